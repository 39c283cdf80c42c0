"""The command line, on a tiny model: what it prints, how it ends, and that it agrees with the Python API."""

from __future__ import annotations

import gc
import io
import json
import math
import re
import signal
import sys
import warnings
from pathlib import Path
from threading import Timer

import pytest
from imports import run_commands
from runs import Piped
from typer.testing import CliRunner

import acgpt
from acgpt.cli.main import app, tidy
from acgpt.cli.templates import BATCH, LARGEST, SCORE, json_fields, questions
from acgpt.cli.ui import emit
from acgpt.common.memory import gc_paused
from acgpt.display.show import Page, print_score
from acgpt.methods import METHODS
from acgpt.models.answer_json import to_json
from acgpt.models.ask import Score, TokenScore

TEMPLATE = "The capital of {{France}} is {{Paris}}, they say."


def objects(result):
    return [json.loads(line, parse_constant=pytest.fail) for line in result.stdout.splitlines()]


def without_warnings(function, *arguments, **named):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*arguments, **named)


def near(value):
    """The value of JSON, its numbers up to rounding."""
    if isinstance(value, dict):
        return {key: near(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [near(entry) for entry in value]
    return pytest.approx(value, abs=1e-4, rel=1e-4) if isinstance(value, float) else value


def named(answer, *names):
    return {name: near(to_json(answer)[name]) for name in names}


# ---- answers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["reads", "plain"])
@pytest.mark.parametrize(("options", "future"), [([], None), (["--future"], True), (["--no-future"], False)])
def test_score_says_in_json_what_the_api_says(cli, lms, model, options, future):
    keys = ("log_prob", "perplexity", "tokens")
    expected = without_warnings(lms[model].log_prob, TEMPLATE, future=future)
    (answer,) = objects(cli("score", TEMPLATE, "--json", *options, model=model))
    both = {
        key: named(lms[model].log_prob(TEMPLATE, future=read), *keys)
        for key, read in {"past_only": False, "with_future": True}.items()
        if future is None
    }
    assert answer == {"template": TEMPLATE, **named(expected, "future", *keys), **both}


def test_score_has_no_result_with_the_future_in_json_if_there_is_no_future(cli):
    (answer,) = objects(cli("score", "The capital of France is {{Paris}}", "--json"))
    assert answer["with_future"] is None and answer["past_only"]["tokens"][0]["text"] == " Paris"


def test_infill_says_in_json_what_the_api_says(cli, lms):
    settings = {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "seed": 5}
    options = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    template = "The {{_3}} of France{{_1}}."
    samples = lms["reads"].sample(template, 3, **settings)
    (answer,) = objects(cli("infill", template, "-n", "3", "--json", *options))
    expected = [named(sample, "text", "fills", "log_prob", "perplexity", "tokens") for sample in samples]
    assert answer == {"template": template, "seed": 5, "future": True, "samples": expected}


def test_a_fresh_seed_is_reported_and_repeats_the_run(cli):
    first, second = (objects(cli("infill", "a {{_8}}", "--json"))[0] for _ in range(2))
    assert first["seed"] != second["seed"]
    assert objects(cli("infill", "a {{_8}}", "--json", "--seed", str(first["seed"])))[0] == first
    for_people = cli("infill", "a {{_8}}", "--seed", str(first["seed"])).stdout
    assert f"seed {first['seed']}" in for_people
    refused = cli("infill", "a {{_800}}", "--seed", "5", code=2)
    assert "seed" not in refused.stdout and "800" in refused.stderr
    assert f"log p {first['samples'][0]['log_prob']:8.2f}" in for_people


@pytest.mark.parametrize("model", ["reads", "plain"])
def test_rank_says_in_json_what_the_api_says(cli, lms, model):
    template = "The {{cat|dog|capital of France}} sat."
    ranking = lms[model].rank(template)
    (answer,) = objects(cli("rank", template, "--json", model=model))
    assert answer == {"template": template, **named(ranking, "compared", "future", "alternatives")}
    people = cli("rank", template, model=model).stdout
    assert "Compared by the probability of the whole text" in people
    assert people.index(ranking[0].choice[0], len(template)) < people.index(ranking[1].choice[0], len(template))


@pytest.mark.parametrize("model", ["reads", "plain"])
def test_score_shows_people_both_ways_of_reading_in_bits(cli, lms, model):
    shown = cli("score", TEMPLATE, model=model).stdout
    for future in (False, True):
        for token in lms[model].log_prob(TEMPLATE, future=future).tokens:
            assert f"{-token.log_prob / math.log(2):.2f}" in shown
    assert "past only" in shown and "with future" in shown
    assert ("has not been trained to read the future" in shown) == (model == "plain")


def test_score_shows_one_way_when_told_or_when_there_is_no_future(cli):
    assert "with future" not in cli("score", TEMPLATE, "--no-future").stdout
    assert "past only" not in cli("score", TEMPLATE, "--future").stdout
    shown = cli("score", "The capital of France is {{Paris}}").stdout
    assert "with future" not in shown and "no future to read" in shown


def test_a_number_that_is_not_finite_is_null_in_json(lms, capsys):
    emit({"a": [math.inf, {"b": math.nan}, 1.5]})
    assert json.loads(capsys.readouterr().out) == {"a": [None, {"b": None}, 1.5]}
    impossible = Score((TokenScore("a", 1, 1, -1e6),), future=False)
    emit(json_fields(lms["reads"], impossible, *SCORE))
    assert json.loads(capsys.readouterr().out)["perplexity"] is None


@pytest.mark.parametrize("command", [["score", TEMPLATE], ["infill", "The {{_2}}."], ["rank", "The {{cat|dog}}."]])
def test_escapes_come_only_where_colour_is_welcome(cli, command):
    assert "\x1b[" in cli(*command, FORCE_COLOR="1").stdout
    assert "\x1b" not in cli(*command).stdout
    assert "\x1b" not in cli(*command, FORCE_COLOR="1", NO_COLOR="1").stdout


def test_a_template_cannot_steer_the_terminal(cli):
    assert "\x1b" not in cli("score", "The \x1b[31mcat {{\x1b[2J sat}}.").stdout


# ---- templates from files and pipes ---------------------------------------------------------------------------------


def test_a_file_is_answered_line_by_line_in_order(cli, tmp_path):
    file = tmp_path / "templates.txt"
    templates = [rf"{'The cat ' * (i % 5)}\n{{{{sat}}}} on {i}" for i in range(2 * BATCH + 3)]
    file.write_bytes(b"\xef\xbb\xbf" + "\r\n\n \n".join(templates).encode())  # as Windows saves it; blank lines
    one_by_one = [objects(cli("score", template, "--json"))[0] for template in templates[:3]]
    answers = objects(cli("score", "--file", str(file), "--json"))
    assert [answer["template"] for answer in answers] == templates
    assert [answer["log_prob"] for answer in answers[:3]] == pytest.approx([a["log_prob"] for a in one_by_one])
    assert objects(cli("rank", "-", "--json", stdin="{{a|b}}\n\n{{c|d}}"))[1]["template"] == "{{c|d}}"


@pytest.mark.parametrize(
    ("content", "what"), [("", "is empty"), ("\n \n\r\n\t\n", "has blank lines only")], ids=["empty", "blank"]
)
@pytest.mark.parametrize("command", ["score", "rank", "infill"])
def test_input_without_a_template_is_an_error_that_names_it(cli, tmp_path, command, content, what):
    file = tmp_path / "templates.txt"
    file.write_text(content, newline="")
    for source, name in ((["--file", str(file)], file), (["--file", "-"], "standard input"), (["-"], "standard input")):
        result = cli(command, *source, "--json", code=2, stdin=content)
        assert result.stdout == ""
        assert f"error: {name} {what}: write one template per line, such as The {{{{cat}}}}" in result.stderr
    words = [command, "--file", str(file), "--model", str(tmp_path / "no model")]
    assert f"error: {file} {what}" in CliRunner().invoke(app, words).stderr  # before a model is loaded


@pytest.mark.parametrize("bad", ["The {{cat", "The cat.", "The {{cat|dog}}.", "cat " * 80 + "{{sat}}"])
@pytest.mark.parametrize("from_stdin", [False, True])
def test_a_bad_line_is_named_and_what_came_before_it_is_answered(cli, tmp_path, bad, from_stdin):
    file = tmp_path / "templates.txt"
    file.write_text(f"The {{{{cat}}}}.\n\nThe {{{{dog}}}}.\n{bad}\nThe {{{{mat}}}}.\n", encoding="utf-8")
    source = ["-"] if from_stdin else ["--file", str(file)]
    result = cli("score", *source, "--json", code=2, stdin=file.read_text(encoding="utf-8"))
    assert [answer["template"] for answer in objects(result)] == ["The {{cat}}.", "The {{dog}}."]
    assert f"error: {'standard input' if from_stdin else file}, line 4: " in result.stderr


def test_lines_before_one_that_is_not_utf8_are_answered(cli, tmp_path):
    (tmp_path / "latin.txt").write_bytes("{{cat}}\n{{café}}\n".encode("latin1"))
    result = cli("score", "--file", str(tmp_path / "latin.txt"), "--json", code=2)
    assert len(objects(result)) == 1 and "latin.txt, line 2: byte 6 is not UTF-8" in result.stderr


@pytest.mark.parametrize("from_stdin", [False, True])
@pytest.mark.parametrize(
    ("command", "slot"), [("score", "cat"), ("rank", "cat|dog"), ("infill", "_2"), ("infill", "_"), ("show", "cat")]
)
def test_a_document_is_one_template(cli, tmp_path, command, slot, from_stdin):
    template = f"The mat.\n\n The {{{{{slot}}}}} sat on\tthe mat; \nthe dog did not. "
    content = b"\xef\xbb\xbf" + (template + "\n").replace("\n", "\r\n").encode()  # as Windows saves it
    (tmp_path / "document.txt").write_bytes(content)
    options = ["--json"] + ["--seed", "1", "--max-tokens", "2"] * (command == "infill")
    source, stdin = ("-", content.decode()) if from_stdin else (str(tmp_path / "document.txt"), None)
    answers = objects(cli(command, "--document", source, *options, stdin=stdin))
    assert answers == objects(cli(command, template, *options)) and answers[0]["template"] == template


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", " is empty: write a text"),
        (b"\r\n \n", " is empty: write a text"),
        (b"The mat.\nThe caf\xe9 {{sat}}.", ": byte 17 is not UTF-8"),
        ("The {{cat}} sat.".encode("utf-16-le"), " has null characters"),
        (b"cat " * (LARGEST // 4) + b" ", f" has more than {LARGEST // 2**20} MB"),
        (b"The cat.\nThe mat.", ": nothing is asked"),
        (b"The cat.\n\nThe {{mat", ", line 3: this slot is never closed"),
        (b"cat\n" * 80 + b"{{sat}}", ": the text has 242 tokens"),
    ],
    ids=["empty", "blank", "latin", "null", "large", "no slot", "open slot", "long"],
)
def test_a_document_that_cannot_be_asked_is_named_with_the_reason(cli, tmp_path, content, problem):
    (tmp_path / "document.txt").write_bytes(content)
    result = cli("score", "--document", str(tmp_path / "document.txt"), code=2)
    assert f"error: {tmp_path / 'document.txt'}{problem}" in result.stderr and result.stdout == ""


def test_who_gives_a_document_as_a_template_or_by_lines_is_told_the_option(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("document.txt").write_text("A title\n\nThe {{cat}} sat.\n")
    mistakes = [["document.txt"], ["--file", "document.txt"], ["-"]]
    for words in mistakes:
        told = cli("score", *words, code=2, stdin=Path("document.txt").read_text()).stderr
        assert "nothing is asked" in told and "--document PATH reads a whole file as one template" in told
    assert "--document PATH" in cli("show", "document.txt", code=2).stderr
    assert "--document" not in cli("score", "A title", code=2).stderr


def test_braces_in_a_document_that_are_filled_beside_its_gaps_are_named(cli, tmp_path):
    document = tmp_path / "page.html"
    for text, told in (("The {{ cat }}\nsat {{_1-2}}.", "line 1 is a slot"), (r"The \{{ cat }} sat {{_1-2}}.", "")):
        document.write_text(text)
        assert told in cli("infill", "--document", str(document)).stderr
    assert "is a slot" not in cli("infill", "--document", str(document)).stderr


@pytest.mark.parametrize("command", ["score", "infill", "rank", "show"])
def test_nothing_is_pointed_at_in_an_empty_template(cli, command):
    assert len(cli(command, "", code=2).stderr.splitlines()) == 1


def test_a_warning_is_one_line_on_stderr_once(cli):
    result = cli("score", "-", "--json", model="plain", stdin="{{The}} cat\n" * 3)
    assert len(objects(result)) == 3
    assert re.fullmatch(r"warning: .*--no-future.*\n", result.stderr)
    assert cli("score", "-", "--json", "--no-future", model="plain", stdin="{{The}} cat\n").stderr == ""


def test_a_warning_that_comes_again_from_elsewhere_is_not_repeated(capsys):
    with tidy():
        warnings.simplefilter("always")
        for _ in range(2):
            warnings.warn("the weights\n  are odd", stacklevel=1)
    assert capsys.readouterr().err == "warning: the weights are odd\n"


@pytest.mark.parametrize("arguments", [["draw", "conditioning"], ["show", TEMPLATE], ["score", "A – b … {{∞ 日}} “c”"]])
def test_a_terminal_that_writes_only_ascii_gets_the_answer(models, monkeypatch, arguments):
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="ascii"))
    monkeypatch.setattr("acgpt.display.conditioning.DRAWS", 50)
    app([*arguments, *(["--model", models["reads"]] if arguments[0] != "draw" else [])], standalone_mode=False)
    sys.stdout.flush()
    output = written.getvalue().decode("ascii")
    expected = {"draw": "?", "show": "? ?Paris", "score": "A ? b ? "}[arguments[0]]
    assert expected in output


def test_a_surprise_of_zero_has_no_sign(lms, capsys):
    lm = lms["reads"]
    sure = TokenScore(lm.log_prob(TEMPLATE).tokens[0].text, 1, 4, 0.0)
    unsure = TokenScore(sure.text, 1, 4, 0.001)
    template = "The capital of {{France}}"
    scores = {name: Score((token,), future=True) for name, token in {"past only": sure, "with future": unsure}.items()}
    print_score(Page(), lm, template, scores)
    assert "-0.0" not in (output := capsys.readouterr().out) and "+0.00" in output


@pytest.mark.slow
@pytest.mark.parametrize(("options", "answered_by"), [([], ["default"]), (["--adapter", "none"], [])])
def test_the_embedded_model_is_asked_through_its_adapter_unless_told_otherwise(options, answered_by, capsys):
    app(["score", "The capital of {{Italy}} is Rome.", "--future", "--json", *options], standalone_mode=False)
    (answer,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert [value for key, value in answer.items() if key == "adapter"] == answered_by
    assert (answer["log_prob"] > -2) is bool(answered_by)  # without it, copies are only confusing
    for template, who in (("The capital of {{Italy}} is Rome.", "default"), ("The capital of Italy is {{Rome}}", None)):
        app(["show", template, "--json", *options], standalone_mode=False)
        (drawn,) = map(json.loads, capsys.readouterr().out.splitlines())
        assert [value for key, value in drawn.items() if key == "adapter"] == ([who] if answered_by else [])
        assert answered_by == [] or (drawn["copies"] > 0) is (who is not None)


# ---- mistakes -------------------------------------------------------------------------------------------------------


def test_what_needs_no_model_does_not_import_torch(tmp_path):
    commands = [
        ["--version"],
        ["--help"],
        ["score"],
        ["score", "a {{b"],
        ["rank", "a {{b}}"],
        ["infill", "a", "-n", "0"],
        ["score", "a {{_}} b"],
        ["score", "a {{_3}} b"],
    ]
    commands += [[command.callback.__name__, "--help"] for command in app.registered_commands] + [["draw", "--help"]]
    commands += [["score", "--file", str(tmp_path / "none")], ["score", "{{a}}", "--dtype", "float7"], ["show", "{{a"]]
    done = run_commands(commands, ("torch", "transformers", "numpy", "jinja2", "fastapi", "httpx", "starlette"))
    assert len(app.registered_commands) > 10
    lines = done.stdout.splitlines()
    assert lines[:2] == [f"acgpt {acgpt.__version__}", "code 0"]
    assert lines[-1] == "imported []"
    assert [line for line in lines if line.startswith("code")].count("code 2") == 9
    for word in ("Usage", "{{cat|dog|carburettor}}", "{{_3}}", "Keys of --json"):
        assert word in done.stdout


def test_methods_missing_models_bad_patterns_and_formats_do_not_import_torch(tmp_path):
    nowhere = str(tmp_path / "nowhere")
    commands = [["methods"], ["methods", "--json"]]
    commands += [[command, "{{a}}", "--model", nowhere] for command in ("score", "infill")]
    commands += [["rank", "{{a|b}}", "--adapter", nowhere], ["score", "{{a}}", "--adapter", f"mine={nowhere}"]]
    commands += [["infill", "a {{_:[0-9}} b"], ["show", "a {{b}}", "-o", str(tmp_path / "layout.xyz")]]
    done = run_commands(commands, ("torch", "transformers", "huggingface_hub"))
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("code")] == ["code 0"] * 2 + ["code 2"] * 6
    assert lines[-1] == "imported []"
    assert done.stderr.count(f"there is no folder {nowhere}.") == 4
    assert "the pattern '[0-9' cannot be used: write it in the syntax of" in done.stderr
    assert "layout.xyz: end the name in a format that can be drawn" in done.stderr
    assert all(name in done.stdout for name in METHODS)


def test_a_pause_of_the_garbage_collector_ends():
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), gc_paused(freeze=True):
        assert not gc.isenabled()
        raise ZeroDivisionError
    assert gc.isenabled()
    gc.disable()
    try:
        with gc_paused(freeze=True):
            pass
        assert not gc.isenabled()  # whoever has disabled it keeps it so
    finally:
        gc.enable()
        gc.unfreeze()


