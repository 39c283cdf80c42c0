"""One model, asked by several threads at once, gives each of them what it would give to one alone."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import random
import signal
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from models import tiny_model, tiny_tokenizer
from shelves import CAUSAL, GAP, SCATTERED
from tolerance import exactly, same_draws, same_scores
from toys import answer, engine_of, query, toy
from transformers import PreTrainedModel

import acgpt
from acgpt import LanguageModel, Metadata
from acgpt.engine.modules import _register, evaluating, process_lock, turn
from acgpt.methods import method_of
from acgpt.query.sampling import Sampling

THREADS = 4
RANKED = "The {{cat|dog|bird}} sat on the mat."


@pytest.fixture
def hasty():
    """Threads take over from each other as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def model_with_dropout():
    network = tiny_model("gpt2", vocabulary=340, scale=0.15, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5).double()
    tokenizer = tiny_tokenizer(bos_token="<bos>", eos_token="<eos>")
    return LanguageModel(network.train(), tokenizer, metadata=Metadata(), mask=5)


def asked_of(adapters):
    """Functions that ask a model in every way, with each of these adapters."""
    for adapter in adapters:
        how = {"adapter": adapter, "future": True}
        yield lambda lm, how=how: [lm.log_prob(GAP, **how)]
        yield lambda lm, how=how: lm.sample(SCATTERED, 2, seed=3, **how)
        yield lambda lm, how=how: lm.rank(RANKED, **how)
    yield lambda lm: lm.log_prob([CAUSAL, GAP, SCATTERED])
    yield lambda lm: [sample for samples in lm.sample([GAP, SCATTERED], seed=1) for sample in samples]


def same(one, other):
    if hasattr(one, "compared"):
        numbers = [{each.choice: each.log_prob for each in ranking} for ranking in (one, other)]
        return numbers[0] == exactly(numbers[1]) and (one.compared, one.adapter) == (other.compared, other.adapter)
    return len(one) == len(other) and all(map(same_scores, one, other))


def hammer(models, questions, rounds=2):
    """All questions, `rounds` times, by four threads in their own orders; the answers that are not those alone."""
    alone = [ask(models[0]) for ask in questions]
    start, wrong = threading.Barrier(THREADS), []

    def work(number):
        order = list(range(len(questions))) * rounds
        random.Random(number).shuffle(order)
        start.wait()
        for i in order:
            answer = questions[i](models[number % len(models)])
            if not same(answer, alone[i]):
                wrong.append((i, answer, alone[i]))

    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(work, number) for number in range(THREADS)]:
            done.result()
    return wrong


@pytest.mark.usefixtures("hasty", "offline")
def test_threads_that_share_a_model_with_adapters_get_the_answers_of_one_alone(both):
    assert hammer([both], list(asked_of(["mine", "other", False]))) == []


@pytest.mark.usefixtures("hasty")
def test_threads_that_share_a_model_without_adapters_get_the_answers_of_one_alone():
    lm = model_with_dropout()
    assert hammer([lm], list(asked_of([None]))) == []
    assert all(module.training for module in lm.model.modules())


@pytest.mark.usefixtures("hasty")
def test_a_stream_is_drawn_without_dropout_while_others_ask():
    lm, ended = model_with_dropout(), threading.Event()

    def drawn():
        *_, last = lm.stream("The {{_}}", max_tokens=12, temperature=1.0, seed=1)
        return [token.id for token in last.fill.tokens]

    def ask():
        while not ended.is_set():
            lm.log_prob(GAP)

    want = drawn()
    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(ask) for _ in range(2)]
        try:
            assert [drawn() for _ in range(8)] == [want] * 8
        finally:
            ended.set()
        for asked in asking:
            asked.result()
    assert all(module.training for module in lm.model.modules())


def test_threads_that_make_models_leave_the_process_as_it_was(tmp_path):
    """Each of them changes functions and settings of torch for the moment."""
    tokenizer = tiny_tokenizer(bos_token="<bos>", eos_token="<eos>")
    LanguageModel(tiny_model("llama", vocabulary=340), tokenizer).save_pretrained(tmp_path)

    def state():
        functions = torch.nn.init.normal_, PreTrainedModel.init_weights, PreTrainedModel.tie_weights
        return *functions, torch.get_float32_matmul_precision(), torch._dynamo.eval_frame._stance.stance

    def make(number):
        start.wait()
        if number % 2:
            return acgpt.load(tmp_path)
        return LanguageModel(networks[number], copy.deepcopy(tokenizer))

    before = state()
    for _ in range(4):
        networks = [tiny_model("llama", vocabulary=340) for _ in range(THREADS)]
        start = threading.Barrier(THREADS)
        with ThreadPoolExecutor(THREADS) as pool:
            assert all(lm.log_prob(GAP, future=True) for lm in pool.map(make, range(THREADS)))
        assert state() == before


