"""Where a killed command resumes: what it leaves behind, where it goes on, and that its result is that of another one.

Commands are killed in a fork of this process, by a callback of their own. Trainings are stopped in this process, and
save nothing then. That a kill at any other moment is survived, the tests of `recovery`, `data` and `evaluation` show.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml
from generations import write_generations
from generators import LENGTH, model_of
from record import check
from runs import SMALL, read_rows, write_corpus
from torch.optim.optimizer import register_optimizer_step_post_hook
from typer.testing import CliRunner

import acgpt
from acgpt.cli.main import app
from acgpt.data import rows
from acgpt.evaluation import perplexity
from acgpt.experiments import runner
from acgpt.experiments.experiment import load_experiment
from acgpt.experiments.runner import run_experiment
from acgpt.training.train import train

pytestmark = [
    pytest.mark.usefixtures("without_curves"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

# Times, places and what depends on them.
CHANGING = {"date", "seconds", "model_seconds", "tokens_per_second", "outside"}
CHANGING |= {"command", "versions", "hardware", "folder"}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a tiny model, of which the corpus has the tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "model"
    model_of("ac-gpt").save_pretrained(folder)
    return folder


def killed(action: Callable[[], object]) -> None:
    """Run an action in a fork of this process, and check that it was ended by SIGKILL."""
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(60)
            action()
        finally:
            os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def files(folder: Path) -> list[str]:
    """Return the paths of all files in a folder."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def steady(value: Any) -> Any:
    """Return a JSON value without times, dates and places."""
    if isinstance(value, dict):
        return {key: steady(each) for key, each in value.items() if key not in CHANGING}
    return [steady(each) for each in value] if isinstance(value, list) else value


def content_of(folder: Path) -> dict[str, Any]:
    """Return the contents of all files of a folder: of JSON files without times, dates and places."""
    moved = str(folder).encode()
    raw = {name: (folder / name).read_bytes().replace(moved, b"FOLDER") for name in files(folder)}
    return {name: steady(json.loads(text)) if name.endswith(".json") else text for name, text in raw.items()}


def test_a_preparation_goes_on_after_its_last_checkpoint(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "BATCH", 10_000)
    source = tmp_path / "texts.jsonl"
    source.write_text("".join(json.dumps({"text": f"{n} The cat sat on the mat. " * 20}) + "\n" for n in range(60)))
    options = {"tokenizer": str(corpus / "tokenizer"), "validation": 0.1, "shard_bytes": 4096, "workers": 1}

    def prepare(folder: str, stop: bool = False) -> list[int]:
        seen = []

        def watch(progress: Any) -> None:
            if progress.documents:
                seen.append(progress.documents)
                if stop:
                    kill()

        acgpt.prepare(source, tmp_path / folder, watch=watch, **options)
        return seen

    whole = prepare("whole")
    killed(lambda: prepare("killed", stop=True))
    left = files(tmp_path / "killed")
    journal = json.loads((tmp_path / "killed" / "journal.json").read_text())
    content = {
        "documents after each batch": whole,
        "files after the kill": left,
        "position after the kill": journal["position"],
        "documents after each batch of the second run": prepare("killed"),
        "files in the end": files(tmp_path / "killed"),
        "documents seen when it is done already": prepare("killed"),
    }
    assert content_of(tmp_path / "killed") == content_of(tmp_path / "whole")
    check("resume-prepare", content)


class Stopped(BaseException):
    """Ends a training in this process, which saves nothing then."""


def stopped_after_step(step: int, action: Callable[[], object]) -> None:
    """Run an action that trains, and end it after an optimizer step."""
    count = iter(range(1, step))

    def after_step(*_: Any) -> None:
        if next(count, None) is None:
            raise Stopped

    hook = register_optimizer_step_post_hook(after_step)
    try:
        with pytest.raises(Stopped):
            action()
    finally:
        hook.remove()


