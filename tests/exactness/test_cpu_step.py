"""Decoding steps with weights in 4 and 8 bits: they agree with the network, and are used only where they may be."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from models import tiny_tokenizer
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM

from acgpt import LanguageModel
from acgpt.engine import cpu_step
from acgpt.engine.architecture import check_model
from acgpt.engine.attention import Cached, run
from acgpt.engine.cpu_step import FEWEST_STEPS, MOST_TOKENS, CpuSteps, LlamaStep
from acgpt.engine.decoding import Decoding
from acgpt.engine.engine import Engine
from acgpt.engine.modules import Watch
from acgpt.engine.peft import switched
from acgpt.engine.prefixes import Prefixes
from acgpt.engine.small_weights import BLOCK, Int4, Int8, LowRank
from acgpt.engine.stand_in import linear_layers
from acgpt.models.ask import SampleAsk
from acgpt.models.scheduler import Scheduler
from acgpt.query.query import Query
from acgpt.query.sampling import Sampling

VOCABULARY = 160
NATS = 0.15  # by which a log-probability of these toys may differ, over all tokens; a wrong one differs by 1 or more


def four_bit(weight):
    """Return a matrix rounded to 16 values a block, and expanded again."""
    blocks = weight.unflatten(1, (-1, BLOCK))
    low, high = blocks.aminmax(dim=-1, keepdim=True)
    step = (high - low) / 15
    return (low + ((blocks - low) / step).round() * step).flatten(1)


def llama(vocabulary=VOCABULARY, **options):
    """Return a small Llama network whose matrices were expanded from 4 bits."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.2, bos_token_id=0, eos_token_id=None,
        **options,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for layer in linear_layers(model):
            layer.weight.copy_(four_bit(layer.weight))
    check_model(model)
    return model


