"""Part A: what the device computes, beside FSDP2 and beside the same without communication.

Ordered by what is wanted first, should the part's time not do for all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import PROCESS_GROUPS
from implementations import Builder, Setup, fsdp2, ours
from torch import Tensor, nn
from torch._inductor import config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from workloads import Workload, loss_of

import graph_fsdp
from device_checks import ACCELERATORS, REHEARSED, VIRTUAL, CannotRun, Figures, check, one_of, schedule_of
from device_checks.model import LlamaWorkload
from graph_fsdp.passes.ir.layout import GatherLayout
from graph_fsdp.runtime.comm.collectives import start_all_gather

RANKS, STEPS = 8, 3
BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# Relative differences that rounding explains, by the dtype of compute. Operator by operator the host has equal bits; on
# other devices attention's backward adds in an order of its own.
EAGER, INDUCTOR = {None: 1e-5, torch.bfloat16: 2e-2}, {None: 1e-4, torch.bfloat16: 2e-2}


def llama_of(device: torch.device, layers: int = 4) -> Workload:
    """A Llama of few layers; in a rehearsal a narrow one of one, which is two units with the root's."""
    if device.type in REHEARSED:
        return LlamaWorkload("llama", layers=1, width=32, heads=4, vocab=64, batch=1, length=16)
    return LlamaWorkload("llama", layers=layers, width=1024, heads=8, vocab=4096, batch=2, length=1024)


@check("A", 60)
def versions(device: torch.device) -> Figures:
    """What is installed, and what the device is."""
    found: Figures = {"torch": torch.__version__, "python": sys.version.split()[0], "device": device.type}
    if device.type != "cpu":
        found["name"] = torch.get_device_module(device).get_device_name(device)
    found |= {name: bool(importlib.util.find_spec(name)) for name in ("triton", "transformers", "pytest", "expecttest")}
    if device.type == "cuda":
        nccl: Any = torch.cuda.nccl
        found |= {"cuda": torch.version.cuda, "nccl": ".".join(map(str, nccl.version()))}
        found["memory"] = torch.cuda.mem_get_info(device)[1]
    return found


@check("A", 90)
def gathers_on_one_rank(device: torch.device) -> Figures:
    """The process group that users have gathers a bucket of 1 and of 8 messages: late starts, inputs overwritten.

    A mesh of one rank runs no collective, so the runtime's own start and wait are called here.
    """
    figures: Figures = {}
    with one_rank(device) as group:
        for messages in (1, 8):
            for source, target in (
                (torch.float32, torch.float32),
                (torch.float32, torch.bfloat16),
                (torch.float8_e4m3fn, torch.float8_e4m3fn),
            ):
                gathers_once(device, group, messages, source, target)
                figures[f"{messages} messages, {source} to {target}"] = "equal"
    return figures


