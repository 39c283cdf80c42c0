"""`acgpt evaluate`: perplexity in the five modes of the paper, as a table or as JSON."""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

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
from acgpt.common.provenance import versions, when
from acgpt.errors import InputError, ModelError

if TYPE_CHECKING:
    from acgpt.data.corpus import Corpus
    from acgpt.display.show import Page
    from acgpt.evaluation.dataset import EvaluationSet
    from acgpt.evaluation.perplexity import Evaluation
    from acgpt.methods import Method
    from acgpt.models.language_model import LanguageModel
    from acgpt.query.conditioning import Conditioning

NO_ANSWER = "--"
OWN: Literal["model"] = "model"  # what --conditioning says for the model's own
PAUSE = 30.0  # seconds between two lines on what is done, where nobody is watching
said = time.monotonic()  # when the last of them was printed, or the program began

HELP = {
    "model": "A folder, a Hugging Face hub id or a .gguf file; 'default' is the embedded SmolLM2-135M-Instruct, "
    "with its adapter.",
    "corpus": "A folder that acgpt prepare made; may be left out with --sets.",
    "sets": "The evaluation set: a file to read, or to make. Default: CORPUS/evaluation/….safetensors.",
    "split": "Of the corpus. Default: test if there is one, else validation.",
    "r_max": "The largest share of a text that is given. Default: that of --conditioning, else 0.6.",
    "length": "Tokens a text. Default: 1023, or as many as the model has positions for.",
    "limit": "The first N texts only.",
    "seed": "Of the conditioning sets and of the intervals. Default: 0.",
    "conditioning": "The training distribution, if it is not the paper's: '{b_max: 4}', as in a recipe; or model: "
    "that of the model's acgpt.json, with its r_max.",
    "modes": "Some modes only, with commas: unconditional,training. Default: all five.",
    "method": "Ask the model as one of this method (acgpt methods). Default: what its acgpt.json says, else gpt.",
    "how": "How the method asks, where it leaves a choice (see acgpt methods); may be repeated.",
    "batch_tokens": "At most so many tokens go through the model at a time. Default: what the device can take.",
    "compile": "Put the network through torch.compile: for mlm and diffusion, whose many passes it speeds up on a GPU.",
    "json": "For programs: one JSON object in a line, with the keys named above.",
    "output": "Write the JSON object into a file as well.",
    "records": "Write every asked token with its log-probability into a .safetensors file.",
}


