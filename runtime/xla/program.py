"""XLA compiles a lowered graph once, and replays it.

[Note: compiled once]
torch_xla makes programs of what is pending on lazy tensors, and knows an argument by the id of its memory. One that
shares memory with another live tensor (after ``clone``, ``copy_`` or a replay that returned it) may become a constant
of the program, and training would go on with its first value. So a graph is run lazily on fresh tensors of the same
shapes, dtypes and shardings; and what it is found to be computed from must be these.

[Note: keys]
torch_xla knows a program by a key that does not say which uses of inputs are uses of one: ``(a * b, a, b)`` and
``(a * b, b, a)`` have the same, and the program of the first to be compiled. So each returns one more tensor, which has
no elements, and a shape that follows from the graph. (From what else was compiled before it must not follow: processes
of several hosts have to compile one program.)

XLA merges, moves and replaces a graph's collectives. What it ran is therefore read in its optimized program (HLO),
after the partitioner and all of its passes, as one device executes it.

A graph is one program of all devices, or, with ``ReplicaProgram``, that of one replica: a process, or on XLA's CPU
client a thread, with one device. Nothing enters or leaves that: its tensors are those of the local view.

[Note: threads]
On XLA's CPU client the replicas are threads of one process, whose Dynamo configuration, AOTAutograd state and torch_xla
counters they share, so they take turns to trace and to compile. A thread in its turn must not wait for the others:
before its turn its device finishes all work, and in it a device starts programs and does not wait for results.

The CPU client ends the process when the devices of a collective come more than ten seconds after each other. So no
thread runs a new program before all have compiled it: the call in which it was compiled ends in ``Compiled``, and is
made again after the turn, when all threads are there (docs/decisions/devices.md, "XLA replicas").
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from graph_fsdp.compat import xla as compat_xla
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.canonical_form import canonical_form, digest
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.ir.layout import layout_of
from graph_fsdp.passes.ir.operands import argument
from graph_fsdp.passes.ir.stage import readable
from graph_fsdp.runtime.ranks.agreement import RankDisagreement
from graph_fsdp.runtime.regions.regions import RegionCache
from graph_fsdp.runtime.slots import GatheredBytes
from graph_fsdp.runtime.whole import WholeProgram, collectives_of
from graph_fsdp.runtime.xla.host_fallbacks import OnHostFallback, find_host_fallbacks, name_what_fails, report
from graph_fsdp.runtime.xla.lower import Lowered
from graph_fsdp.runtime.xla.operators import same_placement


class BakedInputError(RuntimeError):
    """XLA would not read an argument of a graph again in later runs."""


Run: TypeAlias = Callable[[list[Any]], list[Tensor]]  # of a program that is compiled, with all its inputs

FIRST_RUN = "first run"
DROPPED = "torch_xla had dropped it for newer programs (XLA_COMPILATION_CACHE_SIZE)"
FOR_ITS_TEXT = "its HLO was asked for"


@dataclass(frozen=True)
class Compilation:
    """Records a compilation of a captured graph by XLA: its ``cause``, and its ``seconds``, tracing included."""

    cause: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.cause} ({self.seconds:.1f} s)"


def _own_shape(graph: fx.Graph) -> list[int]:
    """Return the shape of a tensor without elements, by what a graph computes of which inputs, whatever their names."""
    body = [node for node in graph.nodes if node.op != "placeholder"]
    parts, _ = canonical_form(graph.find_nodes(op="placeholder"), body, lambda node: node.op, lambda n: str(n.target))
    number = int(digest(parts), 16)
    return [0, *(1 + (number >> shift) % 1024 for shift in (0, 10, 20))]


class XlaProgram(WholeProgram):
    """Runs a graph by XLA. Call it with the list of the graph's inputs, which it empties. ``source`` is the lowered
    graph as Python, ``compilations`` those by XLA, in order. ``on_host`` says what becomes of operators that would run
    on the host; a graph with such runs lazily, each time anew (not where groups of devices run by themselves)."""

    def __init__(
        self, graph: Graph, lowered: Lowered, cache: RegionCache, counter: GatheredBytes, on_host: OnHostFallback
    ) -> None:
        self.cache = cache
        cache.regions += 1
        self.graph, self.lowered, self.counter = graph, lowered, counter
        self.source = readable(lowered.module.graph)
        self.collectives = collectives_of(graph)
        self.on_host = on_host
        self.compilations: list[Compilation] = []
        self._compiled: Run | None = None
        self._taken: list[Any] = []  # descriptions of the inputs as the program takes them

    def __call__(self, args: list[Any]) -> Any:
        inputs = list(args)
        args.clear()
        if self.lowered.seeded:
            inputs.append(self._seeds())
        results: list[Tensor] = []
        if any(kind == "result" for kind, _ in self.lowered.returns):
            if self._compiled is None:
                self._compiled = self._compile(inputs, FIRST_RUN)
            inputs = self._placed(inputs)
            results = self._run(self._compiled, inputs)
        self.counter.collectives.update(self.collectives)
        found = {"input": inputs, "result": results}
        return tuple(value if kind == "constant" else found[kind][value] for kind, value in self.lowered.returns)

    def _run(self, compiled: Run, inputs: list[Any]) -> list[Tensor]:
        try:
            return compiled(inputs)
        except compat_xla.ProgramDroppedError:
            self._compiled = compiled = self._compile(inputs, DROPPED)
        return compiled(inputs)

    def _seeds(self) -> Tensor:
        """Return a number for each device that draws by itself, from the CPU's generator, so that replicas that have
        called ``torch.manual_seed`` alike draw differently. They are hashed, so consecutive ones will do."""
        entry = self.lowered.entries[-1]
        each = torch.arange(len(entry.placement.devices)) if entry is not None else compat_xla.ordinal()
        numbers = (torch.randint(2**31 - 1, ()) + each).to(torch.int32).to(compat_xla.device())
        if entry is not None:
            compat_xla.mark_sharding(numbers, entry.placement.devices, entry.placement.tiles)
        return numbers

    def _placed(self, inputs: list[Any]) -> list[Any]:
        """Put the inputs in memory, sharded as the program takes them."""
        tensors = {place: value for place, value in enumerate(inputs) if isinstance(value, Tensor)}
        if compat_xla.pending([*tensors.values()]):  # all of it, or an optimizer's state would be computed once more
            compat_xla.sync(wait=True)
        moved = False
        for (place, value), spec in zip(tensors.items(), compat_xla.sharding_specs([*tensors.values()]), strict=True):
            taken = self._taken[place]
            if not same_placement(spec, taken.spec):
                inputs[place], moved = compat_xla.annotated(value, taken.sharding), True
        if moved:
            compat_xla.sync(wait=True)
        return inputs

    # --- compiling

    def fresh_inputs(self, inputs: Sequence[Any]) -> list[Any]:
        """Return tensors like the inputs that share memory with nothing, sharded as they enter, or else as these."""
        described = compat_xla.descriptions(inputs)
        for place, entry in enumerate(self.lowered.entries):
            if entry is not None:
                dims = len(described[place].shape)
                sharding = compat_xla.op_sharding(entry.placement.devices, entry.placement.tiles, dims)
                described[place] = replace(described[place], sharding=sharding)
        return compat_xla.fresh_inputs(described)

    def _compile(self, inputs: Sequence[Any], cause: str) -> Run:
        begin = time.perf_counter()
        compat_xla.sync(wait=True)  # what is pending now is forgotten below
        on_host = find_host_fallbacks(self.lowered.module.graph)
        report(on_host, self.on_host, can_run=not self.lowered.groups)
        fresh = self.fresh_inputs(inputs)
        self._taken = compat_xla.descriptions(fresh)
        if on_host:
            return lambda given: list(self.lowered.module(*given))
        try:
            with torch.no_grad(), compat_xla.lazily():
                outputs = list(self.lowered.module(*fresh))
                outputs.append(outputs[0].new_zeros(_own_shape(self.lowered.module.graph)))  # see [Note: keys]
            places = self._matched(fresh, outputs)
            key = compat_xla.compile_pending(outputs)
        except (RuntimeError, ValueError) as error:
            if not isinstance(error, BakedInputError):
                name_what_fails(self.lowered.module.graph)
            raise
        finally:
            compat_xla.drop_pending()
        self.cache.compiled += 1
        self.compilations.append(Compilation(cause, time.perf_counter() - begin))
        return lambda given: compat_xla.run_compiled(key, [given[p] if isinstance(p, int) else p for p in places])

    def hlo(self) -> OptimizedHlo:
        """Return XLA's optimized program of the graph, compiled once more for its text."""
        if not self.compilations:
            raise RuntimeError(f"the {self.graph.phase} graph has not run yet; run the model, then ask for its HLO")
        begin = time.perf_counter()
        found = optimized_hlo(self.lowered.module, self._taken)
        self.compilations.append(Compilation(FOR_ITS_TEXT, time.perf_counter() - begin))
        return replace(found, scheduled=scheduled_collectives(self.graph))

    def _matched(self, fresh: Sequence[Any], outputs: Sequence[Tensor]) -> list[int | Tensor]:
        """Return for each parameter of the XLA program the place of an input, or a constant of the graph (numbers, so
        that graphs that differ in them are one program). See [Note: compiled once]."""
        place_of = {compat_xla.tensor_id(t): i for i, t in enumerate(fresh) if isinstance(t, Tensor)}
        sources = compat_xla.graph_inputs(outputs)
        found: list[int | Tensor] = [place_of.get(tensor_id, value) for tensor_id, value in sources]
        read = {place for place in found if isinstance(place, int)}
        constants = [value for value in found if isinstance(value, Tensor)]
        placeholders = self.lowered.module.graph.find_nodes(op="placeholder")
        for i, node in enumerate(placeholders):
            if node.users and i not in read and any(_is_like(value, fresh[i]) for value in constants):
                raise BakedInputError(
                    f"the {self.graph.phase} graph's argument {node.name} of shape {tuple(fresh[i].shape)} is not "
                    "among what XLA reads when the graph runs, and a constant of that shape is: later steps would use "
                    "its first value"
                )
        return found


