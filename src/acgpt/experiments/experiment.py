"""Experiments: a grid of runs over one recipe, cut into cells that know nothing of each other.

    FILE.yaml ──► Experiment ──► Cell, Cell, …       each: acgpt train … --resume, then acgpt evaluate … and
                                                     acgpt generate … for each set, and acgpt mauve … for what
                                                     was drawn

    OUTPUT/
      CELL/                    the run's folder, as `run_folder` describes it
      CELL/test-r_max0.6.json  an evaluation of what was trained
      CELL/generations/test-r_max0.6/    what it has drawn, as `generate` describes it
      CELL/generations/test-r_max0.6/scores-….json    that all of it is scored; the results lie beside it
      logs/CELL.txt            what the cell's commands said
      locks/CELL               held while somebody works on the cell

Whether a cell is done is read from its folder alone, so any number of runners, on any machines that share the disk, can
work on one experiment, be stopped at any moment, and go on. `experiment_runner` runs them.
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
from typing import Any, Literal, get_type_hints

import yaml

from acgpt.common.options import current_names, declared, documented, option
from acgpt.engine.decode import Sampling
from acgpt.errors import InputError
from acgpt.evaluation.generator import INDEX, PROMPT, TEMPERATURE, TOP_P, check_prompt
from acgpt.evaluation.mauve import FEWEST
from acgpt.evaluation.options import EvaluationOptions, GenerationOptions, ScoringOptions
from acgpt.evaluation.reference import RULES
from acgpt.experiments.options import ExperimentOptions
from acgpt.methods import method_of, parted
from acgpt.query.conditioning import Conditioning, check_keys
from acgpt.query.modes import MODES, modes_named
from acgpt.training.recipe import ELSEWHERE, Loader, Recipe, checked, kinds, load_recipe, read_change, read_yaml

BUILT_IN = Path(__file__).parent / "builtin"
LOGS, LOCKS = "logs", "locks"
Dtype = Literal["auto", "float32", "bfloat16", "float16", "float64"]
# What an axis might be called, and the key of a recipe that it is.
AXES = ELSEWHERE | {"methods": "method", "sizes": "model", "size": "model", "models": "model", "seeds": "seed"}


@documented
@dataclass(frozen=True)
class Evaluations:
    """What a cell is asked once it has been trained: `acgpt evaluate`, once for each split and r_max.

    The evaluation set depends on these keys, the recipe's `length` and r_max alone, so cells of one r_max share it.
    """

    splits: Sequence[str] = option("Of the corpus, a list.", ("test",))
    r_max: Sequence[float] | None = option(
        "The largest shares of a text that are given, a list. Default: the cell's own; for a method that reads no "
        "future, which has none, those of all other cells."
    )
    limit: int | None = declared(EvaluationOptions, "limit")
    seed: int = declared(EvaluationOptions, "seed", default=0)
    conditioning: Mapping[str, Any] | None = option(
        "The training distribution that is asked, if it is not the paper's: {b_max: 4}, say."
    )
    dtype: Dtype = declared(EvaluationOptions, "dtype")
    batch_tokens: int | None = declared(EvaluationOptions, "batch_tokens")
    compile: bool = declared(EvaluationOptions, "compiled")
    method_options: Mapping[str, Sequence[str]] = option(
        "Further evaluations by method, one for each entry of a list of method options, as `acgpt evaluate "
        "--method-option` takes them: {sigma-gpt-random: [order=random]}.",
        factory=dict,
        renamed_from="how",
    )

    def __post_init__(self) -> None:
        ways = self.method_options.values() if isinstance(self.method_options, Mapping) else [None]
        if not all(isinstance(way, list | tuple) and all(isinstance(each, str) for each in way) for way in ways):
            raise InputError("evaluate.method_options must be lists of options by method, such as "
                             f"{{NAME: [a=1, 'a=2,b=3']}}, not {self.method_options!r}.")  # fmt: skip
        for name, each in self.method_options.items():
            try:
                for way in each:
                    method_of(name).configured(dict(parted(word) for word in way.split(",")))
            except InputError as error:
                raise InputError(f"evaluate.method_options, {name}: {error}") from error
        check_sets(self, "evaluate")

    def name(self, split: str, r_max: float, way: str = "") -> str:
        """What the file of an evaluation is called, without its ending: all that decides what is asked, and how."""
        words = [set_name(split, r_max, self.limit, self.seed, self.conditioning)]
        words += [re.sub(r"[^\w.]+", "_", way)] if way else []
        return "-".join(words)


@documented
@dataclass(frozen=True)
class Draws:
    """What a cell draws once it has been evaluated: `acgpt generate`, once for each split and r_max."""

    splits: Sequence[str] = declared(Evaluations, "splits")
    modes: Sequence[str] | None = option(
        "A list of their names. Default: all five; what a method cannot answer is left out."
    )
    r_max: Sequence[float] | None = declared(Evaluations, "r_max", help="As in `evaluate`.")
    limit: int | None = declared(GenerationOptions, "limit")
    samples: int = declared(GenerationOptions, "samples")
    prompt: int = declared(GenerationOptions, "prompt", default=PROMPT)
    top_p: float = declared(GenerationOptions, "top_p", default=TOP_P)
    temperature: float = declared(GenerationOptions, "temperature", default=TEMPERATURE)
    seed: int = declared(GenerationOptions, "seed")
    set_seed: int = declared(GenerationOptions, "set_seed", default=0, help="Of the conditioning sets. Default: 0.")
    conditioning: Mapping[str, Any] | None = declared(Evaluations, "conditioning", help="As in `evaluate`.")
    dtype: Dtype = declared(GenerationOptions, "dtype")
    batch_tokens: int | None = declared(GenerationOptions, "batch_tokens")
    compile: bool = declared(GenerationOptions, "compiled")

    def __post_init__(self) -> None:
        check_sets(self, "generate")
        if self.modes is not None and (not isinstance(self.modes, list | tuple) or not self.modes):
            raise InputError("generate.modes must be a list, such as [infilling].")
        try:
            names = tuple(mode.name for mode in modes_named(self.modes or ()))
            object.__setattr__(self, "modes", None if len(names) == len(MODES) else names)
            for name in ("top_p", "temperature"):
                object.__setattr__(self, name, checked(f"generate.{name}", getattr(self, name), float))
            Sampling(temperature=self.temperature, top_p=self.top_p)
        except InputError as error:
            raise InputError(f"generate: {error}") from error

    def name(self, split: str, r_max: float) -> str:
        """What the folder of generations is called: all that decides what is drawn, where it is not the usual."""
        words = [set_name(split, r_max, self.limit, self.set_seed, self.conditioning)]
        usual = {each.name: each.default for each in fields(Draws)}
        for key in ("samples", "prompt", "top_p", "temperature", "seed"):
            if (value := getattr(self, key)) != usual[key]:
                words.append(f"{'draw-' if key == 'seed' else ''}{key}{value}")
        return "-".join([*words, *(self.modes or ())])


@documented
@dataclass(frozen=True)
class Scores:
    """How what a cell has drawn is scored: `acgpt mauve`, once for each folder of generations."""

    split: str | None = declared(ScoringOptions, "split")
    rule: str | None = declared(ScoringOptions, "rule")
    length: int | None = declared(ScoringOptions, "length")
    skip: int | None = declared(ScoringOptions, "skip")
    count: int | None = declared(ScoringOptions, "count")
    features: str | None = declared(ScoringOptions, "features")
    seeds: int | None = declared(ScoringOptions, "seeds")
    asked_only: bool = declared(
        ScoringOptions,
        "asked_only",
        help="Score what was drawn alone as well, against what stood there: a result more each.",
    )
    judge: str | None = declared(
        ScoringOptions,
        "judge",
        help="A model that says how likely it finds the texts: a folder, another cell's `model` say, or a hub id.",
    )
    no_mauve: bool = declared(ScoringOptions, "no_mauve")

    def __post_init__(self) -> None:
        for name in ("split", "rule", "features", "judge"):
            if checked(f"mauve.{name}", getattr(self, name), str | None) == "":
                raise InputError(f"mauve.{name} is empty: name one, or leave it out.")
        for name in ("asked_only", "no_mauve"):
            checked(f"mauve.{name}", getattr(self, name), bool)
        check_numbers(self, "mauve")
        if self.count is not None and not self.no_mauve and self.count < FEWEST:
            raise InputError(f"mauve.count must be at least {FEWEST}, not {self.count}.")
        if self.rule not in (None, *RULES):
            raise InputError(f"mauve.rule must be one of {', '.join(RULES)}, not {self.rule!r}.")
        unused = [name for name in ("features", "seeds", "asked_only") if self.no_mauve and getattr(self, name)]
        if unused:
            raise InputError(f"mauve.{unused[0]} can do nothing with mauve.no_mauve: leave one or the other out.")

    def ways(self) -> dict[str, list[str]]:
        """The options of `acgpt mauve` for each way of scoring, by a name that holds all of them."""
        both = {"features": self.features, "seeds": self.seeds}
        keys = ("split", "rule", "length", "skip", "count", "judge", "no_mauve")  # of these the other way has no use
        ways: list[dict[str, Any]] = [{key: getattr(self, key) for key in keys} | both]
        ways += [{"asked_only": True} | both] if self.asked_only else []
        found = {}
        for way in ways:
            given = {key: value for key, value in way.items() if value is not None and value is not False}
            name = "-".join(["scores", *(key if x is True else f"{key}_{short(x)}" for key, x in given.items())])
            options = ([f"--{key.replace('_', '-')}", *([] if x is True else [str(x)])] for key, x in given.items())
            found[name] = [word for words in options for word in words]
        return found


@dataclass(frozen=True, eq=False)
class Cell:
    """One run of an experiment, and the evaluations of what it trains.

    Args:
        number: From 1, in the order of the file.
        name: Of its folder: the values that the grid gives it.
        recipe: Its recipe; `recipe.output` is its folder.
        train: The words that follow `acgpt` to train it.
        evaluations: The words that follow `acgpt` for each evaluation, by the file that it writes.
        generations: The words that follow `acgpt` for each folder of generations, by the file that it writes last.
        scores: The words that follow `acgpt` for each of these folders and way of scoring, likewise.
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
        """Of its run."""
        return Path(self.recipe.output)

    @property
    def log(self) -> Path:
        """What its commands said."""
        return self.folder.parent / LOGS / f"{self.name}.txt"

    @property
    def lock(self) -> Path:
        """Held while somebody works on it."""
        return self.folder.parent / LOCKS / self.name

    @property
    def commands(self) -> list[str]:
        """What it comes to, for a shell."""
        asked = {**self.evaluations, **self.generations, **self.scores}
        return [shlex.join(["acgpt", *words]) for words in (self.train, *asked.values())]


