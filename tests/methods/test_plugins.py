"""Methods of other packages: the example is installed, trained, evaluated and reported by acgpt's commands."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from functools import partial
from importlib.metadata import EntryPoint
from itertools import product
from pathlib import Path

import pytest
import torch
import yaml
from runs import SMALL, Command, ended, loss_of, write_corpus
from safetensors.numpy import load_file
from toys import BOS, all_fillings, answer, conditional, counted, engine_of, every_query, p_value, query, toy
from transformers import AutoModelForCausalLM, AutoTokenizer

from acgpt.errors import QueryError
from acgpt.methods import METHODS, Abilities, Method, registry
from acgpt.methods.gpt import Gpt
from acgpt.methods.registry import GROUP, Registry
from acgpt.query.sampling import Sampling

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "right-to-left"
MODULE, NAME = "acgpt_right_to_left", "right-to-left"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder of packages that holds the example, installed as users do it."""
    folder = tmp_path_factory.mktemp("site")
    words = ["install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *words, "--target", folder, EXAMPLE], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """A folder of packages whose methods are unusable, each for a different reason."""
    folder = tmp_path_factory.mktemp("broken")
    package(folder, "fails", "import nowhere_to_be_found", "Fails")
    package(folder, "leaves", "raise SystemExit('needs a licence')", "Leaves")
    package(folder, "number", "Number = 7", "Number")
    package(folder, "taken", "from acgpt.methods.gpt import Gpt\n\n\nclass Taken(Gpt):\n    name = 'ac-gpt'", "Taken")
    package(folder, "nameless", "from acgpt.methods import Method\n\n\nclass Nameless(Method):\n    pass", "Nameless")
    half = "from acgpt.methods import register\nfrom acgpt.methods.gpt import Gpt\n\n\n@register\nclass Half(Gpt):\n"
    package(folder, "half", half + "    name = 'half'\n\n\nraise RuntimeError('no more')", "Half")
    return folder


def package(folder, name, code, entry):
    """Write an installed package: a module, and the metadata that names its entry point."""
    (folder / f"{name}_package.py").write_text(code + "\n")
    metadata = folder / f"{name}_package-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-package\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = {name}_package:{entry}\n")


def prepend(folders):
    sys.path[:0] = folders


def run(*words, output, packages=(), code=0):
    """Run a command in a new process with packages installed beside acgpt, and return its output."""
    command = Command(*words, output=output, before=prepend, detail=list(map(str, packages)))
    with ended(command):
        assert command.wait() == code, command.printed()
    return command.printed()


@pytest.fixture
def right_to_left(site, monkeypatch):
    """The example's class, registered in this process for one test."""
    monkeypatch.syspath_prepend(site)
    monkeypatch.setattr(METHODS, "_methods", dict(METHODS._methods))
    monkeypatch.setattr(METHODS, "_searched", False)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    yield METHODS[NAME]
    monkeypatch.delitem(sys.modules, MODULE, raising=False)


# ---- the example, through the command line ---------------------------------------------------------------------------


def reversed_log_probs(network, bos, text):
    """Oracle: transformers' own forward pass on the reversed text; the log-probability of each token of the text."""
    backwards = torch.tensor([[bos, *reversed(text)]])
    with torch.no_grad():
        scores = network(backwards).logits[0, :-1].double().log_softmax(-1)
    return scores.gather(1, backwards[0, 1:, None])[:, 0].flip(0)


@pytest.fixture(scope="module")
def trained(site, tmp_path_factory):
    """A folder with a corpus, and a run of the example's method from scratch."""
    folder = tmp_path_factory.mktemp("trained")
    write_corpus(folder / "corpus")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(SMALL | {"steps": 60}))
    words = ["train", folder / "recipe.yaml", f"corpus={folder / 'corpus'}", f"output={folder / 'run'}"]
    run(*words, f"method={NAME}", output=folder / "said", packages=[site])
    return folder


@pytest.fixture(scope="module")
def wanted(trained):
    """The oracle, for the model that was trained."""
    model = trained / "run" / "model"
    network = AutoModelForCausalLM.from_pretrained(model)
    return partial(reversed_log_probs, network, json.loads((model / "acgpt.json").read_text())["bos_token_id"])


def test_it_learns_to_predict_what_stands_before_from_what_follows(trained, wanted):
    losses = list(loss_of(trained / "run").values())
    assert losses[-1] < losses[0] - 1
    tokens = next((trained / "corpus").rglob("validation-*.bin")).read_bytes()
    text = torch.frombuffer(bytearray(tokens), dtype=torch.uint16)[:31].tolist()
    backwards, forwards = (wanted(text[::step]).mean().item() for step in (1, -1))
    assert backwards > forwards + 0.5  # it is a model of reversed texts, and no other


