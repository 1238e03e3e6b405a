"""A run folder: configuration, environment, metrics, samples, checkpoints, summary; made, found again, finished."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from plaudit.config import RunConfig
from plaudit.errors import RunError
from plaudit.schema import dump
from plaudit.tracking import JsonlTracker, TensorBoardTracker, Tracker

PACKAGES = ("plaudit", "torch", "transformers", "tokenizers", "safetensors", "datasets", "numpy", "scikit-learn")


class Run:
    """An open run folder. ``metrics`` and ``samples`` go to every tracker; ``finish`` writes ``summary.json``."""

    def __init__(self, folder: Path, command: str):
        self.folder, self.command = folder, command
        self.started = time.time()
        self.jsonl = JsonlTracker(folder)
        self._trackers: list[Tracker] = [self.jsonl]

    @classmethod
    def open(cls, command: str, config: RunConfig, *, resume: bool = False) -> Run:
        """Makes the run folder ``config.out``, or opens it again.

        Raises:
            RunError: it holds a run already and ``resume`` is false, or it cannot be written.
        """
        folder = Path(config.out)
        if (folder / "config.json").exists() and not resume:
            raise RunError(
                f"{folder}: holds a run already, which is not touched; choose another folder with out=…, "
                f"or continue it with `plaudit {command} --resume {folder}`"
            )
        run = cls(folder, command)
        resolved = {"command": command} | dump(config)
        stored = read_json(folder / "config.json")
        if stored is not None and stored | {"out": ""} != resolved | {"out": ""}:
            raise RunError(
                f"{folder}: was begun with another configuration, so it cannot go on with this one; use out=…"
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if stored is None:
                _write(folder / "config.json", resolved)
                _write(folder / "environment.json", environment())
        except OSError as error:
            raise RunError(
                f"{folder}: cannot be written ({error.strerror}); choose another folder with out=…"
            ) from None
        return run

    @property
    def summary(self) -> dict[str, Any] | None:
        """What a finished run measured; None while it is not finished."""
        return read_json(self.folder / "summary.json")

    def write(self, name: str, value: dict[str, Any], *, indent: int | None = 2) -> None:
        """A JSON file in the run folder, whole or not at all."""
        try:
            (self.folder / name).parent.mkdir(exist_ok=True)
            _write(self.folder / name, value, indent)
        except OSError as error:
            raise RunError(f"{self.folder / name}: cannot be written ({error.strerror})") from None

    def path(self, name: str) -> Path:
        return self.folder / name

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if len(self._trackers) == 1:
            # Opened with the first numbers: its package takes a second to import.
            self._trackers.append(TensorBoardTracker(self.folder, first_step=step))
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def log_samples(self, step: int, samples: Sequence[dict[str, Any]]) -> None:
        for tracker in self._trackers:
            tracker.log_samples(step, samples)

    def forget_after(self, step: int) -> None:
        """Drops what was logged and traced later than ``step``: a resumed run writes it again."""
        for name in ("metrics.jsonl", "samples.jsonl", "probes.jsonl", "events.jsonl"):
            lines = read_jsonl(self.folder / name)
            kept = [line for line in lines if line.get("step", 0) <= step]
            if len(kept) < len(lines):
                text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept)
                _atomic(self.folder / name, text)
        for traced in traced_steps(self.folder):
            if traced > step:
                (self.folder / trace_place(traced)).unlink()

    def once(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Named tensors that are made at the run's start and kept: a resumed run reads what the first start made."""
        return _checkpoints().once(self.folder / f"{name}.safetensors", make)

    def save_checkpoint(self, step: int, tensors: dict[str, Any], meta: dict[str, Any]) -> None:
        _checkpoints().save(self.folder / "checkpoints", step, tensors, meta)

    def newest_checkpoint(self):
        return _checkpoints().load_newest(self.folder / "checkpoints")

    def discard_if_empty(self) -> None:
        """Takes back what :meth:`open` wrote, where nothing has been added to it."""
        own = {"config.json", "environment.json"}
        if {path.name for path in self.folder.iterdir()} <= own:
            for name in own:
                (self.folder / name).unlink(missing_ok=True)
            self.folder.rmdir()

    def finish(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Writes the summary, which marks the run as finished, and closes the trackers."""
        self.close()
        self.write("summary.json", summary)
        return summary

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()
        self._trackers = [self.jsonl]


def _checkpoints():
    # torch comes with it, and takes seconds; whoever only looks at a run does without
    from plaudit import checkpoint

    return checkpoint


def newest_round(quickstart: Path) -> Path:
    """Where a quickstart keeps its stages, SFT apart: the newest round that has begun one, where it goes several
    rounds. What is shown of a quickstart is of one round; a stage that is not there yet has not begun."""
    rounds = sorted(quickstart.glob("round-*"), key=lambda path: (len(path.name), path.name))
    return next((path for path in reversed(rounds) if any(path.glob("*/config.json"))), quickstart)


def trace_place(step: int) -> str:
    """The file of an iteration's traces, within the run folder."""
    return f"traces/iteration-{step:06d}.json"


def traced_steps(run: Path) -> list[int]:
    """The traced iterations of a run, in order."""
    found = (run / "traces").glob("iteration-*.json")
    return sorted(int(n) for path in found if (n := path.stem.removeprefix("iteration-")).isdecimal())


def environment() -> dict[str, Any]:
    """What the run ran on: Python, packages, platform, processors."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "packages": versions,
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object from a file, None where there is no such file.

    Raises:
        RunError: the file is no JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise RunError(f"{path}: expected a JSON object")
    return value


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file, without torn lines; empty where there is no such file."""
    lines: list[dict[str, Any]] = []
    if path.exists():
        for text in path.read_bytes().split(b"\n"):
            try:
                value = json.loads(text)
            except ValueError:
                continue
            if isinstance(value, dict):
                lines.append(value)
    return lines


def _write(path: Path, value: dict[str, Any], indent: int | None = 2) -> None:
    _atomic(path, json.dumps(value, indent=indent, ensure_ascii=False) + "\n")


def _atomic(path: Path, text: str) -> None:
    scratch = path.with_name(f".{path.name}.tmp")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)
