"""What it costs to keep ranks in lockstep: per program that is predicted, and per comparison with all other ranks.

    torchrun --nproc-per-node 2 benchmarks/lockstep.py

Prints medians in microseconds on the first rank. Nothing is trained: programs begin, and end at once.
"""

from __future__ import annotations

import statistics
import time

import torch.distributed as dist

from graph_fsdp.runtime.ranks.agreement import RunnableProgram
from graph_fsdp.runtime.ranks.lockstep import lockstep_of

ROUNDS, PROGRAMS = 9, 500


def main() -> None:
    dist.init_process_group("gloo")
    lockstep = lockstep_of(range(dist.get_world_size()))
    lines = tuple(f"forward gather_start blocks.{index} 1,024 bytes" for index in range(100))
    keys = [lockstep.know(RunnableProgram("model 0", phase, lines)) for phase in ("forward", "backward")]
    changing = [lockstep.know(RunnableProgram(f"model {n}", "forward", lines)) for n in range(PROGRAMS)]
    found: dict[str, list[float]] = {"predicted": [], "compared": []}
    for _ in range(ROUNDS):
        for kind, sequence in (("predicted", keys * (PROGRAMS // 2)), ("compared", changing)):
            for key in keys * 4 if kind == "predicted" else ():
                lockstep.begin(key)
            if kind == "compared":
                lockstep._predictions.clear()
            before = lockstep.comparisons
            dist.barrier()
            begin = time.perf_counter()
            for key in sequence:
                lockstep.begin(key)
            found[kind].append((time.perf_counter() - begin) / PROGRAMS * 1e6)
            assert lockstep.comparisons - before == (0 if kind == "predicted" else PROGRAMS)
    if dist.get_rank() == 0:
        for kind, values in found.items():
            print(f"{kind}: {statistics.median(values):.1f} µs per program, {dist.get_world_size()} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
