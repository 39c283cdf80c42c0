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

The state of a cell is read from its folder alone. Any number of runners, on any machines that share the disk, can work
on one experiment, be stopped at any time, and be started again. The module `runner` runs the cells.
"""

from __future__ import annotations

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

from acgpt.common.notation import read_notation
from acgpt.common.options import Options, check_keys, declared, documented, option
from acgpt.errors import InputError
from acgpt.evaluation.generator import INDEX, PROMPT, TEMPERATURE, TOP_P, check_prompt
from acgpt.evaluation.mauve import MIN_TEXTS
from acgpt.evaluation.options import EvaluationOptions, GenerationOptions, ScoringOptions
from acgpt.experiments.options import ExperimentOptions
from acgpt.methods import method_of, split_option
from acgpt.query.conditioning import Conditioning
from acgpt.query.modes import MODES, modes_named
from acgpt.training.recipe import Recipe, check_recipe_keys, load_recipe, read_change, read_yaml

BUILT_IN = Path(__file__).parent / "builtin"
LOGS, LOCKS = "logs", "locks"
Dtype = Literal["auto", "float32", "bfloat16", "float16", "float64"]


@documented
@dataclass(frozen=True)
class EvaluateSection(Options):
    """The section `evaluate` of an experiment: `acgpt evaluate` runs once for each split and r_max.

    The evaluation dataset depends only on these keys and the recipe's `length` and r_max, so cells with the same r_max
    share it.
    """

    splits: tuple[str, ...] = option("List of splits of the corpus.", ("test",))
    r_max: tuple[float, ...] | None = option(
        "List of maximum shares of a text that are given. Default: the cell's r_max; for a method that reads no "
        "future, which has no r_max, those of all other cells.",
        minimum=0,
        maximum=1,
    )
    limit: int | None = declared(EvaluationOptions, "limit")
    seed: int = declared(EvaluationOptions, "seed", default=0)
    conditioning: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None = option(
        "Distribution of conditioning sets for the mode `training`, for example {b_max: 4}, or a list of them, one "
        "evaluation each. Default, and null in a list: the paper's."
    )
    dtype: Dtype = declared(EvaluationOptions, "dtype")
    batch_tokens: int | None = declared(EvaluationOptions, "batch_tokens")
    compile: bool = declared(EvaluationOptions, "compiled")
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
        check_lists(splits=self.splits, r_max=self.r_max)
        if not self.distributions:
            raise InputError("conditioning must be a distribution or a list of them, not [].")
        for conditioning in self.distributions:
            if conditioning is not None:
                Conditioning.from_dict(conditioning)

    @property
    def distributions(self) -> Sequence[Mapping[str, Any] | None]:
        """The distribution of each evaluation; `None` for the paper's."""
        return self.conditioning if isinstance(self.conditioning, list | tuple) else (self.conditioning,)

    def name(self, split: str, r_max: float, conditioning: Mapping[str, Any] | None, options: str = "") -> str:
        """Return the name of the file of an evaluation, without its suffix: all that decides the evaluation.

        Args:
            split: Split of the corpus.
            r_max: Maximum share of a text that is given.
            conditioning: One of `distributions`.
            options: Options of the method, as in `method_options`.
        """
        parts = [set_name(split, r_max, self.limit, self.seed, conditioning)]
        parts += [re.sub(r"[^\w.]+", "_", options)] if options else []
        return "-".join(parts)


