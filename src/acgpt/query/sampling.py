"""How tokens are drawn: the options, declared once for Python, the command line, recipes and the server."""

from __future__ import annotations

import math
from dataclasses import dataclass

from acgpt.common.options import Options, declared, documented, option

GREEDY = 1e-6  # lower temperatures count as 0: dividing by them would overflow


@documented
@dataclass(frozen=True, kw_only=True)
class SamplingOptions(Options):
    """How tokens are drawn."""

    temperature: float = option(
        "Sampling temperature: 1 is the model's own distribution, 0 takes the likeliest tokens. Default: 1.",
        1.0,
        metavar="X",
        minimum=0,
        below=math.inf,
        words="0 (greedy) or above, and finite",
    )
    top_p: float = option(
        "Nucleus sampling: draw from the likeliest tokens whose probabilities sum to P. Default: 1, from all.",
        1.0,
        metavar="P",
        above=0,
        maximum=1,
    )
    top_k: int | None = option("Draw from the K likeliest tokens. Default: from all.", metavar="K", minimum=1)
    seed: int | None = option(
        "Seed of the noise: the same seed gives the same samples of a query, alone or in any batch, up to rounding. "
        "Default: a new one, recorded with the answer.",
        metavar="N",
        flags=("--seed", "-s"),
    )

    @property
    def greedy(self) -> bool:
        """Whether the likeliest tokens are taken."""
        return self.temperature < GREEDY


@documented
@dataclass(frozen=True, kw_only=True)
class Sampling(SamplingOptions):
    """How the engine draws tokens."""

    seed: int = declared(SamplingOptions, "seed", default=0)
    first: int = option(
        "Number of the first sample to draw, from 0: samples 4 and 5 are n = 2 with first = 4.", 0, minimum=0
    )
