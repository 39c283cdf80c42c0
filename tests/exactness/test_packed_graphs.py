"""Captured packed passes: their padding on a CPU, without captures, and the graphs on a GPU (`make gpu-test`).

Cases that run a network's kernels need Triton's interpreter, in a process of their own as in `test_cuda_step`: this
file, as a program.
"""

from __future__ import annotations

import gc
import json
import warnings

import numpy as np
import pytest
import torch
from interpreter import run_interpreted
from models import random_query
from test_cuda_step import network, with_lora
from test_varlen import PAIRS, by_definition

from acgpt.engine import attention, packed_graphs
from acgpt.engine.architecture import check_model
from acgpt.engine.attention import Dense, Recorder, Segments, Varlen, run
from acgpt.engine.cuda_step import CudaStep
from acgpt.engine.engine import Engine
from acgpt.engine.layout import build
from acgpt.engine.packed_graphs import Bucket, Buffers, PackedGraphs, PackedRow, capacity, difference
from acgpt.query.query import Query
from acgpt.query.sampling import Sampling

CAPTURING = 4  # passes of the second use of a bucket: its own, one to compare with, one that compiles, the captured one
BATCHES = [
    *PAIRS,
    ((0,), (1,)),
    ((1, 0, 0, 4), (0, 0, 3, 2)),  # the second query has no slots
    ((64,), (64,)),  # a full bucket
    ((65, 0, 3), (0, 70, 300)),
    (tuple(range(20)), tuple(reversed(range(20)))),
]


def answers(model, layout, rows, hidden, backend=Dense):
    """Return what a packed pass returns, by the network itself."""
    recorder = Recorder()
    output = run(model, *layout.inputs(), backend(layout), rows, recorder, hidden=hidden)[0]
    return output, recorder.states


def some_batches(*lengths, shares=(0.5, 0.4, 0.6)):
    """Return layouts of one bucket: each with a query of every length, some in another order."""
    return [
        build([random_query(10 * seed + n, n, share=share) for n in order], bos=0, mask=None, future=True)
        for seed, (share, order) in enumerate(zip(shares, (lengths, lengths[::-1], sorted(lengths)), strict=True))
    ]


# ---- shapes ----------------------------------------------------------------------------------------------------------


def test_capacities_are_the_next_powers():
    assert [capacity(n, 64) for n in (0, 1, 64, 65, 128, 1000, 8192)] == [0, 64, 64, 128, 128, 1024, 8192]
    assert [capacity(n, 128, 4) for n in (1, 128, 129, 512, 513)] == [128, 128, 512, 512, 2048]


@pytest.mark.parametrize(("copies", "texts"), BATCHES)
def test_a_bucket_has_room_for_its_batches_and_is_that_of_a_full_one(copies, texts):
    bucket = Bucket.of(copies, texts)
    assert bucket.copies >= sum(copies) and bucket.texts >= sum(texts) and bucket.queries >= len(copies)
    assert bucket.longest >= max(*copies, *texts) and bool(bucket.copies) == bool(sum(copies))
    full = Bucket.of((bucket.copies, *[0] * (bucket.queries - 1)), (bucket.texts, *[0] * (bucket.queries - 1)))
    assert (full.copies, full.texts, full.queries) == (bucket.copies, bucket.texts, bucket.queries)


def test_what_would_cost_more_than_launches_is_not_captured():
    assert Bucket.of((4000,), (4000,)).fits(8192) and not Bucket.of((4000,), (4200,)).fits(8192)
    assert not Bucket.of((0,), (65,)).fits(100)
    assert Bucket.of((4,) * 1024, (4,) * 1024).fits(8192) and not Bucket.of((1,) * 1025, (1,) * 1025).fits(8192)
    assert not Bucket.of((1,) * 1000 + (0,), (1,) * 1000 + (600,)).fits(8192)  # grids of 1,024 queries of 2,048 slots


@pytest.mark.parametrize(("copies", "texts"), BATCHES)
def test_no_query_sees_padding(copies, texts, monkeypatch):
    monkeypatch.setattr(attention, "flash", by_definition)
    bucket, total = Bucket.of(copies, texts), sum(copies) + sum(texts)
    real = torch.cat([torch.arange(sum(copies)), bucket.copies + torch.arange(sum(texts))])  # slots of the bucket
    generator = torch.Generator().manual_seed(0)
    packed = torch.randn(3, 1, 2, total, 4, dtype=torch.float64, generator=generator)
    padded = torch.full((3, 1, 2, bucket.slots, 4), float("nan"), dtype=torch.float64)
    padded[:, :, :, real] = packed
    numbers = bucket.segment_numbers(copies, texts)
    assert numbers.shape == (bucket.numbers,) and numbers.dtype == np.int64
    keys = numbers[: bucket.slots]
    assert keys.min() >= 0 and keys.max() < bucket.slots and sorted(keys[:total]) == real.tolist()
    ours = Varlen(bucket.segments(torch.from_numpy(numbers)))(*padded, 0.3)
    expected = Varlen(Segments.of(copies, texts, torch.device("cpu")))(*packed, 0.3)
    assert torch.equal(ours[:, real], expected) and not expected.isnan().any()


