"""`up` on a running deployment by another Python: the same environment under another name is no change."""

from __future__ import annotations

import sys
from pathlib import Path

from pdserve.operations.look import keep_interpreters
from pdserve.plan.model import Plan
from tests.plan.kit import plan
from tests.plan.kit import recipe as planned_recipe


def environment(folder: Path) -> Path:
    """A virtual environment of its own, with the packages of this one."""
    program = folder / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.symlink_to(Path(sys.executable).resolve())
    (program.parent / "python3").symlink_to("python")
    (folder / "pyvenv.cfg").write_text(f"home = {Path(sys.executable).resolve().parent}\n")
    (folder / "lib").symlink_to(Path(sys.prefix) / "lib")
    return program


def run_by(python: Path) -> Plan:
    made = plan(planned_recipe())
    argv = {process.name: (str(python), *process.argv[1:]) for process in made.processes}
    return made.model_copy(
        update={"processes": tuple(p.model_copy(update={"argv": argv[p.name]}) for p in made.processes)}
    )


def test_another_environment_is_one_although_its_program_is_the_same(tmp_path: Path) -> None:
    first, other = environment(tmp_path / "one"), environment(tmp_path / "other")
    new = run_by(other)
    adapted, warnings = keep_interpreters(run_by(first), new)
    assert adapted == new
    names = ", ".join(new.names())
    assert warnings == (
        f"{names}: it runs in the environment of {first}, and here it would in that of {other}: a change",
    )