@dataclass(frozen=True)
class Experiment:
    """A grid of runs over one recipe.

    Args:
        recipe: A YAML file, beside this one or as a path, or the name of a recipe that comes with acgpt.
        output: The folder of the experiment; each cell gets one in it.
        grid: Keys of the recipe, and for each a list of values: every combination is a cell. Or a list of such grids,
            whose cells come one after the other. A method that reads no future has one cell for all values of
            `conditioning`.
        set: Keys of the recipe that are otherwise in all cells.
        evaluate: What each cell is asked once it is trained (below). Default: nothing beyond what training asks.
        generate: What each cell draws once it is evaluated (below). Default: nothing.
        mauve: How what a cell has drawn is scored (below). Default: not at all.
    """

    recipe: str
    output: str
    grid: Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Sequence[Any]]]
    set: Mapping[str, Any] = field(default_factory=dict)
    evaluate: Evaluations | None = None
    generate: Draws | None = None
    mauve: Scores | None = None

    def __post_init__(self) -> None:
        for name in ("recipe", "output"):
            if not isinstance(value := getattr(self, name), str) or not value:
                raise InputError(f"{name} must be text, not {value!r}.")
        known = tuple(each.name for each in fields(Recipe))
        check_axes(self.set, known, "set")
        if not self.grids or not all(self.grids):
            raise InputError("grid has no values: name keys of the recipe, each with a list, such as seed: [0, 1, 2].")
        for grid in self.grids:
            check_axes(grid, known, "grid")
            for key, values in grid.items():
                if not isinstance(values, list | tuple) or not values:
                    raise InputError(f"grid: {key} must be a list of values, such as [{values}], not {values!r}.")
                for one in self.set:
                    if one == key or one.startswith(f"{key}."):
                        raise InputError(f"{one} is in set, and {key} in the grid: leave one of them out.")
        if self.mauve is not None and self.generate is None:
            raise InputError("mauve scores what generate draws, and there is no generate: add one, {limit: 200} say.")
        few = None if self.generate is None else self.generate.limit
        if self.mauve is not None and not self.mauve.no_mauve and few is not None and few < FEWEST:
            raise InputError(
                f"generate.limit is {few}, and MAUVE takes at least {FEWEST} texts: have more, or set mauve.no_mauve."
            )
        self.cells  # noqa: B018  (they are checked by being made)

    @property
    def grids(self) -> Sequence[Mapping[str, Sequence[Any]]]:
        """One or more."""
        return [self.grid] if isinstance(self.grid, Mapping) else self.grid

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """Every combination, each once."""
        recipes: dict[str, tuple[list[str], Recipe]] = {}
        for chosen in self.combinations():
            name = "-".join(label(key, value) for key, value in chosen.items())
            output = str(Path(self.output) / name)
            changes = [written(key, value) for key, value in {**self.set, **chosen, "output": output}.items()]
            if name in recipes:
                if changes != recipes[name][0]:
                    raise InputError(f"two cells are called {name}: their values differ in odd characters only.")
                continue
            if name in (LOGS, LOCKS):
                raise InputError(f"a cell cannot be called {name}.")
            try:
                recipe = load_recipe(self.recipe, changes)
                if self.generate is not None:
                    check_prompt(self.generate.prompt, recipe.length, "generate.prompt")
            except InputError as error:
                raise InputError(f"cell {name}: {error}") from error
            recipes[name] = changes, recipe
        shares = sorted({recipe.distribution.r_max for _, recipe in recipes.values() if reads_future(recipe)})
        found = []
        for number, (name, (changes, recipe)) in enumerate(recipes.items(), start=1):
            train = ("train", self.recipe, *changes, "--resume")
            asked = {} if self.evaluate is None else evaluations(recipe, self.evaluate, shares)
            drawn = {} if self.generate is None else generations(recipe, self.generate, shares)
            scored = {} if self.mauve is None else scores(recipe, self.mauve, drawn)
            found.append(Cell(number, name, recipe, train, asked, drawn, scored))
        return tuple(found)

    def combinations(self) -> Iterator[dict[str, Any]]:
        """The values of each cell by key; where nothing is given in training, those of `conditioning` are left out."""
        for grid in self.grids:
            for values in product(*grid.values()):
                chosen = dict(zip(grid, values, strict=True))
                method = chosen.get("method", self.set.get("method"))
                if method is None:
                    method = load_recipe(self.recipe, [written(key, value) for key, value in self.set.items()]).method
                if not reads_future(method):
                    chosen = {key: value for key, value in chosen.items() if key.partition(".")[0] != "conditioning"}
                yield chosen

    def chosen(self, only: Iterable[str] = ()) -> list[Cell]:
        """The cells of these numbers, names or patterns (`ac-gpt-*`), in the order of the file; all, for none.

        Raises:
            InputError: One of them is no cell.
        """
        found: set[str] = set()
        for each in only:
            mine = {cell.name for cell in self.cells if each in (cell.name, str(cell.number))}
            mine = mine or {cell.name for cell in self.cells if fnmatchcase(cell.name, each)}
            if not mine:
                near = get_close_matches(each, [cell.name for cell in self.cells], n=1)
                hint = f"did you mean {near[0]}?" if near else f"they have the numbers 1 to {len(self.cells)}."
                raise InputError(f"there is no cell {each}: {hint} acgpt experiment … --list shows them.")
            found |= mine
        return [cell for cell in self.cells if not found or cell.name in found]


