"""Train with Lightning: its own ``ModelParallelStrategy`` calls ``shard``, for Fabric and for the Trainer.

::

    from graph_fsdp.integrations.lightning import shard

    from lightning.fabric.strategies import ModelParallelStrategy

    Fabric(strategy=ModelParallelStrategy(shard, data_parallel_size=…, tensor_parallel_size=1))

    class Module(lightning.LightningModule):
        def configure_model(self):
            shard(self.model, self.device_mesh)

[Note: the seam]
The strategy looks for DTensor parameters and ``FSDPModule``, saves and loads by torch's functions for state dicts, and
clips by ``torch.nn.utils``: a compiled model needs no strategy of its own, and nothing of Lightning is patched.
"""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import graph_fsdp
from graph_fsdp.module.module import GraphFSDPModule

Model = TypeVar("Model", bound=nn.Module)


def shard(model: Model, device_mesh: DeviceMesh, **compile_options: Any) -> Model:
    """Shard and compile ``model`` in place, with ``graph_fsdp.compile``, over the strategy's data-parallel ranks.

    A model that is compiled already is returned as it is: the Trainer calls ``configure_model`` before each of ``fit``,
    ``validate`` and ``test``. ``functools.partial(shard, backend=…)`` is a ``parallelize_fn`` with options.

    Args:
        device_mesh: the strategy's, with the dimensions ``data_parallel`` and ``tensor_parallel``.
        compile_options: arguments of :func:`graph_fsdp.compile`.

    Raises:
        ValueError: all ranks are tensor parallel, as Lightning's defaults have it, and the model is not.
        All that ``graph_fsdp.compile`` raises. Nothing is changed then.
    """
    given: object = model
    if isinstance(given, GraphFSDPModule):
        return model
    data_parallel, tensor_parallel = device_mesh["data_parallel"], device_mesh["tensor_parallel"]
    if tensor_parallel.size() > 1 and not any(isinstance(p, DTensor) for p in model.parameters()):
        raise ValueError(
            f"tensor_parallel_size is {tensor_parallel.size()} (Lightning's default: all devices of a node), and the "
            "model is not tensor parallel: give ModelParallelStrategy data_parallel_size=number of processes and "
            "tensor_parallel_size=1, or call torch's parallelize_module with device_mesh['tensor_parallel'] first"
        )
    compiled: Model = graph_fsdp.compile(model, data_parallel, **compile_options)
    return compiled
