"""The program that builds the default adapter's corpus: licences, filters, overlap with benchmarks, repeatable output.

All archives are made here; nothing is downloaded.
"""

from __future__ import annotations

import gzip
import importlib
import io
import json
import random
import tarfile
import zipfile
from pathlib import Path

import programs
import pytest

from acgpt.data.tokenizer import load
from acgpt.errors import InputError

FOLDER = Path(__file__).parent
NAMES = """amber basin cedar delta ember fjord grove haven inlet jetty knoll ledge maple north ocean prairie quartz
ridge shore tundra upland valley willow xenon yarrow zephyr arch bridge castle dome"""


@pytest.fixture
def corpus(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("default_corpus")


@pytest.fixture
def packages(corpus):
    return corpus.packages


@pytest.fixture
def readers(corpus):
    return importlib.import_module("corpus_readers")


@pytest.fixture
def overlap(corpus):
    return importlib.import_module("overlap")


@pytest.fixture(scope="module")
def tokenizer():
    return load("gpt2", mask_token=False).backend_tokenizer


def words(seed: int, count: int) -> str:
    return " ".join(random.Random(seed).choices(NAMES.split(), k=count))


def prose(seed: int, lines: int) -> str:
    """Return lines of prose in which hardly any run of ten tokens is repeated."""
    return "\n".join(words(1000 * seed + i, 24) for i in range(lines))


def code(seed: int) -> str:
    names = words(seed, 12).split()
    body = "\n".join(f"def {name}_{i}(value):\n    return compute_{name}(value)\n" for i, name in enumerate(names))
    return f'"""Functions about {names[0]} and {names[1]}."""\n\n{body}'


def wheel(folder: Path, name: str, licence: str, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nLicense: {licence}\n"
        for path, text in {f"{name}-1.0.dist-info/METADATA": metadata, **files}.items():
            archive.writestr(path, text)


def tarball(path: Path, files: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


def entry(registry: str, name: str, licence: str, kind: str, **more: object) -> dict[str, object]:
    return {"registry": registry, "name": name, "version": "1.0", "licence": licence, "kind": kind, **more}


@pytest.fixture
def inputs(tmp_path):
    """A list of two packages in a cache, and a few articles."""
    cache = tmp_path / "cache"
    modules = {f"alpha/module_{i}.py": code(i) for i in range(12)}
    wheel(cache / "pypi", "alpha", "MIT", modules | {"alpha/copy.py": code(3).replace("\n", "\n\n")})
    scripts = {f"package/lib/file_{i}.js": code(50 + i).encode() for i in range(6)}
    tarball(cache / "npm" / "beta-1.0.tgz", {"package/package.json": b'{"license": "ISC"}', **scripts})
    listed = [entry("pypi", "alpha", "MIT", "python"), entry("npm", "beta", "ISC", "code")]
    (tmp_path / "packages.json").write_text(json.dumps(listed))
    with gzip.open(tmp_path / "wiki.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"text": prose(i, 30)}) + "\n" for i in range(10))
    return tmp_path


def run(inputs: Path, output: str, *arguments: object):
    fixed = ["--packages", inputs / "packages.json", "--cache", inputs / "cache", "--tokenizer", "gpt2"]
    fixed += ["--no-standard-library", "--kinds", "wikipedia", "python", "code", "--held-out", 0.2]
    return programs.program(
        "default_corpus.py",
        *fixed,
        "--wikipedia",
        inputs / "wiki.jsonl.gz",
        *arguments,
        "-o",
        inputs / output,
        folder=FOLDER,
    )


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# ---- overlap --------------------------------------------------------------------------------------------------------


def planted(tokenizer, secret: list[int], length: int) -> str:
    """Return a long text, one line of which has the first `length` tokens of a secret between other words."""
    line = " maple" * 3 + tokenizer.decode(secret[:length]) + " valley" * 3
    text = prose(1, 20) + "\n" + line + "\n" + prose(2, 20)
    ids = tokenizer.encode(text).ids
    assert sum(ids[i : i + length] == secret[:length] for i in range(len(ids))) == 1
    return text


def test_a_planted_run_of_ten_tokens_is_found_and_one_of_nine_is_not(overlap, tokenizer):
    secret = tokenizer.encode(" the quick brown fox jumps over one lazy dog near our old garden gate").ids
    runs = overlap.Runs(tokenizer, [tokenizer.decode(secret)])
    ten, nine = runs.clean([planted(tokenizer, secret, 10), planted(tokenizer, secret, 9)])
    assert nine.pieces == [(planted(tokenizer, secret, 9), nine.tokens)]
    assert [piece for piece, _ in ten.pieces] == [prose(1, 20), prose(2, 20)]
    assert all(count == len(tokenizer.encode(piece).ids) for piece, count in ten.pieces)


def test_a_short_document_with_a_run_and_a_copy_are_dropped_whole(overlap, tokenizer):
    secret = " the quick brown fox jumps over one lazy dog near our old garden gate"
    runs = overlap.Runs(tokenizer, [secret, prose(3, 20)])
    short, copy, other = runs.clean([f"{words(1, 30)}{secret}", prose(3, 20) + "\n" + prose(4, 40), prose(5, 40)])
    assert short.pieces == copy.pieces == []
    assert len(other.pieces) == 1
    counts = overlap.summary([short, copy, other])
    assert counts == {"documents dropped": 2, "tokens dropped": short.tokens + copy.tokens}


@pytest.mark.parametrize(
    "text",
    ["                    \n" * 12, "= - = - ( ) [ ] { } ; : , . + * / % ^ &" * 3, " the" * 30, "1 2 3 4 5 6 7 8 " * 4],
)
def test_trivial_runs_do_not_count(overlap, tokenizer, text):
    assert len(overlap.Runs(tokenizer, [text])) == 0


def test_runs_agree_with_a_search_by_brute_force(overlap, tokenizer):
    against = [words(7, 200), words(8, 200)]
    text = words(9, 60) + " " + " ".join(against[0].split()[50:80]) + " " + words(10, 60)
    runs = overlap.Runs(tokenizer, against)
    known = {tuple(ids[i : i + 10]) for a in against for ids in [tokenizer.encode(a).ids] for i in range(len(ids) - 9)}
    letters = {i: any(map(str.isalpha, tokenizer.decode([i]))) for run in known for i in run}
    known = {run for run in known if sum(letters[i] for i in set(run)) >= overlap.WORDS}
    ids = tokenizer.encode(text).ids
    expected = [i for i in range(len(ids) - 9) if tuple(ids[i : i + 10]) in known]
    assert expected
    assert runs.shared(runs.encode([text])[0]).tolist() == expected
    assert len(runs) == len(known)


def test_benchmarks_are_read_in_their_raw_forms(overlap, tmp_path):
    row = {"prompt": "def f(x):\n", "canonical_solution": "    y = x\n", "suffix": "    return y\n", "test": "t"}
    with gzip.open(tmp_path / "humaneval.jsonl.gz", "wt") as file:
        file.write(json.dumps(row) + "\n" + json.dumps({**row, "test": "u"}) + "\n")
    assert overlap.read_texts(tmp_path / "humaneval.jsonl.gz") == ["def f(x):\n    y = x\n    return y\n"]
    wikitext = " = Title = \n\n The well @-@ known river . \n"
    (tmp_path / "wiki.test.raw").write_text(wikitext)
    assert overlap.read_texts(tmp_path / "wiki.test.raw") == [wikitext, "Title\n\nThe well-known river."]
    (tmp_path / "empty.jsonl").write_text('{"body": "x"}\n')
    with pytest.raises(InputError, match="no text"):
        overlap.read_texts(tmp_path / "empty.jsonl")


# ---- filters and samples --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "text", "why"),
    [
        ("a.py", code(1), None),
        ("a.py", "x = 1\n", "small"),
        ("a.py", code(1) * 400, "large"),
        ("a.py", code(1) + "\x00", "not text"),
        ("a.min.js", code(1), "minified"),
        ("a.js", "a(b);" * 80, "minified"),
        ("a.js", code(1) * 8 + "a(b);" * 250, "long line"),
        ("dist/a.js", code(1), "derived"),
        ("LICENSE.md", code(1), "licence"),
        ("a.md", "The MIT License (MIT)\n\nPermission is hereby granted, free of charge. " * 8, "licence"),
        ("a.py", '"""Under the GNU General Public License."""\n' + code(1), "copyleft"),
        ("a.go", "// Code generated by a tool. DO NOT EDIT.\n" + code(1), "generated"),
        ("a.json", "[1.25, 2.50, 3.75],\n" * 40, "data"),
    ],
)
def test_files_are_left_out_for_the_right_reason(readers, path, text, why):
    assert readers.unfit(path, text) == why


def test_texts_are_drawn_evenly_over_groups_of_different_sizes(corpus):
    sizes = {"small": 5, "middle": 40, "big": 400}
    documents = [corpus.Document("x" * 100, f"{g}{i}", "MIT", g) for g, size in sizes.items() for i in range(size)]
    chosen, rest = corpus.draw_evenly(documents, 6_500)
    assert len(chosen) + len(rest) == len(documents)
    assert {g: sum(d.group == g for d in chosen) for g in sizes} == {"small": 5, "middle": 30, "big": 30}


def test_paragraphs_that_are_not_translated_are_left_out(readers, packages):
    package = packages.Package("npm", "p", "1.0", "MIT", "languages")
    german = "Dieser Absatz wurde schon übersetzt. " * 10
    pages = {"en-US": [("a", ["Still in English.", "Translated."])], "de-DE": [("a", ["Still in English.", german])]}
    (document,) = readers.translated(package, pages)
    assert (document.text, document.group) == (german, "de")


def test_messages_of_catalogues_are_read(readers, packages):
    messages = [f"Dies ist die {name} Meldung auf Deutsch." for name in words(1, 12).split()]
    text = 'msgid ""\nmsgstr ""\n"Project-Id-Version: one two three\\n"\n\n'
    text += "".join(f'msgid "Message {i}"\nmsgstr ""\n"{m[:9]}"\n"{m[9:]}\\n"\n\n' for i, m in enumerate(messages))
    member = packages.Member("a/locale/de/LC_MESSAGES/a.po", len(text), lambda: io.BytesIO(text.encode()))
    (document,) = readers.read_catalogues(packages.Package("pypi", "a", "1.0", "BSD", "languages"), [member])
    assert document.text.split("\n") == list(dict.fromkeys(messages))


# ---- licences -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stated", "licence", "permitted"),
    [
        ("MIT", "MIT", True),
        ("The MIT License (MIT)", "MIT", True),
        ("BSD-3-Clause AND MIT", "BSD", True),
        ("GPL-2.0+ or CC-BY-SA-3.0", "CC-BY-SA-3.0", True),
        ("Apache License, Version 2.0", "Apache-2.0", True),
        ("MIT (c) 2015 A. Author, B. Author", "MIT", True),
        ("MIT", "BSD", False),
        ("MIT AND GPL-3.0", "MIT", False),
        ("LGPL-2.1", "MIT", False),
        ("UNKNOWN", "MIT", False),
    ],
)
def test_licences_are_recognised(packages, stated, licence, permitted):
    assert packages.permits(stated, licence) is permitted


def test_a_licence_that_differs_from_the_list_is_an_error_that_names_the_package(inputs):
    wheel(inputs / "cache" / "pypi", "alpha", "GPL-3.0", {"alpha/a.py": code(1)})
    done = run(inputs, "out")
    assert done.returncode == 2
    message = done.stderr.splitlines()[-1]
    assert message.startswith("error: pypi:alpha@1.0: the metadata states the licence 'GPL-3.0', not MIT.")
    assert not (inputs / "out" / "train-python.jsonl").exists()


def test_files_of_a_debian_source_under_another_licence_are_left_out(packages, tmp_path):
    copyright = "Format: https://example.org\n\nFiles: *\nCopyright: A\nLicense: Expat\n\n"
    copyright += "Files: src/x.c\n lib/*\nCopyright: B\nLicense: GPL-2+\n\nFiles: src/y.c\nLicense: BSD-3-clause\n"
    folder = tmp_path / "debian-source"
    sources = {f"p-1.0/{name}": b"int x;" for name in ("a.c", "src/x.c", "src/y.c", "lib/z/z.c", "src/x.cc")}
    tarball(folder / "p_1.0.orig.tar.gz", sources)
    tarball(folder / "p_1.0-1.debian.tar.gz", {"debian/copyright": copyright.encode()})
    names = [f" {'0' * 64} 1 {name}" for name in ("p_1.0.orig.tar.gz", "p_1.0-1.debian.tar.gz")]
    (folder / "p_1.0-1.dsc").write_text("Checksums-Sha256:\n" + "\n".join(names) + "\n")
    package = packages.Package("debian-source", "p", "1.0-1", "MIT", "code", files=("*.c", "*.cc"))
    assert [member.path for member in packages.members(package, tmp_path)] == ["a.c", "src/y.c", "src/x.cc"]
    with pytest.raises(InputError, match=r"debian-source:p@1\.0-1.*not ISC"):
        next(packages.members(packages.Package("debian-source", "p", "1.0-1", "ISC", "code"), tmp_path))


def test_the_projects_own_list_is_valid_and_evaluates_on_other_packages(corpus, packages):
    listed = packages.read_list(FOLDER / "default_corpus.json")
    assert {package.kind for package in listed} == set(corpus.EVALUATION) | set(corpus.SHARES) - {"wikipedia"}
    assert all(package.reader in corpus.READERS for package in listed)
    trained = {package.name.lower() for package in listed if package.kind in corpus.SHARES}
    assert not trained & {package.name.lower() for package in listed if package.kind in corpus.EVALUATION}


def test_debian_packages_are_read(packages, tmp_path):
    tarball(tmp_path / "data.tar.gz", {"./usr/share/p/a.txt": b"text"})
    data = (tmp_path / "data.tar.gz").read_bytes()

    def member(name: str, content: bytes) -> bytes:
        header = f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode()
        return header + content + b"\n" * (len(content) % 2)

    archive = b"!<arch>\n" + member("debian-binary", b"2.0") + member("data.tar.gz", data)
    (tmp_path / "p_1.0_all.deb").write_bytes(archive)
    files = {file.path: file.read() for file in packages.read_archive(tmp_path / "p_1.0_all.deb")}
    assert files == {"usr/share/p/a.txt": b"text"}


# ---- the whole program ----------------------------------------------------------------------------------------------


def test_the_corpus_has_disjoint_parts_without_overlap_and_its_manifest_counts_them(inputs, tokenizer):
    secret = "\n".join(prose(4, 30).splitlines()[10:12])
    (inputs / "benchmark.txt").write_text(secret)
    done = run(inputs, "out", "--against", inputs / "benchmark.txt")
    assert done.returncode == 0, done.stderr
    manifest = json.loads((inputs / "out" / "manifest.json").read_text())
    for kind, record in manifest["kinds"].items():
        parts = {part: rows(inputs / "out" / f"{part}-{kind}.jsonl") for part in ("train", "heldout")}
        for part, documents in parts.items():
            assert record[part]["documents"] == len(documents)
            assert record[part]["bytes"] == sum(len(row["text"].encode()) for row in documents)
            assert record[part]["tokens"] == sum(len(tokenizer.encode(row["text"]).ids) for row in documents)
        assert not {row["source"] for row in parts["train"]} & {row["source"] for row in parts["heldout"]}
        assert parts["heldout"]
        assert not any(line in row["text"] for rows_ in parts.values() for row in rows_ for line in secret.split("\n"))
    assert manifest["kinds"]["wikipedia"]["overlap"]["documents cut"] == 1
    assert manifest["kinds"]["python"]["filtered"] == {"copy": 1}
    assert {package["name"] for package in manifest["packages"]} == {"alpha", "beta"}
    licences = {row["source"].partition("/")[0]: row["licence"] for row in rows(inputs / "out" / "train-code.jsonl")}
    assert licences == {"npm:beta@1.0": "ISC"}


def test_the_same_seed_gives_the_same_files_and_another_seed_others(inputs):
    for output, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert run(inputs, output, "--seed", seed).returncode == 0
    names = [path.name for path in (inputs / "a").glob("*.jsonl")]
    assert len(names) == 6
    assert all((inputs / "a" / name).read_bytes() == (inputs / "b" / name).read_bytes() for name in names)
    assert any((inputs / "a" / name).read_bytes() != (inputs / "c" / name).read_bytes() for name in names)


def test_an_interrupted_run_leaves_no_partial_file_and_keeps_finished_kinds(inputs, corpus, monkeypatch):
    write = corpus.write_atomically

    def interrupted(path, lines):
        if path.name == "train-python.jsonl":

            def failing():
                yield from lines[:2]
                raise KeyboardInterrupt

            return write(path, failing())
        return write(path, lines)

    monkeypatch.setattr(corpus, "write_atomically", interrupted)
    arguments = ["default_corpus.py", "--packages", inputs / "packages.json", "--cache", inputs / "cache"]
    arguments += ["--tokenizer", "gpt2", "--no-standard-library", "--kinds", "wikipedia", "python", "code"]
    arguments += ["--held-out", "0.2", "--wikipedia", inputs / "wiki.jsonl.gz", "-o", inputs / "out"]
    monkeypatch.setattr("sys.argv", list(map(str, arguments)))
    with pytest.raises(KeyboardInterrupt):
        corpus.main()
    assert not (inputs / "out" / "train-python.jsonl").exists()
    assert not (inputs / "out" / "manifest.json").exists()
    first = (inputs / "out" / "train-wikipedia.jsonl").stat().st_mtime_ns
    monkeypatch.undo()
    assert run(inputs, "out").returncode == 0
    assert (inputs / "out" / "train-wikipedia.jsonl").stat().st_mtime_ns == first
    assert (inputs / "out" / "manifest.json").exists()
    assert run(inputs, "clean").returncode == 0
    for path in (inputs / "clean").glob("*.jsonl"):
        assert path.read_bytes() == (inputs / "out" / path.name).read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--against", "absent.txt"], "absent.txt"),
        (["--wikipedia", "absent.jsonl"], "absent.jsonl"),
        (["--packages", "absent.json"], "absent.json"),
        (["--held-out", "2"], "--held-out"),
    ],
)
def test_bad_input_gives_one_line_and_exit_code_2(inputs, arguments, message):
    done = run(inputs, "out", *arguments)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if "error:" in line]
    assert message in line
    assert not (inputs / "out").exists()
