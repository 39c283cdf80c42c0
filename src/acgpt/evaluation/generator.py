"""Generations: a model draws the tokens that an evaluation set asks, mode by mode, by its method's own procedure.

    generator = Generator(acgpt.load("runs/ac/model"), evaluation_set)
    record = generator.write("infilling", Path("samples"))        # None if the method cannot

    FOLDER/MODE.jsonl        a line a sample, in the order of the texts
    FOLDER/MODE.json         the record of the whole; where it is, the samples are complete
    FOLDER/MODE.jsonl.part   what has been drawn so far, group by group, until all are
    FOLDER/index.json        what each mode came to, once all that were wanted are there

A sample is a function of the seed, the query and the sample's number, but for rounding, which depends on what a batch
holds. So samples are drawn in groups that are a function of the configuration, a group is written at once, and one
that was not written whole is drawn again (see `part`): a run that was killed ends with the bytes of one that was not
(on a CPU; a GPU rounds as it likes). Lines are made of the samples that are ready while a GPU is at work on the others.
"""

from __future__ import annotations

import contextlib
import gc
import platform
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from acgpt.common.files import disk_errors, write_json, write_whole
from acgpt.common.provenance import versions, when
from acgpt.engine.attention import evaluating
from acgpt.engine.decode import GREEDY, Answer, Sampling
from acgpt.engine.meter import ignore
from acgpt.errors import InputError
from acgpt.evaluation.dataset import EvaluationSet
from acgpt.evaluation.generations import BLANK, KIND, as_line, check_lines, sha256
from acgpt.evaluation.partial import TOOK, Group, Part, config_in, opened, record_in, same
from acgpt.evaluation.perplexity import check_fit
from acgpt.methods import Method
from acgpt.models.language_model import LanguageModel
from acgpt.models.metadata import model_method, tokenizer_hash, weights_hash
from acgpt.query.conditioning import ASKED, GIVEN
from acgpt.query.modes import MODES, Mode, modes_named
from acgpt.query.query import Query
from acgpt.query.text import pieces_of_many

INDEX = "index.json"
STAYS = "Make room there, see who may write, or name another folder; what has been drawn stays."
PROMPT, TOP_P, TEMPERATURE = 20, 0.95, 0.8  # as in the paper's experiments
OWN = ("mode", "future")  # of a file's configuration, what another file in the same folder may have otherwise


