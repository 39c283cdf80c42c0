"""File formats of pictures."""

from __future__ import annotations

from pathlib import Path

from acgpt.errors import InputError


def check_format(path: str | Path) -> None:
    """Check that a picture with this file name can be drawn.

    Raises:
        InputError: matplotlib is not installed, or does not know the format.
    """
    try:
        from matplotlib import backend_bases
    except ImportError as error:
        raise InputError("drawing a picture needs matplotlib: pip install 'acgpt[plot]'") from error
    if Path(path).suffix[1:].lower() not in backend_bases.FigureCanvasBase.get_supported_filetypes():
        raise InputError(f"{path}: end the name in a format that can be drawn, such as .png, .svg or .pdf.")
