"""The labelling page: a question at a time, one's own labels, an overview. Pages are plain HTML forms; a script adds
keys.

Every change is a POST that answers with a redirect, so that reloading sends nothing twice. Left out: what is asked and
recorded (see preferences.desk), and the server (see pages).
"""

from __future__ import annotations

import json
import pathlib
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Protocol

from fastapi import Depends, FastAPI, Form, Path, Request, Response
from fastapi.responses import HTMLResponse, PlainTextResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles
from markupsafe import Markup
from starlette.exceptions import HTTPException

from plaudit.errors import DataError, PlauditError
from plaudit.preferences.agreement import Label, Share, agree, agreement, asked_again, attentive
from plaudit.preferences.desk import BEST_RATING, Desk, Mode, Question, Refused, Said
from plaudit.preferences.exchange import exported
from plaudit.progress import say
from plaudit.types import ranked
from plaudit.web.door import Door, Unauthorised, Visitor, from_elsewhere, language_of, proper_name, to, ways_in
from plaudit.web.guard import guard
from plaudit.web.words import SHOWN, phrases, shown, templates, visible

HERE = pathlib.Path(__file__).parent
LARGEST_FORM = 64 * 1024
#: seconds for which the figure of agreement on the page is taken as it was, at least
FRESH = 10.0


async def _form(request: Request) -> dict[str, str]:
    """All of a form's fields: how many places or ratings there are, the question says."""
    return {name: value for name, value in (await request.form()).items() if isinstance(value, str)}


_FIELDS = Depends(_form)
#: a number that a database takes
Id = Annotated[int, Path(ge=0, lt=2**31)]


@dataclass(frozen=True)
class Look:
    """How the page looks: models' texts as text or Markdown, and guidelines (HTML)."""

    render: str = "text"
    guidelines: Markup | None = None


@dataclass(frozen=True)
class Standing:
    """How two models stand: ``rate`` is the share of votes for the second (a tie is half of one), with its interval."""

    first: str
    second: str
    votes: int
    rate: float
    low: float
    high: float


class Contest(Protocol):
    """Two models that answer what a person asks; their answers lie in the store then, as a question."""

    def ask(self, prompt: str) -> None:
        """
        Raises:
            DataError: the models cannot answer this.
        """
        ...

    def standing(self) -> Standing: ...


def labelling_app(
    desk: Desk,
    door: Door,
    look: Look = Look(),
    programmes: Sequence[str] = ("oracle",),
    contest: Contest | None = None,
) -> FastAPI:
    """The application. ``programmes``: annotators' names that no person may take. With a ``contest`` a person asks the
    questions too, and where none is open is asked for the next."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    pages = _Pages(desk, door, look)
    app.mount("/static", StaticFiles(directory=HERE / "static"))
    guard(app, local=door.open_house, refusal=lambda request: _refusal(request, pages))
    _errors(app, pages)
    _label_routes(app, pages, contest)
    if contest is not None:
        _contest_routes(app, pages, contest)
    _overview_routes(app, pages)
    ways_in(app, door, pages.message)
    _name_routes(app, pages, programmes)
    return app


def _label_routes(app: FastAPI, pages: _Pages, contest: Contest | None) -> None:
    """A question, what is said of it, and one's own labels."""
    desk = pages.desk

    @app.get("/")
    def question(request: Request, say: str = "") -> Response:
        visitor = pages.door.visitor(request)
        if visitor is None:
            return pages.page(request, "enter.html", "who")
        asked = desk.next(visitor.name)
        if asked is None:
            return pages.nothing(request) if contest is None else pages.invitation(request, contest.standing())
        return pages.question(request, visitor, asked, "undone" if say == "undone" else "")

    @app.post("/answer")
    def answer(
        request: Request,
        key: str = Form(""),
        choice: str = Form(""),
        reason: str = Form(""),
        seconds: str = Form(""),
        form: dict[str, str] = _FIELDS,
    ) -> Response:
        visitor = pages.known(request)
        mode = desk.asking.mode
        desk.answer(visitor.name, key, lambda count: _said(mode, count, choice, form, reason, seconds))
        return to()

    @app.post("/undo")
    def undo(request: Request) -> Response:
        return to("/?say=undone" if desk.undo(pages.known(request).name) else "/")

    @app.post("/revise/{label}")
    def revise(request: Request, label: Id) -> Response:
        desk.revise(pages.known(request).name, label)
        return to()

    @app.get("/text/{part}")
    def text(request: Request, part: str) -> Response:
        """A long text of the question that lies open, as plain text."""
        asked = desk.next(pages.known(request).name)
        if asked is None or not (part == "prompt" or 1 <= _whole(part) <= len(asked.answers)):
            raise HTTPException(404)
        whole = asked.prompt if part == "prompt" else asked.answers[int(part) - 1].text
        return PlainTextResponse(visible(whole))

    @app.get("/mine")
    def mine(request: Request) -> Response:
        visitor = pages.known(request)
        return pages.page(request, "mine.html", "mine", here="mine", labels=desk.said_by(visitor.name))


