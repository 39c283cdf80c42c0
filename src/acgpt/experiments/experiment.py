"""Experiments: a grid of runs over one recipe, as independent cells.

    FILE.yaml ──► Experiment ──► Cell, Cell, …       each: acgpt train … --resume, then acgpt evaluate … and
                                                     acgpt generate … for each evaluation dataset, then
                                                     acgpt mauve … for each folder of generations

    OUTPUT/
      CELL/                    folder of the run, see `run_folder`
      CELL/test-r_max0.6.json  an evaluation of the trained model
      CELL/generations/test-r_max0.6/    its generations, see `generate`
      CELL/generations/test-r_max0.6/scores-….json    written when all generations are scored; scores are beside it
      logs/CELL.txt            output of the cell's commands
      locks/CELL               locked while a runner works on the cell

A command is known by the file that it writes last, so the state of a cell is read from its folder alone. Any number of
runners, on any machines that share the disk, can work on one experiment, be stopped at any time, and be started again.
The module `runner` runs the cells.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, Literal

from acgpt.common.options import Options, check_keys, declared, documented, option
from acgpt.errors import InputError
from acgpt.evaluation.generator import INDEX, PROMPT, TEMPERATURE, TOP_P, check_prompt
from acgpt.evaluation.mauve import MIN_TEXTS
from acgpt.evaluation.options import AskingOptions, EvaluationOptions, GenerationOptions, ScoringOptions
from acgpt.methods import method_of, split_option
from acgpt.query.conditioning import Conditioning
from acgpt.query.modes import MODES, modes_named
from acgpt.training.recipe import Recipe, check_recipe_keys, load_recipe, read_change, read_yaml
from acgpt.training.run_folder import RESULTS

BUILT_IN = Path(__file__).parent / "builtin"
AUTO = (("device", "auto"), ("dtype", "auto"))  # defaults, which commands leave out

Commands = dict[Path, tuple[str, ...]]  # arguments of the program `acgpt`, by the file that the command writes last


# ---- sections: what is run for each trained cell --------------------------------------------------------------------


@dataclass(frozen=True)
class AskingSection(Options):
    """What `evaluate` and `generate` share: a command for each split, r_max and distribution."""

    splits: tuple[str, ...] = option("List of splits of the corpus.", ("test",))
    r_max: tuple[float, ...] | None = option(
        "List of maximum shares of a text that are given. Default: the cell's r_max; for a method that reads no "
        "future, which has no r_max, those of all other cells.",
        minimum=0,
        maximum=1,
    )
    limit: int | None = declared(AskingOptions, "limit")
    conditioning: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None = option(
        "Distribution of conditioning sets for the mode `training`, for example {b_max: 4}, or a list of them, one "
        "result each. Default, and null in a list: the paper's."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = declared(AskingOptions, "dtype")
    batch_tokens: int | None = declared(AskingOptions, "batch_tokens")
    compile: bool = declared(AskingOptions, "compiled")

    def __post_init__(self) -> None:
        super().__post_init__()
        for item in fields(self):
            if getattr(self, item.name) in ((), []):
                raise InputError(f"{item.name} must be a list of at least one value, not [].")
        for conditioning in self.distributions:
            if conditioning is not None:
                Conditioning.from_dict(conditioning)

    @property
    def distributions(self) -> Sequence[Mapping[str, Any] | None]:
        """The distribution of each result; `None` for the paper's."""
        return self.conditioning if isinstance(self.conditioning, list | tuple) else (self.conditioning,)

    def asked(
        self, command: str, recipe: Recipe, shares: Sequence[float], set_seed: int, options: Mapping[str, Any]
    ) -> Iterator[tuple[str, list[str]]]:
        """Yield the name of each evaluation dataset, and the command that asks the trained model about it.

        A dataset depends only on its name and the recipe's `length`, so cells with the same r_max share it.

        Args:
            command: "evaluate" or "generate".
            recipe: Recipe of the cell.
            shares: The r_max of all cells that have one.
            set_seed: Seed of the conditioning sets.
            options: Further options of the command.
        """
        folder, method = Path(recipe.output), method_of(recipe.method)
        model, adapter = (recipe.base, folder / "adapter") if recipe.lora else (folder / "model", None)
        own = (recipe.distribution.r_max,)
        r_maxes = self.r_max or (own if method.reads_future else shares or own)
        for split, r_max, conditioning in product(self.splits, r_maxes, self.distributions):
            parts = [plain(split).lstrip(".") or "_", f"r_max{r_max:g}"]
            parts += [f"first{self.limit}"] if self.limit is not None else []
            parts += [f"seed{set_seed}"] if set_seed else []
            if conditioning is not None:
                parts.append(digest(json.dumps(Conditioning.from_dict(conditioning).as_dict(), sort_keys=True)))
            question = {"adapter": adapter, "split": split, "r_max": f"{r_max:g}", "length": recipe.length, **options}
            question |= {
                "limit": self.limit,
                "conditioning": None if conditioning is None else json.dumps(conditioning),
                "device": recipe.device,
                "dtype": self.dtype,
                "batch_tokens": self.batch_tokens,
                "compile": self.compile and method.compiles,
            }
            yield "-".join(parts), [command, str(model), recipe.corpus, *arguments(question)]


