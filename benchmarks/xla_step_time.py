"""A training step on XLA: torch_xla's FSDPv2 (``SpmdFullyShardedDataParallel``), and graph_fsdp's two ways.

    python benchmarks/xla_step_time.py
    python benchmarks/xla_step_time.py --model llama --name xla_step_time_llama --rounds 30

It takes torch_xla (``make test-xla`` makes an environment with it). Devices are virtual ones of XLA's CPU client, all
in one process, unless ``PJRT_DEVICE`` says another client.

Steps are timed in one process that holds all implementations, which take turns in an order that changes from round to
round; each has the same initial values and the same batches, rows sharded over the devices. A step is forward,
backward, AdamW and ``torch_xla.sync``, and is over when the devices have nothing more to do. ``local`` is plain PyTorch
on the CPU, one device with the whole batch: its losses are what those of the others are compared with, and a run in
which one differs fails (exit code 1).

Time to the first step is measured in processes of its own, one for each implementation and repeat, from when the model
is on the CPU to the end of its first step: wrapping or capture, passes, XLA's compilation, and the step. ``warm-up`` is
the time of the steps that compiled anything, less as many steps as they are at the time that a step takes afterwards;
``XLA`` is what XLA's compiler took of it, as torch_xla counts it.

What it does not show: accelerators, whose collectives run beside compute; several processes; memory.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from harness import ROOT, Disagreement, command_of, machine, parser_of, publish, workload_of
from step_time import order_of, quartiles
from step_time import plot as plot
from tables import Table, quartile_cell
from torch import Tensor, nn
from training import LEARNING_RATE, TOLERANCES
from workloads import Workload, loss_of

MEASURE = "GRAPH_FSDP_XLA_MEASURE"  # what a process of the benchmark's own measures: "steps", or an implementation
ENVIRONMENT = {"PJRT_DEVICE": "CPU", "TF_CPP_MIN_LOG_LEVEL": "2"}
WARMUP = 4  # the optimizer's state is made in the first step, and its program may differ until the third
TIMEOUT_SECONDS = 1800
WARM_UP = {"warm_up": "warm-up", "warm_up_cpu": "of the CPU", "xla": "XLA"}  # what is measured of it, and its column

Turn = tuple[float, float]  # seconds, and CPU seconds of the process, of a step


# Implementations


def local(model: nn.Module, workload: Workload, mesh: Any) -> nn.Module:
    return model


def fsdpv2(model: nn.Module, workload: Workload, mesh: Any) -> nn.Module:
    from torch_xla.distributed.fsdp.wrap import transformer_auto_wrap_policy
    from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel

    blocks = {type(block) for block in workload.blocks(model)}
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=blocks)
    return SpmdFullyShardedDataParallel(model, mesh=mesh, auto_wrap_policy=policy, shard_output=shard_logits)


def shard_logits(output: Any, mesh: Any) -> None:
    """A block's activations, or a Llama's logits; a loss is no activation."""
    import torch_xla.distributed.spmd as xs

    value = getattr(output, "logits", output[0] if isinstance(output, tuple) else output)
    if value.dim():
        xs.mark_sharding(value, mesh, ("fsdp", *(None,) * (value.dim() - 1)))


def ours(model: nn.Module, workload: Workload, mesh: Any, **options: Any) -> nn.Module:
    import graph_fsdp

    return graph_fsdp.compile(model, mesh, backend="xla", **options)


Builder = Callable[[nn.Module, Workload, Any], nn.Module]
IMPLEMENTATIONS: dict[str, Builder] = {
    "local": local,
    "fsdpv2": fsdpv2,
    "ours": ours,
    "ours_auto": functools.partial(ours, sharding="auto"),
}
COMPARED = "fsdpv2"


class Trainer:
    """One implementation, ready to train on batches of all devices, counted from zero."""

    def __init__(self, name: str, workload: Workload, mesh: Any, model: nn.Module | None = None) -> None:
        model = workload.make(torch.device("cpu")) if model is None else model
        self.workload, self.mesh, self.on_xla = workload, mesh, name != "local"
        self.model = IMPLEMENTATIONS[name](model, workload, mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self.losses: list[Tensor] = []
        self._batches: list[dict[str, Tensor]] = []

    def prepare(self, steps: int) -> None:
        """Have the batches of the next steps on the devices."""
        made = len(self.losses)
        self._batches = [self._batch(made + index) for index in reversed(range(steps))]
        self.wait()

    def _batch(self, step: int) -> dict[str, Tensor]:
        parts = [self.workload.tokens(step, rank, torch.device("cpu")) for rank in range(self.mesh.size())]
        batch = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        if not self.on_xla:
            return batch
        import torch_xla.distributed.spmd as xs

        batch = {name: value.to("xla") for name, value in batch.items()}
        for value in batch.values():
            xs.mark_sharding(value, self.mesh, ("fsdp", None))
        return batch

    def step(self) -> None:
        loss = loss_of(self.model(**self._batches.pop()))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.on_xla:
            import torch_xla

            torch_xla.sync()
        self.losses.append(loss.detach())

    def wait(self) -> None:
        if self.on_xla:
            import torch_xla

            torch_xla.sync(wait=True)


# In a process of the benchmark's own


def make_mesh() -> Any:
    import numpy
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr

    xr.use_spmd()
    devices = xr.global_runtime_device_count()
    return xs.Mesh(numpy.arange(devices), (devices,), ("fsdp",))


def measure_steps(options: argparse.Namespace) -> dict[str, Any]:
    """Step times of all implementations, side by side, and their losses compared.

    Raises:
        Disagreement: an implementation's losses are not plain PyTorch's.
    """
    mesh, workload = make_mesh(), workload_of(options)
    trainers = {}
    for name in options.implementations:
        print(f"building {name}", flush=True)
        trainers[name] = trainer = Trainer(name, workload, mesh)
        trainer.prepare(WARMUP)
        for _ in range(WARMUP):
            trainer.step()
        trainer.wait()
    compiled = compilations()
    rounds = interleave(trainers, options.rounds, options.steps)
    if compilations() != compiled:
        print("note: something was compiled while steps were timed", flush=True)
    losses = {name: [loss.item() for loss in trainer.losses] for name, trainer in trainers.items()}
    return {
        "rounds": rounds,
        "difference": check_losses(losses),
        "devices": options.devices,
        "machine": described(mesh),
    }


def interleave(trainers: Mapping[str, Any], rounds: int, steps: int) -> list[dict[str, Turn]]:
    """Each trainer in turn ``steps`` timed steps, after one that is not, in every round."""
    names = list(trainers)
    found = []
    for index in range(rounds):
        turns = {}
        for name in order_of(names, index):
            trainer = trainers[name]
            trainer.prepare(steps + 1)
            trainer.step()
            trainer.wait()
            begin, cpu_begin = time.perf_counter(), time.process_time()
            for _ in range(steps):
                trainer.step()
            trainer.wait()
            turns[name] = (time.perf_counter() - begin) / steps, (time.process_time() - cpu_begin) / steps
        found.append(turns)
        said = ", ".join(f"{name} {1e3 * turns[name][0]:.0f}" for name in names)
        print(f"round {index + 1} of {rounds}, ms: {said}", flush=True)
    return found


def check_losses(losses: Mapping[str, Sequence[float]]) -> float:
    """Largest difference from plain PyTorch's, as ``training.check_losses`` takes it.

    Raises:
        Disagreement: one is larger than allowed.
    """
    largest = 0.0
    for name, found in losses.items():
        for step, (value, expected) in enumerate(zip(found, losses["local"], strict=True)):
            difference = abs(value - expected) / max(abs(expected), 1.0)
            if not difference <= TOLERANCES["float32"]:  # a NaN too
                raise Disagreement(
                    f"{name} does not train as plain PyTorch does: loss {value:.7g} instead of {expected:.7g} at step "
                    f"{step}, a difference of {difference:.2g} where {TOLERANCES['float32']:g} is allowed"
                )
            largest = max(largest, difference)
    return largest


def measure_first_step(name: str, options: argparse.Namespace) -> dict[str, float]:
    """Seconds to the end of the first step, seconds that the first ones took longer than later ones, also of the
    processor, and seconds of XLA's compiler in them."""
    mesh, workload = make_mesh(), workload_of(options)
    model = workload.make(torch.device("cpu"))
    seconds: list[float] = []
    cpu_seconds: list[float] = []
    begin, cpu_begin = time.perf_counter(), time.process_time()
    trainer = Trainer(name, workload, mesh, model)
    for _ in range(2 * WARMUP):
        if seconds:
            begin, cpu_begin = time.perf_counter(), time.process_time()
        trainer.prepare(1)
        trainer.step()
        trainer.wait()
        seconds.append(time.perf_counter() - begin)
        cpu_seconds.append(time.process_time() - cpu_begin)

    def longer(all_steps: list[float]) -> float:
        return sum(all_steps[:WARMUP]) - WARMUP * statistics.median(all_steps[WARMUP:])

    xla = compilations()[1]
    return {"first": seconds[0], "warm_up": longer(seconds), "warm_up_cpu": longer(cpu_seconds), "xla": xla}


