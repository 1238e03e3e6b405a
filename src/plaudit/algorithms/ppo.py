"""PPO with four roles. One iteration is five verbs: act, judge, assign credit, improve, publish.

This file knows protocols and row types only; which models stand behind the roles, and how they share weights, is an
arrangement's business. Left out: the loop around the iteration, files, progress (see recipes).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from plaudit import ops
from plaudit.algorithms.credit import Facts, TokenRewards, assign, checked
from plaudit.config import CRITIC_FREE, PPOConfig
from plaudit.conventions import Credit, Estimate, Positions, credited, estimated_kl, limited_kl
from plaudit.device import Clock
from plaudit.errors import NonFinite, PlauditError
from plaudit.learner import Average, Learner, Loss, Stats, weighted
from plaudit.models.network import (
    LanguageHead,
    Outputs,
    hidden_states,
    last_values,
    token_alternatives,
    token_kl,
    token_logprobs,
    token_policy,
    token_values,
)
from plaudit.rewards.source import Judgement
from plaudit.rollout.engine import RolloutEngine
from plaudit.rollout.pool import Pool
from plaudit.types import Compared, Experience, Prompt, Rollout, Sequences, Weights


class Role(Protocol):
    """A network that can be read: actor, reference or critic."""

    def evaluate(self, rows: Sequences, read: Callable[[Outputs, Sequences], Tensor]) -> Tensor: ...


class Judging(Protocol):
    """What turns a rollout into scores."""

    def judge(self, rollout: Rollout) -> Judgement: ...


@dataclass(frozen=True)
class Update:
    """A learner and its loss; ``average`` follows its weights, where that is asked for."""

    name: str
    learner: Learner
    loss: Loss
    average: Average | None = None


@dataclass(frozen=True)
class Own:
    """A user's own functions in the place of ours; None: ours. ``callbacks`` are told (verb, state, record)."""

    token_rewards: TokenRewards | None = None
    advantages: Estimate | None = None
    policy_loss: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    callbacks: Sequence[Callable[[str, State, Any], None]] = ()


@dataclass(frozen=True)
class Roles:
    """The four roles, the engine that samples for the actor, and the learners that improve what is trained.

    ``critic`` is None where the estimator needs none. ``behaviour`` puts the weights of the policy that samples in the
    actor's place. ``feed`` is the token fed after an answer, where a convention looks there. ``more`` gives what else
    an actor's step learns from (PTX), by the number of the step.
    """

    engine: RolloutEngine
    judge: Judging
    actor: Role
    reference: Role
    critic: Role | None
    prepare: Callable[[Rollout], Rollout]
    updates: Sequence[Update]
    #: the reference's output layer, for an exact KL
    head: LanguageHead
    feed: int = 0
    behaviour: Callable[[], AbstractContextManager[None]] = nullcontext
    more: Callable[[int], Sequence[tuple[Sequences, Loss]]] = lambda step: ()
    own: Own = field(default_factory=Own)
    clock: Clock = field(default_factory=Clock)
    #: runs the sampling of the next answers beside an update, where that is asked for
    ahead: Callable[[Callable[[], Rollout]], Future[Rollout]] | None = None


@dataclass(frozen=True)
class Seen:
    """What an optimizer step (the ``update``-th of its iteration, from 0) made of some answers: their ``number`` i64
    (B,), and by name its values at each token, f32 (B, S)."""

    update: int
    number: Tensor
    values: dict[str, Tensor]


@dataclass
class Notes:
    """What is noted of the ``count`` answers from number ``first`` on, in an iteration that is traced.

    ``alternatives`` f32 (count, S, 2, K), by role: the log-probabilities and ids of the likeliest tokens in each
    token's place. ``seen``: what the steps made of each token; ``refused``: the steps that were not taken.
    """

    first: int
    count: int
    alternatives: dict[str, Tensor]
    #: the step that is being made
    update: int = 0
    seen: list[Seen] = field(default_factory=list)
    refused: set[int] = field(default_factory=set)

    def take(self, rows: Experience, values: dict[str, Tensor]) -> None:
        keep = (rows.number >= self.first) & (rows.number < self.first + self.count)
        if keep.any():
            kept = {name: x.detach()[keep].float().cpu() for name, x in values.items()}
            self.seen.append(Seen(self.update, rows.number[keep].cpu(), kept))


