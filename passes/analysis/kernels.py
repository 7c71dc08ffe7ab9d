"""This module says which kernels a graph becomes, and what each of its nodes computes, reads and writes.

- Free nodes are inputs, outputs, views, allocations, and the communication of the dialect.
- Fusible nodes are pointwise operators, lookups, constants and reductions. With fusion (Inductor) a *fusion group* is
  one kernel: a connected set of fusible nodes with equally many kernels before them. (Else a node could share a kernel
  with what is computed from its result by way of a matrix multiplication.) A group reads each value from outside once
  and writes what is used outside.
- Kernels of their own are whatever torch has a FLOP formula for (matrix multiplications, convolutions, attention), and
  operators that nothing fuses with (sorts, scatters, complex numbers, for which Inductor generates no code).

Without fusion (the eager backend) each node that is not free is a kernel.
"""

from __future__ import annotations

import enum
import functools
import math
from collections import ChainMap
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graph_fsdp import compat
from graph_fsdp.compat import inputs_of
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.effects import aliased_inputs, is_view, memory_effects, mutated_inputs
from graph_fsdp.passes.ir.fake_values import iterate_tensors
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.ir.operands import argument, first_operand, operand

aten = torch.ops.aten
prims = torch.ops.prims


def packets(namespace: Any, names: str) -> frozenset[Any]:
    """Return the operators of these names that this torch has."""
    return frozenset(getattr(namespace, name) for name in names.split() if hasattr(namespace, name))


_ALLOCATIONS = packets(aten, "empty empty_like empty_strided new_empty new_empty_strided") | packets(
    prims, "empty_strided"
)
# Reads of its first argument what its indices say.
_LOOKUPS = packets(aten, "embedding index index_select gather _unsafe_index")
_REDUCTIONS = packets(
    aten,
    "sum mean amax amin max min var var_mean std std_mean prod any all argmax argmin logsumexp linalg_vector_norm norm"
    " _softmax _log_softmax _softmax_backward_data _log_softmax_backward_data native_layer_norm"
    " native_layer_norm_backward native_group_norm native_group_norm_backward _fused_rms_norm _fused_rms_norm_backward"
    " nll_loss_forward nll_loss_backward cumsum",
)
# Pointwise in what they do, though torch does not tag them so.
_POINTWISE = packets(
    aten,
    "clone _to_copy copy copy_ cat stack constant_pad_nd fill fill_ zero_ native_dropout repeat flip roll slice_scatter"
    " select_scatter as_strided_scatter diagonal_scatter tril triu threshold_backward",
) | packets(prims, "convert_element_type device_put")
# Write into their first argument only where their indices say.
_SCATTERS = packets(
    aten,
    "index_put index_put_ _unsafe_index_put scatter scatter_ scatter_add scatter_add_ scatter_reduce index_add"
    " _unsafe_masked_index_put_accumulate",
)


# Attention on CPU computes what it does elsewhere; torch has had the formulas since 2.15.
_FLASH = "_scaled_dot_product_flash_attention"
CPU_ATTENTION_FORMULAS = {
    getattr(aten, f"{_FLASH}_for_cpu{direction}"): compat.flop_registry[getattr(aten, f"{_FLASH}{direction}")]
    for direction in ("", "_backward")
}


def _grouped_product(a: torch.Tensor, b: torch.Tensor, *_: Any, **__: Any) -> int:
    """Count the FLOPs of ``[rows, inner] @ [inner, columns]`` in groups of rows, of columns or of ``inner``: those of
    the one product, however long the groups are. Where both have a batch of matrices, those of all products."""
    batch = a.shape[0] if a.dim() == b.dim() == 3 else 1
    return 2 * batch * math.prod(a.shape[-2:]) * b.shape[-1]


GROUPED_PRODUCTS = dict.fromkeys(packets(aten, "_grouped_mm _scaled_grouped_mm"), _grouped_product)
FLOP_FORMULAS = ChainMap(compat.flop_registry, CPU_ATTENTION_FORMULAS, GROUPED_PRODUCTS)
_ATTENTION = frozenset(operator for operator in FLOP_FORMULAS if str(operator).startswith("aten._scaled_dot_product_"))
_IN_BACKWARD = frozenset(operator for operator in _ATTENTION if str(operator).endswith("_backward"))


class Kind(enum.Enum):
    FREE = "free"
    FUSIBLE = "fusible"
    KERNEL = "kernel"