def with_lora(model, **options):
    """Add a LoRA adapter with random weights to a network."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", **options)
    adapted = peft.get_peft_model(model, config)
    torch.manual_seed(1)
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            weight.data.normal_(std=0.06)
    return adapted


@pytest.fixture(autouse=True)
def faster(monkeypatch):
    """The copies count as faster, whatever this CPU is."""
    monkeypatch.setattr(cpu_step, "is_faster", lambda *_: True)


def passes(model, step, rows=2, slots=3):
    """Return the log-probabilities by a step and by its network, for the same tokens."""
    ids = torch.randint(0, VOCABULARY, (rows, slots), generator=torch.Generator().manual_seed(2))
    positions = torch.arange(slots).expand(rows, -1)
    with torch.no_grad():
        own, dense = (
            forward(ids, positions, Cached(positions, slots, torch.float32), slots, step.cache(positions))
            for forward in (step, partial(run, model))
        )
    return own.log_softmax(-1), dense.log_softmax(-1)


def engines(model):
    """Return an engine that uses the copies, and one that does not."""
    return Engine(model, bos=0, cpu_steps=CpuSteps(model)), Engine(model, bos=0)


def blank(tokens=FEWEST_STEPS + 1):
    """Return a query with a blank after three tokens and before two."""
    roles = [True] * 3 + [False] * tokens + [True] * 2
    return Query([5, 6, 7, *[None] * tokens, 8, 9], roles)


def drawn(engine, query, n=1, seed=0):
    with torch.no_grad():
        return engine.sample([query], n, Sampling(seed=seed), future=True)[0]


def same(one, other):
    return all(np.array_equal(a, b) for pair in zip(one, other, strict=True) for a, b in zip(*pair, strict=True))


# ---- matrices --------------------------------------------------------------------------------------------------------


def test_four_bits_are_recovered_from_expanded_weights():
    weight = four_bit(torch.randn(48, 96))
    weight[:16, :BLOCK] = 0.5  # blocks of one value
    product = Int4.recover(weight)
    rows = torch.randn(3, 96).bfloat16()
    assert product is not None
    torch.testing.assert_close(product(rows).float(), rows.float() @ weight.T, rtol=0.02, atol=0.1)


def test_weights_that_were_not_expanded_from_four_bits_are_refused():
    assert Int4.recover(torch.randn(48, 96)) is None
    assert Int4.recover(four_bit(torch.randn(48, 96))[:, :80]) is None  # no whole blocks


def test_products_in_eight_bits_and_of_low_rank_agree_with_dense_ones():
    weight, up, down = four_bit(torch.randn(64, 96)), torch.randn(64, 8) / 8, torch.randn(8, 96) / 8
    rows = torch.randn(3, 96).bfloat16()
    torch.testing.assert_close(Int8(weight)(rows).float(), rows.float() @ weight.T, rtol=0.02, atol=0.3)
    base = Int4.recover(weight)
    assert base is not None
    low_rank = LowRank(base, up, down)(rows).float()
    torch.testing.assert_close(low_rank, rows.float() @ (weight + up @ down).T, rtol=0.02, atol=0.3)


# ---- steps -----------------------------------------------------------------------------------------------------------


def test_a_step_agrees_with_the_network():
    model = llama()
    own, dense = passes(model, CpuSteps(model).current())
    assert 0 < (own - dense).abs().max() < NATS


def test_a_step_agrees_with_the_network_for_every_state_of_its_adapters():
    adapted = with_lora(llama())
    model = adapted.get_base_model()
    steps = CpuSteps(model)
    with_adapter, dense = passes(model, steps.current())
    assert (with_adapter - dense).abs().max() < 2 * NATS
    with adapted.disable_adapter():
        without, bare = passes(model, steps.current())
        assert (without - bare).abs().max() < NATS
    assert (with_adapter - without).abs().max() > 5 * NATS  # the adapter matters
    assert len(steps.steps) == 2 and steps.current() is steps.current()


def test_a_step_agrees_with_the_network_after_an_adapter_is_rescaled():
    adapted = with_lora(llama())
    model = adapted.get_base_model()
    steps = CpuSteps(model)
    before, _ = passes(model, steps.current())
    for layer in linear_layers(model):
        layer.set_scale("default", 0.1)
    after, dense = passes(model, steps.current())
    assert (after - dense).abs().max() < 2 * NATS
    assert (after - before).abs().max() > 5 * NATS  # the scale matters


def test_a_step_writes_the_keys_and_values_of_the_network():
    model = llama()
    step = CpuSteps(model).current()
    ids = torch.randint(0, VOCABULARY, (3, 4), generator=torch.Generator().manual_seed(2))
    slots = torch.tensor([[0, 1, 2, 9], [4, 5, 6, 7], [3, 4, 5, 8]])
    caches = []
    with torch.no_grad():
        for forward in (step, partial(run, model)):
            cache = step.cache(slots)
            forward(ids, slots, Cached(slots, 10, torch.float32), 1, cache)
            caches.append(cache.memory[0])
    own, dense = caches
    assert (own - dense).norm() < 0.05 * dense.norm()
    written = torch.zeros(3, 10, dtype=torch.bool).scatter_(1, slots, True)
    assert torch.equal((own != 0).any(-1).any(-1), written.expand(len(own), -1, -1))


def test_log_probs_of_samples_agree_with_scores():
    model = llama()
    engine, dense = engines(model)
    ((tokens, log_probs),) = drawn(engine, blank())
    query = blank()
    complete = Query([5, 6, 7, *tokens.tolist(), 8, 9], query.given)
    with torch.no_grad():
        scores = dense.log_probs([complete], future=True)[0]
    assert log_probs == pytest.approx(scores, rel=0, abs=NATS)
    assert log_probs.tolist() != scores  # the copies were used


def test_the_same_call_gives_the_same_bits():
    engine, _ = engines(llama())
    assert same(drawn(engine, blank()), drawn(engine, blank()))


def test_trained_weights_are_copied_again():
    model = llama()
    steps = CpuSteps(model)
    first = steps.current()
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    assert steps.current() is not first
    own, dense = passes(model, steps.current())
    assert (own - dense).abs().max() < 2 * NATS


# ---- rows that join and leave ----------------------------------------------------------------------------------------


@pytest.fixture
def small_steps(monkeypatch):
    """The number of rows of each step that a copy has run in a test."""
    rows, forward = [], LlamaStep.__call__

    def counted(self, ids, *arguments):
        rows.append(len(ids))
        return forward(self, ids, *arguments)

    monkeypatch.setattr(LlamaStep, "__call__", counted)
    return rows


class Even:
    """Allows tokens with even ids."""

    def allowed(self):
        return np.arange(VOCABULARY) % 2 == 0

    def advance(self, token):
        assert token % 2 == 0


def steps_taken(decoding, steps):
    for _ in range(steps):
        decoding.step()
        decoding.release([row for row in decoding.rows if row.done])


def check_scores(model, rows, nats=NATS):
    """Check that rows report the log-probabilities that the network gives to what they drew."""
    for row in rows:
        assert row.done
        ids = list(row.query.tokens)
        for position, token, _ in row.drawn:
            ids[position - 1] = token
        with torch.no_grad():
            scores = Engine(model, bos=0).log_probs([Query(ids, row.query.given)], future=True)[0]
        assert [log_prob for *_, log_prob in row.drawn] == pytest.approx(scores, rel=0, abs=nats)


def test_rows_that_join_and_leave_agree_with_scores_whoever_runs_the_step(small_steps):
    """A row begins with the copies, goes on with the network while there are many rows, and ends with the copies."""
    model = llama()
    decoding = Decoding(engines(model)[0])
    (first,) = decoding.prefill([blank(3 * FEWEST_STEPS)])
    steps_taken(decoding, 5)
    assert small_steps[-5:] == [1] * 5
    used = len(small_steps)
    others = decoding.prefill([blank(12)] * MOST_TOKENS, samples=range(MOST_TOKENS))
    steps_taken(decoding, 11)
    assert decoding.rows == [first] and len(small_steps) == used
    (late,) = decoding.prefill([blank(10)])
    steps_taken(decoding, 3 * FEWEST_STEPS - 17)
    assert small_steps[used:] == [2] * 9 + [1] * (3 * FEWEST_STEPS - 26) and not decoding.rows
    check_scores(model, [first, late, *others])


def test_short_rows_use_the_network_even_alone(small_steps):
    engine, dense = engines(llama())
    tokens = []
    for one in (engine, dense):
        (row,) = (decoding := Decoding(one)).prefill([blank(FEWEST_STEPS)])
        steps_taken(decoding, FEWEST_STEPS)
        tokens.append(row.drawn)
    assert tokens[0] == tokens[1] and not small_steps


def test_options_and_guides_of_each_row_are_kept(small_steps):
    model = llama()
    decoding = Decoding(engines(model)[0])
    samplings = [Sampling(seed=3), Sampling(temperature=0), Sampling(temperature=0.7, top_k=4, seed=1)]
    rows = decoding.prefill([blank()] * 3, samplings=samplings, guides=[Even(), None, Even()])
    steps_taken(decoding, FEWEST_STEPS + 1)
    check_scores(model, rows)
    assert all(token % 2 == 0 for row in (rows[0], rows[2]) for _, token, _ in row.drawn)
    assert small_steps[-1] == 3
    (greedy,) = (alone := Decoding(engines(model)[0], samplings[1])).prefill([blank()])
    steps_taken(alone, FEWEST_STEPS + 1)
    assert [token for _, token, _ in greedy.drawn] == [token for _, token, _ in rows[1].drawn]


def test_kept_prefixes_are_those_of_the_network(small_steps):
    model = llama()
    engine, dense = engines(model)
    engine.prefixes, dense.prefixes = Prefixes(model, 2**24), Prefixes(model, 2**24)
    query, longer = ([*range(20, 40), *[None] * size] for size in (FEWEST_STEPS + 1, FEWEST_STEPS + 9))
    queries = [Query(ids, [token is not None for token in ids]) for ids in (query, longer)]
    rows = []
    for query in queries:
        for one in (engine, dense):
            rows += (decoding := Decoding(one)).prefill([query])
            steps_taken(decoding, 2 * FEWEST_STEPS)
    assert engine.prefixes.hits == dense.prefixes.hits == 1 and small_steps[-1] == 1
    kept, expected = ([prefix.states for prefix in one.prefixes.kept.values()] for one in (engine, dense))
    assert all(
        torch.equal(a, b)
        for states in zip(kept, expected, strict=True)
        for pairs in zip(*states, strict=True)
        for a, b in zip(*pairs, strict=True)
    )
    check_scores(model, rows)


def test_rows_of_two_adapters_take_turns(small_steps):
    adapted = with_lora(llama())
    model, rows = adapted.get_base_model(), []
    engine, _ = engines(model)
    decodings = [Decoding(engine), Decoding(engine)]
    for number in range(FEWEST_STEPS + 1):
        for decoding, name in zip(decodings, ("default", None), strict=True):
            with switched(model, name):
                if number == 0:
                    rows += decoding.prefill([blank()])
                else:
                    decoding.step()
    assert small_steps[-2:] == [1, 1]
    for row, name in zip(rows, ("default", None), strict=True):
        with switched(model, name):
            check_scores(model, [row], nats=2 * NATS)


# ---- the network is used instead -------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["short", "many rows"])
def test_short_and_large_batches_use_the_network(case):
    engine, dense = engines(llama())
    query, n = (blank(FEWEST_STEPS // 2), 1) if case == "short" else (blank(), MOST_TOKENS + 1)
    assert same(drawn(engine, query, n), drawn(dense, query, n))


def off_the_grid():
    model = llama()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.normal_()
    return model


def another_architecture():
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=VOCABULARY, **sizes)).eval()
    check_model(model)
    return model


def hooked():
    model = llama()
    model.model.layers[0].register_forward_hook(lambda *_: None)
    return model


MODELS = {
    "weights that are not on a grid": off_the_grid,
    "another architecture": another_architecture,
    "float64": lambda: llama().double(),
    "biases": lambda: llama(attention_bias=True),
    "another activation": lambda: llama(hidden_act="gelu"),
    "a hook": hooked,
    "DoRA": lambda: with_lora(llama(), use_dora=True).get_base_model(),
    "a merged adapter": lambda: merged(with_lora(llama())),
    "norms of an adapter": lambda: with_lora(llama(), modules_to_save=["norm", "input_layernorm"]).get_base_model(),
    "whole layers of an adapter": lambda: with_lora(llama(), modules_to_save=["down_proj"]).get_base_model(),
}


def merged(adapted):
    adapted.merge_adapter()
    return adapted.get_base_model()


@pytest.mark.parametrize("case", MODELS)
def test_a_network_that_the_copies_cannot_stand_for_is_used_itself(case):
    model = MODELS[case]()
    assert CpuSteps(model).current() is None
    engine, dense = engines(model)
    assert same(drawn(engine, blank()), drawn(dense, blank()))


def test_hooks_are_obeyed_unless_they_only_watch():
    model = llama()
    steps = CpuSteps(model)
    assert steps.current() is not None and steps.in_use
    watch = model.model.layers[0].register_forward_pre_hook(Watch(lambda: None))
    assert steps.current() is not None and steps.in_use
    hook = model.model.layers[1].register_forward_hook(lambda *_: None)
    assert steps.current() is None and not steps.in_use
    hook.remove()
    watch.remove()
    assert steps.current() is not None


def test_a_server_draws_what_the_library_draws(small_steps):
    lm = LanguageModel(llama(vocabulary=340), tiny_tokenizer(bos_token="<bos>"), bos=0, small_weights=True)
    assert lm.decoding_weights == "int4"
    (alone,) = lm.sample(blank(), seed=1)
    used = len(small_steps)
    scheduler = Scheduler(lm.searches.executor)
    try:
        (served,) = scheduler.submit(lm.searches.of(SampleAsk(blank(), seed=1))).future.result(60)
    finally:
        assert scheduler.close(timeout=60)
    assert small_steps[used:] == [1] * FEWEST_STEPS
    assert served.text == alone.text and served.log_prob == pytest.approx(alone.log_prob, rel=0, abs=1e-3)


def test_a_copy_that_is_not_faster_is_not_used(monkeypatch):
    monkeypatch.setattr(cpu_step, "is_faster", lambda *_: False)
    assert CpuSteps(llama()).current() is None


def test_a_copy_whose_logits_differ_is_not_used(monkeypatch):
    monkeypatch.setattr(cpu_step, "TOLERANCE", 0.0)
    assert CpuSteps(llama()).current() is None
