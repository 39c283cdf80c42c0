"""Sample from a model on a corpus into a folder: `acgpt generate` and `acgpt.generate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from acgpt.common.files import check_writable, disk_errors, write_json
from acgpt.common.options import keywords
from acgpt.data.corpus import Corpus
from acgpt.errors import InputError
from acgpt.evaluation import generator as defaults
from acgpt.evaluation.generations import object_of_kind
from acgpt.evaluation.generator import INDEX, KEPT, Generator, existing_record
from acgpt.evaluation.options import GenerationOptions
from acgpt.evaluation.setup import Setup, Source, compile_errors
from acgpt.query.modes import MODES, modes_named
from acgpt.query.sampling import Sampling

Progress = Callable[[int, int, int], object]  # called with the tokens so far, the total, and the new ones


@keywords(GenerationOptions)
def generate(
    model: Source,
    corpus: Corpus | str | Path | None = None,
    output: str | Path | None = None,
    *,
    progress: Callable[[str], AbstractContextManager[Progress]] = lambda mode: nullcontext(lambda *_: None),
    note: Callable[[str], object] = lambda text: None,
    **keywords: Any,
) -> dict[str, Any]:
    """Sample the asked tokens of the paper's five modes into a folder, by the model's own procedure.

        acgpt.generate("runs/mine/model", "data/mine", "samples/mine", limit=100, modes=["infilling"])

    Complete modes in the folder are not sampled again, and incomplete ones are resumed.

    Args:
        model: A folder, a hub id, a .gguf file, "default" for the embedded model, or a `LanguageModel`.
        corpus: A folder that `acgpt.prepare` has written; optional with `dataset`.
        output: The folder for MODE.jsonl and MODE.json of each mode, and index.json.
        **keywords: See `GenerationOptions`.
        progress: Returns, for a mode, a context manager whose value is called as `Progress`.
        note: Called with messages for the user before sampling starts.

    Returns:
        The index of the requested modes, with the keys that `acgpt generate --help` lists under --json.

    Raises:
        InputError: The arguments or the files are wrong, or the folder holds generations of another config.
        OutputError: The folder cannot be written. Finished samples are kept.
    """
    chosen = GenerationOptions.of(generate, keywords)
    if output is None:
        raise InputError("choose a folder for the files (`output`).")
    output = Path(output)
    if output.exists() and not output.is_dir():
        raise InputError(f"{output} is a file: `output` must be a folder.")
    check_writable(output / INDEX)
    names = [mode.name for mode in modes_named(list(chosen.modes))]
    prompt = defaults.PROMPT if chosen.prompt is None else chosen.prompt
    top_p = defaults.TOP_P if chosen.top_p is None else chosen.top_p
    temperature = defaults.TEMPERATURE if chosen.temperature is None else chosen.temperature
    setup = Setup.load(model, corpus, chosen, "set_seed", note)
    generator = Generator(
        setup.lm, setup.evaluation_dataset, method=setup.method, options=chosen.options, samples=chosen.samples,
        prompt=prompt, sampling=Sampling(temperature=temperature, top_p=top_p, seed=chosen.seed),
        budget=chosen.batch_tokens, compiled=chosen.compiled,
    )  # fmt: skip
    check_index(output / INDEX)
    if chosen.modes and not chosen.if_possible and not any(generator.answers(mode) for mode in names):
        raise InputError(
            f"method {generator.method.name} cannot answer the mode {' or '.join(names)}: choose other `modes`, or add "
            "`if_possible=True`."
        )
    generator.check(output)
    setup.evaluation_dataset.keep()
    records: dict[str, dict[str, Any] | None] = {}
    for mode in names:
        with progress(mode) as update, compile_errors(chosen.compiled):
            records[mode] = generator.write(mode, output, about=setup.about, progress=update)
    result = {
        "kind": "index",
        **setup.about,
        "method": generator.method.name,
        "options": generator.options,
        **setup.result,
        "sampling": {"temperature": temperature, "top_p": top_p, "seed": chosen.seed, "prompt": prompt},
        "samples": chosen.samples,
        "folder": str(output),
        "modes": {name: summary(name, record) for name, record in records.items()},
    }
    for mode in MODES:  # add the modes of earlier calls to the index
        if mode not in records and (
            (earlier := existing_record(output / f"{mode}.json")) or not generator.answers(mode)
        ):
            records[mode] = earlier
    index = {**result, "modes": {mode: summary(mode, records[mode]) for mode in MODES if mode in records}}
    with disk_errors(output, KEPT):
        write_json(output / INDEX, index)
    return result


def complete_modes(folder: Path) -> set[str]:
    """Return the modes whose samples are complete in a folder."""
    return {mode for mode in MODES if (folder / f"{mode}.jsonl").exists() and existing_record(folder / f"{mode}.json")}


def summary(mode: str, record: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the entry of a mode in the index."""
    keys = ("texts", "tokens", "calls", "seconds", "tokens_per_second", "outside")
    return None if record is None else {"file": f"{mode}.jsonl", **{key: record[key] for key in keys}}


def check_index(path: Path) -> None:
    """Refuse to overwrite a file that is not an index of generations."""
    if path.exists() and object_of_kind(path, "index") is None:
        raise InputError(f"{path} is not an index of generations: move it, or choose another folder.")
