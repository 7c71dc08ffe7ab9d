"""Loading checkpoints in one process: safetensors files of many kinds, and what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_files import Split, check_equal, saved, state_of, without
from models import CASES, CLASSES, GPT, MLP, WIDTH, llama, loss_of
from test_meta import Shift, built, initialised, on_meta
from test_meta_errors import refuse, unchanged
from torch import nn

import graph_fsdp
from graph_fsdp import CheckpointError
from graph_fsdp.checkpoint import Safetensors, load_full_state_dict, load_safetensors


@pytest.fixture
def split(tmp_path: Path) -> Split:
    return Split(tmp_path, built(MLP))


# In one process


def path_of(split: Split, kind: str) -> Any:
    if kind.startswith("index"):
        split.write_index()
        split.whole.unlink()
    return {
        "file": split.whole,
        "text": str(split.whole),
        "folder": split.whole.parent,
        "folder of parts": split.folder,
        "list": split.files,
        "index": split.index,
        "index in folder": split.whole.parent,
    }[kind]


@pytest.mark.parametrize("kind", ["file", "text", "folder", "folder of parts", "list", "index", "index in folder"])
def test_files_are_given_in_many_ways(split: Split, kind: str) -> None:
    path = path_of(split, kind)
    model = graph_fsdp.compile(built(MLP, seed=6), backend="eager")
    assert load_safetensors(model, path) == ([], [])
    check_equal(model, split.state)
    check_equal(graph_fsdp.compile(on_meta(MLP), backend="eager", checkpoint=path), split.state)


def test_a_folder_with_a_whole_model_and_its_parts_is_the_whole_model(split: Split) -> None:
    other = {name: value + 1 for name, value in split.state.items()}
    saved(other, split.whole.parent / "other.safetensors")
    check_equal(graph_fsdp.compile(on_meta(MLP), backend="eager", checkpoint=split.whole.parent), split.state)


def test_a_model_computes_and_trains_with_what_was_loaded(split: Split) -> None:
    batch = CASES["mlp"].batch(4, 0)
    model = graph_fsdp.compile(built(MLP, seed=6), backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = loss_of(model, batch)
    load_safetensors(model, split.whole)
    loss = loss_of(model, batch)
    assert before != loss == loss_of(built(MLP), batch)
    loss.backward()
    optimizer.step()
    assert loss_of(model, batch) < loss


class Counted(nn.Linear):
    """Counts how often it is initialised."""

    calls = 0

    def reset_parameters(self) -> None:
        Counted.calls += 1
        super().reset_parameters()


def counted() -> nn.Module:
    return nn.Sequential(Counted(WIDTH, WIDTH), Shift(), Counted(WIDTH, CLASSES))


def test_only_what_the_files_lack_is_initialised(tmp_path: Path) -> None:
    expected = built(counted)
    nn.init.constant_(expected[1].weight, 3.0)
    path = saved(state_of(expected), tmp_path / "a.safetensors")
    model = on_meta(counted)
    Counted.calls = 0
    random_state = torch.get_rng_state()
    graph_fsdp.compile(model, backend="eager", checkpoint=path)
    assert Counted.calls == 0 and torch.equal(torch.get_rng_state(), random_state)
    check_equal(model, state_of(expected))
    assert torch.equal(model[1].shift, expected[1].shift), "a buffer that no state dict has"
    x = torch.randn(2, WIDTH)
    assert torch.equal(model(x), expected(x))

    absent = state_of(expected)
    del absent["2.weight"], absent["2.bias"]
    path = saved(absent, tmp_path / "b.safetensors")
    called = []

    def init(module: nn.Module) -> None:
        called.append(type(module).__name__)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            nn.init.constant_(tensor, 0.5)

    model = on_meta(counted)
    source = Safetensors(path, strict=False)
    graph_fsdp.compile(model, backend="eager", checkpoint=source, param_init_fn=init)
    assert called == ["Shift", "Counted", "Sequential"]
    assert model[2].weight.eq(0.5).all() and model[1].weight.eq(3).all()


def test_a_hugging_face_model(tmp_path: Path) -> None:
    expected = built(llama)
    expected.save_pretrained(tmp_path)
    model = on_meta(llama)
    graph_fsdp.compile(model, backend="eager", checkpoint=tmp_path, param_init_fn=model._init_weights)
    check_equal(model, state_of(expected))
    batch = CASES["hf_llama"].batch(4, 0)
    torch.testing.assert_close(loss_of(model, batch), loss_of(expected, batch), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["tokens.weight", "head.weight"])
def test_a_tied_weight_is_in_the_file_under_one_of_its_names(tmp_path: Path, name: str) -> None:
    expected = built(lambda: GPT(tied=True))
    state = state_of(expected)
    del state[name]
    path = saved(state, tmp_path / "a.safetensors")
    for model in (
        graph_fsdp.compile(on_meta(lambda: GPT(tied=True)), backend="eager", checkpoint=path),
        graph_fsdp.compile(built(lambda: GPT(tied=True), seed=6), backend="eager"),
    ):
        assert load_safetensors(model, path) == ([], [])
        check_equal(model, state_of(expected))
        assert model.head.weight is model.tokens.weight


def test_values_are_cast_to_the_dtype_of_the_shards(tmp_path: Path) -> None:
    expected = {name: value.bfloat16() for name, value in state_of(built(MLP)).items()}
    path = saved(expected, tmp_path / "a.safetensors")
    model = graph_fsdp.compile(on_meta(MLP), backend="eager", checkpoint=path)
    check_equal(model, {name: value.float() for name, value in expected.items()})
    wide = saved(state_of(built(MLP)), tmp_path / "b.safetensors")
    check_equal(graph_fsdp.compile(on_meta(MLP).bfloat16(), backend="eager", checkpoint=wide), expected)


def test_buffers_and_ignored_parameters_are_loaded_whole(tmp_path: Path) -> None:
    make = CASES["cnn_batchnorm"].make
    expected = built(make)
    for buffer in expected.buffers():
        buffer.copy_(torch.rand(buffer.shape).mul(5))
    path = saved(state_of(expected), tmp_path / "a.safetensors")
    for model in (on_meta(make), built(make, seed=6)):
        ignored = model.head.bias
        graph_fsdp.compile(model, backend="eager", checkpoint=path, ignored_params=[ignored])
        assert model.head.bias is ignored
        check_equal(model, state_of(expected))
        for buffer in model.buffers():
            buffer.zero_()
        load_safetensors(model, path)
        check_equal(model, state_of(expected))


def test_names_may_be_others_in_the_file(tmp_path: Path) -> None:
    state = state_of(built(MLP))
    path = saved({f"model.{name}": value for name, value in state.items() if name != "head.bias"}, tmp_path / "a")

    def rename(name: str) -> str | None:
        return None if name == "head.bias" else f"model.{name}"

    source = Safetensors(path, rename=rename)
    model = initialised(on_meta(MLP), checkpoint=source)
    bias = model.head.bias.detach().clone()
    load_safetensors(model, path, rename=rename)
    check_equal(model, state | {"head.bias": bias})


# What does not fit


def test_missing_and_unexpected_keys_are_those_of_load_state_dict(tmp_path: Path) -> None:
    state = without(state_of(built(MLP)))
    path = saved(state, tmp_path / "a.safetensors")
    reference = built(MLP, seed=6)
    with pytest.raises(RuntimeError) as expected:
        reference.load_state_dict(state)
    words = [line.strip() for line in str(expected.value).splitlines()[1:]]
    assert len(words) == 2 and words[0].startswith("Missing") and words[1].startswith("Unexpected")

    model = built(MLP, seed=6)
    refuse(model, CheckpointError, *words, str(path), checkpoint=path)
    graph_fsdp.compile(model, backend="eager")
    before = state_of(model)
    with pytest.raises(CheckpointError) as raised:
        load_safetensors(model, path)
    assert all(line in str(raised.value) for line in words)
    check_equal(model, before)

    keys = reference.load_state_dict(state, strict=False)
    found = load_safetensors(model, path, strict=False)
    assert found == (keys.missing_keys, keys.unexpected_keys)
    assert found.missing_keys == ["head.weight", "head.bias"]
    check_equal(model, state_of(reference))


@pytest.mark.parametrize("strict", [True, False])
def test_another_shape_or_kind_of_number(tmp_path: Path, strict: bool) -> None:
    state = state_of(built(MLP))
    state["blocks.1.up.weight"] = torch.ones(33, 16)
    state["head.bias"] = torch.ones(CLASSES, dtype=torch.int64)
    path = saved(state, tmp_path / "a.safetensors")
    words = (
        "size mismatch for blocks.1.up.weight: copying a param with shape [33, 16] from checkpoint, the shape in "
        "current model is [32, 16].",
        "head.bias: I64 in the file cannot be loaded into float32",
    )
    for model in (on_meta(MLP), built(MLP)):
        refuse(model, CheckpointError, *words, checkpoint=Safetensors(path, strict=strict))
    graph_fsdp.compile(model, backend="eager")
    before = state_of(model)
    with pytest.raises(CheckpointError, match=r"blocks\.1\.up\.weight.*\n.*I64"):
        load_safetensors(model, path, strict=strict)
    check_equal(model, before)


def broken(split: Split, kind: str) -> tuple[Any, str]:
    """A path that cannot be read, and words of the error."""
    empty = split.folder / "empty"
    empty.mkdir()
    match kind:
        case "no file":
            return empty / "a.safetensors", "no such safetensors file: "
        case "empty folder":
            return empty, "has neither model.safetensors.index.json nor any *.safetensors"
        case "checkpoint of DCP":
            dcp.save({"weight": torch.ones(2)}, checkpoint_id=empty, no_dist=True)
            return empty, "is a checkpoint of torch.distributed.checkpoint, and safetensors are asked for; load it by"
        case "empty list":
            return [], "an empty list"
        case "no safetensors":
            (empty / "a.safetensors").write_bytes(b"not one")
            return empty, "cannot be read as safetensors"
        case "cut":
            split.whole.write_bytes(split.whole.read_bytes()[:-1])
            return split.whole, "cannot be read as safetensors"
        case "twice":
            return [split.whole, split.files[0]], f"is in {split.whole} and in {split.files[0]}"
        case "index of nothing":
            split.weight_map["head.bias"] = "a-3.safetensors"
            return split.write_index(), "a-3.safetensors; is the checkpoint complete?"
        case _:
            split.index.write_text("[]")
            return split.index, "is no index of safetensors files"


@pytest.mark.parametrize(
    "kind",
    [
        "no file",
        "empty folder",
        "checkpoint of DCP",
        "empty list",
        "no safetensors",
        "cut",
        "twice",
        "index of nothing",
        "no index",
    ],
)
def test_files_that_cannot_be_read(split: Split, kind: str) -> None:
    path, words = broken(split, kind)
    refuse(on_meta(MLP), CheckpointError, words, checkpoint=path)
    with pytest.raises(CheckpointError) as raised:
        load_safetensors(graph_fsdp.compile(MLP(), backend="eager"), path)
    assert words in str(raised.value)


def test_arguments_of_other_types(split: Split) -> None:
    refuse(on_meta(MLP), TypeError, "a checkpoint must be the path", "got True", checkpoint=True)
    refuse(on_meta(MLP), TypeError, "a checkpoint must be the path", checkpoint=[split.files[0], 3])
    for empty in ("", [split.files[0], ""]):
        refuse(on_meta(MLP), ValueError, "a checkpoint must be the path", "got an empty path", checkpoint=empty)
    with pytest.raises(TypeError, match="rename must be a function"):
        Safetensors(split.whole, rename={"a": "b"})  # type: ignore[arg-type]
    words = ("checkpoint and sync_module_states=True both say where values come from",)
    refuse(built(MLP), ValueError, *words, checkpoint=split.whole, sync_module_states=True)
    refuse(built(MLP), ValueError, "leave it out", checkpoint=split.whole, param_init_fn=nn.init.zeros_)
    with pytest.raises(TypeError, match=r"MLP was not compiled by graph_fsdp; call graph_fsdp\.compile first"):
        load_safetensors(MLP(), split.whole)
    model = graph_fsdp.compile(MLP(), backend="eager")
    with pytest.raises(TypeError, match="state_dict must be a dict of whole tensors on rank 0, got NoneType"):
        load_full_state_dict(model, None)
    with pytest.raises(TypeError, match=r"state_dict\['head.bias'\] is int"):
        load_full_state_dict(model, {"head.bias": 1})  # type: ignore[dict-item]


def test_what_files_and_initialisation_leave_out(tmp_path: Path) -> None:
    make: Callable[[], nn.Module] = lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Shift())  # noqa: E731
    state = state_of(built(make))
    del state["1.weight"]
    path = saved(state, tmp_path / "a.safetensors")
    source = Safetensors(path, strict=False)
    words = ("buffer '1.shift' is on the meta device, and nothing has written to it",)
    model = on_meta(make)
    with unchanged(model), pytest.raises(graph_fsdp.MetaDeviceError, match=words[0]):
        init = lambda module: nn.init.ones_(module.weight) if isinstance(module, Shift) else None  # noqa: E731
        graph_fsdp.compile(model, backend="eager", checkpoint=source, param_init_fn=init)
