"""The command line: `acgpt score`, `infill`, `rank` and `show` here; those that work on whole corpora in `commands`.

Each command is a call of the Python API and a way to print its result: for people by default, as JSON lines with
`--json`. Templates come as an argument, or one a line from a file or a pipe; each is answered before the next is waited
for. What the user can mend ends with one message and exit code 2, what the disk refuses with exit code 1.

torch and transformers take seconds to import, so that is left until a question has to be answered.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Literal, TypeVar

import typer
from typer.core import TyperGroup

from acgpt.cli import (
    draw,
    evaluate,
    experiment,
    finetune,
    generate,
    mauve,
    merge,
    methods,
    prepare,
    push,
    report,
    train,
)
from acgpt.cli.ui import (
    NO_ADAPTER,
    DeviceOption,
    Dtype,
    DtypeOption,
    FileOption,
    FutureOption,
    JsonOption,
    ModelOption,
    TemplateArgument,
    emit,
    hush,
    option,
    speak_plainly,
)
from acgpt.errors import InputError, OutputError, QueryError
from acgpt.query.template import fillings, parse
from acgpt.version import __version__

if TYPE_CHECKING:
    from acgpt.display.show import Page, Reader
    from acgpt.models.language_model import LanguageModel, Ranking, Sample, Score

Answer = TypeVar("Answer")

AdapterOption = Annotated[
    list[str] | None,
    option(
        "--adapter",
        "-a",
        metavar="[NAME=]PATH",
        help="A PEFT adapter for the model: a folder or a hub id. May be repeated, with names: infill=…, scattered=…; "
        "each template is then answered by the one that is for such templates (docs/adapters.md). none: no adapter, "
        "for the embedded model too.",
    ),
]

BATCH = 16  # lines of a file that are answered together


# ---- how a command ends ---------------------------------------------------------------------------------------------


class Commands(TyperGroup):
    """The commands, each of which ends tidily whatever happens in it."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        with tidy():
            return super().invoke(ctx)


@contextmanager
def tidy() -> Iterator[None]:
    """Warnings as one line each, once; errors that the user can mend, Ctrl-C and a closed pipe without a traceback."""
    speak_plainly()
    said: set[str] = set()

    def show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
        text = " ".join(str(message).split())
        if text not in said:
            said.add(text)
            print(f"warning: {text}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show_warning
        try:
            yield
        except InputError as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(2) from error
        except OutputError as error:
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(1) from error
        except KeyboardInterrupt as error:
            print("\ninterrupted", file=sys.stderr)
            raise typer.Exit(130) from error
        except BrokenPipeError as error:  # nobody reads on, which is no mistake: `acgpt … | head -1`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the last flush would fail again
            raise typer.Exit(141) from error
        except OSError as error:  # standard output on a full disk, say
            print(f"error: {error}", file=sys.stderr)
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # as above
            raise typer.Exit(1) from error


# ---- templates in, answers out --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """A template and where it stands: "FILE, line 3: ", or nothing for the argument."""

    template: str
    where: str = ""


def questions(template: str | None, file: Path | None, check: Callable[[str], object]) -> Iterator[list[Line]]:
    """The templates to answer, in the groups to answer them in. What can be checked without a model is checked here."""
    if (template is None) == (file is None):
        raise typer.BadParameter("give one TEMPLATE, or - to read them from standard input, or --file PATH.")
    if template not in (None, "-"):
        assert template is not None
        check(template)
        return iter([[Line(template)]])
    if file in (None, Path("-")):
        if sys.stdin is None:
            raise InputError("standard input is closed: give a TEMPLATE, or --file PATH.")
        if sys.stdin.isatty():
            print("Templates, one a line; Ctrl-D ends.", file=sys.stderr)
        return read_lines(sys.stdin.buffer, "standard input", 1)
    assert file is not None
    try:
        stream = file.open("rb")
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}. Name a text file, one template a line.") from error
    if not file.is_file():  # a pipe by name: its first line may be long in coming
        return read_lines(stream, str(file), 1)
    groups = read_lines(stream, str(file), BATCH)
    return chain([next(groups)], groups)  # what is wrong with it from the start is said before a model is loaded