@dataclass(slots=True)
class Work:
    """Says what a node adds to its kernel. FLOPs in ``dtype`` reach the part of the peak that the hardware's field
    ``efficiency`` says, and the part ``executed`` of them runs (half under a causal mask). ``read`` and ``written`` are
    bytes; ``launches`` is 1 on each kernel's first node."""

    kind: Kind
    flops: int = 0
    dtype: torch.dtype = torch.float32
    efficiency: str = "matmul_efficiency"
    executed: float = 1.0
    read: int = 0
    written: int = 0
    launches: int = 0


def packet(node: fx.Node) -> Any:
    """Return the operator of a call, whatever its overload."""
    return getattr(node.target, "overloadpacket", node.target)


def value_nbytes(value: Any) -> int:
    """Count the bytes of the tensors in a value, symbolic sizes by their hints."""
    if isinstance(value, torch.Tensor):
        return _numel(value) * value.dtype.itemsize
    return sum(_numel(tensor) * tensor.dtype.itemsize for tensor in iterate_tensors(value))


def _numel(tensor: torch.Tensor) -> int:
    numel = tensor.numel()
    return numel if type(numel) is int else math.prod(map(compat.size_hint, tensor.shape))


def kind_of(node: fx.Node) -> Kind:
    if node.op != "call_function":
        return Kind.FREE
    known = _kind_of_operator(node.target, len(compat.flop_registry))
    if known is Kind.FREE or not has_tensor(node) or is_view(node):
        return Kind.FREE
    if known is Kind.KERNEL:
        return Kind.KERNEL
    if _is_complex(node.meta.get("val")):
        return Kind.KERNEL
    for source in inputs_of(node):
        if _is_complex(source.meta.get("val")):
            return Kind.KERNEL
    constant = known is None and not any(map(has_tensor, inputs_of(node)))
    return Kind.FUSIBLE if known is Kind.FUSIBLE or constant else Kind.KERNEL


@functools.cache
def _kind_of_operator(target: Any, formulas: int) -> Kind | None:
    """Return the kind of all calls of an operator that compute on real tensors and are no views, None where it depends
    on more; anew when torch has another number of ``formulas``."""
    operator = getattr(target, "overloadpacket", target)
    if target in dialect.EXECUTED or target is dialect.MODEL_WAIT or operator in _ALLOCATIONS:
        return Kind.FREE
    if operator in FLOP_FORMULAS or operator in _SCATTERS or isinstance(target, compat.HigherOrderOperator):
        return Kind.KERNEL
    pointwise = torch.Tag.pointwise in getattr(target, "tags", ()) or operator in _POINTWISE
    return Kind.FUSIBLE if pointwise or operator in _REDUCTIONS or operator in _LOOKUPS else None