def reads_future(recipe: Recipe | str) -> bool:
    """Does the method read given tokens that stand after an asked one? One that is not known is found out later."""
    name = recipe.method if isinstance(recipe, Recipe) else recipe
    try:
        return method_of(str(name)).reads_future
    except InputError:
        return True


def evaluations(recipe: Recipe, wanted: Evaluations, shares: Sequence[float]) -> dict[Path, tuple[str, ...]]:
    """The commands that evaluate a cell, by the files that they write; `shares` are the r_max of all other cells."""
    found: dict[Path, tuple[str, ...]] = {}
    ways = ("", *wanted.method_options.get(recipe.method, ()))
    for split, r_max, way in product(wanted.splits, r_maxes(recipe, wanted, shares), ways):
        path = Path(recipe.output) / f"{wanted.name(split, r_max, way)}.json"
        how = [word for each in way.split(",") if each for word in ("--method-option", each)]
        words = asking("evaluate", recipe, wanted, split, r_max, ["--seed", str(wanted.seed)])
        found[path] = (*words, *how, "-o", str(path))
    return found


def generations(recipe: Recipe, wanted: Draws, shares: Sequence[float]) -> dict[Path, tuple[str, ...]]:
    """The commands by which a cell draws, by the files that they write last; `shares` as in `evaluations`."""
    found: dict[Path, tuple[str, ...]] = {}
    options = ["--modes", ",".join(wanted.modes), "--if-possible"] if wanted.modes else []
    for key in ("samples", "prompt", "top_p", "temperature", "seed", "set_seed"):
        options += [f"--{key.replace('_', '-')}", str(getattr(wanted, key))]
    for split, r_max in product(wanted.splits, r_maxes(recipe, wanted, shares)):
        folder = Path(recipe.output) / "generations" / wanted.name(split, r_max)
        found[folder / INDEX] = (*asking("generate", recipe, wanted, split, r_max, options), "-o", str(folder))
    return found


