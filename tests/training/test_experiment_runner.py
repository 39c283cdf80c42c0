"""Running experiments: cells that run, fail, stop and resume, and a real tiny experiment."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import yaml
from models import tiny_model
from runs import SMALL, Command, enter, forked, read_rows, until, write_corpus
from test_experiment import ROOT, made, run_cli

from acgpt.cli.experiment import window
from acgpt.data.corpus import Corpus
from acgpt.evaluation.per_text import ENDING
from acgpt.experiments import experiment
from acgpt.experiments import runner as experiment_runner
from acgpt.experiments.experiment import BUILT_IN, Experiment
from acgpt.experiments.runner import PROGRAM, Runner, is_locked, run_experiment, state_of
from acgpt.report import write

# ---- running, with a stand-in for acgpt -----------------------------------------------------------------------------

# It trains nothing, but reads the same words and leaves the same files; what it is to do otherwise, a file tells it.
STAND_IN = """
import json, os, signal, sys, time
from pathlib import Path

told = Path(os.environ["TOLD"])
kind, *words = sys.argv[1:]
if (told / f"{kind}-killed").exists():
    (told / f"{kind}-killed").unlink()
    os.kill(os.getpid(), signal.SIGKILL)
if kind in ("evaluate", "generate", "mauve"):
    path = Path(words[words.index("--index" if kind == "mauve" else "-o") + 1])
    if kind == "generate":
        path.mkdir(parents=True)
        path = path / "index.json"
    if (told / f"{kind}-fails").exists():
        sys.exit("error: no such split")
    (told / "evaluate.began").touch()
    for _ in range(12_000):
        if not (told / "evaluate.waits").exists():
            break
        time.sleep(0.01)
    path.write_text("{}")
    sys.exit()
from acgpt.training.recipe import load_recipe  # takes a moment

words = words[: words.index("--minutes")] if "--minutes" in words else words
recipe = load_recipe(words[0], [word for word in words[1:] if word != "--resume"])
folder = Path(recipe.output)
folder.mkdir(exist_ok=True)
(folder / "config.json").write_text(json.dumps({"recipe": recipe.as_dict(), "corpus_hash": "", "steps": 10}))
def log(step):
    (folder / "log.csv").write_text(f"step,loss,seconds\\n{step},{5 - step / 10},{2 * step}\\n")
log(4)
if not (told / f"{folder.name}.stays").exists():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
else:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
(told / f"{folder.name}.began").touch()
for _ in range(12_000):  # not for ever, lest a mistake hang the tests
    if not (told / f"{folder.name}.waits").exists():
        break
    time.sleep(0.01)
if (told / f"{folder.name}.fails").exists():
    print("error: training has diverged")
    sys.exit(2)
log(10)
(folder / "results.json").write_text("{}")
"""


@pytest.fixture
def told(tmp_path, monkeypatch):
    """The folder of control files for the fake command: NAME.waits, NAME.fails, and those that it writes on start."""
    script, folder = tmp_path / "stand_in.py", tmp_path / "told"
    script.write_text(STAND_IN)
    folder.mkdir()
    monkeypatch.setattr(experiment_runner, "PROGRAM", (sys.executable, str(script)))
    monkeypatch.setenv("TOLD", str(folder))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    return folder


@contextlib.contextmanager
def meanwhile(action: Callable[[], None]) -> Iterator[None]:
    """Run an action in a thread, with signals that act as in a terminal: what runs in the background ignores Ctrl-C."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    acting = threading.Thread(target=action)
    acting.start()
    try:
        yield
        acting.join()
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def three(tmp_path: Path) -> Experiment:
    return made(tmp_path / "out", grid={"seed": [0, 1, 2]}, set={"corpus": "c"}, evaluate={"splits": ["a", "b"]})


def file_of(tmp_path: Path, experiment: Experiment) -> Path:
    """Write an experiment as a file."""
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(json.loads(json.dumps(asdict(experiment)))))
    return file


