"""`acgpt push`: upload a model or adapter to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from acgpt.cli.ui import ObjectOption, emit, silence_libraries, with_options
from acgpt.models.options import PushOptions

HELP = {
    "folder": "Model or adapter folder with an acgpt.json.",
    "repo": "OWNER/NAME on the hub. Created if it does not exist.",
}


@with_options(PushOptions)
def push(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help=HELP["folder"])],
    repo: Annotated[str, typer.Argument(metavar="REPO_ID", help=HELP["repo"])],
    options: PushOptions,
    as_json: ObjectOption = False,
) -> None:
    r"""Upload a model or adapter to the Hugging Face hub.

    acgpt push merged someone/my-model --dry-run
    acgpt push runs/infill/adapter someone/my-adapter --private

    Uploads everything in the folder except names that begin with a dot. A folder
    without weights or acgpt.json is refused, and so is one with pickles, which
    can run code when they are loaded: weights must be safetensors.

    Log in once with: hf auth login (or set HF_TOKEN).

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
    done = "would be uploaded to" if options.dry_run else "uploaded to"
    for file in sent["files"]:
        print(f"{file['bytes']:>15,}  {file['path']}")
    visibility = "private" if options.private else "public"
    print(f"{sent['bytes']:>15,}  bytes in {len(sent['files'])} files {done} {sent['url']} ({visibility})")
    for remark in remarks:
        print(f"note: {remark}")
