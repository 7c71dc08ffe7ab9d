"""The corpus of ``make replay``: models times options of ``compile``, and what a revision makes of each.

    python tests/replay_cases.py FOLDER [NAME …]

writes a file per model and setting to FOLDER: every graph after every pass, every generated program, the tables of
buckets and slots, the report and the lives of all parameters, on rank 0 of 8 of torch's fake process group. Addresses
and the folders that the code lies in are left out.
"""

from __future__ import annotations

import functools
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from models import CASES, Case, loss_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import graph_fsdp
from graph_fsdp.passes import default_pipeline

WORLD_SIZE = 8
RANK = 3  # the first one reads at place 0 whatever is computed for it
ROWS = 2


@dataclass(frozen=True)
class Setting:
    """Options of ``compile``, and what is done with the model. ``options_of``: those that need the model or a mesh.
    ``only``: the models that have this setting, where a compiler makes it slow."""

    options: dict[str, Any] = field(default_factory=dict)
    options_of: Callable[[nn.Module], dict[str, Any]] = lambda model: {}
    run: Callable[[nn.Module, Case], None] = lambda model, case: train(model, case)
    only: tuple[str, ...] = tuple(CASES)


def train(model: nn.Module, case: Case) -> None:
    for step in range(2):
        loss_of(model, case.batch(ROWS, step)).backward()


def evaluate(model: nn.Module, case: Case) -> None:
    with torch.no_grad():
        loss_of(model.eval(), case.batch(ROWS, 0))


def accumulate(model: nn.Module, case: Case) -> None:
    """Two micro-batches, gradients reduced after the second."""
    for last in (False, True):
        model.set_requires_gradient_sync(last)  # type: ignore[operator]
        loss_of(model, case.batch(ROWS, int(last))).backward()


def other_lengths(model: nn.Module, case: Case) -> None:
    for rows in (ROWS, 3 * ROWS):
        loss_of(model, case.batch(rows, 0)).backward()


def vectors_on_fewer_ranks() -> dict[str, Any]:
    both = init_device_mesh("cpu", (2, 4), mesh_dim_names=("outer", "inner"))
    return {"mesh": both._flatten("all"), "meshes": lambda p: both["inner"] if p.dim() == 1 else None}


def mesh(shape: tuple[int, ...], *names: str) -> dict[str, DeviceMesh]:
    return {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=names)}


