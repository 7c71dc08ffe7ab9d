"""Part A, too: what a device has of its own for optimizers, checkpoints, registered memory, profilers and aborts."""

from __future__ import annotations

import copy
import functools
import gc
import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from implementations import Setup, ours
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from workloads import SEED, Workload, loss_of

import graph_fsdp
from device_checks import ACCELERATORS, REHEARSED, CannotRun, Figures, check, one_of, schedule_of
from device_checks.correctness import BFLOAT16, RANKS, gathers_once, llama_of, one_rank
from device_checks.speed import take_workspaces
from graph_fsdp import checkpoint, compat

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "in backward": {"in_backward": True},
    "ahead": {"gather_ahead": 1},
    "state on the CPU": {"offload_state": True},
}
STEPS = 3


@check("A", 120, cases=list(OPTIMIZERS))
def distributed_optimizers(device: torch.device, case: str) -> Figures:
    """AdamW over slices of the shard storage: losses and parameters are those without ``distribute_optimizer``."""
    with one_of(device, RANKS):
        found = stepped(device, case)
        theirs = stepped_alone(device)
    # State on the CPU is stepped there, which rounds otherwise. AdamW makes as much of a gradient that is rounding as
    # of any other.
    limit = 1e-3 if case == "state on the CPU" and device.type not in REHEARSED else 0.0
    worst = max(
        ((a - b).abs().max() / b.abs().max().clamp_min(1e-6)).item() for a, b in zip(found, theirs, strict=True)
    )
    assert worst <= limit, f"{case}: {worst:.2g} from the optimizer alone"
    return {"difference": worst, "limit": limit}


@functools.cache
def stepped_alone(device: torch.device) -> list[Tensor]:
    """In one process with all cases, as in a rehearsal, once for them all."""
    return stepped(device, None)


