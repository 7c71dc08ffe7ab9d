"""The cost model gives the seconds of every node of a graph and of every collective, from shapes alone.

**Compute** (Williams et al. 2009, the roofline). A kernel (``kernels.py``) takes the longer of its arithmetic and its
memory traffic; matrix multiplications and attention, forward and backward, have efficiencies of their own:

    seconds = max(FLOPs / (peak(dtype) · efficiency), bytes / (memory_bandwidth · memory_efficiency)) + launch

**Collectives** (Thakur, Rabenseifner, Gropp 2005). A group of n ranks lies on m islands with l = n / m of it on each.
An all-gather of B bytes brings (n-1)/n · B to every rank, and (n-l)/n · B to every island, through the adapters of its
l ranks:

    bytes:  t(B)  = max((n-1)/n · B / intra, (n-l)/n · B / (l · inter))    (the slower of the two; l = 1: no intra)
    ring:   (n-m) · a_intra + (m-1) · a_inter + t(B)
    log:    ⌈log₂ l⌉ · a_intra + ⌈log₂ m⌉ · a_inter + 2 · t(B)

plus ``collective_launch``; the faster of the two counts. ``a`` is ``Link.latency``, bandwidths are ``Link.sustained``.
*Ring* is NCCL's, its steps counted as in NCCL's ``src/graph/tuning.cc``. *Log* stands for the algorithms of few steps
(recursive doubling, PAT in NCCL 2.23, trees) with NCCL's low-latency protocol, whose flags halve the bandwidth. A
reduce-scatter is an all-gather backwards; an all-reduce is one after the other. In an all-to-all every rank sends its B
bytes, one n-th to each, through its own adapter: ``max((l-1)/n · B / intra, (n-l)/n · B / inter)``, in one step per
level. Gradients that are quantized are exchanged so. Other groups that use the same adapters at the same time are not
seen.

Collectives of the model's own (torch's functional ones, of tensor, context and expert parallelism) cost the same, where
the model was given their groups; otherwise they count as kernels that read and write.

Symbolic sizes count by the values that they had when traced, which can differ between ranks: what all ranks must decide
alike has to come from one rank's numbers, or from shapes that are the same everywhere.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, asdict, dataclass, field
from typing import Any

import torch
from torch import fx

from graph_fsdp import compat
from graph_fsdp.compat import arguments_of
from graph_fsdp.passes.analysis.hardware import Hardware, check_fields
from graph_fsdp.passes.analysis.kernels import Kind, Work, arithmetic_of, graph_work, packet, value_nbytes
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.fake_values import iterate_tensors
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.ir.layout import copies_by, packed_nbytes
from graph_fsdp.passes.ir.operands import argument, arguments, operand

# Functional collective → the method that has its seconds.
_functional = torch.ops._c10d_functional
_MODEL_COLLECTIVES = {
    _functional.all_gather_into_tensor: "all_gather_seconds",
    _functional.reduce_scatter_tensor: "all_gather_seconds",
    _functional.all_reduce: "all_reduce_seconds",
    _functional.all_to_all_single: "all_to_all_seconds",
    torch.ops._c10d_functional_autograd.all_to_all_single: "all_to_all_seconds",
}


@dataclass(frozen=True)
class GroupShape:
    """Says where the ranks of a process group lie: ``size`` of them, ``stride`` apart in global rank. On a mesh, the
    stride of a dimension is the product of the sizes of the later ones. Raises ValueError where either is below 1."""

    size: int
    stride: int = 1

    def __post_init__(self) -> None:
        says = "be a whole number of ranks, 1 or more"
        check_fields(self, says, lambda value: isinstance(value, int) and value >= 1, "size", "stride")


@dataclass(frozen=True)
class Measurements:
    """Holds measured seconds, which take the place of modelled ones.

    compute: ``op_key`` → seconds of a kernel of its own; with fusion, pointwise operators and reductions have no such
    kernel and are not looked up. collectives: ``collective_key`` → seconds. scale: measured over modelled seconds, for
    compute without a measurement.
    """

    compute: Mapping[str, float] = field(default_factory=dict)
    collectives: Mapping[str, float] = field(default_factory=dict)
    scale: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self, "be above 0", lambda value: value > 0, "scale")

    def to_json(self) -> dict[str, Any]:
        """Return a dict that ``json.dumps`` takes."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Measurements:
        """Read what ``to_json`` gave. Raises ValueError on anything else."""
        if not isinstance(data, Mapping) or set(data) != {"compute", "collectives", "scale"}:
            got = sorted(data) if isinstance(data, Mapping) else repr(data)
            raise ValueError(f"measurements: must be a dict of compute, collectives and scale, got {got}")
        return cls(dict(data["compute"]), dict(data["collectives"]), float(data["scale"]))


