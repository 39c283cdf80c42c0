"""`LanguageModel`: a Hugging Face causal language model and its tokenizer, to which any conditional can be put."""

from __future__ import annotations

import math
import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from acgpt.common.files import open_weights
from acgpt.engine.attention import BACKENDS, check_model, choose_backend, compile_blocks, evaluating, possible_backends
from acgpt.engine.decode import Sampling, prefill_tokens
from acgpt.engine.engine import Engine
from acgpt.engine.locks import turn
from acgpt.engine.meter import ignore
from acgpt.engine.peft import switched, trains_biases
from acgpt.errors import InputError, ModelError, QueryError, TemplateError, whole_number
from acgpt.methods import METHODS, Method
from acgpt.models.adapters import (
    BARE,
    Choice,
    agreed_bos,
    statements,
    unwrapped,
)
from acgpt.models.metadata import Metadata, choose_bos, model_method, token_id, tokenizer_hash
from acgpt.models.router import Route, Router, of_first
from acgpt.query.query import Query
from acgpt.query.template import Slot, fillings, parse, rendered
from acgpt.query.text import Encoded, encode, encode_text, pieces


class FutureIgnored(UserWarning):
    """Given tokens after a blank were not used, because the model does not say that it can read them."""


IGNORED = (
    "this model does not say (in an acgpt.json) that it can read the future, so what stands after a slot is ignored. "
    "Load an adapter that can, say future=False (--no-future) if that is what you want, or future=True (--future) to "
    "use the future anyway."
)
LEFT_OUT = (
    "without its adapter this model reads from left to right, so what stands after a slot is ignored. Say future=False "
    "(--no-future) if that is what you want, or leave out adapter=False (--adapter none)."
)


@dataclass(frozen=True)
class TokenScore:
    """One asked token: its text, id, position in the text (from 1) and log-probability in nats."""

    text: str
    id: int
    position: int
    log_prob: float


@dataclass(frozen=True)
class Score:
    """log p(asked | given), token by token."""

    tokens: tuple[TokenScore, ...]
    future: bool  # did every prediction see all given tokens, or only those before it?
    adapter: str | None = field(default=None, kw_only=True)  # that answered; `None` is the model without any
    bound: bool = field(default=False, kw_only=True)  # is the log-probability a lower bound, and not exact?

    @property
    def log_prob(self) -> float:
        """Of all asked tokens together, in nats."""
        return math.fsum(token.log_prob for token in self.tokens)

    @property
    def perplexity(self) -> float:
        """Per asked token: exp of the mean negative log-probability."""
        try:
            return math.exp(-self.log_prob / len(self.tokens))
        except OverflowError:
            return math.inf


@dataclass(frozen=True)
class Sample(Score):
    """A completed text: what was drawn, and how likely the model itself finds it (at temperature 1)."""

    text: str  # the whole text
    fills: tuple[str, ...]  # what was put into each blank
    seed: int  # that drew it
    query: Query  # the finished query: `log_prob` of it is this sample's log_prob


@dataclass(frozen=True)
class Ranked:
    """One alternative of a ranking."""

    text: str  # the whole text
    choice: tuple[str, ...]  # the alternative taken in each slot
    probability: float  # among the alternatives, which sum to 1
    log_prob: float  # of what was compared, in nats


@dataclass(frozen=True)
class Ranking(Sequence[Ranked]):
    """Alternatives, the best first."""

    alternatives: tuple[Ranked, ...]
    compared: str  # what `log_prob` is the probability of: "asked | given" or "whole text"
    future: bool  # as in `Score`
    adapter: str | None = None  # as in `Score`

    def __len__(self) -> int:
        return len(self.alternatives)

    def __getitem__(self, index: Any) -> Any:
        return self.alternatives[index]


Question = str | Query


