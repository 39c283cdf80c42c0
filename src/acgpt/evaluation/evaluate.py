"""An evaluation from a model and a corpus to its record: what `acgpt evaluate` and `acgpt.evaluate` do."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from safetensors.numpy import save

from acgpt.common.files import check_writable, disk_errors, write_json, write_whole
from acgpt.common.provenance import versions, when
from acgpt.data.corpus import Corpus
from acgpt.engine.decode import adapter_layers
from acgpt.errors import InputError
from acgpt.evaluation import perplexity
from acgpt.evaluation.dataset import keep, own_r_max
from acgpt.evaluation.perplexity import Evaluation, Unfinished
from acgpt.evaluation.setup import (
    Distribution,
    Source,
    check_counts,
    choose_method,
    compiling,
    find_set,
    opened_corpus,
    opened_model,
    other_r_max,
    training_distribution,
)
from acgpt.methods import method_of
from acgpt.models.metadata import every_weight_hash, tokenizer_hash
from acgpt.query.modes import modes_named

Progress = Callable[[int, int], object]  # called with how many questions are answered, of how many


def evaluate(
    model: Source,
    corpus: Corpus | str | Path | None = None,
    *,
    split: str | None = None,
    r_max: float | None = None,
    length: int | None = None,
    limit: int | None = None,
    seed: int | None = None,
    conditioning: Distribution = None,
    sets: str | Path | None = None,
    modes: Sequence[str] = (),
    method: str | None = None,
    options: Mapping[str, str] | None = None,
    adapter: str | Path | Literal[False] | None = None,
    device: str = "auto",
    dtype: str = "auto",
    batch_tokens: int | None = None,
    compiled: bool = False,
    output: str | Path | None = None,
    records: str | Path | None = None,
    progress: Callable[[], AbstractContextManager[Progress]] = lambda: nullcontext(lambda done, total: None),
    note: Callable[[str], object] = lambda text: None,
) -> dict[str, Any]:
    """Measure the perplexity of a model in the five modes of the paper.

        results = acgpt.evaluate("runs/mine/model", "data/mine", limit=100)
        results["modes"]["infilling"]["perplexity"], results["gains"]["infilling"]["percent"]

    Args:
        model: A folder, a hub id or a .gguf file, "default" for the embedded one; or a `LanguageModel`.
        corpus: A folder that `acgpt.prepare` has written; may be left out with `sets`.
        split: Of the corpus. Default: test if there is one, else validation.
        r_max: The largest share of a text that is given. Default: that of `conditioning`, else 0.6.
        length: Tokens a text. Default: 1023, or as many as the model has positions for.
        limit: The first texts only.
        seed: Of the conditioning sets and of the intervals. Default: 0.
        conditioning: The training distribution, if it is not the paper's, as in a recipe; "model" takes the model's.
        sets: The file of the evaluation set, to read or to make. Default: one in the corpus's folder.
        modes: Some modes only. Default: all five.
        method: Ask the model as one of this method. Default: its own.
        options: Of the method, where it leaves a choice.
        adapter: As in `acgpt.load`.
        device: As in `acgpt.load`.
        dtype: As in `acgpt.load`.
        batch_tokens: The most tokens of a forward pass. Default: what the device can take.
        compiled: Put the network through torch.compile: for methods of many passes (MLM, diffusion).
        output: Write the result into this JSON file as well. An evaluation that was stopped then goes on when it is
            called again.
        records: Write every asked token with its log-probability into this .safetensors file.
        progress: Makes a context in which `Progress` is called.
        note: Called with what a user should know before the work begins.

    Returns:
        The result, with the keys that `acgpt evaluate --help` lists under --json.

    Raises:
        InputError: Something that the user can mend.
        OutputError: The result cannot be written.
    """
    output, records = (None if path is None else Path(path) for path in (output, records))
    if records is not None and records.suffix != ".safetensors":
        raise InputError(f"{records}: records are written as safetensors; end the name in .safetensors.")
    for path in (output, records):
        check_writable(path)
    check_counts(length=length, limit=limit, batch_tokens=batch_tokens)
    names = [mode.name for mode in modes_named(list(modes))]
    forced, options = None if method is None else method_of(method), dict(options or {})
    chosen = {"split": split, "r_max": r_max, "length": length, "seed": seed}
    training = training_distribution(conditioning, r_max)
    opened = opened_corpus(corpus)
    lm, name, in_use = opened_model(model, adapter, device, dtype)
    evaluation_set, kept, new = find_set(opened, None if sets is None else Path(sets), chosen, limit, training, lm)
    evaluation_set.require_tokenizer(tokenizer_hash(lm.tokenizer))
    if (words := other_r_max(evaluation_set, lm)) is not None:
        note(words)
    asked_by = choose_method(forced, lm).configured(options)
    if compiled:
        lm.compile(asked_by)
    start = time.perf_counter()

    def about() -> dict[str, Any]:
        asked = {"method": asked_by.name, "options": options, "set": evaluation_set.hash, "compiled": compiled}
        network = {"weights": every_weight_hash(lm.model), "config": lm.model.config.to_json_string()}
        place = {"dtype": str(lm.model.dtype), "device": lm.model.device.type, "attention": lm.attention}
        scales = [str(getattr(layer, "scaling", None)) for layer in adapter_layers(lm.model)]
        return {**asked, **network, **place, "bos": lm.bos, "mask": lm.mask, "adapters": scales, **versions()}

    unfinished = None if output is None else Unfinished(output.with_name(f"{output.name}.part"), about)
    with progress() as update, compiling(compiled):
        evaluation = perplexity.evaluate(
            asked_by,
            lm.model,
            evaluation_set,
            bos=lm.bos,
            mask=lm.mask,
            modes=names,
            backend=lm.attention,
            budget=batch_tokens or lm.budget,
            seed=seed or 0,
            progress=update,
            unfinished=unfinished,
        )
    seconds = time.perf_counter() - start if unfinished is None else unfinished.seconds
    if new:
        keep(evaluation_set, kept)
    result = {
        "model": name,
        "adapter": in_use,
        "corpus": None if opened is None else str(opened.folder),
        **evaluation.as_dict(),
        "options": options,
        "metadata": None if lm.metadata is None else asdict(lm.metadata),
        "trained_r_max": own_r_max(lm.metadata),
        "bos_token_id": lm.bos,
        "mask_token_id": lm.mask,
        "device": str(lm.model.device),
        "dtype": str(lm.model.dtype).removeprefix("torch."),
        "batch_tokens": batch_tokens or lm.budget,
        "compiled": compiled,
        **({"resumed": True} if unfinished is not None and unfinished.earlier else {}),
        "seconds": round(seconds, 3),
        "versions": versions(),
        **when(),
    }
    result["set"]["path"] = str(kept)
    write_results(evaluation, result, output, records)
    if unfinished is not None:
        unfinished.discard()
    return result


def write_results(evaluation: Evaluation, result: dict[str, Any], output: Path | None, records: Path | None) -> None:
    """The files that were asked for, each whole or not at all."""
    if output is not None:
        with disk_errors(output):
            write_json(output, result, allow_nan=False)
    if records is not None:
        keys = ("model", "adapter", "method", "set", "device", "dtype", "versions")
        about = {"acgpt_records": json.dumps({key: result[key] for key in keys})}
        content = save(evaluation.records(), metadata=about)
        with disk_errors(records):
            write_whole(records, content)
