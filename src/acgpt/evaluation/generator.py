"""Sample the asked tokens of an evaluation dataset, mode by mode, by the method's own procedure.

    generator = Generator(acgpt.load("runs/ac/model"), evaluation_dataset)
    record = generator.write("infilling", Path("samples"))        # None if the method cannot answer this mode

    FOLDER/MODE.jsonl        one sample per line, in the order of the texts
    FOLDER/MODE.json         the record of the file; if it exists, the samples are complete
    FOLDER/MODE.jsonl.part   a journal of the groups sampled so far, until all are
    FOLDER/index.json        a summary of each mode, written when all requested modes are complete

A sample is a function of the seed, the query and the sample's number, except for rounding, which depends on the other
rows of a batch. Samples are therefore drawn in groups that depend only on the config; a group is written at once, and
an incomplete one is drawn again (see `journal`). A run that was killed and resumed thus writes the same bytes as one
that was not (on a CPU; a GPU is not deterministic). Finished samples are turned into lines while a GPU works on others.
"""

from __future__ import annotations

import json
import platform
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from acgpt.common.files import disk_errors, write_atomically, write_json
from acgpt.common.memory import gc_paused
from acgpt.common.options import ignore
from acgpt.common.provenance import date_and_command, versions
from acgpt.engine.decode import Answer
from acgpt.engine.modules import evaluating
from acgpt.errors import InputError
from acgpt.evaluation.dataset import EvaluationDataset
from acgpt.evaluation.generations import BLANK, KIND, check_lines, object_of_kind, sha256
from acgpt.evaluation.journal import Journal, as_line, check_config, journal_config, open_journal
from acgpt.evaluation.perplexity import check_fit
from acgpt.methods import Method
from acgpt.models.language_model import LanguageModel
from acgpt.models.metadata import model_method, tokenizer_hash, weights_hash
from acgpt.query.conditioning import ASKED, GIVEN
from acgpt.query.modes import MODES, Mode, modes_named
from acgpt.query.query import Query
from acgpt.query.sampling import Sampling
from acgpt.query.text import pieces

INDEX = "index.json"
KEPT = "Finished samples are kept."
PROMPT, TOP_P, TEMPERATURE = 20, 0.95, 0.8  # as in the paper's experiments
COSTS = ("seconds", "model_seconds", "calls")  # keys of a group's costs
PER_MODE = ("mode", "future")  # config keys in which the files of one folder may differ


