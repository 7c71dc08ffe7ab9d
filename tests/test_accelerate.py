"""Hugging Face Accelerate: what the plugin's settings and the launcher's environment become."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from accelerate_states import check_states_that_are_there
from launch import run_ranks
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffloadPolicy,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import graph_fsdp
from graph_fsdp.compat import fake_process_group
from graph_fsdp.integrations.accelerate import Accelerator
from graph_fsdp.integrations.fsdp_config import (
    as_fsdp2,
    check_plugin,
    compile_arguments,
    prepared_dtypes,
    set_state_dict_configs,
)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin leaves some of its settings in the environment, for transformers."""
    monkeypatch.setattr(os, "environ", os.environ.copy())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


class Model(nn.Sequential):
    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__(Block(), Block(), nn.Linear(4, 2))


def arguments(model: nn.Module | None = None, **settings: Any) -> dict[str, Any]:
    plugin = FullyShardedDataParallelPlugin(**settings)
    check_plugin(plugin)
    return compile_arguments(plugin, model if model is not None else Model(), "cpu", None)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"sharding_strategy": "FULL_SHARD"}, True),
        ({"sharding_strategy": "SHARD_GRAD_OP"}, False),
        ({"sharding_strategy": "NO_SHARD"}, None),
        ({"sharding_strategy": "HYBRID_SHARD"}, True),
        ({"sharding_strategy": "HYBRID_SHARD_ZERO2"}, False),
        ({"fsdp_version": 2, "reshard_after_forward": True}, True),
        ({"fsdp_version": 2, "reshard_after_forward": False}, False),
    ],
)
def test_strategies(settings: dict[str, Any], expected: bool | None) -> None:
    assert arguments(**settings)["reshard_after_forward"] is expected


@pytest.mark.parametrize(
    ("strategy", "shape", "names"),
    [
        ("FULL_SHARD", (8,), None),
        ("NO_SHARD", (8,), ("replicate",)),
        ("HYBRID_SHARD", (2, 4), ("replicate", "shard")),
        ("HYBRID_SHARD_ZERO2", (2, 4), ("replicate", "shard")),
    ],
)
def test_meshes(
    strategy: str,
    shape: tuple[int, ...],
    names: tuple[str, ...] | None,
    fake_group: dist.ProcessGroup,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")  # of this node; another may have 5
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    mesh = arguments(sharding_strategy=strategy)["mesh"]
    assert tuple(mesh.shape) == shape and mesh.mesh_dim_names == names


@pytest.mark.parametrize("version", [1, 2])
def test_parameters_compute_with_those_of_fully_shard(version: int, fake_group: dist.ProcessGroup) -> None:
    model, reference = Model(), Model()
    graph_fsdp.compile(model, **arguments(model, fsdp_version=version), backend="eager")
    fully_shard(reference)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        q.data.mul_(0.5).add_(p.data, alpha=0.5)  # as TRL moves a reference to what is trained


@pytest.mark.parametrize("version", [1, 2])
def test_a_reference_model_that_fully_shard_takes_computes_as_the_model(
    version: int, fake_group: dist.ProcessGroup
) -> None:
    given = {"fsdp_version": version, "mixed_precision_policy": "bf16", "activation_checkpointing": True}
    plugin = as_fsdp2(FullyShardedDataParallelPlugin(**given))
    # TRL reads these of a trainer's accelerator, whose FSDP is graph_fsdp.
    options = {"reshard_after_forward": plugin.reshard_after_forward, "offload_policy": plugin.cpu_offload}
    options["mp_policy"] = plugin.mixed_precision_policy or MixedPrecisionPolicy()

    def dtypes(model: nn.Module) -> tuple[torch.dtype, torch.dtype]:
        seen = {}
        model[0].register_forward_hook(lambda module, inputs, output: seen.update(inner=output.dtype))
        return model(torch.ones(2, 4)).dtype, seen["inner"]

    reference, model = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))
    found = dtypes(graph_fsdp.compile(model, **arguments(model, **given), backend="eager"))
    assert found == dtypes(fully_shard(reference, **options)) and found[1] is torch.bfloat16
    assert (plugin.fsdp_version, plugin.activation_checkpointing, plugin.auto_wrap_policy) == (2, False, None)