class LanguageModel:
    """Ask a causal language model for p(any tokens | any other tokens). Threads may share it: they take turns.

    Args:
        model: Any causal language model of transformers, or one with PEFT adapters. Its attention implementation is
            set to "acgpt", which outside of our calls behaves as "sdpa".
        tokenizer: Its tokenizer.
        metadata: What the model, with its adapter, can do; by default what its config says. A model that says nothing
            is taken for an ordinary causal one. Where there are several adapters, a mapping from their names; "none" is
            the model without any.
        bos: The token at position 0, as an id or as a string. By default the metadata's, else the tokenizer's BOS,
            else its EOS.
        mask: The token that stands for unknown ones, as an id or as a string. By default the metadata's.
        attention: "dense", "varlen" or "fused" (CUDA, half precision), or "auto", which chooses.
        router: Let each query be answered by the adapter that is for such queries, and by the model itself what needs
            none (see `acgpt.models.router`)? If not, by the adapter that is active in the PEFT model. By default yes
            if there are several. The attribute `router` is the same switch, later.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        *,
        metadata: Metadata | Mapping[str, Metadata | None] | None = None,
        bos: int | str | None = None,
        mask: int | str | None = None,
        attention: str = "auto",
        router: bool | None = None,
    ) -> None:
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise ModelError(f"expected a tokenizer of transformers, not {type(tokenizer).__name__}.")
        self.model: PreTrainedModel
        self.model, names = unwrapped(model)
        self.tokenizer = tokenizer
        says = statements(metadata, names, Metadata.of(self.model.config))
        self._router = Router(self.model, says, len(names) > 1 if router is None else router)
        self.adapters = self._router.adapters
        self.metadata = self._router.metadata(self._router.at_work())
        self._biased = trains_biases(model)
        check_model(self.model)
        if attention != "auto" and attention not in BACKENDS:
            raise InputError(f"attention must be 'auto' or one of {', '.join(map(repr, BACKENDS))}, not {attention!r}.")
        if attention != "auto" and attention not in (possible := possible_backends(self.model)):
            raise InputError(
                f"attention={attention!r} needs a model in bfloat16 or float16 on CUDA; use 'auto', or here one of "
                f"{', '.join(map(repr, possible))}."
            )
        self.attention = choose_backend(self.model) if attention == "auto" else attention
        config = self.model.config.get_text_config()
        self.vocabulary: int = config.vocab_size
        self.positions = positions_of(config) + 1 - model_method(self.metadata).overhead  # for tokens, and one for BOS
        for name in names or (BARE,):
            said = says[name]
            if said and said.tokenizer_hash and said.tokenizer_hash != tokenizer_hash(tokenizer):
                whose = f"the adapter {name}'s" if len(names) > 1 else "this model's"
                raise ModelError(
                    f"the tokenizer is not the one that {whose} acgpt.json was written for: its tokens would be read "
                    "as others. Load the tokenizer that came with the model or adapter."
                )
        self.bos = choose_bos(agreed_bos(self.adapters) if bos is None else bos, says[BARE], tokenizer)
        self._masks = {name: None if said is None else said.mask_token_id for name, said in says.items()}
        if mask is not None:
            self._masks = dict.fromkeys(self._masks, token_id("mask", mask, tokenizer))
        for role, token in (("bos", self.bos), *(("mask", token) for token in self._masks.values())):
            if token is not None and not 0 <= token < self.vocabulary:
                raise ModelError(f"the {role} token {token} is none of the model's ids, 0 to {self.vocabulary - 1}.")
        self.mask = self._mask(self._router.at_work())
        # Tokens of one pass: as many as keep the device busy, if their logits in fp32 fit into so much memory.
        most, memory = (2**16, 2**32) if self.model.device.type == "cuda" else (2**13, 2**30)
        self.budget = max(1024, min(most, memory // (4 * self.vocabulary)))
        self._engine = self.engine(self.mask)
        self._warned = False
        self.left_out = False  # has it an adapter that reads the future, which the user did not want to be loaded?

    def __repr__(self) -> str:
        kind, device, dtype = type(self.model).__name__, self.model.device, self.model.dtype
        adapters = f", adapters=[{', '.join(self.adapters)}]" if self.adapters else ""
        return f"LanguageModel({kind}, {device}, {dtype}, reads_future={self.reads_future}{adapters})"

    def engine(
        self, mask: int | None, budget: int | None = None, *, notice: Callable[[int], object] = ignore
    ) -> Engine:
        """What scores and draws for this model.

        Args:
            mask: As in `Engine`.
            budget: Likewise; by default as many tokens as the device can take.
            notice: Likewise.
        """
        prefill = budget or self.budget
        if budget is None and self.attention != "dense":  # on a GPU, where one large pass is faster than many
            total = torch.cuda.get_device_properties(self.model.device).total_memory
            prefill = max(1024, prefill_tokens(self.model, total // 16))
        return Engine(
            self.model, bos=self.bos, mask=mask, backend=self.attention, budget=budget or self.budget,
            prefill_budget=prefill, notice=notice,
        )  # fmt: skip

    def compile(self, method: Method | None = None) -> None:
        """Put the network through torch.compile: for methods that take a pass for each token or step.

        The first passes then take up to a minute, and those after them less time than before; answers change by
        rounding. On a GPU that pays for thousands of passes.

        Args:
            method: How the model will be asked; by default as it says itself.

        Raises:
            InputError: The method answers in one pass, or keeps a cache: there is nothing to gain. What the compiler
                itself may fail of comes with the first pass.
        """
        if not (method := method or model_method(self.metadata)).compiles:
            able = " and ".join(name for name, each in METHODS.items() if each.compiles)
            raise InputError(
                f"a model of method {method.name} needs few passes, and would wait for the compiler longer than for "
                f"them: compiling is for {able}."
            )
        compile_blocks(self.model)

    @property
    def router(self) -> bool:
        """Is each query answered by the adapter that is for such queries, where none is named?"""
        return self._router.enabled

    @router.setter
    def router(self, enabled: bool) -> None:
        self._router.enabled = enabled

    @property
    def reads_future(self) -> bool:
        """Does the model, or one of its adapters, say that it can read given tokens that stand after a blank?"""
        return self._router.reads_future(None)

    # ---- the three questions -----------------------------------------------------------------------------------

    @overload
    def log_prob(  # type: ignore[overload-overlap]
        self, query: Question, *, future: bool | None = None, adapter: Choice = None
    ) -> Score: ...
    @overload
    def log_prob(
        self, query: Sequence[Question], *, future: bool | None = None, adapter: Choice = None
    ) -> list[Score]: ...
    def log_prob(
        self, query: Question | Sequence[Question], *, future: bool | None = None, adapter: Choice = None
    ) -> Score | list[Score]:
        """Score the asked tokens: log p(asked | given), exact, in one forward pass.

        Args:
            query: A template such as "The capital of France is {{Paris}}." (see `acgpt.query.template`), a `Query`, or
                a list of these, which are answered together and in their order.
            future: Use given tokens that stand after an asked one? `True`: always, `False`: never, everything is read
                left to right. `None`: if the model says it can, else warn and read left to right.
            adapter: The name of the adapter that is to answer; `False` (or "none"): the model without any. `None`: the
                one that it has, or for each query the one that is for such queries (see `router`).
        """
        queries = [self._scorable(q) for q in as_list(query)]
        results = self._score(queries, self._routes(queries, future, adapter))
        return results[0] if isinstance(query, str | Query) else results

    @overload
    def sample(  # type: ignore[overload-overlap]
        self, query: Question, n: int = 1, *, temperature: float = 1.0, top_p: float = 1.0,
        top_k: int | None = None, seed: int | None = None, future: bool | None = None, adapter: Choice = None,
    ) -> list[Sample]: ...  # fmt: skip
    @overload
    def sample(
        self, query: Sequence[Question], n: int = 1, *, temperature: float = 1.0, top_p: float = 1.0,
        top_k: int | None = None, seed: int | None = None, future: bool | None = None, adapter: Choice = None,
    ) -> list[list[Sample]]: ...  # fmt: skip
    def sample(
        self,
        query: Question | Sequence[Question],
        n: int = 1,
        *,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int | None = None,
        seed: int | None = None,
        future: bool | None = None,
        adapter: Choice = None,
    ) -> list[Sample] | list[list[Sample]]:
        """Draw the asked tokens from p(asked | given), with a key-value cache.

        Args:
            query: A template such as "The cat {{_3}} on the {{_1}}.", a `Query`, or a list of these. `{{text}}` is a
                blank of as many tokens as the text has.
            n: How many samples of each.
            temperature: 1 is the model's own distribution, 0 is greedy.
            top_p: Draw from the likeliest tokens that together have this probability.
            top_k: Draw from this many likeliest tokens.
            seed: The same seed gives the same samples of a query, alone or in any batch, to rounding: a token can
                differ where the noise is within rounding of a border. By default a fresh one, which samples record.
            future: As in `log_prob`.
            adapter: As in `log_prob`.

        Returns:
            A list of n samples; for a list of queries, a list of such lists.
        """
        n = whole_number("n", n, least=1)
        sampling = Sampling(temperature, top_p, top_k, secrets.randbits(32) if seed is None else seed)
        encoded = [self._encode(q) for q in as_list(query)]
        queries = [e.query for e in encoded]
        routes = self._routes(queries, future, adapter)
        results: list[list[Sample]] = [[] for _ in queries]
        for way, members in together(routes):
            with self._inference(way):
                engine = self._engine.with_mask(self._mask(way.adapter))
                drawn = self._router.method(way).sample(engine, [queries[i] for i in members], n, sampling, way.future)
            for i, samples in zip(members, drawn, strict=True):
                results[i] = [self._finish(encoded[i], *sample, way, sampling.seed) for sample in samples]
        return results[0] if isinstance(query, str | Query) else results

    def rank(self, template: str, *, future: bool | None = None, adapter: Choice = None) -> Ranking:
        """Compare alternatives: "The {{cat|dog|carburettor}} purred." Several slots: all their combinations.

        Like is compared with like. If the alternatives differ in the asked tokens alone (the same number of them, the
        same given tokens around them) and the model reads copies, by p(asked | given). Otherwise by the probability
        that a text begins with this one, read left to right, which is comparable whatever the lengths; but if the
        template ends in a slot, "cat" can only be likelier than "cat sat". `compared` says which it was. Where queries
        are routed to adapters, it is the latter unless `future` or `adapter` is named: within one model the two are
        proportional, so nothing is needed that the backbone cannot do.

        Args:
            template: A text with alternatives.
            future: As in `log_prob`; `False` compares whole texts.
            adapter: As in `log_prob`.
        """
        if not isinstance(template, str):
            raise QueryError(f"rank takes one template, a string, not {type(template).__name__}.")
        if model_method(self._router.metadata(self._router.named(adapter))).bound:
            raise QueryError(
                "this model's log-probabilities are bounds, and which of two bounds is the larger says nothing of what "
                "they bound: rank with a model of another method."
            )
        candidates = fillings(template)
        texts = [rendered(parts) for parts in candidates]
        if len(set(texts)) < len(texts):
            raise TemplateError("two alternatives make the same text; write each once.", template, 0)
        routed = self._router.chooses(adapter)
        used = not routed and self._router.reads_future(adapter) if future is None else future
        queries, compared = self._comparable(candidates, template) if used else None, "asked | given"
        # The roles are the same in all of them, and so are the routes.
        routes = [] if queries is None else self._routes(queries, future, adapter)
        if queries is None or not routes[0].future:
            compared = "whole text"
            ids = [encode_text(text, self.tokenizer) for text in texts]
            if not all(ids):
                raise TemplateError("one of the alternatives leaves no text at all to compare.", template, 0)
            queries = [Query(i, given=[False] * len(i)) for i in ids]
            routes = self._routes(queries, False, adapter)
        for query in queries:
            self._check(query)
        answers = self._score(queries, routes)
        scores = torch.tensor([answer.log_prob for answer in answers], dtype=torch.float64)
        ranked = [
            Ranked(text, tuple(p.alternatives[0] for p in parts if isinstance(p, Slot)), probability, log_prob)
            for text, parts, probability, log_prob in zip(
                texts, candidates, scores.softmax(0).tolist(), scores.tolist(), strict=True
            )
        ]
        ranked.sort(key=lambda r: -r.log_prob)
        return Ranking(tuple(ranked), compared, routes[0].future, routes[0].adapter)

    # ---- text and tokens ---------------------------------------------------------------------------------------

    def query(self, template: str) -> Query:
        """The query that a template stands for, as token ids and roles; blanks are `None`."""
        return self._encode(template).query

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """The text that each token contributes; joined, they are the decoded text."""
        return pieces(tokens, self.tokenizer)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the model, its tokenizer and its metadata to a folder that `acgpt.load` and transformers open."""
        if self.adapters:
            raise ModelError(
                "the model carries a PEFT adapter. Save the adapter with the PEFT model's own save_pretrained and "
                "write its metadata beside it (Metadata.write), or merge it first: acgpt merge."
            )
        self.metadata = replace(
            self.metadata or Metadata(method=model_method(None).name),
            bos_token_id=self.bos,
            mask_token_id=self.mask,
            tokenizer_hash=tokenizer_hash(self.tokenizer),
        )
        self.model.config.acgpt = asdict(self.metadata)
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        self.metadata.write(folder)
        open_weights(Path(folder))

    # ---- underneath --------------------------------------------------------------------------------------------

    def _encode(self, question: Question, *, blanks: bool = True) -> Encoded:
        if isinstance(question, Query):
            encoded = Encoded(question, question.blanks)
        else:
            parts = parse(question)
            slots = [part for part in parts if isinstance(part, Slot)]
            for slot in slots:
                if slot.blank is not None and not blanks:
                    raise TemplateError(
                        "a blank has no text to score; write it out, or sample it (infill).", question, slot.at
                    )
            if (blank := sum(slot.blank or 0 for slot in slots)) >= self.positions:
                raise self._too_long(f"at least {blank}")
            encoded = encode(parts, self.tokenizer, question)
        self._check(encoded.query)
        return encoded

    def _scorable(self, question: Question) -> Query:
        query = self._encode(question, blanks=False).query
        for position in query.asked_positions:
            if query.tokens[position - 1] is None:
                raise QueryError(f"the asked token at position {position} has no id to score; give it, or use sample.")
        return query

    def _check(self, query: Query) -> None:
        if len(query) + 1 > self.positions:
            raise self._too_long(len(query))
        for position, token in enumerate(query.tokens, start=1):
            if token is not None and token >= self.vocabulary:
                raise QueryError(
                    f"the token at position {position} has the id {token}, but the model's ids end at "
                    f"{self.vocabulary - 1}."
                )

    def _too_long(self, tokens: int | str) -> QueryError:
        return QueryError(
            f"the text has {tokens} tokens; the model has {self.positions} positions, one of them for BOS, so at most "
            f"{self.positions - 1} tokens are allowed."
        )

    def _comparable(self, candidates: list[Any], template: str) -> list[Query] | None:
        """The candidates as queries if they differ in their asked tokens alone, else `None`."""
        if any(not slot.alternatives[0] for parts in candidates for slot in parts if isinstance(slot, Slot)):
            return None
        queries = [encode(parts, self.tokenizer, template).query for parts in candidates]
        known = {(q.given, tuple(t for t, g in zip(q.tokens, q.given, strict=True) if g)) for q in queries}
        return queries if len(known) == 1 else None

    def _mask(self, adapter: str | None) -> int | None:
        return of_first(self._masks, adapter)

    def _routes(self, queries: Sequence[Query], future: bool | None, adapter: Choice) -> list[Route]:
        """Who answers each query, and with what in view; warns if a future is ignored."""
        routes = self._router.routes(queries, future, adapter)
        ignored = future is None and any(
            query.needs_future and not way.future for query, way in zip(queries, routes, strict=True)
        )
        if ignored and not self._warned:
            self._warned = True
            refused = adapter is not None and self._router.named(adapter) is None and self.reads_future
            warnings.warn(LEFT_OUT if refused or self.left_out else IGNORED, FutureIgnored, stacklevel=3)
        return routes

    def _score(self, queries: Sequence[Query], routes: Sequence[Route]) -> list[Score]:
        """Each query's score by whoever answers it, in their order."""
        results: dict[int, Score] = {}
        for way, members in together(routes):
            with self._inference(way):
                engine = self._engine.with_mask(self._mask(way.adapter))
                answers = self._router.method(way).log_probs(engine, [queries[i] for i in members], future=way.future)
            for i, answer in zip(members, answers, strict=True):
                tokens = token_scores(queries[i], self._texts(queries[i], way.adapter), answer)
                results[i] = Score(tokens, way.future, adapter=way.adapter, bound=self._router.method(way).bound)
        return [results[i] for i in range(len(queries))]

    def _texts(self, query: Query, adapter: str | None) -> list[str]:
        """What each token contributes; where none is known, MASK (or BOS) as the model was shown."""
        mask = self._mask(adapter)
        spare = self.bos if mask is None or mask >= len(self.tokenizer) else mask  # a MASK of the model's own has none
        return self.pieces([spare if t is None else t for t in query.tokens])

    def _finish(self, encoded: Encoded, drawn: np.ndarray, log_probs: np.ndarray, way: Route, seed: int) -> Sample:
        query = encoded.query
        tokens = list(query.tokens)
        for p, token in zip(query.asked_positions, drawn.tolist(), strict=True):
            tokens[p - 1] = token
        query = Query(tokens, query.given, query.asked)
        texts = self._texts(query, way.adapter)
        return Sample(
            tokens=token_scores(query, texts, log_probs.tolist()),
            future=way.future,
            adapter=way.adapter,
            text="".join(texts),
            fills=tuple("".join(texts[first - 1 : last]) for first, last in encoded.slots),
            seed=seed,
            query=query,
        )

    @contextmanager
    def _inference(self, way: Route) -> Iterator[None]:
        """No other thread, no gradients and no dropout within, and only the adapter at work that is to answer."""
        if self._biased and way.adapter is None and not way.as_it_is:
            raise ModelError(
                "the adapter has trained the model's own biases, so the model without it is not there any more: load "
                'it alone, or train the adapter with bias="none".'
            )
        switch = nullcontext() if way.as_it_is else switched(self.model, way.adapter)
        with turn(self.model), switch, torch.inference_mode(), evaluating(self.model):
            yield


