"""Ranks that live as long as a file of tests: processes with gloo between them, which cases are sent to.

A rank makes its process groups once, and then takes case after case from a socket; those that are not
on a case's mesh go on waiting. A rank that dies or does not answer costs all, and the next case starts new ones.

[Note: garbage]
What is there before the first case is frozen: a collection after each case, which would walk it again, took as long as
tracing the model. What a case leaves is collected every few cases.
"""

from __future__ import annotations

import contextlib
import gc
import pickle
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from launch import started
from random_cases import Case, MeshCase
from random_training import Outcome, train_sharded
from torch.distributed.device_mesh import DeviceMesh

COLLECT_EVERY = 8
START_SECONDS = 300.0  # to find each other
CASE_SECONDS = 120.0  # no case takes a tenth of it on a busy machine
STRAGGLER_SECONDS = 60.0  # for the others, when one rank has raised: they may wait for it in a collective


@dataclass
class Raised:
    """An error instead of an outcome. ``types``: the names of its type and its bases."""

    types: tuple[str, ...]
    message: str
    traceback: str


class Ranks:
    """Context manager. ``number``: of processes, which start with the first case that needs a mesh; ``seconds``: that a
    case has."""

    def __init__(self, number: int, seconds: float = CASE_SECONDS) -> None:
        self._number, self._seconds, self._alone = number, seconds, Runner()
        self._processes = contextlib.ExitStack()
        self._pipes: list[Connection] = []

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
        gc.unfreeze()

    def run(self, case: Case) -> list[Outcome | Raised]:
        """The outcome of each rank of the case's mesh."""
        if case.mesh.kind == "none":
            return [self._alone.run(case, None, 0)]
        if not self._pipes:
            self._start()
        pipes = self._pipes[: case.mesh.ranks]
        for pipe in pipes:
            send(pipe, case)
        answers: dict[int, Outcome | Raised] = {}
        deadline = time.monotonic() + self._seconds
        while len(answers) < len(pipes):
            missing = [pipe for rank, pipe in enumerate(pipes) if rank not in answers]
            for pipe in wait(missing, max(0.0, deadline - time.monotonic())):
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    answers[rank] = receive(self._pipes[rank])
                except (EOFError, ConnectionResetError):
                    answers[rank] = Raised(("Died",), "the process ended", "")
                if isinstance(answers[rank], Raised):
                    deadline = min(deadline, time.monotonic() + STRAGGLER_SECONDS)
            if time.monotonic() >= deadline:
                break
        silent = Raised(("Silent",), "no answer", "")
        found = [answers.get(rank, silent) for rank in range(len(pipes))]
        if any(isinstance(answer, Raised) and answer.types[0] in ("Died", "Silent") for answer in found):
            self.stop()
        return found

    def stop(self) -> None:
        self._processes.close()
        self._pipes = []

    def _start(self) -> None:
        with contextlib.ExitStack() as stack, socket.create_server(("127.0.0.1", 0)) as listener:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cases-")))
            listener.settimeout(START_SECONDS)
            port = listener.getsockname()[1]
            stack.enter_context(started(folder, serve, self._number, port, timeout=self._seconds))
            pipes = [stack.enter_context(_connection(listener.accept()[0])) for _ in range(self._number)]
            by_rank = {receive(pipe): pipe for pipe in pipes}
            self._pipes = [by_rank[rank] for rank in range(self._number)]
            self._processes = stack.pop_all()


def _connection(ours: socket.socket) -> Connection:
    return Connection(ours.detach())


def send(pipe: Connection, value: object) -> None:
    """By value: ``Connection.send`` leaves tensors in memory that only processes of multiprocessing share."""
    pipe.send_bytes(pickle.dumps(value))


def receive(pipe: Connection) -> Any:
    return pickle.loads(pipe.recv_bytes())


def serve(port: int) -> None:
    """A rank's life. ``port``: of this host, where cases come from and outcomes go to."""
    torch.set_num_threads(1)
    rank = dist.get_rank()
    meshes = {mesh: make_mesh(mesh) for mesh in MESHES if mesh.ranks <= dist.get_world_size()}
    runner = Runner(meshes.__getitem__)
    with _connection(socket.create_connection(("127.0.0.1", port))) as pipe:
        send(pipe, rank)
        while True:
            try:
                case: Case = receive(pipe)
            except EOFError:  # the tests are over
                return
            send(pipe, runner.run(case, meshes[case.mesh], rank))


MESHES = (
    *(MeshCase("shard", ranks) for ranks in (1, 2, 3, 4)),
    *(MeshCase("replicate", ranks) for ranks in (1, 2, 4)),
    *(MeshCase("hybrid", a * b, (a, b)) for a, b in ((2, 2), (1, 2), (2, 1), (1, 3))),
)


def make_mesh(mesh: MeshCase, device: str = "cpu") -> DeviceMesh:
    """Every rank makes every mesh: it is new process groups."""
    ranks = torch.arange(mesh.ranks)
    if mesh.kind == "hybrid":
        return DeviceMesh(device, ranks.view(mesh.shape), mesh_dim_names=("dp_replicate", "dp_shard"))
    return DeviceMesh(device, ranks, mesh_dim_names=("replicate" if mesh.kind == "replicate" else "fsdp",))


def outcome_of(train: Callable[[], Outcome]) -> Outcome | Raised:
    """An error is for the test to judge, by its type."""
    try:
        return train()
    except Exception as error:
        types = tuple(cls.__name__ for cls in type(error).__mro__)
        return Raised(types, str(error), traceback.format_exc())


class Runner:
    """Of a process: runs cases one after the other."""

    def __init__(self, find: Callable[[MeshCase], Any] = make_mesh) -> None:
        """``find``: the mesh of a description, which parameters of a model on another one can have."""
        self._done, self._find = 0, find

    def run(self, case: Case, mesh: DeviceMesh | None, rank: int) -> Outcome | Raised:
        if not self._done:
            gc.collect()
            gc.freeze()  # see [Note: garbage]
        self._done += 1
        try:
            return outcome_of(lambda: train_sharded(case, mesh, rank, self._find))
        finally:
            torch._dynamo.reset()
            if self._done % COLLECT_EVERY == 0:
                gc.collect()
