"""The live page over run folders: curves, answers beside the reference's, warnings, where the time goes.

The page is loaded once; then the server sends what is new, as server-sent events. Left out: what is read (see
inspection.follow), the server and its address (see pages).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import HTMLResponse
from fastapi.sse import EventSourceResponse, ServerSentEvent
from fastapi.staticfiles import StaticFiles
from markupsafe import Markup
from starlette.concurrency import iterate_in_threadpool

from plaudit.errors import RunError
from plaudit.inspection import trace
from plaudit.inspection.follow import Follower, Watched, traced_answers
from plaudit.progress import say
from plaudit.web.door import Door, bare_message, language_of, ways_in
from plaudit.web.guard import guard
from plaudit.web.trace import trace_page
from plaudit.web.words import phrases, templates

HERE = Path(__file__).parent
#: seconds between looks at the folders: a run says something every few seconds at most
PAUSE = 1.0


def watching_app(runs: Sequence[Watched], door: Door) -> FastAPI:
    """The application over ``runs``."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.mount("/static", StaticFiles(directory=HERE / "static"))
    guard(app, local=door.open_house)
    ways_in(app, door)
    # a stream ends with its server, which says so here
    app.state.ended = lambda: False

    @app.exception_handler(RunError)
    def gone(request: Request, error: RunError) -> Response:
        say(str(error))
        return bare_message(request, phrases(language_of(request))["no_trace"], 404)

    # a stream has begun before its function runs: who asks is looked at first
    known = [Depends(door.visitor)]

    @app.get("/", dependencies=known)
    def page(request: Request) -> HTMLResponse:
        t = phrases(language_of(request))
        told = [
            {
                "name": run.name,
                "iterations": run.config.get("iterations"),
                "monitors": run.config.get("monitors", []),
                "traced": traced_answers(run),
            }
            for run in runs
        ]
        page = templates().get_template("watch.html")
        text = page.render(t=t, heading=t["watch_title"], runs=_data(told), words=_data(t))
        return HTMLResponse(text.encode("utf-8", "replace"))

    @app.get("/events", response_class=EventSourceResponse, dependencies=known)
    async def events() -> AsyncIterator[ServerSentEvent]:
        followers = [Follower(run) for run in runs]
        while not app.state.ended():
            # in a thread: files may be long or far away, and other visitors are not to wait for them
            async for told in iterate_in_threadpool(_told(followers)):
                yield ServerSentEvent(raw_data=told)
                if app.state.ended():
                    return
            await asyncio.sleep(PAUSE)

    @app.get("/trace/{run}/{step}/{row}", dependencies=known)
    def traced(request: Request, run: int, step: int, row: int) -> HTMLResponse:
        if not 0 <= run < len(runs):
            raise RunError(f"no run {run}")
        found = trace.find(runs[run].folder, step, row)
        text = trace_page(found, language_of(request), title=runs[run].name, inline=False)
        return HTMLResponse(text.encode("utf-8", "replace"))

    return app


def _told(followers: Sequence[Follower]) -> Iterator[str]:
    """What is new in the runs, as JSON."""
    for number, follower in enumerate(followers):
        for news in follower.news():
            yield json.dumps({"run": number, "kind": news.kind, "lines": news.lines, "anew": news.anew})


def _data(value: Any) -> Markup:
    """A value as JSON that can stand in a script element."""
    return Markup(json.dumps(value, ensure_ascii=False).replace("<", "\\u003c"))