def test_a_training_goes_on_after_its_last_checkpoint(corpus, tmp_path):
    def run(name: str) -> list[str]:
        keys = {"steps": 8, "save_every": 3, "keep": 2, "log_every": 1, "eval_every": 4, "dropout": 0.1}
        file = tmp_path / f"{name}.yaml"
        file.write_text(json.dumps(SMALL | keys | {"corpus": str(corpus), "output": str(tmp_path / name)}))
        result = CliRunner().invoke(app, ["train", str(file), "--resume"])
        if isinstance(result.exception, Stopped):
            raise result.exception
        assert result.exit_code == 0, result.output
        lines = [line.replace(str(tmp_path), "FOLDER") for line in result.output.splitlines()]
        return [line for line in lines if "resum" in line or "start" in line or "finished" in line]

    folder, whole = tmp_path / "stopped", tmp_path / "whole"
    content: dict[str, Any] = {"message of a new run": run("whole")}
    stopped_after_step(5, lambda: run("stopped"))
    content |= {
        "files after the stop": files(folder),
        "steps in the log after the stop": [row["step"] for row in read_rows(folder)],
        "message of the second run": run("stopped"),
        "steps in the log": [row["step"] for row in read_rows(folder)],
        "files in the end": files(folder),
    }
    assert read_rows(folder) == read_rows(whole)
    assert weights(folder) == weights(whole)
    check("resume-train", content)


def weights(run: Path) -> bytes:
    return (run / "model" / "model.safetensors").read_bytes()


