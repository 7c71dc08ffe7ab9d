"""What a checkpoint has of a tensor that XLA's devices share. (On devices: tests/xla/test_xla_checkpoint.py.)"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from graph_fsdp.xla.checkpoint import Parts

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch.distributed.checkpoint, which is alone here

ROWS = 5


def parts(full: Tensor, rows: int) -> Parts:
    """Of so many rows each; the last has what is left."""
    starts = range(0, len(full), rows)
    return Parts(full.shape, full.dtype, {(start, 0): full[start : start + rows].clone() for start in starts})


def test_parts_are_saved_as_the_whole_tensor_and_read_into_other_parts(tmp_path: Path) -> None:
    full = torch.arange(10.0).reshape(ROWS, 2)
    dcp.save({"x": parts(full, 2)}, checkpoint_id=tmp_path, no_dist=True)
    whole, others = {"x": torch.empty(ROWS, 2)}, {"x": parts(torch.zeros(ROWS, 2), 3)}
    for into in (whole, others):
        dcp.load(into, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(whole["x"], full)
    assert {at: part.tolist() for at, part in others["x"].parts.items()} == {
        (0, 0): full[:3].tolist(),
        (3, 0): full[3:].tolist(),
    }


def test_nothing_is_computed_with_parts() -> None:
    with pytest.raises(TypeError, match=r"aten\.sum.* ran on a tensor without memory"):
        parts(torch.ones(ROWS, 2), 2).sum()