def op_key(node: fx.Node) -> str:
    """Describe a call by its operator, inputs and output: equal for equal work in every trace, process and rank."""
    values: list[Any] = []
    fx.map_arg((node.args, node.kwargs), lambda n: values.append(n.meta.get("val")))  # repeated inputs repeat
    inputs = ", ".join(_describe(value) for value in values if next(iterate_tensors(value), None) is not None)
    return f"{node.target}({inputs}) -> {_describe(node.meta.get('val'))}"


def collective_key(node: fx.Node) -> str:
    """Describe a collective that a node starts by operator, bytes of its full buffer, dtype and group size."""
    given, dtype = vars(arguments(node)), _dtype_name(node.meta["val"].dtype)
    ranks = given["world_size"] if "world_size" in given else given["ranks"]
    sent = f" sent as {_dtype_name(given['sent_as'])}" if given.get("sent_as") else ""
    return f"{node.target} {_full_nbytes(node, ranks)} bytes {dtype}{sent} of {ranks} ranks"


def _describe(value: Any) -> str:
    tensors = [f"{_dtype_name(t.dtype)}{list(map(compat.size_hint, t.shape))}" for t in iterate_tensors(value)]
    return tensors[0] if len(tensors) == 1 else f"({', '.join(tensors)})"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _full_nbytes(node: fx.Node, size: int) -> int:
    """Return the bytes of the whole buffer of a collective: what an all-gather gives and a reduce-scatter takes."""
    return value_nbytes(node.meta["val"]) * (size if node.target is dialect.reduce_scatter_start else 1)


@dataclass(frozen=True, slots=True)
class _Timed:
    """Holds the seconds of a graph as it was: its nodes with operators, arguments and values, and their
    addresses."""

    cost: CostModel
    nodes: list[tuple[Any, ...]]
    addresses: list[int]
    seconds: dict[fx.Node, float]


