"""Compressed generated texts: everything that a tokenizer can restore is left out.

    python benchmarks/keep_runs.py runs/mlm --texts --date 2026-11-16 -o benchmarks/results/NAME
    python benchmarks/kept_texts.py benchmarks/results/NAME/mlm/generations/SET data/wiki/tokenizer -o samples/mlm
    acgpt mauve samples/mlm data/wiki --features gpt2-large

`keep_runs.py --texts` writes `MODE.texts.xz` next to each record of generations: number, roles, token ids and
log-probabilities of every sample. This program restores the files of `acgpt generate` byte by byte, which the record's
sha256 proves. They can then be scored again, with other features.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from acgpt.evaluation.generations import as_line, record_of
from acgpt.evaluation.generator import lines_of
from acgpt.models.metadata import tokenizer_hash
from acgpt.query.query import Query

EXTENSION = ".texts.xz"
NEGATIVE_ZERO = np.iinfo(np.int32).min  # stands for -0.0, because an integer 0 has no sign


def pack(path: Path) -> bytes:
    """Compress the samples of a file; all texts must have the same length."""
    samples = [json.loads(line) for line in path.open(encoding="utf-8")]
    scores = np.array([score for sample in samples for score in sample["log_probs"]])
    if not (abs(scores) < 2147).all() or not all(set(sample["roles"]) <= set("ga") for sample in samples):
        raise SystemExit(f"{path}: log-probabilities of -2147 or less and unknown tokens cannot be kept.")
    micro = np.rint(scores * 1e6).astype(np.int64)
    micro[(scores == 0) & np.signbit(scores)] = NEGATIVE_ZERO
    arrays = {
        "number": np.array([[sample[key] for key in ("item", "sample", "seed")] for sample in samples]),
        "asked": np.packbits([[role == "a" for role in sample["roles"]] for sample in samples], axis=1),
        "tokens": np.array([sample["tokens"] for sample in samples], dtype=np.uint32),
        # Transposed, all high bytes first: they are similar and compress well, unlike the low bytes.
        "scores": micro.astype(">i4").view(np.uint8).reshape(-1, 4).T.copy(),
    }
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return lzma.compress(buffer.getvalue(), preset=9 | lzma.PRESET_EXTREME)


def unpack(packed: bytes, tokenizer: PreTrainedTokenizerBase) -> Iterator[bytes]:
    """Yield the lines of the file that was packed."""
    with np.load(io.BytesIO(lzma.decompress(packed))) as arrays:
        number, asked_bits, tokens, scores = (arrays[key] for key in ("number", "asked", "tokens", "scores"))
    asked = np.unpackbits(asked_bits, axis=1, count=tokens.shape[1]).astype(bool)
    micro = scores.T.copy().view(">i4")[:, 0].astype(np.int64)
    log_probs = np.where(micro == NEGATIVE_ZERO, -0.0, micro / 1e6)
    scores_by_text = np.split(log_probs, asked.sum(1).cumsum()[:-1])
    numbers = [(item, sample, seed) for item, sample, seed in number.tolist()]
    queries = [
        Query(ids.tolist(), (~is_asked).tolist(), is_asked.tolist())
        for ids, is_asked in zip(tokens, asked, strict=True)
    ]
    answers = [
        (ids[is_asked], scores_of_text)
        for ids, is_asked, scores_of_text in zip(tokens, asked, scores_by_text, strict=True)
    ]
    yield from map(as_line, lines_of(numbers, queries, answers, tokenizer))


def restore(folder: Path, tokenizer: PreTrainedTokenizerBase) -> dict[str, bytes]:
    """Return the generations in a folder of kept texts: files by name, checked against their records.

    Raises:
        SystemExit: There are none, one is damaged, a record is missing, or the tokenizer is another.
    """
    files: dict[str, bytes] = {}
    for path in sorted(folder.glob(f"*{EXTENSION}")):
        name = path.name.removesuffix(EXTENSION)
        record: dict[str, Any] | None = record_of(folder / f"{name}.jsonl")
        if record is None:
            raise SystemExit(f"{path} has no record: {name}.json is missing.")
        if record["tokenizer_hash"] != tokenizer_hash(tokenizer):
            raise SystemExit(f"{path} was generated with another tokenizer: name that of its corpus, CORPUS/tokenizer.")
        try:
            lines = b"".join(unpack(path.read_bytes(), tokenizer))
        except (lzma.LZMAError, BadZipFile, EOFError, KeyError, ValueError) as error:
            raise SystemExit(f"{path} is damaged: {error}") from error
        if hashlib.sha256(lines).hexdigest() != record["sha256"]:
            raise SystemExit(f"{path} does not restore the file of its record (sha256 differs).")
        files |= {f"{name}.jsonl": lines, f"{name}.json": (folder / f"{name}.json").read_bytes()}
    if not files:
        raise SystemExit(f"{folder} has no kept texts (*{EXTENSION}).")
    return files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kept", type=Path, help="a folder with kept texts")
    parser.add_argument("tokenizer", help="folder of their tokenizer")
    parser.add_argument("-o", "--output", required=True, type=Path, help="a new folder")
    args = parser.parse_args()
    if args.output.exists():
        raise SystemExit(f"{args.output} exists already: name another folder.")
    files = restore(args.kept, AutoTokenizer.from_pretrained(args.tokenizer, trust_remote_code=False))
    args.output.mkdir(parents=True)
    for name, content in files.items():
        (args.output / name).write_bytes(content)
    print(f"wrote {len(files) // 2} modes into {args.output}")


if __name__ == "__main__":
    main()
