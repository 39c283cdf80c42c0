"""Recipes: every setting of a training run, as a dataclass, a YAML file or `key=value` changes.

A recipe is a YAML file, or the name of a recipe that comes with acgpt (folder `recipes/`). Unknown keys, values of the
wrong type and keys that contradict each other raise an error before anything is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from acgpt.common.notation import read_notation
from acgpt.common.options import Options, check_keys, documented, option
from acgpt.errors import InputError
from acgpt.methods import METHODS
from acgpt.query.conditioning import KINDS, Conditioning

NO_CORPUS = "the recipe names no corpus: add corpus=FOLDER, which acgpt prepare makes of your texts."
BUILT_IN = Path(__file__).parent / "recipes"


@documented
@dataclass(frozen=True)
class Shape(Options):
    """The size of a network."""

    layers: int = option("Number of transformer blocks.", 6, minimum=1)
    width: int = option("Width of the hidden states.", 768, minimum=1)
    heads: int = option("Number of attention heads; width / heads must be an even whole number.", 12, minimum=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % self.heads or self.width // self.heads % 2:
            raise InputError(f"width / heads must be an even whole number, not {self.width} / {self.heads}.")


@documented
@dataclass(frozen=True)
class Lora(Options):
    """A LoRA adapter."""

    rank: int = option("Rank of the added matrices.", 8, minimum=1)
    alpha: float | None = option(
        "The added matrices are scaled by alpha / rank. Default: twice the rank.", above=0, below=math.inf
    )
    dropout: float = option("Dropout rate of their input.", 0.0, minimum=0, below=1)
    targets: Sequence[str] | None = option("Names of the modules to adapt. Default: every linear layer of the blocks.")
    start: str | None = option(
        'Folder of an adapter of the same rank, alpha and targets to start from; "default" is that of the embedded '
        "model. Default: a new adapter."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        names = self.targets if isinstance(self.targets, list | tuple) else [None]
        if self.targets is not None and not all(isinstance(name, str) for name in names):
            raise InputError(f"targets must be a list of module names, not {self.targets!r}.")
        if self.alpha is None:
            object.__setattr__(self, "alpha", 2.0 * self.rank)


MAPPINGS = ("conditioning", "lora", "model")  # keys whose values are mappings
SHAPES = {
    "tiny": Shape(4, 64, 4),
    "small": Shape(6, 768, 12),  # the paper's 82M: 81.1 M with GPT-2's vocabulary and no position table
    "base": Shape(12, 768, 12),  # 124M: 123.7 M
    "medium": Shape(12, 1024, 16),  # 204M: 202.6 M
}


@documented
@dataclass(frozen=True)
class Recipe(Options):
    """The settings of a training run."""

    corpus: str = option("Folder of the corpus, written by `acgpt prepare`.", "")
    output: str = option("Folder of the run. It must not exist yet, unless the run is resumed.", "")
    # The methods declare the allowed values of the next three keys: see `types`.
    method: str = option(
        'Training method: "ac-gpt", "gpt" (its causal twin: the same texts in the same order, nothing given, every '
        "token asked), or another method that `acgpt methods` lists.",
        "ac-gpt",
    )
    loss: str = option(
        'Tokens in the loss: "asked", or "all" for the given tokens too. "all" needs a method that also predicts '
        "given tokens (σ-GPT); it learns faster, but the paper does not use it, for a fair comparison.",
        "asked",
    )
    target_positions: str | None = option(
        'How σ-GPT encodes the position of the token to predict: "rotary" rotates the query to that position, '
        '"table" adds a learned embedding of it to the input (docs/explanation/methods.md). Default: rotary.'
    )
    conditioning: Mapping[str, Any] = option(
        "Distribution of conditioning sets: r_min, r_max, b_min, b_max, placement, the shares infilling, empty and "
        "unknown, or a mixture of parts (docs/explanation/conditioning.md).",
        factory=lambda: {"r_max": 0.6},
    )
    model: str | Mapping[str, Any] = option(
        'Size of a new network: "tiny", "small", "base", "medium", or a mapping of `layers`, `width` and `heads`.',
        "small",
    )
    base: str = option(
        "Pretrained model to fine-tune, instead of training a new network: a folder, a hub id or a .gguf file; "
        '"default" is the embedded model. The corpus must be prepared with its tokenizer.',
        "",
    )
    lora: Mapping[str, Any] | None = option(
        "LoRA adapter to train on the frozen `base`: {rank: 8, alpha: 16, dropout: 0, targets: null, start: null}. "
        "`start` is the folder of an adapter to go on from. Default: train all weights."
    )
    quantize: Literal["4bit"] | None = option(
        'With `lora`: "4bit" stores the frozen weights in NF4. Needs the package bitsandbytes.'
    )
    checkpointing: bool = option(
        "With `base`: recompute activations in the backward pass, which takes less memory and more time.", False
    )
    mask: str | None = option(
        "Token that stands for unknown tokens, as text. Default: the mask token of `base`, else that of the tokenizer, "
        "if any."
    )
    length: int = option("Tokens per text. The model has one more position, for BOS.", 1023, minimum=2)
    dropout: float = option("Dropout rate of the embeddings and of the residual branches.", 0.0, minimum=0, below=1)
    attention_dropout: float = option(
        "Dropout rate of the attention weights. Above 0, a dense attention mask replaces variable-length flash "
        "attention, which has no dropout; this is several times slower on a GPU.",
        0.0,
        minimum=0,
        below=1,
    )
    steps: int | None = option("Number of optimizer steps. Set either `steps` or `epochs`.", minimum=1)
    epochs: float | None = option("Number of passes over the corpus, instead of `steps`.", above=0, below=math.inf)
    batch: int = option("Number of texts per optimizer step, over all processes.", 64, minimum=1)
    micro_batch: int | None = option(
        "Maximum number of texts per forward pass of a process. A step accumulates as many passes as it needs, with "
        "the same result up to rounding. Default: one pass.",
        minimum=1,
    )
    optimizer: Literal["adamw", "muon"] = option(
        '"adamw", or "muon": Muon for the weight matrices of the blocks and AdamW for all other weights.', "adamw"
    )
    lr: float = option("Peak learning rate of AdamW.", 5e-4, above=0, below=math.inf)
    muon_lr: float | None = option(
        "Peak learning rate of Muon, on AdamW's scale. Only with Muon; default 0.002.", above=0, below=math.inf
    )
    betas: tuple[float, float] = option("Betas of AdamW.", (0.9, 0.999), minimum=0, below=1)
    weight_decay: float = option("Decoupled weight decay of matrices (with Muon, except embeddings).", 0.1, minimum=0)
    clip: float = option("Maximum norm of the gradient; 0 for no clipping.", 1.0, minimum=0)
    warmup: int = option("Number of steps of linear learning-rate warmup.", 100, minimum=0)
    schedule: Literal["cosine", "linear", "constant"] = option(
        'Learning rate after warmup: "cosine", "linear" (constant, then a linear decay during the `cooldown`) or '
        '"constant".',
        "cosine",
    )
    final_lr: float | None = option(
        'Final learning rate, as a share of the peak. Not with the schedule "constant"; default 0.1.',
        minimum=0,
        maximum=1,
    )
    cooldown: float | None = option(
        'Share of the steps after warmup that the schedule "linear" takes to decay. Only with "linear"; default 1.',
        above=0,
        maximum=1,
    )
    precision: Literal["auto", "bf16", "fp32"] = option(
        '"bf16" (mixed precision: weights, optimizer and loss stay in fp32), "fp32", or "auto": bf16 on CUDA, else '
        "fp32.",
        "auto",
    )
    compile: bool | Literal["auto"] = option(
        'Compile the training step with torch.compile. "auto": on CUDA, except with FSDP, `checkpointing` or '
        "`quantize`.",
        "auto",
    )
    device: Literal["auto", "cpu", "cuda", "mps"] = option(
        '"cuda", "mps", "cpu", or "auto": the first of these that is available.', "auto"
    )
    parallel: Literal["ddp", "fsdp"] = option(
        'With several processes (torchrun), each holds the whole model ("ddp") or a shard of it ("fsdp"). A launch '
        'by accelerate with an FSDP config counts as "fsdp".',
        "ddp",
    )
    workers: int = option("Number of processes that prepare batches.", 4, minimum=0)
    log_every: int = option("Steps between two rows of the log. Checkpoints and evaluations add a row.", 10, minimum=1)
    save_every: int = option("Steps between two checkpoints. The last step always has one.", 500, minimum=1)
    keep: int = option("Number of checkpoints to keep: the latest ones.", 2, minimum=1)
    eval_every: int = option("Steps between two evaluations; 0 for the final one only.", 500, minimum=0)
    eval_split: str = option(
        "Split of the corpus to evaluate on. By default, a corpus without a validation split is not evaluated on.",
        "validation",
    )
    eval_texts: int = option("Number of texts to evaluate on during training: the first of the split.", 64, minimum=1)
    final_texts: int | None = option(
        "Number of texts in the final evaluation, in all five modes: the first of the split. Default: all; 8 if a "
        "method needs a forward pass per asked token.",
        minimum=1,
    )
    seed: int = option(
        "Seed of the initial weights, the order of the texts, the conditioning sets and dropout.",
        0,
        minimum=0,
        below=2**32,
        words="from 0 to 2³² - 1",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.steps is None) == (self.epochs is None):
            raise InputError("the length of training must be set once: set either steps or epochs.")
        for name, (owner, defaults) in BELONGS.items():
            value, choices = getattr(self, owner), defaults()
            if value in choices and getattr(self, name) is None:
                object.__setattr__(self, name, choices[value])
            elif value not in choices and getattr(self, name) is not None:
                raise InputError(
                    f"{name} is only for {owner}={' or '.join(choices)}, not for {owner}={value}: leave it out "
                    f"({name}=null)."
                )
        if self.parallel == "fsdp" and self.optimizer == "muon":
            raise InputError(
                "Muon does not work with FSDP, because it needs whole matrices: use optimizer=adamw (and "
                "muon_lr=null), or parallel=ddp."
            )
        if self.parallel == "fsdp" and self.compile is True:
            raise InputError("compile=true does not work with parallel=fsdp: leave compile out, or use parallel=ddp.")
        if self.precision == "bf16" and self.device == "mps":
            raise InputError("precision=bf16 does not work on mps: use precision=fp32.")
        if self.steps is not None and self.warmup >= self.steps:
            raise InputError(
                f"warmup ({self.warmup}) must be shorter than the run ({self.steps} steps): use "
                f"warmup={self.steps // 10}, for example."
            )
        for name in ("lora", "checkpointing", "quantize"):
            if getattr(self, name) and not self.base:
                raise InputError(f"{name} needs a pretrained model: add base=FOLDER.")
        if self.quantize and self.lora is None:
            raise InputError("quantize needs LoRA, which freezes the weights: add lora.rank=16, for example.")
        if self.base and (self.dropout or self.attention_dropout):
            raise InputError(
                "dropout and attention_dropout are for new networks, not for base: leave them out, or use lora.dropout."
            )
        self.shape, self.distribution  # noqa: B018  (reading them checks them)
        if self.adapter is not None:
            object.__setattr__(self, "lora", asdict(self.adapter))

    @property
    def shape(self) -> Shape:
        """Size of a new network."""
        if isinstance(self.model, Mapping):
            return Shape.read(self.model, "model")
        if self.model not in SHAPES:
            raise InputError(
                f"model must be one of {', '.join(SHAPES)}, or a mapping of layers, width and heads, not "
                f"{self.model!r}."
            )
        return SHAPES[self.model]

    @property
    def adapter(self) -> Lora | None:
        """The LoRA adapter to train, if any."""
        return None if self.lora is None else Lora.read(self.lora, "lora")

    @property
    def distribution(self) -> Conditioning:
        """The distribution of conditioning sets."""
        return Conditioning.from_dict(self.conditioning)

    @classmethod
    def types(cls) -> dict[str, Any]:
        """Return the types of the keys; for `method` and the keys that methods declare, their allowed values."""
        options = {name: method.training_options for name, method in METHODS.items()}
        types = super().types() | {"method": one_of(options)}
        for key in {key for declared in options.values() for key in declared} & set(types):
            values = one_of(dict.fromkeys(value for declared in options.values() for value in declared.get(key, ())))
            types[key] = values if types[key] is str else values | None
        return types

    def as_dict(self) -> dict[str, Any]:
        """Return the keys and values, for JSON and YAML."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


