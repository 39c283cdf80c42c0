"""`acgpt evaluate`: what it prints, writes and refuses."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch
from models import tiny_model, tiny_tokenizer
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch_file
from safetensors.torch import save_file as save_torch_file
from typer.testing import CliRunner

import acgpt
from acgpt.cli.evaluate import describe_intervals, describe_r_max, print_distances, print_perplexities
from acgpt.cli.main import app
from acgpt.cli.ui import Bars
from acgpt.data.corpus import Corpus
from acgpt.display.show import Page
from acgpt.engine.layout import batches
from acgpt.errors import InputError
from acgpt.evaluation.dataset import LENGTH, EvaluationDataset, dataset_of_corpus
from acgpt.evaluation.per_text import read_per_text
from acgpt.evaluation.perplexity import evaluate, split_groups
from acgpt.methods import METHODS, method_of
from acgpt.methods.ac_gpt import AcGpt
from acgpt.models.language_model import LanguageModel
from acgpt.models.metadata import Metadata, tokenizer_hash
from acgpt.query.conditioning import GIVEN
from acgpt.query.modes import MODES
from acgpt.query.query import Query

TEXT = "The cat sat on the mat. The dog sat on the log, and the bird saw the capital of France. "


def write_corpus(folder, tokenizer, **splits):
    """A corpus as `acgpt prepare` leaves it: a manifest, and a shard a split."""
    folder.mkdir(exist_ok=True)
    entries = {}
    for name, text in splits.items():
        ids = np.array(tokenizer(text)["input_ids"], dtype="<u2")
        (folder / f"{name}-00000.bin").write_bytes(ids.tobytes())
        digest = hashlib.sha256(ids.tobytes()).hexdigest()
        shard = {"file": f"{name}-00000.bin", "tokens": len(ids), "sha256": digest}
        entries[name] = {"documents": 1, "tokens": len(ids), "bytes": len(text), "shards": [shard]}
    manifest = {
        "format_version": 1,
        "dtype": "uint16",
        "convention": "documents",
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "splits": entries,
    }
    (folder / "corpus.json").write_text(json.dumps(manifest))
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two folders with the same weights: one says that it reads the future, the other says nothing."""
    tokenizer = tiny_tokenizer(bos_token="<bos>", eos_token="<eos>")
    folders = {}
    for name, metadata in (("reads", Metadata()), ("plain", None)):
        folders[name] = str(tmp_path_factory.mktemp(name))
        model = tiny_model(vocabulary=len(tokenizer), positions=40)
        LanguageModel(model, tokenizer, metadata=metadata).save_pretrained(folders[name])
    Path(folders["plain"], "acgpt.json").unlink()
    config = Path(folders["plain"], "config.json")
    config.write_text(json.dumps({k: v for k, v in json.loads(config.read_text()).items() if k != "acgpt"}))
    return folders


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "corpus", tiny_tokenizer(), test=TEXT * 12, validation=TEXT * 5)


@pytest.fixture
def cli(models):
    """Run the command in this process, on short texts and on the CPU."""

    def run(*arguments, model="reads", code=0, length="30"):
        options = ["--device", "cpu", *(["--length", length] if length else [])]
        result = CliRunner().invoke(
            app, ["evaluate", models[model], *map(str, arguments), *options], env={"COLUMNS": "150", "NO_COLOR": "1"}
        )
        assert result.exit_code == code, (result.output, result.exception)
        assert "Traceback" not in result.output
        return result

    return run


def object_of(result):
    (line,) = result.stdout.splitlines()
    return json.loads(line, parse_constant=pytest.fail)