def _is_like(constant: Tensor, fresh: Tensor) -> bool:
    """Say whether a constant may be this input: fresh ones are zeros. (XLA does not read some inputs: the weight of the
    mean in ``nll_loss_backward``.)"""
    alike = constant.shape == fresh.shape and constant.dtype == fresh.dtype
    return alike and not bool(constant.cpu().any())


# --- what XLA made of it

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")

# An instruction is "%name = shape opcode(operands), attributes". An asynchronous one has a start and a done; the done
# is no collective of its own.
_OPCODE = re.compile(rf"=\s+(?:\([^=]*\)|\S+)\s+(?P<kind>{'|'.join(KINDS)})(?:-start)?\(")


@dataclass(frozen=True)
class OptimizedHlo:
    """Holds XLA's ``text`` of the program of each device, and counts the ``scheduled`` graph's messages by kind."""

    text: str
    scheduled: Mapping[str, int] = field(default_factory=dict)

    @functools.cached_property
    def collectives(self) -> dict[str, int]:
        """Count collective instructions by kind (``"all-gather"``), in the order of ``KINDS``, without absent kinds."""
        found = Counter(match["kind"] for match in _OPCODE.finditer(self.text))
        return {kind: found[kind] for kind in KINDS if found[kind]}

    def table(self) -> str:
        """Show what XLA runs beside what the schedule has."""
        found, scheduled = self.collectives, self.scheduled
        kinds = [kind for kind in KINDS if kind in found or kind in scheduled]
        width = max(map(len, ["collective", *kinds]))
        lines = [f"{'collective':{width}}  {'scheduled':>9}  {'optimized':>9}"]
        lines += [f"{kind:{width}}  {scheduled.get(kind, 0):>9}  {found.get(kind, 0):>9}" for kind in kinds]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text


