"""Inductor compiles one region here; the files beside this one are imported when it does."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._guards import TracingContext, tracing

from graph_fsdp.compat.traces.torch_compile import current_fake_mode


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    from graph_fsdp.compat.inductor.imports import quick_import

    with quick_import():
        import torch._inductor.lowering  # noqa: F401  # max_pool2d's decomposition takes it to be imported
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def inductor_joint_passes(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Run Inductor's passes on a graph before it is partitioned (random numbers, attention patterns, folding)."""
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V

    with V.set_fake_mode(current_fake_mode()):  # in which seeds of random numbers are made
        return joint_graph_passes(module) or module


def inductor_passes_before_gradients() -> list[str]:
    """Return the settings with which a user has Inductor change what Dynamo traced before it is differentiated."""
    from torch._inductor import config

    return [name for name in ("pre_grad_custom_pass", "pre_grad_fusion_options") if getattr(config, name)]


def built_together() -> contextlib.AbstractContextManager[None]:
    from graph_fsdp.compat.inductor import cpp

    return cpp.built_together()


def default_inductor_cache_directory() -> Path | None:
    """Return where Inductor keeps its caches if it is not told where; None if it is told another place."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    default = Path(default_cache_dir()).absolute()
    told = os.environ.get("TORCHINDUCTOR_CACHE_DIR")  # Inductor itself writes the default there
    return default if told is None or Path(told).absolute() == default else None


def inductor_cache_directory() -> Path | None:
    """Return where Inductor keeps compiled graphs for other processes and later runs; None where it keeps none."""
    from torch._inductor import config
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    if config.force_disable_caches or not config.fx_graph_cache:
        return None
    try:
        return Path(cache_dir())  # makes it
    except OSError:
        return None


def inductor_compile(
    module: torch.fx.GraphModule, phase: str, *, keep_order: bool = False
) -> Callable[[list[Any]], Any]:
    """Compile one region with Inductor. For ``keep_order`` see
    :func:`graph_fsdp.compat.inductor.scheduler.graph_order`.

    Each call needs a TracingContext of its own, or the strides that Inductor reports for one region's outputs are taken
    for another's; and each output must be marked user-visible, or Inductor may change its strides. Inductor makes no
    CUDA graphs, whatever ``config.triton.cudagraphs`` says: they are the program's (``compile(cuda_graphs=True)``).
    """
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.utils import BoxedBool

    from graph_fsdp.compat.inductor.devices import shared_by_devices
    from graph_fsdp.compat.inductor.keys import know_torch, unlogged_keys_unprinted
    from graph_fsdp.compat.inductor.scheduler import graph_order

    if (directory := inductor_cache_directory()) is not None:
        know_torch(directory)
    output = module.graph.output_node()
    outputs: Any
    (outputs,) = output.args
    output.meta["user_visible_output_idxs"] = [i for i, value in enumerate(outputs) if isinstance(value, torch.fx.Node)]
    inputs = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    is_backward, is_inference = phase == "backward", phase == "inference"
    mode = current_fake_mode()
    with contextlib.ExitStack() as stack:
        stack.enter_context(tracing(TracingContext(mode)))
        if keep_order:
            stack.enter_context(graph_order())
        for context in (_vectors_named(module), shared_by_devices(module), unlogged_keys_unprinted()):
            stack.enter_context(context)
        compiled: Any = compile_fx_inner(
            module, inputs, is_backward=is_backward, is_inference=is_inference, cudagraphs=BoxedBool(False)
        )
    return _directly_called(compiled)


def _directly_called(compiled: Any) -> Callable[[list[Any]], Any]:
    """Return the function that Inductor has written, without what Inductor does around each call of it: a range for
    profilers, of which programs have their own, and the end of a bundle of autotuned choices, where there is one."""
    function = getattr(compiled, "current_callable", None)
    if function is None or getattr(compiled, "_compile_context", None) is not None:
        return compiled
    called = functools.partial(function)
    # The graph gives up parts of the function when it goes.
    vars(called).update(compiled=compiled, source_code=compiled.source_code)
    return called


def _vectors_named(module: torch.fx.GraphModule) -> contextlib.AbstractContextManager[None]:
    """Have Inductor's cache give this host only what was written for vectors as wide as its own.

    The C++ kept for a graph steps by the width of vectors, which the cache's key lacks where ``cpp.simdlen`` is None: a
    host with other vectors that shares the folder would compute wrong numbers. So the setting says the width that is
    found (docs/decisions/compute_regions.md).
    """
    from torch._inductor import config
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    from graph_fsdp.compat.inductor.probes import remembered_probes

    values = [node.meta.get("val") for node in module.graph.nodes]
    on_host = any(isinstance(value, torch.Tensor) and value.device.type == "cpu" for value in values)
    if not on_host or config.cpp.simdlen is not None:
        return contextlib.nullcontext()
    with remembered_probes():
        width = pick_vec_isa().bit_width()
    return config.patch({"cpp.simdlen": width})


def inductor_settings() -> dict[str, Any]:
    """Return Inductor's configuration by name, with the user's passes on joint graphs, which torch leaves out."""
    from torch._inductor import config

    settings: dict[str, Any] = config.save_config_portable(ignore_private_configs=False)
    return settings | {name: getattr(config, name) for name in ("joint_custom_pre_pass", "joint_custom_post_pass")}
