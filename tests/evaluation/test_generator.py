"""Generations: only asked tokens are sampled, and a killed run ends with the same files when resumed."""

from __future__ import annotations

import fcntl
import gc
import json
import sys
from itertools import groupby, pairwise

import numpy as np
import pytest
import torch
from generators import LENGTH, lines_of, model_of, set_of, stop
from models import tiny_tokenizer
from runs import Command, kill_self, replace, write_corpus
from toys import engine_of, query, toy
from typer.testing import CliRunner

from acgpt.cli.main import app
from acgpt.common.files import write_atomically, write_json
from acgpt.data.corpus import Corpus
from acgpt.errors import QueryError
from acgpt.evaluation import generator as module
from acgpt.evaluation.generations import Generations
from acgpt.evaluation.generator import Generator, line_of, make_groups
from acgpt.evaluation.text_metrics import own_perplexity
from acgpt.methods import METHODS, method_of
from acgpt.methods.sigma_gpt import SigmaGptRandom
from acgpt.query.conditioning import Conditioning
from acgpt.query.modes import MODES
from acgpt.query.query import Query
from acgpt.query.sampling import Sampling

CANNOT = {
    "gpt": {"infilling", "training"},
    "fim": {"training"},
}


# ---- what is drawn --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(METHODS))
def test_every_method_draws_what_it_can_answer_and_leaves_the_rest_as_it_was(name, tmp_path):
    lm, asked = model_of(name), set_of()
    generator = Generator(lm, asked, samples=2, prompt=5, sampling=Sampling(temperature=0.8, top_p=0.95, seed=3))
    records = {mode: generator.write(mode, tmp_path) for mode in MODES}
    cannot = {mode for mode, record in records.items() if record is None}
    if name in CANNOT or METHODS[name].abilities.samples_any:
        assert cannot == CANNOT.get(name, set())
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{mode}{end}" for mode, record in records.items() if record for end in (".json", ".jsonl")
    }
    for mode, record in records.items():
        if record is None:
            continue
        lines = lines_of(tmp_path / f"{mode}.jsonl")
        assert [(line["item"], line["sample"]) for line in lines] == [(i, s) for i in range(6) for s in range(2)]
        for line in lines:
            true = asked.tokens[line["item"]]
            roles = "".join("agu"[role] for role in asked.roles(MODES[mode])[line["item"]])
            assert line["roles"] == ("g" * 5 + "a" * 19 if mode == "unconditional" else roles)
            given = np.array(list(line["roles"])) == "g"
            assert np.array_equal(np.array(line["tokens"])[given], true[given])
            assert len(line["log_probs"]) == (~given).sum() and line["seed"] == 3
            assert line["text"] == lm.tokenizer.decode(line["tokens"])
        drawn = {tuple(line["tokens"]) for line in lines}
        assert len(drawn) == 12 and not drawn & {tuple(text) for text in asked.tokens.tolist()}
        assert record["tokens"] == sum(len(line["log_probs"]) for line in lines)
        assert (record["kind"], record["method"], record["mode"]) == ("generations", name, mode)
        assert record["set"]["hash"] == asked.hash and record == json.loads((tmp_path / f"{mode}.json").read_text())
        samples, queries = Generations.open(tmp_path / f"{mode}.jsonl").samples, generator.queries(mode)
        assert [(each.item, each.sample) for each in samples] == [(line["item"], line["sample"]) for line in lines]
        for each in samples:
            assert [role == "a" for role in each.roles] == list(queries[each.item].asked)
            assert sum(map(len, each.runs)) == len(each.log_probs) == len(queries[each.item].asked_positions)
        assert own_perplexity(samples) > 1


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if not method.bound])
def test_log_probs_are_those_of_the_model_itself_in_every_mode(name, tmp_path):
    lm, asked = model_of(name, dtype=torch.float64), set_of(texts=3)
    generator = Generator(lm, asked, prompt=4, sampling=Sampling(temperature=0.5, top_p=0.9))
    for mode in MODES:
        if not generator.write(mode, tmp_path):
            continue
        lines = lines_of(tmp_path / f"{mode}.jsonl")
        queries = [
            Query(line["tokens"], [role == "g" for role in line["roles"]], [role == "a" for role in line["roles"]])
            for line in lines
        ]
        with torch.inference_mode():
            want = method_of(name).log_probs(lm.engine(lm.mask), queries, future=MODES[mode].future)
        for line, scores in zip(lines, want, strict=True):
            assert line["log_probs"] == pytest.approx(scores, abs=2e-6)