@contextlib.contextmanager
def one_rank(device: torch.device) -> Iterator[dist.ProcessGroup]:
    if device.type == VIRTUAL:
        with one_of(device, 1) as group:
            yield group
        return
    store = dist.HashStore()
    dist.init_process_group(PROCESS_GROUPS[device.type], store=store, rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def gathers_once(
    device: torch.device, group: dist.ProcessGroup, messages: int, source: torch.dtype, target: torch.dtype
) -> None:
    chunk = 1 << (6 if device.type in REHEARSED else 14)
    length = chunk * messages
    bounds = [bound for message in range(messages) for bound in (message * chunk, chunk)]
    halves = [half for message in range(messages) for half in (message * chunk, message * chunk + chunk // 2)]
    layout = GatherLayout.make(halves, [chunk // 2] * len(halves), length, 1, bounds)
    values = torch.randn(length, device=device).to(source)
    expected = values.to(target) if source is not target else values.clone()
    shard = values.clone()
    delay(device)  # the gather is launched while the stream is busy with what comes before
    pending = start_all_gather([shard], layout, target, group)
    result = torch.empty_like(pending.buffer)
    pending.finish()
    delay(device)
    result.copy_(pending.buffer)
    shard.zero_()  # the next step's optimizer writes the shards
    found, wanted = result.view(torch.uint8), expected.view(torch.uint8)
    assert torch.equal(found, wanted), f"{messages} messages, {source} to {target}: the bytes gathered are others"


def delay(device: torch.device) -> None:
    """Keep the current stream busy for some milliseconds."""
    if device.type == "cuda":
        torch.cuda._sleep(20_000_000)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bfloat16, selective": {"mp_policy": BFLOAT16, "activation_checkpointing": "selective"},
    "dropout, unit": {"activation_checkpointing": "unit"},
    "activations on the CPU": {"activation_checkpointing": "offload"},
    "parameters on the CPU": {"offload_policy": CPUOffloadPolicy()},
    "ZeRO-2": {"reshard_after_forward": False},
    "accumulation": {},
}
ALONE: dict[str, dict[str, Any]] = {
    "unit": {"activation_checkpointing": "unit"},
    "selective": {"activation_checkpointing": "selective"},
    "bfloat16": {"mp_policy": BFLOAT16},
    "dropout": {},
}
REHEARSED_BY_OTHERS = "others stand for it in a rehearsal"


@check("A", 90, cases=list(VARIANTS))
def eager_beside_fsdp2(device: torch.device, case: str) -> Figures:
    """Losses and gradients of a Llama on a simulated group of 8, operator by operator: FSDP2's."""
    return beside_fsdp2(device, case, VARIANTS[case], "eager")


@check("A", 200, cases=["plain"])
def inductor_beside_fsdp2(device: torch.device, case: str) -> Figures:
    """The same with Inductor, within rounding."""
    return compiled_beside_fsdp2(device, case, VARIANTS[case])


@check("A", 200, cases=list(VARIANTS)[1:], needs=ACCELERATORS, reason=REHEARSED_BY_OTHERS)
def inductor_also_beside_fsdp2(device: torch.device, case: str) -> Figures:
    return compiled_beside_fsdp2(device, case, VARIANTS[case])


@check("A", 90, cases=list(ALONE), needs=ACCELERATORS, reason=REHEARSED_BY_OTHERS)
def eager_also_beside_fsdp2(device: torch.device, case: str) -> Figures:
    return beside_fsdp2(device, case, ALONE[case], "eager")


@check("A", 200, needs=["cuda"], reason="it multiplies in float8")
def float8_beside_fsdp2(device: torch.device) -> Figures:
    """torchao's linear layers, whose weights both gather in float8."""
    if not importlib.util.find_spec("torchao"):
        raise CannotRun("torchao is not installed")
    return compiled_beside_fsdp2(device, "float8", {"mp_policy": BFLOAT16})


@check("A", 90, cases=["mxfp8", "nvfp4"], needs=ACCELERATORS, reason="on the CPU tests do it")
def blocks_of_other_formats_beside_fsdp2(device: torch.device, case: str) -> Figures:
    """torchao's formats of blocks of elements, in which both gather weights."""
    if not importlib.util.find_spec("torchao"):
        raise CannotRun("torchao is not installed")
    return beside_fsdp2(device, case, {"mp_policy": BFLOAT16}, "eager")


@check("A", 200, needs=["cuda"], reason="CUDA graphs are captured")
def cuda_graphs_beside_fsdp2(device: torch.device) -> Figures:
    return compiled_beside_fsdp2(device, "CUDA graphs", {"cuda_graphs": True})


@check("A", 200)
def whole_graphs_beside_fsdp2(device: torch.device) -> Figures:
    return compiled_beside_fsdp2(device, "whole graphs", {"regions": "whole"})


def compiled_beside_fsdp2(device: torch.device, case: str, options: dict[str, Any]) -> Figures:
    if device.type == VIRTUAL:
        from virtual import inductor

        inductor.register()
    # Dropout draws what torch's operators draw.
    with config.patch(fallback_random="dropout" in case):
        return beside_fsdp2(device, case, options, "inductor")


def beside_fsdp2(device: torch.device, case: str, options: dict[str, Any], backend: str) -> Figures:
    """The largest relative difference of a loss, or of a gradient's norm. Raises where it is more than rounding."""
    policy = options.get("mp_policy", MixedPrecisionPolicy())
    reshard = options.get("reshard_after_forward")
    rest = {key: value for key, value in options.items() if key not in ("mp_policy", "reshard_after_forward")}
    run = Run(device, policy, reshard, case)
    # Parameters of the CPU become the virtual device's only by being replaced, which torch does for its own devices.
    where = torch.device("cpu") if "offload_policy" in rest and device.type != VIRTUAL else device
    theirs, found = fsdp2_of(run), run.trained(ours(**rest, **schedule_of(device), backend=backend), where)
    torch._dynamo.reset()
    worst = max(abs(a - b) / max(abs(a), 1.0) for a, b in zip(theirs, found, strict=True))
    exact = backend == "eager" and device.type in REHEARSED
    limit = 0.0 if exact else (EAGER if backend == "eager" else INDUCTOR)[policy.param_dtype]
    assert worst <= limit, f"{case}, {backend}: {worst:.2g} from FSDP2's losses and gradients, {limit:g} is rounding"
    return {"difference": worst, "limit": limit}


@dataclasses.dataclass(frozen=True)
class Run:
    """Some steps of a Llama, on a simulated group."""

    device: torch.device
    policy: MixedPrecisionPolicy
    reshard: bool | None
    case: str

    def trained(self, build: Builder, where: torch.device) -> list[float]:
        """Losses and norms of an implementation, whose model is made ``where``."""
        workload = llama_of(self.device)
        model = workload.make(torch.device("cpu")).to(where)  # values are the CPU's generator's
        if "dropout" in self.case:
            for block in workload.blocks(model):
                block.mlp = nn.Sequential(block.mlp, nn.Dropout(0.1))
        if self.case == "float8":
            from device_checks.triton_kernels import in_float8

            in_float8(workload.blocks(model))
        if self.case in ("mxfp8", "nvfp4"):
            from graph_fsdp.integrations.torchao import gather_in

            for block in workload.blocks(model):
                gather_in(block, self.case)
        with one_of(self.device, RANKS):
            mesh = init_device_mesh(self.device.type, (RANKS,))
            sharded = build(model, Setup(workload.blocks, mesh, self.policy, self.reshard))
            torch.manual_seed(1)
            return trained(sharded, workload, self.device, self.case == "accumulation")


@functools.cache
def fsdp2_of(run: Run) -> list[float]:
    return run.trained(fsdp2, run.device)


def trained(model: Any, workload: Workload, device: torch.device, accumulates: bool) -> list[float]:
    """Losses of some steps of SGD, and the norms of the first step's gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses: list[Tensor] = []
    norms: list[Tensor] = []
    for step in range(2 if device.type in REHEARSED else STEPS):
        for micro in range(2 if accumulates else 1):
            if accumulates:
                model.set_requires_gradient_sync(micro == 1)
            loss = loss_of(model(**workload.tokens(2 * step + micro, 0, device)))
            loss.backward()
            losses.append(loss.detach())
        if not norms:
            norms = [torch.linalg.vector_norm(local(p.grad)) for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return [value.item() for value in [*losses, *norms]]


def local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


class Draws(nn.Module):
    """Attention with dropout, and dropout, linear in ``x``: attention's weights depend on ``other`` alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        heads, other = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in (self.value(x), other))
        mixed = F.scaled_dot_product_attention(other, other, heads, dropout_p=0.3)
        return F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), 0.3)


class Drawing(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Draws(width) for _ in range(2))

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, other)
        return x


@check("A", 120, cases=["eager", "inductor"])
def recomputed_dropout_drops_the_same(device: torch.device, case: str) -> Figures:
    """Backward recomputes what forward drew: of a function f that is linear in x, the gradient g has g · x = f(x)."""
    if case == "inductor" and device.type == VIRTUAL:
        raise CannotRun("Inductor makes no random numbers for the virtual device")
    width = 32 if device.type in REHEARSED else 256
    worst = 0.0
    with one_of(device, RANKS):
        torch.manual_seed(0)
        model = Drawing(width).to(device)
        setup = Setup(lambda made: made.blocks, init_device_mesh(device.type, (RANKS,)))
        options = {"activation_checkpointing": "unit", "backend": case, **schedule_of(device)}
        model = ours(**options)(model, setup)
        for _ in range(STEPS):
            x, other = torch.randn(2, 2, 64, width, device=device).unbind()
            x.requires_grad_()
            total = model(x, other).sum()
            total.backward()
            assert x.grad is not None
            scale = x.grad.abs().mul(x.detach().abs()).sum()
            worst = max(worst, ((x.grad * x.detach()).sum() - total).abs().div(scale).item())
    assert worst < 1e-4, f"{case}: the gradient is {worst:.2g} of its size from what forward computed"
    return {"difference": worst}


@check(
    "A",
    200,
    cases=["unit", "selective", "plain"],
    needs=ACCELERATORS,
    reason="on the host a test counts them",
)
def equal_layers_share_compilations(device: torch.device, case: str) -> Figures:
    """As many compiled regions at 4 layers as at 8, with checkpointing too."""
    layers = (4, 8)
    counts = []
    for count in layers:
        workload = dataclasses.replace(llama_of(device), layers=count)
        with one_of(device, RANKS):
            setup = Setup(workload.blocks, init_device_mesh(device.type, (RANKS,)))
            model = ours(**(VARIANTS | ALONE)[case])(workload.make(device), setup)
            loss_of(model(**workload.tokens(0, 0, device))).backward()
            counts.append(graph_fsdp.inspect(model).compiled_regions)
        torch._dynamo.reset()
    assert counts[0] == counts[1], f"{case}: {counts} regions are compiled at {layers} layers"
    return {"layers": layers, "regions": counts}