def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=HELP["model"])],
    corpus: Annotated[Path | None, typer.Argument(metavar="CORPUS", show_default=False, help=HELP["corpus"])] = None,
    split: Annotated[str | None, option("--split", metavar="NAME", help=HELP["split"])] = None,
    r_max: Annotated[float | None, option("--r-max", metavar="R", min=0, max=1, help=HELP["r_max"])] = None,
    length: Annotated[int | None, option("--length", metavar="T", min=1, help=HELP["length"])] = None,
    limit: Annotated[int | None, option("--limit", metavar="N", min=1, help=HELP["limit"])] = None,
    seed: Annotated[int | None, option("--seed", "-s", metavar="N", min=0, help=HELP["seed"])] = None,
    conditioning: Annotated[str | None, option("--conditioning", metavar="YAML", help=HELP["conditioning"])] = None,
    sets: Annotated[Path | None, option("--sets", metavar="PATH", help=HELP["sets"])] = None,
    modes: Annotated[str | None, option("--modes", "--mode", metavar="NAMES", help=HELP["modes"])] = None,
    method: Annotated[str | None, option("--method", metavar="NAME", help=HELP["method"])] = None,
    how: Annotated[list[str] | None, option("--how", metavar="KEY=VALUE", help=HELP["how"])] = None,
    adapter: AdapterOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = Dtype.auto,
    batch_tokens: Annotated[int | None, option("--batch-tokens", metavar="N", min=1, help=HELP["batch_tokens"])] = None,
    compiled: Annotated[bool, option("--compile", help=HELP["compile"])] = False,
    as_json: Annotated[bool, option("--json", help=HELP["json"])] = False,
    output: Annotated[Path | None, option("--output", "-o", metavar="PATH", help=HELP["output"])] = None,
    records: Annotated[Path | None, option("--records", metavar="PATH", help=HELP["records"])] = None,
) -> None:
    r"""Perplexity of a model in the five modes of the paper.

    unconditional          nothing is given, everything is asked
    infilling              both ends of a text are given, the middle is asked
    training               blocks are given, as in training
    infilling-no-future    what infilling asks, from the past alone
    training-no-future     what training asks, from the past alone

    acgpt evaluate runs/ac-gpt/model corpora/wikitext --r-max 0.6 -o results.json
    acgpt evaluate runs/ac-gpt/model corpora/wikitext --conditioning model
    acgpt evaluate default corpora/smollm2 --limit 20 --modes unconditional

    What is asked given what is drawn once and kept beside the corpus, so that
    every model answers the same; results are comparable if the set's hash is the
    same. A mode that a method cannot answer is --, in JSON null. With -o, an
    evaluation that was stopped goes on when the same command is given again.

    Keys of --json:
      model, adapter, corpus, method, options (of the method), bound (are the
      perplexities upper bounds?), metadata (the model's acgpt.json),
      trained_r_max (the model's own, null if it does not say),
      modes: for each, null or perplexity, interval (95 %, over texts), mean_nll
             (nats), tokens (asked), texts
      gains: for infilling and training, null or percent, interval: by how much
             the future lowers the perplexity
      set: hash, path, texts, length, r_max, seed, conditioning, tokenizer_hash,
           corpus_hash, split
      bootstrap (resamples, level, seed), bos_token_id, mask_token_id, device,
      dtype, batch_tokens, compiled, resumed (true, if it had been stopped),
      seconds, versions (of acgpt, torch, …), date, command
    """
    if corpus is None and sets is None:
        raise typer.BadParameter("name a CORPUS (see acgpt prepare), or an evaluation set with --sets PATH.")
    if records is not None and records.suffix != ".safetensors":
        raise InputError(f"{records}: records are written as safetensors; end the name in .safetensors.")
    for path in (output, records):
        check_writable(path)
    hush()
    from acgpt.data.corpus import Corpus
    from acgpt.engine.decode import adapter_layers
    from acgpt.evaluation.dataset import keep, own_r_max
    from acgpt.evaluation.perplexity import Unfinished, evaluate
    from acgpt.methods import method_of, parted
    from acgpt.models.metadata import every_weight_hash, tokenizer_hash

    names = names_in(modes)
    forced = None if method is None else method_of(method)
    chosen = {"split": split, "r_max": r_max, "length": length, "seed": seed}
    training = training_distribution(conditioning, r_max)
    opened = None if corpus is None else Corpus.open(corpus)
    lm, in_use = load_model(model, adapter, device, dtype)
    evaluation_set, path, new = find_set(opened, sets, chosen, limit, training, lm)
    evaluation_set.require_tokenizer(tokenizer_hash(lm.tokenizer))
    note_r_max(evaluation_set, lm)
    options = dict(parted(text) for text in how or ())
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
    with bar("questions") as progress, compiling(compiled):  # one a text and pass
        evaluation = evaluate(
            asked_by,
            lm.model,
            evaluation_set,
            bos=lm.bos,
            mask=lm.mask,
            modes=names,
            backend=lm.attention,
            budget=batch_tokens or lm.budget,
            seed=seed or 0,
            progress=progress,
            unfinished=unfinished,
        )
    seconds = time.perf_counter() - start if unfinished is None else unfinished.seconds
    if new:
        keep(evaluation_set, path)
    result = {
        "model": model,
        "adapter": in_use,
        "corpus": None if corpus is None else str(corpus),
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
    result["set"]["path"] = str(path)
    write_results(evaluation, result, output, records)
    if unfinished is not None:
        unfinished.discard()
    if as_json:
        emit(result)
    else:
        print_evaluation(evaluation, result)


@contextmanager
def compiling(compiled: bool) -> Iterator[None]:
    """What torch.compile may fail of within, where it is at work, becomes an error that says what to do."""
    try:
        yield
    except Exception as error:
        if not compiled or not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            raise
        inner = getattr(error, "inner_exception", error)  # what a compiler said, without how it came to be asked
        reason = str(inner).strip().splitlines() or [type(inner).__name__]
        raise ModelError(f"torch.compile fails here ({reason[0].strip(' .:')}): leave --compile out.") from error


# ---- what is asked --------------------------------------------------------------------------------------------------


def names_in(modes: str | None) -> list[str]:
    """The modes that the user named, with commas, in the paper's order; all five if none."""
    from acgpt.query.modes import modes_named

    names = [] if modes is None else [name.strip() for name in modes.split(",")]
    return [mode.name for mode in modes_named(names)]


def training_distribution(text: str | None, r_max: float | None) -> Conditioning | Literal["model"] | None:
    """The training distribution that --conditioning names, in YAML or JSON; `OWN` is for `find_set` to ask the model.

    --r-max counts where the text names no r_max.
    """
    import yaml

    from acgpt.query.conditioning import Conditioning

    if text is None:
        return None
    if text.strip() == OWN:
        if r_max is not None:
            raise InputError(f"--conditioning {OWN} takes r_max from the model: leave --r-max {r_max:g} out.")
        return OWN
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"--conditioning is not YAML: {' '.join(str(error).split())}.") from error
    if isinstance(content, dict) and "parts" not in content and r_max is not None:
        content = {"r_max": r_max, **content}
    return Conditioning.from_dict(content)


