"""Whether a plan runs the same Python as what is running: the same program may be called by several names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pdserve.plan.model import Plan
from pdserve.plan.process import Process


def as_running(running: Plan, new: Plan) -> tuple[Plan, tuple[str, ...]]:
    """The new plan, with interpreters of the same environment called as they are where they run; and a line for
    processes whose environment is another one, which is a change like any other."""
    old = {process.name: process for process in running.processes}
    processes = tuple(_called_as(old.get(process.name, process), process) for process in new.processes)
    return new.model_copy(update={"processes": processes}), tuple(_changes(old, processes))


def _called_as(running: Process, new: Process) -> Process:
    old_python, new_python = _python(running), _python(new)
    if (
        old_python is None
        or new_python is None
        or old_python == new_python
        or _environment(old_python) != _environment(new_python)
    ):
        return new
    return new.model_copy(update={"argv": (old_python, *new.argv[1:])})


def _changes(old: dict[str, Process], processes: tuple[Process, ...]) -> Iterator[str]:
    names: dict[tuple[str, str], list[str]] = {}
    for process in processes:
        old_python, new_python = _python(old.get(process.name, process)), _python(process)
        if old_python is not None and new_python is not None and old_python != new_python:
            names.setdefault((old_python, new_python), []).append(process.name)
    for (old_python, new_python), whose in names.items():
        yield (
            f"{', '.join(whose)}: it runs in the environment of {old_python}, and here it would in that of "
            f"{new_python}: a change"
        )


def _python(process: Process) -> str | None:
    return process.argv[0] if Path(process.argv[0]).name.startswith("python") else None


def _environment(python: str) -> tuple[Path, Path | None]:
    """What identifies a Python: the program, and the virtual environment in whose folder it is called."""
    folder = Path(python).parent.resolve().parent
    return Path(python).resolve(), folder if (folder / "pyvenv.cfg").exists() else None
