"""The folder of a training run: what lies in it, and how it is written so that a crash leaves nothing half done.

    RUN/
      config.json      the whole recipe, the corpus, the machine, versions; written first
      log.csv          loss, learning rate, speed and perplexities, step by step
      loss.png         the same as a picture, where matplotlib is installed
      tensorboard/     the same for TensorBoard, where that is installed
      checkpoints/     checkpoint-500, …: what a run is resumed from, each a plain Hugging Face folder as well
      model/           the trained model, a plain Hugging Face folder (adapter/: a PEFT adapter); written last but one
      results.per-text.json    nats and asked tokens of each text of the last evaluation
      results.json     the outcome; written last: a run that has it is finished

A file or folder gets its name when all of it is on the disk. What begins with a dot is work in progress, or what an
interruption left of it, and may be deleted.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from acgpt.common import files
from acgpt.common.files import sync, try_lock
from acgpt.errors import InputError, OutputError
from acgpt.evaluation.per_text import path_beside
from acgpt.training.recipe import Recipe, differences

CONFIG, LOG, CURVE, BOARD, RESULTS = "config.json", "log.csv", "loss.png", "tensorboard", "results.json"
PLACES = ("model", "adapter")  # of what was trained: one of them
CHECKPOINTS, PARTIAL = "checkpoints", "checkpoints/.partial"
PATIENCE = 100  # tenths of a second that a run waits for its folder
SITTING = ("processes", "fsdp", "device", "precision", "attention", "compiled", "hardware", "versions", "command")
CHECKPOINT = "checkpoint-"  # and the step: the Trainer's name for them


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Errors of a disk, whoever meets them, become an `OutputError` that names the file or folder and the way on."""
    try:
        yield
    except OutputError:
        raise
    except (OSError, SafetensorError, RuntimeError) as error:
        words = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        if isinstance(error, RuntimeError):
            if "inline_container" not in words and "PytorchStreamWriter" not in words:
                raise
            words = f"the disk is full, or the file may not grow ({words})"  # torch has no better ones
        last = last_checkpoint(path.parents[1] if path.parent.name == CHECKPOINTS else path.parent)
        way_on = f" The run can be resumed from {last} with `resume=True`." if last else ""
        raise OutputError(f"cannot write {path}: {words}. Make room there, or see who may write.{way_on}") from error


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file of a run; what the disk refuses names the way on."""
    with writing(path):
        files.write_json(path, content)


def commit(partial: Path, final: Path) -> None:
    """Give a folder its name, once its contents are on the disk."""
    for path in sorted(partial.rglob("*"), reverse=True):
        sync(path)
    sync(partial)
    final.parent.mkdir(parents=True, exist_ok=True)
    discard(final)
    partial.rename(final)
    sync(final.parent)


def discard(folder: Path) -> None:
    """Delete a folder, if there is one. It loses its name first: what bears a name is complete."""
    hidden = folder.with_name(f".{folder.name.lstrip('.')}.deleted")
    shutil.rmtree(hidden, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        folder.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def open_folder(folder: Path, recipe: Recipe, resume: bool, about: dict[str, Any]) -> list[dict[str, Any]]:
    """Make the run's folder and its config; or, to resume, see that it is a run of this recipe on this corpus.

    Returns:
        The run's sittings, which its config holds: after which step each began, and on what.
    """
    config, last = folder / CONFIG, last_checkpoint(folder)
    sitting = {"after_step": step_of(last) if last else 0} | {name: about[name] for name in SITTING}
    if resume and config.exists():
        if check_same(folder, recipe) != about["corpus_hash"]:
            raise InputError(f"the corpus {recipe.corpus} is not the one that the run in {folder} was begun on.")
        beside = path_beside(Path(RESULTS)).name
        ours = [f".{name}*" for name in (CONFIG, LOG, CURVE, beside, RESULTS, *PLACES)]  # and nobody else's
        for left in (*(path for name in ours for path in folder.glob(name)), *(folder / CHECKPOINTS).glob(".*")):
            shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)
        before = json.loads(config.read_text(encoding="utf-8"))
        sittings = [*before.get("sittings", ()), sitting]
        write_json(config, before | {"sittings": sittings})
        return sittings
    with writing(folder):
        if folder.exists() and (not folder.is_dir() or any(path.name[0] != "." for path in folder.iterdir())):
            hint = "resume that run with `resume=True`, or " if config.exists() else ""
            raise InputError(f"{folder} is there already: {hint}name another folder with output=….")
        folder.mkdir(parents=True, exist_ok=True)
        write_json(config, about | {"sittings": [sitting]})
        return [sitting]


def check_same(folder: Path, recipe: Recipe) -> str:
    """See that a folder's run is one of this recipe; the hash of the corpus that it was begun on."""
    config = folder / CONFIG
    try:
        before = json.loads(config.read_text(encoding="utf-8"))
        changed, corpus_hash = differences(before["recipe"], recipe.as_dict()), str(before["corpus_hash"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{config} cannot be read ({error}): this run cannot be resumed.") from error
    if changed:
        raise InputError(
            f"{folder} is a run of another recipe: {', '.join(changed)} differ. Resume with the same command, or name "
            "another folder with output=…."
        )
    return corpus_hash


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Keep other runs out of a folder, which is made if need be, until this one ends, however it ends (Unix only).

    A run that was killed keeps its folder until its workers have noticed, some seconds later.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is there already: name another folder with output=….")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    try:
        waited = 0
        while not try_lock(descriptor):
            if waited == PATIENCE:
                raise InputError(
                    f"another process is training in {folder}: wait for it, or name another folder with output=…."
                )
            time.sleep(0.1)
            waited += 1
        yield
    finally:
        os.close(descriptor)


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, the oldest first; all that bear the name are complete."""
    found = (folder / CHECKPOINTS).glob(f"{CHECKPOINT}*")
    return sorted((path for path in found if step_of(path) is not None), key=lambda path: step_of(path) or 0)


def step_of(checkpoint: Path) -> int | None:
    """The step after which a checkpoint was written; `None` if its name is not one of a checkpoint."""
    number = checkpoint.name.removeprefix(CHECKPOINT)
    return int(number) if number.isdigit() else None


def last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint of a run."""
    return next(reversed(checkpoints(folder)), None)
