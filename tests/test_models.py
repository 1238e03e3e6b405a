"""What is saved loads elsewhere, with the same numbers; what is missing is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from families import build
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from plaudit.config import ScoreConfig
from plaudit.errors import ModelError
from plaudit.models import builtin
from plaudit.models.load import (
    load_language_model,
    load_reward_model,
    locate,
    new_reward_model,
    save_language_model,
    save_reward_model,
)
from plaudit.models.network import scalar_head
from plaudit.recipes import score


@pytest.fixture
def reward_folder(tiny, tmp_path: Path) -> Path:
    _, tokenizer = tiny
    model = new_reward_model("tiny", tokenizer)
    torch.manual_seed(0)
    head = scalar_head(torch.randn(1, model.config.hidden_size), 0.25)
    save_reward_model(model, head, tokenizer, tmp_path / "reward", mean=0.7, deviation=1.9)
    return tmp_path / "reward"


def test_a_saved_language_model_is_a_plain_hugging_face_folder(tiny, tmp_path: Path):
    model, tokenizer = tiny
    save_language_model(model, tokenizer, tmp_path / "model")
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    ids = torch.tensor([[5, 6, 7, 8]])
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("abc")["input_ids"] == tokenizer.text_ids("abc")
    assert (tmp_path / "model" / "generation_config.json").exists()


def test_a_reward_model_scores_the_same_by_every_path(reward_folder: Path, tmp_path: Path):
    """Here, on the command line and as AutoModelForSequenceClassification (less the shift its configuration keeps),
    whatever the batch."""
    texts = ["a", "good and bad", "it ends.", "the same, but a good deal longer than the others"]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts), encoding="utf-8")
    ours = [row["score"] for row in score(str(reward_folder), str(tmp_path / "texts.jsonl"), ScoreConfig())]
    model, info = AutoModelForSequenceClassification.from_pretrained(reward_folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(reward_folder)
    assert tokenizer.pad_token_id != tokenizer.eos_token_id and model.config.pad_token_id == tokenizer.pad_token_id
    with torch.no_grad():
        batch = model.eval()(**tokenizer(texts, return_tensors="pt", padding=True)).logits[:, 0]
        alone = torch.cat([model(**tokenizer([t], return_tensors="pt")).logits[:, 0] for t in texts])
    assert torch.allclose(batch - model.config.score_shift, torch.tensor(ours), atol=1e-5)
    assert torch.allclose(batch, alone, atol=1e-5)


def test_prompt_and_response_score_like_the_text_they_make(reward_folder: Path, tmp_path: Path):
    rows = [{"text": "ab cd"}, {"prompt": "ab", "response": " cd"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    first, second = score(str(reward_folder), str(tmp_path / "rows.jsonl"), ScoreConfig())
    assert first["score"] == pytest.approx(second["score"], abs=1e-6)


def test_a_reward_model_saved_again_keeps_its_scores(reward_folder: Path, tmp_path: Path):
    model, head, tokenizer = load_reward_model(str(reward_folder))
    save_reward_model(model, head, tokenizer, tmp_path / "again", mean=0.0, deviation=1.0)
    _, again, _ = load_reward_model(str(tmp_path / "again"))
    assert torch.allclose(head.weight, again.weight) and torch.allclose(head.bias, again.bias)


def test_a_language_model_is_no_reward_model_and_the_other_way_round(tiny, reward_folder: Path):
    with pytest.raises(ModelError, match="no trained head"):
        load_reward_model("tiny")
    with pytest.raises(ModelError, match="this is a reward model"):
        load_language_model(str(reward_folder))


def test_a_folder_without_weights_or_configuration_is_named(cache, tmp_path: Path):
    whole = Path(locate("tiny"))
    shutil.copytree(whole, tmp_path / "no_weights", ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copytree(whole, tmp_path / "no_config", ignore=shutil.ignore_patterns("config.json"))
    with pytest.raises(ModelError, match="no weights"):
        load_language_model(str(tmp_path / "no_weights"))
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_language_model(str(tmp_path / "no_config"))
    with pytest.raises(ModelError, match="no such model folder"):
        load_language_model(str(tmp_path / "nowhere"))


def test_missing_weights_are_an_error_not_a_random_start(tmp_path: Path, cache):
    from safetensors.torch import load_file, save_file

    whole = Path(locate("tiny"))
    shutil.copytree(whole, tmp_path / "torn")
    weights = load_file(whole / "model.safetensors")
    weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, tmp_path / "torn" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="weights are missing"):
        load_language_model(str(tmp_path / "torn"))


def test_the_tiny_model_is_the_same_everywhere_and_leaves_the_global_stream_alone(tmp_path: Path, monkeypatch):
    weights = []
    for name in ("one", "two"):
        monkeypatch.setenv("PLAUDIT_CACHE", str(tmp_path / name))
        torch.manual_seed(5 if name == "one" else 6)
        before = torch.random.get_rng_state()
        builtin.folder("tiny")
        assert torch.equal(before, torch.random.get_rng_state())
        weights.append(load_language_model("tiny")[0].state_dict())
    assert all(torch.equal(weights[0][k], weights[1][k]) for k in weights[0])
    assert [p.name for p in (tmp_path / "one").iterdir()] == ["tiny-3"]


@pytest.mark.parametrize("family", ["gpt2", "qwen2"])
def test_other_families_make_reward_models_too(tiny, tmp_path: Path, family: str):
    _, tokenizer = tiny
    save_language_model(build(family), tokenizer, tmp_path / "base")
    model = new_reward_model(str(tmp_path / "base"), tokenizer)
    torch.manual_seed(0)
    save_reward_model(model, scalar_head(torch.randn(1, 32)), tokenizer, tmp_path / "reward", mean=0.0, deviation=1.0)
    assert load_reward_model(str(tmp_path / "reward"))[1].weight.shape == (1, 32)


def test_the_stories_model_loads_and_answers():
    """A real pretrained Llama without a pad token, whose end token is its beginning token."""
    folder = Path(__file__).parents[2] / "shared" / "models" / "stories260k"
    if not folder.is_dir():
        pytest.skip("the stories model lies beside the project only where it is developed")
    from plaudit.config import SamplingConfig
    from plaudit.rollout.local import LocalEngine

    model, tokenizer = load_language_model(str(folder))
    engine = LocalEngine(model, tokenizer.end_ids)
    prompt = tokenizer.prompt("Once upon a time")
    assert prompt.ids.count(tokenizer.inner.bos_token_id) <= 1
    text = tokenizer.responses(engine.generate([prompt], SamplingConfig(temperature=0.0, max_new_tokens=20), seed=0))[0]
    assert len(text.split()) > 5


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_model_runs_with_the_attention_asked_for(cache, attention: str):
    model, tokenizer = load_language_model("tiny", attention)
    scorer = new_reward_model("tiny", tokenizer, attention)
    usual, _ = load_language_model("tiny")
    tokens = torch.arange(12)[None] + 40
    assert {m.config._attn_implementation for m in (model, scorer)} == {attention}
    with torch.no_grad():
        assert torch.allclose(model(tokens).logits, usual(tokens).logits, atol=1e-5)