def test_a_cell_that_fails_is_reported_and_the_others_run(tmp_path, told):
    found = three(tmp_path)
    (told / "seed1.fails").touch()
    shown = []
    states = Runner(found.cells, show=lambda cell, state: shown.append((cell.name, state.state))).run()
    assert [state.state for state in states.values()] == ["done", "failed", "done"]
    assert states["seed1"].error == "acgpt train ended with code 2: error: training has diverged"
    assert (states["seed0"].step, states["seed0"].counts["evaluated"], states["seed0"].left) == (10, 2, 0)
    assert ("seed0", "training") in shown and shown[-1] == ("seed2", "done")
    output = found.cells[1].log.read_text()
    assert output.startswith(f"$ {found.cells[1].commands[0]}\n") and "diverged" in output
    (told / "seed1.fails").unlink()
    (told / "train-killed").touch()
    error = Runner(found.cells).run()["seed1"].error  # of this command, not of the one before
    assert error == f"acgpt train ended with code -9: $ {found.cells[1].commands[0]}"
    assert {state.state for state in Runner(found.cells).run().values()} == {"done"}
    for cell in found.cells:  # those that were done were not trained again
        assert cell.log.read_text().count("$ acgpt train") == (3 if cell.name == "seed1" else 1)


def test_what_a_cell_lacks_is_made_up_and_nothing_is_done_twice(tmp_path, told):
    keys = {"set": {"corpus": "c"}, "evaluate": {"splits": ["a"]}, "generate": {"splits": ["a", "b"]}}
    shown = []
    (cell,) = made(tmp_path / "out", grid={"seed": [0]}, **keys).cells
    state = Runner([cell], show=lambda cell, state: shown.append(state.state)).run()["seed0"]
    counts = {"evaluated": 1, "evaluations": 1, "generated": 2, "generations": 2, "scored": 0, "scores": 0}
    assert (state.state, state.counts) == ("done", counts)
    assert list(dict.fromkeys(shown)) == ["training", "evaluating", "generating", "done"]
    keys["mauve"] = {"asked_only": True}  # wanted later
    (cell,) = made(tmp_path / "out", grid={"seed": [0]}, **keys).cells
    train, evaluate, *draw, one, two, three, four = cell.commands
    done, kinds = [train, evaluate, *draw], [line.split()[1] for line in cell.commands]
    assert kinds == ["train", "evaluate", "generate", "generate", *["mauve"] * 4]
    for lacking, counts, again in (
        ("scores", (2, 0), [one, two, three, four]),
        ("a score", (2, 3), [three]),
        ("a folder of generations", (1, 2), [draw[0], one, two]),
    ):
        if lacking == "a score":
            list(cell.outputs_of("mauve"))[2].unlink()
        elif lacking == "a folder of generations":
            shutil.rmtree(next(iter(cell.outputs_of("generate"))).parent)
        state = state_of(cell)
        assert state.state == "stopped" and state.counts["scores"] == 4
        assert (state.counts["generated"], state.counts["scored"]) == counts
        assert Runner([cell]).run()["seed0"].state == "done"
        done += again
        assert [line.removeprefix("$ ") for line in cell.log.read_text().splitlines()] == done
    file = file_of(tmp_path, made(tmp_path / "out", **keys))
    table = run_cli(file, "--list").stdout
    assert all(word in table for word in ("generated", "scored", "2/2", "0/2", "4/4", "0/4"))
    assert "--only seed1" in run_cli(file, "--print-commands").stdout
    listed = json.loads(run_cli(file, "--list", "--json").stdout)["cells"]
    assert [(each["generated"], each["scored"], each["scores"]) for each in listed] == [(2, 4, 4), (0, 0, 4)]
    assert listed[0]["commands"] == cell.commands


def test_a_folder_of_another_recipe_is_not_taken_for_the_cells(tmp_path, told):
    assert Runner(three(tmp_path).cells[:1]).run()["seed0"].state == "done"
    other = made(tmp_path / "out", grid={"seed": [0]}, set={"corpus": "c", "lr": 1e-4})
    state = Runner(other.cells).run()["seed0"]
    assert state.state == "failed" and "a run of another recipe: lr differ" in state.error
    moved = made(tmp_path / "out", grid={"seed": [0]}, set={"corpus": "elsewhere/c"})  # known by its hash
    assert state_of(moved.cells[0]).state == "done"


def time_is_up(runner: Runner) -> None:
    runner.end = 0.0
    if (Path(os.environ["TOLD"]) / "seed1.waits").exists():
        runner.child.terminate()  # acgpt train ends by itself