def read_lines(stream: BinaryIO, name: str, size: int) -> Iterator[list[Line]]:
    """Groups of `size` lines that are not blank, as they arrive.

    Raises:
        InputError: A line is not UTF-8, or there is no template at all.
    """
    group: list[Line] = []
    number, found = 0, False
    for number, raw in enumerate(stream, start=1):
        try:
            text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            if group:
                yield group
            raise InputError(
                f"{name}, line {number}: byte {error.start + 1} is not UTF-8. Save the text as UTF-8, for example with "
                "iconv -f latin1 -t utf-8."
            ) from error
        if text.strip():
            found = True
            group.append(Line(text.rstrip("\r\n"), f"{name}, line {number}: "))
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group
    if not found:
        what = "has blank lines only" if number else "is empty"
        raise InputError(f"{name} {what}: write a template in each line, such as The {{{{cat}}}} sat on the mat.")


def answers(groups: Iterable[list[Line]], ask: Callable[[list[str]], Sequence[Answer]]) -> Iterator[tuple[str, Answer]]:
    """Every template with its answer, in order. A template that has none ends this, after those before it."""
    for group in groups:
        try:
            results = list(ask([line.template for line in group]))
        except InputError:  # one of them; answer those before it, and say which
            for line in group:
                try:
                    (result,) = ask([line.template])
                except InputError as error:
                    raise InputError(f"{line.where}{error}") from error
                yield line.template, result
        else:
            yield from zip([line.template for line in group], results, strict=True)


def score_fields(score: Score) -> dict[str, Any]:
    """What was asked, for programs: together and token by token; and whether it is a bound, if it is."""
    tokens = [asdict(token) for token in score.tokens]
    bound = {"bound": True} if score.bound else {}
    return {"log_prob": score.log_prob, "perplexity": score.perplexity, **bound, "tokens": tokens}


def named_adapters(options: Sequence[str]) -> dict[str, str] | str | Literal[False] | None:
    """What --adapter says: nothing, one adapter, some by name, or that there is to be none."""
    if list(options) == [NO_ADAPTER]:
        return False
    named: dict[str, str] = {}
    for each in options:
        name, equals, path = each.partition("=")
        if not (equals and re.fullmatch(r"[\w-]+", name)) or Path(each).exists():
            if len(options) > 1:
                raise InputError(f"of several adapters each needs a name: --adapter NAME={each}")
            return each
        if name in named:
            raise InputError(f"two adapters are called {name}: --adapter {each}")
        named[name] = path
    return named or None


def load(model: str | None, adapter: list[str] | None, device: str, dtype: Dtype) -> LanguageModel:
    """Load the model, with no more noise than a progress bar on a terminal."""
    adapters = named_adapters(adapter or ())
    hush()
    from acgpt.models.loading import load

    return load(model, adapters, device, dtype.value)


def answered_by(lm: LanguageModel, answer: Score | Ranking) -> dict[str, str | None]:
    """Which adapter answered, for programs, if the model has any."""
    return {"adapter": answer.adapter} if lm.adapters else {}


def note_adapters(page: Page, lm: LanguageModel, ways: Mapping[str, Score | Ranking]) -> None:
    """Which adapter answered, for people, if there was a choice."""
    if lm.router:
        words = [f"{way + ': ' if way else ''}{answer.adapter or 'no adapter'}" for way, answer in ways.items()]
        page.note(f"answered by {'; '.join(words)}\n")


