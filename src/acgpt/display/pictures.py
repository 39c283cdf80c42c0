"""Files of pictures, drawn with matplotlib, which is an extra and is imported only to draw."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acgpt.common.files import disk_errors, write_atomically
from acgpt.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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


def save_picture(figure: Figure, path: str | Path, dpi: int = 150, **options: Any) -> None:
    """Write a figure to a file, atomically and with the same bytes each time; the suffix is the format.

    Raises:
        OutputError: The file cannot be written.
    """
    from matplotlib import rc_context

    path, content = Path(path), io.BytesIO()
    with rc_context({"svg.hashsalt": "acgpt"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # scripts without a font are shown as boxes
        figure.savefig(content, format=path.suffix[1:].lower(), dpi=dpi, **options)
    with disk_errors(path):
        path.parent.stat()  # a misspelt folder is not created
        write_atomically(path, content.getvalue())
