"""What ``distribute_optimizer`` cannot step says so, before anything of the optimizer is changed."""

from __future__ import annotations

from typing import Any

import pytest
from test_distribute_optimizer import WORLD_SIZE, Net, NotElementWise
from torch import optim
from torch.distributed.device_mesh import init_device_mesh

import graph_fsdp
from graph_fsdp import UnsupportedError


@pytest.mark.usefixtures("fake_group")
def test_bad_input() -> None:
    model: Any = graph_fsdp.compile(Net(), init_device_mesh("cpu", (WORLD_SIZE,)), backend="eager")
    give = graph_fsdp.distribute_optimizer
    with pytest.raises(TypeError, match=r"optimizer must be a torch.optim.Optimizer, and is a list"):
        give(list(model.parameters()))  # type: ignore[type-var]
    with pytest.raises(UnsupportedError, match=r"optimizer: NotElementWise is not known .* element_wise=True"):
        give(NotElementWise(model.parameters()))
    for unknown in (optim.LBFGS(model.parameters()), optim.Adafactor(model.parameters())):
        with pytest.raises(UnsupportedError, match=rf"optimizer: {type(unknown).__name__} is not known"):
            give(unknown)
    with pytest.raises(ValueError, match=r"optimizer: none of its parameters is a shard"):
        give(optim.SGD(Net().parameters()))
    scheduled = optim.SGD(model.parameters())
    optim.lr_scheduler.ExponentialLR(scheduled, 0.5)
    with pytest.raises(UnsupportedError, match=r"step\(\) of this SGD was replaced on the object"):
        give(scheduled)
    assert type(scheduled) is optim.SGD
    for flag in ("in_backward", "offload_state", "element_wise"):
        with pytest.raises(TypeError, match=f"{flag} must be True or False, got 1"):
            give(optim.SGD(model.parameters()), **{flag: 1})  # type: ignore[arg-type]
    for made, options, text in (
        (optim.AdamW, {}, "the parameters are on the CPU, and so is the optimizer's state"),
        (optim.AdamW, {"in_backward": True}, "in_backward=True frees gradients on the device"),
        (NotElementWise, {"element_wise": True}, "NotElementWise is none of torch's"),
    ):
        with pytest.raises(UnsupportedError, match=f"offload_state=True.*{text}"):
            give(made(model.parameters()), offload_state=True, **options)  # type: ignore[abstract, arg-type]
    fused = optim.AdamW(model.parameters(), fused=True)
    with pytest.raises(UnsupportedError, match="offload_state=True: the optimizer has fused=True"):
        give(fused, offload_state=True)
    assert type(fused) is optim.AdamW
    distributed = give(optim.SGD(model.parameters()))
    for again in ({}, {"gather_ahead": 1, "in_backward": True}):
        with pytest.raises(UnsupportedError, match=r"given to distribute_optimizer already"):
            give(distributed, **again)  # type: ignore[arg-type]
