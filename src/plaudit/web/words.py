"""What the pages say, in English and Chinese; and texts of models made safe to show."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, select_autoescape
from markdown_it import MarkdownIt
from markupsafe import Markup, escape

LANGUAGES = ("en", "zh")
#: characters of an answer that a page shows at once
SHOWN = 20_000

#: what changes the direction of text, and what cannot be seen: a model could make a text look other than it is
_HIDDEN = re.compile(
    "[\u200e\u200f\u061c\u202a-\u202e\u2066-\u2069\u200b\u2060\ufeff\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]"
)


@functools.cache
def phrases(language: str) -> dict[str, str]:
    return json.loads((Path(__file__).with_name("phrases") / f"{language}.json").read_text(encoding="utf-8"))


def sum_words(language: str) -> dict[str, str]:
    """What the sums of a trace are said with."""
    return {name[4:]: text for name, text in phrases(language).items() if name.startswith("sum_")}


@functools.cache
def templates() -> Environment:
    return Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=select_autoescape(),
        trim_blocks=True,
        lstrip_blocks=True,
    )


def preferred(accepted: str) -> str:
    """The language of a browser's Accept-Language header: Chinese where it stands before English."""
    for part in accepted.lower().split(","):
        if part.strip()[:2] in LANGUAGES:
            return part.strip()[:2]
    return "en"


def visible(text: str) -> str:
    """Hidden and direction-changing characters by their names, so that nothing is shown other than it is."""
    return _HIDDEN.sub(lambda m: f"⟨U+{ord(m[0]):04X}⟩", text)


@functools.cache
def _markdown() -> MarkdownIt:
    # html=False escapes tags; links to scripts are refused by the library; an image would call another server
    return MarkdownIt("commonmark", {"html": False}).enable("table").disable("image")


def markdown(text: str) -> Markup:
    """Markdown as HTML without tags, scripts or images of its own."""
    return Markup(_markdown().render(visible(text)))


def shown(text: str, render: str) -> Markup:
    """A model's text as HTML that can do nothing."""
    text = text[:SHOWN]
    return markdown(text) if render == "markdown" else escape(visible(text))
