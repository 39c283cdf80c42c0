"""Training: from a recipe to a run folder.

    recipe ──► settle ──► Batches, Learner ──► AcTrainer ──► checkpoints, log ──► evaluation, model, results

Each of them is in a room of its own: `recipe`, `plan`, `batches`, `learner`, `optimizer`, `trainer`, `run_folder`,
`training_log`. Here they are put together.

A resumed run gives the same weights, bit for bit on a CPU, as one that never stopped.
"""

from __future__ import annotations

import json
import math
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from acgpt.common.provenance import versions
from acgpt.data.corpus import Corpus
from acgpt.engine.attention import matrix_products
from acgpt.engine.engine import Engine
from acgpt.errors import InputError
from acgpt.evaluation.dataset import EvaluationSet
from acgpt.evaluation.per_text import write_per_text
from acgpt.evaluation.perplexity import Evaluation, evaluate
from acgpt.methods import Method, method_of
from acgpt.models.card import write_card
from acgpt.models.metadata import Metadata
from acgpt.query.conditioning import Conditioning, Sized
from acgpt.training.batches import Batches
from acgpt.training.learner import Learner, matmul_rate
from acgpt.training.log import DURING, Log, ProgressLine, Row, board, draw_curve
from acgpt.training.networks import base_name, check_method, head_dim, make_network
from acgpt.training.plan import Plan, arguments, settle
from acgpt.training.recipe import Recipe, load_recipe, with_changes
from acgpt.training.run_folder import (
    BOARD,
    CURVE,
    LOG,
    RESULTS,
    alone,
    check_same,
    last_checkpoint,
    open_folder,
    write_json,
    writing,
)
from acgpt.training.trainer import AcTrainer, Watch

FEW = 8  # texts that are evaluated in the end, where a text takes hundreds of passes