@dataclass
class State:
    """What changes from iteration to iteration, apart from the weights."""

    iteration: int = 0
    kl_coef: float = 0.0
    #: how often the policy that samples has been renewed
    version: int = 0
    pool: Pool = field(default_factory=Pool)
    #: the next answers, being sampled ahead; a resumed run samples them again, from the same weights
    pending: Future[Rollout] | None = None
    #: of this iteration, where it is traced
    notes: Notes | None = None

    def see(self, rows: Experience, **values: Tensor) -> None:
        """A loss shows what it made of each token."""
        if self.notes is not None:
            self.notes.take(rows, values)


@dataclass(frozen=True)
class Account:
    """All that a traced iteration's update was made from; tensors are those of ``rows``.

    ``paid`` f32 (B,): the scores after clip and penalties. ``counted`` bool (B, S): where the recursion of the
    advantages ran. ``kl_coef``: what KL cost.
    """

    rows: Rollout
    positions: Positions
    judgement: Judgement
    paid: Tensor
    read: Read
    facts: Facts
    credit: Credit
    counted: Tensor
    importance: Tensor
    kl_coef: float
    notes: Notes


@dataclass(frozen=True)
class Iteration:
    """What an iteration leaves behind: its metrics, what was said and how it was judged; the whole account, where it is
    traced."""

    metrics: dict[str, float]
    rollout: Rollout
    scores: Tensor
    kl: Tensor
    account: Account | None


@dataclass(frozen=True)
class Read:
    """What actor and reference make of a rollout: log-probabilities and KL a token, f32 (B, S)."""

    logprobs: Tensor
    ref_logprobs: Tensor
    kl: Tensor
    ref_hidden: Tensor


def stream(seed: int, iteration: int, purpose: int) -> int:
    """The seed of one random stream. Streams are derived, not carried along, so that a resumed run needs none saved."""
    return (seed * 1_000_003 + iteration) * 8 + purpose


