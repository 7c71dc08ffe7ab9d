"""``compat`` has every private name of PyTorch that graph_fsdp uses: a new torch release changes nothing else.

Most names are handed on here. What few need, or takes long to import, is imported by itself: torch_xla (``xla.py``),
and Inductor's scheduler, C++ compiler, caches and lowerings (``inductor/``).
``docs/private_names.md`` lists the names, what each is for, and the versions of torch that have it.
"""

from __future__ import annotations

import torch

_MINIMUM_TORCH = (2, 9)


def release(version: str) -> tuple[int, ...]:
    """Return (2, 9) for "2.9.1+cpu"."""
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])


def check_torch_version(version: str) -> None:
    """Raise ImportError on a torch that does not have what this package imports."""
    if release(version) < _MINIMUM_TORCH:
        raise ImportError(
            f"graph_fsdp needs torch {'.'.join(map(str, _MINIMUM_TORCH))} or newer, and this is {version}; "
            "pip install --upgrade torch"
        )


check_torch_version(torch.__version__)  # before the imports that an older torch would fail in

# FSDP2 from torch 2.15 on reduces gradients in the dtype of their parameters where a MixedPrecisionPolicy has no
# reduce_dtype, before in param_dtype; and it casts gradients before it adds them to kept ones, before after.
REDUCES_IN_OWN_DTYPE = release(torch.__version__) >= (2, 15)

from graph_fsdp.compat.autograd import *
from graph_fsdp.compat.dispatch_modes import *
from graph_fsdp.compat.distributed import *
from graph_fsdp.compat.dtensor_lists import begin_equal_places as begin_equal_places
from graph_fsdp.compat.dtensor_lists import end_equal_places as end_equal_places
from graph_fsdp.compat.dtensor_lists import unscale_on_all_meshes as unscale_on_all_meshes
from graph_fsdp.compat.inductor.compilation import *
from graph_fsdp.compat.layers.equal_layers import EQUAL_LAYERS as EQUAL_LAYERS
from graph_fsdp.compat.layers.equal_layers import EqualLayers as EqualLayers
from graph_fsdp.compat.replaced import *
from graph_fsdp.compat.tangents import taking_tangents as taking_tangents
from graph_fsdp.compat.tensors import *
from graph_fsdp.compat.traces.checkpoints import checkpointed_functions as checkpointed_functions
from graph_fsdp.compat.traces.dynamo_errors import *
from graph_fsdp.compat.traces.failed_guards import *
from graph_fsdp.compat.traces.forwards import *
from graph_fsdp.compat.traces.joint_traces import without_joint_trace as without_joint_trace
from graph_fsdp.compat.traces.memory_budget import activation_memory_budget as activation_memory_budget
from graph_fsdp.compat.traces.memory_budget import budget_that_is_set as budget_that_is_set
from graph_fsdp.compat.traces.meshes_of_outputs import take_meshes_from_forward as take_meshes_from_forward
from graph_fsdp.compat.traces.quick_graphs import arguments_unsearched as arguments_unsearched
from graph_fsdp.compat.traces.quick_graphs import quick_copies as quick_copies
from graph_fsdp.compat.traces.quick_nodes import *
from graph_fsdp.compat.traces.random_numbers import draws_apart as draws_apart
from graph_fsdp.compat.traces.torch_compile import *