def one_of(values: Iterable[str]) -> Any:
    """Return the `Literal` type of these values."""
    return Literal.__getitem__(tuple(values))


def method_defaults(key: str) -> dict[str, str]:
    """Return the methods that take a recipe key, with their defaults."""
    declared = {name: method.training_options for name, method in METHODS.items()}
    return {name: options[key][0] for name, options in declared.items() if key in options}


# Keys that apply only with certain values of another key: that key, and the default for each of these values.
BELONGS: dict[str, tuple[str, Callable[[], Mapping[str, float | str]]]] = {
    "target_positions": ("method", lambda: method_defaults("target_positions")),
    "muon_lr": ("optimizer", lambda: {"muon": 2e-3}),
    "final_lr": ("schedule", lambda: {"cosine": 0.1, "linear": 0.1}),
    "cooldown": ("schedule", lambda: {"linear": 1.0}),
}


def built_in(folder: Path = BUILT_IN) -> dict[str, str]:
    """Return the names of the YAML files in a folder, by default acgpt's own recipes, with their first lines."""
    files = sorted(folder.glob("*.yaml"))
    return {path.stem: path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for path in files}


def recipes_for(finetuning: bool) -> dict[str, str]:
    """Return the built-in recipes of `acgpt finetune`, or of `acgpt train`, with their first lines."""
    return {name: text for name, text in built_in().items() if bool(load_recipe(name).base) == finetuning}