@dataclass(eq=False)
class CostModel:
    """Gives seconds on given hardware.

    hardware: of every rank.
    groups: process group name, as in the graph's collectives → its shape.
    measured: seconds that take the place of modelled ones.
    fused: whether the backend fuses pointwise operators and reductions (Inductor, XLA) or runs each alone (eager).
    combining: whether the backend's compiler joins small collectives itself, as XLA's combiners do.
    """

    hardware: Hardware
    groups: dict[str, GroupShape]
    _: KW_ONLY
    measured: Measurements = Measurements()
    fused: bool = True
    combining: bool = False

    # compute

    def graph_seconds(self, graph: Graph) -> dict[fx.Node, float]:
        """Return the compute seconds of every node; 0.0 for inputs and views. Linear.

        A fused kernel's launch counts on its first node, its reads and writes on those that read and write. What starts
        a collective has the seconds of the copies that it sends, and the wait those of unpacking, where they overlap. A
        collective of the model's own, which is waited for at once, has its seconds.
        """
        nodes = graph.fx_graph.nodes
        now = [(node, node.target, *arguments_of(node), node.meta.get("val")) for node in nodes]
        addresses = list(map(id, itertools.chain.from_iterable(now)))
        timed: _Timed | None = graph.timed
        if timed is None or timed.cost is not self or timed.addresses != addresses:
            graph.timed = timed = _Timed(self, now, addresses, self._graph_seconds(graph))
        return timed.seconds.copy()

    def _graph_seconds(self, graph: Graph) -> dict[fx.Node, float]:
        seconds: dict[fx.Node, float] = {}
        for node, work in graph_work(graph, fused=self.fused).items():
            own = self.model_collective_seconds(node)
            if own is not None:
                seconds[node] = own
            elif work.kind is Kind.FREE:
                seconds[node] = self.packing_seconds(node)
            else:
                seconds[node] = self._compute_seconds(node, work)
        return seconds

    def least_seconds(self, graph: Graph) -> float:
        """Return seconds that the graph computes at least: its arithmetic, without what is read and written. This takes
        a tenth of the time of ``graph_seconds``."""
        return sum(self._compute_seconds(node, work) for node, work in arithmetic_of(graph).items())

    def packing_seconds(self, node: fx.Node) -> float:
        """Return the seconds of the copies that go with a collective that a node starts or waits for."""
        waits = node.target in dialect.WAITS
        # Where nothing runs beside a collective, no schedule can hide a copy behind one.
        if not self.hardware.overlaps or not (waits or node.target in dialect.STARTS):
            return 0.0
        nbytes = copies_by(operand(node) if waits else node)[waits]
        return self._traffic_seconds(nbytes) + self.hardware.launch if nbytes else 0.0

    def _compute_seconds(self, node: fx.Node, work: Work) -> float:
        if self.measured.compute and (work.kind is Kind.KERNEL or not self.fused):
            seconds = self.measured.compute.get(op_key(node))
            if seconds is not None:
                return seconds
        hardware = self.hardware
        efficiency: float = getattr(hardware, work.efficiency) or hardware.matmul_efficiency / 2
        arithmetic = work.flops * work.executed / (hardware.peak_flops(work.dtype) * efficiency)
        traffic = self._traffic_seconds(work.read + work.written)
        return (max(arithmetic, traffic) + work.launches * hardware.launch) * self.measured.scale

    def _traffic_seconds(self, nbytes: int) -> float:
        return nbytes / (self.hardware.memory_bandwidth * self.hardware.memory_efficiency)

    def copy_seconds(self, nbytes: int) -> float:
        """Return the seconds of a kernel that reads ``nbytes`` and writes as many."""
        return self._traffic_seconds(2 * nbytes) + self.hardware.launch

    def node_seconds(self, graph: Graph) -> dict[fx.Node, float]:
        """Return the compute seconds of every node; of nodes that start a collective or a copy, its seconds."""
        seconds = self.graph_seconds(graph)
        for node in seconds:
            if node.target in dialect.STARTS:
                seconds[node] = self.collective_seconds(node)
            elif node.target is dialect.reduce_payloads:  # nothing runs beside it: it is waited for at once
                seconds[node] = self.all_reduce_seconds(node.meta["fsdp"].nbytes, dialect.group_of(node))
            elif node.target in dialect.COPY_STARTS or node.target in dialect.ACTIVATION_STARTS:
                seconds[node] = self.transfer_seconds(node.meta["fsdp"].nbytes)
        return seconds

    def transfer_seconds(self, nbytes: int) -> float:
        """Return the seconds of a copy of ``nbytes`` between the CPU's memory and the device's."""
        return self.hardware.host.latency + nbytes / self.hardware.host.sustained

    # collectives

    def all_gather_seconds(self, nbytes: int, group: str) -> float:
        """Return the seconds of an all-gather or reduce-scatter with ``nbytes`` in the whole buffer; 0 on one rank."""
        algorithms = self._algorithms(group)
        if not algorithms:
            return 0.0
        return self.hardware.collective_launch + min(steps + nbytes * per_byte for steps, per_byte in algorithms)

    def all_reduce_seconds(self, nbytes: int, group: str) -> float:
        """Return the seconds of an all-reduce of ``nbytes``; 0 on a group of one rank."""
        return max(0.0, 2 * self.all_gather_seconds(nbytes, group) - self.hardware.collective_launch)

    def all_to_all_seconds(self, nbytes: int, group: str) -> float:
        """Return the seconds of an all-to-all in which every rank has ``nbytes``; 0 on a group of one rank."""
        n, local, intra, inter = self._shape(group).size, self._local(group), self.hardware.intra, self.hardware.inter
        if n == 1:
            return 0.0
        inside = intra.latency + (local - 1) / n * nbytes / intra.sustained if local > 1 else 0.0
        outside = inter.latency + (n - local) / n * nbytes / inter.sustained if n > local else 0.0
        return self.hardware.collective_launch + max(inside, outside)

    def model_collective_seconds(self, node: fx.Node) -> float | None:
        """Return the seconds of a collective of the model's own; None for other nodes, kinds of collectives that are
        not known, and groups that the model was not given."""
        if not dialect.is_model_collective(node) or packet(node) not in _MODEL_COLLECTIVES:
            return None
        group = argument(node, "group_name")
        if group not in self.groups:
            return None
        whole = max(value_nbytes(node.meta["val"]), value_nbytes(operand(node).meta["val"]))
        seconds: float = getattr(self, _MODEL_COLLECTIVES[packet(node)])(whole, group)
        return seconds

    def send_seconds(self, nbytes: int, distance: int) -> float:
        """Return the seconds in which one rank sends to another, whose global rank differs by ``distance``."""
        link = self.hardware.intra if distance < self.hardware.island else self.hardware.inter
        return self.hardware.collective_launch + link.latency + nbytes / link.sustained

    def collective_seconds(self, node: fx.Node) -> float:
        """Return the seconds of the collective that a node starts, without packing its inputs (``graph_seconds``).

        Raises:
            ValueError: the node is none of ``dialect.STARTS``, or the model was not given its group.
        """
        if node.target not in dialect.STARTS:
            raise ValueError(f"{node.name}: {node.target} starts no collective; see dialect.STARTS")
        measured = self.measured.collectives.get(collective_key(node)) if self.measured.collectives else None
        if measured is not None:
            return measured
        group = argument(node, "group")
        if node.target is dialect.reduce_scatter_start and argument(node, "sent_as"):
            return self.all_to_all_seconds(packed_nbytes(node), group)
        nbytes = _full_nbytes(node, self._shape(group).size)
        is_half = node.target is dialect.all_gather_start or node.target is dialect.reduce_scatter_start
        return (self.all_gather_seconds if is_half else self.all_reduce_seconds)(nbytes, group)

    def saturating_bytes(self, group: str, efficiency: float = 0.9) -> int:
        """Return the smallest gathered buffer, in bytes, whose all-gather reaches ``efficiency`` of the bandwidth of an
        endless one; 0 on a group of one rank. Raises ValueError where ``efficiency`` is not in (0, 1)."""
        if not 0 < efficiency < 1:
            raise ValueError(f"efficiency must be above 0 and below 1, got {efficiency!r}")
        algorithms, launch = self._algorithms(group), self.hardware.collective_launch
        best = min((per_byte for _, per_byte in algorithms), default=0.0)
        # B · best = efficiency · (launch + steps + B · per_byte), for the algorithm that gets there first
        rates = ((launch + steps, best - efficiency * per_byte) for steps, per_byte in algorithms)
        return min((math.ceil(efficiency * fixed / rate) for fixed, rate in rates if rate > 0), default=0)

    def message_seconds(self, group: str) -> float:
        """Return the steps of one more message in a grouped (coalesced) all-gather, which shares its launch; nothing
        where the compiler joins collectives: it can leave messages apart, and cannot take a copy out again."""
        if self.combining:
            return 0.0
        return min((steps for steps, _ in self._algorithms(group)), default=0.0)

    def levels(self, group: str) -> frozenset[str]:
        """Return the levels of the network that the group's collectives use: "intra", "inter"."""
        size, local = self._shape(group).size, self._local(group)
        return frozenset(name for name, used in (("intra", local > 1), ("inter", size > local)) if used)

    def _local(self, group: str) -> int:
        """Count the ranks of a group that lie on one island."""
        shape = self._shape(group)
        return max(1, min(shape.size, self.hardware.island // shape.stride))

    def _shape(self, group: str) -> GroupShape:
        if group not in self.groups:
            known = ", ".join(map(repr, self.groups)) or "none"
            raise ValueError(f"group: the cost model was given no process group {group!r}; it has {known}")
        return self.groups[group]

    def _algorithms(self, group: str) -> tuple[tuple[float, float], ...]:
        """Return (steps, per_byte) of each algorithm: B bytes take ``steps + B · per_byte`` seconds."""
        shape, hardware = self._shape(group), self.hardware
        n, local = shape.size, self._local(group)
        if n == 1:
            return ()
        islands = -(-n // local)
        intra, inter = hardware.intra, hardware.inter
        inside = (n - 1) / n / intra.sustained if local > 1 else 0.0
        outside = (n - local) / n / (local * inter.sustained)
        per_byte = max(inside, outside)
        ring = (n - islands) * intra.latency + (islands - 1) * inter.latency
        log = math.ceil(math.log2(local)) * intra.latency + math.ceil(math.log2(islands)) * inter.latency
        return (ring, per_byte), (log, 2 * per_byte)
