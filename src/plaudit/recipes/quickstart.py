"""The whole way, one stage after another."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plaudit import device as devices
from plaudit.config import QuickstartConfig
from plaudit.errors import Interrupted
from plaudit.models.load import locate
from plaudit.progress import clock, say
from plaudit.recipes.common import Summary, save
from plaudit.recipes.evaluation import evaluate
from plaudit.recipes.ppo import ppo
from plaudit.recipes.preferences import collect, label
from plaudit.recipes.reward import reward
from plaudit.recipes.sft import sft
from plaudit.report import write_report
from plaudit.runs import Run


def quickstart(config: QuickstartConfig, *, resume: bool = False) -> Summary:
    """SFT, answers, labels, reward model, PPO, evaluation, report: the whole way on real text."""
    locate(config.model)
    run = Run.open("quickstart", config, resume=resume)
    if run.summary is not None:
        say(f"{run.folder}: this run is finished; nothing to do")
        if not run.path("report.html").exists():
            say(f"report: {write_report(run.folder)}")
        return run.summary
    out = run.folder
    store = str(out / "preferences.sqlite")
    sft_model, reward_model, model = (str(out / stage / "model") for stage in ("sft", "reward", "ppo"))
    common = {"seed": config.seed, "device": config.device}

    def stage(name: str, **given: Any):
        return getattr(config, name).model_copy(update=common | {"out": str(out / name)} | given)

    plan: list[tuple[str, Callable[..., Summary], Any]] = [
        ("supervised fine-tuning on critics' sentences", sft, stage("sft", model=config.model)),
        ("collecting answers and human ratings", collect, stage("collect", model=sft_model, store=store)),
        ("labelling (by a programme in a person's place)", label, stage("label", store=store)),
        ("reward model", reward, stage("reward", model=sft_model, store=store)),
        ("PPO", ppo, stage("ppo", model=sft_model, reward=reward_model)),
        ("evaluation", evaluate, stage("evaluate", model=model, reference=sft_model, reward=reward_model)),
    ]
    results: dict[str, Summary] = {}
    seconds = 0.0
    for number, (title, function, stage_config) in enumerate(plan, 1):
        name = function.__name__
        say(f"[bold]{number}/{len(plan)}[/bold] {title}")
        reused = (out / name / "summary.json").exists()
        results[name] = _stage(run, function, stage_config, resume)
        seconds += 0 if reused else results[name]["seconds"]
    final = save(out / "model", lambda folder: _copy(Path(model), folder))
    summary = _pipeline_summary(config, results)
    summary |= {"seconds": round(seconds, 1), "peak_rss_mib": devices.peak_rss_mib()}
    run.finish(summary)
    report = write_report(out)
    _say_what_improved(summary, final, report)
    return summary


def _stage(run: Run, function: Callable[..., Summary], config: Any, resume: bool) -> Summary:
    """Runs a stage of the pipeline, or takes over what an earlier start has finished of it."""
    begun = (Path(config.out) / "config.json").exists()
    try:
        return function(config, resume=resume and begun)
    except Interrupted:
        raise Interrupted(
            f"stopped; what is done is saved, go on with `plaudit quickstart --resume {run.folder}`"
        ) from None
    finally:
        # Modules and their hooks refer to each other; collected now, a stage's models are gone before the next ones.
        gc.collect()
        devices.release_memory()


def _copy(source: Path, target: Path) -> None:
    """A second name for the same files where the file system allows it, else a copy."""
    for file in source.iterdir():
        try:
            (target / file.name).hardlink_to(file)
        except OSError:
            shutil.copy2(file, target / file.name)


def _pipeline_summary(config: QuickstartConfig, results: dict[str, Summary]) -> Summary:
    kept = {k: v for k, v in results["evaluate"].items() if k not in ("seconds", "peak_rss_mib")}
    headline = ("reward_model_accuracy", "longer_wins", "bag_of_words")
    kept |= {k: v for k, v in results["reward"].items() if k.startswith(headline)}
    timing = {name: result["seconds"] for name, result in results.items()}
    return kept | {"seed": config.seed, "stage_seconds": timing}


def _say_what_improved(summary: Summary, model: Path, report: Path) -> None:
    say("")
    say("[bold]What improved[/bold] (held-out openings, judges that no training stage saw)")
    if "gold_before" in summary:
        say(f"  favourable by the gold judge   {summary['gold_before']:.0%} → [bold]{summary['gold_after']:.0%}[/bold]")
    if "vader_before" in summary:
        say(
            f"  VADER's mean sentiment         {summary['vader_before']:.2f} → "
            f"[bold]{summary['vader_after']:.2f}[/bold]"
        )
    say(
        f"  wins against the SFT model     [bold]{summary['win_rate']:.0%}[/bold] "
        f"(95 % interval {summary['win_rate_low']:.0%} to {summary['win_rate_high']:.0%})"
    )
    say(
        f"  paid in KL                     {summary['kl']:.1f} nats an answer; "
        f"{summary['ended']:.0%} of the answers end by themselves"
    )
    say(f"  time and memory                {clock(summary['seconds'])} min, {summary['peak_rss_mib']} MiB")
    say(f"model:  {model}")
    say(f"report: {report}")