def test_the_command_says_in_json_what_the_api_says(cli, models, corpus, tmp_path, monkeypatch):
    output, records = tmp_path / "out" / "results.json", tmp_path / "records.safetensors"
    monkeypatch.setattr(sys, "argv", ["/x/bin/acgpt", "evaluate", "words"])
    before = datetime.now(UTC).replace(microsecond=0)
    got = object_of(cli(corpus, "--json", "-o", output, "--records", records))
    lm = acgpt.load(models["reads"], device="cpu")
    evaluation_dataset, path = dataset_of_corpus(Corpus.open(corpus), split="test", length=30)
    want = evaluate(method_of("ac-gpt"), lm.engine(None), evaluation_dataset)
    plain = json.loads(json.dumps(want.as_dict()))
    assert len(evaluation_dataset) >= 3
    for mode in MODES:
        assert got["modes"][mode] == {key: pytest.approx(value) for key, value in plain["modes"][mode].items()}
    assert got["set"] == {**plain["set"], "path": str(path)}
    assert got["set"]["hash"] == evaluation_dataset.hash and got["set"]["split"] == "test"
    assert path == corpus / "evaluation" / "test-30-r0.6-seed0.safetensors"
    assert set(got) == {
        "model", "adapter", "corpus", "method", "options", "bound", "modes", "gains", "by_distance", "set", "bootstrap",
        "metadata",
        "trained_r_max", "trained_r_maxes",
        "bos_token_id", "mask_token_id", "device", "dtype", "batch_tokens", "compiled", "seconds", "versions",
        "date", "command",
    }  # fmt: skip
    assert got["command"] == ["acgpt", "evaluate", "words"]
    assert before <= datetime.fromisoformat(got["date"]) <= datetime.now(UTC)
    assert (got["method"], got["device"], got["dtype"], got["metadata"]["method"]) == (
        "ac-gpt", "cpu", "float32", "ac-gpt",
    )  # fmt: skip
    assert got["versions"]["torch"] == torch.__version__ and got["bootstrap"] == {
        "resamples": 1000,
        "level": 0.95,
        "seed": 0,
        "unit": "texts",
        "units": len(evaluation_dataset),
    }
    assert json.loads(output.read_text()) == got
    kept = read_per_text(output, got)
    assert {path.name for path in output.parent.iterdir()} == {"results.json", "results.per-text.json"}
    for mode, sums in kept.modes.items():
        assert sums.nats == pytest.approx(want.per_text.modes[mode].nats, abs=1e-3)
        assert sums.tokens.tolist() == want.per_text.modes[mode].tokens.tolist()
    columns = load_file(records)
    for mode, result in got["modes"].items():
        assert math.exp(-columns[f"{mode}.log_prob"].mean()) == pytest.approx(result["perplexity"])


