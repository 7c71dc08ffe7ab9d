"""Keys of a graph's regions are kept with it, so that a start that finds it need not look at what each node computes.

Regions that are equal have one key in the file. Which operators a region calls, and which constants it reads, is read
from its nodes: a key knows them by their ids in this process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graph_fsdp.passes.ir.graph import Graph, Phase
from graph_fsdp.passes.ir.portable import Names
from graph_fsdp.runtime.regions.regions import Region, RegionKey, Step, cut


def keys_to_data(steps: list[Step], phase: Phase, names: Names) -> dict[str, Any]:
    """Return the keys of a graph's regions, in the order of its ``steps``, as data that ``json.dumps`` takes.

    Raises:
        NotPortable: a device is not the model's.
    """
    keys: dict[tuple[Any, ...], int] = {}
    numbers = []
    for region in _regions(steps):
        key = region.key(phase)
        written = (key.body, key.returned, tuple(map(names.of_device, key.devices)))
        numbers.append(keys.setdefault(written, len(keys)))
    return {"keys": list(map(list, keys)), "of": numbers}


def cut_with_keys(graph: Graph, data: Mapping[str, Any], names: Names) -> list[Step]:
    """Cut a graph, and give its regions the keys that ``keys_to_data`` has written.

    Raises:
        ValueError, TypeError, KeyError, IndexError: the data are not what it has written of this graph.
    """
    steps = cut(graph)
    known = [(body, tuple(returned), tuple(map(names.device_of, devices))) for body, returned, devices in data["keys"]]
    for region, number in zip(_regions(steps), data["of"], strict=True):
        body, returned, devices = known[number]
        called = tuple([id(region.called(node)) for node in region.body])
        region.keys[graph.phase] = RegionKey(graph.phase, body, called, returned, devices)
    return steps


def _regions(steps: list[Step]) -> list[Region]:
    return [step for step in steps if isinstance(step, Region)]
