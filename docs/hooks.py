"""Hooks of MkDocs: pages that are generated when the site is built, and links that leave docs/.

    reference/commands.md    from the commands themselves (`command_reference`)
    changelog.md             from CHANGELOG.md

Links to files of the repository (`../src/…`) lead somewhere on a code host, but not on the site: there the path is
shown as text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = re.compile(r"\[(?P<text>[^\]]+)\]\((?:\.\./)+(?P<path>(?:src|tests|configs|examples|benchmarks)\b[^)#\s]*)\)")
PAGE = re.compile(r"\bdocs/([\w/-]+\.md)")
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
    """The text of a link with its path, once."""
    text, path = link["text"], link["path"]
    return f"`{path}`" if text.strip("`") == path else f"{text} (`{path}`)"


def changelog() -> str:
    """CHANGELOG.md, with links to pages that work on the site."""
    return LEAVES_DOCS.sub("](", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))


# ---- the command reference ------------------------------------------------------------------------------------------


def command_reference() -> str:
    """One page of Markdown with every command: its help text, arguments and options."""
    import typer

    from acgpt.cli.main import app

    main = typer.main.get_command(app)
    parts = [
        "# Commands",
        "This page is generated from the commands. `acgpt COMMAND --help` prints the same.",
        "Exit codes: 0 for success; 1 for an error that is not the caller's, such as a full disk or a failed cell of "
        "an experiment; 2 for a mistake in the call or its input; 3 for work that was stopped and can be resumed; 130 "
        "after Ctrl-C.",
        *section("acgpt", main),
    ]
    return "\n\n".join(parts) + "\n"


def section(name: str, command: Any, level: int = 2) -> list[str]:
    """The parts of one command, and of its subcommands."""
    parts = [f"{'#' * level} {name}", *help_parts(command.help or "")]
    parts += parameter_table("argument", [each for each in command.params if each.param_type_name == "argument"])
    parts += parameter_table(
        "option", [each for each in command.params if each.param_type_name == "option" and not each.hidden]
    )
    for own, child in getattr(command, "commands", {}).items():
        parts += section(f"{name} {own}", child, 3 if level == 3 else 2)
    return parts


def help_parts(text: str) -> list[str]:
    """A help text as Markdown: prose as paragraphs; examples, and whatever is laid out, as code."""
    paragraphs = [each.strip("\n\f") for each in text.replace("\b", "").split("\n\n")]
    return [as_code(each) if laid_out(each) else escaped(each) for each in paragraphs if each.strip()]


def laid_out(paragraph: str) -> bool:
    """Do the line breaks of a paragraph mean something? In examples and in what is indented they do."""
    return paragraph.startswith("acgpt ") or any(line.startswith(" ") for line in paragraph.splitlines())


def as_code(paragraph: str) -> str:
    """A paragraph as a block of code."""
    language = "sh" if paragraph.startswith("acgpt ") else "text"
    return f"```{language}\n{paragraph}\n```"


def escaped(text: str) -> str:
    """Text with the characters of Markdown and HTML escaped, and with links to the pages that it names."""
    return PAGE.sub(r"[\1](../\1)", re.sub(r"([\\`*_<>\[\]|#])", r"\\\1", text))


def parameter_table(kind: str, parameters: list[Any]) -> list[str]:
    """A table of arguments or options."""
    rows = [f"| {written(each)} | {' '.join(escaped(each.help or '').split())} |" for each in parameters]
    return ["\n".join([f"| {kind} | |", "|---|---|", *rows])] if rows else []


def written(parameter: Any) -> str:
    """A parameter as it is typed."""
    if parameter.param_type_name == "argument":
        name = parameter.metavar or parameter.name.upper()
        return f"`{name.strip('[]')}`" + ("" if parameter.required else " (optional)")
    flags = ", ".join([*parameter.opts, *parameter.secondary_opts])
    metavar = "" if parameter.is_flag or not parameter.metavar else f" {parameter.metavar}"
    return f"`{flags}{metavar}`".replace("|", "\\|") + (" (required)" if parameter.required else "")
