"""What stands around every request of every page: who may be asked, and the headers that each answer bears."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fastapi import FastAPI, Request, Response
from starlette.datastructures import MutableHeaders
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plaudit.config import LOCAL

POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    # no-referrer would take the origin from the page's own forms too
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def guard(app: FastAPI, *, local: bool, refusal: Callable[[Request], Response | None] = lambda request: None) -> None:
    """``local``: the page is for this machine alone. ``refusal``: the answer to a request that is not looked at any
    further; None lets it through."""
    if local:
        # a page of another name that resolves to this machine is not this page
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=[in_address(host) for host in LOCAL])
    app.add_middleware(_Guard, headers=HEADERS, refusal=refusal)


def in_address(host: str) -> str:
    """A host as it stands in an address: IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


class _Guard:
    """No function of ``app.middleware``: that costs more than a short page, and cannot let go of a stream."""

    def __init__(self, app: ASGIApp, headers: Mapping[str, str], refusal: Callable[[Request], Response | None]):
        self._app, self._headers, self._refusal = app, headers, refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in self._headers.items():
                    headers.setdefault(name, value)
                if scope["path"].startswith("/static/"):
                    headers["Cache-Control"] = "max-age=300"
            await send(message)

        await (self._refusal(Request(scope)) or self._app)(scope, receive, with_headers)