def last_dimension(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.dim() == 2 and parameter.shape[1] % WORLD_SIZE == 0 else None


SETTINGS: dict[str, Setting] = {
    "default": Setting(),
    "evaluation": Setting(run=evaluate),
    "accumulation": Setting(run=accumulate),
    "other rows": Setting(run=other_lengths),
    "dynamic": Setting({"dynamic": True}, run=other_lengths),
    "zero3": Setting({"reshard_after_forward": True}),
    "zero2": Setting({"reshard_after_forward": False}),
    "reshard over 4": Setting({"reshard_after_forward": 4}),
    "kept within a budget": Setting({"reshard_after_forward": "auto", "passes": default_pipeline(budget=12_000)}),
    "two ahead within a budget": Setting({"passes": default_pipeline(prefetch=2, budget=12_000)}),
    "serial": Setting({"passes": default_pipeline(prefetch=0, reductions_in_flight=1)}),
    "three ahead": Setting({"passes": default_pipeline(prefetch=3, reductions_in_flight=4)}),
    "backward post": Setting({"passes": default_pipeline(prefetch=BackwardPrefetch.BACKWARD_POST)}),
    "forward prefetch": Setting({"passes": default_pipeline(prefetch=None, forward_prefetch=2)}),
    "bucket per parameter": Setting({"passes": default_pipeline(bucket="none")}),
    "buckets of 700 bytes": Setting({"passes": default_pipeline(bucket=700)}),
    "automatic buckets": Setting({"passes": default_pipeline(bucket="auto")}),
    "units of linears": Setting({"auto_wrap_policy": {nn.Linear}}),
    "units by size": Setting({"auto_wrap_policy": functools.partial(size_based_auto_wrap_policy, min_num_params=600)}),
    "bfloat16": Setting({"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}),
    "bfloat16 out": Setting({"mp_policy": MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)}),
    "int8 gradients": Setting({"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.int8)}),
    "offload": Setting({"offload_policy": CPUOffloadPolicy()}),
    "ignored": Setting(options_of=lambda model: {"ignored_params": [next(model.parameters())]}),
    "last dimension": Setting({"shard_placement_fn": last_dimension}),
    "checkpointed units": Setting({"activation_checkpointing": "unit"}),
    "checkpointed selectively": Setting({"activation_checkpointing": "selective"}),
    "checkpointed by half": Setting({"activation_checkpointing": 0.5}),
    "activations offloaded": Setting({"activation_checkpointing": "offload"}),
    "whole": Setting({"regions": "whole", "backend": "inductor"}, only=("mlp", "gpt")),
    "whole, reshard over 4": Setting(
        {"regions": "whole", "backend": "inductor", "reshard_after_forward": 4}, only=("mlp",)
    ),
    "pieces": Setting({"fullgraph": False}),
    "hybrid": Setting(options_of=lambda model: mesh((2, 4), "dp_replicate", "dp_shard")),
    "replicas": Setting(options_of=lambda model: mesh((8,), "replicate")),
    "vectors on fewer ranks": Setting(options_of=lambda model: vectors_on_fewer_ranks()),
    "hybrid by names of dimensions": Setting(
        {"dp_mesh_dims": SimpleNamespace(replicate="a", shard="b")}, options_of=lambda model: mesh((2, 4), "a", "b")
    ),
}


def names() -> list[str]:
    return [f"{model}, {setting}" for model in CASES for setting, made in SETTINGS.items() if model in made.only]


def text_of(name: str) -> str:
    """What the package that is imported makes of one model and option, as text."""
    model_name, _, setting_name = name.partition(", ")
    case, setting = CASES[model_name], SETTINGS[setting_name]
    torch._dynamo.reset()
    torch.manual_seed(0)
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=WORLD_SIZE)
    try:
        model = case.model()
        options = {"backend": "eager", **setting.options, **setting.options_of(model)}
        graph_fsdp.compile(model, **options)
        setting.run(model, case)
        return "\n".join(map(without_what_varies, described(model)))
    except Exception as error:  # an option that a model cannot have: the error is what a revision makes of it
        return without_what_varies(f"{type(error).__name__}: {error}")
    finally:
        dist.destroy_process_group()


def described(model: nn.Module) -> Iterator[str]:
    report = graph_fsdp.inspect(model)
    for capture in report.captures:
        yield f"##### capture {capture.index}: {capture.cause}"
        for view in capture.all_views():
            for stage in view.stages.values():
                yield f"### {view.phase} after {stage.name}: {stage.summary}\n{stage.body}"
            yield f"### {view.phase}, program\n{view.program}"
            yield f"### {view.phase}, buckets\n{view.table()}\n{view.slots}\n{view.memory}\n{view.predicted()}"
    yield f"##### report\n{report}\n{report.collectives}"
    for parameter, _ in model.named_parameters():
        yield f"##### {parameter}\n{report.find(parameter)}" if parameter in report.spec.parameters else ""


_PACKAGE = str(Path(graph_fsdp.__file__).parent)
_VARIES = (
    (re.compile(re.escape(_PACKAGE)), "graph_fsdp"),
    (re.compile(re.escape(str(Path(__file__).parent))), "tests"),
    (re.compile(r"\b0x[0-9a-f]{6,}\b"), "0x…"),
    (re.compile(r"graph_fsdp_error_\w+\.json"), "graph_fsdp_error_….json"),
)


def without_what_varies(text: str) -> str:
    for pattern, replacement in _VARIES:
        text = pattern.sub(replacement, text)
    return text


def main() -> None:
    folder, wanted = Path(sys.argv[1]), sys.argv[2:] or names()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in wanted:
        (folder / f"{name}.txt").write_text(text_of(name))


if __name__ == "__main__":
    main()
