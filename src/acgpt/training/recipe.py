"""Recipes: everything that decides how a model is trained, in one dataclass, a YAML file or `key=value` on a line.

A recipe is a file of one's own or the name of one that comes with acgpt (`recipes/`). A key that is not known, a value
of the wrong kind and two keys that contradict each other are errors, before anything is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from acgpt.common.options import Range, documented, option
from acgpt.errors import InputError
from acgpt.query.conditioning import Conditioning, check_keys

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
                f"a model of {self.layers} layers, width {self.width} and {self.heads} heads cannot be: all are at "
                "least 1, and width / heads is an even whole number."
            )


@dataclass(frozen=True)
class Lora:
    """A LoRA adapter.

    Args:
        rank: Of the matrices that it adds.
        alpha: They are scaled by alpha / rank. Default: twice the rank.
        dropout: Of what goes into them.
        targets: The modules that get them, by name. Default: every linear layer of the blocks.
    """

    rank: int = 8
    alpha: float | None = None
    dropout: float = 0.0
    targets: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.rank < 1 or not 0 <= self.dropout < 1 or (self.alpha is not None and not self.alpha > 0):
            raise InputError("lora: rank is at least 1, dropout from 0 to below 1, and alpha above 0.")
        if isinstance(self.targets, str) or not all(isinstance(target, str) for target in self.targets or ()):
            raise InputError(f"lora.targets is a list of names of modules, not {self.targets!r}.")
        if self.alpha is None:
            object.__setattr__(self, "alpha", 2.0 * self.rank)


MAPPINGS = ("conditioning", "lora", "model")  # keys whose values have keys
SHAPES = {
    "tiny": Shape(4, 128, 4),
    "small": Shape(6, 768, 12),  # the paper's 82M: 81.1 M with GPT-2's vocabulary and no position table
    "base": Shape(12, 768, 12),  # 124M: 123.7 M
    "medium": Shape(12, 1024, 16),  # 204M: 202.6 M
}


@documented
@dataclass(frozen=True)
class Recipe:
    """How to train a model."""

    corpus: str = option("A folder that `acgpt prepare` has written.", "")
    output: str = option("The run's folder; it must not exist yet, unless the run is resumed.", "")
    # The values of these three are those that methods declare: see `kinds`.
    method: str = option(
        '"ac-gpt", or "gpt" for its causal twin: the same texts in the same order, nothing given, all asked. Or any '
        "other that `acgpt methods` lists.",
        "ac-gpt",
    )
    loss: str = option(
        'What is learnt from: the "asked" tokens, or "all", the given ones too. The latter only with a method that '
        "predicts given tokens as well (σ-GPT); it learns faster, and the paper leaves it out for fairness.",
        "asked",
    )
    target_positions: str | None = option(
        'With σ-GPT, how a slot is told the position that it predicts: "rotary", its query is rotated to it, or '
        '"table", a learned row for it is added to the embedding (docs/explanation/methods.md). Default: rotary.'
    )
    conditioning: Mapping[str, Any] = option(
        "The distribution of conditioning sets: r_min, r_max, b_min, b_max, the shares infilling, empty and "
        "unknown, or a mixture of parts (docs/explanation/conditioning.md).",
        factory=lambda: {"r_max": 0.6},
    )
    model: str | Mapping[str, Any] = option(
        '"tiny", "small", "base", "medium", or a mapping of `layers`, `width` and `heads`.', "small"
    )
    base: str = option(
        'A pretrained model to tune instead of making one anew: a folder, a hub id or a .gguf file; "default" is '
        "the embedded one. Its tokenizer must be the corpus's.",
        "",
    )
    lora: Mapping[str, Any] | None = option(
        "With `base`: train a LoRA adapter and leave the model as it is, {rank: 8, alpha: 16, dropout: 0, targets: "
        "null}. Default: all weights are trained."
    )
    quantize: Literal["4bit"] | None = option(
        'With `lora`: "4bit" holds the frozen weights in NF4, by the package bitsandbytes.'
    )
    checkpointing: bool = option(
        "With `base`: recompute activations in the backward pass, for less memory and more time.", False
    )
    mask: str | None = option(
        "The token that stands for unknown ones, by its text. Default: the tokenizer's MASK, if it has one."
    )
    length: int = option("Tokens in a text; with BOS the model has one position more.", 1023, minimum=2)
    dropout: float = option("Of embeddings and of what each block adds.", 0.0, minimum=0, below=1)
    attention_dropout: float = option(
        "Of attention weights. Flash attention of variable length has none: above 0 the dense mask is used, which "
        "is several times slower on a GPU.",
        0.0,
        minimum=0,
        below=1,
    )
    steps: int | None = option("Optimizer steps. Either this or `epochs`.", minimum=1)
    epochs: float | None = option("Rounds over the corpus instead of steps.", above=0, below=math.inf)
    batch: int = option("Texts in a step, over all processes.", 64, minimum=1)
    micro_batch: int | None = option(
        "At most so many texts in a forward pass of a process; a step takes as many passes as it needs, and the "
        "result is the same but for rounding. Default: one pass.",
        minimum=1,
    )
    optimizer: Literal["adamw", "muon"] = option(
        '"adamw", or "muon" for the matrices of the blocks and AdamW for all else.', "adamw"
    )
    lr: float = option("AdamW's learning rate at its peak.", 5e-4, above=0, below=math.inf)
    muon_lr: float | None = option("Muon's, on AdamW's scale. Only with Muon; default 0.002.", above=0, below=math.inf)
    betas: tuple[float, float] = option("AdamW's.", (0.9, 0.999), minimum=0, below=1)
    weight_decay: float = option("Decoupled; of matrices (with Muon, not of embeddings).", 0.1, minimum=0)
    clip: float = option("The largest norm of a gradient; 0 is no limit.", 1.0, minimum=0)
    warmup: int = option("Steps over which the learning rate rises.", 100, minimum=0)
    schedule: Literal["cosine", "linear", "constant"] = option(
        '"cosine", "linear" (stays, then falls over the `cooldown`) or "constant".', "cosine"
    )
    final_lr: float | None = option(
        'The share of the peak at which the learning rate ends. Not with "constant"; default 0.1.',
        minimum=0,
        maximum=1,
        words="a share, from 0 to 1",
    )
    cooldown: float | None = option(
        'The share of the steps after warm-up over which "linear" falls. Only with it; default 1.',
        above=0,
        maximum=1,
        words="a share, above 0 and at most 1",
    )
    precision: Literal["auto", "bf16", "fp32"] = option(
        '"bf16" (mixed: weights, optimizer and loss stay fp32), "fp32", or "auto": bf16 on CUDA.', "auto"
    )
    compile: bool | Literal["auto"] = option(
        'torch.compile; "auto" is yes on CUDA, except under FSDP and with `checkpointing` or `quantize`.', "auto"
    )
    device: Literal["auto", "cpu", "cuda", "mps"] = option('"auto", "cpu", "cuda" or "mps".', "auto")
    parallel: Literal["ddp", "fsdp"] = option(
        'Several processes (torchrun) hold whole models ("ddp") or a share of one each ("fsdp"). A launch by '
        'accelerate with an FSDP configuration counts as "fsdp".',
        "ddp",
    )
    workers: int = option("Processes that prepare batches.", 4, minimum=0)
    log_every: int = option(
        "Steps between two lines of the log; there is also one at each checkpoint and each evaluation.", 10, minimum=1
    )
    save_every: int = option("Steps between two checkpoints; there is always one at the end.", 500, minimum=1)
    keep: int = option("How many checkpoints are kept.", 2, minimum=1)
    eval_every: int = option("Steps between two evaluations; 0 is none but the last.", 500, minimum=0)
    eval_split: str = option(
        "The split of the corpus that is evaluated on; without a validation split, by default nothing is.", "validation"
    )
    eval_texts: int = option("How many of its texts, during training.", 64, minimum=1)
    final_texts: int | None = option("How many in the end, in all five modes. Default: all.", minimum=1)
    seed: int = option(
        "Of the weights, the order of texts, their conditioning sets and dropout.",
        0,
        minimum=0,
        below=2**32,
        words="from 0 to 2³² - 1",
    )

    def __post_init__(self) -> None:
        plain = self.method in PLAIN and self.loss == Recipe.loss and self.target_positions is None
        for name, kind in (type_hints() if plain else kinds()).items():
            object.__setattr__(self, name, checked(name, getattr(self, name), kind))
        if (self.steps is None) == (self.epochs is None):
            raise InputError("a recipe says how long to train: give steps or epochs, one of the two.")
        for name, (owner, defaults) in BELONGS.items():
            if owner == "method" and plain:
                continue
            value, choices = getattr(self, owner), defaults()
            if value in choices and getattr(self, name) is None:
                object.__setattr__(self, name, choices[value])
            elif value not in choices and getattr(self, name) is not None:
                raise InputError(
                    f"{name} goes with {owner}={' or '.join(choices)}, not with {owner}={value}: leave it out "
                    f"({name}=null)."
                )
        for name, allowed in RANGES.items():
            value = getattr(self, name)
            if value is not None and not all(x in allowed for x in (value if isinstance(value, tuple) else (value,))):
                raise InputError(f"{name} must be {allowed}, not {list(value) if isinstance(value, tuple) else value}.")
        if self.parallel == "fsdp" and self.optimizer == "muon":
            raise InputError(MUON_AND_FSDP)
        if self.parallel == "fsdp" and self.compile is True:
            raise InputError("compile=true does not go with parallel=fsdp yet: leave compile out, or use parallel=ddp.")
        if self.precision == "bf16" and self.device == "mps":
            raise InputError("precision=bf16 is for CUDA and CPUs: use precision=fp32 on mps.")
        if self.steps is not None and self.warmup >= self.steps:
            raise InputError(
                f"warmup ({self.warmup}) must be shorter than the run ({self.steps} steps): say "
                f"warmup={self.steps // 10}."
            )
        for name in ("lora", "checkpointing", "quantize"):
            if getattr(self, name) and not self.base:
                raise InputError(f"{name} is for a pretrained model: name one, base=FOLDER.")
        if self.quantize and self.lora is None:
            raise InputError("quantize is for LoRA, which leaves the weights as they are: add lora.rank=16, say.")
        if self.base and (self.dropout or self.attention_dropout):
            raise InputError(
                "dropout and attention_dropout are for networks that are made anew: for LoRA use lora.dropout."
            )
        self.shape, self.distribution  # noqa: B018  (they are checked by being read)
        if self.adapter is not None:
            object.__setattr__(self, "lora", asdict(self.adapter))

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
    def adapter(self) -> Lora | None:
        """The LoRA adapter that is trained, if one is."""
        if self.lora is None:
            return None
        check_keys(self.lora, tuple(f.name for f in fields(Lora)), "lora")
        hints = get_type_hints(Lora)
        return Lora(**{name: checked(f"lora.{name}", value, hints[name]) for name, value in self.lora.items()})

    @property
    def distribution(self) -> Conditioning:
        """The distribution of conditioning sets."""
        return Conditioning.from_dict(self.conditioning)

    def as_dict(self) -> dict[str, Any]:
        """For JSON and YAML."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


