"""The local engine: a sampler over any transformers decoder.

Rows in flight write the same slot of the memory. A row that has ended makes room for the next prompt; answers to one
prompt share one reading of it; where no prompt is left, the batch shrinks. A row's random numbers are drawn for the
row, so its answer does not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from plaudit.config import SamplingConfig
from plaudit.models.fused import round_up
from plaudit.models.memory import Memory
from plaudit.models.network import LanguageHead
from plaudit.models.stack import Trunk
from plaudit.rollout.decoders import decoder_for
from plaudit.rollout.sampling import likeliest, sample
from plaudit.types import Prompt, Rollout

#: tokens of prompts that are read at once
PREFILL_TOKENS = 4096
#: what padding may cost of such a reading
WASTE = 0.15


class _Answers:
    """What has been written so far: rows of prompt and answer, padded on the right."""

    def __init__(self, prompts: Sequence[Prompt], limit: int, features: int, device: torch.device | str):
        count, width = len(prompts), max(len(p.ids) for p in prompts) + limit
        self.prompts = prompts
        self.starts = torch.tensor([len(p.ids) for p in prompts], device=device)
        #: tokens of each answer
        self.sizes = torch.zeros_like(self.starts)
        tokens = torch.zeros(count, width, dtype=torch.long)
        for i, prompt in enumerate(prompts):
            tokens[i, : len(prompt.ids)] = torch.tensor(prompt.ids)
        self.tokens = tokens.to(device)
        self.logprobs = torch.zeros(count, width, device=device)
        self.features = torch.zeros(count, width, features, device=device)
        self.terminated = torch.zeros(count, dtype=torch.bool, device=device)
        self.stopped = torch.zeros_like(self.terminated)

    def write(self, rows: Tensor, tokens: Tensor, logprobs: Tensor) -> None:
        at = self.starts[rows] + self.sizes[rows]
        self.tokens[rows, at], self.logprobs[rows, at] = tokens, logprobs
        self.sizes[rows] += 1

    def rollout(self, version: int) -> Rollout:
        lengths = self.starts + self.sizes
        at = torch.arange(int(lengths.max()), device=lengths.device)
        mask = (at >= self.starts[:, None]) & (at < lengths[:, None])
        columns = (self.tokens, mask, lengths, self.features, self.logprobs)
        tokens, mask, lengths, features, logprobs = (x[:, : len(at)].cpu() if x.dim() > 1 else x.cpu() for x in columns)
        # what stands behind the end of a row was read beside its neighbours, and belongs to nobody
        real = torch.arange(len(at)) < lengths[:, None]
        return Rollout(
            torch.where(real, tokens, 0),
            mask,
            lengths,
            torch.where(real[:, :, None], features, 0.0),
            logprobs,
            self.terminated.cpu(),
            self.stopped.cpu(),
            torch.full((len(lengths),), version),
            tuple(self.prompts),
        )


class _Flight:
    """The rows that are being answered: which answers they are, where they begin in the memory, what they read next."""

    def __init__(self, rows: int, device: torch.device | str):
        self.memory: Memory | None = None
        self.answer = torch.zeros(rows, dtype=torch.long, device=device)
        self.first = torch.zeros_like(self.answer)
        self.tokens = torch.zeros_like(self.answer)
        self.positions = torch.zeros_like(self.answer)
        self.live = torch.zeros(rows, dtype=torch.bool, device=device)
        #: rows that are complete, but whose newest token is still to be read, for its features
        self.complete = torch.zeros_like(self.live)

    def real(self) -> Tensor | None:
        """Which slots hold no padding, once the newest tokens have theirs; None where none does."""
        assert self.memory is not None
        first = torch.where(self.live, self.first, 0)
        if not bool(first.any()):
            return None
        return torch.arange(self.memory.used + 1, device=first.device) >= first[:, None]

    def make_room(self) -> None:
        """Forgets slots that no live row needs, where the memory is full."""
        assert self.memory is not None
        if self.memory.used < self.memory.slots:
            return
        needless = int(self.first[self.live].min())
        self.memory.drop(needless)
        self.first = (self.first - needless).clamp(min=0)

    def shrink(self) -> None:
        """Goes on with the live rows, and as many others as make a size that products are made for."""
        live = self.live.nonzero().flatten()
        size = round_up(len(live))
        if size >= len(self.live) or not len(live):
            return
        others = (~self.live).nonzero().flatten()
        kept = torch.cat([live, others[: size - len(live)]])
        for name in ("answer", "first", "tokens", "positions", "live", "complete"):
            setattr(self, name, getattr(self, name)[kept])
        assert self.memory is not None
        self.memory.keep(kept)


class LocalEngine:
    """Answers with the actor's weights; :meth:`load` is due after every change of them, since some are copied.

    A ``trunk`` that the roles share is shared by the engine too: what its blocks make of each token becomes the
    rollout's features, so that their work is done once for generation and for every role. So is a ``head`` that is not
    trained. ``text_of`` turns token ids into text, where stop strings are to be found in it.

    ``weights``: what the blocks above the trunk multiply with. From bfloat16 or int8 the answers' log-probabilities are
    those of the rounded model, which is what sampled them; the trainer's differ by its gap. With int8 no features are
    recorded and all blocks are rounded, the trunk's too.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        end_ids: Sequence[int],
        *,
        trunk: Trunk | None = None,
        head: LanguageHead | None = None,
        text_of: Callable[[list[int]], str] | None = None,
        weights: Literal["float32", "bfloat16", "int8"] = "float32",
        max_rows: int = 128,
        device: torch.device | str = "cpu",
    ):
        int8 = weights == "int8"
        trunk, head = (None, None) if int8 else (trunk, head)
        self.decoder = decoder_for(model, trunk, weights)
        self.shared_head, self.head = head is not None, head or LanguageHead(model, fixed=True, int8=int8)
        self.end_ids = torch.tensor(sorted(end_ids), device=device)
        self.text_of = text_of
        #: width of the features that are recorded; 0 for none
        self.records = trunk.width if trunk else 0
        self.max_rows, self.device = max_rows, device
        self.version = 0

    def load(self, version: int) -> None:
        self.version = version
        self.decoder.refresh()
        if not self.shared_head:
            self.head.refresh()

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingConfig,
        *,
        seed: int,
        progress: Callable[[int], None] | None = None,
    ) -> Rollout:
        """One answer a prompt, in order. ``progress`` is told from time to time how many answers are done.

        Raises:
            NonFinite: the model's logits are not finite.
        """
        uniform = torch.rand(
            len(prompts), sampling.max_new_tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        ).float()
        run = _Run(self, prompts, sampling, uniform.to(self.device))
        said = 0
        while run.busy():
            run.advance()
            done = run.done()
            if progress and done > said:
                progress(said := done)
        return run.answers.rollout(self.version)