def read_yaml(name: str | Path, folder: Path, kind: str, hint: str = "") -> tuple[dict[str, Any], Path]:
    """Read a YAML file and return its contents and its path.

    Args:
        name: Path of the file, or the name of one that comes with acgpt.
        folder: Folder of the files that come with acgpt.
        kind: "recipe" or "experiment", for errors.
        hint: A hint to add to errors.
    """
    path, names = Path(name), built_in(folder)
    if not path.is_file() and str(name).removesuffix(".yaml") in names:
        path = folder / f"{path.name.removesuffix('.yaml')}.yaml"
    try:
        content = read_notation(path.read_text(encoding="utf-8"), f"the {kind} {name}")
    except (OSError, UnicodeDecodeError) as error:
        similar = get_close_matches(str(name), names, n=1)
        hint += f"did you mean {similar[0]}? " if similar else ""
        problem = f"cannot read the {kind} {name} ({getattr(error, 'strerror', None) or error})"
        problem = f"there is no {kind} {name}" if isinstance(error, FileNotFoundError) else problem
        raise InputError(f"{problem}: {hint}Name a YAML file, or one of acgpt's own: {', '.join(names)}.") from error
    if not isinstance(content, dict):
        raise InputError(f"{name} must be a mapping of keys to values, not {type(content).__name__}.")
    return content, path


