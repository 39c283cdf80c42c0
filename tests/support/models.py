"""Tiny models of every supported architecture, random queries, and the oracle: the layout written out by hand."""

from __future__ import annotations

import functools
import os
import random

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from acgpt.engine.architecture import check_model
from acgpt.engine.engine import Engine
from acgpt.query.query import Query

# Models this small only wait for a second thread: on a busy machine, eight times as long.
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))

ARCHITECTURES = ["gpt2", "gpt_neox", "llama", "qwen3", "mistral"]


def tiny_model(architecture="llama", *, vocabulary=50, width=32, layers=2, positions=64, scale=0.3, seed=0, **more):
    """Return a float32 model with random weights, far larger than at initialisation so that every token matters."""
    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    shape = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "intermediate_size": 2 * width,
    }
    shape |= {"vocab_size": vocabulary, "max_position_embeddings": positions, **special, **more}
    grouped = {**shape, "num_key_value_heads": 2}
    config = {
        "gpt2": lambda: GPT2Config(
            n_embd=width, n_layer=layers, n_head=4, n_positions=positions, vocab_size=vocabulary, **special, **more
        ),
        "gpt_neox": lambda: GPTNeoXConfig(rotary_pct=1.0, use_parallel_residual=False, **shape),
        "llama": lambda: LlamaConfig(**grouped),
        "qwen3": lambda: Qwen3Config(head_dim=width // 4, **grouped),
        "mistral": lambda: MistralConfig(**{"sliding_window": None, **grouped}),
    }[architecture]()
    model = AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, scale, generator=generator)
    return model


@functools.cache
def toy_tokenizer():
    """A byte-level BPE of all bytes and a few merges."""
    merges = [("Ġ", "x"), ("a", "y"), ("Ġx", "a"), ("a", "b"), ("x", "y"), ("Ġ", "a"), ("Ġa", "b")]
    tokens = ["<bos>", "<eos>", "<mask>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>", "<mask>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>")


def random_query(seed, length, *, share=0.4, unknown=0.0, vocabulary=50):
    """Return a query of random tokens with these shares given and unknown, and at least one asked."""
    rng = random.Random(seed)
    roles = [rng.choices("gua", (share, unknown, 1 - share - unknown))[0] for _ in range(length)]
    roles[rng.randrange(length)] = "a"
    tokens = [rng.randrange(2, vocabulary) for _ in range(length)]
    return Query(tokens, [r == "g" for r in roles], [r == "a" for r in roles])


# ---- what the layout means, written out by hand: shares no code with acgpt ---------------------------------------


def by_definition(query, *, future=True, bos=0, mask=1):
    """One query's slots, from the paper: copies of what is given, then BOS and the *whole* text.

    Returns:
        ids, positions, who sees whom as a list of lists of booleans [slot][seen slot], and a list of
        (slot, token) for every asked token: where it is predicted, and what it is.
    """
    text = [bos]
    for token, given, asked in zip(query.tokens, query.given, query.asked, strict=True):
        text.append(token if given or asked else mask)
    ids, positions = [], []
    if future:
        for position in range(1, len(text)):
            if query.given[position - 1]:
                ids.append(text[position])
                positions.append(position)
    copies = len(ids)
    for position, token in enumerate(text):
        ids.append(token)
        positions.append(position)
    sees = []
    for slot in range(len(ids)):
        row = []
        for other in range(len(ids)):
            if slot < copies:
                row.append(other < copies)
            elif other < copies:
                row.append(True)
            else:
                row.append(positions[other] <= positions[slot])
        sees.append(row)
    predictions = [
        (copies + position - 1, text[position]) for position in range(1, len(text)) if query.asked[position - 1]
    ]
    return ids, positions, sees, predictions


