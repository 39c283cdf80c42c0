"""Modules that the server of `runs` imports before it forks: those that commands use."""

from __future__ import annotations

import gc

import pydantic  # noqa: F401  by typer, when it reads the command line
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from acgpt.cli.preloaded import import_commands

import_commands()
get_checkpoint_conversion_mapping("gpt2")  # fills a cache of a thousand patterns
gc.freeze()  # the collector leaves all this alone in every fork
