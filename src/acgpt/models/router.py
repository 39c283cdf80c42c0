"""The router: choose which of several adapters on one base model answers a query.

    query                                                        answered by
    nothing given after an asked token, nothing unknown          the causal base model: no adapter, no copies
    one gap: one run of asked tokens, all else given             the adapter for infilling
    anything else                                                the adapter for blocks, the training distribution

The mode of an adapter is given by its name, if that is the name of a mode (`adapters.MODES`); else by the most frequent
kind of conditioning sets in its training (its `acgpt.json`); else it is blocks. Only adapters whose metadata say that
they read copies are chosen. If none of them has the mode of the query, the first one answers; if there are none, the
base model does, with copies if its metadata allow them.

The choice (`route`) depends only on the roles of the query's tokens and on the adapters' metadata, never on tokens,
weights or earlier queries. `Router` also handles explicit choices: an adapter by name, or the model as it is.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from transformers import PreTrainedModel

from acgpt.engine.peft import active_adapter
from acgpt.errors import InputError, QueryError, reason
from acgpt.methods import Method
from acgpt.models.adapters import BARE, Adapter, unknown_name
from acgpt.models.ask import Choice
from acgpt.models.metadata import Metadata, model_method
from acgpt.query.conditioning import Blocks, Infilling
from acgpt.query.query import Query

Value = TypeVar("Value")


class FutureIgnored(UserWarning):
    """Warning that given tokens after a slot were ignored: the model is not known to read the future."""


FUTURE_UNSUPPORTED = (
    "no acgpt.json says that this model reads the future, or its adapter is left out: text after a slot is ignored. "
    "Load an adapter that can, or set `future=False` to accept this or `future=True` to use the future anyway."
)


@dataclass(frozen=True)
class Route:
    """The adapter that answers a query, and what it reads.

    Args:
        adapter: Name of the adapter; `None` is the base model.
        future: Whether predictions see given tokens after an asked one, through copies.
        keep_adapters: Whether to leave the active adapters of the model as they are, without switching.
    """

    adapter: str | None
    future: bool
    keep_adapters: bool = False


def wanted_mode(query: Query, future: bool | None) -> str | None:
    """Return the mode of the adapter to prefer for a query; `None` if the causal base model is enough.

    Args:
        query: The query; only the roles of its tokens matter.
        future: The argument of `LanguageModel.log_prob`. With `False` nothing after an asked token is read; with `True`
            copies are made even if no given token comes after an asked one.
    """
    uses_future = query.needs_future if future is None else future
    if not uses_future and not query.has_unknown:
        return None
    gap = len(query.blanks) == 1 and query.needs_future and not query.has_unknown
    return Infilling.kind if gap else Blocks.kind


def route(query: Query, adapters: Mapping[str, Adapter], backbone: Metadata | None, future: bool | None) -> Route:
    """Choose the adapter for a query, if the user has not named one.

    Args:
        query: The query.
        adapters: The adapters by name; among equals the first one is preferred.
        backbone: Metadata of the base model.
        future: The argument of `LanguageModel.log_prob`.
    """
    mode = wanted_mode(query, future)
    if mode is None:
        return Route(None, False)
    readers = [adapter for adapter in adapters.values() if adapter.reads_copies and adapter.mode is not None]
    if query.has_unknown:  # prefer adapters with a MASK token
        readers = [
            adapter for adapter in readers if adapter.metadata and adapter.metadata.mask_token_id is not None
        ] or readers
    readers.sort(key=lambda adapter: adapter.mode != mode)  # stable: the first with this mode, else the first
    if readers:
        return Route(readers[0].name, future is not False)
    return Route(None, backbone is not None and backbone.reads_copies if future is None else future)


class Router:
    """Decides which adapter answers: the one the user names, the one chosen for the query, or the active one.

    Args:
        model: The base model with its adapters.
        by_name: Metadata of the base model (under the name "none") and of each adapter.
        enabled: Whether to choose an adapter for each query if the user names none.

    Attributes:
        adapters: The adapters by name.
    """

    def __init__(self, model: PreTrainedModel, by_name: Mapping[str, Metadata | None], enabled: bool) -> None:
        self.model, self.by_name, self.enabled = model, by_name, enabled
        self.adapters = {name: Adapter.of(name, metadata) for name, metadata in by_name.items() if name != BARE}
        self.methods: dict[str, Method] = {}  # of the base model and of adapters, once they were asked
        self.warned = False  # of an ignored future

    def chooses_per_query(self, adapter: Choice) -> bool:
        """Return whether the adapter is chosen for each query, with this choice of the user."""
        return adapter is None and self.enabled and bool(self.adapters)

    def active(self) -> str | None:
        """Return the name of the active adapter; the names of several are joined by +. It waits for no pass."""
        return active_adapter(self.model) if self.adapters else None

    def resolve(self, adapter: Choice) -> str | None:
        """Return the name of the adapter that the user has chosen; the active one for `None`."""
        if adapter is None:
            return self.active()
        if adapter is False or adapter == BARE:
            return None
        if not isinstance(adapter, str) or adapter not in self.adapters:
            raise InputError(f"adapter is {reason(repr(adapter))}, {unknown_name(tuple(self.adapters))}")
        return adapter

    def metadata(self, adapter: str | None) -> Metadata | None:
        """Return the metadata of an adapter, of the first of several, or for `None` of the base model."""
        return lookup(self.by_name, adapter)

    def own_method(self, adapter: str | None) -> Method:
        """Return the method that an adapter, the first of several, or for `None` the base model was trained with."""
        name = (adapter or BARE).partition("+")[0]
        if name not in self.methods:
            self.methods[name] = model_method(self.by_name[name])
        return self.methods[name]

    def method(self, route: Route) -> Method:
        """Return the method to query the model with on a route."""
        method = self.own_method(route.adapter)
        return method.with_copies() if route.future and not method.reads_future else method

    def reads_future(self, adapter: Choice) -> bool:
        """Return whether the metadata of an adapter that may answer say that it reads the future."""
        if self.chooses_per_query(adapter):
            return any(metadata.reads_copies for metadata in self.by_name.values() if metadata is not None)
        return self.own_method(self.resolve(adapter)).reads_future

    def routes(self, queries: Sequence[Query], future: bool | None, adapter: Choice) -> list[Route]:
        """Return the route of each query; see `LanguageModel.log_prob` for the arguments.

        Raises:
            QueryError: A query begins without BOS, and the method cannot read it.

        Warns:
            FutureIgnored: Once per router, if the future of a query is ignored although `future` is `None`.
        """
        if self.chooses_per_query(adapter):
            routes = [route(query, self.adapters, self.by_name[BARE], future) for query in queries]
        else:
            used = self.reads_future(adapter) if future is None else future
            # Nothing is switched if no adapter is named: the user may have activated one, and then means it.
            as_it_is = adapter is None or not self.adapters
            routes = [Route(self.resolve(adapter), used, keep_adapters=as_it_is)] * len(queries)
        for query, chosen in zip(queries, routes, strict=True):
            if query.start is not None and not (method := self.method(chosen)).any_start:
                raise QueryError(f"a model of method {method.name} reads BOS first: a query cannot have another start.")
        ignored = future is None and any(
            query.needs_future and not chosen.future for query, chosen in zip(queries, routes, strict=True)
        )
        if ignored and not self.warned:
            self.warned = True
            warnings.warn(FUTURE_UNSUPPORTED, FutureIgnored, stacklevel=caller_level())
        return routes


def caller_level() -> int:
    """Return the `stacklevel` with which the caller of this function warns about the line that called this package."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_globals.get("__name__", "").startswith(f"{__package__}."):
        frame, level = frame.f_back, level + 1
    return level


def lookup(values: Mapping[str, Value], adapter: str | None) -> Value:
    """Return the value of an adapter, of the first of several joined by +, or for `None` of the base model."""
    return values[(adapter or BARE).partition("+")[0]]
