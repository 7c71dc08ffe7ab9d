"""A script with our ``Accelerator`` under ``accelerate launch`` beside the same script with Accelerate's own FSDP2; and
states of optimizers that ``prepare`` refuses."""

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.utils import FullyShardedDataParallelPlugin, merge_fsdp_weights
from accelerate_script import make_model
from running import run_script
from safetensors.torch import load_file
from torch import nn

from graph_fsdp.integrations.accelerate import Accelerator

SCRIPT = Path(__file__).with_name("accelerate_script.py")
FSDP2 = {
    "fsdp_version": 2,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
    "fsdp_reshard_after_forward": True,
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
}
FSDP1 = {
    "fsdp_version": 1,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_backward_prefetch": "BACKWARD_PRE",
    "fsdp_forward_prefetch": True,
    "fsdp_sharding_strategy": "SHARD_GRAD_OP",
    "fsdp_state_dict_type": "FULL_STATE_DICT",
    "fsdp_use_orig_params": True,
    "fsdp_activation_checkpointing": True,
    "fsdp_sync_module_states": False,  # on the CPU Accelerate has no device for it
    "fsdp_cpu_ram_efficient_loading": False,
}


def launch(folder: Path, config: dict[str, Any], *trainings: list[str], precision: str = "no") -> list[dict[str, Any]]:
    """``accelerate launch`` of the script on two processes; what each of its trainings writes about itself. Their
    arguments begin with the name of their folder, in ``folder``."""
    settings = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "fsdp_config": config,
        "mixed_precision": precision,
        "num_machines": 1,
        "num_processes": 2,
        "machine_rank": 0,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": True,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    launcher = ["accelerate.commands.launch", "--config_file", str(folder / "config.yaml")]
    # Accelerate lets torchrun find a port of its own where the one that it is given is taken.
    with socket.create_server(("127.0.0.1", 0)) as taken:
        launcher += ["--main_process_port", str(taken.getsockname()[1])]
        return run_script(launcher, SCRIPT, folder, *trainings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("accelerate")


@pytest.fixture(scope="module")
def trained(folder: Path) -> dict[str, dict[str, Any]]:
    """With Accelerate's own FSDP2, with ours, and resumed with ours."""
    trainings = [["theirs", "--own", "--epochs", "2"], ["ours"], ["resumed", "--resume", str(folder / "theirs/state")]]
    return dict(zip(("theirs", "ours", "resumed"), launch(folder, FSDP2, *trainings), strict=True))


@pytest.mark.long
def test_losses_and_norms_are_those_of_accelerates_fsdp2(trained: dict[str, dict[str, Any]]) -> None:
    theirs, ours = trained["theirs"], trained["ours"]
    assert ours["losses"] == theirs["losses"][: len(ours["losses"])], "bit for bit"
    assert ours["norms"] == theirs["norms"][: len(ours["norms"])]
    assert len(ours["norms"]) * 2 == len(ours["losses"]), "gradients are accumulated over two batches"
    assert ours["sharded"] == theirs["sharded"] == 0.5
    assert "model.layers.1" in ours["report"], "the layers are the units"


@pytest.mark.long
def test_a_state_that_accelerates_fsdp2_saved_is_resumed(trained: dict[str, dict[str, Any]]) -> None:
    theirs, resumed = trained["theirs"], trained["resumed"]
    assert resumed["losses"] == theirs["losses"][len(resumed["losses"]) :]
    assert resumed["norms"] == theirs["norms"][len(resumed["norms"]) :]


@pytest.mark.long
def test_what_was_saved_loads_without_any_sharding(folder: Path, trained: dict[str, dict[str, Any]]) -> None:
    merge_fsdp_weights(str(folder / "ours" / "state" / "pytorch_model_fsdp_0"), str(folder / "merged"))
    merged = load_file(folder / "merged" / "model.safetensors")
    pretrained = load_file(folder / "ours" / "pretrained" / "model.safetensors")
    assert merged.keys() == pretrained.keys() == make_model().state_dict().keys()
    for name, value in merged.items():
        assert torch.equal(value, pretrained[name]), name
    loaded = type(make_model()).from_pretrained(folder / "ours" / "pretrained")
    assert torch.equal(loaded.state_dict()["lm_head.weight"], merged["lm_head.weight"])


@pytest.mark.long
def test_a_configuration_of_fsdp1_trains(folder: Path, trained: dict[str, dict[str, Any]]) -> None:
    [found] = launch(folder, FSDP1, ["version1"], precision="bf16")
    difference = max(abs(a - b) for a, b in zip(found["losses"], trained["ours"]["losses"], strict=True))
    assert 0 < difference < 0.02, "computed in bfloat16, from float32 parameters"
    assert "root            gather       1   4,096" in found["report"], "gathered in bfloat16"
    assert "root            kept         1   4,096" in found["report"], "SHARD_GRAD_OP"
    assert (folder / "version1" / "state" / "pytorch_model_fsdp.bin").exists(), "FULL_STATE_DICT: one file"


# Each setting


class OtherTensor(torch.Tensor):
    """Stands for a DTensor, or for numbers that are coded together."""


STATES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "of another shape": (torch.ones(2), {}, "no plain tensor"),
    "in a list": ([torch.ones(1, 4)], {}, "no plain tensor"),
    "of another class": (torch.ones(1, 4).as_subclass(OtherTensor), {}, "no plain tensor"),
    "of other values": (torch.ones(1, 4), {"sync_module_states": True}, "the first process alone"),
}


@pytest.mark.parametrize(("value", "options", "why"), STATES.values(), ids=STATES)
def test_a_state_that_cannot_be_sharded_is_refused(value: Any, options: dict[str, Any], why: str) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model.weight].update(step=1, scales=value)
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(), compile_options=options)
    with pytest.raises(ValueError, match=rf"prepare: SGD has a state 'scales' of parameter 'weight' .*: .*{why}"):
        accelerator.prepare(model, optimizer)
    assert type(model) is nn.Linear and optimizer.param_groups[0]["params"] == [model.weight, model.bias]
