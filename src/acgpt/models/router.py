"""Which of several adapters on one backbone answers a query.

    query                                                        who answers
    nothing given after an asked token, nothing unknown          no adapter: the bare causal backbone, no copies
    one gap: one run of asked tokens, all else given             the adapter for infilling
    anything else                                                the adapter for blocks, the training distribution

What an adapter is for is said by its name, if that is the name of a mode (`adapters.MODES`); else by the kind of
conditioning sets that most of its training texts had (its `acgpt.json`); one that says nothing of them is for blocks.
Only adapters that say they read copies are shown any. Where none of these is for what is wanted, the first of them
answers; where there are none, the backbone, by its own word.

The choice (`route`) is a function of the query's roles and of what the adapters say; no token, weight or earlier query
has a part in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from acgpt.models.adapters import Adapter
from acgpt.models.metadata import Metadata
from acgpt.query.conditioning import Blocks, Infilling
from acgpt.query.query import Query


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