# ---- networks, under Triton's interpreter ----------------------------------------------------------------------------


def interpret_network():
    """Return the relative differences between padded passes and the network, and how many passes were padded."""
    attention.flash = by_definition
    model, graphs, errors = network("llama"), PackedGraphs(), []
    check_model(model)
    step = CudaStep(model, True)
    kinds = [(False, True), (False, True), (False, True), (True, False), (True, True)]  # hidden, kept
    batches = some_batches(4, 1, 3)
    with torch.no_grad():
        for turn, (hidden, kept) in enumerate(kinds):
            layout = batches[turn % 3]
            rows = layout.rows if turn else torch.arange(len(layout.ids))
            results = graphs.packed(step, layout, rows, hidden=hidden, kept=kept)
            output, states = answers(model, layout, rows, hidden)
            errors.append(difference(results, (output, states if kept else [])))
        for weight in model.parameters():
            weight.mul_(1.1)
        step.refresh()
        causal = build([random_query(5, 6)], bos=0, mask=None, future=False)
        for layout in (batches[0], causal, causal, causal):
            errors.append(
                difference(graphs.packed(step, layout, layout.rows), answers(model, layout, layout.rows, False))
            )
    return errors, [bucket.copies for bucket in graphs.captured[step].graphs], step.calls


def interpret_refusal():
    """Return what is kept of a pass that does not agree, and whether its results are right all the same."""
    attention.flash = by_definition
    model, graphs = network("llama"), PackedGraphs()
    check_model(model)
    step, layout = CudaStep(model, True), some_batches(5, 2)[0]
    packed_graphs.PackedRow = lambda memory, layers: PackedRow(memory.clone(), layers)  # the memory is not written
    with torch.no_grad(), pytest.warns(UserWarning, match="cannot be captured"):
        errors = [
            difference(graphs.packed(step, layout, layout.rows), answers(model, layout, layout.rows, False))
            for _ in range(3)
        ]
    return errors, graphs.usable, graphs.buffers is None


