"""What SFT and sampling read: demonstrations and prompts, from a file or from the reviews."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from plaudit.data import files, reviews
from plaudit.errors import DataError
from plaudit.tokenizer import Tokenizer
from plaudit.types import Demonstrations, Prompt


@dataclass(frozen=True)
class Counted:
    """How many rows were changed or left out on the way, for the log."""

    rows: int
    cut: int = 0
    dropped: int = 0


def demonstrations(source: str, tokenizer: Tokenizer, *, limit: int, max_length: int) -> tuple[Demonstrations, Counted]:
    """SFT rows: texts (all but the first token supervised) or prompts with completions (the completion supervised).

    Exactly one end token closes each row, and is supervised. A row cut at ``max_length`` has no end token; a row
    without a supervised token is dropped. Both are counted.

    Raises:
        DataError: a row is malformed, or none is left.
    """
    end = tokenizer.end_ids[0]
    ids: list[list[int]] = []
    masks: list[list[bool]] = []
    cut = dropped = 0
    for where, row in _demonstration_rows(source):
        if limit and len(ids) + dropped >= limit:
            break
        if "completion" in row or "prompt" in row:
            prompt = tokenizer.text_ids(files.text_column(where, row, "prompt", allow_empty=True))
            answer = tokenizer.answer_ids(files.text_column(where, row, "completion", allow_empty=True))
        elif "messages" in row:
            prompt, answer = _conversation(where, row["messages"], tokenizer)
        else:
            prompt, answer = [], tokenizer.text_ids(files.text_column(where, row, "text"))
        tokens = [*prompt, *answer, end]
        supervised = [False] * len(prompt) + [True] * (len(tokens) - len(prompt))
        supervised[0] = False
        cut += len(tokens) > max_length
        tokens, supervised = tokens[:max_length], supervised[:max_length]
        if any(supervised):
            ids.append(tokens)
            masks.append(supervised)
        else:
            dropped += 1
    if not ids:
        raise DataError(f"{source}: no row has a token to learn from within max_length={max_length}; raise max_length")
    return Demonstrations.pack(ids, masks), Counted(len(ids), cut, dropped)


def _demonstration_rows(source: str):
    if source.startswith("reviews/"):
        part = source.removeprefix("reviews/")
        if part != "sft":
            raise DataError(f"{source}: for demonstrations there is reviews/sft")
        return ((f"{source}, row {i}", {"text": r.text}) for i, r in enumerate(reviews.sentences("train"), 1))
    return files.rows(source)


def _conversation(where: str, value: Any, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    messages = files.messages(where, "messages", value)
    if messages[-1]["role"] != "assistant":
        raise DataError(f"{where}: the last message should be the assistant's, found {messages[-1]['role']!r}")
    prompt = tokenizer.chat_prompt(messages[:-1])
    return list(prompt.ids), tokenizer.answer_ids(messages[-1]["content"])


def prompts(
    source: str, tokenizer: Tokenizer, *, limit: int = 0, max_tokens: int = 0, long: str = "error"
) -> tuple[list[Prompt], Counted]:
    """Prompts from a column ``prompt`` (text or messages) or ``messages``; other columns go along.

    Raises:
        DataError: a row is malformed or empty, there is none, or one is longer than ``max_tokens`` while ``long`` is
            "error" (with "keep_end" its end is kept, and it is counted).
    """
    found: list[Prompt] = []
    cut = 0
    for where, row in _prompt_rows(source):
        if limit and len(found) == limit:
            break
        column = "messages" if "messages" in row else "prompt"
        columns = {k: v for k, v in row.items() if k != column}
        if column == "messages" or isinstance(row.get(column), list):
            prompt = tokenizer.chat_prompt(files.messages(where, column, row[column]), columns)
        else:
            prompt = tokenizer.prompt(files.text_column(where, row, column), columns)
        if max_tokens and len(prompt.ids) > max_tokens:
            if long == "error":
                raise DataError(
                    f"{where}: the prompt has {len(prompt.ids)} tokens, the limit is {max_tokens}; "
                    "raise max_prompt_tokens, or set long_prompts=keep_end"
                )
            ids = prompt.ids[-max_tokens:]
            prompt, cut = Prompt(tokenizer.decode(ids), ids, columns), cut + 1
        found.append(prompt)
    if not found:
        raise DataError(f"{source}: no prompts in it")
    return found, Counted(len(found), cut)


def count_prompts(source: str, most: int) -> int:
    """How many prompts there are, counted up to ``most``; what is in them is not looked at.

    Raises:
        DataError: the source cannot be read.
    """
    return sum(1 for _ in itertools.islice(_prompt_rows(source), most))


TINY_PROMPTS = tuple(
    f"{quality} {thing}"
    for quality in ("the", "one", "two", "old", "new", "red", "blue", "warm", "cold", "slow")
    for thing in ("day", "sea", "tree", "bird", "road")
)


def _prompt_rows(source: str):
    if source == "tiny/prompts":
        return ((f"{source}, row {i}", {"prompt": text}) for i, text in enumerate(TINY_PROMPTS, 1))
    if source.startswith("reviews/"):
        part = source.removeprefix("reviews/")
        if part not in ("prompts", "evaluation", "validation"):
            raise DataError(
                f"{source}: for prompts there are reviews/prompts, reviews/evaluation and reviews/validation"
            )
        return ((f"{source}, row {i}", {"prompt": text}) for i, text in enumerate(reviews.openings(part), 1))
    return files.rows(source)