@documented
@dataclass(frozen=True)
class GenerateSection(Options):
    """The section `generate` of an experiment: `acgpt generate` runs once for each split and r_max."""

    splits: tuple[str, ...] = declared(EvaluateSection, "splits")
    modes: tuple[str, ...] | None = option(
        "List of modes. Default: all five, without those that a method cannot answer."
    )
    r_max: tuple[float, ...] | None = declared(EvaluateSection, "r_max", help="As in `evaluate`.")
    limit: int | None = declared(GenerationOptions, "limit")
    samples: int = declared(GenerationOptions, "samples")
    prompt: int = declared(GenerationOptions, "prompt", default=PROMPT)
    top_p: float = declared(GenerationOptions, "top_p", default=TOP_P)
    temperature: float = declared(GenerationOptions, "temperature", default=TEMPERATURE)
    seed: int = declared(GenerationOptions, "seed")
    set_seed: int = declared(
        GenerationOptions, "set_seed", default=0, help="Seed of the conditioning sets. Default: 0."
    )
    conditioning: Mapping[str, Any] | None = option(
        "Distribution of conditioning sets for the mode `training`. Default: the paper's."
    )
    dtype: Dtype = declared(GenerationOptions, "dtype")
    batch_tokens: int | None = declared(GenerationOptions, "batch_tokens")
    compile: bool = declared(GenerationOptions, "compiled")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_lists(splits=self.splits, r_max=self.r_max, modes=self.modes)
        Conditioning.from_dict(self.conditioning or {})
        names = tuple(mode.name for mode in modes_named(self.modes or ()))
        object.__setattr__(self, "modes", None if len(names) == len(MODES) else names)

    def name(self, split: str, r_max: float) -> str:
        """Return the name of the folder of generations: all that decides the samples, defaults left out."""
        parts = [set_name(split, r_max, self.limit, self.set_seed, self.conditioning)]
        defaults = {key.name: key.default for key in fields(GenerateSection)}
        for key in ("samples", "prompt", "top_p", "temperature", "seed"):
            if (value := getattr(self, key)) != defaults[key]:
                parts.append(f"{'draw-' if key == 'seed' else ''}{key}{value}")
        return "-".join([*parts, *(self.modes or ())])


@documented
@dataclass(frozen=True)
class MauveSection(Options):
    """The section `mauve` of an experiment: `acgpt mauve` runs once for each folder of generations."""

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
    judge: str | None = declared(
        ScoringOptions,
        "judge",
        help="Model that measures how likely the texts are: a folder (such as `model` of another cell) or a hub id.",
    )
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

    def scorings(self) -> dict[str, list[str]]:
        """Return the arguments of each call of `acgpt mauve`, by a name that contains all of its options."""
        common = {"features": self.features, "seeds": self.seeds}
        keys = ("split", "rule", "length", "skip", "count", "judge", "no_mauve")  # not used with asked_only
        calls: list[dict[str, Any]] = [{key: getattr(self, key) for key in keys} | common]
        calls += [{"asked_only": True} | common] if self.asked_only else []
        scorings = {}
        for call in calls:
            given = {key: value for key, value in call.items() if value is not None and value is not False}
            name = "-".join(["scores", *(key if x is True else f"{key}_{short(x)}" for key, x in given.items())])
            options = ([f"--{key.replace('_', '-')}", *([] if x is True else [str(x)])] for key, x in given.items())
            scorings[name] = [argument for arguments in options for argument in arguments]
        return scorings


