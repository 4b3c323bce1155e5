"""Which model lies in a folder, without reading its weights: another one at the same path is another model."""

from __future__ import annotations

import hashlib
from pathlib import Path

from pdserve.weights.files import COMMIT, light

_CONFIGS = ("config.json", "params.json")
_INDEX = ".index.json"
_LARGEST = 64 << 20
"""Bytes of a file that is read whole. An index of a large model has some ten million."""
_DIGITS = 12


def model_identity(folder: Path) -> str | None:
    """For a reader, with a digest of its configuration, the index of its weights, the names and sizes of all files of
    weights and, in the hub's cache, the commit; None: there is none that can be read. Other weights in files of the
    same names and sizes are not seen."""
    digest = hashlib.sha256()
    try:
        files = {file.name: file for file in sorted(folder.iterdir()) if file.is_file()}
        weights = sorted(set(files) - set(light(files)))
        read = [name for name in files if name in _CONFIGS or name.endswith(_INDEX)]
        if not any(name in _CONFIGS for name in read):
            return None
        for name in read:
            if files[name].stat().st_size <= _LARGEST:
                digest.update(f"{name}\0".encode() + hashlib.sha256(files[name].read_bytes()).digest())
        sizes = {name: files[name].stat().st_size for name in weights}
    except OSError:
        return None
    digest.update("".join(f"{name}\0{size}\0" for name, size in sizes.items()).encode())
    if COMMIT.fullmatch(folder.name):
        digest.update(folder.name.encode())
    return f"{digest.hexdigest()[:_DIGITS]} ({len(sizes)} files of weights, {sum(sizes.values())} bytes)"
