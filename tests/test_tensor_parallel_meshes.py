"""Tensor parallelism beside meshes that replicate, and parameters resharded to smaller groups, on four ranks."""

from __future__ import annotations

from facts import Facts
from reference import check_close
from tensor_parallel import Transformer, ours, train, with_matrices, with_sequences
from torch.distributed.device_mesh import init_device_mesh

import graph_fsdp
from graph_fsdp.report.report import engine_of

FACTS = Facts(__name__)


@FACTS
def two_replicas_of_tensor_parallel_ranks_equal_one_process() -> None:
    """Every rank holds its part of each matrix whole; gradients are all-reduced over the replicas."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    model = ours(with_matrices(Transformer(attention=False), mesh["tp"]), mesh)
    found = train(model, "sgd", 2, mesh["dp_replicate"].get_local_rank(), 2)
    expected = train(Transformer(attention=False), "sgd", 2)
    for kind in ("gradients", "parameters"):
        check_close(found[kind], expected[kind], 1e-4, kind)
    counts = engine_of(model).counter.collectives
    assert "all_gather" not in counts and counts["reduce"] > 0


@FACTS
def resharded_to_pairs_of_ranks_equal_one_process() -> None:
    """Backward gathers from two ranks what forward gathered from four."""
    mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp"))
    model = ours(with_sequences(Transformer(attention=False), mesh["tp"]), mesh["dp"], reshard_after_forward=2)
    found = train(model, "sgd", 2, mesh["dp"].get_local_rank(), 4)
    expected = train(Transformer(attention=False), "sgd", 2)
    for kind in ("gradients", "parameters"):
        check_close(found[kind], expected[kind], 1e-4, kind)
    assert "keep_shard" in graph_fsdp.inspect(model).forward.stages["free"].body


test_on_four_ranks = FACTS.on(4)