def _contest_routes(app: FastAPI, pages: _Pages, contest: Contest) -> None:
    """A person asks, and two models answer."""

    @app.post("/ask")
    def ask(request: Request, prompt: str = Form("")) -> Response:
        pages.known(request)
        asked = prompt.replace("\r\n", "\n").strip()
        try:
            if not asked:
                raise DataError(pages.words(request)["contest_empty"])
            contest.ask(asked)
        except DataError as error:
            return pages.invitation(request, contest.standing(), str(error), asked)
        return to()


def _overview_routes(app: FastAPI, pages: _Pages) -> None:
    """What the admin sees and does."""
    desk = pages.desk

    @app.get("/admin")
    def admin(request: Request) -> Response:
        visitor = pages.overseer(request)
        return pages.overview(request, visitor)

    @app.post("/decide")
    def decide(
        request: Request, question: Annotated[int, Form(ge=0, lt=2**31)], best: Annotated[str, Form()]
    ) -> Response:
        visitor = pages.overseer(request)
        count = desk.size(question)
        if best == "equal":
            ranks = [0] * count
        elif 0 <= _whole(best) < count:
            ranks = [int(i != int(best)) for i in range(count)]
        else:
            raise Refused("not_understood")
        desk.decide(visitor.name, question, ranks)
        return to("/admin")

    @app.get("/export.jsonl")
    def export(request: Request) -> Response:
        pages.overseer(request)
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in exported(desk.store, "labels"))
        return StreamingResponse((line.encode("utf-8", "replace") for line in lines), media_type="application/x-ndjson")


def _name_routes(app: FastAPI, pages: _Pages, programmes: Sequence[str]) -> None:
    """Coming in by one's name, and leaving."""
    door = pages.door

    @app.post("/enter")
    def enter(request: Request, name: str = Form("")) -> Response:
        if not door.open_house:
            raise Unauthorised
        proper = proper_name(name)
        if proper is None or proper in programmes:
            why = "name_wrong" if proper is None else "name_taken"
            return pages.page(request, "enter.html", "who", status=400, text=pages.words(request)[why])
        response = to()
        door.keep(request, response, door.token(proper))
        return response

    @app.post("/leave")
    def leave(request: Request) -> Response:
        response = to()
        if door.open_house:
            door.forget(request, response)
        return response


def _said(mode: Mode, count: int, choice: str, form: dict[str, str], reason: str, seconds: str) -> Said:
    """What a form says of ``count`` answers. The desk checks it against the question."""
    more: dict[str, Any] = {"reason": reason.replace("\r\n", "\n"), "seconds": _seconds(seconds)}
    if choice == "skip":
        return Said("skip", **more)
    if choice in ("equal", "both_bad"):
        return Said("both_bad" if choice == "both_bad" else "ranked", (0,) * count, **more)
    if choice == "submit" and mode in ("rank", "rate"):
        name = "place" if mode == "rank" else "rating"
        values = [form.get(f"{name}_{i}", "") for i in range(1, count + 1)]
        if not all(1 <= _whole(v) <= 99 for v in values):
            raise Refused("not_answered")
        numbers = [int(v) for v in values]
        if mode == "rate":
            return Said.rated(numbers, **more)
        return Said("ranked", ranked(numbers), **more)
    if mode in ("compare", "best") and 1 <= _whole(choice) <= max(count, 1):
        return Said("ranked", tuple(int(i != int(choice) - 1) for i in range(count)), **more)
    raise Refused("not_understood")


