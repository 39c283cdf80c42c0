"""The documents say what the code does: their examples are run, their tables come from the result files."""

from __future__ import annotations

import ast
import doctest
import functools
import importlib
import json
import os
import re
import runpy
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from programs import program
from runs import SMALL
from snippets import LANGUAGES, OTHERS, PAGES, ROOT, called, mistakes, run_page, runnable, snippets, working_in

import acgpt
from acgpt.report import write
from acgpt.training import recipe

RUN = [page for page in PAGES if runnable(page)]


# ---- snippets -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def short_recipes(tmp_path_factory):
    """Shorten the recipe tiny-cpu to a second, and leave the others unchanged."""
    folder = shutil.copytree(recipe.BUILT_IN, tmp_path_factory.mktemp("recipes") / "recipes")
    kept = {key: value for key, value in SMALL.items() if key != "lr"}
    content = (
        yaml.safe_load((folder / "tiny-cpu.yaml").read_text("utf-8")) | kept | {"steps": 2, "warmup": 1, "length": 63}
    )
    (folder / "tiny-cpu.yaml").write_text(f"# Short.\n{json.dumps(content)}", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def loaded():
    """A stand-in for `acgpt.load` that loads the embedded model once."""
    load = acgpt.load
    once = functools.cache(lambda: load(device="cpu"))
    return lambda model=None, adapter=None, *rest, **more: (
        once() if model in (None, "default") and adapter is None else load(model, adapter, *rest, **more)
    )


@pytest.fixture
def short(monkeypatch, offline, short_recipes, loaded):
    """Shorten what takes long: training, figures, loading the embedded model."""
    monkeypatch.setattr(recipe, "BUILT_IN", short_recipes)
    monkeypatch.setattr(write, "find_spec", lambda name: None)
    monkeypatch.setattr("acgpt.models.loading.load", loaded)


@pytest.fixture(scope="module")
def text():
    """Some English."""
    return "\n\n".join(path.read_text("utf-8") for page, path in PAGES.items() if page.startswith("docs/how-to")) * 4


@pytest.fixture(scope="module")
def made(tmp_path_factory, text, short_recipes):
    """A corpus and a model that was trained on it, which most pages begin from."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "mine.txt").write_text(text, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch, working_in(folder):
        patch.setattr(recipe, "BUILT_IN", short_recipes)
        acgpt.prepare("mine.txt", "data/mine", validation=0.1, train_tokenizer=512)
        acgpt.train("tiny-cpu", corpus="data/mine", output="runs/mine")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN)
def test_the_snippets_of_a_page_run_and_print_what_it_says(page, short, made, shelf, tmp_path):
    """Run a page in a folder with a text, a corpus and a model, unless the page creates them."""
    shutil.copy(made / "mine.txt", tmp_path)
    code = "\n".join(each.code for each in runnable(page))
    for path in ("data/mine", "runs/mine"):
        if path in code and not re.search(rf"(-o |output=){path}\b", code):
            shutil.copytree(made / path, tmp_path / path)
    if "adapters/infill" in code:
        for source, path in (("base", "base"), ("fill", "adapters/infill"), ("any", "adapters/scattered")):
            shutil.copytree(shelf.folder / source, tmp_path / path)
    with working_in(tmp_path):
        run_page(page)


def test_most_pages_have_snippets_that_run():
    assert {"README.md", "docs/index.md", "docs/tutorial.md", "docs/how-to/fill-gaps.md"} <= set(RUN)
    assert sum(len(runnable(page)) for page in RUN) > 25


@pytest.mark.parametrize("page", PAGES)
def test_every_snippet_is_of_a_known_language_and_calls_options_that_exist(page):
    for each in snippets(page):
        location = f"{page}:{each.line}"
        assert each.language in LANGUAGES | OTHERS, f"{location}: {each.language} is neither run nor known not to be"
        for path in re.findall(r"\b(?:tests|docs|how-to)/\S+\.\w+", each.reason):
            assert (ROOT / path).exists() or (ROOT / "docs" / path).exists(), f"{location}: there is no {path}"
        if each.language in ("sh", "console"):
            for words in called(each.code):
                assert mistakes(words) == [], f"{location}: acgpt {' '.join(words)}"
        elif each.language == "python" and each.reason:
            compile(doctest.script_from_examples(each.code) if ">>>" in each.code else each.code, location, "exec")


def test_a_call_with_an_option_that_does_not_exist_is_noticed():
    assert [*called("time acgpt train a.yaml --resume  # --x\nacgpt methods | parallel -j 4")] == [
        ["train", "a.yaml", "--resume"], ["methods"],
    ]  # fmt: skip
    assert mistakes(["train", "a.yaml", "--resumed"]) == ["--resumed"]
    assert mistakes(["draw", "conditioning", "-o", "a.png"]) == [] and mistakes(["trian", "a.yaml"]) == ["trian"]


def test_the_examples_in_docstrings_print_what_they_say():
    for name in (
        "common.files", "common.options", "display.table", "models.adapters", "query.query", "query.template",
        "report.part", "report.tables",
    ):  # fmt: skip
        results = doctest.testmod(importlib.import_module(f"acgpt.{name}"))
        assert results.attempted > 0 and results.failed == 0, name


def test_what_the_pages_import_is_there():
    lines = [
        line
        for path in PAGES.values()
        for line in re.findall(r"\bfrom acgpt\S* import [\w, ]+\w", path.read_text("utf-8"))
    ]
    assert len(lines) > 5
    for line in lines:
        exec(line, {})


@pytest.mark.slow
def test_each_example_of_the_web_page_is_filled_with_the_words_meant(loaded):
    """With the page's limit the best fill is the first of the words that the page ranks there."""
    folder = ROOT / "src/acgpt/serving/page"
    literal = re.search(r"EXAMPLES = (\{.*?^\});", (folder / "examples.js").read_text("utf-8"), re.S | re.M)[1]
    examples = ast.literal_eval(re.sub(r"^  (\w+):", r"'\1':", literal, flags=re.M)).values()
    limit = int(re.search(r'id="longest".* value="(\d+)"', (folder / "index.html").read_text("utf-8"))[1])
    templates = [f"{acgpt.escape(before)}{{{{_}}}}{acgpt.escape(after)}" for before, _, after in examples]
    found = loaded().fill(templates, n=1, max_tokens=limit, future=True)
    assert [best.fills for (best,) in found] == [(words[0],) for _, words, _ in examples]
    assert len(templates) == 5


# ---- tables ---------------------------------------------------------------------------------------------------------


def test_the_tables_of_the_benchmarks_page_come_from_the_result_files():
    check = program("render.py", "--check")
    assert check.returncode == 0, check.stderr


def test_the_tables_of_options_are_those_that_the_code_declares():
    check = program("option_tables.py", "--check", folder=ROOT / "docs")
    assert check.returncode == 0, check.stderr


# ---- the site -------------------------------------------------------------------------------------------------------


def test_every_relative_link_of_the_documents_leads_somewhere():
    pages = [*ROOT.glob("*.md"), *(path for path in PAGES.values())]
    generated = {ROOT / "docs" / "changelog.md", ROOT / "docs" / "reference" / "commands.md"}
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#\s]+)", page.read_text("utf-8"))]
    local = [(page, link) for page, link in links if "://" not in link and not link.startswith("mailto:")]
    assert len(local) > 50
    targets = [(page, link, (page.parent / link).resolve()) for page, link in local]
    assert [(page.name, link) for page, link, path in targets if not path.exists() and path not in generated] == []


def test_every_page_has_a_place_in_the_site():
    class Loader(yaml.SafeLoader):
        """YAML loader for mkdocs.yml, which contains a tag for a Python function."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)
    navigation = yaml.load((ROOT / "mkdocs.yml").read_text("utf-8"), Loader)["nav"]

    def places(entry: object) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        return [place for each in (entry if isinstance(entry, list) else entry.values()) for place in places(each)]

    listed = [*places(navigation)]
    assert len(listed) == len({*listed})
    pages = {str(path.relative_to(ROOT / "docs")) for path in PAGES.values() if path.name != "README.md"}
    assert {*listed} == pages | {"changelog.md", "reference/commands.md"}


def test_the_command_reference_has_every_option_of_every_command():
    import typer

    from acgpt.cli.main import app

    page = runpy.run_path(str(ROOT / "docs" / "hooks.py"))["command_reference"]()
    main = typer.main.get_command(app)
    for name, command in main.commands.items():
        section = page.partition(f"\n## acgpt {name}\n")[2].partition("\n## acgpt ")[0]
        assert section, name
        for each in command.params:
            if getattr(each, "hidden", False):
                continue
            flags = [flag for flag in (*each.opts, *each.secondary_opts) if flag.startswith("-")]
            assert all(flag in section for flag in flags), each.name
    assert "| `--4bit` | `four_bits` |" in page and "| `--quiet, -q` | |" in page


@pytest.mark.parametrize(
    ("name", "content", "loads"),
    [
        ("index.html", '<a href="https://a.org/x.js">a</a><link rel="canonical" href="https://a.org/">', False),
        ("index.html", '<script src="https://cdn.a.org/x.js"></script>', True),
        ("index.html", '<link rel="stylesheet" href="//cdn.a.org/x.css">', True),
        ("index.html", '<link rel="preconnect" href="https://fonts.a.org">', True),
        ("index.html", '<img src="http://a.org/x.png">', True),
        ("index.html", "<style>@import 'https://a.org/x.css'</style>", True),
        ("index.html", "<script>import('https://a.org/x.mjs')</script>", True),
        ("x.css", "a { background: url(https://a.org/x.woff2) }", True),
        ("x.css", "a { background: url(x.woff2) } /* https://a.org */", False),
        ("x.js", 'load("https://a.org/x.js")', True),
        ("x.js", "// https://a.org/x.js", False),
    ],
)
def test_what_a_site_loads_from_another_host_is_noticed(name, content, loads, tmp_path):
    (tmp_path / "index.html").write_text("<p>", encoding="utf-8")
    (tmp_path / name).write_text(content, encoding="utf-8")
    check = program("check_site.py", tmp_path, folder=Path(ROOT / "docs"))
    assert check.returncode == int(loads), check.stderr


# ---- what runs by itself --------------------------------------------------------------------------------------------


def test_the_hosted_checks_cover_each_supported_python_and_call_targets_that_exist():
    check, release = (
        yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text("utf-8")) for name in ("check", "release")
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    supported = re.findall(r":: (3\.\d+)", "\n".join(project["classifiers"]))
    matrix = check["jobs"]["check"]["strategy"]["matrix"]
    assert matrix["python"] == supported and [name.partition("-")[0] for name in matrix["os"]] == [
        "ubuntu", "macos", "windows",
    ]  # fmt: skip
    runs = [step.get("run", "") for job in (check, release) for each in job["jobs"].values() for step in each["steps"]]
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"][0]["hooks"]
    called = re.findall(r"^make (?:\w+=\S+ )*(\S+)$", "\n".join([*runs, hooks[0]["entry"]]), re.M)
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M)
    assert {"check", "test", "quick"} == set(called) <= set(targets) and called.count("check") == 3
    (shell,) = (run for run in runs if "GITHUB_REF_NAME" in run)
    tags = (f"v{acgpt.__version__}", "v99.0", "")
    tried = [subprocess.run(["sh", "-c", shell], cwd=ROOT, env=os.environ | {"GITHUB_REF_NAME": tag}) for tag in tags]
    assert [done.returncode for done in tried] == [0, 1, 1]