def compilations() -> tuple[int, float]:
    """Programs that XLA has compiled in this process, and the seconds that it took."""
    import torch_xla.debug.metrics as metrics

    count, nanoseconds, *_ = metrics.metric_data("CompileTime") or (0, 0)
    return int(count), nanoseconds / 1e9


def described(mesh: Any) -> dict[str, Any]:
    import torch_xla

    found = machine("cpu", int(mesh.size()))
    client = os.environ["PJRT_DEVICE"]
    return {**found, "device": "xla", "process_group": f"XLA's {client} client, torch_xla {torch_xla.__version__}"}


# The command


def table(result: dict[str, Any]) -> Table:
    header = ["implementation", "step, ms", f"÷ {COMPARED}", "CPU, ms", f"CPU ÷ {COMPARED}"]
    header += ["first step, s", *(f"{label}{unit}" for label in WARM_UP.values() for unit in (", s", " ÷"))]
    rows = []
    for row in result["rows"]:
        line = [row["name"], quartile_cell(row["step_seconds"], 1e3, 1), quartile_cell(row["ratio"][COMPARED], 1, 2)]
        line += [quartile_cell(row["cpu_seconds"], 1e3, 1), quartile_cell(row["cpu_ratio"][COMPARED], 1, 2)]
        if "first_seconds" in row:
            line.append(f"{row['first_seconds']:.1f}")
            for part in WARM_UP:
                line += [f"{row[f'{part}_seconds']:.1f}", f"{row[f'{part}_ratio']:.2f}"]
        rows.append(line + [""] * (len(header) - len(line)))
    loss = result["loss"]
    note = (
        f"Medians, first to third quartile in brackets. Losses of all {loss['steps']} steps agree with plain PyTorch's "
        f"to {loss['largest_difference']:.1g} (allowed: {loss['tolerance']:g})."
    )
    return Table(header, rows, note)


