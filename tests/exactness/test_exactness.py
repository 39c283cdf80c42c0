"""The answers are the exact ones: against a dense mask by hand, against plain causal models, and as probabilities.

The oracle is `models.expected_log_probs`: slots and mask drawn by loops, run by transformers' own `sdpa` on a copy of
the model that acgpt has never touched. Float64 throughout, so that a difference is a mistake and not rounding.
"""

from __future__ import annotations

import warnings
from itertools import pairwise, product

import pytest
import torch
from models import (
    ARCHITECTURES,
    answers,
    by_definition,
    expected_log_probs,
    masked_logits,
    random_query,
    tiny_model,
    twins,
)
from tolerance import EXACT
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CohereConfig,
    DeepseekV3Config,
    DiffLlamaConfig,
    FalconConfig,
    Gemma2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    OPTConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

from acgpt.engine.architecture import check_model
from acgpt.engine.attention import Cached, Dense, Fused, Varlen, attend, choose_backend, run
from acgpt.engine.engine import Engine
from acgpt.engine.layout import build
from acgpt.engine.score import target_log_probs
from acgpt.errors import ModelError
from acgpt.query.query import Query
from acgpt.query.sampling import Sampling


def ragged(*, unknown=0.15):
    """Queries of many lengths and shapes, for one batch."""
    queries = [random_query(seed, n, unknown=unknown) for seed, n in enumerate((17, 1, 40, 2, 9, 63))]
    queries.append(Query([5, 6, 7, 8], [False] * 4))  # nothing given
    queries.append(Query([5, 6, 7, 8, 9], [True] * 4 + [False]))  # everything before is given
    queries.append(Query([5, 6, 7, 8, 9], [False] + [True] * 4))  # everything after is given
    queries.append(Query([5, 6, 7, 8], [False, False, True, True], [True, False, False, False]))
    return queries


# ---- against the definition ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("future", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_log_probs_are_those_of_a_dense_mask_drawn_by_hand(architecture, future):
    reference, ours = twins(architecture)
    queries = ragged()
    for query, got in zip(queries, answers(ours, queries, future=future), strict=True):
        torch.testing.assert_close(got, expected_log_probs(reference, query, future=future), **EXACT)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_query_has_the_same_answer_alone_and_in_a_ragged_batch(architecture):
    _, ours = twins(architecture)
    queries = ragged()
    for query, together in zip(queries, answers(ours, queries), strict=True):
        torch.testing.assert_close(together, answers(ours, [query])[0], **EXACT)


@pytest.mark.parametrize("budget", [1, 40, 100])
def test_small_budgets_change_no_answer_and_no_order(budget):
    _, ours = twins()
    queries = ragged()
    for got, want in zip(answers(ours, queries, budget=budget), answers(ours, queries), strict=True):
        torch.testing.assert_close(got, want, **EXACT)


@pytest.mark.parametrize("future", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_with_nothing_given_it_is_the_plain_causal_model(architecture, future):
    reference, ours = tiny_model(architecture).double(), twins(architecture)[1]  # the first with its own attention
    tokens = list(random_query(1, 50).tokens)
    with torch.no_grad():
        plain = reference(torch.tensor([[0, *tokens]])).logits[0].log_softmax(-1)
    want = torch.stack([plain[i, token] for i, token in enumerate(tokens)])
    got = answers(ours, [Query(tokens, [False] * 50)], future=future)[0]
    torch.testing.assert_close(got, want, **EXACT)


def test_reading_left_to_right_gives_the_plain_conditionals_of_what_is_asked():
    reference, ours = tiny_model().double(), twins()[1]
    query = random_query(2, 30)
    with torch.no_grad():
        plain = reference(torch.tensor([[0, *query.tokens]])).logits[0].log_softmax(-1)
    want = torch.stack([plain[p - 1, query.tokens[p - 1]] for p in query.asked_positions])
    torch.testing.assert_close(answers(ours, [query], future=False)[0], want, **EXACT)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_query_heads_may_share_key_heads(heads):
    shared = {"num_key_value_heads": heads}
    models = []
    for _ in range(2):
        config = LlamaConfig(
            vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
            bos_token_id=0, eos_token_id=0, **shared,
        )  # fmt: skip
        models.append(large_weights(config))
    reference, ours = models
    check_model(ours)
    assert ours.model.layers[0].self_attn.k_proj.weight.shape[0] == 8 * heads
    query = random_query(4, 25)
    torch.testing.assert_close(answers(ours, [query])[0], expected_log_probs(reference, query), **EXACT)


def large_weights(config):
    model = AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.3, generator=generator)
    return model.double()


