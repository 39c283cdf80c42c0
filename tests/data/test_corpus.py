"""A prepared corpus as training and evaluation read it, against arrays written by hand."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import acgpt
from acgpt.data.corpus import Corpus
from acgpt.errors import InputError


def write_corpus(folder: Path, splits: dict[str, list[list[int]]], **changes) -> Path:
    """Write a corpus folder in the documented format, without acgpt's own code."""
    folder.mkdir(exist_ok=True)
    manifest = {"format_version": 1, "tokenizer_hash": "t", "dtype": "uint16", "convention": "lines", "splits": {}}
    for name, shards in splits.items():
        described = []
        for number, tokens in enumerate(shards):
            raw = b"".join(token.to_bytes(2, "little") for token in tokens)
            (folder / f"{name}-{number:05}.bin").write_bytes(raw)
            file = {"file": f"{name}-{number:05}.bin", "tokens": len(tokens), "sha256": sha256(raw).hexdigest()}
            described.append(file)
        total = sum(map(len, shards))
        manifest["splits"][name] = {"documents": 1, "tokens": total, "bytes": 3, "shards": described}
    (folder / "corpus.json").write_text(json.dumps(manifest | changes))
    return folder


SHARDS = [[1, 2, 3, 4, 5], [60000, 7], [8, 9, 10, 11]]
FLAT = [1, 2, 3, 4, 5, 60000, 7, 8, 9, 10, 11]


@pytest.fixture
def folder(tmp_path):
    return write_corpus(tmp_path / "corpus", {"train": SHARDS, "test": [[5, 4]]})


# ---- tokens ---------------------------------------------------------------------------------------------------------


@given(
    shards=st.lists(st.lists(st.integers(0, 65535), min_size=1, max_size=9), max_size=5),
    start=st.one_of(st.none(), st.integers(-50, 50)),
    stop=st.one_of(st.none(), st.integers(-50, 50)),
)
def test_any_slice_is_that_of_the_concatenated_shards(tmp_path_factory, shards, start, stop):
    corpus = Corpus.open(write_corpus(tmp_path_factory.mktemp("corpus"), {"train": shards}))
    tokens, flat = corpus.tokens("train"), [token for shard in shards for token in shard]
    result = tokens[start:stop]
    assert len(tokens) == len(flat)
    assert result.dtype == np.int64
    assert result.tolist() == flat[start:stop]


@given(length=st.integers(1, 12))
def test_chunks_are_whole_and_follow_each_other(tmp_path_factory, length):
    corpus = Corpus.open(write_corpus(tmp_path_factory.mktemp("corpus"), {"train": SHARDS}))
    tokens = corpus.tokens("train")
    whole = [FLAT[at : at + length] for at in range(0, len(FLAT), length)]
    whole = [chunk for chunk in whole if len(chunk) == length]
    assert [tokens.chunk(i, length).tolist() for i in range(tokens.chunks(length))] == whole
    for beyond in (-1, len(whole)):
        with pytest.raises(IndexError, match=f"chunk {beyond} of {len(whole)}"):
            tokens.chunk(beyond, length)


def test_a_chunk_is_a_copy_that_may_be_changed(folder):
    tokens = Corpus.open(folder).tokens("train")
    tokens.chunk(0, 5)[:] = 0
    assert tokens.chunk(0, 5).tolist() == FLAT[:5]


def test_tokens_travel_without_their_contents_and_read_the_same(tmp_path):
    corpus = Corpus.open(write_corpus(tmp_path / "corpus", {"train": [list(range(5000))] * 2}))
    tokens = corpus.tokens("train")
    tokens[:]  # maps every shard
    sent = pickle.dumps(tokens)
    assert len(sent) < 2000
    assert pickle.loads(sent)[4990:5010].tolist() == [*range(4990, 5000), *range(10)]


# ---- what is wrong with a folder ------------------------------------------------------------------------------------


def test_a_missing_shard_is_named_with_the_remedy(folder):
    (folder / "train-00001.bin").unlink()
    corpus = Corpus.open(folder)
    assert corpus.tokens("test")[:].tolist() == [5, 4]
    for use in (lambda: corpus.tokens("train"), corpus.verify):
        with pytest.raises(InputError, match=r"train-00001\.bin cannot be read: No such file.*acgpt prepare"):
            use()


@pytest.mark.parametrize("at", range(8))
def test_verify_finds_any_changed_byte(folder, at):
    corpus = Corpus.open(folder)
    corpus.verify()
    shard = folder / "train-00002.bin"
    raw = bytearray(shard.read_bytes())
    raw[at] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(InputError, match=r"train-00002\.bin is damaged"):
        corpus.verify()


def test_a_corpus_that_is_unfinished_is_told_how_to_go_on(tmp_path):
    (tmp_path / "journal.json").write_text("{}")
    with pytest.raises(InputError, match="is unfinished: repeat the command"):
        Corpus.open(tmp_path)


@pytest.mark.parametrize("name", ["../secret.bin", "/etc/hostname", "", "a/b.bin", ".."])
def test_a_manifest_cannot_name_a_file_outside_its_folder(folder, name):
    (folder.parent / "secret.bin").write_bytes(b"12")
    manifest = json.loads((folder / "corpus.json").read_text())
    manifest["splits"]["test"]["shards"][0] |= {"file": name, "tokens": 1}
    (folder / "corpus.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match=r"is damaged.*not a file of its own folder"):
        Corpus.open(folder)


def test_a_missing_tokenizer_is_named(folder):
    with pytest.raises(InputError, match=r"cannot load the tokenizer in .*corpus/tokenizer"):
        Corpus.open(folder).tokenizer()


# ---- identity -------------------------------------------------------------------------------------------------------


def test_the_hash_is_that_of_the_content_and_not_of_the_place(tmp_path):
    def hash_of(name, splits=None, **changes):
        splits = {"train": SHARDS, "test": [[5, 4]]} if splits is None else splits
        return Corpus.open(write_corpus(tmp_path / name, splits, **changes)).hash

    first = hash_of("a")
    assert hash_of("b", acgpt_version="another", sources=[]) == first
    others = [
        hash_of("c", {"train": [*SHARDS[:2], [8, 9, 10, 12]], "test": [[5, 4]]}),
        hash_of("d", {"train": SHARDS}),
        hash_of("e", {"train": SHARDS, "validation": [[5, 4]]}),
        hash_of("f", tokenizer_hash="u"),
        hash_of("g", convention="another"),
    ]
    assert len({first, *others}) == 6


def test_reading_needs_nothing_but_numpy(folder):
    heavy = {"torch", "transformers", "datasets", "pyarrow", "pydantic", "zstandard"}
    code = (
        "import sys; from acgpt.data.corpus import Corpus\n"
        f"assert Corpus.open({str(folder)!r}).tokens('train')[4:6].tolist() == [5, 60000]\n"
        f"print(*{heavy} & set(sys.modules))"
    )
    env = os.environ | {"PYTHONPATH": str(Path(acgpt.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, encoding="utf-8", check=True)
    assert done.stdout.strip() == ""