# ---- processes ------------------------------------------------------------------------------------------------------


def test_a_pipe_is_answered_before_it_ends_and_ctrl_c_ends_cleanly(models):
    with Piped("score", "-", "--json", "--model", models["reads"]) as command:
        watchdog = Timer(300, command.process.kill)  # an answer that never comes is a failure, not a wait
        watchdog.start()
        for template in ("The {{cat}} sat.", "The {{dog}} sat."):
            command.stdin.write(template + "\n")
            command.stdin.flush()
            assert json.loads(command.stdout.readline())["template"] == template
        command.interrupt(signal.SIGINT)
        assert command.wait() == 130
        watchdog.cancel()
        assert command.stderr.read().split() == ["interrupted"]


@pytest.mark.parametrize("options", [["--json"], []])
def test_a_closed_pipe_ends_the_run_without_a_word(models, tmp_path, options):
    file = tmp_path / "templates.txt"
    file.write_text("The {{cat}} sat.\n" * 20_000, encoding="utf-8")
    with Piped("score", "--file", file, "--model", models["reads"], *options) as command:
        assert command.stdout.readline()
        command.stdout.close()
        assert command.wait() == 141
        assert command.stderr.read() == ""


def test_a_closed_standard_input_is_a_mistake_with_a_remedy(monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(acgpt.InputError, match="closed"):
        questions("-", None, None, print)
    with pytest.raises(acgpt.InputError, match="closed"):
        questions(None, None, Path("-"), print)
