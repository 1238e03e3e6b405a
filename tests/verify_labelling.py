"""The labelling page against its promises: `make verify-labelling`, about 15 minutes.

Not part of the test suite. The real server runs as a process of its own on two cores, beside its clients; each client
is a process with one connection that stays open. Prints each figure beside its limit; exit status 1 if one is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import multiprocessing
import os
import random
import re
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy import Connection, func, select

from plaudit.preferences.desk import Asking, Desk
from plaudit.preferences.store import COUNTED, PreferenceStore
from plaudit.preferences.tables import preferences, questions
from plaudit.types import Answer, Comparison

PEOPLE, EACH = 8, 500
ANSWER_MS = 100.0
KILLS = 50
MANY = 100_000
PAGE_MS = 50.0
PAGE_BYTES = 150_000
#: seconds a person who thinks takes, at least and at most
THINK = (0.05, 0.2)


@dataclass
class Report:
    """The figures so far; ``missed``: names of those beyond their limit."""

    missed: list[str] = field(default_factory=list)

    def part(self, title: str) -> None:
        print(f"\n{title} (load {' '.join(f'{x:.1f}' for x in os.getloadavg())})", flush=True)

    def figure(self, name: str, value: float, limit: float | None = None, *, exactly: bool = False) -> None:
        good = limit is None or (value == limit if exactly else value < limit)
        beside = "" if limit is None else f"{'=' if exactly else '<'} {limit:g}"
        print(f"  {name:64} {value:12,.1f}  {beside:9} {'' if good else 'MISSED'}", flush=True)
        if not good:
            self.missed.append(name)

    def times(self, name: str, seconds: Sequence[float], limit: float, *, median: bool = False) -> None:
        """In milliseconds; the limit is for the 95th percentile and, where asked, the median."""
        cut = statistics.quantiles(seconds, n=20)
        self.figure(f"{name}, median ms", 1e3 * statistics.median(seconds), limit if median else None)
        self.figure(f"{name}, 95th percentile ms", 1e3 * cut[-1], limit)
        self.figure(f"{name}, longest ms", 1e3 * max(seconds))


class Server:
    """``plaudit label`` as a process."""

    def __init__(self, store: str, *keys: str):
        with socket.socket() as any_free:
            any_free.bind(("127.0.0.1", 0))
            self.port = any_free.getsockname()[1]
        self._command = [sys.executable, "-m", "plaudit", "label", store, *keys, "--port", str(self.port)]
        self.start()

    def start(self) -> None:
        begun = time.perf_counter()
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                break
            except OSError:
                if self._process.poll() is not None:
                    raise SystemExit(f"the server did not start: {' '.join(self._command)}") from None
                time.sleep(0.02)
        self.seconds_to_start = time.perf_counter() - begun

    def kill(self) -> None:
        """As the power would: without a chance to end anything."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class Browser:
    """One person's connection, kept open, with their name."""

    def __init__(self, port: int, name: str):
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._cookie = ""
        self.post("/enter", {"name": name})

    def _send(self, method: str, path: str, body: bytes | None = None) -> tuple[http.client.HTTPResponse, bytes]:
        headers = {"Cookie": self._cookie} if self._cookie else {}
        if body is not None:
            headers["Content-Type"] = "application/x-www-form-urlencoded"
        self.connection.request(method, path, body, headers)
        response = self.connection.getresponse()
        text = response.read()
        if cookie := response.getheader("set-cookie"):
            self._cookie = cookie.split(";")[0]
        return response, text

    def get(self, path: str) -> bytes:
        response, text = self._send("GET", path)
        if response.status != 200:
            raise RuntimeError(f"GET {path}: {response.status}")
        return text

    def post(self, path: str, fields: dict[str, str]) -> None:
        """Returns where the server has acknowledged what was sent, by its redirect."""
        response, _ = self._send("POST", path, urllib.parse.urlencode(fields).encode())
        if response.status != 303:
            raise RuntimeError(f"POST {path}: {response.status}")

    def asked(self) -> str:
        """Reads the question; returns its key."""
        return key_of(self.get("/"))

    def answer(self, key: str) -> None:
        choice = random.choice(("1", "2", "1", "2", "equal", "both_bad"))
        self.post("/answer", {"key": key, "choice": choice, "reason": "", "seconds": "1.5"})


