"""Several adapters on one backbone: who answers what, and that each answers as if it were alone."""

from __future__ import annotations

import itertools
import re
import warnings

import pytest
from models import expected_log_probs
from shelves import BLOCKS, CAUSAL, GAP, INFILLING, SCATTERED, Shelf, questions
from tolerance import exactly

import acgpt
from acgpt import FutureIgnored, InputError, LanguageModel, Metadata, Query
from acgpt.models.adapters import Adapter, mode_of
from acgpt.models.fill_by_search import BONUS
from acgpt.models.router import route
from acgpt.query.conditioning import Blocks, Conditioning, Empty, Infilling

pytestmark = pytest.mark.usefixtures("offline")


# ---- what an adapter is for ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("conditioning", "mode"),
    [
        (None, "blocks"),
        (BLOCKS, "blocks"),
        (INFILLING, "infilling"),
        ({"r_max": 0.6, "infilling": 0.6}, "infilling"),  # the short notation
        ({"r_max": 0.6, "infilling": 0.5}, "blocks"),  # a tie
        (Conditioning((Blocks(), Infilling(), Blocks(r_max=0.2)), (2, 3, 2)).as_dict(), "blocks"),  # 4 against 3
        (Conditioning((Empty(), Infilling(), Blocks()), (5, 2, 1)).as_dict(), "infilling"),  # of those given anything
        (Conditioning((Empty(),)).as_dict(), None),
        ({"distribution": "of somebody else"}, "blocks"),
    ],
)
def test_an_adapter_is_for_what_most_of_its_training_texts_with_anything_given_were(conditioning, mode):
    assert mode_of(Metadata(conditioning=conditioning)) == mode


@pytest.mark.parametrize(
    ("name", "mode"),
    [("infill", "infilling"), ("infilling", "infilling"), ("scattered", "blocks"), ("blocks", "blocks")],
)
def test_the_name_of_a_mode_goes_before_what_the_metadata_say(name, mode):
    other = INFILLING if mode == "blocks" else BLOCKS
    assert (
        Adapter.of(name, Metadata(conditioning=other)).mode
        == mode
        != Adapter.of("x", Metadata(conditioning=other)).mode
    )


# ---- who answers ---------------------------------------------------------------------------------------------------


def shaped(roles):
    return Query([7] * len(roles), [r == "g" for r in roles], [r == "a" for r in roles])


def routed(roles, future=None, backbone=None, **adapters):
    known = {name: Adapter.of(name, metadata) for name, metadata in adapters.items()}
    way = route(shaped(roles), known, backbone, future)
    return way.adapter, way.future


@pytest.mark.parametrize("future", [None, False, True])
def test_the_router_goes_by_the_roles_alone(future):
    """Every query of up to five tokens, against the rule written with regular expressions."""
    adapters = {"f": Metadata(conditioning=INFILLING, mask_token_id=1), "b": Metadata(mask_token_id=1)}
    seen = set()
    for length in range(1, 6):
        for roles in map("".join, itertools.product("gau", repeat=length)):
            if "a" not in roles:
                continue
            if "u" not in roles and (future is False or (future is None and not re.search("a.*g", roles))):
                want = (None, False)
            else:
                want = ("f" if re.fullmatch("g*a+g+", roles) else "b", future is not False)
            assert routed(roles, future, **adapters) == want, roles
            seen.add(want)
    assert len(seen) == (3 if future is None else 2)


def test_without_an_adapter_for_it_the_first_that_reads_copies_answers():
    fills, blocks = Metadata(conditioning=INFILLING), Metadata(conditioning=BLOCKS)
    never, gpt = Metadata(conditioning=Conditioning((Empty(),)).as_dict()), Metadata(method="gpt")
    assert routed("gag", x=gpt, y=blocks) == ("y", True)
    assert routed("aga", x=gpt, y=fills) == ("y", True)
    assert routed("aga", x=None, y=never, z=fills) == ("z", True)
    assert routed("gag", first=fills, second=fills) == ("first", True)
    assert routed("aga", x=fills, y=blocks, z=blocks) == ("y", True)
    assert routed("gag", infill=None, y=blocks) == ("y", True)  # a name does not make it read copies
    assert routed("gag", infill=gpt, y=blocks) == ("y", True)


