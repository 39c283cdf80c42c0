r"""Templates: a text in which {{double braces}} mark what is asked.

    The capital of France is {{Paris}}.          how likely is "Paris" here, given all the rest?
    The capital of {{_2}} is Paris.              a blank: sample 2 tokens for this place
    The capital of {{France|Italy}} is Paris.    alternatives: which one fits better?
    It is {{not |}}raining.                      an alternative may be empty: "not ", or nothing?

Everything outside the braces is given: it is conditioned on, whether it stands before or after what is asked. A
template may hold any number of slots, side by side or apart, on any line. All that stands between the braces counts,
white space too: `{{a | b}}` is "a " or " b".

    {{text}}     asks for this text
    {{a|b|c}}    asks for one of these texts
    {{_4}}       asks for any 4 tokens
    {{_…  {{?…   reserved for later, apart from {{_4}} and its like

>>> parse("The capital of {{_2}} is {{Paris|Rome}}.")  # doctest: +NORMALIZE_WHITESPACE
[Given(text='The capital of '), Slot(alternatives=(), blank=2, at=15),
 Given(text=' is '), Slot(alternatives=('Paris', 'Rome'), blank=None, at=25), Given(text='.')]

White space
-----------
Models read tokens, and most tokenizers join a space to the word that follows it. A token that reaches into a slot is
asked as a whole, so

    The capital of France is {{Paris}}           asks for the token " Paris", the space with it
    The capital of France is{{ Paris}}           asks the same
    un{{happy}}                                  asks for "unhappy", if that is one token

White space that the tokenizer joins to the next word belongs to the blank's first token. That is one space, never more:

    The capital of {{_2}} is Paris.              up to " of" is given; the blank could be " Fran" and "ce"
    The capital of{{_2}} is Paris.               asks the same: it is for the model to say if a space comes first
    def f(x):⏎    {{_5}}                         the line break and three spaces are given, the fourth is not

Braces and backslashes
----------------------
A `{{` that is meant as text is written `\{{`. In front of `{{`, and only there, two backslashes stand for one; all
other backslashes outside of slots are plain text, so LaTeX, regular expressions and Windows paths can stay as they are.
`}}` outside of a slot is text. Braces pair up from the right, so a brace may hug a slot:

    \{{ is no slot }}                            the text "{{ is no slot }}"
    C:\\{{Users}}                                the text "C:\", then a slot
    \frac{{{1}}}{2}                              the text "\frac{", a slot, the text "}{2}"

Inside a slot a backslash takes the meaning from any of `\ { } | _ ?`; before anything else it is a plain backslash.
A slot ends at the first `}}`.

    {{a\|b}}                                     asks for "a|b"
    {{\_4}}                                      asks for "_4"
    {{\{x\}}}                                    asks for "{x}"

Programs need not remember any of this. Two functions write any text so that it means itself:

    acgpt.escape(text)                           for what is given, outside of slots
    acgpt.escape_slot(text)                      for what is asked, between {{ and }}, a whole slot or one alternative

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

from acgpt.errors import TemplateError


@dataclass(frozen=True)
class Given:
    """Text that is known."""

    text: str


@dataclass(frozen=True)
class Slot:
    """A place in the text that is asked for.

    Args:
        alternatives: The texts it may hold: one for `{{text}}`, several for `{{a|b}}`, none for a blank.
        blank: How many tokens long a blank is; `None` for a slot with text.
        at: Where its `{{` stands in the template, counted in characters from 0.
    """

    alternatives: tuple[str, ...]
    blank: int | None
    at: int


Part = Given | Slot

_OPENING = re.compile(r"(?<!\\)(\\*)\{\{(?=(?:\{\{)*(?!\{))")  # backslashes, then braces that pair up from the right
_BLANK = re.compile(r"_([0-9]+)\}\}")
_IN_SLOT = re.compile(r"(?P<escaped>\\[\\{}|_?])|(?P<mark>\{\{|\}\}|\|)|[^\\{}|]+|.", re.DOTALL)
_LONGEST_BLANK = 1_000_000  # far beyond any model's context; a typing error must not fill the memory


def parse(template: str) -> list[Part]:
    r"""The parts of a template in order. What is given and not empty comes as one `Given` between slots.

    Raises:
        TemplateError: A slot is malformed; the message points at it.

    >>> parse(r"a\{{b {{c|}}")
    [Given(text='a{{b '), Slot(alternatives=('c', ''), blank=None, at=6)]
    """
    parts: list[Part] = []
    given, at = "", 0
    while opening := _OPENING.search(template, at):
        backslashes = len(opening[1])
        given += template[at : opening.start()] + "\\" * (backslashes // 2)
        if backslashes % 2:
            given, at = given + "{{", opening.end()
            continue
        if given:
            parts.append(Given(given))
        slot, at = _slot(template, opening.end() - 2)
        given = ""
        parts.append(slot)
    given += template[at:]
    return [*parts, Given(given)] if given else parts


def _slot(template: str, at: int) -> tuple[Slot, int]:
    """The slot whose `{{` stands at character `at`, and the offset of the first character behind it."""
    inside = at + 2
    if template.startswith("_", inside):
        return _blank(template, at)
    if template.startswith("?", inside):
        raise TemplateError(r"{{? is reserved; for text that starts with a question mark write {{\?.", template, at)
    alternatives = [""]
    for match in _IN_SLOT.finditer(template, inside):
        if match["mark"] == "}}":
            if not any(alternatives):
                raise TemplateError("this slot is empty: write {{text}}, {{a|b}} or {{_4}}.", template, at)
            return Slot(tuple(alternatives), None, at), match.end()
        if match["mark"] == "{{":
            raise TemplateError(
                rf"a slot opens inside the slot that opened at character {at + 1}; close that one first with }}}}, or "
                r"write \{{ for braces that are text.",
                template,
                match.start(),
            )
        if match["mark"] == "|":
            alternatives.append("")
        else:
            alternatives[-1] += match["escaped"][1:] if match["escaped"] else match[0]
    raise TemplateError(
        r"this slot is never closed: end it with }} (not \}}, where the first brace is text), or write \{{ for braces "
        "that are text.",
        template,
        at,
    )


def _blank(template: str, at: int) -> tuple[Slot, int]:
    """The blank whose `{{_` stands at character `at`, and the offset of the first character behind it."""
    match = _BLANK.match(template, at + 2)
    if not match:
        raise TemplateError(
            r"{{_ is followed by a number of tokens and }}, as in {{_4}}; all else is reserved. For text that starts "
            r"with an underscore write {{\_.",
            template,
            at,
        )
    digits = match[1].lstrip("0")
    if not digits:
        raise TemplateError("a blank needs at least 1 token: write {{_1}} or more.", template, at)
    if len(digits) >= len(str(_LONGEST_BLANK)):
        raise TemplateError(f"a blank is at most {_LONGEST_BLANK - 1} tokens long.", template, at)
    return Slot((), int(digits), at), match.end()


def escape(text: str, before_slot: bool = False) -> str:
    r"""Write `text` so that, outside of slots, a template reads it as that very text: `parse(escape(t)) == [Given(t)]`.

    For what is given. Inside `{{…}}` use `escape_slot`: there `|`, `}` and a leading `_` or `?` have a meaning, too.

    Args:
        text: Any text.
        before_slot: Does a slot follow directly? Then backslashes at the end of the text have to be doubled; without
            a slot behind them they must not be, so `escape` cannot know on its own. Texts that do not end in a
            backslash are safe either way.

    >>> escape("{{x}}") + " and " + escape("C:\\", before_slot=True) + "{{Users}}"
    '\\{{x}} and C:\\\\{{Users}}'
    """

    def escape_run(match: re.Match[str]) -> str:
        backslashes, braces = match.groups()
        lead = backslashes + "{" if len(braces) % 2 else backslashes * 2
        return lead + r"\{{" * (len(braces) // 2)

    escaped = re.sub(r"(?<!\\)(\\*)(\{{2,})", escape_run, text)
    at_end = len(text) - len(text.rstrip("\\"))
    return escaped + "\\" * at_end if before_slot else escaped


def escape_slot(text: str) -> str:
    r"""Write `text` so that, inside a slot, it asks for that very text, alone or as one of several alternatives.

    For what is asked. Outside of slots use `escape`: there the backslashes that this writes would be text. An empty
    text can only be one of several alternatives.

    >>> "{{" + escape_slot("a|b") + "}}"
    '{{a\\|b}}'
    """
    return re.sub(r"[\\{}|_?]", r"\\\g<0>", text)


def fillings(template: str, cap: int = 256) -> list[list[Part]]:
    """Every way to fill the slots of a template with one of their alternatives each: the candidates of a ranking.

    Slots keep their places and hold one alternative. The last slot changes fastest, as in nested loops.

    Raises:
        TemplateError: There is a blank, there are no alternatives, or there are more than `cap` ways.

    >>> [rendered(filling) for filling in fillings("{{a|b}} to {{c|d}}")]
    ['a to c', 'a to d', 'b to c', 'b to d']
    """
    parts = parse(template)
    slots = [part for part in parts if isinstance(part, Slot)]
    for slot in slots:
        if slot.blank is not None:
            raise TemplateError("a blank cannot be ranked: write alternatives, as in {{a|b}}.", template, slot.at)
    count = prod(len(slot.alternatives) for slot in slots)
    if all(len(slot.alternatives) == 1 for slot in slots):
        at = slots[0].at if slots else len(template)
        raise TemplateError("there is nothing to rank: write alternatives in a slot, as in {{a|b}}.", template, at)
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
    """The text of a template whose slots hold one alternative each, as `fillings` gives them.

    Raises:
        ValueError: A slot is a blank, or has several alternatives: there is no one text.
    """
    texts = []
    for part in parts:
        if isinstance(part, Slot) and len(part.alternatives) != 1:
            raise ValueError(f"the slot at character {part.at + 1} has {len(part.alternatives)} texts to choose from.")
        texts.append(part.text if isinstance(part, Given) else part.alternatives[0])
    return "".join(texts)
