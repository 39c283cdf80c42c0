"""Training: from a recipe to a run folder.

    recipe ──► settle ──► network, Batches ──► Learner ──► Loop ──► finish
    (YAML)     (Plan)     (what learns, what   (loss)      (steps,  (final evaluation,
                           it reads)                        log)     model, results.json)

Each part has a module of its own.

A resumed run gives the same weights, bit for bit on a CPU, as one that never stopped.
"""

from __future__ import annotations

import json
import math
import platform
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from acgpt.common.options import keywords, split_keywords
from acgpt.common.provenance import versions
from acgpt.data.corpus import Corpus, Tokens
from acgpt.engine.length_head import FILE as HEAD_FILE
from acgpt.errors import InputError
from acgpt.evaluation.dataset import EvaluationDataset, name_texts
from acgpt.evaluation.per_text import write_per_text
from acgpt.methods import Method, method_of
from acgpt.models.card import write_card
from acgpt.models.metadata import Metadata
from acgpt.query.conditioning import Conditioning, Gaps, Sized
from acgpt.query.lengths import DISTANCE
from acgpt.query.passages import token_kinds
from acgpt.training.batches import Batches
from acgpt.training.learner import Learner
from acgpt.training.log import draw_curve, not_written
from acgpt.training.loop import Loop
from acgpt.training.networks import Tuned, check_method, fresh, head_dim, pretrained
from acgpt.training.options import RunOptions
from acgpt.training.plan import Plan, accelerator_for, settle
from acgpt.training.recipe import NO_CORPUS, Recipe, load_recipe
from acgpt.training.run_folder import (
    CURVE,
    RESULTS,
    alone,
    check_same,
    last_checkpoint,
    open_folder,
    step_of,
    write_json,
    writing,
)
from acgpt.training.stopping import NothingToSave, StopRequests

FEW = 8  # texts of the final evaluation, where a text takes hundreds of forward passes


@keywords(RunOptions)
def train(recipe: Recipe | str | Path, **changes: Any) -> dict[str, Any] | None:
    """Train a model as a recipe says.

        acgpt.train("tiny-cpu", corpus="data/mine", output="runs/mine", steps=100)

    A time limit, SIGTERM (which schedulers send before they end a job) and Ctrl-C stop the run with a checkpoint, to be
    resumed later. A second Ctrl-C does not wait for the checkpoint. Before the first step has ended there is nothing to
    save, and signals stop the run at once. A finished run is not changed by resuming it.

    Args:
        recipe: A YAML file, the name of a recipe that comes with acgpt, or a `Recipe`; it or the changes name `corpus`
            and `output`.
        **keywords: See `RunOptions`.
        **changes: Keys of the recipe and their values, as in `load_recipe`: steps=100. A mapping replaces the recipe's;
            **{"conditioning.r_max": 0.4} changes one key in it.

    Returns:
        The contents of the run's `results.json`; `None` if the run was stopped before its end.

    Raises:
        InputError: Something that the user can mend.
        OutputError: The run's folder cannot be written. The last checkpoint stays, and can be resumed from.
    """
    options, changes = split_keywords(RunOptions, changes)
    stopping = StopRequests(math.inf if options.minutes is None else time.monotonic() + 60 * options.minutes)
    recipe = load_recipe(recipe, changes)
    if not recipe.corpus:
        raise InputError(NO_CORPUS)
    if not recipe.output:
        raise InputError("the recipe names no output: add output=FOLDER.")
    folder = Path(recipe.output)
    if options.resume and (folder / RESULTS).exists():
        check_same(folder, recipe)
        finished: dict[str, Any] = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
        return finished

    method = method_of(recipe.method).with_loss(recipe.loss)
    check_method(method, recipe.base)
    corpus = Corpus.open(recipe.corpus)
    texts = corpus.tokens("train")
    plan = settle(recipe, texts.chunks(recipe.length), head_dim=head_dim(recipe.base) if recipe.base else None)
    product = network_for(recipe, method, corpus.tokenizer(), texts, plan)
    batches = batches_for(recipe, method, product, texts, plan)
    evaluation_sets = build_evaluation_sets(recipe, corpus, method)
    learner = Learner(
        product.model, backend=plan.attention, compiled=plan.compiled,
        forbidden_token=product.metadata.mask_token_id if method.needs_mask else None, length_head=product.length_head,
    )  # fmt: skip
    config = describe(recipe, plan, method, corpus, evaluation_sets)
    if plan.device == "cuda":
        torch.set_float32_matmul_precision("high")
        torch.cuda.reset_peak_memory_stats()
    accelerator = accelerator_for(plan, product.model._no_split_modules or ())
    main = accelerator.is_main_process
    with alone(folder) if main else nullcontext():
        if main:
            config["sittings"] = open_folder(folder, recipe, options.resume, config)
            if not options.quiet:
                epochs, read = plan.steps / batches.per_epoch, plan.steps * batches.step * batches.length
                about = f"corpus {recipe.corpus}: {len(texts):,} tokens; {plan.steps:,} steps read {read:,}"
                print(f"{folder}\n{about} ({epochs:,.2f} epochs)", file=sys.stderr)
        loop = Loop(
            recipe, plan, accelerator, learner, batches, product=product, method=method,
            evaluation_dataset=evaluation_sets.get("during"), stopping=stopping, quiet=options.quiet,
        )  # fmt: skip
        if missing := not_written():
            loop.bar.note(missing)
        if not evaluation_sets:
            loop.bar.note(f"nothing will be evaluated: the corpus has no text for it in a split {recipe.eval_split!r}.")
        try:
            with stopping.from_signals():
                checkpoint = last_checkpoint(folder) if options.resume else None
                if checkpoint is not None:
                    loop.bar.note(f"resuming after step {step_of(checkpoint)}")
                elif options.resume:
                    loop.bar.note("there is no checkpoint yet: starting from step 0")
                loop.run(checkpoint)
            return None if loop.stopped else finish(loop, evaluation_sets.get("final"), config)
        except NothingToSave:
            return None
        finally:
            loop.close()