@pytest.mark.usefixtures("hasty", "offline")
def test_language_models_around_one_network_take_turns(shelf, both):
    peft = pytest.importorskip("peft")
    held = peft.PeftModel.from_pretrained(shelf.network(), shelf.folder / "fill", adapter_name="mine")
    held.load_adapter(shelf.folder / "any", "other")
    says = {name: adapter.metadata for name, adapter in both.adapters.items()}
    models = [LanguageModel(held, both.tokenizer, metadata=says) for _ in range(2)]
    assert models[0].model is models[1].model
    assert hammer(models, list(asked_of(["mine", "other"])), rounds=1) == []


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("name", ["ac-gpt", "diffusion"])
def test_threads_that_share_the_model_of_a_method_get_the_answers_of_one_alone(name):
    method, network = method_of(name), toy(name, dropout=0.5)
    questions = [query(roles) for roles in ("gaag", "agag", "aaga")]

    def ask():
        return answer(name, network, questions), method.sample(engine_of(network, name), questions, 2, Sampling(seed=1))

    def work(_):
        with torch.inference_mode(), evaluating(network):
            return ask()

    with torch.inference_mode():
        want = ask()
    network.train()
    with ThreadPoolExecutor(THREADS) as pool:
        for scores, draws in pool.map(work, range(12)):
            assert [x for some in scores for x in some] == exactly([x for some in want[0] for x in some])
            assert all(same_draws(a, b) for x, y in zip(draws, want[1], strict=True) for a, b in zip(x, y, strict=True))
    assert network.training


# ---- generators ----------------------------------------------------------------------------------------------------


def test_a_stream_holds_no_lock_while_its_consumer_has_the_samples():
    network = toy("ac-gpt")
    sampler = engine_of(network, "ac-gpt")
    with torch.inference_mode():
        stream = sampler.stream([query("a" * n + "g" * (6 - n)) for n in (1, 6, 3, 2)], 1, Sampling(), True)
        parts = [next(stream)]
        with ThreadPoolExecutor(1) as pool:  # another thread asks in between
            between = pool.submit(answer, "ac-gpt", network, [query("gag")]).result(timeout=30)
        parts += stream
    assert sorted(number for part in parts for number, _, _ in part) == [0, 1, 2, 3]
    assert between[0] == exactly(answer("ac-gpt", network, [query("gag")])[0])


def test_a_stream_that_is_abandoned_leaves_the_model_to_others():
    network = toy("ac-gpt")
    with torch.inference_mode():
        stream = engine_of(network, "ac-gpt").stream([query("aaag"), query("ag")], 1, Sampling(), True)
        next(stream)
        kept = weakref.ref(stream)
        del stream
        gc.collect()
    assert kept() is None
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(answer, "ac-gpt", network, [query("gag")]).result(timeout=30)


def test_a_call_that_fails_leaves_the_model_to_others(both):
    with pytest.raises(ValueError):
        both.log_prob("The {{_1}} sat.")
    network = both.model
    weight = network.get_output_embeddings().weight
    value = weight.data[0, 0].item()
    weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        both.log_prob(GAP)
    weight.data[0, 0] = value
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(both.log_prob, GAP).result(timeout=30).adapter == "mine"


# ---- copies --------------------------------------------------------------------------------------------------------


def test_a_model_that_has_been_asked_can_be_copied_and_pickled_and_its_copy_has_a_lock_of_its_own():
    lm = model_with_dropout()
    score = lm.log_prob(GAP)
    for twin in (copy.deepcopy(lm), pickle.loads(pickle.dumps(lm))):
        with turn(lm.model), ThreadPoolExecutor(1) as pool:  # which is not waited for
            assert same_scores(pool.submit(twin.log_prob, GAP).result(timeout=30), score)


def test_a_lock_goes_with_its_model():
    network = toy("gpt")
    answer("gpt", network, [query("ga")])
    kept = weakref.ref(network)
    del network
    gc.collect()
    assert kept() is None


# ---- forks ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs forks")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_takes_the_locks_that_other_threads_held():
    network, held, ended = toy("gpt"), threading.Event(), threading.Event()

    def hold():
        with process_lock(), turn(network), _register:
            held.set()
            ended.wait(60)

    with ThreadPoolExecutor(1) as pool:
        holding = pool.submit(hold)
        assert held.wait(30)
        child = os.fork()
        if not child:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(10)  # which a wait for a thread of the parent would last to
            with process_lock(), turn(network):
                os._exit(0)
        _, status = os.waitpid(child, 0)
        ended.set()
        holding.result(30)
    assert os.waitstatus_to_exitcode(status) == 0
