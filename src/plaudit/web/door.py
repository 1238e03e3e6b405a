"""Who may come in: signed links for a team, names for one machine; which requests are refused, and in what words."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, RedirectResponse
from itsdangerous import BadSignature, URLSafeTimedSerializer
from starlette.exceptions import HTTPException

from plaudit.web.words import LANGUAGES, phrases, preferred, templates

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
            found = self.admit(request.cookies.get(_cookie(request), ""))
        except Unauthorised:
            if self.open_house:
                return None
            raise
        return Visitor(found.name, True) if self.open_house else found

    def keep(self, request: Request, response: Response, token: str) -> None:
        """Lets the browser that asked come in from now on."""
        response.set_cookie(
            _cookie(request),
            token,
            max_age=self._seconds,
            httponly=True,
            samesite="lax",
            secure=request.url.scheme == "https",
        )

    def forget(self, request: Request, response: Response) -> None:
        response.delete_cookie(_cookie(request))


def _cookie(request: Request) -> str:
    """A cookie goes to every port of its host, so pages on one machine have each a name for theirs."""
    _, port = request.scope["server"]
    return f"plaudit-{port}"


#: makes a page of a text and a status
Message = Callable[[Request, str, int], Response]


def bare_message(request: Request, text: str, status: int) -> Response:
    """A page that says why nothing came of a request, and nothing else."""
    t = phrases(language_of(request))
    page = templates().get_template("message.html").render(t=t, heading=t["refused"], text=text, warn=True)
    return HTMLResponse(page, status_code=status)


def ways_in(app: FastAPI, door: Door, message: Message = bare_message) -> None:
    """What every page answers: a link of one's own, the choice of the language, and what it refuses."""

    @app.get("/enter/{token}")
    def enter_by_link(request: Request, token: str) -> Response:
        door.admit(token)
        response = to()
        door.keep(request, response, token)
        return response

    @app.get("/language/{code}")
    def language(code: str) -> Response:
        response = to()
        if code in LANGUAGES:
            response.set_cookie("language", code, max_age=365 * 86400, samesite="lax")
        return response

    def refuse(kind: type[Exception], why: str, status: int) -> None:
        @app.exception_handler(kind)
        def refused(request: Request, error: Exception) -> Response:
            text = phrases(language_of(request))[why]
            return message(request, text, getattr(error, "status_code", status))

    refuse(Unauthorised, "no_name" if door.open_house else "no_link", 401)
    refuse(HTTPException, "unknown_page", 404)
    refuse(RequestValidationError, "not_understood", 400)


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
