"""``offload_policy=CPUOffloadPolicy()`` for a device that is not here: graphs of fake CUDA tensors that are not run."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from graph_fsdp.parameters.host_memory import pieces_of, pinned_nbytes
from graph_fsdp.passes import (
    CostModel,
    Graph,
    GroupShape,
    NodeRecord,
    PassContext,
    Phase,
    Role,
    VerificationError,
    default_pipeline,
    find_hardware,
    memory_profile,
    simulate,
)
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.dialect import set_record
from graph_fsdp.passes.ir.operands import argument
from graph_fsdp.passes.ir.spec import HOST, MeshSpec, Offload, ParameterSpec, make_model_spec
from graph_fsdp.passes.verify.verify import Verifier

aten = torch.ops.aten


# Graphs for a device that is not here

CUDA = torch.device("cuda", 0)


def cuda_graph(phase: Phase) -> tuple[Graph, PassContext]:
    """Two units on 8 ranks after all passes: their weights are used one after the other, or their gradients reduced."""
    f32, mode, module = torch.float32, FakeTensorMode(), fx.GraphModule(nn.Module(), fx.Graph())
    mesh = MeshSpec("", "group", 8)
    parameters = [ParameterSpec(f"{unit}.w", unit, (16, 4), f32, f32, f32, True, mesh) for unit in "ab"]
    offload = Offload(CUDA, pin_memory=True)
    context = PassContext(replace(make_model_spec(parameters, mesh), offload=offload))
    graph = Graph(module, phase)

    def placeholder(name: str, shape: tuple[int, ...], device: torch.device) -> fx.Node:
        node = module.graph.placeholder(name)
        with mode:
            node.meta["val"] = torch.empty(shape, device=device)
        return node

    if phase == "inference":
        shards = [placeholder(p.unit, p.shard_shape, HOST) for p in parameters]
        value = placeholder("x", (4, 4), CUDA)
        for shard, p in zip(shards, parameters, strict=True):
            full = graph.call(dialect.gather_param, (shard, [16, 4], f32, f32, p.name, "group", "", CUDA))
            value = graph.call(aten.mm.default, (value, graph.call(aten.slice.Tensor, (full, 0, 0, 4))))
        outputs = [value]
    else:
        grads = [placeholder(f"grad_{p.unit}", (16, 4), CUDA) for p in parameters]
        outputs = []
        for grad, p in zip(grads, parameters, strict=True):
            doubled = graph.call(aten.mul.Tensor, (grad, 2.0))
            arguments = (doubled, [2, 4], f32, f32, p.name, "group", "", HOST)
            outputs.append(graph.call(dialect.reduce_grad, arguments))
            record = NodeRecord(Role.REDUCE, p.unit, context.bucket_of(p.name).name, (p.name,))
            set_record(outputs[-1], record)
    module.graph.output(tuple(outputs))
    default_pipeline(hardware="h100").run([graph], context)
    return graph, context


def test_a_cuda_graph_fetches_to_the_device_and_counts_its_memory_alone() -> None:
    graph, context = cuda_graph("inference")
    assert_expected_inline(
        placed(graph),
        """\
a cpu
b cpu
fetch_a cuda:0
fetched_a cuda:0
gather_a cuda:0
fetch_b cuda:0
full_a cuda:0
fetched_b cuda:0
gather_b cuda:0
a_w_1 cuda:0
full_b cuda:0
b_w_1 cuda:0""",
    )
    profile = memory_profile(graph, context)
    assert max(profile.timeline["fetched"]) == 2 * 64, "two shards of 32 bytes, each with its padding"
    assert not any(profile.timeline["shards"]), "they are on the CPU"


def test_a_cuda_graph_returns_gradients_on_the_cpu() -> None:
    graph, context = cuda_graph("backward")
    assert_expected_inline(
        placed(graph),
        """\