SHAPE = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
GROUPED = {**SHAPE, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    "config",
    [
        Qwen2Config(**GROUPED),
        Phi3Config(**GROUPED),
        CohereConfig(**GROUPED),
        GraniteConfig(**GROUPED, attention_multiplier=0.2),
        DeepseekV3Config(**SHAPE, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8,
                         qk_rope_head_dim=8, v_head_dim=12, first_k_dense_replace=2),  # values narrower than keys
        GPTNeoXConfig(**SHAPE),  # parallel residual, a quarter of each head rotary: Pythia
        OPTConfig(
            vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=64,
            word_embed_proj_dim=32, max_position_embeddings=64,
        ),
        LlamaConfig(**GROUPED, rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4,
                                                "original_max_position_embeddings": 16}),
    ],
    ids=lambda config: config.model_type,
)  # fmt: skip
def test_other_architectures_that_are_accepted_are_exact_too(config):
    reference, ours = large_weights(config), large_weights(config)
    check_model(ours)
    queries = ragged()
    for query, got in zip(queries, answers(ours, queries), strict=True):
        torch.testing.assert_close(got, expected_log_probs(reference, query), **EXACT)
    sampler = Engine(ours, bos=0, mask=1, backend="dense", budget=100)
    with torch.inference_mode():
        drawn = sampler.sample(queries, 1, Sampling(seed=0), future=True)
    for query, ((tokens, log_probs),) in zip(queries, drawn, strict=True):
        filled = list(query.tokens)
        for position, token in zip(query.asked_positions, tokens.tolist(), strict=True):
            filled[position - 1] = token
        want = expected_log_probs(reference, Query(filled, query.given, query.asked))
        torch.testing.assert_close(torch.from_numpy(log_probs), want, **EXACT)


def test_float32_and_bfloat16_agree_with_float64_as_far_as_they_can():
    reference, _ = twins(scale=0.1)
    queries = ragged()
    want = torch.cat([expected_log_probs(reference, query) for query in queries])
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        _, ours = twins(dtype=dtype, scale=0.1)
        try:
            found = torch.cat(answers(ours, queries))
        except RuntimeError as error:
            if "pack_vnni2" not in str(error):
                raise
            pytest.skip("ATEN_CPU_CAPABILITY hides AVX-512 from torch, but not AMX from its attention in bf16")
        torch.testing.assert_close(found, want, rtol=0, atol=tolerance)


def test_target_log_probs_are_taken_in_chunks_without_a_seam():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2050, 7, generator=generator, dtype=torch.float64)
    targets = torch.randint(7, (2050,), generator=generator)
    want = logits.log_softmax(-1)[torch.arange(2050), targets]
    torch.testing.assert_close(target_log_probs(logits, targets), want, **EXACT)
    half = target_log_probs(logits.bfloat16(), targets)  # in float32 from here on
    assert half.dtype == torch.float32
    want = logits.bfloat16().double().log_softmax(-1)[torch.arange(2050), targets]
    torch.testing.assert_close(half.double(), want, rtol=0, atol=1e-5)


# ---- nothing leaks -------------------------------------------------------------------------------------------------


def leak(log_probs, query, position):
    """How much the asked tokens' distributions at and before `position` change when the token there does.

    Args:
        log_probs: (query) -> (asked, V) log-probabilities of every token at the asked places.
        query: The question.
        position: Of an asked token.
    """
    tokens = list(query.tokens)
    tokens[position - 1] = (tokens[position - 1] + 11) % 40 + 5
    before, after = log_probs(query), log_probs(Query(tokens, query.given, query.asked))
    earlier = [i for i, p in enumerate(query.asked_positions) if p <= position]
    return (before - after)[earlier].abs().max().item()


def distributions(model, *, future=True):
    """Of acgpt: (query) -> (asked, V)."""

    def log_probs(query):
        layout = build([query], bos=0, mask=1, future=future)
        with torch.inference_mode():
            logits = run(model, layout.ids[None], layout.positions[None], Dense(layout), layout.rows)[0]
        return logits.log_softmax(-1)

    return log_probs


PAPER = Query([11, 12, 13, 14], [False, False, True, False])  # x_e = {1, 2, 4}, x_c = {3}


