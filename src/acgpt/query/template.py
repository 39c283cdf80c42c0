r"""Templates: texts in which {{double braces}} mark what is asked.

    The capital of France is {{Paris}}.          how likely is "Paris" here, given all the rest?
    The capital of {{_}} is Paris.               a gap: fill in any text
    The capital of {{France|Italy}} is Paris.    alternatives: which one fits better?
    It is {{not |}}raining.                      an alternative may be empty: "not ", or nothing?

Everything outside the braces is given: the model conditions on it, whether it comes before or after a slot. A template
may have any number of slots, adjacent or apart, on any line. Everything between the braces counts, including white
space: `{{a | b}}` is "a " or " b".

    {{text}}     asks for this text
    {{a|b|c}}    asks for one of these texts
    {{_}}        a gap: asks for any text, also for none
    {{_3-12}}    a gap of 3 to 12 tokens
    {{_:\d+}}    a gap whose text matches a regular expression; {{_1-3:\d+}} bounds its tokens, too
    {{_4}}       a blank: asks for exactly 4 tokens
    {{?3}}       3 unknown tokens: neither given nor asked
    {{_…  {{?…   reserved otherwise

>>> parse("The capital of {{_}} is {{Paris|Rome}}.")  # doctest: +NORMALIZE_WHITESPACE
[Given(text='The capital of '), Slot(alternatives=(), blank=None, at=15, gap=Gap(least=0, most=None, pattern=None)),
 Given(text=' is '), Slot(alternatives=('Paris', 'Rome'), blank=None, at=24), Given(text='.')]

Gaps and blanks
---------------
A gap may begin and end at any character: in the middle of a word, after a line break, before a bracket. The finished
text contains the given text to the letter. Tokens at its borders that another text there could merge with are
generated again, under the constraint that their bytes agree (see `acgpt.query.healing`). The length of a gap counts the
tokens between the last token before it and the first one after it that are kept.

A blank, `{{_4}}`, asks for a number of tokens between the tokens of the given text, as these are next to a word. It is
the exact p(4 tokens | all others), without any constraint. Use a gap unless you mean tokens.

White space
-----------
Models read tokens, and most tokenizers join a space to the word after it. A token that is partly in a slot is asked as
a whole:

    The capital of France is {{Paris}}           asks for the token " Paris", with the space
    The capital of France is{{ Paris}}           asks the same
    un{{happy}}                                  asks for "unhappy", if that is one token

White space that the tokenizer joins to the next word belongs to the blank's first token. This is at most one space:

    The capital of {{_2}} is Paris.              up to " of" is given; the blank could be " Fran" and "ce"
    The capital of{{_2}} is Paris.               asks the same: the model decides whether a space comes first
    def f(x):⏎    {{_5}}                         the line break and three spaces are given, the fourth is not

Braces and backslashes
----------------------
Write `\{{` for a `{{` that is text. Before `{{`, and only there, two backslashes stand for one; all other backslashes
outside of slots are plain text, so LaTeX, regular expressions and Windows paths need no escapes. `}}` outside of a slot
is text. Braces are paired from the right, so a brace may be next to a slot:

    \{{ is no slot }}                            the text "{{ is no slot }}"
    C:\\{{Users}}                                the text "C:\", then a slot
    \frac{{{1}}}{2}                              the text "\frac{", a slot, the text "}{2}"

Inside a slot a backslash makes any of `\ { } | _ ?` plain text; before other characters it is a plain backslash.
A slot ends at the first `}}`; a regular expression at the last pair of the first run of braces: `{{_:\d{4}}}`.

    {{a\|b}}                                     asks for "a|b"
    {{\_4}}                                      asks for "_4"
    {{\{x\}}}                                    asks for "{x}"

Programs can use two functions that escape any text:

    acgpt.escape(text)                           for given text, outside of slots
    acgpt.escape_slot(text)                      for asked text, between {{ and }}: a whole slot or one alternative

>>> context, asked = "In C, {{0}} and a|b:", ["a|b", "_x"]
>>> template = escape(context, before_slot=True) + "{{" + "|".join(map(escape_slot, asked)) + "}}"
>>> parse(template)
[Given(text='In C, {{0}} and a|b:'), Slot(alternatives=('a|b', '_x'), blank=None, at=21)]
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from acgpt.errors import QueryError, TemplateError


@dataclass(frozen=True)
class Given:
    """Given text."""

    text: str


@dataclass(frozen=True)
class Gap:
    """What may fill a gap.

    Args:
        least: Minimum number of tokens.
        most: Maximum number of tokens; `None` if there is none.
        pattern: Regular expression for the whole text of the gap; `None` allows any text.
    """

    least: int = 0
    most: int | None = None
    pattern: str | None = None


@dataclass(frozen=True)
class Slot:
    """A slot: asked text, alternatives, a blank, a gap, or unknown tokens.

    Args:
        alternatives: The possible texts: one for `{{text}}`, several for `{{a|b}}`, none otherwise.
        blank: Number of tokens of a blank; `None` for other slots.
        at: Offset of its `{{` in the template, in characters from 0.
        gap: What may fill a gap; `None` for other slots.
        unknown: Number of unknown tokens; `None` for other slots.
    """

    alternatives: tuple[str, ...]
    blank: int | None
    at: int
    gap: Gap | None = None
    unknown: int | None = None

    def __repr__(self) -> str:
        fields = [f"alternatives={self.alternatives!r}", f"blank={self.blank!r}", f"at={self.at!r}"]
        fields += [f"{name}={value!r}" for name in ("gap", "unknown") if (value := getattr(self, name)) is not None]
        return f"Slot({', '.join(fields)})"

    @property
    def tokens(self) -> int | None:
        """Number of tokens of a blank or of unknown tokens; `None` for other slots."""
        return self.blank if self.unknown is None else self.unknown


Part = Given | Slot

_OPENING = re.compile(r"(?<!\\)(\\*)\{\{(?=(?:\{\{)*(?!\{))")  # backslashes, then braces, paired from the right
_BLANK = re.compile(r"_(?:([0-9]+)(?:-([0-9]+))?)?(?:\}\}|:(.*?)\}\}(?!\}))", re.DOTALL)
_UNKNOWN = re.compile(r"\?([0-9]+)\}\}")
_IN_SLOT = re.compile(r"(?P<escaped>\\[\\{}|_?])|(?P<mark>\{\{|\}\}|\|)|[^\\{}|]+|.", re.DOTALL)
_LONGEST_BLANK = 1_000_000  # far beyond any model's context, so that a typo cannot exhaust memory


def parse(template: str) -> list[Part]:
    r"""Parse a template into its parts. Given text between two slots is one `Given`, left out if empty.

    Raises:
        TemplateError: A slot is malformed; the message points at it.

    >>> parse(r"a\{{b {{c|}}")
    [Given(text='a{{b '), Slot(alternatives=('c', ''), blank=None, at=6)]
    """
    parts: list[Part] = []
    texts: list[str] = []  # of the given text so far
    offset = 0
    while opening := _OPENING.search(template, offset):
        backslashes = len(opening[1])
        texts += (template[offset : opening.start()], "\\" * (backslashes // 2))
        if backslashes % 2:
            texts.append("{{")
            offset = opening.end()
            continue
        if given := "".join(texts):
            parts.append(Given(given))
        slot, offset = _slot(template, opening.end() - 2)
        texts = []
        parts.append(slot)
    given = "".join([*texts, template[offset:]])
    return [*parts, Given(given)] if given else parts


def check_slots(parts: Iterable[Part], template: str, scored: bool = False) -> list[Slot]:
    """Return the slots of a template to score or sample.

    Args:
        parts: A result of `parse`.
        template: The template, for errors.
        scored: Whether the slots need a text to score, which blanks and gaps have not.

    Raises:
        TemplateError: There is no slot, or a slot has several alternatives or no text to score.
    """
    slots = [part for part in parts if isinstance(part, Slot)]
    if all(slot.unknown is not None for slot in slots):
        remedy = "." if scored else ", or write a gap, {{_}}."
        raise TemplateError(f"nothing is asked: put {{{{ and }}}} around text{remedy}", template, 0)
    for slot in slots:
        if len(slot.alternatives) > 1:
            problem = "alternatives can be ranked, but not scored or sampled: keep one of them, or rank the template."
            raise TemplateError(problem, template, slot.at if template else 0)
        if scored and (slot.blank is not None or slot.gap is not None):
            kind, remedy = ("gap", "fill") if slot.gap is not None else ("blank", "sample")
            problem = f"a {kind} has no text to score; write it out, or {remedy} it (infill)."
            raise TemplateError(problem, template, slot.at)
    return slots


def _slot(template: str, start: int) -> tuple[Slot, int]:
    """Parse the slot whose `{{` is at offset `start`; return it and the offset after it."""
    inside = start + 2
    if template.startswith("_", inside):
        return _blank(template, start)
    if template.startswith("?", inside):
        return _unknown(template, start)
    pieces: list[list[str]] = [[]]  # of each alternative
    for match in _IN_SLOT.finditer(template, inside):
        if match["mark"] == "}}":
            alternatives = tuple(map("".join, pieces))
            if not any(alternatives):
                raise TemplateError("this slot is empty: write {{text}}, {{a|b}} or {{_}}.", template, start)
            return Slot(alternatives, None, start), match.end()
        if match["mark"] == "{{":
            raise TemplateError(
                rf"a slot opens inside the slot that opened at character {start + 1}; close that one first with }}}}, "
                r"or write \{{ for braces that are text.",
                template,
                match.start(),
            )
        if match["mark"] == "|":
            pieces.append([])
        else:
            pieces[-1].append(match["escaped"][1:] if match["escaped"] else match[0])
    raise TemplateError(
        r"this slot is never closed: end it with }} (not \}}, where the first brace is text), or write \{{ for braces "
        "that are text.",
        template,
        start,
    )


def _blank(template: str, start: int) -> tuple[Slot, int]:
    """Parse the blank or gap whose `{{_` is at offset `start`; return it and the offset after it."""
    match = _BLANK.match(template, start + 2)
    if not match:
        raise TemplateError(
            r"{{_ must be followed by }}, a number of tokens ({{_4}}), a range ({{_3-12}}), or : and a regular "
            r"expression ({{_:\d+}}). For text that starts with an underscore write {{\_.",
            template,
            start,
        )
    first, last, pattern = match.groups()
    if first is None or last is not None or pattern is not None:
        least, most = (None if number is None else _count(number, template, start) for number in (first, last or first))
        if least is not None and most is not None and least > most:
            raise TemplateError(
                f"the range {first}-{last} has no number in it: write {{{{_{last}-{first}}}}}.", template, start
            )
        return Slot((), None, start, gap=Gap(least or 0, most, pattern or None)), match.end()
    blank = _count(first, template, start)
    if not blank:
        raise TemplateError("a blank needs at least 1 token: write {{_1}} or more, or a gap, {{_}}.", template, start)
    return Slot((), blank, start), match.end()


def _unknown(template: str, start: int) -> tuple[Slot, int]:
    """Parse the unknown tokens whose `{{?` is at offset `start`; return them and the offset after them."""
    match = _UNKNOWN.match(template, start + 2)
    if not match or not (unknown := _count(match[1], template, start)):
        raise TemplateError(
            r"{{? must be followed by a number of unknown tokens and }}, as in {{?3}}. For text that starts with a "
            r"question mark write {{\?.",
            template,
            start,
        )
    return Slot((), None, start, unknown=unknown), match.end()


def _count(digits: str, template: str, start: int) -> int:
    """Return a number of tokens, written with these digits in the slot at offset `start`."""
    digits = digits.lstrip("0")
    if len(digits) >= len(str(_LONGEST_BLANK)):
        raise TemplateError(f"a blank is at most {_LONGEST_BLANK - 1} tokens long.", template, start)
    return int(digits or 0)


def escape(text: str, before_slot: bool = False) -> str:
    r"""Escape given text, outside of slots, so that a template reads it literally: `parse(escape(t)) == [Given(t)]`.

    Inside `{{…}}` use `escape_slot`: there `|`, `}` and a leading `_` or `?` have a meaning, too.

    Args:
        text: Any text.
        before_slot: Whether a slot follows directly. Backslashes at the end of the text must be doubled before a slot,
            and only there. For texts that do not end in a backslash it makes no difference.

    >>> escape("{{x}}") + " and " + escape("C:\\", before_slot=True) + "{{Users}}"
    '\\{{x}} and C:\\\\{{Users}}'
    """

    def escape_run(match: re.Match[str]) -> str:
        backslashes, braces = match.groups()
        lead = backslashes + "{" if len(braces) % 2 else backslashes * 2
        return lead + r"\{{" * (len(braces) // 2)

    escaped = re.sub(r"(?<!\\)(\\*)(\{{2,})", escape_run, text)
    trailing = len(text) - len(text.rstrip("\\"))
    return escaped + "\\" * trailing if before_slot else escaped


def escape_slot(text: str) -> str:
    r"""Escape asked text, inside a slot, so that a template reads it literally, alone or as one of the alternatives.

    Outside of slots use `escape`: there the backslashes of this function would be text. An empty text can only be one
    of several alternatives.

    >>> "{{" + escape_slot("a|b") + "}}"
    '{{a\\|b}}'
    """
    return re.sub(r"[\\{}|_?]", r"\\\g<0>", text)


def gap_between(prefix: str, suffix: str) -> str:
    """Return the template of a gap between two texts.

    Raises:
        QueryError: One of them is not a string.

    >>> gap_between("The capital of ", " is Paris.")
    'The capital of {{_}} is Paris.'
    """
    for name, text in (("prefix", prefix), ("suffix", suffix)):
        if not isinstance(text, str):
            raise QueryError(f"the {name} must be a string, not {type(text).__name__}: {text!r}.")
    return escape(prefix, before_slot=True) + "{{_}}" + escape(suffix)


def fillings(template: str, cap: int = 256) -> list[list[Part]]:
    """Return all combinations of the alternatives of a template's slots: the candidates of a ranking.

    Each has the same parts, with one alternative per slot. The last slot changes fastest, as in nested loops.

    Raises:
        TemplateError: There is a blank, there are no alternatives, or there are more than `cap` combinations.

    >>> [rendered(filling) for filling in fillings("{{a|b}} to {{c|d}}")]
    ['a to c', 'a to d', 'b to c', 'b to d']
    """
    parts = parse(template)
    slots = [part for part in parts if isinstance(part, Slot)]
    for slot in slots:
        if not slot.alternatives:
            raise TemplateError(
                "a blank or gap cannot be ranked: write alternatives, as in {{a|b}}.", template, slot.at
            )
    count = prod(len(slot.alternatives) for slot in slots)
    if all(len(slot.alternatives) == 1 for slot in slots):
        offset = slots[0].at if slots else len(template)
        raise TemplateError("there is nothing to rank: write alternatives in a slot, as in {{a|b}}.", template, offset)
    if count > cap:
        raise TemplateError(
            f"the alternatives can be combined in {count} ways, more than the cap of {cap}; write fewer.",
            template,
            slots[0].at,
        )
    choices: list[list[Part]] = [
        [part] if isinstance(part, Given) else [replace(part, alternatives=(text,)) for text in part.alternatives]
        for part in parts
    ]
    return [list(filling) for filling in product(*choices)]


def rendered(parts: Iterable[Part]) -> str:
    """Return the text of a template whose slots have one alternative each, as those of `fillings` do."""
    return "".join(part.text if isinstance(part, Given) else part.alternatives[0] for part in parts)
