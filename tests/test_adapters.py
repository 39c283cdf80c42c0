"""Several adapters on one backbone: who answers what, and that each answers as if it were alone."""

from __future__ import annotations

import doctest
import itertools
import json
import random
import re
import warnings
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub.constants
import pytest
import torch
from models import expected_log_probs, random_query, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import acgpt
from acgpt import (
    FutureIgnored,
    InputError,
    LanguageModel,
    Metadata,
    ModelError,
    Query,
    decode,
)
from acgpt.adapters import Adapter, mode_of, route, switched
from acgpt.cli import app, named_adapters
from acgpt.conditioning import Blocks, Conditioning, Empty, Infilling
from acgpt.decode import Decoder, Sampling, adapter_layers, adapters_at_work
from acgpt.metadata import tokenizer_hash, weights_hash

peft = pytest.importorskip("peft")

VOCABULARY = 324  # of the tiny tokenizer
INFILLING, BLOCKS = Conditioning((Infilling(),)).as_dict(), Conditioning((Blocks(),)).as_dict()
CAUSAL, GAP, SCATTERED = "The cat sat on the {{mat}}", "The {{cat}} sat on the mat.", "The {{cat}} sat on the {{mat}}."


def tokenizer():
    return tiny_tokenizer(bos_token="<bos>", eos_token="<eos>")


def exactly(values):
    return pytest.approx(values, rel=0, abs=1e-9)