class Generator:
    """Draws what an evaluation set asks of a model.

    Args:
        lm: The model and its tokenizer.
        evaluation_set: What is given and what is asked.
        method: How the model is asked; by default as it says itself.
        options: Of the method, as `Method.configured` takes them.
        samples: Of each text.
        prompt: In the unconditional mode so many tokens of each text are given, and the rest of it is drawn.
        sampling: How a token is drawn.
        budget: At most this many tokens are read at a time; by default what the device can take.
        compiled: Put the network through torch.compile, as `LanguageModel.compile`?
    """

    def __init__(
        self,
        lm: LanguageModel,
        evaluation_set: EvaluationSet,
        *,
        method: Method | None = None,
        options: Mapping[str, str] | None = None,
        samples: int = 1,
        prompt: int = PROMPT,
        sampling: Sampling | None = None,
        budget: int | None = None,
        compiled: bool = False,
    ) -> None:
        if samples < 1:
            raise InputError(f"the number of samples of a text must be at least 1, not {samples}.")
        check_prompt(prompt, evaluation_set.length, "`prompt`")
        self.lm, self.evaluation_set, self.options = lm, evaluation_set, dict(options or {})
        self.method = (method or model_method(lm.metadata)).configured(self.options)
        self.samples, self.prompt, self.compiled = samples, prompt, compiled
        self.sampling = sampling or Sampling(temperature=TEMPERATURE, top_p=TOP_P)
        if samples > 1 and self.sampling.temperature < GREEDY:
            warnings.warn(
                f"temperature 0 takes the likeliest token: the {samples} samples of a text are the same, unless the "
                "method also draws in which order tokens come.",
                stacklevel=2,
            )
        check_fit(lm.model, evaluation_set, self.method.overhead)
        if compiled:
            lm.compile(self.method)
        self.noticed: Callable[[int], object] = ignore
        self.engine = lm.engine(self.method.mask(lm.mask), budget, notice=self.notice)

    def notice(self, tokens: int) -> None:
        """Pass on that so many tokens have been drawn, to whoever draws now."""
        self.noticed(tokens)

    # ---- what is drawn ----------------------------------------------------------------------------------------------

    def queries(self, mode: str) -> list[Query]:
        """What is given and what is asked of each text; nothing is known of the tokens that are asked."""
        (chosen,) = modes_named([mode])
        roles = self.evaluation_set.roles(chosen)
        if chosen.conditioning == "empty":
            roles = np.where(np.arange(roles.shape[1]) < self.prompt, np.int8(GIVEN), roles)
        given, asked = roles == GIVEN, roles == ASKED
        tokens = self.evaluation_set.tokens.astype(object)
        tokens[~given] = None
        rows = zip(tokens.tolist(), given.tolist(), asked.tolist(), strict=True)
        return [Query.trusted(*row) for row in rows]  # an evaluation set has been checked

    def answers(self, mode: str) -> bool:
        """Can the method answer in this mode?"""
        return asked_with(self.method, MODES[mode], self.queries(mode)) is not None

    def config(self, mode: str, future: bool) -> dict[str, Any]:
        """All that decides the samples of a mode, and the bytes of their file: what a run that goes on must have."""
        sampling, prefill = asdict(self.sampling), self.engine.prefill_budget
        del sampling["first"]
        return {
            "mode": mode,
            "future": future,
            "method": self.method.name,
            "options": self.options,
            "weights": self.weights,
            "bos_token_id": self.lm.bos,
            "mask_token_id": self.engine.mask,
            "set": self.evaluation_set.hash,
            "samples": self.samples,
            "prompt": self.prompt,
            **sampling,
            "dtype": str(self.lm.model.dtype).removeprefix("torch."),
            "device": self.lm.model.device.type,
            "attention": self.lm.attention,
            "batch_tokens": self.engine.budget,
            "samples_at_once": self.at_once,
            # What rounds otherwise: a compiled network, steps by a kernel instead of a mask, larger prefills.
            **({"compiled": True} if self.compiled else {}),
            **({"decoding": "kernel"} if not self.method.compiles and self.engine.ragged else {}),
            **({"prefill_tokens": prefill} if not self.method.compiles and prefill != self.engine.budget else {}),
        }

    @property
    def at_once(self) -> int:
        """The most samples of a group."""
        return self.method.rows_at_once(self.engine, self.evaluation_set.length)

    @cached_property
    def weights(self) -> str:
        """A fingerprint of the model's weights."""
        return weights_hash(self.lm.model)

    @cached_property
    def tokenizer_hash(self) -> str:
        """Of the model's tokenizer."""
        return tokenizer_hash(self.lm.tokenizer)

    def check(self, folder: Path) -> None:
        """Refuse a folder that holds generations of another configuration, damaged ones, or others' files."""
        here = self.config("", False)
        for path in (folder / f"{mode}{end}" for mode in MODES for end in (".jsonl", ".json", ".jsonl.part")):
            if path.is_dir():
                raise InputError(
                    f"{path} is a folder, and a file is to be written there: move it, or name another `output`."
                )
            if path.suffix == ".jsonl":
                if path.is_file():
                    check_samples(path)
                continue
            there = config_in(path)
            if there is not None:
                same(path, {**there, **{key: here[key] for key in OWN}}, here)

    def write(
        self,
        mode: str,
        folder: Path,
        *,
        about: Mapping[str, Any] | None = None,
        progress: Callable[[int, int, int], object] = lambda done, all, tokens: None,
    ) -> dict[str, Any] | None:
        """Draw a mode into a folder, or what is missing of it.

        Args:
            mode: Its name, as in `modes`.
            folder: Gets `MODE.jsonl` and `MODE.json`; made if need be.
            about: What else the record is to say: "model", "adapter", "corpus".
            progress: Called with the number of tokens that are there, of all, and of those drawn by this call.

        Returns:
            The record; `None` if the method cannot answer in this mode.

        Raises:
            InputError: As in `check`; or another process is drawing the mode.
        """
        queries = self.queries(mode)
        future = asked_with(self.method, MODES[mode], queries)
        if future is None:
            return None
        lines, record = folder / f"{mode}.jsonl", folder / f"{mode}.json"
        config = self.config(mode, future)
        self.check(folder)
        part = lines.with_name(f"{lines.name}.part")
        if (there := record_in(record)) is not None and lines.exists():
            same(record, there["config"], config)
            part.unlink(missing_ok=True)
            return there
        with disk_errors(folder, STAYS):
            folder.mkdir(parents=True, exist_ok=True)
            with opened(part, config) as drawn:
                counted = self.draw(queries, future, drawn, progress)
                write_whole(lines, drawn.lines())
                drawn.took["seconds"] += time.perf_counter() - counted
                written = self.record(mode, queries, config, drawn.took, lines) | dict(about or {})
                write_json(record, written)
            part.unlink(missing_ok=True)
        return written

    def draw(
        self, queries: Sequence[Query], future: bool, drawn: Part, progress: Callable[[int, int, int], object]
    ) -> float:
        """Draw the groups that are not in the part yet, and add each to it as soon as it is there.

        Returns:
            Until when the time that it took has been counted: all but the writing of the last group.
        """
        left = drawn.resume(groups_of(queries, self.samples, self.at_once))
        before = drawn.tokens
        total, tokens = self.samples * sum(len(query.asked_at) for query in queries), 0

        def notice(count: int) -> None:
            nonlocal tokens
            tokens += count
            progress(before + tokens, total, tokens)

        self.noticed = notice
        notice(0)
        meter, begun = self.engine.meter, time.perf_counter()
        for group in left:
            calls, busy = meter.calls, meter.seconds
            sampling = replace(self.sampling, first=group.samples.start)
            asked = [queries[item] for item in group.items]
            lines: dict[tuple[int, int], bytes] = {}
            with torch.inference_mode(), evaluating(self.lm.model):
                for answers in self.method.stream(self.engine, asked, len(group.samples), sampling, future):
                    lines |= self.lines(group, queries, answers)
            now = time.perf_counter()  # writing a group counts with the next
            took = now - begun, meter.seconds - busy, meter.calls - calls
            begun = now
            drawn.add(group, [lines[key] for key in group.keys], dict(zip(TOOK, took, strict=True)))
        return begun

    def lines(self, group: Group, queries: Sequence[Query], answers: Sequence[Answer]) -> dict[tuple[int, int], bytes]:
        """Samples of a group as lines of the file, by their keys."""
        all_keys = group.keys
        keys = [all_keys[number * len(group.samples) + sample] for number, sample, _ in answers]
        with uncollected():
            lines = lines_of(
                [(*key, self.sampling.seed) for key in keys],
                [queries[item] for item, _ in keys],
                [drawn for *_, drawn in answers],
                self.lm.tokenizer,
            )
            return dict(zip(keys, map(as_line, lines), strict=True))

    def record(
        self,
        mode: str,
        queries: Sequence[Query],
        config: Mapping[str, Any],
        took: Mapping[str, float],
        lines: Path,
    ) -> dict[str, Any]:
        """What describes a file of samples."""
        seconds, busy, calls = (took[key] for key in TOOK)
        tokens = self.samples * sum(len(query.asked_at) for query in queries)
        cuda = self.lm.model.device.type == "cuda"
        return {
            "kind": KIND,
            "method": self.method.name,
            "options": self.options,
            "mode": mode,
            "r_max": self.evaluation_set.origin.r_max,
            "set": self.evaluation_set.as_dict(),
            "sampling": {key: config[key] for key in ("temperature", "top_p", "top_k", "seed", "prompt")},
            "texts": len(queries),
            "samples": self.samples,
            "tokens": tokens,
            "calls": calls,
            "seconds": round(seconds, 3),
            "model_seconds": round(busy, 3),
            "outside": round(max(0.0, 1 - busy / seconds), 4),
            "tokens_per_second": round(tokens / seconds, 1),
            "tokenizer_hash": self.tokenizer_hash,
            "sha256": sha256(lines),
            "config": dict(config),
            "metadata": None if self.lm.metadata is None else asdict(self.lm.metadata),
            "device": str(self.lm.model.device),
            "dtype": config["dtype"],
            "hardware": torch.cuda.get_device_name(self.lm.model.device) if cuda else platform.machine(),
            "versions": versions(),
            **when(),
        }  # fmt: skip


