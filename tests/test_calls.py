"""How a model is called and what it returns, graph breaks between its pieces, and several models in one program.

Both ranks run each fact; numbers are compared with one process that sees the batches of both.
"""

from __future__ import annotations

import warnings
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from facts import Facts
from models import MLP, WIDTH, MLPBlock
from reference import gradients_of, parameters_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F
from torch.utils import _pytree

import graph_fsdp
from graph_fsdp.passes import default_pipeline

FACTS = Facts(__name__)


def batch(of_rank: int, step: int = 0) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + of_rank))


def train(make: Callable[[], nn.Module], loss_of: Callable[[nn.Module, Tensor], Tensor], **options: Any) -> nn.Module:
    """Two steps, sharded and in one process, with equal gradients; the sharded model."""
    torch.manual_seed(0)
    model, reference = make(), make()
    reference.load_state_dict(model.state_dict())
    graph_fsdp.compile(model, **{"backend": "eager", **options})
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    world = dist.get_world_size()
    for step in range(2):
        loss_of(model, batch(dist.get_rank(), step)).backward()
        for other in range(world):
            (loss_of(reference, batch(other, step)) / world).backward()
        for name, gradient in gradients_of(model).items():
            torch.testing.assert_close(gradient, reference.get_parameter(name).grad, rtol=1e-4, atol=1e-6, msg=name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, value in parameters_of(model).items():
        torch.testing.assert_close(value, reference.get_parameter(name).detach(), rtol=1e-4, atol=1e-6, msg=name)
    return model


# Outputs


@dataclass
class Output:
    logits: Tensor
    hidden: list[Tensor]
    loss: Tensor | None = None


Pair = namedtuple("Pair", ["logits", "hidden"])


class Returning(MLP):
    """An MLP that packs what it returns as it is told."""

    def __init__(self, pack: Callable[[Tensor, list[Tensor]], Any]) -> None:
        super().__init__(depth=1)
        self.pack = pack

    def forward(self, x: Tensor) -> Any:
        hidden = []
        for block in self.blocks:
            x = block(x)
            hidden.append(x)
        return self.pack(self.head(x), hidden)


def logits_of(output: Any) -> Tensor:
    if isinstance(output, (Output, Pair)):
        return output.logits
    return output["logits"] if isinstance(output, dict) else output[0]


PACKED: dict[str, Callable[[Tensor, list[Tensor]], Any]] = {
    "a dataclass": lambda logits, hidden: Output(logits, hidden),
    "a namedtuple": lambda logits, hidden: Pair(logits, hidden),
    "a list, nested": lambda logits, hidden: [logits, [{"hidden": tuple(hidden)}, None], (None, []), 3, "text", 0.5],
    "a dict, some without gradient and one twice": lambda logits, hidden: {
        "logits": logits,
        "hidden": (hidden[0].detach(), logits.argmax(-1), logits > 0),
        "none": None,
        "true": True,
        "twice": (logits, logits.t()),
    },
}


@FACTS
def outputs_of_every_kind() -> None:
    for name, pack in PACKED.items():
        torch._dynamo.reset()
        model = train(
            lambda pack=pack: Returning(pack),
            lambda m, x: logits_of(m(x)).square().mean(),
            auto_wrap_policy={MLPBlock},
        )
        plain = Returning(pack)
        plain.load_state_dict({key: value for key, value in parameters_of(model).items()})
        output, expected = model(batch(0)), plain(batch(0))
        assert type(output) is type(expected), name
        leaves, kinds = _pytree.tree_flatten(vars(output) if isinstance(output, Output) else output)
        others, expected_kinds = _pytree.tree_flatten(vars(expected) if isinstance(expected, Output) else expected)
        assert kinds == expected_kinds, name
        for one, other in zip(leaves, others, strict=True):
            if isinstance(other, Tensor):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
                assert one.requires_grad == other.requires_grad, name
            else:
                assert one == other, name


@FACTS.long
def all_outputs_may_be_differentiated() -> None:
    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        output = model(x)
        return output.logits.square().mean() + sum(h.abs().mean() for h in output.hidden)

    train(lambda: Returning(PACKED["a dataclass"]), loss_of)


# Inputs


class Keywords(MLP):
    def forward(self, x: Tensor, /, *, scale: Tensor, extra: dict[str, Any] | None = None, **others: Any) -> Tensor:
        y = super().forward(x * scale)
        if extra is not None:
            y = y + extra["bias"][0] * extra["times"]
        return y if "target" not in others else F.mse_loss(y, others["target"])


@FACTS
def inputs_by_keyword_and_nested() -> None:
    scale, target = torch.tensor(0.5), torch.ones(4, 5)
    train(lambda: Keywords(depth=1), lambda m, x: F.mse_loss(m(x, scale=scale), target))
    extra = {"bias": [torch.ones(5)], "times": 2}
    train(lambda: Keywords(depth=1), lambda m, x: m(x, scale=scale, extra=extra).square().mean())


@FACTS
def the_loss_inside_the_model() -> None:
    scale, target = torch.tensor(0.5), torch.ones(4, 5)
    train(lambda: Keywords(depth=1), lambda m, x: m(x, scale=scale, target=target))


@FACTS
def an_input_gets_its_gradient() -> None:
    model = graph_fsdp.compile(MLP(depth=1), backend="eager")
    plain = MLP(depth=1)
    plain.load_state_dict(parameters_of(model))
    inputs = [batch(dist.get_rank()).requires_grad_() for _ in range(2)]
    for m, x in zip((model, plain), inputs, strict=True):
        m(x).square().sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)