# ---- the parts of a run ----------------------------------------------------------------------------------------------


def network_for(recipe: Recipe, method: Method, tokenizer: PreTrainedTokenizerBase, texts: Tokens, plan: Plan) -> Tuned:
    """Make the network that a recipe asks for, and check that it has the MASK token that training needs."""
    conditioning = method.conditioning(recipe.distribution)
    metadata = Metadata(method.name, conditioning.as_dict() if method.reads_future else None)
    if conditioning.asks_lengths:
        metadata = replace(metadata, lengths={"file": HEAD_FILE, "distance": DISTANCE})
    if recipe.base:
        product: Tuned = pretrained(recipe, tokenizer, metadata, plan)
    else:
        product = fresh(recipe, tokenizer, metadata)
    mask = product.metadata.mask_token_id
    if conditioning.has_unknown and mask is None:
        raise InputError(
            "conditioning.unknown needs a MASK token, and the tokenizer has none: name one of its tokens with mask=…"
            + ("." if recipe.base else ", or prepare the corpus with a mask token.")
        )
    if method.needs_mask and mask is not None and (mask == (product.metadata.bos_token_id or 0) or texts.holds(mask)):
        raise InputError(
            f"mask={tokenizer.convert_ids_to_tokens(mask)}: a token that texts have, or BOS, cannot stand for what is "
            "masked, as it is never predicted. Leave mask out, or name one that no text has."
        )
    if not (conditioning.has_unknown or method.needs_mask):
        product.metadata = replace(product.metadata, mask_token_id=None)  # the network reads no MASK in training
    return product


def batches_for(recipe: Recipe, method: Method, product: Tuned, texts: Tokens, plan: Plan) -> Batches:
    """Make the batches of the run."""
    metadata, conditioning = product.metadata, method.conditioning(recipe.distribution)
    gaps = any(isinstance(part, Gaps) for part in conditioning.parts)
    if gaps and not method.reads_copies:
        raise InputError(f"conditioning of kind gaps is for method=ac-gpt, not for method={method.name}.")
    return Batches(
        texts, count=plan.steps * plan.parts, size=plan.micro_batch, parts=plan.parts, length=recipe.length,
        conditioning=conditioning, seed=recipe.seed, bos=metadata.bos_token_id or 0, mask=metadata.mask_token_id,
        fixed=plan.compiled, balance=recipe.distribution, method=method,
        kinds=token_kinds(product.tokenizer) if gaps else None,
    )  # fmt: skip


