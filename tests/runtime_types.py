"""The checker that the import hook in conftest.py puts around every annotated function and record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintException

# An int is a float, as everywhere in Python.
_checked = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with its annotations checked at every call, as far as they can be (not bare Protocols and Self)."""
    try:
        return _checked(function)
    except BeartypeDecorHintException:
        return function