@documented
@dataclass(frozen=True)
class EvaluateSection(AskingSection):
    """The section `evaluate` of an experiment: options of `acgpt evaluate`."""

    seed: int = declared(EvaluationOptions, "seed", default=0)
    method_options: Mapping[str, Sequence[str]] = option(
        "Additional evaluations of a method with other options (`acgpt evaluate --method-option`), by the name of the "
        "method: {sigma-gpt-random: [order=random]}.",
        factory=dict,
    )

    def __post_init__(self) -> None:
        lists = self.method_options.values() if isinstance(self.method_options, Mapping) else [None]
        if not all(isinstance(items, list | tuple) and all(isinstance(item, str) for item in items) for items in lists):
            raise InputError("method_options must map methods to lists of options, such as "
                             f"{{NAME: [a=1, 'a=2,b=3']}}, not {self.method_options!r}.")  # fmt: skip
        for name, items in self.method_options.items():
            try:
                for options in items:
                    method_of(name).configured(dict(split_option(pair) for pair in options.split(",")))
            except InputError as error:
                raise InputError(f"method_options, {name}: {error}") from error
        super().__post_init__()

    def commands(self, recipe: Recipe, shares: Sequence[float]) -> Commands:
        """Return the commands that evaluate a cell; arguments as in `asked`."""
        commands: Commands = {}
        for name, words in self.asked("evaluate", recipe, shares, self.seed, {"seed": self.seed}):
            for options in ("", *self.method_options.get(recipe.method, ())):
                path = Path(recipe.output) / f"{name}{'-' if options else ''}{plain(options)}.json"
                pairs = [pair for pair in options.split(",") if pair]
                commands[path] = (*words, *arguments({"method_option": pairs}), "-o", str(path))
        return commands


