"""Keys and values that later queries can share: of their copies, and of the text after them.

    kept        copies of A │ BOS The cat            a query shares with it
    query       copies of A │ BOS The dog            the copies, BOS and The
    query       copies of B │ BOS The cat            nothing: copies see each other, so one edit changes them all
    query       no copies   │ BOS The cat sat        with another one without copies, the common beginning

What is shared is not run again: the rest of the query is run as one wide decoding step. The memory is bounded: what was
used least recently is forgotten first.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from acgpt.engine.layout import Layout, slots_of, upload
from acgpt.engine.peft import adapter_layers, adapters_at_work
from acgpt.query.query import Query

States = list[tuple[Tensor, Tensor]]  # keys and values of each layer, (1, heads, slots, width of a head)
LEAST = 8  # slots that must be shared to be worth a pass of their own
PASS_WORK = 4 * 10**12  # weights times slots that a GPU reads in the time that it takes to launch a pass


@dataclass(frozen=True, eq=False)
class Prefix:
    """The slots of one query up to its first blank, with their keys and values.

    Args:
        root: What all that share with it must have in common: the adapters at work, the copies, the first tokens.
        copies: Number of copies, which come first.
        text: Token ids of BOS and the text after the copies.
        states: Keys and values of all slots.
    """

    root: tuple[object, ...]
    copies: int
    text: np.ndarray
    states: States

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values."""
        return sum(state.nbytes for pair in self.states for state in pair)


class Prefixes:
    """The prefixes that are kept for a model.

    Args:
        model: The model.
        most_bytes: Maximum number of bytes of all of them.
        least: Slots that must be shared. Default: `LEAST`, and on a GPU as many as `PASS_WORK` allows: a query that
            shares is run alone, and the others that wait with it in one pass.

    Attributes:
        hits: Number of queries that shared something.
        shared: Number of slots that were not run again.
    """

    def __init__(self, model: PreTrainedModel, most_bytes: int, least: int | None = None) -> None:
        self.adapter_layers, self.most_bytes = adapter_layers(model), most_bytes
        worth = PASS_WORK // model.num_parameters() if model.device.type == "cuda" else 0
        self.least = max(LEAST, worth) if least is None else least
        self.kept: OrderedDict[int, Prefix] = OrderedDict()  # the newest last
        self.alike: dict[tuple[object, ...], dict[int, Prefix]] = {}  # by `beginning`, the same ones
        self.nbytes = self.hits = self.shared = 0

    def clear(self) -> None:
        """Forget everything; needed if the weights have changed."""
        self.kept.clear()
        self.alike.clear()
        self.nbytes = 0

    def suits(self, query: Query, future: bool) -> bool:
        """Return whether a query is long enough to share something; `future` as in `layout.build`."""
        return slots_of(query, future, first_only=True) > self.least

    def root(self, layout: Layout) -> tuple[object, ...]:
        """Return the root of a layout of one query."""
        copies = slice(0, layout.copies[0])
        ids, positions = layout.ids[copies].numpy(), layout.positions[copies].numpy()
        return adapters_at_work(self.adapter_layers), ids.tobytes(), positions.tobytes()

    def beginning(self, root: tuple[object, ...], copies: int, text: np.ndarray) -> tuple[object, ...]:
        """Return what queries that share `least` slots have in common: the root, and the first tokens of the text."""
        return *root, text[: max(0, self.least - copies)].tobytes()

    def longest(self, layout: Layout) -> tuple[States, int] | None:
        """Return the longest prefix that a query can share: its states and number of slots.

        Args:
            layout: The layout of one query. Its last slot, which predicts, is never shared.
        """
        text = layout.ids[layout.copies[0] :].numpy()
        best, length = None, 0
        for key, prefix in self.alike.get(self.beginning(self.root(layout), layout.copies[0], text), {}).items():
            size = min(len(prefix.text), len(text) - 1)
            same = prefix.text[:size] == text[:size]
            common = size if same.all() else int(same.argmin())
            if common + prefix.copies > length:
                best, length = key, common + prefix.copies
        if best is None or length < self.least:
            return None
        self.kept.move_to_end(best)
        self.hits, self.shared = self.hits + 1, self.shared + length
        return [(keys[:, :, :length], values[:, :, :length]) for keys, values in self.kept[best].states], length

    def keep(self, layout: Layout, states: States) -> None:
        """Keep the slots of one query. What it extends is forgotten, and so is the oldest if there is no room.

        Args:
            layout: The layout of one query.
            states: Keys and values of its slots; they are not copied.
        """
        text = layout.ids[layout.copies[0] :].numpy()
        new = Prefix(self.beginning(self.root(layout), layout.copies[0], text), layout.copies[0], text, states)
        if len(layout.ids) <= self.least or new.nbytes > self.most_bytes:
            return
        for key, old in list(self.alike.get(new.root, {}).items()):
            if np.array_equal(old.text, new.text[: len(old.text)]):
                self._forget(key)
        while self.kept and self.nbytes + new.nbytes > self.most_bytes:
            self._forget(next(iter(self.kept)))
        self.kept[id(new)] = new
        self.alike.setdefault(new.root, {})[id(new)] = new
        self.nbytes += new.nbytes

    def _forget(self, key: int) -> None:
        """Forget a prefix."""
        prefix = self.kept.pop(key)
        self.nbytes -= prefix.nbytes
        del self.alike[prefix.root][key]
        if not self.alike[prefix.root]:
            del self.alike[prefix.root]


def part_of(layout: Layout, states: States, number: int, alone: Layout) -> States:
    """Return the keys and values of one query of a packed prefill.

    Args:
        layout: The layout of the pass.
        states: Keys and values of its slots.
        number: Index of the query.
        alone: The layout of the query alone.
    """
    slots, _ = layout.rectangle()
    index = upload(np.ascontiguousarray(slots[number, : len(alone.ids)]), states[0][0].device)
    return [(keys.index_select(2, index), values.index_select(2, index)) for keys, values in states]