def scheduled_collectives(graph: Graph) -> dict[str, int]:
    """Count messages of a scheduled graph's collectives, by the kinds that XLA has for them."""
    found: Counter[str] = Counter()
    for node in graph.fx_graph.nodes:
        if node.target is dialect.all_gather_start:
            found["all-gather"] += len(layout_of(node).messages)
        elif node.target is dialect.reduce_scatter_start:
            found["reduce-scatter"] += len(argument(node, "messages")) or 1
        elif node.target in dialect.STARTS:
            found["all-reduce"] += 1
    return dict(found)


def optimized_hlo(function: Callable[..., Any], inputs: Sequence[Any]) -> OptimizedHlo:
    """Compile ``function`` of XLA tensors once more, without running it, and return XLA's optimized program. Only
    shapes, dtypes and shardings of ``inputs`` count. Raises RuntimeError as ``compat_xla.optimized_text`` does."""
    return OptimizedHlo(compat_xla.optimized_text(function, compat_xla.fresh_inputs(inputs)))


# --- replicas

_turn = threading.RLock()
_turns = threading.local()  # of this thread, that it has now
_PATIENCE_SECONDS = 300.0


@functools.cache
def _all_threads() -> threading.Barrier:
    return threading.Barrier(compat_xla.runtime().addressable_runtime_device_count())


def are_threads() -> bool:
    """Say whether there are several replicas in this process."""
    return _all_threads().parties > 1


@contextlib.contextmanager
def own_turn() -> Iterator[None]:
    """For a time, let no other replica of this process trace or compile; see [Note: threads]."""
    if not are_threads():
        yield
        return
    compat_xla.sync(wait=True)
    with _turn:
        _turns.depth = _has_turn() + 1
        try:
            yield
        finally:
            _turns.depth -= 1


def _has_turn() -> int:
    return getattr(_turns, "depth", 0)


class Compiled(BaseException):  # no error, and nobody's to handle but of who has the turn
    """A program was compiled, and is not to be run in this turn."""


def all_here() -> None:
    """Wait for this process's other threads, if any, before a collective. Raises RankDisagreement if one does not
    come."""
    if not are_threads():
        return
    try:
        _all_threads().wait(_PATIENCE_SECONDS)
    except threading.BrokenBarrierError:
        raise RankDisagreement(
            f"replica {compat_xla.ordinal()} waited {_PATIENCE_SECONDS:.0f} s for the other replicas of this process "
            "to run the same graph, and one did not: call the model on all of them, with inputs of the same shapes"
        ) from None


class ReplicaProgram(XlaProgram):
    """Runs a graph on one replica. All replicas run it at the same time."""

    def _placed(self, inputs: list[Any]) -> list[Any]:
        if are_threads():  # with Python's lock held, a replica would stop the others
            compat_xla.sync(wait=True)
        return super()._placed(inputs)

    def _compile(self, inputs: Sequence[Any], cause: str) -> Run:
        with own_turn():
            self._compiled = compiled = super()._compile(inputs, cause)
        if are_threads() and _has_turn():
            raise Compiled
        all_here()
        return compiled

    def _run(self, compiled: Run, inputs: list[Any]) -> list[Tensor]:
        if not _has_turn():  # backward
            all_here()
        return super()._run(compiled, inputs)

    def hlo(self) -> OptimizedHlo:
        with own_turn():
            return super().hlo()