def test_where_no_adapter_reads_copies_the_backbone_answers_by_its_own_word():
    gpt = Metadata(method="gpt")
    assert routed("gag", x=gpt, y=None) == (None, False)
    assert routed("gag", x=gpt, y=None, backbone=Metadata()) == (None, True)
    assert routed("gag", x=gpt, y=None, future=True) == (None, True)
    assert routed("ga", x=gpt, y=None, backbone=Metadata()) == (None, False)


def test_unknown_tokens_go_to_an_adapter_that_has_a_mask():
    without, having = Metadata(conditioning=BLOCKS), Metadata(conditioning=INFILLING, mask_token_id=3)
    assert routed("gua", x=without, y=having) == ("y", True)
    assert routed("gua", x=without, y=without) == ("x", True)  # which says what is missing
    assert routed("aga", x=without, y=having) == ("x", True)


def oracle(references, query, who, future):
    return expected_log_probs(
        references[who], query, future=future, mask={"mine": 5, "other": 6, None: 0}[who]
    ).tolist()


@pytest.fixture
def alone(shelf):
    """A model with each adapter of `both` alone, and one with none, by name."""
    folders = {"mine": shelf.folder / "fill", "other": shelf.folder / "any", None: None}
    return {name: shelf.load(folder) for name, folder in folders.items()}


def test_a_mixed_batch_gets_the_answers_that_each_adapter_alone_gives_in_order(both, alone, references):
    asked, who = questions()
    scores = both.log_prob(asked)
    assert [score.adapter for score in scores] == who and {None, "mine", "other"} == set(who)
    assert [score.future for score in scores] == [name is not None for name in who]
    for question, name, score in zip(asked, who, scores, strict=True):
        query = both.query(question) if isinstance(question, str) else question
        got = [token.log_prob for token in score.tokens]
        assert got == exactly(oracle(references, query, name, name is not None))
        single = alone[name].log_prob(question, future=name is not None)
        assert got == exactly([token.log_prob for token in single.tokens])
        assert both.log_prob(question).adapter == name  # not what its neighbours got
    distinct = {name: both.log_prob(GAP, adapter=name, future=True).log_prob for name in ("mine", "other", False)}
    assert len({round(value, 3) for value in distinct.values()}) == 3  # the adapters do something


def test_samples_of_a_mixed_batch_are_those_that_each_adapter_alone_draws(both, alone):
    asked, who = questions()
    drawn = both.sample(asked, n=2, seed=3)
    for question, name, samples in zip(asked, who, drawn, strict=True):
        single = alone[name].sample(question, n=2, seed=3, future=name is not None)
        assert [s.text for s in samples] == [s.text for s in single]
        assert [s.log_prob for s in samples] == exactly([s.log_prob for s in single])
        assert {s.adapter for s in samples} == {name} and {s.future for s in samples} == {name is not None}
        for sample in samples:
            assert sample.log_prob == exactly(both.log_prob(sample.query).log_prob)


def test_rankings_are_those_of_the_adapter_that_they_name(both, alone):
    fill, plain = alone["mine"], alone[None]
    gap, end = "The {{cat|dog|bird}} sat.", "The cat sat on the {{mat|log}}"
    for ranking, single in [
        (both.rank(gap), plain.rank(gap)),  # a choice among alternatives needs no future
        (both.rank(gap, future=True), fill.rank(gap)),
        (both.rank(gap, adapter="mine"), fill.rank(gap)),
        (both.rank(gap, future=False), plain.rank(gap)),
        (both.rank(gap, adapter="mine", future=False), fill.rank(gap, future=False)),
        (both.rank(gap, adapter=False), plain.rank(gap)),
        (both.rank(end), plain.rank(end)),
        (both.rank("The {{cat|carburettor}} sat."), plain.rank("The {{cat|carburettor}} sat.")),
    ]:
        assert (ranking.compared, ranking.future) == (single.compared, single.future)
        assert [r.choice for r in ranking] == [r.choice for r in single]
        assert [r.log_prob for r in ranking] == exactly([r.log_prob for r in single])
    assert both.rank(gap, future=True).adapter == both.rank(gap, adapter="mine", future=False).adapter == "mine"
    assert both.rank("The {{cat|dog}} saw the {{cat|dog}}.", future=True).adapter == "other"
    for none in (both.rank(gap), both.rank(gap, future=False), both.rank(gap, adapter=False), both.rank(end)):
        assert none.adapter is None