@pytest.mark.parametrize(
    ("waits", "stop"),
    [
        ("seed1", lambda runner: os.kill(os.getpid(), signal.SIGTERM)),
        ("seed1", lambda runner: os.kill(os.getpid(), signal.SIGINT)),
        ("seed1", lambda runner: os.kill(runner.child.pid, signal.SIGTERM)),  # the training, not the runner
        ("seed1", time_is_up),
        ("evaluate", time_is_up),
    ],
    ids=["SIGTERM", "Ctrl-C", "SIGTERM to the training", "time is up in training", "time is up in an evaluation"],
)
def test_a_cell_that_is_stopped_ends_the_run_and_all_goes_on_later(tmp_path, told, waits, stop):
    cells = three(tmp_path).cells
    runner = Runner(cells, minutes=1)
    (told / f"{waits}.waits").touch()

    def act() -> None:
        until(lambda: (told / f"{waits}.began").exists() and runner.child is not None)
        stop(runner)

    with meanwhile(act):
        states = list(runner.run().values())
    if waits == "seed1":
        assert [state.state for state in states] == ["done", "stopped", "waiting"]
        assert (states[1].step, states[1].steps, states[1].left) == (4, 10, 12)
        assert cells[1].log.read_text().count("$") == 1 and not cells[2].log.exists()
    else:
        assert [state.state for state in states] == ["stopped", "waiting", "waiting"]
        assert not any(path.exists() for path in cells[0].outputs_of("evaluate"))
    assert all(state.error is None for state in states)
    minutes = cells[0].log.read_text().partition(" --minutes ")[2].partition("\n")[0]
    assert 0 < float(minutes) <= 1
    (told / f"{waits}.waits").unlink()
    assert {state.state for state in Runner(cells).run().values()} == {"done"}


def test_two_runners_do_not_work_on_one_cell(tmp_path, told):
    found = three(tmp_path)
    (told / "seed0.waits").touch()
    first: dict[str, Any] = {}
    running = threading.Thread(target=lambda: first.update(Runner(found.cells).run()))
    running.start()
    until(lambda: (told / "seed0.began").exists())
    second = Runner(found.cells).run()
    assert [state.state for state in second.values()] == ["elsewhere", "done", "done"]
    listed = json.loads(run_cli(file_of(tmp_path, found), "--list", "--json").stdout)["cells"]
    assert [cell["state"] for cell in listed] == ["elsewhere", "done", "done"]
    (told / "seed0.waits").unlink()
    running.join()
    assert {state.state for state in first.values()} == {"done"}
    assert all(cell.log.read_text().count("$ acgpt train") == 1 for cell in found.cells)


def test_an_experiment_is_run_by_one_function_with_the_options_of_the_command(tmp_path, told, monkeypatch):
    monkeypatch.setattr(experiment_runner, "check_inputs", lambda experiment, cells: None)
    found, other, shown = three(tmp_path), tmp_path / "other", []

    def show(cell, state):
        shown.append((cell.name, state.state))

    states = run_experiment(found, output=other, only=["seed1", "3"], no_scoring=True, minutes=60, show=show)
    assert {name: state.state for name, state in states.items()} == {"seed1": "done", "seed2": "done"}
    assert {name for name, _ in shown} == {"seed1", "seed2"} and shown[-1] == ("seed2", "done")
    assert (other / "seed1").is_dir() and not Path(found.output).exists()
    assert [" --minutes " in log.read_text() for log in other.rglob("seed*.txt")] == [True, True]


def test_a_cell_stays_locked_while_its_command_outlives_a_runner_that_was_killed(tmp_path, told):
    cell = three(tmp_path).cells[0]
    (told / "seed0.waits").touch()
    runner = os.fork()
    if not runner:
        with contextlib.suppress(BaseException):
            Runner([cell]).run()
        os._exit(0)
    try:
        until(lambda: (told / "seed0.began").exists())
    finally:
        os.kill(runner, signal.SIGKILL)
        os.waitpid(runner, 0)
    assert is_locked(cell) and Runner([cell]).run()["seed0"].state == "elsewhere"
    (told / "seed0.waits").unlink()
    until(lambda: not is_locked(cell))
    assert state_of(cell).step == 10  # the command went on to its end