@pytest.mark.parametrize("name", list(METHODS))
def test_later_samples_are_those_that_more_samples_would_have_had(name):
    model, choices = toy(name, vocabulary=9), [query(roles) for roles in ("gaaag", "ggaaa", "aaagg")]
    questions = [next(filter(method_of(name).answers, choices)), query("aaaa")]
    with torch.inference_mode():
        all_, some = (
            method_of(name).sample(engine_of(model, name), questions, n, Sampling(seed=2, first=first))
            for n, first in ((5, 0), (2, 3))
        )
    for many, few in zip(all_, some, strict=True):
        assert [tokens.tolist() for tokens, _ in few] == [tokens.tolist() for tokens, _ in many[3:]]
        assert len({tuple(tokens) for tokens, _ in many}) > 1


def test_a_method_of_random_orders_answers_where_there_is_no_future_to_see(tmp_path):
    generator = Generator(model_of("sigma-gpt-random"), set_of(texts=2), options={"order": "random"}, prompt=3)
    assert isinstance(generator.method, SigmaGptRandom) and generator.method.random
    assert {mode for mode in MODES if generator.answers(mode)} == {"unconditional", "infilling", "training"}
    assert generator.write("unconditional", tmp_path)["options"] == {"order": "random"}


def test_what_only_bounds_draws_from_the_past_what_it_cannot_score_from_it(tmp_path):
    lm, question = model_of("diffusion"), Query([5, None, 7, None], [True, False, True, False])
    (sample,) = lm.sample(question, future=False, seed=1)
    assert sample.future is False and [token.position for token in sample.tokens] == [2, 4]
    with pytest.raises(QueryError, match="left to right"):
        lm.log_prob(Query([5, 6, 7, 8], [True, False, True, False]), future=False)
    generator = Generator(lm, set_of(texts=3), prompt=4)
    futures = {mode: generator.write(mode, tmp_path)["config"]["future"] for mode in MODES}
    assert futures == {mode: not mode.endswith("no-future") for mode in MODES}  # a prompt is all that is given


def test_unknown_tokens_stay_unknown(tmp_path):
    lm = model_of("ac-gpt")
    lm.mask = 2
    asked = set_of(texts=4, training=Conditioning.from_dict({"r_max": 0.5, "unknown": 0.5}))
    Generator(lm, asked).write("training", tmp_path)
    hidden = 0
    for line in lines_of(tmp_path / "training.jsonl"):
        hidden += line["roles"].count("u")
        assert [token is None for token in line["tokens"]] == [role == "u" for role in line["roles"]]
        assert line["text"].count("____") == sum(role == "u" for role, _ in groupby(line["roles"]))
    assert hidden
    lm.mask = None
    with pytest.raises(QueryError, match="MASK"):
        Generator(lm, asked).write("training", tmp_path / "other")


def test_a_line_shows_what_was_given_and_what_was_drawn():
    tokenizer = tiny_tokenizer()
    ids = tokenizer("The cat sat on the mat.")["input_ids"]
    words = [tokenizer.decode([token]) for token in ids]
    assert words == ["The", " cat", " sat", " on", " the", " mat", "."]
    roles = "uaguaau"  # what is unknown beside what is asked is one blank
    question = Query(
        [token if role == "g" else None for token, role in zip(ids, roles, strict=True)],
        [role == "g" for role in roles],
        [role == "a" for role in roles],
    )
    words = np.array(tokenizer(" mat the cat")["input_ids"])
    answer = words, np.array([-1.0, -2.0, -3.0])
    (line,) = module.lines_of([(3, 1, 6)], [question], [answer], tokenizer)
    assert line == {
        "item": 3, "sample": 1, "seed": 6, "roles": roles,
        "tokens": [None, words[0], ids[2], None, *words[1:], None],
        "log_probs": [-1.0, -2.0, -3.0], "prompt": "____ sat____", "fills": [" mat", " the cat"],
        "text": "____ mat sat____ the cat____",
    }  # fmt: skip


def test_log_probabilities_are_written_with_six_digits_whatever_they_are_computed_in():
    scores = np.array([-1.1, -2e-7, -12.3456785])
    for dtype in (np.float32, np.float64):
        answer = np.array([1, 2, 3]), scores.astype(dtype)
        (line,) = module.lines_of([(0, 0, 0)], [Query([None] * 3, [False] * 3)], [answer], tiny_tokenizer())
        assert json.dumps(line["log_probs"][:2]) == "[-1.1, -0.0]"
        assert line["log_probs"][2] == round(float(dtype(-12.3456785)), 6)


