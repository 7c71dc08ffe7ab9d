"""Find a model to plan, without weights: a Python callable, or a Hugging Face ``config.json``."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from graph_fsdp.errors import UnsupportedError
from graph_fsdp.planning.tracing import built_on_meta

Inputs = dict[str, Tensor] | tuple[Any, ...]
BATCH, LENGTH = 1, 4096


def find_model(model: str, batch: int | None, length: int | None) -> tuple[Callable[[], nn.Module], Inputs, bool]:
    """Find what builds a model, the model's inputs on the meta device, and whether the model came with them.

    Args:
        model: ``"package.module:function"`` or ``"file.py:function"``: a function without arguments that returns a
            module, or a module and its inputs (a tuple or a dict), of one rank. Or the path of a Hugging Face
            ``config.json``: a causal language model, trained on ``batch`` rows of ``length`` tokens.
        batch, length: sizes of inputs that the function does not return; None is 1 row, of 4096 tokens.

    Raises:
        ValueError: there is no such file or function, or the configuration's architecture is not known, or is no causal
            language model; or a size is given beside the function's own inputs.
        UnsupportedError: the function needs more than the meta device, or transformers is not installed.
    """
    tokens = torch.zeros(batch or BATCH, length or LENGTH, dtype=torch.long, device="meta")
    path, separator, name = model.rpartition(":")
    if model.endswith(".py") or (separator and not (path and name)):
        raise ValueError(f"model: {model} names no function that builds the model; give {path or model}:function")
    if not separator or model.endswith(".json"):
        return _from_config(Path(model)), {"input_ids": tokens, "labels": tokens}, True
    function = _named(path, name)
    if not callable(function):
        raise ValueError(f"model: {path} has no function {name!r}")
    made = built_on_meta(function)
    if isinstance(made, nn.Module):
        return function, (tokens,), False
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise ValueError(f"model: {model} must return a module, or a module and its inputs, it returned {made!r}")
    for option, size in {"batch": batch, "seq": length}.items():
        if size is not None:
            raise ValueError(f"--{option}: {model} returns inputs of its own, which have their sizes; leave it out")
    return lambda: function()[0], made[1] if isinstance(made[1], (tuple, dict)) else (made[1],), True


def _named(path: str, name: str) -> Any:
    """Return what a file or a module has under a name, None if nothing."""
    is_file = path.endswith(".py")
    if is_file and not Path(path).is_file():
        raise ValueError(f"model: there is no file {path!r}")
    try:
        module = _loaded(Path(path)) if is_file else importlib.import_module(path)
    except Exception as error:  # of the user's own code, whatever it is
        if not is_file and isinstance(error, ModuleNotFoundError):
            said = f"model: there is no module {path!r} ({error}); name one, or a file.py:function"
        else:
            said = f"model: {path} cannot be imported ({type(error).__name__}: {' '.join(str(error).split())})"
        raise ValueError(said) from error
    return getattr(module, name, None)


def _loaded(path: Path) -> ModuleType:
    """Run a file as a module, under a name by which Dynamo finds it: it imports the module of a function's globals."""
    spec = importlib.util.spec_from_file_location(f"graph_fsdp_plan_of_{path.stem}", path)
    assert spec is not None and spec.loader is not None, "there is a loader for the ending"
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _from_config(path: Path) -> Callable[[], nn.Module]:
    config = read_config(path)
    import transformers

    # In float32, whatever the checkpoint was saved in: mp_policy says what is computed in.
    return functools.partial(transformers.AutoModelForCausalLM.from_config, config, dtype=torch.float32)


def read_config(path: Path) -> Any:
    """Read the configuration of a causal language model of transformers; raises as ``find_model``."""
    if not path.is_file():
        raise ValueError(
            f"model: there is no file {str(path)!r}; give a config.json, module:function or file.py:function"
        )
    try:
        fields = json.loads(path.read_text())
    except ValueError as error:  # no JSON, or no text
        raise ValueError(f"model: {path} is no JSON: {error}") from error
    try:
        import transformers
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
    except ImportError as error:
        raise UnsupportedError("model: a config.json needs transformers; pip install transformers") from error
    kind = fields.get("model_type") if isinstance(fields, dict) else None
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    if not isinstance(kind, str) or kind not in known:
        raise ValueError(
            f"model: {path} has model_type {kind!r}, which transformers {transformers.__version__} has not"
        )
    given = fields.get("architectures")
    named = [str(name) for name in given] if isinstance(given, list) else []
    if kind not in CAUSAL or (named and not any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in named)):
        raise ValueError(
            f"model: {path} is of {', '.join(named) or kind}, which is no causal language model, and only those are "
            "planned from a config.json; give module:function or file.py:function that returns the model and its inputs"
        )
    return known[kind].from_dict({**fields, "use_cache": False})
