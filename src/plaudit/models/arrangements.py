"""Arrangements: how actor, critic, reference and reward model share weights.

``separate``: four whole models. ``shared_trunk``: the critic is a scalar head on the actor's trunk, updated with it.
``frozen_trunk``: all roles share the frozen lower blocks, whose output is computed once a rollout (by the engine, while
it generates) and reused by every role and every epoch; each role owns its top blocks. With equal weights all three
give the same numbers before the first update. The algorithm sees roles and learners only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from plaudit.config import ArrangementConfig
from plaudit.errors import ModelError
from plaudit.models.network import LanguageHead, Network, scalar_head
from plaudit.models.stack import Stack, Trunk, UpperStack, WholeStack, blocks_of, in_bfloat16, own_blocks
from plaudit.types import Sequences

S = TypeVar("S", bound=Sequences)


@dataclass(frozen=True)
class RewardParts:
    """A loaded reward model: its decoder and its scalar head."""

    base: PreTrainedModel
    head: nn.Linear


@dataclass(frozen=True)
class Arrangement:
    """The networks of the four roles, and what they share.

    ``critic`` is None where none is needed, ``reward`` where a function scores. ``joint``: actor and critic are one
    network with one optimizer.
    ``trunk`` and the fixed output layer ``head`` are what they share, for an engine to generate through; ``prepare``
    fills features that are missing.
    """

    actor: Network
    critic: Network | None
    reference: Network
    reward: Network | None
    prepare: Callable[[S], S]
    trunk: Trunk | None
    head: LanguageHead | None
    joint: bool


@dataclass(frozen=True)
class CriticStart:
    """Where the critic starts: ``body`` the reward model's or the actor's (auto: the reward model's, if there is one),
    or none for no critic; ``head`` auto (the reward model's, else zero), zero, or random by ``seed``."""

    body: str = "auto"
    head: str = "auto"
    seed: int = 0


def arrange(
    model: PreTrainedModel, reward: RewardParts | None, config: ArrangementConfig, critic: CriticStart
) -> Arrangement:
    """Builds the roles on ``model``, which becomes the actor, where ``model`` and ``reward`` are (their device).

    Raises:
        ModelError: the roles cannot share a trunk because their lower blocks differ, or one has nothing to start from.
    """
    if critic.body == "auto":
        critic = replace(critic, body="reward" if reward else "actor")
    if critic.body == "reward" and reward is None:
        raise ModelError("critic_from=reward needs a reward model, but a function scores; use critic_from=actor")
    if config.kind == "frozen_trunk":
        return _frozen_trunk(model, reward, config, critic)
    whole = _shared_trunk if config.kind == "shared_trunk" else _separate
    return whole(model, reward, config.precision, critic)


def _separate(model: PreTrainedModel, reward: RewardParts | None, precision: str, start: CriticStart) -> Arrangement:
    reference = _frozen_copy(model)
    scorer = whole_reward(reward) if reward else None
    critic = None
    if start.body != "none":
        body, head = _critic_start(model.base_model, reward, start)
        critic = Network(WholeStack(copy.deepcopy(body), precision), scalar=head)
        critic.requires_grad_(True)
    actor = Network(WholeStack(model.base_model, precision, exact=True), LanguageHead(model))
    actor.requires_grad_(True)
    return Arrangement(actor, critic, reference, scorer, lambda rows: rows, None, None, joint=False)


def _shared_trunk(
    model: PreTrainedModel, reward: RewardParts | None, precision: str, start: CriticStart
) -> Arrangement:
    reference = _frozen_copy(model)
    scorer = whole_reward(reward) if reward else None
    if start.body == "none":
        head = None
    else:
        # A head trained on another trunk means nothing on this one: the critic starts on the actor's, with its own.
        _, head = _critic_start(model.base_model, None, replace(start, body="actor"))
    both = Network(WholeStack(model.base_model, precision, exact=True), LanguageHead(model), head)
    both.requires_grad_(True)
    critic = None if head is None else both
    joint = head is not None
    return Arrangement(both, critic, reference, scorer, lambda rows: rows, None, None, joint=joint)


def _frozen_trunk(
    model: PreTrainedModel, reward: RewardParts | None, config: ArrangementConfig, start: CriticStart
) -> Arrangement:
    base, blocks = model.base_model, config.blocks
    trunk = Trunk(base, blocks, config.precision, sampling=True)
    below = len(blocks_of(base)[1]) - blocks
    if reward is not None and share(base, reward.base, at_most=below) < below:
        raise ModelError(
            f"frozen_trunk: actor and reward model differ below the top {blocks} blocks, so they share no trunk; "
            f"train both with train_blocks={blocks} from one model, or use arrangement.kind=separate"
        )
    model.requires_grad_(False)
    language = LanguageHead(model, fixed=True, low_gradients=in_bfloat16(config.precision, base))
    reference = Network(UpperStack(own_blocks(base, blocks), blocks), language)
    critic = None
    if start.body != "none":
        body, head = _critic_start(base, reward, start)
        critic = Network(UpperStack(own_blocks(body, blocks), blocks, config.precision), scalar=head)
    scorer = Network(UpperStack(reward.base, blocks), scalar=reward.head) if reward else None
    actor = Network(UpperStack(base, blocks, config.precision, exact=True), language)
    for network in (reference, scorer, actor, critic):
        if network is not None:
            network.requires_grad_(False)
    for network in (actor, critic):
        if network is not None:
            blocks_of(network.stack.base)[1].requires_grad_(True)
    if critic is not None and critic.scalar is not None:
        critic.scalar.requires_grad_(True)
    return Arrangement(actor, critic, reference, scorer, trunk.prepare, trunk, language, joint=False)


def further_reward(base: PreTrainedModel, reward: RewardParts, config: ArrangementConfig) -> Network:
    """One more reward model beside the four roles: on their trunk where it has the same, whole otherwise."""
    if config.kind == "frozen_trunk":
        below = len(blocks_of(base)[1]) - config.blocks
        if share(base, reward.base, at_most=below) == below:
            network = Network(UpperStack(reward.base, config.blocks), scalar=reward.head)
            network.requires_grad_(False)
            return network
    return whole_reward(reward)


def _frozen_copy(model: PreTrainedModel) -> Network:
    clone = copy.deepcopy(model)
    clone.requires_grad_(False)
    return Network(WholeStack(clone.base_model), LanguageHead(clone))


def whole_reward(reward: RewardParts) -> Network:
    """A reward model that reads whole rows, frozen."""
    network = Network(WholeStack(reward.base), scalar=reward.head)
    network.requires_grad_(False)
    return network


def _critic_start(
    base: PreTrainedModel, reward: RewardParts | None, start: CriticStart
) -> tuple[PreTrainedModel, nn.Linear]:
    """A decoder and a head of its own: the reward model's, or the actor's with a zero head, unless asked otherwise."""
    body = reward.base if start.body == "reward" and reward is not None else base
    if start.head == "auto" and start.body == "reward" and reward is not None:
        return body, scalar_head(reward.head.weight.detach(), -reward.head.bias.item())
    size = base.config.hidden_size
    weight = torch.zeros(1, size)
    if start.head == "random":
        # a generator of its own: what is drawn here moves no other stream
        weight = torch.randn(1, size, generator=torch.Generator().manual_seed(start.seed)) / (size + 1) ** 0.5
    return body, scalar_head(weight.to(next(base.parameters()).device))


def _equal(a: nn.Module, b: nn.Module) -> bool:
    mine, other = a.state_dict(), b.state_dict()
    return mine.keys() == other.keys() and all(torch.equal(mine[k], other[k]) for k in mine)


def share(a: PreTrainedModel, b: PreTrainedModel, *, at_most: int) -> int:
    """Gives ``b`` the modules of ``a`` wherever they are equal, so that its own can be freed.

    Of the blocks at most the lowest ``at_most`` are shared: above them one of the two may be about to change. Returns
    how many that were; 0 if already the embeddings differ.
    """
    name, blocks = blocks_of(a)
    other = blocks_of(b)[1]
    if type(a) is not type(b) or len(blocks) != len(other):
        return 0
    same_embeddings = True
    for child, module in a.named_children():
        if child == name:
            continue
        if _equal(module, getattr(b, child)):
            setattr(b, child, module)
        elif isinstance(module, nn.Embedding):
            same_embeddings = False
    depth = 0
    while same_embeddings and depth < at_most and _equal(blocks[depth], other[depth]):
        other[depth] = blocks[depth]
        depth += 1
    # Loaded weights are views into one mapped file; while any of them lives, all its pages count as resident memory.
    taken = {id(p) for p in a.parameters()}
    for p in b.parameters():
        if id(p) not in taken:
            p.data = p.data.clone()
    return depth


def read_together(models: list[PreTrainedModel], depth: int) -> list[Stack]:
    """Stacks that read the same rows: from the features of ``depth`` shared blocks, or whole where it is 0."""
    if depth == 0:
        return [WholeStack(m) for m in models]
    return [UpperStack(m, len(blocks_of(m)[1]) - depth) for m in models]


def shared_trunk(base: PreTrainedModel, depth: int, precision: str = "float32") -> Trunk | None:
    """The trunk of ``depth`` shared blocks, for an engine to generate through."""
    total = len(blocks_of(base)[1])
    return Trunk(base, total - depth, precision, sampling=True) if depth else None


def trainable_policy(model: PreTrainedModel, blocks: int, precision: str) -> tuple[Network, Trunk | None]:
    """A language model whose top ``blocks`` blocks are trained (all weights, where that is 0), and its frozen trunk."""
    if blocks:
        model.requires_grad_(False)
    stack, trunk = trainable_top(model.base_model, blocks, precision)
    low = blocks > 0 and in_bfloat16(precision, model)
    return Network(stack, LanguageHead(model, low_gradients=low)), trunk


def trainable_top(base: PreTrainedModel, blocks: int, precision: str = "float32") -> tuple[Stack, Trunk | None]:
    """A stack that trains the top ``blocks`` blocks over a frozen trunk, or all weights where ``blocks`` is 0.

    In bfloat16 the trained blocks multiply bfloat16 copies of weights and activations, forward and backward; weights,
    gradients and everything between the products stay float32.
    """
    if not blocks:
        base.requires_grad_(True)
        return WholeStack(base, precision), None
    trunk = Trunk(base, blocks, precision)
    base.requires_grad_(False)
    stack = UpperStack(base, blocks, precision)
    blocks_of(stack.base)[1].requires_grad_(True)
    return stack, trunk
