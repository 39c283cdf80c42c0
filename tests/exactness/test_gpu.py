"""The CUDA paths against the dense reference, on a GPU: `make gpu-test`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import toys
from joining import join_and_leave
from models import ARCHITECTURES, random_query, tiny_model

from acgpt.engine import passes as engines
from acgpt.engine.architecture import check_model
from acgpt.engine.attention import BACKENDS, Fused, run
from acgpt.engine.decode import draw
from acgpt.engine.decoding import Decoding
from acgpt.engine.engine import Engine
from acgpt.engine.kernels.log_probs import linear_log_probs
from acgpt.engine.layout import build
from acgpt.engine.modules import compile_blocks
from acgpt.engine.score import fast_head, target_log_probs
from acgpt.errors import ModelError
from acgpt.methods import METHODS, masked
from acgpt.query.query import Query
from acgpt.query.sampling import Sampling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


def logits_of(model, queries, backend, future=True):
    layout = build(queries, bos=0, mask=1, future=future).to(model.device)
    with torch.inference_mode():
        return run(model, layout.ids[None], layout.positions[None], BACKENDS[backend](layout), layout.rows)[0], layout


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_varlen_agrees_with_the_dense_mask_in_fp32(architecture, dtype, record_property):
    reference = tiny_model(architecture, scale=0.1, width=128).cuda()
    check_model(reference)
    queries = [random_query(seed, length) for seed, length in enumerate((60, 3, 17, 1, 60, 33))]
    queries.append(Query([5, 6, 7], [False, False, False]))  # no copies among queries with copies
    want, _ = logits_of(reference, queries, "dense")
    half = tiny_model(architecture, scale=0.1, width=128).cuda().to(dtype)
    check_model(half)
    few = [Query([5, 6], [False, True]), Query([5], [False])]  # a single copy in all, a single slot of text
    assert torch.allclose(logits_of(half, few, "varlen")[0], logits_of(half, few, "dense")[0], atol=0.05)
    got, _ = logits_of(half, queries, "varlen")
    dense_half, _ = logits_of(half, queries, "dense")
    error = ((got.float() - want).norm() / want.norm()).item()
    dense_error = ((dense_half.float() - want).norm() / want.norm()).item()
    print(f"{architecture} {dtype}: relative error {error:.2e}; dense in the same dtype {dense_error:.2e}")
    record_property("relative_error", error)
    assert dense_error < 3e-2
    assert error < 1.5 * dense_error + 1e-3


def test_texts_that_are_read_both_ways_agree_with_the_dense_mask_in_fp32():
    texts = [np.arange(2, n + 2) % 30 for n in (60, 3, 33)]
    places = [np.array([0, 1, n - 1]) for n in (60, 3, 33)]
    found = []
    for backend, dtype in (("dense", torch.float32), ("dense", torch.bfloat16), ("varlen", torch.bfloat16)):
        model = tiny_model("gpt_neox", scale=0.1, width=128).cuda().to(dtype)
        check_model(model)
        layout = masked.both_ways(texts, places, places, bos=0, text_slots=False)
        assert sum(layout.texts) == 0
        with torch.inference_mode():
            found.append(Engine(model, bos=0, backend=backend).logits(layout).float())
    want, dense, varlen = found
    error, dense_error = ((each - want).norm() / want.norm() for each in (varlen, dense))
    assert dense_error < 3e-2 and error < 1.5 * dense_error + 1e-3


@pytest.mark.parametrize("architecture", ["gpt_neox", "llama"])
def test_replayed_steps_draw_what_a_single_pass_scores(architecture):
    model = tiny_model(architecture).cuda().double()
    check_model(model)
    sampler = Engine(model, bos=0, mask=1, backend="dense", budget=500)
    queries = [random_query(seed, length) for seed, length in enumerate((60, 5, 31, 60))]
    for sampling in (Sampling(seed=3), Sampling(temperature=0.8, top_p=0.9, seed=4), Sampling(temperature=0)):
        for future in (True, False):
            with torch.inference_mode():
                first = sampler.sample(queries, 3, sampling, future)
                again = sampler.sample(queries, 3, sampling, future)  # graphs captured before are replayed here
                alone = [sampler.sample([query], 3, sampling, future)[0] for query in queries]
            for query, *answers in zip(queries, first, again, alone, strict=True):
                for (tokens, log_probs), (tokens2, _), (tokens3, _) in zip(*answers, strict=True):
                    assert (tokens == tokens2).all() and (tokens == tokens3).all()
                    finished = list(query.tokens)
                    for position, token in zip(query.asked_positions, tokens.tolist(), strict=True):
                        finished[position - 1] = token
                    logits, layout = logits_of(model, [Query(finished, query.given, query.asked)], "dense", future)
                    want = target_log_probs(logits, layout.targets).cpu().double()
                    assert torch.allclose(torch.from_numpy(log_probs), want, atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", list(METHODS))
def test_every_method_draws_what_it_draws_on_a_cpu_and_its_time_is_measured(name):
    method, model = METHODS[name], toys.toy(name, vocabulary=9, length=12)
    questions = [toys.query(roles) for roles in ("ggaaaa", "gaaaaaaaaa", "gggaaaaag", "aaag")]
    questions = list(filter(method.answers, questions))
    drawn = {}
    for device in ("cpu", "cuda"):
        noticed = []
        sampler = toys.engine_of(model.to(device), name, notice=noticed.append)
        with torch.inference_mode():
            drawn[device] = method.sample(sampler, questions, 3, Sampling(temperature=0.8, top_p=0.95, seed=1, first=2))
        assert sampler.meter.calls > 5 and sampler.meter.seconds > 0
        assert sum(noticed) == 3 * sum(len(question.asked_positions) for question in questions)
    for ours, theirs in zip(*drawn.values(), strict=True):
        for (tokens, log_probs), (want, scores) in zip(ours, theirs, strict=True):
            # Rotary tables are fp32 on any device, and one unit in their last place moves these by up to 6e-9.
            assert (tokens == want).all() and log_probs == pytest.approx(scores, abs=2e-8)


@pytest.mark.parametrize("how", [{"top_p": 0.95, "temperature": 0.8}, {"top_k": 20}, {}], ids=str)
def test_a_draw_is_the_one_of_a_cpu(how):
    logits = torch.randn(256, 200, generator=torch.Generator().manual_seed(0)).bfloat16()  # of which many are equal
    uniform = torch.rand(256, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    want, scores = draw(logits, uniform, Sampling(**how))
    tokens, log_probs = draw(logits.cuda(), uniform.cuda(), Sampling(**how))
    assert torch.equal(tokens.cpu(), want)
    assert torch.allclose(log_probs.cpu(), scores, rtol=0, atol=1e-5)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("width", [1, 4, 128])
def test_decoding_in_half_precision_agrees_with_a_single_pass(architecture, width, monkeypatch):
    monkeypatch.setattr("acgpt.engine.decoding.choose_width", lambda *_: width)
    model = tiny_model(architecture, scale=0.1, width=128, positions=256).cuda().half()
    check_model(model)
    sampler = Engine(model, bos=0, mask=1, backend="varlen", budget=500)
    assert sampler.ragged
    queries = [random_query(seed, length, share=0.6) for seed, length in enumerate((200, 5, 31, 1, 120))]
    for future in (True, False):
        with torch.inference_mode():
            drawn = sampler.sample(queries, 2, Sampling(seed=3), future)
        for query, samples in zip(queries, drawn, strict=True):
            for tokens, log_probs in samples:
                finished = list(query.tokens)
                for position, token in zip(query.asked_positions, tokens.tolist(), strict=True):
                    finished[position - 1] = token
                logits, layout = logits_of(model, [Query(finished, query.given, query.asked)], "dense", future)
                error = (
                    (torch.from_numpy(log_probs) - target_log_probs(logits, layout.targets).cpu().double())
                    .abs()
                    .max()
                    .item()
                )
                assert error < 0.05, error


@pytest.mark.parametrize("backend", ["dense", "varlen"])
def test_rows_that_join_and_leave_between_captured_steps_agree_with_a_single_pass(backend):
    model = tiny_model("llama", scale=0.1, width=128, positions=256).cuda()
    model = model.double() if backend == "dense" else model.half()
    check_model(model)
    decoding = Decoding(Engine(model, bos=0, mask=1, backend=backend, budget=500), Sampling(seed=3))
    finished, captured = join_and_leave(decoding, turns=40)
    assert captured
    for row in finished:
        tokens = list(row.query.tokens)
        for position, token, _ in row.drawn:
            tokens[position - 1] = token
        logits, layout = logits_of(model, [Query(tokens, row.query.given, row.query.asked)], "dense")
        want = target_log_probs(logits, layout.targets).cpu().double()
        got = torch.tensor([log_prob for _, _, log_prob in row.drawn], dtype=torch.float64)
        assert (got - want).abs().max() < (1e-9 if backend == "dense" else 0.05)


@pytest.mark.parametrize("name", ["mlm", "diffusion"])
def test_a_compiled_network_says_what_it_said_to_rounding(name):
    method, found = METHODS[name], []
    model = toys.toy(name, vocabulary=60, length=60, scale=0.1, dtype=torch.bfloat16).cuda()
    questions = [toys.query(roles, [5] * len(roles)) for roles in ("ga" * 30, "aaag" * 10, "a" * 60, "gga")]
    how = {"bos": toys.BOS, "mask": toys.mask_of(model, name), "backend": "varlen"}
    for compiled in (False, True):
        if compiled:
            compile_blocks(model)
        sampler = Engine(model, **how, budget=2**13)
        with torch.inference_mode():
            scores = method.log_probs(Engine(model, **how, budget=300), questions)
            (drawn,) = zip(*method.sample(sampler, questions, 1, Sampling(seed=1)), strict=True)
        assert sum(len(tokens) for tokens, _ in drawn) == sum(map(len, scores))
        found.append(np.concatenate(scores))
    assert np.abs(found[1] - found[0]).max() < 0.1 and np.abs(found[1] - found[0]).mean() < 0.01


def test_long_ragged_batches_agree_in_bf16():
    model = tiny_model("gpt_neox", width=128, positions=1024).cuda().bfloat16()
    check_model(model)
    queries = [random_query(seed, length, share=0.5) for seed, length in enumerate((1000, 900, 40, 700, 1))]
    together, layout = logits_of(model, queries, "varlen")
    together = target_log_probs(together, layout.targets).cpu().double().split(layout.asked)
    for query, got in zip(queries, together, strict=True):
        logits, alone = logits_of(model, [query], "varlen")
        assert torch.allclose(got, target_log_probs(logits, alone.targets).cpu().double(), atol=0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("architecture", ["gpt_neox", "llama"])
@pytest.mark.parametrize("vocabulary", [50, 1003, 12800])
def test_scores_from_hidden_states_agree_with_the_dense_mask(architecture, dtype, vocabulary, monkeypatch):
    calls, linear_log_probs = [], engines.linear_log_probs

    def counted(hidden, *args):
        calls.append(len(hidden))
        return linear_log_probs(hidden, *args)

    model = tiny_model(architecture, width=128, positions=1024, vocabulary=vocabulary, scale=0.1).cuda().to(dtype)
    check_model(model)
    lengths = (1000, 900, 40, 700, 1, 1000, 1000, 800)
    queries = [random_query(seed, length, share=0.3) for seed, length in enumerate(lengths)]
    with torch.inference_mode():
        with monkeypatch.context() as patch:
            patch.setattr(engines, "fast_head", lambda *_: None)
            want = Engine(model, bos=0, mask=1, backend="dense").log_probs(queries, future=True)
            plain = Engine(model, bos=0, mask=1, backend="varlen").log_probs(queries, future=True)
        monkeypatch.setattr(engines, "linear_log_probs", counted)
        for budget in (2**13, 3000):
            found = {
                backend: Engine(model, bos=0, mask=1, backend=backend, budget=budget).log_probs(queries, future=True)
                for backend in ("varlen", "fused")
            }
            for backend, scores in found.items():
                error, usual = (np.abs(np.concatenate(x) - np.concatenate(want)).mean() for x in (scores, plain))
                print(f"{architecture} {dtype} {vocabulary} {backend} {budget}: {error:.2e}, from logits {usual:.2e}")
                assert error < 2 * usual + 1e-3
        assert calls and min(calls) >= 1024
        forbidden = Engine(model, bos=0, mask=1).log_probs(queries, future=True, forbidden_token=7)
    assert max(map(max, forbidden)) <= 0
    for query, scores in zip(queries, forbidden, strict=True):
        asked = [query.tokens[position - 1] for position in query.asked_positions]
        assert [score == -np.inf for score in scores] == [token == 7 for token in asked]


@pytest.mark.parametrize("vocabulary", [50257, 50304])
def test_the_log_probs_kernel_agrees_with_log_softmax(vocabulary):
    generator = torch.Generator("cuda").manual_seed(0)
    for dtype, limit in ((torch.float32, 1e-4), (torch.bfloat16, 1e-2), (torch.float16, 1e-2)):
        hidden, weight = (
            torch.randn(n, 64, device="cuda", generator=generator).div(4).to(dtype) for n in (6000, vocabulary)
        )
        targets = torch.randint(0, vocabulary, (6000,), device="cuda", generator=generator)
        found, again = (linear_log_probs(hidden, weight, targets, 3) for _ in range(2))
        logits = (hidden @ weight.T).double()
        logits[:, 3] = -torch.inf
        want = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
        finite = targets != 3
        assert torch.equal(found, again) and torch.equal(found.isfinite(), finite)
        assert ((found - want)[finite].abs().mean() < limit) and not found.isnan().any()


def test_a_call_with_many_texts_uses_the_fused_kernels(monkeypatch):
    used = []
    monkeypatch.setattr(engines, "MANY_SLOTS", 2000)
    monkeypatch.setitem(BACKENDS, "fused", lambda layout: used.append(layout) or Fused(layout))
    model = tiny_model("llama", width=128, positions=1024, scale=0.1).cuda().bfloat16()
    check_model(model)
    queries = [random_query(seed, 1000) for seed in range(3)]
    with torch.inference_mode():
        few = Engine(model, bos=0, mask=1).log_probs(queries[:1], future=True)
        assert not used
        many = Engine(model, bos=0, mask=1).log_probs(queries, future=True)
        assert used
        assert np.abs(np.array(many[0]) - np.array(few[0])).mean() < 0.05
        used.clear()
        Engine(model, bos=0, mask=1, backend="varlen").log_probs(queries, future=True)
    assert not used


def test_nan_is_reported_from_hidden_states():
    model = tiny_model("gpt_neox", width=128, positions=1024).cuda().bfloat16()
    check_model(model)
    queries = [random_query(seed, 1000) for seed in range(3)]
    with torch.inference_mode():
        Engine(model, bos=0, mask=1).log_probs(queries, future=True)
        assert fast_head(model, 1024) is not None
        model.gpt_neox.final_layer_norm.weight.data[0] = torch.nan
        with pytest.raises(ModelError, match="NaN"):
            Engine(model, bos=0, mask=1).log_probs(queries, future=True)


@pytest.mark.parametrize("width", [32, 128], ids=["mask", "kernel"])
def test_captured_steps_serve_every_seed_and_fewer_rows(width, monkeypatch):
    monkeypatch.setattr("acgpt.engine.decoding.choose_width", lambda *_: 2)
    model = tiny_model("llama", width=width).cuda().half()
    check_model(model)
    sampler = Engine(model, bos=0, mask=1, backend="varlen", budget=500)
    assert sampler.ragged == (width == 128)
    query, shorter = random_query(0, 60), random_query(1, 30)
    with torch.inference_mode():
        sampler.sample([query], 4, Sampling(seed=1), True)
        (decoder,) = sampler.decoders
        captured = dict(decoder.graphs)
        (again,) = sampler.sample([query], 4, Sampling(seed=2), True)
        assert captured and captured.items() <= sampler.decoders[0].graphs.items()
        (fewer,) = sampler.sample([shorter], 2, Sampling(seed=2), True)
        assert sampler.decoders == [decoder]
        for question, drawn in ((query, again), (shorter, fewer)):
            fresh = Engine(model, bos=0, mask=1, backend="varlen", budget=500)
            (want,) = fresh.sample([question], len(drawn), Sampling(seed=2), True)
            for (tokens, _), (wanted, _) in zip(drawn, want, strict=True):
                assert (tokens == wanted).all()


def test_a_captured_step_is_not_replayed_for_another_network():
    peft = pytest.importorskip("peft")
    base = tiny_model("llama").cuda().double()
    network = peft.get_peft_model(
        base, peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj", "v_proj"])
    )
    model = network.get_base_model()
    check_model(model)
    sampler = Engine(model, bos=0, mask=1, backend="dense", budget=500)
    query = random_query(0, 40)

    def error():
        with torch.inference_mode():
            ((tokens, log_probs),) = sampler.sample([query], 1, Sampling(seed=0), True)[0]
        filled = list(query.tokens)
        for position, token in zip(query.asked_positions, tokens.tolist(), strict=True):
            filled[position - 1] = token
        logits, layout = logits_of(model, [Query(filled, query.given, query.asked)], "dense")
        return (
            (torch.from_numpy(log_probs) - target_log_probs(logits, layout.targets).cpu().double()).abs().max().item()
        )

    assert error() < 1e-9
    with network.disable_adapter():
        assert error() < 1e-9
    assert error() < 1e-9
    network.merge_adapter()
    assert error() < 1e-9
