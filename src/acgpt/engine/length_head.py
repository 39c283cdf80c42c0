"""The head that predicts lengths of gaps: a linear layer from a hidden state to the classes of `query.lengths`.

It is written beside the weights of a model or an adapter, in a file of its own, which their acgpt.json names. So the
model stays one that every tool can load.
"""

from __future__ import annotations

from pathlib import Path

import safetensors.torch
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from acgpt.errors import ModelError, reason
from acgpt.query.lengths import CLASSES, DISTANCE

FILE = "length_head.safetensors"


class LengthHead(nn.Module):
    """Predicts the length of a gap from the last hidden state of the slot before it.

    A new head predicts all lengths with the same probability.

    Args:
        width: Width of the hidden states.
        distance: Width in positions of a gap whose length is not known, in training and in questions.
    """

    def __init__(self, width: int, distance: int = DISTANCE) -> None:
        super().__init__()
        self.distance = distance
        self.weight = nn.Parameter(torch.zeros(CLASSES, width))
        self.bias = nn.Parameter(torch.zeros(CLASSES))

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (G, width) hidden states to (G, CLASSES) logits, in the head's own precision."""
        with torch.autocast(hidden.device.type, enabled=False):
            return F.linear(hidden.to(self.weight.dtype), self.weight, self.bias)

    def write(self, folder: Path) -> None:
        """Write the head's weights into the folder of a model or adapter."""
        weights = {name: weight.detach().float().cpu().contiguous() for name, weight in self.state_dict().items()}
        safetensors.torch.save_file(weights, folder / FILE, metadata={"format": "pt"})

    @classmethod
    def read(cls, path: Path, width: int, distance: int) -> LengthHead:
        """Read a head.

        Args:
            path: The file that `write` has written.
            width: Width of the model's hidden states.
            distance: See the class.

        Raises:
            ModelError: The file is damaged, or the head is that of a model of another width.
        """
        head = cls(width, distance)
        expected = {name: tuple(weight.shape) for name, weight in head.state_dict().items()}
        try:
            with safe_open(path, "pt") as file:
                found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
                if found != expected:
                    shapes = ", ".join(f"{name} {list(shape)}" for name, shape in sorted(found.items())[:4])
                    raise ModelError(f"cannot load {path}: it has {shapes}, and this model needs {expected}.")
                weights = {name: file.get_tensor(name).float() for name in found}
        except (OSError, SafetensorError, RuntimeError) as error:
            raise ModelError(
                f"cannot load {path}: it is damaged or cut off ({reason(error)}). Copy it again."
            ) from error
        if not all(weight.isfinite().all() for weight in weights.values()):
            raise ModelError(f"cannot load {path}: it has weights that are not finite numbers. Copy it again.")
        head.load_state_dict(weights)
        return head
