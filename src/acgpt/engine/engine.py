"""The engine: one object that scores queries and draws samples, for every method.

Engine(model, bos=…, mask=…)
log_probs   log p of every asked token, see `passes`
stream      queries ──► prefill ──► steps with a key-value cache ──► samples, as they are ready, see `decoding`
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from acgpt.engine.decode import Answer, Drawn, gather_samples, sample_numbers
from acgpt.engine.decoding import Decoding
from acgpt.engine.modules import turn
from acgpt.engine.passes import Passes, Prefill
from acgpt.engine.steps import Row
from acgpt.query.query import Query
from acgpt.query.sampling import Sampling


class Engine(Passes):
    """Scores queries and draws samples with one model; for its arguments see `Passes`.

    On CUDA it keeps its decoder, with the captured steps, between calls.
    """

    def stream(
        self,
        queries: Sequence[Query],
        n: int | Sequence[Sequence[int]],
        sampling: Sampling,
        future: bool,
        *,
        orders: Sequence[np.ndarray] | None = None,
        forbidden_token: int | None = None,
    ) -> Iterator[list[Answer]]:
        """Draw n samples of each query and yield them as they are ready, so that a consumer works while a GPU goes on.

        Args:
            queries: The queries.
            n: Number of samples of each query; or, for each query, the numbers of the samples to draw.
            sampling: Sampling options.
            future: Condition on given tokens after an asked one, see `layout.build`.
            orders: Positions of each query's tokens, if not in the order of the text; see `layout.build`.
            forbidden_token: A token that is not drawn.
        """
        rows = [Row(queries[number], number, sample, sampling) for number, sample in sample_numbers(queries, n)]
        rows.sort(key=lambda row: -len(row.query.asked_at))  # rows of a batch then take about as many steps
        with self.on_device():
            most = self.rows_at_once(max((2 * len(query) for query in queries), default=0))
            prefills: list[Prefill] = []
            for start in range(0, len(rows), most):
                batch, rest = rows[start : start + most], rows[start + most :]
                decoding = Decoding(
                    self, sampling, future=future, orders=orders, forbidden_token=forbidden_token, fixed=True
                )
                with turn(self.model):
                    steps, prefills = decoding.join(batch, prefills, rest[0].number if rest else None)
                yield from decoding.finish(steps)

    def sample(
        self, queries: Sequence[Query], n: int, sampling: Sampling, future: bool, *, forbidden_token: int | None = None
    ) -> list[list[Drawn]]:
        """Draw n samples of each query, as `stream` does, and return them all together."""
        return gather_samples(self.stream(queries, n, sampling, future, forbidden_token=forbidden_token), queries, n)