class Generator:
    """Samples the asked tokens of an evaluation dataset.

    Args:
        lm: The model and its tokenizer.
        evaluation_dataset: The evaluation dataset.
        method: How the model is asked. Default: the method in its metadata.
        options: Options of the method, see `Method.configured`.
        samples: Number of samples per text.
        prompt: Number of tokens of each text that are given in the unconditional mode; the rest is sampled.
        sampling: Temperature, top-p, top-k and seed.
        budget: Maximum number of tokens per forward pass. Default: what fits the device.
        compiled: Compile the network with torch.compile, see `LanguageModel.compile`.
    """

    def __init__(
        self,
        lm: LanguageModel,
        evaluation_dataset: EvaluationDataset,
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
            raise InputError(f"the number of samples per text must be at least 1, not {samples}.")
        check_prompt(prompt, evaluation_dataset.length, "`prompt`")
        self.lm, self.evaluation_dataset, self.options = lm, evaluation_dataset, dict(options or {})
        self.method = (method or model_method(lm.metadata)).configured(self.options)
        self.samples, self.prompt, self.compiled = samples, prompt, compiled
        self.sampling = sampling or Sampling(temperature=TEMPERATURE, top_p=TOP_P)
        if samples > 1 and self.sampling.greedy:
            warnings.warn(
                f"temperature 0 is greedy: the {samples} samples of a text are identical, unless the method also draws "
                "the order of the tokens at random.",
                stacklevel=2,
            )
        check_fit(lm.model, evaluation_dataset, self.method.overhead)
        if compiled:
            lm.compile(self.method)
        self.on_tokens: Callable[[int], object] = ignore
        self.engine = lm.engine(self.method.mask(lm.mask), budget, notice=lambda tokens: self.on_tokens(tokens))

    # ---- queries and config -----------------------------------------------------------------------------------------

    def queries(self, mode: str) -> list[Query]:
        """Return one query per text. Tokens that are not given are `None`."""
        (chosen,) = modes_named([mode])
        roles = self.evaluation_dataset.roles(chosen)
        if chosen.conditioning == "empty":
            roles = np.where(np.arange(roles.shape[1]) < self.prompt, np.int8(GIVEN), roles)
        given, asked = roles == GIVEN, roles == ASKED
        tokens = self.evaluation_dataset.tokens.astype(object)
        tokens[~given] = None
        rows = zip(tokens.tolist(), given.tolist(), asked.tolist(), strict=True)
        return [Query.trusted(*row) for row in rows]  # an evaluation dataset has been checked

    def answers(self, mode: str) -> bool:
        """Return whether the method can answer this mode."""
        return choose_future(self.method, MODES[mode], self.queries(mode)) is not None

    def config(self, mode: str, future: bool) -> dict[str, Any]:
        """Return everything that determines the samples of a mode and the bytes of their file.

        A run can only be resumed with the same config.
        """
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
            "set": self.evaluation_dataset.hash,
            "samples": self.samples,
            "prompt": self.prompt,
            **sampling,
            "dtype": str(self.lm.model.dtype).removeprefix("torch."),
            "device": self.lm.model.device.type,
            "attention": self.lm.attention,
            "batch_tokens": self.engine.budget,
            "samples_at_once": self.group_size,
            # These change the rounding: a compiled network, decoding by a kernel instead of a mask, larger prefills.
            **({"compiled": True} if self.compiled else {}),
            **({"decoding": "kernel"} if not self.method.compiles and self.engine.ragged else {}),
            **({"prefill_tokens": prefill} if not self.method.compiles and prefill != self.engine.budget else {}),
        }

    @property
    def group_size(self) -> int:
        """Maximum number of samples in a group."""
        return self.method.rows_at_once(self.engine, self.evaluation_dataset.length)

    @cached_property
    def weights(self) -> str:
        """Hash of the model's weights."""
        return weights_hash(self.lm.model)

    @cached_property
    def tokenizer_hash(self) -> str:
        """Hash of the model's tokenizer."""
        return tokenizer_hash(self.lm.tokenizer)

    # ---- files ------------------------------------------------------------------------------------------------------

    def check(self, folder: Path) -> None:
        """Refuse a folder with generations of another config, damaged generations, or unrelated files.

        Raises:
            InputError: The folder holds such files.
        """
        config = self.config("", False)
        for lines, record_path, part in (mode_files(folder, mode) for mode in MODES):
            for path in (lines, record_path, part):
                if path.is_dir():
                    raise InputError(f"{path} is a folder, not a file: move it, or choose another `output`.")
            has_lines, begun = lines.is_file(), journal_config(part)
            record = existing_record(record_path)  # after the part: another process may finish in between
            if has_lines and record is not None:
                check_lines(lines, record, sha256(lines), "Delete it and run the same command again.")
            elif has_lines and begun is None:  # with a part, the run was killed before it wrote the record
                raise InputError(
                    f"{lines} has no {record_path.name} beside it, which records how it was sampled. Move or delete it "
                    "to sample the mode again, or choose another folder."
                )
            for path, existing in ((record_path, record and record["config"]), (part, begun)):
                if existing is not None:
                    check_config(path, {**existing, **{key: config[key] for key in PER_MODE}}, config)

    def write(
        self,
        mode: str,
        folder: Path,
        *,
        about: Mapping[str, Any] | None = None,
        progress: Callable[[int, int, int], object] = lambda done, all, tokens: None,
    ) -> dict[str, Any] | None:
        """Sample a mode into a folder, or complete it if it was interrupted.

        Args:
            mode: Name of the mode, as in `modes`.
            folder: Folder for `MODE.jsonl` and `MODE.json`; created if necessary.
            about: Further entries of the record: "model", "adapter", "corpus".
            progress: Called with the number of tokens that exist, the total, and the number sampled by this call.

        Returns:
            The record; `None` if the method cannot answer this mode.

        Raises:
            InputError: See `check`; or another process is sampling this mode.
        """
        queries = self.queries(mode)
        future = choose_future(self.method, MODES[mode], queries)
        if future is None:
            return None
        lines_path, record_path, part = mode_files(folder, mode)
        config = self.config(mode, future)
        self.check(folder)
        if (existing := existing_record(record_path)) is not None and lines_path.exists():
            check_config(record_path, existing["config"], config)
            part.unlink(missing_ok=True)
            return existing
        with disk_errors(folder, KEPT):
            with open_journal(part, config) as journal:
                order, counted_until = self.sample_into(journal, queries, future, progress)
                write_atomically(lines_path, journal.entries(order))
                journal.costs["seconds"] += time.perf_counter() - counted_until
                record = self.record(mode, queries, config, journal.costs, lines_path) | dict(about or {})
                write_json(record_path, record)
            part.unlink(missing_ok=True)
        return record

    def sample_into(
        self, journal: Journal, queries: Sequence[Query], future: bool, progress: Callable[[int, int, int], object]
    ) -> tuple[list[int], float]:
        """Sample the groups that the journal lacks, and append each as soon as it is complete.

        Returns:
            The numbers of the entries in the order of the texts, and the time up to which the costs are counted:
            everything but the writing of the last group.
        """
        samples = map(json.loads, journal.entries())
        numbers = {(sample["item"], sample["sample"]): number for number, sample in enumerate(samples)}
        before = sum(len(queries[item].asked_at) for item, _ in numbers)
        total, tokens = self.samples * sum(len(query.asked_at) for query in queries), 0

        def on_tokens(count: int) -> None:
            nonlocal tokens
            tokens += count
            progress(before + tokens, total, tokens)

        self.on_tokens = on_tokens
        on_tokens(0)
        meter, start = self.engine.meter, time.perf_counter()
        for group in make_groups(queries, self.samples, self.group_size):
            if numbers.keys() >= set(group.keys):
                continue
            calls, model_seconds = meter.calls, meter.seconds
            sampling = replace(self.sampling, first=group.samples.start)
            group_queries = [queries[item] for item in group.items]
            lines: dict[tuple[int, int], bytes] = {}
            with torch.inference_mode(), evaluating(self.lm.model):
                for answers in self.method.stream(self.engine, group_queries, len(group.samples), sampling, future):
                    lines |= self.lines(group, queries, answers)
            now = time.perf_counter()  # the time to write a group counts towards the next
            costs = now - start, meter.seconds - model_seconds, meter.calls - calls
            start = now
            numbers |= {key: len(journal.offsets) + number for number, key in enumerate(group.keys)}
            journal.add([lines[key] for key in group.keys], dict(zip(COSTS, costs, strict=True)))
        return [numbers[key] for key in sorted(numbers)], start

    def lines(self, group: Group, queries: Sequence[Query], answers: Sequence[Answer]) -> dict[tuple[int, int], bytes]:
        """Return samples of a group as lines of the file, by their keys."""
        keys = [group.keys[number * len(group.samples) + sample] for number, sample, _ in answers]
        with gc_paused():
            lines = lines_of(
                [(*key, self.sampling.seed) for key in keys],
                [queries[item] for item, _ in keys],
                [sampled for *_, sampled in answers],
                self.lm.tokenizer,
            )
            return dict(zip(keys, map(as_line, lines), strict=True))

    def record(
        self,
        mode: str,
        queries: Sequence[Query],
        config: Mapping[str, Any],
        costs: Mapping[str, float],
        lines: Path,
    ) -> dict[str, Any]:
        """Return the record of a file of samples."""
        seconds, model_seconds, calls = (costs[key] for key in COSTS)
        tokens = self.samples * sum(len(query.asked_at) for query in queries)
        cuda = self.lm.model.device.type == "cuda"
        return {
            "kind": KIND,
            "method": self.method.name,
            "options": self.options,
            "mode": mode,
            "r_max": self.evaluation_dataset.origin.r_max,
            "set": self.evaluation_dataset.as_dict(),
            "sampling": {key: config[key] for key in ("temperature", "top_p", "top_k", "seed", "prompt")},
            "texts": len(queries),
            "samples": self.samples,
            "tokens": tokens,
            "calls": calls,
            "seconds": round(seconds, 3),
            "model_seconds": round(model_seconds, 3),
            "outside": round(max(0.0, 1 - model_seconds / seconds), 4),
            "tokens_per_second": round(tokens / seconds, 1),
            "tokenizer_hash": self.tokenizer_hash,
            "sha256": sha256(lines),
            "config": dict(config),
            "metadata": None if self.lm.metadata is None else self.lm.metadata.as_dict(),
            "device": str(self.lm.model.device),
            "dtype": config["dtype"],
            "hardware": torch.cuda.get_device_name(self.lm.model.device) if cuda else platform.machine(),
            "versions": versions(),
            **date_and_command(),
        }  # fmt: skip


