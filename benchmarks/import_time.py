"""How long a start takes: the import, the help, and `plaudit ppo` to its first token from a warm cache.

python benchmarks/import_time.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import report

FIRST = """
import sys, time
from plaudit.rollout import local
real = local._Answers.write
def write(self, *args):
    real(self, *args)
    print("first", time.time(), flush=True)
    raise SystemExit(0)
local._Answers.write = write
from plaudit.cli import main
main(sys.argv[1:])
"""


def seconds(*command: str) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def first_token() -> float:
    with tempfile.TemporaryDirectory() as folder:
        reward = Path(folder, "reward.py")
        reward.write_text("def short(prompts, responses, **_): return [-float(len(r)) for r in responses]\n")
        words = ["ppo", "model=smollm2", f"reward={reward}:short", "prompts=reviews/prompts", f"out={folder}/run"]
        started = time.time()
        done = subprocess.run([sys.executable, "-c", FIRST, *words], capture_output=True, text=True)
        line = next(line for line in done.stdout.splitlines() if line.startswith("first "))
        return float(line.split()[1]) - started


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    count = parser.parse_args().rounds
    bare = [seconds("-c", "pass") for _ in range(count)]
    imported = [seconds("-c", "import plaudit") for _ in range(count)]
    helped = [seconds("-m", "plaudit", "--help") for _ in range(count)]
    first = [first_token() for _ in range(count)]
    figures = {
        "python": statistics.median(bare),
        "import plaudit": statistics.median(imported) - statistics.median(bare),
        "plaudit --help": statistics.median(helped),
        "plaudit ppo to its first token": statistics.median(first),
    }
    report("start", [("what", "seconds")] + [(k, f"{v:.2f}") for k, v in figures.items()], {"seconds": figures})


if __name__ == "__main__":
    main()
