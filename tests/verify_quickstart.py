"""The whole quickstart with three seeds against its figures: `make verify-quickstart`, about 20 minutes.

Not part of the test suite. Prints each figure beside its bound; exit status 1 if one is missed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

#: figure -> (bound, whether it is a lower bound)
BOUNDS: dict[str, tuple[float, bool]] = {
    "seconds": (600, False),
    "peak_rss_mib": (3072, False),
    "reward_model_accuracy": (0.80, True),
    "gold_after": (0.90, True),
    "vader_after": (0.50, True),
    "win_rate": (0.80, True),
    "win_rate_low": (0.70, True),
    "kl": (15.0, False),
    "ended": (0.90, True),
    "distinct2_ratio": (0.60, True),
}


def check(summary: dict[str, float]) -> list[str]:
    """The figures that miss their bound, as lines."""
    missed = []
    for name, (bound, lower) in BOUNDS.items():
        good = summary[name] >= bound if lower else summary[name] <= bound
        print(
            f"  {name:24} {summary[name]:10.3f}  {'≥' if lower else '≤'} {bound:<8} {'' if good else 'MISSED'}",
            flush=True,
        )
        if not good:
            missed.append(name)
    for baseline in ("longer_wins", "bag_of_words"):
        if summary["reward_model_accuracy"] <= summary[baseline]:
            missed.append(f"reward_model_accuracy is not above {baseline}")
    return missed


def main() -> int:
    missed = []
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp())
    for seed in (0, 1, 2):
        out = root / f"seed{seed}"
        command = [sys.executable, "-m", "plaudit", "quickstart", f"seed={seed}", f"out={out}"]
        subprocess.run(command, check=True)
        print(f"seed {seed}")
        missed += [f"seed {seed}: {line}" for line in check(json.loads((out / "summary.json").read_text()))]
    print("all figures reached" if not missed else "\n".join(missed))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
