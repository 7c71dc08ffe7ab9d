"""Inductor's Triton kernels of a Llama's regions are built for an H100, which need not be there.

Regions are those of graphs that were traced for the CPU, with their tensors on ``cuda:0`` instead: nothing is computed,
so fake tensors do. Inductor asks what the device is (``Interface``), generates its kernels, and Triton compiles each of
them, in every configuration that Inductor would try, to a cubin. Attention and products are the libraries' kernels.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib.util
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.utils._pytree as pytree
from one_device import OneDevice
from torch import fx, nn
from torch._dynamo import device_interface
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor import config
from torch.utils import _triton
from virtual import library

from device_checks import REHEARSED, CannotRun, Figures, check
from device_checks.correctness import BFLOAT16, RANKS, llama_of
from graph_fsdp.planning.tracing import trace
from graph_fsdp.runtime.backends.inductor import InductorBackend
from graph_fsdp.runtime.regions.regions import Region, cut, region_key

CUDA = torch.device("cuda", 0)
NAME = "triton_kernel"
GUARD = library.SOURCE.with_name("cuda_guard.cpp")
CASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"mp_policy": BFLOAT16},
    "bfloat16, unit": {"mp_policy": BFLOAT16, "activation_checkpointing": "unit"},
    "float8": {"mp_policy": BFLOAT16},
}


@check("A", 300, needs=REHEARSED, reason="other checks build and run Triton's kernels there", cases=list(CASES))
def triton_kernels_of_regions(device: torch.device, case: str) -> Figures:
    """The regions of a Llama of 4 layers, forward and backward, as Triton's kernels for ``cuda:90``."""
    if not importlib.util.find_spec("triton"):
        raise CannotRun("triton is not installed")
    if torch.version.cuda is None and library.COMPILER is None:
        raise CannotRun("there is no C++ compiler, and this torch is built without CUDA")
    workload = dataclasses.replace(llama_of(torch.device("cuda"), layers=4))

    def model() -> nn.Module:
        made = workload.make(torch.device("meta"))
        return in_float8(made) if case == "float8" else made

    graphs = trace(
        model,
        workload.tokens(0, 0, torch.device("cpu")),
        world_size=RANKS,
        device="cpu",
        backend="inductor",
        **CASES[case],
    ).graphs
    regions = {}
    for phase, graph in graphs.items():
        for step in cut(graph):
            if isinstance(step, Region) and not step.is_view_only:
                regions.setdefault(region_key(step, phase), step)
    return built({key.digest: (region, key.kind) for key, region in regions.items()})


def in_float8(model: nn.Module) -> nn.Module:
    """Linear layers multiply in float8, and their weights are gathered so."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    return convert_to_float8_training(model, config=config)


def built(regions: Mapping[str, tuple[Region, str]]) -> Figures:
    """Counts of regions, of their kernels, and of what was built; raises what a compiler raises."""
    kernels: dict[str, str] = {}  # source → name
    with an_h100(), sources(kernels):
        for region, kind in regions.values():
            module = on_cuda(region.module)
            mode = detect_fake_mode([node.meta.get("val") for node in module.graph.nodes])
            with tracing(TracingContext(mode)):
                InductorBackend().compile_region(SimpleNamespace(module=module), kind)  # type: ignore[arg-type]
        binaries = [binary for source in kernels for binary in compiled(source)]
    heuristics = Counter(name.split("_")[1] for name in kernels.values())
    return {
        "regions": len(regions),
        "kernels": len(kernels),
        **{f"kernels, {kind}": count for kind, count in heuristics.items()},
        "binaries": len(binaries),
        "cubin bytes": sum(len(binary.asm["cubin"]) for binary in binaries),
    }


def on_cuda(module: fx.GraphModule) -> fx.GraphModule:
    """The same graph, of tensors on CUDA."""
    mode: Any = detect_fake_mode([node.meta.get("val") for node in module.graph.nodes])

    def moved(value: Any) -> Any:
        if isinstance(value, torch.device):
            return CUDA
        if isinstance(value, torch.Tensor):
            with mode:
                return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=CUDA)
        return value

    for node in module.graph.nodes:
        node.args, node.kwargs = pytree.tree_map(moved, (node.args, node.kwargs))
        if "val" in node.meta:
            node.meta["val"] = pytree.tree_map(moved, node.meta["val"])
    return module


@contextlib.contextmanager
def sources(found: dict[str, str]) -> Iterator[None]:
    """Kernels that Inductor generates meanwhile are kept, and not compiled."""
    from torch._inductor.async_compile import AsyncCompile

    def keep(self: Any, kernel_name: str, source_code: str, device_str: str = "cuda") -> Callable[..., None]:
        found.setdefault(source_code.replace(kernel_name, NAME), kernel_name)  # its number is the graph's
        return lambda *args, **kwargs: None

    with patch.object(AsyncCompile, "triton", keep), config.patch(fx_graph_cache=False):
        yield


def compiled(source: str) -> Sequence[Any]:
    """A kernel in each configuration, as Triton's compiler returns it."""
    from torch._inductor.codecache import PyCodeCache

    with patch.object(torch.cuda, "is_available", lambda: True):  # configurations are those of a GPU
        tuner = getattr(PyCodeCache.load(source), NAME)
        return [tuner._precompile_config(one).kernel for one in tuner.configs]


@contextlib.contextmanager
def an_h100() -> Iterator[None]:
    """Inductor is told, in this process and for a while, that there is one."""
    from torch._inductor.runtime import triton_helpers

    if torch.version.cuda is None:
        ctypes.CDLL(str(library.build(GUARD)))
    before = device_interface.get_interface_for_device("cuda")
    device_interface.register_interface_for_device("cuda", Interface)
    _triton.has_triton.cache_clear()
    answers = {
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: Interface.properties,
    }
    try:
        with (
            patch.multiple(torch.cuda, **answers),
            patch.object(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, create=True),
            patch.object(triton_helpers, "set_driver_to_gpu", lambda: None),
            patch.object(_triton, "triton_hash_with_backend", lambda: "no driver"),
            config.patch(use_static_cuda_launcher=False),
            tempfile.TemporaryDirectory() as folder,
            patch.dict(os.environ, TRITON_CACHE_DIR=folder),
        ):
            yield
    finally:
        device_interface.register_interface_for_device("cuda", before)
        _triton.has_triton.cache_clear()


class Interface(OneDevice):
    """An H100 (SXM), as CUDA describes it."""

    properties = SimpleNamespace(
        name="NVIDIA H100 80GB HBM3",
        major=9,
        minor=0,
        multi_processor_count=132,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        warp_size=32,
        total_memory=80 * 2**30,
        gcnArchName="",
    )

    class Worker(OneDevice.Worker):
        @staticmethod
        def get_device_properties(device: Any = None) -> Any:
            return Interface.properties

    @staticmethod
    def get_compute_capability(device: Any = None) -> int:
        return 90
