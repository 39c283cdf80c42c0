"""A corpus and a recipe small enough to train on in a test, and training in processes that can be killed."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable
from hashlib import sha256
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import tiny_model, tiny_tokenizer
from rounding import perturb_if_asked
from transformers import PreTrainedTokenizerFast

from acgpt.models.metadata import tokenizer_hash
from acgpt.training.recipe import Recipe, make

SPECIAL = {"bos_token": "<bos>", "eos_token": "<eos>", "mask_token": "<mask>"}

# Two layers of width 32, texts of 31 tokens, a dozen steps: a second or two.
SMALL: dict[str, Any] = {
    "model": {"layers": 2, "width": 32, "heads": 4},
    "length": 31,
    "steps": 12,
    "batch": 8,
    "warmup": 2,
    "lr": 3e-3,
    "device": "cpu",
    "workers": 0,
    "log_every": 2,
    "save_every": 4,
    "eval_every": 6,
    "eval_texts": 4,
    "final_texts": 6,
}
LORA: dict[str, Any] = {"rank": 4, "alpha": 8.0}


def write_corpus(
    folder: Path, *, mask: bool = True, splits: tuple[str, ...] = ("train", "validation"), seed: int = 0
) -> Path:
    """Write a prepared corpus of plain sentences in the documented format; only the tokenizer's hash uses acgpt."""
    special = SPECIAL if mask else {name: token for name, token in SPECIAL.items() if name != "mask_token"}
    tokenizer, rng = tiny_tokenizer(**special), random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder / "tokenizer")
    described = {}
    for split in splits:
        lines = [sentence(rng) for _ in range(400 if split == "train" else 40)]
        ids = [token for line in lines for token in [*tokenizer(line)["input_ids"], tokenizer.eos_token_id]]
        raw = np.array(ids, dtype="<u2").tobytes()
        (folder / f"{split}-00000.bin").write_bytes(raw)
        shard = {"file": f"{split}-00000.bin", "tokens": len(ids), "sha256": sha256(raw).hexdigest()}
        described[split] = {"documents": len(lines), "tokens": len(ids), "bytes": 1, "shards": [shard]}
    manifest = {"format_version": 1, "tokenizer_hash": tokenizer_hash(tokenizer), "dtype": "uint16"}
    (folder / "corpus.json").write_text(json.dumps(manifest | {"convention": "lines", "splits": described}))
    return folder


