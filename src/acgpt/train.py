"""Training: from a recipe to a run folder, on Hugging Face's Trainer.

    RUN/
      config.json      the whole recipe, the corpus, the machine, versions
      log.csv          loss, learning rate, speed and perplexities, step by step
      loss.png         the same as a picture, where matplotlib is installed
      checkpoints/     what a run is resumed from; whole or not there
      model/           the trained model, a plain Hugging Face folder; written last but one
      results.json     the outcome; written last: a run that has it is finished

The Trainer brings checkpoints, accumulation, DDP and FSDP. What is ours: the batches (`batches`), the loss (`learner`),
the optimizer (`optimizer`), the log, and checkpoints that appear under their names only when they are complete.

A step's loss is the mean over all asked tokens of the whole step, over every process and accumulated batch. A resumed
run gives the same weights, bit for bit on a CPU, as one that never stopped.
"""

from __future__ import annotations

import contextlib
import csv
import json
import math
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import safetensors.torch
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import SequentialSampler
from transformers import GPTNeoXForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from acgpt import __version__
from acgpt.attention import check_model
from acgpt.batches import COUNTS, Batches
from acgpt.conditioning import Conditioning, Empty
from acgpt.corpus import Corpus
from acgpt.errors import InputError
from acgpt.evaluate import Evaluation, evaluate
from acgpt.evaluation_set import EvaluationSet
from acgpt.language_model import LanguageModel
from acgpt.learner import VOCABULARY_ALIGN, Learner, flops, matmul_rate, new_model
from acgpt.metadata import Metadata, choose_bos
from acgpt.methods import Method, method_of
from acgpt.modes import MODES
from acgpt.optimizer import build_optimizer, rate
from acgpt.recipe import Recipe, differences

CONFIG, LOG, CURVE, RESULTS, MODEL = "config.json", "log.csv", "loss.png", "results.json", "model"
CHECKPOINTS, PARTIAL = "checkpoints", "checkpoints/partial"
COLUMNS = (
    "step", "loss", "learning_rate", "grad_norm", "texts", "tokens", "seconds", "tokens_per_second", "mfu", "wait",
    *MODES,
)  # fmt: skip
DURING = ("unconditional", "training")  # the modes that are evaluated while training


class OutputError(OSError):
    """The run's folder cannot be written; what had been written stays."""


