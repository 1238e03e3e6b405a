"""The loop around a learner for SFT and the reward model: log, checkpoint, stop at a safe point, go on where it was."""

from __future__ import annotations

import time
from collections.abc import Callable

from plaudit import device as devices
from plaudit.errors import Interrupted, NonFinite
from plaudit.learner import Learner, Loss
from plaudit.progress import Bar, graceful
from plaudit.runs import Run
from plaudit.types import Sequences

SECONDS_BETWEEN_CHECKPOINTS = 300
STEPS_BETWEEN_RELEASES = 10


def interrupted(run: Run, what: str) -> Interrupted:
    """The message of a run that was stopped and can go on."""
    return Interrupted(
        f"stopped after {what}, which is saved; go on with `plaudit {run.command} --resume {run.folder}`"
    )


def fit(
    run: Run, learner: Learner, loss: Loss, batch_at: Callable[[int], Sequences], steps: int, title: str
) -> dict[str, float]:
    """Trains to ``steps`` optimizer steps, from the run's checkpoint if it has one; ``batch_at(i)`` is step i's batch.

    Returns the last step's metrics. ``batch_at`` must depend on i alone, so that a resumed run sees the same batches.

    Raises:
        Interrupted: Ctrl-C; the step is finished and saved.
    """
    metrics: dict[str, float] = {}
    saved = time.time()
    if found := run.newest_checkpoint():
        learner.load_state(found[0])
    run.forget_after(learner.batches)
    with graceful() as stop, Bar(title, steps, learner.batches) as bar:
        while learner.batches < steps:
            try:
                metrics = learner.step(batch_at(learner.batches), loss)
            except NonFinite:
                run.save_checkpoint(learner.batches, learner.state(), {})
                raise
            run.log(learner.batches, metrics)
            if learner.batches % STEPS_BETWEEN_RELEASES == 0:
                devices.release_memory()
            bar.advance("  ".join(f"{k} {metrics[k]:.3f}" for k in ("loss", "accuracy") if k in metrics))
            if time.time() - saved > SECONDS_BETWEEN_CHECKPOINTS and learner.batches < steps:
                run.save_checkpoint(learner.batches, learner.state(), {})
                saved = time.time()
            if stop.requested and learner.batches < steps:
                run.save_checkpoint(learner.batches, learner.state(), {})
                raise interrupted(run, f"step {learner.batches} of {steps}")
    return metrics
