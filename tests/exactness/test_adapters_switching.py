"""Adapters are switched and the model is left as it was; what does not go together; the command line."""

from __future__ import annotations

import json
import re
import warnings
from types import SimpleNamespace

import pytest
import torch
from length_adapters import write_adapters
from shelves import CAUSAL, GAP, SCATTERED, Shelf, questions, tokenizer
from tolerance import exactly, same_scores
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import acgpt
from acgpt import InputError, LanguageModel, Metadata, ModelError, Query, QueryError
from acgpt.cli.main import app
from acgpt.cli.ui import named_adapters
from acgpt.engine import decode
from acgpt.engine.decode import Decoder
from acgpt.engine.engine import Engine
from acgpt.engine.peft import adapter_layers, adapters_at_work, switched
from acgpt.models.metadata import weights_hash
from acgpt.query.sampling import Sampling

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.usefixtures("offline")


def state(network):
    """All that switching could change: adapters at work, gradients wanted, modes."""
    return (
        [(layer._active_adapter, layer._disable_adapters) for layer in adapter_layers(network)],
        [weight.requires_grad for weight in network.parameters()],
        [module.training for module in network.modules()],
    )


# ---- without the router --------------------------------------------------------------------------------------------


def test_without_the_router_the_first_adapter_answers_and_the_switch_can_be_turned(shelf, both):
    lm = shelf.load({"mine": shelf.folder / "fill", "other": shelf.folder / "any"}, router=False)
    assert {score.adapter for score in lm.log_prob([CAUSAL, GAP, SCATTERED])} == {"mine"}
    assert lm.log_prob(SCATTERED).log_prob == exactly(both.log_prob(SCATTERED, adapter="mine").log_prob)
    assert same_scores(lm.log_prob(SCATTERED, adapter="other"), both.log_prob(SCATTERED))
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


@pytest.mark.parametrize(("name", "folder"), [("mine", "fill"), ("other", "any"), (False, None)])
def test_every_kind_of_fill_is_answered_by_the_adapter_that_is_named(shelf, both, name, folder):
    template = "The cat {{_2-3}} the mat."
    alone = shelf.load(shelf.folder / folder if folder else None)
    answers = []
    for lm, adapter in ((both, name), (alone, None)):
        options = {"adapter": adapter, "future": True, "seed": 3}
        *_, last = lm.stream(template, **options)
        answers.append([last.fill, *lm.fill(template, 2, **options), *lm.sample(template, 2, **options)])
    for mine, expected in zip(*answers, strict=True):
        assert (mine.text, mine.adapter) == (expected.text, name or None)
        assert (mine.log_prob, mine.score) == (exactly(expected.log_prob), exactly(expected.score))


def test_lengths_are_predicted_by_the_adapter_that_is_named(tmp_path):
    folders = write_adapters(tmp_path)
    lm = acgpt.load(folders.base, adapter={"plain": folders.plain, "lengths": folders.lengths}, router=False)
    template = "The {{_1-3}} sat."
    expected = acgpt.load(folders.base, adapter=folders.lengths).lengths(template)
    assert lm.lengths(template, adapter="lengths").log_probs == pytest.approx(expected.log_probs, abs=1e-4)
    assert lm.fill(template, 1, adapter="lengths")[0].length_log_prob is not None
    for adapter in ("plain", None):
        with pytest.raises(QueryError, match="does not predict lengths"):
            lm.lengths(template, adapter=adapter)


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
        assert same_scores(lm.log_prob(GAP), both.log_prob(GAP, adapter=name))
        assert same_scores(*(model.sample(GAP, adapter=it, seed=1)[0] for model, it in ((lm, None), (both, name))))
    with held.disable_adapter():
        score = lm.log_prob(GAP, future=False)
        assert score.adapter is None
        assert score.log_prob == exactly(both.log_prob(GAP, adapter=False, future=False).log_prob)
        assert same_scores(lm.log_prob(GAP, adapter="mine"), both.log_prob(GAP, adapter="mine"))
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

    for name in ("log_probs", "stream"):
        monkeypatch.setattr(Engine, name, fail)
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
    layers, captured, replayed = adapter_layers(network), [], []

    class Graph:
        def __init__(self):
            self.adapters = adapters_at_work(layers)

        def pool(self):
            return None

        def replay(self):
            replayed.append((self.adapters, adapters_at_work(layers)))

    def capture(work, device, pool):
        graph = Graph()
        captured.append(graph.adapters)
        return graph, work()

    monkeypatch.setattr(decode, "capture", capture)
    clock = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    decoder = SimpleNamespace(clock=clock, graphs={}, warm=set(), step=lambda *_: None, adapter_layers=layers)
    for name in ("mine", "other", None, "mine", "other", None):
        with switched(network, name):
            Decoder.play(decoder, 4, 2, 1, 32, Sampling())
    assert len(captured) == len(set(captured)) == 3  # once for each
    assert len(replayed) == 3 * 3 + 3 * 4 and all(then == now for then, now in replayed)
    for _ in range(3):  # steps one by one: the first is run, the second captured
        Decoder.play(decoder, 1, 1, 1, 32, Sampling())
    assert len(captured) == 4 and len(replayed) == 21 + 2


def test_a_decoder_that_is_kept_serves_every_adapter(both, monkeypatch):
    seen = []
    play = Decoder.play

    def watch(self, *args):
        seen.append(self)
        return play(self, *args)

    monkeypatch.setattr(Decoder, "play", watch)
    for name in ("mine", "other", False):
        both.sample("The {{_3}} sat.", adapter=name, future=True, seed=0)
        both._executor.engine.decoders[:] = [seen[-1]]  # as on CUDA
    both._executor.engine.decoders.clear()
    assert len(set(map(id, seen))) == 1  # room for a batch does not depend on the adapter


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
    with pytest.raises(ModelError, match=r"(?s)tokenizer is not the one .*the adapter theirs"):
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
    ("shape", "problem"), [({"layers": 1}, "lacks"), ({"layers": 3}, "that the model lacks"), ({"width": 64}, "")]
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
        with pytest.raises(ModelError, match=r"weights of the base model|own biases"):
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
    assert "two adapters have the name mine" in cli("score", GAP, adapters=["mine=fill", "mine=any"], code=2).stderr
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
