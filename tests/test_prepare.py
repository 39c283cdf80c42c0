"""From text to shards: every token against one tokenised by hand, and the same bytes whatever interrupts the work."""

from __future__ import annotations

import fcntl
import gzip
import json
import lzma
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from dataclasses import replace
from hashlib import blake2b, sha256
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import ByteLevelBPETokenizer, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from typer.testing import CliRunner

import acgpt
from acgpt import corpus_prepare, corpus_rows, sources
from acgpt.cli import app
from acgpt.corpus import Corpus
from acgpt.corpus_encode import in_order
from acgpt.corpus_prepare import Progress, prepare
from acgpt.corpus_shards import write_json
from acgpt.errors import InputError, OutputError
from acgpt.loading import embedded_default
from acgpt.metadata import tokenizer_hash

SOURCE = str(Path(acgpt.__file__).parents[1])
EOS = "<|endoftext|>"
TEXTS = [
    " = Valkyria = \n \n Senjō no Valkyria 3 was released in 2011 . \n\n = = Gameplay = = \n It is a game . ",
    "",
    "One line.",
    "  leading, trailing  \r\n\r\n\t\r\nlast\u2028not a line end\x0bnor this\n\u00a0\n",
    f"it says {EOS} here",
    "日本語 🙂 naïve\ncafé",
    " \n ",
    "x",
] * 5
NUMBERS = [sha256(b"%d" % number).hexdigest() for number in range(300)]
MANY = [text for pair in zip(TEXTS, NUMBERS, strict=False) for text in pair]


@pytest.fixture(scope="module")
def tokenizer():
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(TEXTS, vocab_size=400, special_tokens=[EOS], show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, bos_token=EOS, eos_token=EOS)


@pytest.fixture(scope="module")
def named(tokenizer, tmp_path_factory):
    """The folder of the tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def run(named, tmp_path):
    """Prepare with the small tokenizer in this process."""

    def run(names, folder=None, **options):
        if "train_tokenizer" not in options:
            options = {"tokenizer": named, **options}
        return prepare(names, folder or tmp_path / "corpus", **{"workers": 1, **options})

    return run


@pytest.fixture
def small(monkeypatch):
    """Batches so small that little text makes many of them."""
    for module in (corpus_rows, sources):
        monkeypatch.setattr(module, "BATCH", 300)
    for name, value in {"READ": 64, "READ_COMPRESSED": 20, "CUT": 100}.items():
        monkeypatch.setattr(corpus_rows, name, value)
    monkeypatch.setattr(sources, "ROWS", 3)


def ids(tokenizer, text):
    """The tokens of a text, from the model underneath: it knows no special tokens, so EOS in a text is text."""
    plain = Tokenizer(tokenizer.backend_tokenizer.model)
    plain.pre_tokenizer = tokenizer.backend_tokenizer.pre_tokenizer
    return plain.encode(text).ids


def by_lines(tokenizer, texts):
    found = []
    for text in texts:
        for line in text.split("\n"):
            line = line[:-1] if line.endswith("\r") else line
            if line.strip():
                found += [*ids(tokenizer, line), tokenizer.eos_token_id]
    return found


def by_documents(tokenizer, texts):
    return [token for text in texts if text.strip() for token in [*ids(tokenizer, text), tokenizer.eos_token_id]]


ORACLES = {"lines": by_lines, "documents": by_documents}


def jsonl(path, texts, field="text"):
    path.write_text("".join(json.dumps({field: text, "id": 1}) + "\n" for text in texts))
    return path


def parquet(path, texts, field="text"):
    import pyarrow
    from pyarrow.parquet import write_table

    write_table(pyarrow.table({"id": range(len(texts)), field: texts}), path, row_group_size=7)
    return path


def compress(path):
    """The file under all names it may have."""
    import zstandard

    raw = path.read_bytes()
    half = len(raw) // 2
    ways = {".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstandard.ZstdCompressor().compress}
    found = []
    for suffix, way in ways.items():
        found.append(path.with_name(path.name + suffix))
        found[-1].write_bytes(way(raw[:half]) + b"\0" * 40 + way(raw[half:]) + b"\0" * 4)  # two streams, padded
    return [path, *found]


def everything(folder):
    """All files under a folder and what is in them."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def tokens(corpus, split="train"):
    return corpus.tokens(split)[:].tolist()


# ---- tokens ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("convention", ORACLES)
def test_every_format_gives_the_tokens_of_its_texts(run, small, tokenizer, tmp_path, convention):
    expected = ORACLES[convention](tokenizer, TEXTS)
    files = [*compress(jsonl(tmp_path / "a.jsonl", TEXTS)), parquet(tmp_path / "a.parquet", TEXTS)]
    for file in files:
        corpus = run(file, tmp_path / f"{file.name}.corpus", convention=convention)
        assert tokens(corpus) == expected, file.name
        assert corpus.manifest["documents"] == sum(bool(text.strip()) for text in TEXTS)
        assert corpus.manifest["bytes"] == sum(len(text.encode()) for text in TEXTS)


@pytest.mark.parametrize("convention", ORACLES)
def test_a_text_file_is_one_document(run, small, tokenizer, tmp_path, convention):
    text = "\n".join(TEXTS)
    plain = tmp_path / "a.txt"
    plain.write_bytes(text.encode())
    for file in compress(plain):
        corpus = run(file, tmp_path / f"{file.name}.corpus", convention=convention)
        assert tokens(corpus) == ORACLES[convention](tokenizer, [text]), file.name
        assert (corpus.manifest["documents"], corpus.manifest["bytes"]) == (
            1,
            len(text.encode()) + (convention == "lines"),
        )


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(st.text(st.sampled_from(" \n\r\tab.é🙂|<"), max_size=30), min_size=1, max_size=12),
    convention=st.sampled_from(sorted(ORACLES)),
)
def test_any_texts_give_their_tokens(run, small, tokenizer, tmp_path_factory, texts, convention):
    folder = tmp_path_factory.mktemp("any")
    expected = ORACLES[convention](tokenizer, texts)
    if not expected:
        with pytest.raises(InputError, match="hold no text"):
            run(jsonl(folder / "a.jsonl", texts), folder / "corpus", convention=convention)
        return
    corpus = run(jsonl(folder / "a.jsonl", texts), folder / "corpus", convention=convention, shard_bytes=1024)
    assert tokens(corpus) == expected


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=st.lists(st.text(st.sampled_from(" \n\r\tab's1.é"), max_size=40), min_size=20, max_size=60))
def test_a_long_text_cut_in_pieces_has_the_tokens_of_the_whole(small, gpt2, words):
    text = "".join(words) + "the end\n\n of " * 60
    pieces = list(corpus_rows.running_blocks([text.encode()]))
    assert len(pieces) > 1
    assert b"".join(pieces) == text.encode()
    assert [token for piece in pieces for token in ids(gpt2, piece.decode())] == ids(gpt2, text)


def test_a_text_without_any_place_to_cut_is_cut_between_characters(small):
    text = "é日本語。" * 300
    pieces = list(corpus_rows.running_blocks([text.encode()]))
    assert len(pieces) > 1
    assert "".join(piece.decode() for piece in pieces) == text


def test_bytes_that_are_no_characters_at_all_are_cut_somewhere(run, small, tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"fine\n" + b"\x80" * 10 * corpus_rows.BATCH)
    assert b"".join(corpus_rows.running_blocks([file.read_bytes()])) == file.read_bytes()
    with pytest.raises(InputError, match="line 2: byte 1 of it is not UTF-8"):
        run(file, convention="documents")


