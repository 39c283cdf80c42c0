"""Modules that the server of `runs` imports before it forks: those that commands use."""

from __future__ import annotations

import contextlib
import gc

from acgpt.cli.ui import silence_libraries

silence_libraries()  # first: libraries read these settings when they are imported

import pydantic  # noqa: E402, F401  by typer, when it reads the command line
from transformers.conversion_mapping import get_checkpoint_conversion_mapping  # noqa: E402

import acgpt.cli.main  # noqa: E402
import acgpt.display.show  # noqa: E402
import acgpt.evaluation.evaluate  # noqa: E402
import acgpt.evaluation.features  # noqa: E402
import acgpt.evaluation.generate  # noqa: E402
import acgpt.evaluation.text_metrics  # noqa: E402
import acgpt.models.loading  # noqa: E402
import acgpt.training.train  # noqa: E402, F401

with contextlib.suppress(ImportError):
    import matplotlib.pyplot  # noqa: F401
get_checkpoint_conversion_mapping("gpt2")  # fills a cache of a thousand patterns
gc.freeze()  # the collector leaves all this alone in every fork
