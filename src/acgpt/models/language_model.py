"""`LanguageModel`, the main class of the package: a Hugging Face model that answers arbitrary conditional queries.

Models are usually created with `acgpt.load`. The dataclasses that the class returns are in `models.ask`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from acgpt.common.files import copy_config_permissions
from acgpt.common.options import ignore
from acgpt.engine.architecture import accept, check_model
from acgpt.engine.attention import BACKENDS, choose_backend, possible_backends
from acgpt.engine.cpu_step import CpuSteps
from acgpt.engine.cuda_step import CudaSteps
from acgpt.engine.decode import prefill_tokens
from acgpt.engine.engine import Engine
from acgpt.engine.length_head import FILE as HEAD_FILE
from acgpt.engine.length_head import LengthHead
from acgpt.engine.modules import compile_blocks, turn
from acgpt.engine.peft import trains_biases
from acgpt.engine.score import has_plain_head
from acgpt.errors import InputError, ModelError
from acgpt.methods import METHODS, Method
from acgpt.models.adapters import BARE, common_bos, metadata_by_name, unknown_name, unwrap_named
from acgpt.models.ask import (
    Ask,
    Fill,
    FillAsk,
    Lengths,
    LengthsAsk,
    Piece,
    RankAsk,
    Ranking,
    Sample,
    SampleAsk,
    Score,
    ScoreAsk,
    StreamAsk,
    asks,
)
from acgpt.models.executor import Executor, Search
from acgpt.models.metadata import Metadata, choose_bos, model_method, token_id, tokenizer_hash
from acgpt.models.router import Router, lookup
from acgpt.models.searches import Searches
from acgpt.query.query import Query
from acgpt.query.template import gap_between
from acgpt.query.text import pieces


class LanguageModel:
    """A causal language model with its tokenizer, for queries p(any tokens | any other tokens).

    Create one with `acgpt.load`, or wrap a model that is in memory already:

        model = AutoModelForCausalLM.from_pretrained("gpt2")
        lm = acgpt.LanguageModel(model, AutoTokenizer.from_pretrained("gpt2"))
        lm.log_prob("The capital of France is {{Paris}}").perplexity

    `log_prob` scores, `sample` generates, `rank` compares alternatives, and `fill` finds the best text for gaps of any
    length. They take a template such as "The {{cat}} sat.", whose slots are asked and whose other text is given, or an
    `acgpt.Query` of token ids. Several threads may share an instance; their calls run one at a time. Other
    threads should not call its tokenizer meanwhile, with truncation for example: that is a setting of the tokenizer.

    Args:
        model: A causal language model of transformers, or a PEFT model with adapters. Its attention implementation is
            set to "acgpt", which behaves like "sdpa" outside of acgpt's own calls.
        tokenizer: The model's tokenizer.
        metadata: What the model, with its adapter, can do. Default: the metadata in the model's config; without any,
            the model is treated as an ordinary causal model, which reads from left to right. With several adapters,
            a mapping from adapter names to metadata, in which "none" is the model without an adapter.
        bos: Token at position 0, as an id or as text. Default: the metadata's, else the tokenizer's BOS, else its EOS.
        mask: Token that stands for unknown tokens, as an id or as text. Default: the metadata's.
        attention: Attention backend: "dense", "varlen" or "fused" (the last two need CUDA and half precision), or
            "auto": "varlen" if possible, else "dense". The fused kernels are faster, but are compiled on first use:
            "auto" scores with them if one call has many texts.
        router: Whether to choose the adapter for each query by the query's roles (see `acgpt.models.router`): a query
            that needs no adapter is answered by the base model. If false, the active adapter of the PEFT model answers
            every query. Default: true if there are several adapters. Can be changed later through the attribute
            `router`.
        length_head: Head that predicts lengths of gaps (see `query.lengths`), of the model or of its active adapter.
            With several adapters, a mapping from their names; "none" is the model without an adapter.
        verified: Whether the model and its tokenizer have passed the checks of this class before, so that they are not
            checked again. Set by `acgpt.load` for the embedded model, see `acgpt.models.embedded`.
        small_weights: Whether decoding on a CPU may use copies of the weights in 4 and 8 bits where the model was
            expanded from 4 bits, see `decoding_weights`. Set by `acgpt.load` for the dtype "auto".

    Attributes:
        model: The Hugging Face model; for a PEFT model, the base model, whose layers hold the adapters.
        tokenizer: The tokenizer.
        metadata: Metadata of the model with its active adapter; `None` if there is none.
        adapters: The adapters by name.
        bos: Id of the BOS token, at position 0.
        mask: Id of the MASK token of the active adapter or model; `None` if there is none.
        vocabulary: Size of the vocabulary.
        positions: Number of positions, of which BOS takes one: a text has at most `positions - 1` tokens.
        attention: Name of the attention backend in use; with "auto", that of all but large calls.
        budget: Maximum number of tokens per forward pass.
        searches: The same questions as searches, for code that answers many at a time, see `models.searches`.

    Raises:
        InputError: An argument has a value that is not allowed.
        ModelError: The model cannot answer queries exactly, or the tokenizer or a token does not belong to it.
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
        length_head: LengthHead | Mapping[str, LengthHead] | None = None,
        verified: bool = False,
        small_weights: bool = False,
    ) -> None:
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise ModelError(f"expected a tokenizer of transformers, not {type(tokenizer).__name__}.")
        self.model: PreTrainedModel
        self.model, names = unwrap_named(model)
        self.tokenizer = tokenizer
        by_name = metadata_by_name(metadata, names, Metadata.of(self.model.config))
        self._router = Router(self.model, by_name, len(names) > 1 if router is None else router)
        self.adapters = self._router.adapters
        self.metadata = self._router.metadata(self._router.active())
        (accept if verified else check_model)(self.model)
        if self.model.device.type == "cuda":
            has_plain_head(self.model)  # remembered: the first score would wait for models that other threads load
        if attention != "auto" and attention not in BACKENDS:
            raise InputError(f"attention must be 'auto' or one of {', '.join(map(repr, BACKENDS))}, not {attention!r}.")
        if attention != "auto" and attention not in (possible := possible_backends(self.model)):
            raise InputError(
                f"attention={attention!r} needs a model in bfloat16 or float16 on CUDA. Use 'auto' or, on this device, "
                f"{' or '.join(map(repr, possible))}."
            )
        self.attention = choose_backend(self.model) if attention == "auto" else attention
        self._backend = None if attention == "auto" else attention  # of engines, which may choose by call
        config = self.model.config.get_text_config()
        self.vocabulary: int = config.vocab_size
        self.positions = positions_of(config) + 1 - model_method(self.metadata).overhead  # the tokens and BOS
        for name in () if verified else names or (BARE,):
            entry = by_name[name]
            if entry and entry.tokenizer_hash and entry.tokenizer_hash != tokenizer_hash(tokenizer):
                owner = f"the adapter {name}" if len(names) > 1 else "this model"
                raise ModelError(
                    f"the tokenizer is not the one named by its hash in the acgpt.json of {owner}. Load the tokenizer "
                    "that came with the model or adapter."
                )
        self.bos = choose_bos(common_bos(self.adapters) if bos is None else bos, by_name[BARE], tokenizer)
        masks = {name: None if entry is None else entry.mask_token_id for name, entry in by_name.items()}
        if mask is not None:
            masks = dict.fromkeys(masks, token_id("mask", mask, tokenizer))
        for role, token in (("bos", self.bos), *(("mask", token) for token in masks.values())):
            if token is not None and not 0 <= token < self.vocabulary:
                raise ModelError(f"the {role} token {token} is not one of the model's ids, 0 to {self.vocabulary - 1}.")
        self.mask = lookup(masks, self._router.active())
        # Enough tokens per pass to keep the device busy, but their logits in fp32 must fit into this many bytes.
        most, memory = (2**16, 2**32) if self.model.device.type == "cuda" else (2**13, 2**30)
        self.budget = max(1024, min(most, memory // (4 * self.vocabulary)))
        if isinstance(length_head, LengthHead):
            length_head = {(self._router.active() or BARE).partition("+")[0]: length_head}
        for name, head in (length_head or {}).items():
            if name not in by_name:
                raise InputError(f"length_head has {name!r}, {unknown_name(tuple(self.adapters))}")
            if head.weight.shape[1] != (width := self.model.get_output_embeddings().weight.shape[1]):
                raise ModelError(
                    f"the head for lengths has a width of {head.weight.shape[1]}, the model one of {width}. Use the "
                    "one that was trained with this model."
                )
        # Log-probabilities of lengths are computed in float32 at least.
        precision = torch.promote_types(self.model.dtype, torch.float32)
        heads = {name: head.to(self.model.device, precision).eval() for name, head in (length_head or {}).items()}
        self._cpu_steps = CpuSteps(self.model) if small_weights and self.model.device.type == "cpu" else None
        self._cuda_steps = CudaSteps(self.model)
        self._executor = Executor(self.engine(self.mask), self._router, masks, heads, biased=trains_biases(model))
        self.searches = Searches(self._executor, tokenizer, self.positions)

    def __repr__(self) -> str:
        kind, device, dtype = type(self.model).__name__, self.model.device, self.model.dtype
        adapters = f", adapters=[{', '.join(self.adapters)}]" if self.adapters else ""
        return f"LanguageModel({kind}, {device}, {dtype}, reads_future={self.reads_future}{adapters})"

    def engine(
        self, mask: int | None, budget: int | None = None, *, notice: Callable[[int], object] = ignore
    ) -> Engine:
        """Return an `Engine`, which scores and samples token ids with this model.

        Args:
            mask: Id of the token that stands for unknown tokens.
            budget: Maximum number of tokens per forward pass. Default: as many as the device can take.
            notice: Called as tokens are drawn, with their number.
        """
        prefill = budget or self.budget
        if budget is None and self.attention != "dense":  # on a GPU, one large pass is faster than many small ones
            total = torch.cuda.get_device_properties(self.model.device).total_memory
            prefill = max(1024, prefill_tokens(self.model, total // 16))
        return Engine(
            self.model, bos=self.bos, mask=mask, backend=self._backend, budget=budget or self.budget,
            prefill_budget=prefill, notice=notice, cpu_steps=self._cpu_steps,
            cuda_steps=self._cuda_steps,
        )  # fmt: skip

    def compile(self, method: Method | None = None) -> None:
        """Compile the network with `torch.compile`, for methods that need one forward pass per token or step.

        The first passes then take up to a minute, and later ones less time than before. Results change by rounding.
        On a GPU this pays off from thousands of passes on. Errors of the compiler itself appear at the first pass.

        Args:
            method: The method that will be used. Default: the one in the model's metadata.

        Raises:
            InputError: The method answers in one pass or uses a cache, so compiling would not help.
        """
        if not (method := method or model_method(self.metadata)).compiles:
            able = " and ".join(name for name, other in METHODS.items() if other.compiles)
            raise InputError(
                f"method {method.name} needs too few forward passes for compiling to pay off. Compile only models of "
                f"{able}."
            )
        compile_blocks(self.model)

    @property
    def router(self) -> bool:
        """Whether the adapter is chosen for each query, unless a call names one. Can be set."""
        return self._router.enabled

    @router.setter
    def router(self, enabled: bool) -> None:
        self._router.enabled = enabled

    @property
    def reads_future(self) -> bool:
        """Whether the metadata of the model, or of one of its adapters, say that it reads given tokens after a slot."""
        return self._router.reads_future(None)

    @property
    def decoding_weights(self) -> str:
        """How weights are stored for drawing long samples, a few at a time: "int4", or the dtype of the model.

        A model on a CPU whose weights were expanded from 4 bits, such as the embedded default, reads a copy in 4 bits
        if a short measurement finds that faster. The copy is made on first use. Prefill and scores do not use it. Load
        with `dtype="float32"` to sample without it.
        """
        with turn(self.model):
            small = self._cpu_steps is not None and self._cpu_steps.in_use
        return "int4" if small else str(self.model.dtype).removeprefix("torch.")

    # ---- queries -----------------------------------------------------------------------------------------------

    @asks(ScoreAsk)
    def log_prob(self, ask: ScoreAsk) -> Score:
        """Return the log-probability of the asked tokens, log p(asked | given).

        For most methods, `ac-gpt` and `gpt` among them, it is exact and takes one forward pass.

        Args:
            **keywords: The fields of `ScoreAsk`.

        Returns:
            A `Score`; for a list of queries, which is scored in batches, a list of them in its order.

        Raises:
            TemplateError: A template is malformed, or has a blank, which has no text to score.
            QueryError: The query does not fit the model (it is too long, for example), or an asked token has no id.
        """
        (scores,) = self._executor.run([self.searches.log_probs(ask)])
        return scores[0] if ask.single else scores  # type: ignore[return-value]

    @asks(SampleAsk)
    def sample(self, ask: SampleAsk) -> list[Sample]:
        """Sample the asked tokens from p(asked | given), with a key-value cache where the method has one.

        Gaps, `{{_}}`, are sampled from p(fill | context), too: `candidates` fills of all lengths are drawn, and n of
        them are chosen at random with weights that make up for how they were drawn. With several gaps, the lengths are
        those that `fill` finds, and the texts are drawn given these. A model that predicts lengths, as the embedded
        default, draws them, each given those before it, then the texts. For the best fills use `fill`.

        Args:
            **keywords: The fields of `SampleAsk`.

        Returns:
            A list of n samples; for a list of queries, a list of such lists.

        Raises:
            TemplateError: A template is malformed.
            QueryError: The query does not fit the model; it is too long, for example.
        """
        return self._answer(ask)  # type: ignore[no-any-return]

    @asks(FillAsk)
    def fill(self, ask: FillAsk) -> list[Fill]:
        r"""Fill the gaps of a template with the texts that fit best, at any character and of any length.

            lm.fill("The capital of {{_}} is Paris.")[0].text
            lm.fill("def area(r):\n    return {{_}} * r ** 2\n", n=1)[0].fills

        Lengths are tried from the shortest on. A model that predicts them, as the embedded default, tries the likeliest
        ones: those that together have a probability of 80 %, at most 16. A smaller `max_tokens` only leaves out longer
        ones. At each length the likeliest fill is taken, and more are drawn at random if `best_of` asks for them. The
        finished text contains the given text to the letter.

        The best fill is the likeliest text, which is short where much would fit. For a longer one write a range, such
        as `{{_10-30}}`; for one of typical length use `sample`.

        Args:
            **keywords: The fields of `FillAsk`.

        Returns:
            At most n fills, the best first (see `Fill.score`); fewer if no more distinct ones were found. For a list
            of templates, a list of such lists.

        Raises:
            TemplateError: The template is malformed or has no gap, or a gap cannot be filled as it asks.
            QueryError: The text is too long, or the model cannot draw under constraints.
            ModelError: The tokenizer is neither byte-level BPE nor SentencePiece with byte fallback.
        """
        return self._answer(ask)  # type: ignore[no-any-return]

    @asks(LengthsAsk)
    def lengths(self, ask: LengthsAsk) -> Lengths:
        """Return p(length of a gap | context), for a model that predicts lengths, without drawing anything.

            lm.lengths("The capital of {{_}} is Paris.").most_probable(3)

        With several gaps, p(text and lengths) is the product of p(length of each gap | lengths of those before it) and
        p(texts | lengths); `Fill.length_log_prob` is the first factor, and `Fill.log_prob` the second.

        Args:
            **keywords: The fields of `LengthsAsk`.

        Returns:
            The log-probability of each length that the gap may have; they are normalised. Lengths count the tokens
            between kept ones, as in `Fill.lengths`. For a list of templates, a list of such answers, in its order.

        Raises:
            TemplateError: The template is malformed or has no gap.
            QueryError: The model does not predict lengths, `known` does not fit the template, or the gap ends the text.
            InputError: `known` is not a list.
        """
        return self._answer(ask)  # type: ignore[no-any-return]

    @asks(StreamAsk)
    def stream(self, ask: StreamAsk) -> Iterator[Piece]:
        """Fill the gaps of a template and yield the text as it is made.

            for piece in lm.stream("The capital of {{_}} is Paris."):
                print(piece.text, end="", flush=True)

        With a temperature, the lengths of all gaps are drawn first, then the tokens, which are yielded as they come.
        With temperature 0, a model that predicts lengths finds the best fill, as `fill` does, and yields the text of
        each gap as a whole. If a gap ends the text, the tokens of the likeliest lengths are yielded as they come
        instead. A model that does not predict lengths finds them as `fill` does, at any temperature, and yields tokens.

        Args:
            **keywords: The fields of `StreamAsk`.

        Yields:
            Pieces of the fills. The last one has no text and holds the finished `Fill`.

        Raises:
            TemplateError: As in `fill`.
        """
        pieces: deque[Piece] = deque()
        return self._pieces(self.searches.stream(ask, pieces.append), pieces)

    def infill(self, prefix: str, suffix: str, n: int = 1, **options: Any) -> list[Fill]:
        """Fill the gap between two strings; the same as `fill` of a template with one gap.

        Args:
            prefix: Text before the gap.
            suffix: Text after the gap.
            n: Number of fills.
            **options: Those of `fill`.

        Returns:
            The fills, the best first.

        Raises:
            QueryError: The prefix or the suffix is not a string.
        """
        return self.fill(gap_between(prefix, suffix), n, **options)

    @asks(RankAsk)
    def rank(self, ask: RankAsk) -> Ranking:
        """Rank alternatives, written as `{{cat|dog|carburettor}}`, by their probability.

        With several slots, all combinations of their alternatives are ranked. `Ranking.compared` says what was
        compared:

        - "asked | given": p(asked | given). Used if the alternatives differ only in their asked tokens (the same
          number of them, and the same given tokens around them) and the model reads the future.
        - "whole text": the probability that a text begins with this one, read from left to right. Comparable for any
          lengths; but if the template ends in a slot, "cat" is never less probable than "cat sat". Used otherwise, and
          with `future=False`.

        If the adapter is chosen per query (`router`), whole texts are compared unless `future` or `adapter` is passed:
        within one model the two probabilities are proportional, so the base model is enough.

        Args:
            **keywords: The fields of `RankAsk`.

        Returns:
            The alternatives, the most probable first; for a list of templates, a list of rankings.

        Raises:
            TemplateError: The template is malformed, has a duplicate alternative, or leaves no text.
            QueryError: The model's log-probabilities are only bounds, or a text is too long.
        """
        return self._answer(ask)  # type: ignore[no-any-return]

    # ---- text and tokens ---------------------------------------------------------------------------------------

    def query(self, template: str) -> Query:
        """Tokenize a template.

        Args:
            template: A template, see `acgpt.query.template`.

        Returns:
            The query: token ids and roles. The ids of blanks are `None`.
        """
        return self.searches.encode(template).query

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Return the text that each token contributes.

        Joined, the pieces are the decoded text, which is not so if each token is decoded alone.

        Args:
            tokens: Token ids.
        """
        return pieces(tokens, self.tokenizer)

    def save_pretrained(self, folder: str | Path) -> None:
        """Save the model, its tokenizer and its metadata (`acgpt.json`).

        `acgpt.load` and the `from_pretrained` methods of transformers can load the folder.

        Args:
            folder: The folder to write to.

        Raises:
            ModelError: The model has a PEFT adapter.
        """
        if self.adapters:
            raise ModelError(
                "the model has a PEFT adapter. Save the adapter with the PEFT model's save_pretrained and its metadata "
                "with Metadata.write, or merge it first with acgpt merge."
            )
        head = self._executor.heads.get(BARE)
        self.metadata = replace(
            self.metadata or Metadata(method=model_method(None).name),
            bos_token_id=self.bos,
            mask_token_id=self.mask,
            tokenizer_hash=tokenizer_hash(self.tokenizer),
            lengths=None if head is None else {"file": HEAD_FILE, "distance": head.distance},
        )
        self.model.config.acgpt = self.metadata.as_dict()
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        if head is not None:
            head.write(Path(folder))
        self.metadata.write(folder)
        copy_config_permissions(Path(folder))

    # ---- internals ---------------------------------------------------------------------------------------------

    def _answer(self, ask: Ask) -> Any:
        """Answer a question, or each of a list."""
        results = self._executor.run([self.searches.of(each) for each in ask.each()])
        return results[0] if ask.single else results

    def _pieces(self, search: Search[Fill], pieces: deque[Piece]) -> Iterator[Piece]:
        """Yield the pieces of `stream`, which the search appends."""
        for _ in self._executor.steps([search]):
            while pieces:
                yield pieces.popleft()
        yield from pieces


def positions_of(config: Any) -> int:
    """Return the number of positions, BOS included, for which the position encoding of a model is fixed."""
    scaling, limit = getattr(config, "rope_parameters", None) or {}, "original_max_position_embeddings"
    for rope in (scaling, *(part for part in scaling.values() if isinstance(part, dict))):  # also per layer type
        if rope.get("rope_type") in ("dynamic", "longrope") and limit in rope:
            return int(rope[limit])  # beyond it, the encoding depends on the longest text of the batch
    return int(config.max_position_embeddings)
