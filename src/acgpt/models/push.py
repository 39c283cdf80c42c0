"""Upload a model or adapter folder to the Hugging Face hub: `acgpt.push` and the command `acgpt push`."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import constants, errors
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from acgpt.common.options import keywords
from acgpt.errors import InputError, ModelError
from acgpt.models.card import CARD, adapter_base, is_hub_id
from acgpt.models.loading import refuse_run
from acgpt.models.metadata import FILE, Metadata
from acgpt.models.options import PushOptions

PICKLES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"}
WEIGHTS = {"config.json": "model*.safetensors", "adapter_config.json": "adapter_model*.safetensors"}


@keywords(PushOptions)
def push(
    folder: str | Path,
    repo: str,
    *,
    note: Callable[[str], object] = lambda text: None,
    **keywords: Any,
) -> dict[str, Any]:
    """Upload a model or adapter folder to the Hugging Face hub, after checks.

        acgpt.push("merged", "someone/my-model", dry_run=True)["files"]     # what would be uploaded
        acgpt.push("merged", "someone/my-model")

    All files are uploaded except hidden ones (names that begin with a dot) and `__pycache__`. A folder with a pickle,
    without weights or without an `acgpt.json` is refused. Log in once with `hf auth login`, or set HF_TOKEN.

    Args:
        folder: A model or adapter folder with an `acgpt.json`.
        repo: OWNER/NAME on the hub. Created if it does not exist.
        **keywords: See `PushOptions`.
        note: Called with each remark about something that other users will miss in the folder.

    Returns:
        A summary of the upload, with the keys that `acgpt push --help` lists under --json.

    Raises:
        InputError: The folder fails a check, HF_HUB_OFFLINE is set, or nobody is logged in.
        ModelError: The upload failed.
    """
    options, folder = PushOptions.of(push, keywords), Path(folder)
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise InputError(f"{repo!r} is not the id of a repository, OWNER/NAME: {error}") from error
    if repo.count("/") != 1:
        raise InputError(f"{repo!r} names no owner: write OWNER/NAME.")
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}.")
    files = contents(folder)
    check(folder, list(files))
    commit = None if options.dry_run else send(folder, list(files), repo, options.private)
    if CARD not in files:
        note(f"there is no {CARD}, which the hub shows; acgpt.models.card writes one.")
    if (base := adapter_base(folder)) is not None and not is_hub_id(base):
        note(
            f"the adapter names {base!r} as its base, which others cannot find: set base_model_name_or_path in "
            "adapter_config.json to a hub id."
        )
    return {
        "repo": repo,
        "url": f"{constants.ENDPOINT}/{repo}",
        "private": options.private,
        "bytes": sum(files.values()),
        "files": [{"path": path, "bytes": size} for path, size in files.items()],
        "sent": not options.dry_run,
        "commit": commit,
    }


def contents(folder: Path) -> dict[str, int]:
    """Return the files of a folder and their sizes. Skip hidden files; refuse links, which may lead anywhere."""
    files: dict[str, int] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if any(part.startswith(".") or part == "__pycache__" for part in name.parts):
            continue
        if path.is_symlink():
            raise InputError(f"{path} is a symbolic link, which is not uploaded. Replace it with the file itself.")
        if path.is_file():
            files[name.as_posix()] = path.stat().st_size
    return files


def check(folder: Path, files: list[str]) -> None:
    """Refuse a folder that should not be shared: a training run, pickles, or without weights, metadata or a head."""
    refuse_run(folder)
    if pickles := [file for file in files if Path(file).suffix.lower() in PICKLES]:
        raise InputError(
            f"{folder} has {', '.join(pickles[:5])}: such files are pickles, which can run any code when they are "
            "loaded. Save the weights as safetensors, and remove these files."
        )
    complete = [weights for config, weights in WEIGHTS.items() if config in files and any(folder.glob(weights))]
    if not complete:
        raise InputError(
            f"{folder} has no weights to share: expected config.json with model.safetensors, or adapter_config.json "
            "with adapter_model.safetensors."
        )
    metadata = Metadata.read(folder)
    if metadata is None:
        raise InputError(
            f"{folder} has no {FILE}, which states what the model can do. Write it with acgpt.Metadata(…)"
            ".write(FOLDER), or save the model with LanguageModel.save_pretrained."
        )
    if metadata.lengths is not None and metadata.lengths["file"] not in files:
        raise InputError(
            f"{folder} has no {metadata.lengths['file']}, the head for lengths of gaps that its {FILE} names. Copy it "
            f"there, or remove the entry `lengths` from {FILE}."
        )


def send(folder: Path, files: list[str], repo: str, private: bool) -> str:
    """Create the repository if it does not exist, and upload the files.

    Returns:
        The address of the commit.

    Raises:
        InputError: HF_HUB_OFFLINE is set, nobody is logged in, or the repository is public and should be private.
        ModelError: The upload failed.
    """
    if constants.HF_HUB_OFFLINE:
        raise InputError("HF_HUB_OFFLINE is set, so nothing can be uploaded: unset it, or use `dry_run`.")
    if huggingface_hub.get_token() is None:
        raise InputError("nobody is logged in to the hub: run hf auth login, or set HF_TOKEN.")
    api = huggingface_hub.HfApi()
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        if private and not api.repo_info(repo).private:  # the hub does not change an existing one
            raise InputError(f"{repo} exists and is public: name another repository, or leave out `private`.")
        commit = api.upload_folder(
            repo_id=repo,
            folder_path=os.fspath(folder),
            allow_patterns=[glob.escape(path) for path in files],  # exactly the files that were checked
            commit_message="Upload with acgpt",
        )
    except (OSError, errors.HTTPError) as error:  # type: ignore[attr-defined]
        raise ModelError(f"the upload to {repo} failed: {' '.join(str(error).split())}") from error
    return str(commit.commit_url)
