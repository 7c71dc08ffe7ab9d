"""Bad input to ``compile``: one clear error before anything is changed, and the model is as it was.

What only a forward can know is in ``test_bad_forward.py``, models on the meta device in ``test_meta.py``.
"""

from __future__ import annotations

import contextlib
import operator
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import FAKE_WORLD_SIZE, fake_process_group
from models import MLP, MLPBlock
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import graph_fsdp
from graph_fsdp import AlreadyCompiledError, AlreadyShardedError, MeshError, UnsupportedError
from graph_fsdp.compat import check_torch_version
from graph_fsdp.mesh import world_size_of_environment
from graph_fsdp.module.collective_methods import CollectiveMethods
from graph_fsdp.module.communication import CommunicationMethods
from graph_fsdp.module.module import unsupported
from graph_fsdp.module.unit_methods import UnitMethods


def batch() -> Tensor:
    return torch.ones(4, 16)


@contextlib.contextmanager
def unchanged(model: nn.Module, *, runs: bool = True) -> Iterator[None]:
    """Around a call that fails: class, parameters and buffers stay what they were, and the model still runs."""

    def state() -> tuple[Any, ...]:
        tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
        ids = [(name, id(tensor), tensor.device, tensor.requires_grad) for name, tensor in tensors]
        return [type(module) for module in model.modules()], ids, list(model.__dict__)

    def values() -> list[Tensor]:
        with torch.no_grad():
            return [*(p.detach().clone() for p in model.parameters()), model(batch())] if runs else []

    before, values_before = state(), values()
    yield
    assert state() == before
    assert all(map(torch.equal, values(), values_before))


def refuse(
    model: nn.Module, error: type[Exception], *words: str, mesh: Any = None, runs: bool = True, **options: Any
) -> None:
    """``compile`` raises exactly this class with all these words in the message, and changes nothing."""
    with unchanged(model, runs=runs), pytest.raises(error) as raised:
        graph_fsdp.compile(model, mesh, **options)
    assert raised.type is error
    missing = [word for word in words if word not in str(raised.value)]
    assert not missing, f"{missing} not in: {raised.value}"


def accept(model: nn.Module, mesh: DeviceMesh | None = None, **options: Any) -> None:
    """The same model compiles and trains once the input is right: the error left nothing behind."""
    graph_fsdp.compile(model, mesh, backend="eager", **options)
    model(batch()).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


# Flags


@pytest.mark.parametrize("name", ["fullgraph", "sync_module_states", "cuda_graphs", "dynamic"])
def test_a_flag_that_is_neither_true_nor_false(name: str) -> None:
    refuse(MLP(), TypeError, f"{name} must be True", "'no'", backend="eager", **{name: "no"})
    if name != "dynamic":
        refuse(MLP(), TypeError, f"{name} must be True or False, got None", backend="eager", **{name: None})


# The mesh


def test_a_mesh_for_another_device_type(fake_group: None) -> None:
    model, mesh = MLP(), DeviceMesh("meta", list(range(FAKE_WORLD_SIZE)))
    refuse(model, MeshError, "mesh is of device type 'meta'", "parameters are on 'cpu'", "move the model", mesh=mesh)
    accept(model, init_device_mesh("cpu", (FAKE_WORLD_SIZE,)))


def test_a_mesh_of_three_dimensions(fake_group: None) -> None:
    model = MLP()
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    words = ("mesh has 3 dimensions of sizes (2, 2, 2)", "a slice of the mesh", "mesh['a', 'b']")
    refuse(model, MeshError, *words, mesh=mesh)
    nameless = init_device_mesh("cpu", (2, 2, 2))
    refuse(model, MeshError, "make the mesh with mesh_dim_names", mesh=nameless)
    accept(model, mesh["a", "b"])


def test_a_mesh_whose_replicas_would_hold_other_shards(fake_group: None) -> None:
    ranks = torch.tensor([[0, 3], [2, 1]])
    mesh = DeviceMesh("cpu", ranks)
    refuse(
        MLP(), MeshError, "mesh has the ranks [[0, 3], [2, 1]]", "list the ranks of each row in ascending", mesh=mesh
    )
    accept(MLP(), DeviceMesh("cpu", ranks.flip(0, 1)[:, [0, 1]].sort(dim=1).values))


def test_a_mesh_without_this_rank(fake_group: None) -> None:
    model = MLP()
    mesh = DeviceMesh("cpu", [4, 5, 6, 7])
    refuse(model, MeshError, "mesh has the ranks [4, 5, 6, 7]", "this one is rank 0", mesh=mesh)
    accept(model, DeviceMesh("cpu", [0, 1, 2, 3]))


