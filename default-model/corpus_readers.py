"""Documents for the default adapter's corpus: how the files of packages become texts, and which files are left out."""

from __future__ import annotations

import gzip
import hashlib
import html.parser
import io
import json
import lzma
import random
import re
import string
import sys
import sysconfig
import tarfile
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from infilling_tasks import sentences as sentence_spans
from overlap import OPENERS
from packages import Member, Package

from acgpt.errors import InputError, reason

LARGEST = 200_000  # bytes of a file
LONGEST_LINE = 1_000  # characters
MINIFIED = 150  # characters per line, on average
SMALLEST = 200  # characters of a file
JOINED_REVIEWS = 1_400  # characters, over 300 tokens
PARAGRAPH = 100  # characters: shorter lines of articles are headings
NAVIGATION = 12  # pages: a line on more of them is not text
ENGLISH = ("C", "en", "en-US")
EUROPEAN = re.compile(r"(ca|cs|da|de|es|fi|fr|gl|hr|hu|it|lt|lv|nb|nl|nn|no|pl|pt|ro|sl|sv|tr)\b")

LANGUAGES = {
    "Python": "py pyi",
    "JavaScript": "js mjs cjs jsx",
    "TypeScript": "ts tsx",
    "C": "c h",
    "C++": "cc cpp cxx hpp hh",
    "Go": "go",
    "Rust": "rs",
    "Java": "java",
    "shell": "sh bash bats zsh",
    "SQL": "sql",
    "HTML": "html htm vue svelte",
    "CSS": "css scss less",
    "JSON": "json",
    "YAML": "yaml yml",
    "Markdown": "md",
}
LANGUAGE = {f".{suffix}": name for name, suffixes in LANGUAGES.items() for suffix in suffixes.split()}
DERIVED = re.compile(
    r"(^|/)(dist|build|umd|esm?\d*|_esm\d*|f?esm\d+|cjs|commonjs|bundles?|node_modules|vendor|__snapshots__)/"
)
MINIFIED_NAME = re.compile(r"[.-](min|bundle|pack)\.|\.lock$|(^|/)(package|npm)-lock|-lock\.(json|yaml)$")
LICENCE_NAME = re.compile(
    r"(^|/)(licen[cs]es?|copying|copyright|notices?|third.?party\w*|patents)\b[^/]*$", re.IGNORECASE
)
LICENCE_TEXT = re.compile(
    r"[\s#*/;<!-]*((The )?(MIT|ISC|BSD|Apache)\b.{0,40}Licen[cs]e|Apache License|Permission is hereby granted"
    r"|Redistribution and use in source|GNU (LESSER )?GENERAL PUBLIC|Creative Commons Legal Code)",
    re.IGNORECASE,
)
COPYLEFT = re.compile(
    r"GNU\s+(Lesser|Library|Affero)?\s*General\s+Public|\b[AL]?GPL|Mozilla\s+Public\s+Licen|\bMPL[- ]", re.IGNORECASE
)
GENERATED = re.compile(
    r"@generated|do not (edit|modify)|auto-?generated|automatically (generated|created)|generated (by|from|file|code)",
    re.IGNORECASE,
)
LETTERS = string.ascii_letters.encode() + bytes(range(128, 256))  # all bytes of other scripts
CONTROL = re.compile(r"[\x00-\x08\x0b\x0e-\x1f\x7f\ufffd]")


@dataclass(frozen=True)
class Document:
    """A text, where it comes from, and the group that it is counted in when texts are drawn evenly."""

    text: str
    source: str
    licence: str
    group: str = ""


# ---- articles and source code ---------------------------------------------------------------------------------------


def read_articles(path: Path) -> list[Document]:
    """Return the articles of a .jsonl file, each but once.

    Raises:
        InputError: A line is not an object with "text".
    """
    number = 0
    documents: dict[bytes, Document] = {}
    try:
        with OPENERS.get(path.suffix, open)(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                text = json.loads(line)["text"]
                documents.setdefault(fingerprint(text), Document(text, f"wikipedia:{number}", "CC-BY-SA-3.0"))
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, lzma.LZMAError) as error:
        raise InputError(f'cannot read {path}, line {number}: {reason(error)}. Lines need a "text".') from error
    return list(documents.values())


