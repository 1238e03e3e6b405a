"""Ten seeds of a healthy run give no warning: the quickstart's PPO, from a finished quickstart (about 40 minutes).

    python tests/verify_health.py runs/quickstart [seeds]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import plaudit
from plaudit.config import QuickstartConfig
from plaudit.runs import read_jsonl


def main() -> int:
    source, seeds = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 10
    place = Path(tempfile.mkdtemp())
    loud = 0
    for seed in range(seeds):
        out = place / f"seed-{seed}"
        said = {"model": str(source / "sft/model"), "reward": str(source / "reward/model"), "out": str(out)}
        summary = plaudit.ppo(QuickstartConfig().ppo.model_copy(update=said | {"seed": seed}))
        warnings = [line["message"] for line in read_jsonl(out / "events.jsonl")]
        loud += bool(warnings)
        print(f"seed {seed}: score {summary['score_last']:.2f}, KL {summary['kl_last']:.1f}, {warnings or 'silent'}")
    print(f"{seeds - loud} of {seeds} seeds silent")
    return int(loud > 0)


if __name__ == "__main__":
    sys.exit(main())