def build_evaluation_sets(recipe: Recipe, corpus: Corpus, method: Method) -> dict[str, EvaluationDataset]:
    """Build what the model is evaluated on "during" training and in the end ("final").

    The training distribution is that of the recipe's first part with nothing unknown, so that a causal twin is asked
    the same: AR mixing and the like belong to training alone.

    A method that needs a forward pass per asked token is evaluated in the end only, by default on few texts.

    Returns:
        The evaluation datasets by name; none if the corpus has no validation split.
    """
    split, length, final = recipe.eval_split, recipe.length, recipe.final_texts
    if split == Recipe.eval_split and split not in corpus.splits:
        return {}
    tokens, part = corpus.tokens(split), recipe.distribution.parts[0]
    if not tokens.chunks(length):
        return {}
    distribution: dict[str, Any] = {}
    if isinstance(part, Sized):
        distribution = {"r_max": part.r_max, "training": Conditioning((replace(part, unknown=0.0),))}
    limits = {"during": recipe.eval_texts, "final": final}
    if not method.abilities.single_pass:
        limits = {"final": FEW if final is None else final}
    most = len(tokens) // length if limits["final"] is None else max(limit or 0 for limit in limits.values())
    starts = corpus.document_starts(split, most * length)
    return {
        name: EvaluationDataset.build(
            tokens, tokenizer_hash=corpus.manifest["tokenizer_hash"], length=length, limit=limit, seed=0,
            corpus_hash=corpus.hash, split=split, documents=starts, **distribution,
        )
        for name, limit in limits.items()
    }  # fmt: skip


def describe(
    recipe: Recipe, plan: Plan, method: Method, corpus: Corpus, evaluation_sets: Mapping[str, EvaluationDataset]
) -> dict[str, Any]:
    """Return the contents of the run's `config.json`: the recipe, and what it came to on this machine."""
    return {
        "recipe": recipe.as_dict(),
        "steps": plan.steps,
        "processes": plan.processes,
        "fsdp": plan.fsdp,
        "device": plan.device,
        "precision": "bf16" if plan.half else "fp32",
        "attention": plan.attention,
        "compiled": plan.compiled,
        "conditioning": method.conditioning(recipe.distribution).as_dict(),
        "corpus_hash": corpus.hash,
        "tokenizer_hash": corpus.manifest["tokenizer_hash"],
        "evaluation_sets": {name: dataset.as_dict() for name, dataset in evaluation_sets.items()},
        "hardware": torch.cuda.get_device_name() if plan.device == "cuda" else platform.machine(),
        "versions": versions(),
        "command": sys.argv,
    }


def finish(loop: Loop, final_set: EvaluationDataset | None, config: Mapping[str, Any]) -> dict[str, Any]:
    """Run the final evaluation, and write the model, its card, the curve and the results."""
    log, folder, batches, evaluation = loop.log, loop.folder, loop.batches, None
    state, product, steps = loop.state, loop.state.product, loop.step
    state.round()
    if final_set is not None:
        loop.bar.note(f"evaluating on {name_texts(final_set.as_dict())}")
        evaluation = loop.evaluate(final_set)
    path = folder / product.folder
    parameters = state.export(path)
    tokens = steps * batches.step * batches.length
    results = {
        "folder": str(folder),
        "model": str(path),
        "steps": steps,
        "texts": steps * batches.step,
        "tokens": tokens,
        "parameters": parameters,
        "loss": log.rows[-1]["loss"],
        "seconds": round(log.seconds, 3),
        "tokens_per_second": round(tokens / log.seconds, 1) if log.seconds else None,
        "wait": log.wait,
        "memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if config["device"] == "cuda" else None,
        "evaluation": None if evaluation is None else evaluation.as_dict(),
        **config,
    }
    if state.main:
        draw_curve(log.rows, folder / CURVE)
        with writing(path):
            write_card(path, results | {"base_model": product.base}, name=folder.name)
        if evaluation is not None:
            with writing(folder):
                write_per_text(folder / RESULTS, evaluation.per_text)
        write_json(folder / RESULTS, results)
    loop.accelerator.wait_for_everyone()
    return results