def interpret_failure(failure):
    """Return how far results are off if a pass cannot be captured, how often that is tried, and what is concluded."""
    attention.flash = by_definition
    model, graphs, tries = network("llama"), PackedGraphs(), []
    check_model(model)
    step, layout = CudaStep(model, True), some_batches(5, 2)[0]

    def run_out(self, step, bucket):
        tries.append(bucket)
        raise failure

    run, Buffers.run = Buffers.run, run_out
    with torch.no_grad(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        errors = [
            difference(graphs.packed(step, layout, layout.rows), answers(model, layout, layout.rows, False))
            for _ in range(4)
        ]
    Buffers.run = run
    return errors, len(tries), graphs.usable, [str(warning.message) for warning in told]


def interpret_stale():
    """Return how far results are off if there is room for one graph, and the copies of the bucket that has it."""
    attention.flash = by_definition
    most, stale = packed_graphs.MOST_GRAPHS, packed_graphs.STALE
    packed_graphs.MOST_GRAPHS, packed_graphs.STALE = 1, 3
    model, graphs, errors, kept = network("llama"), PackedGraphs(), [], []
    check_model(model)
    step, first = CudaStep(model, True), some_batches(4, 1, 3)[0]
    second = build([random_query(5, 6)], bos=0, mask=None, future=False)
    with torch.no_grad():
        for layout in (first, first, second, second, second, first, first, first, second):
            results = graphs.packed(step, layout, layout.rows)
            errors.append(difference(results, answers(model, layout, layout.rows, False)))
            kept.append([bucket.copies for bucket in graphs.captured[step].graphs])
    packed_graphs.MOST_GRAPHS, packed_graphs.STALE = most, stale
    return errors, kept


@pytest.fixture(scope="module")
def interpreted():
    """Results by case, from a process with Triton's interpreter."""
    return run_interpreted(__file__)


@pytest.mark.slow
def test_padded_passes_compute_what_the_network_computes(interpreted):
    errors, captured, calls = interpreted["network"]
    assert len(errors) == 9 and max(errors) < 1e-5, errors
    assert captured == [8, 0]  # with copies, and without
    assert calls == 9 + 4  # the second use of a bucket is run three times


@pytest.mark.slow
def test_a_graph_that_does_not_agree_is_not_used(interpreted):
    errors, usable, freed = interpreted["refusal"]
    assert max(errors) < 1e-5 and not usable and freed


@pytest.mark.slow
def test_a_pass_for_which_there_is_no_memory_is_run_as_it_is(interpreted):
    errors, tries, usable, told = interpreted["no memory"]
    assert max(errors) < 1e-5 and tries == 1 and usable and not told


@pytest.mark.slow
def test_if_a_pass_cannot_be_captured_none_is(interpreted):
    errors, tries, usable, told = interpreted["no capture"]
    assert max(errors) < 1e-5 and tries == 1 and not usable
    assert [message.startswith("passes cannot be captured here") for message in told] == [True]


@pytest.mark.slow
def test_a_graph_that_was_not_used_for_long_gives_way(interpreted):
    errors, kept = interpreted["stale"]
    assert max(errors) < 1e-5
    # first, first: captured; second, second: the first is not stale; second: it is; and so on
    assert kept == [[], [8], [8], [8], [0], [0], [0], [8], [8]]


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
class TestOnCuda:
    @staticmethod
    def engine(model, serving=True):
        """Return an engine of a server, or of a library user."""
        engine = Engine(model, bos=0, mask=1, backend="varlen")
        engine.serving = serving
        return engine

    @staticmethod
    def check_scores(engine, queries, nats=0.15):
        """Check that an engine's scores are those of the network itself, and return how many passes it launched."""
        step = engine.cuda_steps.current()
        before = step.calls
        with torch.inference_mode():
            ours = engine.log_probs(queries, future=True)
            launched = step.calls - before
            theirs = Engine(engine.model, bos=0, mask=1, backend="dense").log_probs(queries, future=True)
        assert np.abs(np.concatenate(ours) - np.concatenate(theirs)).max() < nats
        return launched

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("architecture", ["gpt_neox", "llama"])
    @pytest.mark.parametrize("lengths", [(21, 5, 1, 12), (200, 31, 90, 150, 3) * 8, (7,)], ids=len)
    def test_captured_passes_compute_what_the_network_computes(self, architecture, dtype, lengths):
        model = network(architecture, dtype=dtype, width=256).cuda()
        check_model(model)
        step, graphs, worst = self.engine(model).cuda_steps.current(), PackedGraphs(), 0.0
        batches = [layout.to(model.device) for layout in some_batches(*lengths)]
        bucket = Bucket.of(batches[0].copies, batches[0].texts)
        batches = [layout for layout in batches if Bucket.of(layout.copies, layout.texts) == bucket]
        earlier = []
        with torch.inference_mode():
            for turn in range(12):
                layout, hidden, kept = batches[turn % len(batches)], turn % 3 == 0, turn % 4 != 1
                before = step.calls
                results = graphs.packed(step, layout, layout.rows, hidden=hidden, kept=kept)
                assert step.calls - before == (1, CAPTURING)[turn] if turn < 2 else step.calls == before
                output, states = answers(model, layout, layout.rows, hidden, Varlen)
                expected = output, states if kept else []
                assert len(results[1]) == len(expected[1])
                for ours, theirs in zip(results[1], expected[1], strict=True):
                    assert all(one.shape == other.shape for one, other in zip(ours, theirs, strict=True))
                earlier.append((results, expected))
            for results, expected in earlier:  # not overwritten by later passes
                worst = max(worst, difference(results, expected))
        print(f"{architecture} {dtype} {len(lengths)}: relative difference {worst:.2e}")
        assert graphs.usable and list(graphs.captured[step].graphs) == [bucket]
        assert worst < (3e-2 if dtype == torch.bfloat16 else 4e-3)

    def test_passes_without_copies_are_captured(self):
        model = network("llama", dtype=torch.float16, width=256).cuda()
        check_model(model)
        step, graphs = self.engine(model).cuda_steps.current(), PackedGraphs()
        queries = [random_query(seed, 3 + 11 * seed) for seed in range(9)]
        layout = build(queries, bos=0, mask=None, future=False).to(model.device)
        with torch.inference_mode():
            for _ in range(4):
                results = graphs.packed(step, layout, layout.rows)
                assert difference(results, answers(model, layout, layout.rows, False, Varlen)) < 4e-3
        assert [bucket.copies for bucket in graphs.captured[step].graphs] == [0]

    def test_every_adapter_and_trained_weights_are_obeyed(self):
        adapted = with_lora(network("llama", dtype=torch.float16).cuda())
        model = adapted.get_base_model()
        check_model(model)
        engine, queries = self.engine(model), [random_query(seed, 30 + seed) for seed in range(5)]
        for name in ("default", "other"):
            adapted.set_adapter(name)
            assert [self.check_scores(engine, queries) for _ in range(4)] == [1, CAPTURING, 0, 0]
        adapted.set_adapter("default")
        with torch.no_grad():
            for layer in model.model.layers:
                layer.mlp.up_proj.base_layer.weight.mul_(-1)
                layer.self_attn.q_proj.lora_A["default"].weight.mul_(-1)
        assert self.check_scores(engine, queries) == 0  # replayed, with the new weights
        assert len(engine.packed_graphs.captured) == 2

    def test_graphs_of_replaced_weights_are_dropped(self):
        model = network("llama", dtype=torch.float16).cuda()
        check_model(model)
        engine, queries = self.engine(model), [random_query(seed, 30 + seed) for seed in range(5)]
        assert [self.check_scores(engine, queries) for _ in range(3)] == [1, CAPTURING, 0]
        for weight in model.parameters():
            weight.data = weight.data * 1.1
        assert [self.check_scores(engine, queries) for _ in range(3)] == [1, CAPTURING, 0]
        gc.collect()
        assert len(engine.packed_graphs.captured) == 1

    def test_samples_of_a_server_agree_with_one_pass(self):
        model = network("gpt_neox", dtype=torch.float16).cuda()
        check_model(model)
        engine, network_itself = self.engine(model), Engine(model, bos=0, mask=1, backend="dense")
        queries = [random_query(seed, 40 + seed, share=0.5) for seed in range(6)]
        for turn in range(4):
            with torch.inference_mode():
                samples = engine.sample(queries, 1, Sampling(seed=turn), True)
                filled = []
                for query, ((tokens, _),) in zip(queries, samples, strict=True):
                    text = list(query.tokens)
                    for position, token in zip(query.asked_positions, tokens, strict=True):
                        text[position - 1] = int(token)
                    filled.append(Query(text, query.given, query.asked))
                expected = network_itself.log_probs(filled, future=True)
            for ((_, log_probs),), scores in zip(samples, expected, strict=True):
                assert np.abs(log_probs - np.array(scores)).max() < 0.08
        assert sum(len(own.graphs) for own in engine.packed_graphs.captured.values()) == 1

    def test_beyond_the_bounds_passes_are_run_as_they_are(self, monkeypatch):
        monkeypatch.setattr(packed_graphs, "MOST_GRAPHS", 1)
        model = network("llama", dtype=torch.float16).cuda()
        check_model(model)
        engine = self.engine(model)
        few, many = ([random_query(seed, 30 + seed) for seed in range(count)] for count in (5, 30))
        assert [self.check_scores(engine, few) for _ in range(3)] == [1, CAPTURING, 0]
        assert [self.check_scores(engine, many) for _ in range(3)] == [1, 1, 1]
        assert self.check_scores(engine, few) == 0
        monkeypatch.setattr(packed_graphs, "STALE", 2)
        assert [self.check_scores(engine, many) for _ in range(3)] == [1, CAPTURING, 0]  # in its place
        assert [self.check_scores(engine, few) for _ in range(4)] == [1, CAPTURING, 0, 0]
        monkeypatch.setattr(packed_graphs, "MOST_SLOTS", 64)
        engine = self.engine(model)
        assert [self.check_scores(engine, few) for _ in range(3)] == [1, 1, 1]

    def test_another_stream_does_not_use_the_buffers(self):
        model = network("llama", dtype=torch.float16).cuda()
        check_model(model)
        engine, queries = self.engine(model), [random_query(seed, 30 + seed) for seed in range(5)]
        assert [self.check_scores(engine, queries) for _ in range(3)] == [1, CAPTURING, 0]
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            assert self.check_scores(engine, queries) == 1
        torch.cuda.synchronize()
        assert self.check_scores(engine, queries) == 0

    def test_calls_of_a_library_user_are_not_captured(self):
        model = network("llama", dtype=torch.float16).cuda()
        check_model(model)
        engine, queries = self.engine(model, serving=False), [random_query(seed, 30 + seed) for seed in range(5)]
        layout = build(queries, bos=0, mask=None, future=True, first_only=True).to(model.device)
        with torch.inference_mode():
            for _ in range(4):
                engine.packed_pass(layout, kept=True)  # as a prefill does
        assert not engine.packed_graphs.captured and engine.packed_graphs.buffers is None


if __name__ == "__main__":
    packed_graphs.LEAST_SLOTS = 8  # the interpreter runs every slot by itself
    results = {
        "network": interpret_network(),
        "no memory": interpret_failure(torch.OutOfMemoryError("no memory")),
        "no capture": interpret_failure(RuntimeError("no capture")),
        "stale": interpret_stale(),
        "refusal": interpret_refusal(),
    }
    print(json.dumps(results))
