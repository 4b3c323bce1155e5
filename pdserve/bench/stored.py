"""Where results are: beside the runs of their deployment, so that they outlive a run that is removed.

<home>/<deployment>/bench/<id>/
    result.json                      provenance, figures and verdict of every measurement
    events.jsonl                     the history of the run, to the end of the last measurement
    <load>.<repeat>.json, .log       the client's own result, and what it printed
    <load>.<repeat>.warmup.*         the same of the warm-up, which counts in nothing
"""

from __future__ import annotations

from pathlib import Path

from pdserve.bench.result import BenchResult
from pdserve.errors import StateError
from pdserve.run.stored_model import read_model

RESULT, EVENTS = "result.json", "events.jsonl"
_FOLDER = "bench"


def new_folder(root: Path, deployment: str, bench_id: str) -> Path:
    return root / deployment / _FOLDER / bench_id


def read_result(root: Path, which: str) -> BenchResult:
    """`which`: the id of a benchmark, its folder, or its file. Raises StateError."""
    file = result_file(root, which)
    try:
        data = file.read_bytes()
    except OSError as error:
        raise StateError(
            "this result cannot be read", where=str(file), cause=error.strerror or str(error), todo=_known(root)
        ) from None
    todo = "measure again: pdserve bench"
    return read_model(BenchResult, data, file, other_version=todo, damaged=todo)


def result_file(root: Path, which: str) -> Path:
    """Where it should be. Raises StateError for what is no id, no folder and no file."""
    path = Path(which)
    if path.is_file():
        return path
    if path.is_dir():
        return path / RESULT
    matches = sorted(root.glob(f"*/{_FOLDER}/{which}/{RESULT}")) if "/" not in which and "*" not in which else []
    if not matches:
        raise StateError(
            f"there is no benchmark {which!r}",
            where=str(root),
            cause="it is no id, no folder and no file of a result",
            todo=_known(root),
        )
    return matches[0]


def _known(root: Path) -> str:
    ids = sorted(file.parent.name for file in root.glob(f"*/{_FOLDER}/*/{RESULT}"))
    return (
        f"the newest results are {', '.join(ids[-5:])}" if ids else "make a result: pdserve bench --concurrency 1,4,8"
    )
