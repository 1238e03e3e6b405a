"""The composition root: each stage turns a configuration into concrete objects, runs them, and leaves a run folder.

Every function here is a command and can be called from a notebook. Below this package there are only objects with one
to three methods; above it only the command line.
"""

from plaudit.recipes.dpo import dpo
from plaudit.recipes.evaluation import evaluate
from plaudit.recipes.ppo import ppo
from plaudit.recipes.preferences import collect, label
from plaudit.recipes.quickstart import quickstart
from plaudit.recipes.reward import reward
from plaudit.recipes.sft import sft
from plaudit.recipes.use import Chat, score

__all__ = ["Chat", "collect", "dpo", "evaluate", "label", "ppo", "quickstart", "reward", "score", "sft"]
