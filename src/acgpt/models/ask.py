"""Questions and answers: what may be asked of a model, and what it says, declared once.

The fields of a question are the arguments of a method of `LanguageModel` and of the clients, and the fields of a
request to `acgpt serve`. The settings that questions share are options of commands, too (see `models.options`).

    ScoreAsk    log p(asked | given)                ──► Score
    SampleAsk   text drawn from p(asked | given)    ──► Sample
    FillAsk     the best text for gaps              ──► Fill
    StreamAsk   one fill, as it is made             ──► Piece
    LengthsAsk  p(length of a gap)                  ──► Lengths
    RankAsk     alternatives in order               ──► Ranking

This module imports neither torch nor transformers, which clients do not need.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, ClassVar, Concatenate, Literal, ParamSpec, Protocol, Self, TypeVar, overload

from acgpt.common.options import Options, check_keywords, declared, ignore, option, with_arguments
from acgpt.errors import InputError, QueryError
from acgpt.query.query import Query
from acgpt.query.sampling import Sampling, SamplingOptions

Question = str | Query
Choice = str | Literal[False] | None  # an adapter's name; False or "none": no adapter; None: no choice was made
P = ParamSpec("P")
Asked = TypeVar("Asked", bound="Ask")
Result = TypeVar("Result")

PATIENCE = 4  # longer lengths than the best that may be no better before a search ends
MAX_TOKENS = 32  # default for the longest gap
MOST = 1_000_000  # texts for one question


# ---- answers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenScore:
    """One asked token and its log-probability.

    Attributes:
        text: The token as text.
        id: Token id.
        position: Position in the text, from 1; position 0 is BOS.
        log_prob: Natural logarithm of its probability, given the given tokens and the asked tokens before it.
    """

    text: str
    id: int
    position: int
    log_prob: float


@dataclass(frozen=True)
class Score:
    """The answer of `LanguageModel.log_prob`: log p(asked | given), token by token.

    Attributes:
        tokens: The asked tokens, from left to right.
        future: Whether every prediction saw all given tokens. If false, it saw only those before it.
        adapter: Name of the adapter that answered; `None` is the model without an adapter.
        bound: Whether the log-probability is a lower bound, estimated by sampling, instead of exact.
    """

    tokens: tuple[TokenScore, ...]
    future: bool
    adapter: str | None = field(default=None, kw_only=True)
    bound: bool = field(default=False, kw_only=True)

    @property
    def log_prob(self) -> float:
        """Log-probability of all asked tokens together, in nats: the sum over `tokens`."""
        return math.fsum(token.log_prob for token in self.tokens)

    @property
    def perplexity(self) -> float:
        """Perplexity per asked token: exp of the mean negative log-probability; 1 if there is none."""
        if not self.tokens:
            return 1.0
        try:
            return math.exp(-self.log_prob / len(self.tokens))
        except OverflowError:
            return math.inf


@dataclass(frozen=True)
class Sample(Score):
    """One sample of `LanguageModel.sample`: the completed text and its score.

    Log-probabilities are the model's own, at temperature 1 and without truncation, whatever the sampling options were.
    They are those of the distribution that the tokens were drawn from, rounding included.

    Attributes:
        text: The completed text.
        fills: The text sampled for each slot.
        seed: The seed that reproduces the sample.
        query: The completed query. Scoring it with `LanguageModel.log_prob` gives the log-probability of the sample, up
            to rounding (docs/explanation/footguns.md).
    """

    text: str
    fills: tuple[str, ...]
    seed: int
    query: Query


@dataclass(frozen=True)
class Fill(Sample):
    """One fill of `LanguageModel.fill`: a sample, and how good it is.

    `tokens` and `log_prob` are those that were drawn. They include given text next to a gap that was generated again,
    and what a stop string has cut off.

    Attributes:
        lengths: Number of tokens generated for each gap. Gaps without a kept token between them share their tokens.
        length_log_prob: Log-probability of these lengths; `None` if the model does not predict lengths. With `log_prob`
            it is that of lengths and tokens together, log p(fill, lengths | context).
        score: What fills are ordered by: the causal log-probability of the fill and of all that follows it, plus 0.5
            nats per generated token. For a model that predicts lengths: the mean of that log-probability and of
            `length_log_prob + log_prob`; of a sample, the latter alone.
    """

    lengths: tuple[int, ...] = ()
    length_log_prob: float | None = None
    score: float = -math.inf


@dataclass(frozen=True)
class Lengths:
    """The answer of `LanguageModel.lengths`: how long a gap is.

    Attributes:
        log_probs: Log-probability of each length that the gap may have, in tokens.
    """

    log_probs: Mapping[int, float]

    def log_prob(self, length: int) -> float:
        """Return the log-probability of a length in nats; minus infinity if the gap cannot have it."""
        return self.log_probs.get(length, -math.inf)

    def most_probable(self, n: int = 1) -> list[int]:
        """Return the n most probable lengths, the most probable first."""
        return sorted(self.log_probs, key=lambda length: -self.log_probs[length])[:n]


@dataclass(frozen=True)
class Piece:
    """A part of a fill, yielded by `LanguageModel.stream`.

    Attributes:
        text: New text of a gap.
        slot: Number of the slot, from 0.
        fill: The finished fill; `None` except in the last piece.
    """

    text: str
    slot: int
    fill: Fill | None = None


@dataclass(frozen=True)
class Ranked:
    """One alternative of a `Ranking`.

    Attributes:
        text: The whole text.
        choice: The alternative chosen in each slot.
        probability: Probability relative to the other alternatives; all of them sum to 1.
        log_prob: Log-probability in nats of what was compared, see `Ranking.compared`.
    """

    text: str
    choice: tuple[str, ...]
    probability: float
    log_prob: float


@dataclass(frozen=True)
class Ranking(Sequence[Ranked]):
    """The answer of `LanguageModel.rank`: a sequence of alternatives, the most probable first.

    Attributes:
        alternatives: The alternatives in order.
        compared: The event whose probability was compared: "asked | given" or "whole text".
        future: Whether every prediction saw all given tokens, see `Score`.
        adapter: Name of the adapter that answered; `None` is the model without an adapter.
    """

    alternatives: tuple[Ranked, ...]
    compared: str
    future: bool
    adapter: str | None = None

    def __len__(self) -> int:
        return len(self.alternatives)

    def __getitem__(self, index: Any) -> Any:
        return self.alternatives[index]


def token_scores(query: Query, texts: Sequence[str], log_probs: Sequence[float]) -> tuple[TokenScore, ...]:
    """Return the asked tokens of a complete query with their texts and log-probabilities.

    Args:
        query: The query; every asked token has an id.
        texts: The text of each token of the query.
        log_probs: The log-probability of each asked token.
    """
    tokens = [token for token, asked in zip(query.tokens, query.asked, strict=True) if asked and token is not None]
    scored = zip(query.asked_positions, tokens, log_probs, strict=True)
    return tuple(TokenScore(texts[position - 1], token, position, log_prob) for position, token, log_prob in scored)


# ---- settings that several questions share --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ReadingOptions(Options):
    """What predictions see."""

    future: bool | None = option(
        "Whether predictions see given tokens that come after an asked one. Default: if the model was trained to; "
        "otherwise it reads from left to right, and warns if there are any.",
        flags=("--future/--no-future",),
    )


@dataclass(frozen=True, kw_only=True)
class DrawingOptions(SamplingOptions):
    """How tokens are drawn, and how long gaps may become."""

    max_tokens: int | None = option(
        "Gaps: maximum number of tokens. Default: what the template says, else 32; 255 for a model that predicts "
        "lengths, except in a gap that ends the text.",
        metavar="N",
        minimum=1,
    )
    stop: str | Sequence[str] = option(
        "Gaps: the text ends before this one.",
        (),
        metavar="TEXT",
        form="list",
        python="One or several strings. The log-probability is that of what was drawn.",
        shell="May be repeated.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seed is None:
            object.__setattr__(self, "seed", secrets.randbits(32))
        several = isinstance(self.stop, Iterable) and not isinstance(self.stop, str)
        strings = tuple(self.stop) if several else (self.stop,)
        for string in strings:
            if not isinstance(string, str) or not string:
                raise InputError(f"stop must be strings that are not empty, not {string!r}.")
        object.__setattr__(self, "stop", strings)

    @property
    def sampling(self) -> Sampling:
        """The options of the engine."""
        return Sampling(**{item.name: getattr(self, item.name) for item in fields(SamplingOptions)})


@dataclass(frozen=True, kw_only=True)
class SearchOptions(DrawingOptions):
    """How the best fills of gaps are searched for."""

    best_of: int | None = option(
        "Gaps: number of candidates to choose from. Default: one for each length that is tried.",
        metavar="N",
        minimum=1,
        maximum=MOST,
    )
    patience: int = option(
        "Gaps: number of longer lengths than the best that may be no better before the search ends. A larger number "
        f"finds more of the long fills, and takes more time. Default: {PATIENCE}.",
        PATIENCE,
        metavar="N",
        minimum=1,
    )
    distinct: bool = option(
        "Gaps: no two fills have the same text. Default: yes.", True, flags=("--distinct/--no-distinct",)
    )
    seconds: float | None = option(
        "Gaps: time after which no more lengths are tried; the best fills so far are the answer. Default: no limit.",
        metavar="S",
        above=0,
    )


# ---- questions ------------------------------------------------------------------------------------------------------


def question(help: str, python: str = "") -> dict[str, Any]:
    """Return the metadata of the field of a question that is not checked by its type."""
    return {"help": help, "python": python}


@dataclass(frozen=True, kw_only=True)
class Ask(ReadingOptions):
    """A question to a model, or several with the same settings."""

    adapter: Choice = field(  # checked by the router, which can name those that are loaded
        default=None,
        metadata=question(
            'Name of a loaded adapter, or "none" for the model alone. Default: the active adapter, or the one that is '
            "chosen for each query.",
            python="`False` is the model alone, too.",
        ),
    )

    name: ClassVar[str]  # of the method of `LanguageModel` and of the route
    answer: ClassVar[Any]  # type of the answer to one question
    asks: ClassVar[str] = "template"  # field of the question

    @property
    def question(self) -> Any:
        """The question, a template or a query; or a list of these."""
        return getattr(self, self.asks)

    @property
    def single(self) -> bool:
        """Whether one question is asked, not a list of them."""
        return isinstance(self.question, str | bytes | Query) or not isinstance(self.question, Iterable)

    def each(self) -> list[Self]:
        """Return an object for each question.

        Raises:
            QueryError: A question is neither a template nor a query.
        """
        return [self.about(question) for question in ([self.question] if self.single else self.question)]

    def about(self, question: Any) -> Self:
        """Return the same with another question; nothing else is checked again."""
        if self.asks == "template" and not isinstance(question, str):
            raise QueryError(f"a template must be a string, not {type(question).__name__}: {question!r}.")
        if not isinstance(question, str | Query):
            raise QueryError(
                f"a question must be a template (a string) or a Query, not {type(question).__name__}: {question!r}."
            )
        changed = copy.copy(self)
        object.__setattr__(changed, self.asks, question)
        return changed

    @classmethod
    def like(cls, ask: Ask, **changes: Any) -> Self:
        """Return the question of another kind: with its settings, as far as this kind has them, and with changes."""
        shared = {item.name for item in fields(ask)} & {item.name for item in fields(cls)}
        return cls(**{name: getattr(ask, name) for name in shared} | {cls.asks: ask.question} | changes)


@dataclass(frozen=True, kw_only=True)
class LongAsk(Ask):
    """A question with an answer that takes long."""

    notice: Callable[[int], object] = option(
        "Called with the number of new tokens whenever some are drawn, for a progress bar.", ignore
    )


QUERY = "A template such as {example}, a query on token ids, or a list of these."


@dataclass(frozen=True)
class ScoreAsk(Ask):
    """Ask for log p(asked | given)."""

    name, answer = "log_prob", Score
    asks = "query"
    query: Question | Sequence[Question] = field(
        metadata=question(QUERY.format(example='"The capital of France is {{Paris}}."'))
    )


@dataclass(frozen=True)
class SampleAsk(LongAsk, DrawingOptions):
    """Ask for samples of p(asked | given)."""

    name, answer = "sample", list[Sample]
    asks = "query"
    query: Question | Sequence[Question] = field(
        metadata=question(QUERY.format(example='"The cat {{_3}} on the {{_1}}."') + " A slot with text, `{{text}}`, is "
                          "sampled as a blank of as many tokens as the text has.")
    )  # fmt: skip
    n: int = option("Number of samples per query. Default: 1.", 1, metavar="N", minimum=1, maximum=MOST, flags=("-n",))
    _: KW_ONLY
    candidates: int = option(
        "Gaps: number of fills that the samples are chosen from. Default: 64.", 64, metavar="N", minimum=1, maximum=MOST
    )


@dataclass(frozen=True)
class FillAsk(LongAsk, SearchOptions):
    """Ask for the best fills of gaps."""

    name, answer = "fill", list[Fill]
    template: str | Sequence[str] = field(
        metadata=question(
            r"A template with gaps: `{{_}}`, `{{_3-12}}` (tokens) or `{{_:\d+}}` (a regular expression). It may have "
            "blanks, text slots and unknown tokens, too. Or a list of templates."
        )
    )
    n: int = option("Number of fills per template. Default: 5.", 5, metavar="N", minimum=1, maximum=MOST, flags=("-n",))


@dataclass(frozen=True)
class StreamAsk(Ask, DrawingOptions):
    """Ask for a fill as it is made."""

    name, answer = "stream", Piece
    template: str = field(metadata=question("A template with gaps, see `fill`."))
    _: KW_ONLY
    temperature: float = declared(
        SamplingOptions, "temperature", default=0.0, help="Sampling temperature. Default: 0, which gives the best fill."
    )
    seconds: float | None = declared(SearchOptions, "seconds")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.about(self.template)


@dataclass(frozen=True)
class LengthsAsk(Ask):
    """Ask how long a gap is."""

    name, answer = "lengths", Lengths
    template: str | Sequence[str] = field(
        metadata=question("A template with gaps, see `fill`. Or a list of templates.")
    )
    known: Sequence[int] = option(
        "Lengths of the first gaps, of each template; the next gap is asked for. Gaps without a kept token between "
        "them have one length together.",
        (),
    )
    _: KW_ONLY
    max_tokens: int | None = declared(DrawingOptions, "max_tokens")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.known, list | tuple):
            raise InputError(f"known must be a list of lengths such as [3], not {self.known!r}.")


@dataclass(frozen=True)
class RankAsk(Ask):
    """Ask which alternative is likeliest."""

    name, answer = "rank", Ranking
    template: str | Sequence[str] = field(
        metadata=question("A template with alternatives, separated by `|`. Or a list of templates.")
    )


# ---- methods --------------------------------------------------------------------------------------------------------


class Method(Protocol[P, Result]):
    """A method that answers one question, or each of a list."""

    @overload  # a string is a sequence of strings, too
    def __call__(  # type: ignore[overload-overlap]
        self, question: Question, /, *arguments: P.args, **options: P.kwargs
    ) -> Result: ...
    @overload
    def __call__(self, question: Sequence[Question], /, *arguments: P.args, **options: P.kwargs) -> list[Result]: ...


def asks(
    kind: Callable[Concatenate[Any, P], Asked],
) -> Callable[[Callable[[Any, Asked], Result]], Method[P, Result]]:
    """Give a method of one argument, a question, the fields of its class as arguments, signature and documentation.

    In the section Args of the docstring, the line `**keywords` is replaced by the fields.

    Args:
        kind: The class.
    """
    options: Any = kind
    made = inspect.signature(options)

    def decorate(method: Callable[[Any, Asked], Result]) -> Method[P, Result]:
        @functools.wraps(method)
        def call(self: Any, *arguments: Any, **settings: Any) -> Result:
            check_keywords(method.__name__, settings, made.parameters)
            try:
                made.bind(*arguments, **settings)
            except TypeError as error:
                raise TypeError(f"{method.__name__}: {error}") from None
            return method(self, options(*arguments, **settings))

        own = inspect.signature(method)
        parameters, answer = [own.parameters["self"], *made.parameters.values()], own.return_annotation
        if answer != "Any" and "Sequence" in made.parameters[options.asks].annotation:  # or a list of questions
            answer = f"{answer} | list[{answer}]"
        call.__signature__ = own.replace(parameters=parameters, return_annotation=answer)  # type: ignore[attr-defined]
        call.__doc__ = with_arguments(method.__doc__, options)
        return call  # type: ignore[return-value]

    return decorate
