"""Pages: the labelling page over a store, and the server that shows it."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from markupsafe import Markup

from plaudit.config import LOCAL, CompareConfig, PageConfig
from plaudit.errors import ConfigError, DataError, RunError
from plaudit.inspection.follow import watched
from plaudit.preferences.desk import Asking, Desk
from plaudit.preferences.store import PreferenceStore
from plaudit.progress import say
from plaudit.web.door import Door, proper_name
from plaudit.web.labelling import Look, labelling_app
from plaudit.web.watching import watching_app
from plaudit.web.words import markdown


@dataclass(frozen=True)
class Page:
    """The application, and each person's way in: (name, path), the admin last; empty where anybody may come in."""

    app: FastAPI
    ways: tuple[tuple[str, str], ...]
    #: what to close when the page ends: a store's file is whole then, without the files beside it
    store: PreferenceStore | None = None


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
    _serve(page, config.host, config.port, ways, f"votes go to {config.store}", opened)


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
    _serve(page, config.host, config.port, ways, "every label is on disk as soon as the page goes on", opened)


def watch_page(runs: Sequence[str], host: str) -> Page:
    """The live page over some runs. Served on another address than this machine's own, it needs a link.

    Raises:
        RunError: a folder is no PPO run.
    """
    door = Door(secrets.token_urlsafe(), open_house=host in LOCAL, days=30)
    ways = (("watch", "/" if door.open_house else f"/enter/{door.token('watcher')}"),)
    return Page(watching_app([watched(run) for run in runs], door), ways)


def serve_watch(
    runs: Sequence[str], host: str = "127.0.0.1", port: int = 8112, opened: Callable[[str], None] = lambda address: None
) -> None:
    """Serves the live page over some runs until Ctrl-C.

    Raises:
        RunError: the address cannot be served on, or is in use; a folder is no PPO run.
    """
    page = watch_page(runs, host)
    _serve(page, host, port, page.ways, "it only reads, and goes on while training runs elsewhere", opened)


def _serve(
    page: Page, host: str, port: int, ways: Sequence[tuple[str, str]], note: str, opened: Callable[[str], None]
) -> None:
    """Serves an application, and says where and how one comes in."""
    with _bound(host, port) as listening:
        name = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
        address = f"http://{name}:{listening.getsockname()[1]}"
        for who, way in ways:
            say(f"{who}: {address}{way}")
        say(f"{note}; Ctrl-C ends the page")
        opened(address)
        config = uvicorn.Config(page.app, log_level="warning", lifespan="off", timeout_graceful_shutdown=3)
        server = uvicorn.Server(config)
        page.app.state.ended = lambda: server.should_exit
        try:
            server.run(sockets=[listening])
        finally:
            if page.store is not None:
                page.store.close()


def _bound(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise RunError(f"port {port}: ports go from 0 (any that is free) to 65535")
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(place)
        listening.listen(128)
        return listening
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise RunError(f"{host}:{port}: cannot be served on ({why}); choose another with --port or --host") from None