def has_tensor(node: fx.Node) -> bool:
    """Say whether a node's value is or holds a tensor."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) or next(iterate_tensors(value), None) is not None


def _is_complex(value: Any) -> bool:
    """Say whether a value is or holds a complex tensor."""
    if isinstance(value, torch.Tensor):
        return value.dtype.is_complex
    return any(tensor.dtype.is_complex for tensor in iterate_tensors(value))


def node_flops(node: fx.Node) -> int:
    """Count the floating point operations of a call by ``torch.utils.flop_counter``, 0 where it has no formula.

    Attention is counted without its mask, as torch does: twice what a causal kernel executes (``Work.executed``).
    """
    formula = FLOP_FORMULAS.get(packet(node)) if node.op == "call_function" else None
    if formula is None:
        return 0
    found = fx.map_arg((node.args, node.kwargs), lambda n: _with_hints(n.meta.get("val")))
    args: Sequence[Any] = found[0]
    if packet(node) in _ATTENTION:
        args = _with_equal_heads(args)
    return int(formula(*args, **found[1], out_val=_with_hints(node.meta.get("val"))))


def _flops_key(node: fx.Node) -> Hashable:
    """Return what calls of as many FLOPs have in common; None where a size is symbolic."""
    names = {source: f"%{number}" for number, source in enumerate(node.all_input_nodes)}
    shapes = tuple(tuple(tuple(t.shape) for t in iterate_tensors(n.meta.get("val"))) for n in (node, *names))
    if any(type(size) is not int for of_node in shapes for shape in of_node for size in shape):
        return None
    return node.target, repr(fx.map_arg((node.args, node.kwargs), names.__getitem__)), shapes


def _with_hints(value: Any) -> Any:
    """Return the value with numbers for symbolic sizes, so that a formula guards on nothing."""
    if isinstance(value, torch.SymInt):
        return compat.size_hint(value)
    if isinstance(value, (list, tuple)):
        return [_with_hints(item) for item in value]
    if not isinstance(value, torch.Tensor) or all(isinstance(size, int) for size in value.shape):
        return value
    return torch.empty([compat.size_hint(size) for size in value.shape], dtype=value.dtype, device="meta")


def _with_equal_heads(args: Sequence[Any]) -> list[Any]:
    """Give keys and values as many heads as queries: torch 2.9 has no formulas for grouped-query attention."""
    heads = max(value.shape[1] for value in args if isinstance(value, torch.Tensor) and value.dim() == 4)

    def expanded(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() != 4 or value.shape[1] == heads or heads % value.shape[1]:
            return value
        return torch.empty(value.shape[0], heads, *value.shape[2:], dtype=value.dtype, device="meta")

    return [expanded(value) for value in args]


def graph_work(graph: Graph, *, fused: bool) -> dict[fx.Node, Work]:
    """Return the work of every node. Linear in the graph."""
    nodes = graph.nodes
    work = {node: Work(kind_of(node)) for node in nodes}
    executed = set(graph.calls_of(dialect.EXECUTED))
    roots = _roots(work)
    kernels = _fusion_groups(work, roots, executed) if fused else {node: node for node in nodes}
    launched: set[fx.Node] = set()
    used_outside: set[fx.Node] = set()
    left: dict[tuple[fx.Node, fx.Node], int] = {}  # bytes of a value that a kernel has not read yet
    sizes = _Sizes()
    flops: dict[Hashable, int] = {}
    ordinary: dict[int, bool] = {}  # by the operator's identity: to hash one is a call of Python's
    for node, mine in work.items():
        if mine.kind is Kind.FREE:
            if node in executed or node.op == "output":
                used_outside.update(roots[source] for source in inputs_of(node))
            continue
        kernel = kernels[node]
        mine.launches = int(kernel not in launched)
        launched.add(kernel)
        if mine.kind is Kind.KERNEL:
            _describe_kernel(node, mine, flops)
        is_ordinary = ordinary.get(id(node.target))
        if is_ordinary is None:
            is_ordinary = ordinary[id(node.target)] = _is_ordinary(node.target)
        for source, most in _reads(node, sizes) if not is_ordinary else [(n, sizes[n]) for n in inputs_of(node)]:
            root = roots[source]
            if kernels[root] is kernel:
                continue
            used_outside.add(root)
            if work[root].kind is Kind.FREE and packet(root) in _ALLOCATIONS:
                continue
            rest = left.get((kernel, root), sizes[root])
            read = min(most, rest)
            mine.read += read
            left[kernel, root] = rest - read
        mine.written = sizes[node] if is_ordinary else _written(node, sizes, fused=fused)
    if fused:
        for node, mine in work.items():
            if mine.kind is Kind.FUSIBLE and node not in used_outside and not mutated_inputs(node):
                mine.written = 0
    return work


def arithmetic_of(graph: Graph) -> dict[fx.Node, Work]:
    """Return the work of the nodes whose FLOPs torch has formulas for, without bytes and launches."""
    targets = {node.target for node in graph.nodes if node.op == "call_function"}
    counted = [target for target in targets if getattr(target, "overloadpacket", target) in FLOP_FORMULAS]
    work = {node: Work(Kind.KERNEL) for node in graph.calls_of(counted) if kind_of(node) is Kind.KERNEL}
    flops: dict[Hashable, int] = {}
    for node, mine in work.items():
        _describe_kernel(node, mine, flops)
    return work


class _Sizes(dict[fx.Node, int]):
    """Holds the bytes of the values of nodes that were asked for."""

    def __missing__(self, node: fx.Node) -> int:
        size = self[node] = value_nbytes(node.meta.get("val"))
        return size


def _describe_kernel(node: fx.Node, mine: Work, flops: dict[Hashable, int]) -> None:
    """Say what a node computes that is a kernel of its own. ``flops``: of calls before, which equal ones have too."""
    inputs = iterate_tensors([source.meta.get("val") for source in inputs_of(node)])
    mine.dtype = next((value.dtype for value in inputs if value.dtype.is_floating_point), torch.float32)
    if (key := _flops_key(node)) is None or key not in flops:
        flops[key] = node_flops(node)
    mine.flops = flops[key]
    if packet(node) in _ATTENTION:
        backward = packet(node) in _IN_BACKWARD
        mine.efficiency = "attention_backward_efficiency" if backward else "attention_efficiency"
        mine.executed = 0.5 if argument(node, "is_causal") else 1.0


@functools.cache
def _is_ordinary(target: Any) -> bool:
    """Say whether an operator reads its inputs whole, and writes its value alone."""
    operator = getattr(target, "overloadpacket", target)
    return operator not in _LOOKUPS and operator not in _SCATTERS and not memory_effects(target)[1]


def _roots(work: dict[fx.Node, Work]) -> dict[fx.Node, fx.Node]:
    """Return for each node the one that computed its value, through views and the items of a tuple."""
    roots: dict[fx.Node, fx.Node] = {}
    for node, mine in work.items():
        roots[node] = roots[aliased_inputs(node)[0]] if mine.kind is Kind.FREE and is_view(node) else node
    return roots


def _fusion_groups(
    work: dict[fx.Node, Work], roots: dict[fx.Node, fx.Node], executed: set[fx.Node]
) -> dict[fx.Node, fx.Node]:
    """Return for each node the one that stands for its kernel. ``executed``: what the executor runs itself."""
    levels = _levels(work, roots, executed)
    first = {node: node for node in work}  # another of the same kernel, which leads to the one that stands for it

    def kernel(node: fx.Node) -> fx.Node:
        while (other := first[node]) is not node:
            first[node] = node = first[other]
        return node

    fusible = Kind.FUSIBLE
    for node, mine in work.items():
        if mine.kind is fusible:
            level = levels[node]
            for source in inputs_of(node):
                root = roots[source]
                if work[root].kind is fusible and levels[root] == level:
                    first[kernel(node)] = kernel(root)
    return {node: node if other is node else kernel(node) for node, other in first.items()}


def _levels(work: dict[fx.Node, Work], roots: dict[fx.Node, fx.Node], executed: set[fx.Node]) -> dict[fx.Node, int]:
    """Count for each node the kernels before it: of a kernel or a collective, on the longest path to it; of a fusible
    node, as many as its first use allows, since what backward recomputes is computed where it is used."""
    levels: dict[fx.Node, int] = {}
    behind: dict[fx.Node, int] = {}  # the level of what reads a node
    ends_fusion: set[fx.Node] = set()
    free, fusible, alone = Kind.FREE, Kind.FUSIBLE, Kind.KERNEL
    for node, mine in work.items():
        level = 0
        for source in inputs_of(node):
            level = max(level, behind[roots[source]])
        levels[node] = level
        if mine.kind is alone or (mine.kind is free and node in executed):
            ends_fusion.add(node)
            level += 1
        behind[node] = level
    latest: dict[fx.Node, int] = {}
    for node in reversed(work):
        if work[node].kind is fusible:
            levels[node] = level = latest.get(node, levels[node])
        elif node in ends_fusion:
            level = levels[node]
        else:
            continue
        for source in inputs_of(node):
            root = roots[source]
            if latest.get(root, level) >= level:
                latest[root] = level
    return levels


def _reads(node: fx.Node, sizes: _Sizes) -> Iterator[tuple[fx.Node, int]]:
    """Yield the inputs that a node reads, and how many bytes of each at most."""
    operator, first = packet(node), first_operand(node)
    for source in node.all_input_nodes:
        if source is first and operator in _LOOKUPS:
            yield source, min(sizes[source], sizes[node])
        elif source is first and operator in _SCATTERS:
            continue  # counted with what is written
        elif source is first and mutated_inputs(node) == [source] and packet(node) in _POINTWISE:
            continue  # overwritten
        else:
            yield source, sizes[source]


def _written(node: fx.Node, sizes: _Sizes, *, fused: bool) -> int:
    if packet(node) not in _SCATTERS:
        return sizes[node]
    # Each value is added to what is there: a read and a write of as many bytes. Inductor does so in place; in eager
    # the whole target is copied first.
    updates = max((sizes[source] for source in node.all_input_nodes if source is not operand(node)), default=0)
    copied = 0 if fused or mutated_inputs(node) else 2 * sizes[node]
    return 2 * updates + copied
