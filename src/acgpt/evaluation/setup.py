"""What `evaluate` and `generate` begin with: a model, the evaluation set that it is asked, and the method that asks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from acgpt.data.corpus import Corpus
from acgpt.errors import InputError, ModelError
from acgpt.evaluation.dataset import LENGTH, EvaluationSet, SetChoice, find_or_build, own_conditioning, own_r_max
from acgpt.evaluation.options import AskingOptions
from acgpt.methods import Method, method_of
from acgpt.models.language_model import LanguageModel
from acgpt.models.loading import is_default, load
from acgpt.models.metadata import DEFAULT, model_method
from acgpt.query.conditioning import Conditioning, Sized

OWN: Literal["model"] = "model"  # what names the model's own conditioning
Source = LanguageModel | str | Path
Distribution = Conditioning | Mapping[str, Any] | str | None


@dataclass(frozen=True)
class Setup:
    """A model, and the evaluation set that it is asked.

    Args:
        lm: The model.
        name: Its name, for the record.
        adapter: That of its adapter, likewise.
        corpus: What the set is made of; `None` if only its file was named.
        evaluation_set: The set.
        path: Its file.
        new: Does it still have to be saved there (`dataset.keep`)?
        method: The method that the user named, if one was.
    """

    lm: LanguageModel
    name: str
    adapter: str | None
    corpus: Corpus | None
    evaluation_set: EvaluationSet
    path: Path
    new: bool
    method: Method | None

    @classmethod
    def of(cls, model: Source, corpus: Corpus | str | Path | None, options: AskingOptions, seed: str) -> Setup:
        """Load the model and find, or make, its evaluation set.

        Args:
            model: As in `acgpt.evaluate`.
            corpus: Likewise.
            options: Which set is meant, and how the model is loaded.
            seed: Which of the options is the seed of the conditioning sets.
        """
        method = None if options.method is None else method_of(options.method)
        chosen = {"split": options.split, "r_max": options.r_max, "length": options.length}
        chosen |= {"seed": getattr(options, seed)}
        training = training_distribution(options.conditioning, options.r_max)
        opened = opened_corpus(corpus)
        lm, name, adapter = opened_model(model, options.adapter, options.device, options.dtype)
        sets = None if options.dataset is None else Path(options.dataset)
        evaluation_set, path, new = find_set(opened, sets, chosen, options.limit, training, lm, seed)
        return cls(lm, name, adapter, opened, evaluation_set, path, new, method)

    @property
    def about(self) -> dict[str, Any]:
        """What was asked of what, for the record."""
        folder = None if self.corpus is None else str(self.corpus.folder)
        return {"model": self.name, "adapter": self.adapter, "corpus": folder}

    def check(self, tokenizer: str, note: Callable[[str], object]) -> None:
        """Refuse a model of another tokenizer; note one that was trained with another r_max."""
        self.evaluation_set.require_tokenizer(tokenizer)
        if (words := other_r_max(self.evaluation_set, self.lm)) is not None:
            note(words)


def opened_model(
    model: Source, adapter: str | Path | Literal[False] | None, device: str, dtype: str
) -> tuple[LanguageModel, str, str | None]:
    """The model, loaded if it is named; its name and its adapter's, for the record."""
    if isinstance(model, LanguageModel):
        if adapter is not None or (device, dtype) != ("auto", "auto"):
            raise InputError("adapter, device and dtype are for a model that is named: this one is loaded already.")
        return model, model.model.name_or_path or type(model.model).__name__, "+".join(model.adapters) or None
    lm = load(model, adapter, device, dtype)
    in_use = str(adapter) if adapter else DEFAULT if is_default(model) else None
    return lm, str(model), in_use if lm.adapters else None


def opened_corpus(corpus: Corpus | str | Path | None) -> Corpus | None:
    """The corpus, opened if it is named."""
    return corpus if corpus is None or isinstance(corpus, Corpus) else Corpus.open(corpus)


def training_distribution(distribution: Distribution, r_max: float | None) -> Conditioning | Literal["model"] | None:
    """The training distribution that was named; `OWN` is for `find_set` to ask the model.

    Args:
        distribution: An object, its keys as in a recipe, the same as YAML or JSON, or "model".
        r_max: Counts where the keys name none.
    """
    if distribution is None or isinstance(distribution, Conditioning):
        return distribution
    if isinstance(distribution, str) and distribution.strip() == OWN:
        if r_max is not None:
            raise InputError(f"`conditioning={OWN}` takes r_max from the model: leave `r_max={r_max:g}` out.")
        return OWN
    try:
        content = yaml.safe_load(distribution) if isinstance(distribution, str) else dict(distribution)
    except yaml.YAMLError as error:
        raise InputError(f"`conditioning` is not YAML: {' '.join(str(error).split())}.") from error
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
    seed: str = "seed",
) -> tuple[EvaluationSet, Path, bool]:
    """The evaluation set that is meant, its file, and whether it still has to be saved there.

    Args:
        corpus: What it is made of.
        sets: The file that was named for it, if one was.
        chosen: `split`, `r_max`, `length` and `seed`, `None` where the user left them open.
        limit: On the number of texts.
        training: The training distribution, if the user named one; `OWN` is that of the model.
        lm: The model, which also says how many tokens a text can have.
        seed: The name of the option that is `seed` here, for errors.
    """
    if training == OWN:
        training = own_conditioning(lm.metadata)
    if corpus is None and sets is None:
        raise InputError("name a corpus (see acgpt prepare), or the file of an evaluation dataset (`dataset`).")
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
                named = seed if name == "seed" else name
                raise InputError(
                    f"{sets} has {name} {has[name]}, not {value}: leave out `{named}`, or name another set."
                )
        return (found if limit is None else found.head(limit)), sets, False
    assert corpus is not None
    split, length = "test" if "test" in corpus.splits else "validation", min(LENGTH, lm.positions - 1)
    how: dict[str, Any] = {"split": split, "length": length}
    for part in () if training is None else training.parts:
        if isinstance(part, Sized):  # then infilling gives as much as training does
            how.setdefault("r_max", part.r_max)
    how |= {name: value for name, value in chosen.items() if value is not None}
    return find_or_build(corpus, SetChoice(limit=limit, training=training, **how), sets)


def choose_method(forced: Method | str | None, lm: LanguageModel) -> Method:
    """The model's own method, unless another was asked for; a warning if the model has not learned that one.

    Raises:
        InputError: The model is not a causal one, which any other method would take it for.
    """
    forced = method_of(forced) if isinstance(forced, str) else forced
    own = model_method(lm.metadata)
    if forced is not None and forced.name != own.name:
        if not own.drawn:
            raise InputError(
                f"`method={forced.name}`: the model is of method {own.name}, and no other: leave `method` out."
            )
        if forced.reads_future:
            warnings.warn(
                f"the model does not say that it was trained with {forced.name}: expect bad answers wherever the "
                "future is read.",
                stacklevel=2,
            )
    return forced or own


def other_r_max(evaluation_set: EvaluationSet, lm: LanguageModel) -> str | None:
    """What a user should know, before hours are spent, of a model that is asked at another r_max than its own."""
    asked, own = evaluation_set.origin.r_max, own_r_max(lm.metadata)
    if own is None or own == asked:
        return None
    return (
        f"asked at r_max {asked:g}, and the model was trained with r_max {own:g}, by its acgpt.json. "
        f"`conditioning={OWN}` asks it as it was trained."
    )


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
        raise ModelError(f"torch.compile fails here ({reason[0].strip(' .:')}): leave `compiled` out.") from error
