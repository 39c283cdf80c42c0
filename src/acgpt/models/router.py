"""Which of several adapters on one backbone answers a query.

    query                                                        who answers
    nothing given after an asked token, nothing unknown          no adapter: the bare causal backbone, no copies
    one gap: one run of asked tokens, all else given             the adapter for infilling
    anything else                                                the adapter for blocks, the training distribution

What an adapter is for is said by its name, if that is the name of a mode (`adapters.MODES`); else by the kind of
conditioning sets that most of its training texts had (its `acgpt.json`); one that says nothing of them is for blocks.
Only adapters that say they read copies are shown any. Where none of these is for what is wanted, the first of them
answers; where there are none, the backbone, by its own word.

`Router` also takes what the user says: an adapter by its name, or the model as it stands.

The choice (`route`) is a function of the query's roles and of what the adapters say; no token, weight or earlier query
has a part in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from transformers import PreTrainedModel

from acgpt.engine.locks import turn
from acgpt.engine.peft import active_adapter
from acgpt.errors import InputError
from acgpt.methods import Method
from acgpt.models.adapters import BARE, Adapter, Choice, unknown_name
from acgpt.models.metadata import Metadata, model_method
from acgpt.query.conditioning import Blocks, Infilling
from acgpt.query.query import Query

Value = TypeVar("Value")


@dataclass(frozen=True)
class Route:
    """Who answers a query, and how.

    Args:
        adapter: The adapter's name; `None` is the backbone.
        future: With copies of what is given?
        as_it_is: The model is asked as it stands, and nothing is switched.
    """

    adapter: str | None
    future: bool
    as_it_is: bool = False


def wanted_mode(query: Query, future: bool | None) -> str | None:
    """What an adapter should be for to answer this query; `None` if the causal backbone can do it as well.

    Args:
        query: The question; only the roles of its tokens count.
        future: As in `LanguageModel.log_prob`. `False` leaves nothing to read after an asked token, `True` wants copies
            even so.
    """
    ahead = query.needs_future if future is None else future
    if not ahead and not query.has_unknown:
        return None
    gap = len(query.blanks) == 1 and query.needs_future and not query.has_unknown
    return Infilling.kind if gap else Blocks.kind


def route(query: Query, adapters: Mapping[str, Adapter], backbone: Metadata | None, future: bool | None) -> Route:
    """Who answers a query, if there are several adapters and the user names none of them.

    Args:
        query: The question.
        adapters: By name, in the order of preference among equals.
        backbone: What the backbone itself says it can do.
        future: As in `LanguageModel.log_prob`.
    """
    mode = wanted_mode(query, future)
    if mode is None:
        return Route(None, False)
    readers = [adapter for adapter in adapters.values() if adapter.reads_copies and adapter.mode is not None]
    if query.has_unknown:  # one that has a MASK is better than one that has not
        readers = [each for each in readers if each.metadata and each.metadata.mask_token_id is not None] or readers
    readers.sort(key=lambda adapter: adapter.mode != mode)  # the first that is for it, else the first
    if readers:
        return Route(readers[0].name, future is not False)
    return Route(None, backbone is not None and backbone.reads_copies if future is None else future)


class Router:
    """Who answers a query: the adapter that is named, the one that is for such queries, or the one at work.

    Args:
        model: The backbone, with its adapters.
        says: What the backbone (under the name "none") and each adapter say they can do.
        enabled: Choose for each query the adapter that is for such queries, where none is named?
    """

    def __init__(self, model: PreTrainedModel, says: Mapping[str, Metadata | None], enabled: bool) -> None:
        self.model, self.says, self.enabled = model, says, enabled
        self.adapters = {name: Adapter.of(name, said) for name, said in says.items() if name != BARE}

    def chooses(self, adapter: Choice) -> bool:
        """Is the adapter chosen query by query, if the user says this of it?"""
        return adapter is None and self.enabled and bool(self.adapters)

    def at_work(self) -> str | None:
        """The adapter at work as the model stands, or several with + between them."""
        with turn(self.model):  # another thread may just have switched them
            return active_adapter(self.model) if self.adapters else None

    def named(self, adapter: Choice) -> str | None:
        """The adapter that is meant; by `None`, the one at work as the model stands."""
        if adapter is None:
            return self.at_work()
        if adapter is False or adapter == BARE:
            return None
        if not isinstance(adapter, str) or adapter not in self.adapters:
            raise InputError(f"adapter is {adapter!r}, {unknown_name(tuple(self.adapters))}")
        return adapter

    def metadata(self, adapter: str | None) -> Metadata | None:
        """What an adapter, or by `None` the backbone, says it can do; of several at work, the first."""
        return of_first(self.says, adapter)

    def method(self, way: Route) -> Method:
        """How whoever answers is asked."""
        method = model_method(self.metadata(way.adapter))
        return method.insisted() if way.future and not method.reads_future else method

    def reads_future(self, adapter: Choice) -> bool:
        """Does whoever may answer say that it can read the future?"""
        if self.chooses(adapter):
            return any(said.reads_copies for said in self.says.values() if said is not None)
        return model_method(self.metadata(self.named(adapter))).reads_future

    def routes(self, queries: Sequence[Query], future: bool | None, adapter: Choice) -> list[Route]:
        """Who answers each query, and with what in view; the arguments as in `LanguageModel.log_prob`."""
        if not (future is None or isinstance(future, bool)):
            raise InputError(f"future must be True, False or None, not {future!r}.")
        if self.chooses(adapter):
            return [route(query, self.adapters, self.says[BARE], future) for query in queries]
        used = self.reads_future(adapter) if future is None else future
        # Without adapters, and where none is named, nothing is switched: the user may have, and then means it.
        return [Route(self.named(adapter), used, as_it_is=adapter is None or not self.adapters)] * len(queries)


def of_first(values: Mapping[str, Value], adapter: str | None) -> Value:
    """The value of an adapter, of the first of several with + between them, or by `None` of the backbone."""
    return values[(adapter or BARE).partition("+")[0]]