def key_of(page: bytes) -> str:
    found = re.search(rb'name="key" value="(\w+)"', page)
    if found is None:
        raise RuntimeError("no question is left")
    return found[1].decode()


@dataclass(frozen=True)
class Answered:
    """An acknowledged answer. ``posted``: seconds until its redirect; ``read``: seconds the next question took then."""

    key: str
    posted: float
    read: float


def label(port: int, name: str, count: int, think: tuple[float, float]) -> list[Answered]:
    """One person labels; what was acknowledged, in order."""
    person, done = Browser(port, name), []
    key = person.asked()
    for _ in range(count):
        time.sleep(random.uniform(*think))
        begun = time.perf_counter()
        person.answer(key)
        between = time.perf_counter()
        # the last one is followed by a page like the others, question or not
        page = person.get("/")
        done.append(Answered(key, between - begun, time.perf_counter() - between))
        key = key_of(page) if b'name="key"' in page else ""
    return done


def people_label(port: int, think: tuple[float, float]) -> dict[str, list[Answered]]:
    names = [f"person {i}" for i in range(PEOPLE)]
    with multiprocessing.get_context("fork").Pool(PEOPLE) as pool:
        return dict(zip(names, pool.starmap(label, [(port, n, EACH, think) for n in names], 1), strict=True))


# --- stores -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def places(postgres: str) -> Iterator[dict[str, str]]:
    """Where a fresh store can be made: database -> place. In PostgreSQL that is a schema of its own, dropped after."""
    with tempfile.TemporaryDirectory(prefix="plaudit-verify-") as folder:
        found = {"SQLite": str(Path(folder) / "s.sqlite")}
        if not postgres:
            yield found
            return
        import psycopg

        schema = f"plaudit_verify_{secrets.token_hex(4)}"
        with psycopg.connect(postgres, autocommit=True) as db:
            db.execute(f"CREATE SCHEMA {schema}")
            try:
                mark = "&" if "?" in postgres else "?"
                yield found | {"PostgreSQL": f"{postgres}{mark}options=-csearch_path%3D{schema}"}
            finally:
                db.execute(f"DROP SCHEMA {schema} CASCADE")


def filled(place: str, count: int) -> PreferenceStore:
    store = PreferenceStore(place, create=True)
    store.add(
        [
            Comparison(0, f"prompt {i}: what do you think?", (Answer(f"I like {i}."), Answer(f"{i} is dull.")), {})
            for i in range(count)
        ]
    )
    return store


def keys_in(store: PreferenceStore) -> list[str]:
    with store.database.read() as db:
        return list(db.execute(select(preferences.c.key).where(preferences.c.key.is_not(None))).scalars())


def miscounted(db: Connection) -> int:
    """Questions whose count of labels is not the number of labels that stand."""
    counts = dict(
        db.execute(
            select(preferences.c.question_id, func.count())
            .where(COUNTED, preferences.c.withdrawn.is_(None))
            .group_by(preferences.c.question_id)
        ).all()
    )
    stored = db.execute(select(questions.c.id, questions.c.labels))
    return sum(labels != counts.get(question, 0) for question, labels in stored)


def consistency(report: Report, store: PreferenceStore, acknowledged: Sequence[str], overlap: int) -> None:
    """Whether every acknowledged label is in the store exactly once, and nothing else is wrong with it."""
    there = Counter(keys_in(store))
    report.figure("acknowledged labels", len(acknowledged))
    report.figure("acknowledged labels lost", sum(key not in there for key in acknowledged), 0, exactly=True)
    report.figure("labels there twice", sum(n - 1 for n in there.values()), 0, exactly=True)
    with store.database.read() as db:
        same = select(preferences.c.annotator, preferences.c.question_id, preferences.c.kind).group_by(
            preferences.c.annotator, preferences.c.question_id, preferences.c.kind
        )
        twice = db.execute(select(func.count()).select_from(same.having(func.count() > 1).subquery())).scalar_one()
        beyond = select(func.count()).select_from(questions).where(questions.c.labels > overlap)
        report.figure("questions asked of one person twice", twice, 0, exactly=True)
        report.figure("questions answered by too many", db.execute(beyond).scalar_one(), 0, exactly=True)
        report.figure("questions with a wrong count", miscounted(db), 0, exactly=True)


