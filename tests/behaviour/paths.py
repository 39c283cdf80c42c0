"""Draw three paths through the package, file by file: a score, a completion request, and a training step.

    python tests/behaviour/paths.py                    # of tiny models with random weights
    python tests/behaviour/paths.py --model default    # score and request of the embedded model

Each path is warm: it is what runs after caches are filled and lazy imports are done. A file is entered when a function
that it defines is called, on any thread. The table of a path lists the files of src/acgpt in the order of first entry,
with the file that called it first. Below are counted

    files      the files that are entered
    packages   the packages that they are in
    climbs     pairs of files A, B where A calls B, and the package of B lies above that of A. Packages import only
               those below them, so these are callbacks.
    returns    pairs of files A, B where A calls B, and B was entered before A. A reader who follows the path from its
               top to its bottom turns back there.

The caller is the nearest function of src/acgpt on the stack. Calls within a file do not count, and a pair counts once.
The last line is a JSON object with these numbers and the files of each path.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))  # pytest does so for tests

import httpx
from runs import SMALL, write_corpus
from servers import serving, tiny_lm
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

import acgpt
from acgpt import LanguageModel
from acgpt.training.recipe import make
from acgpt.training.train import train

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(acgpt.__file__).parent
TEMPLATE = "The cat {{sat}} on the mat."
REQUEST = {"model": "tiny", "prompt": "The cat sat on", "max_tokens": 4, "temperature": 0.7, "seed": 1}
WARM = 3  # calls, requests or steps before the one that is drawn


@cache
def own_file(name: str) -> str | None:
    """Return a file of the package, relative to it; `None` for a file of others."""
    path = Path(name)
    return path.relative_to(SOURCE).as_posix() if path.is_relative_to(SOURCE) else None


@cache
def heights() -> dict[str, int]:
    """Return how high each package lies: the import linter's layers, the lowest 0."""
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    (layers,) = (contract["layers"] for contract in linter["contracts"] if contract["type"] == "layers")
    return {
        name.strip().removeprefix("acgpt."): number
        for number, layer in enumerate(reversed(layers))
        for name in layer.split("|")
    }


def package_of(file: str) -> str:
    """Return the package of a file, or the name of a module that is in none."""
    return file.partition("/")[0].removesuffix(".py")


class Walk:
    """A path: the files that are entered while it is recorded, on threads that started within `installed`.

    Attributes:
        files: Each file with the file that called it first; `None` if no other file of the package called it.
        calls: Pairs of files: the caller and the called one.
    """

    def __init__(self) -> None:
        self.files: dict[str, str | None] = {}
        self.calls: set[tuple[str, str]] = set()
        self.recording = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Observe this thread, and those that start in this context, whenever `recording` is true."""
        before = sys.getprofile(), threading.getprofile()
        sys.setprofile(self.observe)
        threading.setprofile(self.observe)
        try:
            yield
        finally:
            self.recording = False
            sys.setprofile(before[0])
            threading.setprofile(before[1])  # type: ignore[arg-type]

    def record(self, action: Callable[[], object]) -> None:
        """Record an action."""
        self.recording = True
        action()
        self.recording = False

    def observe(self, frame: FrameType, event: str, _: Any) -> None:
        """Note a call, as `sys.setprofile` reports it."""
        if not self.recording or event != "call" or (file := own_file(frame.f_code.co_filename)) is None:
            return
        above: FrameType | None = frame.f_back
        while above is not None and own_file(above.f_code.co_filename) is None:
            above = above.f_back
        caller = None if above is None else own_file(above.f_code.co_filename)
        self.files.setdefault(file, None if caller == file else caller)
        if caller is not None and caller != file:
            self.calls.add((caller, file))

    @property
    def climbs(self) -> list[tuple[str, str]]:
        """Calls into a package above."""
        height = heights()
        return sorted(pair for pair in self.calls if height[package_of(pair[0])] < height[package_of(pair[1])])

    @property
    def returns(self) -> list[tuple[str, str]]:
        """Calls into a file that was entered earlier."""
        order = {file: number for number, file in enumerate(self.files)}
        return sorted((a, b) for a, b in self.calls if a in order and order[b] < order[a])

    def numbers(self) -> dict[str, Any]:
        """Return what is counted, and the files by package."""
        packages = Counter(map(package_of, self.files))
        counts = {"files": len(self.files), "packages": len(packages)}
        counts |= {"climbs": len(self.climbs), "returns": len(self.returns)}
        return counts | {"by_package": dict(packages), "path": list(self.files)}

    def table(self) -> str:
        """Return the path as a table for people."""
        lines = [
            f"{number:4}  {file:36}{'' if caller is None else f'from {caller}'}"
            for number, (file, caller) in enumerate(self.files.items(), 1)
        ]
        lines += [f"{name:>10}: " + ", ".join(f"{a} → {b}" for a, b in pairs) for name, pairs in (
            ("climbs", self.climbs), ("returns", self.returns)
        )]  # fmt: skip
        return "\n".join(lines)


# ---- the three paths ------------------------------------------------------------------------------------------------


def score_path(lm: LanguageModel) -> Walk:
    """Draw a call of `log_prob`."""
    walk = Walk()
    with walk.installed():
        for _ in range(WARM):
            lm.log_prob(TEMPLATE)
        walk.record(lambda: lm.log_prob(TEMPLATE))
    return walk


def request_path(lm: LanguageModel) -> Walk:
    """Draw an OpenAI completion, from the bytes of the request to those of the answer."""
    walk = Walk()
    with walk.installed(), serving(lm) as (address, _), httpx.Client(base_url=address) as client:

        def ask() -> None:
            client.post("/v1/completions", json=REQUEST, timeout=60).raise_for_status()

        for _ in range(WARM):
            ask()
        # The server closes a request after the client has its answer, and before the next one on the same connection.
        walk.record(lambda: (ask(), ask()))
    return walk


def training_path() -> Walk:
    """Draw a training step with its row of the log: from the end of an optimizer step to that of the next one."""
    walk, counts = Walk(), Counter[int]()

    def after_step(optimizer: Optimizer, *_: Any) -> None:
        counts[id(optimizer)] += 1
        first = next(iter(counts))  # a recipe may have an optimizer of several
        if id(optimizer) == first:
            walk.recording = counts[first] == WARM

    with tempfile.TemporaryDirectory() as folder:
        corpus = write_corpus(Path(folder) / "corpus")
        keys = {"steps": WARM + 3, "warmup": 1, "log_every": 1, "save_every": 100, "eval_every": 100}
        paths = {"corpus": str(corpus), "output": f"{folder}/run", "method": "ac-gpt"}
        hook = register_optimizer_step_post_hook(after_step)
        try:
            with walk.installed():
                train(make(SMALL | keys | paths, "the script"), quiet=True)
        finally:
            hook.remove()
    return walk


def draw(model: str | None = None) -> dict[str, Walk]:
    """Draw all three paths; the first two with a model if one is named, else with a tiny one."""
    lm = tiny_lm() if model is None else acgpt.load(model, device="cpu")
    return {"log_prob": score_path(lm), "completion request": request_path(lm), "training step": training_path()}


def main() -> None:
    """Print the paths."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder, a hub id, or default; without it, a tiny model")
    walks = draw(parser.parse_args().model)
    for name, walk in walks.items():
        counts = {key: value for key, value in walk.numbers().items() if isinstance(value, int)}
        print(f"{name}: " + ", ".join(f"{value} {key}" for key, value in counts.items()))
        print(walk.table() + "\n")
    print(json.dumps({name: walk.numbers() for name, walk in walks.items()}))


if __name__ == "__main__":
    main()