def test_no_garbage_is_collected_while_lines_are_made_and_then_as_before(tmp_path, monkeypatch):
    seen, make = [], module.lines_of
    monkeypatch.setattr(module, "lines_of", lambda *arguments: seen.append(gc.isenabled()) or make(*arguments))
    for before in (True, False):
        gc.enable() if before else gc.disable()
        try:
            Generator(model_of("gpt"), set_of(texts=1), prompt=4).write("unconditional", tmp_path / str(before))
            assert gc.isenabled() == before
        finally:
            gc.enable()
    monkeypatch.setattr(module, "lines_of", stop)
    with pytest.raises(KeyboardInterrupt):
        Generator(model_of("gpt"), set_of(texts=1), prompt=4).write("unconditional", tmp_path / "stopped")
    assert gc.isenabled() and seen == [False, False]


def test_groups_hold_every_sample_once_and_texts_that_ask_as_much():
    rng = np.random.default_rng(0)
    queries = [Query([item] + [None] * n, [True] + [False] * n) for item, n in enumerate(rng.integers(1, 40, 50))]
    for samples, rows in ((1, 8), (3, 8), (8, 8), (20, 8), (1, 100), (7, 1)):
        groups = make_groups(queries, samples, rows)
        keys = [key for group in groups for key in group.keys]
        assert sorted(keys) == [(item, sample) for item in range(50) for sample in range(samples)]
        assert max(len(group.keys) for group in groups) <= max(rows, 1)
        sizes = [len(queries[item]) for group in groups for item in group.items]
        assert sizes == sorted(sizes, reverse=True)


def test_texts_that_ask_the_same_share_the_numbers_of_its_samples():
    same, alone = Query([None] * 3, [False] * 3), Query([7, None], [True, False])
    for samples, rows in ((1, 8), (3, 8), (20, 8), (7, 1)):
        groups = make_groups([same, alone, same, same], samples, rows)
        keys = [key for group in groups for key in group.keys]
        firsts = {0: 0, 1: 0, 2: samples, 3: 2 * samples}
        assert sorted(keys) == [(item, first + n) for item, first in firsts.items() for n in range(samples)]
        assert max(len(group.keys) for group in groups) <= rows
        for group in groups:
            assert group.items in [[0], [1]]
            assert [number for _, number in group.keys] == list(group.samples)