reduce_a cuda:0
reduce_b cuda:0
reduced_a cuda:0
offload_a cpu
reduced_b cuda:0
offload_b cpu
offloaded_a cpu
a_w_grad_1 cpu
offloaded_b cpu
b_w_grad_1 cpu""",
    )
    offloads = graph.with_role(Role.OFFLOAD_START)
    assert [argument(start, "pin_memory") for start in offloads] == [True, True]
    on_device = memory_profile(graph, context).timeline["gradients"]
    assert on_device[-1] == 0, "what the graph returns is on the CPU"


def placed(graph: Graph) -> str:
    """Where the values of the dialect's nodes lie."""
    found = [node for node in graph.nodes if "fsdp" in node.meta and isinstance(node.meta.get("val"), Tensor)]
    return "\n".join(f"{node.name} {node.meta['val'].device}" for node in found)


def test_copies_have_lanes_of_their_own_on_the_modelled_clock() -> None:
    graph, _ = cuda_graph("inference")
    cost = CostModel(find_hardware("h100"), {"group": GroupShape(8)})
    lanes = [event.group for event in simulate(graph, cost).events]
    assert lanes == ["fetch", "group", "fetch", "group"]


# What the verifier refuses


@pytest.mark.parametrize(
    ("spoiled", "words"), [("unwaited", "before it is waited for"), ("moved", r"has offsets=\[.*, its bucket \[")]
)
def test_the_verifier_knows_copies(spoiled: str, words: str) -> None:
    graph, context = cuda_graph("inference")
    verifier = Verifier(graph, context)
    verifier.check("nothing")
    _gather_unwaited(graph) if spoiled == "unwaited" else _move_shard(graph)
    with pytest.raises(VerificationError, match=words):
        verifier.check("spoil")


def _gather_unwaited(graph: Graph) -> None:
    wait = graph.with_role(Role.FETCH_WAIT)[0]
    gather = next(iter(wait.users))
    gather.replace_input_with(wait, wait.args[0])  # type: ignore[arg-type]
    gather.append(wait)


def _move_shard(graph: Graph) -> None:
    start = graph.with_role(Role.FETCH_START)[0]
    start.args = (start.args[0], [4], *start.args[2:])


# Pinned memory


def taken(sizes: list[int]) -> int:
    """Bytes of pinned memory in the pieces of ``sizes``."""
    left = iter(sizes)
    pieces = [sum(itertools.islice(left, count)) for count in pieces_of(sizes)]
    assert sum(pieces) == sum(sizes)
    return sum(map(pinned_nbytes, pieces))


@pytest.mark.parametrize("ranks", [1, 8, 64, 512])
@pytest.mark.parametrize(
    ("width", "inner", "keys", "layers", "vocabulary"),
    [(2048, 8192, 512, 16, 128_256), (4096, 14_336, 1024, 32, 128_256), (8192, 28_672, 1024, 80, 128_256)],
    ids=["Llama-3.2-1B", "Llama-3-8B", "Llama-3-70B"],
)
def test_pieces_of_pinned_memory_waste_little(
    ranks: int, width: int, inner: int, keys: int, layers: int, vocabulary: int
) -> None:
    layer = [width * width, width * keys, width * keys, width * width, *[width * inner] * 3, width, width]
    sizes = [4 * numel // ranks for numel in [vocabulary * width, *layer * layers, width, vocabulary * width]]
    assert taken(sizes) <= 1.02 * sum(sizes) and len(pieces_of(sizes)) <= 8
    assert sum(pieces_of(sizes)) == len(sizes)


def test_no_other_pieces_take_less() -> None:
    generator = random.Random(0)
    for _ in range(50):
        sizes = [generator.choice([0, *range(1, 4000)]) for _ in range(7)]
        every = []
        for cuts in itertools.product([False, True], repeat=len(sizes) - 1):
            pieces = [sizes[0]]
            for cut, size in zip(cuts, sizes[1:], strict=True):
                pieces = [*pieces, size] if cut else [*pieces[:-1], pieces[-1] + size]
            every.append(sum(map(pinned_nbytes, pieces)))
        assert taken(sizes) <= min(every) + 7 * sum(sizes) / 512, "which is what pieces cost beside their memory"
    assert pieces_of([]) == [] and pinned_nbytes(0) == 0
