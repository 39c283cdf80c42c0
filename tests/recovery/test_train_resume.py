"""A run can be stopped at any moment, and resumes with the same result."""

from __future__ import annotations

import csv
import dataclasses
import errno
import json
import os
import pickle
import resource
import shutil
import signal
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
from disk import watched_disk
from matplotlib.figure import Figure
from runs import SMALL, Command, ended, kill_self, loss_of, read_rows, replace, until, write_corpus
from safetensors.torch import load_file

from acgpt.errors import InputError
from acgpt.models.language_model import LanguageModel
from acgpt.training.recipe import make
from acgpt.training.run_folder import OutputError, commit
from acgpt.training.train import train

KEYS = SMALL | {
    "optimizer": "muon", "dropout": 0.2, "micro_batch": 2, "workers": 1, "save_every": 3, "keep": 2, "eval_every": 4
}  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def words_of(corpus, folder, **keys):
    """Return the command of a run with --resume, as in a job that may be restarted."""
    path = folder.with_suffix(".yaml")
    path.write_text(json.dumps(KEYS | {"corpus": str(corpus), "output": str(folder)} | keys))
    return ("train", path, "--resume", "--quiet")


def run_to_the_end(corpus, folder, **keys):
    command = Command(*words_of(corpus, folder, **keys), output=folder.with_suffix(".said"))
    with ended(command):
        assert command.wait() == 0, command.printed()
    return folder


@pytest.fixture(scope="module")
def uninterrupted(corpus, tmp_path_factory):
    return run_to_the_end(corpus, tmp_path_factory.mktemp("runs") / "uninterrupted")


def check_same(run, other, last=12):
    """Check for the same weights and optimizer state, bit for bit, and the same log except for times."""
    for place in ("model", f"checkpoints/checkpoint-{last}"):
        assert (run / place / "model.safetensors").read_bytes() == (other / place / "model.safetensors").read_bytes()
    one, two = (torch.load(r / f"checkpoints/checkpoint-{last}/optimizer.pt", weights_only=True) for r in (run, other))
    for mine, yours in zip(one["optimizers"], two["optimizers"], strict=True):
        assert mine["param_groups"] == yours["param_groups"]
        for number, held in mine["state"].items():
            assert all(
                torch.equal(torch.as_tensor(held[key]), torch.as_tensor(yours["state"][number][key])) for key in held
            )
    assert read_rows(run) == read_rows(other)
    results = [json.loads((r / "results.json").read_text())["evaluation"] for r in (run, other)]
    assert results[0] == results[1]


def check_whole(run):
    """Check that every folder with the name of a checkpoint is a complete one."""
    for checkpoint in (run / "checkpoints").glob("checkpoint-*"):
        load_file(checkpoint / "model.safetensors")
        for name in ("optimizer.pt", "rng_state.pth"):
            torch.load(checkpoint / name, weights_only=True)
    assert not (run / "results.json").exists()


# ---- on the disk ----------------------------------------------------------------------------------------------------


def test_a_folder_is_on_the_disk_with_all_in_it_before_it_gets_its_name(tmp_path, monkeypatch):
    partial, final = tmp_path / "partial", tmp_path / "runs" / "final"
    for folder, text in ((partial, "new"), (final, "old")):
        (folder / "deep" / "deeper").mkdir(parents=True)
        (folder / "file").write_text(text)
        (folder / "deep" / "deeper" / "file").write_text(text)
    disk = watched_disk(monkeypatch)
    commit(partial, final)
    assert disk.renamed[-1] == (final, []) and disk.lost(final.parent) == []
    assert [path.read_text() for path in sorted(final.rglob("file"))] == ["new", "new"]


def test_checkpoints_and_the_model_of_a_run_are_on_the_disk_before_they_get_their_names(corpus, tmp_path, monkeypatch):
    disk, run = watched_disk(monkeypatch), tmp_path / "run"
    keys = {"corpus": str(corpus), "output": str(run), "steps": 2, "warmup": 0, "save_every": 1}
    train(make(SMALL | keys, "small"), quiet=True)
    lost = {path.relative_to(run): files for path, files in disk.renamed if path.is_relative_to(run)}
    names = ["checkpoints/checkpoint-1", "checkpoints/checkpoint-2", "model", "results.json", "config.json"]
    assert [lost[Path(name)] for name in names] == [[]] * len(names)


# ---- moments: each puts something in the way of the process in which it is called -----------------------------------


