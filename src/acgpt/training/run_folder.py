"""The folder of a training run: its files, and how they are written so that a crash leaves no incomplete file.

    RUN/
      config.json      the recipe, the corpus, the machine, versions; written first
      log.csv          loss, learning rate, speed and perplexities by step
      loss.png         the same as a plot, if matplotlib is installed
      tensorboard/     the same for TensorBoard, if it is installed
      checkpoints/     checkpoint-500, …: to resume from, each also a plain Hugging Face folder
      model/           the trained model, a plain Hugging Face folder (adapter/: a PEFT adapter)
      results.per-text.json    nats and asked tokens of each text of the final evaluation
      results.json     the results; written last: a run that has it is finished

A file or folder gets its final name when it is complete on disk. Names that begin with a dot are work in progress, or
left over from an interruption, and may be deleted.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from acgpt.common import files
from acgpt.common.files import disk_remedy, locked, sync
from acgpt.errors import InputError, OutputError
from acgpt.evaluation.per_text import per_text_path
from acgpt.training.recipe import Recipe, differences

CONFIG, LOG, CURVE, BOARD, RESULTS = "config.json", "log.csv", "loss.png", "tensorboard", "results.json"
MODEL_FOLDERS = ("model", "adapter")  # a finished run has one of them
CHECKPOINTS, PARTIAL = "checkpoints", "checkpoints/.partial"
PATIENCE = 10  # seconds to wait for the lock of the folder
SITTING = ("processes", "fsdp", "device", "precision", "attention", "compiled", "hardware", "versions", "command")
CHECKPOINT = "checkpoint-"  # followed by the step


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn disk errors of any library into an `OutputError` that names the file or folder and how to resume."""
    try:
        yield
    except OutputError:
        raise
    except (OSError, SafetensorError, RuntimeError) as error:
        message = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        if isinstance(error, RuntimeError):
            if "inline_container" not in message and "PytorchStreamWriter" not in message:
                raise
            message = f"the disk is full, or the file is limited in size ({message})"  # torch's message is obscure
        last = last_checkpoint(path.parents[1] if path.parent.name == CHECKPOINTS else path.parent)
        resume = f" The run can be resumed from {last} with `resume=True`." if last else ""
        raise OutputError(f"cannot write {path}: {message}. {disk_remedy(error)}{resume}") from error


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file of a run, with errors as in `writing`."""
    with writing(path):
        files.write_json(path, content)


def commit(partial: Path, final: Path) -> None:
    """Sync the contents of a folder to disk, then rename it to its final path."""
    for path in sorted(partial.rglob("*"), reverse=True):
        sync(path)
    sync(partial)
    final.parent.mkdir(parents=True, exist_ok=True)
    discard(final)
    partial.rename(final)
    sync(final.parent)


def discard(folder: Path) -> None:
    """Delete a folder if it exists. It is renamed first, so that folders with a final name are always complete."""
    hidden = folder.with_name(f".{folder.name.lstrip('.')}.deleted")
    shutil.rmtree(hidden, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        folder.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def open_folder(folder: Path, recipe: Recipe, resume: bool, about: dict[str, Any]) -> list[dict[str, Any]]:
    """Write the config of a run; to resume, check that the run has this recipe and corpus.

    Args:
        folder: Folder of the run, see `alone`.
        recipe: The recipe.
        resume: Whether to resume a run in the folder.
        about: Contents of `config.json`.

    Returns:
        The sittings of the run, as in its config: one for each start, with the step after which it began and the
        machine.
    """
    config, last = folder / CONFIG, last_checkpoint(folder)
    sitting = {"after_step": step_of(last) if last else 0} | {name: about[name] for name in SITTING}
    if resume and config.exists():
        if check_same(folder, recipe) != about["corpus_hash"]:
            raise InputError(
                f"the corpus {recipe.corpus} is not that of the run in {folder}: resume with the same corpus."
            )
        beside = per_text_path(Path(RESULTS)).name
        hidden = [f".{name}*" for name in (CONFIG, LOG, CURVE, beside, RESULTS, *MODEL_FOLDERS)]  # only acgpt's own
        for path in (*(path for name in hidden for path in folder.glob(name)), *(folder / CHECKPOINTS).glob(".*")):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        previous = json.loads(config.read_text(encoding="utf-8"))
        sittings = [*previous.get("sittings", ()), sitting]
        write_json(config, previous | {"sittings": sittings})
        return sittings
    with writing(folder):
        if any(path.name[0] != "." for path in folder.iterdir()):
            hint = "resume that run with `resume=True`, or " if config.exists() else ""
            raise InputError(f"{folder} already exists: {hint}choose another folder with output=….")
        write_json(config, about | {"sittings": [sitting]})
        return [sitting]


def check_same(folder: Path, recipe: Recipe) -> str:
    """Check that the run in a folder has this recipe, and return the hash of its corpus."""
    config = folder / CONFIG
    try:
        previous = json.loads(config.read_text(encoding="utf-8"))
        changed, corpus_hash = differences(previous["recipe"], recipe.as_dict()), str(previous["corpus_hash"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{config} cannot be read ({error}), so the run cannot be resumed.") from error
    if changed:
        raise InputError(
            f"{folder} is a run of another recipe: {', '.join(changed)} differ{'s' * (len(changed) == 1)}. Resume with "
            "the same command, or choose another folder with output=…."
        )
    return corpus_hash


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Create a folder if needed, and lock it against other runs.

    The lock is released when the run ends, even by a crash. After a kill, the workers hold it for some seconds.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} already exists and is not a folder: choose another folder with output=….")
    with contextlib.ExitStack() as stack:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(locked(folder, PATIENCE))
        if lock is None:
            raise InputError(
                f"another process is training in {folder}: wait for it, or choose another folder with output=…."
            )
        yield


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first; all of them are complete."""
    paths = (folder / CHECKPOINTS).glob(f"{CHECKPOINT}*")
    return sorted((path for path in paths if path.name.removeprefix(CHECKPOINT).isdigit()), key=step_of)


def step_of(checkpoint: Path) -> int:
    """Return the step after which a checkpoint was written."""
    return int(checkpoint.name.removeprefix(CHECKPOINT))


def last_checkpoint(folder: Path) -> Path | None:
    """Return the newest checkpoint of a run, if any."""
    return next(reversed(checkpoints(folder)), None)
