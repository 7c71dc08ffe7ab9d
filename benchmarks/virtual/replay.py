"""What a machine ran, once more on the clock of ``graph_fsdp.plan``, under its conditions: a straggler, and contention.

A machine knows when an operation begins as soon as it is launched. That one rank is slower than the others, or that a
collective takes processors from what is computed beside it, changes what has begun already: it takes a simulation.
"""

from __future__ import annotations

from collections.abc import Sequence

from graph_fsdp.passes import Hardware
from graph_fsdp.passes.analysis.simulate import Conditions, Simulation, Task
from virtual.machine import Operation


def seconds_under(conditions: Conditions, operations: Sequence[Operation], hardware: Hardware) -> float:
    """Seconds of ``operations``, in the order in which they were launched by a host that takes no time. Streams wait
    for each other as they did; what came before the first operation has ended. Collectives wait for the last rank, and
    run one after the other where they share a link."""
    awaited = {item for operation in operations for item in operation.waits.items()}
    events: dict[tuple[int, int], Task] = {}
    streams: dict[int, list[Task]] = {}
    for operation in operations:
        tasks = streams.setdefault(operation.stream, [])
        tasks += [Task(waits_for=events[item]) for item in operation.waits.items() if item in events]
        if operation.links:
            tasks.append(Task(operation.seconds, "+".join(sorted(operation.links))))
            tasks.append(Task(waits_for=tasks[-1]))
        else:
            tasks.append(Task(operation.seconds))
        if (item := (operation.stream, operation.number)) in awaited:
            events[item] = Task(0.0, f"event {item}", own=True)
            tasks.append(events[item])
    first, *others = streams.values()
    return Simulation(first, conditions, hardware.interference, others).run()
