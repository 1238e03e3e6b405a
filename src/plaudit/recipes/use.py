"""Using a model: scores for a file, a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plaudit import device as devices
from plaudit.algorithms.ppo import stream
from plaudit.config import ChatConfig, EngineConfig, SamplingConfig, ScoreConfig
from plaudit.data import files
from plaudit.errors import DataError, ModelError
from plaudit.learner import Scorer
from plaudit.models.load import context_length, load_language_model, load_reward_model
from plaudit.models.network import Network, text_scores
from plaudit.models.stack import WholeStack
from plaudit.recipes.common import engine_for, fits
from plaudit.types import Answer, Prompt, Sequences


def score(model: str, file: str, config: ScoreConfig) -> list[dict[str, Any]]:
    """The rows of ``file`` (a column text, or prompt and response) with a reward model's score added to each."""
    scorer = TextScorer(model, config.device)
    rows, texts, places = [], [], []
    for where, row in files.rows(file):
        if "response" in row:
            prompt = files.text_column(where, row, "prompt", allow_empty=True)
            answer = files.text_column(where, row, "response", allow_empty=True)
        else:
            prompt, answer = "", files.text_column(where, row, "text")
        rows.append(row)
        places.append(where)
        texts.append((prompt, answer))
    scores = scorer(texts, places)
    return [row | {"score": value} for row, value in zip(rows, scores, strict=True)]


class TextScorer:
    """A reward model's scores of (prompt, answer) texts."""

    def __init__(self, model: str, device: str):
        self._device = devices.pick(device)
        loaded, head, self._tokenizer = load_reward_model(model)
        self._context = context_length(loaded)
        self._network = Network(WholeStack(loaded.base_model), scalar=head).to(self._device)

    def __call__(self, texts: Sequence[tuple[str, str]], places: Sequence[str]) -> list[float]:
        """One score a text; ``places`` name them in messages.

        Raises:
            DataError: a text is longer than the model's context.
        """
        encode = self._tokenizer
        ids = [encode.scored_ids(encode.text_ids(prompt) if prompt else [], answer) for prompt, answer in texts]
        for where, tokens in zip(places, ids, strict=True):
            if self._context and len(tokens) > self._context:
                raise DataError(
                    f"{where}: {len(tokens)} tokens exceed the model's context of {self._context}; shorten the text"
                )
        packed = Sequences.pack(ids, [[True] * len(i) for i in ids])
        return Scorer(self._network, self._device).evaluate(packed, text_scores).tolist()


class Answerer:
    """A model that answers one at a time, through its chat template (or raw: it goes on from the text as it stands)."""

    def __init__(self, model: str, sampling: SamplingConfig, device: str, raw: bool):
        """
        Raises:
            ModelError: it is missing or unfit, or has no chat template and is not to go on raw.
        """
        place = devices.pick(device)
        loaded, self.tokenizer = load_language_model(model)
        if not raw and not self.tokenizer.inner.chat_template:
            raise ModelError(
                f"{model}: its tokenizer has no chat template; use raw=true to complete texts as they stand"
            )
        self.sampling, self.raw, self.model = sampling, raw, loaded.to(place)
        self.engine = engine_for(EngineConfig(), self.model, self.tokenizer, place)

    def prompt(self, messages: Sequence[dict[str, str]]) -> Prompt:
        """A conversation as the model reads it (raw: its last text alone)."""
        return self.tokenizer.prompt(messages[-1]["content"]) if self.raw else self.tokenizer.chat_prompt(messages)

    def answer(self, prompt: Prompt, seed: int) -> Answer:
        """
        Raises:
            DataError: the prompt does not fit the model.
        """
        fits(self.model, [prompt], self.sampling)
        rollout = self.engine.generate([prompt], self.sampling, seed=seed)
        # a stop string is no end token
        ended = bool(rollout.terminated[0] & ~rollout.stopped[0])
        return Answer(self.tokenizer.responses(rollout)[0], ended)


class Chat:
    """A conversation with a model."""

    def __init__(self, model: str, config: ChatConfig):
        self.answerer = Answerer(model, config.sampling, config.device, config.raw)
        self.config = config
        self.messages: list[dict[str, str]] = []

    def answer(self, text: str) -> str:
        """The model's answer to ``text``, given what was said before (raw: to this text alone)."""
        said = {"role": "user", "content": text}
        if not self.config.raw:
            self.messages.append(said)
        prompt = self.answerer.prompt([said] if self.config.raw else self.messages)
        seed = stream(self.config.seed, len(self.messages), 2)
        try:
            answer = self.answerer.answer(prompt, seed).text
        except DataError:
            self.messages = []
            raise DataError("the conversation no longer fits the model's context; it starts anew") from None
        self.messages.append({"role": "assistant", "content": answer})
        return answer
