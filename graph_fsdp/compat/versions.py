"""The torch releases that graph_fsdp runs on."""

from __future__ import annotations

MINIMUM_TORCH = (2, 9)

TORCH_VERSIONS_RUN = ("2.9.1", "2.13.0", "2.15.0")


def check_torch_version(version: str) -> None:
    """Raise ImportError on a torch that does not have what this module imports."""
    found = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if found < MINIMUM_TORCH:
        raise ImportError(
            f"graph_fsdp needs torch {'.'.join(map(str, MINIMUM_TORCH))} or newer, and this is {version}; "
            "pip install --upgrade torch"
        )
