"""Texts to prepare, files of them, and their tokens, tokenised by hand."""

from __future__ import annotations

import gzip
import json
import lzma
from hashlib import blake2b, sha256
from pathlib import Path

from tokenizers import Tokenizer

import acgpt

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
GOOD = b'{"text": "good"}\n'


def ids(tokenizer, text):
    """The tokens of a text, from the model underneath: it knows no special tokens, so EOS in a text is text."""
    plain = Tokenizer(tokenizer.backend_tokenizer.model)
    plain.pre_tokenizer = tokenizer.backend_tokenizer.pre_tokenizer
    return plain.encode(text).ids


def by_lines(tokenizer, texts):
    token_ids = []
    for text in texts:
        for line in text.split("\n"):
            line = line[:-1] if line.endswith("\r") else line
            if line.strip():
                token_ids += [*ids(tokenizer, line), tokenizer.eos_token_id]
    return token_ids


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
    """Write compressed copies of a file, and return all paths."""
    import zstandard

    raw = path.read_bytes()
    half = len(raw) // 2
    compressors = {".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstandard.ZstdCompressor().compress}
    paths = []
    for suffix, compressor in compressors.items():
        paths.append(path.with_name(path.name + suffix))
        padded = compressor(raw[:half]) + b"\0" * 40 + compressor(raw[half:]) + b"\0" * 4  # two streams
        paths[-1].write_bytes(padded)
    return [path, *paths]


def everything(folder):
    """Return the contents of all files under a folder, by path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def tokens(corpus, split="train"):
    return corpus.tokens(split)[:].tolist()


def skipped(corpus):
    return corpus.manifest["skipped"], [source["skipped"] for source in corpus.manifest["sources"]]


def held_out(seed, part, number, share):
    return int.from_bytes(blake2b(f"{seed}/{part}/{number}".encode(), digest_size=8).digest(), "big") / 2**64 < share