class _Run:
    """One call of the engine."""

    def __init__(self, engine: LocalEngine, prompts: Sequence[Prompt], sampling: SamplingConfig, uniform: Tensor):
        self.engine, self.sampling, self.uniform = engine, sampling, uniform
        self.answers = _Answers(prompts, sampling.max_new_tokens, engine.records, engine.device)
        # The longest prompts first: those that come later fit into the slots that are used by then. Equal ones stand
        # together, and are read once.
        self.waiting = sorted(range(len(prompts)), key=lambda i: (-len(prompts[i].ids), prompts[i].ids, i))
        self.rows = min(engine.max_rows, len(prompts))
        longest = len(prompts[self.waiting[0]].ids) + sampling.max_new_tokens
        #: while prompts wait, new rows begin where others end, and slots are given free once in a while
        self.slots = longest if self.rows == len(prompts) else 2 * longest
        self.flight = _Flight(self.rows, engine.device)
        self._admit()

    def busy(self) -> bool:
        return bool(self.waiting) or bool(self.flight.live.any())

    def done(self) -> int:
        return len(self.answers.prompts) - len(self.waiting) - int(self.flight.live.sum())

    def advance(self) -> None:
        """Every row in flight reads its newest token and chooses the next; rows that have ended make room."""
        flight, answers = self.flight, self.answers
        if not bool(flight.live.any()):
            flight.memory = None
            self._admit()
            return
        assert flight.memory is not None
        flight.make_room()
        hidden, features = self.engine.decoder.read(
            flight.memory, flight.tokens[:, None], flight.positions[:, None], flight.real()
        )
        flight.positions += 1
        if self.engine.records:
            written = flight.answer[flight.live]
            at = answers.starts[written] + answers.sizes[written] - 1
            answers.features[written, at] = features[flight.live, 0].float()
            flight.live &= ~flight.complete
        rows = flight.live.nonzero().flatten()
        if len(rows):
            self._choose(rows, hidden[rows])
        free = len(flight.live) - int(flight.live.sum())
        if self.waiting and self.rows > free >= max(1, self.rows // 8):
            self._admit()
        elif not self.waiting:
            flight.shrink()

    def _choose(self, rows: Tensor, hidden: Tensor) -> None:
        """The next token of these rows, given their states (k, H)."""
        sampling, flight, answers = self.sampling, self.flight, self.answers
        written = flight.answer[rows]
        logits = likeliest(self.engine.head(hidden, sampling.temperature or 1.0), sampling)
        points = self.uniform[written, answers.sizes[written]]
        tokens, logprobs = sample(logits, points, greedy=sampling.temperature == 0)
        answers.write(written, tokens, logprobs)
        ended = torch.isin(tokens, self.engine.end_ids) & (not sampling.fixed_length)
        stopped = self._stopped(written) & ~ended
        answers.terminated[written] = ended | stopped
        answers.stopped[written] = stopped
        complete = stopped | (answers.sizes[written] == sampling.max_new_tokens)
        flight.tokens[rows] = tokens
        # An end token's own features are needed by nobody: no choice follows it, and no score is read there.
        records = self.engine.records > 0
        flight.live[rows] = ~ended & (~complete | records)
        flight.complete[rows] = complete

    def _stopped(self, written: Tensor) -> Tensor:
        """Which of these answers end in a stop string now."""
        stop, text_of = self.sampling.stop, self.engine.text_of
        found = torch.zeros(len(written), dtype=torch.bool)
        if stop and text_of is not None:
            # every token is a byte at least, so the string lies within so many of the newest ones
            most = max(len(text.encode()) for text in stop) + 1
            for place, i in enumerate(written.tolist()):
                end = int(self.answers.starts[i] + self.answers.sizes[i])
                start = max(int(self.answers.starts[i]), end - most)
                text = text_of(self.answers.tokens[i, start:end].tolist())
                found[place] = any(s in text for s in stop)
        return found.to(written.device)

    def _admit(self) -> None:
        """Waiting prompts take the places that are free."""
        flight, engine = self.flight, self.engine
        places = (~flight.live).nonzero().flatten().tolist()
        taken, self.waiting = self.waiting[: len(places)], self.waiting[len(places) :]
        for part in _pieces([self.answers.prompts[i] for i in taken]):
            rows = torch.tensor([places.pop(0) for _ in part.source], device=engine.device)
            written = torch.tensor([taken.pop(0) for _ in part.source], device=engine.device)
            self._read(part, rows, written)

    def _read(self, part: _Piece, rows: Tensor, written: Tensor) -> None:
        flight, engine = self.flight, self.engine
        width = len(part.prompts[0].ids)
        ids, real = torch.zeros(len(part.prompts), width, dtype=torch.long), torch.ones(len(part.prompts), width)
        for i, prompt in enumerate(part.prompts):
            ids[i, width - len(prompt.ids) :] = torch.tensor(prompt.ids)
            real[i, : width - len(prompt.ids)] = 0
        ids, real = ids.to(engine.device), real.bool().to(engine.device)
        positions = (real.cumsum(1) - 1).clamp(min=0)
        memory = engine.decoder.memory(width)
        hidden, features = engine.decoder.read(memory, ids, positions, None if bool(real.all()) else real)
        if flight.memory is None:
            flight.memory = memory.room(len(flight.live), self.slots)
        source = torch.tensor(part.source, device=engine.device)
        flight.memory.take_in(memory, source, rows)
        starts = self.answers.starts[written]
        flight.answer[rows] = written
        flight.first[rows] = flight.memory.used - starts
        flight.positions[rows] = starts
        flight.live[rows] = True
        flight.complete[rows] = False
        if engine.records:
            index, at = real[source].nonzero(as_tuple=True)
            self.answers.features[written[index], positions[source][index, at]] = features[source][index, at].float()
        self._choose(rows, hidden[source])


class _Piece:
    """Prompts that are read at once, the longest first; ``source`` says for every row which of them it has."""

    def __init__(self) -> None:
        self.prompts: list[Prompt] = []
        self.source: list[int] = []

    def takes(self, prompt: Prompt) -> bool:
        """Whether one more prompt neither exceeds what is read at once nor wastes too much of it."""
        if not self.prompts:
            return True
        longest, count = len(self.prompts[0].ids), len(self.prompts) + 1
        real = sum(len(p.ids) for p in self.prompts) + len(prompt.ids)
        small = longest * count <= 256
        return longest * count <= PREFILL_TOKENS and (small or real >= (1 - WASTE) * longest * count)


def _pieces(prompts: Sequence[Prompt]) -> Iterator[_Piece]:
    """Prompts, of which equal ones stand together and longer ones come first, cut into readings."""
    piece = _Piece()
    for prompt in prompts:
        if piece.prompts and piece.prompts[-1].ids == prompt.ids:
            piece.source.append(len(piece.prompts) - 1)
            continue
        if not piece.takes(prompt):
            yield piece
            piece = _Piece()
        piece.source.append(len(piece.prompts))
        piece.prompts.append(prompt)
    yield piece