def standard_library() -> Iterator[Document]:
    """Yield the files of the running interpreter's standard library."""
    folder = Path(sysconfig.get_path("stdlib"))
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder).as_posix()
        if name.startswith(("site-packages/", "dist-packages/", "config-")) or path.stat().st_size > LARGEST:
            continue
        text = decode(path.read_bytes())
        if text is not None:
            yield Document(text, f"cpython@{sys.version.split()[0]}/{name}", "PSF-2.0", "cpython")


def read_files(package: Package, files: Iterable[Member]) -> Iterator[Document]:
    """Yield the files in programming languages. Of large ones only so much that `unfit` knows them as such."""
    for member in files:
        if PurePosixPath(member.path).suffix.lower() in LANGUAGE:
            text = member.read(LARGEST + 1).decode("utf-8-sig", errors="replace")
            text = unix_text(text) if member.size <= LARGEST else text
            yield Document(text, f"{package.label}/{member.path}", package.licence, package.name)


def unix_text(text: str) -> str:
    """Return a text with Unix newlines."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def decode(data: bytes) -> str | None:
    """Return UTF-8 text with Unix newlines, or None if it is not text."""
    try:
        return unix_text(data.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return None


def fingerprint(text: str) -> bytes:
    """Return a hash that ignores whitespace."""
    return hashlib.blake2b("".join(text.split()).encode(errors="replace"), digest_size=16).digest()


def unfit(path: str, text: str) -> str | None:
    """Return why a file of source code is not used, or None."""
    head = text[:3000]
    lines = text.splitlines()
    data = "".join(text.split()).encode(errors="replace")
    checks: dict[str, Callable[[], object]] = {
        "small": lambda: len(text.strip()) < SMALLEST,
        "large": lambda: len(text) > LARGEST or len(text.encode(errors="replace")) > LARGEST,
        "not text": lambda: CONTROL.search(text),
        "minified": lambda: MINIFIED_NAME.search(path) or len(text) > MINIFIED * len(lines),
        "long line": lambda: any(len(line) > LONGEST_LINE for line in lines),
        "derived": lambda: DERIVED.search(path),
        "licence": lambda: LICENCE_NAME.search(path) or LICENCE_TEXT.match(text),
        "copyleft": lambda: COPYLEFT.search(head),
        "generated": lambda: GENERATED.search(head[:1500]),
        "data": lambda: share(data, LETTERS) < 0.45 or share(data, b"0123456789") > 0.25,
    }
    return next((name for name, check in checks.items() if check()), None)


def share(data: bytes, kind: bytes) -> float:
    """Return the share of bytes that are of a kind."""
    return 1 - len(data.translate(None, kind)) / max(1, len(data))


# ---- prose ----------------------------------------------------------------------------------------------------------

BLOCKS = {"p", "li", "dd", "dt", "td", "th", "title", "pre", *(f"h{i}" for i in range(1, 7))}
HIDDEN = {"script", "style", "nav", "head"}


class Paragraphs(html.parser.HTMLParser):
    """The text of the blocks of an HTML page, one line per block; `pre` keeps its lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.text = ""
        self.hidden = 0
        self.preformatted = False

    def finish_block(self) -> None:
        """Add the text so far as a line."""
        line = self.text.strip("\n").rstrip() if self.preformatted else " ".join(self.text.split())
        if line.strip():
            self.lines.append(line)
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.hidden += tag in HIDDEN
        if tag in BLOCKS or tag in ("div", "br", "tr"):
            self.finish_block()
        self.preformatted |= tag == "pre"

    def handle_endtag(self, tag: str) -> None:
        self.hidden -= tag in HIDDEN and self.hidden > 0
        if tag in BLOCKS or tag == "div":
            self.finish_block()
        self.preformatted &= tag != "pre"

    def handle_data(self, data: str) -> None:
        self.text += data * (not self.hidden)


def html_lines(page: str) -> list[str]:
    """Return the paragraphs of an HTML page."""
    parser = Paragraphs()
    parser.feed(page)
    parser.close()
    parser.finish_block()
    return parser.lines


