"""Language and reward models in and out of plain Hugging Face folders."""

from __future__ import annotations

import hashlib
import math
import os
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)
from transformers.utils import logging as hf_logging

from plaudit.errors import ModelError, first_line
from plaudit.models import builtin
from plaudit.models.network import scalar_head
from plaudit.tokenizer import Tokenizer

hf_logging.set_verbosity_error()
hf_logging.disable_progress_bar()


def locate(model: str) -> str:
    """The folder of a built-in model, or the folder or hub id itself.

    Raises:
        ModelError: a folder was named that is not there or holds no model.
    """
    if model in builtin.MODELS:
        return str(builtin.folder(model))
    path = Path(model)
    if path.is_dir():
        if not (path / "config.json").exists():
            raise ModelError(f"{model}: no config.json, so this is no model folder")
        if not any(path.glob("*.safetensors")):
            raise ModelError(f"{model}: no weights (*.safetensors); the folder is incomplete or in another format")
    elif path.is_absolute() or model.startswith(".") or model.count("/") != 1 or os.environ.get("HF_HUB_OFFLINE"):
        raise ModelError(
            f"{model}: no such model folder; an earlier stage makes it, or name another one (a folder or a hub id)"
        )
    return model


def weights_digest(model: str) -> str:
    """SHA-256 over a model folder's weight files: the same name may be another model tomorrow. Empty for a hub id."""
    found = hashlib.sha256()
    files = sorted(Path(locate(model)).glob("*.safetensors"))
    for path in files:
        with path.open("rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest() if files else ""


def _attention(name: str) -> dict[str, str]:
    return {} if name == "auto" else {"attn_implementation": name}


def context_length(model: PreTrainedModel) -> int | None:
    """How many tokens the model's positions reach, where it says so."""
    return getattr(model.config, "max_position_embeddings", None)


def load_language_model(model: str, attention: str = "auto") -> tuple[PreTrainedModel, Tokenizer]:
    """A causal language model in float32, and its tokenizer. ``attention``: transformers' attn_implementation, or auto.

    Raises:
        ModelError: it is not there, or is incomplete.
    """
    tokenizer, folder = load_tokenizer(model), locate(model)
    try:
        loaded, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, **_attention(attention)
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"{model}: cannot be loaded: {first_line(error)}") from None
    if info["missing_keys"]:
        raise ModelError(f"{model}: weights are missing: {', '.join(sorted(info['missing_keys'])[:3])} …")
    return loaded.eval(), tokenizer


def load_tokenizer(model: str) -> Tokenizer:
    """A language model's tokenizer alone.

    Raises:
        ModelError: the model is not there, or is a reward model.
    """
    folder = locate(model)
    if _is_reward_model(folder):
        raise ModelError(f"{model}: this is a reward model; a language model is needed here")
    return Tokenizer.load(folder)


def new_reward_model(model: str, tokenizer: Tokenizer, attention: str = "auto") -> PreTrainedModel:
    """A reward model that starts from a language model, with a zero head (every text scores 0)."""
    folder = locate(model)
    loaded = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, num_labels=1, pad_token_id=tokenizer.pad_id, **_attention(attention)
    )
    nn.init.zeros_(_head(loaded, model).weight)
    return loaded.eval()


def load_reward_model(model: str, attention: str = "auto") -> tuple[PreTrainedModel, nn.Linear, Tokenizer]:
    """A reward model, its scalar head (the shift folded into the bias) and its tokenizer.

    Raises:
        ModelError: it is not there, is incomplete, or has no head.
    """
    folder = locate(model)
    try:
        loaded, info = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, **_attention(attention)
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"{model}: cannot be loaded as a reward model: {first_line(error)}") from None
    if info["missing_keys"]:
        raise ModelError(
            f"{model}: no trained head ({', '.join(sorted(info['missing_keys'])[:2])} is missing); "
            "train one with `plaudit reward`"
        )
    head = _head(loaded, model)
    if head.weight.shape[0] != 1:
        raise ModelError(f"{model}: the head has {head.weight.shape[0]} outputs; a reward model has one (num_labels=1)")
    shift = float(getattr(loaded.config, "score_shift", 0.0))
    if getattr(head, "bias", None) is not None:
        shift -= head.bias.item()
    return loaded.eval(), scalar_head(head.weight.detach(), shift), Tokenizer.load(folder)


def save_language_model(model: PreTrainedModel, tokenizer: Tokenizer, folder: Path) -> None:
    """A plain Hugging Face folder: weights, tokenizer, chat template, generation settings."""
    model.save_pretrained(folder)
    tokenizer.inner.save_pretrained(folder)


def save_reward_model(
    model: PreTrainedModel, head: nn.Linear, tokenizer: Tokenizer, folder: Path, mean: float, deviation: float
) -> None:
    """A folder for ``AutoModelForSequenceClassification`` whose score is (raw − mean) / deviation.

    The scale is folded into the head's weight. The class has no bias, so its output is the score plus
    ``config.score_shift``, which is kept in config.json and taken off wherever Plaudit scores.
    """
    if not (math.isfinite(mean) and math.isfinite(deviation) and deviation > 0):
        raise ModelError(f"the scores' mean {mean} and deviation {deviation} cannot normalise anything")
    target = _head(model, type(model).__name__)
    with torch.no_grad():
        target.weight.copy_(head.weight / deviation)
    model.config.score_shift = (mean - head.bias.item()) / deviation
    model.config.pad_token_id = tokenizer.pad_id
    model.save_pretrained(folder)
    padded = tokenizer.inner
    before = padded.pad_token
    padded.pad_token = padded.convert_ids_to_tokens(tokenizer.pad_id)
    padded.save_pretrained(folder)
    padded.pad_token = before


def _head(model: PreTrainedModel, name: str) -> nn.Linear:
    for attribute in ("score", "classifier"):
        head = getattr(model, attribute, None)
        if isinstance(head, nn.Linear):
            return head
    raise ModelError(f"{name}: {type(model).__name__} has no linear head on its last hidden state")


def _is_reward_model(folder: str) -> bool:
    try:
        kinds = AutoConfig.from_pretrained(folder).architectures or []
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder}: no readable config.json: {first_line(error)}") from None
    return any("SequenceClassification" in kind for kind in kinds)