def write_base(folder: Path, corpus: Path, architecture: str = "llama", **more: Any) -> Path:
    """Write a pretrained model with the tokenizer of a corpus, and no metadata of acgpt."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(corpus / "tokenizer")
    tiny_model(architecture, vocabulary=len(tokenizer), scale=0.05, **more).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def recipe_of(corpus: Path, output: Path | str, *, base: Path | None = None, **keys: Any) -> Recipe:
    """Return a small recipe: of a network from scratch, or of an adapter for a base."""
    content = SMALL
    if base is not None:  # on a CPU, each text of a step is a pass of its own: two are enough to accumulate gradients
        content = {name: value for name, value in SMALL.items() if name != "model"}
        content |= {"batch": 2, "base": str(base), "lora": LORA}
    return make(content | {"corpus": str(corpus), "output": str(output)} | keys, "small")


def results_of(run: Path) -> dict[str, Any]:
    """Return the results of a finished run."""
    content: dict[str, Any] = json.loads((run / "results.json").read_text())
    return content


def sentence(rng: random.Random) -> str:
    nouns = ["cat", "dog", "bird", "mat", "log", "capital", "France", "Italy"]
    verbs = ["sat on", "saw", "and"]
    return " ".join(f"The {rng.choice(nouns)} {rng.choice(verbs)} the {rng.choice(nouns)}." for _ in range(3))


def read_rows(run: Path) -> list[dict[str, str]]:
    """Return the log without its columns of times."""
    header, *lines = (run / "log.csv").read_text().splitlines()
    rows = [dict(zip(header.split(","), line.split(","), strict=True)) for line in lines]
    return [
        {name: value for name, value in row.items() if name not in ("seconds", "tokens_per_second", "mfu", "wait")}
        for row in rows
    ]


def loss_of(run: Path) -> dict[int, float]:
    """Return the losses in the log, by step."""
    return {int(row["step"]): float(row["loss"]) for row in read_rows(run)}


# ---- processes ------------------------------------------------------------------------------------------------------

# Importing torch and transformers takes most of a short run, so one process has done it and is forked for each run.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["preload"])


def forked(target: Callable[..., None], *args: Any) -> Any:
    """Start a process by forking one that has already imported the modules of the commands."""
    with pytest.MonkeyPatch.context() as patch:  # the server finds `preload` by PYTHONPATH alone
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        forkserver.ensure_running()
    process = SERVER.Process(target=target, args=args)
    process.start()
    return process


class Command:
    """`acgpt ARGUMENTS` in a process of its own.

    Args:
        arguments: Of the command.
        output: The file that gets what it prints.
        before: Called in that process before the command, with `detail`.
        env: Added to the environment.
    """

    def __init__(
        self,
        *arguments: str | Path,
        output: Path,
        before: Callable[[Any], None] | None = None,
        detail: Any = None,
        env: dict[str, str] | None = None,
    ) -> None:
        self.output = output
        words = [str(argument) for argument in arguments]
        self.process = forked(enter, words, str(output), before, detail, env or {})

    def wait(self, timeout: float = 300) -> int:
        """Wait for the process and return its exit code, or minus the signal number if it was killed."""
        self.process.join(timeout)
        assert self.process.exitcode is not None, f"still running after {timeout} s:\n{self.printed()}"
        return self.process.exitcode

    def interrupt(self, number: int) -> None:
        """Send a signal to the process group, as a terminal does."""
        os.killpg(self.process.pid, number)

    def printed(self) -> str:
        """Return what the command has printed so far."""
        return self.output.read_text()


class Piped:
    """`acgpt ARGUMENTS` in a process of its own, with pipes: `stdin`, `stdout` and `stderr`, as text.

    Args:
        arguments: Of the command.
        encoding: Of what it writes.
        before: Called in that process before the command, with `None`.
    """

    def __init__(
        self, *arguments: str | Path, encoding: str = "utf-8", before: Callable[[Any], None] | None = None
    ) -> None:
        ends = [SERVER.Pipe(duplex=False) for _ in range(3)]
        theirs = [ends[0][0], ends[1][1], ends[2][1]]
        words = [str(argument) for argument in arguments]
        self.process = forked(enter_piped, words, encoding, before, *theirs)
        self.stdin, self.stdout, self.stderr = (
            os.fdopen(os.dup(end.fileno()), mode, encoding=encoding)
            for end, mode in ((ends[0][1], "w"), (ends[1][0], "r"), (ends[2][0], "r"))
        )
        for end in (end for pair in ends for end in pair):
            end.close()

    def interrupt(self, number: int) -> None:
        """Send a signal to the process."""
        os.kill(self.process.pid, number)

    def wait(self, timeout: float = 300) -> int:
        """Wait for the process and return its exit code, or minus the signal number if it was killed."""
        self.process.join(timeout)
        assert self.process.exitcode is not None, f"still running after {timeout} s"
        return self.process.exitcode

    def __enter__(self) -> Piped:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join()
        for end in (self.stdin, self.stdout, self.stderr):
            with contextlib.suppress(BrokenPipeError):
                end.close()


def enter_piped(words: list[str], encoding: str, before: Callable[[Any], None] | None, *pipes: Connection) -> None:
    """Body of the process of a `Piped` command."""
    for standard, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        os.dup2(pipes[standard].fileno(), standard)
        pipes[standard].close()
        setattr(sys, name, os.fdopen(standard, mode, encoding=encoding, closefd=False))
    enter(words, None, before, None, {})


def enter(
    words: list[str], output: str | None, before: Callable[[Any], None] | None, detail: Any, env: dict[str, str]
) -> None:
    """Body of the process of a command, which leads its own process group."""
    os.setpgid(0, 0)
    multiprocessing.set_start_method("fork", force=True)  # of its workers: as in a process that nobody has prepared
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if output is not None:
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
    os.environ.update(env)
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # as in the process of the tests
    perturb_if_asked(pytest.MonkeyPatch())
    if before is not None:
        before(detail)
    sys.argv = ["acgpt", *words]
    from acgpt.cli.main import main

    main()


def ranks(
    count: int, *arguments: str | Path, output: Path, env: dict[str, str] | None = None, **how: Any
) -> list[Command]:
    """Run the same command in several processes of one job, as torchrun starts them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = (env or {}) | {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    return [
        Command(
            *arguments,
            output=output.with_suffix(f".{rank}"),
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            **how,
        )
        for rank in range(count)
    ]


def kill_self(*_: Any, **__: Any) -> None:
    """Kill the process and its workers like `kill -9`: no cleanup runs."""
    os.killpg(0, signal.SIGKILL)
    time.sleep(60)


def replace(target: str, make: Callable[[Any], Any]) -> None:
    """Replace `module:name` or `module:Class.name` by `make(old)`."""
    import importlib

    module, _, path = target.partition(":")
    *owners, name = path.split(".")
    holder = importlib.import_module(module)
    for owner in owners:
        holder = getattr(holder, owner)
    setattr(holder, name, make(getattr(holder, name)))


def until(happens: Callable[[], bool], timeout: float = 180) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + timeout
    while not happens():
        assert time.monotonic() < end, f"not within {timeout} s"
        time.sleep(0.01)


@contextlib.contextmanager
def ended(*commands: Command):
    """End the processes when the context ends, so that none outlives its test."""
    try:
        yield
    finally:
        for command in commands:
            if command.process.is_alive():
                with contextlib.suppress(ProcessLookupError):  # its workers too, which it would be waited for with
                    command.interrupt(signal.SIGKILL)
                command.process.kill()
                command.process.join()