def test_byte_order_marks_are_no_text(run, tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo", encoding="utf-8-sig")
    (tmp_path / "b.jsonl").write_text('{"text": "three"}\n', encoding="utf-8-sig")
    corpus = run([tmp_path / "a.txt", tmp_path / "b.jsonl"])
    assert tokens(corpus) == by_documents(tokenizer, ["one\ntwo", "three"])


def test_another_field_can_be_named(run, tokenizer, tmp_path):
    for number, write in enumerate((jsonl, parquet)):
        file = write(tmp_path / f"{number}.{write.__name__}", TEXTS, field="body")
        assert tokens(run(file, tmp_path / f"{number}", field="body")) == by_documents(tokenizer, TEXTS)


def test_shards_are_little_endian_and_as_long_as_asked(run, tokenizer, tmp_path):
    corpus = run(jsonl(tmp_path / "a.jsonl", MANY), shard_bytes=1024)
    expected = by_documents(tokenizer, MANY)
    files = sorted((tmp_path / "corpus").glob("*.bin"))
    assert [file.name for file in files] == [f"train-{number:05}.bin" for number in range(len(files))]
    assert b"".join(file.read_bytes() for file in files) == b"".join(token.to_bytes(2, "little") for token in expected)
    sizes = [file.stat().st_size for file in files]
    assert len(sizes) > 2 and set(sizes[:-1]) == {1024} and 0 < sizes[-1] <= 1024
    manifest = json.loads((tmp_path / "corpus" / "corpus.json").read_text())
    shards = manifest["splits"]["train"]["shards"]
    assert [shard["sha256"] for shard in shards] == [sha256(file.read_bytes()).hexdigest() for file in files]
    assert [shard["tokens"] for shard in shards] == [size // 2 for size in sizes]
    assert manifest["splits"]["train"]["tokens"] == manifest["tokens"] == len(expected)
    assert (manifest["dtype"], manifest["vocabulary_size"]) == ("uint16", len(tokenizer))
    assert (manifest["bos_token_id"], manifest["eos_token_id"]) == (tokenizer.eos_token_id,) * 2
    assert manifest["tokenizer_hash"] == tokenizer_hash(tokenizer) == tokenizer_hash(corpus.tokenizer())
    (source,) = manifest["sources"]
    assert source["sha256"] == sha256((tmp_path / "a.jsonl").read_bytes()).hexdigest()
    assert source["bytes"] == (tmp_path / "a.jsonl").stat().st_size


@pytest.mark.parametrize("size, dtype", [(65536, "uint16"), (65537, "uint32")])
def test_a_large_vocabulary_takes_four_bytes(run, tmp_path, size, dtype):
    words = {EOS: 0} | {f"w{number}": number for number in range(1, size)}
    backend = Tokenizer(models.WordLevel(words, unk_token=EOS))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS).save_pretrained(tmp_path / "large")
    file = jsonl(tmp_path / "a.jsonl", [f"w1 w{size - 1}"])
    corpus = run(file, tokenizer=str(tmp_path / "large"))
    assert corpus.manifest["dtype"] == dtype
    assert tokens(corpus) == [1, size - 1, 0]
    assert (tmp_path / "corpus" / "train-00000.bin").stat().st_size == 3 * (2 if dtype == "uint16" else 4)


# ---- splits and sources ---------------------------------------------------------------------------------------------


def held_out(seed, part, number, share):
    return int.from_bytes(blake2b(f"{seed}/{part}/{number}".encode(), digest_size=8).digest(), "big") / 2**64 < share


@pytest.mark.parametrize("seed", [0, 7])
def test_documents_are_held_out_as_documented(run, small, tokenizer, tmp_path, seed):
    texts = [f"document {number}\nline two of {number}" for number in range(120)]
    files = [jsonl(tmp_path / "a.jsonl", texts[:70]), jsonl(tmp_path / "b.jsonl", texts[70:])]
    corpus = run(files, validation=0.25, seed=seed, convention="lines")
    places = [(0, number) for number in range(70)] + [(1, number) for number in range(50)]
    chosen = [held_out(seed, *place, 0.25) for place in places]
    assert 15 < sum(chosen) < 50
    for split, wanted in (("train", False), ("validation", True)):
        expected = by_lines(tokenizer, [text for text, out in zip(texts, chosen, strict=True) if out == wanted])
        assert tokens(corpus, split) == expected
    assert corpus.splits["validation"].documents == sum(chosen)


def test_bad_rows_do_not_move_what_is_held_out(run, tmp_path):
    texts = [f"document {number}" for number in range(60)]
    whole = run(jsonl(tmp_path / "a.jsonl", texts), tmp_path / "whole", validation=0.3)
    rows = (tmp_path / "a.jsonl").read_text().splitlines()
    kept = next(number for number in range(60) if not held_out(0, 0, number, 0.3))
    rows[kept] = "not JSON"
    (tmp_path / "b.jsonl").write_text("\n".join(rows))
    rest = run(tmp_path / "b.jsonl", tmp_path / "rest", validation=0.3, skip_bad=True)
    assert tokens(rest, "validation") == tokens(whole, "validation")


def test_sources_go_to_the_splits_they_are_named_for(run, tokenizer, tmp_path):
    for name in "abcd":
        (tmp_path / f"{name}.txt").write_text(f"text {name}")
    named = [tmp_path / "b.txt", f"test={tmp_path}/a.txt", f"train={tmp_path}/d.txt", f"extra_2={tmp_path}/c.txt"]
    corpus = run(named)
    found = {split: tokens(corpus, split) for split in corpus.splits}
    assert found == {
        "train": by_documents(tokenizer, ["text b", "text d"]),
        "test": by_documents(tokenizer, ["text a"]),
        "extra_2": by_documents(tokenizer, ["text c"]),
    }


def test_folders_and_globs_stand_for_their_files_in_order(run, tokenizer, tmp_path):
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    (folder / ".git").mkdir()
    for name in ("c.txt", "a.txt", "sub/b.txt", ".hidden.txt", ".git/x.txt", "README.md"):
        (folder / name).write_text(f"text {name}")
    assert tokens(run(folder, tmp_path / "1")) == by_documents(
        tokenizer, ["text a.txt", "text c.txt", "text sub/b.txt"]
    )
    assert tokens(run(f"{folder}/*.txt", tmp_path / "2")) == by_documents(tokenizer, ["text a.txt", "text c.txt"])


def test_sources_that_make_no_sense_are_refused_before_anything_is_written(run, tmp_path):
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "a.txt").write_text("a")
    jsonl(tmp_path / "mixed" / "b.jsonl", ["b"])
    (tmp_path / "none").mkdir()
    (tmp_path / "a.pdf").write_text("a")
    (tmp_path / "a.parquet.gz").write_text("a")
    a = f"{tmp_path}/mixed/a.txt"
    for names, problem in {
        (): "no source",
        (f"{tmp_path}/absent.txt",): "there is no file, folder or glob .*absent.txt",
        (f"test={tmp_path}/absent.txt",): "there is no file, folder or glob .*absent.txt",
        (f"{tmp_path}/*.csv",): "there is no file, folder or glob",
        (f"{tmp_path}/a.pdf",): "those that can: .txt",
        (f"{tmp_path}/a.parquet.gz",): "those that can: .txt",
        (f"{tmp_path}/none",): "holds none of the files",
        (f"{tmp_path}/mixed",): "1 txt, 1 jsonl",
        (a, f"test={a}"): "named twice",
        (a, f"{tmp_path}/mixed/*.txt"): "named twice",
        ("test=fineweb",): "fineweb has no split 'test'; its splits: train",
    }.items():
        with pytest.raises(InputError, match=problem):
            run(list(names))
        assert not (tmp_path / "corpus").exists()


def test_options_that_make_no_sense_are_refused_with_the_remedy(run, tmp_path):
    file = str(jsonl(tmp_path / "a.jsonl", TEXTS))
    text = tmp_path / "a.txt"
    text.write_text("a")
    for names, options, problem in (
        (file, {"convention": "words"}, "not one of lines, documents"),
        *((file, {"validation": share}, "from 0 to 0.5 .*, not ") for share in (0.999, 1.0, 99, -0.1, float("nan"))),
        (file, {"seed": -1}, "seed must be a whole number from 0 .*, not -1"),
        (file, {"seed": 2**32}, "seed must be a whole number"),
        (file, {"limit": 0}, "limit on documents must be at least 1"),
        ([file, f"validation={text}"], {"validation": 0.1}, "leave --validation out"),
        (f"test={file}", {"validation": 0.1}, "no train split"),
        (file, {"workers": 0}, "at least one worker"),
        (file, {"shard_bytes": 10}, "at least 1,024 bytes"),
        (file, {"train_tokenizer": 256}, "at least 257 tokens"),
        (file, {"train_tokenizer": 300, "tokenizer": "gpt2"}, "either named or trained"),
        (file, {"tokenizer": str(tmp_path / "absent")}, "there is no folder .*absent"),
        (file, {"tokenizer": str(tmp_path)}, "cannot load the tokenizer"),
    ):
        with pytest.raises(InputError, match=problem):
            run(names, **options)
        assert not (tmp_path / "corpus").exists()