def ppo_iteration(
    cfg: PPOConfig, roles: Roles, state: State, prompts: Sequence[Prompt], upcoming: Sequence[Prompt] = ()
) -> Iteration:
    """Act, judge, assign credit, improve, publish.

    ``upcoming`` are the prompts of the next iteration, if there is one: where answers are sampled ahead, they are
    sampled beside this iteration's update, by the policy from before it.
    """

    def tell(verb: str, record: Any) -> None:
        for callback in roles.own.callbacks:
            callback(verb, state, record)

    # Act: the policy that samples answers the prompts, and says what it and the reference make of each token.
    with roles.behaviour():
        with roles.clock("generate"):
            rollout = state.pending.result() if state.pending else sampled(cfg, roles, prompts, state.iteration)
            state.pending = None
        with roles.clock("read"):
            rollout = roles.prepare(rollout)
            rows, positions = as_read(cfg, rollout, roles)
            read = read_policies(cfg, roles, rows, positions)
        with roles.clock("trace"):
            state.notes = take_notes(cfg, roles, rows, state.iteration)
    tell("act", rollout)
    # Judge: one score an answer, and its price.
    with roles.clock("judge"):
        judgement = roles.judge.judge(rollout)
    finite("scores", judgement.scores[:, None])
    scores = ops.penalise(
        judgement.scores.clamp(-cfg.reward_clip, cfg.reward_clip) if cfg.reward_clip else judgement.scores,
        rollout.terminated,
        rollout.response_lengths(),
        truncation=cfg.truncation,
        truncation_penalty=cfg.truncation_penalty,
        length_penalty=cfg.length_penalty,
    )
    tell("judge", judgement)
    # Assign credit: the score is paid at the end, KL is charged at every token.
    with roles.clock("read"):
        values, bootstrap = read_critic(cfg, roles, rows, positions)
    facts = Facts(scores, dense_part(cfg, judgement, rows), read.kl, values, bootstrap)
    in_reward = state.kl_coef if cfg.kl.place == "reward" else 0.0
    credit = assign(cfg, facts, rows, positions, in_reward, roles.own.token_rewards, roles.own.advantages)
    tell("assign_credit", credit)
    # Improve: a few epochs of clipped updates, on what the pool holds.
    experience = Experience.of(
        rows,
        number=first_number(cfg, state.iteration) + torch.arange(len(rows)),
        value_mask=positions.span(cfg.conventions.value_loss_over),
        logprobs=read.logprobs,
        ref_logprobs=read.ref_logprobs,
        ref_hidden=read.ref_hidden,
        importance=engine_correction(cfg, read.logprobs, rows),
        values=facts.values,
        advantages=credit.advantages,
        returns=credit.returns,
        reduction=cfg.loss_reduction,
    )
    state.pool.add(experience, state.version)
    if roles.ahead is not None:
        renew(roles, state)
        if upcoming:
            following = state.iteration + 1
            state.pending = roles.ahead(lambda: sampled(cfg, roles, upcoming, following))
    with roles.clock("improve"):
        updates = list(improvements(cfg, roles, state))
    tell("improve", updates)
    # Publish: every few iterations the improved policy takes over the sampling, at an adjusted price of KL.
    state.iteration += 1
    if roles.ahead is None and state.iteration % cfg.pool.refresh_every == 0:
        renew(roles, state)
    kl = ops.masked_sum(read.kl, positions.span(cfg.conventions.kl_over))
    metrics = iteration_metrics(cfg, rows, judgement, scores, kl, read, credit, facts.values, updates)
    metrics["kl_coef"] = state.kl_coef
    account, notes, state.notes = None, state.notes, None
    if notes is not None:
        account = Account(
            rows=rows,
            positions=positions,
            judgement=judgement,
            paid=scores,
            # hidden states would be held through the next iteration
            read=replace(read, ref_hidden=rows.features[:, :, :0]),
            facts=facts,
            credit=credit,
            counted=credited(cfg.conventions, positions),
            importance=experience.importance,
            kl_coef=state.kl_coef,
            notes=notes,
        )
    if cfg.kl.controller == "adaptive":
        state.kl_coef = ops.adaptive_kl_coef(
            state.kl_coef, float(kl.mean()), target=cfg.kl.target, horizon=cfg.kl.horizon, n=len(rollout)
        )
    tell("publish", metrics)
    return Iteration(metrics, rollout, judgement.scores, kl, account)


def sampled(cfg: PPOConfig, roles: Roles, prompts: Sequence[Prompt], iteration: int) -> Rollout:
    """The answers of an iteration, from the engine's present weights."""
    asked = [prompt for prompt in prompts for _ in range(cfg.samples_per_prompt)]
    return roles.engine.generate(asked, cfg.sampling, seed=stream(cfg.seed, iteration, 0))


def renew(roles: Roles, state: State) -> None:
    """The actor's present weights take over the sampling."""
    state.version += 1
    with roles.clock("publish"):
        roles.engine.load(state.version)


def as_read(cfg: PPOConfig, rollout: Rollout, roles: Roles) -> tuple[Rollout, Positions]:
    """The rollout as the conventions look at it: where they look beyond the last token, a token is fed there."""
    limit = cfg.sampling.max_new_tokens
    widest = cfg.conventions.widest()
    start = rollout.mask.int().argmax(1, keepdim=True)
    rows = rollout
    if widest != "response":
        room = (limit - rollout.response_lengths()).clamp(min=0)
        rows = roles.prepare(rollout.fed(room.clamp(max=1) if widest == "one_after" else room, roles.feed))
    if widest != "response" or cfg.conventions.score_position != "last":
        # every row has its positions up to the limit, however long its neighbours are
        rows = rows.widen(max(rows.mask.shape[1], int(start.max()) + limit))
    within = torch.arange(rows.mask.shape[1]) < start + limit
    return rows, Positions(rows.mask, within | rows.real())


