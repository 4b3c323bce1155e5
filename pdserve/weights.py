"""Fetches the weights of a model into the hub's cache folder: `python -m pdserve.weights`, before any engine starts.

Runs where the engines run, with their interpreter, because the cache and huggingface_hub are theirs. It ends with 0
when everything that vLLM will open is there; a line that begins with `weights: failed:` is its last word otherwise.

Nodes that share a cache folder all run it: the first takes the lock in the folder, the others wait and then find all
of it there. (huggingface_hub has a lock for each file, which would do, but two nodes would then take turns.)

The cache's layout is documented by huggingface_hub:
`models--ORG--NAME/` with `refs/REVISION` (a file that holds a commit), `snapshots/COMMIT/FILE` (links, made when a file
is complete) and `blobs/` (with `*.incomplete` of downloads).
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import fnmatch
import glob
import importlib
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pdserve.atomic_write import replace_text

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


def configuration_files(files: Iterable[str]) -> list[str]:
    """Return the files of configuration, tokenizer and code: all that is no weights."""
    return [file for file in files if not _HEAVY.search(file) and not file.startswith("original/")]


def weight_files(files: Collection[str], load_format: str, indexed: Collection[str]) -> list[str]:
    """Return the weights that vLLM loads, of those in the repository. `indexed`: what the index of their format
    names."""
    pattern = _pattern(files, load_format)
    if pattern is None:
        return []
    if indexed and pattern.endswith(".safetensors"):
        return sorted(indexed)
    there = (file for file in fnmatch.filter(files, pattern) if not file.startswith("original/"))
    return sorted({*indexed, *(file for file in there if not file.endswith(_TRAINING))})


def select_weights(files: Collection[str], load_format: str, snapshot: Path) -> list[str]:
    """Return the weights that vLLM loads; the index, where `files` have one, is read in `snapshot`. Raises
    BrokenIndexError."""
    index = _INDEXES.get(_pattern(files, load_format) or "")
    return weight_files(files, load_format, indexed_files(snapshot, index) if index is not None else ())


def _pattern(files: Collection[str], load_format: str) -> str | None:
    """Return the pattern of the files that are the weights; an index counts for those that it names."""
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


def indexed_files(snapshot: Path, name: str = INDEX) -> set[str]:
    """Return the files that an index in a snapshot names; none where there is none. Raises BrokenIndexError."""
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
    """The weights of a model in a folder."""

    files: list[str]
    """All that vLLM would load, those that are not there among them."""
    missing: list[str]

    def lack(self) -> str | None:
        """Return what is not there, in words; None: nothing, as far as that is known without the hub."""
        if not self.missing:
            return None if self.files else "the weights"
        first, more = self.missing[0], len(self.missing) - 1
        shown = first if first.isprintable() else ascii(first)
        return f"{shown} and {more} other files of weights" if more else shown


def weights_in(folder: Path, load_format: str) -> Weights:
    """Return the weights in a folder: vLLM loads what lies at its top, and takes what an index names elsewhere for
    missing. Raises BrokenIndexError, OSError."""
    there = {path.name for path in folder.iterdir() if path.is_file()}
    files = set(select_weights(there, load_format, folder))
    if files <= there and _INDEXES.get(_pattern(there, load_format) or "") not in there:
        files |= _named_beside(files, folder) or _shards(files)
    return Weights(sorted(files), sorted(files - there))


def _named_beside(files: Collection[str], folder: Path) -> set[str]:
    """Return what the index of `*.bin` names, if it is one of these files: another may be left there."""
    try:
        named = indexed_files(folder, _BIN_INDEX)
    except BrokenIndexError:  # vLLM loads the files all the same
        return set()
    return named if named & set(files) else set()


def _shards(files: Iterable[str]) -> set[str]:
    """Return all shards of the sets of which `files` have some, by the number of shards in their names."""
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
        """Return the folder of one commit, which may not be there."""
        return self.path / "snapshots" / commit

    def commit_of(self, revision: str) -> str | None:
        """Return the commit that a revision meant when it was last looked up; None: never here."""
        if COMMIT.fullmatch(revision):
            return revision
        try:
            return (self.path / "refs" / revision).read_text(encoding="utf-8").strip()
        except OSError:
            return None

    def missing(self, commit: str, sizes: Mapping[str, int]) -> list[str]:
        """Return the files that are not there in full."""
        snapshot = self.snapshot(commit)
        self._look_again(snapshot)
        return [file for file, size in sizes.items() if _size(snapshot / file) != size]

    def lacking(self, commit: str, load_format: str) -> str | None:
        """Return what a snapshot lacks, as far as it is known without the hub; None: nothing. Raises
        BrokenIndexError."""
        snapshot = self.snapshot(commit)
        self._look_again(snapshot)
        if not (snapshot / "config.json").is_file() and not (snapshot / "params.json").is_file():
            return "config.json"
        lacking = weights_in(snapshot, load_format)
        return None if load_format.lower() == "dummy" else lacking.lack()

    def arrived(self, commit: str, sizes: Mapping[str, int]) -> int:
        """Return the bytes that are there, those of unfinished files among them: what they take on the disk."""
        snapshot = self.snapshot(commit)
        whole = sum(size for file, size in sizes.items() if _size(snapshot / file) == size)
        return min(whole + self.partial(), sum(sizes.values()))

    def partial(self) -> int:
        """Return the bytes in files of running downloads."""
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
        """Open the folders, so that their file system asks its server: one on a network remembers that a file was not
        there."""
        for folder in (self.path / "blobs", snapshot):
            if folder.is_dir():
                list(folder.iterdir())


def _size(file: Path) -> int | None:
    try:
        return file.stat().st_size
    except OSError:
        return None


STALL_SECONDS = 600.0
_REPORT_SECONDS = 5.0
_LOCK_SECONDS = 1.0
_SPARE_BYTES = 1 << 30
"""A disk that is full to the last byte is of no use to the engines."""
_GB = 1e9
_HTTPX = ("TransportError",)
_QUERY = re.compile(r"\?[^\s'\")]*")


class DownloadError(Exception):
    """The weights cannot be had: what, and what to do."""

    def __init__(self, what: str, todo: str) -> None:
        super().__init__(what)
        self.todo = todo


class Revision(NamedTuple):
    """Names the commit that is in the cache folder now."""

    commit: str
    size: int | None
    """Bytes; None where the hub was not asked."""


class Options(NamedTuple):
    """Holds the command line."""

    model: str
    revision: str
    cache_dir: str | None
    load_format: str
    stall_seconds: float


def main() -> int:
    """Fetch a model from the hub, and exit with its outcome."""
    parser = argparse.ArgumentParser(prog="python -m pdserve.weights", description="Fetches a model from the hub.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--revision", default="main")
    parser.add_argument("--cache-dir", help="as vLLM's --download-dir; otherwise by HF_HOME and the like")
    parser.add_argument("--load-format", default="auto", help="vLLM's: which files are the weights")
    parser.add_argument("--record", type=Path, help="file that will hold the commit")
    parser.add_argument("--stall-seconds", type=float, default=STALL_SECONDS, help="without a byte; then it gives up")
    taken = parser.parse_args()
    options = Options(taken.model, taken.revision, taken.cache_dir, taken.load_format, taken.stall_seconds)
    if taken.record is not None:
        taken.record.unlink(missing_ok=True)
    try:
        result = provide(options)
    except DownloadError as failure:
        report(f"failed: {_one_line(str(failure))} -> {failure.todo}")
        return 1
    if taken.record is not None:
        record = {"model": options.model, "revision": options.revision, **result._asdict()}
        taken.record.parent.mkdir(parents=True, exist_ok=True)
        replace_text(taken.record, json.dumps(record))
    return 0


def provide(options: Options) -> Revision:
    """Provide everything of the model that vLLM needs, in the cache folder. Raises DownloadError."""
    # Bars of many threads would fill the log; progress is reported below.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        hub = importlib.import_module("huggingface_hub")
        constants = importlib.import_module("huggingface_hub.constants")
    except ImportError as error:
        raise DownloadError(
            f"{sys.executable} cannot import huggingface_hub: {error}",
            "let engine.python name the interpreter that has vLLM, which brings it, or set model.download: false",
        ) from None
    cache = Path(options.cache_dir or constants.HF_HUB_CACHE).expanduser().absolute()
    folder = CacheFolder(cache, options.model)
    if constants.HF_HUB_OFFLINE:
        return _already_there(folder, options, "the hub is not to be asked (HF_HUB_OFFLINE)")
    try:
        return _fetch(hub, cache, folder, options)
    except _unreachable() as error:
        return _already_there(folder, options, f"{constants.ENDPOINT} cannot be reached ({_reason(error)})")
    except (OSError, ValueError, RuntimeError) as error:  # of this disk, of the hub's answers, of hf_xet
        if _status(error) >= 500:
            return _already_there(folder, options, f"{constants.ENDPOINT} does not serve ({_reason(error)})")
        raise _explain_failure(constants.ENDPOINT, options, error) from None


def _fetch(hub: Any, cache: Path, folder: CacheFolder, options: Options) -> Revision:
    repository = _look_up(hub, options)
    if repository.lacks(folder, options.load_format):
        with _lock_cache(folder):
            if repository.lacks(folder, options.load_format):
                _download(hub, cache, folder, options, repository)
    if options.revision != repository.commit:
        _remember(folder, options.revision, repository.commit)
    size = sum(repository.wanted(folder, options.load_format).values())
    report(f"{size / _GB:.1f} GB complete at {repository.commit}")
    return Revision(repository.commit, size)


class Repository(NamedTuple):
    """The files that the hub has at one commit."""

    model: str
    commit: str
    sizes: dict[str, int]

    def light(self) -> dict[str, int]:
        """Return the small files, which name the large ones."""
        return {file: self.sizes[file] for file in configuration_files(self.sizes)}

    def wanted(self, folder: CacheFolder, load_format: str) -> dict[str, int]:
        """Return all files that vLLM needs, once the small ones are there. Raises DownloadError: there is nothing to
        load."""
        with _index_read():
            weights = select_weights(self.sizes, load_format, folder.snapshot(self.commit))
        if absent := sorted({*weights} - {*self.sizes}):
            raise DownloadError(
                f"{self.model} has an index, but not its file {absent[0]}", "choose another model.revision"
            )
        if not weights and load_format.lower() != "dummy":
            raise DownloadError(f"{self.model} has no weights that vLLM loads", "correct model.id, or set load-format")
        return {**self.light(), **{file: self.sizes[file] for file in weights}}

    def lacks(self, folder: CacheFolder, load_format: str) -> bool:
        """Return whether anything must be fetched."""
        if folder.missing(self.commit, self.light()):
            return True
        return bool(folder.missing(self.commit, self.wanted(folder, load_format)))


def _look_up(hub: Any, options: Options) -> Repository:
    api = hub.HfApi()
    commit: str = api.model_info(options.model, revision=options.revision).sha
    tree = api.list_repo_tree(options.model, recursive=True, revision=commit)
    return Repository(options.model, commit, {entry.path: entry.size for entry in tree if hasattr(entry, "size")})


def _download(hub: Any, cache: Path, folder: CacheFolder, options: Options, repository: Repository) -> None:
    def download(files: Iterable[str]) -> None:
        patterns = [glob.escape(file) for file in files]
        hub.snapshot_download(options.model, revision=commit, cache_dir=str(cache), allow_patterns=patterns)

    commit = repository.commit
    if removed := folder.sweep():
        report(f"removed {removed / _GB:.1f} GB that an earlier download has left unfinished")
    _check_space(cache, folder, commit, repository.light())
    download(repository.light())
    sizes = repository.wanted(folder, options.load_format)
    _check_space(cache, folder, commit, sizes)
    report(f"{len(folder.missing(commit, sizes))} of {len(sizes)} files of {options.model} at {commit} are missing")
    with _watch_download(folder, commit, sizes, options.stall_seconds):
        download(sizes)
    if missing := folder.missing(commit, sizes):
        raise DownloadError(f"{missing[0]} is not complete after the download", f"remove {folder.path} and start again")


def _already_there(folder: CacheFolder, options: Options, why: str) -> Revision:
    """Look, without the hub, for a model that is complete in the cache folder. Raises DownloadError when it is not."""
    todo = "let the node reach the hub once, copy a cache that is complete, or use model.path"
    commit = folder.commit_of(options.revision)
    if commit is None or not folder.snapshot(commit).is_dir():
        raise DownloadError(f"{why}, and {options.model} at {options.revision} is not in {folder.path.parent}", todo)
    with _index_read():
        lacks = folder.lacking(commit, options.load_format)
    if lacks is not None:
        raise DownloadError(f"{why}, and {folder.snapshot(commit)} lacks {lacks}", todo)
    report(f"{why}; complete at {commit}")
    return Revision(commit, None)


@contextlib.contextmanager
def _index_read() -> Iterator[None]:
    """Say that the file behind a broken index is to be removed: its link in the snapshot would be made again to the
    same one."""
    try:
        yield
    except BrokenIndexError as error:
        todo = f"remove {error.file.resolve()}, and start again where the hub can be reached: it is fetched anew"
        raise DownloadError(str(error), todo) from None


def _check_space(cache: Path, folder: CacheFolder, commit: str, sizes: Mapping[str, int]) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    need = sum(sizes[file] for file in folder.missing(commit, sizes))
    free = shutil.disk_usage(cache).free + folder.partial()
    if need and free < need + _SPARE_BYTES:
        raise DownloadError(
            f"the disk of {cache} has {free / _GB:.1f} GB free, and {need / _GB:.1f} GB must still be fetched (and 1 "
            "GB stay free)",
            "make room there, or name a folder on a larger disk with HF_HOME in engine.env",
        )


def _remember(folder: CacheFolder, revision: str, commit: str) -> None:
    """Write the reference as huggingface_hub does: an engine that cannot reach the hub finds by it what the revision
    means."""
    if folder.commit_of(revision) != commit:
        reference = folder.path / "refs" / revision
        reference.parent.mkdir(parents=True, exist_ok=True)
        replace_text(reference, commit)


@contextlib.contextmanager
def _lock_cache(folder: CacheFolder) -> Iterator[None]:
    """Let one process at a time into the cache folder, also from other nodes: a lock of POSIX goes over NFS. The
    kernel, or the server of the file system, lets go of it when its holder dies."""
    folder.lock.parent.mkdir(parents=True, exist_ok=True)
    with folder.lock.open("ab") as file:
        waiting = False
        while True:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except (BlockingIOError, PermissionError):
                if not waiting:
                    report("another process fetches into the same cache: waiting for it")
                waiting = True
            except OSError as error:
                where = folder.lock.parent
                report(f"the file system of {where} has no locks ({error.strerror}): other downloads are not awaited")
                break
            time.sleep(_LOCK_SECONDS)
        yield


@contextlib.contextmanager
def _watch_download(folder: CacheFolder, commit: str, sizes: Mapping[str, int], stall_seconds: float) -> Iterator[None]:
    """Report the progress of a download while it runs, measured on the disk, and ends the process when nothing comes
    any more: the threads of a download cannot be ended."""
    done, total = threading.Event(), sum(sizes.values())

    def watch() -> None:
        shown, most, moved = "", -1, time.monotonic()
        while True:
            arrived = folder.arrived(commit, sizes)
            text = f"fetched {100 * arrived // max(total, 1)} % ({arrived / _GB:.1f} of {total / _GB:.1f} GB)"
            if text != shown:
                report(shown := text)
            if arrived > most:
                most, moved = arrived, time.monotonic()
            elif time.monotonic() - moved > stall_seconds:
                report(
                    f"failed: nothing has come for {stall_seconds:.0f} s -> look at the network to the hub; what is "
                    "complete stays, another start fetches the rest"
                )
                os._exit(1)
            if done.wait(min(_REPORT_SECONDS, stall_seconds)):
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def _explain_failure(endpoint: str, options: Options, error: Exception) -> DownloadError:
    errors = importlib.import_module("huggingface_hub.errors")
    named = f"{options.model} at {options.revision}"
    if isinstance(error, errors.GatedRepoError):
        return DownloadError(
            f"{options.model} is gated: {_reason(error)}",
            "accept its terms on the hub, and put HF_TOKEN: {secret: HF_TOKEN} into engine.env",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return DownloadError(
            f"the hub has {options.model}, but no revision {options.revision}", "correct model.revision"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return DownloadError(
            f"{endpoint} gives out no model {options.model}",
            "correct model.id, or, if it is private, put HF_TOKEN: {secret: HF_TOKEN} into engine.env",
        )
    if isinstance(error, errors.HfHubHTTPError):
        return DownloadError(
            f"the hub does not give out {named}: {_reason(error)}", "try again; look at the hub's state"
        )
    return DownloadError(f"{named} could not be fetched: {_reason(error)}", "read the lines above; start again")


def _unreachable() -> tuple[type[Exception], ...]:
    """Return the errors of a missing connection, by the HTTP library of huggingface_hub (requests before 1.0, httpx,
    httpx2 from 2.0)."""
    errors: list[type[Exception]] = [ConnectionError, TimeoutError]
    for library, names in (("requests", ("ConnectionError", "Timeout")), ("httpx", _HTTPX), ("httpx2", _HTTPX)):
        with contextlib.suppress(ImportError):
            module = importlib.import_module(library)
            errors.extend(getattr(module, name) for name in names)
    return tuple(errors)


def _status(error: Exception) -> int:
    """Return the status of an answer of the hub that is an error; 0: there was no answer."""
    return getattr(getattr(error, "response", None), "status_code", 0)


def _reason(error: Exception) -> str:
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"{type(error).__name__}: {first[:300]}"


def _one_line(text: str) -> str:
    """Put a text on one line, and without the queries of addresses: those of a download are signed."""
    return _QUERY.sub("", " ".join(text.split()))


def report(text: str) -> None:
    """Write a line to the log, which `up` shows as progress (logs/progress.py)."""
    print(f"weights: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