def scores(recipe: Recipe, wanted: Scores, drawn: Iterable[Path]) -> dict[Path, tuple[str, ...]]:
    """The commands that score what a cell has drawn, by the files that they write last; `drawn` as `generations`."""
    device = ["--device", recipe.device] if recipe.device != "auto" else []
    found: dict[Path, tuple[str, ...]] = {}
    for folder, (name, words) in product((index.parent for index in drawn), wanted.ways().items()):
        path = folder / f"{name}.json"
        found[path] = ("mauve", str(folder), recipe.corpus, *words, *device, "--resume", "--index", str(path))
    return found


def r_maxes(recipe: Recipe, wanted: Evaluations | Draws, shares: Sequence[float]) -> Sequence[float]:
    """At which r_max a cell is asked."""
    own = (recipe.distribution.r_max,)
    return wanted.r_max or (own if reads_future(recipe) else shares or own)


def asking(
    command: str, recipe: Recipe, wanted: Evaluations | Draws, split: str, r_max: float, how: Sequence[str]
) -> list[str]:
    """The words by which a command asks what a cell has trained."""
    folder = Path(recipe.output)
    asked = (recipe.base, "--adapter", str(folder / "adapter")) if recipe.lora else (str(folder / "model"),)
    model, *adapter = asked
    words = [command, model, recipe.corpus, *adapter, "--split", split, "--r-max", f"{r_max:g}"]
    words += ["--length", str(recipe.length), *how]
    words += ["--limit", str(wanted.limit)] if wanted.limit is not None else []
    words += ["--conditioning", json.dumps(wanted.conditioning)] if wanted.conditioning is not None else []
    words += ["--device", recipe.device] if recipe.device != "auto" else []
    words += ["--dtype", wanted.dtype] if wanted.dtype != "auto" else []
    words += ["--batch-tokens", str(wanted.batch_tokens)] if wanted.batch_tokens is not None else []
    words += ["--compile"] if wanted.compile and method_of(recipe.method).compiles else []
    return words


