"""Bad input: one clear error before anything is changed, and the model is as it was.

What only a forward can know (graph breaks, parameters without memory) is an error there, after which parameters
are shards again and the model can be used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import FAKE_WORLD_SIZE, fake_process_group
from models import MLP, MLPBlock
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import graph_fsdp
from graph_fsdp import AlreadyCompiledError, AlreadyShardedError, MeshError, UnsupportedError
from graph_fsdp.validate import torch_version


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
    check_words(raised.value, words)


def check_words(error: Exception, words: tuple[str, ...]) -> None:
    missing = [word for word in words if word not in str(error)]
    assert not missing, f"{missing} not in: {error}"


def accept(model: nn.Module, mesh: DeviceMesh | None = None, **options: Any) -> None:
    """The same model compiles and trains once the input is right: the error left nothing behind."""
    graph_fsdp.compile(model, mesh, backend="eager", **options)
    model(batch()).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


# The mesh


def test_a_mesh_for_another_device_type(fake_group: None) -> None:
    model, mesh = MLP(), DeviceMesh("meta", list(range(FAKE_WORLD_SIZE)))
    refuse(model, MeshError, "mesh is of device type 'meta'", "parameters are on 'cpu'", "move the model", mesh=mesh)
    accept(model, init_device_mesh("cpu", (FAKE_WORLD_SIZE,)))


def test_a_mesh_of_two_dimensions(fake_group: None) -> None:
    model = MLP()
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    refuse(model, MeshError, "mesh has 2 dimensions of sizes (2, 4)", "mesh['replicate']", mesh=mesh)
    accept(model, mesh["replicate"])


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


def test_a_mesh_whose_process_group_was_destroyed() -> None:
    with fake_process_group():
        mesh = init_device_mesh("cpu", (FAKE_WORLD_SIZE,))
    refuse(MLP(), MeshError, "mesh", "process group", "destroyed", "torchrun --nproc-per-node", mesh=mesh)


# The model


def test_a_model_without_parameters(fake_group: None) -> None:
    refuse(nn.Sequential(nn.ReLU()), ValueError, "model: Sequential has no parameters", "nothing to shard")


def test_something_that_is_no_module(fake_group: None) -> None:
    for wrong in (MLP, torch.relu):
        with pytest.raises(TypeError, match=r"model must be an nn\.Module, got"):
            graph_fsdp.compile(wrong)  # type: ignore[type-var]


def test_a_second_compile_of_a_model(fake_group: None) -> None:
    model = graph_fsdp.compile(MLP(), backend="eager")
    refuse(model, AlreadyCompiledError, "model was compiled by graph_fsdp before", "compile a model once")


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
    model = DistributedDataParallel(MLP())
    refuse(model, AlreadyShardedError, "model is wrapped in DistributedDataParallel", "pass model.module", runs=False)
    accept(model.module)


def test_a_model_that_went_through_torch_compile(fake_group: None) -> None:
    model = torch.compile(MLP(), backend="eager")
    refuse(model, UnsupportedError, "model is a OptimizedModule", "the module that it was made of")


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_scripted_model(fake_group: None) -> None:
    with pytest.raises(UnsupportedError, match="ScriptModule; pass the module that it was made of"):
        graph_fsdp.compile(torch.jit.script(nn.Linear(2, 2)))


def test_a_model_on_the_meta_device(fake_group: None) -> None:
    with torch.device("meta"):
        model = MLP()
    refuse(model, UnsupportedError, "parameter 'blocks.0.up.weight'", "meta device", "to_empty", runs=False)


def test_a_lazy_module_that_never_ran(fake_group: None) -> None:
    model = nn.Sequential(nn.LazyLinear(5))
    refuse(model, ValueError, "parameter '0.weight' has no shape yet", "run the model once", runs=False)
    model(batch())
    accept(model)


def test_gradients_that_sharding_would_lose(fake_group: None) -> None:
    model = MLP()
    model(batch()).sum().backward()
    refuse(model, ValueError, "parameter 'blocks.0.up.weight' has a gradient", "model.zero_grad()")
    assert model.head.weight.grad is not None
    model.zero_grad()
    accept(model)


# The options


@pytest.mark.parametrize("backend", ["tpu", None, ["eager"]])
def test_an_unknown_backend(fake_group: None, backend: Any) -> None:
    refuse(MLP(), ValueError, f"backend {backend!r} does not exist", "'eager'", "'inductor'", backend=backend)


def test_a_policy_that_selects_nothing(fake_group: None) -> None:
    model = MLP()
    policy = {nn.Conv2d}
    refuse(model, ValueError, "auto_wrap_policy", "Conv2d", "selects none", "MLPBlock (2)", auto_wrap_policy=policy)
    accept(model, auto_wrap_policy={MLPBlock})


def test_something_that_is_no_policy(fake_group: None) -> None:
    refuse(MLP(), TypeError, "auto_wrap_policy is 3 of type int", "pass None", auto_wrap_policy=3)


def test_torch_before_2_9(fake_group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(torch, "__version__", "2.8.1+cpu")
        refuse(MLP(), UnsupportedError, "needs torch 2.9 or newer", "2.8.1", "pip install --upgrade torch")
    accept(MLP())


@pytest.mark.parametrize("version", ["1.13.1", "2.0.0", "2.8.1", "2.8.0a0+git1234"])
def test_old_torch_versions_are_refused(version: str) -> None:
    with pytest.raises(UnsupportedError, match=r"2\.9 or newer"):
        torch_version(version)


@pytest.mark.parametrize("version", ["2.9", "2.9.0+cu128", "2.10.0", "2.15.0.dev20260101+cpu", "3.0.0"])
def test_new_torch_versions_are_accepted(version: str) -> None:
    torch_version(version)


NOT_AVAILABLE_YET: dict[str, Any] = {
    "offload_policy": CPUOffloadPolicy(),
    "activation_checkpointing": "full",
    "param_init_fn": nn.Module.to_empty,
    "reshard_after_forward": 4,
}


@pytest.mark.parametrize("option", NOT_AVAILABLE_YET)
def test_an_option_that_is_not_available_yet(fake_group: None, option: str) -> None:
    model = MLP()
    refuse(model, UnsupportedError, option, "not available yet", **{option: NOT_AVAILABLE_YET[option]})
    accept(model)


WRONG_TYPES = [
    ("mp_policy", torch.bfloat16, "must be a torch.distributed.fsdp.MixedPrecisionPolicy, got torch.bfloat16"),
    ("passes", [], "must be a PassPipeline (see graph_fsdp.passes.default_pipeline), got []"),
    ("reshard_after_forward", 1.0, "1.0"),
    ("reshard_after_forward", "yes", "'yes'"),
    ("ignored_params", ["head.weight"], "holds 'head.weight'"),
    ("ignored_params", nn.Parameter(torch.ones(5)), "Parameter"),
]


@pytest.mark.parametrize(("option", "value", "words"), WRONG_TYPES)
def test_an_option_of_the_wrong_type(fake_group: None, option: str, value: Any, words: str) -> None:
    refuse(MLP(), TypeError, option, words, **{option: value})


def test_ignored_parameters_that_are_not_some_of_the_models(fake_group: None) -> None:
    model, other = MLP(), nn.Parameter(torch.ones(3))
    refuse(model, ValueError, "ignored_params", "shape (3,)", "no parameter of model", ignored_params=[other])
    refuse(model, ValueError, "ignored_params holds every parameter", ignored_params=model.parameters())


# What only a forward can know


class Faulty(MLP):
    """While ``fault`` is set, the forward does what the fault's name says, at the first line below that does."""

    fault: str | None = None

    @torch.compiler.disable
    def norm(self) -> Tensor:
        return self.blocks[0].up.weight.norm()

    def forward(self, x: Tensor) -> Tensor:
        if self.fault == "break":
            torch._dynamo.graph_break()
        if self.fault == "branch on data" and x.sum() > 0:
            x = 2 * x
        if self.fault == "touch":
            x = x / self.norm()
        return super().forward(x)


