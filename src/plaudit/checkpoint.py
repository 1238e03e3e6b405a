"""Checkpoints: safetensors and JSON, written beside their place and renamed, the newest whole one read back."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from plaudit.errors import RunError

KEEP = 2


def save(folder: Path, step: int, tensors: dict[str, Tensor], meta: dict[str, Any]) -> Path:
    """Writes checkpoint ``step``; the two newest are kept.

    Raises:
        RunError: the disk is full or the folder cannot be written; the earlier checkpoints are untouched.
    """
    target = folder / f"step-{step:06d}"
    scratch = folder / f".step-{step:06d}.tmp"
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, scratch / "state.safetensors")
        (scratch / "meta.json").write_text(json.dumps({"step": step} | meta), encoding="utf-8")
        for file in scratch.iterdir():
            with file.open("rb+") as opened:
                os.fsync(opened.fileno())
        shutil.rmtree(target, ignore_errors=True)
        scratch.rename(target)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(scratch, ignore_errors=True)
        raise RunError(
            f"{target}: the checkpoint could not be written ({error}); earlier checkpoints are untouched"
        ) from None
    for old in _oldest_first(folder)[:-KEEP]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def _oldest_first(folder: Path) -> list[Path]:
    steps = {path: path.name.removeprefix("step-") for path in folder.glob("step-*")}
    return sorted((p for p, step in steps.items() if step.isdigit()), key=lambda p: int(steps[p]))


def load_newest(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The newest checkpoint that can be read, or None where there is none.

    Raises:
        RunError: there are checkpoints, and none can be read; a silent start from the beginning would lose them.
    """
    found = _oldest_first(folder)
    for candidate in reversed(found):
        try:
            meta = json.loads((candidate / "meta.json").read_text(encoding="utf-8"))
            return load_file(candidate / "state.safetensors"), meta
        except (OSError, ValueError, SafetensorError):
            continue
    if found:
        raise RunError(f"{folder}: none of the {len(found)} checkpoints can be read; start anew with another out=…")
    return None


def once(path: Path, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors in the file at ``path``; where there is none, those of ``make``, written there first.

    Raises:
        RunError: the file cannot be written, or not be read.
    """
    scratch = path.with_name(f".{path.name}.tmp")
    try:
        if not path.exists():
            save_file({k: v.contiguous() for k, v in make().items()}, scratch)
            scratch.rename(path)
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path}: cannot be written or read ({error})") from None
