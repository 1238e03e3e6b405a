"""One way to evaluate a network and one way to train it.

``Scorer.evaluate`` and ``Learner.step`` are the only places where rows are split into micro-batches and joined again;
an algorithm is a batch type and a loss, and never learns how large a micro-batch was.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol, cast

import torch
from torch import Tensor

from plaudit.config import OptimizerConfig
from plaudit.errors import PlauditError
from plaudit.models.network import Network, Outputs
from plaudit.types import Sequences


class Batch(Protocol):
    """What :class:`Learner` asks of a batch beyond :class:`Sequences`: what each of its losses counts."""

    def weights(self) -> Tensor: ...


#: (outputs, rows) -> losses of the shape of ``rows.weights()``, and named statistics of that shape. A statistic is
#: reported as its weighted sum; one whose name ends in _max as its maximum over the weighted places.
Loss = Callable[[Outputs, "Sequences"], tuple[Tensor, dict[str, Tensor]]]


class Scorer:
    """Reads a network without training it."""

    def __init__(self, network: Network, device: torch.device | str = "cpu", token_budget: int = 512):
        self.network, self.device, self.token_budget = network, device, token_budget

    @torch.no_grad()
    def evaluate(self, rows: Sequences, read: Callable[[Outputs, Sequences], Tensor]) -> Tensor:
        """``read(outputs, rows)`` for all rows, in their order: (B, S) for a per-token reader, (B,) for a per-row one.

        The result stands on the CPU and does not depend on the token budget but for rounding.
        """
        result: Tensor | None = None
        for index in rows.micro_batches(self.token_budget):
            part = rows.take(index).trim().to(self.device)
            values = read(self.network(part), part).float().cpu()
            if result is None:
                result = torch.zeros(len(rows), *rows.tokens.shape[1:] if values.dim() == 2 else ())
            if values.dim() == 2:
                result[index, : values.shape[1]] = values
            else:
                result[index] = values
        return torch.zeros(len(rows)) if result is None else result


class NonFinite(PlauditError):
    """A loss or gradient that is not a number; nothing was stepped."""


class Learner:
    """A network, its optimizer and its schedule."""

    def __init__(self, network: Network, config: OptimizerConfig, total_steps: int, device: torch.device | str = "cpu"):
        self.network, self.config, self.device = network, config, device
        self.total_steps = max(1, total_steps)
        self.named = {n: p for n, p in network.named_parameters() if p.requires_grad}
        decay = [p for p in self.named.values() if p.dim() >= 2]
        plain = [p for p in self.named.values() if p.dim() < 2]
        groups = [{"params": decay, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(
            groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True
        )
        self.steps = 0

    def learning_rate(self) -> float:
        """The rate of the next step: a linear warm-up, then the schedule, counted in optimizer steps."""
        c = self.config
        if self.steps < c.warmup_steps:
            return c.learning_rate * (self.steps + 1) / c.warmup_steps
        if c.schedule == "constant":
            return c.learning_rate
        done = (self.steps - c.warmup_steps) / max(1, self.total_steps - c.warmup_steps)
        left = max(0.0, 1 - done) if c.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        return c.learning_rate * (c.final_fraction + (1 - c.final_fraction) * left)

    def step(self, batch: Sequences, loss: Loss) -> dict[str, float]:
        """One optimizer step on the weighted sum of ``loss`` over the batch, and its weighted statistics.

        The weights are those of the whole batch, so the split into micro-batches changes nothing but rounding.

        Raises:
            NonFinite: the loss or the gradient is not finite; weights and optimizer are as before.
        """
        weights = cast(Batch, batch).weights()
        rate = self.learning_rate()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        totals: dict[str, float] = {}
        for index in batch.micro_batches(self.config.micro_batch_tokens):
            part = batch.take(index).trim().to(self.device)
            weight = weights[index]
            if weight.dim() == 2:
                weight = weight[:, : part.tokens.shape[1]]
            weight = weight.to(self.device)
            losses, stats = loss(self.network(part), part)
            total = (losses * weight).sum()
            total.backward()
            totals["loss"] = totals.get("loss", 0.0) + total.item()
            for name, value in stats.items():
                value = value.detach().float()
                if name.endswith("_max"):
                    totals[name] = max(
                        totals.get(name, -math.inf), torch.where(weight > 0, value, -math.inf).max().item()
                    )
                else:
                    totals[name] = totals.get(name, 0.0) + (value * weight).sum().item()
        norm = torch.nn.utils.clip_grad_norm_(self.named.values(), self.config.max_grad_norm or math.inf).item()
        if not math.isfinite(totals.get("loss", 0.0)) or not math.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            raise NonFinite(
                f"optimizer step {self.steps + 1}: loss {totals.get('loss')}, gradient norm {norm}; "
                "nothing was stepped. Lower the learning rate, or look at the last samples."
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        return totals | {"grad_norm": norm, "learning_rate": rate}

    def state(self) -> dict[str, Tensor]:
        """Weights, moments and step count as named tensors, for a checkpoint."""
        state = {f"weight.{n}": p.detach() for n, p in self.named.items()}
        for name, p in self.named.items():
            for key, value in self.optimizer.state.get(p, {}).items():
                state[f"optimizer.{name}.{key}"] = torch.as_tensor(value)
        return state | {"steps": torch.tensor(self.steps)}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """The inverse of :meth:`state`."""
        self.steps = int(state["steps"])
        for name, p in self.named.items():
            with torch.no_grad():
                p.copy_(state[f"weight.{name}"])
            prefix = f"optimizer.{name}."
            moments = {k[len(prefix) :]: v for k, v in state.items() if k.startswith(prefix)}
            if moments:
                self.optimizer.state[p] = {k: v.to(p.device, copy=True) for k, v in moments.items()}
