"""What all tests share: annotated shapes and dtypes are checked at run time, caches of their own."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from jaxtyping import install_import_hook

# No test may need the network; a look-up that would go out fails at once instead.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
# Read when the library is imported, which test modules do while they are collected.
_SCRATCH = tempfile.mkdtemp(prefix="plaudit-tests-")
os.environ["HF_DATASETS_CACHE"] = _SCRATCH

# Installed before anything of the package is imported. Left out: what pydantic and SQLAlchemy check themselves.
CHECKED = (
    "ops",
    "conventions",
    "types",
    "tokenizer",
    "learner",
    "checkpoint",
    "models",
    "data",
    "rewards",
    "rollout",
    "algorithms",
)
install_import_hook([f"plaudit.{name}" for name in CHECKED], "runtime_types.check")


def pytest_unconfigure() -> None:
    shutil.rmtree(_SCRATCH, ignore_errors=True)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where built-in models are made: PLAUDIT_CACHE if it is set, else a folder of this session."""
    with pytest.MonkeyPatch.context() as patch:
        if not os.environ.get("PLAUDIT_CACHE"):
            patch.setenv("PLAUDIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield Path(os.environ["PLAUDIT_CACHE"])


@pytest.fixture
def tiny(cache: Path):
    """The built-in tiny model, freshly loaded, and its tokenizer: a test may change both."""
    from plaudit.models.load import load_language_model

    return load_language_model("tiny")


@pytest.fixture
def tokenizer(cache: Path):
    """The tiny model's tokenizer, one token a byte; a test may change it."""
    from plaudit.models.load import locate
    from plaudit.tokenizer import Tokenizer

    return Tokenizer.load(locate("tiny"))