def mallard_lines(page: str) -> list[str]:
    """Return the titles and paragraphs of a page of GNOME's help (http://projectmallard.org)."""
    try:
        root = ElementTree.fromstring(page)
    except ElementTree.ParseError:
        return []
    for parent in root.iter():
        for child in list(parent):
            if child.tag.endswith("}info"):
                parent.remove(child)
    lines = [
        " ".join("".join(element.itertext()).split())
        for element in root.iter()
        if element.tag.rpartition("}")[2] in ("title", "p")
    ]
    return [line for line in lines if line]


def read_pages(package: Package, files: Iterable[Member]) -> Iterator[Document]:
    """Yield pages of translated documentation: HTML or Mallard files in a folder for each language."""
    pages: dict[str, list[tuple[str, list[str]]]] = defaultdict(list)
    for member in files:
        parts = PurePosixPath(member.path).parts
        language = next((part for part in parts[:-1] if re.fullmatch(r"[a-z]{2}([-_][A-Z]{2})?|C", part)), None)
        suffix = PurePosixPath(member.path).suffix
        if language is None or suffix not in (".html", ".page") or member.size > LARGEST:
            continue
        text = decode(member.read())
        if text is not None:
            lines = html_lines(text) if suffix == ".html" else mallard_lines(text)
            pages[language].append((member.path, lines))
    yield from translated(package, pages)


def read_catalogues(package: Package, files: Iterable[Member]) -> Iterator[Document]:
    """Yield the translations in gettext catalogues (.po), a line per message of at least three words."""
    pages: dict[str, list[tuple[str, list[str]]]] = defaultdict(list)
    for member in files:
        language = PurePosixPath(member.path).parts[-3]  # …/LANGUAGE/LC_MESSAGES/NAME.po
        text = decode(member.read())
        blocks = re.findall(r'^msgstr(?:\[\d\])? ((?:"(?:.*)"\s*\n?)+)', text or "", re.MULTILINE)
        messages = ["".join(map(json_string, re.findall(r'"(?:[^"\\]|\\.)*"', block))) for block in blocks]
        lines = [" ".join(message.split()) for message in messages[1:] if len(message.split()) >= 3]
        pages[language].append((member.path, list(dict.fromkeys(lines))))
    yield from translated(package, pages)


def json_string(text: str) -> str:
    """Return a string in quotation marks with its escapes replaced, "" if it has unusual ones."""
    try:
        return str(json.loads(text, strict=False))
    except ValueError:
        return ""


def read_electron(package: Package, files: Iterable[Member]) -> Iterator[Document]:
    """Yield the pages of electron-i18n: a JSON file of HTML pages by language and address."""
    pages: dict[str, list[tuple[str, list[str]]]] = {}
    for member in files:
        for language, by_address in json.loads(member.read()).items():
            pages[language] = [(f"{language}{path}", html_lines(page["html"])) for path, page in by_address.items()]
    yield from translated(package, pages)


def read_declarations(package: Package, files: Iterable[Member]) -> Iterator[Document]:
    """Yield the Universal Declaration of Human Rights in each language, named by the file."""
    for member in files:
        text = decode(member.read())
        if text is not None:
            body = "\n".join(html_lines(text))
            yield Document(body, f"{package.label}/{member.path}", package.licence, "declarations")


def translated(package: Package, pages: dict[str, list[tuple[str, list[str]]]]) -> Iterator[Document]:
    """Yield pages without the paragraphs that are still in English, those of the English pages, and without navigation.

    A page that is mostly English is left out. Navigation is what many pages of a language have in common.
    """
    english = {line for language in ENGLISH for _, lines in pages.get(language, ()) for line in lines}
    for language in sorted(set(pages) - set(ENGLISH)):
        if not EUROPEAN.match(language.replace("_", "-")):
            continue
        uses = Counter(line for _, lines in pages[language] for line in set(lines))
        for path, lines in pages[language]:
            kept = [line for line in lines if line not in english and uses[line] <= NAVIGATION]
            text = "\n".join(kept)
            if len(text) >= SMALLEST and len(text) > sum(map(len, lines)) / 2:
                group = re.split("[-_]", language)[0]
                yield Document(text, f"{package.label}/{path}", package.licence, group)


