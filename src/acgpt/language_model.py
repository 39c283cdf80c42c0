"""`LanguageModel`: a Hugging Face causal language model and its tokenizer, to which any conditional can be put."""

from __future__ import annotations

import math
import secrets
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, overload

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from acgpt.attention import BACKENDS, check_model, choose_backend, evaluating, possible_backends
from acgpt.decode import Sampler, Sampling
from acgpt.errors import InputError, ModelError, QueryError, TemplateError
from acgpt.metadata import Metadata, choose_bos, token_id, tokenizer_hash
from acgpt.query import Query
from acgpt.score import log_probs
from acgpt.template import Slot, fillings, parse, rendered
from acgpt.text import Encoded, encode, encode_text, pieces


class FutureIgnored(UserWarning):
    """Given tokens after a blank were not used, because the model does not say that it can read them."""


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

    def __len__(self) -> int:
        return len(self.alternatives)

    def __getitem__(self, index: Any) -> Any:
        return self.alternatives[index]


Question = str | Query


class LanguageModel:
    """Ask a causal language model for p(any tokens | any other tokens).

    Args:
        model: Any causal language model of transformers, or one with a PEFT adapter. Its attention implementation is
            set to "acgpt", which outside of our calls behaves as "sdpa".
        tokenizer: Its tokenizer.
        metadata: What the model can do; by default what its config says. A model that says nothing is taken for an
            ordinary causal one.
        bos: The token at position 0, as an id or as a string. By default the metadata's, else the tokenizer's BOS,
            else its EOS.
        mask: The token that stands for unknown ones, as an id or as a string. By default the metadata's.
        attention: "dense", "varlen" or "fused" (CUDA, half precision), or "auto", which chooses.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        *,
        metadata: Metadata | None = None,
        bos: int | str | None = None,
        mask: int | str | None = None,
        attention: str = "auto",
    ) -> None:
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise ModelError(f"expected a tokenizer of transformers, not {type(tokenizer).__name__}.")
        self.model: PreTrainedModel = without_peft(model)
        self.has_adapter = self.model is not model
        self.tokenizer = tokenizer
        self.metadata = metadata if metadata is not None else Metadata.of(self.model.config)
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
        self.positions = positions_of(config)
        if self.metadata and self.metadata.tokenizer_hash not in (None, tokenizer_hash(tokenizer)):
            raise ModelError(
                "the tokenizer is not the one that this model's acgpt.json was written for: its tokens would be read "
                "as others. Load the tokenizer that came with the model or adapter."
            )
        self.bos = choose_bos(bos, self.metadata, tokenizer)
        self.mask = token_id("mask", mask, tokenizer) if mask is not None else None
        if mask is None and self.metadata is not None:
            self.mask = self.metadata.mask_token_id
        for role, token in (("bos", self.bos), ("mask", self.mask)):
            if token is not None and not 0 <= token < self.vocabulary:
                raise ModelError(f"the {role} token {token} is none of the model's ids, 0 to {self.vocabulary - 1}.")
        # Tokens of one pass: as many as keep the device busy, if their logits in fp32 fit into so much memory.
        most, memory = (2**16, 2**32) if self.model.device.type == "cuda" else (2**13, 2**30)
        self.budget = max(1024, min(most, memory // (4 * self.vocabulary)))
        self._sampler = Sampler(self.model, bos=self.bos, mask=self.mask, backend=self.attention, budget=self.budget)
        self._warned = False

    def __repr__(self) -> str:
        kind, device, dtype = type(self.model).__name__, self.model.device, self.model.dtype
        return f"LanguageModel({kind}, {device}, {dtype}, reads_future={self.reads_future})"

    @property
    def reads_future(self) -> bool:
        """Does the model say that it can read given tokens that stand after a blank?"""
        return self.metadata is not None and self.metadata.reads_copies

    # ---- the three questions -----------------------------------------------------------------------------------

    @overload
    def log_prob(self, query: Question, *, future: bool | None = None) -> Score: ...  # type: ignore[overload-overlap]
    @overload
    def log_prob(self, query: Sequence[Question], *, future: bool | None = None) -> list[Score]: ...
    def log_prob(self, query: Question | Sequence[Question], *, future: bool | None = None) -> Score | list[Score]:
        """Score the asked tokens: log p(asked | given), exact, in one forward pass.

        Args:
            query: A template such as "The capital of France is {{Paris}}." (see `acgpt.template`), a `Query`, or a
                list of these, which are answered together and in their order.
            future: Use given tokens that stand after an asked one? `True`: always, `False`: never, everything is read
                left to right. `None`: if the model says it can, else warn and read left to right.
        """
        queries = [self._scorable(q) for q in as_list(query)]
        used = self._use_future(queries, future)
        with self._inference():
            answers = log_probs(
                self.model,
                queries,
                bos=self.bos,
                mask=self.mask,
                future=used,
                backend=self.attention,
                budget=self.budget,
            )
        results = [
            Score(token_scores(q, self._texts(q), answer), future=used)
            for q, answer in zip(queries, answers, strict=True)
        ]
        return results[0] if isinstance(query, str | Query) else results

    @overload
    def sample(  # type: ignore[overload-overlap]
        self, query: Question, n: int = 1, *, temperature: float = 1.0, top_p: float = 1.0,
        top_k: int | None = None, seed: int | None = None, future: bool | None = None,
    ) -> list[Sample]: ...  # fmt: skip
    @overload
    def sample(
        self, query: Sequence[Question], n: int = 1, *, temperature: float = 1.0, top_p: float = 1.0,
        top_k: int | None = None, seed: int | None = None, future: bool | None = None,
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
    ) -> list[Sample] | list[list[Sample]]:
        """Draw the asked tokens from p(asked | given), with a key-value cache.

        Args:
            query: A template such as "The cat {{_3}} on the {{_1}}.", a `Query`, or a list of these. `{{text}}` is a
                blank of as many tokens as the text has.
            n: How many samples of each.
            temperature: 1 is the model's own distribution, 0 is greedy.
            top_p: Draw from the likeliest tokens that together have this probability.
            top_k: Draw from this many likeliest tokens.
            seed: The same seed gives the same samples of a query, alone or in any batch. By default a fresh one,
                which every sample records.
            future: As in `log_prob`.

        Returns:
            A list of n samples; for a list of queries, a list of such lists.
        """
        if not isinstance(n, int) or n < 1:
            raise InputError(f"n must be a whole number, at least 1, not {n!r}.")
        sampling = Sampling(temperature, top_p, top_k, secrets.randbits(32) if seed is None else seed)
        encoded = [self._encode(q) for q in as_list(query)]
        queries = [e.query for e in encoded]
        used = self._use_future(queries, future)
        with self._inference():
            drawn = self._sampler.sample(queries, n, sampling, used)
        results = [
            [self._finish(e, tokens.tolist(), log_probs.tolist(), used, sampling.seed) for tokens, log_probs in samples]
            for e, samples in zip(encoded, drawn, strict=True)
        ]
        return results[0] if isinstance(query, str | Query) else results

    def rank(self, template: str, *, future: bool | None = None) -> Ranking:
        """Compare alternatives: "The {{cat|dog|carburettor}} purred." Several slots: all their combinations.

        Like is compared with like. If the alternatives differ in the asked tokens alone (the same number of them, the
        same given tokens around them) and the model reads copies, by p(asked | given). Otherwise by the probability
        that a text begins with this one, read left to right, which is comparable whatever the lengths; but if the
        template ends in a slot, "cat" can only be likelier than "cat sat". `compared` says which it was.
        """
        if not isinstance(template, str):
            raise QueryError(f"rank takes one template, a string, not {type(template).__name__}.")
        candidates = fillings(template)
        texts = [rendered(parts) for parts in candidates]
        if len(set(texts)) < len(texts):
            raise TemplateError("two alternatives make the same text; write each once.", template, 0)
        used = self.reads_future if future is None else future
        queries = self._comparable(candidates, template) if used else None
        if queries is None:
            used, compared = False, "whole text"
            ids = [encode_text(text, self.tokenizer) for text in texts]
            if not all(ids):
                raise TemplateError("one of the alternatives leaves no text at all to compare.", template, 0)
            queries = [Query(i, given=[False] * len(i)) for i in ids]
        else:
            compared = "asked | given"
        scores = torch.tensor([s.log_prob for s in self.log_prob(queries, future=used)], dtype=torch.float64)
        ranked = [
            Ranked(text, tuple(p.alternatives[0] for p in parts if isinstance(p, Slot)), probability, log_prob)
            for text, parts, probability, log_prob in zip(
                texts, candidates, scores.softmax(0).tolist(), scores.tolist(), strict=True
            )
        ]
        ranked.sort(key=lambda r: -r.log_prob)
        return Ranking(tuple(ranked), compared, used)

    # ---- text and tokens ---------------------------------------------------------------------------------------

    def query(self, template: str) -> Query:
        """The query that a template stands for, as token ids and roles; blanks are `None`."""
        return self._encode(template).query

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """The text that each token contributes; joined, they are the decoded text."""
        return pieces(tokens, self.tokenizer)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the model, its tokenizer and its metadata to a folder that `acgpt.load` and transformers open."""
        if self.has_adapter:
            raise ModelError(
                "the model carries a PEFT adapter. Save the adapter with the PEFT model's own save_pretrained and "
                "write its metadata beside it (Metadata.write), or merge it first: merge_and_unload()."
            )
        self.metadata = replace(
            self.metadata or Metadata(method="gpt"),
            bos_token_id=self.bos,
            mask_token_id=self.mask,
            tokenizer_hash=tokenizer_hash(self.tokenizer),
        )
        self.model.config.acgpt = asdict(self.metadata)
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        self.metadata.write(folder)

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
                raise self._too_long(blank)
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

    def _too_long(self, tokens: int) -> QueryError:
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

    def _use_future(self, queries: Sequence[Query], future: bool | None) -> bool:
        if not (future is None or isinstance(future, bool)):
            raise InputError(f"future must be True, False or None, not {future!r}.")
        if future is None:
            future = self.reads_future
            if not future and not self._warned and any(q.needs_future for q in queries):
                self._warned = True
                warnings.warn(
                    "this model does not say (in an acgpt.json) that it can read the future, so what stands after a "
                    "slot is ignored. Load an adapter that can, pass future=False to say that this is what you want, "
                    "or future=True to use the future anyway.",
                    FutureIgnored,
                    stacklevel=3,
                )
        return future

    def _texts(self, query: Query) -> list[str]:
        """What each token contributes; where none is known, MASK (or BOS) as the model was shown."""
        spare = self.bos if self.mask is None else self.mask
        return self.pieces([spare if t is None else t for t in query.tokens])

    def _finish(
        self, encoded: Encoded, drawn: Sequence[int], log_probs: Sequence[float], used: bool, seed: int
    ) -> Sample:
        query = encoded.query
        tokens = list(query.tokens)
        for p, token in zip(query.asked_positions, drawn, strict=True):
            tokens[p - 1] = token
        query = Query(tokens, query.given, query.asked)
        texts = self._texts(query)
        return Sample(
            tokens=token_scores(query, texts, log_probs),
            future=used,
            text="".join(texts),
            fills=tuple("".join(texts[first - 1 : last]) for first, last in encoded.slots),
            seed=seed,
            query=query,
        )

    @contextmanager
    def _inference(self) -> Iterator[None]:
        with torch.inference_mode(), evaluating(self.model):
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


def positions_of(config: Any) -> int:
    """How many positions the model has, BOS included, within which its position encoding does not change."""
    scaling = getattr(config, "rope_parameters", None) or {}
    if scaling.get("rope_type") in ("dynamic", "longrope") and "original_max_position_embeddings" in scaling:
        return int(scaling["original_max_position_embeddings"])  # beyond, it depends on the batch's longest text
    return int(config.max_position_embeddings)


def without_peft(model: Any) -> PreTrainedModel:
    """The Hugging Face model inside a PEFT one (its adapter is in its layers); any other model as it is."""
    if isinstance(model, PreTrainedModel):
        return model
    try:
        from peft import PeftModel
    except ImportError:
        PeftModel = None
    if PeftModel is None or not isinstance(model, PeftModel):
        raise ModelError(f"expected a causal language model of transformers or peft, not {type(model).__name__}.")
    if model.active_peft_config.is_prompt_learning:
        raise ModelError(
            f"the adapter is of type {model.active_peft_config.peft_type}, which adds virtual tokens to the text; "
            "only adapters inside the layers (LoRA and the like) leave positions as they are."
        )
    return model.get_base_model()
