"""The five evaluation modes of section 4.1 of the paper: given tokens, asked tokens, and whether the future is read.

                            The  cat  sat  on   the  mat        ● given   ? asked   · read, but not scored
    unconditional            ?    ?    ?    ?    ?    ?         nothing is given, everything is asked
    infilling                ●    ?    ?    ?    ?    ●         both ends are given, the middle is asked
    training                 ?    ●    ●    ?    ?    ●         blocks are given, as in training
    infilling-no-future      ·    ?    ?    ?    ?    ·         the tokens asked by infilling, from the past alone
    training-no-future       ?    ·    ·    ?    ?    ·         the tokens asked by training, from the past alone

Without the future, given tokens before an asked one are read and those after it are not. This is the same as reading
the text from left to right with nothing given, and counting only the tokens that the mode asks. One unconditional pass
therefore serves all three modes without future. (Unknown tokens stay unknown.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from acgpt.errors import InputError
from acgpt.query.conditioning import ASKED, GIVEN, Blocks, Conditioning, Empty, Infilling


@dataclass(frozen=True)
class Mode:
    """An evaluation mode.

    Args:
        name: Name in code, in JSON and on the command line.
        title: Name in the paper.
        conditioning: Name of the distribution of its conditioning sets, a key of `distributions`.
        future: Whether a token is predicted from given tokens after it.
    """

    name: str
    title: str
    conditioning: str
    future: bool

    def model_roles(self, roles: np.ndarray) -> np.ndarray:
        """Return the roles that the model sees in this mode, from the roles that were drawn.

        Without the future, given tokens become asked. Modes with the same result share a pass.
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
WITHOUT_FUTURE = {"infilling": "infilling-no-future", "training": "training-no-future"}  # ask the same tokens


def distributions(r_max: float, training: Conditioning | None = None) -> dict[str, Conditioning]:
    """Return the distributions of the modes' conditioning sets, by name.

    Args:
        r_max: Largest share of a text that is given (r_min is 0).
        training: The training distribution. Default: that of the paper's experiments, b_min = 1 and b_max = |x_c|.
    """
    return {
        "empty": Conditioning((Empty(),)),
        "infilling": Conditioning((Infilling(r_max=r_max),)),  # f_min = 0.2, f_max = 0.8
        "training": Conditioning((Blocks(r_max=r_max),)) if training is None else training,
    }


def modes_named(names: Sequence[str] = ()) -> list[Mode]:
    """Return the modes of these names in the paper's order; all five if there are no names."""
    for name in names:
        if name not in MODES:
            raise InputError(f"there is no mode {name!r}; the modes are {', '.join(MODES)}.")
    return [mode for mode in MODES.values() if not names or mode.name in names]
