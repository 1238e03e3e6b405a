"""Who may come in: signed links for a team, names for one machine; and which requests are refused."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse, RedirectResponse
from itsdangerous import BadSignature, URLSafeTimedSerializer

from plaudit.web.words import LANGUAGES, preferred

COOKIE = "plaudit"
_NAME = re.compile(r"\w(?:[\w .@-]{0,78}\w)?")


@dataclass(frozen=True)
class Visitor:
    name: str
    admin: bool


class Unauthorised(Exception):
    """No token, or one that is wrong, expired or signed for another store."""


class Door:
    """Tells who a request is from. ``open_house``: anybody on this machine may say their name and see the overview."""

    def __init__(self, secret: str, *, open_house: bool, days: float):
        self.open_house, self._seconds = open_house, int(days * 86400)
        self._signer = URLSafeTimedSerializer(secret, salt="visitor")

    def token(self, name: str, *, admin: bool = False) -> str:
        """What lets a person in: name and role, signed, with its time."""
        return self._signer.dumps([name, admin])

    def admit(self, token: str) -> Visitor:
        """
        Raises:
            Unauthorised: the token is not ours or too old.
        """
        try:
            name, admin = self._signer.loads(token, max_age=self._seconds)
            return Visitor(str(name), bool(admin))
        except (BadSignature, ValueError, TypeError):
            raise Unauthorised from None

    def visitor(self, request: Request) -> Visitor | None:
        """Who is asking; None where nobody has said a name yet and may.

        Raises:
            Unauthorised: a token is needed, and there is no good one.
        """
        try:
            found = self.admit(request.cookies.get(COOKIE, ""))
        except Unauthorised:
            if self.open_house:
                return None
            raise
        return Visitor(found.name, True) if self.open_house else found

    def keep(self, response: Any, token: str, *, secure: bool) -> None:
        response.set_cookie(
            COOKIE, token, max_age=self._seconds, httponly=True, samesite="lax", secure=secure, path="/"
        )


def ways_in(app: FastAPI, door: Door) -> None:
    """What every page answers: a link of one's own, and the choice of the language."""

    @app.get("/enter/{token}")
    def enter_by_link(request: Request, token: str) -> Response:
        door.admit(token)
        response = to()
        door.keep(response, token, secure=request.url.scheme == "https")
        return response

    @app.get("/language/{code}")
    def language(code: str) -> Response:
        response = to()
        if code in LANGUAGES:
            response.set_cookie("language", code, max_age=365 * 86400, samesite="lax")
        return response

    @app.exception_handler(Unauthorised)
    def unauthorised(request: Request, error: Exception) -> Response:
        return PlainTextResponse("401", status_code=401)


def to(place: str = "/") -> RedirectResponse:
    """On to another page; a reload there sends nothing twice."""
    return RedirectResponse(place, status_code=303)


def language_of(request: Request) -> str:
    """The language that was chosen, or that the browser asks for."""
    language = request.cookies.get("language") or preferred(request.headers.get("accept-language", ""))
    return language if language in LANGUAGES else "en"


def proper_name(text: str) -> str | None:
    """A name as it is stored, or None where it is none: what could pass for markup or another's name stays out."""
    name = " ".join(text.split())
    return name if _NAME.fullmatch(name) else None


def from_elsewhere(request: Request) -> bool:
    """Whether a browser sent this at another site's wish. Requests without a browser's headers are no such."""
    site = request.headers.get("sec-fetch-site")
    if site is not None and site not in ("same-origin", "none"):
        return True
    origin = request.headers.get("origin")
    return origin is not None and urlsplit(origin).netloc != request.headers.get("host", "")