def find_set(
    corpus: Corpus | None,
    sets: Path | None,
    chosen: dict[str, Any],
    limit: int | None,
    training: Conditioning | Literal["model"] | None,
    lm: LanguageModel,
) -> tuple[EvaluationSet, Path, bool]:
    """The evaluation set that is meant, its file, and whether it still has to be saved there.

    Args:
        corpus: What it is made of.
        sets: The file that was named for it, if one was.
        chosen: `split`, `r_max`, `length` and `seed`, `None` where the user left them open.
        limit: On the number of texts.
        training: The training distribution, if the user named one; `OWN` is that of the model.
        lm: The model, which also says how many tokens a text can have.
    """
    from acgpt.evaluation.dataset import LENGTH, EvaluationSet, find_or_build, own_conditioning
    from acgpt.query.conditioning import Sized

    if training == OWN:
        training = own_conditioning(lm.metadata)
    if sets is not None and (corpus is None or sets.exists()):
        found = EvaluationSet.load(sets)
        if corpus is not None and corpus.hash != found.origin.corpus_hash:
            raise InputError(
                f"{sets} is not an evaluation set of {corpus.folder}: leave out the corpus, or name another set."
            )
        has = {**found.as_dict(), "conditioning": found.origin.conditioning}
        wanted = {**chosen, "conditioning": None if training is None else training.as_dict()}
        for name, value in wanted.items():
            if value is not None and value != has[name]:
                option = f"--{name.replace('_', '-')}"
                raise InputError(
                    f"{sets} has {name} {has[name]}, not {value}: leave out {option}, or name another set."
                )
        return (found if limit is None else found.head(limit)), sets, False
    assert corpus is not None
    split, length = "test" if "test" in corpus.splits else "validation", min(LENGTH, lm.positions - 1)
    how: dict[str, Any] = {"split": split, "length": length}
    for part in () if training is None else training.parts:
        if isinstance(part, Sized):  # then infilling gives as much as training does
            how.setdefault("r_max", part.r_max)
    how |= {name: value for name, value in chosen.items() if value is not None}
    return find_or_build(corpus, sets, limit=limit, training=training, **how)


def choose_method(forced: Method | None, lm: LanguageModel) -> Method:
    """The model's own method, unless another was asked for; a warning if the model has not learned that one.

    Raises:
        InputError: The model is not a causal one, which any other method would take it for.
    """
    from acgpt.models.metadata import model_method

    own = model_method(lm.metadata)
    if forced is not None and forced.name != own.name:
        if not own.drawn:
            raise InputError(
                f"--method {forced.name}: the model is of method {own.name}, and no other: leave --method out."
            )
        if forced.reads_future:
            warnings.warn(
                f"the model does not say that it was trained with {forced.name}: expect bad answers wherever the "
                "future is read.",
                stacklevel=2,
            )
    return forced or own


# ---- what is said ---------------------------------------------------------------------------------------------------


def note_r_max(evaluation_set: EvaluationSet, lm: LanguageModel) -> None:
    """Say on standard error, before hours are spent, that a model is asked at another r_max than its own."""
    from acgpt.evaluation.dataset import own_r_max

    asked, own = evaluation_set.origin.r_max, own_r_max(lm.metadata)
    if own is not None and own != asked:
        print(
            f"note: asked at r_max {asked:g}, and the model was trained with r_max {own:g}, by its acgpt.json. "
            f"--conditioning {OWN} asks it as it was trained.",
            file=sys.stderr,
        )


def r_max_in_words(result: Mapping[str, Any]) -> str:
    """The r_max of the evaluation set, and how it compares with the model's own."""
    asked, own = result["set"]["r_max"], result["trained_r_max"]
    beside = "" if own is None else " as in training" if own == asked else f" (trained with {own:g})"
    return f"r_max {asked}{beside}"


