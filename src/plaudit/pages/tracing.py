"""A traced answer in the terminal, and as a page."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table
from rich.text import Text

from plaudit.errors import RunError
from plaudit.inspection.follow import watched
from plaudit.inspection.trace import Found, columns, find, last_step, number, numbers, sums
from plaudit.progress import console
from plaudit.web.trace import shown_text, trace_page
from plaudit.web.words import sum_words

#: columns of a terminal from which the likeliest tokens are shown too
WIDE = 130
HEADS = {"logprob": "log π", "ref_logprob": "log π_ref", "returns": "return"}
SHORT = {"ref_logprob": "ref", "value": "V", "advantage": "A", "entropy": "H"}


def trace(
    run: str | Path,
    *,
    step: int | None = None,
    row: int | None = None,
    prompt: str = "",
    html: str | None = None,
    language: str = "en",
) -> Path:
    """Prints a traced answer as a table and writes it as a page, whose path is returned.

    Raises:
        RunError: there is no such answer, or the page cannot be written.
    """
    folder = watched(run).folder
    found = find(folder, step, row, prompt)
    _print(found)
    page = Path(html) if html else folder / "trace.html"
    try:
        page.write_bytes(trace_page(found, language, title=str(run)).encode("utf-8", "replace"))
    except OSError as error:
        raise RunError(f"{page}: cannot be written ({error.strerror}); choose another with --html") from None
    return page


def _print(found: Found) -> None:
    t, rules = found.trace, found.rules
    console.print(f"iteration {found.step}, answer {t.row}", style="bold")
    if t.prompt:
        console.print(Text.assemble(("prompt  ", "dim"), shown_text(t.prompt)))
    console.print(Text.assemble(("answer  ", "dim"), shown_text(t.response)))
    paid = f", {number(t.paid)} paid after penalties and limits" if t.paid != t.score else ""
    ended = "the policy ended it" if t.ended else "cut by the length limit"
    console.print(Text.assemble(("score   ", "dim"), f"{number(t.score)}{paid}; {ended}"))
    console.print(_table(found))
    last = len(t.tokens) - 1
    console.print(f"the sums of token {last + 1}:", style="dim")
    for name, text in sums(found, last, sum_words("en")).items():
        console.print(Text.assemble((f"  {HEADS.get(name, name):10}", "dim"), text), soft_wrap=True)
    console.print(
        f"log-probabilities and KL in nats at temperature {rules.temperature:g}; ratio and entropy as the last step on "
        "the token saw them, c: clipped",
        style="dim",
        soft_wrap=True,
    )


def _table(found: Found) -> Table:
    names = columns(found)
    wide = console.width >= WIDE
    heads = HEADS if wide else HEADS | SHORT
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2 if wide else 1, 0, 0))
    table.add_column("", justify="right", style="dim")
    table.add_column("token", no_wrap=True, overflow="ellipsis", max_width=14)
    for name in names:
        table.add_column(heads.get(name, name), justify="right", no_wrap=True)
    if wide:
        table.add_column("might have been", no_wrap=True, overflow="ellipsis")
    for i, token in enumerate(found.trace.tokens):
        values, step = numbers(token), last_step(token)
        cells = [Text(_cell(values[n]), style=_colour(n, values[n])) for n in names]
        if step and step.clipped:
            cells[names.index("ratio")].append("c", style="yellow")
        others = "  ".join(
            f"{shown_text(a.text)!r} {number(a.logprob, 1)}" for a in token.alternatives if a.id != token.id
        )
        text = Text(repr(token.text)[1:-1], style="" if token.chosen else "dim italic")
        table.add_row(str(i + 1), text, *cells, *([Text(others, style="dim")] if wide else []))
    return table


def _cell(value: float | None) -> str:
    # adding 0 takes the sign from what rounds to 0
    return "–" if value is None else f"{round(value, 2) + 0.0:.2f}".replace("-", "−")


def _colour(name: str, value: float | None) -> str:
    """Green pulls up, red down; a token's KL is yellow where it is dear."""
    if value is None:
        return "dim"
    if name in ("reward", "advantage"):
        return "green" if value > 0.005 else "red" if value < -0.005 else ""
    return "yellow" if name == "kl" and abs(value) > 1 else ""


