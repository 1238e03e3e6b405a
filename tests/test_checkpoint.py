"""Checkpoints: the newest whole one is read back bit for bit, and a failed save harms none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from plaudit import checkpoint
from plaudit.errors import RunError


def newest_step(folder: Path) -> int | None:
    found = checkpoint.load_newest(folder)
    if found is None:
        return None
    tensors, meta = found
    assert int(tensors["x"]) == meta["step"], "tensors and meta of one checkpoint belong together"
    return meta["step"]


def save(folder: Path, *steps: int) -> None:
    for step in steps:
        checkpoint.save(folder, step, {"x": torch.tensor(step)}, {})


def test_tensors_and_meta_come_back_bit_for_bit(tmp_path: Path):
    g = torch.Generator().manual_seed(0)
    tensors = {
        "weights": torch.randn(3, 5, generator=g),
        "turned": torch.randn(3, 5, generator=g).T,
        "half": torch.randn(4, generator=g).bfloat16(),
        "step": torch.tensor(7),
        "trained": torch.nn.Parameter(torch.randn(2, generator=g)),
        "nothing": torch.zeros(0),
    }
    checkpoint.save(tmp_path, 3, tensors, {"kl_coef": 0.1 + 0.2, "name": "ä"})
    found = checkpoint.load_newest(tmp_path)
    assert found is not None
    assert found[1] == {"step": 3, "kl_coef": 0.1 + 0.2, "name": "ä"}
    assert found[0].keys() == tensors.keys()
    for name, value in tensors.items():
        assert found[0][name].dtype == value.dtype and torch.equal(found[0][name], value), name


def test_without_a_checkpoint_there_is_none(tmp_path: Path):
    assert checkpoint.load_newest(tmp_path) is None
    assert checkpoint.load_newest(tmp_path / "absent") is None


def test_the_two_newest_are_kept_and_the_newest_is_read(tmp_path: Path):
    save(tmp_path, 1, 5, 10, 100)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000010", "step-000100"]
    assert newest_step(tmp_path) == 100


def test_the_newest_is_the_one_with_the_highest_step_whatever_its_number_of_digits(tmp_path: Path):
    save(tmp_path, 999_998, 999_999, 1_000_000)
    assert newest_step(tmp_path) == 1_000_000


def test_a_step_saved_again_replaces_the_earlier_one(tmp_path: Path):
    save(tmp_path, 1, 2)
    checkpoint.save(tmp_path, 2, {"x": torch.tensor(2), "more": torch.ones(1)}, {})
    found = checkpoint.load_newest(tmp_path)
    assert found is not None and "more" in found[0]


def truncate(path: Path, share: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])


DAMAGE: dict[str, Callable[[Path], None]] = {
    "tensors cut in half": lambda p: truncate(p / "state.safetensors", 0.5),
    "tensors lack the last bytes": lambda p: truncate(p / "state.safetensors", 0.99),
    "tensors empty": lambda p: truncate(p / "state.safetensors", 0),
    "tensors missing": lambda p: (p / "state.safetensors").unlink(),
    "meta cut": lambda p: truncate(p / "meta.json", 0.5),
    "meta empty": lambda p: truncate(p / "meta.json", 0),
    "meta missing": lambda p: (p / "meta.json").unlink(),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, name: str):
    save(tmp_path, 1, 2)
    DAMAGE[name](tmp_path / "step-000002")
    assert newest_step(tmp_path) == 1
    DAMAGE[name](tmp_path / "step-000001")
    with pytest.raises(RunError, match="none of the 2 checkpoints"):
        newest_step(tmp_path)


def test_what_a_killed_save_leaves_behind_is_neither_read_nor_in_the_way(tmp_path: Path):
    save(tmp_path, 1)
    (tmp_path / ".step-000002.tmp").mkdir()
    (tmp_path / ".step-000002.tmp" / "state.safetensors").write_bytes(b"half")
    assert newest_step(tmp_path) == 1
    save(tmp_path, 2)
    assert newest_step(tmp_path) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000001", "step-000002"]


def test_a_save_that_fails_is_named_and_leaves_the_earlier_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save(tmp_path, 1, 2)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.os, "fsync", full)
    for step in (2, 3):
        with pytest.raises(RunError, match=f"step-{step:06d}.*No space left"):
            save(tmp_path, step)
    assert newest_step(tmp_path) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000001", "step-000002"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="could not be written"):
        save(tmp_path / "file" / "checkpoints", 1)
