"""MAUVE (Pillutla et al., 2021) by the authors' own package, mauve-text, from features that are computed here.

The package is GPL and takes seconds to import, so it is an extra, and is imported when a score is computed and not
before. Its k-means begins at random: a score is the mean over several seeds, with their standard deviation.
"""

from __future__ import annotations

import importlib
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from acgpt.errors import InputError

if TYPE_CHECKING:
    import numpy as np

PAPER = "gpt2-large"  # the model whose features the paper has

SETTINGS = {
    "kmeans_max_iter": 500,  # these two as in the paper
    "kmeans_num_redo": 5,
    "kmeans_explained_var": 0.9,  # and these as the package has them
    "mauve_scaling_factor": 5,
    "divergence_curve_discretization_size": 25,
}
FEWEST = 10  # texts on either side: there are a tenth as many clusters
FEW = 100  # below, chance decides
FEW_A_CLUSTER = b"WARNING clustering "


def package(otherwise: str = "`no_mauve` leaves it out and measures the rest.") -> Any:
    """mauve-text, or how to get it, and how to do without it."""
    try:
        return importlib.import_module("mauve")
    except ImportError as error:
        raise InputError(
            "MAUVE is computed by the package mauve-text, which is not installed: pip install 'acgpt[mauve]'. "
            + otherwise
        ) from error


def scores(generated: np.ndarray, reference: np.ndarray, seeds: Sequence[int]) -> dict[str, Any]:
    """MAUVE of features, (texts, dimensions) each.

    Args:
        generated: P.
        reference: Q.
        seeds: Of k-means, a score each.

    Returns:
        mean, std (of a sample; `None` for one seed), scores and smoothed (MAUVE*, whose histograms have half a text
        more in every cluster) by seed, seeds, clusters, settings, and the package's version.

    Raises:
        InputError: There are too few texts, or the package is not installed.
    """
    check_counts(len(generated), len(reference))
    compute = package().compute_mauve
    found = []
    for seed in seeds:
        with quiet():
            found.append(compute(p_features=generated, q_features=reference, seed=seed, device_id=-1, **SETTINGS))
    values = [float(each.mauve) for each in found]
    return {
        "mean": statistics.fmean(values),
        "std": statistics.stdev(values) if len(values) > 1 else None,
        "scores": values,
        "smoothed": [float(each.mauve_star) for each in found],
        "seeds": list(seeds),
        "clusters": int(found[0].num_buckets),
        "settings": SETTINGS,
        "mauve_text": version("mauve-text"),
    }


def check_counts(generated: int, reference: int) -> None:
    """Are there enough texts on either side?

    Raises:
        InputError: There are not.
    """
    draw, find = "draw more of them", "take another split or, of few long documents, rule windows"
    for name, count, remedy in (("generated texts", generated, draw), ("texts of reference", reference, find)):
        if count < FEWEST:
            raise InputError(f"there are {count} {name}, and MAUVE takes at least {FEWEST}: {remedy}.")


@contextmanager
def quiet() -> Iterator[None]:
    """Without the word that k-means has for so few texts a cluster, which its library writes past Python."""
    sys.stderr.flush()
    saved = os.dup(2)
    with TemporaryFile() as written:
        try:
            os.dup2(written.fileno(), 2)
            yield
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)
            written.seek(0)
            for line in written:
                if FEW_A_CLUSTER not in line:
                    os.write(2, line)
