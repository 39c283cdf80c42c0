"""The kernels against a dense mask and plain cross-entropy: under Triton's interpreter on a CPU, and on a GPU.

The interpreter must be chosen before Triton is imported, so those cases run in a process of their own: this file, as a
program. It prints the errors that the tests below judge.
"""

from __future__ import annotations

import itertools
import json
import math
from contextlib import contextmanager

import pytest
import torch
from interpreter import run_interpreted
from torch.nn.attention import SDPBackend, sdpa_kernel

from acgpt.engine.layout import visible

pytest.importorskip("triton", reason="builds of torch for CPUs come without Triton")

# Queries as (copies, text slots). Blocks are of 16 and 32 here: lengths below, at and above their multiples.
RAGGED = [(33, 40), (0, 5), (16, 1), (1, 33), (3, 1)]
# Short ones beside two long ones: programs find their queries. At the end some have no slots, as in training.
SPARSE = [
    (2, 3),
    (40, 70),
    (0, 1),
    (15, 17),
    (0, 0),
    (1, 16),
    (16, 0),
    (0, 17),
    (33, 64),
    *[(1, 2)] * 14,
    (0, 0),
    (0, 0),
]
CASES = {
    "many short queries": (SPARSE, {}),
    "many short queries, other blocks": (SPARSE, {"blocks": (16, 32)}),
    "many short queries that share key heads": (SPARSE, {"blocks": (32, 16), "heads": 6, "key_heads": 2}),
    "many copies, few, none; dummies": (RAGGED, {}),
    "rows in larger blocks than keys": (RAGGED, {"blocks": (32, 16)}),
    "keys in larger blocks than rows": (RAGGED, {"blocks": (16, 32)}),
    "no copies at all": ([(0, 33), (0, 1)], {}),
    "read in both directions, with a text slot that nobody reads": ([(33, 1), (17, 1), (0, 2)], {}),
    "one query in whole blocks": ([(16, 32)], {}),
    "four heads share two key heads": (RAGGED[1:4], {"heads": 4, "key_heads": 2}),
    "strided as a network has them": (RAGGED[1:4], {"strided": True}),
    "channels apart in memory": ([(3, 5)], {"apart": True}),
    "64 channels": ([(17, 18)], {"dim": 64}),
    "half precision": (RAGGED[1:4], {"dtype": "float16"}),
}


# Steps of decoding as (rows, heads, key heads, queries a row, slots), and into how many parts rows are cut.
STEPS = {
    "rows as they are": ((3, 4, 4, 1, 50), 1),
    "few rows in parts, some of them empty": ((3, 4, 2, 1, 50), 2),
    "several queries a row": ((2, 4, 2, 5, 70), 4),
    "more queries than a block has": ((1, 2, 1, 40, 70), 1),
    "more queries than a block has, in parts": ((2, 2, 1, 40, 140), 4),
    "half a block of slots": ((2, 2, 2, 1, 9), 1),
}


# Cases of log-probabilities as (size of the vocabulary, dtype, forbidden token).
LOG_PROBS = {
    f"log-probs of {size} tokens in {dtype}, without {forbidden}": (size, dtype, forbidden)
    for size, dtype, forbidden in itertools.product((37, 8192, 8193, 20000), ("float32", "bfloat16"), (None, 11))
}
VOCABULARIES = (37, 8192, 8193, 20000)  # less than a block of the loss's kernel, one, a little more, several


def starts(lengths, device):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


def inputs(queries, *, heads, key_heads, dim, dtype, device="cpu", strided=False, apart=False, seed=0):
    """q, k, v and the gradient of the output; the first three ready to be differentiated."""
    rng = torch.Generator().manual_seed(seed)
    slots = sum(map(sum, queries))

    def draw(*shape):
        return torch.randn(*shape, generator=rng).to(device, dtype)

    q, k, v, dout = (draw(slots, n, dim) for n in (heads, key_heads, key_heads, heads))
    if strided:  # rotary leaves heads before slots; v is a part of a fused projection; dout comes transposed
        q, k, dout = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, dout))
        v = torch.cat([draw(slots, key_heads, 2 * dim), v], dim=2)[..., 2 * dim :]
    if apart:
        q, k, v, dout = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, dout))
    return q.detach().requires_grad_(), k.detach().requires_grad_(), v.detach().requires_grad_(), dout


