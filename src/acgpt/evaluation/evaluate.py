"""Evaluate a model on a corpus and write the result: `acgpt evaluate` and `acgpt.evaluate`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from safetensors.numpy import save

from acgpt.common.files import check_writable, disk_errors, read_json_object, write_atomically, write_json
from acgpt.common.options import keywords
from acgpt.common.provenance import date_and_command, versions
from acgpt.data.corpus import Corpus
from acgpt.engine.peft import adapter_layers, adapter_scales
from acgpt.errors import InputError
from acgpt.evaluation import perplexity
from acgpt.evaluation.options import EvaluationOptions
from acgpt.evaluation.per_text import write_per_text
from acgpt.evaluation.perplexity import Evaluation, PartialEvaluation, partial_path
from acgpt.evaluation.setup import Setup, Source, compile_errors
from acgpt.models.metadata import full_weights_hash
from acgpt.query.modes import modes_named

Progress = Callable[[int, int, int], object]  # called with the tokens of answered texts, the total, and the new ones


@keywords(EvaluationOptions)
def evaluate(
    model: Source,
    corpus: Corpus | str | Path | None = None,
    *,
    progress: Callable[[], AbstractContextManager[Progress]] = lambda: nullcontext(lambda *_: None),
    note: Callable[[str], object] = lambda text: None,
    **keywords: Any,
) -> dict[str, Any]:
    """Measure the perplexity of a model in the paper's five modes.

        results = acgpt.evaluate("runs/mine/model", "data/mine", limit=100)
        results["modes"]["infilling"]["perplexity"], results["gains"]["infilling"]["percent"]

    Args:
        model: A folder, a hub id, a .gguf file, "default" for the embedded model, or a `LanguageModel`.
        corpus: A folder that `acgpt.prepare` has written; optional with `dataset`.
        **keywords: See `EvaluationOptions`.
        progress: Returns a context manager whose value is called as `Progress`.
        note: Called with messages for the user before the evaluation starts.

    Returns:
        The result, with the keys that `acgpt evaluate --help` lists under --json.

    Raises:
        InputError: The arguments or the files are wrong; the message says what to do.
        OutputError: The result cannot be written.
    """
    chosen = EvaluationOptions.of(evaluate, keywords)
    output, records = (None if path is None else Path(path) for path in (chosen.output, chosen.records))
    if records is not None and records.suffix != ".safetensors":
        raise InputError(f"{records}: records are a safetensors file. Use a name that ends in .safetensors.")
    for path in (output, records):
        check_writable(path)
    names = [mode.name for mode in modes_named(list(chosen.modes))]
    options, compiled = dict(chosen.options or {}), chosen.compiled
    setup = Setup.load(model, corpus, chosen, "seed", note)
    lm, method, evaluation_dataset = setup.lm, setup.method, setup.evaluation_dataset
    if output is not None and output.exists():
        about = {name: setup.about[name] for name in ("model", "adapter")} | {"method": method.name, "options": options}
        dtype = str(lm.model.dtype).removeprefix("torch.")
        check_result(output, about | {"modes": sorted(names), "set": evaluation_dataset.hash, "dtype": dtype})
    if compiled:
        lm.compile(method)
    engine = lm.engine(lm.mask, chosen.batch_tokens)
    batch_tokens = chosen.batch_tokens or perplexity.pass_tokens(engine)
    start = time.perf_counter()

    def config() -> dict[str, Any]:
        return {
            "method": method.name, "options": options, "set": evaluation_dataset.hash, "compiled": compiled,
            "weights": full_weights_hash(lm.model), "config": lm.model.config.to_json_string(),
            "dtype": str(lm.model.dtype), "device": lm.model.device.type, "attention": lm.attention,
            "bos": lm.bos, "mask": lm.mask, "adapters": adapter_scales(adapter_layers(lm.model)), **versions(),
        }  # fmt: skip

    unfinished = None if output is None else PartialEvaluation(partial_path(output), config)
    with progress() as update, compile_errors(compiled), unfinished or nullcontext():
        evaluation = perplexity.evaluate(
            method, engine, evaluation_dataset,
            modes=names, seed=chosen.seed or 0, budget=batch_tokens, progress=update, unfinished=unfinished,
        )  # fmt: skip
    seconds = time.perf_counter() - start if unfinished is None else unfinished.seconds
    setup.evaluation_dataset.keep()
    result = {
        **setup.about,
        **evaluation.as_dict(),
        "options": options,
        "metadata": None if lm.metadata is None else lm.metadata.as_dict(),
        **setup.result,
        "bos_token_id": lm.bos,
        "mask_token_id": lm.mask,
        "device": str(lm.model.device),
        "dtype": str(lm.model.dtype).removeprefix("torch."),
        "batch_tokens": batch_tokens,
        "compiled": compiled,
        **({"resumed": True} if unfinished is not None and unfinished.earlier else {}),
        "seconds": round(seconds, 3),
        "versions": versions(),
        **date_and_command(),
    }
    write_results(evaluation, result, output, records)
    if unfinished is not None:
        unfinished.discard()
    return result


def same(value: Any, other: Any) -> bool:
    """Return whether two values of results are equal, or two ways to write the path of one folder."""
    paths = [path for path in (value, other) if isinstance(path, str) and os.path.exists(path)]
    return bool(value == other) or (len(paths) == 2 and os.path.samefile(*paths))


def check_result(path: Path, question: Mapping[str, Any]) -> None:
    """Refuse to replace a file that is not a result of the same question."""
    try:
        if not path.is_file():  # reading a pipe, such as /dev/stdout, would wait for ever
            raise ValueError("not a regular file")
        existing = read_json_object(path)
        existing |= {"modes": sorted(existing["modes"]), "set": existing["set"]["hash"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is not a result of acgpt evaluate: move it, or choose another `output`.") from error
    if other := [name for name in question if not same(existing.get(name), question[name])]:
        texts = " (their number, split or conditioning, for example)" if "set" in other else ""
        raise InputError(
            f"{path} is the result of another evaluation, with other {', '.join(other).replace('set', 'texts')}{texts}"
            ": move it, or choose another `output`."
        )


def write_results(evaluation: Evaluation, result: dict[str, Any], output: Path | None, records: Path | None) -> None:
    """Write the requested files atomically; the per-text file goes beside the result."""
    if output is not None:
        with disk_errors(output):
            write_per_text(output, evaluation.per_text)
            write_json(output, result, allow_nan=False)
    if records is not None:
        keys = ("model", "adapter", "method", "set", "device", "dtype", "versions")
        metadata = {"acgpt_records": json.dumps({key: result[key] for key in keys})}
        content = save(evaluation.records(), metadata=metadata)
        with disk_errors(records):
            write_atomically(records, content)
