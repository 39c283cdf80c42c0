"""acgpt: ask a causal language model for p(any tokens | any other tokens).

    import acgpt
    lm = acgpt.load()                                                    # the embedded default model and its adapter
    lm.log_prob("The capital of {{Italy}} is Rome.")                     # exact, in one forward pass
    lm.fill("The capital of {{_}} is Paris.")                            # gaps of any length, best fill first
    lm.sample("The cat {{_3}} on the {{_1}}.", n=5)                      # with a key-value cache
    lm.rank("The {{cat|dog|carburettor}} purred.")

Templates are documented in `acgpt.query.template`, queries on token ids in `acgpt.Query`.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from acgpt.errors import InputError, ModelError, OutputError, QueryError, ServerError, TemplateError
from acgpt.query.query import Query
from acgpt.query.template import escape, escape_slot
from acgpt.version import __version__

if TYPE_CHECKING:
    from acgpt.client import AsyncClient, Client
    from acgpt.data.prepare import prepare
    from acgpt.evaluation.evaluate import evaluate
    from acgpt.evaluation.generate import generate
    from acgpt.evaluation.score_samples import score_samples
    from acgpt.models.ask import Fill, Lengths, Piece, Ranked, Ranking, Sample, Score, TokenScore
    from acgpt.models.language_model import LanguageModel
    from acgpt.models.loading import load
    from acgpt.models.merge import merge
    from acgpt.models.metadata import Metadata
    from acgpt.models.push import push
    from acgpt.models.router import FutureIgnored
    from acgpt.report.compare import compare
    from acgpt.training.finetune import finetune
    from acgpt.training.train import train

# Names that need torch and transformers, which take seconds to import, or an extra. Imported on first use.
LAZY = {
    "AsyncClient": "acgpt.client",
    "Client": "acgpt.client",
    "Fill": "acgpt.models.ask",
    "FutureIgnored": "acgpt.models.router",
    "LanguageModel": "acgpt.models.language_model",
    "Lengths": "acgpt.models.ask",
    "Metadata": "acgpt.models.metadata",
    "Piece": "acgpt.models.ask",
    "Ranked": "acgpt.models.ask",
    "Ranking": "acgpt.models.ask",
    "Sample": "acgpt.models.ask",
    "Score": "acgpt.models.ask",
    "TokenScore": "acgpt.models.ask",
    "compare": "acgpt.report.compare",
    "evaluate": "acgpt.evaluation.evaluate",
    "finetune": "acgpt.training.finetune",
    "generate": "acgpt.evaluation.generate",
    "load": "acgpt.models.loading",
    "merge": "acgpt.models.merge",
    "prepare": "acgpt.data.prepare",
    "push": "acgpt.models.push",
    "score_samples": "acgpt.evaluation.score_samples",
    "train": "acgpt.training.train",
}

# Threads of OpenMP that wait for work spin, and so hold cores that another process needs. These limits are read when
# torch loads the runtime, and inherited by child processes: docs/explanation/footguns.md, "Speed".
if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "500")  # GNU's runtime: turns of a loop, instead of 300,000
    os.environ.setdefault("KMP_BLOCKTIME", "0")  # Intel's and LLVM's: milliseconds, instead of 200

__all__ = [
    "AsyncClient",
    "Client",
    "Fill",
    "FutureIgnored",
    "InputError",
    "LanguageModel",
    "Lengths",
    "Metadata",
    "ModelError",
    "OutputError",
    "Piece",
    "Query",
    "QueryError",
    "Ranked",
    "Ranking",
    "Sample",
    "Score",
    "ServerError",
    "TemplateError",
    "TokenScore",
    "__version__",
    "compare",
    "escape",
    "escape_slot",
    "evaluate",
    "finetune",
    "generate",
    "load",
    "merge",
    "prepare",
    "push",
    "score_samples",
    "train",
]


def __dir__() -> list[str]:
    """Return all public names, including those not imported yet."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    """Import a lazy name on first use."""
    from importlib import import_module

    if name not in LAZY:
        raise AttributeError(f"module 'acgpt' has no attribute {name!r}")
    return getattr(import_module(LAZY[name]), name)
