"""Many searches at a time get what each would get alone; what fails, fails alone; what is cancelled, leaves."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import replace

import pytest
from fuzz import examples
from models import tiny_model, tiny_tokenizer
from runs import SPECIAL
from servers import local_client, until
from tolerance import exactly, same_scores

from acgpt import LanguageModel, Metadata
from acgpt.engine.decoding import Decoding
from acgpt.engine.modules import blocks_of, turn
from acgpt.errors import Broken, Draining, QueueFull
from acgpt.models.ask import Fill, FillAsk, LengthsAsk, RankAsk, SampleAsk, ScoreAsk
from acgpt.models.executor import Executor, Scores
from acgpt.models.scheduler import Scheduler
from acgpt.serving.app import create_app
from acgpt.serving.service import Service

WORDS = ["cat", "dog", "bird", "mat", "the", "sat", "on", "a"]


@pytest.fixture(params=[{}, {"patience": 3, "keep_pools": True}], ids=["as on a CPU", "as on a GPU"])
def scheduler(lm, started, request):
    scheduler = started(lm)
    vars(scheduler).update(request.param)
    return scheduler


def mixed(number):
    """Return the name of a method of `LanguageModel`, its arguments and its options."""
    rng = random.Random(number)
    words = " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 5)))
    after = " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 5)))
    kind = rng.choice(["log_prob", "sample", "sample", "sample gap", "fill", "rank"])
    how = {"temperature": rng.choice([0.0, 0.7, 1.0]), "top_p": rng.choice([1.0, 0.8]), "seed": number}
    how["top_k"] = rng.choice([None, 5])
    future = rng.choice([None, False])
    if kind == "log_prob":
        return "log_prob", [f"The {{{{{words}}}}} and {after}."], {"future": future}
    if kind == "sample":
        blanks = f"{{{{_{rng.randint(1, 6)}}}}}"
        return "sample", [f"{words} {blanks} {after} {{{{_1}}}}.", rng.randint(1, 3)], how | {"future": future}
    if kind == "sample gap":
        return "sample", [f"{words}{{{{_1-3}}}} {after}", 1], how | {"candidates": 4}
    if kind == "fill":
        return "fill", [f"{words} {{{{_}}}} {after}", 2], how | {"max_tokens": 3}
    return "rank", [f"{words} {{{{cat|dog|bird}}}} {after}"], {"future": future}


ASKS = {kind.name: kind for kind in (ScoreAsk, SampleAsk, FillAsk, RankAsk)}


def search_of(lm, kind, arguments, how):
    return lm.searches.of(ASKS[kind](*arguments, **how))


def check(kind, one, other):
    if kind == "rank":
        assert [each.choice for each in one] == [each.choice for each in other]
        assert [each.log_prob for each in one] == exactly([each.log_prob for each in other])
    elif kind == "log_prob":
        assert same_scores(one, other)
    else:
        assert [each.text for each in one] == [each.text for each in other]
        for mine, alone in zip(one, other, strict=True):
            if isinstance(mine, Fill):
                assert mine.score == exactly(alone.score)
                mine = replace(mine, score=alone.score)
            assert same_scores(mine, alone)


def test_many_mixed_searches_at_a_time_get_what_each_gets_alone(lm, scheduler):
    questions = [mixed(number) for number in range(examples(100))]
    scheduler.most_waiting = len(questions)
    with ThreadPoolExecutor(16) as pool:  # they arrive from many threads, while others are answered
        jobs = list(pool.map(lambda question: scheduler.submit(search_of(lm, *question)), questions))
    together = [job.future.result(120) for job in jobs]
    for (kind, arguments, how), found in zip(questions, together, strict=True):
        check(kind, found, getattr(lm, kind)(*arguments, **how))
    assert scheduler.active_rows == 0 and bool(scheduler.pools) == scheduler.keep_pools
    assert scheduler.counts.jobs == len(questions) and scheduler.counts.failed == 0
    assert scheduler.counts.steps < scheduler.counts.drawn / 3  # they did share steps


@pytest.mark.parametrize("bound", ["most_rows", "memory"])
def test_no_more_rows_are_decoded_at_a_time_than_there_is_room_for(lm, started, monkeypatch, bound):
    if bound == "memory":
        monkeypatch.setattr(lm.searches.executor.engine, "slot_bytes", 2**27)  # for 16 slots
    scheduler, active = started(lm, **({"most_rows": 3} if bound == "most_rows" else {})), []
    embedding = lm.model.get_input_embeddings()
    hook = embedding.register_forward_hook(lambda *_: active.append(scheduler.active_rows))
    try:
        jobs = [scheduler.submit(lm.searches.of(SampleAsk("The {{_4}}", 2, seed=seed))) for seed in range(6)]
        assert all(len(job.future.result(60)) == 2 for job in jobs)
    finally:
        hook.remove()
    assert 1 <= max(active) <= 3


def test_what_is_drawn_whole_is_drawn_for_one_request_at_a_time(started):
    lm = LanguageModel(
        tiny_model("gpt_neox", vocabulary=340), tiny_tokenizer(**SPECIAL), metadata=Metadata("mlm", mask_token_id=2)
    )
    scheduler, ended = started(lm), []
    with turn(lm.model):  # until all wait
        jobs = [scheduler.submit(lm.searches.of(SampleAsk("The {{_8}} sat.", 4, seed=seed % 2))) for seed in range(6)]
        jobs.append(scheduler.submit(lm.searches.of(ScoreAsk("The {{cat}} sat."))))
        for number, job in enumerate(jobs):
            job.future.add_done_callback(lambda _, number=number: ended.append(number))
    for job in jobs:
        job.future.result(60)
    until(lambda: len(ended) == len(jobs))
    assert ended.index(6) <= 2  # the score: one request is computed when it arrives, and one more comes before it


def broken_search(lm, *, by):
    """A search that fails: by itself, or by what it asks for."""
    if by == "itself":
        raise ZeroDivisionError("broken")
    query = lm.query("The {{cat}} sat.")
    if by == "its request":
        yield Scores([query], [None])
    yield "no request"


@pytest.mark.parametrize("by", ["itself", "its request", "a wrong request"])
def test_a_search_that_fails_fails_alone(lm, scheduler, by):
    good = [scheduler.submit(lm.searches.of(SampleAsk("The {{_8}} sat.", 2, seed=i))) for i in range(5)]
    bad = scheduler.submit(broken_search(lm, by=by))
    more = [scheduler.submit(lm.searches.of(ScoreAsk("The {{cat}} sat on the mat."))) for _ in range(5)]
    with pytest.raises((ZeroDivisionError, AttributeError)):
        bad.future.result(60)
    for i, job in enumerate(good):
        assert [s.text for s in job.future.result(60)] == [s.text for s in lm.sample("The {{_8}} sat.", 2, seed=i)]
    assert all(same_scores(job.future.result(60), lm.log_prob("The {{cat}} sat on the mat.")) for job in more)
    assert scheduler.counts.failed == 1 and not scheduler.jobs


def test_rows_that_cannot_be_prefilled_fail_alone(lm, scheduler, monkeypatch):
    """As when there is no memory for a long text."""
    real, long = Scheduler._join, 30

    def join(self, tasks):
        if any(len(task.query) > long for task in tasks):
            raise MemoryError("no room")
        return real(self, tasks)

    monkeypatch.setattr(Scheduler, "_join", join)
    texts = ["The {{_4}} sat." if i % 2 else "The cat sat. " * 8 + "{{_4}}" for i in range(6)]
    jobs = [scheduler.submit(lm.searches.of(SampleAsk(text, seed=i))) for i, text in enumerate(texts)]
    for i, job in enumerate(jobs):
        if i % 2:
            assert job.future.result(60)[0].text == lm.sample(texts[i], seed=i)[0].text
        else:
            with pytest.raises(MemoryError):
                job.future.result(60)


def test_if_a_step_fails_the_newest_row_gives_way(lm, scheduler, monkeypatch):
    real = Decoding.step

    def step(self):
        if len(self.rows) > 3:
            raise MemoryError("no room")
        return real(self)

    monkeypatch.setattr(Decoding, "step", step)
    jobs = [scheduler.submit(lm.searches.of(SampleAsk("The {{_6}} sat.", seed=i))) for i in range(6)]
    results = []
    for i, job in enumerate(jobs):
        try:
            results.append(job.future.result(60)[0].text == lm.sample("The {{_6}} sat.", seed=i)[0].text)
        except MemoryError:
            results.append(None)
    assert results.count(False) == 0 and results.count(True) >= 3


def test_a_cancelled_search_leaves_before_the_next_step(lm, scheduler, monkeypatch):
    real, gate = Decoding.step, threading.Semaphore(0)
    monkeypatch.setattr(Decoding, "step", lambda self: (gate.acquire(timeout=30), real(self))[1])
    searches = lm.searches.of(SampleAsk("The {{_40}}", seed=1)), lm.searches.of(SampleAsk("A {{_40}}", 4, seed=2))
    with turn(lm.model):  # until both have arrived
        kept, job = map(scheduler.submit, searches)  # both are made before: a step that waits has the network
    gate.release()  # a step of the first one, if it was alone
    assert until(lambda: scheduler.active_rows == 5)
    job.cancel()
    gate.release(2)  # the step that was on its way, and the next one
    assert until(lambda: scheduler.active_rows == 1)
    with pytest.raises(CancelledError):
        job.future.result(1)
    gate.release(100)
    assert kept.future.result(60)[0].text == lm.sample("The {{_40}}", seed=1)[0].text


def test_a_cancelled_search_that_waits_is_forgotten(lm, started):
    scheduler = started(lm, most_rows=1)
    jobs = [scheduler.submit(lm.searches.of(SampleAsk("The {{_20}}", seed=i))) for i in range(4)]
    jobs[2].cancel()
    assert [len(jobs[i].future.result(60)) for i in (0, 1, 3)] == [1, 1, 1]
    assert jobs[2].future.cancelled()


def test_too_many_searches_are_refused(lm, started):
    scheduler, gate = started(lm, most_waiting=3, most_rows=1), threading.Event()

    def slow():
        gate.wait(30)
        return "done"
        yield

    first = scheduler.submit(slow())
    while scheduler.arrivals:
        time.sleep(0.01)
    others = [scheduler.submit(slow()) for _ in range(2)]
    with pytest.raises(QueueFull, match="3 requests are waiting"):
        scheduler.submit(slow())
    gate.set()
    assert [job.future.result(30) for job in (first, *others)] == ["done"] * 3


@pytest.mark.parametrize(("active", "waiting", "rounds"), [(0, 1, 1), (8, 1, 2), (24, 1, 4), (200, 1, 9), (64, 32, 1)])
def test_a_query_waits_for_others_the_longer_the_more_rows_are_decoded(lm, monkeypatch, active, waiting, rounds):
    scheduler = Scheduler(lm._executor)
    scheduler.patience = 8
    assert scheduler.close(drain=False, timeout=60)
    monkeypatch.setattr(Scheduler, "active_rows", active)
    for _ in range(2):  # the count begins again
        assert [scheduler._due("queries", waiting) for _ in range(rounds)] == [False] * (rounds - 1) + [True]
    assert not scheduler._due("queries", 0)


def test_searches_whose_lengths_are_known_still_wait(lengths_lm, started, monkeypatch):
    """A model that predicts lengths answers these first, in one pass: the queue would have no end."""
    monkeypatch.setattr(Scheduler, "_admit", lambda self: time.sleep(0.001))
    scheduler = started(lengths_lm, most_waiting=3)
    jobs = [scheduler.submit(lengths_lm.searches.of(FillAsk("The {{_}} sat.", 1, max_tokens=3))) for _ in range(3)]
    assert until(lambda: len({task.owner for task in list(scheduler.waiting)}) == 3)  # after their lengths
    assert scheduler.queued == 3
    with pytest.raises(QueueFull):
        scheduler.submit(lengths_lm.searches.of(FillAsk("The {{_}} sat.", 1, max_tokens=3)))
    monkeypatch.undo()
    assert all(job.future.result(60) for job in jobs)


def test_lengths_are_asked_in_slices_while_rows_are_decoded(lengths_lm, started, monkeypatch):
    asked, answers, gate = [], Executor.answers, threading.Event()
    monkeypatch.setattr(Executor, "answers", lambda self, tasks: (asked.append(len(tasks)), answers(self, tasks))[1])
    scheduler = started(lengths_lm)
    scheduler.slice = 1  # token

    def held():
        gate.wait(30)
        return (yield from lengths_lm.searches.of(SampleAsk("The {{_60}}", seed=1)))

    first = scheduler.submit(held())
    jobs = [scheduler.submit(lengths_lm.searches.of(LengthsAsk("The {{_}} sat.", max_tokens=3))) for _ in range(4)]
    gate.set()
    assert first.future.result(60) and all(job.future.result(60) for job in jobs)
    assert asked == [1, 1, 1, 1]


def test_a_scheduler_that_is_closed_finishes_what_it_has(lm):
    scheduler = Scheduler(lm._executor)
    jobs = [scheduler.submit(lm.searches.of(SampleAsk("The {{_20}}", seed=i))) for i in range(3)]
    assert scheduler.close(timeout=60)
    assert all(job.future.result(1) for job in jobs)
    with pytest.raises(Draining):
        scheduler.submit(lm.searches.of(SampleAsk("The {{_20}}")))


def test_a_scheduler_that_is_stopped_cancels_what_it_has(lm):
    scheduler = Scheduler(lm._executor, most_rows=1)
    jobs = [scheduler.submit(lm.searches.of(SampleAsk("The {{_60}}", 4, seed=i))) for i in range(5)]
    assert scheduler.close(drain=False, timeout=60)
    assert all(job.future.done() for job in jobs)
    assert isinstance(jobs[-1].future.exception(), Draining)


def test_a_bug_of_the_scheduler_does_not_stop_it(lm, scheduler, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "_admit", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            scheduler.submit(lm.searches.of(SampleAsk("The {{_4}} sat."))).future.result(60)
    assert scheduler.submit(lm.searches.of(SampleAsk("The {{_4}} sat."))).future.result(60)


def test_a_search_that_fails_to_close_harms_no_other(lm, scheduler):
    begun, go_on = threading.Event(), threading.Event()

    def search():
        try:
            begun.set()
            go_on.wait(30)
            yield from lm.searches.of(SampleAsk("The {{_40}}", seed=1))
        finally:
            raise ZeroDivisionError("broken")

    job = scheduler.submit(search())
    assert begun.wait(30)
    job.cancel()
    go_on.set()
    with pytest.raises(CancelledError):
        job.future.result(30)
    assert scheduler.submit(lm.searches.of(ScoreAsk("The {{cat}} sat."))).future.result(30)


def test_rows_that_cannot_be_released_fail_with_those_beside_them(lm, scheduler, monkeypatch):
    real, gate = Decoding.step, threading.Semaphore(0)
    with monkeypatch.context() as patch:
        patch.setattr(Decoding, "step", lambda self: (gate.acquire(timeout=30), real(self))[1])
        patch.setattr(Decoding, "release", lambda self, rows: 1 / 0)
        searches = [lm.searches.of(SampleAsk("The {{_80}}", seed=i)) for i in range(3)]
        with turn(lm.model):  # until all have arrived
            jobs = [scheduler.submit(search) for search in searches]  # a step that waits has the network
        gate.release()  # a step of those that came first
        assert until(lambda: scheduler.active_rows == 3)
        jobs[0].cancel()
        gate.release(2)  # the step that was on its way, and the next one
        with pytest.raises(CancelledError):
            jobs[0].future.result(30)
        for job in jobs[1:]:
            with pytest.raises(ZeroDivisionError):
                job.future.result(30)
        assert until(lambda: not scheduler.jobs) and not scheduler.active_rows
    assert scheduler.submit(lm.searches.of(SampleAsk("The {{_4}} sat."))).future.result(60)


def test_if_the_thread_ends_everything_is_refused(lm, monkeypatch):
    monkeypatch.setattr(Scheduler, "_cancelled", lambda self: 1 / 0)
    scheduler = Scheduler(lm._executor)
    with pytest.raises(Broken):
        scheduler.submit(lm.searches.of(SampleAsk("The {{_4}} sat."))).future.result(30)
    assert until(lambda: not scheduler.thread.is_alive()) and not scheduler.jobs
    with pytest.raises(Broken, match="restart it"):
        scheduler.submit(lm.searches.of(SampleAsk("The {{_4}} sat.")))
    http = local_client(create_app(Service(lm, scheduler)))
    assert http.get("/health").status_code == 503
    reply = http.post("/v1/log_prob", json={"query": "The {{cat}} sat."})
    assert reply.status_code == 503 and reply.json()["error"]["code"] == "broken"


def test_a_client_that_hangs_up_at_the_last_moment_harms_no_other(lm, scheduler):
    hung_up = threading.Event()

    def search():
        assert hung_up.wait(60)
        return (yield from lm.searches.of(ScoreAsk("The {{cat}} sat.")))

    gone, kept = scheduler.submit(search()), scheduler.submit(lm.searches.of(ScoreAsk("The {{cat}} sat.")))
    gone.future.cancel()  # as asyncio does, without a word to the scheduler
    hung_up.set()
    assert kept.future.result(60).tokens
    assert scheduler.submit(lm.searches.of(ScoreAsk("The {{dog}} sat."))).future.result(60)


@pytest.mark.usefixtures("offline")
def test_adapters_and_prefixes_are_not_confused(both, started):
    """The same questions with every adapter, twice, so that the second ones find what the first ones have left."""
    texts = ["The cat sat on the mat and the {{_2}} sat on the dog.", "The cat sat on the mat and the {{_4}}"]
    questions = [(text, adapter) for _ in range(2) for text in texts for adapter in ("mine", "other", "none", None)]
    alone = [both.sample(text, 2, seed=1, adapter=adapter) for text, adapter in questions]
    scheduler = started(both)
    for _ in range(2):
        jobs = [scheduler.submit(both.searches.of(SampleAsk(text, 2, seed=1, adapter=a))) for text, a in questions]
        for job, expected in zip(jobs, alone, strict=True):
            found = job.future.result(60)
            assert all(same_scores(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
    assert both._executor.engine.prefixes.hits >= 4  # at least one for each text and network


@pytest.mark.parametrize("kind", ["log_prob", "sample"])
def test_a_pass_that_nobody_waits_for_ends_at_the_next_block(lm, scheduler, kind):
    first, *_, last = blocks_of(lm.model)
    inside, go_on, reached = threading.Event(), threading.Event(), []

    def wait(*_):
        inside.set()
        assert go_on.wait(30)

    hooks = [first.register_forward_pre_hook(wait), last.register_forward_hook(lambda *_: reached.append(1))]
    try:
        text = "The {{cat}} sat." if kind == "log_prob" else "The {{_3}} sat."
        job = scheduler.submit(search_of(lm, kind, [text], {}))
        assert inside.wait(30)
        job.cancel()
        go_on.set()
        with pytest.raises(CancelledError):
            job.future.result(30)
        assert until(lambda: not scheduler.jobs) and not reached
    finally:
        for hook in hooks:
            hook.remove()
    later = scheduler.submit(lm.searches.of(ScoreAsk("The {{cat}} sat on the mat.")))
    assert later.future.result(30).log_prob == pytest.approx(lm.log_prob("The {{cat}} sat on the mat.").log_prob)


def test_a_pass_that_somebody_waits_for_goes_on(lm, scheduler):
    inside, go_on = threading.Event(), threading.Event()

    def wait(*_):
        if len(scheduler.passing) > 1:
            inside.set()
            assert go_on.wait(30)

    hook = blocks_of(lm.model)[0].register_forward_pre_hook(wait)
    try:
        with turn(lm.model):  # until all wait: the first for its pass, the others for the next
            jobs = [scheduler.submit(lm.searches.of(ScoreAsk("The {{cat}} sat."))) for _ in range(3)]
        assert inside.wait(30)
        jobs[1].cancel()
        go_on.set()
        for job in (jobs[0], jobs[2]):
            assert same_scores(job.future.result(30), lm.log_prob("The {{cat}} sat."))
    finally:
        hook.remove()