def mode_files(folder: Path, mode: str) -> tuple[Path, Path, Path]:
    """Return the paths of a mode's samples, their record, and the journal of unfinished samples."""
    return folder / f"{mode}.jsonl", folder / f"{mode}.json", folder / f"{mode}.jsonl.part"


def existing_record(path: Path) -> dict[str, Any] | None:
    """Return the record of generations; `None` if there is none yet.

    Raises:
        InputError: The file is not a record of generations.
    """
    if not path.exists():
        return None
    record = object_of_kind(path, KIND)
    if record is None or not isinstance(record.get("config"), dict):
        raise InputError(
            f"{path} is not a record of generations. Move or delete it to sample the mode again, or choose another "
            "folder."
        )
    return record


@dataclass(frozen=True)
class Group:
    """Samples that are drawn together: the same sample numbers of several texts.

    Args:
        items: Numbers of the texts whose queries are asked.
        samples: Numbers of the samples.
        keys: For every sample, the number of the text that it belongs to, and its own.
    """

    items: Sequence[int]
    samples: range
    keys: Sequence[tuple[int, int]]


def check_prompt(prompt: int, length: int, name: str) -> None:
    """Refuse a prompt that is as long as the text.

    Args:
        prompt: Number of given tokens.
        length: Number of tokens per text.
        name: The user's name for the option, for the error.
    """
    if not 0 <= prompt < length:
        raise InputError(
            f"a prompt of {prompt} tokens leaves nothing to sample in texts of {length}: use {name} {length - 1} or "
            "less."
        )