@pytest.mark.parametrize("future", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_asked_token_changes_no_prediction_at_or_before_it(architecture, future):
    log_probs = distributions(twins(architecture)[1], future=future)
    for query in [PAPER, *(random_query(seed, 14, unknown=0.1) for seed in range(4))]:
        for position in query.asked_positions:
            assert leak(log_probs, query, position) <= 1e-12, (query, position)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_asked_token_changes_the_predictions_after_it(architecture):
    log_probs = distributions(twins(architecture)[1])
    other = Query([11, 40, 13, 14], PAPER.given)
    assert (log_probs(PAPER) - log_probs(other))[2].abs().max() > 1e-2


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_given_token_changes_the_predictions_before_it_unless_all_is_read_left_to_right(architecture):
    _, ours = twins(architecture)
    other = Query([11, 12, 40, 14], PAPER.given)
    with_future, without = distributions(ours), distributions(ours, future=False)
    assert ((with_future(PAPER) - with_future(other)).abs().amax(-1) > 1e-2).all()
    past = without(PAPER) - without(other)
    assert past[:2].abs().max() <= 1e-12 and past[2].abs().max() > 1e-2


def test_an_unknown_token_is_never_read():
    log_probs = distributions(twins()[1])
    one, other = (Query([11, t, 13, 14], [True, False, False, True], [False, False, True, False]) for t in (12, 40))
    assert torch.equal(log_probs(one), log_probs(other))


def without_copies(model):
    """A layout that seems to do: no copies; the text is causal, except that all see the given tokens themselves."""

    def log_probs(query):
        ids, positions, sees, predictions = by_definition(query, future=False)
        for row in sees:
            for place in query.given_positions:
                row[place] = True
        logits = masked_logits(model, ids, positions, sees)
        return torch.stack([logits[slot] for slot, _ in predictions]).log_softmax(-1)

    return log_probs


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_leak_check_catches_a_layout_without_copies_on_the_papers_example(architecture):
    reference, ours = twins(architecture)
    assert leak(without_copies(reference), PAPER, 2) > 1e-2  # x_2 reached x_3 in layer 1, and x_1 saw x_3 in layer 2
    assert leak(distributions(ours), PAPER, 2) <= 1e-12
    one_layer = tiny_model(architecture, layers=1).double()
    assert leak(without_copies(one_layer), PAPER, 2) <= 1e-12  # it takes two layers


def test_the_leak_check_catches_a_boolean_mask_that_eager_attention_adds():
    model = tiny_model().double()
    model.set_attn_implementation("eager")

    def log_probs(query):
        ids, positions, sees, predictions = by_definition(query)
        with torch.no_grad():
            logits = model(
                input_ids=torch.tensor([ids]),
                position_ids=torch.tensor([positions]),
                attention_mask=torch.tensor(sees)[None, None],
                use_cache=False,
            ).logits[0]
        return torch.stack([logits[slot] for slot, _ in predictions]).log_softmax(-1)

    assert leak(log_probs, PAPER, 2) > 0.1


# ---- they are probabilities ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["gpt2", "gpt_neox", "llama"])
def test_probabilities_of_all_completions_sum_to_one_for_every_choice_of_given_positions(architecture):
    _, ours = twins(architecture, vocabulary=3)
    truth = [2, 0, 1, 1, 2]
    cases, queries = [], []
    for given in product([True, False], repeat=5):
        if all(given):
            continue
        for text in product(range(3), repeat=5):
            if all(t == x for t, x, g in zip(truth, text, given, strict=True) if g):
                cases.append(given)
                queries.append(Query(text, given))
    assert len(queries) == 4**5 - 1  # each place is given, or asked with 3 values
    sums = dict.fromkeys(cases, 0.0)
    for case, log_probs in zip(cases, answers(ours, queries), strict=True):
        sums[case] += log_probs.sum().exp().item()
    assert len(sums) == 31
    assert sums == pytest.approx(dict.fromkeys(sums, 1.0), abs=1e-9)


def test_probabilities_sum_to_one_with_unknown_tokens_too():
    _, ours = twins("gpt_neox", vocabulary=3)
    sums = {}
    queries, cases = [], []
    for roles in product("gau", repeat=4):
        if "a" not in roles:
            continue
        for text in product(*(range(3) if role == "a" else [2] for role in roles)):
            queries.append(Query(text, [r == "g" for r in roles], [r == "a" for r in roles]))
            cases.append(roles)
    for case, log_probs in zip(cases, answers(ours, queries), strict=True):
        sums[case] = sums.get(case, 0.0) + log_probs.sum().exp().item()
    assert len(sums) == 3**4 - 2**4
    assert sums == pytest.approx(dict.fromkeys(sums, 1.0), abs=1e-9)


# ---- the ways to be shown another mask -----------------------------------------------------------------------------


def test_transformers_cuts_a_sequence_where_positions_jump_and_acgpt_is_not_cut():
    reference, ours = twins()
    query = Query([5, 6, 7, 8, 9, 10], [True, False, True, False, True, False])
    ids, positions, sees, predictions = by_definition(query)
    slots = [slot for slot, _ in predictions]
    right = masked_logits(reference, ids, positions, sees)[slots]
    with torch.no_grad():
        trapped = reference(
            input_ids=torch.tensor([ids]), position_ids=torch.tensor([positions]), attention_mask=None, use_cache=False
        ).logits[0]
    assert (trapped[slots] - right).abs().max() > 1
    # What it did: documents begin wherever a position does not follow the one before it, and are read causally.
    document = [0]
    for before, after in pairwise(positions):
        document.append(document[-1] + (after != before + 1))
    cut = [[document[q] == document[k] and k <= q for k in range(len(ids))] for q in range(len(ids))]
    torch.testing.assert_close(trapped, masked_logits(reference, ids, positions, cut), **EXACT)
    # And what we do:
    torch.testing.assert_close(distributions(ours)(query), right.log_softmax(-1), **EXACT)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_texts_with_nothing_given_keep_apart(architecture):
    reference, ours = twins(architecture)
    queries = [Query([5, 6, 7], [False] * 3), Query([8, 9, 10, 11], [False] * 4)]
    for future in (True, False):
        for query, got in zip(queries, answers(ours, queries, future=future), strict=True):
            torch.testing.assert_close(got, expected_log_probs(reference, query), **EXACT)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_attention_changed_behind_our_back_is_noticed(architecture, implementation):
    model = tiny_model(architecture)
    check_model(model)
    model.set_attn_implementation(implementation)
    with pytest.raises(ModelError, match=rf"0 of its 2 layers.*{implementation}"):
        answers(model, [PAPER])
    check_model(model)  # and can be mended
    answers(model, [PAPER])


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MistralConfig(**GROUPED), "sliding window of 4096"),
        (Qwen2Config(**GROUPED, use_sliding_window=True, sliding_window=16, max_window_layers=1), "window of 16"),
        (
            Qwen3Config(
                **GROUPED, head_dim=8, use_sliding_window=True, sliding_window=16,
                layer_types=["full_attention", "sliding_attention"],
            ),
            "window of 16",
        ),
        (Gemma2Config(**GROUPED, head_dim=8), "sliding window"),
        (
            Gemma2Config(**GROUPED, head_dim=8, layer_types=["full_attention"] * 2, use_sliding_window=False),
            "softcap",
        ),
        (BloomConfig(vocab_size=50, hidden_size=32, n_layer=2, n_head=4), "does not take position_ids"),
        (MambaConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, state_size=4), "linear_attention"),
        (DiffLlamaConfig(**GROUPED), "4 times for its 2 layers"),
        (FalconConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True), "Falcon"),
    ],
    ids=["mistral", "qwen2", "qwen3", "gemma2", "gemma2-softcap", "bloom", "mamba", "diffllama", "falcon-alibi"],
)  # fmt: skip
def test_models_whose_attention_is_not_plain_are_refused_with_the_reason(config, reason):
    model = AutoModelForCausalLM.from_config(config).eval()
    before = model.config._attn_implementation
    with pytest.raises(ModelError, match=reason):
        check_model(model)
    assert model.config._attn_implementation == before  # it goes on as it came


