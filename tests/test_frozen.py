"""Frozen parameters are gathered and not reduced, also where the user freezes and unfreezes them between steps."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from facts import Facts
from models import MLP, WIDTH, Batch, hf_tokens
from reference import fsdp2, gradients_of, parameters_of, rows_of, whole
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor

import graph_fsdp

FACTS = Facts(__name__)
needs_peft = pytest.mark.skipif(
    None in map(importlib.util.find_spec, ("peft", "transformers")), reason="peft and transformers are not installed"
)


def ours(model: nn.Module, **options: Any) -> nn.Module:
    return graph_fsdp.compile(model, backend="eager", **options)


# Frozen in each step: nothing, all of a unit, parameters of each unit, and nothing, twice.
FROZEN = [(), ("blocks.1.",), ("blocks.0.up.weight", "blocks.1.down.", "head.weight"), (), ()]


def train(shard: Callable[[nn.Module], nn.Module]) -> Iterator[dict[str, dict[str, Any]]]:
    torch.manual_seed(0)
    model = shard(MLP())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    identities = [id(p) for p in model.parameters()]
    generator = torch.Generator().manual_seed(dist.get_rank())
    for frozen in FROZEN:
        for name, p in model.named_parameters():
            p.requires_grad_(not name.startswith(frozen or "nothing"))
        loss = model(torch.randn(4, WIDTH, generator=generator)).square().mean()
        loss.backward()
        yield {"loss": {"": loss.detach()}, "gradients": gradients_of(model)}
        optimizer.step()
        optimizer.zero_grad()
        assert [id(p) for p in model.parameters()] == identities, "the optimizer's parameters are the model's"
        states = {name: {k: whole(v) for k, v in optimizer.state[p].items()} for name, p in model.named_parameters()}
        yield {"parameters": parameters_of(model), **states}
    if shard is ours:
        assert len(graph_fsdp.inspect(model).graphs) == len(set(FROZEN)), "a graph of each kind is captured once"


@FACTS
def freezing_between_steps_equals_fsdp2_bit_for_bit() -> None:
    for theirs, own in zip(train(fsdp2), train(ours), strict=True):
        for kind, values in theirs.items():
            assert list(own[kind]) == list(values)
            assert [k for k, v in own[kind].items() if v is None] == [k for k, v in values.items() if v is None]
            assert [k for k, v in values.items() if v is not None and not torch.equal(own[kind][k], v)] == []


def lora() -> nn.Module:
    from models import llama
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], modules_to_save=["lm_head"]
    )
    model = get_peft_model(llama(depth=1), config)
    for name, p in model.named_parameters():
        if "lora_B" in name:  # zeros, behind which nothing reaches lora_A
            nn.init.normal_(p, std=0.02)
    return model


@FACTS.marked(needs_peft)
def lora_adapters_of_a_hugging_face_model_train_as_in_one_process() -> None:
    from peft import get_peft_model_state_dict
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    model, reference = ours(lora(), auto_wrap_policy={LlamaDecoderLayer}), lora()
    assert all(isinstance(p, DTensor) for p in model.parameters())
    optimizers = [
        torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2) for m in (model, reference)
    ]
    before = parameters_of(model)
    for number in range(3):
        batch: Batch = hf_tokens(8, torch.Generator().manual_seed(number))
        model(**rows_of(batch, dist.get_rank(), 4)).loss.backward()
        reference(**batch).loss.backward()
        with_gradient = [name for name, p in model.named_parameters() if p.grad is not None]
        assert with_gradient == [name for name, p in reference.named_parameters() if p.grad is not None]
        assert all("lora_" in name or "modules_to_save" in name for name in with_gradient)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    after = parameters_of(model)
    assert {name for name in after if not torch.equal(after[name], before[name])} == set(with_gradient)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    expected = get_peft_model_state_dict(reference)
    if dist.get_rank() == 0:  # which has it
        saved = get_peft_model_state_dict(model, state_dict=full)
        assert list(saved) == list(expected)
        for name, value in expected.items():
            torch.testing.assert_close(saved[name], value, rtol=1e-4, atol=1e-5, msg=name)
    local: dict[str, Tensor] = get_peft_model_state_dict(model)
    assert list(local) == list(expected)
    assert all(isinstance(value, DTensor) for value in local.values())


@FACTS.marked(needs_peft)
def adapters_without_a_task_generate_by_the_compiled_model() -> None:
    model, reference = ours(lora()), lora()
    register_fsdp_forward_method(model, "generate")  # as transformers' Trainer does, and TRL
    prompt = torch.randint(1, 32, (2, 5), generator=torch.Generator().manual_seed(dist.get_rank()))
    found, expected = (m.eval().generate(prompt, max_new_tokens=2, pad_token_id=0) for m in (model, reference))
    assert torch.equal(found, expected)
    assert not any("generate" in capture.cause.text for capture in graph_fsdp.inspect(model).captures)


test_on_two_ranks = FACTS.on(2)


def test_a_frozen_unit_is_gathered_and_not_reduced(fake_group: None) -> None:
    model = ours(MLP())
    printed = []
    for frozen in (False, True):
        model.blocks[0].requires_grad_(not frozen)
        model(torch.ones(4, WIDTH)).sum().backward()
        graph = graph_fsdp.inspect(model).graphs[-1]
        for phase in ("forward", "backward"):
            lines = graph.views[phase].stages["free"].body.splitlines()
            starts = [line.split(" = ")[0].strip() for line in lines if "_start.default" in line]
            printed.append(f"{phase}, blocks.0 {'frozen' if frozen else 'trained'}: {', '.join(starts)}")
    assert_expected_inline(
        "\n".join(printed),
        """\
forward, blocks.0 trained: gather_blocks_0, gather_blocks_1, gather_root
backward, blocks.0 trained: gather_blocks_1, reduce_root, gather_blocks_0, reduce_blocks_1, reduce_blocks_0
forward, blocks.0 frozen: gather_blocks_0, gather_blocks_1, gather_root
backward, blocks.0 frozen: gather_blocks_1, reduce_root, reduce_blocks_1""",
    )