def test_torchrun_trains_a_cell_and_does_not_evaluate_it(tmp_path, told, monkeypatch):
    script = tmp_path / "torchrun.py"
    script.write_text(
        "import os, subprocess, sys\n"
        "assert sys.argv[1:4] == ['2', '-m', 'acgpt'], sys.argv\n"
        "assert os.environ['TORCH_ELASTIC_SHUTDOWN_TIMEOUT'] == '600'  # a checkpoint may take longer than 30 s\n"
        f"sys.exit(subprocess.call([sys.executable, {str(tmp_path / 'stand_in.py')!r}, *sys.argv[4:]]))"
    )
    monkeypatch.setattr(experiment_runner, "TORCHRUN", (sys.executable, str(script)))
    assert Runner(three(tmp_path).cells[:1], processes=2).run()["seed0"].state == "done"


# ---- commands that die, and the process that they are forked from ---------------------------------------------------


def test_a_command_that_is_killed_fails_its_cell_alone_and_is_made_up_later(tmp_path, told):
    keys = {"set": {"corpus": "c"}, "evaluate": {"splits": ["a"]}, "generate": {"splits": ["a"]}, "mauve": {}}
    cells = made(tmp_path / "out", grid={"seed": list(range(5))}, **keys).cells
    kinds = list(experiment_runner.WORK)
    for kind in kinds:
        (told / f"{kind}-killed").touch()  # once: in a cell each
    states = Runner(cells).run()
    assert [state.state for state in states.values()] == ["failed"] * 4 + ["done"]
    for kind, cell in zip(kinds, cells, strict=False):
        assert states[cell.name].error.startswith(f"acgpt {kind} ended with code -9: ")
    assert {state.state for state in Runner(cells).run().values()} == {"done"}
    for kind, cell in zip(kinds, cells, strict=False):
        lines = [line.split()[2] for line in cell.log.read_text().splitlines()]
        assert lines == [each for each in kinds for _ in range(1 + (each == kind))]


def test_a_second_ctrl_c_does_not_wait_for_the_checkpoint(tmp_path, told):
    found = three(tmp_path)
    for flag in ("waits", "stays"):
        (told / f"seed0.{flag}").touch()
    runner = Runner(found.cells)

    def ask() -> None:
        until(lambda: (told / "seed0.began").exists())
        for times in (1, 2):
            os.kill(os.getpid(), signal.SIGINT)
            until(lambda times=times: runner.stop_requests == times)

    with meanwhile(ask):
        states = runner.run()
    assert [state.state for state in states.values()] == ["stopped", "waiting", "waiting"]


# ---- the command ----------------------------------------------------------------------------------------------------


def test_the_commands_that_are_printed_run_one_cell_each(tmp_path, told, monkeypatch):
    monkeypatch.setattr(experiment_runner, "check_inputs", lambda experiment, cells: None)
    file = file_of(tmp_path, three(tmp_path))
    lines = run_cli(file, "lr=0.001", "--print-commands", "--nproc-per-node", "1").stdout.splitlines()
    assert [shlex.split(line) for line in lines] == [
        ["acgpt", "experiment", str(file), "lr=0.001", "--only", f"seed{seed}"] for seed in range(3)
    ]
    result = run_cli(*shlex.split(lines[1])[2:])
    assert "seed1" in result.stdout and "1 of 1 cells done" in result.stdout and "seed1: done" in result.stderr
    assert len(run_cli(file, "lr=0.001", "--print-commands").stdout.splitlines()) == 2
    (told / "seed2.fails").touch()
    answer = json.loads(run_cli(file, "lr=0.001", "--json", "--quiet", code=1).stdout)
    assert (answer["done"], answer["failed"], answer["left"]) == (2, 1, 0)
    assert [cell["state"] for cell in answer["cells"]] == ["done", "done", "failed"]
    assert "diverged" in answer["cells"][2]["error"] and answer["cells"][2]["commands"][0].startswith("acgpt train")
    assert "--nproc-per-node 4" in run_cli(file, "--print-commands", "--nproc-per-node", "4").stdout