def read_policies(cfg: PPOConfig, roles: Roles, rows: Rollout, positions: Positions) -> Read:
    """Log-probabilities of actor and reference, and the KL between them, at every position the conventions look at."""
    t = cfg.logprob_temperature
    wide = replaced_mask(rows, positions.span(cfg.conventions.widest()) & rows.real())

    def logprobs_of(role: Role) -> Tensor:
        return role.evaluate(wide, lambda outputs, part: token_logprobs(outputs, part, t))

    logprobs = finite("actor's log-probabilities", logprobs_of(roles.actor))
    ref_logprobs = finite("reference's log-probabilities", logprobs_of(roles.reference))
    if cfg.kl.estimator != "full":
        clamp = cfg.conventions.kl_clamp
        kl = estimated_kl(clamp, logprobs, ref_logprobs, cfg.kl.estimator)
        return Read(logprobs, ref_logprobs, kl, rows.features[:, :, :0])
    hidden = roles.reference.evaluate(wide, hidden_states)
    compared = Compared(wide.tokens, wide.mask, wide.lengths, wide.features, hidden)

    def exact(outputs: Outputs, part: Sequences) -> Tensor:
        assert isinstance(part, Compared)
        return token_kl(outputs, part, part.ref_hidden, roles.head, t)

    kl = limited_kl(cfg.conventions.kl_clamp, roles.actor.evaluate(compared, exact))
    return Read(logprobs, ref_logprobs, kl, hidden if cfg.kl.place == "loss" else rows.features[:, :, :0])


def first_number(cfg: PPOConfig, iteration: int) -> int:
    """The number of an iteration's first answer, among all of the run."""
    return iteration * cfg.answers


def take_notes(cfg: PPOConfig, roles: Roles, rows: Rollout, iteration: int) -> Notes | None:
    """Begins the notes of an iteration (from 0) that is traced: what actor and reference might have said instead."""
    if not cfg.trace.due(iteration + 1, cfg.iterations):
        return None
    few = rows.take(range(min(cfg.trace.answers, len(rows)))).trim()
    count, t = cfg.trace.alternatives, cfg.logprob_temperature

    def likeliest(outputs: Outputs, part: Sequences) -> Tensor:
        return token_alternatives(outputs, part, count, t)

    asked = {"actor": roles.actor, "reference": roles.reference}
    alternatives = {name: role.evaluate(few, likeliest) for name, role in asked.items()}
    return Notes(first_number(cfg, iteration), len(few), alternatives)


def finite(name: str, x: Tensor) -> Tensor:
    """``x``, if all of it is finite.

    Raises:
        NonFinite: otherwise, with the first row that is not.
    """
    if not torch.isfinite(x).all():
        row = int((~torch.isfinite(x)).flatten(1).any(1).nonzero()[0])
        raise NonFinite(f"the {name} are not finite, first in row {row}; nothing was stepped. Look at the last samples")
    return x


def read_critic(cfg: PPOConfig, roles: Roles, rows: Rollout, positions: Positions) -> tuple[Tensor, Tensor]:
    """Values (B, S) wherever the conventions look, and V after each truncated row (B,) where it is to be continued."""
    nothing = torch.zeros(len(rows))
    if roles.critic is None:
        return torch.zeros_like(rows.logprobs), nothing
    c = cfg.conventions
    looked_at = (positions.span(c.values_over) | positions.span(c.value_loss_over)) & rows.real()
    values = finite("critic's values", roles.critic.evaluate(replaced_mask(rows, looked_at), token_values))
    if not cfg.bootstrap_truncated:
        return values, nothing
    return values, torch.where(rows.terminated, 0.0, roles.critic.evaluate(rows, last_values))


def replaced_mask(rows: Rollout, mask: Tensor) -> Sequences:
    """The same tokens, to be read at other positions."""
    return Sequences(rows.tokens, mask, rows.lengths, rows.features)


def dense_part(cfg: PPOConfig, judgement: Judgement, rows: Rollout) -> Tensor:
    """What a dense reward pays each token; zeros without one."""
    if not cfg.dense_reward:
        return torch.zeros_like(rows.logprobs)
    width = rows.mask.shape[1] - judgement.prefix_scores.shape[1]
    return ops.dense_rewards(torch.nn.functional.pad(judgement.prefix_scores, (0, width)), rows.text_mask())


def engine_correction(cfg: PPOConfig, logprobs: Tensor, rows: Rollout) -> Tensor:
    """What each token's loss weighs for the engine's gap: 1 where no correction is asked for."""
    if not cfg.pool.importance_cap:
        return torch.ones_like(logprobs)
    return torch.where(rows.mask, ops.truncated_importance(logprobs, rows.logprobs, cfg.pool.importance_cap), 1.0)


