"""Trackers: where a run's numbers and samples go as they come. JSON lines always, TensorBoard beside them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from plaudit.errors import RunError


class Tracker(Protocol):
    def log(self, step: int, metrics: dict[str, float]) -> None: ...
    def log_samples(self, step: int, samples: Sequence[dict[str, Any]]) -> None: ...
    def close(self) -> None: ...


class JsonlTracker:
    """``metrics.jsonl`` and ``samples.jsonl``: one object a line, flushed as written."""

    def __init__(self, folder: Path):
        self.folder = folder

    def append(self, name: str, lines: Sequence[dict[str, Any]]) -> None:
        try:
            with (self.folder / name).open("ab+") as file:
                # A line that a kill has torn off is closed first, so that it swallows no other.
                if file.tell() and not _ends_a_line(file):
                    file.write(b"\n")
                file.write("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode())
        except OSError as error:
            raise RunError(
                f"{self.folder / name}: cannot be written ({error.strerror}); free space and use --resume"
            ) from None

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.append("metrics.jsonl", [{"step": step} | metrics])

    def log_samples(self, step: int, samples: Sequence[dict[str, Any]]) -> None:
        self.append("samples.jsonl", [{"step": step} | s for s in samples])

    def log_probes(self, step: int, answers: Sequence[dict[str, Any]]) -> None:
        """The fixed prompts' answers into ``probes.jsonl``."""
        self.append("probes.jsonl", [{"step": step} | a for a in answers])

    def event(self, kind: str, message: str, **details: Any) -> None:
        """A warning with advice, or a milestone, into ``events.jsonl``."""
        self.append("events.jsonl", [{"kind": kind, "message": message} | details])

    def close(self) -> None:
        return


def _ends_a_line(file: BinaryIO) -> bool:
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"


class TensorBoardTracker:
    """Event files under ``tensorboard/``."""

    def __init__(self, folder: Path, first_step: int = 0):
        """``first_step``: what an earlier start of the run has written from there on is superseded."""
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def log_samples(self, step: int, samples: Sequence[dict[str, Any]]) -> None:
        for i, sample in enumerate(samples[:4]):
            self.writer.add_text(f"sample/{i}", json.dumps(sample, ensure_ascii=False), step)

    def close(self) -> None:
        self.writer.close()
