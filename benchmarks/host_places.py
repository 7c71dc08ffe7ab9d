"""Where the host's time of a step goes: samples of the stack, by the place in the package or in torch that they are in.

    OMP_NUM_THREADS=1 python benchmarks/host_places.py --parameters 388 --work step

The stack is looked at every millisecond of processor time, while a model of ``host_time.py`` runs. Python's profiler
would make small functions look large.
"""

from __future__ import annotations

import argparse
import gc
import signal
import time
from collections import Counter
from collections.abc import Sequence
from types import FrameType

from host_time import MODELS, WORLD_SIZE, Subject
from implementations import IMPLEMENTATIONS
from tables import Table

from graph_fsdp import compat

# Place → parts of files' names, each with a function. A sample belongs to the innermost of these, if there is one.
FUNCTIONS: dict[str, list[tuple[str, str]]] = {
    "compute regions: Inductor's functions and kernels": [("inductor", "call")],
    "calls of the process group": [("compat/distributed.py", "grouped")],
    "starts of gathers, but for the call": [("runtime/frame.py", "start_gather")],
    "packing of gradients": [("comm/collectives.py", "pack_gradients")],
    "starts of reductions, but for these two": [("runtime/frame.py", "start_reduction")],
    "unpacking": [("comm/collectives.py", "unpack")],
    "waits, but for unpacking": [("runtime/frame.py", "wait")],
    "views of reduced gradients": [("regions/regions.py", "run")],
    "gradients to `.grad`": [("parameters/gradients.py", "_accumulate")],
    "one node of autograd for all shards": [("parameters/gradients.py", "connected_shards")],
    "a look at each parameter and module": [("parameters/shards.py", "refresh"), ("module/structure.py", "check")],
    "placeholders in, shards back": [("parameters/sharded.py", "placeholders_registered")],
    "`zero_grad`": [("nn/modules/module.py", "zero_grad"), ("module/structure.py", "drop_gradients")],
}
# The same for all others, with any function of a file.
FILES: dict[str, list[str]] = {
    "other lines of programs": ["runtime/frame.py", "program>", "runtime/slots.py", "runtime/comm", "runtime/executor"],
    "Dynamo: guards and entry": ["<string>", "_dynamo/"],
    "AOTAutograd around programs": ["_functorch", "autograd/function.py"],
    "autograd's engine": ["autograd/graph.py"],
    "the rest of the package": ["graph_fsdp/", "runtime/"],
}
OTHER = "the rest"


Stack = list[tuple[str, str]]  # file and function of each frame, the innermost first


def place_of(stack: Stack) -> str:
    for file, function in stack:
        for place, parts in FUNCTIONS.items():
            if any(part in file and function == name for part, name in parts):
                return place
    for file, _ in stack:
        for place, files in FILES.items():
            if any(part in file for part in files):
                return place
    return OTHER


def places(name: str, parameters: int, work: str, times: int, warm_up: int = 5) -> tuple[dict[str, float], float]:
    """Return place → its part of the samples, and the processor seconds of one piece of work."""
    run = Subject(IMPLEMENTATIONS[name], parameters).work[work]
    for _ in range(warm_up):
        run()
    gc.collect()
    gc.freeze()
    stacks: list[Stack] = []

    def sample(_: int, frame: FrameType | None) -> None:
        stack: Stack = []
        while frame is not None:
            stack.append((frame.f_code.co_filename, frame.f_code.co_name))
            frame = frame.f_back
        stacks.append(stack)

    compat.leave_to_python(sample)  # Dynamo would compile it, as what a model calls
    before = signal.signal(signal.SIGPROF, sample)
    begin = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, 1e-3, 1e-3)
    for _ in range(times):
        run()
    signal.setitimer(signal.ITIMER_PROF, 0)
    seconds = (time.process_time() - begin) / times
    signal.signal(signal.SIGPROF, before)
    gc.unfreeze()
    found = Counter(map(place_of, stacks))
    return {place: found[place] / found.total() for place in [*FUNCTIONS, *FILES, OTHER] if found[place]}, seconds


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, choices=sorted(MODELS), default=max(MODELS))
    parser.add_argument("--implementation", choices=sorted(IMPLEMENTATIONS), default="ours")
    parser.add_argument("--work", choices=["step", "accumulation", "evaluation"], default="step")
    parser.add_argument("--times", type=int, default=300)
    parser.add_argument("--layers", type=int, default=32, help="that the last column divides by")
    options = parser.parse_args(arguments)
    with compat.fake_process_group(WORLD_SIZE):
        found, seconds = places(options.implementation, options.parameters, options.work, options.times)
    rows = [
        [place, f"{part:.1%}", f"{part * seconds * 1e3:.2f}", f"{part * seconds * 1e6 / options.layers:.0f}"]
        for place, part in [*found.items(), ("all", 1.0)]
    ]
    print(Table(["place", "of the step", "ms", "µs per layer"], rows).markdown())
    return found


if __name__ == "__main__":
    main()
