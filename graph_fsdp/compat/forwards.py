"""What a forward may do that torch traces otherwise than it should, or would not say that it has traced."""

from __future__ import annotations

import contextlib
from unittest.mock import patch

import torch
from torch._decomp import decompositions
from torch._dynamo.symbolic_convert import InstructionTranslator


def inputs_given_gradients() -> set[str]:
    """Return the names of those inputs of the graph that Dynamo has just traced whose ``grad`` is set when it has run:
    Dynamo traces a whole ``backward()`` so, where it traces ``torch.autograd.grad``."""
    set_later = InstructionTranslator.current_tx().output.side_effects.store_attr_mutations
    return {variable.as_proxy().node.name for variable, attributes in set_later.items() if "grad" in attributes}


def differentiable_lstms() -> contextlib.AbstractContextManager[object]:
    """For a time, let ``nn.LSTM`` with parameters that need gradients be traced step by step.

    On a CPU, torch writes an LSTM out as calls of oneDNN's layer if its input needs no gradient. That layer's backward
    needs what its forward returns in training only, so that an LSTM that trains on data fails in its first forward
    (``expected all tensors_saved_with_vc_check to be Tensors``).
    """
    choose = decompositions.select_one_layer_lstm_function

    def choice(input: torch.Tensor, hx: list[torch.Tensor], params: list[list[torch.Tensor]]) -> object:
        if torch.is_grad_enabled() and any(p.requires_grad for layer in params for p in layer):
            return decompositions.one_layer_lstm
        return choose(input, hx, params)

    return patch.object(decompositions, "select_one_layer_lstm_function", choice)