def check_samples(path: Path) -> None:
    """Refuse samples that are not what their record says, or that have none, unless a run was killed before it."""
    part, beside = path.with_name(f"{path.name}.part"), path.with_suffix(".json")
    killed = part.is_file() and config_in(part) is not None  # asked first: whoever is drawing may end just now
    record = record_in(beside) if beside.is_file() else None
    if record is not None:
        check_lines(path, record, "Delete it, and the same command draws it again.")
    elif not killed:
        raise InputError(
            f"{path} has no {beside.name} beside it that says how it was drawn: move it elsewhere or delete it, and "
            "the mode is drawn again; or name another folder."
        )


def check_prompt(prompt: int, length: int, name: str) -> None:
    """Refuse a prompt that is as long as the text; `name` is what the user called it."""
    if not 0 <= prompt < length:
        raise InputError(
            f"a prompt of {prompt} tokens leaves nothing to draw of texts of {length}: use {name} {length - 1} or less."
        )


def asked_with(method: Method, mode: Mode, queries: Sequence[Query]) -> bool | None:
    """Are these asked with the future in view, or from left to right? `None`: the method cannot answer them."""
    # What is not taken apart from left to right is asked as it is where there is no future to leave out.
    future = mode.future or not (method.chain or any(query.needs_future for query in queries))
    return future if all(method.can_sample(query, future) for query in queries) else None


