"""Warn of an attention that torch computes wrongly."""

from __future__ import annotations

import warnings

import torch

from graph_fsdp.passes import Graph
from graph_fsdp.passes.ir.operands import arguments

_CUDNN = torch.ops.aten._scaled_dot_product_cudnn_attention.default
_MENDED = 92600  # the version of cuDNN, as torch.backends.cudnn.version() says it
_HOPPER = 9


def warn_of_attention(graph: Graph) -> None:
    """Warn where cuDNN computes attention with a mask whose gradients may be NaN: on an H100 or H200, for a number of
    keys that is 64 more than a multiple of 128, where all scores of a row are below -88. ``graph``: a joint graph, or
    a forward one.

    A mask comes of tracing, too: a model of transformers that is given positions cannot see in its graph that nothing
    is packed. Masks that say no more than ``is_causal`` are gone by now (``passes/transforms/causal_attention.py``).
    Source: https://github.com/pytorch/pytorch/issues/196678, found with torch 2.11 to 2.14.
    """
    version = torch.backends.cudnn.version()
    if version is None or version >= _MENDED:
        return
    for node in graph.fx_graph.find_nodes(op="call_function", target=_CUDNN):
        given = arguments(node)
        key = given.key.meta["val"]
        keys = key.shape[-2]
        if given.attn_bias is None or (isinstance(keys, int) and keys % 128 != 64):
            continue
        if torch.cuda.get_device_capability(key.device)[0] == _HOPPER:
            warnings.warn(
                f"attention over {keys} keys has a mask, and torch computes it with cuDNN {version}, whose gradients "
                "can be NaN for 64 keys more than a multiple of 128 (https://github.com/pytorch/pytorch/issues/196678)"
                "; call torch.backends.cuda.enable_cudnn_sdp(False) before the first forward, or use another length",
                stacklevel=2,
            )
            return
