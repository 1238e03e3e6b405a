"""Two models answer what a person asks, and the person votes without knowing which is which."""

from __future__ import annotations

import threading

from plaudit.algorithms.ppo import stream
from plaudit.config import CompareConfig
from plaudit.evaluation.compare import win_rate
from plaudit.models.load import weights_digest
from plaudit.preferences.store import PreferenceStore
from plaudit.progress import say
from plaudit.recipes.use import Answerer
from plaudit.types import Comparison
from plaudit.web.labelling import Standing


class Contestant:
    """A model that answers, by its name and the digest of its weights."""

    def __init__(self, model: str, config: CompareConfig):
        say(f"{model}: loading")
        self.name, self.weights = model, weights_digest(model)
        self.answerer = Answerer(model, config.sampling, config.device, config.raw)


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
            messages = [{"role": "user", "content": prompt}]
            answers = tuple(a.answer(a.prompt(messages), seed) for a in (model.answerer for model in self.models))
            asked = {} if self.config.raw else {"messages": messages}
            self.store.add([Comparison(0, prompt, answers, asked | self._provenance(seed))])

    def _provenance(self, seed: int) -> dict[str, object]:
        return self._who() | {"sampling": self.config.sampling.model_dump(), "seed": seed}

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
