"""Plaudit: glass-box RLHF, from human choices to an aligned language model."""

from __future__ import annotations

import importlib
import os
from typing import Any

__version__ = "0.1.0"

# oneDNN and PyTorch's layer above it each keep what is compiled for every size of matrix they meet, about a megabyte
# apiece and a thousand of them by default. They read these once, before the first product.
for _cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_cache, "128")

_MODULES = ("ops", "types", "config", "conventions", "recipes", "errors", "report")
_STAGES = ("sft", "collect", "label", "reward", "ppo", "dpo", "evaluate", "quickstart")


def __getattr__(name: str) -> Any:
    # torch takes seconds to import; what needs it is loaded when it is first asked for.
    if name in _MODULES:
        return importlib.import_module(f"plaudit.{name}")
    if name in _STAGES:
        return getattr(importlib.import_module("plaudit.recipes"), name)
    raise AttributeError(f"module 'plaudit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*_MODULES, *_STAGES, "__version__"])
