"""Progress for people: a bar with an ETA in a terminal, plain lines elsewhere; and Ctrl-C at a good moment."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class _Console(Console):
    def on_broken_pipe(self) -> None:
        # as for any other output that nobody reads: the command says what becomes of it
        raise BrokenPipeError


console = _Console(highlight=False)


class Bar:
    """One stage's progress: ``advance`` after each unit, with a short note of how it goes."""

    def __init__(self, title: str, total: int, done: int = 0):
        self.title, self.total, self.done, self.start_done = title, total, done, done
        self.started = self.spoken = time.time()
        self._progress: Progress | None = None

    def __enter__(self) -> Bar:
        if console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}", style="dim", markup=False),
                console=console,
            )
            self._task = self._progress.add_task(self.title, total=self.total, completed=self.done, note="")
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress:
            self._progress.stop()

    def advance(self, note: str = "", amount: int = 1) -> None:
        self.done += amount
        if self._progress:
            self._progress.update(self._task, completed=self.done, note=note)
        elif time.time() - self.spoken > 10 or self.done >= self.total:
            self.spoken = time.time()
            spent = self.spoken - self.started
            left = spent / max(1, self.done - self.start_done) * (self.total - self.done)
            console.print(
                f"{self.title}: {self.done}/{self.total}, {clock(spent)} so far, {clock(left)} left  {note}",
                soft_wrap=True,
                markup=False,
                emoji=False,
            )


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def say(text: str, *, markup: bool = False) -> None:
    """A line for people, shown as it is. ``markup``: it is all our own, and may be bold."""
    console.print(text, soft_wrap=True, markup=markup, emoji=False)


class Stop:
    """Whether Ctrl-C was pressed; work is stopped at the next point where it can be saved."""

    requested = False


@contextmanager
def graceful() -> Iterator[Stop]:
    """The first Ctrl-C (or SIGTERM) asks the work to stop at its next safe point; the second stops it at once."""
    stop = Stop()
    previous: dict[int, Any] = {}

    def ask(number: int, _frame: object) -> None:
        if stop.requested:
            raise KeyboardInterrupt
        stop.requested = True
        say("stopping after this step; once more to stop at once")

    try:
        for which in (signal.SIGINT, signal.SIGTERM):
            previous[which] = signal.signal(which, ask)
    except ValueError:
        previous = {}  # not the main thread (a notebook's server): Ctrl-C stays what it was
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
