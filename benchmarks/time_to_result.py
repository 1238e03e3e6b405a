"""Time to a result: from the same SFT and reward model to the same goal, Plaudit against TRL 1.12.

    python benchmarks/time_to_result.py --run runs/quickstart [--cap 2400] [--trial 240]

The quickstart's task. The goal is a gold share of 90 % on held-out prompts at a KL of at most 15 nats. Plaudit's time
is that of the whole command `plaudit ppo` with the quickstart's settings, start and saving included; TRL's is its
training alone. TRL trains all weights with batch, epochs, minibatches, KL coefficient and penalty as Plaudit has them;
its learning rate is the one of ``--learning-rates`` whose trial came nearest to the goal. Its policy is judged every
four minutes up to the cap, outside of its time. Both are judged by `plaudit evaluate`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from against_trl import REQUIREMENTS
from common import HERE, environment, report

from plaudit import evaluate
from plaudit.config import EvaluateConfig, PPOConfig, QuickstartConfig
from plaudit.data import rows
from plaudit.models.load import load_tokenizer
from plaudit.schema import build

GOLD, KL = 0.9, 15.0


def judged(model: str, sft: str, place: Path) -> dict[str, float]:
    """Gold share and KL of a model on the quickstart's held-out prompts."""
    out = tempfile.mkdtemp(dir=place)
    found = evaluate(build(EvaluateConfig, {"model": model, "reference": sft, "out": out}))
    return {"gold": found["gold_after"], "kl": found["kl"], "win_rate": found["win_rate"]}


def reached(found: dict[str, float]) -> bool:
    return found["gold"] >= GOLD and found["kl"] <= KL


def ours(sft: str, reward: str, place: Path) -> dict[str, float]:
    settings = QuickstartConfig().ppo
    words = [f"model={sft}", f"reward={reward}", f"out={place}/plaudit", 'monitors=["gold", "vader"]']
    words.append(f"arrangement.precision={settings.arrangement.precision}")
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "plaudit", "ppo", *words], check=True, stdout=sys.stderr)
    seconds = time.perf_counter() - started
    return {"seconds": seconds} | judged(f"{place}/plaudit/model", sft, place)


def theirs(task: dict[str, Any], place: Path) -> Iterator[dict[str, Any]]:
    """TRL's policies as they come."""
    python = environment("trl", REQUIREMENTS)
    file = place / "task.json"
    file.write_text(json.dumps(task))
    command = [str(python), str(HERE / "trl_result.py"), str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith('{"'):
                yield json.loads(line)
    if process.returncode:
        raise SystemExit(f"TRL's side ended with {process.returncode}; see above")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", required=True, help="a finished quickstart: its SFT and reward model are taken")
    parser.add_argument("--cap", type=float, default=2400, help="seconds of TRL's training")
    parser.add_argument("--trial", type=float, default=240, help="seconds of each trial of a learning rate")
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[1e-5, 3e-5, 1e-4, 3e-4])
    args = parser.parse_args()
    sft, reward = (str(Path(args.run, stage, "model").resolve()) for stage in ("sft", "reward"))
    place = Path(tempfile.mkdtemp())
    config, tokenizer = PPOConfig(), load_tokenizer(sft)
    prompts, _ = rows.prompts(config.prompts, tokenizer, max_tokens=config.max_prompt_tokens)
    task = {
        "sft": sft,
        "reward": reward,
        "prompts": [list(p.ids) for p in prompts],
        "pad": tokenizer.pad_id,
        "end": tokenizer.end_ids[0],
        "seed": config.seed,
        "batch_size": config.batch_size,
        "epochs": config.epochs,
        "minibatches": config.minibatches,
        "max_new_tokens": config.sampling.max_new_tokens,
        "temperature": config.sampling.temperature,
        "truncation_penalty": config.truncation_penalty,
        "kl_coef": config.kl.coef,
        "out": str(place / "trl"),
        "interval": 240.0,
    }

    def kept(task: dict[str, Any]) -> list[dict[str, Any]]:
        found = list(theirs(task, place))
        for policy in found:
            tokenizer.inner.save_pretrained(policy["folder"])
            policy |= judged(policy["folder"], sft, place)
            shutil.rmtree(policy.pop("folder"))
            policy["learning_rate"] = task["learning_rate"]
            print("  " + json.dumps(policy), file=sys.stderr, flush=True)
        return found

    mine = ours(sft, reward, place)
    trials = [
        kept(task | {"learning_rate": r, "cap": args.trial, "interval": args.trial})[-1] for r in args.learning_rates
    ]
    within = [t for t in trials if t["kl"] <= KL] or trials
    chosen = max(within, key=lambda t: t["gold"])["learning_rate"]
    other = kept(task | {"learning_rate": chosen, "cap": args.cap})
    goal = next((policy for policy in other if reached(policy)), None)
    last = goal or max(other, key=lambda policy: policy["gold"] if policy["kl"] <= KL else 0.0)
    seconds = goal["seconds"] if goal else other[-1]["seconds"]
    sign = "" if goal else "≥ "
    table = [
        ("system", "seconds", "gold share", "KL", "win rate", "goal reached", "times as long"),
        ("Plaudit", f"{mine['seconds']:.0f}", f"{mine['gold']:.1%}", f"{mine['kl']:.1f}", f"{mine['win_rate']:.1%}",
         "yes" if reached(mine) else "no", "1"),
        (f"TRL 1.12, {chosen:g}", f"{sign}{seconds:.0f}", f"{last['gold']:.1%}", f"{last['kl']:.1f}",
         f"{last['win_rate']:.1%}", "yes" if goal else "no", f"{sign}{seconds / mine['seconds']:.1f}"),
    ]  # fmt: skip
    report(
        "time to a gold share of 90 % at a KL of at most 15",
        table,
        {"plaudit": mine, "trials": trials, "trl": other, "reached": goal is not None},
    )
    shutil.rmtree(place)


if __name__ == "__main__":
    main()
