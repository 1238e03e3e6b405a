"""Writes docs/configuration.md and docs/conventions.md from the code: ``python docs/generate.py``."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from plaudit import config as configs
from plaudit.cli import STAGES
from plaudit.conventions import PRESETS, Conventions, Hyper
from plaudit.explain import preset_config, value_at
from plaudit.schema import Frozen, leaves

TARGET = Path(__file__).with_name("configuration.md")
COMMANDS: dict[str, tuple[type[Frozen], str]] = {
    **{"label --oracle, --judge" if name == "label" else name: stage for name, stage in STAGES.items()},
    "label": (configs.PageConfig, "the labelling page"),
    "score": (configs.ScoreConfig, "score texts with a reward model"),
    "chat": (configs.ChatConfig, "talk to a model"),
    "compare": (configs.CompareConfig, "two models answer, and you vote"),
}
HEAD = """# Configuration

Made from the schema by `make docs`; do not edit it by hand.

Every key stands in a TOML file or on the command line as `key=value`. A key with a dot belongs to a section: `kl.coef`
is `coef` under `[kl]`. Values are TOML; on the command line, what is no TOML is a string. Unknown keys and values out
of range are errors. `--dry-run` prints the resolved configuration of a command.
"""
QUICKSTART = """
Every key of a stage is known here under the stage's name, for example `sft.epochs` or `ppo.kl.coef`. Listed are the
quickstart's own keys and those whose default differs from the stage's. The quickstart itself sets each stage's `out`,
`seed` and `device`, and the models and the store that pass from stage to stage.
"""

Leaf = tuple[str, str, Any, str]


def render() -> str:
    """The whole page, with one section a command."""
    sections = [HEAD]
    for name, (schema, title) in COMMANDS.items():
        sections.append(f"\n## {name}\n\n{title[0].upper()}{title[1:]}.\n")
        rows = list(leaves(schema))
        if schema is configs.QuickstartConfig:
            sections.append(QUICKSTART)
            rows = _differing(rows)
        sections.append("\n| key | type or choices | default | meaning |\n|---|---|---|---|\n")
        sections += [f"| {' | '.join(_cells(row))} |\n" for row in rows]
    return "".join(sections)


def _differing(rows: list[Leaf]) -> list[Leaf]:
    """The rows that no stage has under its name with the same default."""
    stages = {
        f"{stage}.{key}": default for stage, (schema, _) in STAGES.items() for key, _, default, _ in leaves(schema)
    }
    return [row for row in rows if row[0] not in stages or row[2] != stages[row[0]]]


def _cells(row: Leaf) -> list[str]:
    key, kind, default, meaning = row
    choices = ", ".join(f"`{choice}`" for choice in kind.split(" | ")) if " | " in kind else kind
    return [f"`{key}`", choices, f"`{json.dumps(default, ensure_ascii=False)}`", meaning.replace("|", "\\|")]


CONVENTIONS = Path(__file__).with_name("conventions.md")
CONVENTIONS_HEAD = """# Conventions

Made from `plaudit.conventions` by `make docs`; do not edit it by hand.

Public PPO systems disagree on details that move the numbers. Each column is a preset that reproduces one system's step:
`plaudit vectors FILE` compares them with numbers that the systems' own code gave. A row's response has n tokens;
`response` means those, `one_after` also the position behind them where the row has one, `row` everything from the first
response token on.

`plaudit ppo conventions.preset=trl-1` trains by a column: its choices, its coefficients, and below its optimizer and
schedule become the defaults of all keys, which your own keys override. One choice is changed by its own key, for
example `conventions.score_position=after_end`. Where a choice looks at positions behind the answer, pad tokens are fed
there. The presets, and single deviations from `plaudit`, are tested; other mixtures are allowed. `plaudit explain
CONFIG` says in words what a configuration does at each step, and who does otherwise.
"""


def conventions() -> str:
    """The page on conventions: the choices, then the coefficients, one column a preset."""
    choices = {name: f for name, f in Conventions.model_fields.items() if name != "preset"}
    page = [CONVENTIONS_HEAD, "\n## Choices\n", _row(["choice", *PRESETS]), _row(["---"] * (len(PRESETS) + 1))]
    for name in choices:
        page.append(_row([f"`{name}`", *(_said(getattr(p.conventions, name)) for p in PRESETS.values())]))
    page.append("\n\n")
    page += [f"- `{name}`: {f.description}\n" for name, f in choices.items()]
    page += ["\n## Coefficients\n", _row(["coefficient", *PRESETS]), _row(["---"] * (len(PRESETS) + 1))]
    for h in fields(Hyper):
        page.append(_row([f"`{h.name}`", *(_said(getattr(p.hyper, h.name)) for p in PRESETS.values())]))
    page += ["\n\n## Optimizer and schedule\n", _row(["key", *PRESETS]), _row(["---"] * (len(PRESETS) + 1))]
    keys = dict.fromkeys(
        key
        for p in PRESETS.values()
        for name, value in p.training.items()
        for key in ([f"{name}.{k}" for k in value] if isinstance(value, dict) else [name])
    )
    runs = [preset_config(name) for name in PRESETS]
    page += [_row([f"`{key}`", *(_said(value_at(run, key)) for run in runs)]) for key in keys if "critic." not in key]
    return "".join(page)


def _row(cells: list[str]) -> str:
    return f"\n| {' | '.join(cells)} |"


def _said(value: Any) -> str:
    if value is None or value is False or (isinstance(value, float) and value == 0):
        return "off"
    return "on" if value is True else f"{value:g}" if isinstance(value, float) else str(value)


PAGES = {TARGET: render, CONVENTIONS: lambda: conventions().rstrip() + "\n"}

if __name__ == "__main__":
    for target, make in PAGES.items():
        target.write_text(make(), encoding="utf-8", newline="\n")
        print(target)
