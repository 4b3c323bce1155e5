"""The tensors of a checkpoint by its safetensors headers: eight bytes of length, then JSON. No weights are read.

The format: https://huggingface.co/docs/safetensors/index#format. (The library safetensors wants torch or numpy for it,
and huggingface_hub is the engines', not ours.)
"""

from __future__ import annotations

import json
from pathlib import Path

from pdserve.models.weights import Tensor

_LENGTH = 8
_LARGEST = 100_000_000
"""Bytes of a header that safetensors itself accepts."""


class HeaderError(Exception):
    """The file is no safetensors file, or is not there in full. The message is a clause: why."""


def tensors_of(file: Path) -> list[Tensor]:
    """The tensors of a file. Raises HeaderError, or OSError where it cannot be read."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH), "little")
        if not 1 < length <= _LARGEST:
            raise HeaderError(f"{file.name} does not begin with a header of safetensors")
        text = stream.read(length)
    try:
        header = json.loads(text)
        return [
            Tensor(name, about["dtype"], tuple(about["shape"]))
            for name, about in header.items()
            if name != "__metadata__"
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise HeaderError(f"the header of {file.name} cannot be read ({len(text)} of {length} bytes)") from error
