"""`acgpt merge`: a model and its adapter become one plain Hugging Face model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from acgpt.cli.ui import ObjectOption, emit, option, silence_libraries, with_options
from acgpt.models.options import MergeOptions

HELP = {
    "base": "A folder, a Hugging Face hub id or a .gguf file; 'default' is the embedded SmolLM2-135M-Instruct.",
    "adapter": "A PEFT adapter for it: a folder or a hub id; default: the embedded model's.",
    "output": "Where the model goes: a folder that is not there yet.",
}


@with_options(MergeOptions)
def merge(
    base: Annotated[str, typer.Argument(metavar="BASE", help=HELP["base"])],
    adapter: Annotated[str, typer.Argument(metavar="ADAPTER", help=HELP["adapter"])],
    output: Annotated[Path, option("--output", "-o", metavar="FOLDER", help=HELP["output"])],
    options: MergeOptions,
    as_json: ObjectOption = False,
) -> None:
    r"""Merge an adapter into its model: one plain model, for any program.

    acgpt merge runs/base/model runs/infill/adapter -o merged
    acgpt merge model.Q4_1.gguf someone/adapter -o merged --dtype bfloat16

    The folder opens in transformers and in acgpt, and says in its acgpt.json what
    the adapter said. Weights are merged in float32 (4 bytes a parameter; a .gguf
    file is unpacked) and rounded once. What was written is read again and must
    answer as the two together do; it gets its name only then.

    Keys of --json:
      folder, base, adapter, dtype, parameters, bytes (of weights),
      method, conditioning, bos_token_id, mask_token_id
    """
    silence_libraries()
    from acgpt.models.merge import merge

    written = merge(base, adapter, output, **vars(options))
    if as_json:
        emit(written)
        return
    print(
        f"{output}: {written['parameters']:,} parameters in {written['dtype']}, {written['bytes'] / 2**20:,.0f} MB, "
        f"method {written['method']}"
    )