def load_recipe(name: Recipe | str | Path, changes: Sequence[str] | Mapping[str, Any] = ()) -> Recipe:
    """Load a recipe and apply changes to it.

    Args:
        name: A YAML file, the name of a recipe that comes with acgpt, or a `Recipe`.
        changes: Values by key, or a list of `key=value`, where each value is YAML (paths and other text as they are).
            A dotted key sets a key of a mapping: `conditioning.r_max`. A change also removes the keys of the file that
            it makes meaningless: `steps` removes `epochs` and shortens a `warmup` that is as long as the run,
            `optimizer=adamw` removes `muon_lr`, and `lora.rank` removes `lora.alpha`.
    """
    if isinstance(name, Recipe):
        content, source = name.as_dict(), "the recipe"
    else:
        hint = "name the recipe first, then the changes. " if "=" in str(name) else ""
        content, source = read_yaml(name, BUILT_IN, "recipe", hint)[0], str(name)
    pairs = list(changes.items()) if isinstance(changes, Mapping) else list(map(read_change, changes))
    for key, value in pairs:
        set_key(content, key, value)
    changed = [key for key, _ in pairs]
    for key, other in (("steps", "epochs"), ("epochs", "steps")):
        if key in changed and other not in changed:
            content.pop(other, None)
    if "steps" in changed and "warmup" not in changed and isinstance(steps := content["steps"], int):
        warmup = content.get("warmup", Recipe.warmup)
        content["warmup"] = min(warmup, steps // 10) if isinstance(warmup, int) and warmup >= steps else warmup
    if "lora.rank" in changed and "lora.alpha" not in changed and isinstance(content.get("lora"), dict):
        content["lora"].pop("alpha", None)
    for key, (owner, defaults) in BELONGS.items():
        if owner in changed and key not in changed and content[owner] not in list(defaults()):
            content.pop(key, None)
    return make(content, source)


def check_recipe_keys(keys: Iterable[str], where: str) -> None:
    """Refuse keys that recipes do not have, see `check_keys`."""
    inner = {item.name: f"conditioning.{item.name}" for kind in KINDS.values() for item in fields(kind)}
    check_keys(keys, [key.name for key in fields(Recipe)], where, inner)


def make(content: Mapping[str, Any], source: str) -> Recipe:
    """Make a recipe from its keys and values; `source` is its name for errors."""
    check_recipe_keys(content, source)
    try:
        return Recipe(**content)
    except InputError as error:
        raise InputError(f"{source}: {error}") from error


def read_change(change: str) -> tuple[str, Any]:
    """Parse `key=value`, where the value is YAML; paths and other text are taken as they are."""
    key, equals, text = change.partition("=")
    key = key.strip()
    if not equals or not key:
        raise InputError(f"{change!r} is not a change: write key=value, as in steps=1000 or conditioning.r_max=0.4.")
    is_path = Recipe.types().get(key) is str
    return key, text if is_path else read_notation(text, f"{change!r}: the value")  # a path need not be valid YAML


def set_key(content: dict[str, Any], key: str, value: Any) -> None:
    """Set one key of a recipe; a dotted key sets a key of a mapping."""
    *parents, last = key.split(".")
    mapping = content
    for name in parents:
        inner = mapping.get(name)
        inner = {} if inner is None and name in MAPPINGS else inner
        if not isinstance(inner, dict):
            raise InputError(f"{key!r}: {name} is {inner!r}, not a mapping. Only {', '.join(MAPPINGS)} have keys.")
        mapping[name] = dict(inner)
        mapping = mapping[name]
    mapping[last] = value


# Keys that do not change the trained model, up to rounding. A corpus is identified by its hash, not by its path.
FREE = frozenset({"corpus", "output", "micro_batch", "workers", "log_every", "save_every", "keep"})


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the keys whose values differ, without those that change neither the model nor its evaluation (`FREE`)."""
    return [key.name for key in fields(Recipe) if key.name not in FREE and one.get(key.name) != other.get(key.name)]
