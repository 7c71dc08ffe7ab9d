"""Dynamo traces one of a model's equal layers, and its nodes are copied for the others.

[Note: equal layers in Dynamo]
While Dynamo traces the call of a layer, it is noted which nodes and inputs the call adds to the graph, and which
guards are on what belongs to the layer. A later call, of another layer of the same class, gets copies of these if a
trace of it would give the same:

- It is called at the same line, under the same context managers, with arguments that are alike, and equal where they
  are no tensors.
- Each guard on something of the first layer holds for the same thing of the other one (``layer_guards.py``). Dynamo
  guards on all that it reads.
- The call changes no object that was there before it, and reads no attribute that the frame has changed: Dynamo has no
  guard on these. Between the calls no such object was changed. Nor has the call added to what Dynamo keeps anything but
  nodes, guards and inputs.

Otherwise Dynamo traces the call, as without this. A copy has the guards of a trace, on the other layer, so that the
graph is stale when any of the layers is changed. torch's ``nested_compile_region`` reuses graphs under about the same
conditions, but installs no guards for the calls that it has not traced.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from torch import nn
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.source import LocalSource
from torch._dynamo.variables.base import MutationType
from torch._dynamo.variables.higher_order_ops import CheckpointHigherOrderVariable
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable
from torch._guards import Source

from graph_fsdp.compat.layers.layer_calls import NEW, Given, Recording, surroundings
from graph_fsdp.compat.layers.layer_copies import LayerTrace
from graph_fsdp.compat.layers.layer_guards import Counterparts, Differs

log = logging.getLogger(__name__)

# torch 2.9 has no values of sources.
EQUAL_LAYERS = hasattr(Source, "get_value")

_TRACES = 4  # kept of one call: beyond, layers that differ from all of them are traced as ever


class EqualLayers:
    """Holds the traces of a frame while Dynamo traces it. ``classes``: those of layers of which one is traced."""

    def __init__(self, classes: frozenset[type[nn.Module]]) -> None:
        self.classes = classes if EQUAL_LAYERS else frozenset()
        self.copied = 0  # layers, in all frames
        self._output: Any = None
        self._traces: dict[Any, list[LayerTrace | None]] = {}  # None: of a call that cannot be copied
        self._lists_changed = False  # or dicts, that were there before the frame
        self._recording: Recording | None = None

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Trace one of equal layers in each frame that Dynamo traces in this context, in this thread."""
        if not self.classes:
            yield
            return
        _install()
        before = _present()
        _thread.layers = self
        try:
            yield
        finally:
            _thread.layers = before
            self._output, self._traces = None, {}

    def _enter(self, output: Any) -> None:
        if output is not self._output:
            self._output, self._traces, self._lists_changed = output, {}, False

    def note_change(self, effects: Any, item: Any) -> None:
        """Note that an object is changed."""
        self._enter(effects.output_graph_weakref())
        self.note_read(item)
        if not isinstance(item.mutation_type, NEW):
            self._traces.clear()

    def note_contents(self, item: Any) -> None:
        """Note that it is a list or dict, or the like."""
        keywords = inspect.getargs(self._output.root_tx.f_code).varkw  # a dict of the frame's own
        own = isinstance(item.source, LocalSource) and item.source.local_name == keywords
        self._lists_changed |= not (own or isinstance(item.mutation_type, NEW))

    def note_read(self, item: Any) -> None:
        """Note that an attribute is read that the frame has changed."""
        if self._recording is not None:
            self._recording.note(item)

    def note_created(self, mutation_type: Any) -> None:
        """Note that an object is made."""
        if self._recording is not None:
            self._recording.created[id(mutation_type)] = mutation_type

    def call(
        self,
        call: Callable[[], Any],
        module: Any,
        tx: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        *,
        checkpointed: bool = False,
    ) -> Any:
        output = tx.output
        self._enter(output)
        if (
            type(module.value) not in self.classes
            or module.source is None
            or self._lists_changed
            or self._recording is not None
            or output.current_tracer.parent is not None
            or output.export
        ):
            return call()
        try:
            given = Given(args, kwargs)
            key = checkpointed, type(module.value), given.key, surroundings(tx)
            hash(key)
        except (Differs, TypeError) as reason:
            log.debug("%s is not compared with other layers: %s", module.source.name, reason)
            return call()
        traces = self._traces.get(key, [])
        for trace in filter(None, traces):
            try:
                counterparts = Counterparts(output, trace.guards.source, module.source)
                trace.guards.check(module.value, counterparts)
            except Differs as reason:
                log.debug("%s is not copied: %s", module.source.name, reason)
                continue
            self.copied += 1
            return trace.copy(tx, module, given, counterparts)
        if len(traces) == _TRACES:
            return call()
        result, made = self._recorded(call, module, tx, given)
        self._traces.setdefault(key, []).append(made)
        return result

    def _recorded(self, call: Callable[[], Any], module: Any, tx: Any, given: Given) -> tuple[Any, LayerTrace | None]:
        recording = self._recording = Recording(module, tx, given)
        try:
            with recording.names():
                result = call()
        finally:
            self._recording = None
        try:
            return result, recording.trace(result)
        except Differs as reason:
            log.debug("%s is not copied for other layers: %s", module.source.name, reason)
            return result, None


_thread = threading.local()


def _present() -> EqualLayers | None:
    return getattr(_thread, "layers", None)


@functools.cache
def _install() -> None:
    """Have Dynamo ask the ``EqualLayers`` that are active in a thread. Once, as threads compile at the same time."""
    layer, checkpointed = cast("tuple[Any, ...]", (UnspecializedNNModuleVariable, CheckpointHigherOrderVariable))
    effects, kind = cast("tuple[Any, ...]", (SideEffects, MutationType))
    call, call_checkpointed, init = layer.call_function, checkpointed._call_function, kind.__init__
    store, load, mutate = effects.store_attr, effects.load_attr, effects.mutation

    def call_function(module: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if (layers := _present()) is None:
            return call(module, tx, args, kwargs)
        return layers.call(functools.partial(call, module, tx, args, kwargs), module, tx, args, kwargs)

    def call_function_checkpointed(checkpoint: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        called = functools.partial(call_checkpointed, checkpoint, tx, args, kwargs)
        if (layers := _present()) is None:
            return called()
        module = args[0].realize() if isinstance(args[0], LazyVariableTracker) else args[0]
        if type(module) is not UnspecializedNNModuleVariable:
            return called()
        return layers.call(called, module, tx, args[1:], kwargs, checkpointed=True)

    def store_attr(effects: Any, item: Any, *args: Any, **kwargs: Any) -> Any:
        if (layers := _present()) is not None:
            layers.note_change(effects, item)
        return store(effects, item, *args, **kwargs)

    def load_attr(effects: Any, item: Any, *args: Any, **kwargs: Any) -> Any:
        if (layers := _present()) is not None:
            layers.note_read(item)
        return load(effects, item, *args, **kwargs)

    def mutation(effects: Any, item: Any) -> Any:
        if (layers := _present()) is not None:
            layers.note_change(effects, item)
            layers.note_contents(item)
        return mutate(effects, item)

    def created(mutation_type: Any, *args: Any, **kwargs: Any) -> None:
        init(mutation_type, *args, **kwargs)
        if (layers := _present()) is not None:
            layers.note_created(mutation_type)

    layer.call_function, checkpointed._call_function, kind.__init__ = call_function, call_function_checkpointed, created
    effects.store_attr, effects.load_attr, effects.mutation = store_attr, load_attr, mutation
