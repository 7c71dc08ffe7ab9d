"""The verifier runs after every pass and proves, on the graph, what a schedule must never break.

Each check costs one walk of the graph; fake tensors are propagated only through nodes that a pass made or changed.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import fx

from graph_fsdp.compat import inputs_of
from graph_fsdp.passes.context import PassContext, VerificationError
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.dialect import Role, has_role, record
from graph_fsdp.passes.ir.effects import aliased_inputs
from graph_fsdp.passes.ir.fake_values import VALUES, kind
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.ir.layout import cut_of
from graph_fsdp.passes.ir.operands import argument, arguments, first_operand, operand
from graph_fsdp.passes.ir.spec import BucketSpec
from graph_fsdp.passes.ir.stage import Snapshot
from graph_fsdp.passes.transforms.reshard import scale_of
from graph_fsdp.passes.transforms.slots import Lifetime, lifetimes
from graph_fsdp.passes.verify.constants import broken_constant
from graph_fsdp.passes.verify.gradients import GradientChecks
from graph_fsdp.passes.verify.places import Writes, exchanged
from graph_fsdp.passes.verify.proven import Proven

_GATHER_INVARIANT = "a gathered bucket has its own layout"
_KEPT_INVARIANT = "a kept shard has its bucket's layout"
_CUSTOM_INVARIANT = "collectives are those that the user has set"


class Verifier(GradientChecks):
    """Checks one graph after each pass, and remembers what it has proven of nodes that did not change since.
    ``reduced``: the parameters whose gradients it reduces; None for those that it reduces now. ``snapshot``: of the
    graph as it is, taken here where there is none."""

    def __init__(
        self,
        graph: Graph,
        context: PassContext,
        reduced: set[str] | None = None,
        *,
        snapshot: Snapshot | None = None,
    ) -> None:
        super().__init__(graph, context, reduced)
        self.entries = (snapshot or Snapshot(graph.fx_graph)).entries
        self.proven = Proven(self.entries, graph.placeholders)
        self.returned, self.outputs = graph.outputs, self.proven.kinds(graph.outputs)
        self.writes = Writes(graph)
        self.gradients = {  # the place of a gradient among the outputs → its parameter
            index: dialect.parameter_of(value)
            for index, value in enumerate(graph.outputs)
            if isinstance(value, fx.Node) and value.target is dialect.reduce_grad
        }

    def check(self, pass_name: str, snapshot: Snapshot | None = None) -> None:
        self.pass_name = pass_name
        self.entries = (snapshot or Snapshot(self.graph.fx_graph)).entries
        self.nodes = [entry[0] for entry in self.entries]
        self._topological()
        if self.graph.phase == "capture":
            return
        self._values()
        if wrong := self.writes.broken(self.graph, self.nodes):
            self._fail("inputs are written as they were", *wrong)
        self._reductions()
        self._reduced_over()
        self._where_gradients_lie()
        self._returned()
        if self.graph.phase in ("forward", "backward", "inference"):
            self._buffers()
            self._slots()
            self._updates()
            self._collectives()
            self._budget()

    def _topological(self) -> None:
        seen, body = set[fx.Node](), False
        self.recorded: dict[fx.Node, dialect.NodeRecord] = {}
        for node, op, _, _, _, _, meta in self.entries:
            if not seen.issuperset(inputs_of(node)):
                source = next(source for source in inputs_of(node) if source not in seen)
                is_wait = source.target in dialect.WAITS
                invariant = "a buffer is used after its wait" if is_wait else "the order is topological"
                self._fail(invariant, node, f"{node} uses {source} before it exists")
            if op != "placeholder":
                body = True
            elif body:
                self._fail("inputs come first", node, f"input {node} stands among the operators")
            if (found := meta.get(dialect.RECORD)) is not None:
                self.recorded[node] = found
            seen.add(node)
        for node, following in itertools.pairwise(self.nodes):
            if node.next is not following:
                self._fail(
                    "the list of nodes is whole", node, f"{node} was inserted before {node.next}, which is erased"
                )
        if wrong := self.proven.broken_inputs(self.entries):
            self._fail("the graph takes what it took", *wrong)
        if not self.nodes or self.nodes[-1].op != "output":
            self._fail("the graph returns what it returned", None, "it does not end with an output")

    def _values(self) -> None:
        """Shapes, dtypes and devices agree with the fake tensors of nodes that were edited, or whose inputs were."""
        self.edited = due = self.proven.edited(self.entries)
        for node in self.nodes if due else ():
            if node in due and (wrong := broken_constant(self.graph, node)):
                self._fail("constants are nodes, or tensors of the graph's module", node, wrong)
            if node in due and node.op == "call_function":
                meta = node.meta
                if "val" not in meta:
                    self._fail("every node has a fake value", node, f"{node} has no meta['val']")
                if all("val" in i.meta for i in inputs_of(node)):
                    self._value(node)

    def _value(self, node: fx.Node) -> None:
        invariant = "shapes, dtypes and devices agree with the fake tensors"
        try:
            computed = VALUES.kind_of(node)
        except Exception as error:
            raise VerificationError(
                self.pass_name, self.graph, invariant, node, f"{node} cannot be computed from its inputs: {error}"
            ) from error
        if computed != kind(node.meta["val"]):
            self._fail(invariant, node, f"{node} is annotated as {kind(node.meta['val'])} and computes {computed}")

    def _returned(self) -> None:
        """The user's outputs and saved tensors stay, kept buckets join them, each gradient is its parameter's."""
        kept = [kind(node.meta["val"]) for node in self.graph.kept.values()]
        count = self.context.forward_outputs
        expected = [*self.outputs[:count], *kept, *self.outputs[count:]] if kept else self.outputs
        expected = [*expected, *(kind(node.meta["val"]) for node in self.graph.given.values())]
        found = self.proven.kinds(self.graph.outputs)
        invariant, output = "the graph returns what it returned", self.graph.output
        if len(found) != len(expected):
            self._fail(invariant, output, f"output: there were {len(expected)} values and are {len(found)}")
        outputs = self.graph.outputs
        is_checked = self.graph.phase == "backward" and self.context.model.mesh.ranks > 1
        for index, name in self.gradients.items() if is_checked else ():
            value = outputs[index]
            roles = Role.REDUCE, Role.SHARD_GRAD, Role.ACCUMULATE, Role.UPDATE
            own = isinstance(value, fx.Node) and has_role(value, *roles)
            if not own or value.meta["fsdp"].params != (name,):
                self._fail(invariant, output, f"output {index} is {value} and not the gradient of {name}", (name,))
        offloaded = set(self.graph.offloaded.values())  # their copies are on another device
        for index, (before, after) in enumerate(zip(expected, found, strict=True)):
            if before != after and not (outputs[index] in offloaded and before[:2] == after[:2]):
                self._fail(invariant, output, f"output {index} was {before} and is {after}")
        stood = [*self.returned[:count], *[None] * len(kept), *self.returned[count:]]
        if (place := exchanged(stood, outputs)) is not None:
            self._fail(invariant, output, f"output {place} was {stood[place]} and is {outputs[place]}, another output")

    def _buffers(self) -> None:
        """Each buffer is started, waited for and freed once, behind its last use through any alias."""
        freed_due = "freed" in self.graph.facts
        starts = dict.fromkeys(self.graph.calls_of(dialect.TRANSFER_STARTS))
        # A collective that works in place starts on the buffer of another.
        own = (start for start in starts if not aliased_inputs(start))
        buffers = dict.fromkeys((*self._with_role(Role.KEPT), *own))
        uses = self.graph.uses_of(buffers)
        state = {b: "ready" if has_role(b, Role.KEPT) else "started" for b in buffers}
        latest = {buffer: buffer for buffer in buffers}  # the collective that was started last on it
        gathered: dict[str, fx.Node] = {}
        if bare := next((start for start in starts if record(start) is None), None):
            self._fail("collectives carry a record", bare, f"{bare} has no meta['fsdp']")
        for node in self.nodes:
            found = self.recorded.get(node)
            if found is None and node not in uses:
                continue
            if found is not None:
                self._layout(node)
                if node in buffers and found.role in (Role.GATHER_START, Role.KEPT):
                    other = gathered.setdefault(found.bucket, node)
                    if other is not node:
                        self._fail("each bucket is gathered once", node, f"{other} gathers the same bucket")
            for root in uses.get(node, ()):
                state[root] = self._advance(node, root, state[root])
                if node in starts and state[root] == "started":
                    latest[root] = node
        for buffer, final in state.items():
            if final == "started":
                late = latest[buffer]
                self._fail("each collective is waited for once", late, f"{late} is never waited for")
            is_gather = buffer.target is dialect.all_gather_start or has_role(buffer, Role.KEPT)
            if is_gather and freed_due and final == "ready" and not buffer.meta["fsdp"].escapes:
                self._fail("each gathered buffer is freed once", buffer, f"{buffer} is never freed")

    def _layout(self, node: fx.Node) -> None:
        """Chunks, parameters and gradients lie where the bucket's layout and messages say."""
        context = self.context
        if node.target is dialect.all_gather_start or has_role(node, Role.KEEP_SHARD):
            self._chunks(node, context.bucket_of(node.meta["fsdp"].params[0]))
        elif node.target is dialect.reduce_scatter_start and "bucketed" in self.graph.facts:
            invariant = "a bucket is reduced in the same messages on all ranks"
            names, custom = node.meta["fsdp"].params, context.settings.custom_reduce_scatter
            parameters = [context.model.parameters[name] for name in names]
            sent_as = parameters[0].sent_as
            messages = [] if sent_as else context.bucket_of(names[0]).reduced_in(parameters)
            self._arguments(node, {"sent_as": sent_as}, "gradients are sent in the type that their policy names")
            self._messages(node, custom, messages, invariant)
        elif has_role(node, Role.UNPACK):
            name = node.meta["fsdp"].params[0]
            bucket, parameter = context.bucket_of(name), context.model.spec_of(name)
            piece = node
            while (source := first_operand(piece)) is not None and not has_role(source, Role.GATHER_WAIT, Role.KEPT):
                piece = source
            begin = bucket.offsets[name] * bucket.world_size
            expected = (begin, begin + parameter.shard_numel * bucket.world_size)
            if cut_of(piece) != expected:
                wrong = f"{name} lies at {expected} of its bucket and is read at {piece.args[2:]}"
                self._fail(_GATHER_INVARIANT, node, wrong)

    def _chunks(self, node: fx.Node, bucket: BucketSpec) -> None:
        """Check what is gathered, or cut out of a gathered bucket to be gathered in backward."""
        model, names, scale = self.context.model, [p.name for p in bucket.parameters], 1
        source = argument(node, "shards")[0] if node.target is dialect.all_gather_start else operand(node)
        is_fetched, is_kept = has_role(source, Role.FETCH_WAIT), has_role(source, Role.KEPT_SHARD)
        if is_kept:
            scale = scale_of(self.context)
            name_at = {scale * offset: name for name, offset in bucket.offsets.items()}
            names = [name_at.get(offset, "") for offset in argument(node, "offsets")]
        elif node.target is dialect.all_gather_start:
            shards = argument(operand(source) if is_fetched else node, "shards")
            names = [shard.meta["fsdp"].params[0] for shard in shards]
            if foreign := [name for name in names if name not in bucket.offsets]:
                self._fail(_GATHER_INVARIANT, node, f"{node} is of bucket {bucket.name} and gathers {foreign}")
        numel_of = {p.name: p.shard_numel for p in bucket.parameters}
        offsets = [scale * bucket.offsets.get(name, -1) for name in names]
        due: dict[str, Any] = {"offsets": offsets, "length": scale * bucket.shard_numel}
        numels = {"numels": [scale * numel_of.get(name, -1) for name in names]}
        if is_fetched:
            self._arguments(operand(source), due, _GATHER_INVARIANT)
        if is_kept or node.target is dialect.keep_shard:
            self._arguments(node, {**due, **numels, "group": model.reshard_group}, _KEPT_INVARIANT)
            if source.meta["fsdp"].bucket != bucket.name:
                self._fail(_KEPT_INVARIANT, node, f"{node} is of bucket {bucket.name} and takes {source}")
        else:
            due["group"] = bucket.mesh.group
            self._arguments(node, {**due, **(numels if is_fetched else {})}, _GATHER_INVARIANT)
        if node.target is dialect.all_gather_start:
            invariant = "a bucket is gathered in the same messages on all ranks"
            self._messages(node, self.context.settings.custom_all_gather, bucket.message_arguments(scale), invariant)

    def _arguments(self, node: fx.Node, due: Mapping[str, Any], invariant: str) -> None:
        given = arguments(node)
        for name, value in due.items():
            found = getattr(given, name)
            if (list(found) if isinstance(value, list) else found) != value:
                self._fail(invariant, node, f"{node} has {name}={found}, its bucket {value}")

    def _messages(self, node: fx.Node, custom: bool, messages: list[int], invariant: str) -> None:
        self._arguments(node, {"custom": custom}, _CUSTOM_INVARIANT)
        self._arguments(node, {"messages": [] if custom else messages}, invariant)

    def _slots(self) -> None:
        """No two live buffers share a slot, each fits its slot, and none that outlives the graph lies in one."""
        if "slotted" not in self.graph.facts:
            return
        sizes = self.graph.slots
        latest: dict[int | None, Lifetime] = {}  # by slot; buffers come in the order of their starts
        for buffer in lifetimes(self.graph):
            start, slot = buffer.start, buffer.slot
            if slot is not None and not (0 <= slot < len(sizes) and buffer.nbytes <= sizes[slot]):
                there = f"has {sizes[slot]:,}" if 0 <= slot < len(sizes) else "does not exist"
                wrong = f"{buffer} takes {buffer.nbytes:,} bytes, slot {slot} {there}"
                self._fail("each buffer fits its slot", start, wrong)
            if slot is not None and slot in latest and (before := latest[slot]).end >= buffer.begin:
                wrong = f"{buffer} starts in slot {slot} while {before} is live in it"
                self._fail("live buffers do not share a slot", start, wrong)
            latest[slot] = buffer
        for start in self._with_role(Role.GATHER_START):
            if start.meta["fsdp"].escapes and start.meta["fsdp"].slot is not None:
                wrong = f"{start} lies in slot {start.meta['fsdp'].slot} and is not freed in this graph"
                self._fail("a buffer that outlives the graph has memory of its own", start, wrong)

    def _updates(self) -> None:
        """Gathers read the shards of before: one that is under way when they are written gathers neither."""
        written: set[str] = set()
        for node in self._with_role(Role.UPDATE, Role.GATHER_WAIT):
            names = set(node.meta["fsdp"].params)
            if has_role(node, Role.UPDATE):
                written |= names
            elif found := sorted(names & written):
                invariant = "a parameter is stepped when it has been gathered for the last time"
                self._fail(invariant, node, f"{found[0]} is gathered until {node}, and was stepped", tuple(found))

    def _advance(self, node: fx.Node, root: fx.Node, state: str) -> str:
        params = root.meta["fsdp"].params
        if node.target in dialect.TRANSFER_WAITS:
            if state != "started":
                invariant = "each collective is waited for once"
                self._fail(invariant, node, f"{root} is waited for when it is {state}", params)
            return "ready"
        if node.target is dialect.free:
            if state != "ready":
                self._fail("each gathered buffer is freed once", node, f"{root} is freed when it is {state}", params)
            return "freed"
        if state == "started":
            self._fail("a buffer is used after its wait", node, f"{node} uses {root} before it is waited for", params)
        if state == "freed":
            self._fail("a buffer is not used after its free", node, f"{node} uses {root} after it was freed", params)
        return "started" if node.target is dialect.all_reduce_shard_start else state

    def _budget(self) -> None:
        """Count bytes gathered and in flight, from each start to the free (before there are frees: the last use)."""
        budget = self.context.budget
        if budget is None or "scheduled" not in self.graph.facts:
            return
        gathers = self.graph.gathers
        starts = {gather.start or gather.buffer: gather.nbytes for gather in gathers}
        ends: Counter[fx.Node] = Counter()
        for gather in gathers:
            if not gather.escapes:
                ends[gather.free or [gather.buffer, *gather.reads][-1]] += gather.nbytes
        live = 0
        for node in self.nodes:
            live += starts.get(node, 0)
            if live > budget and node.target is dialect.all_gather_start:
                wrong = f"{live:,} bytes are gathered at once, the budget is {budget:,}"
                self._fail("bytes gathered and in flight stay under the budget", node, wrong)
            live -= ends[node]

    def _collectives(self) -> None:
        """Once scheduled, the sequence of collectives is fixed: it is what the ranks agree on."""
        if "scheduled" not in self.graph.facts:
            return
        sequence = self.graph.collectives
        planned = self.graph.order = sequence if self.graph.order is None else self.graph.order
        for index, (found, due) in enumerate(itertools.zip_longest(sequence, planned, fillvalue="nothing")):
            if found != due:
                start = next(itertools.islice(self.graph.starts, index, None), None)
                wrong = f"entry {index} is {found}, planned was {due}"
                self._fail("the sequence of collectives is the plan's", start, wrong)
