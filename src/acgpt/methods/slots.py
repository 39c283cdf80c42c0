"""Slots: a batch of texts as a network is shown them in training, whatever the method.

Two kinds of slots carry all methods, and the attention kernels know no others (see `layout` for the drawing):

    copies   see every copy of their text: attention in both directions
    text     sees every copy, and causally itself

                 copies                            text                             predicts
    GPT          –                                 BOS, x                           the next token, at the text
    AC-GPT       what is given                     BOS, x                           the next token, at the text
    σ-GPT        –                                 BOS, then x in another order     the token it is told to aim at
    FIM          –                                 BOS, prefix, suffix, middle      the next token, at the text
    MLM,         BOS and x, what is asked masked   one slot that nobody reads       its own token, at the copies
    diffusion

`Slots` are numpy arrays, because they are made by the workers that feed a GPU; `batches.fill` makes tensors of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from acgpt.errors import InputError
from acgpt.query.conditioning import ASKED, GIVEN, UNKNOWN


@dataclass(frozen=True)
class Slots:
    """B texts, packed as `[copies of all | text of all]`; C copies and L text slots in all, A predictions."""

    copy_ids: np.ndarray  # (C,) token ids
    copy_positions: np.ndarray  # (C,)
    n_copies: np.ndarray  # (B,) how many copies each text has
    text_ids: np.ndarray  # (L,)
    text_positions: np.ndarray  # (L,)
    n_texts: np.ndarray  # (B,) how many text slots each text has, at least one
    rows: np.ndarray  # (A,) the slots that predict, counted over `[copies | text]`
    targets: np.ndarray  # (A,) the token ids that they predict
    asked: int  # what the summed loss is divided by: how many tokens are asked
    aims: np.ndarray | None = None  # (L,) the position that a slot is told to predict, where a network wants to know
    weights: np.ndarray | None = None  # (A,) of each prediction in the loss; by default 1


def copies_and_text(tokens: np.ndarray, roles: np.ndarray, *, bos: int, mask: int | None) -> Slots:
    """AC-GPT's slots, and with nothing given GPT's: a copy of what is given, BOS, and the text but its last token.

    Args:
        tokens: (B, T) token ids.
        roles: (B, T) `GIVEN`, `ASKED` or `UNKNOWN`.
        bos: The token at position 0.
        mask: The token that stands for unknown ones.
    """
    count, length = tokens.shape
    if mask is None and (roles == UNKNOWN).any():
        raise InputError("unknown tokens are fed as the MASK token, and the tokenizer names none.")
    given, asked = roles == GIVEN, roles == ASKED
    body = tokens if mask is None else np.where(roles == UNKNOWN, mask, tokens)
    copy_ids = tokens[given]
    return Slots(
        copy_ids=copy_ids,
        copy_positions=np.nonzero(given)[1] + 1,
        n_copies=given.sum(1),
        text_ids=np.concatenate([np.full((count, 1), bos), body[:, :-1]], axis=1).ravel(),
        text_positions=np.tile(np.arange(length), count),
        n_texts=np.full(count, length),
        rows=len(copy_ids) + np.flatnonzero(asked),
        targets=tokens[asked],
        asked=int(asked.sum()),
    )