def set_name(split: str, r_max: float, limit: int | None, seed: int, conditioning: Mapping[str, Any] | None) -> str:
    """All that decides an evaluation set, as the name of a file."""
    words = [re.sub(r"[^\w.]+", "_", split).lstrip(".") or "_", f"r_max{r_max:g}"]
    words += [f"first{limit}"] if limit is not None else []
    words += [f"seed{seed}"] if seed else []
    if conditioning is not None:
        text = json.dumps(Conditioning.from_dict(conditioning).as_dict(), sort_keys=True)
        words.append(hashlib.sha256(text.encode()).hexdigest()[:8])
    return "-".join(words)


def short(value: str | int) -> str:
    """A value as a part of a file's name: of a path, its last part and a hash of it all."""
    plain = re.sub(r"[^\w]+", "_", str(value).rstrip("/").rpartition("/")[2])[:40]
    return plain if plain == str(value) else f"{plain}-{hashlib.sha256(str(value).encode()).hexdigest()[:8]}"


def check_sets(wanted: Evaluations | Draws, key: str) -> None:
    """Refuse wrong values among those that `evaluate` and `generate` have in common; lists are then tuples."""
    for name, kind in (("splits", str), ("r_max", float)):
        values = getattr(wanted, name)
        if values is None and name == "r_max":
            continue
        if not isinstance(values, list | tuple) or not values:
            raise InputError(f"{key}.{name} must be a list, such as [{'test' if kind is str else 0.6}].")
        object.__setattr__(wanted, name, tuple(checked(f"{key}.{name}", value, kind) for value in values))
    if any(not 0 <= r_max <= 1 for r_max in wanted.r_max or ()):
        raise InputError(f"{key}.r_max are shares, from 0 to 1, not {list(wanted.r_max or ())}.")
    check_numbers(wanted, key)
    checked(f"{key}.dtype", wanted.dtype, Dtype)
    checked(f"{key}.compile", wanted.compile, bool)
    if wanted.conditioning is not None:
        Conditioning.from_dict(wanted.conditioning)


