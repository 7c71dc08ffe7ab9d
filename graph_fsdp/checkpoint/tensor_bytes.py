"""Where the bytes of a tensor lie in an entry of a checkpoint's file, and reading them into memory without a copy.

An entry is what ``torch.save`` has written of one tensor: a zip file, uncompressed, of a pickle that says dtype, shape
and strides, and of the bytes. ``torch.load`` would read them into a new tensor, which is then copied; most of its time
goes into that memory. What is not written in the plain way is found to have no place here, and is ``torch.load``'s.
"""

from __future__ import annotations

import collections
import io
import math
import pickle
import struct
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_LOCAL_HEADER = struct.Struct("<26xHH")  # of a file in a zip file: …, length of its name, length of the extra field

DTYPES = {  # by the names that torch.save has for them
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}


@dataclass(frozen=True)
class TensorBytes:
    """A contiguous tensor in a file."""

    offset: int  # in bytes, from the start of the file
    dtype: torch.dtype
    shape: tuple[int, ...]

    def part(self, offsets: Sequence[int], lengths: Sequence[int]) -> int | None:
        """Where in the file a part of the tensor begins; None if its bytes do not lie together, or are not there."""
        if len(offsets) != len(self.shape) or len(lengths) != len(self.shape):
            return None
        first, stride, whole = 0, 1, True
        for size, at, length in zip(reversed(self.shape), reversed(offsets), reversed(lengths), strict=True):
            if at < 0 or at + length > size or not (whole or length == 1):
                return None
            first += at * stride
            stride *= size
            whole = whole and length == size
        return self.offset + first * self.dtype.itemsize


def find(file: io.FileIO, offset: int, length: int) -> TensorBytes | None:
    """The tensor in an entry, of which nothing but its description is read; None if ``torch.load`` has to read it.
    Nothing in the entry is run."""
    try:
        entry = _Slice(file, offset, length)
        with zipfile.ZipFile(entry) as records:
            names = {name.partition("/")[2]: name for name in records.namelist()}
            saved = _Description(io.BytesIO(records.read(names["data.pkl"]))).load()
            if not isinstance(saved, _Saved) or records.read(names["byteorder"]).decode() != sys.byteorder:
                return None
            record = records.getinfo(names[f"data/{saved.key}"])
        held = math.prod(saved.shape) * saved.dtype.itemsize
        if record.compress_type != zipfile.ZIP_STORED or held > record.file_size:
            return None
        entry.seek(record.header_offset)
        start = record.header_offset + _LOCAL_HEADER.size + sum(_LOCAL_HEADER.unpack(entry.read(_LOCAL_HEADER.size)))
        return TensorBytes(offset + start, saved.dtype, saved.shape) if start + record.file_size <= length else None
    except OSError:
        raise
    except Exception:  # what damaged zip files and pickles raise is of many types; torch.load says what it is
        return None


def read_into(file: io.FileIO, offset: int, tensor: Tensor) -> None:
    """Fill a contiguous tensor on the CPU with bytes of a file.

    Raises:
        EOFError: the file ends before.
    """
    if not tensor.numel():
        return
    view = tensor.reshape(-1).view(torch.uint8).numpy().data
    torch.autograd.graph.increment_version(tensor)  # as an operator would
    file.seek(offset)
    while view:
        done = file.readinto(view)
        if not done:
            raise EOFError(f"{file.name!s} ends {len(view):,} bytes too early")
        view = view[done:]


def fits(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether ``read_into`` gives the tensor the values that its bytes mean with that dtype."""
    plain = type(tensor) is Tensor and tensor.device.type == "cpu" and not tensor.is_inference()
    return plain and tensor.dtype == dtype and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


@dataclass(frozen=True)
class _Saved:
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class _Description(pickle.Unpickler):
    """An unpickler of the description of a plain contiguous tensor; it fails with any other."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _contiguous
        if (module, name) == ("collections", "OrderedDict"):  # of backward hooks, of which there are none
            return collections.OrderedDict
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        raise pickle.UnpicklingError(f"{module}.{name} is in no description of a plain tensor")

    def persistent_load(self, pid: Any) -> tuple[torch.dtype, str]:
        kind, dtype, key, _, _ = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError(f"{pid} is no storage of a plain tensor")
        return dtype, str(key)


def _contiguous(storage: tuple[torch.dtype, str], offset: int, shape: Any, strides: Any, *rest: Any) -> _Saved | None:
    dtype, key = storage
    size, stride = tuple(shape), 1
    for length, step in zip(reversed(size), reversed(strides), strict=True):
        if length != 1 and step != stride:
            return None
        stride *= length
    _, _, *flags = rest  # requires_grad, hooks; then what is lazily negative or conjugated
    return _Saved(key, dtype, size) if offset == 0 and not any(flags) else None


class _Slice(io.RawIOBase):
    """A part of a file is read as if it were a file."""

    def __init__(self, file: io.FileIO, offset: int, length: int) -> None:
        super().__init__()
        self.file, self.offset, self.length, self.at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.length}[whence]
        self.at = base + offset
        if self.at < 0:
            raise ValueError(f"{self.at} is before the start")
        return self.at

    def tell(self) -> int:
        return self.at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self.length - self.at)]
        self.file.seek(self.offset + self.at)
        done = self.file.readinto(view) or 0
        self.at += done
        return done