def test_it_is_evaluated_exactly_where_it_has_an_answer(trained, site, wanted, tmp_path):
    words = ["evaluate", trained / "run" / "model", trained / "corpus", "--split", "validation", "--limit", "5"]
    words += ["--length", "20", "--dataset", tmp_path / "set.safetensors", "-o", tmp_path / "evaluation.json"]
    run(*words, output=tmp_path / "said", packages=[site])
    content = json.loads((tmp_path / "evaluation.json").read_text())
    assert content["method"] == NAME
    assert {mode for mode, answer in content["modes"].items() if answer} == {"unconditional"}
    texts = load_file(tmp_path / "set.safetensors")["tokens"].tolist()
    scores = torch.cat([wanted(text) for text in texts])
    assert content["modes"]["unconditional"]["tokens"] == len(scores) == 100
    assert content["modes"]["unconditional"]["mean_nll"] == pytest.approx(-scores.mean().item(), abs=1e-5)


def test_it_generates_from_right_to_left_with_the_models_own_log_probabilities(trained, site, wanted, tmp_path):
    words = ["generate", trained / "run" / "model", trained / "corpus", "--split", "validation", "--limit", "3"]
    words += ["--length", "20", "--prompt", "0", "-o", tmp_path / "samples"]
    run(*words, output=tmp_path / "said", packages=[site])
    assert [path.name for path in (tmp_path / "samples").glob("*.jsonl")] == ["unconditional.jsonl"]
    lines = [json.loads(line) for line in (tmp_path / "samples" / "unconditional.jsonl").read_text().splitlines()]
    assert len({tuple(line["tokens"]) for line in lines}) == 3
    for line in lines:
        assert line["log_probs"] == pytest.approx(wanted(line["tokens"]).tolist(), abs=2e-5)


def test_it_answers_templates_and_refuses_those_that_give_the_past(trained, site, wanted, tmp_path):
    model = trained / "run" / "model"
    told = run("score", "{{The cat}} sat on the mat.", "-m", model, "--future", "--json", output=tmp_path / "a",
               packages=[site])  # fmt: skip
    tokens = AutoTokenizer.from_pretrained(model)("The cat sat on the mat.")["input_ids"]
    asked = [token["log_prob"] for token in json.loads(told)["tokens"]]
    assert asked == pytest.approx(wanted(tokens)[: len(asked)].tolist(), abs=1e-5)
    refused = run("score", "The {{cat}} sat.", "-m", model, "--future", output=tmp_path / "b", packages=[site], code=2)
    assert f"method {NAME} cannot answer query 1 of 1: it gives a token before an asked one" in " ".join(
        refused.split()
    )
    drawn = run("infill", "{{_3}} sat on the mat.", "-m", model, "--json", output=tmp_path / "c", packages=[site])
    assert json.loads(drawn)["samples"][0]["text"].endswith(" sat on the mat.")


def test_a_report_has_its_title_and_its_colour(trained, site, tmp_path):
    run("report", trained / "run", "-o", tmp_path / "report", output=tmp_path / "said", packages=[site])
    (row,) = [
        row
        for sizes in json.loads((tmp_path / "report" / "report.json").read_text())["from-scratch"]["splits"].values()
        for rows in sizes.values()
        for row in rows
        if row["from"] == "here"
    ]
    assert row["method"] == "Right to left" and row["unconditional"] is not None and row["training"] is None
    (figure,) = (tmp_path / "report").rglob("main.svg")
    assert "#2f4858" in figure.read_text()


def test_without_its_package_the_run_is_refused_with_the_remedy(trained, tmp_path):
    for words in (
        ["report", trained / "run", "-o", tmp_path / "report"],
        ["infill", "{{_1}}", "-m", trained / "run/model"],
    ):
        output = " ".join(run(*words, output=tmp_path / "said", code=2).split())
        assert f"there is no method '{NAME}'" in output and "install that package" in output


# ---- the example, against enumeration --------------------------------------------------------------------------------


def test_it_answers_all_queries_that_reading_right_to_left_answers_and_no_others(right_to_left):
    model = toy(NAME, vocabulary=3, length=4)
    texts = product(range(3), repeat=4)
    joint = {text: math.exp(reversed_log_probs(model, BOS, text).sum().item()) for text in texts}
    assert sum(joint.values()) == pytest.approx(1)
    answered = 0
    for question in every_query(4, "gau"):
        if not right_to_left.answers(question):
            with pytest.raises(QueryError, match="cannot answer query 1 of 1"):
                answer(right_to_left, model, [question])
            continue
        answered += 1
        (scores,) = answer(right_to_left, model, [question])
        assert sum(scores) == pytest.approx(conditional(joint, question), abs=1e-9), question
    assert answered == 4 + 3 + 2 + 1  # unknown up to some place, then asked up to some place, then given


