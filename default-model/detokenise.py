"""Convert WikiText to plain text, an article per line, to evaluate models that were trained on ordinary text.

    python default-model/detokenise.py wikitext103.test.raw > test.jsonl
    acgpt prepare … test=test.jsonl

WikiText (Merity et al. 2016, https://arxiv.org/abs/1609.07843) separates punctuation like the Moses tokenizer, writes
" @-@ " for the hyphen of "well-known", likewise " @,@ " and " @.@ " in numbers, and " = Title = " for headings. Undoing
this is guesswork in places: straight quotation marks open and close in turns, a lone ' after an s is a genitive unless
a quotation is open, and an en dash keeps its spaces except between digits. <unk> and <formula> stay.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

JOINING = {"@-@", "@,@", "@.@", "/", "⁄", "—"}  # no space on either side
BETWEEN_DIGITS = {"–", "-", ":"}  # likewise between digits
CLOSING = {",", ".", ";", ":", "!", "?", "%", ")", "]", "}", "”", "..", "′", "″"}  # no space before
OPENING = {"(", "[", "{", "“", "‘"}  # no space after
PREFIXES = {"$", "£", "€", "¥", "₱", "₩", "#", "−"}  # no space before a digit
COUNTRIES = {"A", "AU", "C", "CA", "CN", "HK", "NT", "NZ", "R", "S", "US"}  # of dollars and yuan: US$
CLITIC = re.compile(r"['’][^\W\d]+")  # Boulter 's, don 't, Xi 'an, l 'Étang
CLITIC_ENDINGS = {"s", "t", "d", "m", "re", "ve", "ll"}  # follow the ’ of a clitic
HEADING = re.compile(r"((?:= )+)(.+?)(?: =)+")


def plain(line: str) -> str:
    """Restore the original form of a line of WikiText."""
    words = line.split()
    text = ""
    glued = True  # whether the next word follows without a space
    quoting = {'"': False, "'": False}
    for i, word in enumerate(words):
        before, after = words[i - 1] if i else "", words[i + 1] if i + 1 < len(words) else ""
        left, right = sides(word, before, after)
        if word == '"' or (word == "'" and not genitive(before, quoting["'"], "'" in words[i + 1 :])):
            left, right = quoting[word], not quoting[word]
            quoting[word] = not quoting[word]
        text += ("" if glued or left else " ") + (word.strip("@") if word in JOINING else word)
        glued = right
    return text


def genitive(before: str, quoting: bool, more: bool) -> bool:
    """Return whether a lone ' belongs to a genitive (the players ' bus) or to a shortened word."""
    return not quoting and (before.endswith(("s", "z", "x")) or not more)


def sides(word: str, before: str, after: str) -> tuple[bool, bool]:
    """Return whether a word loses the space before and after it. Straight quotation marks depend on more."""
    figures = before[-1:].isdigit() and after[:1].isdigit()
    if word in JOINING or (word in BETWEEN_DIGITS and figures):
        return True, True
    if word in PREFIXES:
        figure = after[:1].isdigit() and not (word == "−" and before[-1:].isdigit())
        return figure and before in COUNTRIES, figure
    if word == "&":  # AT&T, R&D
        short = all(len(side) <= 2 and side.isupper() for side in (before, after))
        return short, short
    if word == "°":  # 14.5 °C, but 30° and 5° N
        return after not in ("C", "F"), after in ("C", "F")
    if word == "’":
        return True, after in CLITIC_ENDINGS
    return word in CLOSING or word == "'" or bool(CLITIC.fullmatch(word)), word in OPENING


def articles(lines: Iterable[str]) -> Iterator[str]:
    """Yield the articles: the title, a blank line, then a line per heading and paragraph.

    A title is a line " = Title = " that is not within a sentence, as some are that come from formulas.
    """
    nonempty = [line for line in map(str.strip, lines) if line]
    article: list[str] = []
    for before, line, after in zip(["", *nonempty], nonempty, [*nonempty[1:], ""], strict=False):
        heading = HEADING.fullmatch(line)
        in_sentence = len(before.split()) >= 8 and before[-1].isalnum() and not after[:1].isupper()
        if heading and heading[1] == "= " and not in_sentence:
            if article:
                yield "\n".join(article)
            article = [plain(heading[2]), ""]
        else:
            article.append(plain(heading[2] if heading and heading[1] != "= " else line))
    if article:
        yield "\n".join(article)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wikitext", type=Path, help="a file of WikiText: wikitext103.test.raw, wiki.test.tokens …")
    args = parser.parse_args()
    with args.wikitext.open(encoding="utf-8") as lines:
        for article in articles(lines):
            sys.stdout.write(json.dumps({"text": article}) + "\n")


if __name__ == "__main__":
    main()