def test_models_that_only_could_have_a_window_are_accepted():
    for config in (MistralConfig(**GROUPED, sliding_window=None), Qwen2Config(**GROUPED)):
        check_model(AutoModelForCausalLM.from_config(config).eval())


@pytest.mark.parametrize("own", [{"softcap": 50.0}, {"sliding_window": 8}, {"s_aux": torch.zeros(4)}])
def test_attention_that_a_layer_would_add_is_refused_when_it_is_called(own):
    q = torch.randn(1, 4, 2, 8)
    backend = Dense(build([Query([5, 6], [False, False])], bos=0, mask=None, future=True))
    with pytest.raises(ModelError, match=next(iter(own))):
        attend(torch.nn.Module(), q, q, q, None, acgpt=backend, **own)


def test_attention_dropout_is_applied_under_the_dense_mask_and_refused_elsewhere():
    layout = build([Query([5, 6, 7], [True, False, False])], bos=0, mask=None, future=True)
    q = torch.randn(1, 4, len(layout.ids), 8)
    torch.manual_seed(0)
    dropped, _ = attend(torch.nn.Module(), q, q, q, None, acgpt=Dense(layout), dropout=0.5)
    kept, _ = attend(torch.nn.Module(), q, q, q, None, acgpt=Dense(layout))
    assert (dropped != kept).any()
    torch.manual_seed(1)
    several = torch.stack([Dense(layout)(q, q, q, None, 0.5) for _ in range(4000)]).mean(0)
    torch.testing.assert_close(several, kept, rtol=0, atol=0.15)  # scaled so that the mean stays
    for backend in (Varlen(layout), Fused(layout), Cached(torch.zeros(1, 4, dtype=torch.long), 4, q.dtype)):
        with pytest.raises(ModelError, match="dropout"):
            attend(torch.nn.Module(), q, q, q, None, acgpt=backend, dropout=0.1)