def test_too_few_documents_to_hold_any_out_is_said(run, tmp_path):
    file = jsonl(tmp_path / "a.jsonl", ["a"])
    with pytest.warns(UserWarning, match=r"no document was held out: .*--validation 0.0001.*validation=PATH"):
        corpus = run(file, validation=0.0001)
    assert len(corpus.tokens("validation")) == 0
    seed = next(seed for seed in range(100) if held_out(seed, 0, 0, 0.5))
    with pytest.warns(UserWarning, match="every document was held out"):
        corpus = run(file, tmp_path / "other", validation=0.5, seed=seed)
    assert len(corpus.tokens("train")) == 0


@pytest.mark.parametrize("convention", ORACLES)
@pytest.mark.parametrize("seed", [0, 3])
def test_pieces_of_a_few_text_files_are_held_out(run, small, tokenizer, tmp_path, monkeypatch, convention, seed):
    monkeypatch.setattr(corpus_prepare, "PIECE", 200)
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    texts = ["".join(f"{number} naïve {word}\n" for number, word in enumerate(NUMBERS[start::2])) for start in (0, 1)]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text)
    chosen = 0.1  # with seed 0 a whole file would be, half of what there is
    assert held_out(0, 0, 0, chosen) and not held_out(3, 0, 0, chosen)
    corpus = run(files, validation=chosen, seed=seed, convention=convention)
    expected = {"train": [], "validation": []}
    for part, text in enumerate(texts):
        at, before = 0, None
        for line in text.splitlines(keepends=True):
            split = "validation" if held_out(seed, part, at // 200, chosen) else "train"
            if split != before:
                expected[split].append("")
            expected[split][-1] += line
            at, before = at + len(line.encode()), split
    assert len(expected["validation"]) > 5
    decode = corpus.tokenizer().decode
    for split, stretches in expected.items():
        got = decode(tokens(corpus, split)).split(EOS)[:-1]
        if convention == "lines":
            assert got == "".join(stretches).splitlines()
        else:  # which may be cut a line earlier or later where a block of what is read ends
            assert sum(map(len, got)) == pytest.approx(sum(map(len, stretches)), rel=0.2)
            assert len({*got} & {*stretches}) > 0.5 * len(stretches)
    everywhere = decode(tokens(corpus)) + decode(tokens(corpus, "validation"))
    assert sorted(everywhere.replace(EOS, " " * (convention == "lines")).split()) == sorted(
        "".join(texts).split()
    )  # all of it, and once
    again = run(
        [*compress(files[0])[1:2], files[1]], tmp_path / "again", validation=chosen, seed=seed, convention=convention
    )
    assert again.hash == corpus.hash


def test_many_text_files_are_held_out_as_wholes(run, tmp_path):
    for number in range(30):
        (tmp_path / f"{number:02}.txt").write_text(f"text {number}")
    corpus = run(f"{tmp_path}/*.txt", validation=0.2)
    assert corpus.splits["validation"].documents == sum(held_out(0, part, 0, 0.2) for part in range(30)) > 0
    assert "piece" not in corpus.manifest["recipe"]


def test_a_tokenizer_learns_nothing_from_pieces_that_are_held_out(run, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_prepare, "PIECE", 10)
    (tmp_path / "a.txt").write_text(
        "".join("xyzxyzxyz\n" if held_out(0, 0, n, 0.3) else "abcabcabc\n" for n in range(99))
    )
    with pytest.warns(UserWarning, match="too small"):
        words = run(tmp_path / "a.txt", train_tokenizer=300, validation=0.3).tokenizer().get_vocab()
    assert "abc" in words and "xy" not in words


@pytest.mark.parametrize("limit", [1, 25, 40, 47, 1000])
def test_a_limit_takes_the_first_documents_of_train(run, small, tokenizer, tmp_path, limit):
    texts = [f"document {number}" for number in range(60)]
    test = jsonl(tmp_path / "test.jsonl", texts)
    (tmp_path / "c.txt").write_text("one\nand the same\n" * 100)
    sources = [jsonl(tmp_path / "a.jsonl", texts[:30]), f"test={test}", parquet(tmp_path / "b.parquet", texts[30:50])]
    sources += [tmp_path / "c.txt", jsonl(tmp_path / "d.jsonl", texts[50:])]
    ordered = [*texts[:50], (tmp_path / "c.txt").read_text(), *texts[50:]]
    corpus = run(sources, limit=limit)
    assert tokens(corpus) == by_documents(tokenizer, ordered[:limit])
    assert tokens(corpus, "test") == by_documents(tokenizer, texts)
    assert corpus.manifest["limit"] == corpus.manifest["recipe"]["limit"] == limit
    with pytest.raises(InputError, match=rf"limit \({limit} there, None here\).*--overwrite"):
        run(sources)
    whole = run(sources, tmp_path / "whole")
    assert whole.manifest["limit"] is None and "limit" not in whole.manifest["recipe"]


def test_what_is_held_out_of_a_limit_is_what_is_held_out_of_all(run, tokenizer, tmp_path):
    texts = [f"document {number}" for number in range(60)]
    corpus = run(jsonl(tmp_path / "a.jsonl", texts), validation=0.3, limit=40)
    chosen = [text for number, text in enumerate(texts[:40]) if held_out(0, 0, number, 0.3)]
    assert tokens(corpus, "validation") == by_documents(tokenizer, chosen)


def test_a_tokenizer_learns_only_from_what_a_limit_leaves(run, tmp_path):
    file = jsonl(tmp_path / "a.jsonl", ["abcabcabc"] * 20 + ["xyzxyzxyz"] * 20)
    with pytest.warns(UserWarning, match="too small"):
        words = run(file, train_tokenizer=300, limit=20).tokenizer().get_vocab()
    assert "abc" in words and "xy" not in words


# ---- rows that cannot be used ---------------------------------------------------------------------------------------

GOOD = b'{"text": "good"}\n'
BAD_ROWS = {
    b'{"text": "a"': ("line 2", "not JSON"),
    b'["a"]': ("line 2", "not a JSON object"),
    b'{"body": "a", "id": 3}': ("line 2", "no field 'text' (its fields: 'body', 'id'); --field"),
    b'{"text": null}': ("line 2", "'text' is null"),
    b'{"text": 3}': ("line 2", "'text' is a int"),
    b'{"text": "caf\xe9"}': ("line 2", "not UTF-8"),
    b'{"text": "\\ud83d"}': ("line 2", "surrogate"),
    b"[" * 100_000: ("line 2", "not JSON"),
}


def skipped(corpus):
    return corpus.manifest["skipped"], [source["skipped"] for source in corpus.manifest["sources"]]


@pytest.mark.parametrize("row", BAD_ROWS, ids=[why for _, why in BAD_ROWS.values()])
def test_a_bad_row_is_named_or_skipped_and_counted(run, tokenizer, tmp_path, row):
    first = jsonl(tmp_path / "a.jsonl", ["fine"])
    file = tmp_path / "b.jsonl"
    file.write_bytes(GOOD + row + b"\n\n" + GOOD + row)
    where, why = BAD_ROWS[row]
    with pytest.raises(InputError, match=re.escape(f"{file}, {where}: ")) as caught:
        run([first, file])
    assert why in str(caught.value) and "--skip-bad" in str(caught.value)
    corpus = run([first, file], skip_bad=True)  # goes on in the same folder
    assert tokens(corpus) == by_documents(tokenizer, ["fine", "good", "good"])
    assert skipped(corpus) == (2, [0, 2])
    with pytest.raises(InputError, match=r"without 2 rows.*--skip-bad"):
        run([first, file])


@pytest.mark.parametrize("convention", ORACLES)
def test_a_line_of_text_that_is_not_utf8_is_named_or_skipped(run, small, tokenizer, tmp_path, convention):
    file = tmp_path / "a.txt"
    lines = [b"line %d" % number for number in range(100)]
    lines[70] = b"caf\xe9"
    file.write_bytes(b"\n".join(lines))
    with pytest.raises(InputError, match=r"a\.txt, line 71: byte 4 of it is not UTF-8"):
        run(file, convention=convention)
    corpus = run(file, convention=convention, skip_bad=True)
    text = "\n".join(line.decode() for number, line in enumerate(lines) if number != 70)
    assert tokens(corpus) == ORACLES[convention](tokenizer, [text])
    assert skipped(corpus) == (1, [1])


def test_what_stands_before_a_bad_row_is_kept(run, small, tmp_path):
    file = jsonl(tmp_path / "a.jsonl", NUMBERS)
    file.write_bytes(file.read_bytes() + b"{\n")
    with pytest.raises(InputError, match="line 301"):
        run(file)
    seen = []
    run(file, skip_bad=True, watch=lambda progress: seen.append(progress.documents))
    assert next(documents for documents in seen if documents) > 290


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
@pytest.mark.parametrize("harm", ["truncated", "corrupt"])
def test_a_damaged_compressed_file_is_named_or_read_up_to_there(run, small, tokenizer, tmp_path, suffix, harm):
    plain = jsonl(tmp_path / "a.jsonl", NUMBERS)
    compress(plain)
    first = jsonl(tmp_path / "first.jsonl", ["fine"])
    file = tmp_path / f"a.jsonl{suffix}"
    raw = file.read_bytes()
    half = len(raw) // 2
    file.write_bytes(raw[: half - 30] if harm == "truncated" else raw[: half - 100] + b"\xff" * 60 + raw[half - 40 :])
    with pytest.raises(InputError, match=rf"{file}, line \d+: ") as caught:
        run([first, file])
    line = int(re.search(r"line (\d+)", str(caught.value))[1])
    corpus = run([first, file], skip_bad=True)
    expected = by_documents(tokenizer, ["fine", *NUMBERS[: line - 1]])
    if suffix != ".zst":  # which is unpacked by the 128 kB, more than there are
        assert line > 100
    if harm == "truncated":
        assert "the file is damaged from here on: it ends too early" in str(caught.value)
        assert "leave the rest of the file out with --skip-bad" in str(caught.value)
        assert tokens(corpus) == expected
        assert skipped(corpus) == (1, [0, 1])
        said = f"line {line}: the file is damaged from here on: it ends too early; the rest of the file is left out"
        assert [source["damaged"] for source in corpus.manifest["sources"]] == [None, said]
        assert corpus.manifest["damaged"] == 1
        with pytest.raises(InputError, match=r"without 1 rows .*, and what follows in 1 damaged files; --skip-bad"):
            run([first, file])
    else:  # some of what follows may pass for text: checksums come at the end
        assert tokens(corpus)[: len(expected)] == expected
        assert skipped(corpus)[1][1] > 0


@pytest.mark.parametrize("convention", ORACLES)
def test_a_damaged_text_file_is_read_up_to_there(run, tokenizer, tmp_path, convention):
    plain = tmp_path / "a.txt"
    plain.write_text("\n".join(NUMBERS))
    file = compress(plain)[1]
    file.write_bytes(file.read_bytes()[:-3000])
    with pytest.raises(InputError, match=r"line \d+: the file is damaged from here on") as caught:
        run(file, convention=convention)
    line = int(re.search(r"line (\d+)", str(caught.value))[1])
    found = tokens(run(file, convention=convention, skip_bad=True))
    assert line > 150
    expected = ORACLES[convention](tokenizer, ["\n".join(NUMBERS[: line - 1])])
    if convention == "lines":
        assert found == expected
    else:  # what there is of the last line belongs to it
        assert found[: len(expected) - 1] == expected[:-1]
        assert found.index(tokenizer.eos_token_id) == len(found) - 1


def test_a_damaged_parquet_file_is_named_or_skipped(run, tokenizer, tmp_path):
    good = parquet(tmp_path / "a.parquet", ["fine"])
    cut = parquet(tmp_path / "b.parquet", TEXTS)
    cut.write_bytes(cut.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"b\.parquet, as a whole: the file is damaged"):
        run([cut, good])
    corpus = run([cut, good], skip_bad=True)
    assert tokens(corpus) == by_documents(tokenizer, ["fine"])
    assert skipped(corpus) == (1, [1, 0])
    lost, whole = (source["damaged"] for source in corpus.manifest["sources"])
    assert whole is None and re.fullmatch(r"as a whole: the file is damaged: .*; the file is left out", lost, re.DOTALL)


def test_a_damaged_row_group_costs_its_rows_and_no_others(run, tokenizer, tmp_path):
    import pyarrow
    from pyarrow.parquet import ParquetFile, write_table

    texts = NUMBERS[:30]
    file = tmp_path / "a.parquet"
    write_table(pyarrow.table({"text": texts}), file, row_group_size=10, write_page_checksum=True)
    chunk = ParquetFile(file).metadata.row_group(1).column(0)
    raw = bytearray(file.read_bytes())
    raw[chunk.dictionary_page_offset + chunk.total_compressed_size // 2] ^= 1
    file.write_bytes(raw)
    with pytest.raises(InputError, match=r"a\.parquet, rows 11 to 20: the file is damaged"):
        run(file)
    corpus = run(file, skip_bad=True)
    assert tokens(corpus) == by_documents(tokenizer, texts[:10] + texts[20:])
    assert skipped(corpus) == (10, [10])


def test_a_parquet_row_that_is_no_text_is_named_by_its_number(run, tokenizer, tmp_path):
    file = parquet(tmp_path / "a.parquet", ["one", None, "two"])
    with pytest.raises(InputError, match=r"a\.parquet, row 2: its 'text' is null"):
        run(file)
    assert tokens(run(file, skip_bad=True)) == by_documents(tokenizer, ["one", "two"])
    with pytest.raises(InputError, match=r"no column 'body'.*'id', 'text'"):
        run(file, tmp_path / "other", field="body")


def test_a_row_too_long_to_hold_is_named_or_skipped(run, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_rows, "LONGEST", 200_000)
    long = "y" * 300_000
    file = jsonl(tmp_path / "a.jsonl", ["one", long, "two"])
    text = tmp_path / "a.txt"
    text.write_text(f"one\n{long}\ntwo\n{long}")
    for source, options in ((file, {}), (text, {"convention": "lines"})):
        folder = tmp_path / f"{source.name}.corpus"
        with pytest.raises(InputError, match="line 2: it is longer than"):
            run(source, folder, **options)
        assert tokens(run(source, folder, skip_bad=True, **options)) == by_documents(tokenizer, ["one", "two"])


def test_a_missing_package_is_named_with_the_extra_that_brings_it(run, tmp_path, monkeypatch):
    compress(jsonl(tmp_path / "a.jsonl", TEXTS))
    parquet(tmp_path / "a.parquet", TEXTS)
    for module, source in (
        ("zstandard", tmp_path / "a.jsonl.zst"),
        ("pyarrow", tmp_path / "a.parquet"),
        ("datasets", "wikitext-103"),
    ):
        if module == "zstandard" and sys.version_info >= (3, 14):
            continue
        with monkeypatch.context() as without:
            for name in [name for name in sys.modules if name.partition(".")[0] == module]:
                without.delitem(sys.modules, name)
            without.setitem(sys.modules, module, None)
            with pytest.raises(InputError, match=rf"{module}.*pip install 'acgpt\[data\]'"):
                run(source, tmp_path / f"corpus-{module}")


# ---- the hub --------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub on the disk: `datasets` reads local files instead, and every call is noted."""
    import datasets
    import huggingface_hub

    load, calls = datasets.load_dataset, []
    rows = {
        "train": ["", " = One = \n", " text of one \n", "", " more \n"],
        "validation": ["", " = Two = \n"],
        "test": [" = Three = \n", ""],
    }

    def stand_in(path, config, *, split, streaming, revision):
        calls.append((path, config, split, streaming, revision))
        texts = rows[split] if path == "Salesforce/wikitext" else [f"page {number}" for number in range(40)]
        file = parquet(tmp_path / f"{split}.parquet", texts)
        return load(
            "parquet", data_files={split: str(file)}, split=split, streaming=streaming, cache_dir=tmp_path / "hub"
        )

    monkeypatch.setattr(datasets, "load_dataset", stand_in)
    revisions = iter(["first", "second", "third"])
    info = lambda path: type("Info", (), {"sha": next(revisions)})  # noqa: E731
    monkeypatch.setattr(huggingface_hub, "dataset_info", info)
    return calls, rows


def test_wikitext_comes_with_its_splits_and_its_convention(run, hub, tokenizer):
    calls, rows = hub
    corpus = run("wikitext-103")
    assert {split: tokens(corpus, split) for split in corpus.splits} == {
        split: by_lines(tokenizer, texts) for split, texts in rows.items()
    }
    assert calls == [("Salesforce/wikitext", "wikitext-103-raw-v1", split, False, "first") for split in rows]
    run("wikitext-103")  # reused: the hub is not asked again, nor for a newer revision
    assert len(calls) == 3
    with pytest.raises(InputError, match="--convention lines"):
        run("wikitext-103", convention="documents")


def test_one_split_of_a_named_data_set_can_be_taken(run, hub, tokenizer, tmp_path):
    _, rows = hub
    corpus = run([jsonl(tmp_path / "a.jsonl", ["mine"]), "test=wikitext-103"])
    assert tokens(corpus) == by_lines(tokenizer, ["mine"])
    assert tokens(corpus, "test") == by_lines(tokenizer, rows["test"])
    assert list(corpus.splits) == ["train", "test"]


def test_fineweb_is_streamed_up_to_its_limit_with_a_share_held_out(run, small, hub, tokenizer, monkeypatch):
    calls, _ = hub
    assert (sources.NAMED["fineweb"].rows, sources.NAMED["fineweb"].validation) == (1_500_000, 0.01)
    limited = replace(sources.NAMED["fineweb"], rows=30, validation=0.2)
    monkeypatch.setitem(sources.NAMED, "fineweb", limited)

    class Stop(Exception):
        pass

    def stop(progress: Progress) -> None:
        if progress.documents >= 15:
            raise Stop

    monkeypatch.setattr(corpus_prepare, "CHECKPOINT", 20)
    with pytest.raises(Stop):
        run("fineweb", watch=stop)
    corpus = run("fineweb")
    assert calls == [("HuggingFaceFW/fineweb", "sample-10BT", "train", True, "first")] * 2
    for split, wanted in (("train", False), ("validation", True)):
        texts = [f"page {number}" for number in range(30) if held_out(0, 0, number, 0.2) == wanted]
        assert tokens(corpus, split) == by_documents(tokenizer, texts)


def test_a_limit_goes_before_that_of_a_data_set(run, small, hub, tokenizer, tmp_path, monkeypatch):
    _, rows = hub
    monkeypatch.setitem(sources.NAMED, "fineweb", replace(sources.NAMED["fineweb"], rows=10, validation=0.0))
    for limit in (4, 35):
        corpus = run("fineweb", tmp_path / f"{limit}", limit=limit)
        assert tokens(corpus) == by_documents(tokenizer, [f"page {number}" for number in range(limit)])
        assert corpus.manifest["sources"][0]["rows"] == limit
    corpus = run("wikitext-103", limit=2)
    assert [tokens(corpus, split) for split in rows] == [
        by_lines(tokenizer, texts[: 2 if split == "train" else None]) for split, texts in rows.items()
    ]


def test_the_advice_for_fineweb_in_files_makes_the_same_of_it(run, hub, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "dataset_info", lambda path: 1 / 0)
    with pytest.raises(
        InputError, match=r"10BT/\*\.parquet' --convention documents --limit 1500000 --validation 0\.01 "
    ):
        run("fineweb")


@pytest.mark.parametrize("broken", ["info", "data"])
def test_a_hub_that_cannot_be_reached_says_what_to_do(run, hub, monkeypatch, broken):
    import datasets
    import huggingface_hub

    def fail(*_, **__):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(*((huggingface_hub, "dataset_info") if broken == "info" else (datasets, "load_dataset")), fail)
    with pytest.raises(InputError, match="no route to host") as caught:
        run("wikitext-103")
    assert "hf download --repo-type dataset Salesforce/wikitext" in str(caught.value)
    assert "test='DIR/wikitext-103-raw-v1/test-*.parquet'" in str(caught.value)
    assert "HF_HUB_OFFLINE=1" in str(caught.value)


def test_without_a_connection_the_cache_is_used_if_asked_for(run, hub, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub, "dataset_info", lambda path: pytest.fail("the hub was asked"))
    calls, _ = hub
    run("test=wikitext-103")
    assert calls == [("Salesforce/wikitext", "wikitext-103-raw-v1", "test", False, "main")]


# ---- interruptions --------------------------------------------------------------------------------------------------

WRITES = {"os.rename", "os.remove", "os.truncate", "os.mkdir", "os.rmdir"}


def in_a_fork(action):
    """Run an action in a copy of this process; how that ended: a negative number is a signal."""
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(60)
            action()
            os._exit(0)
        except (InputError, OutputError) as error:
            os.write(2, str(error).encode())
            os._exit(2 if isinstance(error, InputError) else 1)
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill_before(number):
    """From now on, kill this process before its `number`th change to the disk."""
    left, fsync = number, os.fsync

    def change(event, args):
        nonlocal left
        if event in WRITES or (event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def before_sync(descriptor):
        change("os.rename", ())
        fsync(descriptor)

    sys.addaudithook(change)
    os.fsync = before_sync


def complete_or_absent(folder):
    """A manifest stands for what is there, at any moment; a shard that has its name has all its tokens."""
    if (folder / "corpus.json").exists():
        Corpus.open(folder).verify()
    if (folder / "journal.json").exists():
        for split in json.loads((folder / "journal.json").read_text())["splits"].values():
            for shard in split["shards"]:
                assert sha256((folder / shard["file"]).read_bytes()).hexdigest() == shard["sha256"]


def test_a_record_is_replaced_as_a_whole(tmp_path):
    write_json(tmp_path / "record.json", {"number": 1})
    with (tmp_path / "record.json").open() as old:
        write_json(tmp_path / "record.json", {"number": 2})
        assert json.load(old) == {"number": 1}  # whoever has the old one can read it to its end
    assert json.loads((tmp_path / "record.json").read_text()) == {"number": 2}
    assert [file.name for file in tmp_path.iterdir()] == ["record.json"]


@pytest.fixture
def interrupted(tmp_path, small, monkeypatch, named):
    """A preparation that has something of everything, what it should give, and how to run it into another folder."""
    monkeypatch.setattr(corpus_prepare, "CHECKPOINT", 2500)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    (tmp_path / "c.txt").write_bytes("\n".join(MANY).encode())
    names = [jsonl(tmp_path / "a.jsonl", MANY[:40]), parquet(tmp_path / "b.parquet", MANY), f"test={tmp_path}/c.txt"]
    names[0] = compress(names[0])[2]

    def run(folder, **options):
        options = {"validation": 0.3, "shard_bytes": 1024, "workers": 1, "tokenizer": named, **options}
        return prepare(names, tmp_path / folder, **options)

    run("whole")
    return run, everything(tmp_path / "whole")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_preparation_killed_at_any_moment_goes_on_to_the_same_bytes(interrupted, tmp_path):
    run, whole = interrupted
    assert sum(name.endswith(".bin") for name in whole) > 4
    number, ended = 0, 1
    while ended != 0:
        number += 4
        folder = f"killed-{number}"

        def work(number=number, folder=folder):
            kill_before(number)
            run(folder)

        ended = in_a_fork(work)
        assert ended in (0, -signal.SIGKILL), number
        complete_or_absent(tmp_path / folder)
        if ended and number % 2:  # killed twice
            assert in_a_fork(work) in (0, -signal.SIGKILL)
        run(folder)
        assert everything(tmp_path / folder) == whole, number
        shutil.rmtree(tmp_path / folder)
    assert number > 60, number


@pytest.mark.parametrize("moment", range(1, 40, 5))
@pytest.mark.parametrize("kind", ["limit", "pieces"])
def test_a_limit_and_pieces_are_the_same_after_an_interruption(run, small, tmp_path, monkeypatch, kind, moment):
    class Stop(Exception):
        pass

    def stop(progress):
        nonlocal moment
        moment -= progress.phase == "tokens"
        if not moment:
            raise Stop

    monkeypatch.setattr(corpus_prepare, "CHECKPOINT", 20)
    monkeypatch.setattr(corpus_prepare, "PIECE", 200)
    names = [tmp_path / f"{number}.txt" for number in range(3)]
    for number, name in enumerate(names):
        name.write_text("\n".join(NUMBERS[number::3]))
    options = {"validation": 0.1, "shard_bytes": 1024}
    if kind == "limit":
        names += [jsonl(tmp_path / "a.jsonl", NUMBERS[:20]), jsonl(tmp_path / "b.jsonl", NUMBERS[20:])]
        options = {"limit": 35, "shard_bytes": 1024}
    run(names, tmp_path / "whole", **options)
    with pytest.raises(Stop):
        run(names, watch=stop, **options)
    run(names, **options)
    assert everything(tmp_path / "corpus") == everything(tmp_path / "whole")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_replacing_a_corpus_can_be_killed_at_any_moment(interrupted, tmp_path):
    run, whole = interrupted
    for number in range(1, 40, 3):
        run("replaced", validation=0.0, seed=3, overwrite=True)

        def work(number=number):
            kill_before(number)
            run("replaced", overwrite=True)

        assert in_a_fork(work) == -signal.SIGKILL
        complete_or_absent(tmp_path / "replaced")
        begun = not (tmp_path / "replaced" / "corpus.json").exists()
        run("replaced", overwrite=not begun)
        assert everything(tmp_path / "replaced") == whole, number
    assert begun


@pytest.mark.parametrize("room", ["none for the tokenizer", "none for a shard"])
def test_a_full_disk_is_said_and_the_same_command_goes_on(run, named, tmp_path, monkeypatch, capfd, room):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    file = jsonl(tmp_path / "a.jsonl", NUMBERS * 5)
    run(file, tmp_path / "whole")
    limit = 3000 if room == "none for the tokenizer" else max(map(len, everything(Path(named)).values())) + 3000

    def work():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        run(file)

    assert in_a_fork(work) == 1
    said = capfd.readouterr().err
    assert f"cannot write to {tmp_path / 'corpus'}" in said and "File too large" in said and "Make room" in said
    assert not (tmp_path / "corpus" / "corpus.json").exists()
    assert not list((tmp_path / "corpus").glob("*.bin"))
    run(file)
    assert everything(tmp_path / "corpus") == everything(tmp_path / "whole")


def test_a_command_killed_with_its_workers_goes_on_with_one_to_the_same_bytes(run, named, tmp_path):
    texts = [f"{number} " + TEXTS[0] * 80 for number in range(300)]
    file = jsonl(tmp_path / "a.jsonl", texts)  # some batches of the usual size
    command = [sys.executable, "-m", "acgpt", "prepare", str(file), "-o", str(tmp_path / "killed"), "-t", named]
    options = ["--validation", "0.1", "--workers", "2", "--shard-size", "0.0625"]
    env = os.environ | {"PYTHONPATH": SOURCE}
    process = subprocess.Popen([*command, *options], env=env, stderr=subprocess.PIPE, start_new_session=True)
    journal, deadline = tmp_path / "killed" / "journal.json", time.monotonic() + 60
    while not journal.exists() or not (row := json.loads(journal.read_text())["position"][1]):
        assert process.poll() is None and time.monotonic() < deadline, process.stderr.read()
        time.sleep(0.01)
    process.kill()
    process.wait()
    process.stderr.read()  # ends when the last worker has ended, for they hold it too
    assert not (tmp_path / "killed" / "corpus.json").exists()
    same, seen = {"validation": 0.1, "shard_bytes": 1 << 16}, []
    run(file, tmp_path / "killed", **same, watch=lambda progress: seen.append(progress.documents))
    assert next(documents for documents in seen if documents) > row  # it did go on
    run(file, tmp_path / "whole", **same)
    assert everything(tmp_path / "killed") == everything(tmp_path / "whole")


def test_a_finished_corpus_is_checked_and_left_as_it_is(run, tmp_path):
    file = jsonl(tmp_path / "a.jsonl", MANY)
    run(file, shard_bytes=1024)
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "corpus").rglob("*")}
    phases = []
    moved = file.rename(tmp_path / "moved.jsonl")  # what counts is the content
    run(moved, shard_bytes=1024, watch=lambda progress: phases.append(progress.phase))
    assert phases[-1] == "reused"
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "corpus").rglob("*")} == times
    shard = tmp_path / "corpus" / "train-00001.bin"
    raw = shard.read_bytes()
    shard.write_bytes(raw[:-2] + b"\0\0")
    with pytest.raises(InputError, match=r"train-00001\.bin is not what was written.*--overwrite"):
        run(moved, shard_bytes=1024)
    run(moved, shard_bytes=1024, overwrite=True)
    assert shard.read_bytes() == raw