def test_something_that_is_no_mesh(fake_group: Any) -> None:
    refuse(MLP(), TypeError, "mesh must be a DeviceMesh", "init_device_mesh", "got 'cpu'", mesh="cpu")
    refuse(MLP(), TypeError, "mesh must be a DeviceMesh", "ProcessGroup", mesh=fake_group)


# The process group


def test_ranks_of_a_launcher_without_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    refuse(MLP(), MeshError, "2 processes", "no process group", "MASTER_ADDR", "torchrun --nproc-per-node")


def test_tasks_of_slurm_without_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_NTASKS", "2")
    refuse(MLP(), MeshError, "2 processes", "no process group", "srun torchrun", "init_process_group")


def test_torchrun_under_slurm_says_how_many_ranks_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """``srun`` starts one task of torchrun on each node, which starts the ranks."""
    ours = {"WORLD_SIZE": "16", "RANK": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in {**ours, "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}.items():
        monkeypatch.setenv(name, value)
    assert world_size_of_environment() == 16


def test_a_mesh_whose_process_group_was_destroyed() -> None:
    with fake_process_group():
        mesh = init_device_mesh("cpu", (FAKE_WORLD_SIZE,))
    refuse(MLP(), MeshError, "mesh", "process group", "destroyed", "torchrun --nproc-per-node", mesh=mesh)


# The model


def test_a_container_that_runs_nothing(fake_group: None) -> None:
    for holder in (nn.ModuleList([nn.Linear(4, 4)]), nn.ModuleDict(), nn.ParameterList([torch.ones(1)])):
        words = f"model: {type(holder).__name__} only holds others", "pass the module whose forward uses it"
        refuse(holder, ValueError, *words, runs=False)


def test_something_that_is_no_module(fake_group: None) -> None:
    for wrong in (MLP, torch.relu):
        with pytest.raises(TypeError, match=r"model must be an nn\.Module, got"):
            graph_fsdp.compile(wrong)  # type: ignore[type-var]


def test_a_second_compile_of_a_model(fake_group: None) -> None:
    model = graph_fsdp.compile(MLP(), backend="eager")
    refuse(model, AlreadyCompiledError, "model was compiled by graph_fsdp before", "compile a model once")
    refuse(model.blocks[0].up, AlreadyCompiledError, "model was compiled by graph_fsdp before, as a part", runs=False)
    part = nn.Sequential(model.blocks[0].up)
    refuse(part, AlreadyCompiledError, "its submodule '0' was compiled by graph_fsdp before, as a part", runs=False)


def test_a_part_that_was_left_out_is_compiled_by_itself() -> None:
    model = MLP()
    graph_fsdp.compile(model, backend="eager", ignored_params=[model.blocks[0].up])
    graph_fsdp.compile(model.blocks[0].up, backend="eager")


def test_a_submodule_that_was_compiled(fake_group: None) -> None:
    model = MLP()
    graph_fsdp.compile(model.blocks[0], backend="eager")
    refuse(model, AlreadyCompiledError, "submodule 'blocks.0' was compiled by graph_fsdp", "once")


def test_a_model_sharded_by_fsdp1(fake_group: None) -> None:
    model = FullyShardedDataParallel(MLP(), device_id=torch.device("cpu"))
    refuse(model, AlreadyShardedError, "model is sharded by FSDP1", "as it was before", runs=False)


def test_a_model_sharded_by_fsdp2(fake_group: None) -> None:
    model = MLP()
    fully_shard(model.blocks[1])
    refuse(model, AlreadyShardedError, "'blocks.1' is sharded by FSDP2", "as it was before", runs=False)


def test_a_parameter_that_is_a_dtensor(fake_group: None) -> None:
    model, mesh = MLP(), init_device_mesh("cpu", (FAKE_WORLD_SIZE,))
    model.head.weight = nn.Parameter(distribute_tensor(model.head.weight.detach(), mesh, [Shard(0)]))
    refuse(model, AlreadyShardedError, "parameter 'head.weight' is a DTensor", "plain tensors", runs=False)


def test_a_model_wrapped_in_ddp(fake_group: None) -> None:
    for model in (DistributedDataParallel(MLP()), nn.DataParallel(MLP())):
        refuse(model, AlreadyShardedError, f"model is wrapped in {type(model).__name__}", "model.module", runs=False)
        accept(model.module)


def test_a_model_that_went_through_torch_compile(fake_group: None) -> None:
    model = torch.compile(MLP(), backend="eager")
    refuse(model, UnsupportedError, "model is a OptimizedModule", "the module that it was made of")


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_scripted_model(fake_group: None) -> None:
    with pytest.raises(UnsupportedError, match="ScriptModule; pass the module that it was made of"):
        graph_fsdp.compile(torch.jit.script(nn.Linear(2, 2)))


def test_a_lazy_module_that_never_ran(fake_group: None) -> None:
    model = nn.Sequential(nn.LazyLinear(5))
    refuse(model, ValueError, "parameter '0.weight' has no shape yet", "run the model once", runs=False)
    model(batch())
    accept(model)


def test_a_sparse_parameter(fake_group: None) -> None:
    model = MLP()
    model.sparse = nn.Parameter(torch.eye(3).to_sparse())
    before = list(model.parameters())
    with pytest.raises(UnsupportedError, match=r"parameter 'sparse' has the layout torch\.sparse_coo.*ignored_params"):
        graph_fsdp.compile(model)
    assert all(map(operator.is_, model.parameters(), before))
    graph_fsdp.compile(model, backend="eager", ignored_params=[model.sparse])(batch()).sum().backward()


def test_hooks_of_a_parameter_that_sharding_loses(fake_group: None) -> None:
    model = MLP()
    model.head.weight.register_hook(lambda grad: grad)
    with pytest.warns(UserWarning, match=r"parameter 'head\.weight' has hooks .* register them on the parameters"):
        graph_fsdp.compile(model, backend="eager")


def test_parameters_in_one_memory_that_sharding_separates(fake_group: None) -> None:
    model = MLP()
    model.blocks[1].up.weight.data = model.blocks[0].up.weight.data
    with pytest.warns(UserWarning, match=r"'blocks\.0\.up\.weight' and 'blocks\.1\.up\.weight' have memory in common"):
        graph_fsdp.compile(model, backend="eager")
    whole, beside = torch.ones(4, 6), MLP()
    beside.left, beside.right = nn.Parameter(whole[:, :3]), nn.Parameter(whole[:, 3:])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graph_fsdp.compile(beside, backend="eager")
        graph_fsdp.compile(nn.LSTM(3, 4), backend="eager")


def test_gradients_that_sharding_would_lose(fake_group: None) -> None:
    model = MLP()
    model(batch()).sum().backward()
    refuse(model, ValueError, "parameter 'blocks.0.up.weight' has a gradient", "model.zero_grad()")
    assert model.head.weight.grad is not None
    model.zero_grad()
    accept(model)


def test_gradients_of_ignored_parameters_stay(fake_group: None) -> None:
    model = MLP()
    model.head.weight.grad = grad = torch.ones_like(model.head.weight)
    graph_fsdp.compile(model, backend="eager", ignored_params=[model.head])
    assert model.head.weight.grad is grad


# The options


@pytest.mark.parametrize("backend", ["tpu", None, ["eager"]])
def test_an_unknown_backend(fake_group: None, backend: Any) -> None:
    refuse(MLP(), ValueError, f"backend {backend!r} does not exist", "'eager'", "'inductor'", backend=backend)


@pytest.mark.parametrize("regions", ["all", None, ["cut"]])
def test_regions_that_are_neither_cut_nor_whole(fake_group: None, regions: Any) -> None:
    refuse(MLP(), ValueError, "regions must be 'cut' or 'whole'", f"got {regions!r}", regions=regions)


def test_a_whole_graph_without_a_compiler(fake_group: None) -> None:
    model = MLP()
    refuse(
        model, ValueError, "regions='whole'", "backend 'eager'", "backend='inductor'", backend="eager", regions="whole"
    )
    accept(model)


def test_a_policy_that_selects_nothing(fake_group: None) -> None:
    model = MLP()
    policy = {nn.Conv2d}
    words = ("auto_wrap_policy", "Conv2d", "selects none", "MLPBlock (2)", "{MLP}")
    refuse(model, ValueError, *words, auto_wrap_policy=policy)
    accept(model, auto_wrap_policy={MLPBlock})


def test_something_that_is_no_policy(fake_group: None) -> None:
    refuse(MLP(), TypeError, "auto_wrap_policy is 3 of type int", "pass None", auto_wrap_policy=3)


@pytest.mark.parametrize("version", ["1.13.1", "2.0.0", "2.8.1", "2.8.0a0+git1234"])
def test_old_torch_versions_are_refused(version: str) -> None:
    with pytest.raises(ImportError, match=r"2\.9 or newer.*pip install --upgrade torch"):
        check_torch_version(version)


@pytest.mark.parametrize("version", ["2.9", "2.9.0+cu128", "2.10.0", "2.15.0.dev20260101+cpu", "3.0.0"])
def test_new_torch_versions_are_accepted(version: str) -> None:
    check_torch_version(version)


WRONG_TYPES = [
    ("mp_policy", torch.bfloat16, "must be a torch.distributed.fsdp.MixedPrecisionPolicy, got torch.bfloat16"),
    ("mp_policy", MixedPrecisionPolicy(param_dtype="bf16"), "param_dtype='bf16'; pass a torch.dtype"),
    ("mp_policy", MixedPrecisionPolicy(reduce_dtype="bf16"), "reduce_dtype='bf16'; pass a torch.dtype"),
    ("mp_policy", MixedPrecisionPolicy(output_dtype="bf16"), "output_dtype='bf16'; pass a torch.dtype"),
    ("mp_policy", MixedPrecisionPolicy(cast_forward_inputs="no"), "cast_forward_inputs='no'; pass True or False"),
    ("auto_wrap_policy", {MLPBlock: False}, "of type dict"),
    ("ignored_params", 5, "must be a list or set of parameters and modules, or None, got 5"),
    ("passes", [], "must be a PassPipeline (see graph_fsdp.passes.default_pipeline), got []"),
    ("reshard_after_forward", 1.0, "1.0"),
    ("reshard_after_forward", "yes", "'yes'"),
    ("ignored_params", ["head.weight"], "holds 'head.weight', a str; give parameters and modules"),
    ("ignored_params", nn.Parameter(torch.ones(5)), "Parameter"),
    ("ignored_params", nn.Linear(2, 2), "one module (Linear)"),
]


@pytest.mark.parametrize(("option", "value", "words"), WRONG_TYPES)
def test_an_option_of_the_wrong_type(fake_group: None, option: str, value: Any, words: str) -> None:
    refuse(MLP(), TypeError, option, words, **{option: value})


@pytest.mark.parametrize("name", ["param_dtype", "output_dtype"])
def test_types_to_compute_in_that_hold_no_fractions(fake_group: None, name: str) -> None:
    for policy in (MixedPrecisionPolicy(**{name: torch.int8}), {MLPBlock: MixedPrecisionPolicy(**{name: torch.int8})}):
        refuse(MLP(), ValueError, f"mp_policy has {name}=torch.int8; pass a floating-point type", mp_policy=policy)


def test_ignored_parameters_that_are_not_some_of_the_models(fake_group: None) -> None:
    model, other, module = MLP(), nn.Parameter(torch.ones(3)), nn.Linear(2, 2)
    refuse(model, ValueError, "ignored_params", "(3,)", "no parameter of model; leave it out", ignored_params=[other])
    refuse(model, ValueError, "ignored_params", "(Linear)", "submodule of model; leave it out", ignored_params=[module])
    refuse(model, ValueError, "ignored_params holds every parameter", ignored_params=model.parameters())
    refuse(model, ValueError, "ignored_params holds every parameter", ignored_params=[model])


# What a compiled model does not have

FSDP2_METHODS = [
    n
    for n in vars(FSDPModule)
    if callable(getattr(FSDPModule, n)) and not n.startswith("_")
    if not any(hasattr(methods, n) for methods in (UnitMethods, CommunicationMethods, CollectiveMethods))
]


def test_every_method_of_fsdp2_is_there_or_says_why_not(fake_group: None) -> None:
    assert FSDP2_METHODS == []
    with pytest.raises(UnsupportedError, match=r"one_of_tomorrow\(\) of FSDP2 is not available"):
        unsupported("one_of_tomorrow")(graph_fsdp.compile(MLP(), backend="eager"))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: m.set_keep_unsharded_storage(True), ("set_keep_unsharded_storage(True)", "cuda_graphs=True")),
    ],
)
def test_methods_for_what_is_otherwise_here(fake_group: None, call: Any, words: tuple[str, ...]) -> None:
    model: Any = graph_fsdp.compile(MLP(), backend="eager")
    with pytest.raises(UnsupportedError) as raised:
        call(model)
    assert all(word in str(raised.value) for word in words)
    model.set_keep_unsharded_storage(False)
    model.set_manual_backward_finalization(False)
    with pytest.raises(ValueError, match="keep must be"):
        model.set_keep_unsharded_storage(1)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("option", ["auto_wrap_policy", "mp_policy", "shard_placement_fn", "param_init_fn", "meshes"])
def test_functions_that_cannot_be_called_are_refused(option: str) -> None:
    words = (option, "cannot be called with (", "pass a function of" if option != "auto_wrap_policy" else "module=")
    refuse(MLP(), TypeError, *words, **{option: lambda: None})


def test_an_empty_path_of_programs_is_refused() -> None:
    words = ("programs must be the path of a folder, False to keep none", "got an empty path")
    refuse(MLP(), ValueError, *words, programs="", backend="inductor")
