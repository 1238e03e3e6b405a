"""A model beside its reference on held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plaudit import device as devices
from plaudit.config import EvaluateConfig
from plaudit.data import rows as data
from plaudit.evaluation.compare import Answers, compare
from plaudit.learner import Scorer
from plaudit.models.arrangements import read_together, share, shared_trunk
from plaudit.models.load import load_language_model, load_reward_model
from plaudit.models.network import LanguageHead, Network, token_logprobs
from plaudit.recipes.common import Summary, engine_for, fits, generate, one_vocabulary, prepared, stage, watch
from plaudit.rewards.model import ModelReward
from plaudit.runs import Run
from plaudit.types import Prompt, Rollout


@stage
def evaluate(config: EvaluateConfig, run: Run) -> Summary:
    """Compares a model with its reference on held-out prompts, one sample each."""
    device = devices.pick(config.device)
    model, tokenizer = load_language_model(config.model, config.attn_implementation)
    reference, other = load_language_model(config.reference, config.attn_implementation)
    one_vocabulary(tokenizer, other, config.reference)
    run.forget_after(0)
    # the top block is read by each model itself, even where all are equal
    most = model.config.num_hidden_layers - 1
    depth = share(model.base_model, reference.base_model, at_most=most)
    if reference.config.tie_word_embeddings and reference.get_input_embeddings() is model.get_input_embeddings():
        reference.set_output_embeddings(model.get_output_embeddings())
    bases, head = [model.base_model, reference.base_model], None
    if config.reward:
        scoring, head, other = load_reward_model(config.reward, config.attn_implementation)
        one_vocabulary(tokenizer, other, config.reward)
        depth = min(depth, share(model.base_model, scoring.base_model, at_most=most))
        bases.append(scoring.base_model)
        del scoring
    for part in (model, reference, *bases, *([head] if head is not None else [])):
        part.to(device)
    stacks = read_together(bases, depth)
    trunk = shared_trunk(model.base_model, depth, config.precision)
    prompts, _ = data.prompts(config.prompts, tokenizer, limit=config.count)
    fits(model, prompts, config.sampling)
    watches = {name: watch(name) for name in config.judges}
    reward_source = ModelReward(Scorer(Network(stacks[2], scalar=head), device)) if head is not None else None

    def answers(policy, title: str) -> tuple[Answers, Rollout]:
        engine = engine_for(config.engine, policy, tokenizer, device, trunk=trunk)
        rollout = prepared(generate(engine, prompts, config.sampling, config.seed, title), trunk)
        texts, asked = tokenizer.responses(rollout), [p.text for p in prompts]
        judged = {name: watch(asked, texts) for name, watch in watches.items()}
        scores = reward_source.score(rollout).tolist() if reward_source else []
        return Answers(texts, rollout.terminated.tolist(), judged, scores), rollout

    before, _ = answers(reference, "answers of the reference")
    after, rollout = answers(model, "answers of the model")
    kl = _kl(
        rollout, Network(stacks[0], LanguageHead(model)), Network(stacks[1], LanguageHead(reference)), config, device
    )
    summary: Summary = compare(before, after, kl)
    run.log(1, {k: float(v) for k, v in summary.items()})
    run.log_samples(1, _side_by_side(prompts, before, after, kl))
    return summary


def _kl(rollout: Rollout, policy: Network, reference: Network, config: EvaluateConfig, device) -> list[float]:
    """Summed k1 of each answer at the sampling temperature (at 1 for greedy answers), in nats."""
    t = config.sampling.temperature or 1.0
    mine, theirs = (
        Scorer(network, device).evaluate(rollout, lambda out, part: token_logprobs(out, part, t))
        for network in (policy, reference)
    )
    return (mine - theirs).sum(1).tolist()


def _side_by_side(
    prompts: Sequence[Prompt], before: Answers, after: Answers, kl: Sequence[float]
) -> list[dict[str, Any]]:
    rows = []
    for i, prompt in enumerate(prompts):
        row: dict[str, Any] = {"prompt": prompt.text, "before": before.responses[i], "after": after.responses[i]}
        row |= {"ended_before": before.ended[i], "ended": after.ended[i], "kl": kl[i]}
        for judge in after.judged:
            row |= {f"{judge}_before": before.judged[judge][i], f"{judge}_after": after.judged[judge][i]}
        if after.scores:
            row |= {"score_before": before.scores[i], "score_after": after.scores[i]}
        rows.append(row)
    return rows