@pytest.mark.parametrize("name", list(METHODS))
def test_every_text_has_samples_of_its_own_also_where_nothing_is_given(name, tmp_path, monkeypatch):
    lm, asked = model_of(name), set_of(texts=9)
    monkeypatch.setattr(type(method_of(name)), "rows_at_once", lambda *_: 4)
    generator = Generator(lm, asked, prompt=0, samples=2)
    generator.write("unconditional", tmp_path)
    lines = lines_of(tmp_path / "unconditional.jsonl")
    assert [(line["item"], line["sample"]) for line in lines] == [(number // 2, number) for number in range(18)]
    assert len({tuple(line["tokens"]) for line in lines}) == 18
    question, options = generator.queries("unconditional")[8], Sampling(temperature=0.8, top_p=0.95, first=16)
    with torch.inference_mode():
        ((again, _),) = method_of(name).sample(generator.engine, [question], 1, options)[0]
    assert again.tolist() == lines[16]["tokens"]


@pytest.mark.parametrize("name", ["ac-gpt", "mlm", "diffusion"])
def test_calls_are_counted_as_the_network_sees_them(name, tmp_path):
    lm, seen = model_of(name), []
    lm.model.register_forward_hook(lambda *_: seen.append(1))
    record = Generator(lm, set_of(), prompt=10).write("infilling", tmp_path)
    assert record["calls"] == len(seen) > 10
    assert 0 < record["model_seconds"] < record["seconds"] and 0 < record["outside"] < 1


# ---- stopped and gone on --------------------------------------------------------------------------------------------

MANY = ["--samples", "40", "--limit", "10", "--length", str(LENGTH), "--prompt", "20", "--modes", "unconditional"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"), mask=False)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The folder of a tiny model of a method, when it is first asked for."""

    def folder(name):
        path = root / name
        if not path.exists():
            model_of(name).save_pretrained(path)
        return path

    root = tmp_path_factory.mktemp("models")
    return folder


def die_at(number):
    """Kill the process after this many samples."""

    def make(line_of):
        count = iter(range(number))
        return lambda *arguments: line_of(*arguments) if next(count, None) is not None else kill_self()

    replace("acgpt.evaluation.generator:line_of", make)


def test_a_run_that_was_killed_ends_with_the_bytes_of_one_that_was_not(models, corpus, tmp_path, monkeypatch):
    words = ["generate", models("ac-gpt"), corpus, *MANY, "--device", "cpu", "-o"]
    killed = Command(*words, tmp_path / "killed", output=tmp_path / "said", before=die_at, detail=200)
    whole = CliRunner().invoke(app, [*map(str, words), str(tmp_path / "whole")])
    assert (whole.exit_code, killed.wait()) == (0, -9)
    want = (tmp_path / "whole" / "unconditional.jsonl").read_bytes()
    (part,) = (tmp_path / "killed").iterdir()  # and nothing that could be taken for the whole
    content, drawn = part.read_bytes(), []
    existing = content.count(b'{"item": ')
    assert 100 < existing <= 200  # all but what was being drawn
    monkeypatch.setattr(module, "line_of", lambda *arguments: drawn.append(1) or line_of(*arguments))
    for name, left in (("whole", content), ("cut", content[:-300]), ("begun", content[:50])):
        folder = tmp_path / f"{name} part"
        folder.mkdir()
        (folder / part.name).write_bytes(left)
        drawn.clear()
        again = CliRunner().invoke(app, [*map(str, words), str(folder)])
        assert again.exit_code == 0, again.output
        assert (folder / "unconditional.jsonl").read_bytes() == want and want.count(b"\n") == 400
        assert len(drawn) == 400 - existing if name == "whole" else 400 - existing < len(drawn) <= 400
        assert {path.name for path in folder.iterdir()} == {"unconditional.jsonl", "unconditional.json", "index.json"}


@pytest.mark.parametrize("name", ["ac-gpt", "mlm", "diffusion"])
def test_progress_counts_the_tokens_that_are_drawn_and_goes_on_where_it_was(name, tmp_path, monkeypatch):
    generator, seen = Generator(model_of(name), set_of(), samples=8, budget=8 * (LENGTH + 2)), []
    generator.engine.most_rows = 8
    calls = iter(range(20))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "line_of", lambda *a: line_of(*a) if next(calls, None) is not None else stop())
        generator.write("training", tmp_path)
    record = generator.write("training", tmp_path, progress=lambda *numbers: seen.append(numbers))
    existing, total, drawn = seen[0]
    assert drawn == 0 and 0 < existing < total == record["tokens"]
    assert seen[-1] == (total, total, total - existing) and len(seen) > 10
    assert all(a[0] <= b[0] and b[0] - b[2] == existing for a, b in pairwise(seen))


def test_a_part_is_locked_until_all_is_written(tmp_path, monkeypatch):
    seen = []

    def watched(write):
        def watch(path, content):
            with (tmp_path / "unconditional.jsonl.part").open("rb") as file, pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            seen.append(path.name)
            write(path, content)
            if path.suffix == ".json":
                (tmp_path / "unconditional.jsonl.part").unlink()  # as one does who finds both files there

        return watch

    for write in (write_atomically, write_json):
        monkeypatch.setattr(module, write.__name__, watched(write))
    record = Generator(model_of("gpt"), set_of(texts=1)).write("unconditional", tmp_path)
    assert (tmp_path / "unconditional.json").read_text() == json.dumps(record, indent=2) + "\n"
    assert seen == ["unconditional.jsonl", "unconditional.json"]


# ---- the command ----------------------------------------------------------------------------------------------------


def run(*arguments, code=0):
    words = ["generate", *map(str, arguments), "--device", "cpu"]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "150", "NO_COLOR": "1"})
    assert result.exit_code == code, (result.output, result.exception)
    assert "Traceback" not in result.output
    return result


