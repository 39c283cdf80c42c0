"""Two processes learn what one does, with whole models (DDP) or with a share each (FSDP); on CPUs, over gloo."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from runs import SMALL, ended, kill_self, loss_of, ranks, read_rows, replace
from safetensors.torch import load_file
from transformers.models.gpt_neox import modeling_gpt_neox

from acgpt.training.log import DURING
from acgpt.training.recipe import make
from acgpt.training.train import train

ROOT = Path(__file__).resolve().parents[2]
KEYS = SMALL | {"steps": 6, "save_every": 2, "eval_every": 2, "micro_batch": 2, "keep": 9}
CLOSE = 1e-5  # relative: what another order of the same sums in fp32 may change in a loss


@pytest.fixture(scope="module")
def alone(corpus, tmp_path_factory):
    """Folder of the same run in one process."""
    folder = tmp_path_factory.mktemp("runs") / "alone"
    train(make(KEYS | {"corpus": str(corpus), "output": str(folder)}, "x"), quiet=True)
    return folder


def words_of(corpus, folder, **keys):
    path = folder.with_suffix(".yaml")
    path.write_text(json.dumps(KEYS | {"corpus": str(corpus), "output": str(folder)} | keys))
    return ("train", path, "--resume")


def together(words, folder, before=None, detail=None, env=None):
    """Run a command in two processes. If one dies the other is ended, as torchrun would."""
    both = ranks(2, *words, output=folder.with_suffix(".said"), before=before, detail=detail, env=env)
    with ended(*both):
        codes = [both[0].wait()]
        if codes[0] != 0:
            both[1].process.kill()
        codes.append(both[1].wait())
    return codes, [command.printed() for command in both]


def check_learnt_the_same(run, alone, tolerance=CLOSE):
    assert loss_of(run) == pytest.approx(loss_of(alone), rel=tolerance)
    for one, other in zip(read_rows(run), read_rows(alone), strict=True):
        assert one["step"] == other["step"]
        for name in ("grad_norm", *DURING):
            assert float(one[name] or 0) == pytest.approx(float(other[name] or 0), rel=1e-3)
    mine, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (run, alone))
    assert mine.keys() == theirs.keys()
    for name in mine:
        torch.testing.assert_close(mine[name], theirs[name], rtol=1e-3, atol=1e-3)


def at_the_second_checkpoint(rank):
    """Kill the first process after the checkpoint of step 4 is written, before it is renamed."""

    def make(old):
        def commit(partial, final):
            return kill_self() if final.name == "checkpoint-4" else old(partial, final)

        return commit

    replace("acgpt.training.state:commit", make)


@pytest.mark.slow
def test_two_processes_train_as_one_does_and_one_process_speaks(corpus, alone, tmp_path):
    run = tmp_path / "run"
    codes, output = together([*words_of(corpus, run), "--json", "--quiet"], run)
    assert codes == [0, 0] and output[1] == "", output
    (line,) = output[0].splitlines()
    results = json.loads(line)
    assert (results["processes"], results["fsdp"]) == (2, False)
    check_learnt_the_same(run, alone)


@pytest.mark.soak  # three processes import everything anew; the others get the environment of torchrun from `ranks`
def test_torchrun_trains_as_one_process_does_and_one_process_speaks(corpus, alone, tmp_path):
    run = tmp_path / "run"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "acgpt"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    words = [*launcher, *map(str, words_of(corpus, run)), "--json", "--quiet"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    results = json.loads(line)
    assert (results["processes"], results["fsdp"]) == (2, False)
    assert done.stderr == ""
    check_learnt_the_same(run, alone)


@pytest.mark.slow
def test_two_processes_that_are_killed_go_on_bit_for_bit(corpus, tmp_path):
    """With dropout, so that each process must get back random numbers of its own."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    codes, output = together(words_of(corpus, whole, dropout=0.2), whole)
    assert codes == [0, 0], output
    words = words_of(corpus, run, dropout=0.2)
    codes, _ = together(words, run, before=at_the_second_checkpoint)
    assert codes[0] == -signal.SIGKILL and codes[1] != 0  # the other is killed, or finds its partner gone first
    assert [path.name for path in (run / "checkpoints").glob("checkpoint-*")] == ["checkpoint-2"]
    codes, output = together(words, run)
    assert codes == [0, 0], output
    assert read_rows(run) == read_rows(whole)
    for name in ("model", "checkpoints/checkpoint-6"):
        assert (run / name / "model.safetensors").read_bytes() == (whole / name / "model.safetensors").read_bytes()
    states = [torch.load(run / f"checkpoints/checkpoint-6/rng_state_{rank}.pth", weights_only=False) for rank in (0, 1)]
    seeds = [torch.Generator().set_state(state["cpu"]).initial_seed() for state in states]
    assert seeds == [0, 1]  # texts of their own get noise of their own


