"""benchmarks/scaling.py: what the arithmetic predicts, counted from layouts and masks; and benchmarks/profiler.py."""

from __future__ import annotations

import importlib
import threading

import programs
import pytest
import torch
from models import tiny_model

from acgpt.engine.engine import Engine
from acgpt.engine.layout import build, visible
from acgpt.training.learner import Work


@pytest.fixture
def program(monkeypatch):
    """Import a benchmark program."""
    monkeypatch.syspath_prepend(programs.BENCHMARKS)
    return importlib.import_module


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_the_floor_of_scores_counts_the_slots_and_pairs_of_the_layout(program, share):
    scaling = program("scaling")
    engine = Engine(tiny_model("llama"), bos=0)
    queries = scaling.random_queries(scaling.Case(length=200, share=share, batch=3))
    expected = 0.0
    for query in queries:
        layout = build([query], bos=0, mask=None, future=True)
        pairs = int(visible(torch.tensor(layout.copies), len(layout.ids)).sum())
        work = Work.of(engine.model).total(slots=len(layout.ids), pairs=pairs, asked=len(layout.rows))
        expected += work / 3  # of forward and backward
    assert scaling.score_floor(engine, queries, scaling.Limits(1e3, 1e3)) == pytest.approx(expected / 1e3)
    assert sum(query.given.count(True) for query in queries) == pytest.approx(3 * 199 * share, abs=3 * scaling.BLOCK)


def test_the_floor_of_samples_reads_the_weights_and_the_keys_at_every_step(program):
    scaling = program("scaling")
    engine = Engine(tiny_model("llama"), bos=0)
    (query,) = queries = scaling.random_queries(scaling.Case(length=130, share=0.5, batch=1))
    copies = len(query.given_positions)
    slots = sum(copies + position for position in query.asked_positions)  # BOS and the text before each asked token
    weights = sum(weight.nbytes for weight in engine.model.parameters())
    expected = len(query.asked_at) * weights + slots * engine.slot_bytes
    assert scaling.sample_floor(engine, queries, scaling.Limits(1e30, 1.0)) == pytest.approx(expected)


def test_a_profile_says_what_a_thread_does(program):
    profile, ended = program("profiler").Profile(), threading.Event()

    def wait_here():
        ended.wait()

    thread = threading.Thread(target=wait_here)
    thread.start()
    with profile.of(thread):
        while profile.samples < 20:
            pass
    ended.set()
    thread.join()
    assert profile.shares()["evaluation/test_scaling.py:wait_here"] == 1.0
    assert "evaluation/test_scaling.py:test_a_profile_says_what_a_thread_does" not in profile.shares()