def groups_of(queries: Sequence[Query], samples: int, rows: int) -> list[Group]:
    """All samples of all texts in groups of at most so many; texts that ask about as much come together.

    A sample is known by its question and its number, so texts that ask the same, for nothing is given say, share the
    numbers out: the second has those from `samples` on.
    """
    asking: dict[Query, list[int]] = {}
    for item, query in enumerate(queries):
        asking.setdefault(query, []).append(item)
    order = sorted(asking.values(), key=lambda items: -len(queries[items[0]].asked_at))
    alone = [item for items in order if len(items) == 1 for item in items]
    texts, most = max(1, rows // samples), min(samples, rows)
    groups = [
        Group(tuple(alone[start : start + texts]), range(first, min(first + most, samples)))
        for start in range(0, len(alone), texts)
        for first in range(0, samples, most)
    ]
    for items in (items for items in order if len(items) > 1):
        owners = [item for item in items for _ in range(samples)]
        for first in range(0, len(owners), rows):
            own = tuple(owners[first : first + rows])
            groups.append(Group((items[0],), range(first, first + len(own)), own))
    return groups


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection within, which would walk through all lists of tokens again and again, and find nothing."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


# ---- a line a sample ------------------------------------------------------------------------------------------------


def lines_of(
    numbers: Sequence[tuple[int, int, int]],
    queries: Sequence[Query],
    answers: Sequence[tuple[np.ndarray, np.ndarray]],
    tokenizer: PreTrainedTokenizerBase,
) -> list[dict[str, Any]]:
    """Samples as their file has them.

    Args:
        numbers: Of each sample that of its text, its own among those of this text's question, and the seed.
        queries: What was given and asked.
        answers: The tokens that were drawn, from left to right, and their log-probabilities under the model itself.
        tokenizer: The model's.
    """
    filled = [fill_in(query, drawn) for query, (drawn, _) in zip(queries, answers, strict=True)]
    return [
        line_of(number, roles, tokens, log_probs, runs)
        for number, (_, log_probs), (roles, tokens), runs in zip(
            numbers, answers, filled, texts_of(filled, tokenizer), strict=True
        )
    ]


def fill_in(query: Query, drawn: np.ndarray) -> tuple[str, list[int | None]]:
    """A letter for the role of each token, and the tokens, with those that were drawn."""
    letters = np.full(len(query), b"u")
    letters[query.given_at - 1], letters[query.asked_at - 1] = b"g", b"a"
    tokens = query.ids.astype(object)
    tokens[tokens < 0] = None
    tokens[query.asked_at - 1] = drawn
    return letters.tobytes().decode(), tokens.tolist()


def line_of(
    number: tuple[int, int, int],
    roles: str,
    tokens: Sequence[int | None],
    log_probs: np.ndarray,
    runs: Sequence[tuple[str, str]],
) -> dict[str, Any]:
    """A sample as its file has it; `runs` as in `texts_of`, the others as in `lines_of` and `fill_in`."""
    item, sample, seed = number
    return {
        "item": item,
        "sample": sample,
        "seed": seed,
        "roles": roles,
        "tokens": tokens,
        "log_probs": log_probs.astype(np.float64).round(6).tolist(),
        "prompt": "".join(
            text if role == "g" else BLANK if before == "g" else ""
            for (before, _), (role, text) in pairwise([("g", ""), *runs])
        ),
        "fills": [text for role, text in runs if role == "a"],
        "text": "".join([BLANK if role == "u" else text for role, text in runs]),
    }


def texts_of(
    filled: Sequence[tuple[str, Sequence[int | None]]], tokenizer: PreTrainedTokenizerBase
) -> Iterator[list[tuple[str, str]]]:
    """Of each text, the role and the text of every run of tokens that play the same; that of unknown ones is empty."""
    parts = [list(re.finditer("[ga]+|u+", roles)) for roles, _ in filled]
    runs = [[re.findall("g+|a+|u+", part.group()) for part in of_text] for of_text in parts]
    known = [
        ([token for token in tokens[part.start() : part.end()] if token is not None], list(accumulate(map(len, run))))
        for (_, tokens), of_text, of_parts in zip(filled, parts, runs, strict=True)
        for part, run in zip(of_text, of_parts, strict=True)
        if run[0][0] != "u"
    ]
    texts = pieces_of_many(known, tokenizer)
    for of_parts in runs:
        yield [
            (run[0], text)
            for part in of_parts
            for run, text in zip(part, [""] if part[0][0] == "u" else next(texts), strict=True)
        ]
