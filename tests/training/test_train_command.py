"""`acgpt train`: its output, signals, and messages at the end."""

from __future__ import annotations

import json
import re
import signal

import pytest
from runs import SMALL, Command, ended, read_rows, recipe_of, results_of, until, write_corpus
from typer.testing import CliRunner

from acgpt.cli.main import app
from acgpt.data.corpus import Corpus
from acgpt.query.modes import MODES
from acgpt.training.learner import Learner
from acgpt.training.log import ProgressLine, not_written
from acgpt.training.run_folder import last_checkpoint
from acgpt.training.stopping import StopRequests
from acgpt.training.train import train

pytestmark = pytest.mark.usefixtures("without_curves")


def command(*words):
    return CliRunner().invoke(app, ["train", *map(str, words)])


@pytest.fixture
def recipe_file(corpus, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "\n".join(f"{key}: {json.dumps(value)}" for key, value in (SMALL | {"corpus": str(corpus)}).items())
    )
    return path


def test_the_command_lists_recipes():
    listed = command("--list")
    assert listed.exit_code == 0
    assert "wikitext103-small-fast  WikiText-103, 81.1 M parameters" in listed.stdout
    assert json.loads(command("--list", "--json").stdout)["tiny-cpu"]


def test_the_command_trains_and_prints_perplexities_and_again_when_it_is_finished(corpus, recipe_file, tmp_path):
    changes = ("steps=3", "warmup=0", "conditioning.r_max=0.4", "model.layers=1")
    words = (recipe_file, f"output={tmp_path / 'run'}", *changes)
    first = command(*words)
    assert first.exit_code == 0, first.stderr
    lines, tokens = first.stderr.splitlines(), len(Corpus.open(corpus).tokens("train"))
    results = results_of(tmp_path / "run")
    assert lines[0] == str(tmp_path / "run")
    assert lines[1].startswith(f"corpus {corpus}: {tokens:,} tokens; 3 steps read {results['tokens']:,} (")
    assert f"{tmp_path / 'run' / 'model'}\n" in first.stdout.replace("\n/", "/")
    assert "training-no-future" in first.stdout and "gain from the future" in first.stdout
    assert "evaluating on texts 1–6 of validation\n" in first.stderr
    assert "on texts 1–6 of validation, 31 tokens each:" in first.stdout
    assert (results["steps"], results["recipe"]["conditioning"], results["recipe"]["model"]["layers"]) == (
        3, {"r_max": 0.4}, 1
    )  # fmt: skip
    assert command(*words, "--resume").stdout == first.stdout
    assert json.loads(command(*words, "--resume", "--json").stdout)["evaluation"] == results["evaluation"]
    changed = command(*words, "lr=0.5", "--resume")
    assert changed.exit_code == 2 and "another recipe: lr differ" in changed.stderr


def test_the_command_makes_no_noise_but_its_own(recipe_file, tmp_path):
    done = Command("train", recipe_file, f"output={tmp_path / 'run'}", "workers=2", output=tmp_path / "said")
    with ended(done):
        assert done.wait() == 0, done.printed()
    ours = ["step ", "evaluating on texts 1–6 of validation", "on texts 1–6 of validation, ", "evaluated ", "mode "]
    ours += ["method ", "No intervals: ", "corpus ", "expected: ", "not written, ", str(tmp_path / "run"), *MODES]
    for line in done.printed().splitlines():
        assert not line or line.startswith(tuple(ours)), done.printed()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_process_and_its_workers_ends_in_words_that_say_how_to_go_on(number, recipe_file, tmp_path):
    words = ("train", recipe_file, f"output={tmp_path / 'run'}", "steps=100000", "workers=1", "eval_every=0")
    running = Command(*words, output=tmp_path / "said")
    with ended(running):
        until(lambda: (tmp_path / "run" / "checkpoints" / "checkpoint-4").is_dir())
        running.interrupt(number)
        assert running.wait() == 3
    *_, last = running.printed().splitlines()
    step = read_rows(tmp_path / "run")[-1]["step"]
    assert last == f"stopped. The same command with --resume continues after step {step}."
    assert (tmp_path / "run" / "checkpoints" / f"checkpoint-{step}" / "optimizer.pt").exists()
    assert "Traceback" not in running.printed()


