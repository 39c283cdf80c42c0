"""Check that every causal model of transformers is exact under acgpt or refused, against an independent oracle.

    python tests/exactness/architectures.py                       all model types (a few minutes): architectures.json
    python tests/exactness/architectures.py --page                write the tables of the documentation from it
    python tests/exactness/architectures.py llama llama4_text     only these model types

Every class of MODEL_FOR_CAUSAL_LM_MAPPING is built with the default configuration of its model type, shrunk: four
layers, a width of 32, 64 positions, and so on for every size that the configuration names. Weights are random and
large, so that every token matters. Thresholds of branches (a window, a temperature) are shrunk, too.

A class that is refused is tried again with other settings, where its configuration has them: full attention in every
layer, a causal mask, a fixed temperature. The verdict must not depend on the weights: `check_model` is called again
with weights that are a hundred times smaller, in bfloat16.

A model that is accepted answers queries of several lengths in one batch: with copies, left to right, and by sampling
with a cache. Each log-probability is compared with that of the unmodified transformers model with eager attention, one
query at a time:

    left to right   a plain pass for each prefix of the text, without mask or positions
    with copies     one pass with an explicit mask and positions, and the copies *after* the text, so that nothing that
                    counts slots can agree by accident
    sampling        as with copies, for the sampled text

Exact means: the largest difference is below a thousandth of the mean difference that the copies make.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import random
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from acgpt.engine.architecture import check_model
from acgpt.engine.engine import Engine
from acgpt.errors import ModelError
from acgpt.models.language_model import positions_of
from acgpt.query.query import Query
from acgpt.query.sampling import Sampling

RECORD = Path(__file__).with_suffix(".json")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "explanation" / "architectures.md"
MAX_PARAMETERS = 8_000_000  # of a tiny model
LONGEST = 40  # tokens of a text: beyond the threshold of any branch of a shrunk model
EXACT = 1e-3  # the largest difference, over the mean difference that the copies make
AS_IT_COMES = "as it comes"
SIZES = {
    name: size
    for size, names in {
        64: "vocab_size vocab_size_per_layer_input decoder_vocab_size n_positions max_position_embeddings max_seq_len "
        "n_ctx max_target_positions model_max_length context_length pronunciation_vocab_size shape_vocab_size "
        "encoder_hash_byte_group_vocab ngram_vocab_size_base intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim "
        "ffn_hidden_size dim_ff dff d_inner feed_forward_size intermediate_size_mlp moe_intermediate_size "
        "shared_expert_intermediate_size dense_intermediate_size moe_shared_expert_intermediate_size mamba_d_ssm",
        32: "hidden_size d_model n_embd emb_dim embedding_size word_embed_proj_dim input_embedding_size "
        "output_embedding_size embedding_dim lru_width attention_hidden_size hidden_size_per_layer_input "
        "pronunciation_embed_dim shape_embed_dim dim_model_base expert_ffn_hidden_size ple_embed_dim "
        "router_hidden_size cross_attention_hidden_size",
        16: "q_lora_rank kv_lora_rank o_lora_rank qk_head_dim hc_lowrank laurel_rank adapter_rank gated_norm_rank "
        "prompt_mid_dim mamba_d_state state_size ssm_state_size time_step_rank mamba_dt_rank",
        8: "head_dim dim_head kv_channels d_head attention_head_dim attention_head_size qk_rope_head_dim "
        "qk_nope_head_dim v_head_dim swa_head_dim index_head_dim linear_head_dim linear_key_head_dim "
        "linear_value_head_dim mamba_d_head mamba_head_dim mamba_headdim mamba_n_heads mamba_num_heads rotary_dim "
        "index_block_size num_mel_bins zero_expert_num",
        4: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers "
        "num_encoder_layers num_layers_per_stack num_blocks num_attention_heads n_head n_heads num_heads "
        "decoder_attention_heads encoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads "
        "attention_heads swa_num_attention_heads index_n_heads linear_num_value_heads linear_num_heads num_experts "
        "num_local_experts n_routed_experts moe_num_experts floor_scale log_scaling_n_floor index_topk "
        "sliding_window attention_chunk_size local_attention window_size",
        2: "num_key_value_heads num_kv_heads swa_num_key_value_heads linear_num_key_heads num_query_groups "
        "num_experts_per_tok num_experts_per_token moe_topk moe_k index_topk_blocks",
        1: "n_group topk_group num_expert_group first_k_dense_replace num_dense_layers mamba_n_groups n_groups",
        0: "num_kv_shared_layers",
    }.items()
    for name in names.split()
}
# Set even if there is no default.
ALWAYS_SET = {"head_dim", "num_key_value_heads", "num_experts_per_tok", "n_routed_experts", "moe_intermediate_size"}
# Further settings that a shrunk configuration needs.
EXTRA_SETTINGS: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {
            name: {"rope_type": "default", "rope_theta": 1e4} for name in ("full_attention", "sliding_attention")
        }
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"moe_num_experts": 4, "moe_top_k": 2, "ffn_hidden_size": 64},
    },
    "dots1": {"n_shared_experts": 1},
    "gemma3n_text": {
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "activation_sparsity_pattern": None,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "lfm2_moe": {"layer_types": ["conv"] * 3 + ["full_attention"]},
    "mamba2": {"num_heads": 8},
    "qwen4_exp": (indexer := {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8,
                              "indexer_budget": 4, "indexer_compress_ratio": 2}),
    "qwen4_exp_text": indexer,
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": (16, 16), "axial_pos_shape": (8, 8)},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
# Further settings to try: by model type, a name and its changes.
ROPE = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {
        "rope_type: dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
        "rope_type: linear": {"rope_parameters": {**ROPE, "rope_type": "linear"}},
        "rope_type: yarn": {"rope_parameters": {**ROPE, "rope_type": "yarn"}},
        "rope_type: llama3": {
            "rope_parameters": {**ROPE, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        },
    },
    "phi3": {
        "rope_type: longrope": {
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32,
                "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
            },
        }
    },
    "minimax_m3_vl_text": {"sparse layers": {"layer_types": ["full_attention"] * 3 + ["minimax_m3_sparse"]}},
    "ministral3": {
        "llama_4_scaling_beta: 0.5": {
            "rope_parameters": {**ROPE, "rope_type": "yarn", "llama_4_scaling_beta": 0.5}
        }
    },
    "llama4_text": {
        "full attention, attn_temperature_tuning: false": {
            "layer_types": ["full_attention"] * 4,
            "attn_temperature_tuning": False,
        }
    },
}  # fmt: skip


# ---- networks -----------------------------------------------------------------------------------------------------


def tiny_config(config_class: type[PreTrainedConfig], **overrides: Any) -> PreTrainedConfig:
    """Return the default configuration of a class with every size shrunk, also in its sub-configurations."""
    default = config_class()
    values = default.to_dict()
    sizes = {
        name: size
        for name, size in SIZES.items()
        if name in values and (name in ALWAYS_SET or values[name] is not None) and not isinstance(values[name], list)
    }
    for name, token in values.items():  # BOS is 0
        if name.endswith("_token_id") and isinstance(token, int) and not 0 <= token < SIZES["vocab_size"]:
            sizes[name] = 1
    if "kv_lora_rank" in values:  # keys and values come from one latent vector: heads are not shared
        sizes["num_key_value_heads"] = SIZES["num_attention_heads"]
    parts = {name: part for name, part in vars(default).items() if isinstance(part, PreTrainedConfig)}
    for name, part in parts.items():
        sizes[name] = tiny_config(type(part), **overrides.get(name, {})).to_dict()
    return config_class(**{**sizes, **{name: value for name, value in overrides.items() if name not in parts}})


def class_of(model_type: str) -> type[PreTrainedModel]:
    """Return the class that AutoModelForCausalLM would use."""
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]]
    return model_class[0] if isinstance(model_class, list | tuple) else model_class


def config_of(model_type: str, **overrides: Any) -> PreTrainedConfig:
    """Return the shrunk configuration of a model type for its class."""
    config_class = class_of(model_type).config_class or CONFIG_MAPPING[model_type]
    return tiny_config(config_class, **{**EXTRA_SETTINGS.get(model_type, {}), **overrides})


def tiny_model(
    model_type: str, config: PreTrainedConfig, *, scale: float = 0.3, dtype: torch.dtype = torch.float32, seed: int = 0
) -> PreTrainedModel:
    """Build a model with random weights; at the default scale every token matters."""
    model_class = class_of(model_type)
    with torch.device("meta"):
        size = sum(weight.numel() for weight in model_class(copy.deepcopy(config)).parameters())
    if size > MAX_PARAMETERS:
        raise MemoryError(f"{size:,} parameters despite the shrunk configuration")
    model = model_class(copy.deepcopy(config)).eval()
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.data.normal_(0, scale, generator=generator)
    return model.to(dtype)


def remedies(config: PreTrainedConfig, reason: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield changes to the configuration of a refused model, by name, that may make it acceptable."""
    values = config.get_text_config().to_dict()
    if "both ways" in reason:
        yield "is_decoder: true", {"is_decoder": True}
    elif "every layer has full attention" in reason:
        windows = {"use_sliding_window": False, "sliding_window": None}
        full = {name: value for name, value in windows.items() if values.get(name)}
        if values.get("layer_types"):
            full = {"layer_types": ["full_attention"] * len(values["layer_types"])}
        for name in config.sub_configs:  # the setting belongs to a sub-configuration
            if getattr(config, name, None) is config.get_text_config():
                full = {name: full} if full else {}
        if full:
            yield "full attention", full


