"""What run folders say, as it comes: the new whole lines of their JSON-lines files since last asked.

Works on a run that another process is writing and on a finished one; it only ever reads. Left out: who looks (see
web.watching).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plaudit.errors import RunError
from plaudit.runs import read_json, stage_folder, traced_steps

#: the files that are followed, by the kind of their lines
FILES = {"metrics": "metrics.jsonl", "samples": "samples.jsonl", "probes": "probes.jsonl", "events": "events.jsonl"}


@dataclass(frozen=True)
class News:
    """New lines of one kind. ``anew``: what was said before of this kind no longer holds (a resumed run rewrites what
    it does again)."""

    kind: str
    lines: list[dict[str, Any]]
    anew: bool


@dataclass
class _Place:
    """How far a file has been read: up to ``offset``, of the file with this ``inode``."""

    inode: int = -1
    offset: int = 0


@dataclass
class Follower:
    """Reads one run folder, each line once."""

    folder: Path
    _places: dict[str, _Place] = field(default_factory=dict)
    _state: dict[str, Any] | None = None

    def news(self) -> Iterator[News]:
        """What is new since the last call; at the first, everything."""
        for kind, name in FILES.items():
            if found := self._read(kind, self.folder / name):
                yield found
        state = {"finished": (self.folder / "summary.json").exists(), "traced": traced_steps(self.folder)}
        if state != self._state:
            self._state = state
            yield News("state", [state], True)

    def _read(self, kind: str, path: Path) -> News | None:
        place = self._places.setdefault(kind, _Place())
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                # a file in another's place, or one that has shrunk, is read from its beginning
                anew = status.st_ino != place.inode or status.st_size < place.offset
                if anew:
                    place.inode, place.offset = status.st_ino, 0
                if status.st_size == place.offset:
                    return None
                file.seek(place.offset)
                text = file.read()
        except OSError:
            # not there yet, or not to be read now: the other files and runs go on
            return None
        # the last line may still be in the writing
        whole = text.rfind(b"\n") + 1
        place.offset += whole
        lines = [line for part in text[:whole].split(b"\n") if (line := _object(part)) is not None]
        return News(kind, lines, anew) if lines or anew else None


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(text, parse_constant=lambda name: None)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


@dataclass(frozen=True)
class Watched:
    """A run that can be watched: its name, its folder, and its configuration."""

    name: str
    folder: Path
    config: dict[str, Any]


def watched(folder: str | Path) -> Watched:
    """The PPO run that a folder is or holds (a quickstart's).

    Raises:
        RunError: it is no run folder, or of another command.
    """
    folder = Path(folder)
    config = read_json(folder / "config.json")
    if config is None:
        raise RunError(f"{folder}: is no run folder (no config.json there); give the out=… of a PPO run")
    if config.get("command") == "quickstart":
        return Watched(str(folder), stage_folder(folder, "ppo"), _section(config, "ppo"))
    if config.get("command") != "ppo":
        raise RunError(f"{folder}: was made by `plaudit {config.get('command')}`; give a PPO run's folder")
    return Watched(str(folder), folder, config)


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    """A section of a configuration that may be anybody's."""
    found = config.get(name)
    return found if isinstance(found, dict) else {}


def traced_answers(run: Watched) -> int:
    """How many answers of an iteration the run traces."""
    found = _section(run.config, "trace").get("answers", 0)
    return found if isinstance(found, int) else 0
