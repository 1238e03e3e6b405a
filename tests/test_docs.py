"""What the documentation says is so: its commands parse, its example runs, its links lead somewhere."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from plaudit import cli
from plaudit import config as configs
from plaudit import schema as schemas
from plaudit.rewards.function import load_function

ROOT = Path(__file__).resolve().parents[1]
READMES = (ROOT / "README.md", ROOT / "README.zh.md")
PAGES = [*READMES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
WITHOUT_DRY_RUN = {"score": configs.ScoreConfig, "chat": configs.ChatConfig, "compare": configs.CompareConfig}


def fences(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page that are marked with exactly this language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def code_of(text: str) -> list[str]:
    """Lines without comments and blank ends: what two languages of one text must share."""
    lines = [re.sub(r"(^|\s+)#.*$", "", line).rstrip() for line in text.splitlines()]
    return [line for line in lines if line]


def commands() -> list[str]:
    """Every different line of the pages' sh blocks, in order."""
    return list(dict.fromkeys(line for page in PAGES for block in fences(page, "sh") for line in code_of(block)))


@pytest.mark.parametrize("line", [line for line in commands() if line.startswith("plaudit ")])
def test_a_documented_command_is_well_formed(line, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    words = shlex.split(line)[1:]
    if "--help" in words:
        with pytest.raises(SystemExit) as done:
            cli.main(words)
        assert done.value.code == 0
        assert words[0] in capsys.readouterr().out
    elif words[0] in cli.STAGES and "--resume" not in words:
        assert cli.main([*words, *(["--dry-run"] if "--dry-run" not in words else [])]) == 0
        assert json.loads(capsys.readouterr().out)
    else:
        arguments = cli._parse(words)
        if words[0] in WITHOUT_DRY_RUN:
            schemas.read(WITHOUT_DRY_RUN[words[0]], None, arguments.config)


def test_the_pages_name_every_command():
    lines = commands()
    assert "make quickstart" in lines
    assert "make test" in lines
    for page in READMES:
        text = page.read_text(encoding="utf-8")
        for name in [*cli.STAGES, "report", "score", "chat", "store", "watch", "trace", "compare"]:
            assert f"`plaudit {name}" in text, f"{page.name} does not mention plaudit {name}"


def test_a_documented_make_target_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {word for page in PAGES for word in re.findall(r"\bmake ([a-z-]+)`", page.read_text(encoding="utf-8"))}
    named |= {line.split()[1] for line in commands() if line.startswith("make ")}
    assert named
    assert named <= targets


@pytest.mark.parametrize("language", ["sh", "py", "python"])
def test_both_readmes_hold_the_same_code(language):
    english, chinese = ([code_of(block) for block in fences(page, language)] for page in READMES)
    assert english
    assert english == chinese


def test_the_python_example_runs_in_an_empty_folder(tmp_path):
    (block,) = fences(READMES[0], "python")
    (tmp_path / "example.py").write_text(block, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "example.py"],
        cwd=tmp_path,
        # on a busy machine, threads that wait for one another take far longer over a tiny model than one alone
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    before, after = map(float, re.findall(r"(\S+) before, (\S+) after", done.stdout)[0])
    assert after > before
    (model,) = re.findall(r"^model: (.+)$", done.stdout, re.MULTILINE)
    assert (tmp_path / model / "config.json").exists()
    assert (tmp_path / model / "model.safetensors").exists()


@pytest.mark.parametrize("page", READMES, ids=lambda page: page.name)
def test_the_reward_example_is_a_reward(page, tmp_path, monkeypatch):
    (block,) = fences(page, "py")
    (tmp_path / "reward.py").write_text(block, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    (spec,) = {word for line in commands() for word in re.findall(r"reward=(reward\.py:\w+)", line)}
    assert load_function(spec)(["a", "b", "c"], ["1x", "", "22"], other=[0, 0, 0]) == [0.5, 0.0, 1.0]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_a_recipe_resolves_by_the_command_it_names(recipe):
    head = recipe.read_text(encoding="utf-8")
    named = re.findall(rf"^#\s+plaudit (\w+) .*{re.escape(recipe.name)}$", head, re.MULTILINE)
    assert len(named) == 1, "a recipe's head says with which command it is used"
    schema, _ = cli.STAGES[named[0]]
    assert schemas.read(schema, recipe).out.startswith("runs/")


def test_every_stage_has_a_recipe():
    assert {path.stem for path in RECIPES} >= set(cli.STAGES)


def test_the_configuration_page_is_up_to_date():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    for page, make in generate.PAGES.items():
        assert page.read_text(encoding="utf-8") == make(), "run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page.name}: {target} leads nowhere"
        if anchor:
            assert anchor in _anchors(linked), f"{page.name}: {target} names no heading"


def _anchors(page: Path) -> set[str]:
    """The anchors that a page's headings have: lower case, punctuation dropped, spaces as hyphens."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_figure_is_left_to_fill_in(page):
    assert not re.findall(r"@[A-Z_]+@", page.read_text(encoding="utf-8"))
