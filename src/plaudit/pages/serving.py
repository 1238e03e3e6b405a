"""A page and the server that shows it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import uvicorn
from fastapi import FastAPI

from plaudit.errors import RunError
from plaudit.progress import say
from plaudit.web.guard import in_address


class Closing(Protocol):
    def close(self) -> None: ...


@dataclass(frozen=True)
class Page:
    """The application, and each person's way in: (name, path), the admin last; empty where anybody may come in."""

    app: FastAPI
    ways: tuple[tuple[str, str], ...]
    #: what to close when the page ends: a store's file is whole then, without the files beside it
    store: Closing | None = None


def serve(
    page: Page, host: str, port: int, ways: Sequence[tuple[str, str]], note: str, opened: Callable[[str], None]
) -> None:
    """Serves an application, and says where and how one comes in."""
    with _bound(host, port) as listening:
        name = socket.gethostname() if host in ("0.0.0.0", "::") else in_address(host)
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