def test_a_corpus_whose_tokenizer_was_changed_is_refused(run, named, tmp_path):
    file = jsonl(tmp_path / "a.jsonl", TEXTS)
    run(file)
    other = run(file, tmp_path / "other", mask_token=True)
    shutil.rmtree(tmp_path / "corpus" / "tokenizer")
    with pytest.raises(InputError, match="cannot load the tokenizer in"):
        run(file)
    shutil.copytree(other.folder / "tokenizer", tmp_path / "corpus" / "tokenizer")
    with pytest.raises(InputError, match=r"corpus/tokenizer is not the one .*--overwrite"):
        run(file)


@pytest.mark.parametrize("name", ["corpus.json", "journal.json"])
@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"recipe": {}}'])
def test_a_damaged_record_of_an_earlier_run_is_named(run, tmp_path, name, content):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / name).write_text(content)
    with pytest.raises(InputError, match=f"corpus/{name} is damaged"):
        run(jsonl(tmp_path / "a.jsonl", TEXTS))


def test_what_was_made_otherwise_is_refused_by_what_differs(run, tmp_path, monkeypatch):
    file = jsonl(tmp_path / "a.jsonl", TEXTS)
    other = jsonl(tmp_path / "b.jsonl", TEXTS[:3])
    run(file)
    before = everything(tmp_path / "corpus")
    for names, options, difference in (
        (file, {"convention": "lines"}, r"convention \('documents' there, 'lines' here\)"),
        (file, {"validation": 0.1}, r"validation \(0.0 there, 0.1 here\)"),
        (file, {"seed": 1}, r"seed \(0 there, 1 here\)"),
        (file, {"field": "id"}, "field"),
        (file, {"shard_bytes": 2048}, "shard_bytes"),
        (file, {"mask_token": True}, "tokenizer, mask_token"),
        (file, {"train_tokenizer": 300}, "What differs: tokenizer"),
        (other, {}, r"sources \(train=.*a\.jsonl only there, train=.*b\.jsonl only here\)"),
        ([file, f"test={other}"], {}, r"sources \(test=.*b\.jsonl only here\)"),
        (f"test={file}", {}, r"sources \(train=.*a\.jsonl only there, test=.*a\.jsonl only here\)"),
    ):
        with pytest.raises(InputError, match=f"{difference}.*--overwrite"):
            run(names, **options)
        assert everything(tmp_path / "corpus") == before
    corpus = run(other, convention="lines", overwrite=True)
    assert corpus.manifest["convention"] == "lines"