def train(
    recipe: Recipe | str | Path,
    *,
    resume: bool = False,
    quiet: bool = False,
    minutes: float | None = None,
    **changes: Any,
) -> dict[str, Any] | None:
    """Train a model as a recipe says.

        acgpt.train("tiny-cpu", corpus="data/mine", output="runs/mine", steps=100)

    Args:
        recipe: A YAML file, the name of a recipe that comes with acgpt, or a `Recipe`; it or the changes name `corpus`
            and `output`.
        resume: Go on from the last checkpoint of the run in `output`; if it has none, or there is no such run, begin.
            A finished run is left as it is.
        quiet: Show no progress.
        minutes: Stop with a checkpoint when training has taken so long, to be resumed later. So do SIGTERM, which
            schedulers send before they end a job, and Ctrl-C; a second Ctrl-C does not wait for the checkpoint. Before
            the first step has ended there is nothing to save, and both stop at once.
        **changes: Keys of the recipe and their values, as in `load_recipe`: steps=100. A mapping replaces the recipe's;
            **{"conditioning.r_max": 0.4} changes one key in it.

    Returns:
        The contents of the run's `results.json`; `None` if the run was stopped before its end.

    Raises:
        InputError: Something that the user can mend.
        OutputError: The run's folder cannot be written. The last checkpoint stays, and can be resumed from.
    """
    if minutes is not None and not minutes > 0:
        raise InputError(f"the minutes that training may take must be above 0, not {minutes}.")
    recipe = loaded(recipe, changes)
    end = math.inf if minutes is None else time.monotonic() + 60 * minutes
    for name in ("corpus", "output"):
        if not getattr(recipe, name):
            raise InputError(f"the recipe names no {name}: add {name}=FOLDER.")
    folder = Path(recipe.output)
    if resume and (folder / RESULTS).exists():
        check_same(folder, recipe)
        finished: dict[str, Any] = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
        return finished
    check_method(recipe)
    corpus = Corpus.open(recipe.corpus)
    texts, tokenizer = corpus.tokens("train"), corpus.tokenizer()
    plan = settle(recipe, texts.chunks(recipe.length), head_dim=head_dim(recipe))
    method = method_of(recipe.method).learning_from(recipe.loss)
    conditioning = method.conditioning(recipe.distribution)
    said = Metadata(method.name, conditioning.as_dict() if method.reads_future else None)
    product = make_network(recipe, tokenizer, said, plan)
    bos, mask = product.metadata.bos_token_id or 0, product.metadata.mask_token_id
    if conditioning.hides and mask is None:
        raise InputError(
            "conditioning.unknown needs a MASK token, and the tokenizer has none: name one of its tokens with mask=…"
            + ("." if recipe.base else ", or prepare the corpus with --mask-token.")
        )
    if method.needs_mask and (mask == bos or texts.holds(mask)):
        raise InputError(
            f"mask={tokenizer.convert_ids_to_tokens(mask)}: a token that texts have, or BOS, cannot stand for what is "
            "masked, as it is never predicted. Leave mask out, or name one that no text has."
        )
    if not (conditioning.hides or method.needs_mask):  # a MASK that was never read means nothing to the network
        product.metadata = replace(product.metadata, mask_token_id=None)
    batches = Batches(
        texts, count=plan.steps * plan.parts, size=plan.micro_batch, parts=plan.parts, length=recipe.length,
        conditioning=conditioning, seed=recipe.seed, bos=bos, mask=mask, fixed=plan.compiled,
        balance=recipe.distribution, method=method,
    )  # fmt: skip
    sets = evaluation_sets(recipe, corpus, method)
    args = arguments(recipe, plan, product.model._no_split_modules or ())
    about = {
        "recipe": recipe.as_dict(), "steps": plan.steps, "processes": plan.processes, "fsdp": plan.fsdp,
        "device": plan.device, "precision": "bf16" if plan.half else "fp32", "attention": plan.attention,
        "compiled": plan.compiled, "conditioning": conditioning.as_dict(), "corpus_hash": corpus.hash,
        "tokenizer_hash": corpus.manifest["tokenizer_hash"],
        "evaluation_sets": {name: each.as_dict() for name, each in sets.items()},
        "hardware": torch.cuda.get_device_name() if plan.device == "cuda" else platform.machine(),
        "versions": versions(), "command": sys.argv,
    }  # fmt: skip
    if plan.device == "cuda":
        torch.set_float32_matmul_precision("high")
        torch.cuda.reset_peak_memory_stats()
    learner = Learner(
        product.model, backend=plan.attention, length=method.longest(recipe.length), compiled=plan.compiled,
        never=mask if method.needs_mask else None,
    )  # fmt: skip
    main = args.process_index == 0
    with alone(folder) if main else nullcontext():
        if main:
            about["sittings"] = open_folder(folder, recipe, resume, about)
        trainer = AcTrainer(learner, recipe, args, batches, product=product, fsdp=plan.fsdp)
        torch.manual_seed(
            recipe.seed + args.process_index
        )  # of dropout: processes that see other texts need other noise
        reporter = Reporter(trainer, folder, method, plan, sets.get("during"), quiet)
        trainer.add_callback(reporter)
        if not sets:
            reporter.bar.note(
                f"nothing will be evaluated: the corpus has no text for it in a split {recipe.eval_split!r}."
            )
        try:
            # Afterwards there is a checkpoint: Ctrl-C may come.
            with asked_to_stop(end, lambda: reporter.steps > 0) as reporter.asked_to_stop:
                trainer.resume(last_checkpoint(folder) if resume else None)
            return finish(trainer, reporter, sets.get("final"), about) if not reporter.stopped else None
        except NothingToSave:
            return None
        finally:
            reporter.close()


def loaded(recipe: Recipe | str | Path, changes: Mapping[str, Any]) -> Recipe:
    """The recipe with changes, from its file if it is named."""
    if not isinstance(recipe, Recipe):
        return load_recipe(recipe, changes)
    return with_changes(recipe.as_dict(), changes, "the recipe") if changes else recipe


class NothingToSave(KeyboardInterrupt):
    """A wish to stop that came before the first step had ended."""