def note_shares(path):
    """Write down which share of the parameters this process holds, and kill it at the second checkpoint."""

    def make(old):
        def save(self, *args):
            held = [getattr(weight, "_local_tensor", weight).numel() for weight in self.model.parameters()]
            Path(path).write_text(str(sum(held) / sum(weight.numel() for weight in self.model.parameters())))
            return old(self, *args)

        return save

    replace("acgpt.training.state:State.save", make)
    at_the_second_checkpoint(None)


@pytest.mark.slow
def test_fsdp_trains_evaluates_exports_and_resumes_as_one_process_does(corpus, alone, tmp_path):
    run, share = tmp_path / "run", tmp_path / "share"
    words = words_of(corpus, run, parallel="fsdp")
    codes, output = together(words, run, before=note_shares, detail=str(share))
    assert codes[0] == -signal.SIGKILL and codes[1] != 0, output  # as above
    assert float(share.read_text()) == pytest.approx(0.5, abs=0.02)  # it really is shared out
    codes, output = together(words, run)
    assert codes == [0, 0], output
    assert output[1] == ""
    assert json.loads((run / "results.json").read_text())["fsdp"]
    check_learnt_the_same(run, alone)
    assert not [path for path in (run / "checkpoints" / "checkpoint-6").iterdir() if path.suffix == ".bin"]


@pytest.mark.slow
def test_fsdp_as_accelerate_launches_it_from_the_configuration_that_is_shipped(corpus, alone, tmp_path):
    """The environment is the one that accelerate itself makes of the file; a run that was finished but for its end."""
    env = accelerate_environment(ROOT / "configs" / "accelerate-fsdp.yaml")
    run = tmp_path / "run"
    words = words_of(corpus, run)
    codes, output = together(words, run, before=fail_to_export, env=env)
    assert codes[0] == 1 and "cannot write" in output[0]
    codes, output = together(words, run, env=env)
    assert codes == [0, 0], output
    results = json.loads((run / "results.json").read_text())
    assert results["fsdp"] and results["recipe"]["parallel"] == "ddp"
    check_learnt_the_same(run, alone)


def fail_to_export(_):
    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    replace("acgpt.models.language_model:LanguageModel.save_pretrained", lambda old: fail)


# ---- configurations of accelerate -----------------------------------------------------------------------------------


def accelerate_environment(config):
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    args = launch_command_parser().parse_args(["--config_file", str(config), "-m", "acgpt", "train"])
    args, _, _ = _validate_launch_command(args)
    assert (args.module, args.training_script, args.num_processes) == (True, "acgpt", 8)
    made = prepare_multi_gpu_env(args)
    return {name: value for name, value in made.items() if name.startswith(("ACCELERATE_", "FSDP_"))}


def test_accelerates_configurations_are_read_by_accelerate_and_name_a_layer_that_exists(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "FSDP_")):
            monkeypatch.delenv(name)
    ddp, fsdp = (accelerate_environment(ROOT / "configs" / f"accelerate-{kind}.yaml") for kind in ("ddp", "fsdp"))
    assert "ACCELERATE_USE_FSDP" not in ddp
    assert (fsdp["ACCELERATE_USE_FSDP"], fsdp["FSDP_VERSION"]) == ("true", "2")
    assert fsdp["FSDP_STATE_DICT_TYPE"] == "FULL_STATE_DICT"
    assert hasattr(modeling_gpt_neox, fsdp["FSDP_TRANSFORMER_CLS_TO_WRAP"])
    for kind in ("ddp", "fsdp"):
        content = yaml.safe_load((ROOT / "configs" / f"accelerate-{kind}.yaml").read_text())
        assert content["num_processes"] == 8 and content["mixed_precision"] == "no"


def test_a_mistake_is_told_by_one_process(corpus, tmp_path):
    both = ranks(2, "train", "tiny-cpu", "stpes=3", output=tmp_path / "said")
    with ended(*both):
        assert [command.wait() for command in both] == [2, 2]
    assert "did you mean 'steps'" in both[0].printed()
    assert both[1].printed() == ""
