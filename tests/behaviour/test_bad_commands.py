"""The record of bad input to the command line: exit code and stderr of each command.

A case is a command line without `acgpt`; `<tmp>` is the folder that the fixture `room` fills. The frames that typer
draws around its messages are left out, because their width is that of the terminal.
"""

from __future__ import annotations

import shlex
from typing import Any

import pytest
from record import check
from room import Room
from typer.testing import CliRunner

from acgpt.cli.main import app

QUESTIONS = [
    "scor 'The {{cat}} sat.'",
    "--vesion",
    "score The {{cat}} sat.",
    "score",
    "score 'The cat sat.' -m <tmp>/model",
    "score 'The {{cat sat.' -m <tmp>/model",
    "score 'The {{_2}} sat.' -m <tmp>/model --json",
    "score 'The {{_}} sat.' -m <tmp>/model",
    "score '{{a}}' -a /nowhere/at/all",
    "score 'The {{cat}} sat.' -m <tmp>/nowhere",
    "score 'The {{cat}} sat.' -m <tmp>/model --device tpu",
    "score 'The {{cat}} sat.' -m <tmp>/model --dtype int8",
    "score 'The {{cat}} sat.' -m <tmp>/model -a <tmp>/corpus",
    "score 'The {{cat}} sat.' -m <tmp>/model -a <tmp>/adapter -a <tmp>/corpus",
    "score 'The {{cat}} sat.' -m <tmp>/model -a x=<tmp>/adapter -a x=<tmp>/corpus",
    "score 'The {{cat}} sat.' --jsn",
    "score 'The {{cat}} sat.' --server http://127.0.0.1:8080 -m <tmp>/model",
    "score --file <tmp>/nowhere.txt -m <tmp>/model",
    "score --file <tmp> -m <tmp>/model",
    "score --file <tmp>/blank.txt -m <tmp>/model",
    "score --file <tmp>/latin1.txt -m <tmp>/model",
    "score --file <tmp>/notes.txt -m <tmp>/model",
    "score --file <tmp>/notes.txt 'The {{cat}} sat.' -m <tmp>/model",
    "rank 'The cat sat.' -m <tmp>/model",
    "rank 'The {{_}} sat.' -m <tmp>/model",
    "rank 'The {{cat|cat}} sat.' -m <tmp>/model",
    "rank --future maybe 'The {{a|b}} sat.'",
    "infill 'The cat sat.' -m <tmp>/model",
    "infill 'The {{_}} sat.' -m <tmp>/model -n 0",
    "infill 'The {{_}} sat.' -m <tmp>/model -n many",
    "infill 'The {{_}} sat.' -m <tmp>/model --top-p 0",
    "infill 'The {{_}} sat.' -m <tmp>/model --top-p 1.5",
    "infill 'The {{_}} sat.' -m <tmp>/model --temperature nan",
    "infill 'The {{_}} sat.' -m <tmp>/model --temperature inf",
    "infill 'The {{_}} sat.' -m <tmp>/model --stop ''",
    "infill 'The {{_}} sat.' -m <tmp>/model --max-tokens 0",
    "infill 'The {{_}} sat.' -m <tmp>/model --best-of 0",
    "infill 'The {{_}} sat {{on|by}}.' -m <tmp>/model",
    "infill 'The {{_x}} sat.' -m <tmp>/model",
    "infill 'The {{_500-600}} sat.' -m <tmp>/model",
    "infill 'The {{?3}} sat.' -m <tmp>/model",
    "infill '' -m <tmp>/model",
    "infill '" + "cat " * 64 + "{{_}}' -m <tmp>/model",
    "infill 'The {{_}} sat.' -m <tmp>/model --seed -1",
    "infill 'The {{_5-3}} sat.' -m <tmp>/model",
    "infill 'The {{_:[}} sat.' -m <tmp>/model",
    "infill 'The {{_20-30}} sat.' -m <tmp>/model --max-tokens 5",
    "show 'The cat sat.'",
    "show 'The {{cat}} sat.' -m <tmp>/nowhere",
    "show 'The {{cat}} sat.' -a /nowhere/at/all",
    "show 'The {{cat}} sat.' -m <tmp>/model -o <tmp>/nowhere/picture.png",
    "show 'The {{cat}} sat.' -m <tmp>/model -o <tmp>/picture.xyz",
    "show 'The {{_}} sat.' -m <tmp>/model",
    "draw mode",
    "draw conditioning -c '{r_mx: 1}' -o <tmp>/sets.png",
    "draw conditioning -c r_max -o <tmp>/sets.png",
    "draw conditioning -c '{r_max: 2}'",
    "draw conditioning -c '{r_max: '",
    "draw conditioning -c '{empty: 1}' -o <tmp>/sets.txt",
    "draw conditioning -c '{empty: 1}' -o <tmp>/nowhere/sets.png",
    "draw conditioning --length 0",
    "draw conditioning --rows 0",
    "draw conditioning --seed -1",
]
MEASURING = [
    "evaluate",
    "evaluate <tmp>/model",
    "evaluate <tmp>/model <tmp>/nowhere",
    "evaluate <tmp>/model <tmp>/notes.txt",
    "evaluate <tmp>/nowhere <tmp>/corpus",
    "evaluate <tmp>/unfinished <tmp>/corpus --length 31",
    "evaluate <tmp>/model <tmp>/corpus --rmax 0.5",
    "evaluate <tmp>/model <tmp>/corpus --r-max 1.5",
    "evaluate <tmp>/model <tmp>/corpus --split test",
    "evaluate <tmp>/model <tmp>/corpus --length 500",
    "evaluate <tmp>/model <tmp>/corpus --limit 0",
    "evaluate <tmp>/model <tmp>/corpus --length 31 --modes infill",
    "evaluate <tmp>/model <tmp>/corpus --length 31 --conditioning '{b_mx: 4}'",
    "evaluate <tmp>/model <tmp>/corpus --length 31 --conditioning '{b_max: '",
    "evaluate <tmp>/model <tmp>/corpus --length 31 --conditioning 4",
    "evaluate <tmp>/model <tmp>/corpus --length 31 --conditioning model --r-max 0.4",
    "evaluate <tmp>/model <tmp>/corpus --length 31 --seed 4294967296",
    "evaluate <tmp>/model <tmp>/corpus --length 31 --records <tmp>/records.csv",
    "evaluate <tmp>/model --dataset <tmp>/nowhere.safetensors",
    "evaluate <tmp>/model <tmp>/other --length 31",
    "evaluate <tmp>/model <tmp>/corpus --length 31 --conditioning model",
    "evaluate <tmp>/model <tmp>/corpus --length 31 --method ac-gtp",
    "evaluate <tmp>/model <tmp>/corpus --length 31 --method-option draws",
    "evaluate <tmp>/model <tmp>/corpus --length 31 --method-option draws=3",
    "evaluate <tmp>/model <tmp>/corpus --length 31 -o <tmp>/empty",
    "evaluate <tmp>/model <tmp>/corpus --length 31 -o <tmp>/notes.txt/result.json",
    "generate <tmp>/model <tmp>/corpus",
    "generate <tmp>/model -o <tmp>/samples",
    "generate <tmp>/model <tmp>/corpus -o <tmp>/samples --length 31 --modes sideways",
    "generate <tmp>/model <tmp>/corpus -o <tmp>/samples --length 31 --method gpt --modes training",
    "generate <tmp>/model <tmp>/corpus -o <tmp>/samples --length 31 --method-option order=random",
    "generate <tmp>/model <tmp>/corpus -o <tmp>/notes.txt/samples --length 31",
    "generate <tmp>/model <tmp>/other -o <tmp>/samples --length 31",
    "generate <tmp>/model <tmp>/corpus -o <tmp>/notes.txt --length 31",
    "generate <tmp>/model <tmp>/corpus -o <tmp>/samples --quite",
    "generate <tmp>/model <tmp>/corpus -o <tmp>/samples --top-p 0",
    "generate <tmp>/model <tmp>/corpus -o <tmp>/samples --length 31 --prompt 31",
    "generate <tmp>/model <tmp>/no-validation -o <tmp>/samples --length 31",
    "mauve <tmp>/nowhere <tmp>/corpus --no-mauve",
    "mauve <tmp>/empty <tmp>/corpus --no-mauve",
    "mauve <tmp>/notes.txt <tmp>/corpus --no-mauve",
    "mauve <tmp>/empty <tmp>/corpus --no-mauve --skip 0 --asked-only",
    "mauve <tmp>/drawn <tmp>/corpus --asked-only --rule windows --count 5",
    "mauve <tmp>/drawn <tmp>/corpus --no-mauve --seeds 5",
    "mauve <tmp>/drawn <tmp>/corpus --no-mauve --features default",
    "mauve <tmp>/drawn <tmp>/corpus --field story",
    "mauve <tmp>/drawn <tmp>/notes.txt --limit 9",
    "mauve <tmp>/drawn <tmp>/notes.txt --split test --length 9",
    "mauve <tmp>/drawn <tmp>/notes.txt --asked-only",
    "mauve <tmp>/drawn <tmp>/nowhere --split test --no-mauve",
    "mauve <tmp>/drawn <tmp>/corpus --split test --no-mauve",
    "mauve <tmp>/drawn <tmp>/corpus --rule pages --no-mauve",
    "mauve <tmp>/drawn <tmp>/corpus --no-mauve --limit 15",
    "mauve <tmp>/drawn <tmp>/corpus --no-mauve --judge <tmp>/nowhere",
    "mauve <tmp>/drawn <tmp>/corpus --no-mauve -o <tmp>/drawn/training.json",
    "mauve <tmp>/drawn <tmp>/corpus --no-mauve --index <tmp>/corpus/corpus.json",
    "mauve <tmp>/drawn <tmp>/corpus --no-mauve --index <tmp>/all.mauve.json",
    "mauve <tmp>/drawn <tmp>/corpus --no-mauve -o <tmp>/one.json --index <tmp>/drawn/../one.json",
    "mauve <tmp>/drawn/training.json <tmp>/corpus --no-mauve",
    "mauve <tmp>/drawn <tmp>/drawn-again <tmp>/corpus --no-mauve -o <tmp>/one.json",
    "mauve <tmp>/drawn <tmp>/drawn-again <tmp>/corpus --no-mauve -o <tmp>/scores",
    "mauve <tmp> <tmp>/corpus --no-mauve",
    "mauve <tmp>/empty <tmp>/corpus --seeds 0",
    "report",
    "report <tmp>/nowhere -o <tmp>/report",
    "report <tmp>/empty -o <tmp>/report",
    "report <tmp>/notes.txt -o <tmp>/report",
    "report <tmp>/unfinished -o <tmp>/report",
    "report <tmp>/model -o <tmp>/notes.txt",
    "report <tmp>/model -o <tmp>/model",
    "methods all",
    "methods --jsn",
]
TRAINING = [
    "train",
    "train tiny-cup",
    "train <tmp>/nowhere.yaml",
    "train <tmp>/list.yaml",
    "train <tmp>/typo.yaml",
    "train <tmp>/recipe.yaml stpes=3",
    "train <tmp>/recipe.yaml steps",
    "train <tmp>/recipe.yaml steps=many",
    "train <tmp>/recipe.yaml optimizer=adam",
    "train <tmp>/recipe.yaml lr=0",
    "train <tmp>/recipe.yaml conditioning.r_mx=0.5",
    "train <tmp>/recipe.yaml corpus=<tmp>/nowhere",
    "train <tmp>/recipe.yaml output=<tmp>/corpus",
    "train <tmp>/recipe.yaml output=<tmp>/notes.txt",
    "train <tmp>/recipe.yaml eval_split=tset output=<tmp>/other",
    "train <tmp>/recipe.yaml --minutes 0",
    "train <tmp>/recipe.yaml --resum",
    "train qwen3-1.7b-lora",
    "finetune",
    "finetune tiny-cpu -c <tmp>/corpus -o <tmp>/tuned",
    "finetune --full --rank 8",
    "finetune finetune-lora -c <tmp>/corpus -o <tmp>/tuned base=<tmp>/model --rank 0",
    "finetune finetune-lora -c <tmp>/corpus -o <tmp>/tuned base=<tmp>/nowhere",
    "finetune finetune-lora -c <tmp>/corpus -o <tmp>/tuned base=<tmp>/model --full lora.rank=3",
    "finetune finetune-lroa -c <tmp>/corpus -o <tmp>/tuned",
    "experiment",
    "experiment tiny-cup",
    "experiment <tmp>/grid-typo.yaml",
    "experiment <tmp>/grid-scalar.yaml",
    "experiment <tmp>/recipe.yaml",
    "experiment <tmp>/grid.yaml --only seed-7",
    "experiment <tmp>/grid.yaml --list seed=1",
    "experiment <tmp>/grid.yaml -o <tmp>/notes.txt",
    "experiment <tmp>/grid.yaml --minutes 0",
    "experiment <tmp>/grid.yaml --nproc-per-node 0",
]
SHARING = [
    "prepare",
    "prepare <tmp>/notes.txt",
    "prepare <tmp>/nowhere.txt -o <tmp>/new",
    "prepare <tmp>/binary.xyz -o <tmp>/new",
    "prepare <tmp>/empty -o <tmp>/new",
    "prepare <tmp>/notes.txt -o <tmp>/model",
    "prepare <tmp>/notes.txt -o <tmp>/new --validation 0.9",
    "prepare <tmp>/notes.txt -o <tmp>/new --convention word",
    "prepare <tmp>/notes.txt -o <tmp>/new --train-tokenizer 5",
    "prepare <tmp>/notes.txt -o <tmp>/new --train-tokenizer 500 --tokenizer gpt2",
    "prepare <tmp>/notes.txt -o <tmp>/new --shard-size nan",
    "prepare <tmp>/notes.txt -o <tmp>/new --validation some",
    "prepare <tmp>/notes.txt -o <tmp>/new --seed -1",
    "prepare <tmp>/notes.txt -o <tmp>/new --limit 0",
    "prepare <tmp>/notes.txt -o <tmp>/new --tokenizer ./nowhere",
    "prepare <tmp>/notes.txt -o /proc/no-such/new",
    "prepare <tmp>/notes.txt -o <tmp>/new --shard-size 0.0001",
    "prepare <tmp>/notes.txt -o <tmp>/new --workers 0",
    "merge",
    "merge <tmp>/model <tmp>/adapter -o <tmp>/corpus",
    "merge <tmp>/model <tmp>/nowhere -o <tmp>/merged",
    "merge <tmp>/nowhere <tmp>/adapter -o <tmp>/merged",
    "push <tmp>/nowhere owner/model --dry-run",
    "push <tmp>/empty owner/model --dry-run",
    "push <tmp>/adapter owner/model --dry-run",
    "push <tmp>/model model --dry-run",
    "serve --port 70000",
    "serve --port web",
    "serve --timeout 0",
    "serve --queue 0",
    "serve -m <tmp>/nowhere",
    "serve -m <tmp>/model --host 0.0.0.0",
    "serve -m <tmp>/model --api-key-file <tmp>/nowhere",
    "serve -m <tmp>/model --api-key-file <tmp>/blank.txt",
    "serve -m <tmp>/model --api-key-file <tmp>/notes.txt",
]
TABLES = {"questions": QUESTIONS, "measuring": MEASURING, "training": TRAINING, "sharing": SHARING}
# Wide, so that nothing is wrapped; rich ignores the width of a dumb terminal.
ENVIRONMENT = {"COLUMNS": "4000", "NO_COLOR": "1", "TERM": "xterm", "ACGPT_API_KEY": None}


def plain(text: str) -> list[str]:
    """Return the lines of stderr without typer's frames."""
    lines = [line.strip("│").rstrip() if line.startswith("│") else line.rstrip() for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith(("╭", "╰"))]


def end_of(case: str, room: Room) -> dict[str, Any]:
    """Return the exit code and the stderr of a command that fails."""
    done = CliRunner().invoke(app, shlex.split(room.real(case)), env=ENVIRONMENT, prog_name="acgpt")
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return {"exit": done.exit_code, "stderr": plain(room.told(done.stderr)), "stdout": plain(room.told(done.stdout))}


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("table", TABLES)
def test_ends_of_bad_commands(table: str, room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(room.folder)
    before = room.files()
    ends = {case: end_of(case, room) for case in TABLES[table]}
    assert [case for case, end in ends.items() if end["exit"] == 0] == []
    assert room.files() == before  # a command that is refused writes nothing
    check(f"commands-{table}", ends)
