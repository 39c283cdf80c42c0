"""The five evaluation modes of section 4.1 of the paper: what is given, what is asked, and whether the future is read.

                            The  cat  sat  on   the  mat        ● given   ? asked   · read, but not scored
    unconditional            ?    ?    ?    ?    ?    ?         nothing is given, everything is asked
    infilling                ●    ?    ?    ?    ?    ●         both ends are given, the middle is asked
    training                 ?    ●    ●    ?    ?    ●         blocks are given, as in training
    infilling-no-future      ·    ?    ?    ?    ?    ·         what infilling asks, from the past alone
    training-no-future       ?    ·    ·    ?    ?    ·         what training asks, from the past alone

Without the future, the given tokens that stand before an asked one are read and those after it are not. That is
reading the text from left to right with nothing given, and counting only the tokens that the mode asks: one
unconditional pass serves all three modes that need no future. (Tokens that are unknown stay so.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from acgpt.errors import InputError
from acgpt.query.conditioning import ASKED, GIVEN, Blocks, Conditioning, Empty, Infilling


@dataclass(frozen=True)
class Mode:
    """One way to evaluate.

    Args:
        name: In code, in JSON and on the command line.
        title: In the paper.
        conditioning: Which of the `distributions` its conditioning sets come from.
        future: Is a token predicted from given tokens after it?
    """

    name: str
    title: str
    conditioning: str
    future: bool

    def shown(self, roles: np.ndarray) -> np.ndarray:
        """The roles under which a model answers for this mode, from those that were drawn.

        All that is asked is asked here too; without the future, so is all that is given. Modes that show the same
        share a pass.
        """
        return roles if self.future else np.where(roles == GIVEN, np.int8(ASKED), roles)


MODES = {
    mode.name: mode
    for mode in (  # in the order of the paper's tables
        Mode("unconditional", "Unconditional", "empty", future=False),
        Mode("infilling", "Infilling", "infilling", future=True),
        Mode("training", "Training distribution", "training", future=True),
        Mode("infilling-no-future", "Infilling (no future)", "infilling", future=False),
        Mode("training-no-future", "Training distribution (no future)", "training", future=False),
    )
}
WITHOUT_FUTURE = {"infilling": "infilling-no-future", "training": "training-no-future"}  # the same tokens are asked


def distributions(r_max: float, training: Conditioning | None = None) -> dict[str, Conditioning]:
    """The distributions that modes draw their conditioning sets from, by name.

    Args:
        r_max: The largest share of a text that is given (r_min is 0).
        training: The training distribution, by default that of the paper's experiments: b_min = 1, b_max = |x_c|.
    """
    return {
        "empty": Conditioning((Empty(),)),
        "infilling": Conditioning((Infilling(r_max=r_max),)),  # f_min = 0.2, f_max = 0.8
        "training": Conditioning((Blocks(r_max=r_max),)) if training is None else training,
    }


def modes_named(names: Sequence[str] = ()) -> list[Mode]:
    """The modes of these names in the paper's order; all five for no names."""
    for name in names:
        if name not in MODES:
            raise InputError(f"there is no mode {name!r}; the modes are {', '.join(MODES)}.")
    return [mode for mode in MODES.values() if not names or mode.name in names]