def test_what_a_failed_first_command_left_does_not_stand_in_the_way_of_its_correction(run, tokenizer, tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(GOOD + b'{"text": \n')
    with pytest.raises(InputError, match="line 2"):
        run(file)
    jsonl(file, TEXTS, field="body")  # mended, but of another field
    with pytest.raises(InputError, match="no field 'text'"):
        run(file, validation=0.1)
    (tmp_path / "corpus" / "thesis.tex").write_text("mine")
    assert tokens(run(file, field="body")) == by_documents(tokenizer, TEXTS)
    assert (tmp_path / "corpus" / "thesis.tex").read_text() == "mine"
    assert not (tmp_path / "corpus" / "journal.json").exists()


def test_unfinished_work_of_value_is_kept_and_the_ways_on_are_named(run, small, tmp_path):
    file = jsonl(tmp_path / "a.jsonl", MANY)
    file.write_bytes(file.read_bytes() + b"{\n")
    with pytest.raises(InputError, match="--skip-bad"):
        run(file, shard_bytes=1024)
    before = everything(tmp_path / "corpus")
    assert "train-00000.bin" in before
    with pytest.raises(
        InputError, match=r"unfinished work of another command\. What differs: seed .*Repeat.*--overwrite"
    ):
        run(file, shard_bytes=1024, seed=1, skip_bad=True)
    assert everything(tmp_path / "corpus") == before
    run(file, shard_bytes=1024, seed=1, skip_bad=True, overwrite=True)


def test_a_folder_with_other_files_is_refused_and_those_files_are_never_touched(run, tmp_path):
    file = jsonl(tmp_path / "a.jsonl", TEXTS)
    folder = tmp_path / "corpus"
    (folder / "tokenizer").mkdir(parents=True)
    for name in ("train-00000.bin", "thesis.tex", "tokenizer/mine"):
        (folder / name).write_text("mine")
    before = everything(folder)
    for overwrite in (False, True):
        with pytest.raises(
            InputError, match=r"holds files that are no corpus \(thesis.tex, tokenizer, train-00000.bin\)"
        ):
            run(file, overwrite=overwrite)
    assert everything(folder) == before
    shutil.rmtree(folder)
    run(file)
    (folder / "evaluation").mkdir()
    for name in ("thesis.tex", "evaluation/set", "train.bin"):
        (folder / name).write_text("mine")
    run(file, convention="lines", overwrite=True)
    assert [(folder / name).read_text() for name in ("thesis.tex", "evaluation/set", "train.bin")] == ["mine"] * 3


def test_where_nothing_can_be_written_it_is_said(run, tmp_path):
    file = jsonl(tmp_path / "a.jsonl", TEXTS)
    with pytest.raises(InputError, match="is not a folder"):
        run(file, file)
    with pytest.raises(OutputError, match=r"cannot write to .*Not a directory"):
        run(file, file / "corpus")


def test_two_processes_do_not_write_to_one_folder(run, tmp_path):
    file = jsonl(tmp_path / "a.jsonl", TEXTS)
    (tmp_path / "corpus").mkdir()
    descriptor = os.open(tmp_path / "corpus", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(InputError, match="another process is preparing"):
        run(file)
    os.close(descriptor)
    run(file)


# ---- bounded memory -------------------------------------------------------------------------------------------------


def test_no_more_batches_are_read_ahead_than_allowed():
    taken, used = 0, 0
    most = 0

    def items():
        nonlocal taken, most
        for number in range(-30, 0):
            taken += 1
            most = max(most, taken - used)
            yield number

    for result in in_order(abs, items(), workers=2, ahead=5):
        assert result == 30 - used
        used += 1
    assert used == 30
    assert most <= 5


@pytest.mark.parametrize(
    "name, convention", [("a.txt.gz", "lines"), ("a.txt.xz", "documents"), ("a.jsonl.gz", "documents")]
)
def test_reading_holds_a_few_batches_whatever_the_size(tmp_path, monkeypatch, name, convention):
    for module in (corpus_rows, sources):
        monkeypatch.setattr(module, "BATCH", 1 << 17)
    monkeypatch.setattr(corpus_rows, "READ_COMPRESSED", 128)
    rows = (json.dumps({"text": f"{number} and {number * 7919} and {number**3}"}) + "\n" for number in range(100_000))
    raw = "".join(rows).encode()
    file = tmp_path / name
    file.write_bytes(gzip.compress(raw, 1) if name.endswith(".gz") else lzma.compress(raw, preset=0))
    (part,) = sources.resolve([str(file)], {})
    tracemalloc.start()
    read = sum(len(row) + ("jsonl" in name) for batch in part.batches(0, "text", convention) for row in batch.rows)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert read == len(raw)
    assert peak < 3 << 19 < len(raw) / 2  # a few batches


@pytest.mark.parametrize("name, convention", [("a.jsonl", "documents"), ("a.txt", "lines")])
def test_a_file_without_line_ends_does_not_fill_the_memory(tmp_path, monkeypatch, name, convention):
    monkeypatch.setattr(corpus_rows, "LONGEST", 1 << 17)
    (tmp_path / name).write_bytes(b"no end " * 500_000)
    (part,) = sources.resolve([str(tmp_path / name)], {})
    tracemalloc.start()
    ((bad,),) = [batch.rows for batch in part.batches(0, "text", convention)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert bad.where == "line 1"
    assert peak < 1 << 20


# ---- tokenizers -----------------------------------------------------------------------------------------------------


def test_gpt2_is_the_default_and_needs_no_hub(gpt2, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    corpus = prepare(jsonl(tmp_path / "a.jsonl", TEXTS), tmp_path / "corpus", workers=1, convention="lines")
    assert tokens(corpus) == by_lines(gpt2, TEXTS)
    assert corpus.manifest["tokenizer_hash"] == tokenizer_hash(gpt2)
    assert corpus.manifest["mask_token_id"] is None


def test_gpt2_comes_from_the_hub_where_the_package_is_missing(run, tokenizer, tmp_path, monkeypatch):
    from transformers import AutoTokenizer

    real, asked = AutoTokenizer.from_pretrained, []

    def stand_in(name, **options):
        asked.append(name)
        if name != "gpt2":
            return real(name, **options)
        if len(asked) == 1:
            raise OSError("no route to host")
        return tokenizer

    monkeypatch.setattr(acgpt.corpus_tokenizer, "GPT2_PACKAGE", "not_installed_at_all")
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", stand_in)
    file = jsonl(tmp_path / "a.jsonl", TEXTS)
    with pytest.raises(InputError, match=r"(?s)no route to host.*pip install"):
        run(file, tokenizer="gpt2")
    assert tokens(run(file, tokenizer="gpt2")) == by_documents(tokenizer, TEXTS)


def test_a_tokenizer_without_eos_is_refused(run, tmp_path):
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}))).save_pretrained(tmp_path / "no-eos")
    with pytest.raises(InputError, match="no end-of-sequence token"):
        run(jsonl(tmp_path / "a.jsonl", TEXTS), tokenizer=str(tmp_path / "no-eos"))