def _whole(text: str) -> int:
    """A whole number from a form, −1 where it is none, or larger than any that is asked for."""
    return int(text) if text.isdecimal() and len(text) < 10 else -1


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if 0 <= value < 1e6 else 0.0


class _Pages:
    """What pages have in common: the visitor, the language, the templates."""

    def __init__(self, desk: Desk, door: Door, look: Look):
        self.desk, self.door, self.look = desk, door, look
        self._agree, self._agree_again, self._agreeing = Share.of(0, 0), 0.0, threading.Lock()

    def known(self, request: Request) -> Visitor:
        """
        Raises:
            Unauthorised: nobody has said who they are.
        """
        visitor = self.door.visitor(request)
        if visitor is None:
            raise Unauthorised
        return visitor

    def overseer(self, request: Request) -> Visitor:
        visitor = self.known(request)
        if not visitor.admin:
            raise Unauthorised
        return visitor

    def words(self, request: Request) -> dict[str, str]:
        return phrases(language_of(request))

    def page(
        self, request: Request, template: str, heading: str, *, status: int = 200, here: str = "", **more: Any
    ) -> HTMLResponse:
        t = self.words(request)
        try:
            visitor = self.door.visitor(request)
        except Unauthorised:
            visitor = None
        said = {
            "t": t,
            "heading": t[heading],
            "here": here,
            "name": visitor.name if visitor else "",
            "admin": visitor is not None and visitor.admin,
            "may_leave": self.door.open_house,
            "short": _short,
            "said": lambda label: _said_in_words(label, t),
        }
        text = templates().get_template(template).render(said | more)
        return HTMLResponse(text.encode("utf-8", "replace"), status_code=status)

    def message(self, request: Request, text: str, status: int) -> HTMLResponse:
        return self.page(request, "message.html", "refused", status=status, text=text, warn=True)

    def nothing(self, request: Request) -> HTMLResponse:
        t = self.words(request)
        visitor = self.known(request)
        progress = self.desk.progress(visitor.name)
        which = "done" if progress.answered + progress.open else "empty"
        return self.page(
            request, "message.html", f"{which}_title", here="label", text=t[which], may_undo=progress.mine > 0
        )

    def invitation(self, request: Request, standing: Standing, text: str = "", asked: str = "") -> HTMLResponse:
        more = {"standing": standing, "text": text, "asked": asked}
        return self.page(request, "ask.html", "contest_title", here="label", status=400 if text else 200, **more)

    def question(self, request: Request, visitor: Visitor, asked: Question, notice: str) -> HTMLResponse:
        t = self.words(request)
        text = t[notice] if notice else ""
        if asked.before is not None:
            was = _said_in_words({"said": asked.before, "answers": [a.text for a in asked.answers]}, t)
            text = f"{t['again']} {t['again_was'].format(said=was)}"
        agreed = self.agreed()
        return self.page(
            request,
            "question.html",
            f"ask_{self.desk.asking.mode}",
            here="label",
            question=asked,
            before=asked.before,
            mode=self.desk.asking.mode,
            render=self.look.render,
            show=lambda body: shown(body, self.look.render),
            guidelines=self.look.guidelines,
            progress=self.desk.progress(visitor.name),
            agree=_share(agreed, t) if agreed.count else "",
            text=text,
            most=SHOWN,
            best_rating=BEST_RATING,
        )

    def agreed(self) -> Share:
        """How often two people say the same; what it was a few seconds ago is good enough for a page. One request works
        it out while others take the last one, and seldom enough to cost little where there are many labels."""
        begun = time.monotonic()
        if begun >= self._agree_again and self._agreeing.acquire(blocking=False):
            try:
                self._agree = agree(self.desk.store.labels(several=True))
                done = time.monotonic()
                self._agree_again = done + max(FRESH, 20 * (done - begun))
            finally:
                self._agreeing.release()
        return self._agree

    def overview(self, request: Request, visitor: Visitor) -> HTMLResponse:
        t = self.words(request)
        labels = self.desk.store.labels()
        found = agreement(labels)
        rows = [
            (t["agree"], _share(found.agree, t)),
            (t["alpha"], _figure(found.alpha, t)),
            (t["fleiss"], _figure(found.fleiss, t)),
            *((f"{t['cohen']}: {a}, {b}", _figure(k, t)) for (a, b), k in found.kappa.items()),
            (t["first"], _share(found.first, t)),
            (t["self"], _share(found.again, t)),
            (t["checks"], _share(found.attentive, t)),
        ]
        return self.page(
            request,
            "admin.html",
            "admin",
            here="admin",
            progress=self.desk.progress(visitor.name),
            people=[_person(name, labels, t) for name in sorted({label.annotator for label in labels})],
            agreement=rows,
            disagreements=self.desk.disagreements(),
        )