@contextmanager
def bar(what: str, quiet: bool = False) -> Iterator[Callable[..., None]]:
    """A progress bar on standard error, or a line there now and then if that is no terminal; nothing if `quiet`.

    What it yields is called with how many are done, of how many, and, if a rate is to be shown, the tokens so far.
    """
    if quiet:
        yield lambda *_: None
        return
    if not sys.stderr.isatty():
        yield now_and_then(what)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    rate = TextColumn("{task.fields[rate]}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), rate, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(what, total=None, rate="")

        def update(done: int, total: int, tokens: int = 0) -> None:
            elapsed = shown.tasks[0].elapsed
            rate = f"{tokens / elapsed:,.0f} tokens/s" if tokens and elapsed else ""
            shown.update(task, completed=done, total=total, rate=rate)

        yield update


def now_and_then(what: str) -> Callable[..., None]:
    """Say how many are done, of how many, but no more often than every `PAUSE` seconds, whatever else was said."""

    def update(done: int, total: int, tokens: int = 0) -> None:
        global said
        if time.monotonic() - said >= PAUSE:
            said = time.monotonic()
            print(f"{what}: {done:,} of {total:,}", file=sys.stderr, flush=True)

    return update


def check_writable(path: Path | None) -> None:
    """Find out before an evaluation, not after it, that its result cannot be written."""
    if path is None:
        return
    folder = next(folder for folder in path.absolute().parents if folder.exists())
    if path.is_dir():
        raise InputError(f"cannot write {path}: it is a folder. Name a file.")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        why = "cannot be written into" if folder.is_dir() else "is a file"
        raise InputError(f"cannot write {path}: {folder} {why}. Name another place.")


def write_results(evaluation: Evaluation, result: dict[str, Any], output: Path | None, records: Path | None) -> None:
    """The files that were asked for, each whole or not at all."""
    from safetensors.numpy import save

    from acgpt.common.files import disk_errors, write_whole

    files: dict[Path, bytes] = {}
    if output is not None:
        files[output] = (json.dumps(result, indent=2, allow_nan=False) + "\n").encode()
    if records is not None:
        keys = ("model", "adapter", "method", "set", "device", "dtype", "versions")
        about = {"acgpt_records": json.dumps({key: result[key] for key in keys})}
        files[records] = save(evaluation.records(), metadata=about)
    for path, content in files.items():
        with disk_errors(path):
            write_whole(path, content)


def print_evaluation(evaluation: Evaluation, result: dict[str, Any]) -> None:
    """The table for people."""
    from acgpt.display.show import Page, printable

    page = Page()
    texts, about = len(evaluation.evaluation_set), result["set"]
    page.note(printable(called(result["model"], result["adapter"])), "bold")
    page.note(
        f"method {evaluation.method}; {texts} texts of {about['length']} tokens, {r_max_in_words(result)}, "
        f"set {about['hash'][:12]}; {result['dtype']} on {result['device']}, {result['seconds']:.1f} s\n"
    )
    print_perplexities(page, result)


def print_perplexities(page: Page, result: Mapping[str, Any]) -> None:
    """The perplexities of `Evaluation.as_dict`, mode by mode."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("mode", no_wrap=True)
    for heading in ("perplexity", "95 % interval", "asked", "gain from the future"):
        table.add_column(heading, justify="right", no_wrap=True)
    for mode, answer in result["modes"].items():
        row, gained = [NO_ANSWER] * 3, NO_ANSWER if mode in result["gains"] else ""
        if answer is not None:
            span = NO_ANSWER if answer["interval"] is None else "{:,.2f}–{:,.2f}".format(*answer["interval"])
            perplexity = "∞" if answer["perplexity"] is None else f"{answer['perplexity']:,.2f}"
            perplexity = f"≤ {perplexity}" if result.get("bound") else perplexity
            row = [perplexity, span, f"{answer['tokens']:,}"]
        gain = result["gains"].get(mode)
        if gain is not None and gain["percent"] is not None:
            gained = f"{gain['percent']:z.1f} %"
            gained += "" if gain["interval"] is None else " ({:z.1f} to {:z.1f})".format(*gain["interval"])
        table.add_row(mode, *row, gained)
    page.table(table)
    if None in result["modes"].values():
        how = "".join(f", {name}={value}" for name, value in result.get("options", {}).items())
        page.note(f"\n{NO_ANSWER}: cannot be answered by a model of method {result['method']}{how}.")
    if result.get("bound"):
        page.note("\n≤: a bound, estimated by chance; not to be compared with exact perplexities.")
