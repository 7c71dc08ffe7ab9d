"""Private names of torch.distributed.checkpoint, and of the files of ``torch.save`` that it writes."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.utils import _create_file_view


def tensor_offset(file: Any, offset: int, length: int) -> int:
    """Where in a file the bytes of a tensor's storage begin, of which ``torch.save`` has written ``length`` bytes there
    from ``offset`` on."""
    entry: Any = _create_file_view(file, offset, length)
    reader: Any = torch._C.PyTorchFileReader(entry)
    return offset + int(reader.get_record_offset("data/0"))