def _refusal(request: Request, pages: _Pages) -> Response | None:
    """The answer to a request that is not looked at any further."""
    t = pages.words(request)
    if request.method not in ("GET", "HEAD") and from_elsewhere(request):
        return pages.message(request, t["other_origin"], 403)
    length = request.headers.get("content-length", "")
    if request.method == "POST" and not 0 <= _whole(length) <= LARGEST_FORM:
        return pages.message(request, t["too_long"], 413)
    return None


def _errors(app: FastAPI, pages: _Pages) -> None:
    """Errors as pages, never as traces."""

    @app.exception_handler(Refused)
    def refused(request: Request, error: Refused) -> Response:
        return pages.message(request, pages.words(request)[error.reason], 409)

    @app.exception_handler(PlauditError)
    def failed(request: Request, error: PlauditError) -> Response:
        say(str(error))
        return PlainTextResponse(pages.words(request)["store_fails"], status_code=503)


def _short(text: str, most: int = 300) -> str:
    return visible(text if len(text) <= most else text[: most - 1] + "…")


def _said_in_words(label: dict[str, Any], t: dict[str, str]) -> str:
    said: Said = label["said"]
    if said.verdict != "ranked":
        return t[f"said_{said.verdict}"]
    if len(set(said.places)) == 1:
        return t["said_equal"]
    best = " / ".join(_short(a, 120) for a, p in zip(label["answers"], said.places, strict=True) if p == 0)
    return t["said_ranked"].format(best=best)


def _share(share: Share, t: dict[str, str]) -> str:
    if share.value is None:
        return t["not_yet"]
    return t["of"].format(
        share=f"{share.value:.0%}", low=f"{share.low:.0%}", high=f"{share.high:.0%}", count=share.count
    )


def _figure(value: float | None, t: dict[str, str]) -> str:
    return t["not_yet"] if value is None else f"{value:.2f}"


def _person(name: str, labels: Sequence[Label], t: dict[str, str]) -> dict[str, Any]:
    mine = [label for label in labels if label.annotator == name]
    said = [label for label in mine if label.kind == "label"]
    recent = (datetime.now(UTC) - timedelta(hours=1)).isoformat(timespec="seconds")
    answered = [label for label in said if not label.skipped]
    return {
        "name": name,
        "labels": len(answered),
        "skipped": len(said) - len(answered),
        "seconds": f"{statistics.median([label.seconds for label in answered]):.1f}" if answered else "–",
        "last_hour": sum(label.created >= recent for label in mine),
        "checks": _share(attentive(mine), t),
        "again": _share(asked_again(mine), t),
    }