@contextmanager
def asked_to_stop(end: float, begun: Callable[[], bool]) -> Iterator[Callable[[], bool]]:
    """Within, a function that says whether it is time to stop: the end has come, or SIGTERM or Ctrl-C has.

    Until `begun` says that there is something to save, a signal stops at once: the first step may take a minute to
    compile, or, if the signal has reached the compiler's processes as well, never end.
    """
    asked = threading.Event()

    def handle(number: int, where: Any) -> None:
        if asked.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt  # the user will not wait
        if not begun():
            raise NothingToSave
        if number == signal.SIGINT and sys.stderr.isatty():
            os.write(2, b"\nstopping after this step, with a checkpoint; Ctrl-C again: at once\n")
        asked.set()

    main = threading.current_thread() is threading.main_thread()  # only there can signals be handled
    heard = [each for each in (signal.SIGINT, signal.SIGTERM) if main and signal.getsignal(each) != signal.SIG_IGN]
    before = {each: signal.signal(each, handle) for each in heard}
    try:
        yield lambda: asked.is_set() or time.monotonic() > end
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def evaluation_sets(recipe: Recipe, corpus: Corpus, method: Method) -> dict[str, EvaluationSet]:
    """What the model is evaluated on during training and in the end; nothing where the corpus has no validation split.

    A method that takes a pass for every asked token is evaluated in the end only, and on few texts unless the recipe
    names a number.

    The training distribution of the sets is that of the recipe's first part with nothing unknown (AR mixing and the
    like belong to training alone), so that a causal twin is asked the same.
    """
    if recipe.eval_split == Recipe.eval_split and recipe.eval_split not in corpus.splits:
        return {}
    tokens, part = corpus.tokens(recipe.eval_split), recipe.distribution.parts[0]
    if not tokens.chunks(recipe.length):
        return {}
    how: dict[str, Any] = {}
    if isinstance(part, Sized):
        how = {"r_max": part.r_max, "training": Conditioning((replace(part, unknown=0.0),))}
    limits = {"during": recipe.eval_texts, "final": recipe.final_texts}
    if not method.abilities.single_pass:
        limits = {"final": FEW if recipe.final_texts is None else recipe.final_texts}
    return {
        name: EvaluationSet.build(
            tokens, tokenizer_hash=corpus.manifest["tokenizer_hash"], length=recipe.length, limit=limit, seed=0,
            corpus_hash=corpus.hash, split=recipe.eval_split, **how,
        )
        for name, limit in limits.items()
    }  # fmt: skip


# ---- while it runs, and after ---------------------------------------------------------------------------------------


