"""Each case in processes of its own that need not import what this one has imported: forks of it. Not on CUDA."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

Results = dict[str, dict[str, Any]]
Run = Callable[[], Iterator[tuple[str, dict[str, Any]]]]


def on_ranks(run: Run, ranks: int, seconds: float) -> Results:
    """What rank 0 yields by name, as far as it came in that time; "error" with what ended it, if something did.

    This process must not have run an operator: threads are no part of a fork.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        receiver, sender = context.Pipe(duplex=False)
        processes = [
            context.Process(target=_rank, args=(run, rank, ranks, folder, sender), daemon=True) for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        sender.close()
        try:
            return _received(receiver, time.monotonic() + seconds, seconds)
        finally:
            for process in processes:
                process.kill()
                process.join()


def in_this_process(run: Run, process_group: str) -> Results:
    """The same of one rank, without a fork: a process that has asked for CUDA has no fork that can use it."""
    import torch.distributed as dist

    dist.init_process_group(process_group, store=dist.HashStore(), rank=0, world_size=1)
    try:
        return dict(_results(run))
    finally:
        dist.destroy_process_group()


def _results(run: Run) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        yield from run()
    except Exception as error:
        yield "error", {"result": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}


def _received(receiver: Connection, deadline: float, seconds: float) -> Results:
    found: Results = {}
    while True:
        if not receiver.poll(max(0.0, deadline - time.monotonic())):
            found["error"] = {"result": f"not done in {seconds:.0f} s"}
            return found
        try:
            name, result = receiver.recv()
        except EOFError:
            found["error"] = {"result": "the process ended"}
            return found
        if not name:
            return found
        found[name] = result


def _rank(run: Run, rank: int, ranks: int, folder: str, sender: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    for name, result in _results(run):
        if rank == 0:
            sender.send((name, result))
    if rank == 0:
        sender.send(("", {}))
    # The parent ends all ranks: one that ended by itself would break the others' connections.
    time.sleep(3600)
