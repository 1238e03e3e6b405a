"""The command line: what a user sees, above all when something is wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from plaudit.cli import STAGES, main


def _run(capsys, *words: str) -> tuple[int, str, str]:
    status = main(words)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def _is_a_clear_error(status: int, err: str, *parts: str) -> None:
    assert status == 2
    assert len(err.strip().splitlines()) <= 2 and "Traceback" not in err
    for part in parts:
        assert part in err, err


def test_help_explains_every_key(capsys):
    from plaudit.schema import leaves

    for name, (schema, _) in STAGES.items():
        with pytest.raises(SystemExit) as stop:
            main([name, "--help"])
        assert stop.value.code == 0
        shown = capsys.readouterr().out
        assert all(f"{key} = " in shown for key, *_ in leaves(schema))


def test_a_dry_run_prints_the_resolved_configuration_and_makes_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, _ = _run(capsys, "ppo", "--dry-run", "seed=7", "kl.coef=0.1")
    shown = json.loads(out)
    assert status == 0 and shown["seed"] == 7 and shown["kl"]["coef"] == 0.1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["ppo", "iteratons=3"], ["iteratons", "iterations"]),
        (["ppo", "kl.coeff=3"], ["coeff", "kl.coef"]),
        (["ppo", "clip_range=-1"], ["clip_range", "greater than 0"]),
        (["ppo", "seed=x"], ["seed"]),
        (["ppo", "sampling.temperature=0"], ["temperature"]),
        (["ppo", "arrangement.kind=shared_trunk", "critic_from=reward"], ["critic_from"]),
        (["collect", "count=0"], ["count"]),
        (["quickstart", "sft.seed=3"], ["sft.seed", "seed=…"]),
        (["quickstart", "ppo.reward=x/y"], ["ppo.reward"]),
        (["ppo", "nowhere.toml"], ["nowhere.toml", "no such file"]),
        (["ppo", "a.toml", "b.toml"], ["one configuration file"]),
        (["ppo", "model=nowhere/at/all"], ["nowhere/at/all", "no such model folder"]),
        (["sft", "model=tiny", "data=nowhere.jsonl"], ["nowhere.jsonl", "no such file"]),
        (["label"], ["runs/preferences.sqlite", "no such preference store"]),
        (["label", "nowhere.sqlite"], ["nowhere.sqlite"]),
        (["label", "--host", "0.0.0.0"], ["host", "people"]),
        (["label", "next=uncertain"], ["next", "reward"]),
        (["store", "show", "nowhere.sqlite"], ["nowhere.sqlite", "no such preference store"]),
        (["store", "import", "s.sqlite", "nowhere.jsonl"], ["nowhere.jsonl", "no such file"]),
        (["label", "--oracle", "store=nowhere.sqlite"], ["nowhere.sqlite"]),
        (["reward", "store=nowhere.sqlite"], ["nowhere.sqlite"]),
        (["evaluate", "model=nowhere/x/y"], ["nowhere/x/y"]),
        (["report", "nowhere"], ["nowhere"]),
        (["score", "tiny", "texts.jsonl"], ["no trained head"]),
        (["chat", "tiny"], ["chat template"]),
        (["ppo", "--resume", "nowhere"], ["nowhere", "no run"]),
        (["ppo", "model=tiny", "reward=plaudit.rewards.function:nothing", "prompts=tiny/prompts"], ["nothing"]),
        (
            ["ppo", "model=tiny", "reward=plaudit.rewards.function:vowels", "prompts=tiny/prompts", "device=cuda:9"],
            ["cuda:9"],
        ),
        (
            [
                "ppo",
                "model=tiny",
                "reward=plaudit.rewards.function:vowels",
                "prompts=tiny/prompts",
                "critic_from=reward",
            ],
            ["critic_from"],
        ),
        (
            [
                "ppo",
                "model=tiny",
                "reward=plaudit.rewards.function:vowels",
                "prompts=tiny/prompts",
                "arrangement.blocks=9",
            ],
            ["6 blocks"],
        ),
        (
            [
                "ppo",
                "model=tiny",
                "reward=plaudit.rewards.function:vowels",
                "prompts=tiny/prompts",
                "sampling.max_new_tokens=999",
            ],
            ["context"],
        ),
    ],
)
def test_a_mistake_is_told_in_two_lines(capsys, cache, tmp_path, monkeypatch, words, parts):
    monkeypatch.chdir(tmp_path)
    status, _, err = _run(capsys, *words)
    _is_a_clear_error(status, err, *parts)


def test_a_folder_that_holds_a_run_is_not_touched(capsys, cache, tmp_path):
    words = ["sft", "model=tiny", f"data={tmp_path}/d.jsonl", f"out={tmp_path}/run"]
    (tmp_path / "d.jsonl").write_text('{"text": "abc"}\n', encoding="utf-8")
    assert main(words) == 0
    before = sorted((p, p.stat().st_mtime_ns) for p in (tmp_path / "run").rglob("*"))
    status, _, err = _run(capsys, *words)
    _is_a_clear_error(status, err, "out=", "--resume")
    assert before == sorted((p, p.stat().st_mtime_ns) for p in (tmp_path / "run").rglob("*"))


def test_a_malformed_row_is_named(capsys, cache, tmp_path):
    (tmp_path / "d.jsonl").write_text('{"text": "abc"}\n{"txt": "abc"}\n', encoding="utf-8")
    status, _, err = _run(capsys, "sft", "model=tiny", f"data={tmp_path}/d.jsonl", f"out={tmp_path}/run")
    _is_a_clear_error(status, err, "row 2", "'text'", "'txt'")


def test_a_store_without_a_usable_pair_is_named(capsys, cache, tmp_path):
    from plaudit.preferences.store import PreferenceStore

    PreferenceStore(tmp_path / "s.sqlite", create=True).close()
    status, _, err = _run(capsys, "reward", "model=tiny", f"store={tmp_path}/s.sqlite", f"out={tmp_path}/run")
    _is_a_clear_error(status, err, "no preference pairs")


def test_an_unwritable_run_folder_is_named(capsys, cache, tmp_path):
    (tmp_path / "file").write_text("x", encoding="utf-8")
    status, _, err = _run(capsys, "ppo", f"out={tmp_path}/file/run")
    _is_a_clear_error(status, err, "cannot be written")


def test_a_full_disk_at_a_checkpoint_is_named_and_the_run_goes_on_later(capsys, cache, tmp_path, monkeypatch):
    from plaudit import checkpoint

    words = [
        "ppo",
        "model=tiny",
        "reward=plaudit.rewards.function:vowels",
        "prompts=tiny/prompts",
        "checkpoint_every=1",
    ]
    words += ["arrangement.kind=separate", "iterations=3", "sampling.max_new_tokens=4", f"out={tmp_path}/run"]
    real, calls = checkpoint.save_file, []

    def full(tensors, path):
        calls.append(path)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        real(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", full)
    status, _, err = _run(capsys, *words)
    _is_a_clear_error(status, err, "No space left", "checkpoint")
    assert main(["ppo", "--resume", f"{tmp_path}/run"]) == 0
    assert [json.loads(line)["step"] for line in (tmp_path / "run/metrics.jsonl").open()] == [1, 2, 3]


def _start(tmp_path: Path, *more: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "plaudit", "ppo", "model=tiny", "reward=plaudit.rewards.function:vowels"]
    command += ["prompts=tiny/prompts", "arrangement.kind=separate", "iterations=400", f"out={tmp_path}/run", *more]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def test_ctrl_c_saves_and_says_how_to_resume(cache, tmp_path):
    process = _start(tmp_path)
    metrics = tmp_path / "run/metrics.jsonl"
    deadline = time.time() + 60
    while time.time() < deadline and not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"plaudit ppo --resume {tmp_path}/run" in err and "Traceback" not in err
    done = len(metrics.read_text().splitlines())
    assert (tmp_path / f"run/checkpoints/step-{done:06d}").is_dir()


def _weights(folder: Path):
    from safetensors.torch import load_file

    return load_file(folder / "model/model.safetensors")


def test_a_resumed_run_ends_with_the_weights_of_one_that_was_never_stopped(cache, tmp_path, monkeypatch):
    import torch

    from plaudit.errors import PlauditError
    from plaudit.rewards import function

    words = ["ppo", "model=tiny", "reward=plaudit.rewards.function:vowels", "prompts=tiny/prompts", "iterations=6"]
    words += ["checkpoint_every=2", "kl.controller=adaptive", "kl.horizon=100.0", "arrangement.blocks=1"]
    assert main([*words, f"out={tmp_path}/straight"]) == 0
    real, calls = function.vowels, []

    def failing(prompts, responses, **columns):
        calls.append(1)
        if len(calls) == 6:
            raise PlauditError("the power went out")
        return real(prompts, responses)

    monkeypatch.setattr(function, "vowels", failing)
    assert main([*words, f"out={tmp_path}/stopped"]) == 2
    assert main(["ppo", "--resume", f"{tmp_path}/stopped"]) == 0
    one, two = _weights(tmp_path / "straight"), _weights(tmp_path / "stopped")
    assert all(torch.equal(one[k], two[k]) for k in one)
    steps = [json.loads(line)["step"] for line in (tmp_path / "stopped/metrics.jsonl").open()]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_a_finished_run_says_so(capsys, cache, tmp_path):
    (tmp_path / "d.jsonl").write_text('{"text": "abc"}\n', encoding="utf-8")
    assert main(["sft", "model=tiny", f"data={tmp_path}/d.jsonl", f"out={tmp_path}/run"]) == 0
    status, out, _ = _run(capsys, "sft", "--resume", f"{tmp_path}/run")
    assert status == 0 and "nothing to do" in out


def test_importing_the_package_loads_no_torch():
    code = "import sys, plaudit, plaudit.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_labelling_that_was_interrupted_goes_on_with_the_same_comparisons(cache, tmp_path, monkeypatch):
    from plaudit.evaluation import judges
    from plaudit.preferences.store import PreferenceStore
    from plaudit.types import Answer, Comparison

    monkeypatch.setattr(judges, "oracle_judge", lambda: lambda texts: [float(len(t)) for t in texts])
    store = PreferenceStore(tmp_path / "s.sqlite", create=True)
    store.add([Comparison(0, f"p{i}", (Answer("a"), Answer("bb"))) for i in range(5)])
    words = ["label", "--oracle", f"store={tmp_path}/s.sqlite", "limit=3", f"out={tmp_path}/run"]
    assert main(words) == 0
    (tmp_path / "run/summary.json").unlink()  # killed after the labels were stored, before the run was closed
    assert main(["label", "--resume", f"{tmp_path}/run"]) == 0
    assert json.loads((tmp_path / "run/summary.json").read_text())["labelled"] == 3
    assert len(store.preferences()) == 3


def test_a_run_does_not_go_on_under_another_configuration(cache, tmp_path):
    import plaudit
    from plaudit.config import SFTConfig
    from plaudit.errors import RunError

    (tmp_path / "d.jsonl").write_text('{"text": "abc"}\n', encoding="utf-8")
    config = SFTConfig(out=str(tmp_path / "run"), model="tiny", data=str(tmp_path / "d.jsonl"))
    plaudit.sft(config)
    with pytest.raises(RunError, match="another configuration"):
        plaudit.sft(config.model_copy(update={"epochs": 2}), resume=True)


def test_a_command_that_could_not_begin_leaves_its_folder_free(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = (
        "ppo",
        "model=tiny",
        "prompts=tiny/prompts",
        "reward=mine.py:short",
        "iterations=1",
        "batch_size=4",
        "out=run",
    )
    words += ("arrangement.kind=separate",)
    _is_a_clear_error(*_run(capsys, *words)[::2], "no such file mine.py")
    assert not Path("run").exists()
    Path("mine.py").write_text("def short(prompts, responses):\n    return [-len(r) for r in responses]\n")
    assert main(words) == 0
    assert Path("run/summary.json").exists()


def test_a_command_that_fails_later_keeps_what_it_had(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    Path("run/notes.txt").write_text("mine")
    _is_a_clear_error(*_run(capsys, "evaluate", "model=nowhere", "out=run")[::2], "nowhere")
    assert Path("run/notes.txt").read_text() == "mine"


def test_what_comes_from_elsewhere_is_printed_as_it_is(capsys):
    """No markup, no pictures for words: a folder's name or a server's words may look like either."""
    from plaudit.progress import say

    for text in ("runs/[/b]", "judge:m: [bold]", "a [x] b"):
        say(text)
        assert capsys.readouterr().out == f"{text}\n"


@pytest.mark.parametrize("words", [["--help"], ["explain"], ["watch", "run", "--port", "0"]])
def test_output_that_nobody_reads_ends_a_command_quietly(tmp_path, words):
    """By argparse, by print, by the console: as for any other tool, the status is 128 + SIGPIPE."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text('{"command": "ppo"}')
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "plaudit", *words]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        command, cwd=tmp_path, env=buffered, stdout=writer, stderr=subprocess.PIPE, timeout=60, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_said():
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "plaudit", "explain"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    _is_a_clear_error(done.returncode, done.stderr, "standard output", "No space left")
