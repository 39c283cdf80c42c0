"""`LanguageModel`: the three questions, what may be asked, and of which models."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from models import expected_log_probs, random_query, tiny_model, tiny_tokenizer
from tolerance import exactly

from acgpt import (
    FutureIgnored,
    InputError,
    LanguageModel,
    Metadata,
    ModelError,
    Query,
    QueryError,
    TemplateError,
)
from acgpt.models.language_model import positions_of

VOCABULARY = 324  # of the tiny tokenizer


def make(*, model=None, tokenizer=None, dtype=torch.float64, **how):
    """A language model with a tiny network; one that reads the future unless `metadata` says otherwise."""
    tokenizer = tokenizer or tiny_tokenizer(bos_token="<bos>", eos_token="<eos>")
    model = model if model is not None else tiny_model(vocabulary=VOCABULARY, scale=0.15).to(dtype)
    return LanguageModel(model, tokenizer, **{"metadata": Metadata(mask_token_id=2), **how})


@pytest.fixture(scope="module")
def lm():
    return make()


@pytest.fixture
def plain():
    """One that says nothing of what it can do: an ordinary causal model."""
    return make(metadata=None)


@pytest.fixture(scope="module")
def reference():
    return tiny_model(vocabulary=VOCABULARY, scale=0.15).double()


def expected(reference, query, future=True, bos=0):
    return expected_log_probs(reference, query, future=future, bos=bos, mask=2).tolist()


def ids(text):
    return tiny_tokenizer()(text)["input_ids"]


# ---- log_prob ------------------------------------------------------------------------------------------------------

TEMPLATE = "The {{cat}} sat on the {{mat}}."


def test_a_template_is_scored_as_the_query_that_it_stands_for(lm, reference):
    query = Query(ids("The cat sat on the mat."), [True, False, True, True, True, False, True])
    score = lm.log_prob(TEMPLATE)
    assert [token.log_prob for token in score.tokens] == exactly(expected(reference, query))
    assert [token.text for token in score.tokens] == [" cat", " mat"]
    assert [token.id for token in score.tokens] == [query.tokens[1], query.tokens[5]]
    assert [token.position for token in score.tokens] == [2, 6]
    assert score.log_prob == exactly(sum(expected(reference, query)))
    assert score.future
    assert lm.query(TEMPLATE) == query and lm.log_prob(query) == score


def test_perplexity_is_that_of_one_asked_token(lm):
    score = lm.log_prob(TEMPLATE)
    assert score.perplexity == pytest.approx(math.exp(-sum(t.log_prob for t in score.tokens) / 2))


def test_a_hopeless_text_has_an_infinite_perplexity_and_no_traceback():
    from acgpt.models.ask import Score, TokenScore

    assert Score((TokenScore("x", 1, 1, -800.0),), False).perplexity > 1e300
    assert Score((TokenScore("x", 1, 1, -math.inf),), False).perplexity == math.inf


def test_a_list_is_answered_in_its_order_whatever_its_lengths(lm, reference):
    questions = [random_query(i, n, unknown=0.1, vocabulary=300) for i, n in enumerate((3, 50, 1, 20))]
    questions.insert(2, "{{The}} cat.")
    questions.append("The capital of France is {{Paris}}.")
    scores = lm.log_prob(questions)
    assert len(scores) == len(questions)
    for question, score in zip(questions, scores, strict=True):
        query = lm.query(question) if isinstance(question, str) else question
        assert [t.log_prob for t in score.tokens] == exactly(expected(reference, query))
        assert tuple(t.position for t in score.tokens) == query.asked_positions
        assert score.future
        alone = lm.log_prob(question)
        assert [t.log_prob for t in alone.tokens] == exactly([t.log_prob for t in score.tokens])


def test_no_questions_get_no_answers(lm):
    assert lm.log_prob([]) == []
    assert lm.sample([], n=3) == []


def test_a_small_budget_changes_no_answer(lm, monkeypatch):
    questions = [random_query(i, n, vocabulary=300) for i, n in enumerate((3, 50, 1, 20))]
    want = [s.log_prob for s in lm.log_prob(questions)]
    monkeypatch.setattr(lm, "budget", 1)
    assert [s.log_prob for s in lm.log_prob(questions)] == exactly(want)


def test_a_budget_that_is_named_holds_for_every_pass(lm):
    assert (lm.engine(5, 7).budget, lm.engine(5, 7).prefill_budget, lm.engine(5, 7).mask) == (7, 7, 5)
    assert lm.engine(None).budget == lm.engine(None).prefill_budget == lm.budget  # on a CPU


@pytest.mark.parametrize("question", [None, 3, b"text", ["x"]])
def test_what_is_no_question_is_refused(lm, question):
    with pytest.raises(QueryError, match="a template"):
        lm.log_prob([question])


@pytest.mark.parametrize("verb", ["log_prob", "sample"])
def test_a_template_that_asks_nothing_is_refused(lm, verb):
    with pytest.raises(TemplateError, match="nothing is asked"):
        getattr(lm, verb)("The cat sat.")


@pytest.mark.parametrize(
    ("verb", "template", "problem", "at"),
    [
        ("log_prob", "The {{cat}} sat on {{_2}}.", "a blank has no text to score", 19),
        ("log_prob", "The {{cat}} sat on {{a|b}}.", "alternatives", 19),
        ("sample", "The {{_1}} sat on {{a|b}}.", "alternatives", 18),
        ("rank", "The {{cat|dog}} sat on {{_2}}.", "a blank or gap cannot be ranked", 23),
        ("rank", "The {{cat}} sat.", "nothing to rank", 4),
        ("log_prob", "The {{cat sat.", "never closed", 4),
    ],
)
def test_errors_of_templates_point_at_the_place(lm, verb, template, problem, at):
    with pytest.raises(TemplateError, match=problem) as caught:
        getattr(lm, verb)(template)
    assert caught.value.at == at
    caret = str(caught.value).splitlines()[-1]
    assert caret.index("^") - 2 == at


def test_a_query_without_the_token_to_score_is_refused(lm):
    with pytest.raises(QueryError, match="position 2 has no id to score"):
        lm.log_prob(Query([5, None], [True, False]))


# ---- what fits the model -------------------------------------------------------------------------------------------


def test_a_text_may_be_as_long_as_the_positions_allow_and_no_longer(lm, reference):
    assert lm.positions == 64
    longest = Query([5] * 63, [False, *[True] * 61, False])
    assert [t.log_prob for t in lm.log_prob(longest).tokens] == exactly(expected(reference, longest))
    (sample,) = lm.sample(longest, seed=0)
    assert sample.log_prob == exactly(lm.log_prob(sample.query).log_prob)
    too_long = Query([5] * 64, [False, *[True] * 63])
    for verb in (lm.log_prob, lm.sample):
        with pytest.raises(QueryError, match=r"64 tokens.*at most 63"):
            verb(too_long)
    with pytest.raises(QueryError, match=r"at least 100000 tokens.*at most 63"):
        lm.sample("The {{_100000}}")


def test_a_token_id_outside_the_vocabulary_is_refused(lm):
    with pytest.raises(QueryError, match=r"position 2 has the id 324.*largest id is 323"):
        lm.log_prob(Query([5, 324], [True, False]))
    lm.log_prob(Query([5, 323], [True, False]))


def test_dynamic_position_encodings_are_used_only_where_they_do_not_change():
    config = tiny_model().config
    assert positions_of(config) == 64
    config.rope_parameters = {"rope_type": "longrope", "original_max_position_embeddings": 16}
    assert positions_of(config) == 16


def test_unknown_tokens_need_a_mask_token(plain, reference):
    query = Query([5, None, 7], [True, False, False], [False, False, True])
    with pytest.raises(QueryError, match="mask=ID"):
        plain.log_prob(query)
    with pytest.raises(QueryError, match="mask=ID"):
        plain.sample(query)
    for mask in (2, "<mask>"):
        named = make(metadata=None, mask=mask)
        assert named.mask == 2
        assert scores(named, query, future=True) == exactly(expected(reference, query))
        assert scores(named, query, future=False) == exactly(expected(reference, query, future=False))


# ---- past and future -----------------------------------------------------------------------------------------------


def scores(lm, question, **how):
    return [t.log_prob for t in lm.log_prob(question, **how).tokens]


def test_future_decides_whether_copies_are_read(lm, plain, reference):
    query = lm.query(TEMPLATE)
    with_future, without = expected(reference, query), expected(reference, query, future=False)
    assert max(abs(a - b) for a, b in zip(with_future, without, strict=True)) > 0.1
    for model in (lm, plain):
        assert scores(model, TEMPLATE, future=True) == exactly(with_future)
        assert model.log_prob(TEMPLATE, future=True).future
        assert scores(model, TEMPLATE, future=False) == exactly(without)
        assert not model.log_prob(TEMPLATE, future=False).future
    assert lm.reads_future and scores(lm, TEMPLATE) == exactly(with_future)
    assert not plain.reads_future
    with pytest.warns(FutureIgnored):
        assert scores(plain, TEMPLATE) == exactly(without)


def test_answers_say_whether_every_prediction_saw_all_that_was_given(lm, plain):
    for question in (TEMPLATE, "The cat sat on the {{mat}}"):  # also where nothing given follows
        for future in (True, False):
            assert lm.log_prob(question, future=future).future is future
            assert lm.sample(question, seed=0, future=future)[0].future is future
        assert lm.log_prob(question).future
    assert not plain.log_prob("The cat sat on the {{mat}}").future


def test_an_ordinary_model_warns_once_and_only_if_there_is_a_future_to_ignore(plain):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plain.log_prob("The cat sat on the {{mat}}")  # nothing is ignored here
        plain.log_prob(TEMPLATE, future=False)  # nor is it news here
        plain.log_prob(TEMPLATE, future=True)
        plain.rank("The {{cat|dog}} sat.")  # compares whole texts
        plain.sample("{{_2}}", seed=0)
    assert caught == []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plain.log_prob(["{{The}}", TEMPLATE])
        plain.log_prob(TEMPLATE)
        plain.sample(TEMPLATE, seed=0)
    assert [w.category for w in caught] == [FutureIgnored]
    assert caught[0].filename == __file__  # it points at the caller
    assert "future=True" in str(caught[0].message)


def test_sampling_warns_too_and_another_model_warns_for_itself(plain):
    for model in (plain, make(metadata=None)):
        with pytest.warns(FutureIgnored):
            model.sample(TEMPLATE, seed=0)


def test_metadata_of_another_method_reads_no_copies():
    other = make(metadata=Metadata(method="gpt"))
    assert not other.reads_future
    with pytest.warns(FutureIgnored):
        other.log_prob(TEMPLATE)


# ---- sample --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("future", [True, False])
def test_a_samples_log_prob_is_that_of_its_finished_query(lm, reference, future):
    for sample in lm.sample("The {{_2}} sat on the {{_1}}.", n=3, seed=1, temperature=0.5, top_k=9, future=future):
        assert sample.log_prob == exactly(lm.log_prob(sample.query, future=future).log_prob)
        assert [t.log_prob for t in sample.tokens] == exactly(expected(reference, sample.query, future))
        assert sample.future is future


def test_fills_text_and_query_of_a_sample_agree(lm):
    for sample in lm.sample("The {{_2}} sat on the {{_1}}.", n=5, seed=2):
        tokens = list(sample.query.tokens)
        assert tokens[0] == ids("The")[0] and tokens[3:6] == ids(" sat on the") and tokens[7:] == ids(".")
        assert sample.text == lm.tokenizer.decode(tokens)
        assert [t.id for t in sample.tokens] == [tokens[1], tokens[2], tokens[6]]
        assert [t.position for t in sample.tokens] == [2, 3, 7]
        assert "The" + sample.fills[0] + " sat on the" + sample.fills[1] + "." == sample.text
        assert "".join(t.text for t in sample.tokens[:2]) == sample.fills[0]
        assert sample.query.given == (True, False, False, True, True, True, False, True)


def test_text_in_a_slot_is_a_blank_of_its_length(lm):
    filled, blank = lm.sample(TEMPLATE, seed=3), lm.sample("The {{_1}} sat on the {{_1}}.", seed=3)
    assert filled == blank


def test_seeds_are_recorded_and_bring_a_sample_back(lm):
    question = "The {{_3}} sat."
    first = lm.sample(question, n=3)
    assert len({s.seed for s in first}) == 1
    assert lm.sample(question, n=3, seed=first[0].seed) == first
    assert len({s.text for s in first}) == 3  # the samples of one call differ
    assert lm.sample(question)[0].seed != lm.sample(question)[0].seed
    assert lm.sample(question, seed=5) != lm.sample(question, seed=6)


def test_one_question_gets_a_list_and_a_list_gets_lists(lm):
    questions = ["The {{_3}} sat.", Query([None, 5], [False, True])]
    one, many = lm.sample(questions[0], n=2, seed=0), lm.sample(questions, n=2, seed=0)
    assert [len(samples) for samples in many] == [2, 2]
    turned = lm.sample(questions[::-1], n=2, seed=0)[::-1]
    for samples, same in [(many[0], one), *zip(turned, many, strict=True)]:
        assert [s.query for s in samples] == [s.query for s in same]
        assert [s.log_prob for s in samples] == exactly([s.log_prob for s in same])
    assert len(lm.sample(questions[0])) == 1


def test_unknown_tokens_are_shown_as_mask_in_a_samples_text(lm, reference):
    query = Query([ids("The")[0], None, None], [True, False, False], [False, False, True])
    (sample,) = lm.sample(query, seed=0)
    assert sample.query.tokens[1] is None and sample.query.asked == query.asked
    assert sample.text.startswith("The<mask>")
    assert [t.log_prob for t in sample.tokens] == exactly(expected(reference, sample.query))


def test_impossible_requests_for_samples_are_refused(lm):
    for how, name in [
        ({"n": 0}, "n must"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"temperature": -1}, "t"),
    ]:
        with pytest.raises(InputError, match=name):
            lm.sample("The {{_3}} sat.", **how)


# ---- rank ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["cat|dog|bird", "bird|dog|cat", "dog|bird|cat"])
def test_alternatives_of_one_length_are_compared_by_what_is_asked_the_best_first(lm, reference, order):
    ranking = lm.rank("The {{" + order + "}} sat.")
    assert ranking.compared == "asked | given" and ranking.future
    want = {}
    for word in ("cat", "dog", "bird"):
        query = Query(ids(f"The {word} sat."), [True, False, True, True])
        want[word] = sum(expected(reference, query))
    assert {r.choice[0]: r.log_prob for r in ranking} == exactly(want)
    total = sum(math.exp(x) for x in want.values())
    assert {r.choice[0]: r.probability for r in ranking} == exactly({w: math.exp(x) / total for w, x in want.items()})
    assert [r.choice[0] for r in ranking] == sorted(want, key=want.get, reverse=True)
    assert {r.text for r in ranking} == {"The cat sat.", "The dog sat.", "The bird sat."}
    assert len(ranking) == 3 and ranking[0] == ranking.alternatives[0]


def whole(reference, text):
    return sum(expected(reference, Query(ids(text), [False] * len(ids(text))), future=False))


@pytest.mark.parametrize(
    ("template", "texts"),
    [
        ("The {{cat|carburettor}} sat.", ["The cat sat.", "The carburettor sat."]),  # other lengths
        ("The{{ cat|}} sat.", ["The cat sat.", "The sat."]),  # an empty alternative
        ("The {{cat|cats}}.", ["The cat.", "The cats."]),
    ],
)
def test_alternatives_that_differ_in_length_are_compared_as_whole_texts(lm, reference, template, texts):
    ranking = lm.rank(template)
    assert ranking.compared == "whole text" and not ranking.future
    assert {r.text: r.log_prob for r in ranking} == exactly({text: whole(reference, text) for text in texts})
    assert sum(r.probability for r in ranking) == pytest.approx(1)


def test_a_model_that_reads_no_copies_compares_whole_texts(lm, plain, reference):
    texts = ["The cat sat.", "The dog sat."]
    for ranking in (plain.rank("The {{cat|dog}} sat."), lm.rank("The {{cat|dog}} sat.", future=False)):
        assert ranking.compared == "whole text" and not ranking.future
        assert {r.text: r.log_prob for r in ranking} == exactly({text: whole(reference, text) for text in texts})
    asked = plain.rank("The {{cat|dog}} sat.", future=True)
    assert asked.compared == "asked | given" and asked.future
    assert [r.log_prob for r in asked] == exactly([r.log_prob for r in lm.rank("The {{cat|dog}} sat.")])


def test_alternatives_that_swallow_given_text_are_compared_as_whole_texts(lm, reference):
    ranking = lm.rank("A {{bird saw a ca|bird mat.}}t")  # " cat" takes the given "t" in; after "mat." it is a token
    texts = ["A bird saw a cat", "A bird mat.t"]
    assert [len(ids(text)) for text in texts] == [5, 5]  # as many tokens, but not the same ones given
    assert ranking.compared == "whole text"
    assert {r.text: r.log_prob for r in ranking} == exactly({text: whole(reference, text) for text in texts})


def test_slots_multiply(lm):
    ranking = lm.rank("The {{cat|dog}} saw the {{cat|dog|bird}}.")
    assert len(ranking) == 6 and ranking.compared == "asked | given"
    assert {r.choice for r in ranking} == {(a, b) for a in ("cat", "dog") for b in ("cat", "dog", "bird")}
    assert sum(r.probability for r in ranking) == pytest.approx(1)
    assert all(r.text == f"The {r.choice[0]} saw the {r.choice[1]}." for r in ranking)
    both = lm.log_prob("The {{dog}} saw the {{bird}}.").log_prob
    assert {r.choice: r.log_prob for r in ranking}["dog", "bird"] == exactly(both)


def test_the_number_of_combinations_has_a_cap(lm):
    slot = "{{cat|dog}}"
    assert len(lm.rank(" ".join([slot] * 4))) == 16
    with pytest.raises(TemplateError, match="512 ways"):
        lm.rank(" ".join([slot] * 9))


def test_an_alternative_that_leaves_no_text_is_refused(lm):
    with pytest.raises(TemplateError, match="no text"):
        lm.rank("{{cat|}}")


# ---- which tokens stand for the beginning and for the unknown --------------------------------------------------------


def test_bos_is_the_argument_then_the_metadata_then_the_tokenizers_bos_then_its_eos(reference):
    both, eos = tiny_tokenizer(bos_token="<bos>", eos_token="<eos>"), tiny_tokenizer(eos_token="<eos>")
    none = tiny_tokenizer()
    says = Metadata(bos_token_id=17)
    assert make(tokenizer=both, metadata=says, bos=9).bos == 9
    assert make(tokenizer=both, metadata=says, bos="<mask>").bos == 2
    assert make(tokenizer=both, metadata=says, bos=0).bos == 0  # zero is a token like others
    assert make(tokenizer=both, metadata=says).bos == 17
    assert make(tokenizer=none, metadata=says).bos == 17
    assert make(tokenizer=both, metadata=Metadata()).bos == make(tokenizer=both, metadata=None).bos == 0
    assert make(tokenizer=eos, metadata=None).bos == 1
    with pytest.raises(ModelError, match="bos="):
        make(tokenizer=none, metadata=None)
    query = Query(ids("The cat"), [False, False])
    assert scores(make(bos=9), query) == exactly(expected(reference, query, bos=9))
    (sample,) = make(bos=9).sample(query, seed=0)
    assert [t.log_prob for t in sample.tokens] == exactly(expected(reference, sample.query, bos=9))


def test_mask_is_the_argument_then_the_metadata():
    assert make(metadata=Metadata(mask_token_id=5), mask=7).mask == 7
    assert make(metadata=Metadata(mask_token_id=5)).mask == 5
    assert make(metadata=None).mask is None


@pytest.mark.parametrize("name", ["bos", "mask"])
@pytest.mark.parametrize("token", ["no such token", 324, -1])
def test_a_bos_or_mask_that_is_no_token_is_refused(name, token):
    with pytest.raises(ModelError, match=rf"{name}.*{token}"):
        make(**{name: token})


@pytest.mark.parametrize("field", ["bos_token_id", "mask_token_id"])
def test_metadata_that_names_a_token_outside_the_vocabulary_is_refused(field):
    with pytest.raises(ModelError, match=field.split("_")[0]):
        make(metadata=Metadata(**{field: 10_000}))


def test_an_unknown_attention_backend_is_refused():
    assert make(attention="dense").attention == "dense"
    with pytest.raises(InputError, match="attention must be"):
        make(attention="flash")


# ---- the network inside --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_the_network_goes_back_to_the_mode_it_was_in(training):
    lm = make()
    lm.model.train(training)
    lm.log_prob(TEMPLATE)
    lm.sample(TEMPLATE)
    lm.rank("The {{cat|dog}} sat.")
    assert lm.model.training is training
    with pytest.raises(QueryError):
        lm.log_prob(Query([999], [False]))
    lm.model.set_attn_implementation("eager")
    with pytest.raises(ModelError):
        lm.log_prob(TEMPLATE)
    assert lm.model.training is training  # also after an error


def test_dropout_is_out_of_action_in_our_calls():
    dropout = {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}
    network = tiny_model("gpt2", vocabulary=VOCABULARY, scale=0.15, **dropout).double()
    lm = make(model=network)
    still = scores(lm, TEMPLATE)
    network.train()
    assert scores(lm, TEMPLATE) == still
    (sample,) = lm.sample(TEMPLATE, seed=0)
    assert sample.log_prob == exactly(lm.log_prob(sample.query).log_prob)
    x = torch.tensor([[5, 6, 7]])
    assert not torch.equal(network(x).logits, network(x).logits)  # it is in action elsewhere


def test_no_gradient_is_kept(lm):
    lm.log_prob(TEMPLATE)
    assert all(p.grad is None for p in lm.model.parameters())


def test_bfloat16_on_a_cpu_is_close_to_float32():
    full, half = make(dtype=torch.float32), make(dtype=torch.bfloat16)
    assert half.model.dtype == torch.bfloat16
    assert scores(half, TEMPLATE) == pytest.approx(scores(full, TEMPLATE), rel=0, abs=0.1)
    for sample in half.sample("The {{_3}} sat on the {{_2}}.", n=3, seed=0):
        assert sample.log_prob == pytest.approx(half.log_prob(sample.query).log_prob, rel=0, abs=0.2)


def test_a_lora_adapter_is_part_of_the_model(lm):
    from shelves import lora

    one, other = (
        lora(tiny_model(vocabulary=VOCABULARY, scale=0.15).double(), "q_proj", "v_proj", seed=0).double()
        for _ in range(2)
    )
    adapted, merged, query = make(model=one), other.merge_and_unload(), lm.query(TEMPLATE)
    want = expected(merged, query)
    assert scores(adapted, TEMPLATE) == pytest.approx(want, abs=1e-6)
    assert scores(lm, TEMPLATE) != pytest.approx(want, abs=0.01)
    (sample,) = adapted.sample(TEMPLATE, seed=0)
    assert sample.log_prob == exactly(adapted.log_prob(sample.query).log_prob)


def test_an_adapter_that_adds_virtual_tokens_is_refused():
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    with pytest.raises(ModelError, match="virtual tokens"):
        make(model=peft.get_peft_model(tiny_model(vocabulary=VOCABULARY), config))


@pytest.mark.parametrize("network", [torch.nn.Linear(2, 2), "gpt2", None])
def test_what_is_no_language_model_is_refused(network):
    with pytest.raises(ModelError, match="expected a causal language model"):
        LanguageModel(network, tiny_tokenizer(bos_token="<bos>"))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_real_tokenizers_work(kind, request):
    tokenizer = request.getfixturevalue(kind)
    network = tiny_model(vocabulary=len(tokenizer), scale=0.1)
    lm = make(model=network, tokenizer=tokenizer, metadata=Metadata())
    score = lm.log_prob("The capital of France is {{Paris}}.")
    assert "".join(t.text for t in score.tokens).strip() == "Paris"
    for sample in lm.sample("The capital of {{_2}} is Paris.", n=2, seed=0):
        assert sample.log_prob == pytest.approx(lm.log_prob(sample.query).log_prob, abs=1e-3)


@pytest.mark.parametrize("verb", ["log_prob", "sample"])
def test_a_network_that_breaks_down_gives_an_error_and_no_answer(verb):
    lm = make()
    lm.model.get_output_embeddings().weight.data[5] = math.nan
    with pytest.raises(ModelError, match="NaN"):
        getattr(lm, verb)(TEMPLATE)
