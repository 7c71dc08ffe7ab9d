"""Loading checkpoints: safetensors files read row by row, and state dicts that one rank has."""

from __future__ import annotations

import atexit
import contextlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from facts import Facts, Failures, check
from launch import run_ranks
from models import CASES, CLASSES, GPT, MLP, WIDTH, UnevenBlock, llama, loss_of
from reference import parameters_of, whole
from safetensors.torch import save_file
from test_meta import Shift, built, initialised, on_meta, refuse, unchanged
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import graph_fsdp
from graph_fsdp import CheckpointError, RankDisagreement, safetensors_files
from graph_fsdp.checkpoint import Safetensors, load_full_state_dict, load_safetensors

FACTS = Facts(__name__)


def uneven() -> nn.Module:
    return MLP(block=UnevenBlock)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def saved(state: dict[str, Tensor], path: Path) -> Path:
    save_file({name: value.contiguous() for name, value in state.items()}, path)
    return path


def check_equal(model: nn.Module, expected: dict[str, Tensor]) -> None:
    found = {name: whole(value) for name, value in model.state_dict().items()}
    assert list(found) == list(expected)
    assert not [name for name, value in expected.items() if not torch.equal(found[name], value)]


class Split:
    """A checkpoint of a model, in one file and in two with an index."""

    def __init__(self, folder: Path, model: nn.Module) -> None:
        self.folder, self.state = folder, state_of(model)
        names = list(self.state)
        parts = {"a-1.safetensors": names[::2], "a-2.safetensors": names[1::2]}
        for file, keys in parts.items():
            saved({key: self.state[key] for key in keys}, folder / file)
        self.files = [folder / file for file in parts]
        (folder / "whole").mkdir()
        self.whole = saved(self.state, folder / "whole" / "model.safetensors")
        self.index = folder / "whole" / "model.safetensors.index.json"
        self.weight_map = {key: f"../{file}" for file, keys in parts.items() for key in keys}

    def write_index(self) -> Path:
        self.index.write_text(json.dumps({"weight_map": self.weight_map}))
        return self.index


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


def without(state: dict[str, Tensor]) -> dict[str, Tensor]:
    left = {name: value for name, value in state.items() if not name.startswith("head.")}
    return {**left, "tail.a": torch.ones(2), "tail.b": torch.ones(3)}


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
    ["no file", "empty folder", "empty list", "no safetensors", "cut", "twice", "index of nothing", "no index"],
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
    with pytest.raises(TypeError, match="rename must be a function"):
        Safetensors(split.whole, rename={"a": "b"})  # type: ignore[arg-type]
    words = ("checkpoint and sync_module_states=True both say where values come from",)
    refuse(built(MLP), ValueError, *words, checkpoint=split.whole, sync_module_states=True)
    refuse(built(MLP), ValueError, "leave it out", checkpoint=split.whole, param_init_fn=nn.init.zeros_)
    with pytest.raises(TypeError, match=r"model must be one that graph_fsdp.compile has returned, got MLP"):
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
        return self._count(key, self.reader.get_tensor(key))

    def get_slice(self, key: str) -> Any:
        return Part(self, key, self.reader.get_slice(key))

    def _count(self, key: str, value: Tensor) -> Tensor:
        self.elements[key] = self.elements.get(key, 0) + value.numel()
        return value


class Part:
    def __init__(self, reads: Reads, key: str, part: Any) -> None:
        self.reads, self.key, self.part = reads, key, part
        self.get_shape, self.get_dtype = part.get_shape, part.get_dtype

    def __getitem__(self, index: Any) -> Tensor:
        return self.reads._count(self.key, self.part[index])


@contextlib.contextmanager
def counted_reads() -> Iterator[dict[str, int]]:
    opened = safetensors_files._open
    elements: dict[str, int] = {}
    safetensors_files._open = lambda file: Reads(opened(file), elements)
    try:
        yield elements
    finally:
        safetensors_files._open = opened


def shared_folder() -> Path:
    """One folder, on all ranks."""
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    if dist.get_rank() == 0:
        atexit.register(shutil.rmtree, str(box[0]), ignore_errors=True)
    dist.broadcast_object_list(box, src=0)
    return Path(str(box[0]))


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


@pytest.fixture(scope="module")
def ranks() -> Failures:
    return FACTS.check_on(2)


@pytest.mark.parametrize("name", FACTS.names)
def test_on_two_ranks(ranks: Failures, name: str) -> None:
    check(ranks, name)


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
