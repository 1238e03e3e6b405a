"""Two models answer what a person asks, and the person votes without knowing which is which."""

from __future__ import annotations

import threading

from plaudit import device as devices
from plaudit.algorithms.ppo import stream
from plaudit.config import CompareConfig, EngineConfig
from plaudit.errors import ModelError
from plaudit.evaluation.compare import win_rate
from plaudit.models.load import load_language_model, weights_digest
from plaudit.preferences.store import PreferenceStore
from plaudit.progress import say
from plaudit.recipes.common import engine_for, fits
from plaudit.types import Answer, Comparison
from plaudit.web.labelling import Standing


class Contestant:
    """A model that answers, one prompt at a time."""

    def __init__(self, model: str, config: CompareConfig):
        say(f"{model}: loading")
        device = devices.pick(config.device)
        self.name, self.config = model, config
        self.weights = weights_digest(model)
        loaded, self.tokenizer = load_language_model(model)
        if not config.raw and not self.tokenizer.inner.chat_template:
            raise ModelError(f"{model}: its tokenizer has no chat template; use raw=true to complete texts as they are")
        self.model = loaded.to(device)
        self.engine = engine_for(EngineConfig(), self.model, self.tokenizer, device)

    def answer(self, text: str, seed: int) -> Answer:
        """
        Raises:
            DataError: the prompt does not fit the model.
        """
        messages = [{"role": "user", "content": text}]
        prompt = self.tokenizer.prompt(text) if self.config.raw else self.tokenizer.chat_prompt(messages)
        fits(self.model, [prompt], self.config.sampling)
        rollout = self.engine.generate([prompt], self.config.sampling, seed=seed)
        return Answer(self.tokenizer.responses(rollout)[0], bool(rollout.terminated[0] & ~rollout.stopped[0]))


class Duel:
    """Two models, and the store that their answers and the votes go to."""

    def __init__(self, first: Contestant, second: Contestant, config: CompareConfig, store: PreferenceStore):
        self.models, self.config, self.store = (first, second), config, store
        self._one_at_a_time = threading.Lock()

    def ask(self, prompt: str) -> None:
        """Both models' answers into the store, as a question.

        Raises:
            DataError: the prompt does not fit one of them.
        """
        with self._one_at_a_time:
            seed = stream(self.config.seed, self.store.counts()["comparisons"], 2)
            answers = tuple(model.answer(prompt, seed) for model in self.models)
            self.store.add([Comparison(0, prompt, answers, self._provenance(prompt, seed))])

    def _provenance(self, prompt: str, seed: int) -> dict[str, object]:
        asked = {} if self.config.raw else {"messages": [{"role": "user", "content": prompt}]}
        return asked | self._who() | {"sampling": self.config.sampling.model_dump(), "seed": seed}

    def _who(self) -> dict[str, object]:
        return {"models": [model.name for model in self.models], "weights": [model.weights for model in self.models]}

    def standing(self) -> Standing:
        """From the votes on these two models as they are now: their weights tell, where they lie in a folder."""
        mine = self._who()
        votes = [p.ranks for p in self.store.preferences() if mine == {k: p.comparison.provenance.get(k) for k in mine}]
        # a lower place is better, so the first beats the second where its place is lower
        rate, low, high = win_rate([ranks[0] for ranks in votes], [ranks[1] for ranks in votes])
        first, second = self.models
        return Standing(first.name, second.name, len(votes), rate, low, high)
