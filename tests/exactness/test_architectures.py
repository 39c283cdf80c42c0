"""Whatever causal model transformers offers is exact, or refused with a reason: representative classes.

architectures.py runs all of them. The networks and the oracle here are that program's.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import architectures
import pytest
import torch
from transformers import PreTrainedModel

from acgpt.engine import architecture
from acgpt.engine.architecture import check_model
from acgpt.engine.attention import NAME
from acgpt.errors import ModelError
from acgpt.models.language_model import positions_of

FULL = {"layer_types": ["full_attention"] * 4}
LONGEST = 10  # tokens; more than every window and temperature of these networks waits for
SMALL = {"scale": 0.003, "dtype": torch.bfloat16}
torch.set_num_threads(1)


def built(model_type: str, own: dict[str, Any] | None = None, **how: Any) -> PreTrainedModel:
    """A tiny network; a test whose class this version of transformers does not have is skipped."""
    if model_type not in architectures.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        pytest.skip(f"this version of transformers has no {model_type}")
    return architectures.tiny_model(model_type, architectures.config_of(model_type, **(own or {})), **how)


def rope(rope_type: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 1e4, "factor": 4.0, **more}}


ACCEPTED = {
    "mixtral": ("mixtral", {}),
    "smollm3": ("smollm3", {}),
    "bert as a decoder": ("bert", {"is_decoder": True}),
    "a window that no layer uses": ("olmo3", FULL),
    "a view of what attention returns": ("afmoe", FULL),
    "dynamic rope": ("llama", rope("dynamic")),
    "longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 16,
            **rope(
                "longrope", original_max_position_embeddings=16, short_factor=[1.0] * 4, long_factor=[4.0] * 4
            ),
        },
    ),
    "a temperature by position": (
        "ministral3", rope("yarn", original_max_position_embeddings=4, llama_4_scaling_beta=0.5),
    ),
    "llama4 without a temperature": ("llama4_text", {**FULL, "attn_temperature_tuning": False}),
}  # fmt: skip


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted_models_agree_with_the_oracle_in_every_way_of_asking(name):
    ours, reference = (built(*ACCEPTED[name]) for _ in range(2))
    check_model(ours)
    measured = architectures.measure(ours, reference, LONGEST)
    assert measured.exact, measured
    assert set(measured.differences) == {
        "with copies", "left to right", "sampling with copies", "sampling left to right"
    }  # fmt: skip


REFUSED = {
    "temperature by slot": ("llama4_text", FULL, "attn_temperature_tuning to false"),
    "bert": ("bert", {}, "reads a text both ways.*is_decoder"),
    "electra": ("electra", {}, "reads a text both ways"),
    "ernie": ("ernie", {}, "reads a text both ways"),
    "bert-generation": ("bert-generation", {}, "reads a text both ways"),
    "positions after padding": ("roberta", {"is_decoder": True}, "does not number positions 0, 1, 2"),
    "alibi": ("bloom", {}, "does not take position_ids"),
    "alibi in mpt": ("mpt", {}, "does not take position_ids"),
    "gptj": ("gptj", {}, "computes attention itself"),
    "stablelm": ("stablelm", {}, "computes attention itself"),
    "falcon": ("falcon", {}, "computes attention itself"),
    "xglm": ("xglm", {}, "computes attention itself"),
    "a cache of its own": ("minimax", FULL, "no key-value cache but its own"),
    "recurrent": ("minimax", {}, r"recurrent layers \(linear_attention\)"),
    "chunks": ("llama4_text", {}, "chunked_attention"),
    "sparse": ("minimax_m3_vl_text", {"layer_types": ["minimax_m3_sparse"] * 4}, "minimax_m3_sparse, which leave keys"),
    "softcap": ("gemma2", FULL, "attention uses softcap"),
    "sinks": ("gpt_oss", FULL, "attention uses s_aux"),
    "heads of several widths": ("gemma4_text", FULL, "no width that all attention heads have"),
    "several passes a layer": ("diffllama", {}, "8 times for its 4 layers"),
}


@pytest.mark.parametrize("weights", [{}, SMALL], ids=["large weights", "small weights in bfloat16"])
@pytest.mark.parametrize("name", REFUSED)
def test_refused_models_are_refused_whatever_their_weights_with_a_reason(name, weights):
    model_type, own, reason = REFUSED[name]
    model = built(model_type, own, **weights)
    with pytest.raises(ModelError, match=reason) as refusal:
        check_model(model)
    assert not str(refusal.value).count("Error:")  # no words of somebody else's code


@pytest.mark.parametrize("scale", [1e-4, 0.02, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_are_accepted_whatever_their_weights(scale, dtype):
    for model_type in ("llama", "gpt2"):
        check_model(built(model_type, scale=scale, dtype=dtype))


@pytest.mark.parametrize("weights", [{}, SMALL], ids=["large weights", "small weights in bfloat16"])
def test_a_temperature_by_slot_is_found_by_trial_too(monkeypatch, weights):
    monkeypatch.setattr(architecture, "objection", lambda model: None)
    model = built("llama4_text", {**FULL, "floor_scale": 8192}, **weights)
    with pytest.raises(ModelError, match="number of a slot"):
        check_model(model)


def test_the_oracle_sees_a_temperature_that_follows_slots():
    ours, reference = (built("llama4_text", {**FULL, "attn_scale": 1.0}) for _ in range(2))
    ours.set_attn_implementation(NAME)  # unchecked
    measured = architectures.measure(ours, reference, LONGEST)
    assert not measured.exact
    assert min(measured.differences[way] for way in ("with copies", "sampling with copies")) > 0.1  # nats


@pytest.mark.parametrize("scale", [0.3, 0.02])
def test_a_model_that_reads_both_ways_is_found_by_trial_too(scale):
    model = built("bert", scale=scale)
    model.set_attn_implementation("eager")
    for module in model.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = True  # it lies; its mask is that of an encoder
    with pytest.raises(ModelError, match="both ways"):
        check_model(model)


def test_experts_in_float64_are_exact_or_refused_with_the_remedy():
    ours, reference = (built("mixtral", dtype=torch.float64) for _ in range(2))
    try:
        check_model(ours)
    except ModelError as refusal:
        assert "set_experts_implementation" in str(refusal) and "float32" in str(refusal)
        for model in (ours, reference):
            model.set_experts_implementation("eager")
        check_model(ours)
    assert architectures.measure(ours, reference, LONGEST).exact


def test_positions_end_where_a_rope_by_layer_type_would_change():
    if "modernbert-decoder" not in architectures.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        pytest.skip("this version of transformers has no modernbert-decoder")
    ropes = {
        "full_attention": rope("longrope", original_max_position_embeddings=24)["rope_parameters"],
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    config = architectures.config_of("llama")
    assert positions_of(config) == 64
    config.rope_parameters = ropes
    assert positions_of(config) == 24


def test_the_program_says_of_each_class_what_became_of_it(monkeypatch):
    monkeypatch.setattr(architectures, "LONGEST", LONGEST)
    exact, refused = architectures.sweep(["gpt2", "bloom"])
    assert (exact["type"], exact["class"], exact["verdict"]) == ("gpt2", "GPT2LMHeadModel", "exact")
    assert 0 < max(exact["differences"].values()) < 1e-3 < exact["effect"]
    assert (refused["verdict"], refused["differences"]) == ("refused", {}) and "position_ids" in refused["reason"]
    made = dict.fromkeys(("command", "hardware", "torch", "transformers", "date"), "")
    page = architectures.tables({"rows": [exact, refused], **made})
    assert "**Exact**: 1 of 2 model types" in page and "| as it comes | gpt2 |" in page
    assert page.index("| gpt2 |") < page.index("**Refused**") < page.index("takes no `position_ids` | bloom |")


def test_the_page_has_the_tables_of_the_saved_record():
    record, text = json.loads(architectures.RECORD.read_text("utf-8")), architectures.PAGE.read_text("utf-8")
    assert architectures.page(record, text) == text
    refusals = [row["reason"] for row in record["rows"] if row["verdict"] == "refused"]
    assert all(architectures.short_reason(reason) in architectures.REASONS.values() for reason in refusals)


def test_the_program_fails_if_a_model_is_neither_exact_nor_refused(monkeypatch, capsys):
    monkeypatch.setattr(architectures, "refusal", lambda model: model.set_attn_implementation(NAME))  # accepts all
    tuned = {**FULL, "attn_scale": 1.0}
    monkeypatch.setattr(
        architectures, "config_of", lambda model_type, of=architectures.config_of, **own: of(model_type, **tuned)
    )
    monkeypatch.setattr(architectures, "LONGEST", LONGEST)
    monkeypatch.setattr(architectures, "VARIANTS", {})
    monkeypatch.setattr(sys, "argv", ["architectures.py", "llama4_text"])
    with pytest.raises(SystemExit, match="neither exact nor refused: llama4_text"):
        architectures.main()
    assert "llama4_text, as it comes: NOT EXACT" in capsys.readouterr().out