def choose_future(method: Method, mode: Mode, queries: Sequence[Query]) -> bool | None:
    """Return whether queries of a mode are asked with the future in view (else left to right).

    Returns:
        `None` if the method cannot answer them.
    """
    # A method without a left-to-right decomposition is asked with the future if there is none to hide.
    future = mode.future or not (method.chain or any(query.needs_future for query in queries))
    return future if all(method.can_sample(query, future) for query in queries) else None


def make_groups(queries: Sequence[Query], samples: int, rows: int) -> list[Group]:
    """Divide all samples of all texts into groups; texts with similar numbers of asked tokens come together.

    A sample is determined by its query and its number. Texts with equal queries (if nothing is given, say) therefore
    share one sequence of numbers: the second text starts at `samples`.

    Args:
        queries: One per text.
        samples: Number of samples per text.
        rows: Maximum number of samples per group.
    """
    items_by_query: dict[Query, list[int]] = {}
    for item, query in enumerate(queries):
        items_by_query.setdefault(query, []).append(item)
    order = sorted(items_by_query.values(), key=lambda items: -len(queries[items[0]].asked_at))
    unique = [item for items in order if len(items) == 1 for item in items]
    texts, most = max(1, rows // samples), min(samples, rows)
    groups = []
    for start in range(0, len(unique), texts):
        for first in range(0, samples, most):
            items, numbers = unique[start : start + texts], range(first, min(first + most, samples))
            groups.append(Group(items, numbers, [(item, number) for item in items for number in numbers]))
    for items in (items for items in order if len(items) > 1):
        keys = [(items[number // samples], number) for number in range(len(items) * samples)]
        for first in range(0, len(keys), rows):
            part = keys[first : first + rows]
            groups.append(Group(items[:1], range(first, first + len(part)), part))
    return groups


# ---- lines of the file ----------------------------------------------------------------------------------------------


def lines_of(
    numbers: Sequence[tuple[int, int, int]],
    queries: Sequence[Query],
    answers: Sequence[tuple[np.ndarray, np.ndarray]],
    tokenizer: PreTrainedTokenizerBase,
) -> list[dict[str, Any]]:
    """Return samples as the JSON objects of their file.

    Args:
        numbers: For each sample: number of the text, number of the sample for this query, seed.
        queries: The query of each sample.
        answers: The sampled tokens, left to right, and their log-probabilities under the model.
        tokenizer: The model's tokenizer.
    """
    rows = zip(numbers, queries, answers, strict=True)
    return [line_of(number, query, answer, tokenizer) for number, query, answer in rows]


def line_of(
    number: tuple[int, int, int],
    query: Query,
    answer: tuple[np.ndarray, np.ndarray],
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, Any]:
    """Return a sample as the JSON object of its file, see `lines_of`."""
    (item, sample, seed), (sampled, log_probs) = number, answer
    letters = np.full(len(query), b"u")
    letters[query.given_at - 1], letters[query.asked_at - 1] = b"g", b"a"
    filled = query.ids.astype(object)
    filled[filled < 0] = None
    filled[query.asked_at - 1] = sampled
    roles, tokens = letters.tobytes().decode(), filled.tolist()
    runs = decode_runs(roles, tokens, tokenizer)
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


def decode_runs(roles: str, tokens: Sequence[int | None], tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, str]]:
    """Return the role and decoded text of every run of tokens with one role; unknown runs are empty."""
    runs: list[tuple[str, str]] = []
    for part in re.finditer("[ga]+|u+", roles):  # known tokens that follow each other are decoded together
        part_runs = re.findall("g+|a+|u+", part.group())
        known = [token for token in tokens[part.start() : part.end()] if token is not None]
        texts = pieces(known, tokenizer, list(accumulate(map(len, part_runs)))) if known else [""]
        runs += [(run[0], text) for run, text in zip(part_runs, texts, strict=True)]
    return runs
