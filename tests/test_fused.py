"""Blocks fused for inference compute the model they were made from, or are not used."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, VOCABULARY, build
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from plaudit.models.fused import can_fuse
from plaudit.models.stack import Trunk, bfloat16_products
from plaudit.types import Sequences

ROWS = [[5, 9, 3, 17, 2], [7, 2], [4, 4, 4, 8, 11, 60, 61], [6]]


def _rows() -> Sequences:
    return Sequences.pack(ROWS, [[True] * len(row) for row in ROWS])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sampling", [False, True])
def test_a_trunk_gives_what_the_model_has_there(family: str, sampling: bool):
    model = build(family)
    expected = model(_rows().tokens, output_hidden_states=True).hidden_states[2]
    features = Trunk(model.base_model, 1, sampling=sampling).prepare(_rows()).features
    real = torch.arange(features.shape[1])[None] < _rows().lengths[:, None]
    assert torch.allclose(features[real], expected[real], atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_bfloat16_trunk_is_near_and_leaves_the_weights(family: str):
    model = build(family)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    exact = Trunk(model.base_model, 1).prepare(_rows()).features
    low = Trunk(model.base_model, 1, "bfloat16").prepare(_rows()).features
    # GPT-2 multiplies with a layer class of its own, which stays float32
    assert family == "gpt2" or not torch.equal(low, exact)
    assert (low - exact).norm() < 0.05 * exact.norm()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_the_families_that_are_fused():
    """The three whose blocks are Llama's; that the others are not is what keeps them right."""
    assert {family for family in FAMILIES if can_fuse(build(family).base_model)} == {"llama", "qwen2", "qwen3"}


@pytest.mark.parametrize("deviation", [{"residual_multiplier": 0.5}, {"attention_multiplier": 0.9}, {}])
def test_a_model_of_the_same_structure_with_other_numbers_is_not_fused(deviation: dict[str, float]):
    """Granite's modules carry Llama's names; its multipliers are what tells them apart."""
    config = AutoConfig.for_model(
        "granite", vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2, **deviation,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    fused = can_fuse(model.base_model)
    features = Trunk(model.base_model, 1, sampling=True).prepare(_rows()).features
    expected = model(_rows().tokens, output_hidden_states=True).hidden_states[2]
    real = torch.arange(features.shape[1])[None] < _rows().lengths[:, None]
    assert torch.allclose(features[real], expected[real], atol=1e-4)
    assert not (fused and "residual_multiplier" in deviation)


def test_a_family_that_differs_only_at_late_positions_is_not_fused():
    """Ministral 3 scales its queries from a certain position on, and is Llama before it."""
    config = AutoConfig.for_model(
        "ministral3", vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    config.rope_parameters |= {"original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.5}
    model = AutoModelForCausalLM.from_config(config).eval()
    tokens = torch.arange(20)[None]
    rows = Sequences.pack(tokens.tolist(), [[True] * 20])
    expected = model(tokens, output_hidden_states=True).hidden_states[1]
    assert torch.allclose(Trunk(model.base_model, 1).prepare(rows).features, expected, atol=1e-4)
    assert not can_fuse(model.base_model)


def test_bfloat16_products_have_the_gradients_of_float32_ones_and_end_with_the_block():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 8, bias=False))
    x = torch.randn(3, 5, 64, requires_grad=True)

    def gradients() -> list[torch.Tensor]:
        (layers(x).square().sum()).backward()
        made = [x.grad, *(p.grad for p in layers.parameters())]
        x.grad = None
        layers.zero_grad(set_to_none=True)
        return made

    exact = gradients()
    with bfloat16_products(layers):
        low = gradients()
    for mine, theirs in zip(low, exact, strict=True):
        assert mine.dtype == torch.float32
        assert not torch.equal(mine, theirs)
        assert (mine - theirs).norm() < 0.02 * theirs.norm()
    assert all(torch.equal(a, b) for a, b in zip(gradients(), exact, strict=True))
