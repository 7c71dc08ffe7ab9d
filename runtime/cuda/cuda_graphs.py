"""CUDA graphs of a program's compute regions are captured once and replayed later, with collectives between them.

The first runs of a program are ordinary (compilers and libraries set themselves up). Then one run captures each region
call that ``capture.py`` has chosen, and later runs replay them.

[Note: memory of CUDA graphs]
A replay reads and writes the addresses of the capture. Whether that is right is decided before a run:

- An input lies where it lay (the model's own tensors; what the forward program saved), or is copied to where its first
  copy lay (the batch; gradients of outputs). Gathered buffers lie in kept slots. Otherwise the run is ordinary; if that
  goes on, the program is captured anew.
- Results lie in one pool per program, in which later regions reuse what is dropped during a run. So none of them may be
  alive when the next run replays: the user's are copied out, and what is saved for backward is *lent*: storages tell
  how many tensors use them. While something lent is alive (two forwards before a backward), a run is ordinary.

No collective is added, left out or moved, so ranks need not decide alike. Other addresses within a run are an error.
"""

from __future__ import annotations

import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from graph_fsdp import compat
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.ir.operands import operands
from graph_fsdp.runtime.cuda.capture import CudaCapture, ProgramChoice, RegionChoice
from graph_fsdp.runtime.regions.regions import Compiled, cut
from graph_fsdp.runtime.slots import GatheredBytes, SlotMemory, SlotPlan

if TYPE_CHECKING:
    from graph_fsdp.runtime.executor import Program

WARM_UP_RUNS = 2
CHANGED_RUNS = 3  # in a row, with inputs that lie elsewhere, until a program is captured anew
MOST_CAPTURES = 4  # of one program


class ModelGraphs:
    """Holds what the programs of one model share. ``state`` returns the tensors that the model owns."""

    def __init__(
        self, capture: CudaCapture, device: torch.device, counter: GatheredBytes, state: Callable[[], Iterable[Tensor]]
    ) -> None:
        self.capture, self.device, self.state = capture, device, state
        self.slots = SlotMemory(device, counter)
        self.closed = False
        self.programs: list[ProgramGraphs] = []

    def close(self) -> None:
        """Run programs without CUDA graphs from now on, as the model is gone. What was lent keeps its memory."""
        self.closed = True
        self.slots.pieces.clear()
        for program in self.programs:
            program.forget()


# Makes a tensor of a storage.
_Layout = Callable[[torch.UntypedStorage], Tensor]
# Makes what a replayed call returns, of its inputs.
_Result = Callable[[list[Any]], Any]


def _layout(value: Tensor) -> _Layout:
    """Return what makes a tensor like ``value`` of a storage."""
    dtype, place = value.dtype, (int(value.storage_offset()), value.shape, value.stride())
    return lambda storage: torch.empty(0, dtype=dtype, device=storage.device).set_(storage, *place)


