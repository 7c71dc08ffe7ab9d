"""Bad input with ``backend="xla"`` that XLA itself must be asked about: one clear error, and nothing is changed."""

from __future__ import annotations

import re

import pytest
from xla_launch import run_xla


def refusal(launched: int, spmd: bool, replicas: bool) -> str:
    """What the environment is refused with: ``launched`` processes of torch.distributed, all of them pretended."""
    import torch.distributed as dist
    import torch_xla.runtime as xr
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from graph_fsdp import xla_validate

    if launched:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=launched)
    if spmd:
        xr.use_spmd()
    try:
        xla_validate.environment(replicas=replicas)
    except (ValueError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("launched", "spmd", "replicas", "expected"),
    [
        (0, False, False, "UnsupportedError: .*SPMD must be on"),
        (0, True, True, "UnsupportedError: .*SPMD is on"),
        (2, True, False, "MeshError: mesh: .* counts 2 processes and XLA 1 processes"),
        (1, True, False, "^$"),
    ],
)
def test_the_environment_must_fit(launched: int, spmd: bool, replicas: bool, expected: str) -> None:
    assert re.search(expected, run_xla(refusal, launched, spmd, replicas))


def test_a_launcher_that_xla_knows_nothing_of_is_refused() -> None:
    """As torchrun sets it, before any process group is made."""
    message = run_xla(refusal, 0, True, False, env={"WORLD_SIZE": "2", "RANK": "0"})
    assert message.startswith("MeshError: mesh: ") and "counts 2 processes and XLA 1 processes" in message