@pytest.fixture
def listening():
    """Handle Ctrl-C as in a terminal; tests that run in the background may ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_second_ctrl_c_does_not_wait(listening):
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    stopping = StopRequests()
    with stopping.from_signals():
        stopping.step_done()
        assert not stopping
        signal.raise_signal(signal.SIGINT)
        assert stopping
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert [signal.getsignal(number) for number in numbers] == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_first_step_has_ended_does_not_wait_for_it(
    number, listening, corpus, tmp_path, monkeypatch
):
    def compiles_for_ever(self, **batch):
        signal.raise_signal(number)
        raise AssertionError("it goes on")

    recipe = recipe_of(corpus, tmp_path / "run")
    with monkeypatch.context() as patched:
        patched.setattr(Learner, "forward", compiles_for_ever)
        assert train(recipe, quiet=True) is None
    assert last_checkpoint(tmp_path / "run") is None
    assert train(recipe, resume=True, quiet=True) is not None


def test_once_training_is_over_ctrl_c_ends_the_last_evaluation(corpus, tmp_path, monkeypatch):
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr("acgpt.training.train.finish", lambda *_: {"handler": signal.getsignal(signal.SIGINT)})
    assert train(recipe_of(corpus, tmp_path / "run"), quiet=True) == {"handler": before}


def test_a_run_in_the_background_goes_on_ignoring_ctrl_c(listening):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stopping = StopRequests()
    with stopping.from_signals():
        stopping.step_done()
        signal.raise_signal(signal.SIGINT)
        assert not stopping


def test_a_run_that_is_broken_off_at_once_says_how_to_go_on(recipe_file, tmp_path, monkeypatch):
    def train(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("acgpt.training.train.train", train)
    done = command(recipe_file, f"output={tmp_path / 'run'}")
    assert done.exit_code == 130 and "interrupted. There is no checkpoint yet" in done.stderr


def test_a_corpus_without_the_split_is_trained_on_and_that_nothing_will_be_evaluated_is_told(recipe_file, tmp_path):
    held = write_corpus(tmp_path / "corpus", splits=("train",))
    done = command(recipe_file, f"corpus={held}", f"output={tmp_path / 'run'}", "steps=2", "warmup=0")
    assert done.exit_code == 0 and "nothing will be evaluated" in done.stderr.partition("step ")[0]
    assert results_of(tmp_path / "run")["evaluation"] is None and (tmp_path / "run" / "model").is_dir()


def test_an_evaluation_shows_how_far_it_has_come(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("acgpt.training.log.ProgressLine.EVERY", 0.0)
    train(recipe_of(corpus, tmp_path / "run", steps=3, eval_every=0))
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("evaluated ")]
    assert lines and lines[-1] == f"evaluated {lines[-1].split('/')[1].split()[0]}/{lines[-1].split('/')[1]}"


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("ac-gpt", r"unconditional [\d.]+, training [\d.]+, training-no-future [\d.]+"),
        ("diffusion", r"unconditional ≤ [\d.]+, training ≤ [\d.]+"),
    ],
)
def test_a_perplexity_on_the_way_says_if_it_is_a_bound(method, words, corpus, tmp_path, capsys):
    train(recipe_of(corpus, tmp_path / "run", steps=3, eval_every=1, final_texts=1, method=method))
    output = capsys.readouterr().err.partition("step 1: perplexity on texts 1–4 of validation: ")[2].splitlines()[0]
    assert re.fullmatch(words, output)


@pytest.mark.parametrize("resumed", [0, 50])
def test_the_expected_time_is_that_of_the_steps_to_come_at_the_pace_after_the_first_row(capsys, resumed):
    line = ProgressLine(quiet=False)
    line.start(resumed, 200)
    for step, seconds in ((1, 30.0), (10, 48.0), (20, 99.0)):  # 30 s, then 2 s a step, then more
        line.show({"step": resumed + step, "seconds": seconds, "loss": 1.0, "tokens_per_second": 1.0, "mfu": 0.1})
    told = [text for text in capsys.readouterr().err.splitlines() if text.startswith("expected: ")]
    left = {0: "0:06:20", 50: "0:04:40"}[resumed]  # 190 or 140 steps
    assert told == [f"expected: {left} to step 200, without evaluations"]


def test_what_a_missing_package_would_have_written_is_told(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "tensorboard" else object())
    assert not_written() == "not written, because their packages are missing: tensorboard/ (pip install tensorboard)"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert not_written() == ""


def test_quiet_is_quiet(recipe_file, tmp_path):
    done = command(recipe_file, f"output={tmp_path / 'run'}", "steps=2", "warmup=0", "--quiet")
    assert done.exit_code == 0 and done.stderr == ""
