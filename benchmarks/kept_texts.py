"""Generated texts in little room: what a tokenizer can make again is left out, and the rest is compressed.

    python benchmarks/keep_runs.py runs/mlm --texts --date 2026-11-16 -o benchmarks/results/NAME
    python benchmarks/kept_texts.py benchmarks/results/NAME/mlm/generations/SET data/wiki/tokenizer -o samples/mlm
    acgpt mauve samples/mlm data/wiki --features gpt2-large

`keep_runs.py --texts` keeps `MODE.texts.xz` beside each record of generations: for every sample its number, roles,
tokens and log-probabilities. This program makes of them the files that `acgpt generate` had written, byte by byte,
which the record's sha256 shows; then they can be scored with other features than they were.
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

END = ".texts.xz"
NEGATIVE_ZERO = np.iinfo(np.int32).min  # a log-probability that rounds to nothing has a sign; an integer has none


def pack(lines: Path) -> bytes:
    """The samples of a file, all of texts of one length."""
    samples = [json.loads(line) for line in lines.open(encoding="utf-8")]
    scores = np.array([score for sample in samples for score in sample["log_probs"]])
    if not (abs(scores) < 2147).all() or not all(set(sample["roles"]) <= set("ga") for sample in samples):
        raise SystemExit(f"{lines}: log-probabilities of -2147 or less, and unknown tokens, cannot be kept.")
    whole = np.rint(scores * 1e6).astype(np.int64)
    whole[(scores == 0) & np.signbit(scores)] = NEGATIVE_ZERO
    arrays = {
        "number": np.array([[sample[key] for key in ("item", "sample", "seed")] for sample in samples]),
        "asked": np.packbits([[role == "a" for role in sample["roles"]] for sample in samples], axis=1),
        "tokens": np.array([sample["tokens"] for sample in samples], dtype=np.uint32),
        # Byte by byte, the highest ones of all first: these are alike, and the lowest cannot be compressed anyway.
        "scores": whole.astype(">i4").view(np.uint8).reshape(-1, 4).T.copy(),
    }
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return lzma.compress(buffer.getvalue(), preset=9 | lzma.PRESET_EXTREME)


def unpack(kept: bytes, tokenizer: PreTrainedTokenizerBase) -> Iterator[bytes]:
    """The lines of the file that was packed."""
    with np.load(io.BytesIO(lzma.decompress(kept))) as arrays:
        number, packed, tokens, scores = (arrays[key] for key in ("number", "asked", "tokens", "scores"))
    asked = np.unpackbits(packed, axis=1, count=tokens.shape[1]).astype(bool)
    whole = scores.T.copy().view(">i4")[:, 0].astype(np.int64)
    log_probs = np.where(whole == NEGATIVE_ZERO, -0.0, whole / 1e6)
    parts = np.split(log_probs, asked.sum(1).cumsum()[:-1])
    numbers = [(item, sample, seed) for item, sample, seed in number.tolist()]
    queries = [Query(ids.tolist(), (~at).tolist(), at.tolist()) for ids, at in zip(tokens, asked, strict=True)]
    answers = [(ids[at], own) for ids, at, own in zip(tokens, asked, parts, strict=True)]
    yield from map(as_line, lines_of(numbers, queries, answers, tokenizer))


def restore(place: Path, tokenizer: PreTrainedTokenizerBase) -> dict[str, bytes]:
    """What a folder of kept texts has of generations: the files by name, of which each is what its record says.

    Raises:
        SystemExit: It has none, one is damaged, a record is missing, or the tokenizer is another.
    """
    files: dict[str, bytes] = {}
    for path in sorted(place.glob(f"*{END}")):
        name = path.name.removesuffix(END)
        record: dict[str, Any] | None = record_of(place / f"{name}.jsonl")
        if record is None:
            raise SystemExit(f"{path} has no record beside it, {name}.json.")
        if record["tokenizer_hash"] != tokenizer_hash(tokenizer):
            raise SystemExit(f"{path} was drawn with another tokenizer: name that of its corpus, CORPUS/tokenizer.")
        try:
            lines = b"".join(unpack(path.read_bytes(), tokenizer))
        except (lzma.LZMAError, BadZipFile, EOFError, KeyError, ValueError) as error:
            raise SystemExit(f"{path} is damaged: {error}") from error
        if hashlib.sha256(lines).hexdigest() != record["sha256"]:
            raise SystemExit(f"{path} does not make the file that its record describes.")
        files |= {f"{name}.jsonl": lines, f"{name}.json": (place / f"{name}.json").read_bytes()}
    if not files:
        raise SystemExit(f"{place} has no kept texts (*{END}).")
    return files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kept", type=Path, help="a folder with kept texts")
    parser.add_argument("tokenizer", help="the folder of their tokenizer")
    parser.add_argument("-o", "--output", required=True, type=Path, help="a folder that is not there yet")
    args = parser.parse_args()
    if args.output.exists():
        raise SystemExit(f"{args.output} is there already: name another folder.")
    files = restore(args.kept, AutoTokenizer.from_pretrained(args.tokenizer, trust_remote_code=False))
    args.output.mkdir(parents=True)
    for name, content in files.items():
        (args.output / name).write_bytes(content)
    print(f"wrote {len(files) // 2} modes into {args.output}")


if __name__ == "__main__":
    main()
