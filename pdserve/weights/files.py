"""Which files of a repository vLLM loads, and which of them lie in the hub's cache folder.

The cache's layout is documented by huggingface_hub: `models--ORG--NAME/` with `refs/REVISION` (a file that holds a
commit), `snapshots/COMMIT/FILE` (links, made when a file is complete) and `blobs/` (with `*.incomplete` of downloads).
"""

from __future__ import annotations

import fnmatch
import json
import re
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

COMMIT = re.compile(r"[0-9a-f]{40}")
INDEX = "model.safetensors.index.json"
STALE_SECONDS = 600.0
"""A partial file without a write for so long belongs to a download that is over."""

_HEAVY = re.compile(r"\.(safetensors|bin|pth?|ckpt|h5|msgpack|gguf|onnx|onnx_data|ot|tflite|npz|nemo|mlmodel)$")
_FORMATS = {
    "auto": ("*.safetensors", "*.bin", "*.pt"),
    "mistral": ("consolidated*.safetensors",),
    "pt": ("*.pt",),
    "npcache": ("*.bin",),
    "dummy": (),
}
"""vLLM's --load-format -> patterns, of which the first that matches decides (DefaultModelLoader._prepare_weights,
0.32). Other formats read safetensors."""
_NAMED_ALIKE = re.compile(r"\.[0-9a-f]{8}\.incomplete$")
"""huggingface_hub 2 names each partial file anew and never goes on with one; older versions do."""


def light(files: Iterable[str]) -> list[str]:
    """Configuration, tokenizer and code: all that is no weights."""
    return [file for file in files if not _HEAVY.search(file) and not file.startswith("original/")]


def heavy(files: Collection[str], load_format: str, indexed: Collection[str]) -> list[str]:
    """The weights that vLLM loads, of those in the repository. `indexed`: what its index of safetensors names."""
    at_top = [file for file in files if "/" not in file]
    if load_format == "auto" and fnmatch.filter(at_top, *_FORMATS["mistral"]):
        load_format = "mistral"
    if indexed and load_format not in ("mistral", "pt", "npcache", "dummy"):
        return sorted(indexed)
    for pattern in _FORMATS.get(load_format, ("*.safetensors",)):
        if fnmatch.filter(at_top, pattern):
            return [file for file in fnmatch.filter(files, pattern) if not file.startswith("original/")]
    return []


def indexed(snapshot: Path) -> set[str]:
    """The files that the index in a snapshot names; none where there is none. Raises ValueError for no index at all."""
    try:
        index = json.loads((snapshot / INDEX).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return set()
    except RecursionError:
        index = None
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(f"{INDEX} has no weight_map from tensors to files")
    return set(names.values())


class CacheFolder:
    """One repository in a cache folder."""

    def __init__(self, cache: Path, model: str) -> None:
        name = f"models--{model.replace('/', '--')}"
        self.path = cache / name
        self.lock = cache / ".locks" / f"pdserve--{name}.lock"

    def snapshot(self, commit: str) -> Path:
        """The folder of one commit, which may not be there."""
        return self.path / "snapshots" / commit

    def commit_of(self, revision: str) -> str | None:
        """The commit that a revision meant when it was last looked up; None: never here."""
        if COMMIT.fullmatch(revision):
            return revision
        try:
            return (self.path / "refs" / revision).read_text(encoding="utf-8").strip()
        except OSError:
            return None

    def missing(self, commit: str, sizes: Mapping[str, int]) -> list[str]:
        """The files that are not there in full."""
        snapshot = self.snapshot(commit)
        self._look_again(snapshot)
        return [file for file, size in sizes.items() if _size(snapshot / file) != size]

    def lacking(self, commit: str, load_format: str) -> str | None:
        """What a snapshot lacks, as far as it is known without the hub; None: nothing."""
        snapshot = self.snapshot(commit)
        self._look_again(snapshot)
        if not (snapshot / "config.json").is_file() and not (snapshot / "params.json").is_file():
            return "config.json"
        there = [str(path.relative_to(snapshot)) for path in snapshot.rglob("*") if path.is_file()]
        wanted = heavy(there, load_format, indexed(snapshot))
        gone = sorted(set(wanted) - set(there))
        if gone:
            return f"{gone[0]} and {len(gone) - 1} other files of weights" if len(gone) > 1 else gone[0]
        return None if wanted or load_format == "dummy" else "the weights"

    def arrived(self, commit: str, sizes: Mapping[str, int]) -> int:
        """Bytes that are there, those of unfinished files among them: what they take on the disk."""
        snapshot = self.snapshot(commit)
        whole = sum(size for file, size in sizes.items() if _size(snapshot / file) == size)
        return min(whole + self.partial(), sum(sizes.values()))

    def partial(self) -> int:
        """Bytes in files of running downloads."""
        since, taken = time.time() - STALE_SECONDS, 0
        for path in (self.path / "blobs").glob("*.incomplete"):
            try:
                status = path.stat()
            except FileNotFoundError:  # it has just been finished
                continue
            if status.st_mtime >= since:
                taken += min(status.st_size, 512 * status.st_blocks)
        return taken

    def sweep(self) -> int:
        """Removes what downloads that were killed have left and that cannot be continued; returns its bytes."""
        removed, since = 0, time.time() - STALE_SECONDS
        for path in (self.path / "blobs").glob("*.incomplete"):
            if not _NAMED_ALIKE.search(path.name):
                continue
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            if status.st_mtime < since:
                removed += 512 * status.st_blocks
                path.unlink(missing_ok=True)
        return removed

    def _look_again(self, snapshot: Path) -> None:
        """A network file system remembers that a file was not there; opening its folder makes it ask the server."""
        for folder in (self.path / "blobs", snapshot):
            if folder.is_dir():
                list(folder.iterdir())


def _size(file: Path) -> int | None:
    try:
        return file.stat().st_size
    except OSError:
        return None
