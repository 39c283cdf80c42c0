"""Generation from a model and a corpus to a folder of samples: what `acgpt generate` and `acgpt.generate` do."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from acgpt.common.files import check_writable, disk_errors, write_json
from acgpt.common.options import keywords
from acgpt.data.corpus import Corpus
from acgpt.engine.decode import Sampling
from acgpt.errors import InputError
from acgpt.evaluation import generator as drawing
from acgpt.evaluation.dataset import keep, own_r_max
from acgpt.evaluation.generator import INDEX, STAYS, Generator
from acgpt.evaluation.options import GenerationOptions
from acgpt.evaluation.partial import record_in
from acgpt.evaluation.setup import Setup, Source, choose_method, compiling
from acgpt.query.modes import MODES, modes_named

Progress = Callable[[int, int, int], object]  # called with how many tokens are there, of how many, and how many are new


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
    """Draw what the five modes of the paper ask, by the model's own procedure, into a folder.

        acgpt.generate("runs/mine/model", "data/mine", "samples/mine", limit=100, modes=["infilling"])

    What is complete in the folder is left as it is, and what was begun goes on.

    Args:
        model: A folder, a hub id or a .gguf file, "default" for the embedded one; or a `LanguageModel`.
        corpus: A folder that `acgpt.prepare` has written; may be left out with `dataset`.
        output: The folder; it gets MODE.jsonl and MODE.json for each mode, and index.json.
        **keywords: See `GenerationOptions`.
        progress: Makes, for a mode, a context in which `Progress` is called.
        note: Called with what a user should know before the work begins.

    Returns:
        The folder's index, of the modes that were wanted: the keys that `acgpt generate --help` lists under --json.

    Raises:
        InputError: Something that the user can mend; the folder holds generations of another configuration.
        OutputError: The folder cannot be written; what has been drawn stays.
    """
    chosen = GenerationOptions(**keywords)
    if output is None:
        raise InputError("name a folder for the files (`output`).")
    output = Path(output)
    if output.exists() and not output.is_dir():
        raise InputError(f"{output} is a file: name a folder with `output`.")
    check_writable(output / INDEX)
    wanted = [mode.name for mode in modes_named(list(chosen.modes))]
    options, samples, compiled = dict(chosen.options or {}), chosen.samples, chosen.compiled
    prompt = drawing.PROMPT if chosen.prompt is None else chosen.prompt
    top_p = drawing.TOP_P if chosen.top_p is None else chosen.top_p
    temperature = drawing.TEMPERATURE if chosen.temperature is None else chosen.temperature
    sampling = Sampling(temperature=temperature, top_p=top_p, seed=chosen.seed)
    setup = Setup.of(model, corpus, chosen, "set_seed")
    lm, evaluation_set = setup.lm, setup.evaluation_set
    generator = Generator(
        lm, evaluation_set, method=choose_method(setup.method, lm), options=options, samples=samples, prompt=prompt,
        sampling=sampling, budget=chosen.batch_tokens, compiled=compiled,
    )  # fmt: skip
    setup.check(generator.tokenizer_hash, note)
    check_index(output / INDEX)
    if chosen.modes and not chosen.if_possible and not any(generator.answers(each) for each in wanted):
        raise InputError(
            f"a model of method {generator.method.name} cannot answer in the mode {' or '.join(wanted)}: name others "
            "with `modes`, or add `if_possible=True`."
        )
    generator.check(output)
    if setup.new:
        keep(evaluation_set, setup.path)
    about = setup.about
    records: dict[str, dict[str, Any] | None] = {}
    for each in wanted:
        with progress(each) as update, compiling(compiled):
            records[each] = generator.write(each, output, about=about, progress=update)
    result = {
        "kind": "index",
        **about,
        "method": generator.method.name,
        "options": options,
        "set": evaluation_set.as_dict() | {"path": str(setup.path)},
        "trained_r_max": own_r_max(lm.metadata),
        "sampling": {"temperature": temperature, "top_p": top_p, "seed": chosen.seed, "prompt": prompt},
        "samples": samples,
        "folder": str(output),
        "modes": {name: summary(name, record) for name, record in records.items()},
    }
    for each in MODES:  # of earlier calls
        if each not in records and ((earlier := record_in(output / f"{each}.json")) or not generator.answers(each)):
            records[each] = earlier
    index = {**result, "modes": {each: summary(each, records[each]) for each in MODES if each in records}}
    with disk_errors(output, STAYS):
        write_json(output / INDEX, index)
    return result


def complete_modes(folder: Path) -> set[str]:
    """The modes whose samples are all in a folder."""
    return {mode for mode in MODES if (folder / f"{mode}.jsonl").exists() and record_in(folder / f"{mode}.json")}


def summary(mode: str, record: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Of a mode's record, what its folder's index says."""
    keys = ("texts", "tokens", "calls", "seconds", "tokens_per_second", "outside")
    return None if record is None else {"file": f"{mode}.jsonl", **{key: record[key] for key in keys}}


def check_index(path: Path) -> None:
    """Refuse to write over another's file."""
    try:
        if not path.exists() or json.loads(path.read_text(encoding="utf-8"))["kind"] == "index":
            return
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise InputError(f"{path} is no index of generations: move it elsewhere, or name another folder.")
