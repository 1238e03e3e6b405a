"""What is done with a preference store from the command line: looking, exchanging, keeping."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from plaudit.data import comparisons
from plaudit.preferences import exchange
from plaudit.preferences.agreement import Share, agreement
from plaudit.preferences.store import PreferenceStore
from plaudit.preferences.tables import Database


def store_import(store: str, file: str, *, annotator: str = "people", checks: bool = False) -> dict[str, int]:
    """Adds a file's comparisons and labels to a store, which is made where there is none.

    Raises:
        DataError: a row is malformed (nothing is added), or the store cannot be used.
    """
    judged = list(comparisons.read(file, annotator))
    with closing(PreferenceStore(store, create=True)) as opened:
        return exchange.imported(opened, judged, checks=checks)


def store_export(store: str, file: str, form: exchange.Form = "labels") -> int:
    """Writes a store's labels (or preferred pairs) to a file; returns the number of rows."""
    with closing(PreferenceStore(store)) as opened:
        return exchange.write(opened, file, form)


def store_backup(store: str, file: str) -> None:
    with closing(PreferenceStore(store)) as opened:
        opened.backup(file)


def store_forget(store: str, annotator: str) -> int:
    """Deletes everything a person said; returns how many labels that was."""
    with closing(PreferenceStore(store)) as opened:
        return opened.forget(annotator)


def store_upgrade(store: str) -> None:
    """Brings a store of an older Plaudit to today's schema; a file's copy is kept beside it."""
    Database(store, upgrade=True).close()


def store_show(store: str) -> dict[str, Any]:
    """Counts, and how far people agree."""
    with closing(PreferenceStore(store)) as opened:
        labels = opened.labels()
        counts = opened.counts()
    found = agreement(labels)
    shown: dict[str, Any] = dict(counts)
    for name, share in (
        ("two people agree", found.agree),
        ("the answer shown first wins", found.first),
        ("same when asked again", found.again),
        ("attention checks passed", found.attentive),
    ):
        if share.count:
            shown[name] = _share(share)
    if found.alpha is not None:
        shown["Krippendorff's alpha"] = f"{found.alpha:.2f}"
    return shown


def _share(share: Share) -> str:
    return f"{share.value:.1%} ({share.low:.1%} to {share.high:.1%} of {share.count})"