def line_of(text: str) -> str:
    """Where in this file a text stands, as an error message has it."""
    with open(__file__) as file:
        return f"{__file__}:{next(number for number, line in enumerate(file, 1) if text in line)}"


def fail_forward(model: Faulty, fault: str | None, error: type[Exception], *words: str) -> None:
    """A forward raises; the model has its shards afterwards, and trains as soon as the fault is gone."""
    shards = list(model.parameters())
    model.fault = fault
    with pytest.raises(error) as raised:
        model(batch())
    check_words(raised.value, words)
    assert all(after is shard for after, shard in zip(model.parameters(), shards, strict=True))
    assert all(isinstance(shard, DTensor) for shard in shards), "a placeholder is left"
    with torch.compiler.set_stance("default"):
        model.fault = None
        model(batch()).sum().backward()
    assert all(shard.grad is not None for shard in shards)


BREAKS = {
    "break": ("            torch._dynamo.graph_break()", "torch._dynamo.graph_break()"),
    "branch on data": ('if self.fault == "branch on data"', "Data-dependent"),
    "touch": ("x = x / self.norm()", "torch.compiler.disable"),
}


@pytest.mark.parametrize("fault", BREAKS)
def test_a_graph_break_under_fullgraph(fake_group: None, fault: str) -> None:
    line, reason = BREAKS[fault]
    words = ("cannot be traced in one graph", line_of(line), "in forward", reason, "fullgraph=False")
    fail_forward(graph_fsdp.compile(Faulty(), backend="eager"), fault, graph_fsdp.GraphBreakError, *words)


