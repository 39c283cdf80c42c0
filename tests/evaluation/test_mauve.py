"""`acgpt mauve`: what it scores, where it writes that, and what it refuses."""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from generations import LENGTH, write_generations
from models import tiny_model, tiny_tokenizer
from runs import SPECIAL
from typer.testing import CliRunner

from acgpt.cli.main import app
from acgpt.data.corpus import Corpus
from acgpt.errors import InputError
from acgpt.evaluation import mauve as mauve_score
from acgpt.evaluation import reference, score_samples
from acgpt.evaluation.dataset import dataset_of_corpus
from acgpt.evaluation.features import Featurizer
from acgpt.evaluation.generations import Generations, find_generations
from acgpt.evaluation.judge import Judge
from acgpt.evaluation.mauve import check_counts
from acgpt.evaluation.score_samples import Scoring
from acgpt.models.language_model import LanguageModel
from acgpt.models.metadata import Metadata
from acgpt.report.write import make_report

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of features."""
    folder = tmp_path_factory.mktemp("mauve") / "features"
    tiny_model("gpt2", vocabulary=340).save_pretrained(folder)
    tiny_tokenizer(**SPECIAL).save_pretrained(folder)
    return folder


def acgpt(*words: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["mauve", *map(str, words)])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def mauve() -> Callable[[np.ndarray, np.ndarray, int], float]:
    """The package's own score of features."""
    package = pytest.importorskip("mauve")

    def score(p: np.ndarray, q: np.ndarray, seed: int) -> float:
        return package.compute_mauve(p_features=p, q_features=q, seed=seed, **mauve_score.SETTINGS).mauve

    return score


def test_every_file_of_a_folder_is_scored_and_says_with_what(corpus: Path, model: Path, tmp_path: Path, mauve: Any):
    folder = tmp_path / "generated"
    for mode in ("training", "unconditional"):
        write_generations(folder, corpus, mode)
    result = acgpt(folder, corpus, "--split", "validation", "--features", model, "--seeds", 3, "--json")
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert [each["record"]["mode"] for each in answers] == ["unconditional", "training"]  # in the order of the modes
    for each in answers:
        assert json.loads(next(folder.glob(f"{each['name']}.*.mauve.json")).read_text()) == each
        assert each["mauve"]["seeds"] == [0, 1, 2]
        assert each["mauve"]["settings"]["kmeans_max_iter"] == 500 and each["mauve"]["settings"]["kmeans_num_redo"] == 5
        assert (each["texts"], each["scored"]) == (12, "whole text")
        assert each["reference"]["skip"] == 12 * LENGTH and each["reference"]["length"] == LENGTH
        assert each["companions"]["original"]["distinct_1"] < each["companions"]["generated"]["distinct_1"]
        assert each["reference"]["rule"] == "windows" and each["notes"][0].endswith("mostly noise.")
    of_documents = ("--split", "validation", "--rule", "documents", "--length", 4, "--features", model)
    answer = json.loads(acgpt(folder / "training.jsonl", corpus, *of_documents, "--seeds", 1, "--json").stdout)
    assert answer["notes"][0].endswith("The rule windows may find more reference texts.")
    features = Featurizer.load(str(model), "cpu")
    opened, path = Corpus.open(corpus), folder / "training.jsonl"
    ours = features.features([each.text for each in Generations.open(path).samples])
    generated = [Generations.open(path)]
    texts = reference.reference_from_corpus(opened, "validation", length=LENGTH, generated=generated).texts
    expected = [mauve(ours, features.features(texts), seed) for seed in range(3)]
    assert answers[1]["mauve"]["scores"] == pytest.approx(expected, abs=1e-6)
    assert answers[1]["features"] == features.describe()
    whole = [opened.tokenizer().decode(opened.tokens("validation")[i * LENGTH : (i + 1) * LENGTH]) for i in range(12)]
    real = mauve(features.features(whole), features.features(texts), 0)
    assert answers[0]["original"]["scores"][0] == answers[1]["original"]["scores"][0] == pytest.approx(real, abs=1e-6)