# ---- the oracle: shares no code with acgpt ------------------------------------------------------------------------


def with_copies(model: PreTrainedModel, query: Query, bos: int = 0) -> Tensor:
    """Return log p of each asked token with copies of the given ones, by an explicit mask and positions."""
    text, given = [bos, *query.tokens], [p for p in range(1, len(query) + 1) if query.given[p - 1]]
    positions = [*range(len(text)), *given]
    visible = torch.zeros(len(positions), len(positions), dtype=torch.bool)
    for slot in range(len(positions)):
        for other in range(len(positions)):
            is_copy = other >= len(text)
            visible[slot, other] = is_copy or (slot < len(text) and other <= slot)
    mask = torch.zeros(visible.shape, dtype=model.dtype).masked_fill(~visible, torch.finfo(model.dtype).min)
    with torch.no_grad():
        logits = model(
            input_ids=torch.tensor([[*text, *(text[p] for p in given)]]),
            position_ids=torch.tensor([positions]),
            attention_mask=mask[None, None],
            use_cache=False,
        ).logits[0]
    return chosen(logits, query)


def left_to_right(model: PreTrainedModel, query: Query, bos: int = 0) -> Tensor:
    """Return log p of each asked token from the tokens before it: a plain pass per prefix, without any mask."""
    text = [bos, *query.tokens]
    with torch.no_grad():
        rows = [
            model(input_ids=torch.tensor([text[:length]]), use_cache=False).logits[0, -1]
            for length in range(1, len(text))
        ]
    return chosen(torch.stack(rows), query)


