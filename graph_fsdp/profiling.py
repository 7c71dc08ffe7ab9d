"""``graph_fsdp.profile``: what the regions and collectives of a running model take, for the cost model to compute with.

After DeepCompile (Tanaka et al. 2025), whose passes schedule by profiled times of operators and collectives; here
whole compute regions are timed as they were compiled, and their times are spread over the nodes in them.

[Note: times that all ranks share]
What a schedule is made of must be equal on all ranks, and what they measure is not. So the first rank says what it has
run, and each piece of that is averaged over the ranks that have run the same: the same computation on the same shapes
(a rank with another batch shape has other regions, and the first rank is the one whose graphs decide the plan). A
collective ends for all ranks at once, so what a rank measures is the collective and the wait for the rank that comes
last: of each run, the shortest time over the ranks counts. From these figures the first rank makes the profile, and all
ranks get it. In all three small collectives per mesh dimension, on what one rank has run.
"""

from __future__ import annotations

import contextlib
import json
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from graph_fsdp.errors import UnsupportedError
from graph_fsdp.passes import CostModel, Measurements, compat
from graph_fsdp.passes.cost import collective_key, op_key
from graph_fsdp.passes.dialect import Role
from graph_fsdp.passes.graph import Phase
from graph_fsdp.passes.kernels import Kind, kind_of
from graph_fsdp.profile_report import CollectiveTime, Profile, RegionTime
from graph_fsdp.report import ROW_KINDS, engine_of
from graph_fsdp.runtime import Program
from graph_fsdp.runtime.agreement import digest, is_shared
from graph_fsdp.runtime.regions import Region, Step, cut
from graph_fsdp.runtime.timing import Place, Recorder


def profile(model: nn.Module, *batch: Any, steps: int = 10, warmup: int = 3, **kwargs: Any) -> Profile:
    """Run ``model(*batch, **kwargs)`` and its backward, and time each compute region and each collective.

    All ranks must call it at once, as they would call the model; they get equal profiles. While it runs, collectives
    are waited for where they start, so steps take longer than in training.

    A model in training mode runs forward and backward: of the output, if it is a tensor, of its ``loss``, if it has
    one, else of all its tensors; the sum of it is differentiated. In evaluation mode, under ``torch.no_grad()`` and
    under ``torch.inference_mode()``, its inference graph runs alone. Gradients, buffers and the state of torch's random
    number generators are afterwards what they were, and nothing calls an optimizer: hooks that run after a gradient was
    accumulated do not run. What the model keeps elsewhere is not restored.

    Times of a graph with symbolic sizes count for the sizes that it was traced with: profile with such a batch.

    Args:
        model: compiled by graph_fsdp. It may be called for the first time here.
        steps: timed calls, 1 or more; the median over them counts.
        warmup: calls before these, 1 or more: graphs are captured and compiled in the first one.

    Raises:
        TypeError: ``model`` was not compiled by graph_fsdp, or the batch does not fit its forward.
        ValueError: ``steps`` or ``warmup`` is below 1, or the model ran no graph.
        UnsupportedError: ``model`` was compiled with ``regions="whole"``.
    """
    engine = engine_of(model)
    if engine.whole:
        raise UnsupportedError(
            "model: it was compiled with regions='whole', and what runs as one function cannot be timed by region; "
            "profile it compiled with regions='cut', whose profile a pipeline takes for either"
        )
    _check_count("steps", steps)
    _check_count("warmup", warmup)
    device = engine.storage.device
    recorder = Recorder(device)
    with _restored(model, device):
        for _ in range(warmup):
            _step(model, batch, kwargs)
        with recorder.timing(engine.programs.values()):
            for _ in range(steps):
                _step(model, batch, kwargs)
                recorder.read()
    if not recorder.seconds:
        raise ValueError(
            f"batch: {type(model).__name__} ran no compute region and no collective on it; pass a batch as in training"
        )
    ran = _Ran.of(recorder, engine.programs)
    groups = _groups(engine)
    ran.share(groups, device)
    made = ran.profile(engine.cost, len(engine.schedules.ranks), steps) if _decides(engine) else None
    if not groups:
        assert made is not None
        return made
    return Profile.from_json(json.loads(_broadcast(json.dumps(made.to_json()) if made else "", groups)))


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of calls, 1 or more, got {value!r}")


