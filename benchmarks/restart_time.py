"""How long it takes from the ``kill -9`` of all ranks of a host, which is replaced, to the end of the next step.

    OMP_NUM_THREADS=1 python benchmarks/restart_time.py
    OMP_NUM_THREADS=1 python benchmarks/restart_time.py --starts kept precompiled cold --rounds 5

Two hosts of this machine, each an agent of torchrun with a rank, a folder in memory and an Inductor cache of its own,
train the GPT of the benchmarks and save it to memory every few steps (``checkpoint.save(…, memory=True)``). When the
next save is due in two steps, all ranks of a host are killed by SIGKILL, and its memory and caches are lost; the hosts
take turns. torchrun starts all ranks again, which load ``checkpoint.latest(folder, model)``: what the other host holds.
The clock runs from the first kill until the slowest rank has done its next step, and that step's loss must have the
bits that it had before.

What the replaced host's cache has: *kept*: what a first start has left on the other host, programs and kernels, as it
is where hosts share a cache, or an image has one; *precompiled*: what ``graph_fsdp.precompile`` has made, programs and
kernels of forward and backward; *cold*: nothing but Inductor's toolchain. Nobody has written a checkpoint to disk.

What it does not show: a scheduler that finds a new host, and agents that start. It cannot run under torchrun.
"""

from __future__ import annotations

import time

BEGUN = time.time()  # of this process, before its imports

import argparse  # noqa: E402
import contextlib  # noqa: E402
import itertools  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import shutil  # noqa: E402
import signal  # noqa: E402
import socket  # noqa: E402
import statistics  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Iterator, Sequence  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from harness import (  # noqa: E402
    POLICIES,
    Disagreement,
    command_of,
    machine,
    on_a_rank,
    parser_of,
    process_group,
    publish,
    say,
    workload_of,
)
from tables import Table  # noqa: E402
from training import LEARNING_RATE  # noqa: E402

import graph_fsdp  # noqa: E402
from graph_fsdp import checkpoint  # noqa: E402

IMPORTED = time.time()
HOSTS, EVERY = 2, 5
STARTS = ("kept", "precompiled", "cold")
PARTS = ("detected", "imported", "joined", "made", "loaded", "step")
MARKS = ("begun", "imported", "joined", "made", "loaded", "step")
TIMEOUT_SECONDS = 900.0


# On a rank


def train(options: argparse.Namespace) -> None:
    """Train until killed; marks, and the loss of each step, go to this rank's file as lines."""
    workload, device = workload_of(options), torch.device("cpu")
    runs = options.folder / "runs"
    with open(options.folder / f"rank{os.environ['RANK']}", "a", buffering=1) as log:

        def mark(name: str, when: float, **more: Any) -> None:
            log.write(json.dumps({"mark": name, "at": when, **more}) + "\n")

        mark("begun", BEGUN)
        mark("imported", IMPORTED)
        with process_group("cpu") as mesh:
            if dist.get_rank() == 0:
                (options.folder / "machine").write_text(json.dumps(machine("cpu", dist.get_world_size())))
            mark("joined", time.time())
            model = graph_fsdp.compile(workload.make(device), mesh, mp_policy=POLICIES[options.dtype])
            optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
            mark("made", time.time())
            newest = checkpoint.latest(runs, model)
            done = checkpoint.load(newest, model, optimizer)["step"] if newest else 0
            mark("loaded", time.time(), step=done)
            saving: checkpoint.PendingSave | None = None
            while True:
                loss = model(**workload.tokens(done, dist.get_rank(), device))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                done += 1
                mark("step", time.time(), step=done, loss=loss.item(), cpu=time.process_time())
                if done % EVERY == 0:
                    path = runs / f"step_{done}"
                    extra = {"step": done}
                    saving = checkpoint.save(path, model, optimizer, extra=extra, memory=True, asynchronous=True)
                elif done % EVERY == EVERY - 3 and saving is not None:
                    saving.result()  # it is complete when the ranks are killed, after the next step


def precompile(options: argparse.Namespace) -> None:
    workload, device = workload_of(options), torch.device("cpu")
    torch.compile(lambda x: torch.relu(x) + 1)(torch.ones(64))  # Inductor's toolchain
    if options.precompile == "precompiled":
        graph_fsdp.precompile(
            lambda: workload.make(torch.device("meta")),
            workload.tokens(0, 0, device),
            mesh_shape=(HOSTS,),
            path=Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "graph_fsdp" / "programs",
            device=device,
            mp_policy=POLICIES[options.dtype],
        )


