"""One way to evaluate a network and one way to train it.

``Scorer.evaluate`` and ``Learner.step`` are the only places where rows are split into micro-batches and joined again;
an algorithm is a batch type and a loss, and never learns how large a micro-batch was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from plaudit.config import OptimizerConfig
from plaudit.errors import ConfigError, NonFinite
from plaudit.models.network import Network, Outputs
from plaudit.types import Sequences, Weights


class Batch(Protocol):
    """What :class:`Learner` asks of a batch beyond :class:`Sequences`: what each of its places counts."""

    def weights(self) -> Weights: ...


#: What a loss measured, weighted: scalars that are added up over the parts of a batch. One whose name ends in _max is a
#: maximum instead.
Stats = dict[str, Tensor]
#: (outputs, rows, weights of these rows) -> this part's share of the batch's loss, a scalar, and what else it measured.
Loss = Callable[[Outputs, Sequences, Weights], tuple[Tensor, Stats]]


def weighted(values: dict[str, Tensor], weights: Tensor) -> Stats:
    """Per-place values as :data:`Stats`: the weighted sum, or the maximum over the weighted places."""
    return {
        name: torch.where(weights > 0, x.detach().float(), -math.inf).amax()
        if name.endswith("_max")
        else (x.detach().float() * weights).sum()
        for name, x in values.items()
    }


class Scorer:
    """Reads a network without training it."""

    def __init__(self, network: Network, device: torch.device | str = "cpu", token_budget: int = 512):
        self.network, self.device, self.token_budget = network, device, token_budget

    @torch.no_grad()
    def evaluate(self, rows: Sequences, read: Callable[[Outputs, Sequences], Tensor]) -> Tensor:
        """``read(outputs, rows)`` for all rows, in their order: (B,) for a per-row reader, (B, S) or (B, S, H) for one
        that reads tokens.

        The result stands on the CPU and does not depend on the token budget but for rounding.
        """
        result: Tensor | None = None
        for index in rows.micro_batches(self.token_budget):
            part = rows.take(index).trim().to(self.device)
            values = read(self.network(part), part).float().cpu()
            if result is None:
                width = rows.tokens.shape[1:] if values.dim() > 1 else ()
                result = torch.zeros(len(rows), *width, *values.shape[2:])
            if values.dim() > 1:
                result[index, : values.shape[1]] = values
            else:
                result[index] = values
        return torch.zeros(len(rows)) if result is None else result


def make_optimizer(config: OptimizerConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The optimizer of a configuration, over parameter groups.

    Raises:
        ConfigError: its package is not installed.
    """
    match config.optimizer:
        case "adamw":
            return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True)
        case "adafactor":
            return torch.optim.Adafactor(groups, lr=config.learning_rate)
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError:
        raise ConfigError(
            "optimizer=adamw_8bit needs the package bitsandbytes: `pip install plaudit[8bit]`, or use adamw"
        ) from None
    return AdamW8bit(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps)


class Average:
    """The exponential moving average of weights, counted in optimizer steps: a ← decay · a + (1 − decay) · w."""

    def __init__(self, named: dict[str, torch.nn.Parameter], decay: float):
        self.decay = decay
        self.weights = {name: p.detach().clone() for name, p in named.items()}

    @torch.no_grad()
    def update(self, named: dict[str, torch.nn.Parameter]) -> None:
        for name, average in self.weights.items():
            average.lerp_(named[name].detach(), 1 - self.decay)


