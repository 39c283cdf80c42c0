"""The first questions of a server, its own: a GPU compiles and captures kernels before a client asks.

Triton keeps what it has compiled on disk, so this takes long on the first start on a machine only.
"""

from __future__ import annotations

from typing import Any

from acgpt.common.options import ignore
from acgpt.errors import QueryError, TemplateError, log_failure
from acgpt.models.ask import Ask, FillAsk, SampleAsk, ScoreAsk, StreamAsk
from acgpt.models.language_model import LanguageModel
from acgpt.models.scheduler import Counts, Scheduler

ROUNDS = 2  # what comes a second time is captured
SAMPLINGS: tuple[dict[str, Any], ...] = ({}, {"top_p": 0.9}, {"top_k": 40}, {"temperature": 0.0})  # a kernel for each


def warm_up(lm: LanguageModel, scheduler: Scheduler) -> int:
    """Let a scheduler answer a few short questions of every kind. What a model cannot answer is left out.

    Returns:
        Number of questions that were answered.
    """
    answered = 0
    for ask in questions(lm) * ROUNDS:
        try:
            search = lm.searches.stream(ask, ignore) if isinstance(ask, StreamAsk) else lm.searches.of(ask)
            scheduler.submit(search).future.result()
            answered += 1
        except (QueryError, TemplateError):
            continue  # not a question for this model
        except Exception as error:  # clients will be told
            log_failure(error)
    scheduler.counts = Counts()  # of clients' questions
    return answered


def questions(lm: LanguageModel) -> list[Ask]:
    """Return questions: scores, samples of each kind, fills of gaps."""
    after = " on the mat." if lm.reads_future else ""
    word, gap = "The cat{{ sat}}" + after, "The cat {{_}}" + after
    samples = [SampleAsk(word, seed=0, **sampling) for sampling in SAMPLINGS]
    return [ScoreAsk(word), *samples, StreamAsk(gap, max_tokens=4, seed=0), FillAsk(gap, n=1, max_tokens=4, seed=0)]