def result_of(options: argparse.Namespace, found: dict[str, Any], first: dict[str, list[dict[str, float]]]) -> Any:
    rounds = found["rounds"]
    rows: list[dict[str, Any]] = []
    medians = {n: {k: statistics.median(m[k] for m in of) for k in of[0]} for n, of in first.items()}
    for name in options.implementations:
        row: dict[str, Any] = {"name": name, "rounds": [turns[name][0] for turns in rounds]}
        row["step_seconds"] = quartiles(row["rounds"])
        row["cpu_seconds"] = quartiles([turns[name][1] for turns in rounds])
        row["ratio"] = {COMPARED: quartiles([turns[name][0] / turns[COMPARED][0] for turns in rounds])}
        row["cpu_ratio"] = {COMPARED: quartiles([turns[name][1] / turns[COMPARED][1] for turns in rounds])}
        if name in medians:
            row["first_seconds"] = medians[name]["first"]
            for part in WARM_UP:
                row[f"{part}_seconds"] = medians[name][part]
                row[f"{part}_ratio"] = medians[name][part] / medians[COMPARED][part]
        rows.append(row)
    steps = WARMUP + options.rounds * (1 + options.steps)
    left_out = {"arguments", "results", "images", "markdown", "name", "implementations", "ranks", "device"}
    return {
        "benchmark": "xla_step_time",
        "command": command_of(__file__, options.arguments),
        "machine": found["machine"],
        "settings": {"against": [COMPARED], **{k: v for k, v in vars(options).items() if k not in left_out}},
        "loss": {"tolerance": TOLERANCES["float32"], "largest_difference": found["difference"], "steps": steps},
        "rows": rows,
    }


def in_process(what: str, options: argparse.Namespace) -> Any:
    """Measure in a process of its own: XLA's client is made once in a process."""
    threads = str(2 * options.devices)  # a collective holds a thread per device until all have come
    environment = {**ENVIRONMENT, "CPU_NUM_DEVICES": str(options.devices), "XLA_THREAD_POOL_SIZE": threads}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        command = [sys.executable, __file__, *options.arguments]
        variables = {**environment, **os.environ, MEASURE: f"{what}:{path}"}
        finished = subprocess.run(command, env=variables, cwd=ROOT, timeout=TIMEOUT_SECONDS)
        if finished.returncode or not path.exists():
            raise Disagreement(f"measuring {what} ended with exit code {finished.returncode}")
        return json.loads(path.read_text())


def measure_all(options: argparse.Namespace) -> Any:
    found = in_process("steps", options)
    first: dict[str, list[dict[str, float]]] = {}
    for _ in range(options.repeats):
        for name in options.implementations:
            if name != "local":
                first.setdefault(name, []).append(in_process(name, options))
                print(f"first step of {name}, s: {first[name][-1]['first']:.1f}", flush=True)
    return result_of(options, found, first)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = parser_of(__doc__, "xla_step_time")
    parser.set_defaults(width=256, batch=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--devices", type=int, default=4, help="virtual devices of the CPU client")
    parser.add_argument("--implementations", nargs="+", choices=list(IMPLEMENTATIONS), default=list(IMPLEMENTATIONS))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a turn")
    parser.add_argument("--repeats", type=int, default=3, help="of each first step; 0 leaves them out")
    options = parser.parse_args(arguments)
    options.arguments = list(arguments)
    if {"local", COMPARED} - set(options.implementations):
        parser.error(f"--implementations must have local and {COMPARED} among them, to compare with")
    if options.rounds < 1 or options.steps < 1:
        parser.error("--rounds and --steps must be at least 1")
    if options.dtype != "float32" or options.ranks or options.device:
        parser.error("--dtype, --ranks and --device are not for this benchmark; see --devices")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        if MEASURE in os.environ:
            what, _, path = os.environ[MEASURE].partition(":")
            found = measure_steps(options) if what == "steps" else measure_first_step(what, options)
            Path(path).write_text(json.dumps(found))
        else:
            publish(options, measure_all(options), table, plot)
    except Disagreement as error:
        print(f"FAILED: {error}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
