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
from plaudit.runs import newest_round, read_json, traced_steps

#: the files that are followed, by the kind of their lines
FILES = {"metrics": "metrics.jsonl", "samples": "samples.jsonl", "probes": "probes.jsonl", "events": "events.jsonl"}
#: bytes of a file that are told at once, so that a long run neither fills memory nor keeps others waiting
PIECE = 2**20


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
    """Reads one run, each line once; goes on to a quickstart's next round when that begins."""

    run: Watched
    _folder: Path | None = None
    _places: dict[str, _Place] = field(default_factory=dict)
    _state: dict[str, Any] = field(default_factory=dict)

    def news(self) -> Iterator[News]:
        """What is new since the last call, a piece at a time; at the first, everything."""
        folder = self.run.folder
        if folder != self._folder:
            if self._folder is not None:
                # nothing of the round before is this one's
                yield from (News(kind, [], True) for kind in FILES)
            self._folder, self._places, self._state = folder, {}, {}
        traced = self._state.get("traced")
        for kind, name in FILES.items():
            for found in self._read(kind, folder / name):
                if kind == "metrics":
                    traced = None
                yield found
        if traced is None:
            # looked up with new metrics only: an iteration's traces are there before its metrics are
            traced = traced_steps(folder)
        state = {"folder": str(folder), "finished": (folder / "summary.json").exists(), "traced": traced}
        if state != self._state:
            self._state = state
            yield News("state", [state], True)

    def _read(self, kind: str, path: Path) -> Iterator[News]:
        place = self._places.setdefault(kind, _Place())
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                # a file in another's place, or one that has shrunk, is read from its beginning
                anew = status.st_ino != place.inode or status.st_size < place.offset
                if anew:
                    place.inode, place.offset = status.st_ino, 0
                file.seek(place.offset)
                torn = False
                while not torn and (parts := file.readlines(PIECE)):
                    # the last line may still be in the writing
                    torn = not parts[-1].endswith(b"\n")
                    whole = parts[:-1] if torn else parts
                    place.offset += sum(map(len, whole))
                    lines = [line for part in whole if (line := _object(part)) is not None]
                    if lines:
                        yield News(kind, lines, anew)
                        anew = False
        except OSError:
            # not there yet, or not to be read now: the other files and runs go on
            return
        if anew:
            yield News(kind, [], True)


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(text, parse_constant=lambda name: None)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


@dataclass(frozen=True)
class Watched:
    """A run that can be watched: its name, the folder that was named (of a PPO run, or of a quickstart), and the PPO
    run's configuration."""

    name: str
    named: Path
    quickstart: bool
    config: dict[str, Any]

    @property
    def folder(self) -> Path:
        """The PPO run's folder now: a quickstart goes from one round to the next."""
        return newest_round(self.named) / "ppo" if self.quickstart else self.named


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
        return Watched(str(folder), folder, True, _section(config, "ppo"))
    if config.get("command") != "ppo":
        raise RunError(f"{folder}: was made by `plaudit {config.get('command')}`; give a PPO run's folder")
    return Watched(str(folder), folder, False, config)


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    """A section of a configuration that may be anybody's."""
    found = config.get(name)
    return found if isinstance(found, dict) else {}


def traced_answers(run: Watched) -> int:
    """How many answers of an iteration the run traces."""
    found = _section(run.config, "trace").get("answers", 0)
    return found if isinstance(found, int) else 0