def improvements(cfg: PPOConfig, roles: Roles, state: State) -> Iterator[dict[str, float]]:
    """The iteration's updates, one a minibatch, until they are done or the policy has moved far enough."""
    generator = torch.Generator().manual_seed(stream(cfg.seed, state.iteration, 1))
    critic_only = state.iteration < cfg.critic_warmup
    for update in roles.updates:
        update.learner.rollouts = state.iteration - cfg.critic_warmup * (update.name == "actor")
    for number, minibatch in enumerate(state.pool.minibatches(cfg.epochs, cfg.minibatches, generator)):
        if state.notes is not None:
            state.notes.update = number
        stats = improve(cfg, roles, minibatch, critic_only=critic_only)
        if state.notes is not None and stats.get("actor/skipped"):
            state.notes.refused.add(number)
        yield stats
        if cfg.stop_kl and stats.get("actor/approx_kl_k2_nats_per_token", 0.0) > cfg.stop_kl:
            return


def improve(cfg: PPOConfig, roles: Roles, minibatch: Experience, *, critic_only: bool = False) -> dict[str, float]:
    """One optimizer step of every learner. Where the mean ratio is out of bounds, none of them steps."""
    limit = cfg.conventions.skip_above_mean_ratio
    stats: dict[str, float] = {}
    for update in roles.updates:
        if critic_only and update.name == "actor":
            continue
        step: dict[str, float] = update.learner.step(
            minibatch,
            update.loss,
            also=roles.more(update.learner.batches) if update.name == "actor" else (),
            veto=(lambda measured: measured["ratio"] > limit) if limit and update.name == "actor" else None,
        )
        stats |= {f"{update.name}/{k}": v for k, v in step.items()}
        if step["vetoed"]:
            break
        if update.average is not None and not step["skipped"]:
            update.average.update(update.learner.named)
    return stats


def actor_loss(cfg: PPOConfig, reference: LanguageHead, state: State, own: Own) -> Loss:
    """Clipped policy loss with an entropy bonus and, where KL stands in the loss, its price."""
    hyper, c = cfg.hyper(), cfg.conventions
    t = cfg.logprob_temperature
    clamp = c.ratio_clamp or None

    def loss(outputs: Outputs, rows: Sequences, weights: Weights) -> tuple[Tensor, Stats]:
        assert isinstance(rows, Experience)
        logprobs, entropy = token_policy(outputs, rows, t, entropy_gradient=cfg.entropy_coef > 0)
        if own.policy_loss is not None:
            made = own.policy_loss(logprobs, rows.logprobs, rows.advantages)
            if isinstance(made, Tensor) and not made.requires_grad:
                raise PlauditError(
                    f"{cfg.functions.policy_loss}: its losses carry no gradient to the log-probabilities"
                )
            policy = torch.where(rows.mask, checked(made, logprobs, cfg.functions.policy_loss), 0.0)
        else:
            policy = ops.policy_loss(
                logprobs, rows.logprobs, rows.advantages, hyper.clip, dual_clip=hyper.dual_clip, ratio_clamp=clamp
            )
        total = policy * rows.importance
        now = logprobs.detach()
        clipped = ops.policy_clipped(now, rows.logprobs, rows.advantages, hyper.clip, ratio_clamp=clamp)
        ratio = ops.importance_ratio(now, rows.logprobs, clamp)
        stats = {
            "policy_loss": policy,
            "entropy_nats_per_token": entropy,
            "clip_fraction": clipped.float(),
            "approx_kl_k2_nats_per_token": ops.kl_estimate(now, rows.logprobs, "k2"),
            "ratio": ratio,
            "log_ratio_max": (now - rows.logprobs).abs(),
        }
        state.see(rows, new_logprobs=now, ratio=ratio, clipped=clipped, entropy=entropy, policy_loss=policy)
        if cfg.entropy_coef:
            total = total - cfg.entropy_coef * entropy
        if cfg.kl.place == "loss":
            if cfg.kl.estimator == "full":
                kl = limited_kl(c.kl_clamp, token_kl(outputs, rows, rows.ref_hidden, reference, t))
            else:
                kl = estimated_kl(c.kl_clamp, logprobs, rows.ref_logprobs, cfg.kl.estimator)
                if c.kl_gradient == "kl":
                    kl = kl.detach() + ops.kl_slope(logprobs, rows.logprobs, rows.ref_logprobs)
            total = total + state.kl_coef * kl
            stats[f"kl_{cfg.kl.estimator}_nats_per_token"] = kl
        return (total * weights.main).sum(), weighted(stats, weights.places)

    return loss


