"""Save a training and resume it, and load weights from elsewhere.

- :func:`save` and :func:`load` write and read a checkpoint of ``torch.distributed.checkpoint`` with model, optimizer,
  random states and whatever else a training has to remember. It resumes on any number of ranks. With ``memory=True``
  it is in the memory of two hosts.
- :func:`latest` and :func:`complete` find the checkpoints in a folder.
- ``graph_fsdp.compile(model, checkpoint=…)`` starts with a model's values from safetensors files;
  :func:`load_safetensors` loads them at any later time.
- :func:`load_full_state_dict` takes a whole state dict that one rank has.
- ``graph_fsdp.export(model)`` gives out whole tensors while the model trains (``export.py``).
"""

from graph_fsdp.checkpoint.finding import latest
from graph_fsdp.checkpoint.folder import complete
from graph_fsdp.checkpoint.full import load_full_state_dict, load_safetensors
from graph_fsdp.checkpoint.loading import load
from graph_fsdp.checkpoint.saving import PendingSave, save
from graph_fsdp.errors import CheckpointError
from graph_fsdp.initialise.safetensors_files import Safetensors
from graph_fsdp.initialise.state_keys import IncompatibleKeys

__all__ = [
    "CheckpointError",
    "IncompatibleKeys",
    "PendingSave",
    "Safetensors",
    "complete",
    "latest",
    "load",
    "load_full_state_dict",
    "load_safetensors",
    "save",
]