def check_numbers(wanted: Evaluations | Draws | Scores, key: str) -> None:
    """Refuse whole numbers outside of the ranges that their options declare, and what is no whole number."""
    for name, kind in get_type_hints(type(wanted)).items():
        if kind in (int, int | None):
            (allowed,) = (each.metadata["range"] for each in fields(wanted) if each.name == name)
            value = checked(f"{key}.{name}", getattr(wanted, name), kind)
            if value is not None and value not in allowed:
                raise InputError(f"{key}.{name} must be {allowed}, not {value}.")


# ---- keys and values ------------------------------------------------------------------------------------------------


def check_axes(keys: Any, known: tuple[str, ...], where: str) -> None:
    """Refuse what is no mapping, and keys that a recipe does not have; suggest the one that was meant."""
    if not isinstance(keys, Mapping):
        raise InputError(f"{where} must be a mapping of keys of the recipe, not {keys!r}.")
    for key in keys:
        if key in AXES:
            raise InputError(f"{where} has no key {key!r}: here it is {AXES[key]!r}.")
        check_keys({str(key).partition(".")[0]: None}, known, where)
        if key == "output":
            raise InputError(f"{where} cannot name an output: every cell gets a folder in that of the experiment.")


def label(key: str, value: Any) -> str:
    """A value in the name of a cell: of methods and sizes the name, of others with the key, `r_max0.6`."""
    text = value if isinstance(value, str) else json.dumps(value)
    text = re.sub(r"[^\w.+-]+", "_", text).strip("_.")
    return text if key in ("method", "model") else key.rpartition(".")[2] + text