def read_wordnet(package: Package, files: Iterable[Member]) -> Iterator[Document]:
    """Yield WordNet's definitions ("word: definition") and the sentences that are given as examples."""
    for member in files:
        for line in member.read().decode("utf-8").splitlines():
            if line.startswith(" ") or " | " not in line:
                continue
            entry, gloss = line.split(" | ", 1)
            word = entry.split()[4].partition("(")[0].replace("_", " ")
            source = f"{package.label}/{PurePosixPath(member.path).name}/{entry.split()[0]}"
            definition = gloss.split('; "')[0].strip(" ;")
            yield Document(f"{word}: {definition}", source, package.licence, "WordNet")
            for example in re.findall(r'"([^"]+)"', gloss):
                if len(example.split()) >= 5:
                    yield Document(example.strip(), source, package.licence, "WordNet")


def read_fortunes(package: Package, files: Iterable[Member]) -> Iterator[Document]:
    """Yield the sayings of files of fortune, which are separated by lines of %."""
    for member in files:
        text = decode(member.read())
        for i, saying in enumerate(re.split(r"^%\s*$", text or "", flags=re.MULTILINE)):
            if 20 <= len(saying.strip()) <= 2_000 and not CONTROL.search(saying):
                yield Document(saying.strip("\n"), f"{package.label}/{member.path}/{i}", package.licence, "fortunes")


def single_sentences(articles: Sequence[Document], seed: int, most: int = 24) -> Iterator[Document]:
    """Yield one to three consecutive sentences at a time, of random paragraphs of articles."""
    rng = random.Random(f"{seed} sentences")
    for article in articles:
        paragraphs = [line for line in article.text.split("\n") if len(line) > PARAGRAPH]
        for i, paragraph in enumerate(rng.sample(paragraphs, min(most, len(paragraphs)))):
            spans = list(sentence_spans(paragraph))
            if spans:
                first = rng.randrange(len(spans))
                last = min(first + rng.choice((0, 0, 0, 1, 2)), len(spans) - 1)
                text = paragraph[spans[first][0] : spans[last][1]]
                if len(text.split()) >= 5:
                    yield Document(text, f"{article.source}/{i}", article.licence, "Wikipedia")


def read_reviews(package: Package, files: Iterable[Member]) -> Iterator[Document]:
    """Yield product reviews of VADER's test data, whose sentences are numbered REVIEW_SENTENCE."""
    reviews: dict[str, list[str]] = defaultdict(list)
    for member in files:
        with tarfile.open(fileobj=io.BytesIO(member.read())) as archive:
            file = archive.extractfile("hutto_ICWSM_2014/amazonReviewSnippets_GroundTruth.txt")
            for line in file.read().decode("utf-8", errors="replace").splitlines():
                number, _, sentence = line.split("\t", 2)
                reviews[number.partition("_")[0]].append(sentence.strip())
    numbers, text = [], ""
    for number, lines in reviews.items():  # short reviews are joined with the next ones, mostly of the same product
        numbers.append(number)
        text += "\n\n" * bool(text) + " ".join(lines)
        if len(text) >= JOINED_REVIEWS:
            yield Document(text, f"{package.label}/{'+'.join(numbers)}", package.licence)
            numbers, text = [], ""


def read_abstracts(package: Package, files: Iterable[Member]) -> Iterator[Document]:
    """Yield the abstracts of PubMed dumps (.xml.gz)."""
    for member in files:
        with gzip.open(io.BytesIO(member.read())) as content:
            for _, element in ElementTree.iterparse(content):
                if element.tag == "PubmedArticle":
                    parts = ["".join(part.itertext()).strip() for part in element.iter("AbstractText")]
                    name = f"{package.label}/{element.findtext('.//PMID')}"
                    yield Document("\n".join(filter(None, parts)), name, package.licence)
                    element.clear()


READERS: dict[str, Callable[[Package, Iterable[Member]], Iterator[Document]]] = {
    "files": read_files,
    "pages": read_pages,
    "catalogues": read_catalogues,
    "electron": read_electron,
    "declarations": read_declarations,
    "wordnet": read_wordnet,
    "fortunes": read_fortunes,
    "reviews": read_reviews,
    "abstracts": read_abstracts,
}