def test_the_command_draws_the_modes_that_were_named_and_says_so(models, corpus, tmp_path):
    out = tmp_path / "new" / "samples"
    arguments = [models("fim"), corpus, "--length", LENGTH, "--limit", 3, "--r-max", 0.4, "-o", out]
    got = json.loads(run(*arguments, "--modes", "training, infilling", "--json").stdout)
    assert list(got["modes"]) == ["infilling", "training"] and got["modes"]["training"] is None
    assert got["modes"]["infilling"]["file"] == "infilling.jsonl" and got["set"]["r_max"] == 0.4
    assert got["sampling"] == {"temperature": 0.8, "top_p": 0.95, "seed": 0, "prompt": 20}
    record = json.loads((out / "infilling.json").read_text())
    assert (record["model"], record["corpus"], record["hardware"] != "") == (str(models("fim")), str(corpus), True)
    assert record["command"] == ["acgpt", *sys.argv[1:]]
    assert record["set"]["split"] == "validation" and set(record["versions"]) >= {"acgpt", "torch", "transformers"}
    from acgpt.evaluation.dataset import dataset_of_corpus

    same_set, _ = dataset_of_corpus(Corpus.open(corpus), split="validation", length=LENGTH, r_max=0.4, limit=3)
    assert record["set"]["hash"] == same_set.hash  # as acgpt evaluate asks it
    table = run(*arguments).stdout
    words = [line.split() for line in table.splitlines() if line]
    rows = {first: rest for first, *rest in words if first in MODES}
    assert set(rows) == set(MODES) and rows["training"] == ["--"] * 5 and "--" not in rows["infilling"]
    assert "cannot be answered by a model of method fim" in table
    assert "already complete, not changed: infilling." in table
    other = tmp_path / "none"
    run(*arguments[:-1], other, "--modes", "training", "--if-possible")
    assert json.loads((other / "index.json").read_text())["modes"] == {"training": None}
    index = json.loads((out / "index.json").read_text())
    assert [mode for mode in MODES if index["modes"][mode] is None] == ["training"]


def test_the_index_of_a_folder_says_what_lies_there_and_what_its_method_cannot(models, corpus, tmp_path):
    arguments = [corpus, "--length", LENGTH, "--limit", 2, "-o", tmp_path / "o"]
    run(models("gpt"), *arguments, "--modes", "training", "--if-possible")
    assert json.loads((tmp_path / "o" / "index.json").read_text())["modes"] == {"infilling": None, "training": None}
    for mode, count in (("training-no-future", 1), ("infilling", 2)):  # another method can, and no file forbids it
        run(models("ac-gpt"), *arguments, "--mode", mode)
        index = json.loads((tmp_path / "o" / "index.json").read_text())
        assert index["method"] == "ac-gpt" and mode in index["modes"] and len(index["modes"]) == count
        assert all((tmp_path / "o" / result["file"]).exists() for result in index["modes"].values())


def test_samples_that_will_all_be_the_same_are_drawn_with_a_warning(models, corpus, tmp_path):
    arguments = [models("ac-gpt"), corpus, "--length", LENGTH, "--limit", 2, "--modes", "infilling", "--temperature", 0]
    assert "warning" not in run(*arguments, "-o", tmp_path / "one").stderr
    assert "warning: " in (output := run(*arguments, "-n", 3, "-o", tmp_path / "o").stderr)
    assert "the 3 samples of a text are identical" in output
    lines = lines_of(tmp_path / "o" / "infilling.jsonl")
    assert len(lines) == 6 and len({tuple(line["tokens"]) for line in lines}) == 2


def test_a_disk_that_refuses_ends_with_code_1_and_what_was_drawn_stays(models, corpus, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    options = ["--length", LENGTH, "--limit", 2, "--modes", "unconditional", "-o", tmp_path / "o"]
    arguments = [models("gpt"), corpus, *options]
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_atomically", full)
        assert "No space left" in run(*arguments, code=1).stderr
    assert [path.name for path in (tmp_path / "o").iterdir()] == ["unconditional.jsonl.part"]
    monkeypatch.setattr(module, "line_of", lambda *_: pytest.fail("drawn again"))
    run(*arguments)
    assert len(lines_of(tmp_path / "o" / "unconditional.jsonl")) == 2


@pytest.mark.parametrize("name", ["unconditional.json", "index.json", "training.jsonl.part"])
def test_a_stray_file_in_the_folder_is_not_overwritten(models, corpus, tmp_path, name):
    (tmp_path / name).write_text("mine\n")
    arguments = [models("gpt"), corpus, "--length", LENGTH, "--limit", 2, "-o", tmp_path]
    assert f"{name} is not a" in run(*arguments, code=2).stderr
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "mine\n")]