@cache
def type_hints() -> dict[str, Any]:
    """The types of a recipe's keys, as the class declares them."""
    return get_type_hints(Recipe)


def kinds() -> dict[str, Any]:
    """The types of a recipe's keys; of `method` and of what methods declare, the values that there are."""
    options = training_options()
    found = type_hints() | {"method": one_of(options)}
    for key in {key for declared in options.values() for key in declared} & set(found):
        values = one_of(dict.fromkeys(value for declared in options.values() for value in declared.get(key, ())))
        found[key] = values if found[key] is str else values | None
    return found


def training_options() -> dict[str, Mapping[str, tuple[str, ...]]]:
    """The recipe keys that each method takes, with their values."""
    from acgpt.methods import METHODS  # here, as it imports torch, which listing the recipes does without

    return {name: method.training_options for name, method in METHODS.items()}


def one_of(values: Iterable[str]) -> Any:
    """The type of these values and no others."""
    return Literal.__getitem__(tuple(values))


def method_defaults(key: str) -> dict[str, str]:
    """The methods that take a recipe key, each with its default."""
    return {name: declared[key][0] for name, declared in training_options().items() if key in declared}


# The default method and its causal twin take no keys of their own. Recipes of these are read without importing all
# methods, and with them torch, which takes seconds.
PLAIN = ("ac-gpt", "gpt")
# Keys that mean something only beside certain values of another key: that key, and its values with the defaults.
BELONGS: dict[str, tuple[str, Callable[[], Mapping[str, float | str]]]] = {
    "target_positions": ("method", lambda: method_defaults("target_positions")),
    "muon_lr": ("optimizer", lambda: {"muon": 2e-3}),
    "final_lr": ("schedule", lambda: {"cosine": 0.1, "linear": 0.1}),
    "cooldown": ("schedule", lambda: {"linear": 1.0}),
}
RANGES: dict[str, Range] = {
    each.name: each.metadata["range"] for each in fields(Recipe) if each.metadata["range"] != Range()
}
MUON_AND_FSDP = (
    "Muon needs whole matrices, and FSDP gives each process a part of them: use optimizer=adamw (and muon_lr=null), or "
    "parallel=ddp."
)


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