# ---- the commands ---------------------------------------------------------------------------------------------------

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def print_version(wanted: bool) -> None:
    """Print the version and end."""
    if wanted:
        print(f"acgpt {__version__}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool, option("--version", callback=print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    r"""Ask a causal language model for p(any tokens | any other tokens).

    A template is a text in which {{double braces}} mark what is asked.
    All the rest is given, whether it stands before or after.

    acgpt score  'The capital of France is {{Paris}}, on the Seine.'
        How likely is this, token by token?
    acgpt rank   'The {{cat|dog|carburettor}} purred.'
        Which alternative fits best?
    acgpt infill 'The cat {{_3}} on the {{_1}}.' -n 5
        What could stand here? {{_3}} is a blank of three tokens.
    acgpt show   'The capital of {{Italy}} is Rome.' -o layout.png
        What is the model told? Its input and its attention mask, drawn.

    A model of your own: acgpt prepare (text to tokens), acgpt train or
    acgpt finetune, acgpt evaluate, acgpt generate and acgpt mauve (samples, and
    their score); acgpt draw pictures what they give and ask; acgpt experiment
    does that for a grid of them, and acgpt report compares what was trained.
    acgpt merge and acgpt push: an adapter into its model, a model or adapter to
    others.

    For braces that are text write \{{. Inside a slot, a backslash makes text
    of { } | and _ likewise. acgpt COMMAND --help explains the rest.
    """


@app.command()
def score(
    template: TemplateArgument = None,
    file: FileOption = None,
    model: ModelOption = None,
    adapter: AdapterOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = Dtype.auto,
    future: FutureOption = None,
    as_json: JsonOption = False,
) -> None:
    r"""How likely is the text in the {{slots}}? Exact, in one forward pass.

    Shows the surprise of each asked token in bits (0 is certain, 1 a coin toss),
    read from the past only, and with the future: the given text after it. A way
    in which the model cannot be asked is --.

    acgpt score 'The capital of France is {{Paris}}, on the Seine.'
    acgpt score 'She {{put on her coat}} because it was cold.' --no-future
    acgpt score --file templates.txt --json > scores.jsonl

    A token that reaches into a slot is asked as a whole: in 'is {{Paris}}' that
    is ' Paris', the space with it.

    Keys of --json:
      template, future (was it used?), adapter (that answered, if there are any),
      log_prob (of all asked tokens, in nats), perplexity (per asked token),
      bound (true, of a model that only bounds them),
      tokens: text, id, position (from 1), log_prob
    """
    groups = questions(template, file, parse)
    lm = load(model, adapter, device, dtype)
    from acgpt.display.show import NO_ANSWER, Page, print_score, printable

    if as_json:
        for text, result in answers(groups, lambda texts: lm.log_prob(texts, future=future)):
            emit({"template": text, "future": result.future, **answered_by(lm, result), **score_fields(result)})
        return

    def ask(texts: list[str]) -> list[dict[str, Score | QueryError]]:
        columns: dict[str, Sequence[Score | QueryError]] = {}
        for name, way in {"past only": False, "with future": True}.items():
            try:
                if future in (None, way):
                    columns[name] = lm.log_prob(texts, future=way)
            except QueryError as error:
                if len(texts) > 1:  # `answers` asks each of them alone
                    raise
                columns[name], refusal = [error], error
        found = [dict(zip(columns, scores, strict=True)) for scores in zip(*columns.values(), strict=True)]
        if all(isinstance(each, QueryError) for each in found[0].values()):
            raise refusal
        return found

    page = Page()
    for text, ways in answers(groups, ask):
        nothing_ahead = future is None and not lm.query(text).needs_future
        if nothing_ahead:  # both ways are one question
            ways = {"past only": next(each for each in ways.values() if not isinstance(each, QueryError))}
        scores = {name: each for name, each in ways.items() if not isinstance(each, QueryError)}
        print_score(page, lm, text, {name: scores.get(name) for name in ways})
        note_adapters(page, lm, scores)
        if "with future" in scores and not lm.reads_future:
            page.note("This model has not been trained to read the future: expect “with future” to be bad.\n", "yellow")
        if any(each.bound for each in scores.values()):
            page.note("This model only bounds probabilities: the surprise is at most this, estimated by chance.\n")
        for each in ways.values():
            if isinstance(each, QueryError):
                page.note(printable(f"{NO_ANSWER}: {each}\n"))
        if nothing_ahead:
            page.note("Nothing given stands after what is asked: there is no future to read.\n")


@app.command()
def infill(
    template: TemplateArgument = None,
    file: FileOption = None,
    n: Annotated[int, option("-n", metavar="N", min=1, help="How many samples of each template. Default: 1.")] = 1,
    temperature: Annotated[
        float, option(metavar="X", min=0, help="1 is the model's own, the default; 0 is greedy.")
    ] = 1.0,
    top_p: Annotated[
        float,
        option(
            metavar="P",
            help="Draw from the likeliest tokens that together have probability P, above 0 and at most 1.",
        ),
    ] = 1.0,
    top_k: Annotated[int | None, option(metavar="K", min=1, help="Draw from the K likeliest tokens.")] = None,
    seed: Annotated[
        int | None,
        option("--seed", "-s", metavar="N", min=0, help="The same one repeats a run. Default: a fresh one."),
    ] = None,
    model: ModelOption = None,
    adapter: AdapterOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = Dtype.auto,
    future: FutureOption = None,
    as_json: JsonOption = False,
) -> None:
    r"""Draw what could stand in the {{slots}}.

    {{_3}} is a blank of three tokens; {{some text}} is one of as many tokens as
    that text has.

    acgpt infill 'The cat {{_3}} on the {{_1}}.' -n 5 --seed 1
    acgpt infill 'My favourite place in Paris is{{_12}}' --temperature 0.7
    echo 'Once upon a {{_8}}' | acgpt infill - --json

    The seed is always printed: one for the whole run. Under the same seed a
    template has the same samples, to rounding, whatever stands in the lines
    around it.

    Keys of --json:
      template, seed, future (was it used?), adapter (that drew, if there is any),
      samples: text, fills (one a slot), log_prob (in nats, at temperature 1),
               perplexity, tokens: text, id, position (from 1), log_prob
    """
    if not 0 < top_p <= 1:
        raise typer.BadParameter(f"--top-p must be above 0 and at most 1, not {top_p:g}.")
    if not math.isfinite(temperature):
        raise typer.BadParameter(f"--temperature must be a finite number, not {temperature:g}.")
    groups = questions(template, file, parse)
    used = secrets.randbits(32) if seed is None else seed
    lm = load(model, adapter, device, dtype)
    from acgpt.display.show import Page, print_samples

    def ask(texts: list[str]) -> list[list[Sample]]:
        return lm.sample(texts, n, temperature=temperature, top_p=top_p, top_k=top_k, seed=used, future=future)

    page = Page()
    for number, (text, samples) in enumerate(answers(groups, ask)):
        if number == 0 and not as_json:
            page.note(f"seed {used}\n")
        if as_json:
            drawn = [{"text": sample.text, "fills": sample.fills, **score_fields(sample)} for sample in samples]
            about = {"template": text, "seed": used, "future": samples[0].future, **answered_by(lm, samples[0])}
            emit({**about, "samples": drawn})
        else:
            print_samples(page, lm, samples)
            note_adapters(page, lm, {"": samples[0]})


@app.command()
def rank(
    template: TemplateArgument = None,
    file: FileOption = None,
    model: ModelOption = None,
    adapter: AdapterOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = Dtype.auto,
    future: FutureOption = None,
    as_json: JsonOption = False,
) -> None:
    r"""Which alternative in the {{slots}} fits best?

    Several slots: all combinations are compared. An alternative may be empty.

    acgpt rank 'The {{cat|dog|carburettor}} purred.'
    acgpt rank 'It is {{not |}}raining, so take {{an umbrella|sunglasses}}.'

    The answer says how they were compared: by the probability of the whole text,
    read left to right; or, if the model reads the future and the alternatives
    have equally many tokens, by p(alternative | all the rest).

    Keys of --json:
      template, compared ("whole text" or "asked | given"), future (was it used?),
      adapter (that answered, if there are any),
      alternatives, the best first: text, choice (one a slot), probability,
                                    log_prob (of what was compared, in nats)
    """
    groups = questions(template, file, fillings)
    lm = load(model, adapter, device, dtype)
    from acgpt.display.show import Page, print_ranking

    page = Page()
    for text, ranking in answers(groups, lambda texts: [lm.rank(each, future=future) for each in texts]):
        if as_json:
            ranked = [asdict(alternative) for alternative in ranking.alternatives]
            about = {"template": text, "compared": ranking.compared, "future": ranking.future}
            emit({**about, **answered_by(lm, ranking), "alternatives": ranked})
        else:
            print_ranking(page, text, ranking)
            note_adapters(page, lm, {"": ranking})


@app.command()
def show(
    template: Annotated[str, typer.Argument(metavar="TEMPLATE", help="A text with {{slots}}, in quotes.")],
    output: Annotated[
        Path | None, option("--output", "-o", metavar="PATH", help="Draw a picture: .png, .svg or .pdf.")
    ] = None,
    model: ModelOption = None,
    adapter: AdapterOption = None,
    future: Annotated[
        bool | None,
        option(
            "--future/--no-future",
            help="With copies of what is given, or left to right? Default: with copies; with several adapters, as the "
            "one that would answer is asked.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    r"""Draw what the model is told: every slot of its input, and which others it reads.

    Given tokens are copied to the front, each with the position of its original,
    where all of the text can read them. Blanks are drawn as □. Only the
    tokenizer is loaded, not the model.

    acgpt show 'The capital of {{Italy}} is Rome.'
    acgpt show 'The cat {{_3}} on the {{_1}}.' -o layout.png
    acgpt show 'The capital of {{Italy}} is Rome.' --no-future

    Keys of --json:
      template, future, adapter (that would be asked, if there are any),
      copies (how many; they are the first slots),
      and lists with one entry a slot: tokens, ids (null for a blank), positions,
      roles (copy, BOS, given, asked, unknown),
      predicts (null, or position, id, text), mask (0 and 1: which slots it reads)
    """
    parse(template)
    adapters = named_adapters(adapter or ())
    hush()
    from acgpt.display import show as drawing

    reader, about, future = choose_reader(model, adapters, template, future)
    future = True if future is None else future
    query = drawing.query_of(template, reader.tokenizer)
    drawn = drawing.figure(query, reader.tokenizer, bos=reader.bos, mask=reader.mask, future=future)
    if output is not None:
        drawing.picture(drawn, output, template)
        print(f"wrote {output}", file=sys.stderr)
    if as_json:
        emit({"template": template, "future": future, **about, **drawn.as_dict()})
    elif output is None:
        page = drawing.Page()
        page.note(drawing.printable(template) + "\n", "bold")
        page.print(drawing.terminal(drawn, page.width), soft_wrap=True)
        if future and query.needs_future and not reader.reads_future:
            page.note(
                "This model has not been trained on copies: unless told --future it is run with --no-future.", "yellow"
            )


def choose_reader(
    model: str | None, adapters: dict[str, str] | str | Literal[False] | None, template: str, future: bool | None
) -> tuple[Reader, dict[str, str | None], bool | None]:
    """What drawing takes of the model; the adapter that would be asked, if there are any; and with copies or not."""
    from transformers import AutoConfig

    from acgpt.display import show as drawing
    from acgpt.models.adapters import BARE, Adapter, statements
    from acgpt.models.loading import from_pretrained, metadata_of, read_metadata, resolve_all, routed
    from acgpt.models.router import route

    source, folders = resolve_all(model, adapters)
    one = next(iter(folders.values())) if isinstance(adapters, dict) else adapters
    reader = drawing.load_reader(model, one)  # they have tokenizer and BOS in common
    if not routed(folders):
        return reader, {"adapter": next(iter(folders))} if adapters else {}, future
    config = None if source.endswith(".gguf") else from_pretrained(AutoConfig, source)
    metadata = {name: read_metadata(folder) for name, folder in folders.items()}
    said = statements(metadata, tuple(folders), metadata_of(source, None, config))
    query = drawing.query_of(template, reader.tokenizer)
    way = route(query, {name: Adapter.of(name, said[name]) for name in folders}, said[BARE], future)
    spoken = said[way.adapter or BARE]
    reads = spoken is not None and spoken.reads_copies
    return replace(reader, reads_future=reads), {"adapter": way.adapter}, way.future


app.add_typer(draw.app, name="draw")
app.command()(evaluate.evaluate)
app.command()(experiment.experiment)
app.command()(generate.generate)
app.command()(mauve.mauve)
app.command()(merge.merge)
app.command()(methods.methods)
app.command()(prepare.prepare)
app.command()(push.push)
app.command()(report.report)
app.command()(train.train)
app.command()(finetune.finetune)


def main() -> None:
    """The entry point of the command `acgpt`."""
    app(prog_name="acgpt")
