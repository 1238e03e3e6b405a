"""How a PPO iteration grows with its tokens, and that memory does not grow with iterations.

    python benchmarks/ppo.py [--sizes 256 1024 4096 16384] [--iterations 100]

The default arrangement on the built-in model, prompts of 16 tokens and answers of 32: what an iteration costs, from
256 answer tokens to 16,384, in a process of its own for each size. Then 100 iterations of answers that end where they
like, with the process's memory after each.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

from common import Other, report

NEW = 32


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 1024, 4096, 16384])
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    table = [("answer tokens an iteration", "seconds", "tokens/s", "peak MiB")]
    growth = {}
    for size in args.sizes:
        side = Other(sys.executable, "plaudit_side.py", "frozen_trunk", "fixed", "--prompts", str(size // NEW))
        said = [side(number) for number in range(args.rounds + 1)][1:]
        side.close()
        seconds = statistics.median(s["seconds"] for s in said)
        assert all(s["tokens"] == size for s in said)
        table.append((f"{size}", f"{seconds:.1f}", f"{size / seconds:.0f}", f"{said[-1]['peak_mib']:.0f}"))
        growth[size] = {"seconds": seconds, "peak_mib": said[-1]["peak_mib"]}
        print("  " + "  ".join(table[-1]), file=sys.stderr, flush=True)
    side = Other(sys.executable, "plaudit_side.py", "frozen_trunk", "ragged")
    resident = []
    for number in range(args.iterations):
        side(number)
        resident.append(resident_mib(side.process))
        if (number + 1) % 10 == 0:
            print(f"  iteration {number + 1}: {resident[-1]:.0f} MiB", file=sys.stderr, flush=True)
    side.close()
    late = max(resident[10:]) / max(resident[:10]) - 1
    table.append((f"memory over {args.iterations} iterations, after the 10th", f"{late:+.1%}", "", ""))
    report("PPO, growth", table, {"sizes": growth, "resident_mib": resident, "growth_after_tenth": late})


def resident_mib(process: subprocess.Popen) -> float:
    """What the process holds in memory now."""
    with open(f"/proc/{process.pid}/status") as lines:
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


if __name__ == "__main__":
    main()