# Starting and killing


class Job:
    """Two agents and what they have: ``host0`` and ``host1``, folders in memory with a cache beside."""

    def __init__(self, options: argparse.Namespace, folder: Path, cache: Path, start: str) -> None:
        self.options, self.folder, self.cache, self.start = options, folder, cache, start
        self.agents: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Job:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        for host in range(HOSTS):
            self.replace(host)
            command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(HOSTS), "--nproc-per-node", "1"]
            command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "restart_time"]
            command += [
                "--max-restarts",
                str(2 * self.options.rounds),
                "--monitor-interval",
                "0.1",
                "--local-addr",
                "127.0.0.1",
                __file__,
            ]
            command += [*self.options.arguments, "--folder", str(self.folder)]
            environment = {
                **os.environ,
                "GRAPH_FSDP_MEMORY": str(self.memory(host)),
                "TORCHINDUCTOR_CACHE_DIR": str(self.memory(host) / "cache"),
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
                "GLOO_SOCKET_IFNAME": "lo",
            }
            with open(self.folder / f"agent{host}", "wb") as output:
                self.agents.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output))
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.agents:
            for pid in ranks_of(agent.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            agent.kill()
            agent.wait()

    def memory(self, host: int) -> Path:
        return self.folder / f"host{host}"

    def replace(self, host: int) -> None:
        shutil.rmtree(self.memory(host), ignore_errors=True)
        self.memory(host).mkdir()
        shutil.copytree(self.cache, self.memory(host) / "cache")

    def marks(self) -> list[list[dict[str, Any]]]:
        """Each rank's so far."""
        found = []
        for rank in range(HOSTS):
            path = self.folder / f"rank{rank}"
            lines = path.read_text().splitlines() if path.exists() else []
            found.append([json.loads(line) for line in lines])
        return found

    def wait(self, what: Any) -> list[list[dict[str, Any]]]:
        """Wait until all ranks' marks are as ``what`` says of one rank's."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not all(map(what, found := self.marks())):
            if time.monotonic() > deadline or any(agent.poll() is not None for agent in self.agents):
                texts = [(self.folder / f"agent{host}").read_text()[-3000:] for host in range(HOSTS)]
                raise RuntimeError("the ranks do not go on:\n" + "\n".join(texts))
            time.sleep(0.005)
        return found

    def stop(self, what: Any) -> list[list[dict[str, Any]]]:
        """Stop all ranks where their marks are as ``what`` says: a small model's go on while they are looked at."""
        while True:
            self.wait(what)
            pids = [pid for agent in self.agents for pid in ranks_of(agent.pid)]
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            while not all(map(_is_stopped, pids)):
                time.sleep(0.001)
            if all(map(what, found := self.marks())):
                return found
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

    def strike(self, host: int) -> dict[str, Any]:
        """Kill the ranks of a host and replace it; seconds of the restart and its parts, by the slowest rank."""

        def is_due(marks: list[dict[str, Any]]) -> bool:
            """At least two steps after what was loaded, and after a save that is complete."""
            return (
                marks != []
                and marks[-1]["mark"] == "step"
                and marks[-1]["step"] % EVERY == EVERY - 2
                and (sum(m["mark"] == "step" for m in marks[_begun(marks) :]) > EVERY)
            )

        before = self.stop(is_due)
        if self.start == "kept":
            self.cache = self.folder / f"kept{len(list(self.folder.glob('kept*')))}"
            shutil.copytree(self.memory(1 - host) / "cache", self.cache)
        load, killed = os.getloadavg()[0], time.time()
        for number, agent in enumerate(self.agents):
            for pid in ranks_of(agent.pid):
                os.kill(pid, signal.SIGKILL if number == host else signal.SIGCONT)
        self.replace(host)
        after = self.wait(lambda marks: _is_again(marks, killed))
        parts = [parts_of(killed, *of_rank) for of_rank in zip(before, after, strict=True)]
        return {**max(parts, key=lambda found: found["seconds"]), "host": host, "load": load}


def parts_of(killed: float, before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return seconds of a rank's restart and of its parts. Raises Disagreement unless it went on from the newest
    checkpoint with the bits of the step after it."""
    marks = after[_begun(after) :]  # of the new process: a step of the old one may end after the kill of its peers
    times = {m["mark"]: m["at"] for m in reversed(marks)}
    ends = [killed, *(times[name] for name in MARKS)]
    parts = {name: b - a for name, (a, b) in zip(PARTS, itertools.pairwise(ends), strict=True)}
    steps = [m for m in before if m["mark"] == "step"]
    loaded = next(m["step"] for m in marks if m["mark"] == "loaded")
    again = next(m for m in marks if m["mark"] == "step")
    known = {m["step"]: m["loss"] for m in steps}
    newest = steps[-1]["step"] // EVERY * EVERY
    if loaded != newest or known.get(again["step"]) != again["loss"]:
        raise Disagreement(f"a rank went on after step {loaded}, not {newest}: {again}, was {known.get(again['step'])}")
    return {**parts, "seconds": times["step"] - killed, "cpu_seconds": again["cpu"], "resumed_after": loaded}


def _begun(marks: list[dict[str, Any]]) -> int:
    return max(i for i, m in enumerate(marks) if m["mark"] == "begun")


def _is_again(marks: list[dict[str, Any]], killed: float) -> bool:
    return any(m["mark"] == "step" for m in marks[_begun(marks) :]) and marks[_begun(marks)]["at"] > killed


def _is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def ranks_of(agent: int) -> Iterator[int]:
    """The processes of torchrun's ranks. (Linux only.)"""
    for pid in Path(f"/proc/{agent}/task/{agent}/children").read_text().split():
        with contextlib.suppress(OSError):
            if b"\0RANK=" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes():
                yield int(pid)


def measure_all(options: argparse.Namespace) -> dict[str, Any]:
    rows = []
    base = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=base) as name:
        for start in options.starts:
            folder = Path(name) / start
            cache = folder / "made"
            cache.mkdir(parents=True)
            command = [sys.executable, __file__, *options.arguments, "--precompile", start]
            subprocess.run(command, env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)}, check=True)
            rounds = []
            with Job(options, folder, cache, start) as job:
                for number in range(options.rounds):
                    rounds.append(job.strike(1 - number % HOSTS))
                    say(f"{start}: {rounds[-1]}")
            rows.append({"start": start, "rounds": rounds})
            made = json.loads((folder / "machine").read_text())
            shutil.rmtree(folder)
    return {
        "benchmark": "restart_time",
        "command": command_of(__file__, options.arguments),
        "machine": made,
        "settings": {**workload_of(options).__dict__, "dtype": options.dtype, "saved_every": EVERY},
        "rows": rows,
    }