def dense(q, k, v, dout, queries, scale):
    """The output and its gradients, query by query under `layout.visible`, in the precision of float64 or float32."""
    wide = torch.float64 if q.device.type == "cpu" else torch.float32
    leaves = [x.detach().to(wide).requires_grad_() for x in (q, k, v)]
    q, k, v = leaves
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    out, copy, text = torch.zeros_like(q), 0, sum(copies for copies, _ in queries)
    for n_copies, n_text in queries:
        slots = [*range(copy, copy + n_copies), *range(text, text + n_text)]
        copy, text = copy + n_copies, text + n_text
        mask = visible(torch.tensor([n_copies], device=q.device), len(slots))
        with sdpa_kernel(SDPBackend.MATH):
            rows = (x[slots].transpose(0, 1) for x in (q, k, v))
            attended = torch.nn.functional.scaled_dot_product_attention(*rows, attn_mask=mask, scale=scale)
        index = torch.tensor(slots, dtype=torch.int64, device=q.device)
        out = out.index_put((index,), attended.transpose(0, 1))
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(wide))]


@contextmanager
def poisoned():
    """Memory that nobody has written is NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def run_kernels(q, k, v, dout, queries, scale, attention=None):
    from acgpt.engine.kernels import attention as kernels

    copies, texts = zip(*queries, strict=True)
    where = starts(copies, q.device), starts(texts, q.device), sum(copies), max(copies), max(texts)
    with poisoned():
        out = (attention or kernels.attention)(q, k, v, *where, scale)
        gradients = torch.autograd.grad(out, (q, k, v), dout)
    for x, like in zip((out, *gradients), (q, q, k, v), strict=True):
        assert x.shape == like.shape and x.dtype == like.dtype
    assert out.is_contiguous()
    return [out.detach(), *gradients]


def relative_errors(got, want):
    names = ("out", "dq", "dk", "dv")
    errors = (((a.to(b.dtype) - b).norm() / b.norm()).item() for a, b in zip(got, want, strict=True))
    return dict(zip(names, errors, strict=True))


def exact(errors, limit):
    return all(error < limit for error in errors.values())  # false for NaN, which max() may pass over


def interpret(queries, *, blocks=(16, 16), dtype="float32", dim=32, heads=1, key_heads=1, **kind):
    """Errors of the interpreted kernels."""
    from acgpt.engine.kernels import attention as kernels

    for table in kernels.TUNING.values():
        table[dim] = {"BLOCK_M": blocks[0], "BLOCK_N": blocks[1], "num_warps": 4, "num_stages": 2}
    dtype = getattr(torch, dtype)
    data = inputs(queries, heads=heads, key_heads=key_heads, dim=dim, dtype=dtype, **kind)
    return relative_errors(run_kernels(*data, queries, 0.3), dense(*data, queries, 0.3))


def interpret_with_a_query_of_nans(queries, poisoned_query):
    """Errors of all other queries where one consists of NaN."""
    from acgpt.engine.kernels import attention as kernels

    for table in kernels.TUNING.values():
        table[32] = {"BLOCK_M": 16, "BLOCK_N": 32, "num_warps": 4, "num_stages": 2}
    q, k, v, dout = inputs(queries, heads=1, key_heads=1, dim=32, dtype=torch.float32)
    want = dense(q, k, v, dout, queries, 0.3)
    owner = torch.arange(len(queries)).repeat(2)
    owner = owner.repeat_interleave(torch.tensor(queries).T.flatten())  # (N,)
    others = owner != poisoned_query
    with torch.no_grad():
        for x in (q, k, v, dout):
            x[~others] = math.nan
    got = run_kernels(q, k, v, dout, queries, 0.3)
    assert all(x[~others].isnan().all() for x in got)
    return relative_errors([x[others] for x in got], [x[others] for x in want])


def interpret_compiled(queries):
    """Errors within torch.compile: a graph without a break, traced through the operator and its gradient."""
    from acgpt.engine.kernels import attention as kernels

    compiled = torch.compile(
        lambda *args: kernels.attention(*args) * 1, fullgraph=True, dynamic=False, backend="aot_eager"
    )
    data = inputs(queries, heads=2, key_heads=1, dim=32, dtype=torch.float32, strided=True)
    return relative_errors(run_kernels(*data, queries, 0.3, compiled), dense(*data, queries, 0.3))


def interpret_loss(rows, vocabulary, dim=5, weighted=False):
    """Errors of the loss of a vocabulary projection and of its gradients; some rows have no target, some the last.

    If `weighted`, each row has a weight, and one token no probability.
    """
    from acgpt.engine.kernels.loss import linear_cross_entropy

    rng = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, dim, generator=rng).requires_grad_() for n in (rows, vocabulary))
    targets = torch.randint(0, vocabulary, (rows,), generator=rng)
    targets[::3], targets[1] = -100, vocabulary - 1
    weights, never, logits = None, None, (hidden @ weight.T).double()
    if weighted:
        weights, never = torch.rand(rows, generator=rng) + 0.5, vocabulary // 2
        targets[targets == never] = 0
        logits = logits.index_fill(1, torch.tensor([never]), float("-inf"))
    losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    want = (losses if weights is None else losses * weights).sum() / 7
    found = linear_cross_entropy(hidden, weight, targets, weights, never) / 7
    pairs = [(found, want), *zip(*(torch.autograd.grad(x, (hidden, weight)) for x in (found, want)), strict=True)]
    errors = (((a - b).norm() / b.norm()).item() for a, b in pairs)
    return dict(zip(("loss", "hidden", "weight"), errors, strict=True))


def interpret_log_probs(vocabulary, dtype, forbidden):
    """Errors of log-probabilities: under given logits with extremes and padding, and under a vocabulary projection."""
    from acgpt.engine.kernels import log_probs as kernel

    rng, dtype, rows = torch.Generator().manual_seed(0), getattr(torch, dtype), 7
    columns = -(-vocabulary // kernel.ALIGN) * kernel.ALIGN
    logits = (30 * torch.randn(rows, columns, generator=rng)).to(dtype)
    logits[:, vocabulary:] = math.nan  # padding is not read
    targets = torch.randint(0, vocabulary, (rows,), generator=rng)
    targets[0], targets[1] = vocabulary - 1, 0
    logits[2, :-1], logits[3, 3:] = -math.inf, logits[3, 3:] - 500  # but one; most of them far below
    logits[2, 1], targets[2], targets[4] = -300, 1, 5
    logits[4, 5] = -math.inf  # an impossible target
    logits[6, : min(vocabulary - 1, kernel.BLOCK)], targets[6] = -math.inf, vocabulary - 1  # nothing in the first block
    if forbidden is not None:
        targets[targets == forbidden], targets[5] = 2, forbidden
    found = torch.full((rows,), math.nan)
    kernel.row_log_probs(logits, targets, found, vocabulary, forbidden)

    def plain(logits):
        logits = logits[:, :vocabulary].double()
        if forbidden is not None:
            logits = logits.index_fill(1, torch.tensor([forbidden]), -math.inf)
        return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]

    def error(found, want):
        assert torch.equal(found.isinf(), want.isinf())
        finite = want.isfinite()
        return ((found - want)[finite].abs() / want[finite].abs().clamp(min=1)).max().item()

    errors = {"given": error(found, plain(logits))}
    hidden, weight = (torch.randn(n, 8, generator=rng).to(dtype) for n in (rows, vocabulary))
    kernel.TILE, kernel.MOST_BYTES = 2, 2 * columns * hidden.element_size()  # several chunks
    found = kernel.linear_log_probs(hidden, weight, targets, forbidden)
    return errors | {"projected": error(found, plain(hidden @ weight.T))}


def interpret_broken_rows():
    """Whether rows with NaN, with ∞, without any token and with a target that does not exist are NaN, and no other."""
    from acgpt.engine.kernels import log_probs as kernel

    logits, found = torch.zeros(7, 64), torch.zeros(7)
    logits[1, 7], logits[2, 7], logits[3] = math.nan, math.inf, -math.inf
    kernel.row_log_probs(logits, torch.tensor([3, 3, 3, 3, -1, 40, 39]), found, 40, None)
    return {"wrong": float(found.isnan().tolist() != [False, True, True, True, True, True, False])}


def step_inputs(rows, heads, key_heads, width, slots, *, dim=32, dtype=torch.float32, device="cpu", keys=None):
    """Queries, keys and values of a step of decoding, strided as a sampler has them, and where the queries are.

    The first row, if it is as wide, begins with queries that only fill it up; the second, of three, is all of them.
    What no query may read is NaN.
    """
    rng = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=rng).to(device, dtype)

    ends = torch.randint(width, slots + 1, (rows,), generator=rng)
    ends[-1] = slots
    at = ends[:, None] - width + torch.arange(width)
    at[0, : width // 2] = slots
    if rows > 2:
        at[1] = slots
    q = draw(rows, width, heads, dim).transpose(1, 2)
    k, v = (draw(rows, slots + 1, key_heads, dim) for _ in range(2))
    reach = torch.where(at < slots, at, 0).amax(1)
    unread = (torch.arange(slots + 1) > reach[:, None]).to(device)
    for x in (k, v):
        x[unread] = math.nan
    k, v = (x[:, :slots].transpose(1, 2) for x in (k, v))
    return q, k if keys is None else k.to(keys), v, at.to(device)


def step_by_definition(q, k, v, at, slots):
    """In float64, under a mask; queries that only fill up a row read slot 0."""
    k, v = (x.nan_to_num().double().repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    mask = torch.arange(slots, device=q.device) <= torch.where(at < slots, at, 0)[:, None, :, None]
    with sdpa_kernel(SDPBackend.MATH):
        out = torch.nn.functional.scaled_dot_product_attention(q.double(), k, v, attn_mask=mask, scale=0.3)
    return out.transpose(1, 2)


def interpret_step(shape, parts):
    """The error of an interpreted step of decoding."""
    from acgpt.engine.kernels import decode as decode_kernel

    decode_kernel.TUNING[32]["BLOCK_N"] = 16
    decode_kernel.parts_of = lambda *_: parts
    data = step_inputs(*shape)
    with poisoned():
        found = decode_kernel.attention(*data, shape[-1], 0.3)
    want = step_by_definition(*data, shape[-1])
    assert found.shape == want.shape
    return {"out": ((found - want).norm() / want.norm()).item()}


def interpret_all():
    results = {f"loss over {size} tokens": interpret_loss(7, size) for size in VOCABULARIES}
    results |= {f"weighted loss over {size} tokens": interpret_loss(7, size, weighted=True) for size in VOCABULARIES}
    results |= {name: interpret_log_probs(*case) for name, case in LOG_PROBS.items()}
    results["broken rows"] = interpret_broken_rows()
    results |= {name: interpret(queries, **kind) for name, (queries, kind) in CASES.items()}
    for i in range(3):
        results[f"query {i} is NaN"] = interpret_with_a_query_of_nans([(17, 20), (5, 33), (1, 1)], i)
    results |= {name: interpret_step(*step) for name, step in STEPS.items()}
    results["compiled"] = interpret_compiled([(5, 9), (0, 3)])
    return results


@pytest.mark.parametrize("size", [16, 32])
def test_programs_search_for_their_queries_if_most_would_have_no_work(size):
    from acgpt.engine.kernels.attention import programs_of

    def programs(queries):
        copies, texts = (max(numbers) for numbers in zip(*queries, strict=True))
        return programs_of(sum(map(sum, queries)), len(queries), -(-copies // size) + -(-texts // size), size)

    slots = sum(map(sum, SPARSE))
    assert programs(SPARSE) == (slots // size + 2 * len(SPARSE), 32)
    assert programs(RAGGED)[1] == 0


@pytest.fixture(scope="module")
def interpreted():
    """Errors by case, from a process with Triton's interpreter."""
    return run_interpreted(__file__)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_kernels_agree_with_the_dense_mask(interpreted, case):
    limit = 1e-3 if case == "half precision" else 1e-6
    assert exact(interpreted[case], limit), interpreted[case]


