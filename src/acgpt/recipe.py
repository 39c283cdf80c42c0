"""Recipes: everything that decides how a model is trained, in one dataclass, a YAML file or `key=value` on a line.

A recipe is a file of one's own or the name of one that comes with acgpt (`recipes/`). A key that is not known, a value
of the wrong kind and two keys that contradict each other are errors, before anything is loaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from acgpt.conditioning import Conditioning, check_keys
from acgpt.errors import InputError

BUILT_IN = Path(__file__).parent / "recipes"


@dataclass(frozen=True)
class Shape:
    """The size of a network.

    Args:
        layers: Transformer blocks.
        width: Of the hidden states.
        heads: Attention heads; `width` must be a multiple.
    """

    layers: int = 6
    width: int = 768
    heads: int = 12

    def __post_init__(self) -> None:
        if min(self.layers, self.width, self.heads) < 1 or self.width % self.heads or self.width // self.heads % 2:
            raise InputError(
                f"a model of {self.layers} layers, width {self.width} and {self.heads} heads cannot be: all are at least "
                "1, and width / heads is an even whole number."
            )


SHAPES = {
    "tiny": Shape(4, 128, 4),
    "small": Shape(6, 768, 12),  # 82M with GPT-2's vocabulary
    "base": Shape(12, 768, 12),  # 124M
    "medium": Shape(12, 1024, 16),  # 204M
}


@dataclass(frozen=True)
class Recipe:
    """How to train a model.

    Args:
        corpus: A folder that `acgpt prepare` has written.
        output: The run's folder; it must not exist yet, unless the run is resumed.
        method: "ac-gpt", or "gpt" for its causal twin: the same texts in the same order, nothing given, all asked.
        conditioning: The distribution of conditioning sets, as `Conditioning.from_dict` reads it.
        model: "tiny", "small", "base", "medium", or a mapping of `layers`, `width` and `heads`.
        length: Tokens in a text; with BOS the model has one position more.
        dropout: Of embeddings and of what each block adds.
        attention_dropout: Of attention weights. Flash attention of variable length has none: above 0 the dense mask is
            used, which is several times slower on a GPU.
        steps: Optimizer steps. Either this or `epochs`.
        epochs: Rounds over the corpus instead of steps.
        batch: Texts in a step, over all processes.
        micro_batch: Texts in a forward pass on one process; the rest of a step is accumulated. Default: as many as
            `batch` over the processes.
        optimizer: "adamw", or "muon" for the matrices of the blocks and AdamW for all else.
        lr: AdamW's learning rate at its peak.
        muon_lr: Muon's, on AdamW's scale.
        betas: AdamW's.
        weight_decay: Decoupled, of matrices.
        clip: The largest norm of a gradient; 0 is no limit.
        warmup: Steps over which the learning rate rises.
        schedule: "cosine", "linear" (stays, then falls over the `cooldown`) or "constant".
        final_lr: The share of the peak at which the learning rate ends.
        cooldown: The share of the steps over which "linear" falls.
        precision: "bf16" (mixed: weights and sums stay fp32), "fp32", or "auto": bf16 on CUDA.
        compile: torch.compile; "auto" is yes on CUDA, except under FSDP.
        device: "auto", "cpu", "cuda" or "mps".
        parallel: Several processes (torchrun) hold whole models ("ddp") or a share of one each ("fsdp").
        workers: Processes that prepare batches.
        log_every: Steps between two lines of the log.
        save_every: Steps between two checkpoints.
        keep: How many checkpoints are kept.
        eval_every: Steps between two evaluations; 0 is none but the last.
        eval_split: The split of the corpus that is evaluated on; none if the corpus has it not.
        eval_texts: How many of its texts, during training.
        final_texts: How many in the end, in all five modes; `null` is all.
        seed: Of the weights, the order of texts, their conditioning sets and dropout.
    """

    corpus: str = ""
    output: str = ""
    method: Literal["ac-gpt", "gpt"] = "ac-gpt"
    conditioning: Mapping[str, Any] = field(default_factory=lambda: {"r_max": 0.6})
    model: str | Mapping[str, Any] = "small"
    length: int = 1023
    dropout: float = 0.0
    attention_dropout: float = 0.0
    steps: int | None = None
    epochs: float | None = None
    batch: int = 64
    micro_batch: int | None = None
    optimizer: Literal["adamw", "muon"] = "adamw"
    lr: float = 5e-4
    muon_lr: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.1
    clip: float = 1.0
    warmup: int = 100
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    final_lr: float = 0.1
    cooldown: float = 1.0
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    compile: bool | Literal["auto"] = "auto"
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    parallel: Literal["ddp", "fsdp"] = "ddp"
    workers: int = 4
    log_every: int = 10
    save_every: int = 500
    keep: int = 2
    eval_every: int = 500
    eval_split: str = "validation"
    eval_texts: int = 64
    final_texts: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for each in fields(self):
            object.__setattr__(self, each.name, checked(each.name, getattr(self, each.name), hints[each.name]))
        if (self.steps is None) == (self.epochs is None):
            raise InputError("a recipe says how long to train: give steps or epochs, one of the two.")
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise InputError(f"{name} must be at least {least}, not {value}.")
        for name in ("dropout", "attention_dropout", "final_lr", "cooldown"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"{name} is a share, from 0 to 1, not {getattr(self, name)}.")
        for name in ("epochs", "lr", "muon_lr", "cooldown"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise InputError(f"{name} must be above 0, not {getattr(self, name)}.")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise InputError(f"betas must lie from 0 to below 1, not {list(self.betas)}.")
        if not 0 <= self.seed < 2**32:
            raise InputError(f"seed must lie from 0 to 2³² - 1, not {self.seed}.")
        if self.micro_batch is not None and self.batch % self.micro_batch:
            raise InputError(f"batch ({self.batch}) must be a multiple of micro_batch ({self.micro_batch}).")
        if self.parallel == "fsdp" and self.optimizer == "muon":
            raise InputError(
                "Muon needs whole matrices, and FSDP gives each process a part of them: use optimizer=adamw, or "
                "parallel=ddp."
            )
        if self.parallel == "fsdp" and self.compile is True:
            raise InputError("compile=true does not go with parallel=fsdp yet: leave compile out, or use parallel=ddp.")
        if self.precision == "bf16" and self.device == "mps":
            raise InputError("precision=bf16 is for CUDA and CPUs: use precision=fp32 on mps.")
        if self.steps is not None and self.warmup >= self.steps:
            raise InputError(f"warmup ({self.warmup}) must be shorter than the run ({self.steps} steps).")
        self.shape, self.distribution  # noqa: B018  (they are checked by being read)

    @property
    def shape(self) -> Shape:
        """The size of the network."""
        if isinstance(self.model, Mapping):
            check_keys(self.model, tuple(f.name for f in fields(Shape)), "model")
            hints = get_type_hints(Shape)
            return Shape(**{name: checked(f"model.{name}", value, hints[name]) for name, value in self.model.items()})
        if self.model not in SHAPES:
            raise InputError(
                f"model is one of {', '.join(SHAPES)}, or a mapping of layers, width, heads: not {self.model!r}."
            )
        return SHAPES[self.model]

    @property
    def distribution(self) -> Conditioning:
        """The distribution of conditioning sets."""
        return Conditioning.from_dict(self.conditioning)

    def as_dict(self) -> dict[str, Any]:
        """For JSON and YAML."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