def test_its_samples_come_as_often_as_it_says(right_to_left):
    model, question = toy(NAME, vocabulary=3, length=4), query("aagg", [0, 0, 2, 1])
    with torch.inference_mode():
        (samples,) = right_to_left.sample(engine_of(model, NAME), [question], 2000, Sampling(seed=1))
    wanted = [math.exp(sum(scores)) for scores in answer(right_to_left, model, list(all_fillings(question, 3)))]
    assert sum(wanted) == pytest.approx(1) and p_value(counted(samples, 3), wanted) > 1e-3


# ---- packages that cannot be used ------------------------------------------------------------------------------------

REASONS = {
    "fails": "nowhere_to_be_found",
    "leaves": "needs a licence",
    "number": "7 is not a subclass of acgpt.methods.Method",
    "taken": "the name ac-gpt is taken by acgpt.methods.ac_gpt.AcGpt",
    "nameless": "Nameless lacks name, title, description, abilities, reads_future, answers, lay_out, score, stream",
    "half": "no more",
}


def test_a_broken_package_is_named_once_and_everything_else_works(site, broken, tmp_path):
    *warnings, listed = run("methods", "--json", output=tmp_path / "a", packages=[site, broken]).splitlines()
    for name, words in REASONS.items():
        (warning,) = [line for line in warnings if f"the method {name} of the package {name}-package" in line]
        assert warning.startswith("warning: ") and words in warning and "uninstall" in warning
    assert len(warnings) == len(REASONS)
    assert list(json.loads(listed)["methods"]) == [*METHODS, NAME]


def test_nothing_is_imported_from_packages_before_methods_are_asked_for(broken, tmp_path):
    output = run("--help", output=tmp_path / "a", packages=[broken])
    assert "warning" not in output and "Usage" in output


def test_a_method_may_bring_a_network_of_its_own(trained, tmp_path):
    """Its class is known to transformers only after the package was imported, which loading a model does."""
    code = """
from acgpt.methods.gpt import Gpt
from transformers import AutoConfig, AutoModelForCausalLM, GPTNeoXConfig, GPTNeoXForCausalLM

class OwnConfig(GPTNeoXConfig):
    model_type = "own-neox"

class OwnNetwork(GPTNeoXForCausalLM):
    config_class = OwnConfig

AutoConfig.register("own-neox", OwnConfig)
AutoModelForCausalLM.register(OwnConfig, OwnNetwork)

class Own(Gpt):
    name = "own"
    network = OwnNetwork
"""
    (tmp_path / "site").mkdir()
    package(tmp_path / "site", "own", code, "Own")
    words = ["train", trained / "recipe.yaml", f"corpus={trained / 'corpus'}", f"output={tmp_path / 'run'}"]
    run(*words, "method=own", "steps=4", output=tmp_path / "said", packages=[tmp_path / "site"])
    model = tmp_path / "run" / "model"
    assert json.loads((model / "config.json").read_text())["model_type"] == "own-neox"
    words = ["score", "The {{cat}}", "-m", model, "--no-future", "--json"]
    told = run(*words, output=tmp_path / "a", packages=[tmp_path / "site"])
    assert json.loads(told)["log_prob"] < 0


# ---- the registry ----------------------------------------------------------------------------------------------------


class Known(Gpt):
    name = "known"


class Late(Gpt):
    name, sort_order = "late", 5


def test_packages_are_looked_up_once_and_not_for_what_is_registered(monkeypatch):
    asked = []

    def entry_points(group):
        asked.append(group)
        return [EntryPoint("late", f"{__name__}:Late", group)]

    monkeypatch.setattr(registry, "entry_points", entry_points)
    methods = Registry()
    methods.register(Known)
    assert methods["known"].name == "known" and asked == []
    assert "late" in methods and "never" not in methods and methods.get("never") is None
    assert list(methods) == ["late", "known"] and len(methods) == 2  # by sort_order
    assert asked == [GROUP]


def test_what_is_no_method_is_refused_when_it_is_registered():
    methods = Registry()
    assert methods.register(Known) is Known and methods.register(Known) is Known  # as when a module is loaded again
    same = type("Other", (Gpt,), {"name": "known"})
    nameless = type("Nameless", (Method,), {"abilities": Abilities(False, False, False, False, False)})
    shouting = type("Shouting", (Gpt,), {"name": "GPT 2"})
    for method, kind, words in (
        (same, ValueError, "known is taken by .*Known"),
        (nameless, TypeError, "Nameless lacks name, title, description, reads_future, answers"),
        (shouting, TypeError, "lower-case words joined by hyphens, not 'GPT 2'"),
        (print, TypeError, "not a subclass"),
    ):
        with pytest.raises(kind, match=words):
            methods.register(method)


def test_the_page_shows_the_package_that_these_tests_install():
    page = (ROOT / "docs" / "how-to" / "add-a-method.md").read_text(encoding="utf-8")
    shown = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert (EXAMPLE / f"{MODULE}.py").read_text(encoding="utf-8") in shown
    (entry,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    assert entry.strip() in (EXAMPLE / "pyproject.toml").read_text(encoding="utf-8")
