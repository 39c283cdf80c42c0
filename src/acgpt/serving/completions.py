"""Completions, the common part of OpenAI's, Mistral's and llama.cpp's protocols: a prompt, a suffix, a text between.

    prompt alone        a continuation, from left to right: the prompt's tokens are read as they are, and tokens are
                        drawn until the text ends, a stop string comes, or there are `max_tokens`
    prompt and suffix   a gap: temperature 0 finds the best fill, as `LanguageModel.fill` does; with another one it is
                        drawn, as by `LanguageModel.sample`, which draws a candidate of each length. If there may be
                        more than 64 tokens, the length is found first, as `LanguageModel.stream` does

A prompt of token ids is read as it is sent, without BOS before it: its first token is at position 0, and so has no
log-probability. A prompt of text is tokenized, and BOS comes before it.

Each method of `Completer` returns a search (see `models.searches`). It reads its arguments at once, so that malformed
input is refused before anything is run.
"""

from __future__ import annotations

import codecs
import math
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel

from acgpt.common.options import Range, declared, ignore, option
from acgpt.engine.score import TopScore
from acgpt.engine.steps import Row
from acgpt.errors import ModelError, QueryError, too_long
from acgpt.models.ask import (
    MAX_TOKENS,
    Choice,
    DrawingOptions,
    Fill,
    FillAsk,
    LongAsk,
    Piece,
    Sample,
    SampleAsk,
    SearchOptions,
    StreamAsk,
    question,
)
from acgpt.models.executor import Rows, Search, Top
from acgpt.models.language_model import LanguageModel
from acgpt.models.router import Route
from acgpt.query.query import Query
from acgpt.query.sampling import SamplingOptions
from acgpt.query.template import escape, parse
from acgpt.query.text import encode_text, pieces
from acgpt.query.vocabulary import ByteVocabulary
from acgpt.serving.errors import InvalidField
from acgpt.serving.service import Budget, Service, naming

Result = TypeVar("Result")

CANDIDATES = 64  # that a sample of a gap is chosen from, the default of `LanguageModel.sample`

Prompt = str | tuple[int, ...]  # a text, or token ids


@dataclass(frozen=True)
class CompletionAsk(LongAsk, DrawingOptions):
    """Ask for the texts after prompts, each up to the suffix if there is one."""

    asks = "prompt"
    prompt: Sequence[Prompt] = field(metadata=question("Texts, or token ids, which are read as they are sent."))
    _: KW_ONLY
    suffix: str = option('Text after the gap; "" for a continuation.', "")
    max_tokens: int | None = declared(DrawingOptions, "max_tokens", range=Range(minimum=0))
    min_tokens: int = option("Number of tokens before which the text does not end.", 0, minimum=0)
    n: int = option("Number of texts per prompt.", 1, minimum=1)
    best_of: int | None = option(
        "Number of texts to choose the n most probable ones from, by mean log-probability. Default: n.", minimum=1
    )
    top: int | None = option(
        "Number of most probable tokens to return with each log-probability. Default: no log-probabilities.", minimum=0
    )
    echo: bool = option("Whether log-probabilities of the prompt are returned, too.", False)
    seconds: float | None = declared(
        SearchOptions, "seconds", help="Time after which the text ends with what there is."
    )
    heal: bool = option("Whether the last tokens of a prompt without suffix may be replaced by longer ones.", False)

    def __post_init__(self) -> None:
        if self.seed is not None and self.seed < 0:  # no seed, as llama.cpp reads it
            object.__setattr__(self, "seed", None)
        super().__post_init__()

    @property
    def is_gap(self) -> bool:
        """Whether gaps are filled; otherwise the prompts are continued."""
        return bool(self.suffix or self.heal) and self.max_tokens != 0

    @property
    def drawn(self) -> int:
        """Number of texts that are drawn per prompt."""
        return max(self.n, self.best_of or 0)

    @property
    def resampled(self) -> bool:
        """Whether a gap is drawn from candidates of all lengths; otherwise its length is found before its text."""
        return not self.greedy and (self.max_tokens or self.min_tokens + MAX_TOKENS) <= CANDIDATES