def test_an_evaluation_goes_on_after_the_texts_that_it_has_answered(corpus, model, tmp_path, monkeypatch):
    def interrupt() -> None:
        raise KeyboardInterrupt

    def evaluate(
        name: str, stop: int | None = None, by: Callable[[], None] = interrupt
    ) -> tuple[list[list[int]], dict[str, Any]]:
        seen: list[list[int]] = []

        def progress(*numbers: int) -> None:
            seen.append([*numbers])
            if len(seen) == stop:
                by()

        result = acgpt.evaluate(
            str(model), corpus, split="validation", length=LENGTH, limit=6, batch_tokens=100, device="cpu",
            output=tmp_path / name / "result.json", progress=lambda: nullcontext(progress),
        )  # fmt: skip
        return seen, result

    seen, whole = evaluate("whole")
    with pytest.raises(KeyboardInterrupt):
        evaluate("stopped", stop=len(seen) // 2)
    left = files(tmp_path / "stopped")
    again, result = evaluate("stopped")
    resumed = result.pop("resumed")
    content = {
        "progress": seen,
        "files after the stop": left,
        "progress of the second run": again,
        "resumed": resumed,
        "files in the end": files(tmp_path / "stopped"),
    }
    assert result["modes"] == whole["modes"]
    check("resume-evaluate", content)
    monkeypatch.setattr(perplexity, "PAUSE", 0)  # every group is written
    killed(lambda: evaluate("killed", stop=len(seen) // 2, by=kill))
    assert evaluate("killed")[0] == again and files(tmp_path / "killed") == files(tmp_path / "whole")
    per_text = [(tmp_path / name / "result.per-text.json").read_bytes() for name in ("killed", "whole")]
    assert per_text[0] == per_text[1]


def test_a_generation_goes_on_after_its_last_group(corpus, model, tmp_path):
    options = {"split": "validation", "length": LENGTH, "limit": 24, "samples": 2, "device": "cpu", "prompt": 4}

    def generate(name: str, stop: tuple[str, int] | None = None) -> dict[str, list[list[int]]]:
        seen: dict[str, list[list[int]]] = {}

        def progress(mode: str) -> Any:
            calls = seen.setdefault(mode, [])

            def update(*numbers: int) -> None:
                calls.append(list(numbers))
                if stop is not None and stop[0] == mode and numbers[2] > stop[1]:
                    kill()

            return nullcontext(update)

        acgpt.generate(
            str(model), corpus, tmp_path / name, modes=["unconditional", "training"], progress=progress, **options
        )
        return {mode: [calls[0], calls[-1]] if calls else [] for mode, calls in seen.items()}

    whole = generate("whole")
    killed(lambda: generate("killed", stop=("training", whole["training"][-1][1] * 3 // 4)))
    left = files(tmp_path / "killed")
    content = {
        "progress, first and last": whole,
        "files after the kill": left,
        "progress of the second run": generate("killed"),
        "files in the end": files(tmp_path / "killed"),
        "progress when it is done already": generate("killed"),
    }
    assert content_of(tmp_path / "killed") == content_of(tmp_path / "whole")
    check("resume-generate", content)


def test_a_scoring_goes_on_with_the_files_that_have_no_result(corpus, tmp_path):
    def score(name: str, stop: int | None = None) -> list[str]:
        folder, done = tmp_path / name, []
        if not folder.exists():
            for mode in ("infilling", "training", "unconditional"):
                write_generations(folder, corpus, mode)

        def note(path: Path, result: Any) -> None:
            done.append(f"{path.name} {path.stat().st_mtime_ns in earlier}")
            if len(done) == stop:
                kill()

        earlier = {path.stat().st_mtime_ns for path in folder.glob("*.mauve.json")}
        options = {"no_mauve": True, "resume": True, "index": folder / "scores.json"}
        acgpt.score_samples(folder, corpus, done=note, **options)
        return done

    score("whole")
    killed(lambda: score("killed", stop=2))
    left = files(tmp_path / "killed")
    content = {
        "files after the kill": left,
        "results of the second run, and whether they are the first run's": score("killed"),
        "files in the end": files(tmp_path / "killed"),
    }
    assert content_of(tmp_path / "killed") == content_of(tmp_path / "whole")
    check("resume-score", content)


# In place of the program `acgpt`: it leaves the files by which a command is known to have ended.
STAND_IN = """
import sys
from pathlib import Path

kind, *words = sys.argv[1:]
if kind == "train":
    (folder,) = [word.removeprefix("output=") for word in words if word.startswith("output=")]
    Path(folder, "results.json").write_text("{}")
else:
    Path(words[words.index("-o") + 1]).write_text("{}")
"""


def test_an_experiment_goes_on_with_the_commands_that_have_no_result(corpus, tmp_path, monkeypatch):
    """Its runner is gone after the training of the first cell, and within that of the second."""
    file, script, out = tmp_path / "grid.yaml", tmp_path / "stand_in.py", tmp_path / "out"
    keys = SMALL | {"steps": 4, "save_every": 2, "eval_every": 0, "final_texts": 1, "corpus": str(corpus)}
    grid = {"recipe": "tiny-cpu", "output": str(out), "set": keys, "grid": {"seed": [0, 1]}}
    file.write_text(yaml.safe_dump(grid | {"evaluate": {"splits": ["validation"], "limit": 3}}))
    first, second = load_experiment(file).cells
    content: dict[str, Any] = {"before": states(file)}
    train(first.recipe, quiet=True)
    stopped_after_step(3, lambda: train(second.recipe, quiet=True))
    content["after the stop"] = states(file)
    script.write_text(STAND_IN)
    monkeypatch.setattr(runner, "PROGRAM", (sys.executable, str(script)))
    content["in the end"] = {name: state.state for name, state in run_experiment(file).items()}
    names = [path for path in sorted(out.rglob("*.txt")) if path.is_file()]
    lines = [
        line.replace(str(tmp_path), "FOLDER").replace(str(corpus), "CORPUS")
        for path in names
        for line in path.read_text().splitlines()
    ]
    content["logs"] = [path.relative_to(out).as_posix() for path in names]
    content["commands of the second run"] = [line for line in lines if line.startswith("$")]
    content["files in the end"] = [name for name in files(out) if "checkpoint-" not in name]
    check("resume-experiment", content)


def states(file: Path) -> list[list[Any]]:
    """Return what the command lists of each cell."""
    result = CliRunner().invoke(app, ["experiment", str(file), "--list", "--json"])
    assert result.exit_code == 0, result.output
    return [
        [cell[key] for key in ("cell", "state", "step", "evaluated")] for cell in json.loads(result.stdout)["cells"]
    ]
