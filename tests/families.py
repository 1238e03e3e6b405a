"""Small random models of the families that a user is likely to bring, for tests that must hold for all of them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

FAMILIES = ("llama", "qwen2", "qwen3", "gpt2", "gemma", "mistral", "phi")
VOCABULARY = 101


def build(family: str, *, seed: int = 0, layers: int = 3, positions: int = 128) -> PreTrainedModel:
    """A random causal language model over ids 0 … 100, in evaluation mode; pad is 0, end is 1.

    Its configuration asks for dropout 0.1 wherever the family knows it, and its weights are large enough for a mistake
    in positions or masks to show in the third digit.
    """
    common: dict[str, Any] = {"vocab_size": VOCABULARY, "initializer_range": 0.2}
    common |= {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    if family == "gpt2":
        own = {"n_embd": 32, "n_inner": 64, "n_layer": layers, "n_head": 4, "n_positions": positions}
        own |= {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
    else:
        own = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers, "num_attention_heads": 4}
        own |= {"num_key_value_heads": 2, "max_position_embeddings": positions, "attention_dropout": 0.1}
    if family == "gemma":
        own |= {"head_dim": 8}
    if family == "phi":
        own |= {"resid_pdrop": 0.1, "embd_pdrop": 0.1}
    config = AutoConfig.for_model(family, **common, **own)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