@dataclass(frozen=True)
class Completion:
    """One text.

    Args:
        text: The text, without the prompt.
        ids: The tokens that were drawn, also those that a stop string has cut off and the token that ended the text.
        ended_by: "eos" if the model ended the text, "word" if a stop string did, "limit" if there was no room or time.
        word: The stop string that ended it.
        offsets: Of a continuation, where each token begins in the text; without those that a stop string has cut off.
        log_probs: Log-probabilities of the tokens if they were asked for, in the terms of OpenAI's completions.
    """

    text: str
    ids: tuple[int, ...]
    ended_by: str
    word: str = ""
    offsets: tuple[int, ...] = ()
    log_probs: dict[str, Any] | None = None

    @property
    def finish_reason(self) -> str:
        """Why the text ended, in the terms of OpenAI and Mistral."""
        return "length" if self.ended_by == "limit" else "stop"


@dataclass(frozen=True)
class Completions:
    """The texts of a request.

    Args:
        texts: n texts for each prompt, prompt by prompt.
        prompt_tokens: Number of tokens that were given.
        drawn_tokens: Number of tokens that were drawn for these texts, and for those that were not chosen.
    """

    texts: tuple[Completion, ...]
    prompt_tokens: int
    drawn_tokens: int

    @classmethod
    def joined(cls, results: Sequence[Completions]) -> Completions:
        """Return the results of several searches as one."""
        texts = tuple(text for result in results for text in result.texts)
        return cls(texts, sum(each.prompt_tokens for each in results), sum(each.drawn_tokens for each in results))

    @property
    def usage(self) -> dict[str, int]:
        """The numbers of tokens, in the terms of OpenAI and Mistral."""
        total = self.prompt_tokens + self.drawn_tokens
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.drawn_tokens, "total_tokens": total}


@dataclass(frozen=True)
class Delta:
    """A new part of the text with this number."""

    index: int
    text: str


Parts = AsyncGenerator[Delta | Completions]  # of a stream: parts of the texts, and at the end the result


class Writer:
    """The text of one row as it is drawn. It ends the row, and says which tokens may end it; see `decoding.Guide`.

    Args:
        completer: Knows the bytes of tokens, and those that end a text.
        ask: Says before which strings the text ends, and how many tokens it has at least.
        allowed: (V,) tokens that may be drawn.
        index: Number of the text.
    """

    def __init__(self, completer: Completer, ask: CompletionAsk, allowed: np.ndarray, index: int) -> None:
        self.bytes_of, self.ends = completer.bytes_of, frozenset(completer.ends)
        self.stop, self.least, self.index = ask.stop, ask.min_tokens, index
        self.all, self.inner = allowed, allowed.copy()
        self.inner[list(self.ends)] = False
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")  # holds back half a character
        self.text, self.shown = "", 0
        self.held = max(map(len, self.stop), default=1) - 1  # characters at the end that may begin a stop string
        self.offsets: list[int] = []  # where each token that was drawn begins
        self.ended_by, self.word = "", ""

    def allowed(self) -> np.ndarray:
        """Return which tokens may come next."""
        return self.all if len(self.offsets) >= self.least else self.inner

    def advance(self, token: int) -> None:
        """Note that a token has been drawn."""
        begin = len(self.text)
        self.offsets.append(begin)
        if token in self.ends:
            self.ended_by = "eos"
            return
        self.text += self.decoder.decode(self.bytes_of(token))
        places = [(self.text.find(word, max(0, begin - len(word) + 1)), word) for word in self.stop]
        if found := [(at, word) for at, word in places if at >= 0]:
            at, self.word = min(found)
            self.text, self.ended_by = self.text[:at], "word"

    def news(self, done: bool) -> str:
        """Return the text that is settled and was not returned before: nothing that may be stopped, unless done."""
        held = 0 if done or self.ended_by else self.held
        begin, self.shown = self.shown, max(self.shown, len(self.text) - held)
        return self.text[begin : self.shown]

    def completion(self, ids: Iterable[int]) -> Completion:
        """Return the finished text, of these tokens."""
        shown = [begin for begin in self.offsets if self.ended_by != "word" or begin < len(self.text)]
        return Completion(self.text, tuple(ids), self.ended_by or "limit", self.word, tuple(shown))


