"""Modules, parameters and hooks of a network are those that torch lists, also after the network has changed."""

from __future__ import annotations

import gc
import weakref

import pytest
from models import tiny_model
from torch import nn

from acgpt.engine.modules import Listing, Watch, is_hooked, modules_of, parameters_of, unchanged
from acgpt.engine.peft import Switch


def check(model):
    assert list(map(id, modules_of(model))) == list(map(id, model.modules()))
    assert list(map(id, parameters_of(model))) == list(map(id, model.parameters()))


def test_lists_follow_changes_of_the_network():
    model = tiny_model("llama")
    check(model)
    layer = model.model.layers[1]
    layer.mlp.up_proj = nn.Linear(4, 4)  # replaced
    check(model)
    layer.mlp.up_proj.extra = nn.ReLU()  # a leaf that gets a child
    check(model)
    del layer.mlp.up_proj.extra
    check(model)
    layer.shared = model.model.layers[0].mlp  # in two places
    check(model)
    layer.mlp.register_parameter("scale", nn.Parameter(layer.mlp.down_proj.weight[0].detach().clone()))
    check(model)


def test_a_module_without_children_is_listed():
    check(nn.Linear(2, 3))
    check(nn.Sequential())


def test_hooks_are_found_unless_they_only_watch():
    model = tiny_model("llama")
    watch = model.model.layers[0].register_forward_pre_hook(Watch(lambda: None))
    assert not is_hooked(model)
    hook = model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    assert is_hooked(model)
    hook.remove()
    watch.remove()
    assert not is_hooked(model)


def test_inside_a_context_the_list_is_compared_once(monkeypatch):
    model, compared, is_current = tiny_model("llama"), [], Listing.is_current
    monkeypatch.setattr(Listing, "is_current", lambda self, model: compared.append(1) or is_current(self, model))
    check(model)
    before = len(compared)
    with pytest.raises(KeyError), unchanged(model):
        with unchanged(model):
            check(model)
        check(model)
        raise KeyError
    assert len(compared) == before + 1
    model.model.layers[0].mlp.up_proj = nn.Linear(4, 4)
    check(model)
    with unchanged(model):
        check(model)


def test_a_network_that_was_listed_can_be_freed():
    model = tiny_model("llama")
    modules_of(model)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def test_a_switch_finds_adapters_that_are_added_later():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules="all-linear")
    adapted = peft.get_peft_model(tiny_model("llama"), config)
    model = adapted.get_base_model()
    switch = Switch(model)
    with switch.to("default"):
        assert all(layer._active_adapter == ["default"] for layer in switch.layers)
    adapted.add_adapter("later", config)
    with switch.to("later"):
        assert switch.layers and all(layer._active_adapter == ["later"] for layer in switch.layers)
        assert not any(layer._disable_adapters for layer in switch.layers)
    with switch.to(None, same_layers=True):
        assert all(layer._disable_adapters for layer in switch.layers)
    assert all(layer.active_adapters == ["default"] for layer in switch.layers)
