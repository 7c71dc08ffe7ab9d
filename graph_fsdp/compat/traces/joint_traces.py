"""AOTAutograd traces no joint graph where the forward and backward that it would be divided into are known.

What AOTAutograd knows of a graph when it runs (which inputs need gradients, which outputs have some, what is a view of
what) it finds out before, by running the graph once. The trace of the joint graph tells it nothing more, and passes
each of a model's parameters through proxies and functional tensors.
"""

from __future__ import annotations

import contextlib
import unittest.mock
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd import graph_capture, graph_compile
from torch._functorch._aot_autograd.subclass_utils import requires_subclass_dispatch

_TRACE = "aot_dispatch_autograd_graph"
# What follows its trace, and writes to what AOTAutograd knows of the graph.
FOLLOWING = ("populate_fw_metadata_with_stream_indices", "_extract_tangent_source_stack_traces")


def without_joint_trace(call: Callable[..., Any], stack_traces: Sequence[str | None]) -> Any:
    """Return a context in which AOTAutograd is given in the place of a joint graph one of as many inputs, whose outputs
    are of ``call``, each of the lines that its stack trace says. The partition function must not read it."""
    torchs = getattr(graph_compile, _TRACE, None)
    if torchs is None or not all(hasattr(graph_capture, name) for name in FOLLOWING):  # before torch 2.13
        return contextlib.nullcontext()

    def outlined(flat_fn: Any, flat_args: Any, descriptions: Any, config: Any, *, fw_metadata: Any) -> Any:
        if requires_subclass_dispatch(flat_args, fw_metadata) or fw_metadata.tokens:
            return torchs(flat_fn, flat_args, descriptions, config, fw_metadata=fw_metadata)
        joint = _without_compute(len(flat_args), call, stack_traces)
        for name in FOLLOWING:
            getattr(graph_capture, name)(joint, fw_metadata)
        inputs = list(flat_args), fw_metadata.traced_tangents
        return joint, inputs, (descriptions, fw_metadata.traced_tangents_descs), None

    return unittest.mock.patch.object(graph_compile, _TRACE, outlined)


def _without_compute(inputs: int, call: Callable[..., Any], stack_traces: Sequence[str | None]) -> fx.GraphModule:
    graph = fx.Graph()
    for number in range(inputs):  # which torch 2.15 counts
        graph.placeholder(f"primals_{number + 1}")
    outputs = []
    for text in stack_traces:
        outputs.append(graph.call_function(call))
        outputs[-1].meta["stack_trace"] = text
    graph.output(tuple(outputs))
    return fx.GraphModule(torch.nn.Module(), graph)