def test_a_router_with_nothing_to_choose_from_changes_no_ranking(shelf):
    tokenizer, said = shelf.load(None).tokenizer, Metadata(method="ac-gpt")
    ranked = [
        LanguageModel(shelf.load(None).model, tokenizer, metadata=said, router=router).rank("The {{cat|dog}} sat.")
        for router in (True, False)
    ]
    assert ranked[0].compared == ranked[1].compared == "asked | given"


@pytest.mark.parametrize("name", ["mine", "other", False, "none"])
@pytest.mark.parametrize("future", [True, False])
def test_an_adapter_that_is_named_answers_whatever_the_query(both, references, name, future):
    who = None if name in (False, "none") else name
    for template in (CAUSAL, GAP, SCATTERED):
        score = both.log_prob(template, adapter=name, future=future)
        assert (score.adapter, score.future) == (who, future)
        want = oracle(references, both.query(template), who, future)
        assert [token.log_prob for token in score.tokens] == exactly(want)
        (sample,) = both.sample(template, adapter=name, future=future, seed=0)
        assert sample.adapter == who
        assert sample.log_prob == exactly(both.log_prob(sample.query, adapter=name, future=future).log_prob)
    (fill,) = both.fill("The {{_2-2}} sat.", 1, adapter=name, future=future)
    assert fill.adapter == who
    assert fill.log_prob == exactly(both.log_prob(fill.query, adapter=name, future=future).log_prob)
    read = Query(fill.query.tokens, [i < fill.query.asked_positions[0] - 1 for i in range(len(fill.query))])
    assert fill.score - BONUS * 2 == exactly(both.log_prob(read, adapter=name, future=False).log_prob)


def test_each_adapter_reads_its_own_mask_unless_the_user_names_one(shelf, both, references):
    query = Query([9, None, 8, 7], [True, False, False, True], [False, False, True, False])
    for name, mask in (("mine", 5), ("other", 6)):
        (token,) = both.log_prob(query, adapter=name).tokens
        assert [token.log_prob] == exactly(expected_log_probs(references[name], query, mask=mask).tolist())
        (sample,) = both.sample(query, adapter=name, seed=0)
        assert sample.text == both.tokenizer.decode([9, mask, sample.tokens[0].id, 7])
        (fill,) = both.fill("The {{?1}} {{_1-1}} sat.", 1, adapter=name)
        assert fill.log_prob == exactly(both.log_prob(fill.query, adapter=name).log_prob)
    with pytest.raises(InputError, match="MASK"):
        both.log_prob(query, adapter=False, future=False)
    named = shelf.load({"mine": shelf.folder / "fill", "other": shelf.folder / "any"}, mask=8)
    (token,) = named.log_prob(query, adapter="mine").tokens
    assert [token.log_prob] == exactly(expected_log_probs(references["mine"], query, mask=8).tolist())


def test_what_adapters_leave_open_of_bos_and_mask_is_as_the_base_says(tmp_path):
    shelf = Shelf(tmp_path, says=Metadata(method="gpt", bos_token_id=7, mask_token_id=8))
    shelf.add("one", "q_proj", metadata=Metadata(), seed=1)
    shelf.add("two", "q_proj", metadata=Metadata(mask_token_id=9), seed=2)
    lm = shelf.load({name: shelf.folder / name for name in ("one", "two")})
    assert lm.bos == 7
    assert [a.metadata.mask_token_id for a in lm.adapters.values()] == [8, 9]
    query = Query([5, None, 6], [True, False, False], [False, False, True])
    for name, mask in (("one", 8), ("two", 9)):
        want = expected_log_probs(shelf.reference(name), query, bos=7, mask=mask).tolist()
        assert [token.log_prob for token in lm.log_prob(query, adapter=name).tokens] == exactly(want)