LEAST = {
    "length": 2, "steps": 1, "batch": 1, "micro_batch": 1, "weight_decay": 0, "clip": 0, "warmup": 0, "workers": 0,
    "log_every": 1, "save_every": 1, "keep": 1, "eval_every": 0, "eval_texts": 1, "final_texts": 1,
}  # fmt: skip


def checked(name: str, value: Any, wanted: Any) -> Any:
    """The value, if it is of the kind that the annotation says; whole numbers stand for floats, lists for tuples."""
    origin, args = get_origin(wanted), get_args(wanted)
    if origin in (Union, UnionType):
        for option in args:
            try:
                return checked(name, value, option)
            except InputError:
                continue
    elif origin is Literal:
        if value in args and isinstance(value, type(args[0])):
            return value
    elif origin is tuple:
        if isinstance(value, list | tuple) and len(value) == len(args):
            return tuple(checked(name, item, kind) for item, kind in zip(value, args, strict=True))
    elif wanted is NoneType:
        if value is None:
            return None
    elif wanted is float:
        number = as_number(value)
        if number is not None:
            return float(number)
    elif isinstance(value, origin or wanted) and not (wanted is int and isinstance(value, bool)):
        return value
    raise InputError(f"{name} must be {in_words(wanted)}, not {value!r}.")


