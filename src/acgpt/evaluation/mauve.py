"""MAUVE (Pillutla et al., 2021), computed by the authors' package mauve-text from our features.

The package is GPL and takes seconds to import. It is therefore an optional dependency, imported only when a score is
computed. Its k-means has a random initialisation: a score is the mean over several seeds, with a standard deviation.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from acgpt.errors import InputError

if TYPE_CHECKING:
    import numpy as np

PAPER = "gpt2-large"  # the model of features in the paper

SETTINGS = {
    "kmeans_max_iter": 500,  # this and the next as in the paper
    "kmeans_num_redo": 5,
    "kmeans_explained_var": 0.9,  # this and the next two are the package's defaults
    "mauve_scaling_factor": 5,
    "divergence_curve_discretization_size": 25,
}
MIN_TEXTS = 10  # least number of texts on either side: there are a tenth as many clusters
FEW = 100  # with fewer texts, the score is mostly noise


def package(otherwise: str = "`no_mauve` computes everything else.") -> Any:
    """Import mauve-text.

    Args:
        otherwise: Last sentence of the error: what can be done without the package.

    Raises:
        InputError: The package is not installed.
    """
    try:
        return importlib.import_module("mauve")
    except ImportError as error:
        raise InputError(
            "MAUVE needs the package mauve-text, which is not installed: pip install 'acgpt[mauve]'. " + otherwise
        ) from error


def scores(generated: np.ndarray, reference: np.ndarray, seeds: Sequence[int]) -> dict[str, Any]:
    """Compute MAUVE from features.

    Args:
        generated: (texts, dimensions) features of the generated texts, P.
        reference: (texts, dimensions) features of the reference texts, Q.
        seeds: Seeds of k-means; one score each.

    Returns:
        mean, std (sample standard deviation; `None` for one seed), scores and smoothed by seed (MAUVE*, whose
        histograms have half a text more in every cluster), seeds, clusters, settings, and the package's version.

    Raises:
        InputError: There are too few texts, or the package is not installed.
    """
    check_counts(len(generated), len(reference))
    compute = package().compute_mauve
    features = {"p_features": generated, "q_features": reference}
    results = [compute(**features, seed=seed, device_id=-1, **SETTINGS) for seed in seeds]
    values = [float(result.mauve) for result in results]
    return {
        "mean": statistics.fmean(values),
        "std": statistics.stdev(values) if len(values) > 1 else None,
        "scores": values,
        "smoothed": [float(result.mauve_star) for result in results],
        "seeds": list(seeds),
        "clusters": int(results[0].num_buckets),
        "settings": SETTINGS,
        "mauve_text": version("mauve-text"),
    }


def check_counts(generated: int, reference: int) -> None:
    """Check that there are enough texts on either side.

    Raises:
        InputError: There are too few.
    """
    more, other = "generate more", "use another split or, if the documents are few and long, the rule windows"
    for name, count, remedy in (("generated texts", generated, more), ("reference texts", reference, other)):
        if count < MIN_TEXTS:
            raise InputError(f"there are {count} {name}, but MAUVE needs at least {MIN_TEXTS}: {remedy}.")