def written(key: str, value: Any) -> str:
    """`key=value` as `acgpt train` reads it."""
    if isinstance(value, str) and (kinds().get(key) is str or as_yaml(value) == value):
        return f"{key}={value}"
    return f"{key}={json.dumps(value)}"


def as_yaml(text: str) -> Any:
    """What YAML takes a text for; `None` for what is no YAML."""
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError:
        return None


# ---- files ----------------------------------------------------------------------------------------------------------


def load_experiment(name: str | Path, changes: Sequence[str] = (), output: str | Path | None = None) -> Experiment:
    """An experiment from its file.

    Args:
        name: A YAML file, or the name of an experiment that comes with acgpt.
        changes: `key=value` each, keys of the recipe that are otherwise in all cells; they go before those of `set`.
        output: The folder of the experiment, instead of the file's.

    Raises:
        InputError: The file cannot be read, or a key or value is wrong; the message says which was probably meant.
    """
    content, path = read_yaml(name, BUILT_IN, "experiment")
    if output is not None:
        content["output"] = str(output)
    if isinstance(recipe := content.get("recipe"), str) and (path.parent / recipe).is_file():
        content["recipe"] = str(path.parent / recipe)
    return make(content, str(name), changes)


def opened(experiment: Experiment | str | Path, changes: Sequence[str], options: ExperimentOptions) -> Experiment:
    """An experiment, or that in a file, as the options want it.

    Raises:
        InputError: As in `load_experiment`; there are changes to an experiment that is loaded; its output is a file.
    """
    if not isinstance(experiment, Experiment):
        experiment = load_experiment(experiment, changes, options.output)
    elif changes:
        raise InputError("`changes` are for an experiment from a file: name one, or load it with them.")
    elif options.output is not None and str(options.output) != experiment.output:
        experiment = replace(experiment, output=str(options.output))
    if Path(experiment.output).is_file():
        raise InputError(f"{experiment.output} is a file: name a folder with `output`.")
    return replace(experiment, mauve=None) if options.no_scoring and experiment.mauve is not None else experiment


def make(content: Mapping[str, Any], source: str, changes: Sequence[str] = ()) -> Experiment:
    """An experiment from its keys and values; `source` names it in errors."""
    content = dict(content)
    check_keys(content, tuple(each.name for each in fields(Experiment)), source)
    for key in ("recipe", "output", "grid"):
        if key not in content:
            raise InputError(f"{source} has no {key}: an experiment has a recipe, an output and a grid.")
    try:
        if changes and isinstance(content.setdefault("set", {}), Mapping):
            content["set"] = {**content["set"], **dict(map(read_change, changes))}
        for key, kind in (("evaluate", Evaluations), ("generate", Draws), ("mauve", Scores)):
            if content.get(key) is not None:
                if not isinstance(content[key], Mapping):
                    example = "{split: test}" if kind is Scores else "{splits: [test]}"
                    raise InputError(f"{key} must be a mapping such as {example}, not {content[key]!r}.")
                values = current_names(kind, content[key], f"{key}.")
                check_keys(values, tuple(each.name for each in fields(kind)), key)
                content[key] = kind(**values)
        return Experiment(**content)
    except InputError as error:
        raise InputError(f"{source}: {error}") from error