def test_on_a_terminal_there_is_a_table_of_cells_around_the_one_that_runs(tmp_path):
    cells = made(tmp_path / "out", grid={"seed": list(range(100))}).cells
    for running, first in ((0, 1), (50, 46), (99, 91)):
        assert [cell.number for cell in window(cells, cells[running], 10)] == list(range(first, first + 10))
    assert window(cells[:2], cells[1], 10) == cells[:2]


# ---- as it is -------------------------------------------------------------------------------------------------------


class ForkedCommand:
    """What `runner.start` returns, forked from a process that has imported everything already."""

    def __init__(self, words: Sequence[str], output: BinaryIO, lock: int) -> None:
        self.process = forked(enter, [*words[len(PROGRAM) :]], None, write_to, output.name, {})
        self.pid = self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float) -> None:
        self.process.join(timeout)

    def terminate(self) -> None:
        self.process.terminate()


def write_to(path: str) -> None:
    """Append what this process prints to a file."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)


def run_forked(*words: str | Path) -> None:
    """Run `acgpt experiment` with these arguments, and fork its commands from a process that is already there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment_runner, "start", ForkedCommand)
        run_cli(*words, "--quiet")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Folder of the tiny experiment with some finished cells, and the arguments of the command that ran them."""
    tmp_path = tmp_path_factory.mktemp("tiny")
    corpus, out = write_corpus(tmp_path / "corpus"), tmp_path / "results"
    small = {**SMALL, "steps": 4, "eval_every": 0, "corpus": str(corpus), "workers": 0}
    file = tmp_path / "tiny.yaml"
    content = yaml.safe_load((BUILT_IN / "tiny-cpu.yaml").read_text())
    drawn = {"splits": ["validation"], "limit": 3, "modes": ["unconditional", "training"], "r_max": [0.4]}
    content["grid"] |= {"conditioning.r_max": [0.4, 0.8], "seed": [0, 1]}
    content["evaluate"] = {"splits": ["validation"], "limit": 5}
    file.write_text(yaml.safe_dump(content | {"generate": drawn}, sort_keys=False))
    words = [file, *(experiment.written(key, value) for key, value in small.items()), "-o", out, "--only", "*-seed0"]
    run_forked(*words)
    return out, words


def test_the_tiny_experiment_is_trained_evaluated_and_reported(tiny, tmp_path, monkeypatch):
    out, words = tiny
    answer = json.loads(run_cli(*words, "--json", "--quiet").stdout)
    assert [cell["cell"] for cell in answer["cells"]] == ["ac-gpt-r_max0.4-seed0", "ac-gpt-r_max0.8-seed0", "gpt-seed0"]
    assert all((cell["state"], cell["step"], cell["scored"]) == ("done", 4, 1) for cell in answer["cells"])
    for cell in answer["cells"]:
        (folder,) = (Path(cell["folder"]) / "generations").iterdir()
        index = json.loads((folder / "index.json").read_text())["modes"]
        assert (index["training"] is None) is (cell["cell"] == "gpt-seed0") and cell["generated"] == 1
        assert len((folder / "unconditional.jsonl").read_text().splitlines()) == 3
        scored = json.loads((folder / "scores-no_mauve.json").read_text())["results"]
        assert [each["mode"] for each in scored] == [mode for mode, present in index.items() if present]
        assert {each["result"] for each in scored} == set(map(str, folder.glob("*.mauve.json")))
    asked: dict[float, dict[str, str]] = {}
    for cell in answer["cells"]:
        files = Path(cell["folder"]).glob("validation-r_max*.json")
        for path in (path for path in files if not path.name.endswith(ENDING)):
            content = json.loads(path.read_text())
            asked.setdefault(content["set"]["r_max"], {})[cell["cell"]] = content["set"]["hash"]
    assert {r_max: sorted(each) for r_max, each in asked.items()} == {
        0.4: ["ac-gpt-r_max0.4-seed0", "gpt-seed0"], 0.8: ["ac-gpt-r_max0.8-seed0", "gpt-seed0"],
    }  # fmt: skip
    hashes = [set(each.values()) for each in asked.values()]
    assert all(len(each) == 1 for each in hashes) and len(set.union(*hashes)) == 2
    monkeypatch.setattr(write, "find_spec", lambda name: None)  # figures take seconds, and have tests of their own
    report = write.make_report([out], tmp_path / "report")
    (table,) = report.content["from-scratch"]["splits"]["validation"].values()
    compared = [row for row in table if row["set"] in {each[:8] for each in set.union(*hashes)}]
    assert [(row["r_max"], row["method"]) for row in compared] == [
        (0.4, "AC-GPT"), (0.4, "GPT"), (0.8, "AC-GPT"), (0.8, "GPT"),
    ]  # fmt: skip
    (measured,) = report.content["generation"]["sizes"].values()
    assert {row["method"].split(",")[0] for row in measured["companions"]} == {"AC-GPT", "GPT", "original"}
    path = out / "gpt-seed0" / "validation-r_max0.8-first5.json"
    perplexity = json.loads(path.read_text())["modes"]["training-no-future"]["perplexity"]
    assert compared[3]["training-no-future"]["mean"] == perplexity and compared[3]["training"] is None


def test_a_cell_has_the_results_of_commands_that_are_run_one_by_one(tiny, tmp_path):
    out, words = tiny
    answer = json.loads(run_cli(*words, "--list", "--json").stdout)
    (commands,) = (cell["commands"] for cell in answer["cells"] if cell["cell"] == "ac-gpt-r_max0.4-seed0")
    alone = tmp_path / out.name
    for number, command in enumerate(commands):
        again = shlex.split(command.replace(str(out), str(alone)))[1:]
        done = Command(*again, output=tmp_path / f"{number}.txt")
        assert done.wait() == 0, done.printed()
    cell = out / "ac-gpt-r_max0.4-seed0"
    files = sorted(path.relative_to(out) for path in cell.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(alone) for path in alone.rglob("*") if path.is_file())
    kinds = {path.name for path in files}
    assert {"model.safetensors", "training.jsonl", "validation-r_max0.4-first5.json", "results.json"} <= kinds
    for path in files:
        assert timeless(out / path) == timeless(alone / path, str(alone), str(out)), path


def test_the_experiment_on_finetuning_comes_out_as_the_papers_curve(tmp_path, monkeypatch):
    corpus, base = write_corpus(tmp_path / "corpus"), tmp_path / "base"
    tokenizer = Corpus.open(corpus).tokenizer()
    tokenizer.save_pretrained(base)
    tiny_model("qwen3", vocabulary=len(tokenizer), scale=0.05).save_pretrained(base)
    content = yaml.safe_load((BUILT_IN / "finetuning-r-max.yaml").read_text())
    content["evaluate"]["splits"], content["grid"]["conditioning.r_max"] = ["validation"], [0.2, 0.6]
    keys = {key: value for key, value in SMALL.items() if key not in ("model", "final_texts")}
    keys |= {"steps": 3, "batch": 2, "eval_every": 0, "corpus": str(corpus), "base": str(base)}
    file, out = tmp_path / "smaller.yaml", tmp_path / "results"
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    run_forked(file, *(experiment.written(key, value) for key, value in keys.items()), "-o", out)
    monkeypatch.setattr(write, "find_spec", lambda name: None)
    report = write.make_report([out], tmp_path / "report").content["finetuning"]["splits"]["validation"]
    ours = {name: [row for row in table if row["run"] != "paper"] for name, table in report.items()}
    assert [(row["run"], row["r_max"]) for row in ours["sweep"]] == [("ac-gpt-r_max0.2", 0.2), ("ac-gpt-r_max0.6", 0.6)]
    assert all(row["advantage_interval"] for row in ours["sweep"])
    assert [row["twin"] for row in ours["advantages"]] == ["gpt", "gpt"]
    assert [row["run"] for row in ours["perplexities"]] == ["gpt", "ac-gpt-r_max0.2", "gpt", "ac-gpt-r_max0.6"]


def timeless(path: Path, *moved: str) -> Any:
    """The content of a file without times and dates, and with the folder replaced as if it lay elsewhere."""
    raw = path.read_bytes().replace(*(name.encode() for name in moved)) if moved else path.read_bytes()
    if path.name == "log.csv":
        return read_rows(path.parent)
    return without_times(json.loads(raw)) if path.suffix == ".json" else raw


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        times = ("seconds", "model_seconds", "tokens_per_second", "wait", "outside", "date", "command")
        return {key: without_times(each) for key, each in value.items() if key not in times}
    return [without_times(each) for each in value] if isinstance(value, list) else value