def test_a_result_takes_the_place_of_one_of_the_same_question_only(cli, models, corpus, tmp_path, monkeypatch):
    output = tmp_path / "results.json"
    cli(corpus, "-o", output)
    output.write_text(output.read_text().replace('"date": "2', '"date": "1'))
    cli(corpus, "-o", output)
    monkeypatch.chdir(Path(models["reads"]).parent)  # the same folder, written in another way
    monkeypatch.setitem(models, "relative", f"./{Path(models['reads']).name}")
    cli(corpus, "-o", output, model="relative")
    output.write_text(output.read_text().replace('"date": "2', '"date": "1'))
    cli(corpus, "-o", output)
    assert b'"date": "2' in (second := output.read_bytes())
    monkeypatch.setitem(models, "copy", str(shutil.copytree(models["reads"], tmp_path / "copy")))
    others = {"texts": ("--seed", "5"), "modes": ("--modes", "training"), "dtype": ("--dtype", "bfloat16")}
    for name, words in (others | {"model": (), "method": ("--method", "gpt")}).items():
        told = cli(corpus, "-o", output, *words, code=2, model="copy" if name == "model" else "reads").stderr
        assert f"{output} is the result of another evaluation, with other {name}" in told
    (tmp_path / "thesis.txt").write_text("mine")
    assert "is not a result of acgpt evaluate" in cli(corpus, "-o", tmp_path / "thesis.txt", code=2).stderr
    assert output.read_bytes() == second and (tmp_path / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize("asked", [None, 64, 10**6])
def test_a_result_says_how_many_tokens_a_pass_had_at_most(cli, corpus, monkeypatch, asked):
    sizes, real = [], AcGpt.log_probs
    count = lambda self, engine, queries: sizes.append(len(queries)) or real(self, engine, queries)  # noqa: E731
    monkeypatch.setattr(AcGpt, "log_probs", count)
    monkeypatch.setattr("acgpt.evaluation.perplexity.CPU_TOKENS", 128)
    words = () if asked is None else ("--batch-tokens", asked)
    result = object_of(cli(corpus, "--json", "--modes", "unconditional", *words))
    assert result["batch_tokens"] == (asked or 128)
    assert max(sizes) == min(result["batch_tokens"] // 31, result["set"]["texts"]) > 1  # 30 tokens and BOS each


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
def test_a_pipe_is_neither_read_nor_replaced(cli, corpus, tmp_path):
    result, pipe = tmp_path / "results.json", tmp_path / "pipe"
    cli(corpus, "-o", result)
    os.mkfifo(pipe)
    Thread(target=lambda: pipe.write_text(result.read_text()), daemon=True).start()  # so that a reader goes on
    assert f"{pipe} is not a result of acgpt evaluate" in cli(corpus, "-o", pipe, code=2).stderr
    assert pipe.is_fifo()


def test_another_file_in_the_place_of_unfinished_answers_is_replaced(cli, corpus, tmp_path):
    want, part = object_of(cli(corpus, "--json")), tmp_path / "results.json.part"
    part.write_text("something else")
    got = object_of(cli(corpus, "--json", "-o", tmp_path / "results.json"))
    assert got["modes"] == want["modes"] and "resumed" not in got and not part.exists()


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGTERM, 3, "stopped"), (signal.SIGINT, 130, "interrupted")]
)
def test_a_signal_keeps_what_was_answered_and_says_how_to_go_on(cli, corpus, tmp_path, monkeypatch, number, code, word):
    before = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("nobody handles SIGTERM"))
    ask, asked, output = AcGpt.log_probs, [], tmp_path / "results.json"

    def log_probs(self, model, queries, **options):
        asked.append(len(queries))
        if len(asked) == 3:
            os.kill(os.getpid(), number)
        return ask(self, model, queries, **options)

    monkeypatch.setattr(AcGpt, "log_probs", log_probs)
    options = (corpus, "--batch-tokens", "120")
    printed = cli(*options, "-o", output, code=code).stderr  # too soon for a write of its own accord
    assert f"{word}. The same command resumes from {output}.part." in printed and not output.exists()
    signal.signal(signal.SIGTERM, before)
    left = len(asked)
    cli(*options, "-o", output)
    assert json.loads(output.read_text())["resumed"] and not output.with_name("results.json.part").exists()
    resumed = len(asked) - left
    cli(*options)
    assert len(asked) - left - resumed == resumed + 2  # two groups had been answered


