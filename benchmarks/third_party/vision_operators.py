"""torchvision beside a torch that its build does not fit.

The wheels of the package index are built for CUDA. Beside a torch without CUDA torchvision's operators do not load, and
it cannot be imported, since it registers shapes for them; nor can what imports it, though no model here uses one.
"""

from __future__ import annotations

import importlib.util

import torch

_OPERATORS: list[torch.library.Library] = []


def declare_where_missing() -> None:
    """The operators without which torchvision's import fails, without kernels. Call it before that import."""
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _OPERATORS.append(library)
