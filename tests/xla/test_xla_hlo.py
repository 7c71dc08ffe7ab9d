"""What is read of XLA's optimized program."""

from __future__ import annotations

import os

import torch
from xla_launch import DEVICES, XlaFacts, run_xla

from graph_fsdp.runtime.xla.program import OptimizedHlo, optimized_hlo

FACTS = XlaFacts(__name__)


def _sharded(*shape: int) -> torch.Tensor:
    import numpy as np
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr

    xr.use_spmd()
    mesh = xs.Mesh(np.arange(DEVICES), (DEVICES,), ("fsdp",))
    value = torch.randn(shape, device="xla")
    xs.mark_sharding(value, mesh, ("fsdp", *(None,) * (len(shape) - 1)))
    return value


@FACTS
def the_partitioners_collectives_are_counted() -> None:
    inputs, weight = _sharded(16, 64), _sharded(64, 64)
    hlo = optimized_hlo(lambda x, w: ((x @ w.t()).sum(),), [inputs, weight])
    assert hlo.collectives == {"all-gather": 1, "all-reduce": 1}, hlo
    assert "f32[4,64]" in hlo.text  # a device's part of the inputs


@FACTS
def one_tensor_given_twice_is_two_inputs() -> None:
    value = _sharded(16, 64)
    hlo = optimized_hlo(lambda x, y: (x + y.t()[:16].sum(),), [value, value])
    assert " parameter(1)" in hlo.text, hlo


test_on_four_devices = FACTS.on_devices()


def text_without_the_passes() -> str:
    import torch_xla

    value = torch.ones(3, device=torch_xla.device()) + 1
    torch_xla._XLAC._get_xla_tensors_hlo([value])
    try:
        optimized_hlo(lambda x: (x + 1,), [value])
    except RuntimeError as error:
        return str(error)
    return os.environ["XLA_DUMP_POST_OPTIMIZATIONS"]


def test_text_from_before_the_passes_is_an_error() -> None:
    assert "start the process with XLA_DUMP_POST_OPTIMIZATIONS=1" in run_xla(text_without_the_passes)


def test_each_collective_counts_once_and_its_done_does_not() -> None:
    text = """\
  %all-gather = f32[16,64]{1,0} all-gather(f32[4,64]{1,0} %p), channel_id=1, dimensions={0}
  %start = (f32[4], f32[16]) all-gather-start(f32[4]{0} %q), channel_id=2, dimensions={0}
  %done = f32[16] all-gather-done((f32[4], f32[16]) %start)
  %both = (f32[4]{0}, f32[8]{0}) reduce-scatter(f32[16]{0} %a, f32[32]{0} %b), channel_id=3
  ROOT %sum = f32[] add(f32[] %all-reduce.1, f32[] %all-gather)
"""
    hlo = OptimizedHlo(text, {"all-gather": 2, "reduce-scatter": 2})
    assert hlo.collectives == {"all-gather": 2, "reduce-scatter": 1}
    assert hlo.table() == (
        "collective      scheduled  optimized\n"
        "all-gather              2          2\n"
        "reduce-scatter          2          1"
    )
