"""The device a run uses, what time passes there, and how much memory its process has taken."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from plaudit.errors import ConfigError


def pick(name: str) -> torch.device:
    """The device of that name; ``auto`` is a GPU where there is one (CUDA, then Apple's MPS), else the CPU.

    Raises:
        ConfigError: there is no such device here.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        raise ConfigError(f"device={name}: not available here; use auto or cpu") from None
    return device


def release_memory() -> None:
    """Gives memory that was freed back to the system, where the C library keeps it otherwise (glibc).

    Tensors of ever different sizes leave holes between each other; without this a long run grows to twice its need.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def peak_rss_mib() -> int:
    """The largest resident memory this process has had, in MiB."""
    if sys.platform == "win32":
        import psutil

        return psutil.Process(os.getpid()).memory_info().peak_wset // 2**20
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak // 2**20 if sys.platform == "darwin" else peak // 2**10


@dataclass
class Clock:
    """Seconds of each phase since the last :meth:`reset`. ``device``: a phase ends when its work there has ended."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seconds: dict[str, float] = field(default_factory=dict)

    def reset(self) -> None:
        self.seconds = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started = self._now()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + self._now() - started

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        elif self.device.type == "mps":
            torch.mps.synchronize()
        return time.perf_counter()