# The table


def table(result: dict[str, Any]) -> Table:
    lines = []
    for row in result["rows"]:
        seconds = [found["seconds"] for found in row["rounds"]]
        middle = [statistics.median(found[part] for found in row["rounds"]) for part in (*PARTS, "cpu_seconds")]
        cells = [f"{min(seconds):.1f}", f"{statistics.median(seconds):.1f}", f"{max(seconds):.1f}"]
        lines.append([row["start"], str(len(seconds)), *cells, *(f"{value:.1f}" for value in middle)])
    loads = [found["load"] for row in result["rows"] for found in row["rounds"]]
    settings = result["settings"]
    note = (
        f"Seconds; {settings['layers']} layers of width {settings['width']}, saved to memory every "
        f"{settings['saved_every']} steps. Parts, and CPU seconds of the new process, are medians, of the slowest "
        f"rank. Load average of the machine when ranks were killed: {min(loads):.1f} to {max(loads):.1f}."
    )
    header = ["new processes", "imports", "process group", "model", "load", "step", "CPU"]
    return Table(["start", "kills", "least", "median", "most", *header], lines, note)


# The command


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = parser_of(__doc__, "restart_time")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--starts", nargs="+", choices=STARTS, default=["kept"], help="what the replaced host has")
    parser.add_argument("--rounds", type=int, default=5, help="kills")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # of a rank
    parser.add_argument("--precompile", choices=STARTS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.arguments = list(arguments)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    if options.precompile:
        precompile(options)
    elif on_a_rank():
        train(options)
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and end the ranks
        try:
            publish(options, measure_all(options), table, lambda result, path: None)
        except Disagreement as error:
            say(f"FAILED: {error}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
