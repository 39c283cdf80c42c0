"""Rows that join and leave a decoding while it goes on."""

from __future__ import annotations

from models import random_query


def join_and_leave(decoding, turns):
    """Let two rows join every third turn until turn 20, and let those that are done leave every fourth turn.

    Returns:
        The 14 rows, all done, and whether steps were captured.
    """
    finished, captured = [], False
    for turn in range(turns):
        if turn < 20 and turn % 3 == 0:
            decoding.prefill([random_query(turn + number, 5 + 4 * turn) for number in range(2)])
        decoding.step()
        captured = captured or bool(decoding.decoder.graphs)
        if turn % 4 == 3:  # often several at a time
            done = [row for row in decoding.rows if row.done]
            finished += done
            decoding.release(done)
    while any(not row.done for row in decoding.rows):
        decoding.step()
    finished += decoding.rows
    assert len(finished) == 14
    return finished, captured