class Captured:
    """Holds one capture of a program: its graphs and their memory, but for slots and what others own."""

    def __init__(self, capture: CudaCapture, device: torch.device) -> None:
        self.capture, self.device, self.pool = capture, device, capture.pool()
        self.function: Callable[..., Any] | None = None
        self.slots = SlotPlan()
        self.inputs: dict[int, Tensor] = {}  # by place, where what is copied lies
        self.addresses: dict[int, int] = {}  # by place, of what is not
        self.owned: dict[int, int] = {}  # address of a storage → bytes
        self.graphs: list[Any] = [self.pool]  # what keeps the memory of results
        # By address: what all runs lend of results that outlive them, and how often it is used between runs.
        self.shared: dict[int, tuple[torch.UntypedStorage, int]] = {}
        self.lent: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()  # other memory, which each run lends anew
        self.copied_nbytes = 0
        self.saved_names: frozenset[str] = frozenset()  # of what the program saves, that which lies in owned memory
        self.buffers: dict[str, Tensor] = {}  # by bucket, gathered for backward

    def own(self, value: Tensor) -> None:
        self.owned[address_of(value)] = value.untyped_storage().nbytes()

    def copy_of(self, value: Tensor) -> Tensor:
        """Return memory for copies of ``value`` and of its successors."""
        copy = _like(value)
        self.own(copy)
        self.copied_nbytes += copy.untyped_storage().nbytes()
        return copy

    def owns(self, value: Any) -> bool:
        return isinstance(value, Tensor) and address_of(value) in self.owned

    @property
    def is_lent(self) -> bool:
        return bool(self.lent) or any(compat.storage_uses(s) > between for s, between in self.shared.values())

    def share(self, value: Tensor) -> Tensor:
        """Return a tensor in the memory of ``value``, a result. Its ``detach()`` is lent for as long as somebody holds
        it, and keeps the memory."""
        address = address_of(value)
        storage, _ = self.shared.get(address) or (compat.storage_at(address, self.owned[address], self.device), 0)
        vars(storage)["kept"] = self.graphs
        shared = _layout(value)(storage)
        self.shared[address] = storage, compat.storage_uses(storage)
        return shared

    def lend(self, address: int) -> torch.UntypedStorage:
        """Return owned memory as a storage, for as long as somebody holds it."""
        return self.watch(compat.storage_at(address, self.owned[address], self.device))

    def watch(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        self.lent.add(storage)
        weakref.finalize(storage, lambda _: None, self).atexit = False  # keeps the memory of what was lent
        return storage

    def lend_buffer(self, bucket: str, nbytes: int) -> Tensor:
        if bucket not in self.buffers:
            with torch.inference_mode(False):
                self.buffers[bucket] = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            self.own(self.buffers[bucket])
        kept = self.buffers[bucket]
        return _layout(kept)(self.lend(address_of(kept)))

    def drop(self) -> None:
        """Drop the graphs now, and not when the garbage collector comes."""
        self.function, self.slots = None, SlotPlan()

    def fits(self, args: Sequence[Any]) -> bool:
        return all(args[place].data_ptr() == address for place, address in self.addresses.items())


class CapturedCall:
    """Captures a region's call in its first run, and replays it in all others."""

    def __init__(self, name: str, function: Compiled, choice: RegionChoice, captured: Captured) -> None:
        self.name, self.function, self.choice, self.captured = name, function, choice, captured
        self._replay: Callable[[], None] | None = None
        self._copies: dict[int, Tensor] = {}
        self._addresses: list[int] = []
        self._results: list[_Result] = []

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        for index in self.choice.copied:
            if index not in self._copies:
                self._copies[index] = self.captured.copy_of(inputs[index])
            inputs[index] = _copy(inputs[index], self._copies[index])
        if self._replay is None:
            return self._capture(inputs)
        for value, address in zip(inputs, self._addresses, strict=True):
            if value.data_ptr() != address:
                raise RuntimeError(
                    f"cuda_graphs=True: {self.name} was captured with an input at another address, and what it would "
                    "read there is not its input; leave cuda_graphs out, and report this"
                )
        self._replay()
        results = [result(inputs) for result in self._results]
        inputs.clear()
        return results

    def _capture(self, inputs: list[Any]) -> Sequence[Any]:
        captured = self.captured
        try:
            replay, outputs = captured.capture.capture(self.function, inputs, captured.pool)
        except Exception as error:
            raise RuntimeError(
                f"cuda_graphs=True: {self.name} cannot be captured ({error}); leave cuda_graphs out"
            ) from error
        sources = {address_of(value): index for index, value in enumerate(inputs)}
        self._addresses = [value.data_ptr() for value in inputs]
        own = {address_of(o): o for o in outputs if isinstance(o, Tensor) and address_of(o) not in {0, *sources}}
        saved = {address_of(o) for o, outlives in zip(outputs, self.choice.saved, strict=True) if outlives} & own.keys()
        with torch.inference_mode(False):
            for address, value in own.items():
                captured.own(value)
                if address in saved:
                    captured.watch(value.untyped_storage())
            self._results = [self._result(value, sources, saved) for value in outputs]
        self._replay = replay
        captured.graphs.append(replay)
        replay()
        inputs.clear()
        return outputs

    def _result(self, value: Any, sources: dict[int, int], saved: set[int]) -> _Result:
        """Make one result. ``sources`` maps addresses of inputs to places; ``saved`` has those of what outlives the
        run."""
        if not isinstance(value, Tensor) or not address_of(value):
            return lambda inputs: value
        address, layout = address_of(value), _layout(value)
        if address in sources:
            return lambda inputs: layout(inputs[sources[address]].untyped_storage())
        if address in saved:
            shared = self.captured.share(value)
            return lambda inputs: shared.detach()
        # The pool keeps the memory, and uses it again behind where the program drops ``outputs``.
        kept = layout(compat.storage_at(address, self.captured.owned[address], self.captured.device))
        return lambda inputs: kept


class ProgramGraphs:
    """Decides for each run of a program whether its CUDA graphs run; ``str`` says what was decided. The first
    ``user_outputs`` outputs are not saved for backward. ``forward`` is the forward program's, of a backward program."""

    def __init__(
        self, model: ModelGraphs, graph: Graph, user_outputs: int, forward: ProgramGraphs | None = None
    ) -> None:
        self.model, self.forward, self.phase = model, forward, graph.phase
        self.choice = ProgramChoice(graph, cut(graph), model.device.type, user_outputs)
        self.captured: Captured | None = None
        self.captures = 0
        self.runs: Counter[str] = Counter()  # by what they were
        self._changed = 0  # runs in a row
        self._user_outputs = user_outputs
        self._names = [node.name for node in graph.placeholders]
        self._saved_names = [str(output) for output in operands(graph.output)[user_outputs:]]
        model.programs.append(self)

    def forget(self) -> None:
        if self.captured is not None and not self.captured.is_lent:
            self.captured.drop()
        self.captured = None

    def note(self, index: int) -> str:
        """Return a note on the region at this index, for the program's source."""
        choice = self.choice.regions[index]
        return f"no CUDA graph: {choice.reason}" if choice.reason else "a CUDA graph"

    def run(self, program: Program, args: list[Any]) -> Any:
        if self.model.closed or not self.choice.captured:
            self.runs["with nothing to capture"] += 1
            return program.execute(program.ordinary, program.slots, args)
        with (program.memory or self.model.slots).lent_to(program.slots) as slots:
            ordinary = self._why_not(args) if slots is not program.slots else "within another run"
            self.runs[ordinary or ("replayed" if self.captured else "captured")] += 1
            if ordinary:
                return program.execute(program.ordinary, slots, args)
            captured = self.captured or self._prepared(program, slots, args)
            results = self._replay(captured, program, args)
            self.captured = captured
            return results

    def _why_not(self, args: list[Any]) -> str:
        """Say why this run is an ordinary one; "" if it is not."""
        if sum(self.runs.values()) < WARM_UP_RUNS:
            return "warming up"
        if self.captured is not None and self.captured.is_lent:
            return "with saved tensors of another run alive"
        if self.forward is not None and not self.forward.has_saved(zip(self._names, args, strict=True)):
            return "behind an ordinary forward"
        if self.captured is not None and self.captured.fits(args):
            self._changed = 0
            return ""
        if self.captured is not None:
            self._changed += 1
            if self._changed < CHANGED_RUNS or self.captures == MOST_CAPTURES:
                return "with inputs that lie elsewhere"
            self.captured.drop()
            self.captured, self._changed = None, 0
        return ""

    def has_saved(self, values: Iterable[tuple[str, Any]]) -> bool:
        """Say whether these inputs of backward, by name, are what a replay of this program saved."""
        if (captured := self.captured) is None:
            return False
        return all(captured.owns(value) for name, value in values if name in captured.saved_names)

    def _prepared(self, program: Program, slots: SlotPlan, args: list[Any]) -> Captured:
        captured = Captured(self.model.capture, self.model.device)
        self.captures += 1
        for memory in slots.memory:
            captured.own(memory)
        captured.slots = replace(slots, lend=captured.lend_buffer)
        forward = self.forward.captured if self.forward is not None else None
        fixed = {address_of(value) for value in self.model.state()}.union(forward.owned if forward else ())
        for place in self.choice.read:
            value = args[place]
            if place in self.choice.written or address_of(value) in fixed:
                captured.addresses[place] = value.data_ptr()
            else:
                captured.inputs[place] = captured.copy_of(value)
        calls: dict[str, CapturedCall] = {}
        for index in self.choice.captured:
            name, choice = f"region_{index}", self.choice.regions[index]
            where = f"{name} of the {self.phase} graph"
            calls[name] = CapturedCall(where, program.constants[name], choice, captured)
        function = program.ordinary
        captured.function = types.FunctionType(function.__code__, {**function.__globals__, **calls})
        return captured

    def _replay(self, captured: Captured, program: Program, args: list[Any]) -> Any:
        for place, kept in captured.inputs.items():
            lent = _layout(kept)(captured.lend(address_of(kept))) if place in self.choice.saved else kept
            args[place] = _copy(args[place], lent)
        assert captured.function is not None
        results = program.execute(captured.function, captured.slots, args)
        saved = results[self._user_outputs :]
        names = zip(self._saved_names, saved, strict=True)
        captured.saved_names = frozenset(name for name, value in names if captured.owns(value))
        users = results[: self._user_outputs]
        return [*(_copy(value, _like(value)) if captured.owns(value) else value for value in users), *saved]

    def __str__(self) -> str:
        reasons = self.choice.reasons
        chosen = len(self.choice.captured)
        lines = [f"CUDA graphs: {chosen} of {chosen + len(reasons)} regions that have kernels"]
        lines += [f"  region_{index} is not one: {reason}" for index, reason in reasons.items()]
        if self.runs:
            lines.append("  runs: " + ", ".join(f"{count} {what}" for what, count in self.runs.items()))
        if self.captured is not None:
            captured = self.captured
            parts = {
                "copies of inputs": captured.copied_nbytes,
                "buckets gathered for backward": sum(value.nbytes for value in captured.buffers.values()),
            }
            slots = sum(memory.nbytes for memory in captured.slots.memory)
            parts["results"] = sum(captured.owned.values()) - sum(parts.values()) - slots
            kept = ", ".join(f"{what} {nbytes:,}" for what, nbytes in parts.items() if nbytes)
            lines.append(f"  kept between runs, in bytes: {kept}; slots of all graphs {self.model.slots.nbytes:,}")
        return "\n".join(lines)


def address_of(value: Tensor) -> int:
    """Return the address of a tensor's storage; 0 if it has no bytes."""
    return int(value.untyped_storage().data_ptr())


def _like(value: Tensor) -> Tensor:
    """Allocate memory for a tensor of the same shape and strides."""
    sizes = [1 if stride == 0 else size for size, stride in zip(value.shape, value.stride(), strict=True)]
    with torch.inference_mode(False):
        memory = torch.empty_strided(sizes, value.stride(), dtype=value.dtype, device=value.device)
        return memory.as_strided(value.shape, value.stride())


def _copy(value: Tensor, to: Tensor) -> Tensor:
    """Copy ``value`` to ``to``, and return that."""
    source, target = value.detach(), to
    for dim, stride in enumerate(value.stride()):
        if stride == 0 and value.shape[dim] > 1:  # expanded
            source, target = source.narrow(dim, 0, 1), target.narrow(dim, 0, 1)
    target.copy_(source)
    return to