@documented
@dataclass(frozen=True)
class GenerateSection(AskingSection):
    """The section `generate` of an experiment: options of `acgpt generate`."""

    modes: tuple[str, ...] | None = option(
        "List of modes. Default: all five, without those that a method cannot answer."
    )
    samples: int = declared(GenerationOptions, "samples")
    prompt: int = declared(GenerationOptions, "prompt", default=PROMPT)
    top_p: float = declared(GenerationOptions, "top_p", default=TOP_P)
    temperature: float = declared(GenerationOptions, "temperature", default=TEMPERATURE)
    seed: int = declared(GenerationOptions, "seed")
    set_seed: int = declared(GenerationOptions, "set_seed", default=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        names = tuple(mode.name for mode in modes_named(self.modes or ()))
        object.__setattr__(self, "modes", None if len(names) == len(MODES) else names)

    def commands(self, recipe: Recipe, shares: Sequence[float]) -> Commands:
        """Return the commands that generate samples; arguments as in `asked`.

        The name of a folder contains all that decides the samples, defaults left out.
        """
        keys = ("samples", "prompt", "top_p", "temperature", "seed")
        changed = {key: getattr(self, key) for key in keys if getattr(self, key) != getattr(GenerateSection, key)}
        parts = [f"{'draw-' if key == 'seed' else ''}{key}{value}" for key, value in changed.items()]
        parts += self.modes or ()
        options = {"modes": self.modes and ",".join(self.modes), "if_possible": self.modes is not None}
        options |= {key: getattr(self, key) for key in (*keys, "set_seed")}
        commands: Commands = {}
        for name, words in self.asked("generate", recipe, shares, self.set_seed, options):
            folder = Path(recipe.output) / "generations" / "-".join([name, *parts])
            commands[folder / INDEX] = (*words, "-o", str(folder))
        return commands


@documented
@dataclass(frozen=True)
class MauveSection(Options):
    """The section `mauve` of an experiment: options of `acgpt mauve`, which runs for each folder of generations."""

    split: str | None = declared(ScoringOptions, "split")
    rule: Literal["documents", "windows"] | None = declared(ScoringOptions, "rule")
    length: int | None = declared(ScoringOptions, "length")
    skip: int | None = declared(ScoringOptions, "skip")
    count: int | None = declared(ScoringOptions, "count")
    features: str | None = declared(ScoringOptions, "features")
    seeds: int | None = declared(ScoringOptions, "seeds")
    asked_only: bool = declared(
        ScoringOptions,
        "asked_only",
        help="Also score the sampled tokens alone against the original ones, as an additional result.",
    )
    judge: str | None = declared(ScoringOptions, "judge")
    no_mauve: bool = declared(ScoringOptions, "no_mauve")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("split", "features", "judge"):
            if getattr(self, name) == "":
                raise InputError(f"{name} is empty: set it, or leave it out.")
        if self.count is not None and not self.no_mauve and self.count < MIN_TEXTS:
            raise InputError(f"count must be at least {MIN_TEXTS}, not {self.count}.")
        unused = [name for name in ("features", "seeds", "asked_only") if self.no_mauve and getattr(self, name)]
        if unused:
            raise InputError(f"{unused[0]} has no effect with mauve.no_mauve: leave one of them out.")

    def commands(self, recipe: Recipe, generated: Iterable[Path]) -> Commands:
        """Return the commands that score the generations of a cell, which end with the files `generated`.

        The name of an index contains all options of its command.
        """
        common = {"features": self.features, "seeds": self.seeds}
        keys = ("split", "rule", "length", "skip", "count", "judge", "no_mauve")  # not used with asked_only
        calls: list[dict[str, Any]] = [{key: getattr(self, key) for key in keys} | common]
        calls += [{"asked_only": True} | common] if self.asked_only else []
        commands: Commands = {}
        for index, call in product(generated, calls):
            given = {key: value for key, value in call.items() if value is not None and value is not False}
            parts = ["scores", *(key if value is True else f"{key}_{short(value)}" for key, value in given.items())]
            path = index.parent / f"{'-'.join(parts)}.json"
            words = arguments({**given, "device": recipe.device, "resume": True, "index": path})
            commands[path] = ("mauve", str(index.parent), recipe.corpus, *words)
        return commands


def arguments(options: Mapping[str, Any]) -> list[str]:
    """Write options as on the command line: without `None`, false and `AUTO`, and once for each item of a list."""
    words = []
    for key, values in options.items():
        for value in values if isinstance(values, list) else [values]:
            if value is not None and value is not False and (key, value) not in AUTO:
                words += [f"--{key.replace('_', '-')}", *([] if value is True else [str(value)])]
    return words


def plain(text: str) -> str:
    """Return a text as part of a file name."""
    return re.sub(r"[^\w.]+", "_", text)


def digest(text: str) -> str:
    """Return a short hash of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def short(value: str | int) -> str:
    """Return a value as part of a file name; a path as its last component and a hash of the whole path."""
    last = re.sub(r"[^\w]+", "_", str(value).rstrip("/").rpartition("/")[2])[:40]
    return last if last == str(value) else f"{last}-{digest(str(value))}"


# ---- cells ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Cell:
    """One run of an experiment, with its evaluations, generations and scores.

    Args:
        number: Number of the cell, from 1, in the order of the file.
        name: Name of the cell and of its folder, made of its grid values.
        recipe: Recipe of the run; `recipe.output` is the folder of the cell.
        outputs: The commands of the cell in their order, the training first.
    """

    number: int
    name: str
    recipe: Recipe
    outputs: Commands

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return Path(self.recipe.output)

    @property
    def log(self) -> Path:
        """File with the output of the cell's commands."""
        return self.folder.parent / "logs" / f"{self.name}.txt"

    @property
    def lock(self) -> Path:
        """File that is locked while a runner works on the cell."""
        return self.folder.parent / "locks" / self.name

    @property
    def commands(self) -> list[str]:
        """The commands as shell commands."""
        return [shlex.join(["acgpt", *words]) for words in self.outputs.values()]

    def outputs_of(self, command: str) -> list[Path]:
        """Return the files that a command, such as "evaluate", writes."""
        return [path for path, words in self.outputs.items() if words[0] == command]

    def without(self, command: str) -> Cell:
        """Return the cell without all commands of a name."""
        return replace(self, outputs={path: words for path, words in self.outputs.items() if words[0] != command})


@dataclass(frozen=True)
class Experiment:
    """A grid of runs over one recipe.

    Args:
        recipe: A YAML file, relative to this file or as a path, or the name of a recipe that comes with acgpt.
        output: Folder of the experiment; each cell gets a subfolder.
        grid: Recipe keys, each with a list of values: every combination is a cell. Or a list of such grids, whose cells
            are run in order. A method that reads no future has one cell for all values of `conditioning`.
        set: Recipe keys overridden in every cell.
        evaluate: How each trained cell is evaluated (below). Default: no evaluation besides that of training.
        generate: What each evaluated cell generates (below). Default: nothing.
        mauve: How the generations of a cell are scored (below). Default: not at all.
    """

    recipe: str
    output: str
    grid: Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Sequence[Any]]]
    set: Mapping[str, Any] = field(default_factory=dict)
    evaluate: EvaluateSection | None = None
    generate: GenerateSection | None = None
    mauve: MauveSection | None = None

    def __post_init__(self) -> None:
        for name in ("recipe", "output"):
            if not isinstance(value := getattr(self, name), str) or not value:
                raise InputError(f"{name} must be text, not {value!r}.")
        if not self.grids or not all(self.grids):
            raise InputError("grid has no values: add recipe keys, each with a list, such as seed: [0, 1, 2].")
        for where, keys in [("set", self.set), *(("grid", grid) for grid in self.grids)]:
            if not isinstance(keys, Mapping):
                raise InputError(f"{where} must be a mapping of recipe keys, not {keys!r}.")
            check_recipe_keys([str(key).partition(".")[0] for key in keys], where)
            if "output" in keys:
                raise InputError(f"{where} cannot set output: every cell gets a subfolder of the experiment's output.")
        for grid in self.grids:
            for key, values in grid.items():
                if not isinstance(values, list | tuple) or not values:
                    raise InputError(f"grid: {key} must be a list of values, such as [{values}], not {values!r}.")
                for fixed in self.set:
                    if fixed == key or fixed.startswith(f"{key}."):
                        raise InputError(f"{fixed} is in set, and {key} in the grid: leave one of them out.")
        if self.mauve is not None and self.generate is None:
            raise InputError("mauve has nothing to score without generate: add generate: {limit: 200}, for example.")
        limit = None if self.generate is None else self.generate.limit
        if self.mauve is not None and not self.mauve.no_mauve and limit is not None and limit < MIN_TEXTS:
            raise InputError(
                f"generate.limit is {limit}, and MAUVE needs at least {MIN_TEXTS} texts: raise it, or set "
                "mauve.no_mauve."
            )
        self.cells  # noqa: B018  (making them checks them)

    @property
    def grids(self) -> Sequence[Mapping[str, Sequence[Any]]]:
        """The grids, one or more."""
        return self.grid if isinstance(self.grid, Sequence) else [self.grid]

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """The cells of all combinations of grid values, without duplicates."""
        planned: dict[str, tuple[list[str], Recipe]] = {}
        for grid in self.grids:
            for values in product(*grid.values()):
                name, changes, recipe = self.plan(dict(zip(grid, values, strict=True)))
                if planned.setdefault(name, (changes, recipe))[0] != changes:
                    raise InputError(
                        f"two cells have the name {name}, because their values differ only in special characters: "
                        "change one of the values."
                    )
        recipes = [recipe for _, recipe in planned.values() if method_of(recipe.method).reads_future]
        shares = sorted({recipe.distribution.r_max for recipe in recipes})
        cells = []
        for number, (name, (changes, recipe)) in enumerate(planned.items(), start=1):
            outputs: Commands = {Path(recipe.output) / RESULTS: ("train", self.recipe, *changes, "--resume")}
            if self.evaluate is not None:
                outputs |= self.evaluate.commands(recipe, shares)
            generated = {} if self.generate is None else self.generate.commands(recipe, shares)
            outputs |= generated
            if self.mauve is not None:
                outputs |= self.mauve.commands(recipe, generated)
            cells.append(Cell(number, name, recipe, outputs))
        return tuple(cells)

    def plan(self, values: Mapping[str, Any]) -> tuple[str, list[str], Recipe]:
        """Return the name of the cell with these grid values, the changes to the recipe, and its recipe."""
        name = "-".join(label(key, value) for key, value in values.items())
        keys = {**self.set, **values, "output": str(Path(self.output) / name)}
        changes = [written(key, value) for key, value in keys.items()]
        try:
            recipe = load_recipe(self.recipe, changes)
            if self.generate is not None:
                check_prompt(self.generate.prompt, recipe.length, "generate.prompt")
        except InputError as error:
            raise InputError(f"cell {name}: {error}") from error
        needed = {key: value for key, value in values.items() if key.partition(".")[0] != "conditioning"}
        if len(needed) < len(values) and not method_of(recipe.method).reads_future:
            return self.plan(needed)
        return name, changes, recipe

    def chosen(self, only: Iterable[str] = (), *, scoring: bool = True) -> list[Cell]:
        """Return the cells with these numbers, names or patterns (`ac-gpt-*`), in the order of the file.

        Args:
            only: Numbers, names or patterns. Default: all cells.
            scoring: Whether their generations are scored.

        Raises:
            InputError: One of them matches no cell.
        """
        cells = set[Cell]()
        for pattern in only:
            matches = {cell for cell in self.cells if pattern == str(cell.number) or fnmatchcase(cell.name, pattern)}
            if not matches:
                similar = get_close_matches(pattern, [cell.name for cell in self.cells], n=1)
                hint = f"did you mean {similar[0]}?" if similar else f"their numbers are 1 to {len(self.cells)}."
                raise InputError(f"there is no cell {pattern}: {hint} acgpt experiment … --list shows all cells.")
            cells |= matches
        chosen = [cell for cell in self.cells if not cells or cell in cells]
        return chosen if scoring else [cell.without("mauve") for cell in chosen]