def test_the_log_says_which_texts_are_read_and_each_side_ends_once(
    corpus: Path, model: Path, tmp_path: Path, mauve: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("acgpt.cli.ui.PAUSE", 0.0)
    path = write_generations(tmp_path, corpus, "training")
    output = acgpt(path, corpus, "--split", "validation", "--features", model).stderr
    ends = [line for line in output.splitlines() if re.search(r": (\d+) of \1$", line)]
    sides = ("reference", "generated", "original")
    assert [line.partition(": ")[0] for line in ends] == [f"training, features of the {side} texts" for side in sides]


def test_texts_that_are_not_read_to_their_end_are_counted(corpus: Path, tmp_path: Path, mauve: Any):
    tiny_model("gpt2", vocabulary=340, positions=8).save_pretrained(tmp_path / "short")
    tiny_tokenizer(**SPECIAL).save_pretrained(tmp_path / "short")
    path = write_generations(tmp_path, corpus, "training")
    answer = json.loads(acgpt(path, corpus, "--features", tmp_path / "short", "--seeds", 1, "--json").stdout)
    both = answer["texts"] + answer["reference"]["texts"]
    assert f"texts truncated to 8 tokens: {both}." in answer["notes"]


def test_the_asked_part_is_scored_against_what_stood_there(corpus: Path, model: Path, tmp_path: Path, mauve: Any):
    path = write_generations(tmp_path, corpus, "infilling", noise=0.9, samples=2)
    acgpt(path, corpus, "--asked-only", "--features", model, "--seeds", 1)
    content = json.loads(next(tmp_path.glob("*.mauve.json")).read_text())
    features, opened = Featurizer.load(str(model), "cpu"), Corpus.open(corpus)
    fills = ["\n".join(json.loads(line)["fills"]) for line in path.read_text().splitlines()[::2]]
    real = [
        opened.tokenizer().decode(opened.tokens("validation")[i * LENGTH + 8 : (i + 1) * LENGTH - 8]) for i in range(12)
    ]
    assert (content["scored"], content["texts"], content["reference"]["texts"]) == ("asked part", 12, 12)
    expected = mauve(features.features(fills), features.features(real), 0)
    assert content["mauve"]["scores"] == [pytest.approx(expected, abs=1e-6)] and content["mauve"]["std"] is None


def test_several_samples_of_a_text_are_scored_as_one_is(corpus: Path, model: Path, tmp_path: Path, mauve: Any):
    scored = {}
    for samples in (1, 3):
        folder = tmp_path / str(samples)
        path = write_generations(folder, corpus, samples=samples)
        scored[samples] = json.loads(acgpt(path, corpus, "--features", model, "--seeds", 1, "--json").stdout)
    one, three = scored.values()
    assert one["mauve"] == three["mauve"] and one["original"] == three["original"] and three["texts"] == 12
    assert any("uses the first of each" in note for note in three["notes"]) and len(three["notes"]) > len(one["notes"])


def test_the_first_texts_are_scored_as_a_file_of_fewer_is(corpus: Path, model: Path, tmp_path: Path, mauve: Any):
    opened = Corpus.open(corpus)

    def drawn(texts: int) -> Path:
        made, _ = dataset_of_corpus(opened, tmp_path / f"{texts}.set", split="validation", length=LENGTH, limit=texts)
        return write_generations(tmp_path / str(texts), corpus, texts=texts, samples=2, set=made.as_dict())

    fewer, more = drawn(11), drawn(14)
    variants = (
        ("--features", model, "--seeds", 1),
        ("--no-mauve",),
        ("--asked-only", "--features", model, "--seeds", 1),
    )
    for options in variants:
        one = json.loads(acgpt(fewer, corpus, *options, "--json").stdout)
        limited = json.loads(acgpt(more, corpus, *options, "--limit", 11, "--json").stdout)
        assert limited["record"]["set"] == one["record"]["set"] and (one["limit"], limited["limit"]) == (None, 11)
        for key in ("texts", "mauve", "original", "companions", "perplexity", "reference"):
            assert limited[key] == one[key], key
        whole = json.loads(acgpt(more, corpus, *options, "--json").stdout)
        assert whole["texts"] == 14 and whole["companions"] != limited["companions"]
        again = acgpt(more, corpus, *options, "--limit", 11, "--resume", "--json").stdout
        assert json.loads(again) == limited  # with the date of the first
    assert len(list(more.parent.glob("*.mauve.json"))) == 2 * len(variants)
    other = write_generations(tmp_path / "other", corpus)  # whose set is none that acgpt makes
    assert "cannot be derived" in acgpt(other, corpus, "--no-mauve", "--limit", 11, code=2).stderr


def test_no_result_replaces_one_of_another_kind(corpus: Path, model: Path, tmp_path: Path, mauve: Any):
    path = write_generations(tmp_path / "drawn", corpus)
    other = tmp_path / "other"
    tiny_model("gpt2", vocabulary=340, seed=1).save_pretrained(other)
    tiny_tokenizer(**SPECIAL).save_pretrained(other)
    variants = [
        ("--features", model), ("--features", other), ("--features", model, "--split", "validation"),
        ("--features", model, "--asked-only"), ("--features", model, "--judge", other),
        ("--no-mauve",), ("--no-mauve", "--judge", model), ("--no-mauve", "--judge", other),
        ("--no-mauve", "--split", "validation"),
    ]  # fmt: skip
    for options in variants:
        acgpt(path, corpus, *options, *(() if "--no-mauve" in options else ("--seeds", 1)))
    files = sorted(path.parent.glob("training.*.mauve.json"))
    assert len(files) == len(variants)
    acgpt(path, corpus, "--features", model, "--seeds", 2)  # the same again: it takes its own place
    assert sorted(path.parent.glob("training.*.mauve.json")) == files
    results = [json.loads(each.read_text())["mauve"] for each in files]
    assert [each["seeds"] for each in results if each].count([0, 1]) == 1


def test_a_judges_result_goes_where_it_is_told_and_nothing_goes_elsewhere(corpus: Path, model: Path, tmp_path: Path):
    path = write_generations(tmp_path / "drawn", corpus, texts=3)
    existing, words = set(tmp_path.rglob("*")), (path, corpus, "--no-mauve", "--judge", model)
    for name in ("one.json", "new/one.mauve.json", "folder"):
        acgpt(*words, "-o", tmp_path / name)
        made = [each for each in set(tmp_path.rglob("*")) - existing if each.is_file()]
        assert len(made) == 1 and made[0].is_relative_to(tmp_path / name)
        assert json.loads(made[0].read_text())["judge"]["model"] == str(model)
        existing |= set(tmp_path.rglob("*"))
    acgpt(*words, "-o", tmp_path / "one.json")  # a result takes the place of a result
    assert set(tmp_path.rglob("*")) == existing


def test_a_command_that_was_stopped_goes_on_and_its_index_comes_last(
    corpus: Path, model: Path, tmp_path: Path, mauve: Any, monkeypatch: pytest.MonkeyPatch
):
    folder, index, real = tmp_path / "drawn", tmp_path / "drawn" / "scores.json", Scoring.result
    for mode in ("infilling", "training", "unconditional"):
        write_generations(folder, corpus, mode)
    computed: list[str] = []

    def counted(self: Scoring, each: Generations, *unfinished: Any) -> dict[str, Any]:
        computed.append(each.name)
        if len(computed) == stop:
            raise KeyboardInterrupt
        return real(self, each, *unfinished)

    monkeypatch.setattr(Scoring, "result", counted)

    def score(*more: object, code: int = 0) -> list[str]:
        """Run the command, and return which results it computed."""
        computed.clear()
        words = (folder, corpus, "--features", model, "--resume", "--index", index, *(more or ("--seeds", 1)))
        acgpt(*words, code=code)
        return list(computed)

    stop = 2
    assert score(code=130) == ["unconditional", "infilling"] and not index.exists()
    (kept,) = folder.glob("*.mauve.json")
    before, stop = kept.read_bytes(), 0
    assert score() == ["infilling", "training"] and kept.read_bytes() == before
    content = json.loads(index.read_text())
    assert content["kind"] == "scores" and [each["mode"] for each in content["results"]] == [
        "unconditional", "infilling", "training",
    ]  # fmt: skip
    assert {each["result"] for each in content["results"]} == set(map(str, folder.glob("*.mauve.json")))
    assert score() == []
    assert len(score("--seeds", 2)) == 3  # other scores under the same name
    write_generations(folder, corpus, "training", noise=0.5)  # drawn again
    assert score("--seeds", 2) == ["training"]
    kept.write_text('{"kind": "mauve"}')
    assert score("--seeds", 2) == ["unconditional"]
    result = json.loads(acgpt(kept.with_name("unconditional.jsonl"), corpus, "--features", model, "--json").stdout)
    assert computed == ["unconditional"] * 2  # replaced without --resume
    assert result["mauve"]["seeds"] == [0, 1, 2, 3, 4]


def test_a_folder_of_which_nothing_could_be_drawn_is_passed_over(corpus: Path, tmp_path: Path):
    """A method that answers none of the requested modes leaves a folder with only an index."""
    path, empty = write_generations(tmp_path / "ac", corpus), tmp_path / "gpt"
    empty.mkdir()
    (empty / "index.json").write_text('{"kind": "index", "modes": {"training": null}}')
    passed_over = "gpt contains an index, but no generations"
    assert passed_over in acgpt(path.parent, empty, corpus, "--no-mauve").stderr
    assert len(list(path.parent.glob("*.mauve.json"))) == 1
    assert "there are no generations" in acgpt(empty, corpus, "--no-mauve", code=2).stderr
    assert passed_over in acgpt(empty, corpus, "--index", tmp_path / "scores.json").stderr
    assert json.loads((tmp_path / "scores.json").read_text())["results"] == []


def test_a_result_of_a_judge_that_was_trained_again_is_not_kept(corpus: Path, tmp_path: Path):
    path, judge = write_generations(tmp_path, corpus, texts=3), tmp_path / "judge"
    tiny_tokenizer(**SPECIAL).save_pretrained(judge)
    results = []
    for seed in (0, 0, 1):
        tiny_model("gpt2", vocabulary=340, seed=seed).save_pretrained(judge)
        output = acgpt(path, corpus, "--no-mauve", "--judge", judge, "--resume", "--json").stdout
        results.append(json.loads(output))
    first, same, other = results
    assert same == first and other["judge"]["hash"] != first["judge"]["hash"]
    assert other["judge"]["model"] == first["judge"]["model"]
    assert other["judge"]["perplexity"] != first["judge"]["perplexity"]
    (kept,) = tmp_path.glob("*.mauve.json")  # under the same name
    assert json.loads(kept.read_text())["judge"] == other["judge"]
    Metadata("ac-gpt").write(judge)  # the same weights, asked as another kind of model
    again = json.loads(acgpt(path, corpus, "--no-mauve", "--judge", judge, "--json").stdout)
    assert again["judge"]["hash"] != other["judge"]["hash"]
    earlier = {**again, "judge": {key: value for key, value in again["judge"].items() if key != "hash"}}
    kept.write_text(json.dumps({**earlier, "seconds": -1.0}))  # of a version that did not say it
    last = json.loads(acgpt(path, corpus, "--no-mauve", "--judge", judge, "--resume", "--json").stdout)
    assert last["judge"] == again["judge"] and last["seconds"] >= 0


def test_the_bound_of_a_judge_is_marked(corpus: Path, tmp_path: Path):
    path, judge = write_generations(tmp_path, corpus, texts=3), tmp_path / "judge"
    tiny_tokenizer(**SPECIAL).save_pretrained(judge)
    tiny_model("gpt2", vocabulary=340).save_pretrained(judge)
    for method, marks in (("ac-gpt", 0), ("diffusion", 2)):
        Metadata(method, mask_token_id=3).write(judge)
        (line,) = [x for x in acgpt(path, corpus, "--no-mauve", "--judge", judge).stdout.splitlines() if ", judge" in x]
        assert line.count("≤ ") == marks and len(re.findall(r"[\d,]+\.\d\d", line)) == 2


@pytest.mark.parametrize(("generated", "reference", "remedy"), [(9, 20, "generate more"), (20, 9, "rule windows")])
def test_too_few_texts_for_mauve_are_told_with_what_helps(generated: int, reference: int, remedy: str):
    with pytest.raises(InputError, match=rf"there are 9 .*at least 10: .*{remedy}"):
        check_counts(generated, reference)


@pytest.mark.parametrize("files", [1, 3])
def test_a_file_is_read_once_to_be_checked_and_once_to_be_scored(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: int
):
    """A single file is read only once, because the last one is cached."""
    for mode in ("infilling", "training", "unconditional")[:files]:
        write_generations(tmp_path, corpus, mode)
    read, real = [], score_samples.originals
    monkeypatch.setattr(score_samples, "originals", lambda each, corpus: read.append(each.name) or real(each, corpus))
    acgpt(tmp_path, corpus, "--no-mauve", "--resume")
    assert len(read) == (1 if files == 1 else 2 * files)
    results = [json.loads(path.read_text()) for path in tmp_path.glob("*.mauve.json")]
    assert {each["name"]: each["hash"] for each in results} == {
        each.name: each.hash for each in find_generations([tmp_path])
    }
    assert len({json.dumps(each["companions"]["original"]) for each in results}) == files  # each its own


def test_the_embedded_model_judges_without_its_adapter(monkeypatch: pytest.MonkeyPatch):
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr("acgpt.evaluation.judge.load", lambda *named: asked.append(named))
    for name in ("default", "a/folder"):
        Judge.load(name, "cpu")
    assert asked == [("default", False, "cpu"), ("a/folder", None, "cpu")]


def test_without_mauve_a_corpus_need_not_leave_a_reference(corpus: Path, tmp_path: Path):
    texts = len(Corpus.open(corpus).tokens("test")) // LENGTH
    path = write_generations(tmp_path, corpus, texts=texts, split="test")  # prompts from all of the split
    assert "no windows of 31 tokens, after the" in acgpt(path, corpus, "--features", "x", code=2).stderr
    assert not list(tmp_path.glob("*.mauve.json"))
    result = json.loads(acgpt(path, corpus, "--no-mauve", "--json").stdout)
    assert result["reference"]["texts"] == 0 and not result["reference"]["overlaps_prompts"] and not result["notes"]
    other = json.loads(acgpt(path, corpus, "--no-mauve", "--split", "validation", "--json").stdout)
    assert other["reference"]["texts"] > 0 and other["companions"] == result["companions"]
    assert make_report([tmp_path], tmp_path / "report").parts[-1].tables
    assert "tset" in acgpt(path, corpus, "--no-mauve", "--split", "tset", code=2).stderr  # that is still an error


def test_the_bound_of_diffusion_is_no_perplexity(corpus: Path, tmp_path: Path):
    for method in ("diffusion", "mlm", "another"):
        path = write_generations(tmp_path / method, corpus, method=method)
        answer = json.loads(acgpt(path, corpus, "--no-mauve", "--json").stdout)
        assert (answer["perplexity"] is None) == (method == "diffusion")


def test_what_cannot_be_measured_is_found_before_any_model_runs(
    corpus: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(score_samples, "package", lambda: None)
    monkeypatch.setattr(Featurizer, "load", None)
    monkeypatch.setattr(LanguageModel, "log_prob", None)
    good, few = write_generations(tmp_path / "a", corpus), write_generations(tmp_path / "b", corpus, texts=9)
    assert f"{few}: there are 9 generated texts" in acgpt(good, few, corpus, code=2).stderr
    strange = write_generations(tmp_path / "d", corpus, tokenizer_hash="x")
    (tmp_path / "texts.txt").write_text("a\n" * 20)
    network, tokenizer = tiny_model("gpt2", vocabulary=340), tiny_tokenizer(**SPECIAL)
    monkeypatch.setattr(
        "acgpt.evaluation.judge.load",
        lambda *_, **__: LanguageModel(network, tokenizer, metadata=Metadata("ac-gpt")),
    )
    result = acgpt(good, strange, tmp_path / "texts.txt", "--no-mauve", "--judge", model, code=2)
    assert f"{strange}: the judge has another tokenizer" in result.stderr
    assert not list(tmp_path.rglob("*.mauve.json"))


def test_without_the_package_the_rest_is_measured(
    corpus: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = write_generations(tmp_path, corpus)
    real_import = importlib.import_module

    def missing(name: str) -> Any:
        if name == "mauve":
            raise ImportError(name)
        return real_import(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    assert "pip install 'acgpt[mauve]'" in acgpt(path, corpus, "--features", model, code=2).stderr
    result = acgpt(path, corpus, "--no-mauve", "--judge", model, "-o", tmp_path / "out.json")
    assert "whole text" in result.stdout and "repeated 4-grams" in result.stdout
    answer = json.loads((tmp_path / "out.json").read_text())
    assert answer["mauve"] is None and answer["judge"]["measures"] == "whole text"
    assert answer["judge"]["original"]["tokens"] == answer["judge"]["tokens"] == 12 * LENGTH
    own = [x for each in Generations.open(path).samples for x in each.log_probs]
    assert answer["perplexity"] == pytest.approx(math.exp(-sum(own) / len(own)))
