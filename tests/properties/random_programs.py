"""Random models whose forwards break into several graphs, as Python source: ``random_program(seed)``.

Statements change ``x``, a tensor of float64 of shape [rows, 4] whose values stay near one; ``turn`` is the number of
the call.
"""

from __future__ import annotations

import linecache
import random
import sys
import textwrap
import types
from typing import Any

from torch import nn

HEADER = """
import contextlib
import torch
from torch import nn
from torch.nn import functional as F

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
    def forward(self, x):
        return x + torch.tanh(self.down(torch.tanh(self.up(x))))

class Breaking(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 4) / 2), nn.Parameter(torch.randn(4))
    def forward(self, x):
        if bool(x.sum() > 0):
            return torch.tanh(x @ self.weight + self.bias)
        return torch.tanh(x @ self.weight - self.bias)

class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return torch.mm(x, weight, out=x.new_empty(len(x), weight.shape[1]))
    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(%(kinds)s)
        self.w, self.v = nn.Parameter(torch.randn(4, 4) / 2), nn.Parameter(torch.randn(4))
        self.norm = nn.LayerNorm(4)
        self.calls = 0
%(init)s
"""


class _Program:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.large = seed % 4 == 0  # what takes time is compiling a program's ten or more graphs
        self.methods: list[str] = []
        self.layers = self.random.randint(2, 4)
        kinds = ", ".join(f"{self.random.choice(['Block', 'Block', 'Breaking'])}()" for _ in range(self.layers))
        init = self.random.choice(
            ["", "", "        self.tied = self.layers[0]", "        self.layers[1].alias = self.w"]
        )
        self.header = HEADER % {"kinds": f"[{kinds}]", "init": init}

    def source(self) -> str:
        depth, count = (3, self.random.randint(2, 5)) if self.large else (2, self.random.randint(1, 3))
        forward = self.method("forward", "x, turn", depth, count, "return self.norm(x) * self.v")
        return self.header + "\n".join([*self.methods, forward])

    def method(self, name: str, arguments: str, depth: int, count: int, end: str) -> str:
        """A method of statements."""
        body = [*self.block(depth, count), end]
        return f"    def {name}(self, {arguments}):\n" + textwrap.indent("\n".join(body), " " * 8) + "\n"

    def block(self, depth: int, count: int) -> list[str]:
        return [line for _ in range(count) for line in self.statement(depth)]

    def inner(self, depth: int) -> list[str]:
        """The lines of a nested block."""
        return [f"    {line}" for line in self.block(depth - 1, self.random.randint(1, 2))]

    def layer(self) -> str:
        return f"self.layers[{self.random.randrange(self.layers)}]"

    def statement(self, depth: int) -> list[str]:
        names = ["call", "direct", "item", "graph_break", "show", "disabled", "function", "no_grad", "listed", "passed"]
        if depth > 0:
            names += [
                "loop",
                "loop",
                "branch",
                "branch",
                "nested",
                "generator",
                "finally_",
                "raising",
                "early",
                "while_",
            ]
        lines: list[str] = getattr(self, self.random.choice(names))(depth)
        return lines

    # --- statements

    def call(self, _: int) -> list[str]:
        return [f"x = {self.layer()}(x)"]

    def direct(self, _: int) -> list[str]:
        return [self.random.choice(["x = torch.tanh(x @ self.w)", "x = torch.tanh(F.linear(x, self.w, self.v))"])]

    def item(self, _: int) -> list[str]:
        return ["x = x * (1 + torch.tanh(x.detach().mean()).item())"]

    def graph_break(self, _: int) -> list[str]:
        return ["torch._dynamo.graph_break()"]

    def show(self, _: int) -> list[str]:
        return ["print('', end='')"]

    def disabled(self, _: int) -> list[str]:
        what = self.random.choice([f"{self.layer()}(x)", "torch.tanh(x @ self.w)", "x * self.w.norm()", "self.norm(x)"])
        name = f"disabled_{len(self.methods)}"
        self.methods.append(f"    @torch.compiler.disable\n    def {name}(self, x):\n        return {what}\n")
        return [f"x = torch.tanh(self.{name}(x))"]

    def function(self, _: int) -> list[str]:
        if self.random.random() < 0.5:
            return ["x = torch.tanh(Product.apply(x, self.w))"]
        name = f"product_{len(self.methods)}"
        self.methods.append(
            f"    @torch.compiler.disable\n    def {name}(self, x):\n        return Product.apply(x, self.w)\n"
        )
        return [f"x = torch.tanh(self.{name}(x))"]

    def no_grad(self, _: int) -> list[str]:
        broken = self.random.choice(["torch._dynamo.graph_break()", "pass"])
        return ["with torch.no_grad():", f"    {broken}", f"    y = {self.layer()}(x)", "x = x + y / 2"]

    def listed(self, _: int) -> list[str]:
        return ["x = torch.stack([layer(x) for layer in self.layers]).mean(0)"]

    def passed(self, _: int) -> list[str]:
        """A layer goes into a function of its own."""
        return ["apply = lambda layer, value: layer(value)", f"x = apply({self.layer()}, x)"]

    def loop(self, depth: int) -> list[str]:
        over = self.random.choice(["self.layers", "self.layers[1:]", "reversed(self.layers)"])
        return [f"for layer in {over}:", *self.inner(depth), "    x = layer(x)", *self.maybe("    ")]

    def while_(self, depth: int) -> list[str]:
        return ["steps = 0", "while steps < 2:", "    steps += 1", *self.inner(depth), *self.maybe("    ")]

    def maybe(self, indent: str) -> list[str]:
        return self.random.choice(
            [
                [],
                [f"{indent}if bool((x == x).all()):", f"{indent}    x = x * 0.9"],
                [f"{indent}torch._dynamo.graph_break()"],
            ]
        )

    def branch(self, depth: int) -> list[str]:
        on = self.random.choice(["bool(x.sum() > 0)", "x.mean().item() > 0", "turn % 2", "bool((x == x).all())"])
        return [f"if {on}:", *self.inner(depth), "else:", *self.inner(depth)]

    def nested(self, depth: int) -> list[str]:
        name = f"nested_{len(self.methods)}_{self.random.randrange(10**6)}"
        self.methods.append(self.method(name, "x, turn", depth - 1, self.random.randint(1, 2), "return x"))
        return [f"x = self.{name}(x, turn)"]

    def generator(self, depth: int) -> list[str]:
        name = f"generator_{len(self.methods)}_{self.random.randrange(10**6)}"
        lines = ["for layer in self.layers:", *self.inner(depth), "    yield layer(x)"]
        body = textwrap.indent("\n".join(lines), " " * 8)
        self.methods.append(f"    def {name}(self, x, turn):\n{body}\n")
        return [f"for y in self.{name}(x, turn):", "    x = torch.tanh(x + y)"]

    def finally_(self, depth: int) -> list[str]:
        return ["try:", *self.inner(depth), "finally:", "    self.calls += 1"]

    def raising(self, depth: int) -> list[str]:
        condition = self.random.choice(["bool((x == x).all())", "turn % 2"])
        return [
            "try:", f"    if {condition}:", "        raise ValueError", *self.inner(depth),
            "except ValueError:", *self.inner(depth),
        ]  # fmt: skip

    def early(self, _: int) -> list[str]:
        condition = self.random.choice(["bool(x.sum() > 1)", "turn == 1"])
        return [f"if {condition}:", f"    return {self.layer()}(x)"]


def random_program(seed: int) -> tuple[str, type[nn.Module]]:
    """A model's source and class, whose forward takes ``x`` and the number of the call. Methods that are generators
    may return early."""
    source = _Program(seed).source()
    file = f"<random program {seed}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    module: Any = types.ModuleType(f"random_program_{seed}")
    sys.modules[module.__name__] = module  # where Dynamo looks for globals
    exec(compile(source, file, "exec"), vars(module))
    return source, module.Model