def test_wrap_policies() -> None:
    assert arguments(auto_wrap_policy="transformer_based_wrap")["auto_wrap_policy"] == {Block}, "_no_split_modules"
    by_name = arguments(auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Linear"])
    assert by_name["auto_wrap_policy"] == {nn.Linear}
    assert arguments(auto_wrap_policy="no_wrap")["auto_wrap_policy"] == {Model}, "one unit"
    by_size = arguments(auto_wrap_policy="size_based_wrap", min_num_params=20)["auto_wrap_policy"]
    assert by_size.keywords == {"min_num_params": 20}
    with pytest.raises(ValueError, match="fsdp_transformer_layer_cls_to_wrap: the model has no Layer; it has"):
        arguments(auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Layer"])


def test_precision_offloading_and_checkpointing() -> None:
    assert arguments()["mp_policy"] == MixedPrecisionPolicy()
    policy_of = arguments(model := Model(), mixed_precision_policy="bf16")["mp_policy"]
    assert policy_of(model) == MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.float32, True)
    assert policy_of(model[0]) is None, "FSDP1 casts what the model returns alone"
    of_fsdp1 = arguments(model := Model(), mixed_precision_policy=MixedPrecision(torch.bfloat16))["mp_policy"]
    assert of_fsdp1(model).reduce_dtype is torch.bfloat16, "FSDP1 reduces in param_dtype if not told otherwise"
    own = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    assert arguments(fsdp_version=2, mixed_precision_policy=own)["mp_policy"] is own
    assert type(arguments()["offload_policy"]) is OffloadPolicy
    assert isinstance(arguments(cpu_offload=True)["offload_policy"], CPUOffloadPolicy)
    assert isinstance(arguments(fsdp_version=2, cpu_offload=True)["offload_policy"], CPUOffloadPolicy)
    assert arguments()["activation_checkpointing"] is None
    assert arguments(activation_checkpointing=True)["activation_checkpointing"].recompute == "unit"
    offloaded = arguments(fsdp_version=2, activation_checkpointing=True, activation_checkpointing_offload=True)
    assert offloaded["activation_checkpointing"] == graph_fsdp.ActivationCheckpointing("unit", offload=True)


def test_prefetches() -> None:
    assert arguments(fsdp_version=2)["passes"] is None, "FSDP2 has none to set"
    printed = {
        (backward, forward): tuple(
            repr(a_pass) for a_pass in arguments(backward_prefetch=backward, forward_prefetch=forward)["passes"]
        )
        for backward in (None, BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST)
        for forward in (False, True)
    }
    assert len(set(printed.values())) == 6, printed


def test_original_parameters_are_there_with_either_setting() -> None:
    given = [arguments(use_orig_params=value) for value in (False, True)]
    assert given[0].keys() == given[1].keys()
    for name in given[0].keys() - {"passes", "auto_wrap_policy"}:
        assert given[0][name] == given[1][name], name
    model = Model()
    model[0].linear.bias.requires_grad_(False)  # frozen beside trainable in one unit
    given[0].pop("mesh")
    graph_fsdp.compile(model, None, backend="eager", **given[0])
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in Model().named_parameters()]
    model(torch.ones(2, 4)).sum().backward()
    assert model[0].linear.weight.grad is not None and model[0].linear.bias.grad is None


def test_ignored_modules() -> None:
    model = Model()
    assert arguments(model, ignored_modules=[model[2]])["ignored_params"] == [model[2]]
    assert arguments(model, ignored_modules=r"\d\.linear")["ignored_params"] == [model[0].linear, model[1].linear]
    with pytest.raises(ValueError, match="fsdp_ignored_modules: 'head' matches no module"):
        arguments(ignored_modules="head")


def test_values_of_one_rank(fake_group: dist.ProcessGroup) -> None:
    assert not arguments()["sync_module_states"]
    assert arguments(fsdp_version=2, cpu_ram_efficient_loading=True)["sync_module_states"]


def test_one_process_has_all_values() -> None:
    assert not arguments(fsdp_version=2, cpu_ram_efficient_loading=True)["sync_module_states"]


def test_trainable_parameters_become_float32_and_buffers_of_fsdp1_the_buffer_dtype() -> None:
    model = Model().to(torch.float16)
    model[2].requires_grad_(False)
    plugin = FullyShardedDataParallelPlugin(mixed_precision_policy="bf16")
    with pytest.raises(ZeroDivisionError), prepared_dtypes(plugin, model):
        assert model[0].linear.weight.dtype == torch.float32
        assert model[2].weight.dtype == torch.float16, "frozen"
        assert model[0].scale.dtype == torch.bfloat16
        raise ZeroDivisionError
    assert {t.dtype for t in model.state_dict().values()} == {torch.float16}


class Normalised(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def trained(model: nn.Module) -> list[torch.Tensor]:
    """Loss, gradients and statistics after a backward."""
    (loss := model(torch.arange(16.0).view(4, 4)).float().square().sum()).backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]


