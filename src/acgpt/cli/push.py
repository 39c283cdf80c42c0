"""`acgpt push`: share a model or adapter folder on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from acgpt.cli.ui import ObjectOption, emit, silence_libraries, with_options
from acgpt.models.options import PushOptions

HELP = {
    "folder": "A model or adapter folder, with its acgpt.json.",
    "repo": "OWNER/NAME on the hub. It is made if it is not there.",
}


@with_options(PushOptions)
def push(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help=HELP["folder"])],
    repo: Annotated[str, typer.Argument(metavar="REPO_ID", help=HELP["repo"])],
    options: PushOptions,
    as_json: ObjectOption = False,
) -> None:
    r"""Share a model or adapter on the Hugging Face hub.

    acgpt push merged someone/my-model --dry-run
    acgpt push runs/infill/adapter someone/my-adapter --private

    Everything in the folder is sent but what has a name that begins with a dot.
    Only safetensors: a pickle can run code on the machine of whoever opens it, so
    a folder with one is refused, and so is one without weights or without an
    acgpt.json, which says what the model can do.

    Logging in is done once with: hf auth login (or set HF_TOKEN).

    Keys of --json:
      repo, url, private, sent (false for --dry-run), commit (null for --dry-run),
      bytes, files: path, bytes
    """
    silence_libraries()
    from acgpt.models.push import push

    remarks: list[str] = []
    sent = push(folder, repo, note=remarks.append, **vars(options))
    if as_json:
        emit(sent)
        return
    done = "would be sent to" if options.dry_run else "sent to"
    for file in sent["files"]:
        print(f"{file['bytes']:>15,}  {file['path']}")
    seen = "private" if options.private else "public"
    print(f"{sent['bytes']:>15,}  bytes in {len(sent['files'])} files {done} {sent['url']} ({seen})")
    for remark in remarks:
        print(f"note: {remark}")