def test_code_that_is_not_compiled_touches_a_parameter(fake_group: None) -> None:
    model = graph_fsdp.compile(Faulty(), backend="eager", fullgraph=False)
    where = line_of("return self.blocks[0].up.weight.norm()")
    words = ("parameter 'blocks.0.up.weight'", "module 'blocks.0.up'", "'norm'", where, "in norm", "Remove the break")
    fail_forward(model, "touch", graph_fsdp.EmptyPlaceholderError, *words)


@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_reference_from_before_compile(fake_group: None, fullgraph: bool) -> None:
    model = MLP()
    weight = model.head.weight
    graph_fsdp.compile(model, backend="eager", fullgraph=fullgraph)
    for _ in range(2):
        assert type(weight) is not nn.Parameter, "an operator on it would read address zero"
        for read in (torch.sum, repr, torch.Tensor.tolist):
            with pytest.raises(graph_fsdp.EmptyPlaceholderError, match=r"'head.weight' .* before graph_fsdp\.compile"):
                read(weight)
        model(batch()).sum().backward()


@pytest.mark.parametrize(
    "touch",
    [
        lambda weight: nn.functional.linear(batch(), weight),
        lambda weight: weight.detach(),
        lambda weight: weight.data,
        lambda weight: weight.tolist(),
        lambda weight: weight.numpy(),
        lambda weight: weight.data_ptr(),
        lambda weight: weight[0],
        lambda weight: weight.copy_(weight),
        lambda weight: torch.stack([weight]),
        lambda weight: repr(weight),
    ],
    ids=["linear", "detach", "data", "tolist", "numpy", "data_ptr", "index", "copy_", "list", "repr"],
)
def test_every_way_to_read_or_write_a_placeholder_is_an_error(fake_group: None, touch: Any) -> None:
    model = Faulty()
    model.norm = torch.compiler.disable(lambda: touch(model.head.weight))  # type: ignore[method-assign]
    graph_fsdp.compile(model, backend="eager", fullgraph=False)
    fail_forward(model, "touch", graph_fsdp.EmptyPlaceholderError, "parameter 'head.weight'", "module 'head'")


def test_code_that_is_not_compiled_may_ask_for_shapes(fake_group: None) -> None:
    model = Faulty()
    asked: list[Any] = []

    @torch.compiler.disable
    def norm() -> float:
        weight = model.head.weight
        asked.append((weight.shape, weight.dtype, weight.device.type, weight.requires_grad, len(weight)))
        return 1.0

    model.norm = norm  # type: ignore[method-assign]
    graph_fsdp.compile(model, backend="eager", fullgraph=False)
    model.fault = "touch"
    model(batch())
    assert asked == [((5, 16), torch.float32, "cpu", True, 5)]


@pytest.mark.parametrize("stance", ["force_eager", "eager_on_recompile"])
def test_torch_compile_turned_off(fake_group: None, stance: str) -> None:
    model = graph_fsdp.compile(Faulty(), backend="eager")
    words = ("torch.compile is off", "set_stance('force_eager')", "turn it on")
    with torch.compiler.set_stance(stance):
        fail_forward(model, None, graph_fsdp.EmptyPlaceholderError, *words)


# What a compiled model does not have

FSDP2_METHODS = [n for n, method in vars(FSDPModule).items() if callable(method) and not n.startswith("_")]


@pytest.mark.parametrize("method", FSDP2_METHODS)
def test_methods_of_fsdp2_that_are_not_available_say_so(fake_group: None, method: str) -> None:
    model = graph_fsdp.compile(MLP(), backend="eager")
    assert isinstance(model, FSDPModule)
    with pytest.raises(UnsupportedError, match=rf"{method}\(\) of FSDP2 is not available"):
        getattr(model, method)()
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
