"""Run folders: never two runs in one, never half a file, nothing lost at a kill and nothing said twice after it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from plaudit.config import SFTConfig
from plaudit.errors import RunError
from plaudit.runs import Run, read_json, read_jsonl
from plaudit.schema import build


def config(folder: Path) -> SFTConfig:
    return SFTConfig(out=str(folder), seed=4)


@pytest.fixture
def run(tmp_path: Path):
    opened = Run.open("sft", config(tmp_path / "run"))
    yield opened
    opened.close()


def lines(run: Run, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.folder / name).read_text(encoding="utf-8").split("\n") if line]


# --- making and opening -----------------------------------------------------------------------------------------------


def test_a_new_run_says_what_it_is_and_where_it_ran(tmp_path: Path):
    run = Run.open("sft", config(tmp_path / "a" / "b"))
    stored = json.loads((run.folder / "config.json").read_text())
    assert stored.pop("command") == "sft"
    assert build(SFTConfig, stored) == config(tmp_path / "a" / "b")
    environment = json.loads((run.folder / "environment.json").read_text())
    assert {"python", "packages", "platform"} <= environment.keys() and "torch" in environment["packages"]
    assert run.summary is None


def test_a_folder_that_holds_a_run_is_refused_untouched_and_both_ways_out_are_named(run: Run):
    run.log(1, {"loss": 1.0})
    before = {p.name: p.read_bytes() for p in run.folder.iterdir() if p.is_file()}
    other = SFTConfig(out=str(run.folder), seed=99)
    with pytest.raises(RunError, match=r"out=.*--resume") as error:
        Run.open("sft", other)
    assert str(run.folder) in str(error.value)
    assert {p.name: p.read_bytes() for p in run.folder.iterdir() if p.is_file()} == before


def test_a_folder_with_other_files_may_take_a_run_and_they_stay(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("mine")
    Run.open("sft", config(tmp_path))
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(RunError, match=r"file.*cannot be written"):
            Run.open("sft", config(place))
    assert (tmp_path / "file").read_text() == ""


def test_finishing_leaves_a_summary_by_which_the_run_is_known_as_finished(run: Run):
    run.finish({"seconds": 1.5, "name": "ä"})
    again = Run.open("sft", config(run.folder), resume=True)
    assert again.summary == {"seconds": 1.5, "name": "ä"}


# --- metrics and samples ----------------------------------------------------------------------------------------------


def test_what_is_logged_is_on_disk_at_once(run: Run):
    run.log(1, {"loss": 0.5})
    run.log_samples(1, [{"response": "a"}, {"response": "b"}])
    assert lines(run, "metrics.jsonl") == [{"step": 1, "loss": 0.5}]
    assert lines(run, "samples.jsonl") == [{"step": 1, "response": "a"}, {"step": 1, "response": "b"}]


def test_metrics_also_go_to_tensorboard(run: Run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run.log(3, {"loss": 0.5})
    run.close()
    events = EventAccumulator(str(run.folder / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(3, 0.5)]


def test_forgetting_drops_what_a_resumed_run_will_say_again_and_nothing_else(run: Run):
    for step in (1, 2, 3):
        run.log(step, {"loss": step / 2})
        run.log_samples(step, [{"response": "ä"}, {"response": "b"}])
    run.forget_after(2)
    assert [line["step"] for line in lines(run, "metrics.jsonl")] == [1, 2]
    assert [line["step"] for line in lines(run, "samples.jsonl")] == [1, 1, 2, 2]
    assert lines(run, "metrics.jsonl")[1] == {"step": 2, "loss": 1.0}
    run.log(3, {"loss": 9.0})
    assert [line["step"] for line in read_jsonl(run.path("metrics.jsonl"))] == [1, 2, 3]


def test_forgetting_in_a_run_that_has_said_nothing_is_nothing(run: Run):
    run.forget_after(0)
    assert not run.path("metrics.jsonl").exists()


TORN = ['{"step": 3, "lo', '{"step": 3, "loss": 1.0, "text": "ä'.encode()[:-1]]


@pytest.mark.parametrize("torn", TORN, ids=["in a key", "in a letter"])
def test_a_line_torn_by_a_kill_is_forgotten_and_swallows_no_later_one(run: Run, torn: str | bytes):
    """The process died while it wrote step 3; the checkpoint is of step 2; the resumed run writes step 3 again."""
    run.log(1, {"loss": 1.0})
    run.log(2, {"loss": 2.0})
    with run.path("metrics.jsonl").open("ab") as file:
        file.write(torn.encode() if isinstance(torn, str) else torn)
    again = Run.open("sft", config(run.folder), resume=True)
    assert [line["step"] for line in read_jsonl(again.path("metrics.jsonl"))] == [1, 2]
    again.forget_after(2)
    again.log(3, {"loss": 3.0})
    again.close()
    assert [line["loss"] for line in read_jsonl(again.path("metrics.jsonl"))] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\x85", "\x0b", "\r\n", "\x1e"])
def test_no_character_of_a_sample_breaks_its_line(run: Run, character: str):
    """A policy writes what it likes, line and record separators included."""
    text = f"before{character}after"
    run.log_samples(1, [{"response": text}])
    run.log_samples(2, [{"response": "later"}])
    assert [s["response"] for s in read_jsonl(run.path("samples.jsonl"))] == [text, "later"]
    run.forget_after(1)
    assert [s["response"] for s in read_jsonl(run.path("samples.jsonl"))] == [text]


def test_a_log_that_cannot_be_written_is_a_named_error(tmp_path: Path):
    run = Run.open("sft", config(tmp_path / "run"))
    run.path("samples.jsonl").mkdir()
    with pytest.raises(RunError, match=r"samples\.jsonl"):
        run.log_samples(1, [{"response": "a"}])


# --- files are whole --------------------------------------------------------------------------------------------------


def test_a_write_that_fails_half_way_leaves_the_old_file_whole(run: Run, monkeypatch: pytest.MonkeyPatch):
    run.finish({"value": 1})
    whole = Path.write_text

    def half(self: Path, text: str, *args: Any, **kwargs: Any) -> int:
        whole(self, text[: len(text) // 2], *args, **kwargs)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(RunError, match=r"summary\.json.*No space left"):
        run.finish({"value": 2, "more": "x" * 1000})
    assert run.summary == {"value": 1}


def test_reading_back_says_what_is_wrong(tmp_path: Path):
    assert read_json(tmp_path / "absent.json") is None
    for content in ("{", "[1]", ""):
        (tmp_path / "a.json").write_text(content)
        with pytest.raises(RunError, match=r"a\.json"):
            read_json(tmp_path / "a.json")
    (tmp_path / "a.json").write_bytes(b"\xff\xfe")
    with pytest.raises(RunError, match=r"a\.json"):
        read_json(tmp_path / "a.json")


def test_checkpoints_of_a_run_are_found_again(run: Run):
    assert run.newest_checkpoint() is None
    run.save_checkpoint(2, {"x": torch.ones(2)}, {"iteration": 2})
    run.save_checkpoint(4, {"x": torch.ones(2) * 2}, {"iteration": 4})
    again = Run.open("sft", config(run.folder), resume=True)
    found = again.newest_checkpoint()
    assert found is not None
    assert found[1]["iteration"] == 4 and found[0]["x"].tolist() == [2, 2]
