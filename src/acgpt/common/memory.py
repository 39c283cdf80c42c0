"""Python's garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused(*, freeze: bool = False) -> Iterator[None]:
    """Pause garbage collection: it would repeatedly walk through all that is allocated without freeing anything.

    Args:
        freeze: Exempt what was allocated from later collections, too. For imports and for loading a model: nearly all
            of it stays.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if freeze:
                gc.freeze()
            gc.enable()