def lora(network, *targets, seed, **how):
    """A network with a LoRA adapter that changes it a good deal."""
    torch.manual_seed(seed)
    config = peft.LoraConfig(target_modules=list(targets), init_lora_weights=False, task_type="CAUSAL_LM", **how)
    adapted = peft.get_peft_model(network, config)
    for name, weight in adapted.named_parameters():
        if "trainable_tokens" in name or "modules_to_save" in name:
            weight.data += torch.randn_like(weight)
    return adapted


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """Nothing here may reach for a network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


class Shelf:
    """A base model and adapters for it, in folders."""

    def __init__(self, folder, says=None, **shape):
        self.folder, self.base = folder, folder / "base"
        network = tiny_model(vocabulary=VOCABULARY, scale=0.15, **shape)
        LanguageModel(network, tokenizer(), metadata=says).save_pretrained(self.base)

    def network(self):
        return AutoModelForCausalLM.from_pretrained(self.base)

    def add(self, name, *targets, metadata=None, seed=1, **how):
        lora(self.network(), *targets, seed=seed, **how).save_pretrained(self.folder / name)
        if metadata is not None:
            metadata.write(self.folder / name)
        return self.folder / name

    def load(self, adapter, **how):
        return acgpt.load(self.base, adapter=adapter, dtype="float64", **how)

    def reference(self, name=None):
        """The base, or the base with an adapter merged into it by PEFT, as transformers has it: never seen by acgpt."""
        network = AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.float64)
        if name is None:
            return network
        return peft.PeftModel.from_pretrained(network, self.folder / name).merge_and_unload()


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """Not to be changed."""
    shelf = Shelf(tmp_path_factory.mktemp("shelf"))
    known = {"base_hash": weights_hash(shelf.network()), "tokenizer_hash": tokenizer_hash(tokenizer())}
    shelf.add("fill", "q_proj", "v_proj", metadata=Metadata(conditioning=INFILLING, mask_token_id=5, **known))
    shelf.add("any", "q_proj", "down_proj", metadata=Metadata(conditioning=BLOCKS, mask_token_id=6, **known), seed=2)
    shelf.add("causal", "o_proj", metadata=Metadata(method="gpt"), seed=3)
    shelf.add("silent", "o_proj", seed=4)
    return shelf


@pytest.fixture(scope="module")
def both(shelf):
    return shelf.load({"mine": shelf.folder / "fill", "other": shelf.folder / "any"})


@pytest.fixture(scope="module")
def references(shelf):
    return {"mine": shelf.reference("fill"), "other": shelf.reference("any"), None: shelf.reference()}


def state(network):
    """All that switching could change: adapters at work, gradients wanted, modes."""
    return (
        [(layer._active_adapter, layer._disable_adapters) for layer in adapter_layers(network)],
        [weight.requires_grad for weight in network.parameters()],
        [module.training for module in network.modules()],
    )


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


# ---- each as if it were alone --------------------------------------------------------------------------------------


def questions():
    """Of all shapes and lengths, mixed, with who should answer each; MASK differs between the adapters."""
    found = [(CAUSAL, None), (GAP, "mine"), (SCATTERED, "other"), ("{{The}} cat.", "mine"), ("{{The cat}}", None)]
    found += [(random_query(i, 9 + i, share=0.5, vocabulary=300), "other") for i in range(3)]
    found += [(random_query(9, 14, share=0.4, unknown=0.3, vocabulary=300), "other")]
    found += [(Query([9, 8, 7, 6], [True, False, False, True]), "mine"), (Query([9, 8], [False, False]), None)]
    random.Random(1).shuffle(found)
    return [q for q, _ in found], [who for _, who in found]


def oracle(references, query, who, future):
    return expected_log_probs(
        references[who], query, future=future, mask={"mine": 5, "other": 6, None: 0}[who]
    ).tolist()


def test_a_mixed_batch_gets_the_answers_that_each_adapter_alone_gives_in_order(shelf, both, references):
    asked, who = questions()
    scores = both.log_prob(asked)
    assert [score.adapter for score in scores] == who and {None, "mine", "other"} == set(who)
    assert [score.future for score in scores] == [name is not None for name in who]
    alone = {
        "mine": shelf.load(shelf.folder / "fill"),
        "other": shelf.load(shelf.folder / "any"),
        None: shelf.load(None),
    }
    for question, name, score in zip(asked, who, scores, strict=True):
        query = both.query(question) if isinstance(question, str) else question
        got = [token.log_prob for token in score.tokens]
        assert got == exactly(oracle(references, query, name, name is not None))
        single = alone[name].log_prob(question, future=name is not None)
        assert got == exactly([token.log_prob for token in single.tokens])
        assert both.log_prob(question).adapter == name  # not what its neighbours got
    distinct = {name: both.log_prob(GAP, adapter=name, future=True).log_prob for name in ("mine", "other", False)}
    assert len({round(value, 3) for value in distinct.values()}) == 3  # the adapters do something


def test_samples_of_a_mixed_batch_are_those_that_each_adapter_alone_draws(shelf, both):
    asked, who = questions()
    drawn = both.sample(asked, n=2, seed=3)
    alone = {
        "mine": shelf.load(shelf.folder / "fill"),
        "other": shelf.load(shelf.folder / "any"),
        None: shelf.load(None),
    }
    for question, name, samples in zip(asked, who, drawn, strict=True):
        single = alone[name].sample(question, n=2, seed=3, future=name is not None)
        assert [s.text for s in samples] == [s.text for s in single]
        assert [s.log_prob for s in samples] == exactly([s.log_prob for s in single])
        assert {s.adapter for s in samples} == {name} and {s.future for s in samples} == {name is not None}
        for sample in samples:
            assert sample.log_prob == exactly(both.log_prob(sample.query).log_prob)


def test_rankings_are_those_of_the_adapter_that_they_name(shelf, both):
    fill, plain = shelf.load(shelf.folder / "fill"), shelf.load(None)
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


def test_each_adapter_reads_its_own_mask_unless_the_user_names_one(shelf, both, references):
    query = Query([9, None, 8, 7], [True, False, False, True], [False, False, True, False])
    for name, mask in (("mine", 5), ("other", 6)):
        (token,) = both.log_prob(query, adapter=name).tokens
        assert [token.log_prob] == exactly(expected_log_probs(references[name], query, mask=mask).tolist())
        (sample,) = both.sample(query, adapter=name, seed=0)
        assert sample.text == both.tokenizer.decode([9, mask, sample.tokens[0].id, 7])
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
    monkeypatch.setattr(acgpt.loading, "load_base", lambda *_: pytest.fail("it was loaded"))
    with pytest.raises(InputError, match="adapter"):
        shelf.load(adapters)


def test_one_name_may_be_part_of_another_or_of_peft_s_own(shelf):
    warnings.simplefilter("ignore")  # PEFT's own doubts about such names
    for names in (("fill", "infill"), ("lora", "or")):
        lm = shelf.load(dict(zip(names, (shelf.folder / "any", shelf.folder / "fill"), strict=True)))
        alone = shelf.load(shelf.folder / "any")
        assert lm.log_prob(GAP, adapter=names[0]).log_prob == exactly(alone.log_prob(GAP).log_prob)


# ---- without the router --------------------------------------------------------------------------------------------


def test_without_the_router_the_first_adapter_answers_and_the_switch_can_be_turned(shelf, both):
    lm = shelf.load({"mine": shelf.folder / "fill", "other": shelf.folder / "any"}, router=False)
    assert {score.adapter for score in lm.log_prob([CAUSAL, GAP, SCATTERED])} == {"mine"}
    assert lm.log_prob(SCATTERED).log_prob == exactly(both.log_prob(SCATTERED, adapter="mine").log_prob)
    assert lm.log_prob(SCATTERED, adapter="other") == both.log_prob(SCATTERED)
    lm.router = True
    assert [score.adapter for score in lm.log_prob([CAUSAL, GAP, SCATTERED])] == [None, "mine", "other"]


def test_one_adapter_answers_everything_unless_it_is_to_be_routed_to(shelf):
    alone, routed = (shelf.load(shelf.folder / "fill", router=router) for router in (None, True))
    assert (alone.router, routed.router) == (False, True)
    assert {score.adapter for score in alone.log_prob([CAUSAL, GAP, SCATTERED])} == {"default"}
    found = routed.log_prob([CAUSAL, GAP, SCATTERED])
    assert [(score.adapter, score.future) for score in found] == [(None, False), ("default", True), ("default", True)]
    assert found[0].log_prob == exactly(alone.log_prob(CAUSAL, adapter=False, future=False).log_prob)
    assert [score.log_prob for score in found[1:]] == [exactly(alone.log_prob(q).log_prob) for q in (GAP, SCATTERED)]


@pytest.fixture
def held(shelf):
    """A PEFT model with two adapters, as a user may hold it, one of them in training."""
    network = AutoModelForCausalLM.from_pretrained(shelf.base, dtype=torch.float64)
    model = peft.PeftModel.from_pretrained(network, shelf.folder / "fill", adapter_name="mine", is_trainable=True)
    model.load_adapter(shelf.folder / "any", "other")
    return model.train()


def says(shelf):
    return {"mine": Metadata.read(shelf.folder / "fill"), "other": Metadata.read(shelf.folder / "any")}


def test_a_peft_model_of_one_s_own_is_asked_likewise(shelf, both, held):
    lm = LanguageModel(held, tokenizer(), metadata=says(shelf))
    asked, who = questions()
    scores = lm.log_prob(asked)
    assert [score.adapter for score in scores] == who
    assert [score.log_prob for score in scores] == exactly([score.log_prob for score in both.log_prob(asked)])
    same = LanguageModel(held, tokenizer(), metadata=Metadata())  # one word for all of them
    assert [a.mode for a in same.adapters.values()] == ["blocks", "blocks"] and same.reads_future
    with pytest.raises(InputError, match=r"'theirs'.*mine, other"):
        LanguageModel(held, tokenizer(), metadata={"theirs": Metadata()})


def test_a_name_that_stands_for_something_else_is_refused(shelf):
    for name in ("none", "a+b"):
        model = peft.PeftModel.from_pretrained(shelf.network(), shelf.folder / "fill", adapter_name=name)
        with pytest.raises(InputError, match=re.escape(repr(name))):
            LanguageModel(model, tokenizer())


def test_without_the_router_what_the_user_has_set_in_the_peft_model_counts(shelf, both, held):
    lm = LanguageModel(held, tokenizer(), metadata=says(shelf), router=False)
    for name in ("other", "mine"):
        held.set_adapter(name)
        assert lm.log_prob(GAP) == both.log_prob(GAP, adapter=name)
        assert lm.sample(GAP, seed=1) == both.sample(GAP, adapter=name, seed=1)
    with held.disable_adapter():
        score = lm.log_prob(GAP, future=False)
        assert score.adapter is None
        assert score.log_prob == exactly(both.log_prob(GAP, adapter=False, future=False).log_prob)
        assert lm.log_prob(GAP, adapter="mine") == both.log_prob(GAP, adapter="mine")
    held.base_model.set_adapter(["mine", "other"])
    assert lm.log_prob(GAP).adapter == "mine+other"


# ---- a model is left as it was -------------------------------------------------------------------------------------


@pytest.mark.parametrize("set_up", ["as loaded", "another active", "switched off"])
def test_a_model_is_left_as_it_was_whatever_was_asked(shelf, held, set_up):
    lm = LanguageModel(held, tokenizer(), metadata=says(shelf))
    if set_up == "another active":
        held.set_adapter("other")
    if set_up == "switched off":
        held.base_model.disable_adapter_layers()
    before = state(held.get_base_model())
    lm.log_prob([CAUSAL, GAP, SCATTERED])
    lm.sample([CAUSAL, GAP, SCATTERED], seed=0)
    lm.rank("The {{cat|dog}} sat.")
    for name in ("mine", "other", False):
        lm.log_prob(GAP, adapter=name, future=True)
    assert state(held.get_base_model()) == before


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("verb", ["log_prob", "sample"])
def test_a_model_is_left_as_it_was_also_after_an_error(shelf, held, monkeypatch, verb, error):
    lm = LanguageModel(held, tokenizer(), metadata=says(shelf))
    network, before, during = held.get_base_model(), state(held.get_base_model()), []

    def fail(*_, **__):
        during.append(state(network))
        raise error

    monkeypatch.setattr("acgpt.score.log_probs", fail)
    monkeypatch.setattr(lm._sampler, "sample", fail)
    for template in (CAUSAL, SCATTERED):
        with pytest.raises(error):
            getattr(lm, verb)(template)
        assert state(network) == before
    assert len(during) == 2 and before not in during  # it had been switched


def test_switching_reaches_layers_that_only_some_adapters_touch(shelf, references):
    """`fill` touches v_proj and not down_proj, `any` the other way round: PEFT leaves the rest to us."""
    lm = shelf.load({"mine": shelf.folder / "fill", "other": shelf.folder / "any"})
    x = torch.tensor([[5, 6, 7]])
    for name in ("mine", "other", None):
        with switched(lm.model, name), torch.no_grad():
            torch.testing.assert_close(lm.model(x).logits, references[name](x).logits, rtol=0, atol=1e-9)


TOKENS, HEAD = {"trainable_token_indices": {"embed_tokens": [6, 9]}}, {"modules_to_save": ["lm_head"]}


@pytest.mark.parametrize(("extra", "tied"), [(TOKENS, False), (TOKENS, True), (HEAD, False), (HEAD, True)])
def test_adapters_that_bring_tokens_or_whole_layers_are_switched_too(tmp_path, extra, tied):
    shelf = Shelf(tmp_path, tie_word_embeddings=tied)
    for seed, name in enumerate(("one", "two"), start=1):
        shelf.add(name, "q_proj", metadata=Metadata(mask_token_id=6), seed=seed, **extra)
    lm = shelf.load({name: shelf.folder / name for name in ("one", "two")})
    query = Query([9, 6, 8, 9], [True, False, False, True], [False, True, False, False])
    for name in ("one", "two"):
        alone = shelf.load(shelf.folder / name)
        assert lm.log_prob(query, adapter=name).log_prob == exactly(alone.log_prob(query).log_prob)
    bare = acgpt.load(shelf.base, dtype="float64").log_prob(CAUSAL, future=False)
    assert lm.log_prob(CAUSAL).log_prob == exactly(bare.log_prob)


def test_adapters_that_are_merged_into_the_weights_are_not_switched(shelf, held):
    lm = LanguageModel(held, tokenizer(), metadata=says(shelf))
    held.merge_adapter(["mine"])
    with pytest.raises(ModelError, match="unmerge_adapter"):
        lm.log_prob(SCATTERED)
    lm.router = False
    merged = lm.log_prob(GAP)  # as it stands, it can be asked
    held.unmerge_adapter()
    assert merged.log_prob == exactly(lm.log_prob(GAP, adapter="mine").log_prob)


# ---- captured steps ------------------------------------------------------------------------------------------------


def test_a_captured_step_is_replayed_only_for_the_adapter_that_it_was_captured_with(both, monkeypatch):
    """What CUDA does, with stand-ins: a graph remembers which adapters were at work when it was captured."""
    network = both.model
    captured, replayed = [], []

    class Graph:
        def pool(self):
            return None

        def replay(self):
            replayed.append((self.adapters, adapters_at_work(network)))

    @contextmanager
    def capture(graph, pool):
        graph.adapters = adapters_at_work(network)
        captured.append(graph.adapters)
        yield

    monkeypatch.setattr(decode.torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(decode.torch.cuda, "graph", capture)
    clock = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    decoder = SimpleNamespace(clock=clock, graphs={}, step=lambda *_: None, model=network)
    for name in ("mine", "other", None, "mine", "other", None):
        with switched(network, name):
            decoder.at_work = adapters_at_work(network)
            Decoder.play(decoder, 4, 2, 1, 32, Sampling())
    assert len(captured) == len(set(captured)) == 3  # once for each
    assert len(replayed) == 3 * 3 + 3 * 4 and all(then == now for then, now in replayed)


def test_a_decoder_that_is_kept_learns_which_adapters_are_at_work_now(both, monkeypatch):
    seen = []
    play = Decoder.play

    def watch(self, *args):
        seen.append((self, self.at_work == adapters_at_work(both.model)))
        return play(self, *args)

    monkeypatch.setattr(Decoder, "play", watch)
    for name in ("mine", "other", False):
        both.sample("The {{_3}} sat.", adapter=name, future=True, seed=0)
        both._sampler.decoder = seen[-1][0]  # as on CUDA
    both._sampler.decoder = None
    assert len({id(decoder) for decoder, _ in seen}) == 1  # room for a batch does not depend on the adapter
    assert all(right for _, right in seen)


# ---- what does not go together -------------------------------------------------------------------------------------


@pytest.fixture
def mixed(tmp_path):
    """A shelf to be changed, with one adapter that is fine."""
    shelf = Shelf(tmp_path)
    shelf.fine = shelf.add("fine", "q_proj", metadata=Metadata(bos_token_id=0), seed=1)
    return shelf


def test_adapters_with_another_bos_are_refused_unless_the_user_names_one(mixed):
    other = mixed.add("other", "q_proj", metadata=Metadata(bos_token_id=1), seed=2)
    with pytest.raises(ModelError, match="fine: 0, other: 1"):
        mixed.load({"fine": mixed.fine, "other": other})
    assert mixed.load({"fine": mixed.fine, "other": other}, bos=7).bos == 7
    assert mixed.load(other).bos == 1


def test_an_adapter_of_another_tokenizer_is_refused_by_name(mixed):
    other = mixed.add("other", "q_proj", metadata=Metadata(tokenizer_hash="0" * 64), seed=2)
    with pytest.raises(ModelError, match=r"(?s)tokenizer is not the one that the adapter theirs"):
        mixed.load({"fine": mixed.fine, "theirs": other})


def test_an_adapter_for_other_weights_of_this_shape_warns_and_only_that_one(mixed):
    own = Metadata(base_hash=weights_hash(mixed.network()))
    fits = mixed.add("fits", "q_proj", metadata=own, seed=2)
    other = mixed.add("other", "q_proj", metadata=Metadata(base_hash="0" * 64), seed=3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mixed.load({"fine": mixed.fine, "fits": fits, "other": other})
    (warning,) = caught
    assert "other weights" in str(warning.message) and str(other) in str(warning.message)


@pytest.mark.parametrize(
    ("shape", "problem"), [({"layers": 1}, "lacks"), ({"layers": 3}, "not there"), ({"width": 64}, "")]
)
@pytest.mark.parametrize("place", ["alone", "second"])
def test_an_adapter_made_for_another_shape_is_refused(mixed, tmp_path, shape, problem, place):
    elsewhere = Shelf(tmp_path / "elsewhere", **shape)
    other = elsewhere.add("other", "q_proj", metadata=Metadata())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ModelError, match=f"cannot put the adapter {other}.*{problem}"):
            mixed.load(other if place == "alone" else {"fine": mixed.fine, "other": other})


@pytest.mark.parametrize("kind", ["biases", "embeddings", "residual"])
def test_an_adapter_that_changes_the_backbone_goes_alone(mixed, kind):
    how = {
        "biases": (["q_proj"], {"bias": "lora_only"}),
        "embeddings": (["q_proj", "embed_tokens"], {}),
        "residual": (["q_proj"], {}),
    }
    shelf = mixed
    if kind == "biases":
        shelf = Shelf(mixed.folder / "biased", attention_bias=True)
        shelf.fine = shelf.add("fine", "q_proj", metadata=Metadata())
    targets, more = how[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = shelf.add("other", *targets, metadata=Metadata(), seed=2, **more)
        if kind == "residual":  # PiSSA subtracts the adapter from the weights when it is put on
            config = json.loads((other / "adapter_config.json").read_text())
            (other / "adapter_config.json").write_text(json.dumps(config | {"init_lora_weights": "pissa"}))
        with pytest.raises(ModelError, match=r"weights of the model itself|own biases"):
            acgpt.load(shelf.base, adapter={"fine": shelf.fine, "other": other})
        alone = acgpt.load(shelf.base, adapter=other)
        assert alone.log_prob(GAP).adapter == "default"
    if kind == "biases":
        with pytest.raises(ModelError, match="biases"):
            alone.log_prob(CAUSAL, adapter=False)


def test_adapters_of_two_kinds_are_a_model_error(mixed):
    config = peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[], task_type="CAUSAL_LM")
    peft.get_peft_model(mixed.network(), config).save_pretrained(mixed.folder / "other")
    with pytest.raises(ModelError, match="cannot put the adapter"):
        mixed.load({"fine": mixed.fine, "other": mixed.folder / "other"})
    lm = mixed.load(mixed.folder / "other")  # alone it is as good as any
    assert lm.log_prob(CAUSAL).adapter == "default" and lm.log_prob(CAUSAL, adapter=False).adapter is None


def test_the_examples_of_the_page_print_what_it_says(shelf, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "adapters").mkdir()
    for link, target in {"base": "base", "adapters/infill": "fill", "adapters/scattered": "any"}.items():
        (tmp_path / link).symlink_to(shelf.folder / target)
    page = Path(__file__).resolve().parent.parent / "docs" / "adapters.md"
    results = doctest.testfile(str(page), module_relative=False, verbose=False)
    assert results.attempted > 5 and results.failed == 0
    results = doctest.testmod(acgpt.adapters)
    assert results.attempted > 0 and results.failed == 0


# ---- the command line ----------------------------------------------------------------------------------------------


@pytest.fixture
def cli(shelf):
    def run(*arguments, adapters=("mine=fill", "other=any"), code=0, stdin=None):
        options = []
        for each in adapters:
            name, _, folder = each.rpartition("=")
            options += ["--adapter", f"{name}={shelf.folder / folder}" if name else str(shelf.folder / folder)]
        command = [*arguments, "--model", str(shelf.base), *options]
        result = CliRunner().invoke(app, command, input=stdin, env={"COLUMNS": "200", "NO_COLOR": "1"})
        assert result.exit_code == code, (result.output, result.exception)
        return result

    return run


def objects(result):
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_json_says_which_adapter_answered(cli, both):
    lines = "\n".join([CAUSAL, GAP, SCATTERED])
    for answer, score in zip(
        objects(cli("score", "-", "--json", stdin=lines)), both.log_prob(lines.split("\n")), strict=True
    ):
        assert answer["adapter"] == score.adapter and answer["future"] == score.future
        assert answer["log_prob"] == pytest.approx(score.log_prob, abs=1e-4)
    assert [a["adapter"] for a in objects(cli("infill", "-", "--json", stdin=lines))] == [None, "mine", "other"]
    assert objects(cli("rank", "The {{cat|dog}} sat.", "--json"))[0]["adapter"] is None
    assert objects(cli("rank", "The {{cat|dog}} sat.", "--json", "--future"))[0]["adapter"] == "mine"
    one = objects(cli("score", CAUSAL, "--json", adapters=["fill"]))[0]
    assert one["adapter"] == "default" and one["future"]
    assert objects(cli("score", CAUSAL, "--json", adapters=["mine=fill"]))[0]["adapter"] == "mine"
    assert "adapter" not in objects(cli("score", CAUSAL, "--json", adapters=[]))[0]


def test_people_are_told_too_where_there_was_a_choice(cli):
    assert "answered by past only: no adapter; with future: mine" in cli("score", GAP).stdout
    assert "answered by other" in cli("infill", SCATTERED).stdout
    assert "answered by mine" in cli("rank", "The {{cat|dog}} sat.", "--future").stdout
    assert "answered by" not in cli("score", GAP, adapters=["fill"]).stdout


def test_show_draws_what_the_adapter_that_would_answer_is_told(cli):
    for template, adapter in [(CAUSAL, None), (GAP, "mine"), (SCATTERED, "other")]:
        (drawn,) = objects(cli("show", template, "--json"))
        assert drawn["adapter"] == adapter and drawn["future"] == (adapter is not None)
        assert (drawn["copies"] > 0) == (adapter is not None)
    (drawn,) = objects(cli("show", CAUSAL, "--json", "--future"))
    assert drawn["adapter"] == "other" and drawn["copies"] > 0
    (drawn,) = objects(cli("show", GAP, "--json", "--no-future"))
    assert drawn["adapter"] is None and drawn["copies"] == 0
    for adapters, name in ((["fill"], "default"), (["mine=fill"], "mine")):
        (drawn,) = objects(cli("show", CAUSAL, "--json", adapters=adapters))
        assert drawn["adapter"] == name and drawn["copies"] > 0  # as one adapter is asked
    assert "adapter" not in objects(cli("show", CAUSAL, "--json", adapters=[]))[0]


def test_several_adapters_need_names_that_differ(cli):
    assert "NAME=" in cli("score", GAP, adapters=["fill", "any"], code=2).stderr
    assert "NAME=" in cli("show", GAP, adapters=["mine=fill", "any"], code=2).stderr
    assert "two adapters are called mine" in cli("score", GAP, adapters=["mine=fill", "mine=any"], code=2).stderr
    assert "'none'" in cli("score", GAP, adapters=["none=fill"], code=2).stderr


def test_a_path_may_have_an_equals_sign_in_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert named_adapters(["r=8"]) == {"r": "8"}
    (tmp_path / "r=8").mkdir()
    assert named_adapters(["r=8"]) == "r=8"  # it is there
    assert named_adapters([str(tmp_path / "r=8")]) == str(tmp_path / "r=8")
    assert named_adapters(["a=" + str(tmp_path / "r=8")]) == {"a": str(tmp_path / "r=8")}
    assert named_adapters(["./runs/lr=3"]) == "./runs/lr=3"  # no name has a slash
    assert named_adapters([]) is None
