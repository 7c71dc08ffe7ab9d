"""Inductor's cache on disk serves all ranks of a host, each of which has a device of its own, with the same code.

Inductor has the index of a device in the keys of its cache and in the code that it keeps. Here keys have index 0, and
what was kept for another device is changed to the rank's own before it is loaded. Keys have the name of the device too,
so that devices of other kinds share nothing. ``docs/private_names.md`` lists the private names of torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import re
import unittest.mock
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._inductor import codecache, config
from torch.utils._pytree import tree_leaves

# As Inductor writes the index of a device: of kernels, guards, streams, and in arguments.
_INDEX = re.compile(
    r"(\btype='(?:cuda|hip|xpu)', index=|\b(?:cuda|xpu):|_DeviceGuard\(|\bset_device\(|\bget_raw_stream\()\d+\b"
)


@contextlib.contextmanager
def shared_by_devices(module: fx.GraphModule) -> Iterator[None]:
    """For a time, have Inductor find and keep the code of ``module``, which is changed, for all devices of its kind."""
    device = _only_device(module)
    if device is None:
        yield
        return
    unnumbered = torch.device(device.type)  # which means the current one, as it is
    for node in module.graph.nodes:
        given = fx.node.map_aggregate((node.args, node.kwargs), lambda a: unnumbered if a == device else a)
        node.args, node.kwargs = given
    module.recompile()
    described, load = codecache.extract_tensor_metadata_for_cache_key, codecache.FxGraphCache.cache_hit_post_compile

    def of_first(tensor: torch.Tensor) -> Any:
        found = described(tensor)
        return dataclasses.replace(found, device=torch.device(device.type, 0)) if found.device == device else found

    def moved_and_loaded(graph: Any, *rest: Any) -> Any:
        move(graph, device.index)
        return load(graph, *rest)

    with (
        unittest.mock.patch.object(codecache, "extract_tensor_metadata_for_cache_key", of_first),
        unittest.mock.patch.object(codecache.FxGraphCache, "cache_hit_post_compile", staticmethod(moved_and_loaded)),
    ):
        yield


def move(graph: Any, index: int) -> None:
    """Change what Inductor has kept of a graph for one device to the device of its kind with this index."""
    if set(graph.device_idxs) <= {index}:
        return
    graph.source_code = _INDEX.sub(rf"\g<1>{index}", graph.source_code)
    graph.cache_key += f"_{index}"  # names the file with the code
    graph.device_idxs = type(graph.device_idxs)([index])
    if graph._triton_bundle:
        kernels = [dataclasses.replace(kernel, device=index) for kernel in graph._triton_bundle.kernel_artifacts]
        # Without launchers that were made for the other device: they are made of the code and the kernels.
        graph._triton_bundle = dataclasses.replace(graph._triton_bundle, kernel_artifacts=kernels, static_autotuners=[])


def _only_device(module: fx.GraphModule) -> torch.device | None:
    """Return the device of a graph's tensors, if it is the current one of an accelerator, and nothing else in the graph
    lies on it: neither constants nor other graphs."""
    nodes = module.graph.nodes
    values = [value for node in nodes for value in tree_leaves(node.meta.get("val"))]
    devices = {v.device for v in values if isinstance(v, torch.Tensor) and v.device.type in ("cuda", "xpu")}
    constants = [operator.attrgetter(str(node.target))(module) for node in nodes if node.op == "get_attr"]
    if len(devices) != 1 or config.cpp_wrapper:
        return None
    if any(not isinstance(value, torch.Tensor) or value.device.type != "cpu" for value in constants):
        return None
    (device,) = devices
    is_current = torch.accelerator.is_available() and torch.accelerator.current_device_index() == device.index
    return device if is_current else None
