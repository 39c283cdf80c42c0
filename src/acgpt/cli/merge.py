"""`acgpt merge`: merge an adapter into its base model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from acgpt.cli.ui import ObjectOption, emit, option, silence_libraries, with_options
from acgpt.models.options import MergeOptions

HELP = {
    "base": "Base model: a folder, a hub id or a .gguf file; 'default' is the embedded SmolLM2-135M-Instruct. "
    "Or only the adapter: its config names the base.",
    "adapter": "PEFT adapter: a folder or a hub id; 'default' is that of the embedded model.",
    "output": "Folder of the merged model; must not exist.",
}


@with_options(MergeOptions)
def merge(
    base: Annotated[str, typer.Argument(metavar="BASE", help=HELP["base"])],
    output: Annotated[Path, option("--output", "-o", metavar="FOLDER", help=HELP["output"])],
    adapter: Annotated[str | None, typer.Argument(metavar="ADAPTER", show_default=False, help=HELP["adapter"])] = None,
    *,
    options: MergeOptions,
    as_json: ObjectOption = False,
) -> None:
    r"""Merge an adapter into its base model, as a plain Hugging Face model.

    acgpt merge runs/infill/adapter -o merged
    acgpt merge model.Q4_1.gguf someone/adapter -o merged --dtype bfloat16

    The merged model can be loaded with transformers and with acgpt; its
    acgpt.json is that of the adapter. Weights are merged in float32 (4 bytes per
    parameter; .gguf files are unpacked) and rounded once. Before the folder gets
    its name, the model is loaded again and its outputs are compared with those
    of base and adapter.

    Keys of --json:
      folder, base, adapter, dtype, parameters, bytes (of weights),
      method, conditioning, bos_token_id, mask_token_id
    """
    silence_libraries()
    from acgpt.models.merge import merge

    of, merged = (None, base) if adapter is None else (base, adapter)
    written = merge(of, merged, output, **vars(options))
    if as_json:
        emit(written)
        return
    print(
        f"{output}: {written['parameters']:,} parameters in {written['dtype']}, {written['bytes'] / 2**20:,.0f} MB, "
        f"method {written['method']}"
    )
