"""One lock per network, so that several threads can use it.

A call switches the adapters and modes of its network, so two simultaneous calls would disturb each other. They take
turns instead:

    a call of `LanguageModel`                       holds the lock from the switch to the answer
    a pass of `attention.run`, a step of decoding   holds it while it runs

The lock belongs to the network, not to its wrapper: two `LanguageModel`s around one network share it. It is re-entrant.
It is not held while a generator waits for its consumer, who may make another call or never resume the generator.

A second lock, `process_lock`, is for what changes the state of the process and restores it afterwards: two threads
would restore each other's. A whole load holds it, with its downloads.
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
    """The lock of a network, and the state to restore when the last of several overlapping calls ends.

    Args:
        lock: Held by the thread that uses the network.
        evaluating: Number of callers inside `modules.evaluating`.
        training: Modules that were in training mode before.
        resting: State of the adapters that a switch will restore, see `peft.Switch`; `None` outside of a switch.
        switches: Incremented at each switch and each return; readers without the lock retry if it changed.
    """

    lock: Any = field(default_factory=RLock)
    evaluating: int = 0
    training: list[Module] = field(default_factory=list)
    resting: Any = None
    switches: int = 0


# Not stored on the networks: these are copied and pickled, and a lock cannot be.
_turns: WeakKeyDictionary[Module, Turn] = WeakKeyDictionary()
_process = RLock()
_register = RLock()  # re-entrant: a generator may be garbage-collected inside, and call `turn`


def turn_of(network: Module) -> Turn:
    """Return the lock and the state of a network, without waiting."""
    with _register:
        state = _turns.get(network)
        if state is None:
            state = _turns[network] = Turn()
    return state


@contextmanager
def turn(network: Module) -> Iterator[Turn]:
    """Wait for the network's lock; inside the context only this thread uses the network."""
    state = turn_of(network)
    with state.lock:
        yield state


@contextmanager
def process_lock() -> Iterator[None]:
    """Load or try a network inside the context: one thread of the process at a time.

    To load a network, transformers replaces functions of torch for the moment; to try one, torch is told not to
    compile. Whoever also needs the turn of a network that others can use takes that first.
    """
    with _process:
        yield


def _forget() -> None:
    """Drop all locks in a forked process, where the threads that held them do not exist."""
    global _turns, _register, _process
    _turns, _register, _process = WeakKeyDictionary(), RLock(), RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