class Completer:
    """Makes the searches for completions.

    Args:
        lm: The model.
    """

    def __init__(self, lm: LanguageModel) -> None:
        self.lm, self.searches, self.tokenizer = lm, lm.searches, lm.tokenizer
        self.executor = lm.searches.executor

    # ---- questions --------------------------------------------------------------------------------------------------

    def complete(
        self, ask: CompletionAsk, report: Callable[[Delta], object] | None = None
    ) -> list[Callable[[], Search[Completions]]]:
        """Return what makes the searches for completions, whose results are the answer, see `Completions.joined`.

        Args:
            ask: What is asked for.
            report: Called with new parts of the texts; only if no more are drawn than returned.
        """
        if ask.is_gap:
            return [partial(self.gap, prompt, ask, report, i * ask.n) for i, prompt in enumerate(ask.prompt)]
        return [partial(self.continuation, ask, report or ignore)]

    def stream(self, ask: CompletionAsk, report: Callable[[Delta | Completions], object]) -> Search[Completions]:
        """Make a search that reports parts of the texts as they are drawn, and at its end the result."""
        search = one_by_one([make() for make in self.complete(ask, report)])

        def reporting() -> Search[Completions]:
            completions = Completions.joined((yield from search))
            report(completions)
            return completions

        return reporting()

    def continuation(self, ask: CompletionAsk, report: Callable[[Delta], object] = ignore) -> Search[Completions]:
        """Continue prompts from left to right, see `complete`."""
        read = [self.read(prompt) for prompt in ask.prompt]
        count = 0 if ask.max_tokens == 0 else ask.drawn
        queries, routes = [], []
        for i, (start, ids) in enumerate(read):
            room = self.lm.positions - 1 - len(ids)
            if room < min(1, count):  # one token at least, if any are to be drawn
                problem = too_long(len(ids), self.lm.positions)
                error = QueryError(f"{problem} With max_tokens above 0, one of them is for the completion.")
                raise InvalidField(f"prompt.{i}" if len(read) > 1 else "prompt", error)
            routes.append(self.route(start, ids, ask.adapter))
            if count:
                unknown = [None] * (room if ask.max_tokens is None else min(ask.max_tokens, room))
                known = [True] * len(ids) + [False] * len(unknown)
                queries.append(Query([*ids, *unknown], known, None, start))
        allowed = self.drawable(routes[0])

        def search() -> Search[Completions]:
            deadline = math.inf if ask.seconds is None else time.monotonic() + ask.seconds

            def progress(row: Row) -> None:
                writer = writer_of(row)
                if time.monotonic() > deadline and not writer.ended_by:
                    writer.ended_by = "limit"
                if text := writer.news(row.done):
                    report(Delta(writer.index, text))

            request = Rows(ask.sampling, lambda row: bool(writer_of(row).ended_by), ask.notice, progress)
            for query, route in zip(queries, routes, strict=False):  # no queries, if nothing is to be drawn
                for sample in range(count):
                    request.add(query, sample, route, Writer(self, ask, allowed, len(request.rows)))
            rows = iter((yield request) if request.rows else [])
            chosen: list[Completion] = []
            drawn = 0
            for _ in read:
                own = [next(rows) for _ in range(count)]
                drawn += sum(len(row.drawn) for row in own)
                if ask.drawn > ask.n:
                    own.sort(key=mean_log_prob, reverse=True)
                texts = [writer_of(row).completion(token for _, token, _ in row.drawn) for row in own[: ask.n]]
                chosen += texts or [Completion("", (), "limit")] * ask.n
            if ask.top is not None:
                chosen = yield from self.scored(chosen, read, ask)
            given = sum(len(ids) + isinstance(prompt, tuple) for (_, ids), prompt in zip(read, ask.prompt, strict=True))
            return Completions(tuple(chosen), given, drawn)

        return search()

    def gap(
        self, prompt: Prompt, ask: CompletionAsk, report: Callable[[Delta], object] | None = None, first: int = 0
    ) -> Search[Completions]:
        """Fill the gap between a prompt and the suffix: the best fills, or samples.

        Args:
            prompt: The prompt.
            ask: What is asked for.
            report: Called with new parts of the texts, which are then drawn one after the other.
            first: Number of the first of them.
        """
        search: Search[list[Fill]] | Search[list[Sample]]
        template = self.template(prompt, ask)
        if ask.greedy and report is None:
            # Beside the likeliest texts, `fill` draws others at random: of the model's own distribution.
            drawing = SamplingOptions(seed=ask.seed)
            search = self.searches.fill(FillAsk.like(ask, template=template, **vars(drawing)))
        elif ask.resampled and report is None:
            search = self.searches.sample(SampleAsk.like(ask, query=template, n=ask.drawn))
        else:
            seeds = range(ask.sampling.seed, ask.sampling.seed + ask.drawn)
            asks = [StreamAsk.like(ask, template=template, seed=seed) for seed in seeds]
            search = one_by_one(
                [self.drawn_gap(one, ask.notice, report or ignore, first + i) for i, one in enumerate(asks)]
            )

        def filled() -> Search[Completions]:
            fills = [fill for fill in (yield from search) if isinstance(fill, Fill)]
            drawn = sum(len(fill.tokens) for fill in fills)
            if not ask.greedy and ask.drawn > ask.n:
                fills.sort(key=lambda fill: fill.log_prob / max(1, len(fill.tokens)), reverse=True)
            chosen = (fills + fills[:1] * ask.n)[: ask.n]  # there may be fewer distinct ones
            texts = []
            for fill in chosen:
                texts.append((yield from self.completion_of_fill(fill, ask)))
            given = len(fills[0].query.given_positions)
            return Completions(tuple(texts), given, drawn)

        return filled()

    def drawn_gap(
        self, ask: StreamAsk, notice: Callable[[int], object], report: Callable[[Delta], object], number: int
    ) -> Search[Fill]:
        """Draw a fill after its length, and report each new part of its text as that of the text of this number."""
        shown = ""

        def notify(piece: Piece) -> None:
            nonlocal shown
            notice(1)
            if piece.text:
                shown += piece.text
                report(Delta(number, piece.text))

        stream = self.searches.stream(ask, notify)

        def drawn() -> Search[Fill]:
            fill = yield from stream
            if rest := fill.fills[0][len(shown) :]:  # what was held back when the time was over
                report(Delta(number, rest))
            return fill

        return drawn()

    # ---- reading prompts --------------------------------------------------------------------------------------------

    def read(self, prompt: Prompt) -> tuple[int | None, list[int]]:
        """Return the token at position 0 (`None` for BOS), and the tokens after it."""
        if isinstance(prompt, str):
            return None, encode_text(prompt, self.tokenizer)
        for position, token in enumerate(prompt):
            if not 0 <= token < self.lm.vocabulary:
                error = QueryError(
                    f"the token at index {position} has the id {token}, but the model's ids are 0 to "
                    f"{self.lm.vocabulary - 1}."
                )
                raise InvalidField("prompt", error)
        return (None if prompt[0] == self.lm.bos else prompt[0]), list(prompt[1:])

    def route(self, start: int | None, ids: Sequence[int], adapter: Choice) -> Route:
        """Return the route of a continuation, which reads from left to right."""
        query = Query([*ids, None], [True] * len(ids) + [False], None, start)
        try:
            (route,) = self.executor.router.routes([query], False, adapter)
        except QueryError as error:
            raise InvalidField("prompt", QueryError(f"{error} Begin token ids with BOS, {self.lm.bos}.")) from error
        return route

    def template(self, prompt: Prompt, ask: CompletionAsk) -> str:
        """Return the template with a gap between a prompt and the suffix."""
        if not isinstance(prompt, str):
            raise InvalidField("suffix", QueryError("a suffix needs a prompt that is text, not token ids."))
        least, most = ask.min_tokens, ask.max_tokens
        gap = f"{{{{_{least}-{max(least, most or least + MAX_TOKENS)}}}}}" if least else "{{_}}"
        return escape(prompt, before_slot=True) + gap + escape(ask.suffix)

    def text_of(self, prompt: Prompt) -> str:
        """Return a prompt as text."""
        return prompt if isinstance(prompt, str) else "".join(pieces(prompt, self.tokenizer))

    # ---- tokens and bytes -------------------------------------------------------------------------------------------

    @cached_property
    def vocabulary(self) -> ByteVocabulary | None:
        """The bytes of tokens; `None` if they are not known, see `ByteVocabulary`."""
        try:
            return ByteVocabulary.of(self.tokenizer)
        except ModelError:
            return None

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token; none for a token that is not text."""
        if self.vocabulary is not None:
            return (self.vocabulary.tokens[token] or b"") if token < len(self.vocabulary.tokens) else b""
        return b"" if token in self.special else "".join(pieces([token], self.tokenizer)).encode()

    @cached_property
    def special(self) -> frozenset[int]:
        """Tokens that are not text."""
        return frozenset(self.tokenizer.all_special_ids)

    @cached_property
    def ends(self) -> list[int]:
        """Tokens that end a text."""
        ids = {self.lm.bos, self.tokenizer.eos_token_id}
        return sorted(i for i in ids if i is not None and not self.bytes_of(i))

    def drawable(self, route: Route) -> np.ndarray:
        """Return (V,) the tokens that may be drawn: those of the tokenizer, but not MASK."""
        allowed = np.zeros(self.lm.vocabulary, dtype=np.bool_)
        allowed[: len(self.tokenizer)] = True
        mask = self.executor.mask(route.adapter)
        if mask is not None and mask not in self.ends:
            allowed[mask] = False
        return allowed

    def name(self, token: int) -> str:
        r"""Return a token as text: its name if it is special, `bytes:\xe2\x80` if it is a part of a character."""
        known = self.bytes_of(token)
        if not known:
            named = self.tokenizer.convert_ids_to_tokens(token) if token < len(self.tokenizer) else None
            return f"<{token}>" if named is None else str(named)
        try:
            return known.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in known)

    # ---- log-probabilities ------------------------------------------------------------------------------------------

    def scored(
        self, completions: Sequence[Completion], read: Sequence[tuple[int | None, list[int]]], ask: CompletionAsk
    ) -> Search[list[Completion]]:
        """Return continuations with their log-probabilities, and those of their prompts if they are echoed.

        Args:
            completions: n continuations of each prompt.
            read: The token at position 0 of each prompt, and the tokens after it.
            ask: What is asked for.
        """
        assert ask.top is not None
        queries, routes = [], []
        for number, completion in enumerate(completions):
            start, ids = read[number // ask.n]
            tokens = [*ids, *completion.ids]
            given = [not ask.echo and i < len(ids) for i in range(len(tokens))]
            if not all(given):
                queries.append(Query(tokens, given, None, start))
                routes.append(self.route(start, ids, ask.adapter))
        answers = iter((yield Top(queries, routes, max(1, ask.top))) if queries else [])
        results = []
        for number, completion in enumerate(completions):
            (_, ids), prompt = read[number // ask.n], ask.prompt[number // ask.n]
            before = [] if not ask.echo else list(prompt) if isinstance(prompt, tuple) else ids
            asked = len(ids) * ask.echo + len(completion.ids)
            tops: list[TopScore | None] = [*next(answers)] if asked else []
            tops = [*[None] * (len(before) + len(completion.ids) - len(tops)), *tops]
            if ask.echo and tops:
                tops[0] = None  # by convention, also if BOS comes before it
            shown = [*before, *completion.ids[: len(completion.offsets)]]
            offsets, begin = starts(pieces(before, self.tokenizer)) if before else [], len(self.text_of(prompt))
            offsets += [begin + offset for offset in completion.offsets]
            log_probs = self.log_probs(shown, tops[: len(shown)], offsets, ask.top)
            results.append(replace(completion, log_probs=log_probs))
        return results

    def log_probs(
        self, ids: Sequence[int], tops: Sequence[TopScore | None], offsets: Sequence[int], k: int
    ) -> dict[str, Any]:
        """Return log-probabilities in the terms of OpenAI's completions."""
        tables: list[dict[str, float] | None] = []
        for token, top in zip(ids, tops, strict=True):
            if top is None:
                tables.append(None)
                continue
            table: dict[str, float] = {}
            for other, log_prob in [*zip(top.ids[:k], top.log_probs[:k], strict=True), (token, top.log_prob)]:
                name = self.name(other)
                table[name] = max(finite(log_prob), table.get(name, -math.inf))
            tables.append(table)
        return {
            "tokens": list(map(self.name, ids)),
            "token_logprobs": [None if top is None else finite(top.log_prob) for top in tops],
            "top_logprobs": tables,
            "text_offset": offsets,
        }

    def completion_of_fill(self, fill: Fill, ask: CompletionAsk) -> Search[Completion]:
        """Return a fill as a completion, with its log-probabilities if they are asked for."""
        ids, text = tuple(token.id for token in fill.tokens), fill.fills[0]
        drawn = b"".join(map(self.bytes_of, ids)).decode(errors="ignore")
        word = next((stop for stop in ask.stop if text + stop in drawn), "")
        bound = ask.max_tokens or (math.inf if ask.suffix else MAX_TOKENS)
        full = sum(fill.lengths) >= bound
        completion = Completion(text, ids, "word" if word else "limit" if full else "eos", word)
        if ask.top is None:
            return completion
        tops: list[TopScore] = []
        if ids:
            (route,) = self.executor.router.routes([fill.query], None, ask.adapter)
            (tops,) = yield Top([fill.query], [route], max(1, ask.top))
        offsets = starts(self.searches.texts(fill.query, fill.adapter))
        own = [offsets[token.position - 1] for token in fill.tokens]
        return replace(completion, log_probs=self.log_probs(ids, tops, own, ask.top))


