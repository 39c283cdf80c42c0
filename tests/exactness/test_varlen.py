"""Attention over a packed batch, on a CPU: flash attention is replaced by its definition, the rest is as on CUDA."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from models import tiny_model
from torch.nn import functional as F

from acgpt.engine import attention
from acgpt.engine.architecture import check_model
from acgpt.engine.attention import Dense, Regroup, Segments, Varlen, as_int64, run, take
from acgpt.engine.layout import build
from acgpt.methods import masked
from acgpt.query.query import Query

PAIRS = [((3,), (2,)), ((2, 0, 5), (1, 4, 3)), ((0, 0), (3, 1)), ((4, 1, 2), (0, 0, 0)), ((1, 7, 0, 2), (5, 1, 1, 9))]


def by_definition(q, k, v, q_starts, k_starts, longest_q, longest_k, *, scale=None, window_size=(-1, -1)):
    """torch's variable-length attention, (N, heads, D) in and out: segment by segment, causal to the bottom right.

    Slots of no segment get NaN: torch leaves them as they are in memory.
    """
    out = torch.full_like(q, float("nan"))
    for i in range(len(q_starts) - 1):
        mine, seen = slice(*q_starts[i : i + 2].tolist()), slice(*k_starts[i : i + 2].tolist())
        rows, columns = mine.stop - mine.start, seen.stop - seen.start
        assert rows <= longest_q and columns <= longest_k
        mask = torch.ones(rows, columns, dtype=torch.bool)
        if window_size == (-1, 0):
            mask = mask.tril(columns - rows)
        x, y, z = (t.transpose(0, 1)[None] for t in (q[mine], k[seen], v[seen]))
        attended = F.scaled_dot_product_attention(x, y, z, attn_mask=mask, scale=scale, enable_gqa=True)
        out[mine] = attended[0].transpose(0, 1)
    return out


@pytest.mark.parametrize(
    ("x", "in_words"),
    [
        (torch.randn(5, 2, 8), True),
        (torch.randn(5, 2, 8, dtype=torch.float64), True),
        (torch.randn(5, 2, 8).bfloat16(), True),
        (torch.randn(5, 2, 24).bfloat16()[..., 8:16], True),  # the keys of what was computed with queries and values
        (torch.randn(2, 5, 8).half().transpose(0, 1), True),  # heads first in memory
        (torch.randn(5, 2, 9).bfloat16()[..., :8], False),  # rows of 18 bytes
        (torch.randn(5, 2, 9).bfloat16()[..., 1:], False),  # and from the second on
        (torch.randn(5, 2, 6).bfloat16(), False),
        (torch.randn(82).bfloat16()[2:].view(5, 2, 8), False),  # from the fourth byte on
        (torch.randn(5, 8, 2).bfloat16().transpose(1, 2), False),
    ],
)
def test_rows_are_taken_whole_whatever_they_are_moved_in(x, in_words):
    index = torch.tensor([3, 0, 4, 4, 1])
    assert (as_int64(x).dtype == torch.int64) == in_words
    assert torch.equal(take(x, index), x[index]) and take(x, index).dtype == x.dtype


@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_regrouped_has_its_gradient(compiled):
    x, index = torch.randn(5, 2, 8, dtype=torch.float64, requires_grad=True), torch.tensor([3, 0, 4, 2, 1])

    def regroup(x):
        return Regroup.apply(x, index, index.argsort())

    regroup = torch.compile(regroup, backend="aot_eager", fullgraph=True) if compiled else regroup
    assert torch.equal(regroup(x), x[index]) and torch.autograd.gradcheck(regroup, (x,))
    assert compiled or torch.autograd.gradgradcheck(regroup, (x,))


@pytest.mark.parametrize(("copies", "texts"), PAIRS)
def test_keys_are_the_slots_of_each_query_in_turn_and_homes_the_way_back(copies, texts):
    found = Segments.of(copies, texts, torch.device("cpu"))
    slots = iter(range(sum(copies)))
    first = [[next(slots) for _ in range(n)] for n in copies]
    slots = iter(range(sum(copies), sum(copies) + sum(texts)))
    then = [[next(slots) for _ in range(n)] for n in texts]
    assert found.keys.tolist() == [slot for one, other in zip(first, then, strict=True) for slot in [*one, *other]]
    assert found.homes[found.keys].tolist() == list(range(len(found.keys)))
    for starts, sizes in (
        (found.copy_starts, copies),
        (found.text_starts, texts),
        (found.key_starts, np.add(copies, texts)),
    ):
        assert starts.tolist() == [0, *np.cumsum(sizes)] and starts.dtype == torch.int32


def layouts():
    rng = np.random.default_rng(0)
    queries = [
        Query(rng.integers(0, 20, n).tolist(), [*(rng.random(n - 1) < share), False])
        for n, share in ((7, 0.5), (3, 0.0), (9, 0.8))
    ]
    texts = [rng.integers(0, 20, n) for n in (6, 4, 9)]
    nothing = [np.zeros(0, dtype=np.int64)] * 3
    return {
        "with the future": build(queries, bos=0, mask=None, future=True),
        "without": build(queries, bos=0, mask=None, future=False),
        "both ways": masked.both_ways(texts, nothing, nothing, bos=0, text_slots=False),
        "both ways, fused": masked.both_ways(texts, nothing, nothing, bos=0, text_slots=True),
    }


@pytest.mark.parametrize("kind", layouts())
def test_packed_attention_is_that_of_the_rectangle(kind, monkeypatch):
    monkeypatch.setattr(attention, "flash", by_definition)
    layout = layouts()[kind]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, len(layout.ids), 4, dtype=torch.float64, generator=generator) for _ in range(3))
    torch.testing.assert_close(Varlen(layout)(q, k, v, 0.3), Dense(layout)(q, k, v, 0.3), rtol=1e-12, atol=1e-12)


def test_the_slot_for_the_kernels_changes_nothing_that_is_read_both_ways():
    model = tiny_model(vocabulary=20).double()
    check_model(model)
    texts = [np.array([0, 4, 5, 6]), np.array([0, 7, 8, 9, 3, 2])]
    places, targets = [np.array([2]), np.array([1, 4])], [np.array([5]), np.array([7, 3])]
    found = [
        run(model, layout.ids[None], layout.positions[None], Dense(layout), layout.rows)
        for text_slots in (False, True)
        for layout in [masked.both_ways(texts, places, targets, bos=0, text_slots=text_slots)]
    ]
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
