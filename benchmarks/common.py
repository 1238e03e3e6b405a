"""What the benchmarks share: both sides in one run and in turns, medians and ratios, a table, a last line of JSON.

Only ratios mean anything on a machine that others use too: every round measures every side once, the order rotates,
and a ratio is the median of the rounds' own ratios.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent


def rounds(sides: dict[str, Callable[[int], float]], count: int, *, warm: int = 1) -> dict[str, list[float]]:
    """Seconds of every side in every round. A side is called with the number of the round and returns its seconds."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for number in range(-warm, count):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            taken = sides[name](number)
            if number >= 0:
                seconds[name].append(taken)
                print(f"  round {number + 1}/{count}  {name:34} {taken:8.3f} s", file=sys.stderr, flush=True)
    return seconds


def ratio(slower: list[float], faster: list[float]) -> float:
    """How many times as long the first takes, as the median over rounds."""
    return statistics.median(a / b for a, b in zip(slower, faster, strict=True))


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    units = [name for name in ("avx2", "avx512_f", "avx512_bf16", "amx_bf16", "amx_int8") if capabilities.get(name)]
    return {
        "cores": os.cpu_count(),
        "units": units,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def report(title: str, table: list[tuple[str, ...]], result: dict[str, Any]) -> None:
    """A table for people, and the same as one line of JSON, the last."""
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    print(f"\n{title}")
    for row in table:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print(json.dumps({"benchmark": title} | result | {"machine": machine()}))


def environment(name: str, requirements: list[str], *, without: Sequence[str] = ()) -> Path:
    """The Python of an environment of its own with these packages, made once; ``without`` is taken out again."""
    folder = HERE / ".environments" / name
    python = folder / "bin" / "python"
    marker = folder / "made-of"
    wanted = "\n".join(requirements)
    if not (marker.exists() and marker.read_text() == wanted):
        print(f"making the environment {name} …", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
        for requirement in requirements:
            subprocess.run([*pip, "install", *requirement.split()], check=True)
        if without:
            subprocess.run([*pip, "uninstall", "--yes", *without], check=True)
        marker.write_text(wanted)
    return python


class Other:
    """Another system's side: a process of its own that answers one line of JSON for every line it is given."""

    def __init__(self, python: Path, script: str, *arguments: str):
        quiet = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
        self.process = subprocess.Popen(
            [str(python), str(HERE / script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | quiet,
        )

    def __call__(self, request: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith('{"'):
                return json.loads(line)
        raise SystemExit(f"the other side ended with {self.process.wait()}; see above")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)
