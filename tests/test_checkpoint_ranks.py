"""Loading checkpoints on ranks: safetensors files read row by row, and state dicts that one rank has."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from checkpoint_files import check_equal, saved, state_of, uneven, without
from facts import Facts, shared_folder
from launch import run_ranks
from models import CASES, CLASSES, GPT, MLP, WIDTH, loss_of
from reference import parameters_of
from test_meta import built, on_meta
from test_meta_errors import unchanged
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import graph_fsdp
from graph_fsdp import CheckpointError, RankDisagreement, checkpoint
from graph_fsdp.checkpoint import Safetensors, load_full_state_dict, load_safetensors, saving
from graph_fsdp.initialise import safetensors_files

FACTS = Facts(__name__)


# On ranks


class Reads:
    """What is asked of a file: key → elements."""

    def __init__(self, reader: Any, elements: dict[str, int]) -> None:
        self.reader, self.elements = reader, elements

    def __enter__(self) -> Reads:
        self.reader.__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        self.reader.__exit__(*args)

    def keys(self) -> Any:
        return self.reader.keys()

    def get_tensor(self, key: str) -> Tensor:
        return self.count(key, self.reader.get_tensor(key))

    def get_slice(self, key: str) -> Any:
        return Part(self, key, self.reader.get_slice(key))

    def count(self, key: str, value: Tensor) -> Tensor:
        self.elements[key] = self.elements.get(key, 0) + value.numel()
        return value


class Part:
    def __init__(self, reads: Reads, key: str, part: Any) -> None:
        self.reads, self.key, self.part = reads, key, part
        self.get_shape, self.get_dtype = part.get_shape, part.get_dtype

    def __getitem__(self, index: Any) -> Tensor:
        return self.reads.count(self.key, self.part[index])


@contextlib.contextmanager
def counted_reads() -> Iterator[dict[str, int]]:
    opened = safetensors_files.open_file
    elements: dict[str, int] = {}
    safetensors_files.open_file = lambda file: Reads(opened(file), elements)
    try:
        yield elements
    finally:
        safetensors_files.open_file = opened


def local_elements(model: nn.Module) -> dict[str, int]:
    """Name → elements of it that this rank holds, where it holds any."""
    held = {name: v.to_local() if isinstance(v, DTensor) else v for name, v in model.state_dict().items()}
    return {name: value.numel() for name, value in held.items() if value.numel()}


def rows_are_read(mesh_shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> None:
    """Each rank asks for its own elements, and all values arrive."""
    folder = shared_folder()
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    for make in (uneven, CASES["cnn_batchnorm"].make):
        expected = state_of(built(make))
        if dist.get_rank() == 0:
            saved(expected, folder / "a.safetensors")
        dist.barrier()
        with counted_reads() as elements:
            model = graph_fsdp.compile(on_meta(make), mesh, backend="eager", checkpoint=folder)
        assert elements == local_elements(model)
        check_equal(model, expected)
        with torch.no_grad():
            for value in model.state_dict().values():
                value.zero_()
        with counted_reads() as elements:
            load_safetensors(model, folder)
        assert elements == local_elements(model)
        check_equal(model, expected)
        dist.barrier()


@FACTS
def a_rank_reads_its_own_rows() -> None:
    rows_are_read((2,))
    model = graph_fsdp.compile(uneven(), backend="eager")
    held = local_elements(model)
    assert held["blocks.0.up.weight"] == (4 if dist.get_rank() == 0 else 3) * WIDTH
    assert ("blocks.0.gate" in held) == (dist.get_rank() == 0), "of one row the second rank reads nothing"


@FACTS
def replicas_read_all() -> None:
    rows_are_read((2,), ("replicate",))


@FACTS
def what_the_files_lack_has_the_same_values_on_all_ranks() -> None:
    folder = shared_folder()
    state = state_of(built(MLP))
    del state["head.weight"]
    if dist.get_rank() == 0:
        saved(state, folder / "a.safetensors")
    dist.barrier()
    torch.manual_seed(dist.get_rank())
    source = Safetensors(folder, strict=False)
    model = graph_fsdp.compile(on_meta(MLP), backend="eager", checkpoint=source)
    values = parameters_of(model)
    torch.manual_seed(0)
    expected = nn.Linear(WIDTH, CLASSES)
    assert torch.equal(values["head.weight"], expected.weight)
    assert torch.equal(values["blocks.1.up.weight"], state["blocks.1.up.weight"])


@FACTS
def a_file_that_one_rank_lacks_is_an_error_on_all() -> None:
    folder = shared_folder()
    path = folder / f"{dist.get_rank()}.safetensors"
    if dist.get_rank() == 0:
        saved(state_of(built(MLP)), path)
    error = CheckpointError if dist.get_rank() else RankDisagreement
    model = on_meta(MLP)
    with unchanged(model), pytest.raises(error, match=r"no such safetensors file: .*1\.safetensors"):
        graph_fsdp.compile(model, backend="eager", checkpoint=path)
    model = graph_fsdp.compile(MLP(), backend="eager")
    before = parameters_of(model)
    with pytest.raises(error, match=r"no such safetensors file: .*1\.safetensors"):
        load_safetensors(model, path)
    assert all(torch.equal(value, before[name]) for name, value in parameters_of(model).items())


@FACTS
def other_files_on_one_rank() -> None:
    folder = shared_folder()
    dtype = torch.bfloat16 if dist.get_rank() else torch.float32
    state = {name: value.to(dtype) for name, value in state_of(built(MLP)).items()}
    path = saved(state, folder / f"{dist.get_rank()}.safetensors")
    words = r"of the checkpoint 'blocks.0.up.weight' \[32, 16\] BF16\" on rank 1"
    with pytest.raises(RankDisagreement, match=words):
        graph_fsdp.compile(on_meta(MLP), backend="eager", checkpoint=path)
    with pytest.raises(RankDisagreement, match=words):
        load_safetensors(graph_fsdp.compile(MLP(), backend="eager"), path)


@FACTS
def a_rank_that_has_found_no_checkpoint_is_named_on_all() -> None:
    folder = shared_folder()
    model = graph_fsdp.compile(built(MLP), backend="eager")
    path = checkpoint.save(folder / "step_1", model).result()
    before = parameters_of(model)
    error = TypeError if dist.get_rank() else CheckpointError
    with pytest.raises(error, match="has found no complete checkpoint in its folder"):
        checkpoint.load(path if dist.get_rank() == 0 else None, model)  # type: ignore[arg-type]
    assert all(torch.equal(value, before[name]) for name, value in parameters_of(model).items())


@FACTS
def a_save_that_failed_in_the_background_is_told_to_all_whichever_rank_has_asked() -> None:
    folder, model = shared_folder(), graph_fsdp.compile(built(MLP), backend="eager")
    path = checkpoint.save(folder / "step_1", model).result()
    for call in (
        lambda: checkpoint.save(folder / "step_3", model, overwrite=True),
        lambda: checkpoint.load(path, model),
        lambda: checkpoint.latest(folder, model),
    ):
        with mock.patch.object(saving.folder, "commit", side_effect=OSError("the disk is full")):
            pending = checkpoint.save(folder / "step_2", model, asynchronous=True)
            while not pending.done():
                pass
        if dist.get_rank() == 0:
            with pytest.raises(CheckpointError, match="the disk is full"):
                pending.result()
        with pytest.raises(CheckpointError, match="the disk is full"):
            call()
        call()
    assert [found.name for found in checkpoint.complete(folder)] == ["step_1", "step_3"]


@FACTS
def a_path_that_is_wrong_on_one_rank_is_an_error_on_all() -> None:
    folder, model = shared_folder(), graph_fsdp.compile(built(MLP), backend="eager")
    for wrong, error in ((None, TypeError), ("", ValueError)):
        path: Any = wrong if dist.get_rank() else folder / "step_1"
        with pytest.raises(error if dist.get_rank() else CheckpointError, match="path must be the path of a folder"):
            checkpoint.save(path, model)
        with pytest.raises(error if dist.get_rank() else CheckpointError, match="folder must be the path of a folder"):
            checkpoint.latest(path, model)
    assert not checkpoint.complete(folder)


# A state dict that one rank has


def kinds() -> nn.Module:
    """Uneven rows, scalars, fewer rows than ranks, buffers of integers, a tied weight."""
    model = nn.Module()
    model.body = uneven()
    model.norm = nn.BatchNorm1d(WIDTH)
    model.head = nn.Linear(WIDTH, CLASSES, bias=False)
    model.body.head = model.head
    return model


@FACTS
def the_first_ranks_state_dict_reaches_all() -> None:
    expected = built(kinds)
    expected.norm.num_batches_tracked.fill_(7)
    state = state_of(expected)
    del state["head.weight"]
    model = graph_fsdp.compile(kinds(), backend="eager")
    shards = dict(model.named_parameters())
    found = load_full_state_dict(model, state if dist.get_rank() == 0 else None)
    assert found == ([], [])
    check_equal(model, state_of(expected))
    assert all(model.get_parameter(name) is p and isinstance(p, DTensor) for name, p in shards.items())
    assert "head.weight" not in state, "the caller's dict is as it was"


@FACTS
def a_tied_parameter_is_in_the_state_dict_under_one_of_its_names() -> None:
    expected = state_of(built(lambda: GPT(tied=True)))
    for name in ("tokens.weight", "head.weight"):
        model = graph_fsdp.compile(built(lambda: GPT(tied=True), seed=6), backend="eager")
        state = {key: value for key, value in expected.items() if key != name}
        assert load_full_state_dict(model, state if dist.get_rank() == 0 else None) == ([], [])
        check_equal(model, expected)
        assert model.head.weight is model.tokens.weight


@FACTS
def a_state_dict_of_another_dtype_is_cast_and_the_model_trains_with_it() -> None:
    state = {name: value.bfloat16() for name, value in state_of(built(MLP)).items()}
    model = graph_fsdp.compile(MLP(), backend="eager")
    load_full_state_dict(model, state if dist.get_rank() == 0 else None)
    check_equal(model, {name: value.float() for name, value in state.items()})
    batch = CASES["mlp"].batch(4, 0)
    reference = MLP()
    reference.load_state_dict(state)
    torch.testing.assert_close(loss_of(model, batch), loss_of(reference, batch), rtol=1e-6, atol=0)


@FACTS
def keys_that_are_missing_are_named_on_all_ranks() -> None:
    state = without(state_of(built(MLP)))
    model = graph_fsdp.compile(built(MLP, seed=6), backend="eager")
    before = parameters_of(model)
    mine = state if dist.get_rank() == 0 else None
    error = RankDisagreement if dist.get_rank() else CheckpointError
    with pytest.raises(error, match=r'Missing key\(s\) in state_dict: "head.weight", "head.bias"'):
        load_full_state_dict(model, mine)
    wrong = {"head.bias": torch.ones(3)} if dist.get_rank() == 0 else None
    with pytest.raises(error, match=r"size mismatch for head.bias: .* shape \[3\] from checkpoint"):
        load_full_state_dict(model, wrong, strict=False)
    assert all(torch.equal(value, before[name]) for name, value in parameters_of(model).items())
    found = load_full_state_dict(model, mine, strict=False)
    assert found == (["head.weight", "head.bias"], ["tail.a", "tail.b"])
    after = parameters_of(model)
    assert torch.equal(after["head.weight"], before["head.weight"])
    assert torch.equal(after["blocks.0.up.weight"], state["blocks.0.up.weight"])


@FACTS
def tensors_without_values_are_refused_before_anything_is_sent() -> None:
    model = graph_fsdp.compile(built(MLP, seed=6), backend="eager")
    before = parameters_of(model)
    whole = state_of(built(MLP))
    for wrong in (whole["head.weight"].to("meta"), whole["head.weight"].to_sparse()):
        state = {**whole, "head.weight": wrong}
        with pytest.raises(RankDisagreement if dist.get_rank() else TypeError, match=r"head.weight'] is o[nf] the "):
            load_full_state_dict(model, state if dist.get_rank() == 0 else None)
    assert all(torch.equal(value, before[name]) for name, value in parameters_of(model).items())


@FACTS
def shards_that_another_rank_saved_are_refused() -> None:
    model = graph_fsdp.compile(built(MLP), backend="eager")
    optimizer = torch.optim.Adam(model.parameters())
    loss_of(model, CASES["mlp"].batch(4, 0)).backward()
    optimizer.step()
    file = shared_folder() / "first.pt"
    if dist.get_rank() == 0:
        torch.save((model.state_dict(), optimizer.state_dict()), file)
    dist.barrier()
    before = {name: p.to_local().clone() for name, p in model.named_parameters()}
    states, optimizer_states = torch.load(file, weights_only=False)
    optimizer.load_state_dict(optimizer_states)
    if dist.get_rank():
        states = {name: value * 2 for name, value in states.items()}
    for prefix, module in (("", model), ("0.", nn.ModuleList([model]))):
        with refused(f"state_dict['{prefix}blocks.0.up.weight'] has the rows of rank 0"):
            module.load_state_dict(under(prefix, states))
    with refused("the optimizer's state 'exp_avg' has the rows of rank 0, which has saved it, and this is rank 1"):
        optimizer.step()
    assert dist.get_rank() == 0 or all(torch.equal(p.to_local(), before[name]) for name, p in model.named_parameters())


def refused(words: str) -> contextlib.AbstractContextManager[Any]:
    """On the rank that has not saved."""
    return pytest.raises(CheckpointError, match=re.escape(words)) if dist.get_rank() else contextlib.nullcontext()


def under(prefix: str, state: dict[str, Any]) -> dict[str, Any]:
    return {f"{prefix}{name}": value for name, value in state.items()}


@FACTS
def a_module_that_holds_the_model_loads_whole_tensors_too() -> None:
    expected = state_of(built(MLP))
    model = graph_fsdp.compile(built(MLP, seed=6), backend="eager")
    given = under("0.", expected)
    nn.ModuleList([model]).load_state_dict(given)
    check_equal(model, expected)
    assert not any(isinstance(value, DTensor) for value in given.values()), "the caller's dict is as it was"


test_on_two_ranks = FACTS.on(2)


def on_hybrid_meshes() -> bool:
    """On a rank of four."""
    for shape in ((2, 2), (1, 4)):
        rows_are_read(shape)
    expected = built(kinds)
    model = graph_fsdp.compile(kinds(), init_device_mesh("cpu", (2, 2)), backend="eager")
    load_full_state_dict(model, state_of(expected) if dist.get_rank() == 0 else None)
    check_equal(model, state_of(expected))
    half = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]
    model = graph_fsdp.compile(MLP(), half, backend="eager")
    with pytest.raises(ValueError, match="its mesh has 2 of 4 ranks"):
        load_full_state_dict(model, None)
    return True


def test_replicas_of_shards_read_the_same_rows() -> None:
    assert run_ranks(on_hybrid_meshes, 4) == [True] * 4
