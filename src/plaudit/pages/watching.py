"""The live page over run folders."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from plaudit.config import LOCAL
from plaudit.inspection.follow import watched
from plaudit.pages.serving import Page, serve
from plaudit.web.door import Door
from plaudit.web.watching import watching_app


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
    serve(page, host, port, page.ways, "it only reads, and goes on while training runs elsewhere", opened)
