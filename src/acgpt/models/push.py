"""A model or adapter folder is shared on the Hugging Face hub: what `acgpt.push` and `acgpt push` do."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable
from dataclasses import dataclass
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
    """Share a model or adapter folder on the Hugging Face hub, after a check that it is fit to be shared.

        acgpt.push("merged", "someone/my-model", dry_run=True)["files"]     # what would be sent
        acgpt.push("merged", "someone/my-model")

    Everything is sent but what has a name that begins with a dot. A folder with a pickle, without weights or without
    an `acgpt.json` is refused. Log in once with `hf auth login`, or set HF_TOKEN.

    Args:
        folder: A model or adapter folder, with its `acgpt.json`.
        repo: OWNER/NAME on the hub. It is made if it is not there.
        **keywords: See `PushOptions`.
        note: Called with what others will miss in the folder.

    Returns:
        What was sent, with the keys that `acgpt push --help` lists under --json.

    Raises:
        InputError: The folder is not fit to be shared, there is no network, or nobody is logged in.
        ModelError: The hub refuses.
    """
    options = PushOptions(**keywords)
    upload = Upload.of(Path(folder), repo, options.private)
    commit = None if options.dry_run else send(upload)
    for remark in upload.remarks():
        note(remark)
    return {**upload.as_dict(), "sent": not options.dry_run, "commit": commit}


@dataclass(frozen=True)
class Upload:
    """What is sent, and where to.

    Args:
        folder: Here.
        repo: On the hub.
        private: Is nobody else to see it?
        files: Paths in the folder, and their sizes in bytes.
    """

    folder: Path
    repo: str
    private: bool
    files: dict[str, int]

    @classmethod
    def of(cls, folder: Path, repo: str, private: bool) -> Upload:
        """Look at a folder, and refuse it if it is not fit to be shared; no network is needed."""
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
        return cls(folder, repo, private, files)

    @property
    def url(self) -> str:
        """Where it can be seen."""
        return f"{constants.ENDPOINT}/{self.repo}"

    @property
    def bytes(self) -> int:
        """Of all files together."""
        return sum(self.files.values())

    def remarks(self) -> list[str]:
        """What others will miss."""
        remarks = (
            [] if CARD in self.files else [f"there is no {CARD}, which the hub shows; acgpt.models.card writes one."]
        )
        base = adapter_base(self.folder)
        if base is not None and not is_hub_id(base):
            remarks.append(
                f"the adapter names {base!r} as its base, which others cannot find: put a hub id into "
                "base_model_name_or_path of adapter_config.json."
            )
        return remarks

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        files = [{"path": path, "bytes": size} for path, size in self.files.items()]
        return {"repo": self.repo, "url": self.url, "private": self.private, "bytes": self.bytes, "files": files}


def contents(folder: Path) -> dict[str, int]:
    """The files of a folder and their sizes; nothing hidden, and no link, which may lead anywhere."""
    files: dict[str, int] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if any(part.startswith(".") or part == "__pycache__" for part in name.parts):
            continue
        if path.is_symlink():
            raise InputError(f"{path} is a link, and what it leads to may not be meant: put the file itself there.")
        if path.is_file():
            files[name.as_posix()] = path.stat().st_size
    return files


def check(folder: Path, files: list[str]) -> None:
    """Refuse a folder that is not fit to be shared, with the reason."""
    refuse_run(folder)
    if pickles := [file for file in files if Path(file).suffix.lower() in PICKLES]:
        raise InputError(
            f"{folder} has {', '.join(pickles[:5])}: such files are pickles, which can run any code on the machine of "
            "whoever opens them. Save the weights as safetensors, and leave the rest out."
        )
    whole = [weights for config, weights in WEIGHTS.items() if config in files and any(folder.glob(weights))]
    if not whole:
        raise InputError(
            f"{folder} has no weights to share: expected config.json with model.safetensors, or adapter_config.json "
            "with adapter_model.safetensors."
        )
    if Metadata.read(folder) is None:
        raise InputError(
            f"{folder} has no {FILE}, so nobody could tell what the model can do: write it with acgpt.Metadata(…)"
            ".write(FOLDER), or save the model with LanguageModel.save_pretrained."
        )


def send(upload: Upload) -> str:
    """Make the repository if need be, and send the files; the address of the commit.

    Raises:
        InputError: There is no network, nobody is logged in, or the hub refuses.
    """
    if constants.HF_HUB_OFFLINE:
        raise InputError(
            "HF_HUB_OFFLINE is set, so nothing can be sent: unset it, or see what would be with `dry_run`."
        )
    if huggingface_hub.get_token() is None:
        raise InputError("nobody is logged in to the hub: run hf auth login, or set HF_TOKEN.")
    api = huggingface_hub.HfApi()
    try:
        api.create_repo(upload.repo, private=upload.private, exist_ok=True)
        if upload.private and not api.repo_info(upload.repo).private:  # the hub leaves one that exists as it is
            raise InputError(f"{upload.url} exists and is public: name another repository, or leave out `private`.")
        commit = api.upload_folder(
            repo_id=upload.repo,
            folder_path=os.fspath(upload.folder),
            allow_patterns=[glob.escape(path) for path in upload.files],  # what was shown, and nothing else
            commit_message="Upload with acgpt",
        )
    except (OSError, errors.HTTPError) as error:  # type: ignore[attr-defined]
        raise ModelError(f"the hub did not take {upload.repo}: {' '.join(str(error).split())}") from error
    return str(commit.commit_url)