def test_batch_norm_is_float32_where_fsdp1_wraps_modules() -> None:
    settings: dict[str, Any] = {"mixed_precision_policy": "bf16", "transformer_cls_names_to_wrap": ["Linear"]}
    plugin = FullyShardedDataParallelPlugin(auto_wrap_policy="transformer_based_wrap", **settings)
    model = Normalised()
    given = {**compile_arguments(plugin, model, "cpu", None), "backend": "eager"}
    with prepared_dtypes(plugin, model):
        graph_fsdp.compile(model, **given)
    found = trained(model)
    with fake_process_group(1):
        policy = MixedPrecision(*[torch.bfloat16] * 3)
        wrapped = {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear}), "device_id": torch.device("cpu")}
        theirs = FullyShardedDataParallel(Normalised(), mixed_precision=policy, use_orig_params=True, **wrapped)
        torch.testing.assert_close(found, trained(theirs), rtol=0, atol=0)
    assert len(found) == 10 and found[-3].dtype is torch.float32, "loss, six parameters, three buffers"
    unwrapped = FullyShardedDataParallelPlugin(auto_wrap_policy="no_wrap", mixed_precision_policy="bf16")
    with prepared_dtypes(unwrapped, whole := Normalised()):
        assert whole[1].running_mean.dtype is torch.bfloat16, "as FSDP1 has it, which wraps no module"
    with pytest.raises(graph_fsdp.UnsupportedError, match="keep_low_precision_grads"):
        check_plugin(
            FullyShardedDataParallelPlugin(mixed_precision_policy=MixedPrecision(keep_low_precision_grads=True))
        )


def state_dicts_of_a_rank(folder: str, given: list[tuple[bool, bool]]) -> dict[str, Any]:
    """On a rank: which parameters ``get_state_dict`` has there, and weights before and after a checkpoint."""
    os.environ["ACCELERATE_USE_CPU"] = "true"  # not by the launch: the rank would be a new process
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    found: dict[str, Any] = {}
    for on_cpu, first_only in given:
        config = FullStateDictConfig(on_cpu, first_only)
        AcceleratorState._reset_state(reset_partial_state=False)
        plugin = FullyShardedDataParallelPlugin(
            state_dict_type="FULL_STATE_DICT",
            state_dict_config=config,
            optim_state_dict_config=FullOptimStateDictConfig(on_cpu, first_only),
        )
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, compile_options={"backend": "eager"})
        torch.manual_seed(0)
        model, of_a_loss = Model(), nn.Parameter(torch.ones(3))
        with pytest.raises(ValueError, match=r"1 parameters that are not the model's, .* has shape \(3,\)\)"):
            accelerator.prepare(model, torch.optim.SGD([*model.parameters(), of_a_loss]))
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        for _ in range(2):
            accelerator.backward(model(torch.ones(2, 4)).sum())
            optimizer.step()
            optimizer.zero_grad()
        state = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
        found[on_cpu, first_only] = {name: type(value) is torch.Tensor for name, value in state.items()}
        assert all(value.shape == Model().state_dict()[name].shape for name, value in state.items())
        accelerator.save_state(f"{folder}/{on_cpu}{first_only}")
        accelerator.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        changed = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
        accelerator.load_state(f"{folder}/{on_cpu}{first_only}")
        loaded = accelerator.get_state_dict(model)
        assert all(torch.equal(loaded[name], value) for name, value in state.items())
        assert not changed or any(not torch.equal(changed[name], value) for name, value in state.items())
        assert (config.offload_to_cpu, config.rank0_only) == (on_cpu, first_only), "the script's own stays"
    # Accelerate finds parameters by their addresses; the second rank has no row of these, and shards without have none.
    model = nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    assert list(map(id, stepped)) == list(map(id, model.parameters()))
    check_states_that_are_there(accelerator, Model)
    return found


@pytest.mark.parametrize(
    "given",
    [[(True, True)], pytest.param([(False, True), (True, False)], marks=pytest.mark.long)],
    ids=["on the CPU, of the first rank", "others"],
)
def test_state_dict_configs_say_where_whole_tensors_are(tmp_path: Path, given: list[tuple[bool, bool]]) -> None:
    first, second = run_ranks(state_dicts_of_a_rank, 2, str(tmp_path), given)
    everything = dict.fromkeys(Model().state_dict(), True)
    for on_cpu, first_only in given:
        assert first[on_cpu, first_only] == everything
        assert second[on_cpu, first_only] == ({} if first_only else everything)


def test_one_process_that_a_launcher_started(tmp_path: Path) -> None:
    (found,) = run_ranks(state_dicts_of_a_rank, 1, str(tmp_path), [(True, True)])
    assert found == {(True, True): dict.fromkeys(Model().state_dict(), True)}