@pytest.mark.slow
@pytest.mark.parametrize("query", range(3))
def test_a_query_never_reads_another(interpreted, query):
    assert exact(interpreted[f"query {query} is NaN"], 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("size", VOCABULARIES)
def test_the_loss_and_its_gradients_agree_with_plain_cross_entropy(interpreted, size):
    for case in (f"loss over {size} tokens", f"weighted loss over {size} tokens"):
        assert exact(interpreted[case], 1e-5), interpreted[case]


@pytest.mark.slow
@pytest.mark.parametrize("case", LOG_PROBS)
def test_log_probs_agree_with_plain_log_softmax(interpreted, case):
    assert exact(interpreted[case], 1e-5), interpreted[case]


@pytest.mark.slow
def test_log_probs_of_broken_logits_are_nan(interpreted):
    assert exact(interpreted["broken rows"], 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("case", STEPS)
def test_a_step_of_decoding_reads_of_each_row_what_it_has_and_no_more(interpreted, case):
    assert exact(interpreted[case], 1e-6), interpreted[case]


@pytest.mark.slow
def test_the_operator_is_one_node_under_compile(interpreted):
    assert exact(interpreted["compiled"], 1e-6)


gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


class TestOnCuda:
    pytestmark = gpu
    queries = ((600, 1023), (0, 1023), (613, 1023), (128, 256), (1, 300), (77, 1), (3, 1), (0, 1))
    sparse = (*queries, *((i % 50, i % 3 * 40) for i in range(100)), (0, 0))  # programs find their queries

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("queries", [queries, sparse], ids=["long", "short"])
    @pytest.mark.parametrize(("heads", "key_heads", "dim"), [(4, 4, 64), (6, 2, 64), (4, 1, 32), (4, 2, 128)])
    def test_kernels_agree_with_the_dense_mask(self, heads, key_heads, dim, queries, dtype):
        shape = {"heads": heads, "key_heads": key_heads, "dim": dim}
        data = inputs(queries, **shape, dtype=dtype, device="cuda", strided=True)
        errors = relative_errors(run_kernels(*data, queries, dim**-0.5), dense(*data, queries, dim**-0.5))
        print(dtype, heads, key_heads, dim, errors)
        assert exact(errors, 1e-2 if dtype == torch.bfloat16 else 2e-3), errors

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("shape", [(64, 12, 12), (3, 12, 12), (1, 4, 1), (40, 6, 2)], ids=str)
    @pytest.mark.parametrize("width", [1, 4, 40])
    @pytest.mark.parametrize("dim", [32, 64, 128])
    def test_a_step_of_decoding_reads_of_each_row_what_it_has_and_no_more(self, shape, width, dim, dtype):
        from acgpt.engine.kernels import decode as decode_kernel

        data = step_inputs(*shape, width, 1500, dim=dim, dtype=dtype, device="cuda", keys=torch.float32)
        with poisoned():
            found, again = (decode_kernel.attention(*data, 1500, 0.3) for _ in range(2))
        want = step_by_definition(*data, 1500)
        error = ((found - want).norm() / want.norm()).item()
        assert error < (1e-2 if dtype == torch.bfloat16 else 2e-3), error
        assert torch.equal(found, again)

    def test_results_repeat_bit_by_bit(self):
        data = inputs(self.queries, heads=4, key_heads=2, dim=64, dtype=torch.bfloat16, device="cuda")
        first, second = (run_kernels(*data, self.queries, 0.125) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))

    def test_compiled_agrees_with_eager(self):
        from acgpt.engine.kernels import attention as kernels

        compiled = torch.compile(lambda *args: kernels.attention(*args) * 1, fullgraph=True, dynamic=False)
        data = inputs(self.queries, heads=4, key_heads=4, dim=64, dtype=torch.bfloat16, device="cuda", strided=True)
        eager, graph = (run_kernels(*data, self.queries, 0.125, f) for f in (None, compiled))
        assert all(torch.equal(a, b) for a, b in zip(eager, graph, strict=True))


if __name__ == "__main__":
    print(json.dumps(interpret_all()))
