"""The torch releases that graph_fsdp runs on."""

from __future__ import annotations

import torch

MINIMUM_TORCH = (2, 9)

TORCH_VERSIONS_RUN = ("2.9.1", "2.13.0", "2.15.0")


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])


# What FSDP2 takes a MixedPrecisionPolicy without reduce_dtype to mean: that gradients are reduced in the dtype of their
# parameters, and before torch 2.15 in param_dtype.
REDUCES_IN_OWN_DTYPE = _release(torch.__version__) >= (2, 15)


def check_torch_version(version: str) -> None:
    """Raise ImportError on a torch that does not have what this module imports."""
    if _release(version) < MINIMUM_TORCH:
        raise ImportError(
            f"graph_fsdp needs torch {'.'.join(map(str, MINIMUM_TORCH))} or newer, and this is {version}; "
            "pip install --upgrade torch"
        )
