"""Generation from a model and a corpus to a folder of samples: what `acgpt generate` and `acgpt.generate` do."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

from acgpt.common.files import check_writable, disk_errors, write_json
from acgpt.data.corpus import Corpus
from acgpt.engine.decode import Sampling
from acgpt.errors import InputError
from acgpt.evaluation import generator as drawing
from acgpt.evaluation.dataset import keep, own_r_max
from acgpt.evaluation.generator import INDEX, STAYS, Generator
from acgpt.evaluation.partial import record_in
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
from acgpt.query.modes import MODES, modes_named

Progress = Callable[[int, int, int], object]  # called with how many tokens are there, of how many, and how many are new


def generate(
    model: Source,
    corpus: Corpus | str | Path | None = None,
    output: str | Path | None = None,
    *,
    modes: Sequence[str] = (),
    if_possible: bool = False,
    split: str | None = None,
    r_max: float | None = None,
    length: int | None = None,
    limit: int | None = None,
    samples: int = 1,
    prompt: int | None = None,
    top_p: float | None = None,
    temperature: float | None = None,
    seed: int = 0,
    set_seed: int | None = None,
    conditioning: Distribution = None,
    sets: str | Path | None = None,
    method: str | None = None,
    options: Mapping[str, str] | None = None,
    adapter: str | Path | Literal[False] | None = None,
    device: str = "auto",
    dtype: str = "auto",
    batch_tokens: int | None = None,
    compiled: bool = False,
    progress: Callable[[str], AbstractContextManager[Progress]] = lambda mode: nullcontext(lambda *_: None),
    note: Callable[[str], object] = lambda text: None,
) -> dict[str, Any]:
    """Draw what the five modes of the paper ask, by the model's own procedure, into a folder.

        acgpt.generate("runs/mine/model", "data/mine", "samples/mine", limit=100, modes=["infilling"])

    What is complete in the folder is left as it is, and what was begun goes on.

    Args:
        model: As in `acgpt.evaluate`; so are the arguments that are not named here.
        corpus: A folder that `acgpt.prepare` has written; may be left out with `sets`.
        output: The folder; it gets MODE.jsonl and MODE.json for each mode, and index.json.
        modes: Some modes only. Default: all five.
        if_possible: Is it no error if the method can answer none of the `modes`?
        split: Of the corpus.
        r_max: The largest share of a text that is given.
        length: Tokens a text.
        limit: The first texts only.
        samples: Of each text.
        prompt: In the unconditional mode so many tokens of each text are given. Default: 20.
        top_p: Draw from the likeliest tokens that together have this probability. Default: 0.95.
        temperature: 1 is the model's own distribution, 0 is greedy. Default: 0.8.
        seed: Of the draws.
        set_seed: Of the conditioning sets. Default: 0.
        conditioning: The training distribution, if it is not the paper's.
        sets: The file of the evaluation set.
        method: Ask the model as one of this method.
        options: Of the method.
        adapter: As in `acgpt.load`.
        device: As in `acgpt.load`.
        dtype: As in `acgpt.load`.
        batch_tokens: The most tokens of a forward pass.
        compiled: Put the network through torch.compile.
        progress: Makes, for a mode, a context in which `Progress` is called.
        note: Called with what a user should know before the work begins.

    Returns:
        The folder's index, of the modes that were wanted: the keys that `acgpt generate --help` lists under --json.

    Raises:
        InputError: Something that the user can mend; the folder holds generations of another configuration.
        OutputError: The folder cannot be written; what has been drawn stays.
    """
    if output is None:
        raise InputError("name a folder for the files (output).")
    output = Path(output)
    if output.exists() and not output.is_dir():
        raise InputError(f"{output} is a file: name a folder with -o.")
    check_writable(output / INDEX)
    check_counts(length=length, limit=limit, batch_tokens=batch_tokens, samples=samples)
    wanted = [mode.name for mode in modes_named(list(modes))]
    forced, options = None if method is None else method_of(method), dict(options or {})
    prompt = drawing.PROMPT if prompt is None else prompt
    top_p = drawing.TOP_P if top_p is None else top_p
    temperature = drawing.TEMPERATURE if temperature is None else temperature
    sampling = Sampling(temperature=temperature, top_p=top_p, seed=seed)
    chosen = {"split": split, "r_max": r_max, "length": length, "seed": set_seed}
    training = training_distribution(conditioning, r_max)
    opened = opened_corpus(corpus)
    lm, name, in_use = opened_model(model, adapter, device, dtype)
    evaluation_set, path, new = find_set(opened, None if sets is None else Path(sets), chosen, limit, training, lm)
    generator = Generator(
        lm, evaluation_set, method=choose_method(forced, lm), options=options, samples=samples, prompt=prompt,
        sampling=sampling, budget=batch_tokens, compiled=compiled,
    )  # fmt: skip
    evaluation_set.require_tokenizer(generator.tokenizer_hash)
    if (words := other_r_max(evaluation_set, lm)) is not None:
        note(words)
    check_index(output / INDEX)
    if modes and not if_possible and not any(generator.answers(each) for each in wanted):
        raise InputError(
            f"a model of method {generator.method.name} cannot answer in the mode {' or '.join(wanted)}: name others "
            "with --modes, or add --if-possible."
        )
    generator.check(output)
    if new:
        keep(evaluation_set, path)
    about: dict[str, Any] = {
        "model": name,
        "adapter": in_use,
        "corpus": None if opened is None else str(opened.folder),
    }
    records: dict[str, dict[str, Any] | None] = {}
    for each in wanted:
        with progress(each) as update, compiling(compiled):
            records[each] = generator.write(each, output, about=about, progress=update)
    result = {
        "kind": "index",
        **about,
        "method": generator.method.name,
        "options": options,
        "set": evaluation_set.as_dict() | {"path": str(path)},
        "trained_r_max": own_r_max(lm.metadata),
        "sampling": {"temperature": temperature, "top_p": top_p, "seed": seed, "prompt": prompt},
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