def built_in(folder: Path = BUILT_IN) -> dict[str, str]:
    """The recipes that come with acgpt, or other such files, by name, and the line with which each begins."""
    files = sorted(folder.glob("*.yaml"))
    return {path.stem: path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for path in files}


def read_yaml(name: str | Path, folder: Path, kind: str, hint: str = "") -> tuple[dict[str, Any], Path]:
    """The content of a YAML file, and where it lies.

    Args:
        name: The file, or the name of one that comes with acgpt.
        folder: Of those.
        kind: What such a file is, for errors.
        hint: What was probably meant, for errors.
    """
    path, own = Path(name), built_in(folder)
    if not path.is_file() and str(name).removesuffix(".yaml") in own:
        path = folder / f"{path.name.removesuffix('.yaml')}.yaml"
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader)
    except (OSError, UnicodeDecodeError) as error:
        near = get_close_matches(str(name), own, n=1)
        hint += f"did you mean {near[0]}? " if near else ""
        raise InputError(
            f"cannot read the {kind} {name} ({error}): {hint}Name a YAML file, or one of acgpt's own: {', '.join(own)}."
        ) from error
    except yaml.YAMLError as error:
        raise InputError(f"{name} is no {kind} in YAML: {error}") from error
    if not isinstance(content, dict):
        raise InputError(f"{name} must be a mapping of keys to values, not {type(content).__name__}.")
    return content, path