# ---- the run's folder -----------------------------------------------------------------------------------------------


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file, whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(content, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def open_folder(folder: Path, recipe: Recipe, resume: bool, about: Mapping[str, Any]) -> None:
    """Make the run's folder; or, to resume, see that it is a run of this recipe."""
    config = folder / CONFIG
    if not resume:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise InputError(f"{folder} exists: resume that run with --resume, or name another folder with output=….")
    elif config.exists():
        try:
            before = json.loads(config.read_text(encoding="utf-8"))
            changed = differences(before["recipe"], recipe.as_dict())
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{config} is damaged ({error}): this run cannot be resumed.") from error
        if changed:
            raise InputError(
                f"{folder} is a run of another recipe: {', '.join(changed)} differ. Resume with the same command, or "
                "name another folder with output=…."
            )
        if before["corpus_hash"] != about["corpus_hash"]:
            raise InputError(f"the corpus {recipe.corpus} is not the one that the run in {folder} was begun on.")
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(config, about)
    except OSError as error:
        raise OutputError(f"cannot write the run's folder {folder}: {error.strerror or error}.") from error


def last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint of a run; all that bear the name are complete."""
    found = [path for path in (folder / CHECKPOINTS).glob("checkpoint-*") if path.name[11:].isdigit()]
    return max(found, key=lambda path: int(path.name[11:]), default=None)


def versions() -> dict[str, str]:
    """What a result may depend on."""
    return {
        "acgpt": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


# ---- the Trainer ----------------------------------------------------------------------------------------------------


@dataclass
class Watch:
    """What has been done since the last line of the log."""

    steps: int = 0
    waited: float = 0.0
    flops: float = 0.0
    asked: int = 0
    since: float = field(default_factory=time.perf_counter)


class AcTrainer(Trainer):
    """Hugging Face's Trainer with our loss, optimizer, schedule and checkpoints."""

    def __init__(
        self,
        learner: Learner,
        recipe: Recipe,
        args: TrainingArguments,
        batches: Batches,
        tokenizer: Any,
        meta: Metadata,
    ) -> None:
        self.recipe, self.tokenizer, self.metadata, self.watch = recipe, tokenizer, meta, Watch()
        super().__init__(model=learner, args=args, train_dataset=batches, data_collator=only)
        self.model_accepts_loss_kwargs = True  # the loss is normalised by the step's tokens, not by its batches
        self.loss_is_scaled_for_ga = True
        self.remove_callback(PrinterCallback)

    @property
    def network(self) -> GPTNeoXForCausalLM:
        """The language model inside."""
        learner = self.accelerator.unwrap_model(self.model)
        return learner.model

    # -- a step

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """The batches of one step, and how many tokens it asks in all."""
        start = time.perf_counter()
        batches = [next(epoch_iterator) for _ in range(num_batches)]
        self.watch.waited += time.perf_counter() - start
        counts = {name: sum(batch[name] for batch in batches) for name in COUNTS}
        self.watch.flops += flops(self.network, **counts)
        self.watch.asked += counts["asked"]
        self.watch.steps += 1
        asked = torch.tensor(counts["asked"], device=device, dtype=torch.float32)
        return batches, self.accelerator.reduce(asked, "sum") if self.args.world_size > 1 else asked

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """This batch's part of the step's loss, times the processes, over which gradients are averaged."""
        loss: Tensor = model(**inputs) * (self.args.world_size / num_items_in_batch)
        return loss

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """AdamW, or Muon and AdamW."""
        r = self.recipe
        self.optimizer = build_optimizer(
            self.network, muon=r.optimizer == "muon", lr=r.lr, muon_lr=r.muon_lr, betas=r.betas,
            weight_decay=r.weight_decay,
        )  # fmt: skip
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The learning rate by step."""
        r = self.recipe
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer if optimizer is None else optimizer,
            lambda step: rate(
                step, steps=num_training_steps, warmup=r.warmup, shape=r.schedule, final=r.final_lr, cooldown=r.cooldown
            ),
        )
        self._created_lr_scheduler = True
        return self.lr_scheduler

    # -- checkpoints

    def _get_output_dir(self, trial: Any) -> str:
        return str(Path(self.args.output_dir) / PARTIAL)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """A checkpoint is written aside, and takes its name when all of it is on the disk."""
        folder, name = Path(self.args.output_dir), f"checkpoint-{self.state.global_step}"
        if self.args.should_save:
            shutil.rmtree(folder / PARTIAL, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        try:
            super()._save_checkpoint(model, trial)
            if self.args.should_save:
                self.accelerator.wait_for_everyone() if self.args.world_size > 1 else None
                commit(folder / PARTIAL / name, folder / CHECKPOINTS / name)
                for old in sorted((folder / CHECKPOINTS).glob("checkpoint-*"), key=lambda p: int(p.name[11:]))[
                    : -self.recipe.keep
                ]:
                    shutil.rmtree(old, ignore_errors=True)
            elif self.args.world_size > 1:
                self.accelerator.wait_for_everyone()
        except (OSError, RuntimeError, safetensors.SafetensorError) as error:
            if isinstance(error, RuntimeError) and "write" not in str(error):  # torch's words for a full disk
                raise
            shutil.rmtree(folder / PARTIAL, ignore_errors=True)
            last = last_checkpoint(folder)
            remedy = f"the last good one is {last}" if last else "there is none before it"
            raise OutputError(
                f"cannot write {name} into {folder}: {error}. Make room, then go on with --resume; {remedy}."
            ) from error

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        network = self.network
        weights = network.state_dict() if state_dict is None else inner(state_dict)
        network.save_pretrained(folder, state_dict=weights, max_shard_size="1TB")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self.is_fsdp_enabled:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        weights = safetensors.torch.load_file(Path(resume_from_checkpoint) / "model.safetensors")
        self.network.load_state_dict(weights, strict=False)
        self.network.tie_weights()

    # -- the network as a whole

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Within, the network can be called by itself also where FSDP has shared it out."""
        if isinstance(self.model, FSDPModule):
            self.model.unshard()
        try:
            yield
        finally:
            if isinstance(self.model, FSDPModule):
                self.model.reshard()

    def export(self, folder: Path) -> None:
        """Write the trained model as a plain Hugging Face folder, with the vocabulary that its tokenizer has."""
        weights = inner(self.accelerator.get_state_dict(self.model)) if self.is_fsdp_enabled else None
        if not self.args.should_save:
            return
        config = self.network.config
        model = GPTNeoXForCausalLM(config)
        model.load_state_dict(self.network.state_dict() if weights is None else weights, strict=False)
        model.tie_weights()
        model.resize_token_embeddings(len(self.tokenizer), mean_resizing=False)
        model.config._attn_implementation = "sdpa"
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            LanguageModel(model.eval(), self.tokenizer, metadata=self.metadata).save_pretrained(partial)
            shutil.rmtree(folder, ignore_errors=True)
            commit(partial, folder)
        except (OSError, safetensors.SafetensorError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise OutputError(
                f"cannot write the model into {folder}: {error}. Make room, then use --resume."
            ) from error


def inner(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of the network from those of the learner around it."""
    return {name.removeprefix("model."): weight for name, weight in state_dict.items()}


def only(items: list[dict[str, Any]]) -> dict[str, Any]:
    """The collator: the dataset's items are batches already."""
    (batch,) = items
    return batch


def commit(partial: Path, final: Path) -> None:
    """Give a folder its name once its contents are on the disk."""
    for path in sorted(partial.rglob("*"), reverse=True):
        sync(path)
    sync(partial)
    final.parent.mkdir(parents=True, exist_ok=True)
    partial.rename(final)
    sync(final.parent)


def sync(path: Path) -> None:
    """Have the disk hold what was written, a file or the entries of a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- the log --------------------------------------------------------------------------------------------------------


class Reporter(TrainerCallback):
    """Writes the log, shows the progress and evaluates.

    Args:
        trainer: Whose run it is.
        folder: Of the run.
        peak: Operations a second of the machine, for MFU.
        evaluation_set: What is evaluated during training, if anything.
        quiet: Show nothing.
    """

    def __init__(
        self, trainer: AcTrainer, folder: Path, *, method: Method, peak: float, evaluation_set: EvaluationSet | None,
        quiet: bool,
    ) -> None:  # fmt: skip
        self.trainer, self.folder, self.method, self.peak = trainer, folder, method, peak
        self.evaluation_set, self.main = evaluation_set, trainer.args.process_index == 0
        self.rows: list[dict[str, Any]] = []
        self.seconds = self.waited = self.training_seconds = 0.0
        self.bar = ProgressLine(quiet or not self.main)
        self.board = board(folder / "tensorboard") if self.main else None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take up the log of the run so far."""
        path = self.folder / LOG
        if path.exists() and state.global_step:
            with path.open(newline="", encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
            self.rows = [row for row in rows if int(row["step"]) <= state.global_step]
            self.seconds = max((float(row["seconds"]) for row in self.rows if row["seconds"]), default=0.0)
        if self.main:
            with writing(path), path.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, COLUMNS)
                writer.writeheader()
                writer.writerows(self.rows)
        self.bar.start(state.global_step, state.max_steps)
        self.trainer.watch = Watch()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        """A line of the log."""
        if not logs or "loss" not in logs:
            return
        if not math.isfinite(logs["loss"]):
            raise InputError(
                f"the loss is {logs['loss']} at step {state.global_step}: training has diverged. Lower lr or muon_lr, or "
                "lengthen warmup."
            )
        watch, recipe = self.trainer.watch, self.trainer.recipe
        took = time.perf_counter() - watch.since
        self.seconds += took
        self.training_seconds += took
        self.waited += watch.waited
        texts = watch.steps * recipe.batch
        row = {
            "step": state.global_step,
            "loss": logs["loss"],
            "learning_rate": logs["learning_rate"],
            "grad_norm": logs.get("grad_norm"),
            "texts": state.global_step * recipe.batch,
            "tokens": state.global_step * recipe.batch * recipe.length,
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round(texts * recipe.length / took, 1),
            "mfu": round(watch.flops / took / self.peak, 4),
            "wait": round(watch.waited / took, 4),
        }
        self.write(row)
        self.bar.show(row)
        self.trainer.watch = Watch()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Move the bar; now and then, evaluate."""
        self.bar.advance(state.global_step)
        every = self.trainer.recipe.eval_every
        if every and state.global_step % every == 0 and state.global_step < state.max_steps:
            self.evaluate_now(state.global_step)

    def evaluate_now(self, step: int) -> None:
        """Evaluate, into the log; the time that it takes is not training's."""
        if self.evaluation_set is None:
            return
        start = time.perf_counter()
        evaluation = self.measure(self.evaluation_set, DURING)
        row = {"step": step} | {
            name: round(result.perplexity, 4) for name, result in evaluation.modes.items() if result is not None
        }
        self.write(row)
        self.bar.note(row)
        self.trainer.watch.since += time.perf_counter() - start

    def measure(self, evaluation_set: EvaluationSet, modes: tuple[str, ...] = ()) -> Evaluation:
        """The network as it is now, on every process alike."""
        trainer = self.trainer
        with trainer.whole():
            return evaluate(
                self.method, trainer.network, evaluation_set, bos=trainer.metadata.bos_token_id or 0,
                mask=trainer.metadata.mask_token_id, modes=modes,
            )  # fmt: skip

    def write(self, row: dict[str, Any]) -> None:
        """Append to the log."""
        self.rows.append(row)
        if self.main:
            path = self.folder / LOG
            with writing(path), path.open("a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, COLUMNS).writerow(row)
        if self.board is not None:
            for name, value in row.items():
                if name != "step" and value is not None:
                    self.board.add_scalar(name, value, row["step"])

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Put the bar away."""
        self.bar.stop()
        if self.board is not None:
            self.board.close()


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """A disk that is full says which file it was."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}. Make room, then use --resume.") from error


def board(folder: Path) -> Any:
    """TensorBoard's writer, where TensorBoard is installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder))


class ProgressLine:
    """A bar on a terminal, a line now and then elsewhere."""

    EVERY = 15.0  # seconds between two lines

    def __init__(self, quiet: bool) -> None:
        self.quiet, self.bar, self.task, self.said = quiet, None, None, 0.0
        self.total = self.began = 0
        self.since = time.perf_counter()

    def start(self, step: int, total: int) -> None:
        """Begin at a step."""
        self.began, self.total, self.since = step, total, time.perf_counter()
        if self.quiet or not sys.stderr.isatty():
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        self.bar = Progress(*columns, console=Console(stderr=True))
        self.bar.start()
        self.task = self.bar.add_task("", total=total, completed=step)

    def advance(self, step: int) -> None:
        """Steps done so far."""
        if self.bar is not None:
            self.bar.update(self.task, completed=step)

    def show(self, row: Mapping[str, Any]) -> None:
        """A line of the log."""
        speed = f"{row['tokens_per_second']:,.0f} tokens/s, MFU {row['mfu']:.1%}"
        text = f"loss {row['loss']:.3f}, {speed}"
        if self.bar is not None:
            self.bar.update(self.task, description=text)
        elif not self.quiet and (time.perf_counter() - self.said > self.EVERY or row["step"] == self.total):
            self.said = time.perf_counter()
            left = (self.said - self.since) / max(1, row["step"] - self.began) * (self.total - row["step"])
            print(f"step {row['step']}/{self.total}: {text}, {left:.0f} s left", file=sys.stderr, flush=True)

    def note(self, row: Mapping[str, Any]) -> None:
        """An evaluation."""
        results = ", ".join(f"{name} {value:.2f}" for name, value in row.items() if name != "step")
        text = f"step {row['step']}: perplexity {results}"
        if self.bar is not None:
            self.bar.console.print(text, highlight=False)
        elif not self.quiet:
            print(text, file=sys.stderr, flush=True)

    def stop(self) -> None:
        """The end."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


def draw_curve(rows: list[dict[str, Any]], path: Path) -> bool:
    """The loss and the perplexities against tokens, as a picture; false where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    tokens = {int(row["step"]): float(row["tokens"]) / 1e6 for row in rows if row.get("tokens")}
    losses = [(tokens[int(row["step"])], float(row["loss"])) for row in rows if row.get("loss")]
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(*zip(*losses, strict=True), color="0.6", linewidth=1, label="training loss")
    for mode in MODES:
        points = [
            (tokens[int(row["step"])], math.log(float(row[mode])))
            for row in rows
            if row.get(mode) and int(row["step"]) in tokens
        ]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=f"{mode}, held out")
    axes.set_xlabel("million tokens read")
    axes.set_ylabel("nats a token")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True


# ---- all of it ------------------------------------------------------------------------------------------------------


def choose_device(recipe: Recipe) -> str:
    """The device that "auto" stands for; a named one must be there."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if recipe.device == "auto":
        return next(device for device in ("cuda", "mps", "cpu") if there[device])
    if not there[recipe.device]:
        raise InputError(f"device={recipe.device}, and there is none here: use device=auto or device=cpu.")
    return recipe.device


def train(recipe: Recipe, *, resume: bool = False, quiet: bool = False) -> dict[str, Any]:
    """Train a model as a recipe says.

    Args:
        recipe: With `corpus` and `output` set.
        resume: Go on from the last checkpoint of the run in `output`, if it has one. A finished run is left as it is.
        quiet: Show no progress.

    Returns:
        The contents of the run's `results.json`.
    """
    for name in ("corpus", "output"):
        if not getattr(recipe, name):
            raise InputError(f"the recipe names no {name}: add {name}=FOLDER.")
    folder = Path(recipe.output)
    if resume and (folder / RESULTS).exists():
        done: dict[str, Any] = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
        return done
    corpus = Corpus.open(recipe.corpus)
    tokenizer = corpus.tokenizer()
    device = choose_device(recipe)
    half = recipe.precision == "bf16" or (recipe.precision == "auto" and device == "cuda")
    flash = device == "cuda" and half and not recipe.attention_dropout
    if recipe.compile == "auto":
        compiled = flash and recipe.parallel == "ddp"
    elif compiled := bool(recipe.compile):
        if not flash:
            raise InputError("compile=true needs CUDA, bf16 and attention_dropout=0: the dense mask is not compiled.")
    world = int(os.environ.get("WORLD_SIZE", 1))
    micro = recipe.micro_batch or max(1, recipe.batch // world)
    if recipe.batch % (micro * world):
        raise InputError(
            f"batch ({recipe.batch}) must be a multiple of micro_batch ({micro}) times the {world} processes."
        )
    accumulation = recipe.batch // (micro * world)
    method = method_of(recipe.method)
    conditioning = recipe.distribution if method.reads_future else Conditioning((Empty(),))
    bos, mask = choose_bos(None, None, tokenizer), tokenizer.mask_token_id
    if conditioning.unknown and mask is None:
        raise InputError(
            "conditioning.unknown needs a MASK token, and the corpus's tokenizer has none: prepare the corpus with "
            "--mask-token."
        )
    texts = corpus.tokens("train")
    steps = recipe.steps or max(1, round((recipe.epochs or 0) * texts.chunks(recipe.length) / recipe.batch))
    if recipe.warmup >= steps:
        raise InputError(f"warmup ({recipe.warmup}) must be shorter than the run ({steps} steps).")
    batches = Batches(
        texts, count=steps * accumulation * world, size=micro, length=recipe.length, conditioning=conditioning,
        seed=recipe.seed, bos=bos, mask=mask, fixed=compiled,
    )  # fmt: skip
    sets = evaluation_sets(recipe, corpus, conditioning if method.reads_future else None)

    args = arguments(recipe, folder, device, half, steps, accumulation)
    if args.process_index == 0:
        about = {
            "recipe": recipe.as_dict(), "conditioning": conditioning.as_dict(), "steps": steps, "processes": world,
            "corpus_hash": corpus.hash, "tokenizer_hash": corpus.manifest["tokenizer_hash"],
            "evaluation_sets": {name: each.as_dict() for name, each in sets.items()},
            "hardware": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
            "versions": versions(), "command": sys.argv,
        }  # fmt: skip
        open_folder(folder, recipe, resume, about)

    torch.set_float32_matmul_precision("high")
    model = new_model(
        recipe.shape, vocabulary=-(-len(tokenizer) // VOCABULARY_ALIGN) * VOCABULARY_ALIGN, positions=recipe.length + 1,
        dropout=recipe.dropout, attention_dropout=recipe.attention_dropout, seed=recipe.seed,
        bos=bos, eos=tokenizer.eos_token_id,
    )  # fmt: skip
    check_model(model)
    metadata = Metadata(method.name, conditioning.as_dict() if method.reads_future else None, bos, mask)
    learner = Learner(model, backend="varlen" if flash else "dense", length=recipe.length, compiled=compiled)
    trainer = AcTrainer(learner, recipe, args, batches, tokenizer, metadata)
    if recipe.parallel == "fsdp" and not trainer.is_fsdp_enabled:
        raise InputError(
            "parallel=fsdp is for several processes: start with torchrun --nproc-per-node N -m acgpt train …."
        )
    if trainer.is_fsdp_enabled and recipe.optimizer == "muon":
        raise InputError("Muon needs whole matrices, and FSDP gives each process a part of them: use optimizer=adamw.")
    reporter = Reporter(
        trainer, folder, method=method, peak=matmul_rate(device) * world, evaluation_set=sets.get("during"), quiet=quiet
    )
    trainer.add_callback(reporter)
    checkpoint = last_checkpoint(folder) if resume else None
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    return finish(trainer, reporter, folder, sets, corpus, device)


def evaluation_sets(recipe: Recipe, corpus: Corpus, training: Conditioning | None) -> dict[str, EvaluationSet]:
    """What the model is evaluated on during training and in the end; nothing where the corpus has no such split.

    The training distribution of the sets is that of the recipe's first part (AR mixing and the like belong to training
    alone), so that a causal twin is asked the same.
    """
    if recipe.eval_split not in corpus.splits:
        return {}
    tokens = corpus.tokens(recipe.eval_split)
    if not tokens.chunks(recipe.length):
        return {}
    part = recipe.distribution.parts[0]
    shared = {"tokenizer_hash": corpus.manifest["tokenizer_hash"], "length": recipe.length, "corpus_hash": corpus.hash}
    limits = {"during": recipe.eval_texts, "final": recipe.final_texts}
    return {
        name: EvaluationSet.build(
            tokens, **shared, split=recipe.eval_split, limit=limit, r_max=getattr(part, "r_max", 0.6), seed=0,
            training=None if isinstance(part, Empty) else Conditioning((part,)),
        )
        for name, limit in limits.items()
    }  # fmt: skip


def arguments(
    recipe: Recipe, folder: Path, device: str, half: bool, steps: int, accumulation: int
) -> TrainingArguments:
    """What the Trainer is told."""
    fsdp: dict[str, Any] = {}
    if recipe.parallel == "fsdp" and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        fsdp = {"fsdp": "full_shard", "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["GPTNeoXLayer"]}}
    workers: dict[str, Any] = {"dataloader_num_workers": recipe.workers}
    if recipe.workers:
        workers |= {"dataloader_prefetch_factor": 4, "dataloader_persistent_workers": True}
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=1,  # the dataset's items are whole batches
        gradient_accumulation_steps=accumulation,
        learning_rate=recipe.lr,
        max_grad_norm=recipe.clip,
        bf16=half,
        use_cpu=device == "cpu",
        seed=recipe.seed,
        logging_steps=recipe.log_every,
        logging_first_step=True,
        logging_nan_inf_filter=False,
        save_strategy="steps",
        save_steps=recipe.save_every,
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        ddp_find_unused_parameters=False,
        dataloader_pin_memory=device == "cuda",
        accelerator_config={"non_blocking": device == "cuda"},
        **workers,
        **fsdp,
    )
    args._n_gpu = min(1, args.n_gpu)  # one process, one device: several GPUs are for torchrun
    return args


def finish(
    trainer: AcTrainer, reporter: Reporter, folder: Path, sets: Mapping[str, EvaluationSet], corpus: Corpus, device: str
) -> dict[str, Any]:
    """The last evaluation, the model, the curve and the results."""
    recipe, steps = trainer.recipe, trainer.state.global_step
    evaluation = reporter.measure(sets["final"]) if "final" in sets else None
    trainer.export(folder / MODEL)
    losses = [(int(row["step"]), float(row["loss"])) for row in reporter.rows if row.get("loss")]
    if evaluation is not None:
        reporter.board = None
        reporter.write(
            {"step": steps} | {name: round(r.perplexity, 4) for name, r in evaluation.modes.items() if r is not None}
        )
    results = {
        "steps": steps,
        "texts": steps * recipe.batch,
        "tokens": steps * recipe.batch * recipe.length,
        "parameters": sum(p.numel() for p in trainer.network.parameters()),
        "loss": losses[-1][1] if losses else None,
        "seconds": round(reporter.seconds, 2),
        "tokens_per_second": round(steps * recipe.batch * recipe.length / reporter.seconds, 1)
        if reporter.seconds
        else None,
        "wait": round(reporter.waited / reporter.training_seconds, 5) if reporter.training_seconds else None,
        "memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if device == "cuda" else None,
        "evaluation": None if evaluation is None else evaluation.as_dict(),
        **json.loads((folder / CONFIG).read_text(encoding="utf-8")),
    }
    if trainer.args.process_index == 0:
        with writing(folder / CURVE):
            draw_curve(reporter.rows, folder / CURVE)
        with writing(folder / RESULTS):
            write_json(folder / RESULTS, results)
    trainer.accelerator.wait_for_everyone()
    return results
