"""A plain Python function as a reward source: ``(prompts, responses, **columns) -> list of numbers``."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from plaudit.errors import ConfigError, PlauditError, first_line
from plaudit.tokenizer import Tokenizer
from plaudit.types import Rollout


class RewardError(PlauditError):
    """A reward function that raised, or returned something that is no score; names the function and the row."""


class FunctionReward:
    """Calls ``function`` with the texts of prompts and answers, and with the prompts' other columns as lists.

    A function that takes no ``**columns`` is given those it names.
    """

    def __init__(
        self,
        function: Callable[..., Sequence[float]],
        tokenizer: Tokenizer,
        name: str | None = None,
        kind: str = "reward function",
    ):
        self.function, self.tokenizer = function, tokenizer
        self.name = f"{kind} {name or getattr(function, '__name__', type(function).__name__)}"
        parameters = inspect.signature(function).parameters
        self.takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self.takes = set(parameters)

    def score(self, rollout: Rollout) -> Float[Tensor, " B"]:
        """The scores.

        Raises:
            RewardError: the function raised, returned another number of values, or one that is not a finite number.
        """
        names = {name for prompt in rollout.prompts for name in prompt.columns}
        columns = {
            name: [prompt.columns.get(name) for prompt in rollout.prompts]
            for name in sorted(names)
            if self.takes_all or name in self.takes
        }
        prompts, responses = [prompt.text for prompt in rollout.prompts], self.tokenizer.responses(rollout)
        try:
            scores = listed(self.function(prompts, responses, **columns))
        except (Exception, SystemExit) as error:
            where = self._row_at_fault(prompts, responses, columns)
            what = f"{type(error).__name__}{where}: {first_line(error)}"
            raise RewardError(f"{self.name} raised {what}") from error
        return torch.tensor(checked(scores, len(rollout), self.name))

    def _row_at_fault(self, prompts: list[str], responses: list[str], columns: dict[str, list[Any]]) -> str:
        """The first row on which the function fails by itself, for the message."""
        for row, response in enumerate(responses):
            try:
                list(self.function([prompts[row]], [response], **{k: [v[row]] for k, v in columns.items()}))
            except (Exception, SystemExit):
                return f" at row {row} ({prompts[row][:40]!r})"
        return ""


def listed(returned: Any) -> Any:
    """What a function returned, as a list; what is no sequence stays as it is, for :func:`checked` to refuse."""
    single = isinstance(returned, dict | str | bytes) or not hasattr(returned, "__iter__")
    return returned if single else list(returned)


def checked(scores: Any, count: int, who: str) -> list[float]:
    """``scores`` (see :func:`listed`) as floats, if there are ``count`` of them and all are finite.

    Raises:
        RewardError: otherwise, naming who returned them and the row.
    """
    if not isinstance(scores, list):
        raise RewardError(f"{who} returned {type(scores).__name__} for {count} rows; return one number a row")
    if len(scores) != count:
        raise RewardError(f"{who} returned {len(scores)} values for {count} rows; return one number a row")
    for row, score in enumerate(scores):
        try:
            # float32 is what the score becomes: 1e39 is finite in Python and infinite there
            finite = math.isfinite(float(score)) and abs(float(score)) <= torch.finfo(torch.float32).max
        except Exception:  # whatever an object of the user's raises when it is asked for its number
            finite = False
        if not finite or isinstance(score, str):
            raise RewardError(f"{who} returned {score!r} for row {row}; return a finite number")
    return [float(score) for score in scores]


def guarded(function: Callable[..., Any], who: str) -> Callable[..., Any]:
    """``function``, whose failures name it.

    Raises:
        RewardError: it raised, or tried to end the process.
    """

    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except PlauditError:
            raise
        except (Exception, SystemExit) as error:
            raise RewardError(f"{who} raised {type(error).__name__}: {first_line(error)}") from error

    return called


def load_function(spec: str) -> Callable[..., Any]:
    """The function named by ``file.py:name`` or ``module:name``.

    Raises:
        ConfigError: there is no such file, module or function.
    """
    if not is_function(spec):
        raise ConfigError(f"{spec!r} names no function; write file.py:name or module:name")
    place, _, name = spec.rpartition(":")
    try:
        if place.endswith(".py"):
            if not Path(place).exists():
                raise ConfigError(f"{spec}: no such file {place}")
            found = importlib.util.spec_from_file_location(Path(place).stem, place)
            assert found is not None and found.loader is not None
            module = importlib.util.module_from_spec(found)
            found.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        # whatever the user's own file raises while it is read is a mistake of that file
        raise ConfigError(f"{spec}: cannot be imported: {type(error).__name__}: {first_line(error)}") from None
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{spec}: {place} has no function {name!r}")
    return function


def is_function(spec: str) -> bool:
    """Whether a configuration's reward names a function rather than a model folder."""
    place, colon, name = spec.rpartition(":")
    return bool(colon and place and name.isidentifier() and "\\" not in name and len(place) > 1)


def vowels(prompts: Sequence[str], responses: Sequence[str], **_columns: Any) -> list[float]:
    """Share of an answer's characters that are vowels: the tiny recipe's reward."""
    return [sum(c in "aeiou" for c in r.lower()) / max(1, len(r)) for r in responses]
