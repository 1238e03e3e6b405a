"""The whole way, one stage after another."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plaudit import device as devices
from plaudit.config import QuickstartConfig
from plaudit.data import rows as data
from plaudit.errors import DataError, Interrupted
from plaudit.models.load import locate
from plaudit.progress import clock, say
from plaudit.recipes.common import Summary, save
from plaudit.recipes.evaluation import evaluate
from plaudit.recipes.ppo import ppo
from plaudit.recipes.preferences import collect, label
from plaudit.recipes.reward import reward
from plaudit.recipes.sft import sft
from plaudit.recipes.stores import store_backup
from plaudit.report import write_report
from plaudit.runs import Run


def quickstart(config: QuickstartConfig, *, resume: bool = False) -> Summary:
    """SFT, answers, labels, reward model, PPO, evaluation, report: the whole way on real text."""
    locate(config.model)
    if config.rounds > 1 and not resume:
        _enough_prompts(config)
    run = Run.open("quickstart", config, resume=resume)
    if run.summary is not None:
        say(f"{run.folder}: this run is finished; nothing to do")
        if not run.path("report.html").exists():
            say(f"report: {write_report(run.folder)}")
        return run.summary
    out = run.folder
    common = {"seed": config.seed, "device": config.device}
    sft_config = config.sft.model_copy(update=common | {"out": str(out / "sft"), "model": config.model})
    titles = 1 + len(ROUND) * config.rounds
    results = {"sft": _stage(run, "supervised fine-tuning on critics' sentences", 1, titles, sft, sft_config, resume)}
    rounds: list[dict[str, Summary]] = []
    for number in range(1, config.rounds + 1):
        stages = _round(config, number, out)
        done: dict[str, Summary] = {}
        for place, (name, (title, function)) in enumerate(ROUND.items(), 2 + len(ROUND) * (number - 1)):
            if name == "collect" and number > 1:
                _take_over(stages["collect"].store, _round(config, number - 1, out)["collect"].store)
            title += f" (round {number} of {config.rounds})" * (config.rounds > 1)
            done[name] = _stage(run, title, place, titles, function, stages[name], resume)
        rounds.append(done)
    final = save(out / "model", lambda folder: _copy(Path(stages["ppo"].out, "model"), folder))
    seconds = sum(r["seconds"] for r in (results["sft"], *(s for done in rounds for s in done.values())))
    summary = _pipeline_summary(config, results | rounds[-1])
    summary |= {"seconds": round(seconds, 1), "peak_rss_mib": devices.peak_rss_mib()}
    if config.rounds > 1:
        summary["rounds"] = [_round_summary(done) for done in rounds]
    run.finish(summary)
    report = write_report(out)
    _say_what_improved(summary, final, report)
    return summary


#: what is done in each round, by stage: its title and its command
ROUND: dict[str, tuple[str, Callable[..., Summary]]] = {
    "collect": ("collecting answers and human ratings", collect),
    "label": ("labelling (by a programme in a person's place)", label),
    "reward": ("reward model", reward),
    "ppo": ("PPO", ppo),
    "evaluate": ("evaluation", evaluate),
}


def _enough_prompts(config: QuickstartConfig) -> None:
    """
    Raises:
        DataError: the rounds ask for more prompts than there are, since each takes new ones.
    """
    source, each = config.collect.prompts, config.collect.count
    needed = each * config.rounds
    there = data.count_prompts(source, needed)
    if there < needed:
        ways = [f"rounds={max(1, there // each)}"]
        if fewer := there // config.rounds:
            ways.append(f"collect.count={fewer}")
        raise DataError(
            f"{source}: holds {there} prompts, and {config.rounds} rounds with collect.count={each} take {needed}; "
            f"use {' or '.join(ways)}"
        )


def _round(config: QuickstartConfig, number: int, out: Path) -> dict[str, Any]:
    """The stages of a round, connected. The first answers come from the SFT model, later ones from the newest policy.

    Every round's reward model and policy start from the SFT model, and what a round adds is data: as in the iterated
    RLHF of Bai et al. 2022. So KL is always that to the SFT model.
    """
    place = out / f"round-{number}" if config.rounds > 1 else out
    before = out / f"round-{number - 1}"
    sft_model, reward_model, model = (str(p / "model") for p in (out / "sft", place / "reward", place / "ppo"))
    store = str(place / "preferences.sqlite")
    answers = config.collect.count
    given: dict[str, dict[str, Any]] = {
        "collect": {"model": sft_model, "store": store},
        "label": {"store": store},
        "reward": {"model": sft_model, "store": store},
        "ppo": {"model": sft_model, "reward": reward_model},
        "evaluate": {"model": model, "reference": sft_model, "reward": reward_model},
    }
    if number > 1:
        # ready-made judgements are in the store already
        given["collect"] |= {"model": str(before / "ppo/model"), "skip": answers * (number - 1), "comparisons": ""}
    common = {"seed": config.seed, "device": config.device}
    return {
        name: getattr(config, name).model_copy(update=common | {"out": str(place / name)} | keys)
        for name, keys in given.items()
    }


def _take_over(store: str, earlier: str) -> None:
    """A round's store begins as a copy of the one before, which stays as it is."""
    if not Path(store).exists():
        Path(store).parent.mkdir(exist_ok=True)
        store_backup(earlier, store)


def _round_summary(done: dict[str, Summary]) -> Summary:
    """What a round came to."""
    found = {"labels": done["label"]["labelled"]}
    found |= {k: v for k, v in done["reward"].items() if k in ("reward_model_accuracy", "accuracy")}
    keys = ("gold_before", "gold_after", "win_rate", "win_rate_low", "win_rate_high", "kl")
    return found | {k: v for k, v in done["evaluate"].items() if k in keys}


def _stage(
    run: Run, title: str, number: int, of: int, function: Callable[..., Summary], config: Any, resume: bool
) -> Summary:
    """Runs a stage of the pipeline, or takes over what an earlier start has finished of it."""
    say(f"[bold]{number}/{of}[/bold] {title}", markup=True)
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
    say("[bold]What improved[/bold] (held-out openings, judges that no training stage saw)", markup=True)
    if "gold_before" in summary:
        before, after = summary["gold_before"], summary["gold_after"]
        say(f"  favourable by the gold judge   {before:.0%} → [bold]{after:.0%}[/bold]", markup=True)
    if "vader_before" in summary:
        say(
            f"  VADER's mean sentiment         {summary['vader_before']:.2f} → "
            f"[bold]{summary['vader_after']:.2f}[/bold]",
            markup=True,
        )
    say(
        f"  wins against the SFT model     [bold]{summary['win_rate']:.0%}[/bold] "
        f"(95 % interval {summary['win_rate_low']:.0%} to {summary['win_rate_high']:.0%})",
        markup=True,
    )
    say(
        f"  paid in KL                     {summary['kl']:.1f} nats an answer; "
        f"{summary['ended']:.0%} of the answers end by themselves"
    )
    say(f"  time and memory                {clock(summary['seconds'])} min, {summary['peak_rss_mib']} MiB")
    say(f"model:  {model}")
    say(f"report: {report}")