# Graph breaks (test_pieces_ranks.py has those that the model makes itself)


class Printing(MLP):
    """Python between the pieces that computes with activations."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        scale = self.measured(x)
        return self.head(self.blocks[1](x)) * scale

    @torch.compiler.disable
    def measured(self, x: Tensor) -> Tensor:
        return x.detach().abs().mean().clamp(max=float(x.shape[0]))


@FACTS
def python_between_pieces_may_compute_with_activations() -> None:
    train(Printing, lambda m, x: m(x).square().mean(), fullgraph=False)


class Touching(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.norm()

    @torch.compiler.disable
    def norm(self) -> Tensor:
        return self.head.weight.norm()


@FACTS
def python_between_pieces_that_reads_a_parameter_has_its_unit_gathered() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="code outside of graphs reads")
        train(Touching, lambda m, x: m(x).square().mean(), fullgraph=False)


# Several models


@FACTS.long
def models_with_other_meshes_and_options_take_turns() -> None:
    """A student over both ranks, a teacher that each rank has for itself, and a replicated critic in bfloat16."""
    me = dist.get_rank()
    torch.manual_seed(0)
    plain = [MLP(), MLP(depth=1), MLP(depth=3)]
    models = [MLP(), MLP(depth=1), MLP(depth=3)]
    for model, other in zip(models, plain, strict=True):
        other.load_state_dict(model.state_dict())
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ranks", "shard"))["shard"]
    replicated = init_device_mesh("cpu", (2,), mesh_dim_names=("replicate",))
    student = graph_fsdp.compile(models[0], backend="eager", reshard_after_forward=True)
    teacher = graph_fsdp.compile(models[1].requires_grad_(False), alone, backend="eager", reshard_after_forward=False)
    policy = {MLP: MixedPrecisionPolicy(output_dtype=torch.float64)}
    pipeline = default_pipeline(bucket="none", prefetch=2)
    critic = graph_fsdp.compile(models[2], replicated, backend="eager", mp_policy=policy, passes=pipeline)
    stepped = (student, critic)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (*stepped, plain[0], plain[2])]
    for step in range(3):
        first, second = student(batch(me, step)), critic(batch(me, step))
        wanted = teacher(batch(me, step))
        F.mse_loss(first, wanted).backward()
        second.square().mean().backward()
        assert second.dtype is torch.float64
        for other in range(2):
            x = batch(other, step)
            (F.mse_loss(plain[0](x), plain[1](x).detach()) / 2).backward()
            (plain[2](x).double().square().mean() / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            student(batch(0, step))
    for model, other in zip(models, plain, strict=True):
        for name, value in parameters_of(model).items():
            torch.testing.assert_close(value, other.get_parameter(name).detach(), rtol=1e-4, atol=1e-6, msg=name)


test_on_two_ranks = FACTS.on(2)
