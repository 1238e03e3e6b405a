"""The composition of a PPO run: which concrete objects stand behind the roles, and what of them a checkpoint holds."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from plaudit import ops
from plaudit.algorithms import ppo as algorithm
from plaudit.algorithms.sft import scaled, sft_loss
from plaudit.config import CRITIC_FREE, PPOConfig
from plaudit.data import rows as data
from plaudit.data.order import shuffled
from plaudit.device import Clock
from plaudit.errors import ConfigError
from plaudit.inspection.profile import Sizes, linear_weights
from plaudit.learner import Average, Learner, Loss, Scorer
from plaudit.models.arrangements import CriticStart, RewardParts, arrange, further_reward
from plaudit.models.load import load_reward_model
from plaudit.models.network import Network
from plaudit.models.stack import own_blocks
from plaudit.recipes.common import engine_for, one_vocabulary, prepared
from plaudit.rewards.function import FunctionReward, guarded, is_function, load_function
from plaudit.rewards.judge import Ensemble, Judge, Voice
from plaudit.rewards.model import ModelReward
from plaudit.rewards.source import RewardSource
from plaudit.rollout.engine import RolloutEngine
from plaudit.rollout.pool import Pool
from plaudit.tokenizer import Tokenizer
from plaudit.types import Sequences


class Behaviour:
    """The weights that sample, where they are to lag behind the actor's: a copy, put in their place while needed."""

    def __init__(self, named: dict[str, torch.nn.Parameter]):
        self.named = named
        self.copy = {name: p.detach().clone() for name, p in named.items()}

    def publish(self) -> None:
        """The actor's present weights sample from now on."""
        _copy(self.copy, self.named)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with exchanged(self.named, self.copy):
            yield


@contextmanager
def exchanged(named: dict[str, torch.nn.Parameter], weights: dict[str, Tensor]) -> Iterator[None]:
    """Inside, the parameters have these values; the two change places, so nothing is copied."""

    def swap() -> None:
        for name, p in named.items():
            weights[name], p.data = p.data, weights[name]

    swap()
    try:
        yield
    finally:
        swap()


class SyncedEngine:
    """An engine for which something else follows the actor first: a lagging copy, or one to sample from."""

    def __init__(self, engine: RolloutEngine, sync: Callable[[], None]):
        self.engine, self.sync = engine, sync
        self.generate = engine.generate

    def load(self, version: int) -> None:
        self.sync()
        self.engine.load(version)


def _with_own(model: PreTrainedModel, blocks: int) -> PreTrainedModel:
    """The model with its own copy of the top ``blocks`` blocks, or of everything where that is 0."""
    if not blocks:
        return copy.deepcopy(model)
    made = copy.copy(model)
    made._modules = dict(model._modules)
    setattr(made, model.base_model_prefix, own_blocks(model.base_model, blocks))
    return made


