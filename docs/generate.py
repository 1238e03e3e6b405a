"""Writes docs/configuration.md from the schema of every command: ``python docs/generate.py``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from plaudit import config as configs
from plaudit.cli import STAGES

TARGET = Path(__file__).with_name("configuration.md")
COMMANDS: dict[str, tuple[type[configs.Frozen], str]] = {
    **STAGES,
    "score": (configs.ScoreConfig, "score texts with a reward model"),
    "chat": (configs.ChatConfig, "talk to a model"),
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
        rows = list(configs.leaves(schema))
        if schema is configs.QuickstartConfig:
            sections.append(QUICKSTART)
            rows = _differing(rows)
        sections.append("\n| key | type or choices | default | meaning |\n|---|---|---|---|\n")
        sections += [f"| {' | '.join(_cells(row))} |\n" for row in rows]
    return "".join(sections)


def _differing(rows: list[Leaf]) -> list[Leaf]:
    """The rows that no stage has under its name with the same default."""
    stages = {
        f"{stage}.{key}": default
        for stage, (schema, _) in STAGES.items()
        for key, _, default, _ in configs.leaves(schema)
    }
    return [row for row in rows if row[0] not in stages or row[2] != stages[row[0]]]


def _cells(row: Leaf) -> list[str]:
    key, kind, default, meaning = row
    choices = ", ".join(f"`{choice}`" for choice in kind.split(" | ")) if " | " in kind else kind
    return [f"`{key}`", choices, f"`{json.dumps(default, ensure_ascii=False)}`", meaning.replace("|", "\\|")]


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8", newline="\n")
    print(TARGET)
