"""``nn.LSTM`` is traced so that it can be differentiated.

On a CPU, torch writes an LSTM out as calls of oneDNN's layer if its input needs no gradient. That layer's backward
needs what its forward returns in training only, so that an LSTM that trains on data fails in its first forward
(``expected all tensors_saved_with_vc_check to be Tensors``). Where a parameter needs a gradient, each step is written
out instead, as where the input needs one.
"""

from __future__ import annotations

import contextlib
from unittest.mock import patch

import torch
from torch._decomp import decompositions


def differentiable_lstms() -> contextlib.AbstractContextManager[object]:
    """For a time, let LSTMs with parameters that need gradients be traced step by step."""
    choose = decompositions.select_one_layer_lstm_function

    def choice(input: torch.Tensor, hx: list[torch.Tensor], params: list[list[torch.Tensor]]) -> object:
        if torch.is_grad_enabled() and any(p.requires_grad for layer in params for p in layer):
            return decompositions.one_layer_lstm
        return choose(input, hx, params)

    return patch.object(decompositions, "select_one_layer_lstm_function", choice)
