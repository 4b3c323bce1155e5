"""The tensors of a checkpoint by its safetensors headers: eight bytes of length, then JSON. No weights are read.

The format: https://huggingface.co/docs/safetensors/index#format. (The library safetensors wants torch or numpy for it,
and huggingface_hub is the engines', not ours.)
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import from_json

from pdserve.models.weights import BITS, Tensor

_LENGTH = 8
_LARGEST = 100_000_000
"""Bytes of a header that safetensors itself accepts."""
_METADATA = "__metadata__"

_Number = Annotated[int, Field(ge=0, le=1 << 60)]


class HeaderError(Exception):
    """The file is no safetensors file, or is not there in full. The message is a clause: why."""


class _Entry(BaseModel):
    model_config = ConfigDict(strict=True)

    dtype: str
    shape: Annotated[list[_Number], Field(max_length=16)]
    data_offsets: Annotated[list[_Number], Field(min_length=2, max_length=2)]


_HEADER: TypeAdapter[dict[str, _Entry]] = TypeAdapter(dict[Annotated[str, Field(max_length=2000)], _Entry])


def tensors_of(file: Path) -> list[Tensor]:
    """The tensors of a file. Raises HeaderError, or OSError where it cannot be read."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH), "little")
        if not 1 < length <= _LARGEST:
            raise HeaderError(f"{file.name} does not begin with a header of safetensors")
        if _LENGTH + length > size:
            raise HeaderError(f"the header of {file.name} cannot be read ({size - _LENGTH} of {length} bytes)")
        entries = _entries(stream.read(length), file.name)
    data = size - _LENGTH - length
    return [_tensor(name, entry, data, file.name) for name, entry in entries.items()]


def _entries(text: bytes, file: str) -> dict[str, _Entry]:
    try:
        header: Any = from_json(text)
        if isinstance(header, dict):
            header.pop(_METADATA, None)
        return _HEADER.validate_python(header)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "it"
        raise HeaderError(f"the header of {file} cannot be read: {place[:200]}: {first['msg']}") from error
    except ValueError as error:
        raise HeaderError(f"the header of {file} cannot be read: {error}") from error


def _tensor(name: str, entry: _Entry, data: int, file: str) -> Tensor:
    """`data`: bytes behind the header."""
    if entry.dtype not in BITS:
        raise HeaderError(f"the tensor {name} of {file} has the unknown type {entry.dtype[:40]!r}")
    begin, end = entry.data_offsets
    if not begin <= end <= data:
        raise HeaderError(f"the tensor {name} of {file} lies at bytes {begin} to {end} of {data}")
    tensor = Tensor(name, entry.dtype, tuple(entry.shape))
    if tensor.stored_bytes != end - begin:
        raise HeaderError(f"the tensor {name} of {file} has {end - begin} bytes, and its shape {tensor.stored_bytes}")
    return tensor
