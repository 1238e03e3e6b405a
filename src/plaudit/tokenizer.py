"""One path from text to ids and back, for every stage.

The tokenizer's own special tokens (a BOS where the model has one) are added once, to the beginning. An answer is
encoded by itself, so that no token spans the border between prompt and answer, and gets exactly one end token.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from plaudit.errors import DataError, ModelError, first_line
from plaudit.types import Comparison, Prompt, Rollout


class Tokenizer:
    """A model's tokenizer with its end tokens."""

    def __init__(self, inner: PreTrainedTokenizerBase, end_ids: Sequence[int]):
        self.inner, self.end_ids = inner, tuple(end_ids)
        if not self.end_ids:
            raise ModelError("this model names no end token (eos_token_id); set one in its generation_config.json")

    @classmethod
    def load(cls, folder: str) -> Tokenizer:
        """The tokenizer of a model folder or hub id; several end tokens are all recognised.

        Raises:
            ModelError: there is no tokenizer, or no end token.
        """
        try:
            inner = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"{folder}: no usable tokenizer ({first_line(error)})") from None
        try:
            ends = GenerationConfig.from_pretrained(folder).eos_token_id
        except (OSError, ValueError):
            ends = None
        ends = ends if ends is not None else inner.eos_token_id
        known = [ends] if isinstance(ends, int) else list(ends or [])
        # The tokenizer's own end token closes a turn of its template, so it is the one that is taught.
        return cls(inner, sorted(known, key=lambda end: end != inner.eos_token_id))

    @property
    def pad_id(self) -> int:
        """An id for padding that is no end token: exported reward models find their last token by it."""
        candidates = [self.inner.pad_token_id, self.inner.unk_token_id, *range(len(self.inner))]
        return next(i for i in candidates if i is not None and i not in self.end_ids)

    def text_ids(self, text: str) -> list[int]:
        """A text from its beginning, with the model's own BOS if it has one; without an end token."""
        # A text that a chat template has written begins with its BOS already.
        begun = bool(self.inner.bos_token) and text.startswith(self.inner.bos_token)
        ids = self.inner(text, add_special_tokens=not begun, verbose=False)["input_ids"]
        # Some tokenizers close every text with their end token; whether a text ended is recorded elsewhere.
        while ids and ids[-1] in self.end_ids:
            ids.pop()
        return ids

    def answer_ids(self, text: str) -> list[int]:
        """An answer after its prompt: no BOS, no end token."""
        ids = self.inner(text, add_special_tokens=False, verbose=False)["input_ids"]
        while ids and ids[-1] in self.end_ids:
            ids.pop()
        return ids

    def scored_ids(self, prompt: Sequence[int], answer: str) -> list[int]:
        """What a reward model reads: an answer after its prompt (a text of its own where there is none), no end token.

        An empty answer to no prompt has no token to read a score at; the end token stands for it.
        """
        encode = self.answer_ids if prompt else self.text_ids
        return [*prompt, *encode(answer)] or [self.end_ids[0]]

    def prompt(self, text: str, columns: dict[str, Any] | None = None) -> Prompt:
        """A prompt from raw text.

        Raises:
            DataError: the text has no token, so there is no state to choose the first word from.
        """
        ids = self.text_ids(text)
        if not ids:
            raise DataError(f"the prompt {text!r} is empty; the policy needs at least one token to start from")
        return Prompt(text, tuple(ids), columns or {})

    def chat_prompt(self, messages: Sequence[dict[str, str]], columns: dict[str, Any] | None = None) -> Prompt:
        """A prompt from a conversation, through the model's chat template, opened for the assistant.

        Raises:
            ModelError: the tokenizer has no chat template.
        """
        if not self.inner.chat_template:
            raise ModelError("this tokenizer has no chat template, which messages need; give plain prompts instead")
        text = self.inner.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        # The template writes the special tokens itself; adding the tokenizer's own would double the BOS.
        ids = self.inner(text, add_special_tokens=False)["input_ids"]
        return Prompt(text, tuple(ids), columns or {})

    def asked_ids(self, comparison: Comparison) -> list[int]:
        """A comparison's prompt: through the chat template where it was a conversation, empty where there is none.

        Raises:
            ModelError: it was a conversation, and the tokenizer has no chat template.
        """
        if comparison.messages:
            return list(self.chat_prompt(comparison.messages).ids)
        return self.text_ids(comparison.prompt) if comparison.prompt else []

    def decode(self, ids: Sequence[int]) -> str:
        return self.inner.decode(list(ids), skip_special_tokens=True)

    def token(self, id: int) -> str:
        """One token as text; a special one by its name."""
        return self.decode([id]) or str(self.inner.convert_ids_to_tokens(id))

    def responses(self, rollout: Rollout) -> list[str]:
        """The text of every answer, without its end token."""
        return [self._continuation(rollout.prompts[i].ids, rollout.response_ids(i)) for i in range(len(rollout))]

    def _continuation(self, prompt: Sequence[int], answer: Sequence[int]) -> str:
        """The text that ``answer`` adds to ``prompt``. Decoded alone, some tokenizers drop its first space."""
        before, whole = self.decode(prompt), self.decode([*prompt, *answer])
        return whole[len(before) :] if whole.startswith(before) else self.decode(answer)

    def fingerprint(self) -> str:
        """Equal for tokenizers with the same vocabulary."""
        vocabulary = sorted(self.inner.get_vocab().items())
        return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()