def critic_loss(cfg: PPOConfig, state: State) -> Loss:
    """Value loss, clipped where that is asked for."""
    clip = cfg.value_clip_range or None

    def loss(outputs: Outputs, rows: Sequences, weights: Weights) -> tuple[Tensor, Stats]:
        assert isinstance(rows, Experience)
        values = token_values(outputs, rows, where=rows.value_mask)
        losses = ops.value_loss(values, rows.values, rows.returns, clip)
        clipped = (values.detach() - rows.values).abs() > (clip or float("inf"))
        state.see(rows, new_values=values, value_loss=losses)
        stats = weighted({"value_loss": losses, "value_clip_fraction": clipped.float()}, weights.of_values)
        return (losses * weights.of_values).sum(), stats

    return loss


def joint_loss(cfg: PPOConfig, state: State, policy: Loss) -> Loss:
    """Policy and value loss of one network with both heads: L_policy + vf_coef · L_value − entropy_coef · H."""
    value = critic_loss(cfg, state)

    def loss(outputs: Outputs, rows: Sequences, weights: Weights) -> tuple[Tensor, Stats]:
        of_policy, policy_stats = policy(outputs, rows, weights)
        of_value, value_stats = value(outputs, rows, weights)
        return of_policy + cfg.vf_coef * of_value, policy_stats | value_stats

    return loss


def iteration_metrics(
    cfg: PPOConfig,
    rollout: Rollout,
    judgement: Judgement,
    scores: Tensor,
    kl: Tensor,
    read: Read,
    credit: Credit,
    values: Tensor,
    updates: Sequence[dict[str, float]],
) -> dict[str, float]:
    """Means over real tokens (or responses) of what the iteration saw, and over its updates of what they reported.

    ``score`` is what the sources gave, ``score_paid`` what is left after clip and penalties; ``kl`` is the KL that is
    trained on, under its short name and under one that tells estimator and unit.
    """
    mask = rollout.mask
    lengths = rollout.response_lengths().float()
    metrics = {
        "score": float(judgement.scores.mean()),
        "score_std": float(judgement.scores.std(unbiased=False)),
        "score_paid": float(scores.mean()),
        "kl": float(kl.mean()),
        f"kl_{cfg.kl.estimator}_nats_per_response": float(kl.mean()),
        "response_tokens": float(lengths.mean()),
        "ended": float(rollout.terminated.float().mean()),
        "truncated": float((~rollout.terminated).float().mean()),
        "updates": float(len(updates)),
    }
    if len(judgement.sources) > 1 or cfg.reward_normalise or cfg.reward_weight != 1:
        metrics |= {f"score/{name}": float(x.mean()) for name, x in judgement.sources.items()}
    if cfg.estimator not in CRITIC_FREE:
        returns = credit.returns
        residual = ops.masked_mean((returns - values).square(), mask)
        spread = ops.masked_mean((returns - ops.masked_mean(returns, mask)).square(), mask)
        metrics["explained_variance"] = float(1 - residual / spread.clamp(min=1e-8))
    elif cfg.samples_per_prompt > 1:
        compared = ops.masked_sum(credit.whitened_rewards, mask)
        metrics["equal_groups"] = float(ops.equal_groups(compared, cfg.samples_per_prompt).float().mean())
    if cfg.logprob_temperature == cfg.sampling.temperature:
        metrics["engine_gap_nats_per_token"] = float(ops.masked_mean((rollout.logprobs - read.logprobs).abs(), mask))
    if "actor/log_ratio_max" in updates[0]:
        metrics["first_log_ratio_max"] = updates[0]["actor/log_ratio_max"]
    names = dict.fromkeys(name for update in updates for name in update)
    for name in names:
        said = [update[name] for update in updates if name in update]
        metrics[name] = max(said) if name.endswith("_max") else sum(said) / len(said)
    return metrics