class Learner:
    """A network, its optimizer and its schedule."""

    def __init__(
        self,
        network: Network,
        config: OptimizerConfig,
        total_steps: int,
        device: torch.device | str = "cpu",
        *,
        steps_per_rollout: int = 1,
    ):
        """``total_steps``: optimizer steps of the whole run, which the schedule stretches over; ``steps_per_rollout``:
        how many of them share a learning rate where the schedule counts rollouts."""
        self.network, self.config, self.device = network, config, device
        network.stack.recompute = config.gradient_checkpointing
        self.total_steps = max(1, total_steps)
        self.steps_per_rollout = steps_per_rollout
        fraction = config.warmup_fraction
        self.warmup = round(fraction * self.total_steps) if fraction else config.warmup_steps
        self.named = {n: p for n, p in network.named_parameters() if p.requires_grad}
        decay = [p for p in self.named.values() if p.dim() >= 2]
        plain = [p for p in self.named.values() if p.dim() < 2]
        groups = [{"params": decay, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self.optimizer = make_optimizer(config, groups)
        #: optimizer steps; batches, those that were skipped too; rollouts, which the caller counts
        self.steps, self.batches, self.rollouts = 0, 0, 0

    def learning_rate(self) -> float:
        """The rate of the next step: a linear warm-up, then the schedule, counted in optimizer steps."""
        c = self.config
        step = self.rollouts * self.steps_per_rollout if c.schedule_per == "rollout" else self.steps
        if step < self.warmup:
            return c.learning_rate * (step + 1) / self.warmup
        if c.schedule == "constant":
            return c.learning_rate
        done = (step - self.warmup) / max(1, self.total_steps - self.warmup)
        left = max(0.0, 1 - done) if c.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        return c.learning_rate * (c.final_fraction + (1 - c.final_fraction) * left)

    def step(
        self,
        batch: Sequences,
        loss: Loss,
        *,
        also: Sequence[tuple[Sequences, Loss]] = (),
        veto: Callable[[dict[str, float]], bool] | None = None,
    ) -> dict[str, float]:
        """One optimizer step on the mean of ``loss`` over the batch (and of others over theirs), and what was measured.

        The means are those of the whole batch, so the split into micro-batches changes nothing but rounding. ``veto``
        may look at the measurements and refuse the step: then nothing changes, and ``skipped`` is 1.

        Raises:
            NonFinite: the loss or the gradient is not finite, and the configuration does not skip such steps; weights
                and optimizer are as before.
        """
        rate = self.learning_rate()
        self.optimizer.zero_grad(set_to_none=True)
        totals: dict[str, float] = {"loss": 0.0}
        for rows, of_rows in ((batch, loss), *also):
            self._accumulate(rows, of_rows, totals)
        norm = torch.nn.utils.clip_grad_norm_(self.named.values(), self.config.max_grad_norm or math.inf).item()
        vetoed = veto is not None and veto(totals)
        finite = math.isfinite(totals["loss"]) and math.isfinite(norm)
        if not finite and not vetoed and not self.config.skip_nonfinite:
            self.optimizer.zero_grad(set_to_none=True)
            bad = next((n for n, p in self.named.items() if not torch.isfinite(p).all()), "")
            raise NonFinite(
                f"optimizer step {self.steps + 1}: loss {totals['loss']}, gradient norm {norm}"
                f"{f', weights {bad} are not finite' if bad else ''}; nothing was stepped. Lower the learning rate, or "
                "look at the last samples."
            )
        skipped = vetoed or not finite
        self.batches += 1
        if not skipped:
            self._set_rate(rate)
            self.optimizer.step()
            self.steps += 1
        self.optimizer.zero_grad(set_to_none=True)
        measured = totals | {"grad_norm": norm, "learning_rate": rate}
        # what is not a number says nothing in a mean; that it was left out is said
        kept = {k: v for k, v in measured.items() if math.isfinite(v)}
        return kept | {"skipped": float(skipped), "vetoed": float(vetoed)}

    def _accumulate(self, batch: Sequences, loss: Loss, totals: dict[str, float]) -> None:
        """Adds the batch's gradient to the weights' and its measurements to ``totals``."""
        weights = cast(Batch, batch).weights()
        for index in batch.micro_batches(self.config.micro_batch_tokens):
            part = batch.take(index).trim().to(self.device)
            total, stats = loss(self.network(part), part, weights.take(index).cut(part.tokens.shape[1]).to(self.device))
            total.backward()
            totals["loss"] += total.item()
            for name, value in stats.items():
                if name.endswith("_max"):
                    totals[name] = max(totals.get(name, -math.inf), value.item())
                else:
                    totals[name] = totals.get(name, 0.0) + value.item()

    def _set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
            if not self.config.eps_corrected:
                # √(v / (1 − β₂^t)) + ε' with ε' = ε / √(1 − β₂^t): ε stands beside the moment as it is
                group["eps"] = self.config.eps / math.sqrt(1 - self.config.betas[1] ** (self.steps + 1))

    def state(self) -> dict[str, Tensor]:
        """Weights, moments and step count as named tensors, for a checkpoint."""
        state = {f"weight.{n}": p.detach() for n, p in self.named.items()}
        for name, p in self.named.items():
            for key, value in self.optimizer.state.get(p, {}).items():
                state[f"optimizer.{name}.{key}"] = torch.as_tensor(value)
        return state | {"steps": torch.tensor(self.steps), "batches": torch.tensor(self.batches)}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """The inverse of :meth:`state`."""
        self.steps, self.batches = int(state["steps"]), int(state["batches"])
        for name, p in self.named.items():
            with torch.no_grad():
                p.copy_(state[f"weight.{name}"])
            prefix = f"optimizer.{name}."
            moments = {k[len(prefix) :]: v for k, v in state.items() if k.startswith(prefix)}
            if moments:
                self.optimizer.state[p] = {k: v.to(p.device, copy=True) for k, v in moments.items()}