def as_number(value: Any) -> float | None:
    """A number; also one that YAML takes for text, as it does with 5e-4."""
    if isinstance(value, bool):
        return None
    try:
        return float(value) if isinstance(value, int | float | str) else None
    except ValueError:
        return None


def in_words(wanted: Any) -> str:
    """What an annotation asks for, for people."""
    origin, args = get_origin(wanted), get_args(wanted)
    if origin in (Union, UnionType):
        return " or ".join(in_words(option) for option in args)
    if origin is Literal:
        return "one of " + ", ".join(map(str, args)) if len(args) > 1 else repr(args[0])
    if origin is tuple:
        return f"a list of {len(args)} numbers"
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false", NoneType: "null"}
    return words.get(wanted, "a mapping")


def built_in() -> list[str]:
    """The names of the recipes that come with acgpt."""
    return sorted(path.stem for path in BUILT_IN.glob("*.yaml"))


def load_recipe(name: str | Path, changes: Sequence[str] = ()) -> Recipe:
    """A recipe and changes to it.

    Args:
        name: A YAML file, or the name of a recipe that comes with acgpt.
        changes: `key=value` each, the value as YAML writes it; `conditioning.r_max=0.4` reaches into a mapping.
    """
    path = Path(name)
    if not path.exists() and path.name in (*built_in(), *(f"{recipe}.yaml" for recipe in built_in())):
        path = BUILT_IN / f"{path.name.removesuffix('.yaml')}.yaml"
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"cannot read the recipe {name} ({error}). Name a YAML file, or one of acgpt's own: {', '.join(built_in())}."
        ) from error
    except yaml.YAMLError as error:
        raise InputError(f"{name} is not YAML: {error}") from error
    if not isinstance(content, dict):
        raise InputError(f"{name} must be a mapping of keys to values, not {type(content).__name__}.")
    for change in changes:
        apply(content, change)
    return make(content, str(name))


def make(content: Mapping[str, Any], source: str) -> Recipe:
    """A recipe from its keys and values; `source` names it in errors."""
    check_keys(content, tuple(f.name for f in fields(Recipe)), source)
    try:
        return Recipe(**content)
    except InputError as error:
        raise InputError(f"{source}: {error}") from error


def apply(content: dict[str, Any], change: str) -> None:
    """Put one `key=value` into a recipe."""
    key, equals, text = change.partition("=")
    if not equals or not key.strip():
        raise InputError(f"{change!r} is no change: write key=value, as in steps=1000 or conditioning.r_max=0.4.")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"{change!r}: the value is not YAML: {error}") from error
    *path, last = key.strip().split(".")
    place = content
    for name in path:
        inner = place.get(name)
        if inner is None and name in ("conditioning", "model"):
            inner = {}
        if not isinstance(inner, dict):
            raise InputError(f"{change!r}: {name} is {inner!r} and has no keys of its own; {REACH}.")
        place[name] = place = dict(inner)
    place[last] = value
    if not path and last in ("steps", "epochs"):  # one replaces the other
        content["epochs" if last == "steps" else "steps"] = None


REACH = "conditioning and model are mappings"


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The keys whose values differ, of those that change what is learnt."""
    free = {"output", "workers", "log_every", "save_every", "keep"}
    names = [f.name for f in dataclasses.fields(Recipe) if f.name not in free]
    return [name for name in names if one.get(name) != other.get(name)]