class Reporter(TrainerCallback):
    """Writes the log, shows the progress and evaluates.

    Args:
        trainer: Whose run it is.
        folder: Of the run.
        method: How the model is asked.
        plan: On what it runs.
        evaluation_set: What is evaluated during training, if anything.
        quiet: Show nothing.
    """

    def __init__(
        self,
        trainer: AcTrainer,
        folder: Path,
        method: Method,
        plan: Plan,
        evaluation_set: EvaluationSet | None,
        quiet: bool,
    ) -> None:
        self.trainer, self.recipe, self.folder, self.method = trainer, trainer.recipe, folder, method
        self.evaluation_set, self.main = evaluation_set, trainer.args.process_index == 0
        self.peak = matmul_rate(plan.device)
        self.log = Log(folder / LOG, write=self.main)
        self.bar = ProgressLine(quiet or not self.main, method.bound)
        self.board: Any = None  # TensorBoard's writer, where there is one
        self.asked_to_stop: Callable[[], bool] = lambda: False  # says whether it is time to stop
        self.stopped = False
        self.steps = 0  # that this sitting has taken

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take up the log of the run so far."""
        state.save_steps, state.logging_steps = args.save_steps, args.logging_steps  # not those of before a resumption
        self.log.start(state.global_step)
        self.seconds = self.log.seconds
        self.board = board(self.folder / BOARD, state.global_step) if self.main else None
        self.bar.start(state.global_step, state.max_steps)
        self.trainer.watch = Watch()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Move the bar. A step that is evaluated or saved has a row in the log, so that a resumed log has no gap."""
        self.steps += 1
        self.bar.advance(state.global_step)
        last = state.global_step == state.max_steps
        if not last and self.stops(state.global_step):
            self.stopped = control.should_save = control.should_training_stop = True
        if last or self.stopped or self.evaluates(state) or state.global_step % self.recipe.save_every == 0:
            control.should_log = True

    def stops(self, step: int) -> bool:
        """Is it time to stop? Several processes must agree, which takes time: they ask each other now and then only."""
        if self.trainer.args.world_size == 1:
            return self.asked_to_stop()
        if step % self.recipe.log_every:
            return False
        votes = torch.tensor(float(self.asked_to_stop()), device=self.trainer.args.device)
        return bool(self.trainer.accelerator.reduce(votes, "sum") > 0)

    def evaluates(self, state: Any) -> bool:
        """Is the model evaluated after this step?"""
        every = self.recipe.eval_every if self.evaluation_set is not None else 0
        return bool(every) and (state.global_step % every == 0 or state.global_step == state.max_steps)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        """A row of the log."""
        if not logs or "loss" not in logs:
            return
        watch, step, batch = self.trainer.watch, state.global_step, self.recipe.batch
        for name in ("loss", "grad_norm"):
            if not math.isfinite(logs[name]):
                raise InputError(
                    f"{name} is {logs[name]} at step {step}: training has diverged. Lower lr or muon_lr, or lengthen "
                    "warmup."
                )
        took = time.perf_counter() - watch.since
        self.seconds += took
        row: Row = {
            "step": step,
            "loss": logs["loss"],
            "learning_rate": logs["learning_rate"],
            "grad_norm": logs["grad_norm"],
            "texts": step * batch,
            "tokens": step * batch * self.recipe.length,
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round(watch.steps * batch * self.recipe.length / took, 1),
            "mfu": round(watch.flops / took / self.peak, 4),
            "wait": round(watch.waited / took, 4),
        }
        if self.evaluates(state):
            assert self.evaluation_set is not None
            answers = self.measure(self.evaluation_set, DURING).modes
            row |= {mode: round(answer.perplexity, 4) for mode, answer in answers.items() if answer is not None}
        self.log.append(row)
        self.bar.show(row)
        if self.board is not None:
            for name in row.keys() - {"step"}:
                self.board.add_scalar(name, row[name], step)
        self.trainer.watch = Watch()  # the time of an evaluation is not training's

    def measure(self, evaluation_set: EvaluationSet, modes: tuple[str, ...] = ()) -> Evaluation:
        """The network as it is now, on every process alike."""
        said = self.trainer.product.metadata
        with self.trainer.whole() as network, matrix_products("highest"):  # as for those who evaluate it later
            engine = Engine(network, bos=said.bos_token_id or 0, mask=said.mask_token_id)
            return evaluate(self.method, engine, evaluation_set, modes=modes, progress=self.bar.evaluated)

    def close(self) -> None:
        """Put everything away."""
        self.bar.stop()
        if self.board is not None:
            self.board.close()
            self.board = None


def finish(
    trainer: AcTrainer, reporter: Reporter, final_set: EvaluationSet | None, about: Mapping[str, Any]
) -> dict[str, Any]:
    """The last evaluation, the model, the curve and the results."""
    recipe, log, folder, evaluation = trainer.recipe, reporter.log, reporter.folder, None
    trainer.round()
    if final_set is not None:
        reporter.bar.note(f"evaluating on {len(final_set)} texts")
        evaluation = reporter.measure(final_set)
    place = folder / trainer.product.place
    parameters = trainer.export(place)
    tokens = trainer.state.global_step * recipe.batch * recipe.length
    results = {
        "folder": str(folder),
        "model": str(place),
        "steps": trainer.state.global_step,
        "texts": trainer.state.global_step * recipe.batch,
        "tokens": tokens,
        "parameters": parameters,
        "loss": log.rows[-1]["loss"],
        "seconds": round(log.seconds, 3),
        "tokens_per_second": round(tokens / log.seconds, 1) if log.seconds else None,
        "wait": log.wait,
        "memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if about["device"] == "cuda" else None,
        "evaluation": None if evaluation is None else evaluation.as_dict(),
        **about,
    }
    if reporter.main:
        draw_curve(log.rows, folder / CURVE)
        with writing(place):
            write_card(place, results | {"base_model": base_name(recipe)}, name=folder.name)
        if evaluation is not None:
            with writing(folder):
                write_per_text(folder / RESULTS, evaluation.per_text)
        write_json(folder / RESULTS, results)
    trainer.accelerator.wait_for_everyone()
    return results