def test_a_mask_token_is_added_once(run, tokenizer, tmp_path):
    file = jsonl(tmp_path / "a.jsonl", [*TEXTS, "a <|mask|> is text"])
    corpus = run(file, mask_token=True)
    masked = corpus.tokenizer()
    assert masked.mask_token == "<|mask|>"
    assert corpus.manifest["mask_token_id"] == masked.mask_token_id == len(tokenizer)
    assert corpus.manifest["vocabulary_size"] == len(tokenizer) + 1
    assert len(tokenizer) not in tokens(corpus)
    again = run(file, tmp_path / "again", mask_token=True, tokenizer=str(tmp_path / "corpus" / "tokenizer"))
    assert again.hash == corpus.hash


def test_a_trained_tokenizer_is_the_same_each_time_and_reads_every_text(run, small, tmp_path):
    texts = [sha256(b"%d" % (number % 40)).hexdigest() for number in range(300)]
    file = jsonl(tmp_path / "a.jsonl", texts)
    corpus = run(file, train_tokenizer=400)
    trained = corpus.tokenizer()
    assert len(trained) == corpus.manifest["vocabulary_size"] == 400
    assert trained.bos_token == trained.eos_token == EOS
    text = "any text: \0 日本語 🙂\n"
    assert trained.decode(trained(text, add_special_tokens=False)["input_ids"]) == text
    assert trained.decode(tokens(corpus)).split(EOS)[:-1] == texts
    assert len(tokens(corpus)) < 300 * 65 / 1.2  # it learned something
    run(file, tmp_path / "again", train_tokenizer=400)
    assert everything(tmp_path / "again") == everything(tmp_path / "corpus")