@dataclass
class Composed:
    """The roles of a run with what a checkpoint holds of them."""

    model: PreTrainedModel
    roles: algorithm.Roles
    state: algorithm.State
    engine: RolloutEngine
    judge: Judge
    behaviour: Behaviour | None
    #: the weights that are to be saved in the end, where they are not the actor's last
    average: Average | None
    #: what the roles' linear layers weigh, for a profile
    sizes: Sizes
    actor: dict[str, torch.nn.Parameter]

    def snapshot(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Named tensors and plain values from which :meth:`restore` goes on."""
        tensors = {f"{u.name}.{k}": v for u in self.roles.updates for k, v in u.learner.state().items()}
        if self.average is not None:
            tensors |= {f"average.{k}": v for k, v in self.average.weights.items()}
        if self.behaviour is not None:
            tensors |= {f"behaviour.{k}": v for k, v in self.behaviour.copy.items()}
        if self.state.pool.size > 1:
            tensors |= {f"pool.{k}": v for k, v in self.state.pool.state().items()}
        tensors |= {f"judge.{k}": v for k, v in self.judge.state().items()}
        s = self.state
        return tensors, {"iteration": s.iteration, "kl_coef": s.kl_coef, "version": s.version}

    def restore(self, tensors: dict[str, Tensor], meta: dict[str, Any], reduction: ops.Reduction) -> None:
        def part(name: str) -> dict[str, Tensor]:
            return {k.removeprefix(f"{name}."): v for k, v in tensors.items() if k.startswith(f"{name}.")}

        for update in self.roles.updates:
            update.learner.load_state(part(update.name))
        if self.average is not None:
            _copy(self.average.weights, part("average"))
        self.state.iteration, self.state.kl_coef = meta["iteration"], meta["kl_coef"]
        self.state.version = meta["version"]
        self.state.pool.load_state(part("pool"), reduction)
        self.judge.load_state(part("judge"))
        if self.behaviour is not None:
            _copy(self.behaviour.copy, part("behaviour"))
        self.reload()

    def settle(self) -> None:
        """Waits for answers that are being sampled ahead: the engine is free then."""
        if self.state.pending is not None:
            self.state.pending.result()

    def reload(self) -> None:
        """The engine takes over the weights that sample now."""
        with self.roles.behaviour():
            self.engine.load(self.state.version)

    @contextmanager
    def result(self) -> Iterator[None]:
        """Inside, the model has the weights that the run leaves behind: the average, where there is one."""
        with exchanged(self.actor, self.average.weights) if self.average is not None else nullcontext():
            yield


@torch.no_grad()
def _copy(mine: dict[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Values into tensors that are there, where they are (their device)."""
    for name, value in values.items():
        mine[name].copy_(value.detach())


def compose(config: PPOConfig, model: PreTrainedModel, tokenizer: Tokenizer, device: torch.device) -> Composed:
    """Builds the roles of a run on ``model``, which becomes the actor.

    Raises:
        ConfigError: what is asked for does not go together; ModelError: a model is missing or unfit.
    """
    parts = None
    if not is_function(config.reward):
        parts = reward_parts(config.reward, tokenizer, device, config.attn_implementation)
    body = "none" if config.estimator in CRITIC_FREE else config.critic_from
    made = arrange(model, parts, config.arrangement, CriticStart(body, config.critic_head, config.seed))
    for network in (made.actor, made.critic, made.reference, made.reward):
        if network is not None:
            network.to(device)

    def further(spec: str) -> RewardSource:
        return source_of(
            spec,
            tokenizer,
            device,
            lambda parts: further_reward(model.base_model, parts, config.arrangement),
            attention=config.attn_implementation,
        )

    judge = _judge(config, tokenizer, made.reward, further, device)
    state = algorithm.State(kl_coef=config.kl.coef, pool=Pool(config.pool.size, config.pool.max_age))
    own = _own(config)
    assert made.reference.language is not None
    actor_loss = algorithm.actor_loss(config, made.reference.language, state, own)
    if made.joint:
        actor_loss = algorithm.joint_loss(config, state, actor_loss)
    a_rollout = config.epochs * config.minibatches
    steps = config.iterations * a_rollout
    actor = Learner(
        made.actor, config.actor, steps - config.critic_warmup * a_rollout, device, steps_per_rollout=a_rollout
    )
    average = Average(actor.named, config.ema_decay) if config.ema_decay else None
    updates = [algorithm.Update("actor", actor, actor_loss, average)]
    if made.critic is not None and not made.joint:
        critic = Learner(made.critic, config.critic, steps, device, steps_per_rollout=a_rollout)
        updates.append(algorithm.Update("critic", critic, algorithm.critic_loss(config, state)))
    sampling = model
    if config.pool.overlap:
        sampling = _with_own(model, config.arrangement.blocks if made.trunk is not None else 0)
    engine = engine_for(config.engine, sampling, tokenizer, device, trunk=made.trunk, head=made.head)
    if config.pool.overlap:
        shared = {id(p) for p in model.parameters()}
        copied = {name: p for name, p in sampling.named_parameters() if id(p) not in shared}
        # the engine samples from a copy of what the actor trains while the actor is improved
        engine = SyncedEngine(engine, lambda: _copy(copied, {name: model.get_parameter(name) for name in copied}))
    behaviour = Behaviour(actor.named) if config.pool.lags else None
    roles = algorithm.Roles(
        engine=engine if behaviour is None else SyncedEngine(engine, behaviour.publish),
        judge=judge,
        actor=Scorer(made.actor, device),
        reference=Scorer(made.reference, device),
        critic=None if made.critic is None else Scorer(made.critic, device),
        prepare=made.prepare,
        updates=updates,
        head=made.reference.language,
        feed=tokenizer.pad_id,
        behaviour=nullcontext if behaviour is None else behaviour,
        more=_ptx(config, tokenizer, made.trunk, device),
        own=own,
        clock=Clock(device),
        ahead=ThreadPoolExecutor(1).submit if config.pool.overlap else None,
    )
    sizes = Sizes(
        blocks=linear_weights(model.base_model),
        head=made.reference.language.linear.weight.numel(),
        actor=linear_weights(made.actor.stack),
        reference=linear_weights(made.reference.stack),
        # a head on the actor's own trunk runs no blocks of its own
        critic=0 if made.critic is None or made.joint else linear_weights(made.critic.stack),
        reward=linear_weights(made.reward and made.reward.stack),
    )
    return Composed(model, roles, state, engine, judge, behaviour, average, sizes, actor.named)


def source_of(
    spec: str,
    tokenizer: Tokenizer,
    device: torch.device,
    network_of: Callable[[RewardParts], Network],
    kind: str = "reward function",
    attention: str = "auto",
) -> RewardSource:
    """A function (a ``kind`` of which, its errors say), or a reward model as the network ``network_of`` makes of it."""
    if is_function(spec):
        return FunctionReward(load_function(spec), tokenizer, spec, kind)
    return ModelReward(Scorer(network_of(reward_parts(spec, tokenizer, device, attention)).to(device), device))


def reward_parts(folder: str, tokenizer: Tokenizer, device: torch.device, attention: str = "auto") -> RewardParts:
    reward_model, head, reward_tokenizer = load_reward_model(folder, attention)
    one_vocabulary(tokenizer, reward_tokenizer, folder)
    return RewardParts(reward_model.base_model.to(device), head.to(device))


def _judge(
    config: PPOConfig,
    tokenizer: Tokenizer,
    network: Network | None,
    further: Callable[[str], RewardSource],
    device: torch.device,
) -> Judge:
    first: RewardSource
    if network is not None:
        first = ModelReward(Scorer(network, device))
    else:
        first = FunctionReward(load_function(config.reward), tokenizer, config.reward)
    if config.ensemble.members:
        if functions := [m for m in (config.reward, *config.ensemble.members) if is_function(m)]:
            raise ConfigError(f"ensemble: {functions[0]} is a function; members are reward models, use extra_rewards")
        members = [first, *(further(member) for member in config.ensemble.members)]
        first = Ensemble(members, config.ensemble.combine, config.ensemble.coef)

    def voice(name: str, source: RewardSource, weight: float, clip: float, normalise: bool) -> Voice:
        return Voice(name, source, weight, clip, ops.Moments() if normalise else None)

    voices = [voice("reward", first, config.reward_weight, 0.0, config.reward_normalise)]
    for i, s in enumerate(config.extra_rewards, 1):
        voices.append(voice(f"extra{i}", further(s.source), s.weight, s.clip, s.normalise))
    return Judge(voices, config.dense_reward)


def _own(config: PPOConfig) -> algorithm.Own:
    def found(spec: str) -> Callable[..., Any] | None:
        return guarded(load_function(spec), spec) if spec else None

    f = config.functions
    callbacks = tuple(guarded(load_function(spec), spec) for spec in f.callbacks)
    return algorithm.Own(found(f.token_rewards), found(f.advantages), found(f.policy_loss), callbacks)


def _ptx(config: PPOConfig, tokenizer: Tokenizer, trunk, device) -> Callable[[int], Sequence[tuple[Sequences, Loss]]]:
    """What the actor's steps learn from besides: each step's rows follow from its number, every row once a pass."""
    if not config.ptx.coef:
        return lambda step: ()
    rows, _ = data.demonstrations(config.ptx.data, tokenizer, limit=0, max_length=config.ptx.max_length)
    loss = scaled(sft_loss, config.ptx.coef, "ptx")

    def more(step: int) -> Sequence[tuple[Sequences, Loss]]:
        index = turn(len(rows), config.ptx.batch_size, step, config.seed)
        return [(prepared(rows.take(index).trim().to(device), trunk), loss)]

    return more


def turn(count: int, batch: int, number: int, seed: int) -> list[int]:
    """The ``number``-th batch of an endless round: every row once an epoch, in an order drawn afresh for each."""
    chosen = []
    orders: dict[int, list[int]] = {}
    for position in range(number * batch, (number + 1) * batch):
        epoch, place = divmod(position, count)
        if epoch not in orders:
            orders[epoch] = shuffled(count, seed, epoch)
        chosen.append(orders[epoch][place])
    return chosen