def test_a_signal_before_anything_was_answered_leaves_no_file(cli, corpus, tmp_path, monkeypatch):
    def log_probs(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(AcGpt, "log_probs", log_probs)
    assert "Nothing was computed yet" in cli(corpus, "-o", tmp_path / "results.json", code=130).stderr
    assert "Nothing was saved: with -o FILE" in cli(corpus, code=130).stderr
    assert not list(tmp_path.glob("results*"))


def test_what_another_evaluation_has_left_is_not_taken_for_this_ones(cli, models, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("acgpt.evaluation.perplexity.PAUSE", 0)
    monkeypatch.setattr(
        "acgpt.evaluation.perplexity.PartialEvaluation.discard", lambda self: None
    )  # as if all had been stopped
    output = tmp_path / "results.json"
    for change in ("weight", "config", "seed", "limit", "dtype"):
        where = models | {"other": str(tmp_path / change)}
        shutil.copytree(models["reads"], where["other"])
        if change == "weight":
            path = tmp_path / change / "model.safetensors"
            weights = load_torch_file(path)
            next(weight for name, weight in weights.items() if "lm_head" in name or "embed" in name)[7, 3] += 1.0
            save_torch_file(weights, path, metadata={"format": "pt"})
        elif change == "config":
            path = tmp_path / change / "config.json"
            config = json.loads(path.read_text())
            path.write_text(json.dumps(config | {"rms_norm_eps": 0.3}))
        options = {"seed": ("--seed", "5"), "limit": ("--limit", "2"), "dtype": ("--dtype", "bfloat16")}.get(change, ())
        monkeypatch.setitem(models, "other", where["other"])
        output.unlink(missing_ok=True)
        first = json.loads((cli(corpus, "-o", output), output.read_text())[1])
        assert output.with_name("results.json.part").exists()
        output.unlink()
        got, want = (object_of(cli(corpus, "--json", *options, *more, model="other")) for more in (("-o", output), ()))
        for mode, result in want["modes"].items():
            assert got["modes"][mode]["perplexity"] == pytest.approx(result["perplexity"], rel=1e-6), change
        assert got["modes"]["training"]["mean_nll"] != pytest.approx(first["modes"]["training"]["mean_nll"], rel=1e-6)


def test_where_the_disk_refuses_what_is_unfinished_the_evaluation_goes_on(cli, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("acgpt.evaluation.perplexity.PAUSE", 0)
    output = tmp_path / "results.json"
    output.with_name("results.json.part").mkdir()
    printed = " ".join(cli(corpus, "-o", output).output.split())
    assert "results.json.part: Is a directory. This evaluation cannot be resumed if it stops." in printed
    assert json.loads(output.read_text())["modes"]["training"]["perplexity"] > 1


def test_mlm_can_go_on_after_a_few_texts():
    asked, groups = [Query([1, 2, 3], [True, False, False])] * 20, []
    for group in split_groups(batches(dict(enumerate(asked)), 10**6, future=True), METHODS["mlm"].texts_at_once):
        groups.append(list(group))
    assert [len(group) for group in groups] == [4] * 5
    assert sorted(text for group in groups for text in group) == list(range(20))
    assert [list(group) for group in split_groups([[3, 1], [2]], None)] == [[3, 1], [2]]


def test_the_table_has_a_row_for_every_mode_and_dashes_where_there_is_no_answer(cli, corpus):
    reads, plain = (cli(corpus, model=model).stdout for model in ("reads", "plain"))
    for name, mode in MODES.items():
        ours, gpts = (
            next(line for line in text.splitlines() if line.startswith(f"{name}  ")).split() for text in (reads, plain)
        )
        assert "--" not in ours
        assert ours[-1].endswith(")") is mode.future  # the gain and its interval
        assert gpts == ([name, *["--"] * 4] if mode.future else ours)  # the same weights, the same numbers
    assert "method ac-gpt" in reads and "cannot be answered" not in reads
    assert "method gpt" in plain and "--: cannot be answered by a model of method gpt" in plain


def test_the_set_is_made_once_and_used_by_every_model(cli, corpus):
    first = object_of(cli(corpus, "--json"))
    saved = Path(first["set"]["path"])
    before = saved.stat().st_mtime_ns
    second = object_of(cli(corpus, "--json", model="plain"))
    assert second["set"] == first["set"] and saved.stat().st_mtime_ns == before
    assert second["modes"]["unconditional"] == first["modes"]["unconditional"]
    others = [
        ["--seed", "1"], ["--r-max", "0.3"], ["--limit", "2"], ["--split", "validation"],
        ["--conditioning", "{b_max: 1}"], ["--conditioning", '{"b_max": 1, "unknown": 0.1}', "--method", "gpt"],
    ]  # fmt: skip
    hashes = {object_of(cli(corpus, "--json", *other, "--mode", "unconditional"))["set"]["hash"] for other in others}
    assert len(hashes | {first["set"]["hash"]}) == 7
    assert len(list(saved.parent.iterdir())) == 7


def test_texts_are_as_long_as_the_model_takes_unless_told(cli, corpus):
    assert object_of(cli(corpus, "--json", length=None))["set"]["length"] == 39  # of 40 positions, one is for BOS
    assert (LENGTH, object_of(cli(corpus, "--json"))["set"]["length"]) == (1023, 30)


def test_infilling_gives_as_much_as_the_training_distribution_unless_told(cli, corpus):
    for options, r_max in (
        (["--conditioning", "{r_max: 0.2}"], 0.2),
        (["--conditioning", "{parts: [{kind: empty}, {kind: blocks, r_max: 0.3}]}"], 0.3),
        (["--conditioning", "{b_max: 2}", "--r-max", "0.4"], 0.4),
        (["--conditioning", "{r_max: 0.2}", "--r-max", "0.4"], 0.4),
        (["--conditioning", "{empty: 1}"], 0.6),
    ):
        made = object_of(cli(corpus, "--json", *options, "--modes", "infilling"))["set"]
        drawn = EvaluationDataset.load(made["path"]).sampled_roles["infilling"]
        assert made["r_max"] == r_max
        assert (drawn == GIVEN).mean(axis=1).max() <= r_max


def test_a_result_that_cannot_be_written_ends_with_code_1(cli, corpus, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("acgpt.common.files.write_atomically", full)
    output = cli(corpus, "-o", tmp_path / "results.json", code=1).stderr
    assert f"error: cannot write {tmp_path}/results.json: No space left on device. Free some space" in output


def test_zero_has_no_sign_in_the_table(capsys):
    answer = {"perplexity": 1.0, "interval": (1.0, 1.0), "mean_nll": 0.0, "tokens": 1, "texts": 2}
    gains = {"training": {"percent": -0.01, "interval": (-0.04, -0.0)}}
    print_perplexities(Page(), units(60, 60) | {"modes": {"training": answer}, "gains": gains, "method": "ac-gpt"})
    assert "0.0 % (0.0 to 0.0)" in (output := capsys.readouterr().out) and "-0.0" not in output
    entry = {"tokens": 3, "nats": 1.0, "nats_without": 1.0, "gain": -1e-9, "interval": (-1e-9, 0.0)}
    print_distances(Page(), {"training": {"distance": {"1": entry}, "run": {}}, "infilling": None})
    assert "0.000 (0.000 to 0.000)" in (output := capsys.readouterr().out) and "-0.000" not in output


def units(count, documents, unit="documents"):
    return {
        "bootstrap": {"unit": unit, "units": count},
        "set": {"documents": documents},
        "modes": {"training": {"": 1}},
    }


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (units(60, 60), "Intervals are over 60 documents."),
        (
            units(276, 12, "texts"),
            "by windows: they resample the 276 texts, because there are fewer than 30 documents (12).",
        ),
        (
            units(276, None, "texts"),
            "by windows: they resample the 276 texts, because the corpus does not tell its documents apart",
        ),
        (units(3, 2, "texts"), "No intervals: they need at least 8 texts, not 3."),
        (units(0, 2, "texts") | {"modes": {"training": None}}, ""),
    ],
    ids=lambda value: str(value)[:40],
)
def test_the_table_says_over_what_its_intervals_are(result, message):
    assert message in describe_intervals(result)


def test_the_gain_by_distance_is_printed_and_drawn(cli, corpus, tmp_path):
    figure = tmp_path / "gains.svg"
    result = cli(corpus, "--figure", figure)
    assert "tokens to the next given one" in result.stdout and "tokens in the run" in result.stdout
    assert "none: no given token follows" in result.stdout
    assert f"wrote {figure}" in result.stderr and figure.read_text().startswith("<?xml")
    drawn = object_of(cli(corpus, "--json"))["by_distance"]["training"]
    for bins in drawn.values():
        counted = sum(entry["tokens"] for entry in bins.values())
        assert counted == object_of(cli(corpus, "--json", "--modes", "training"))["modes"]["training"]["tokens"]
    assert "end the name in a format" in cli(corpus, "--figure", tmp_path / "gains.txt", code=2).stderr
    assert "-no-future among --modes" in cli(corpus, "--figure", figure, "--modes", "training", code=2).stderr
    plain = cli(corpus, "--figure", tmp_path / "none.png", "--method", "gpt", code=2)  # no mode reads the future
    assert "unconditional" in plain.stdout and "next given" not in plain.stdout
    assert "no mode was answered with and without the future" in plain.stderr and not (tmp_path / "none.png").exists()
    cli(corpus, "--figure", tmp_path / "new folder" / "gains.png")
    assert (tmp_path / "new folder" / "gains.png").stat().st_size > 1000


def test_another_placement_than_in_training_is_said(cli, corpus):
    assert "r_max 0.6, set" in cli(corpus).stdout
    asked = cli(corpus, "--conditioning", "{placement: stretches}").stdout
    assert "r_max 0.6, placement stretches, set" in asked
    about = {"set": {"r_max": 0.6, "conditioning": {"r_max": 0.6}}, "trained_r_max": 0.6, "trained_r_maxes": [0.6]}
    trained = {"metadata": {"conditioning": {"parts": [{"kind": "blocks", "placement": "stretches"}]}}}
    assert describe_r_max(about | trained) == "r_max 0.6 as in training (trained with stretches)"
    about["set"]["conditioning"] = trained["metadata"]["conditioning"]
    assert describe_r_max(about | trained) == "r_max 0.6 as in training, placement stretches"


def test_a_corpus_that_has_changed_has_another_set(cli, corpus):
    first = object_of(cli(corpus, "--json"))
    write_corpus(corpus, tiny_tokenizer(), test=TEXT[4:] * 12)
    result = cli(corpus, "--json")
    assert "it is built again" in result.stderr
    assert object_of(result)["set"]["hash"] != first["set"]["hash"]
    assert cli(corpus, "--json").stderr == ""


def test_a_named_set_needs_no_corpus_and_is_not_overwritten(cli, corpus, tmp_path):
    path = tmp_path / "mine.safetensors"
    made = object_of(cli(corpus, "--dataset", path, "--r-max", "0.4", "--json"))
    assert made["set"]["path"] == str(path) and not (corpus / "evaluation").exists()
    before = path.read_bytes()
    again = object_of(cli("--dataset", path, "--json", length=None))
    assert again["modes"] == made["modes"] and again["set"] == made["set"] and again["corpus"] is None
    limited = object_of(cli("--dataset", path, "--json", "--limit", "2", length=None))
    assert limited["set"]["texts"] == 2 and limited["set"]["hash"] != made["set"]["hash"]
    assert "r_max 0.4, not 0.6: omit --r-max" in cli("--dataset", path, "--r-max", "0.6", code=2).stderr
    assert "omit --length" in cli(corpus, "--dataset", path, length="20", code=2).stderr
    assert "conditioning" in cli("--dataset", path, "--conditioning", "{b_max: 1}", code=2).stderr
    with pytest.raises(InputError, match="choose another"):
        dataset_of_corpus(Corpus.open(corpus), path, split="test", length=30)
    assert path.read_bytes() == before


def test_a_named_set_of_another_corpus_is_refused(cli, corpus, tmp_path):
    path, other = tmp_path / "mine.safetensors", tmp_path / "other"
    cli(corpus, "--dataset", path)
    write_corpus(other, tiny_tokenizer(), test=TEXT[4:] * 12)
    assert "is not an evaluation dataset of" in cli(other, "--dataset", path, code=2).stderr
    assert object_of(cli(corpus, "--dataset", path, "--json"))["corpus"] == str(corpus)


def test_a_corpus_that_cannot_be_written_to_is_evaluated_all_the_same(cli, corpus):
    want = object_of(cli(corpus, "--json"))["modes"]
    for file in (corpus / "evaluation").iterdir():
        file.unlink()
    (corpus / "evaluation").rmdir()
    (corpus / "evaluation").write_text("in the way")
    result = cli(corpus, "--json")
    assert "cannot save" in result.stderr and "--dataset" in result.stderr
    assert object_of(result)["modes"] == want


def test_a_method_can_be_forced_and_copies_to_an_untrained_model_are_warned_of(cli, corpus):
    reads = object_of(cli(corpus, "--json"))
    forced = cli(corpus, "--json", "--method", "ac-gpt", model="plain")
    assert "warning: the model does not say that it was trained with ac-gpt" in forced.stderr
    assert object_of(forced)["modes"] == reads["modes"] and object_of(forced)["metadata"] is None
    as_gpt = cli(corpus, "--json", "--method", "gpt")
    assert as_gpt.stderr == "" and object_of(as_gpt)["modes"]["training"] is None


def test_batch_tokens_change_no_result(cli, corpus):
    one, other = (object_of(cli(corpus, "--json", "--batch-tokens", n, "--dtype", "float64")) for n in (1, 10_000))
    assert one["batch_tokens"] == 1
    for mode in MODES:
        assert one["modes"][mode]["mean_nll"] == pytest.approx(other["modes"][mode]["mean_nll"], abs=1e-12)


@pytest.mark.parametrize(
    ("pause", "lines"), [(0.0, ["infilling: 1,000 of 2,000", "infilling: 2,000 of 2,000"]), (9e9, [])]
)
def test_where_nobody_watches_a_line_now_and_then_says_how_far_it_is(monkeypatch, capsys, pause, lines):
    monkeypatch.setattr("acgpt.cli.ui.PAUSE", pause)
    with Bars()("infilling") as update:
        update(1000, 2000, 3)
        update(2000, 2000)
    captured = capsys.readouterr()
    assert captured.err.splitlines() == lines and captured.out == ""