def chosen(logits: Tensor, query: Query) -> Tensor:
    """Return the log-probabilities of the asked tokens, each predicted one slot before it."""
    scores = logits.double().log_softmax(-1)
    return torch.stack([scores[p - 1, query.tokens[p - 1]] for p in range(1, len(query) + 1) if query.asked[p - 1]])


def expected(model: PreTrainedModel, query: Query, future: bool) -> Tensor:
    """Return the oracle's answer."""
    return with_copies(model, query) if future else left_to_right(model, query)


# ---- acgpt against it ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """Distance of acgpt from the oracle, in nats, and the size of the effect of copies."""

    differences: Mapping[str, float]  # largest difference, by kind of question
    effect: float  # the mean difference that the copies make

    @property
    def exact(self) -> bool:
        """Whether all differences are rounding."""
        return max(self.differences.values()) <= EXACT * self.effect


def queries_for(config: PreTrainedConfig, longest: int, seed: int = 0) -> list[Query]:
    """Return queries of several lengths, with 40 % of their tokens given, within the model's positions."""
    rng = random.Random(seed)
    longest, vocabulary = min(longest, positions_of(config) - 1), config.vocab_size
    queries = []
    for length in (longest, longest // 2, longest // 4):
        given = [rng.random() < 0.4 for _ in range(length)]
        given[0], given[-1] = False, False
        queries.append(Query([rng.randrange(1, vocabulary) for _ in range(length)], given))
    return queries


def measure(ours: PreTrainedModel, reference: PreTrainedModel, longest: int) -> Measured:
    """Compare a model that `check_model` has accepted with its unmodified twin."""
    config = ours.config.get_text_config()
    queries = queries_for(config, longest)
    reference.set_attn_implementation("eager")
    engine = Engine(ours, bos=0, backend="dense", budget=10**6)
    differences, oracle = {}, {}
    for future, name in ((True, "with copies"), (False, "left to right")):
        with torch.inference_mode():
            scores = engine.log_probs(queries, future=future)
            samples = engine.sample(queries, 1, Sampling(seed=1), future)
        oracle[future] = [expected(reference, query, future) for query in queries]
        differences[name] = largest([torch.tensor(score) for score in scores], oracle[future])
        filled = [with_tokens(query, tokens) for query, ((tokens, _),) in zip(queries, samples, strict=True)]
        differences[f"sampling {name}"] = largest(
            [torch.from_numpy(log_probs) for ((_, log_probs),) in samples],
            [expected(reference, query, future) for query in filled],
        )
    effect = torch.cat(oracle[True]) - torch.cat(oracle[False])
    return Measured(differences, effect.abs().mean().item())


def largest(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest absolute difference."""
    return (torch.cat(list(actual)).double() - torch.cat(list(expected)).double()).abs().max().item()


def with_tokens(query: Query, tokens: Sequence[int]) -> Query:
    """Return the query with these tokens at the asked positions."""
    remaining = iter(tokens)
    filled = [int(next(remaining)) if asked else token for token, asked in zip(query.tokens, query.asked, strict=True)]
    return Query(filled, query.given, query.asked)


def refusal(model: PreTrainedModel) -> str | None:
    """Return why acgpt refuses a model, which it leaves unchanged; `None` if it is accepted."""
    try:
        check_model(model)
    except ModelError as error:
        return str(error)
    return None


def examine(model_type: str, setting: str = AS_IT_COMES, **overrides: Any) -> dict[str, Any]:
    """Return the verdict on one model type under one setting, and its evidence."""
    row: dict[str, Any] = {"type": model_type, "class": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]}
    row |= {"setting": setting, "reason": "", "differences": {}, "effect": None}
    try:
        config = config_of(model_type, **overrides)
        ours, reference = (tiny_model(model_type, config) for _ in range(2))
        small = tiny_model(model_type, config, scale=0.003, dtype=torch.bfloat16)
    except Exception as error:
        return row | {"verdict": "not built", "reason": f"{type(error).__name__}: {first_line(error)}"}
    reason, small_reason = refusal(ours), refusal(small)
    if (reason is None) != (small_reason is None):
        return row | {"verdict": "DEPENDS ON WEIGHTS", "reason": f"large: {reason}; small: {small_reason}"}
    if reason is not None:
        return row | {"verdict": "refused", "reason": reason}
    try:
        measured = measure(ours, reference, LONGEST)
    except Exception as error:
        return row | {"verdict": "FAILED", "reason": f"{type(error).__name__}: {first_line(error)}"}
    row |= {"differences": measured.differences, "effect": measured.effect}
    return row | {"verdict": "exact" if measured.exact else "NOT EXACT"}


def first_line(error: Exception) -> str:
    """Return the message of an error in one short line."""
    return " ".join(str(error).split())[:160]


def sweep(model_types: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield a row per model type with its defaults, and one for every other setting worth trying."""
    for model_type in model_types:
        row = examine(model_type)
        yield row
        variants = dict(VARIANTS.get(model_type, {}))
        if row["verdict"] == "refused":
            variants = {**dict(remedies(config_of(model_type), row["reason"])), **variants}
        for name, overrides in variants.items():
            changed = examine(model_type, name, **overrides)
            if changed["verdict"] != "not built":  # otherwise the class does not have the setting
                yield changed


# ---- the page -------------------------------------------------------------------------------------------------------


REASONS = {  # what a refusal says, and the heading of its group on the page
    "sliding window": "sliding window",
    "recurrent layers": "recurrent or convolutional layers",
    "layers of type": "sparse or chunked attention",
    "position_ids": "counts tokens itself (as ALiBi does): takes no `position_ids`",
    "code computes attention itself": "computes attention itself, not through transformers' attention interface",
    "its attention uses": "attention with sinks, a soft cap, a bias, indices or a mask of its own",
    "both ways": "reads both ways: no causal model",
    "number positions": "positions do not begin at 0 (RoBERTa)",
    "names no width": "attention heads of several widths",
    "calls attention": "not one softmax attention per layer",
    "temperature of attention": "temperature by the number of the slot",
    "key-value cache": "takes no key-value cache but its own",
}


def short_reason(reason: str) -> str:
    """Return the group of a refusal; a refusal of a new kind is its own group."""
    return next((group for words, group in REASONS.items() if words in reason), reason)


def tables(record: Mapping[str, Any]) -> str:
    """Return the page's tables: the model types that are exact by setting, and the refused ones by reason."""
    rows = record["rows"]
    exact: dict[str, list[str]] = {}
    refused: dict[str, list[str]] = {}
    for row in rows:
        if row["verdict"] == "exact":
            exact.setdefault(row["setting"], []).append(row["type"])
        elif row["verdict"] == "refused":
            setting = "" if row["setting"] == AS_IT_COMES else f" ({row['setting']})"
            refused.setdefault(short_reason(row["reason"]), []).append(row["type"] + setting)
    accepted = {row["type"] for row in rows if row["verdict"] == "exact"}
    largest = max(max(row["differences"].values()) for row in rows if row["differences"])
    parts = [
        f"**Exact**: {len(accepted)} of {len({row['type'] for row in rows})} model types, {len(exact[AS_IT_COMES])} of "
        f"them as they come. The largest difference is {largest:.0e} nats.",
        markdown("setting", exact),
        "**Refused**, in brackets the setting if it is not the default one:",
        markdown("reason", refused),
    ]
    if not_built := [row["type"] for row in rows if row["verdict"] == "not built"]:
        parts.append(f"Not built here, and so not tried: {', '.join(not_built)}.")
    parts.append(
        f"`{record['command']}`, {record['hardware']}, torch {record['torch']}, transformers "
        f"{record['transformers']}, {record['date']}."
    )
    return "\n\n".join(parts)


def markdown(heading: str, groups: Mapping[str, Sequence[str]]) -> str:
    """Return a Markdown table of groups of model types, the largest group first."""
    lines = [f"| {heading} | model types |", "|---|---|"]
    ordered = sorted(groups, key=lambda name: -len(groups[name]))
    return "\n".join([*lines, *(f"| {name} | {', '.join(groups[name])} |" for name in ordered)])


def page(record: Mapping[str, Any], text: str) -> str:
    """Return the text of the page with the tables of a record."""
    head, _, rest = text.partition("<!-- architectures -->\n")
    return f"{head}<!-- architectures -->\n{tables(record)}\n<!-- end -->{rest.partition('<!-- end -->')[2]}"


# ---- the program ----------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model types, such as llama; default: all")
    parser.add_argument("--page", action="store_true", help="only write the tables of the page from the saved record")
    args = parser.parse_args()
    if args.page:
        PAGE.write_text(page(json.loads(RECORD.read_text("utf-8")), PAGE.read_text("utf-8")), encoding="utf-8")
        return
    if unknown := set(args.types) - set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        parser.error(f"transformers {transformers.__version__} has no causal model types {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)  # more threads slow down such small models
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    rows = []
    for row in sweep(args.types or list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)):
        print(f"{row['type']}, {row['setting']}: {row['verdict']} {row['reason']}", flush=True)
        rows.append(row)
    if not args.types:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        made = {"command": "python tests/exactness/architectures.py", "hardware": "CPU, 1 thread"} | versions
        record = {**made, "date": datetime.date.today().isoformat(), "rows": rows}
        RECORD.write_text(json.dumps(record) + "\n", encoding="utf-8")
    if wrong := [row for row in rows if row["verdict"].isupper()]:
        sys.exit(f"neither exact nor refused: {', '.join(row['type'] for row in wrong)}")


if __name__ == "__main__":
    main()