@dataclass(frozen=True, eq=False)
class Cell:
    """One run of an experiment, with its evaluations, generations and scores.

    A command is the list of arguments of the program `acgpt`.

    Args:
        number: Number of the cell, from 1, in the order of the file.
        name: Name of the cell and of its folder, made of its grid values.
        recipe: Recipe of the run; `recipe.output` is the folder of the cell.
        train: The command that trains the model.
        evaluations: The command of each evaluation, by the file that it writes.
        generations: The command of each folder of generations, by the file that it writes last.
        scores: The command of each scoring of such a folder, by the file that it writes last.
    """

    number: int
    name: str
    recipe: Recipe
    train: tuple[str, ...]
    evaluations: Mapping[Path, tuple[str, ...]]
    generations: Mapping[Path, tuple[str, ...]] = field(default_factory=dict)
    scores: Mapping[Path, tuple[str, ...]] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return Path(self.recipe.output)

    @property
    def log(self) -> Path:
        """File with the output of the cell's commands."""
        return self.folder.parent / LOGS / f"{self.name}.txt"

    @property
    def lock(self) -> Path:
        """File that is locked while a runner works on the cell."""
        return self.folder.parent / LOCKS / self.name

    @property
    def after_training(self) -> dict[Path, tuple[str, ...]]:
        """The commands that follow training, by the file that each writes last."""
        return {**self.evaluations, **self.generations, **self.scores}

    @property
    def commands(self) -> list[str]:
        """All commands of the cell, as shell commands."""
        return [shlex.join(["acgpt", *arguments]) for arguments in (self.train, *self.after_training.values())]


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
        check_axes(self.set, "set")
        if not self.grids or not all(self.grids):
            raise InputError("grid has no values: add recipe keys, each with a list, such as seed: [0, 1, 2].")
        for grid in self.grids:
            check_axes(grid, "grid")
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
        recipes: dict[str, tuple[list[str], Recipe]] = {}
        for values in self.combinations():
            name = "-".join(label(key, value) for key, value in values.items())
            output = str(Path(self.output) / name)
            changes = [written(key, value) for key, value in {**self.set, **values, "output": output}.items()]
            if name in recipes:
                if changes != recipes[name][0]:
                    raise InputError(
                        f"two cells have the name {name}, because their values differ only in special characters: "
                        "change one of the values."
                    )
                continue
            if name in (LOGS, LOCKS):
                raise InputError(f"a cell cannot have the name {name}, which is a folder of the experiment.")
            try:
                recipe = load_recipe(self.recipe, changes)
                if self.generate is not None:
                    check_prompt(self.generate.prompt, recipe.length, "generate.prompt")
            except InputError as error:
                raise InputError(f"cell {name}: {error}") from error
            recipes[name] = changes, recipe
        shares = sorted({recipe.distribution.r_max for _, recipe in recipes.values() if reads_future(recipe)})
        cells = []
        for number, (name, (changes, recipe)) in enumerate(recipes.items(), start=1):
            train = ("train", self.recipe, *changes, "--resume")
            evaluate = {} if self.evaluate is None else evaluations(recipe, self.evaluate, shares)
            generate = {} if self.generate is None else generations(recipe, self.generate, shares)
            score = {} if self.mauve is None else scores(recipe, self.mauve, generate)
            cells.append(Cell(number, name, recipe, train, evaluate, generate, score))
        return tuple(cells)

    def combinations(self) -> Iterator[dict[str, Any]]:
        """Yield the grid values of each cell by key, without `conditioning` if the method reads no future."""
        for grid in self.grids:
            for combination in product(*grid.values()):
                values = dict(zip(grid, combination, strict=True))
                method = values.get("method", self.set.get("method"))
                if method is None:
                    method = load_recipe(self.recipe, [written(key, value) for key, value in self.set.items()]).method
                if not reads_future(method):
                    values = {key: value for key, value in values.items() if key.partition(".")[0] != "conditioning"}
                yield values

    def chosen(self, only: Iterable[str] = ()) -> list[Cell]:
        """Return the cells with these numbers, names or patterns (`ac-gpt-*`), in the order of the file.

        Args:
            only: Numbers, names or patterns. Default: all cells.

        Raises:
            InputError: One of them matches no cell.
        """
        names: set[str] = set()
        for pattern in only:
            matches = {cell.name for cell in self.cells if pattern in (cell.name, str(cell.number))}
            matches = matches or {cell.name for cell in self.cells if fnmatchcase(cell.name, pattern)}
            if not matches:
                similar = get_close_matches(pattern, [cell.name for cell in self.cells], n=1)
                hint = f"did you mean {similar[0]}?" if similar else f"their numbers are 1 to {len(self.cells)}."
                raise InputError(f"there is no cell {pattern}: {hint} acgpt experiment … --list shows all cells.")
            names |= matches
        return [cell for cell in self.cells if not names or cell.name in names]


def reads_future(recipe: Recipe | str) -> bool:
    """Return whether the method reads given tokens after an asked one. Unknown methods are reported later."""
    name = recipe.method if isinstance(recipe, Recipe) else recipe
    try:
        return method_of(str(name)).reads_future
    except InputError:
        return True


def evaluations(recipe: Recipe, section: EvaluateSection, shares: Sequence[float]) -> dict[Path, tuple[str, ...]]:
    """Return the commands that evaluate a cell, by the files that they write.

    Args:
        recipe: Recipe of the cell.
        section: The section `evaluate` of the experiment.
        shares: The r_max of all other cells.
    """
    commands: dict[Path, tuple[str, ...]] = {}
    variants = ("", *section.method_options.get(recipe.method, ()))
    questions = product(section.splits, r_maxes(recipe, section, shares), section.distributions, variants)
    for split, r_max, conditioning, options in questions:
        path = Path(recipe.output) / f"{section.name(split, r_max, conditioning, options)}.json"
        method_options = [argument for pair in options.split(",") if pair for argument in ("--method-option", pair)]
        seed = ["--seed", str(section.seed)]
        command = command_on_model("evaluate", recipe, section, split, r_max, conditioning, seed)
        commands[path] = (*command, *method_options, "-o", str(path))
    return commands