def label(key: str, value: Any) -> str:
    """Return a value as part of a cell's name: methods and sizes as they are, others after the key, `r_max0.6`."""
    text = value if isinstance(value, str) else json.dumps(value)
    text = re.sub(r"[^\w.+-]+", "_", text).strip("_.")
    return text if key in ("method", "model") else key.rpartition(".")[2] + text


def written(key: str, value: Any) -> str:
    """Return `key=value` as `acgpt train` reads it."""
    with contextlib.suppress(InputError):
        if isinstance(value, str) and read_change(f"{key}={value}") == (key, value):
            return f"{key}={value}"
    return f"{key}={json.dumps(value)}"


# ---- files ----------------------------------------------------------------------------------------------------------


def load_experiment(
    experiment: Experiment | str | Path, changes: Sequence[str] = (), output: str | Path | None = None
) -> Experiment:
    """Load an experiment from its file.

    Args:
        experiment: A YAML file, or the name of an experiment that comes with acgpt. An `Experiment` is returned with
            the new output.
        changes: Recipe keys overridden in every cell, each as `key=value`. They take precedence over `set`.
        output: Folder of the experiment. Default: that of the file.

    Raises:
        InputError: The file cannot be read, the output is a file, or a key or value is wrong; the error says which was
            probably meant.
    """
    if isinstance(experiment, Experiment):
        if changes:
            raise InputError("`changes` cannot be applied to an Experiment object: pass them to load_experiment.")
        same = output is None or str(output) == experiment.output
        loaded = experiment if same else replace(experiment, output=str(output))
    else:
        content, path = read_yaml(experiment, BUILT_IN, "experiment")
        if output is not None:
            content["output"] = str(output)
        if isinstance(recipe := content.get("recipe"), str) and (path.parent / recipe).is_file():
            content["recipe"] = str(path.parent / recipe)
        loaded = make(content, str(experiment), changes)
    if Path(loaded.output).is_file():
        raise InputError(f"the output {loaded.output} is a file: choose a folder with `output`.")
    return loaded


def make(content: Mapping[str, Any], source: str, changes: Sequence[str] = ()) -> Experiment:
    """Make an experiment from its keys and values, with changes as in `load_experiment`; `source` is for errors."""
    content = dict(content)
    check_keys(content, [key.name for key in fields(Experiment)], source)
    for key in ("recipe", "output", "grid"):
        if key not in content:
            raise InputError(f"{source} lacks the key {key!r}: an experiment needs recipe, output and grid.")
    try:
        if changes and isinstance(content.setdefault("set", {}), Mapping):
            content["set"] = {**content["set"], **dict(map(read_change, changes))}
        for key, section in (("evaluate", EvaluateSection), ("generate", GenerateSection), ("mauve", MauveSection)):
            if content.get(key) is not None:
                if not isinstance(content[key], Mapping):
                    example = "{split: test}" if section is MauveSection else "{splits: [test]}"
                    raise InputError(f"{key} must be a mapping such as {example}, not {content[key]!r}.")
                content[key] = section.read(content[key], key)
        return Experiment(**content)
    except InputError as error:
        raise InputError(f"{source}: {error}") from error
