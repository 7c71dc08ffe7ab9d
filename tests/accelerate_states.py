"""States that optimizers have when Accelerate prepares them."""

import copy
import functools
from collections.abc import Callable

import torch
from torch import nn

from graph_fsdp.integrations.accelerate import Accelerator


def check_states_that_are_there(accelerator: Accelerator, build: Callable[[], nn.Module]) -> None:
    """An optimizer that has stepped a whole model goes on, and so does one that has its state from the beginning."""
    for make in (functools.partial(torch.optim.SGD, momentum=0.9), torch.optim.Adagrad, torch.optim.AdamW):
        torch.manual_seed(0)
        model = build()
        plain = copy.deepcopy(model)
        optimizer, other = make(model.parameters(), lr=0.1), make(plain.parameters(), lr=0.1)
        for step in range(3):
            for each, stepping in ((model, optimizer), (plain, other)):
                each(torch.ones(2, 4) + step).square().sum().backward()
                stepping.step()
                stepping.zero_grad()
            if not step:
                model, optimizer = accelerator.prepare(model, optimizer)
        for p, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.full_tensor(), expected)  # type: ignore[attr-defined]