def load_recipe(name: str | Path, changes: Sequence[str] | Mapping[str, Any] = ()) -> Recipe:
    """Load a recipe and apply changes to it.

    Args:
        name: A YAML file, or the name of a recipe that comes with acgpt.
        changes: Values by key; or a list of `key=value`, each value as YAML writes it (paths and other text as they
            are). The key `conditioning.r_max` reaches into a mapping. A change takes along what it makes meaningless in
            the file: `steps` its `epochs` and a `warmup` that is as long, `optimizer=adamw` its `muon_lr`, `lora.rank`
            its `lora.alpha`.
    """
    hint = "name the recipe first, then what is to be otherwise. " if "=" in str(name) else ""
    content, _ = read_yaml(name, BUILT_IN, "recipe", hint)
    return with_changes(content, changes, str(name))


def with_changes(content: dict[str, Any], changes: Sequence[str] | Mapping[str, Any], source: str) -> Recipe:
    """A recipe from its keys and values, changed as in `load_recipe`; `source` names it in errors."""
    pairs = list(changes.items()) if isinstance(changes, Mapping) else list(map(read_change, changes))
    for key, value in pairs:
        change(content, key, str(value) if isinstance(value, Path) else value)
    changed = [key for key, _ in pairs]
    for one, other in (("steps", "epochs"), ("epochs", "steps")):
        if one in changed and other not in changed:
            content.pop(other, None)
    if "steps" in changed and "warmup" not in changed and isinstance(steps := content["steps"], int):
        warmup = content.get("warmup", Recipe.warmup)
        content["warmup"] = min(warmup, steps // 10) if isinstance(warmup, int) and warmup >= steps else warmup
    if "lora.rank" in changed and "lora.alpha" not in changed and isinstance(content.get("lora"), dict):
        content["lora"].pop("alpha", None)
    for key, (owner, defaults) in BELONGS.items():
        if (
            owner in changed
            and key not in changed
            and (content[owner] in PLAIN or content[owner] not in list(defaults()))
        ):
            content.pop(key, None)
    return make(content, source)


class Loader(yaml.SafeLoader):
    """Plain YAML, in which a key may not stand twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """A mapping, its keys all different."""
        names = [key.value for key, _ in node.value]
        for key, _ in node.value:
            if names.count(key.value) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} stands there twice", key.start_mark)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def make(content: Mapping[str, Any], source: str) -> Recipe:
    """A recipe from its keys and values; `source` names it in errors."""
    for key in content:
        if key in ELSEWHERE:
            raise InputError(f"{source} has no key {key!r}: here it is {ELSEWHERE[key]!r}.")
    check_keys(content, tuple(each.name for each in fields(Recipe)), source)
    try:
        return Recipe(**content)
    except InputError as error:
        raise InputError(f"{source}: {error}") from error


# What other programs call it.
ELSEWHERE = {
    "learning_rate": "lr", "batch_size": "batch", "per_device_train_batch_size": "micro_batch", "max_steps": "steps",
    "num_train_epochs": "epochs", "warmup_steps": "warmup", "max_grad_norm": "clip", "lr_scheduler_type": "schedule",
    "output_dir": "output", "context": "length", "num_workers": "workers", "save_total_limit": "keep", "r_max":
    "conditioning.r_max",
}  # fmt: skip


def read_change(change: str) -> tuple[str, Any]:
    """The key and the value of a `key=value`, the value as YAML writes it (paths and other text as they are)."""
    key, equals, text = change.partition("=")
    key = key.strip()
    if not equals or not key:
        raise InputError(f"{change!r} is no change: write key=value, as in steps=1000 or conditioning.r_max=0.4.")
    try:
        path = type_hints().get(key) is str and key not in ("method", "loss")
        return key, text if path else yaml.load(text, Loader)  # a path is no YAML
    except yaml.YAMLError as error:
        raise InputError(f"{change!r}: the value is not YAML: {error}") from error


def change(content: dict[str, Any], key: str, value: Any) -> None:
    """Set one key of a recipe; a dotted key reaches into a mapping."""
    *path, last = key.split(".")
    mapping = content
    for name in path:
        inner = mapping.get(name)
        inner = {} if inner is None and name in MAPPINGS else inner
        if not isinstance(inner, dict):
            raise InputError(f"{key!r}: {name} is {inner!r} and has no keys; {', '.join(MAPPINGS)} can have them.")
        mapping[name] = dict(inner)
        mapping = mapping[name]
    mapping[last] = value


# Keys that change nothing that is learnt, but for rounding. The corpus is known by its hash, not by its place.
FREE = frozenset({"corpus", "output", "micro_batch", "workers", "log_every", "save_every", "keep"})


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The keys whose values differ, of those that change what is learnt (but for rounding) or measured.

    A key that a recipe of an earlier version has not is as it was.
    """
    return [
        each.name
        for each in fields(Recipe)
        if each.name not in FREE and one.get(each.name, each.default) != other.get(each.name, each.default)
    ]