def at_call(number):
    """Kill the process just before the `number`-th call."""

    def make(old):
        calls = []

        def called(*args, **kwargs):
            calls.append(1)
            return kill_self() if len(calls) == number else old(*args, **kwargs)

        return called

    return make


def half_a_file(old):
    def save(content, path, *args, **kwargs):
        old(content, path, *args, **kwargs)
        os.truncate(path, Path(path).stat().st_size // 2)
        kill_self()

    return save


def half_a_row(old):
    def append(self, row):
        old(self, row)
        text = self.path.read_text()
        self.path.write_text(text[: text.rstrip("\n").rfind("\n") + 2])  # "1" of step 10
        kill_self()

    return append


def half_a_folder(old):
    def remove(path, *args, **kwargs):
        if "checkpoint-3" in str(path) and Path(path).exists():
            (Path(path) / "model.safetensors").unlink()
            kill_self()
        return old(path, *args, **kwargs)

    return remove


MOMENTS = [
    ("before the first checkpoint", "acgpt.training.log:Log.append", at_call(2)),
    ("half-way through a file of the first checkpoint", "torch:save", half_a_file),
    ("when the second checkpoint is written, and has no name yet", "acgpt.training.state:commit", at_call(2)),
    ("while the oldest checkpoint is deleted", "shutil:rmtree", half_a_folder),
    ("while the log is taken up again", "os:fsync", at_call(1)),
    ("in the middle of a row of the log", "acgpt.training.log:Log.append", half_a_row),
    ("while the model is exported", "acgpt.models.language_model:LanguageModel.save_pretrained", at_call(1)),
    ("between the model and the results", "acgpt.training.train:write_json", at_call(1)),
]


def prepare_moment(number):
    _, target, make = MOMENTS[number]
    replace(target, make)


def test_a_run_that_is_killed_at_the_worst_moments_ends_with_the_same_weights_bit_for_bit(
    corpus, uninterrupted, tmp_path
):
    run = tmp_path / "run"
    words = words_of(corpus, run)
    steps = []
    for number, (moment, _, _) in enumerate(MOMENTS):
        command = Command(*words, output=tmp_path / "said", before=prepare_moment, detail=number)
        with ended(command):
            assert command.wait() == -signal.SIGKILL, f"{moment}: {command.printed()}"
        check_whole(run)
        steps.append(max([int(path.name[11:]) for path in (run / "checkpoints").glob("checkpoint-*")], default=0))
    assert steps == [0, 0, 3, 9, 9, 9, 12, 12]  # each was killed where it should be
    run_to_the_end(corpus, run)
    check_same(run, uninterrupted)
    assert [path for path in run.rglob("*") if path.name.startswith(".")] == []


def test_a_run_that_is_killed_from_outside_with_its_workers_ends_with_the_same_weights(corpus, tmp_path):
    keys = {"steps": 18, "save_every": 3}
    whole, run = run_to_the_end(corpus, tmp_path / "whole", **keys), tmp_path / "run"
    for step in (4, 8, 14):
        command = Command(*words_of(corpus, run, **keys), output=tmp_path / "said", before=wait_at, detail=step + 4)
        with ended(command):
            until(lambda at=step: reached(run, at))
            command.interrupt(signal.SIGKILL)
            assert command.wait() == -signal.SIGKILL
    run_to_the_end(corpus, run, **keys)
    check_same(run, whole, last=18)


def wait_at(step):
    """Do not continue beyond a step, even if the signal comes late."""

    def make(old):
        def append(self, row):
            old(self, row)
            if row["step"] >= step:
                time.sleep(120)

        return append

    replace("acgpt.training.log:Log.append", make)


def reached(run, step):
    path = run / "log.csv"
    last = path.read_text().rpartition("\n")[0].rpartition("\n")[2].partition(",")[0] if path.exists() else ""
    return last.isdigit() and int(last) >= step


# ---- a disk that is full --------------------------------------------------------------------------------------------


def limit_files(size):
    """Limit the size of files: a larger write fails, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def test_a_file_that_cannot_be_written_ends_the_run_with_a_clear_message_and_loses_nothing(
    corpus, uninterrupted, tmp_path
):
    run, words = tmp_path / "run", words_of(corpus, tmp_path / "run")
    first = Command(*words, output=tmp_path / "said", before=prepare_moment, detail=2)  # after checkpoint-3
    with ended(first):
        first.wait()
    size = (run / "checkpoints/checkpoint-3/model.safetensors").stat().st_size + 1000
    assert (run / "checkpoints/checkpoint-3/optimizer.pt").stat().st_size > size
    command = Command(*words, output=tmp_path / "said", before=limit_files, detail=size)
    with ended(command):
        assert command.wait() == 1
    message = command.printed()
    assert f"error: cannot write {run}/checkpoints/checkpoint-6: " in message
    assert f"The run can be resumed from {run}/checkpoints/checkpoint-3 with --resume." in message
    assert "Traceback" not in message
    check_whole(run)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["checkpoint-3"]
    run_to_the_end(corpus, run)
    check_same(run, uninterrupted)


FULL = OSError(errno.ENOSPC, "No space left on device")
WRITERS = {
    "checkpoint-6": (torch, "save", 4),  # three files of each checkpoint are torch's
    "checkpoint-3": (safetensors.torch, "save_file", 1),
    "log.csv": (csv.DictWriter, "writerow", 4),
    "model": (LanguageModel, "save_pretrained", 1),
    "loss.png": (Figure, "savefig", 1),
}


@pytest.mark.parametrize("name", WRITERS)
def test_whatever_meets_a_full_disk_is_named_and_the_run_can_go_on(name, corpus, uninterrupted, tmp_path, monkeypatch):
    place, attribute, number = WRITERS[name]
    old, calls = getattr(place, attribute), []

    def fails(*args, **kwargs):
        calls.append(1)
        if len(calls) == number:
            raise FULL
        return old(*args, **kwargs)

    recipe = make(KEYS | {"corpus": str(corpus), "output": str(tmp_path / "run"), "workers": 0}, "x")
    with monkeypatch.context() as patch:
        patch.setattr(place, attribute, fails)
        with pytest.raises(OutputError, match=rf"cannot write .*/{name}: No space left on device\. Free some space"):
            train(recipe, quiet=True)
    check_whole(tmp_path / "run")
    train(recipe, resume=True, quiet=True)
    check_same(tmp_path / "run", uninterrupted)


# ---- what is read back ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def crashed(corpus, tmp_path_factory):
    """A run after a crash: checkpoints of steps 2 and 4 out of 6, and no result."""
    run = tmp_path_factory.mktemp("crashed") / "run"
    keys = {"corpus": str(corpus), "output": str(run), "steps": 6, "save_every": 2, "workers": 0, "keep": 3}
    recipe = make(KEYS | keys, "x")
    train(recipe, quiet=True)
    (run / "results.json").unlink()
    for folder in (run / "model", run / "checkpoints" / "checkpoint-6"):
        shutil.rmtree(folder)
    return recipe


@pytest.fixture
def stopped(crashed, tmp_path):
    """Copy such a run to a new folder and return its recipe."""
    shutil.copytree(crashed.output, tmp_path / "run")
    return dataclasses.replace(crashed, output=str(tmp_path / "run"))


class Evil:
    """A pickle that runs code when it is read."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("name", ["optimizer.pt", "rng_state.pth"])
@pytest.mark.parametrize("write", ["torch", "pickle"])
def test_no_code_in_a_checkpoint_is_run(name, write, stopped, tmp_path):
    file, marker = Path(stopped.output) / "checkpoints" / "checkpoint-4" / name, tmp_path / "marker"
    if write == "torch":
        torch.save({"state": Evil(marker)}, file)
        torch.load(file, weights_only=False)
    else:
        file.write_bytes(pickle.dumps(Evil(marker), protocol=2))
        pickle.loads(file.read_bytes())
    marker.unlink()  # it works; so it was there
    with pytest.raises(InputError, match="checkpoint-4 is damaged, or not a checkpoint of acgpt"):
        train(stopped, resume=True, quiet=True)
    assert not marker.exists()


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "rng_state.pth"])
@pytest.mark.parametrize("damage", ["truncated", "other content", "empty", "missing"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_serves(damage, name, stopped):
    checkpoint = Path(stopped.output) / "checkpoints" / "checkpoint-4"
    file = checkpoint / name
    if damage == "other content" and name == "model.safetensors":
        safetensors.torch.save_file({"other": torch.zeros(3)}, file)
    elif damage == "other content":
        file.write_bytes(b"no archive")
    elif damage == "missing":
        file.unlink()
    else:
        os.truncate(file, file.stat().st_size // 2 if damage == "truncated" else 0)
    if (damage, name) == ("missing", "rng_state.pth"):  # as of a run with fewer processes
        assert train(stopped, resume=True, quiet=True)["steps"] == 6
        return
    with pytest.raises(InputError, match=r"checkpoint-4 is damaged.*Delete it"):
        train(stopped, resume=True, quiet=True)
    shutil.rmtree(checkpoint)
    assert train(stopped, resume=True, quiet=True)["steps"] == 6


def test_a_run_is_resumed_only_with_its_own_recipe_on_its_own_corpus(stopped, corpus, tmp_path):
    keys = stopped.as_dict()
    with pytest.raises(InputError, match="is a run of another recipe: lr, seed differ"):
        train(make(keys | {"lr": 1e-4, "seed": 3}, "x"), resume=True, quiet=True)
    moved = shutil.copytree(corpus, tmp_path / "moved")
    other = write_corpus(tmp_path / "other", seed=1)
    with pytest.raises(InputError, match=r"is not that of the run in"):
        train(make(keys | {"corpus": str(other)}, "x"), resume=True, quiet=True)
    results = train(make(keys | {"corpus": str(moved), "workers": 1}, "x"), resume=True, quiet=True)
    assert results["steps"] == 6
    with pytest.raises(InputError, match="seed differ"):  # finished, and still not that run
        train(make(keys | {"seed": 3}, "x"), resume=True, quiet=True)


def test_a_run_whose_config_cannot_be_read_is_not_resumed(stopped):
    (Path(stopped.output) / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"config.json cannot be read .*, so the run cannot be resumed"):
        train(stopped, resume=True, quiet=True)


def test_a_run_may_be_resumed_with_other_batches_and_learns_the_same(corpus, tmp_path):
    keys = KEYS | {"corpus": str(corpus), "dropout": 0.0, "steps": 6, "save_every": 2, "keep": 9, "workers": 0}
    runs = [tmp_path / name for name in ("whole", "resumed")]
    for run in runs:
        train(make(keys | {"output": str(run)}, "x"), quiet=True)
    (runs[1] / "results.json").unlink()
    for step in (4, 6):
        shutil.rmtree(runs[1] / "checkpoints" / f"checkpoint-{step}")
    train(make(keys | {"output": str(runs[1]), "micro_batch": 4}, "x"), resume=True, quiet=True)
    assert loss_of(runs[1]) == pytest.approx(loss_of(runs[0]), rel=1e-4)


def test_a_resumed_run_saves_and_logs_as_it_is_told_now(corpus, tmp_path):
    keys = KEYS | {"corpus": str(corpus), "output": str(tmp_path / "run"), "workers": 0}
    assert train(make(keys | {"save_every": 4}, "x"), quiet=True, minutes=1e-4) is None
    train(make(keys | {"save_every": 3, "keep": 9}, "x"), resume=True, quiet=True)
    kept = sorted(int(path.name[11:]) for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == [1, 3, 6, 9, 12]


def test_files_of_others_in_a_runs_folder_are_left_alone(stopped):
    run = Path(stopped.output)
    (run / ".git").mkdir()
    (run / ".git" / "HEAD").write_text("ref")
    (run / ".model").mkdir()  # ours, left by a crash
    train(stopped, resume=True, quiet=True)
    assert (run / ".git" / "HEAD").read_text() == "ref" and not (run / ".model").exists()


def lose_patience(_):
    """Wait for another run's workers for a moment only."""
    replace("acgpt.training.run_folder:PATIENCE", lambda old: 0.3)


def test_two_runs_never_share_a_folder(corpus, tmp_path):
    run = tmp_path / "run"
    words = words_of(corpus, run)
    first = Command(*words, output=tmp_path / "first", before=wait_at, detail=2)
    with ended(first):
        until(lambda: reached(run, 2))
        second = Command(*words, output=tmp_path / "second", before=lose_patience)
        with ended(second):
            assert second.wait() == 2
        assert "another process is training in" in second.printed()
        assert first.process.is_alive()


def test_a_folder_left_by_a_crash_before_anything_was_written_is_begun_in(corpus, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / ".config.json.123.tmp").write_text("{")
    keys = KEYS | {"corpus": str(corpus), "output": str(run), "steps": 2, "warmup": 0, "workers": 0}
    assert train(make(keys, "x"), resume=True, quiet=True)["steps"] == 2
