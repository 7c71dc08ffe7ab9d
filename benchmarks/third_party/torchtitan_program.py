"""torchtitan's Trainer on a rank of torchrun, on the CPU: its own parallelize functions, or graph_fsdp's.

Its debug models train on this file's bytes. Not as torchtitan configures them: attention without masks of documents
(its ``ScaledDotProductAttention``, as its masked ones are for CUDA), a tokenizer and a text of this file, as its wheel
has none, and a device without memory statistics.
"""

from __future__ import annotations

import argparse
import itertools
import json
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torchtitan.tools import utils

_STATISTICS = {
    "get_device_name": lambda device: "cpu",
    "get_device_properties": lambda device: types.SimpleNamespace(total_memory=1),
    "memory_stats": lambda device: {},
    "reset_peak_memory_stats": lambda: None,
    "empty_cache": lambda: None,
    "current_device": lambda: 0,
}


def on_cpu() -> None:
    """Have torchtitan, which asks torch for an accelerator when it is imported, find the CPU."""
    utils.device_type = "cpu"
    utils.device_module = types.SimpleNamespace(**{**vars(torch.cpu), **_STATISTICS})
    utils.get_local_device = lambda: torch.device("cpu")
    if not hasattr(torch.distributed, "set_timeout"):  # before torch 2.14: timeouts stay as they were
        torch.distributed.set_timeout = lambda timeout, group: None


on_cpu()

from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC  # noqa: E402
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention  # noqa: E402
from torchtitan.models.deepseek_v3 import config_registry as deepseek_v3  # noqa: E402
from torchtitan.models.llama3 import config_registry as llama3  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

PIPELINE = "llama3-pipeline"  # two stages on each of two ranks, interleaved, as torchtitan does by default
MODELS = {
    "llama3": llama3.llama3_debugmodel,
    "deepseek_v3": deepseek_v3.deepseek_v3_debugmodel,
    PIPELINE: llama3.llama3_debugmodel,
}
CHECKPOINTING = {"none": None, "full": FullAC.Config(), "selective": SelectiveAC.Config()}
LENGTH, BATCH, STEPS = 64, 2, 4


class Tokenizer(BaseTokenizer):
    """Of bytes."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Any, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    def get_vocab_size(self) -> int:
        return 256


class Bytes(BaseDataLoader):
    """Draws windows of this file, other ones on each data-parallel rank."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(
        self, config: Any, *, dp_rank: int, tokenizer: Any, seq_len: int, local_batch_size: int, **rest: Any
    ) -> None:
        self.text = torch.tensor(tokenizer.encode(Path(__file__).read_text()))
        self.length, self.batch = seq_len, local_batch_size
        self.draws = torch.Generator().manual_seed(dp_rank)

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            starts = torch.randint(len(self.text) - self.length, (self.batch, 1), generator=self.draws)
            rows = self.text[starts + torch.arange(self.length + 1)]
            yield {"input": rows[:, :-1], "positions": torch.arange(self.length).expand(self.batch, -1)}, rows[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def configuration(model: str, way: str, out: Path, checkpointing: str) -> Any:
    config = MODELS[model]()
    spec = config.model_spec
    for _, _, parent, name in list(spec.model.traverse(FlexAttention.Config)):
        setattr(parent, name, ScaledDotProductAttention.Config())
    if way == "graph_fsdp":
        from graph_fsdp.integrations.torchtitan import parallelize, pipelined

        config.model_spec = replace(spec, parallelize_fn=parallelize, pipelining_fn=pipelined(spec.pipelining_fn))
        config.compile.enable, config.compile.backend = True, "eager"
        config.compile.components = ["model"]
    config.tokenizer, config.dataloader = Tokenizer.Config(), Bytes.Config()
    config.activation_checkpoint = CHECKPOINTING[checkpointing]
    config.training.local_batch_size, config.training.seq_len, config.training.steps = BATCH, LENGTH, STEPS
    config.training.disable_cuda_graphs = True
    config.parallelism.spmd_backend = "partial_dtensor"
    config.checkpoint.enable = config.validator.enable = False
    config.dump_folder, config.debug.seed = str(out), 0
    config.debug.enable_structured_logging = False
    if model == "deepseek_v3":
        config.parallelism.expert_parallel_degree = 2
    if model == PIPELINE:
        config.parallelism.pipeline_parallel_degree = 2
        config.training.mixed_precision_param = "float32"
        config.training.local_batch_size = 2 * BATCH
    return config


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", required=True, choices=[f"torchtitan-{name}" for name in MODELS])
    parser.add_argument("--way", choices=("fsdp2", "graph_fsdp"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--checkpointing", default="none", choices=CHECKPOINTING)
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = configuration(options.library.removeprefix("torchtitan-"), options.way, options.out, options.checkpointing)
    trainer: Trainer = config.build()
    for module in itertools.chain.from_iterable(part.modules() for part in trainer.model_parts):
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no sums with a factor
    found: dict[str, list[float]] = {"loss": [], "grad_norm": []}
    log = trainer.metrics_processor.log

    def keep(step: int, loss: float, largest: float, norm: float, **rest: Any) -> None:
        found["loss"].append(loss)
        found["grad_norm"].append(norm)
        log(step, loss, largest, norm, **rest)

    trainer.metrics_processor.log = keep
    trainer.train()
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:  # the last stage has losses
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "losses.json").write_text(json.dumps({"trained": found}))
    trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