def test_a_model_that_computes_something_else_under_our_attention_is_refused(monkeypatch):
    model = tiny_model()
    monkeypatch.setattr(
        Dense, "__call__", lambda self, q, k, v, scale, dropout: v.repeat_interleave(2, 1).transpose(1, 2)
    )
    with pytest.raises(ModelError, match="with nothing given its logits differ"):
        check_model(model)
    assert model.config._attn_implementation == "sdpa"


def test_a_model_that_counts_positions_by_itself_is_refused(monkeypatch):
    model = tiny_model("gpt2")
    true = type(model).forward

    def forward(self, input_ids=None, position_ids=None, **kwargs):  # it takes positions, and does not heed them
        return true(self, input_ids=input_ids, **kwargs)

    monkeypatch.setattr(type(model), "forward", forward)
    with pytest.raises(ModelError, match="order of copies"):
        check_model(model)


def test_a_model_on_several_devices_is_refused():
    model = tiny_model()
    model.lm_head.to("meta")
    with pytest.raises(ModelError, match="several devices"):
        check_model(model)


def test_a_model_with_hardly_any_positions_can_be_checked():
    check_model(tiny_model("gpt2", positions=3))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_checked_model_still_works_as_a_plain_one(architecture):
    reference, ours = twins(architecture, torch.float32)
    ids = torch.tensor([[0, 0, 0, 5, 6, 7], [0, 8, 9, 10, 11, 12]])
    padding = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    for how in ({}, {"attention_mask": padding}, {"attention_mask": padding, "use_cache": False}):
        with torch.no_grad():
            want, got = reference(ids, **how).logits, ours(ids, **how).logits
        real = padding.bool() if how else torch.ones_like(padding).bool()
        torch.testing.assert_close(got[real], want[real])
    assert ours.config._attn_implementation == "acgpt" and reference.config._attn_implementation == "sdpa"
    how = {"attention_mask": padding, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(ours.generate(ids, **how), reference.generate(ids, **how))


def test_checking_a_model_leaves_its_mode_and_its_weights_alone():
    for training in (True, False):
        model = tiny_model().train(training)
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        check_model(model)
        assert model.training is training
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
        check_model(model)  # twice does no harm


def test_logits_of_an_architecture_that_ignores_logits_to_keep_are_picked(monkeypatch):
    reference, ours = twins()
    layout = build([PAPER], bos=0, mask=None, future=True)
    whole = type(ours).forward

    def forward(self, *args, logits_to_keep=0, **kwargs):
        return whole(self, *args, **kwargs)

    monkeypatch.setattr(type(ours), "forward", forward)
    with torch.inference_mode():
        logits = run(ours, layout.ids[None], layout.positions[None], Dense(layout), layout.rows)
        last = run(ours, layout.ids[None], layout.positions[None], Dense(layout), 2)
    monkeypatch.undo()
    assert logits.shape[1] == 3 and last.shape[1] == 2
    torch.testing.assert_close(
        target_log_probs(logits[0], layout.targets), expected_log_probs(reference, PAPER), **EXACT
    )


def test_on_a_cpu_the_backend_is_the_dense_one():
    assert choose_backend(tiny_model()) == choose_backend(tiny_model().bfloat16()) == "dense"
