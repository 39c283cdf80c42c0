"""Build the training corpus of the default adapter: Wikipedia, Python, other code, other languages, short sentences.

    python default-model/default_corpus.py --evaluation -o corpus/evaluation
    python default-model/default_corpus.py --wikipedia wiki.jsonl.xz -o corpus \\
        --against wikitext103.test.raw wikitext103.valid.tokens humaneval.jsonl.gz
    acgpt prepare 'corpus/train-*.jsonl' --tokenizer default -o data/default

| kind | share | text | drawn evenly over |
|---|---|---|---|
| wikipedia | 55 % | articles of a .jsonl file ("text"), which may be compressed (.gz, .xz) | |
| python | 20 % | the running interpreter's standard library, and wheels from PyPI | packages |
| code | 15 % | other languages, from PyPI, npm and Debian | programming languages |
| languages | 7 % | documentation in European languages other than English | languages |
| sentences | 3 % | glosses and examples of WordNet, fortunes, sentences of the articles that are left over | sources |

The packages are in default_corpus.json, with versions and licences; packages.py checks them against the metadata.
Files are left out if they are over 200 kB, minified, generated, not UTF-8 text, licences, mostly digits, copies of
another file (whitespace aside), or state a copyleft licence. What overlaps the texts of --against is removed:
overlap.py says how.

Output: train-KIND.jsonl and heldout-KIND.jsonl, in random order, with lines of {"text", "source", "licence"}, and
manifest.json with counts, packages and settings. Held-out documents are not in the train part. The same inputs and seed
give the same files. If the program is interrupted, run it again: downloads and finished kinds are kept.

With --evaluation the program writes three sets for measuring, from packages that the training corpus does not use:
reviews.jsonl (product reviews), abstracts.jsonl (PubMed) and code.jsonl, with texts of at least 300 tokens.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import random
import shlex
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Any

import packages
from corpus_readers import (
    LANGUAGE,
    READERS,
    Document,
    fingerprint,
    read_articles,
    single_sentences,
    standard_library,
    unfit,
)
from overlap import Kept, Runs, read_texts, summary
from packages import Package

from acgpt.common.files import write_atomically, write_json
from acgpt.data.tokenizer import load
from acgpt.errors import InputError, OutputError

SHARES = {"wikipedia": 0.55, "python": 0.20, "code": 0.15, "languages": 0.07, "sentences": 0.03}
ENCODED = 256  # documents per call of the tokenizer
SAMPLE = 200  # documents of a kind whose tokens are counted in advance
EVALUATION = {"reviews": "reviews", "abstracts": "abstracts", "evaluation-code": "code"}  # kinds of packages, and files
EVALUATION_TOKENS = (300, 2_000)  # least and most of a text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wikipedia", type=Path, metavar="JSONL", help='articles: lines of {"text": …}')
    parser.add_argument("--packages", type=Path, default=Path(__file__).with_suffix(".json"), help="list of packages")
    parser.add_argument("--against", type=Path, nargs="+", default=[], metavar="FILE", help="texts of benchmarks")
    parser.add_argument(
        "--kinds", nargs="+", choices=SHARES, default=list(SHARES), help="kinds to write; all if absent"
    )
    parser.add_argument("--tokens", type=float, default=120e6, help="tokens of all kinds together, about")
    parser.add_argument(
        "--held-out", type=float, default=0.005, metavar="SHARE", help="share of the documents held out"
    )
    parser.add_argument("--evaluation", action="store_true", help="write the evaluation sets instead of the corpus")
    parser.add_argument("--count", type=int, default=300, help="texts of each evaluation set")
    parser.add_argument("--tokenizer", default="default", help="as in `acgpt prepare`")
    parser.add_argument("--cache", type=Path, help="folder of downloads (default: OUTPUT/packages)")
    parser.add_argument("--no-standard-library", action="store_true", help="read only packages for Python")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER")
    args = parser.parse_args()
    args.cache = args.cache or args.output / "packages"
    try:
        write_evaluation(args) if args.evaluation else write_corpus(args)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    except OutputError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from error


def progress(message: str) -> None:
    """Print a line with the time."""
    print(f"{time.strftime('%H:%M:%S')} {message}", file=sys.stderr, flush=True)


# ---- the corpus -----------------------------------------------------------------------------------------------------


def write_corpus(args: argparse.Namespace) -> None:
    """Write all kinds that are not complete yet, and the manifest."""
    if not 0 <= args.held_out <= 0.5 or args.tokens <= 0:
        raise InputError("--held-out must be between 0 and 0.5, and --tokens positive.")
    if "wikipedia" in args.kinds and args.wikipedia is None:
        raise InputError("--wikipedia is needed for the kind wikipedia: name a .jsonl file, or choose other --kinds.")
    listed = [package for package in packages.read_list(args.packages) if package.kind in SHARES]
    needed = [package for package in listed if feeds(package) & set(args.kinds)]
    benchmark_texts = [text for path in args.against for text in read_texts(path)]
    keys = {kind: settings(args, [package for package in listed if kind in feeds(package)]) for kind in args.kinds}
    records = {kind: finished(args.output, kind, key) for kind, key in keys.items()}
    start = time.perf_counter()
    if not all(records.values()):
        packages.fetch(needed, args.cache, progress)
        progress(f"downloads complete after {time.perf_counter() - start:.0f} s; reading the tokenizer and benchmarks")
        runs = Runs(load(args.tokenizer, mask_token=False).backend_tokenizer, benchmark_texts)
        progress(f"{len(runs):,} runs of ten tokens to avoid")
        sources = Sources(args, listed, runs)
        for kind, key in keys.items():
            if records[kind] is None:
                records[kind] = write_kind(args, kind, sources, key)
    manifest = {
        "command": shlex.join(["python", *sys.argv]),
        "seed": args.seed,
        "tokens_asked": args.tokens,
        "held_out": args.held_out,
        "tokenizer": args.tokenizer,
        "against": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in args.against},
        "python": sys.version.split()[0],
        "kinds": {
            kind: {name: value for name, value in record.items() if name != "key"} for kind, record in records.items()
        },
        "packages": [asdict(package) for package in needed],
    }
    write_json(args.output / "manifest.json", manifest)
    print_counts(records)


def feeds(package: Package) -> set[str]:
    """Return the kinds of text that a package has. Its files decide between Python and other code."""
    return {"python", "code"} if package.kind in ("python", "code") else {package.kind}


def settings(args: argparse.Namespace, listed: Sequence[Package]) -> str:
    """Return a hash of all that determines the output, to recognise kinds that are complete."""
    files = [path for path in (args.wikipedia, *args.against) if path is not None]
    for path in files:
        if not path.is_file():
            raise InputError(f"there is no file {path}.")
    inputs = [(path.name, path.stat().st_size) for path in files]
    values = [args.tokens, args.seed, args.held_out, args.tokenizer, args.no_standard_library, sys.version]
    return hashlib.sha256(json.dumps([inputs, values, [asdict(p) for p in listed]]).encode()).hexdigest()


def finished(folder: Path, kind: str, key: str) -> dict[str, Any] | None:
    """Return the record of a kind that an earlier run with the same settings completed."""
    try:
        record = json.loads((folder / f"record-{kind}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if record.get("key") == key else None


def write_kind(args: argparse.Namespace, kind: str, sources: Sources, key: str) -> dict[str, Any]:
    """Collect, sample, decontaminate and write a kind of text. Return its record, which is written last."""
    start = time.perf_counter()
    chosen, filtered = sources.draw(kind)
    progress(f"{kind}: {len(chosen):,} documents; decontaminating")
    results: list[Kept] = []
    for first in range(0, len(chosen), ENCODED):
        results += sources.runs.clean([document.text for document in chosen[first : first + ENCODED]])
        if first // ENCODED % 8 == 7:
            progress(f"{kind}: {len(results):,}/{len(chosen):,}, {sum(kept.tokens for kept in results):,} tokens")
    held_out = round(args.held_out * len(chosen))
    parts = {"heldout": range(held_out), "train": range(held_out, len(chosen))}
    record: dict[str, Any] = {"key": key, "filtered": dict(filtered), "overlap": dict(summary(results))}
    groups: Counter[str] = Counter()
    for part, indices in parts.items():
        lines = []
        counts = Counter(documents=0, bytes=0, tokens=0)
        for i in indices:
            for text, tokens in results[i].pieces:
                lines.append(json_line(text, chosen[i]))
                counts.update(documents=1, bytes=len(text.encode()), tokens=tokens)
                groups[chosen[i].group] += tokens
        write_atomically(args.output / f"{part}-{kind}.jsonl", lines)
        record[part] = dict(counts)
    available = dict(sources.available[kind].most_common())
    record |= {
        "tokens_of": dict(groups.most_common()),
        "characters_available": available,
        "seconds": round(time.perf_counter() - start, 1),
    }
    write_json(args.output / f"record-{kind}.json", record)
    progress(f"{kind}: {record['train']['tokens']:,} tokens in {record['seconds']} s")
    return record


def json_line(text: str, document: Document) -> bytes:
    """Return a line of the output."""
    row = {"text": text, "source": document.source, "licence": document.licence}
    return json.dumps(row, ensure_ascii=False).encode() + b"\n"


def draw_evenly(documents: Sequence[Document], size: float) -> tuple[list[Document], list[Document]]:
    """Choose documents of this many characters together, and as equal a share of every group as its size allows.

    Returns:
        The chosen documents and the others, in the order in which they were given.
    """
    available: Counter[str] = Counter()
    for document in documents:
        available[document.group] += len(document.text)
    limits, left = {}, size
    for i, (group, length) in enumerate(sorted(available.items(), key=lambda item: (item[1], item[0]))):
        limits[group] = min(length, left / (len(available) - i))
        left -= limits[group]
    chosen, rest = [], []
    used: Counter[str] = Counter()
    for document in documents:
        fits = used[document.group] < limits[document.group]
        used[document.group] += len(document.text) * fits
        (chosen if fits else rest).append(document)
    return chosen, rest


def print_counts(records: dict[str, dict[str, Any]]) -> None:
    """Print a table of the kinds."""
    print(f"{'kind':<10} {'documents':>10} {'MB':>7} {'M tokens':>9} {'held out':>9}  overlap")
    for kind, record in records.items():
        train = record["train"]
        lost = ", ".join(f"{count:,} {what}" for what, count in sorted(record["overlap"].items()))
        print(
            f"{kind:<10} {train['documents']:>10,} {train['bytes'] / 1e6:>7.1f} {train['tokens'] / 1e6:>9.2f} "
            f"{record['heldout']['tokens'] / 1e6:>9.2f}  {lost}"
        )


# ---- where documents come from --------------------------------------------------------------------------------------


class Sources:
    """All documents of each kind, before sampling.

    `left_over` are Wikipedia articles in neither part, of which single sentences are taken.
    """

    def __init__(self, args: argparse.Namespace, listed: Sequence[Package], runs: Runs) -> None:
        self.args, self.listed, self.runs = args, listed, runs
        self.left_over: list[Document] | None = None
        self.source_code: dict[str, list[Document]] | None = None
        self.filtered: dict[str, Counter[str]] = defaultdict(Counter)
        self.available: dict[str, Counter[str]] = defaultdict(Counter)  # characters of each group

    def draw(self, kind: str) -> tuple[list[Document], Counter[str]]:
        """Choose documents of a kind, in random order, and count the files that were left out, by reason."""
        documents, filtered = self.documents(kind)
        random.Random(f"{self.args.seed} {kind}").shuffle(documents)
        if not documents:
            raise InputError(f"there are no documents of the kind {kind}: add packages, or leave it out with --kinds.")
        sample = [document.text for document in documents[:SAMPLE]]
        per_token = sum(map(len, sample)) / max(1, sum(map(len, self.runs.encode(sample))))
        for document in documents:
            self.available[kind][document.group] += len(document.text)
        chosen, rest = draw_evenly(documents, self.args.tokens * SHARES[kind] * per_token)
        if kind == "wikipedia":
            self.left_over = rest
        return chosen, filtered

    def documents(self, kind: str) -> tuple[list[Document], Counter[str]]:
        """Return the documents of a kind and how many files were left out, by reason."""
        if kind == "wikipedia":
            return read_articles(self.args.wikipedia), Counter()
        if kind in ("python", "code"):
            if self.source_code is None:
                self.source_code = self.read_code()
            return self.source_code[kind], self.filtered[kind]
        documents = [d for package in self.listed if package.kind == kind for d in self.read(package)]
        if kind == "sentences" and self.args.wikipedia is not None:
            documents += single_sentences(self.left_over_articles(), self.args.seed)
        unique = {fingerprint(document.text): document for document in documents}
        return list(unique.values()), Counter(copy=len(documents) - len(unique))

    def read(self, package: Package) -> Iterator[Document]:
        """Yield the documents of a package by its reader."""
        if package.reader not in READERS:
            raise InputError(f"{package.label}: there is no reader {package.reader!r}; there are {', '.join(READERS)}.")
        progress(f"reading {package.label}")
        yield from READERS[package.reader](package, packages.members(package, self.args.cache))

    def read_code(self) -> dict[str, list[Document]]:
        """Return the documents of all packages of source code, Python and other."""
        files = [] if self.args.no_standard_library else [standard_library()]
        files += [self.read(package) for package in self.listed if package.kind in ("python", "code")]
        found: dict[str, list[Document]] = {"python": [], "code": []}
        seen: set[bytes] = set()
        for document in itertools.chain.from_iterable(files):
            path = document.source
            language = LANGUAGE[PurePosixPath(path).suffix.lower()]
            kind = "python" if language == "Python" else "code"
            why = unfit(path, document.text)
            mark = fingerprint(document.text)
            if why or mark in seen:
                self.filtered[kind][why or "copy"] += 1
                continue
            seen.add(mark)
            group = document.group if kind == "python" else language
            found[kind].append(Document(document.text, path, document.licence, group))
        return found

    def left_over_articles(self) -> list[Document]:
        """Return the articles that are in neither part of the kind wikipedia."""
        if self.left_over is None:  # an earlier run completed the kind, or it is not written: draw the same again
            self.draw("wikipedia")
        return self.left_over


# ---- evaluation sets ------------------------------------------------------------------------------------------------


def write_evaluation(args: argparse.Namespace) -> None:
    """Write the three evaluation sets and their manifest."""
    listed = [package for package in packages.read_list(args.packages) if package.kind in EVALUATION]
    packages.fetch(listed, args.cache, progress)
    tokenizer = load(args.tokenizer, mask_token=False).backend_tokenizer
    sources = Sources(args, listed, Runs(tokenizer, ()))
    record = {}
    for kind, name in EVALUATION.items():
        documents = [d for package in listed if package.kind == kind for d in sources.read(package)]
        if kind == "evaluation-code":
            documents = [
                Document(d.text, d.source, d.licence, LANGUAGE[PurePosixPath(d.source).suffix.lower()])
                for d in documents
                if unfit(d.source, d.text) is None
            ]
        documents = list({fingerprint(document.text): document for document in documents}.values())
        random.Random(f"{args.seed} {kind}").shuffle(documents)
        chosen = list(itertools.islice(long_texts(in_turns(documents), tokenizer), args.count))
        write_atomically(args.output / f"{name}.jsonl", [json_line(d.text, d) for d in chosen])
        record[name] = {"texts": len(chosen), "groups": dict(Counter(d.group for d in chosen).most_common())}
        progress(f"{name}.jsonl: {len(chosen)} texts")
    manifest = {"command": shlex.join(["python", *sys.argv]), "seed": args.seed, "sets": record}
    write_json(args.output / "manifest.json", manifest | {"packages": [asdict(package) for package in listed]})


def in_turns(documents: Iterable[Document]) -> Iterator[Document]:
    """Yield documents of the groups in turns, until the smallest groups are used up and then the others."""
    groups: dict[str, list[Document]] = defaultdict(list)
    for document in documents:
        groups[document.group].append(document)
    for row in itertools.zip_longest(*(groups[name] for name in sorted(groups))):
        yield from (document for document in row if document is not None)


def long_texts(documents: Iterable[Document], tokenizer: Any) -> Iterator[Document]:
    """Yield the documents of at least 300 tokens; cut those of over 2,000 at the end of a line."""
    least, most = EVALUATION_TOKENS
    for document in documents:
        if len(document.text) < 2 * least:
            continue
        offsets = tokenizer.encode(document.text, add_special_tokens=False).offsets
        if len(offsets) < least:
            continue
        text = document.text
        if len(offsets) > most:
            text = text[: offsets[most][0]].rpartition("\n")[0] or text[: offsets[most][0]]
        yield Document(text, document.source, document.licence, document.group)


if __name__ == "__main__":
    main()