def one_by_one(searches: Sequence[Search[Result]]) -> Search[list[Result]]:
    """Return the results of searches, each begun after the one before it has ended."""
    results = []
    for search in searches:
        results.append((yield from search))
    return results


def writer_of(row: Row) -> Writer:
    """Return what writes the text of a row."""
    assert isinstance(row.guide, Writer)
    return row.guide


def mean_log_prob(row: Row) -> float:
    """Return the mean log-probability of the tokens that a row has drawn."""
    return math.fsum(log_prob for *_, log_prob in row.drawn) / max(1, len(row.drawn))


def starts(texts: Iterable[str]) -> list[int]:
    """Return where each text begins if they are joined."""
    return list(accumulate(map(len, texts), initial=0))[:-1]


def finite(log_prob: float) -> float:
    """Return a log-probability as a number that JSON has: the smallest one instead of minus infinity."""
    return max(log_prob, -1e30)


def check_limits(service: Service, completer: Completer, ask: CompletionAsk, *, length: str = "max_tokens") -> None:
    """Check that a request is within the limits of the server. Tokenizes the prompts.

    Args:
        service: Has the limits.
        completer: Tokenizes.
        ask: What is asked for.
        length: Name of the field for the maximum number of tokens, for errors.

    Raises:
        InvalidField: It is not.
    """
    service.check_questions("prompt", ask.prompt)
    service.check_numbers({"n": ask.n, "best_of": ask.best_of})
    budget, asked = Budget(service), min(ask.max_tokens or 0, service.lm.positions)
    rows = max(ask.drawn, CANDIDATES) if ask.resampled else ask.drawn  # of a gap
    with naming("prompt"):
        for prompt in ask.prompt:
            if isinstance(prompt, str):
                service.check_characters(len(prompt) + len(ask.suffix))
            if ask.is_gap:
                budget.spend_on_gaps(parse(completer.template(prompt, ask)), ask, rows, length)
                continue
            given = len(encode_text(prompt, completer.tokenizer)) if isinstance(prompt, str) else len(prompt)
            budget.spend(given)
            budget.spend(ask.drawn * asked, length)


def asked(body: BaseModel, **settings: Any) -> CompletionAsk:
    """Return what a request asks for. Without a temperature, a gap gets its best fill.

    Args:
        body: The request. Its fields with names of `CompletionAsk` are taken over, unless they are null.
        **settings: Other settings, or values that replace those of the request.
    """
    names = {item.name for item in fields(CompletionAsk)}
    same = {name: value for name, value in body if name in names and value is not None}
    given = same | settings
    gap = given.get("suffix") or given.get("heal")
    return CompletionAsk(**{"temperature": 0.0 if gap else 1.0} | given)
