"""A plain model becomes a compiled one by what was decided for it: by ``compile``, or for the model that it is a copy
of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import nn

from graph_fsdp.engine.dynamo import trace_composable_checkpoints
from graph_fsdp.engine.sync_batch_norm import trace_sync_batch_norm
from graph_fsdp.mesh import DataParallelMesh
from graph_fsdp.module.entering import original_forward
from graph_fsdp.module.module import become_compiled
from graph_fsdp.parameters.extensions import ExtendedGather, extend, plain
from graph_fsdp.parameters.mixed_precision import ModulePolicies
from graph_fsdp.parameters.sharded import Owners, Shards
from graph_fsdp.passes import CostModel
from graph_fsdp.passes.ir.spec import ModelSpec
from graph_fsdp.units import Unit

if TYPE_CHECKING:
    from graph_fsdp.place import Place

UNFINISHED = "_graph_fsdp_unfinished"  # in a model, while it is changed


@dataclass(frozen=True)
class Decisions:
    """Holds what ``compile`` decides before it changes a model."""

    place: Place
    spec: ModelSpec
    policies: ModulePolicies
    units: list[Unit]
    cost: CostModel
    reshard_after_forward: bool | Literal["auto"] | None
    fullgraph: bool
    cuda_graphs: bool


def build(
    model: nn.Module,
    decisions: Decisions,
    originals: Mapping[str, nn.Parameter],
    owners: dict[str, Owners],
    put_values: Callable[[Shards], None],
    extensions: dict[str, ExtendedGather] | None = None,
) -> None:
    """Shard the parameters of ``model`` and give it its new class. ``originals``, ``owners``: by parameter.
    ``put_values``: puts values into shards that the model's own parameters lack. ``extensions``: by parameter, of a
    model that is copied, whose spec has their payloads; its parameters are plain."""
    place, spec, policies, cost = decisions.place, decisions.spec, decisions.policies, decisions.cost
    shown = {**originals}
    if extensions is None:
        ranks = place.mesh if isinstance(place.mesh, DataParallelMesh) else None
        spec, extensions = extend(spec, shown, owners, ranks, policies.around, place.device)
        shown |= {name: plain(originals[name]) for name in extensions}  # of which the model has nothing yet
    shown |= {name: quantized.sharded for name, quantized in place.quantized.items()}
    storage = place.storage(spec, shown, owners, place.mesh, place.device)
    storage.by_original = {id(p): storage.parameters[name] for name, p in originals.items()}
    for quantized in place.quantized.values():
        quantized.put_into(storage)
    if storage.has_memory:
        put_values(storage)
    trace_composable_checkpoints(model)
    if place.backend.name != "xla":
        trace_sync_batch_norm(model)
    forward, reshard = original_forward(model), decisions.reshard_after_forward
    engine = place.engine(
        forward, spec, storage, place, cost, reshard_after_forward=reshard, fullgraph=decisions.fullgraph
    )
    engine.extensions = extensions
    if decisions.cuda_graphs:
        engine.capture_regions(model)
    vars(model)[UNFINISHED] = True
    storage.install(model, decisions.fullgraph)
    policies.install(name for unit in decisions.units for name in unit.modules)
    place.before_compiled(model)
    become_compiled(model, engine, policies, decisions.units)
    del vars(model)[UNFINISHED]