def stepped(device: torch.device, case: str | None) -> list[Tensor]:
    """Losses and shards, on the CPU, of steps with the optimizer of a case, or with AdamW alone."""
    workload = llama_of(device)
    model = ours(backend="eager", **schedule_of(device))(
        workload.make(torch.device("cpu")).to(device),
        Setup(workload.blocks, init_device_mesh(device.type, (RANKS,))),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if case is not None:
        optimizer = graph_fsdp.distribute_optimizer(optimizer, **OPTIMIZERS[case])
    losses = [trained_once(model, optimizer, workload, device, step) for step in range(STEPS)]
    shards = [p.to_local() for p in model.parameters() if isinstance(p, DTensor)]
    return [value.detach().cpu().clone() for value in (*losses, *shards)]


def trained_once(model: Any, optimizer: Any, workload: Workload, device: torch.device, step: int) -> Tensor:
    loss = loss_of(model(**workload.tokens(step, 0, device)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@check("A", 90, needs=ACCELERATORS, reason="on the CPU tests do it")
def muon_of_one_rank(device: torch.device) -> Figures:
    """Muon for the matrices of blocks: losses are those without ``distribute_optimizer``."""
    workload, losses = llama_of(device), []
    with one_rank(device):
        setup = Setup(workload.blocks, init_device_mesh(device.type, (1,)))
        for distributed in (False, True):
            model = ours(backend="eager")(workload.make(torch.device("cpu")).to(device), setup)
            matrices = [p for block in workload.blocks(model) for p in block.parameters() if p.ndim == 2]
            optimizer = torch.optim.Muon(matrices, lr=1e-2)
            if distributed:
                graph_fsdp.distribute_optimizer(optimizer)
            losses.append([trained_once(model, optimizer, workload, device, step).item() for step in range(STEPS)])
    worst = max(abs(a - b) / abs(a) for a, b in zip(*losses, strict=True))
    assert worst <= 1e-3 and losses[1][-1] != losses[1][0], losses
    return {"difference": worst, "losses": losses[1]}


@check("A", 120, needs=ACCELERATORS, reason="on the CPU tests do it", cases=["at once", "asynchronous"])
def checkpoints_of_one_rank(device: torch.device, case: str) -> Figures:
    """What is saved goes on as if nothing had been."""
    workload = llama_of(device)
    with one_rank(device), tempfile.TemporaryDirectory() as folder:
        mesh = init_device_mesh(device.type, (1,))
        path = Path(folder) / "saved"
        losses = []
        for resumed in (False, True):
            model = ours(backend="eager")(workload.make(device), Setup(workload.blocks, mesh))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
            if resumed:
                checkpoint.load(path, model, optimizer)
            else:
                for step in range(2):
                    trained_once(model, optimizer, workload, device, step)
                saved = checkpoint.save(path, model, optimizer, asynchronous=case == "asynchronous")
            losses.append([trained_once(model, optimizer, workload, device, step).item() for step in (2, 3)])
            if not resumed:
                saved.result()
    assert losses[0] == losses[1], losses
    return {"losses": losses[0]}


@check("A", 120, needs=ACCELERATORS, reason="facts of the virtual device do it", cases=["AdamW", "distributed"])
def models_lent_to_another_process(device: torch.device, case: str) -> Figures:
    """A model that is moved to the CPU between steps takes no memory of the device, and trains on when it is back."""
    with one_of(device, RANKS):
        theirs, found = (lent(device, case == "distributed", away) for away in (False, True))
    assert found["losses"] == theirs["losses"], (found, theirs)
    return found


def lent(device: torch.device, distributed: bool, away: bool) -> Figures:
    workload, memory = llama_of(device), torch.accelerator.memory_allocated
    take_workspaces(device)
    before = memory(device)
    setup = Setup(workload.blocks, init_device_mesh(device.type, (RANKS,)))
    model = ours(backend="eager")(workload.make(device), setup)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    if distributed:
        graph_fsdp.distribute_optimizer(optimizer)
    losses = [trained_once(model, optimizer, workload, device, step).item() for step in range(2)]
    figures: Figures = {"held": memory(device) - before}
    if away:
        for place in ("cpu", device):
            model.to(place)
            for state in optimizer.state.values():
                state.update({k: v.to(place) for k, v in state.items() if isinstance(v, Tensor)})
            gc.collect()
            figures[f"held on {place}"] = memory(device) - before
        assert figures["held on cpu"] <= figures["held"] // 20, figures
    losses += [trained_once(model, optimizer, workload, device, step).item() for step in range(2, 4)]
    return {**figures, "losses": losses}


@check("A", 90)
def eager_lora_beside_fsdp2(device: torch.device) -> Figures:
    """100 steps of adapters in float32 beside frozen weights in bfloat16: losses stay finite, and begin as FSDP2's.

    Without cuDNN's attention, whose gradients are NaN for a mask and 64 tokens
    (https://github.com/pytorch/pytorch/issues/196678); what comes of both with it is a figure.
    """
    return lora_beside_fsdp2(device, "eager")


@check("A", 150, needs=ACCELERATORS, reason="operator by operator stands for it in a rehearsal")
def inductor_lora_beside_fsdp2(device: torch.device) -> Figures:
    return lora_beside_fsdp2(device, "inductor")


def lora_beside_fsdp2(device: torch.device, backend: str) -> Figures:
    if missing := [name for name in ("peft", "transformers") if not importlib.util.find_spec(name)]:
        raise CannotRun(f"{' and '.join(missing)} is not installed")
    steps = 4 if device.type in REHEARSED else 100
    with one_rank(device):
        mesh = init_device_mesh(device.type, (1,))
        options = {"backend": backend, "mp_policy": BFLOAT16, **schedule_of(device)}
        losses = {}
        for cudnn in (False, True) if device.type == "cuda" else (False,):
            torch.backends.cuda.enable_cudnn_sdp(cudnn)
            losses["FSDP2", cudnn] = adapters_trained(
                device, steps, lambda model: fully_shard(model, mesh=mesh, mp_policy=BFLOAT16)
            )
            losses["ours", cudnn] = adapters_trained(
                device, steps, lambda model: graph_fsdp.compile(model, mesh, **options)
            )
    finite = {f"{who}{' with cuDNN' * cudnn}": row.isfinite().tolist() for (who, cudnn), row in losses.items()}
    figures: Figures = {"first loss that is not finite": {k: v.index(False) for k, v in finite.items() if False in v}}
    found, theirs = losses["ours", False], losses["FSDP2", False]
    worst = ((found - theirs) / theirs)[:3].abs().max().item()
    assert all(finite["ours"]) and worst <= 2e-2, (figures, found.tolist(), theirs.tolist())
    return {**figures, "difference": worst, "last": [found[-1].item(), theirs[-1].item()]}


def adapters_trained(device: torch.device, steps: int, shard: Callable[[nn.Module], object]) -> Tensor:
    """The losses of a Llama with LoRA, after ``shard``."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256}
    sizes["num_hidden_layers"] = 1 if device.type in REHEARSED else 2
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.1)
    base = LlamaForCausalLM(config).to(torch.bfloat16)
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, lora).to(device)
    shard(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(steps):
        draws = torch.Generator().manual_seed(step)
        tokens = (torch.randint(64, (8, 1), generator=draws) + 3 * torch.arange(64)).remainder(256).to(device)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().float().cpu())
    return torch.stack(losses)


@check("A", 90, needs=ACCELERATORS, reason="on the CPU tests do it")
def recurrent_layers(device: torch.device) -> Figures:
    """The device's own layers have the gradients in a graph that they have alone, at every length."""
    worst = 0.0
    with one_rank(device):
        mesh = init_device_mesh(device.type, (1,))
        for kind in (nn.LSTM, nn.GRU):
            torch.manual_seed(SEED)
            plain = kind(64, 128, num_layers=2, bidirectional=True).to(device)
            model: Any = graph_fsdp.compile(copy.deepcopy(plain), mesh, backend="eager")
            for length in (32, 48, 40):
                x = torch.randn(length, 8, 64, device=device)
                for each in (plain, model):
                    each(x)[0].square().mean().backward()
            assert len(graph_fsdp.inspect(model).graphs) == 2, "another length compiles another graph"
            for expected, p in zip(plain.parameters(), model.parameters(), strict=True):
                difference = (p.grad.full_tensor() - expected.grad).abs().max() / expected.grad.abs().max()
                worst = max(worst, difference.item())
    assert worst <= 1e-3, f"gradients are {worst:.2g} off"  # TF32 may be on
    return {"difference": worst}


@check("A", 90, needs=["cuda"], reason="NCCL registers it", cases=["registered", "symmetric"])
def memory_of_the_process_group(device: torch.device, case: str) -> Figures:
    """Buckets are gathered into memory that NCCL has allocated, or whose addresses ranks have exchanged."""
    with one_rank(device) as group:
        if case == "registered":
            backend: Any = group._get_backend(device)
            if not backend.supports_tensor_alloc(device):
                raise CannotRun("NCCL registers no memory here")
            made = compat.allocate_from_group(group, 1 << 20, torch.bfloat16, device)
        else:
            if why := compat.why_no_symmetric_memory(group, device, "NCCL"):
                raise CannotRun(why)
            made = compat.symmetric_memory([group], "NCCL")(1 << 20, torch.bfloat16, device)
            assert compat.is_symmetric(made)
        assert made.shape == (1 << 20,) and made.device == device
        sent = torch.randn_like(made)
        dist.all_gather_into_tensor(made, sent, group=group)
        assert torch.equal(made, sent)
    return {}


@check("A", 90, needs=["cuda"], reason="NCCL's groups are")
def groups_are_aborted(device: torch.device) -> Figures:
    """Two process groups are aborted while collectives of both wait for the stream that computes."""
    with one_rank(device) as group:
        other = dist.new_group([0])
        for one in (group, other):
            gathers_once(device, one, 1, torch.float32, torch.float32)
        torch.cuda._sleep(200_000_000)
        value = torch.ones(1 << 20, device=device)
        works = [dist.all_reduce(value, group=one, async_op=True) for one in (group, other)]
        compat.abort_process_groups(device)
        torch.cuda.synchronize()
        try:
            dist.all_reduce(value, group=group)
        except RuntimeError as error:
            return {"says": str(error).splitlines()[0], "collectives": len(works)}
    raise AssertionError("a group that was aborted still reduces")


@check("A", 90, needs=["cuda"], reason="NVTX is NVIDIA's")
def ranges_in_profilers(device: torch.device) -> Figures:
    """``torch.profiler`` shows gathers and reductions by unit, with kernels in them; NVTX takes the same ranges."""
    workload = llama_of(device)
    with one_of(device, RANKS):
        setup = Setup(workload.blocks, init_device_mesh(device.type, (RANKS,)))
        model = ours(backend="eager")(workload.make(device), setup)
        loss_of(model(**workload.tokens(0, 0, device))).backward()
        with torch.profiler.profile() as profiled:
            loss_of(model(**workload.tokens(1, 0, device))).backward()
            torch.cuda.synchronize()
        with torch.autograd.profiler.emit_nvtx():
            loss_of(model(**workload.tokens(2, 0, device))).backward()
    names = {event.key for event in profiled.key_averages() if event.key.startswith("FSDP::")}
    wanted = {"FSDP::gather model.layers.1 (forward)", "FSDP::reduce model.layers.1 (backward)"}
    assert wanted <= names, sorted(names)
    return {"ranges": len(names)}