# Running the model


def _step(model: nn.Module, batch: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with torch.set_grad_enabled(torch.is_grad_enabled() and model.training):
        sums = [t.sum() for t in _differentiated(model(*batch, **kwargs)) if t.requires_grad]
        parameters = [p for p in model.parameters() if p.requires_grad]
        if sums and parameters:
            # Not backward(): nothing is accumulated, in parameters as in the tensors that made the batch.
            torch.autograd.grad(sums, parameters, allow_unused=True)


def _differentiated(output: Any) -> list[Tensor]:
    loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return [loss]
    tensors: list[Tensor] = []
    compat.tree_map_only(Tensor, tensors.append, output)
    return tensors


@contextlib.contextmanager
def _restored(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Buffers and random number generators as they were, whatever happens."""
    saved = [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    generators: dict[str, Any] = (
        {"devices": []} if device.type == "cpu" else {"devices": [device], "device_type": device.type}
    )
    with torch.random.fork_rng(**generators):
        try:
            yield
        finally:
            with torch.no_grad():
                for module, name, buffer, value in saved:
                    module._buffers[name] = buffer
                    if buffer is not None and value is not None:
                        buffer.copy_(value)


# What ran


class _Ran:
    """What a rank has run, by names that other ranks which ran the same have too. ``regions``: name → median seconds.
    ``collectives``: name → seconds of each run."""

    def __init__(self) -> None:
        self.graphs: dict[Program, tuple[int, Phase]] = {}
        self.steps: dict[str, tuple[Program, int, Step]] = {}
        self.regions: dict[str, float] = {}
        self.collectives: dict[str, list[float]] = {}

    @classmethod
    def of(cls, recorder: Recorder, programs: Mapping[tuple[int, Phase], Program]) -> _Ran:
        ran = cls()
        ran.graphs = {program: graph for graph, program in programs.items()}
        cuts: dict[Program, list[Step]] = {}
        for (program, index), seconds in recorder.seconds.items():
            steps = cuts.setdefault(program, cut(program.graph))
            order = list(cuts).index(program)
            ran._add(f"{order} {program.graph.phase}", (program, index), steps[index], seconds)
        return ran

    def _add(self, graph: str, place: Place, step: Step, seconds: list[float]) -> None:
        if isinstance(step, Region):
            count = len(self.regions)
            name = f"{graph} region {count} {digest([op_key(n) for n in step.nodes if n.op == 'call_function'])}"
            self.regions[name] = statistics.median(seconds)
        else:
            count = len(self.collectives)
            name = f"{graph} collective {count} {step.meta['fsdp'].bucket} {collective_key(step)}"
            self.collectives[name] = seconds
        self.steps[name] = (*place, step)

    def share(self, groups: list[dist.ProcessGroup], device: torch.device) -> None:
        """Replace this rank's seconds by those of all. See *times that all ranks share*."""
        if not groups:
            return
        runs = {f"{name} #{k}": s for name, seconds in self.collectives.items() for k, s in enumerate(seconds)}
        names, run_names = json.loads(_broadcast(json.dumps([list(self.regions), list(runs)]), groups))
        counted = [float(name in self.regions) for name in names]
        summed = [self.regions.get(name, 0.0) for name in names]
        totals = _all_reduce(summed + counted, dist.ReduceOp.SUM, groups, device)
        shortest = _all_reduce([runs.get(n, float("inf")) for n in run_names], dist.ReduceOp.MIN, groups, device)
        if names == list(self.regions) and run_names == list(runs):  # as on the first rank, which makes the profile
            means = [total / count for total, count in zip(totals[: len(names)], totals[len(names) :], strict=True)]
            self.regions = dict(zip(names, means, strict=True))
            values = iter(shortest)
            self.collectives = {name: [next(values) for _ in seconds] for name, seconds in self.collectives.items()}

    def profile(self, cost: CostModel, ranks: int, steps: int) -> Profile:
        """``cost``: what the running program was scheduled with. Seconds are spread by the model alone: its scale is
        what they give."""
        model = CostModel(cost.hardware, cost.groups, fused=cost.fused)
        modelled: dict[Program, dict[fx.Node, float]] = {}
        predicted: dict[Program, dict[fx.Node, float]] = {}
        compute: dict[str, list[float]] = {}
        regions: list[RegionTime] = []
        total = measured = 0.0
        for name, seconds in self.regions.items():
            program, index, region = self.steps[name]
            assert isinstance(region, Region)
            if program not in modelled:
                modelled[program] = model.graph_seconds(program.graph)
                predicted[program] = cost.graph_seconds(program.graph)
            shares = {node: modelled[program][node] for node in region.nodes if modelled[program][node] > 0}
            region_total = sum(shares.values())
            total, measured = total + region_total, measured + (seconds if shares else 0.0)
            own = [n for n in shares if not cost.fused or kind_of(n) is Kind.KERNEL]  # others have none to be looked up
            for node in own:
                compute.setdefault(op_key(node), []).append(seconds * shares[node] / region_total)
            expected = sum(predicted[program][node] for node in region.nodes)
            first = next((node for node in region.nodes if node in shares), region.nodes[0])
            regions.append(RegionTime(*self.graphs[program], index, _unit(region), first.name, expected, seconds))
        collectives, by_key = self._collective_times(cost)
        return Profile(
            Measurements(_means(compute), _means(by_key), measured / total if measured and total else 1.0),
            regions,
            collectives,
            hardware=cost.hardware.name,
            ranks=ranks,
            steps=steps,
        )

    def _collective_times(self, cost: CostModel) -> tuple[list[CollectiveTime], dict[str, list[float]]]:
        rows: list[CollectiveTime] = []
        by_key: dict[str, list[float]] = {}
        for name, runs in self.collectives.items():
            program, _, node = self.steps[name]
            assert isinstance(node, fx.Node)
            seconds, record = statistics.median(runs), node.meta["fsdp"]
            by_key.setdefault(collective_key(node), []).append(seconds)
            kind, expected = ROW_KINDS[record.role], cost.collective_seconds(node)
            rows.append(CollectiveTime(*self.graphs[program], kind, record.bucket, record.nbytes, expected, seconds))
        return rows, by_key


def _unit(region: Region) -> str:
    """The units whose parameters a region computes with; "" where it computes with none."""
    records = [node.meta.get("fsdp") for node in [*region.inputs, *region.nodes]]
    roles = (Role.GATHER_WAIT, Role.UNPACK)
    return ", ".join(dict.fromkeys(r.unit or "root" for r in records if r is not None and r.role in roles))


def _means(values: dict[str, list[float]]) -> dict[str, float]:
    return {key: statistics.fmean(value) for key, value in values.items()}


# Ranks


def _groups(engine: Any) -> list[dist.ProcessGroup]:
    """The process groups of each mesh dimension that together join all ranks of the model; none for one rank."""
    if not is_shared(engine.schedules.ranks):
        return []
    mesh = engine.storage.mesh.mesh
    return [mesh.get_group(dimension) for dimension in range(mesh.ndim)]


def _decides(engine: Any) -> bool:
    return not is_shared(engine.schedules.ranks) or dist.get_rank() == engine.schedules.ranks[0]


def _broadcast(text: str, groups: list[dist.ProcessGroup]) -> str:
    """The first rank's text: along each dimension in turn, from the first rank of it."""
    value: list[Any] = [text]
    for group in groups:
        dist.broadcast_object_list(value, dist.get_process_group_ranks(group)[0], group=group)
    return value[0]


def _all_reduce(
    values: list[float], op: Callable[..., Any], groups: list[dist.ProcessGroup], device: torch.device
) -> list[float]:
    vector = torch.tensor(values, dtype=torch.float64, device=device)
    for group in groups:
        dist.all_reduce(vector, op=op, group=group)
    return vector.tolist()