def test_a_state_dict_type_that_is_set_later_has_configs_of_its_kind() -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_config=ShardedStateDictConfig(False))
    with pytest.raises(graph_fsdp.UnsupportedError, match="optim_state_dict_config: offload_to_cpu, rank0_only are"):
        check_plugin(plugin)
    plugin.optim_state_dict_config = ShardedOptimStateDictConfig(offload_to_cpu=False)
    check_plugin(plugin)
    plugin.set_state_dict_type("FULL_STATE_DICT")
    set_state_dict_configs(plugin)
    assert plugin.state_dict_config == FullStateDictConfig(offload_to_cpu=False, rank0_only=True)
    assert plugin.optim_state_dict_config == FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=True)
    plugin.set_state_dict_type("SHARDED_STATE_DICT")
    set_state_dict_configs(plugin)
    assert plugin.state_dict_config == ShardedStateDictConfig(offload_to_cpu=False)
    assert plugin.optim_state_dict_config == ShardedOptimStateDictConfig(offload_to_cpu=False)


PREFETCH_PRE = {"backward_prefetch": BackwardPrefetch.BACKWARD_PRE}
# Keys of an fsdp_config by what ``accelerate launch`` puts into the environment, and the test or assertion of each.
KEYS = {
    "FSDP_VERSION": ("2", lambda a: a["passes"] is None),
    "FSDP_SHARDING_STRATEGY": ("SHARD_GRAD_OP", lambda a: a["reshard_after_forward"] is False),
    "FSDP_RESHARD_AFTER_FORWARD": ("SHARD_GRAD_OP", lambda a: a["reshard_after_forward"] is True),  # the strategy's
    "FSDP_OFFLOAD_PARAMS": ("true", lambda a: isinstance(a["offload_policy"], CPUOffloadPolicy)),
    "FSDP_AUTO_WRAP_POLICY": ("TRANSFORMER_BASED_WRAP", lambda a: a["auto_wrap_policy"] == {Block}),
    "FSDP_BACKWARD_PREFETCH": ("BACKWARD_POST", lambda a: settings_of(a) != settings_of(arguments(**PREFETCH_PRE))),
    "FSDP_FORWARD_PREFETCH": ("true", lambda a: settings_of(a) != settings_of(arguments(forward_prefetch=False))),
    "FSDP_ACTIVATION_CHECKPOINTING": ("true", lambda a: a["activation_checkpointing"] is not None),
    "FSDP_IGNORED_MODULES": ("2", lambda a: len(a["ignored_params"]) == 1),
}


def settings_of(found: dict[str, Any]) -> list[Any]:
    return [repr(a_pass) for a_pass in found["passes"]]


@pytest.mark.parametrize("key", KEYS)
def test_what_a_launcher_leaves_in_the_environment_is_honoured(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value, honoured = KEYS[key]
    monkeypatch.setenv(key, value)
    assert honoured(arguments())


def test_the_environments_names_of_layers_and_sizes_are_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_AUTO_WRAP_POLICY", "TRANSFORMER_BASED_WRAP")
    monkeypatch.setenv("FSDP_TRANSFORMER_CLS_TO_WRAP", "Linear,Block")
    assert arguments()["auto_wrap_policy"] == {nn.Linear, Block}
    monkeypatch.setenv("FSDP_AUTO_WRAP_POLICY", "SIZE_BASED_WRAP")
    monkeypatch.setenv("FSDP_MIN_NUM_PARAMS", "20")
    assert arguments()["auto_wrap_policy"].keywords == {"min_num_params": 20}
    monkeypatch.setenv("FSDP_STATE_DICT_TYPE", "LOCAL_STATE_DICT")
    with pytest.raises(graph_fsdp.UnsupportedError, match="fsdp_state_dict_type: LOCAL_STATE_DICT"):
        arguments()


def test_every_setting_of_the_plugin_is_known() -> None:
    """A release of Accelerate with another setting: honour it or refuse it, then list it here."""
    page = (Path(__file__).parents[1] / "docs" / "accelerate.md").read_text()
    elsewhere = {"param_init_fn", "transformer_cls_names_to_wrap", "min_num_params", "cpu_offload"}
    for field in dataclasses.fields(FullyShardedDataParallelPlugin):
        assert field.name in page or field.name in elsewhere, field.name


def test_what_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(graph_fsdp.UnsupportedError, match="fsdp_state_dict_type: LOCAL_STATE_DICT"):
        arguments(state_dict_type="LOCAL_STATE_DICT")
    with pytest.raises(graph_fsdp.UnsupportedError, match="limit_all_gathers=False"):
        arguments(limit_all_gathers=False)