def generations(recipe: Recipe, section: GenerateSection, shares: Sequence[float]) -> dict[Path, tuple[str, ...]]:
    """Return the commands that generate samples, by the files that they write last; arguments as in `evaluations`."""
    commands: dict[Path, tuple[str, ...]] = {}
    options = ["--modes", ",".join(section.modes), "--if-possible"] if section.modes else []
    for key in ("samples", "prompt", "top_p", "temperature", "seed", "set_seed"):
        options += [f"--{key.replace('_', '-')}", str(getattr(section, key))]
    for split, r_max in product(section.splits, r_maxes(recipe, section, shares)):
        folder = Path(recipe.output) / "generations" / section.name(split, r_max)
        command = command_on_model("generate", recipe, section, split, r_max, section.conditioning, options)
        commands[folder / INDEX] = (*command, "-o", str(folder))
    return commands


def scores(recipe: Recipe, section: MauveSection, generated: Iterable[Path]) -> dict[Path, tuple[str, ...]]:
    """Return the commands that score the generations of a cell, by the files that they write last.

    Args:
        recipe: Recipe of the cell.
        section: The section `mauve` of the experiment.
        generated: The files of `generations`.
    """
    device = ["--device", recipe.device] if recipe.device != "auto" else []
    commands: dict[Path, tuple[str, ...]] = {}
    for folder, (name, arguments) in product((index.parent for index in generated), section.scorings().items()):
        path = folder / f"{name}.json"
        commands[path] = ("mauve", str(folder), recipe.corpus, *arguments, *device, "--resume", "--index", str(path))
    return commands


def r_maxes(recipe: Recipe, section: EvaluateSection | GenerateSection, shares: Sequence[float]) -> Sequence[float]:
    """Return the values of r_max with which a cell is evaluated; `shares` are those of all other cells."""
    own = (recipe.distribution.r_max,)
    return section.r_max or (own if reads_future(recipe) else shares or own)


def command_on_model(
    command: str,
    recipe: Recipe,
    section: EvaluateSection | GenerateSection,
    split: str,
    r_max: float,
    conditioning: Mapping[str, Any] | None,
    options: Sequence[str],
) -> list[str]:
    """Return the arguments of `acgpt evaluate` or `acgpt generate` for the model that a cell has trained."""
    folder = Path(recipe.output)
    trained = (recipe.base, "--adapter", str(folder / "adapter")) if recipe.lora else (str(folder / "model"),)
    model, *adapter = trained
    arguments = [command, model, recipe.corpus, *adapter, "--split", split, "--r-max", f"{r_max:g}"]
    arguments += ["--length", str(recipe.length), *options]
    arguments += ["--limit", str(section.limit)] if section.limit is not None else []
    arguments += ["--conditioning", json.dumps(conditioning)] if conditioning is not None else []
    arguments += ["--device", recipe.device] if recipe.device != "auto" else []
    arguments += ["--dtype", section.dtype] if section.dtype != "auto" else []
    arguments += ["--batch-tokens", str(section.batch_tokens)] if section.batch_tokens is not None else []
    arguments += ["--compile"] if section.compile and method_of(recipe.method).compiles else []
    return arguments


def set_name(split: str, r_max: float, limit: int | None, seed: int, conditioning: Mapping[str, Any] | None) -> str:
    """Return a file name that contains all that decides an evaluation dataset."""
    parts = [re.sub(r"[^\w.]+", "_", split).lstrip(".") or "_", f"r_max{r_max:g}"]
    parts += [f"first{limit}"] if limit is not None else []
    parts += [f"seed{seed}"] if seed else []
    if conditioning is not None:
        text = json.dumps(Conditioning.from_dict(conditioning).as_dict(), sort_keys=True)
        parts.append(hashlib.sha256(text.encode()).hexdigest()[:8])
    return "-".join(parts)