def test_an_adapter_that_says_nothing_or_reads_no_copies_is_never_shown_any(shelf):
    folders = {"silent": shelf.folder / "silent", "causal": shelf.folder / "causal"}
    lm = shelf.load(folders)
    assert not lm.reads_future
    with pytest.warns(FutureIgnored) as caught:
        score = lm.log_prob([GAP, SCATTERED])[0]
    assert (score.adapter, score.future) == (None, False) and caught[0].filename == __file__
    with pytest.warns(FutureIgnored):
        score = shelf.load(folders).log_prob(GAP, adapter="silent")
    assert (score.adapter, score.future) == ("silent", False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fresh = shelf.load(folders)
        fresh.log_prob(CAUSAL)
        assert fresh.rank("The {{cat|dog}} sat.").compared == "whole text"


# ---- names, and what there is --------------------------------------------------------------------------------------


def test_what_there_is_can_be_listed(both):
    assert list(both.adapters) == ["mine", "other"]
    assert [adapter.mode for adapter in both.adapters.values()] == ["infilling", "blocks"]
    assert both.adapters["mine"].conditioning == INFILLING and both.adapters["mine"].reads_copies
    assert "mine, other" in repr(both) and both.reads_future


@pytest.mark.parametrize("name", ["infill", "", True, 3, "mine+other"])
@pytest.mark.parametrize("verb", ["log_prob", "sample", "rank"])
def test_an_unknown_name_is_refused_with_those_there_are(both, verb, name):
    template = "The {{cat|dog}} sat." if verb == "rank" else GAP
    with pytest.raises(InputError, match=rf"{re.escape(repr(name))}.*mine, other"):
        getattr(both, verb)(template, adapter=name)


def test_a_model_without_adapters_has_none_to_name(shelf):
    lm = shelf.load(None)
    assert lm.adapters == {} and lm.log_prob(CAUSAL).adapter is None
    assert lm.log_prob(CAUSAL, adapter=False) == lm.log_prob(CAUSAL, adapter="none") == lm.log_prob(CAUSAL)
    with pytest.raises(InputError, match="no adapters"):
        lm.log_prob(CAUSAL, adapter="mine")


@pytest.mark.parametrize(
    ("given", "name"),
    [(lambda folder: folder, "default"), (str, "default"), (lambda folder: {"fill": folder}, "fill")],
)
def test_one_adapter_answers_everything_unless_the_backbone_is_asked_for(shelf, references, given, name):
    lm = shelf.load(given(shelf.folder / "fill"))
    assert list(lm.adapters) == [name] and lm.mask == 5
    for template in (CAUSAL, GAP, SCATTERED):
        score = lm.log_prob(template)
        assert (score.adapter, score.future) == (name, True)
        assert [t.log_prob for t in score.tokens] == exactly(oracle(references, lm.query(template), "mine", True))
        bare = lm.log_prob(template, adapter=False, future=False)
        assert [t.log_prob for t in bare.tokens] == exactly(oracle(references, lm.query(template), None, False))
        assert bare.adapter is None
    with pytest.warns(FutureIgnored):
        assert not lm.log_prob(GAP, adapter=False).future  # by the backbone's own word


@pytest.mark.parametrize("adapters", [{}, {"none": "x"}, {"a.b": "x"}, {"": "x"}, {3: "x"}, {"keys": "x"}, {"a": 7}])
def test_a_mapping_that_cannot_be_is_refused_before_anything_is_loaded(shelf, adapters, monkeypatch):
    monkeypatch.setattr(acgpt.models.loading, "load_base", lambda *_: pytest.fail("it was loaded"))
    with pytest.raises(InputError, match="adapter"):
        shelf.load(adapters)


def test_one_name_may_be_part_of_another_or_of_peft_s_own(shelf):
    warnings.simplefilter("ignore")  # PEFT's own doubts about such names
    for names in (("fill", "infill"), ("lora", "or")):
        lm = shelf.load(dict(zip(names, (shelf.folder / "any", shelf.folder / "fill"), strict=True)))
        alone = shelf.load(shelf.folder / "any")
        assert lm.log_prob(GAP, adapter=names[0]).log_prob == exactly(alone.log_prob(GAP).log_prob)