def as_list(query: Question | Sequence[Question]) -> list[Question]:
    """One question as a list of one; a sequence of questions as it is."""
    if isinstance(query, str | Query):
        return [query]
    try:
        queries = list(query)
    except TypeError:
        queries = [query]  # type: ignore[list-item]  # which is refused
    for q in queries:
        if not isinstance(q, str | Query):
            raise QueryError(f"a question is a template (a string) or a Query, not {type(q).__name__}: {q!r}.")
    return queries


def token_scores(query: Query, texts: Sequence[str], log_probs: Sequence[float]) -> tuple[TokenScore, ...]:
    """The asked tokens of a complete query with their texts and log-probabilities."""
    tokens = [token for token, asked in zip(query.tokens, query.asked, strict=True) if asked and token is not None]
    places = zip(query.asked_positions, tokens, log_probs, strict=True)
    return tuple(TokenScore(texts[p - 1], token, p, log_prob) for p, token, log_prob in places)


def together(routes: Sequence[Route]) -> list[tuple[Route, list[int]]]:
    """The numbers of the queries that each route answers."""
    groups: dict[Route, list[int]] = {}
    for number, way in enumerate(routes):
        groups.setdefault(way, []).append(number)
    return list(groups.items())


def positions_of(config: Any) -> int:
    """How many positions the model has, BOS included, within which its position encoding does not change."""
    scaling, limit = getattr(config, "rope_parameters", None) or {}, "original_max_position_embeddings"
    for rope in (scaling, *(part for part in scaling.values() if isinstance(part, dict))):  # also by layer type
        if rope.get("rope_type") in ("dynamic", "longrope") and limit in rope:
            return int(rope[limit])  # beyond, it depends on the batch's longest text
    return int(config.max_position_embeddings)
