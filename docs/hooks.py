"""Hooks of MkDocs: pages that are generated when the site is built, and links that leave docs/.

    reference/commands.md    from the commands themselves (`command_reference`)
    changelog.md             from CHANGELOG.md

Links to files of the repository (`../src/…`) lead somewhere on a code host, but not on the site: there the path is
shown as text.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = re.compile(
    r"\[(?P<text>[^\]]+)\]\((?:\.\./)+(?P<path>(?:src|tests|configs|examples|benchmarks|default-model)\b[^)#\s]*)\)"
)
PAGE = re.compile(r"\bdocs/([\w/-]+\.md)")
FUNCTIONS = {  # commands, and the public functions that take their options as keywords
    "prepare": "acgpt.prepare",
    "train": "acgpt.train",
    "finetune": "acgpt.finetune",
    "evaluate": "acgpt.evaluate",
    "generate": "acgpt.generate",
    "mauve": "acgpt.score_samples",
    "experiment": "acgpt.experiments.runner.run_experiment",
    "merge": "acgpt.merge",
    "push": "acgpt.push",
}
LEAVES_DOCS = re.compile(r"\]\((?:\.\./)?docs/")


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages."""
    from mkdocs.structure.files import File

    generated = {"reference/commands.md": command_reference(), "changelog.md": changelog()}
    for path, content in generated.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Show the paths of files outside docs/ as text."""
    return OUTSIDE.sub(path_as_text, markdown)


def path_as_text(link: re.Match[str]) -> str:
    """Return the text of a link followed by its path, without repetition."""
    text, path = link["text"], link["path"]
    return f"`{path}`" if text.strip("`") == path else f"{text} (`{path}`)"


def changelog() -> str:
    """Return CHANGELOG.md with links that work on the site."""
    return LEAVES_DOCS.sub("](", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))


# ---- the command reference ------------------------------------------------------------------------------------------


def command_reference() -> str:
    """Return a Markdown page of all commands: help, arguments and options."""
    import typer

    from acgpt.cli.main import app

    main = typer.main.get_command(app)
    parts = [
        "# Commands",
        "This page is generated from the commands. `acgpt COMMAND --help` prints the same. If a public function does "
        "the same, the column *keyword* has the names of its arguments.",
        "Exit codes: 0 for success; 1 for an error that the user did not cause, such as a full disk or a failed "
        "cell of an experiment; 2 for an error in the call or its input; 3 for work that was stopped and can be "
        "resumed; 130 after Ctrl-C.",
        *section("acgpt", main),
    ]
    return "\n\n".join(parts) + "\n"


def section(name: str, command: Any, level: int = 2) -> list[str]:
    """Return the paragraphs of a command and of its subcommands."""
    parts = [f"{'#' * level} {name}", *help_parts(command.help or "")]
    arguments = [item for item in command.params if item.param_type_name == "argument"]
    options = [item for item in command.params if item.param_type_name == "option" and not item.hidden]
    parts += parameter_table("argument", arguments)
    if function := FUNCTIONS.get(name.removeprefix("acgpt ")):
        parts += [f"The keywords are those of `{function}`.", *parameter_table("option", options, keywords(function))]
    else:
        parts += parameter_table("option", options)
    for child_name, child in getattr(command, "commands", {}).items():
        parts += section(f"{name} {child_name}", child, 3 if level == 3 else 2)
    return parts


def help_parts(text: str) -> list[str]:
    """Convert a help text to Markdown: prose to paragraphs, examples and indented text to code."""
    paragraphs = [item.strip("\n\f") for item in text.replace("\b", "").split("\n\n")]
    return [as_code(item) if laid_out(item) else escaped(item) for item in paragraphs if item.strip()]


def laid_out(paragraph: str) -> bool:
    """Return whether line breaks matter, as in examples and indented text."""
    return paragraph.startswith("acgpt ") or any(line.startswith(" ") for line in paragraph.splitlines())


def as_code(paragraph: str) -> str:
    """Return a paragraph as a block of code."""
    language = "sh" if paragraph.startswith("acgpt ") else "text"
    return f"```{language}\n{paragraph}\n```"


def escaped(text: str) -> str:
    """Escape text for Markdown and HTML, and link the pages that it names."""
    return PAGE.sub(r"[\1](../\1)", re.sub(r"([\\`*_<>\[\]|#])", r"\\\1", text))


def keywords(function: str) -> Collection[str]:
    """Return the names of the parameters of a function."""
    module, _, name = function.rpartition(".")
    return inspect.signature(getattr(import_module(module), name)).parameters


def parameter_table(kind: str, parameters: list[Any], keywords: Collection[str] | None = None) -> list[str]:
    """Return a table of arguments or options, with a column for those that are keywords of a function."""
    head, line = (f"| {kind} | |", "|---|---|") if keywords is None else (f"| {kind} | keyword | |", "|---|---|---|")
    rows = []
    for item in parameters:
        keyword = "" if keywords is None else f" `{item.name}` |" if item.name in keywords else " |"
        rows.append(f"| {written(item)} |{keyword} {' '.join(escaped(item.help or '').split())} |")
    return ["\n".join([head, line, *rows])] if rows else []


def written(parameter: Any) -> str:
    """Return a parameter as it is typed."""
    if parameter.param_type_name == "argument":
        name = parameter.metavar or parameter.name.upper()
        return f"`{name.strip('[]')}`" + ("" if parameter.required else " (optional)")
    flags = ", ".join([*parameter.opts, *parameter.secondary_opts])
    metavar = "" if parameter.is_flag or not parameter.metavar else f" {parameter.metavar}"
    return f"`{flags}{metavar}`".replace("|", "\\|") + (" (required)" if parameter.required else "")
