"""The pages on which people say what they prefer: over a store, or between two models that answer them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from markupsafe import Markup

from plaudit.config import CompareConfig, PageConfig
from plaudit.errors import ConfigError, DataError
from plaudit.pages.serving import Page, serve
from plaudit.preferences.desk import Asking, Desk
from plaudit.preferences.store import PreferenceStore
from plaudit.progress import say
from plaudit.web.door import Door, proper_name
from plaudit.web.labelling import Look, labelling_app
from plaudit.web.words import markdown


def label_page(config: PageConfig) -> Page:
    """The labelling page of a configuration.

    Raises:
        ConfigError: a name that is none.
        DataError: the store or the guidelines cannot be read.
        ModelError: a reward model cannot be read.
    """
    guidelines = _guidelines(config.guidelines)
    store = PreferenceStore(config.store)
    desk = Desk(store, Asking(config.mode, config.overlap, config.check_every, config.repeat_every))
    if config.next == "uncertain":
        _ask_uncertain_first(desk, config)
    else:
        desk.ask_at_random()
    door, ways = _door(desk, config.people, config.admin, config.link_days)
    return Page(labelling_app(desk, door, Look(config.render, guidelines)), ways, store)


def _door(desk: Desk, people: Sequence[str], admin: str, days: float) -> tuple[Door, tuple[tuple[str, str], ...]]:
    """Who may come in, and each person's way.

    Raises:
        ConfigError: a name that is none.
    """
    for name in (*people, admin):
        if proper_name(name) != name:
            raise ConfigError(f"people: {name!r} is no name; use letters, digits, spaces, and . - _ @ between them")
    door = Door(desk.secret(), open_house=not people, days=days)
    ways = [(name, f"/enter/{door.token(name)}") for name in people]
    if people:
        ways.append((admin, f"/enter/{door.token(admin, admin=True)}"))
    return door, tuple(ways)


def compare_page(first: str, second: str, config: CompareConfig) -> Page:
    """The page on which two models answer and a person votes.

    Raises:
        ConfigError: a name that is none; ModelError: a model is missing or unfit; DataError: the store cannot be used.
    """
    # torch comes with it, which the other pages do without
    from plaudit.recipes.comparing import Contestant, Duel

    contestants = Contestant(first, config), Contestant(second, config)
    store = PreferenceStore(config.store, create=True)
    duel = Duel(*contestants, config, store)
    desk = Desk(store, Asking("compare", 1, 0, 0))
    desk.ask_at_random()
    door, ways = _door(desk, config.people, "admin", 30.0)
    return Page(labelling_app(desk, door, Look(config.render), contest=duel), ways, store)


def serve_compare(
    first: str, second: str, config: CompareConfig, opened: Callable[[str], None] = lambda address: None
) -> None:
    """Serves the page of :func:`compare_page` until Ctrl-C.

    Raises:
        RunError: the address cannot be served on, or is in use; and as for :func:`compare_page`.
    """
    page = compare_page(first, second, config)
    ways = page.ways or (("compare", "/"),)
    serve(page, config.host, config.port, ways, f"votes go to {config.store}", opened)


def _guidelines(file: str) -> Markup | None:
    if not file:
        return None
    try:
        return markdown(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: the guidelines cannot be read ({error})") from None


def _ask_uncertain_first(desk: Desk, config: PageConfig) -> None:
    # torch comes with it, which a page does without otherwise
    from plaudit.recipes.use import TextScorer

    asked = list(desk.open_questions())
    texts = [(prompt, answer) for _, prompt, answers in asked for answer in answers]
    if not texts:
        return
    places = [f"question {question}" for question, _, answers in asked for _ in answers]
    said = []
    for folder in config.reward:
        say(f"{folder}: scores {len(texts)} answers")
        said.append(TextScorer(folder, config.device)(texts, places))
    scores, at = {}, 0
    for question, _, answers in asked:
        scores[question] = [member[at : at + len(answers)] for member in said]
        at += len(answers)
    desk.ask_first(scores)


def serve_labels(config: PageConfig, opened: Callable[[str], None] = lambda address: None) -> None:
    """Serves the labelling page until Ctrl-C. ``opened`` is told the address.

    Raises:
        RunError: the address cannot be served on, or is in use; and as for :func:`label_page`.
    """
    page = label_page(config)
    ways = page.ways or (("labelling page", "/"),)
    serve(page, config.host, config.port, ways, "every label is on disk as soon as the page goes on", opened)