def test_a_tokenizer_learns_from_the_train_split_alone(run, tmp_path):
    texts = ["abcabcabc" if not held_out(0, 0, number, 0.5) else "xyzxyzxyz" for number in range(40)]
    test = jsonl(tmp_path / "test.jsonl", ["xyz" * 50] * 20)
    file = jsonl(tmp_path / "a.jsonl", texts)
    with pytest.warns(UserWarning, match="too small for 300 tokens"):
        corpus = run([file, f"test={test}"], train_tokenizer=300, validation=0.5)
    words = corpus.tokenizer().get_vocab()
    assert "abc" in words and "xy" not in words


def test_a_tokenizer_is_trained_on_at_most_so_much_text(run, small, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_prepare, "TRAINED_ON", 1000)
    file = jsonl(tmp_path / "a.jsonl", ["abcabcabc"] * 200 + ["xyzxyzxyz"] * 200)
    with pytest.warns(UserWarning, match="too small"):
        corpus = run(file, train_tokenizer=300)
    words = corpus.tokenizer().get_vocab()
    assert "abc" in words and "xy" not in words


def test_training_a_tokenizer_stops_at_a_bad_row(run, tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(GOOD + b"{\n")
    with pytest.raises(InputError, match=r"a\.jsonl, line 2: it is not JSON.*--skip-bad"):
        run(file, train_tokenizer=300)
    with pytest.warns(UserWarning, match="too small"):
        assert skipped(run(file, train_tokenizer=300, skip_bad=True)) == (1, [1])


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def command(named, tmp_path):
    def run(*arguments, code=0):
        arguments = ["prepare", "-o", str(tmp_path / "corpus"), "-w", "1", *map(str, arguments)]
        result = CliRunner().invoke(app, arguments, env={"NO_COLOR": "1", "COLUMNS": "100"})
        assert result.exit_code == code, (result.output, result.exception)
        assert "Traceback" not in result.output
        return result

    return run


def test_the_command_prints_a_table_and_then_that_it_is_already_prepared(command, named, tokenizer, tmp_path):
    file = jsonl(tmp_path / "a.jsonl", TEXTS * 30)
    options = (file, "-t", named, "--convention", "lines", "--shard-size", "0.01")
    first, second = command(*options), command(*options)
    expected = by_lines(tokenizer, TEXTS * 30)
    row = ["train", f"{len(TEXTS) * 30 * 6 // 8:,}", f"{len(expected):,}", str(-(-len(expected) // 5243))]
    for result in (first, second):
        assert row in [line.split() for line in result.stdout.splitlines()]
        assert result.stderr == ""  # no bar where nobody watches
    assert "prepared in" in first.stdout and "already" not in first.stdout
    assert "already prepared, and checked" in second.stdout
    assert tokens(Corpus.open(tmp_path / "corpus")) == expected


def test_json_is_the_summary_of_the_manifest(command, named, tmp_path):
    file = jsonl(tmp_path / "a.jsonl", [f"text {number}" for number in range(50)])
    options = (file, "-t", named, "--json", "--validation", "0.2", "--mask-token", "--skip-bad")
    found = json.loads(command(*options).stdout)
    corpus = Corpus.open(tmp_path / "corpus")
    manifest = json.loads((tmp_path / "corpus" / "corpus.json").read_text())
    assert found["hash"] == corpus.hash and found["reused"] is False and found["seconds"] > 0
    for key in (
        "tokenizer_hash",
        "vocabulary_size",
        "mask_token_id",
        "dtype",
        "documents",
        "tokens",
        "bytes",
        "skipped",
    ):
        assert found[key] == manifest[key]
    split = manifest["splits"]["validation"]
    assert found["splits"]["validation"] == {**split, "shards": len(split["shards"])}
    assert json.loads(command(*options).stdout)["reused"] is True


def test_the_command_says_what_was_skipped_and_in_which_source(command, named, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(GOOD + b"{\n")
    result = command(tmp_path / "a.jsonl", "-t", named, code=2)
    assert re.search(r"error: .*a\.jsonl, line 2: it is not JSON", result.stderr.replace("\n", " "))
    result = command(tmp_path / "a.jsonl", "-t", named, "--skip-bad")
    assert re.search(r"a\.jsonl: 1 rows? skipped", result.stdout.replace("\n", ""))


def test_the_command_says_what_is_lost_of_a_damaged_file(command, named, tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(GOOD * 3)[:-8])
    result = command(tmp_path / "a.jsonl.gz", "-t", named, "--skip-bad")
    said = result.stdout.replace("\n", " ")
    assert "a.jsonl.gz: 1 rows skipped" in said
    assert "a.jsonl.gz, line 4: the file is damaged from here on: it ends too early; the rest of the file is" in said


def test_the_command_refuses_nonsense_with_code_2_and_a_disk_with_code_1(command, named, tmp_path):
    file = jsonl(tmp_path / "a.jsonl", TEXTS)
    for options in (["--validation", "some"], ["--validation", "nan"], ["--seed", "-1"], ["--limit", "0"],
                    ["--shard-size", "nan"], ["--shard-size", "inf"]):  # fmt: skip
        command(file, "-t", named, *options, code=2)
        assert not (tmp_path / "corpus").exists()
    (tmp_path / "corpus").symlink_to("/proc/no-such")
    assert "error: cannot write to" in command(file, "-t", named, code=1).stderr


def test_the_command_takes_a_limit(command, named, tmp_path):
    found = json.loads(command(jsonl(tmp_path / "a.jsonl", NUMBERS), "-t", named, "--limit", "7", "--json").stdout)
    assert (found["limit"], found["documents"], found["damaged"]) == (7, 7, 0)


def test_a_bar_is_shown_on_a_terminal(named, tmp_path):
    from acgpt.commands.prepare import bar

    class Terminal:
        def __init__(self):
            self.written = ""

        def write(self, text):
            self.written += text

        def flush(self):
            pass

        def isatty(self):
            return True

    for stderr, size in ((sys.stderr, 0), (Terminal(), 1000)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stderr", stderr)
            patch.setenv("COLUMNS", "200")
            patch.setenv("TERM", "xterm")
            with bar() as show:
                show(Progress("sources"))
                show(Progress("tokens", done=100, total=size, documents=4, tokens=1234, text=100))
                show(Progress("tokens", done=200, total=size, documents=8, tokens=5678, text=200))
        if size:
            assert "5,678 tokens, 8 documents" in stderr.written and "MB/s" in stderr.written


def test_the_embedded_models_tokenizer_ends_documents_as_its_pretraining_did(tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"text": "One."}\n{"text": "Two."}\n')
    prepare([tmp_path / "mine.jsonl"], tmp_path / "corpus", tokenizer="default")
    corpus = Corpus.open(tmp_path / "corpus")
    tokenizer = corpus.tokenizer()
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|endoftext|>", "<|endoftext|>")
    assert tokenizer.decode(corpus.tokens("train")[:]) == "One.<|endoftext|>Two.<|endoftext|>"
    assert corpus.manifest["tokenizer_hash"] == tokenizer_hash(AutoTokenizer.from_pretrained(embedded_default()))


def test_of_many_text_files_few_may_be_taken_and_pieces_of_those_held_out(run, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_prepare, "PIECE", 20)
    for number in range(30):
        (tmp_path / f"{number:02}.txt").write_text("one line of text\n" * 20)
    corpus = run(f"{tmp_path}/*.txt", validation=0.2, limit=2)
    assert corpus.manifest["recipe"]["piece"] == 20 and corpus.splits["validation"].tokens
