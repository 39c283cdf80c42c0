"""`acgpt generate`: draw what an evaluation set asks, in the five modes of the paper, a file a mode."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from acgpt.cli import evaluate
from acgpt.cli.evaluate import (
    NO_ANSWER,
    bar,
    check_writable,
    choose_method,
    compiling,
    find_set,
    names_in,
    note_r_max,
    r_max_in_words,
    training_distribution,
)
from acgpt.cli.train import QuietOption
from acgpt.cli.ui import (
    AdapterOption,
    DeviceOption,
    Dtype,
    DtypeOption,
    called,
    emit,
    hush,
    load_model,
    option,
)
from acgpt.errors import InputError

HELP = {
    "if_possible": "Not an error if the method can answer none of the modes that were named.",
    "output": "The folder of the files, MODE.jsonl and MODE.json; it has to be named.",
    "samples": "Samples of each text. Default: 1.",
    "prompt": "Of the unconditional mode: tokens of the text that are given. Default: 20.",
    "top_p": "Draw from the likeliest tokens that together have probability P, above 0 and at most 1. Default: 0.95.",
    "temperature": "1 is the model's own distribution, 0 is greedy. Default: 0.8.",
    "seed": "Of the draws. Default: 0.",
    "set_seed": "Of the conditioning sets, as acgpt evaluate --seed. Default: 0.",
    "batch_tokens": "At most so many tokens are read by the model at a time. Default: what the device can take.",
}


def generate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=evaluate.HELP["model"])],
    corpus: Annotated[
        Path | None, typer.Argument(metavar="CORPUS", show_default=False, help=evaluate.HELP["corpus"])
    ] = None,
    output: Annotated[Path | None, option("--output", "-o", metavar="FOLDER", help=HELP["output"])] = None,
    modes: Annotated[str | None, option("--modes", "--mode", metavar="NAMES", help=evaluate.HELP["modes"])] = None,
    if_possible: Annotated[bool, option("--if-possible", help=HELP["if_possible"])] = False,
    split: Annotated[str | None, option("--split", metavar="NAME", help=evaluate.HELP["split"])] = None,
    r_max: Annotated[float | None, option("--r-max", metavar="R", min=0, max=1, help=evaluate.HELP["r_max"])] = None,
    length: Annotated[int | None, option("--length", metavar="T", min=1, help=evaluate.HELP["length"])] = None,
    limit: Annotated[int | None, option("--limit", metavar="N", min=1, help=evaluate.HELP["limit"])] = None,
    samples: Annotated[int, option("--samples", "-n", metavar="N", min=1, help=HELP["samples"])] = 1,
    prompt: Annotated[int | None, option("--prompt", metavar="N", min=0, help=HELP["prompt"])] = None,
    top_p: Annotated[float | None, option("--top-p", metavar="P", help=HELP["top_p"])] = None,
    temperature: Annotated[float | None, option("--temperature", metavar="X", min=0, help=HELP["temperature"])] = None,
    seed: Annotated[int, option("--seed", "-s", metavar="N", min=0, help=HELP["seed"])] = 0,
    set_seed: Annotated[int | None, option("--set-seed", metavar="N", min=0, help=HELP["set_seed"])] = None,
    conditioning: Annotated[
        str | None, option("--conditioning", metavar="YAML", help=evaluate.HELP["conditioning"])
    ] = None,
    sets: Annotated[Path | None, option("--sets", metavar="PATH", help=evaluate.HELP["sets"])] = None,
    method: Annotated[str | None, option("--method", metavar="NAME", help=evaluate.HELP["method"])] = None,
    how: Annotated[list[str] | None, option("--how", metavar="KEY=VALUE", help=evaluate.HELP["how"])] = None,
    adapter: AdapterOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = Dtype.auto,
    batch_tokens: Annotated[int | None, option("--batch-tokens", metavar="N", min=1, help=HELP["batch_tokens"])] = None,
    compiled: Annotated[bool, option("--compile", help=evaluate.HELP["compile"])] = False,
    quiet: QuietOption = False,
    as_json: Annotated[bool, option("--json", help=evaluate.HELP["json"])] = False,
) -> None:
    r"""Draw what the five modes of the paper ask, by the model's own procedure.

    unconditional          all but the first 20 tokens of a text
    infilling              the middle of a text, from both its ends
    training               all but blocks of it, as in training
    infilling-no-future    the middle, from left to right
    training-no-future     all but the blocks, from left to right: a block is
                           read when it is reached

    acgpt generate runs/ac/model data/mine --split validation -o samples/ac
    acgpt generate runs/ac/model data/mine --modes infilling -n 5 -o samples/5

    What is given is that of acgpt evaluate: the same set for every model. Each
    mode gets MODE.jsonl, a line a sample, and MODE.json, which says how it was
    made. Stop it at any moment: the same command goes on, and what is done is
    left as it is. A mode that the method cannot answer is --.
    docs/generation.md explains the files.

    Keys of --json:
      model, adapter, corpus, method, options, set, trained_r_max (the model's
      own, null if it does not say), sampling, samples (of each text), folder,
      modes: for each, null or file, texts, tokens (drawn), calls (of the
             model), seconds, tokens_per_second, outside (the share of the time
             that was not the model's)
    """
    if corpus is None and sets is None:
        raise typer.BadParameter("name a CORPUS (see acgpt prepare), or an evaluation set with --sets PATH.")
    if output is None:
        raise typer.BadParameter("name a folder for the files: --output FOLDER.")
    if output.exists() and not output.is_dir():
        raise InputError(f"{output} is a file: name a folder with -o.")
    check_writable(output / "index.json")
    with going_on(output):
        hush(quiet)
        from acgpt.common.files import disk_errors, write_whole
        from acgpt.data.corpus import Corpus
        from acgpt.engine.decode import Sampling
        from acgpt.evaluation.dataset import keep, own_r_max
        from acgpt.evaluation.generate import INDEX, PROMPT, STAYS, TEMPERATURE, TOP_P, Generator
        from acgpt.evaluation.partial import record_in
        from acgpt.methods import method_of, parted
        from acgpt.query.modes import MODES

        wanted = names_in(modes)
        forced = None if method is None else method_of(method)
        options = dict(parted(text) for text in how or ())
        prompt = PROMPT if prompt is None else prompt
        top_p = TOP_P if top_p is None else top_p
        temperature = TEMPERATURE if temperature is None else temperature
        sampling = Sampling(temperature=temperature, top_p=top_p, seed=seed)
        chosen = {"split": split, "r_max": r_max, "length": length, "seed": set_seed}
        training = training_distribution(conditioning, r_max)
        opened = None if corpus is None else Corpus.open(corpus)
        lm, in_use = load_model(model, adapter, device, dtype)
        evaluation_set, path, new = find_set(opened, sets, chosen, limit, training, lm)
        generator = Generator(
            lm, evaluation_set, method=choose_method(forced, lm), options=options, samples=samples, prompt=prompt,
            sampling=sampling, budget=batch_tokens, compiled=compiled,
        )  # fmt: skip
        evaluation_set.require_tokenizer(generator.tokenizer_hash)
        note_r_max(evaluation_set, lm)
        check_index(output / INDEX)
        if modes and not if_possible and not any(generator.answers(each) for each in wanted):
            raise InputError(
                f"a model of method {generator.method.name} cannot answer in the mode {' or '.join(wanted)}: name "
                "others with --modes, or add --if-possible."
            )
        generator.check(output)
        if new:
            keep(evaluation_set, path)
        about: dict[str, Any] = {"model": model, "adapter": in_use, "corpus": None if corpus is None else str(corpus)}
        records: dict[str, dict[str, Any] | None] = {}
        there = {each: record_in(output / f"{each}.json") for each in wanted if (output / f"{each}.jsonl").exists()}
        for each in wanted:
            with bar(each, quiet) as progress, compiling(compiled):
                records[each] = generator.write(each, output, about=about, progress=progress)
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
    for each in MODES:  # of earlier commands
        if each not in records and ((earlier := record_in(output / f"{each}.json")) or not generator.answers(each)):
            records[each] = earlier
    index = {**result, "modes": {each: summary(each, records[each]) for each in MODES if each in records}}
    with disk_errors(output, STAYS):
        write_whole(output / INDEX, json.dumps(index, indent=2) + "\n")
    if as_json:
        emit(result)
    else:
        print_generations(result, [each for each in wanted if there.get(each) is not None])


class Stopped(BaseException):
    """SIGTERM has come."""


@contextmanager
def going_on(folder: Path) -> Iterator[None]:
    """Within, SIGTERM and Ctrl-C end the command with words on how to go on, and with the exit codes of training."""

    def stop(number: int, where: Any) -> None:
        raise Stopped

    main = threading.current_thread() is threading.main_thread()  # only there can signals be handled
    heard = main and signal.getsignal(signal.SIGTERM) != signal.SIG_IGN
    before = signal.signal(signal.SIGTERM, stop) if heard else None
    try:
        yield
    except Stopped as error:
        print(f"stopped. {way_on(folder)}", file=sys.stderr)
        raise typer.Exit(3) from error
    except KeyboardInterrupt as error:
        print(f"\ninterrupted. {way_on(folder)}", file=sys.stderr)
        raise typer.Exit(130) from error
    finally:
        if heard:
            signal.signal(signal.SIGTERM, before)


def way_on(folder: Path) -> str:
    """How a command that was stopped is taken up again."""
    if any(folder.glob("*.jsonl*")):
        return f"The same command goes on with what is in {folder}."
    return "Nothing had been drawn yet: the same command begins anew."


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


def print_generations(result: Mapping[str, Any], there: Sequence[str]) -> None:
    """The table for people; these modes were there before."""
    from rich.table import Table

    from acgpt.display.show import Page, printable

    page, about = Page(), result["set"]
    page.note(printable(called(result["model"], result["adapter"])), "bold")
    page.note(
        f"method {result['method']}; {about['texts']} texts of {about['length']} tokens, {result['samples']} of each, "
        f"{r_max_in_words(result)}, set {about['hash'][:12]}\n"
    )
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("mode", no_wrap=True)
    for heading in ("tokens", "calls", "seconds", "tokens/s", "outside the model"):
        table.add_column(heading, justify="right", no_wrap=True)
    for mode, one in result["modes"].items():
        cells = [NO_ANSWER] * 5
        if one is not None:
            cells = [f"{one['tokens']:,}", f"{one['calls']:,}", f"{one['seconds']:.1f}"]
            cells += [f"{one['tokens_per_second']:,.0f}", f"{one['outside']:.0%}"]
        table.add_row(mode, *cells)
    page.table(table)
    if None in result["modes"].values():
        page.note(f"\n{NO_ANSWER}: cannot be answered by a model of method {result['method']}.")
    if there:
        page.note(f"\nwere there already, and are as they were: {', '.join(there)}.")
    page.note(printable(f"\nwrote {result['folder']}"))
