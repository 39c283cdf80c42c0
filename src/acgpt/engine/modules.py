"""A network as one object for several threads: its lock, its modules and their modes.

A call switches the adapters and modes of its network, so two simultaneous calls would disturb each other. They take
turns instead:

    a call of `LanguageModel`                       holds the lock from the switch to the answer
    a pass of `attention.run`, a step of decoding   holds it while it runs

The lock belongs to the network, not to its wrapper: two `LanguageModel`s around one network share it. It is re-entrant.
It is not held while a generator waits for its consumer, who may make another call or never resume the generator.

A second lock, `process_lock`, is for what changes the state of the process and restores it afterwards: two threads
would restore each other's. A whole load holds it, with its downloads.

A server needs the list of modules for every pass, and torch takes milliseconds to make it. It is kept, with the
children of each module, and made again when any of them differ. A call that asks several times compares them once: see
`unchanged`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary

from torch.nn import Module, Parameter
from transformers import PreTrainedModel

from acgpt.errors import ModelError

Children = dict[str, Any]  # of a module, by name: `Module._modules`


# ---- locks -----------------------------------------------------------------------------------------------------------


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


# ---- modules ---------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Listing:
    """The modules below a network, which is not in it: it would never be freed.

    Args:
        modules: The modules.
        parents: The children of modules that have some, and which these were.
        leaves: The children of the other modules, all empty.
        parameters: The parameters of each module, the network first.
        hooks: Two for each module: the hooks after and before its pass.
        trusted: Number of contexts, see `unchanged`, in which it is not compared with the network.
    """

    modules: list[Module]
    parents: list[tuple[Children, tuple[Any, ...]]]
    leaves: list[Children]
    parameters: list[dict[str, Parameter | None]]
    hooks: list[dict[int, Any]]
    trusted: int = 0

    @classmethod
    def of(cls, model: Module) -> Listing:
        """List the modules of a network."""
        modules = list(model.modules())
        everything = [module._modules for module in modules]
        parents = [(children, tuple(children.values())) for children in everything if children]
        leaves = [children for children in everything if not children]
        parameters = [module._parameters for module in modules]
        hooks: list[dict[int, Any]] = [x for m in modules for x in (m._forward_hooks, m._forward_pre_hooks)]
        return cls(modules[1:], parents, leaves, parameters, hooks)

    def is_current(self, model: Module) -> bool:
        """Return whether the modules are still those of the network."""
        begins = self.parents[0][0] if self.parents else self.leaves[0]
        return (
            model._modules is begins
            and not any(self.leaves)
            and all([tuple(children.values()) == known for children, known in self.parents])
        )


_listings: WeakKeyDictionary[Module, Listing] = WeakKeyDictionary()


def listed(model: Module) -> Listing:
    """Return the listing of a network as it is now."""
    listing = _listings.get(model)
    if listing is None or not (listing.trusted or listing.is_current(model)):
        listing = _listings[model] = Listing.of(model)
    return listing


@contextmanager
def unchanged(model: Module) -> Iterator[None]:
    """Compare the list with the network once: inside the context no module is added, removed or replaced.

    The caller holds the lock of the network.
    """
    listing = listed(model)
    listing.trusted += 1
    try:
        yield
    finally:
        listing.trusted -= 1


def modules_of(model: Module) -> list[Module]:
    """Return all modules, as `Module.modules` does."""
    return [model, *listed(model).modules]


def hooks_of(model: Module) -> list[Any]:
    """Return the hooks of all modules that are called before or after their passes."""
    return [hook for hooks in listed(model).hooks if hooks for hook in hooks.values()]


def parameters_of(model: Module) -> list[Parameter]:
    """Return all parameters, each once, as `Module.parameters` does."""
    weights = [weight for table in listed(model).parameters if table for weight in table.values()]
    return list({id(weight): weight for weight in weights if weight is not None}.values())


def blocks_of(model: PreTrainedModel) -> list[Module]:
    """Return the repeated blocks of a network, as its class names them in `_no_split_modules`."""
    names = set(model._no_split_modules or ())
    return [module for module in modules_of(model) if type(module).__name__ in names]


class Watch:
    """A forward pre-hook that changes nothing; it may end a pass with an error. Decoding steps may leave it out.

    Args:
        look: Called before the module.
    """

    def __init__(self, look: Callable[[], object]) -> None:
        self.look = look

    def __call__(self, *_: object) -> None:
        """Call the function, which may raise."""
        self.look()


def is_hooked(model: PreTrainedModel) -> bool:
    """Return whether a module has hooks that may change what it computes."""
    return any(not isinstance(hook, Watch) for hook in hooks_of(model))


def compile_blocks(model: PreTrainedModel) -> None:
    """Compile a model's blocks with torch.compile; they are alike, so one compilation serves all of them."""
    if not (blocks := blocks_of(model)):
        raise ModelError(f"{type(model).__name__} does not say which blocks it consists of, so it cannot be compiled.")
    with turn(model):
        for block in blocks:
            block.compile()


def is_compiled(model: PreTrainedModel) -> bool:
    """Return whether `compile_blocks` was applied; the layers then do not count their calls."""
    blocks = blocks_of(model)
    return bool(blocks) and all(block._compiled_call_impl is not None for block in blocks)


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Switch off dropout inside the context; afterwards restore the mode of every module.

    If several threads evaluate a model at once, the last one to exit restores the modes.
    """
    with turn(model) as shared:
        shared.evaluating += 1
        training = [module for module in modules_of(model) if module.training]
        shared.training += training
        if training:  # a server comes here for every step, and `eval` would visit all modules again
            model.eval()
    try:
        yield
    finally:
        with turn(model):
            shared.evaluating -= 1
            if not shared.evaluating:
                for module in shared.training:
                    module.training = True
                shared.training.clear()
