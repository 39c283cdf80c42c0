"""One lock per network, so that several threads can use it.

A call switches adapters and modes of the network it asks, so two calls at once would answer with each other's. They
take turns instead:

    a call of `LanguageModel`                       holds the lock from the switch to the answer
    a pass of `attention.run`, a step of decoding   holds it while it runs

The lock belongs to the network, not to what wraps it: two `LanguageModel`s around one network share it. It is
re-entrant, and never held while a generator waits for its consumer, who may ask something else or never come back.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary

from torch.nn import Module


@dataclass
class Turn:
    """The lock of a network, and what is to be undone when the last of those who overlap is done.

    Args:
        lock: Held by the thread whose turn it is.
        evaluating: How many want the network without dropout, see `attention.evaluating`.
        training: The modules that were in training mode before.
    """

    lock: Any = field(default_factory=RLock)
    evaluating: int = 0
    training: list[Module] = field(default_factory=list)


# Kept apart from the networks: a lock can be neither copied nor pickled, and networks are.
_turns: WeakKeyDictionary[Module, Turn] = WeakKeyDictionary()
_register = RLock()  # re-entrant: a generator that is collected in the midst of it may ask for a turn


@contextmanager
def turn(network: Module) -> Iterator[Turn]:
    """Wait for the network; within, this thread alone uses it."""
    with _register:
        own = _turns.get(network)
        if own is None:
            own = _turns[network] = Turn()
    with own.lock:
        yield own


def _forget() -> None:
    """In a forked process: the threads that held locks are not there any more."""
    global _turns, _register
    _turns, _register = WeakKeyDictionary(), RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