# --- the parts --------------------------------------------------------------------------------------------------------


def clients(report: Report, database: str, place: str, think: tuple[float, float], manner: str) -> None:
    report.part(f"{database}: {PEOPLE} people label {EACH} questions each at once, {manner}")
    overlap = 2
    # enough for all, though nobody answers a question twice
    store = filled(place, PEOPLE * EACH * 5 // 4 // overlap)
    with Server(place, f"overlap={overlap}") as server:
        begun = time.perf_counter()
        said = people_label(server.port, think)
        taken = time.perf_counter() - begun
    answers = [a for each in said.values() for a in each]
    report.figure("answers a second", len(answers) / taken)
    report.times("an answer", [a.posted for a in answers], ANSWER_MS)
    report.times("an answer and the next question", [a.posted + a.read for a in answers], ANSWER_MS)
    consistency(report, store, [a.key for a in answers], overlap)
    counts = store.counts()
    wrong = sum(counts.get(f"by {name}", 0) != EACH for name in said)
    report.figure(f"people without exactly {EACH} labels", wrong, 0, exactly=True)
    store.close()


def crashes(report: Report, database: str, place: str) -> None:
    report.part(f"{database}: the server is killed {KILLS} times while 4 people label")
    overlap = 2
    store = filled(place, MANY // 10)
    acknowledged: list[str] = []
    resent = 0

    def person(port: int, name: str, unsure: dict[str, str]) -> None:
        """Labels until the server is gone. What was not acknowledged then is sent again first, as a person would."""
        with contextlib.suppress(OSError, http.client.HTTPException):
            browser = Browser(port, name)
            while True:
                key = unsure.pop(name, "") or browser.asked()
                unsure[name] = key
                browser.answer(key)
                del unsure[name]
                acknowledged.append(key)

    unsure: dict[str, str] = {}
    with Server(place, f"overlap={overlap}") as server:
        for round_ in range(KILLS + 1):
            if round_:
                server.start()
            before = len(acknowledged)
            resent += len(unsure)
            people = [threading.Thread(target=person, args=(server.port, f"person {i}", unsure)) for i in range(4)]
            for thread in people:
                thread.start()
            while len(acknowledged) == before:
                time.sleep(0.001)
            time.sleep(random.uniform(0, 0.5))
            server.kill()
            for thread in people:
                thread.join()
    report.figure("answers cut off by a kill and sent again", resent)
    consistency(report, store, acknowledged, overlap)
    unknown = set(keys_in(store)) - set(acknowledged) - set(unsure.values())
    report.figure("labels that nobody sent", len(unknown), 0, exactly=True)
    store.close()


def size(report: Report, database: str, place: str) -> None:
    report.part(f"{database}: {MANY:,} comparisons")
    begun = time.perf_counter()
    store = filled(place, MANY)
    report.figure("storing them, seconds", time.perf_counter() - begun)
    with Server(place, "overlap=2") as server:
        report.figure("the page's start, seconds", server.seconds_to_start)

        def next_question(when: str, name: str, count: int = 200) -> None:
            said = label(server.port, name, count, (0, 0))
            report.times(f"the next question, {when}", [a.read for a in said], PAGE_MS, median=True)

        next_question("no label yet", "ann")
        label(server.port, "ann", 1000 - 200, (0, 0))
        next_question("after 1,000 labels of the same person", "ann")
        next_question("after 1,000 labels of another", "ben")
        with multiprocessing.get_context("fork").Pool(1) as pool:
            # all the time that is measured, somebody else labels or reads
            other = pool.apply_async(label, (server.port, "eve", 400, (0, 0)))
            next_question("while another person labels", "ann")
            other.get()
        admin, taken = Browser(server.port, "ann"), []
        for _ in range(10):
            begun = time.perf_counter()
            admin.get("/admin")
            taken.append(time.perf_counter() - begun)
        report.figure("the overview, the first time, ms", 1e3 * taken[0])
        report.figure("the overview, median ms", 1e3 * statistics.median(taken))
    desk = Desk(store, Asking(overlap=2))
    begun = time.perf_counter()
    asked = list(desk.open_questions())
    report.figure("reading all open questions, seconds", time.perf_counter() - begun)
    scores = {q: [[random.gauss(0, 1) for _ in texts] for _ in range(3)] for q, _, texts in asked}
    begun = time.perf_counter()
    desk.ask_first(scores)
    report.figure("ordering them by an ensemble of 3, without its scores, seconds", time.perf_counter() - begun)
    begun = time.perf_counter()
    desk.ask_at_random()
    report.figure("taking that order back, seconds", time.perf_counter() - begun)
    begun = time.perf_counter()
    desk.ask_at_random()
    report.figure("where there is nothing to take back, seconds", time.perf_counter() - begun)
    store.close()


def weight(report: Report, database: str, place: str) -> None:
    report.part("The first page, as it goes over the wire")
    store = PreferenceStore(place, create=True)
    store.add([Comparison(0, "word " * 100, (Answer("word " * 300), Answer("another " * 300)), {})])
    store.close()
    with Server(place) as server:
        browser = Browser(server.port, "ann")
        page, body = browser._send("GET", "/")
        wanted = [urllib.parse.urljoin("/", x) for x in re.findall(r'(?:src|href)="([^"]+)"', body.decode())]
        files = [x for x in wanted if x.startswith("/static/")]
        received = 0
        elsewhere = 0
        for path in ["/", *files]:
            response, text = browser._send("GET", path)
            head = sum(len(f"{name}: {value}\r\n") for name, value in response.getheaders())
            received += len(f"HTTP/1.1 {response.status} {response.reason}\r\n\r\n") + head + len(text)
            elsewhere += len(re.findall(rb"https?://|[\"'(]//|@import|url\((?!data:)", text))
        report.figure("requests for it", 1 + len(files))
        report.figure("bytes with headers", received, PAGE_BYTES)
        report.figure("addresses of other hosts in it", elsewhere, 0, exactly=True)
        policy = page.getheader("content-security-policy") or ""
        hosts = [x for x in re.split(r"[ ;]+", policy) if "." in x or "*" in x or x in ("http:", "https:")]
        open_ = len(hosts) + ("default-src 'none'" not in policy)
        report.figure("other hosts that its policy allows", open_, 0, exactly=True)


PARTS = ("clients", "crashes", "size", "weight")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--postgres", default="", metavar="URL", help="a database to make schemas of our own in")
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts, with commas: {','.join(PARTS)}")
    arguments = parser.parse_args()
    only = arguments.only.split(",")
    if unknown := set(only) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    # ended from outside, it still stops its server and drops its schemas
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    report = Report()

    def each(part, *more: object) -> None:
        with places(arguments.postgres) as found:
            for database, place in found.items():
                part(report, database, place, *more)

    if "clients" in only:
        each(clients, (0.0, 0.0), "back to back")
        each(clients, THINK, f"thinking {1e3 * THINK[0]:.0f} to {1e3 * THINK[1]:.0f} ms before each")
    if "crashes" in only:
        each(crashes)
    if "size" in only:
        each(size)
    if "weight" in only:
        with places("") as found:
            weight(report, *next(iter(found.items())))
    print()
    if not arguments.postgres:
        print("PostgreSQL WAS NOT MEASURED: give a database with --postgres URL")
    print("all limits kept" if not report.missed else "missed:\n" + "\n".join(f"  {name}" for name in report.missed))
    return 1 if report.missed else 0


if __name__ == "__main__":
    sys.exit(main())
