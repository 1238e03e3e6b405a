"""What the stages share: how one opens and closes, how a model folder is written, and what is checked before work."""

from __future__ import annotations

import functools
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from plaudit import device as devices
from plaudit.config import EngineConfig, RunConfig, SamplingConfig
from plaudit.errors import ConfigError, DataError, ModelError, RunError, first_line
from plaudit.evaluation import judges
from plaudit.models.fused import can_fuse
from plaudit.models.load import context_length
from plaudit.models.network import LanguageHead
from plaudit.models.stack import Trunk, in_bfloat16
from plaudit.progress import Bar, say
from plaudit.rewards.function import RewardError, checked, is_function, listed, load_function
from plaudit.rollout.engine import RolloutEngine
from plaudit.rollout.local import LocalEngine
from plaudit.runs import Run
from plaudit.tokenizer import Tokenizer
from plaudit.types import Prompt, Rollout

Summary = dict[str, Any]
Watch = Callable[[Sequence[str], Sequence[str]], list[float]]
C = TypeVar("C", bound=RunConfig, contravariant=True)


class Stage(Protocol[C]):
    def __call__(self, config: C, *, resume: bool = False) -> Summary: ...


def stage(work: Callable[[C, Run], Summary]) -> Stage[C]:
    """A command from what it does in an open run folder: a finished run is not repeated, what it cost is noted."""

    @functools.wraps(work)
    def command(config: C, *, resume: bool = False) -> Summary:
        run = Run.open(work.__name__, config, resume=resume)
        if run.summary is not None:
            say(f"{run.folder}: this run is finished; nothing to do")
            return run.summary
        try:
            summary = work(config, run)
        except (ConfigError, DataError, ModelError):
            # the command could not begin: corrected, it may take the same folder
            run.discard_if_empty()
            raise
        cost = {"seconds": round(time.time() - run.started, 1), "peak_rss_mib": devices.peak_rss_mib()}
        return run.finish(summary | {"seed": config.seed} | cost)

    # help and inspect are to show the command, not the function inside it
    del command.__wrapped__
    command.__annotations__ = {"config": work.__annotations__["config"], "resume": "bool", "return": "Summary"}
    return command


def save(folder: Path, write: Callable[[Path], None]) -> Path:
    """Writes a model folder beside its place and renames it, so that a folder that is there is whole."""
    scratch = folder.with_name(f".{folder.name}.tmp")
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        write(scratch)
        shutil.rmtree(folder, ignore_errors=True)
        scratch.rename(folder)
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(scratch, ignore_errors=True)
        raise RunError(f"{folder}: the model could not be written: {error}") from None
    return folder


def prepared(rows, trunk: Trunk | None):
    """The rows with the trunk's features, where there is a trunk."""
    return trunk.prepare(rows) if trunk else rows


def engine_for(
    config: EngineConfig,
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    device: torch.device,
    *,
    trunk: Trunk | None = None,
    head: LanguageHead | None = None,
) -> RolloutEngine:
    """The engine of a configuration.

    Raises:
        ConfigError: this model cannot be sampled from in the way asked for.
    """
    if config.kind == "vllm":
        # vLLM is a heavy import, and most runs do without it
        from plaudit.rollout.vllm import VLLMEngine

        context = min(context_length(model) or 2048, 2048)
        folder = model.name_or_path
        return VLLMEngine(model, folder, tokenizer.end_ids, max_rows=config.max_rows, context=context, device=device)
    weights = config.weights
    if weights == "auto":
        weights = "bfloat16" if in_bfloat16("auto", model) and can_fuse(model.base_model) else "float32"
    return LocalEngine(
        model,
        tokenizer.end_ids,
        trunk=trunk,
        head=head,
        text_of=tokenizer.decode,
        weights=weights,
        max_rows=config.max_rows,
        device=device,
    )


def generate(
    engine: RolloutEngine, prompts: Sequence[Prompt], sampling: SamplingConfig, seed: int, title: str
) -> Rollout:
    with Bar(title, len(prompts)) as bar:
        return engine.generate(prompts, sampling, seed=seed, progress=lambda done: bar.advance(amount=done - bar.done))


def fits(model: PreTrainedModel, prompts: Sequence[Prompt], sampling: SamplingConfig) -> None:
    context = context_length(model)
    longest = max(len(p.ids) for p in prompts)
    if context and longest + sampling.max_new_tokens > context:
        raise DataError(
            f"a prompt of {longest} tokens and {sampling.max_new_tokens} new ones exceed the model's context "
            f"of {context}; shorten the prompts, or lower sampling.max_new_tokens"
        )


def holds(model: PreTrainedModel, tokens: int, key: str) -> None:
    context = context_length(model)
    if context and tokens > context:
        raise ConfigError(f"{key}={tokens} exceeds the model's context of {context}; lower it")


def one_vocabulary(mine: Tokenizer, other: Tokenizer, name: str) -> None:
    if mine.fingerprint() != other.fingerprint():
        raise ModelError(f"{name}: its vocabulary differs from the policy's; train both from one model")


def watch(name: str) -> Watch:
    if name in ("gold", "vader"):
        judge = judges.gold_judge() if name == "gold" else judges.vader_judge()
        return lambda prompts, responses: judge([p + r for p, r in zip(prompts, responses, strict=True)])
    if not is_function(name):
        raise ConfigError(f"unknown judge {name!r}: gold, vader, or a function as file.py:name")
    function = load_function(name)

    def watch(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        try:
            said = listed(function(prompts, responses))
        except Exception as error:
            raise RewardError(f"judge {name} raised {type(error).__name__}: {first_line(error)}") from error
        return checked(said, len(prompts), f"judge {name}")

    return watch
