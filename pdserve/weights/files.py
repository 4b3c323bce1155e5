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
from typing import NamedTuple

COMMIT = re.compile(r"[0-9a-f]{40}")
INDEX = "model.safetensors.index.json"
STALE_SECONDS = 600.0
"""A partial file without a write for so long belongs to a download that is over."""

_HEAVY = re.compile(r"\.(safetensors|bin|pth?|ckpt|h5|msgpack|gguf|onnx|onnx_data|ot|tflite|npz|nemo|mlmodel)$")
_SAFETENSORS, _MISTRAL = "*.safetensors", "consolidated*.safetensors"
_FORMATS = {
    "auto": (_SAFETENSORS, "*.bin", "*.pt"),
    "hf": (_SAFETENSORS, "*.bin", "*.pt"),
    "mistral": (_MISTRAL,),
    "pt": ("*.pt",),
    "npcache": ("*.bin", "*.pt"),
    "dummy": (),
}
"""vLLM's --load-format -> patterns, of which the first that matches decides (DefaultModelLoader._prepare_weights,
0.32). Other formats read safetensors."""
_INDEXES = {_SAFETENSORS: INDEX, _MISTRAL: "consolidated.safetensors.index.json"}
"""Pattern -> the index of such files. vLLM loads what it names, and nothing else."""
_BIN_INDEX = "pytorch_model.bin.index.json"
"""vLLM does not read it, and loads all of `*.bin`: it tells what should be there."""
_TRAINING = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
"""Ends of names that vLLM leaves out (filter_files_not_needed_for_inference in model_loader/weight_utils.py)."""
_SHARD = re.compile(r"(.*?)(\d{1,9})(-of-(\d{1,9})\.\w+)")
"""`model-00001-of-00002.safetensors`; DeepSeek writes `model-00001-of-000163.safetensors`."""
_MOST_SHARDS = 100_000
"""What claims more is no shard of a model."""
_NAMED_ALIKE = re.compile(r"\.[0-9a-f]{8}\.incomplete$")
"""huggingface_hub 2 names each partial file anew and never goes on with one; older versions do."""


def light(files: Iterable[str]) -> list[str]:
    """Configuration, tokenizer and code: all that is no weights."""
    return [file for file in files if not _HEAVY.search(file) and not file.startswith("original/")]


def heavy(files: Collection[str], load_format: str, indexed: Collection[str]) -> list[str]:
    """The weights that vLLM loads, of those in the repository. `indexed`: what the index of their format names."""
    pattern = _pattern(files, load_format)
    if pattern is None:
        return []
    if indexed and pattern.endswith(".safetensors"):
        return sorted(indexed)
    there = (file for file in fnmatch.filter(files, pattern) if not file.startswith("original/"))
    return sorted({*indexed, *(file for file in there if not file.endswith(_TRAINING))})


def wanted(files: Collection[str], load_format: str, snapshot: Path) -> list[str]:
    """The same; the index, where `files` have one, is read in `snapshot`. Raises BrokenIndexError."""
    index = _INDEXES.get(_pattern(files, load_format) or "")
    return heavy(files, load_format, indexed(snapshot, index) if index is not None else ())


def _pattern(files: Collection[str], load_format: str) -> str | None:
    """Of the files that are the weights; an index counts for those that it names."""
    at_top = [file for file in files if "/" not in file]
    load_format = load_format.lower()
    if load_format == "auto" and fnmatch.filter(at_top, _MISTRAL):
        load_format = "mistral"
    for pattern in _FORMATS.get(load_format, (_SAFETENSORS,)):
        if fnmatch.filter(at_top, pattern) or _INDEXES.get(pattern) in at_top:
            return pattern
    return None


class BrokenIndexError(ValueError):
    """An index is there and names no files. The message has the index and why."""

    def __init__(self, file: Path, why: str) -> None:
        super().__init__(f"{file} is no index of weights ({why})")
        self.file = file


def indexed(snapshot: Path, name: str = INDEX) -> set[str]:
    """The files that an index in a snapshot names; none where there is none. Raises BrokenIndexError."""
    file = snapshot / name
    try:
        index = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return set()
    except (OSError, ValueError) as error:
        raise BrokenIndexError(file, str(error)) from error
    except RecursionError:
        index = None
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise BrokenIndexError(file, "it has no weight_map from tensors to files")
    return set(names.values())


class Weights(NamedTuple):
    """Of a model in a folder."""

    files: list[str]
    """All that vLLM would load, those that are not there among them."""
    missing: list[str]

    def lack(self) -> str | None:
        """What is not there, in words; None: nothing, as far as that is known without the hub."""
        if not self.missing:
            return None if self.files else "the weights"
        first, more = self.missing[0], len(self.missing) - 1
        shown = first if first.isprintable() else ascii(first)
        return f"{shown} and {more} other files of weights" if more else shown


def weights_in(folder: Path, load_format: str) -> Weights:
    """Of a folder vLLM loads what lies at its top, and takes what an index names elsewhere for missing. Raises
    BrokenIndexError, OSError."""
    there = {path.name for path in folder.iterdir() if path.is_file()}
    files = set(wanted(there, load_format, folder))
    if files <= there and _INDEXES.get(_pattern(there, load_format) or "") not in there:
        files |= _named_beside(files, folder) or _shards(files)
    return Weights(sorted(files), sorted(files - there))


def _named_beside(files: Collection[str], folder: Path) -> set[str]:
    """What the index of `*.bin` names, if it is one of these files: another may be left there."""
    try:
        named = indexed(folder, _BIN_INDEX)
    except BrokenIndexError:  # vLLM loads the files all the same
        return set()
    return named if named & set(files) else set()


def _shards(files: Iterable[str]) -> set[str]:
    """All shards of the sets of which `files` have some, by the number of shards in their names."""
    sets: dict[tuple[str, str, int, int], set[int]] = {}
    for file in files:
        if match := _SHARD.fullmatch(file):
            before, number, rest, total = match.groups()
            sets.setdefault((before, rest, len(number), int(total)), set()).add(int(number))
    found: set[str] = set()
    for (before, rest, width, total), there in sets.items():
        if total <= _MOST_SHARDS:
            first = 0 if 0 in there else 1
            found.update(f"{before}{number:0{width}}{rest}" for number in range(first, first + total))
    return found


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
        """What a snapshot lacks, as far as it is known without the hub; None: nothing. Raises BrokenIndexError."""
        snapshot = self.snapshot(commit)
        self._look_again(snapshot)
        if not (snapshot / "config.json").is_file() and not (snapshot / "params.json").is_file():
            return "config.json"
        lacking = weights_in(snapshot, load_format)
        return None if load_format.lower() == "dummy" else lacking.lack()

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
