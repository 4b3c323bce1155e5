"""Fetches the weights of a model into the hub's cache folder: `python -m pdserve.weights`, before any engine starts.

Runs where the engines run, with their interpreter, because the cache and huggingface_hub are theirs. It ends with 0
when everything that vLLM will open is there; a line that begins with `weights: failed:` is its last word otherwise.

Nodes that share a cache folder all run it: the first takes the lock in the folder, the others wait and then find all
of it there. (huggingface_hub has a lock for each file, which would do, but two nodes would then take turns.)
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import glob
import importlib
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pdserve.atomic_write import replace_text
from pdserve.weights.files import BrokenIndexError, CacheFolder, light, wanted

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
    """What is there now."""

    commit: str
    size: int | None
    """Bytes; None where the hub was not asked."""


class Options(NamedTuple):
    """The command line."""

    model: str
    revision: str
    cache_dir: str | None
    load_format: str
    stall_seconds: float


def main() -> int:
    """Entry."""
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
        report(f"failed: {_plain(str(failure))} -> {failure.todo}")
        return 1
    if taken.record is not None:
        record = {"model": options.model, "revision": options.revision, **result._asdict()}
        taken.record.parent.mkdir(parents=True, exist_ok=True)
        replace_text(taken.record, json.dumps(record))
    return 0


def provide(options: Options) -> Revision:
    """Everything of the model that vLLM needs, in the cache folder. Raises DownloadError."""
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
        raise _explained(constants.ENDPOINT, options, error) from None


def _fetch(hub: Any, cache: Path, folder: CacheFolder, options: Options) -> Revision:
    repository = _look_up(hub, options)
    if repository.lacks(folder, options.load_format):
        with _alone(folder):
            if repository.lacks(folder, options.load_format):
                _download(hub, cache, folder, options, repository)
    if options.revision != repository.commit:
        _remember(folder, options.revision, repository.commit)
    size = sum(repository.wanted(folder, options.load_format).values())
    report(f"{size / _GB:.1f} GB complete at {repository.commit}")
    return Revision(repository.commit, size)


class Repository(NamedTuple):
    """What the hub has at one commit."""

    model: str
    commit: str
    sizes: dict[str, int]

    def light(self) -> dict[str, int]:
        """The small files, which name the large ones."""
        return {file: self.sizes[file] for file in light(self.sizes)}

    def wanted(self, folder: CacheFolder, load_format: str) -> dict[str, int]:
        """All files that vLLM needs, once the small ones are there. Raises DownloadError: there is nothing to load."""
        with _index_read():
            weights = wanted(self.sizes, load_format, folder.snapshot(self.commit))
        if absent := sorted({*weights} - {*self.sizes}):
            raise DownloadError(
                f"{self.model} has an index, but not its file {absent[0]}", "choose another model.revision"
            )
        if not weights and load_format.lower() != "dummy":
            raise DownloadError(f"{self.model} has no weights that vLLM loads", "correct model.id, or set load-format")
        return {**self.light(), **{file: self.sizes[file] for file in weights}}

    def lacks(self, folder: CacheFolder, load_format: str) -> bool:
        """Whether anything must be fetched."""
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
    with _watched(folder, commit, sizes, options.stall_seconds):
        download(sizes)
    if missing := folder.missing(commit, sizes):
        raise DownloadError(f"{missing[0]} is not complete after the download", f"remove {folder.path} and start again")


def _already_there(folder: CacheFolder, options: Options, why: str) -> Revision:
    """What can be done without the hub: to look whether it is needed at all."""
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
    """The file behind a broken index is to be removed: its link in the snapshot would be made again to the same one."""
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
    """As huggingface_hub does: an engine that cannot reach the hub finds by it what the revision means."""
    if folder.commit_of(revision) != commit:
        reference = folder.path / "refs" / revision
        reference.parent.mkdir(parents=True, exist_ok=True)
        replace_text(reference, commit)


@contextlib.contextmanager
def _alone(folder: CacheFolder) -> Iterator[None]:
    """One process at a time, also from other nodes: a lock of POSIX goes over NFS. The kernel, or the server of the
    file system, lets go of it when its holder dies."""
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
def _watched(folder: CacheFolder, commit: str, sizes: Mapping[str, int], stall_seconds: float) -> Iterator[None]:
    """Reports its progress while it runs, measured on the disk, and ends the process when nothing comes any more: the
    threads of a download cannot be ended."""
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


def _explained(endpoint: str, options: Options, error: Exception) -> DownloadError:
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
    """Of no connection, by the HTTP library of huggingface_hub (requests before 1.0, httpx, httpx2 from 2.0)."""
    errors: list[type[Exception]] = [ConnectionError, TimeoutError]
    for library, names in (("requests", ("ConnectionError", "Timeout")), ("httpx", _HTTPX), ("httpx2", _HTTPX)):
        with contextlib.suppress(ImportError):
            module = importlib.import_module(library)
            errors.extend(getattr(module, name) for name in names)
    return tuple(errors)


def _status(error: Exception) -> int:
    """Of an answer of the hub that is an error; 0: there was no answer."""
    return getattr(getattr(error, "response", None), "status_code", 0)


def _reason(error: Exception) -> str:
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"{type(error).__name__}: {first[:300]}"


def _plain(text: str) -> str:
    """On one line, and without the queries of addresses: those of a download are signed."""
    return _QUERY.sub("", " ".join(text.split()))


def report(text: str) -> None:
    """Write a line to the log, which `up` shows as progress (logs/progress.py)."""
    print(f"weights: {text}", flush=True)