def short(value: str | int) -> str:
    """Return a value as part of a file name; a path as its last component and a hash of the whole path."""
    plain = re.sub(r"[^\w]+", "_", str(value).rstrip("/").rpartition("/")[2])[:40]
    return plain if plain == str(value) else f"{plain}-{hashlib.sha256(str(value).encode()).hexdigest()[:8]}"


def check_lists(**lists: Sequence[Any] | None) -> None:
    """Refuse empty lists, by the names of their keys."""
    for name, values in lists.items():
        if values is not None and not values:
            raise InputError(f"{name} must be a list of at least one value, not [].")


# ---- keys and values ------------------------------------------------------------------------------------------------


def check_axes(keys: Any, where: str) -> None:
    """Check that `keys` is a mapping of recipe keys.

    Args:
        keys: The value of `grid` or `set`.
        where: "grid" or "set", for errors.

    Raises:
        InputError: It is not; the error suggests the key that was probably meant.
    """
    if not isinstance(keys, Mapping):
        raise InputError(f"{where} must be a mapping of recipe keys, not {keys!r}.")
    check_recipe_keys([str(key).partition(".")[0] for key in keys], where)
    for key in keys:
        if key == "output":
            raise InputError(f"{where} cannot set output: every cell gets a subfolder of the experiment's output.")


def label(key: str, value: Any) -> str:
    """Return a value as part of a cell's name: methods and sizes as they are, others after the key, `r_max0.6`."""
    text = value if isinstance(value, str) else json.dumps(value)
    text = re.sub(r"[^\w.+-]+", "_", text).strip("_.")
    return text if key in ("method", "model") else key.rpartition(".")[2] + text


def written(key: str, value: Any) -> str:
    """Return `key=value` as `acgpt train` reads it."""
    if isinstance(value, str) and (Recipe.types().get(key) is str or as_yaml(value) == value):
        return f"{key}={value}"
    return f"{key}={json.dumps(value)}"


def as_yaml(text: str) -> Any:
    """Return the value of a text as YAML; `None` if it is not valid YAML."""
    try:
        return read_notation(text, "")
    except InputError:
        return None


# ---- files ----------------------------------------------------------------------------------------------------------


def load_experiment(name: str | Path, changes: Sequence[str] = (), output: str | Path | None = None) -> Experiment:
    """Load an experiment from its file.

    Args:
        name: A YAML file, or the name of an experiment that comes with acgpt.
        changes: Recipe keys overridden in every cell, each as `key=value`. They take precedence over `set`.
        output: Folder of the experiment. Default: that of the file.

    Raises:
        InputError: The file cannot be read, or a key or value is wrong; the error says which was probably meant.
    """
    content, path = read_yaml(name, BUILT_IN, "experiment")
    if output is not None:
        content["output"] = str(output)
    if isinstance(recipe := content.get("recipe"), str) and (path.parent / recipe).is_file():
        content["recipe"] = str(path.parent / recipe)
    return make(content, str(name), changes)


def opened(experiment: Experiment | str | Path, changes: Sequence[str], options: ExperimentOptions) -> Experiment:
    """Load an experiment, unless it is one, and apply the options to it.

    Args:
        experiment: A YAML file, the name of an experiment that comes with acgpt, or an `Experiment`.
        changes: As in `load_experiment`.
        options: Options of the run; `output` and `no_scoring` apply here.

    Raises:
        InputError: As in `load_experiment`; or there are changes to an `Experiment`, or the output is a file.
    """
    if not isinstance(experiment, Experiment):
        experiment = load_experiment(experiment, changes, options.output)
    elif changes:
        raise InputError("`changes` cannot be applied to an Experiment object: pass them to load_experiment.")
    elif options.output is not None and str(options.output) != experiment.output:
        experiment = replace(experiment, output=str(options.output))
    if Path(experiment.output).is_file():
        raise InputError(f"the output {experiment.output} is a file: choose a folder with `output`.")
    return replace(experiment, mauve=None) if options.no_scoring and experiment.mauve is not None else experiment


def make(content: Mapping[str, Any], source: str, changes: Sequence[str] = ()) -> Experiment:
    """Make an experiment from its keys and values, with changes as in `load_experiment`; `source` is for errors."""
    content = dict(content)
    check_keys(content, tuple(key.name for key in fields(Experiment)), source)
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
