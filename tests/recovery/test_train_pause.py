"""A run that is told to stop saves a checkpoint, and resumes with the same result."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from runs import SMALL, ended, ranks, read_rows, write_corpus

from acgpt.training import train as training
from acgpt.training.recipe import make

pytestmark = pytest.mark.usefixtures("without_curves")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def recipe_of(corpus, output, **keys):
    return make(SMALL | {"corpus": str(corpus), "output": str(output), "dropout": 0.1} | keys, "small")


def weights_of(run):
    return safetensors.torch.load_file(Path(run) / "model" / "model.safetensors")


def test_a_run_in_many_short_sittings_ends_as_one_in_a_single_sitting(corpus, tmp_path, monkeypatch):
    whole = training.train(recipe_of(corpus, tmp_path / "whole"), quiet=True)
    run, sittings = recipe_of(corpus, tmp_path / "run"), 0
    clock = itertools.count(step=30)
    monkeypatch.setattr(training.time, "monotonic", lambda: next(clock))
    while training.train(run, resume=True, quiet=True, minutes=1) is None:  # the clock moves half a minute a look
        sittings += 1
        assert not (tmp_path / "run" / "results.json").exists()
        last = training.last_checkpoint(tmp_path / "run")
        assert last is not None and last.name == f"checkpoint-{read_rows(tmp_path / 'run')[-1]['step']}"
    assert sittings > 2
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert len(config["sittings"]) == sittings + 1  # the last of which ended it
    assert whole is not None
    sittings_after = [each["after_step"] for each in config["sittings"]]
    for steps in (sittings_after, [int(row["step"]) for row in read_rows(tmp_path / "run")]):
        assert steps == sorted(set(steps))
    one, other = weights_of(tmp_path / "whole"), weights_of(tmp_path / "run")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_two_processes_stop_at_the_same_step(corpus, tmp_path):
    words = ("train", "tiny-cpu", *(f"{key}={value}" for key, value in SMALL.items() if key != "model"))
    words += (f"corpus={corpus}", f"output={tmp_path / 'run'}", "model={layers: 2, width: 32, heads: 4}")
    words += ("steps=100000", "save_every=100000", "eval_every=0", "warmup=1", "--minutes", "0.1")
    both = ranks(2, *words, output=tmp_path / "said")
    with ended(*both):
        assert [each.wait() for each in both] == [3, 3], both[0].printed()
    assert "stopped." in both[0].printed() and "stopped." not in both[1].printed()
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 1