def by_hand(tokens, roles, gaps, lengths, distance, *, bos=0, mask=1):
    """One question for the length of a gap (see `acgpt.query.lengths`), as `by_definition`.

    Returns:
        ids, positions, who sees whom, and the slot that predicts the length.
    """
    widths = list(lengths) + [distance] * (len(gaps) - len(lengths))
    copies, text, predicts, position = [], [(bos, 0)], None, 0
    for index in range(len(tokens) + 1):
        for number, gap in enumerate(gaps):
            if gap == index:
                if number == len(lengths):
                    predicts = len(text) - 1
                position += widths[number]
        if index == len(tokens):
            break
        position += 1
        if roles[index] == 1:
            copies.append((tokens[index], position))
        if predicts is None and roles[index] != 0:
            text.append((mask if roles[index] == 2 else tokens[index], position))
    ids, positions = zip(*copies, *text, strict=True)
    sees = [
        [other < len(copies) or (len(copies) <= slot and other <= slot) for other in range(len(ids))]
        for slot in range(len(ids))
    ]
    return list(ids), list(positions), sees, len(copies) + predicts


def masked_logits(model, ids, positions, sees):
    """Logits of a model of transformers, under its own attention, with an explicit additive mask: (slots, V)."""
    with torch.no_grad():
        return model(**masked_inputs(model, ids, positions, sees)).logits[0]


def masked_hidden(model, ids, positions, sees):
    """The last hidden states, as `masked_logits`: (slots, width)."""
    with torch.no_grad():
        return model.base_model(**masked_inputs(model, ids, positions, sees)).last_hidden_state[0]


def masked_inputs(model, ids, positions, sees):
    """Inputs of a model of transformers for one sequence with an explicit additive mask."""
    hidden = ~torch.tensor(sees)
    mask = torch.zeros(hidden.shape, dtype=model.dtype).masked_fill(hidden, torch.finfo(model.dtype).min)
    return {
        "input_ids": torch.tensor([ids]),
        "position_ids": torch.tensor([positions]),
        "attention_mask": mask[None, None],
        "use_cache": False,
    }


def expected_log_probs(model, query, *, future=True, bos=0, mask=1):
    """Return log p of each asked token by definition, from a model without acgpt."""
    ids, positions, sees, predictions = by_definition(query, future=future, bos=bos, mask=mask)
    scores = masked_logits(model, ids, positions, sees).log_softmax(-1)
    return torch.stack([scores[slot, token] for slot, token in predictions]).double()


@functools.cache
def twins(architecture="llama", dtype=torch.float64, **more):
    """Return two models with the same weights: one from transformers, and one prepared by acgpt."""
    reference, ours = (tiny_model(architecture, **more).to(dtype) for _ in range(2))
    reference.set_attn_implementation("sdpa")
    check_model(ours)
    return reference, ours


def answers(model, queries, *, future=True, bos=0, mask=1, budget=10**6):
    """Return acgpt's log-probabilities, one tensor per query, from one packed pass if the budget allows."""
    with torch.inference_mode():
        scores = Engine(model, bos=bos, mask=mask, backend="dense", budget=budget).log_probs(queries, future=future)
    return [torch.tensor(score, dtype=torch.float64) for score in scores]


def finished(query, drawn):
    """Return the query with its asked tokens replaced by these."""
    tokens = list(query.tokens)
    for position, token in zip(query.asked_positions, drawn, strict=True):
        tokens[position - 1] = int(token)
    return Query(tokens, query.given, query.asked)


# ---- text ---------------------------------------------------------------------------------------------------------

CORPUS = [
    "The cat sat on the mat. The dog sat on the log. The bird sat on the cat.",
    "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is Madrid.",
    "A cat and a dog saw a bird; the bird saw the cat, the dog and the mat.",
]


@functools.cache
def trained_bpe():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<bos>", "<eos>", "<mask>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 20, trainer)
    return tokenizer.to_str()


def tiny_tokenizer(**special):
    """A byte-level BPE of 340 tokens in which " cat", " dog" and " bird" are one token each."""
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(trained_bpe()), **special)


def truncated(p, sampling):
    """Apply temperature, then top-k, then top-p, by definition."""
    p = p ** (1 / sampling.temperature)
    p = (p / p.sum()).tolist()
    ranked = sorted(range(len(p)), key=lambda i: -p[i])[: sampling.top_k]
    total, kept, held = sum(p[i] for i in ranked), set(), 0.0
    for i in ranked:
        if held >= sampling.top_p * total:
            break
        kept.add(i)
        held += p[i]
    return np.array([p[i] / held if i in kept else 0.0 for i in range(len(p))])
