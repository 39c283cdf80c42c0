"""The setup shared by `evaluate` and `generate`: the model, the evaluation dataset and the method."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from acgpt.common.notation import read_notation
from acgpt.data.corpus import Corpus
from acgpt.errors import InputError, ModelError
from acgpt.evaluation.dataset import (
    LENGTH,
    EvaluationDataset,
    dataset_of_corpus,
    trained_conditioning,
    trained_r_max,
    trained_r_maxes,
)
from acgpt.evaluation.options import AskingOptions
from acgpt.methods import Method, method_of
from acgpt.models.language_model import LanguageModel
from acgpt.models.loading import is_default, load
from acgpt.models.metadata import DEFAULT, model_method, tokenizer_hash
from acgpt.query.conditioning import Conditioning, Sized

OWN: Literal["model"] = "model"  # value of `conditioning` that stands for the model's own
Source = LanguageModel | str | Path
Distribution = Conditioning | Mapping[str, Any] | str | None


@dataclass(frozen=True)
class Setup:
    """A model, how it is asked, and the evaluation dataset that it is asked.

    Args:
        lm: The model.
        method: How it is asked, with the user's options.
        evaluation_dataset: The evaluation dataset. If it is new, `keep` it once all is known to be right.
        about: Names of the model, adapter and corpus, for results.
    """

    lm: LanguageModel
    method: Method
    evaluation_dataset: EvaluationDataset
    about: Mapping[str, str | None]

    @classmethod
    def load(
        cls,
        model: Source,
        corpus: Corpus | str | Path | None,
        options: AskingOptions,
        seed: str,
        note: Callable[[str], object],
    ) -> Setup:
        """Load the model, and load or build the evaluation dataset.

        Args:
            model: See `acgpt.evaluate`.
            corpus: See `acgpt.evaluate`.
            options: Settings of the dataset, of loading and of the method.
            seed: Name of the option that is the seed of the conditioning sets.
            note: Called with a message if the model was trained with another r_max.
        """
        method = None if options.method is None else method_of(options.method)
        training = training_distribution(options.conditioning, options.r_max)
        opened = corpus if corpus is None or isinstance(corpus, Corpus) else Corpus.open(corpus)
        lm, name, adapter = resolve_model(model, options.adapter, options.device, options.dtype)
        dataset = find_dataset(opened, options, training, lm, seed)
        dataset.require_tokenizer(tokenizer_hash(lm.tokenizer))
        if (message := r_max_mismatch(dataset, lm)) is not None:
            note(message)
        about = {"model": name, "adapter": adapter, "corpus": None if opened is None else str(opened.folder)}
        return cls(lm, choose_method(method, lm).configured(options.options or {}), dataset, about)

    @property
    def result(self) -> dict[str, Any]:
        """The entries that all results have."""
        return {
            "set": {**self.evaluation_dataset.as_dict(), "path": str(self.evaluation_dataset.path)},
            "trained_r_max": trained_r_max(self.lm.metadata),
            "trained_r_maxes": trained_r_maxes(self.lm.metadata),
        }


def resolve_model(
    model: Source, adapter: str | Path | Literal[False] | None, device: str, dtype: str
) -> tuple[LanguageModel, str, str | None]:
    """Return the model, loaded if it is a name or path, and the names of the model and its adapter."""
    if isinstance(model, LanguageModel):
        if adapter is not None or (device, dtype) != ("auto", "auto"):
            raise InputError("adapter, device and dtype cannot be set for a loaded model: pass its name or path.")
        return model, model.model.name_or_path or type(model.model).__name__, "+".join(model.adapters) or None
    lm = load(model, adapter, device, dtype)
    in_use = str(adapter) if adapter else DEFAULT if is_default(model) else None
    return lm, str(model), in_use if lm.adapters else None


def training_distribution(distribution: Distribution, r_max: float | None) -> Conditioning | Literal["model"] | None:
    """Return the training distribution that the option `conditioning` describes; `find_dataset` resolves `OWN`.

    Args:
        distribution: A `Conditioning`, its keys as in a recipe (a mapping, YAML or JSON), or "model".
        r_max: Used if the keys have no r_max.
    """
    if distribution is None or isinstance(distribution, Conditioning):
        return distribution
    if isinstance(distribution, str) and distribution.strip() == OWN:
        if r_max is not None:
            raise InputError(f"`conditioning={OWN}` takes r_max from the model: omit `r_max={r_max:g}`.")
        return OWN
    content = read_notation(distribution, "`conditioning`") if isinstance(distribution, str) else distribution
    if isinstance(content, Mapping) and "parts" not in content and r_max is not None:
        content = {"r_max": r_max, **content}
    return Conditioning.from_dict(content)


def find_dataset(
    corpus: Corpus | None,
    options: AskingOptions,
    training: Conditioning | Literal["model"] | None,
    lm: LanguageModel,
    seed: str,
) -> EvaluationDataset:
    """Return the requested evaluation dataset, which has a file.

    Args:
        corpus: The corpus.
        options: Settings of the dataset.
        training: The training distribution, if the user set one; `OWN` is the model's.
        lm: The model; its positions limit the default length.
        seed: Name of the option that is the seed of the conditioning sets.
    """
    sets, limit = None if options.dataset is None else Path(options.dataset), options.limit
    requested = {"split": options.split, "r_max": options.r_max, "length": options.length}
    requested |= {"seed": getattr(options, seed)}
    if training == OWN:
        training = trained_conditioning(lm.metadata)
    if corpus is None and sets is None:
        raise InputError("pass a corpus (see acgpt prepare), or the file of an evaluation dataset (`dataset`).")
    if sets is not None and (corpus is None or sets.exists()):
        dataset = EvaluationDataset.load(sets)
        if corpus is not None and corpus.hash != dataset.origin.corpus_hash:
            raise InputError(
                f"{sets} is not an evaluation dataset of {corpus.folder}: omit the corpus, or choose another file."
            )
        actual = {**dataset.as_dict(), "conditioning": dataset.origin.conditioning}
        conditioning = None if training is None else training.as_dict()
        for name, value in {**requested, "conditioning": conditioning}.items():
            if value is not None and value != actual[name]:
                option = seed if name == "seed" else name
                raise InputError(
                    f"{sets} has {name} {actual[name]}, not {value}: omit `{option}`, or choose another file."
                )
        return dataset if limit is None else dataset.head(limit)
    assert corpus is not None
    split, length = "test" if "test" in corpus.splits else "validation", min(LENGTH, lm.positions - 1)
    config: dict[str, Any] = {"split": split, "length": length}
    for part in () if training is None else training.parts:
        if isinstance(part, Sized):  # infilling gets the same r_max as training
            config.setdefault("r_max", part.r_max)
    config |= {name: value for name, value in requested.items() if value is not None}
    return dataset_of_corpus(corpus, sets, limit=limit, training=training, keep=False, **config)[0]


def choose_method(forced: Method | None, lm: LanguageModel) -> Method:
    """Return the model's own method, or the one the user chose; warn if the model was not trained with it.

    Raises:
        InputError: Another method was chosen for a model that is not causal.
    """
    own = model_method(lm.metadata)
    if forced is not None and forced.name != own.name:
        if not own.drawable:  # another layout than that of ac-gpt and gpt
            raise InputError(
                f"`method={forced.name}`: the model can only be asked with its own method, {own.name}. Omit `method`."
            )
        if forced.reads_future:
            warnings.warn(
                f"the model does not say that it was trained with {forced.name}: expect bad answers in modes that read "
                "the future.",
                stacklevel=2,
            )
    return forced or own


def r_max_mismatch(evaluation_dataset: EvaluationDataset, lm: LanguageModel) -> str | None:
    """Return a note for the user if the dataset has another r_max than the model was trained with."""
    asked, trained = evaluation_dataset.origin.r_max, trained_r_maxes(lm.metadata)
    if trained is None or asked == next(iter(trained), 0.0):
        return None
    values = ", ".join(f"{r_max:g}" for r_max in trained or [0])
    return (
        f"asked at r_max {asked:g}, but the model was trained with r_max {values}, by its acgpt.json. "
        f"`conditioning={OWN}` asks it as it was trained, of a mixture as in the first part."
    )


@contextmanager
def compile_errors(compiled: bool) -> Iterator[None]:
    """Turn errors of torch.compile inside the context into a `ModelError` with a remedy."""
    try:
        yield
    except Exception as error:
        if not compiled or not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            raise
        inner = getattr(error, "inner_exception", error)  # the compiler's own message, without the path to it
        reason = str(inner).strip().splitlines() or [type(inner).__name__]
        raise ModelError(f"torch.compile fails here ({reason[0].strip(' .:')}): omit `compiled`.") from error
