"""acgpt: ask a causal language model for p(any tokens | any other tokens).

    import acgpt
    lm = acgpt.load()                                                    # the embedded default model and its adapter
    lm.log_prob("The capital of {{Italy}} is Rome.")                     # exact, in one forward pass
    lm.sample("The cat {{_3}} on the {{_1}}.", n=5)                      # with a key-value cache
    lm.rank("The {{cat|dog|carburettor}} purred.")

Templates are documented in `acgpt.query.template`, queries on token ids in `acgpt.Query`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from acgpt.errors import InputError, ModelError, OutputError, QueryError, TemplateError
from acgpt.query.query import Query
from acgpt.query.template import escape
from acgpt.version import __version__

if TYPE_CHECKING:
    from acgpt.models.language_model import FutureIgnored, LanguageModel, Ranked, Ranking, Sample, Score, TokenScore
    from acgpt.models.loading import load
    from acgpt.models.metadata import Metadata

__all__ = [
    "FutureIgnored",
    "InputError",
    "LanguageModel",
    "Metadata",
    "ModelError",
    "OutputError",
    "Query",
    "QueryError",
    "Ranked",
    "Ranking",
    "Sample",
    "Score",
    "TemplateError",
    "TokenScore",
    "__version__",
    "escape",
    "load",
]


def __dir__() -> list[str]:
    """All public names, those too that have not been imported yet."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    """Import what needs torch and transformers (seconds) only when it is first used."""
    from importlib import import_module

    for module in ("models.language_model", "models.loading", "models.metadata") if name in __all__ else ():
        found = vars(import_module(f"acgpt.{module}"))
        if name in found:
            return found[name]
    raise AttributeError(f"module 'acgpt' has no attribute {name!r}")
