"""Which patches the engines of a node would get and which of them would refuse to start, before anything is loaded.

The interpreter that the plan gives the engines judges its own sources by the function that the engines decide with when
they start (patches/verdict.py), so the verdict here is what happens there. Where the recipe has a container, this runs
inside of it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Iterable, Iterator, Mapping

from pydantic import ValidationError

from pdserve.patches.registry import find
from pdserve.patches.verdict import MODULE, VERDICTS, Verdict, decide, remedy
from pdserve.plan.environment import ALLOW_UNKNOWN
from pdserve.plan.process import Process
from pdserve.preflight.finding import Finding, Status
from pdserve.system.interpreter import NoAnswerError, ask_interpreter

_ASK_SECONDS = 60.0
"""It parses a dozen large files, perhaps from a network file system."""
_SOMETHING_ELSE = "it answered something else than was asked for"
_PATH = "PYTHONPATH"


def find_patches(node: str, wanted: Iterable[Process]) -> list[Finding]:
    """One finding for each patch that needs a word, and one for all others of an interpreter.

    Of a process whose command is the recipe's own nothing is known.
    """
    findings: list[Finding] = []
    for (python, path), processes in _by_interpreter(wanted).items():
        names = tuple(dict.fromkeys(name for process in processes for name in process.patches))
        verdicts = judged(python, path, names)
        if isinstance(verdicts, str):
            need = f"an interpreter that can judge the patches of {_listed(processes)}"
            fix = "correct engine.python; its engines will judge when they start"
            findings.append(_finding(node, "unknown", f"{python}: {verdicts}", need, fix))
        else:
            findings += _of_verdicts(node, processes, verdicts)
    return findings


def _by_interpreter(wanted: Iterable[Process]) -> Mapping[tuple[str, str | None], list[Process]]:
    grouped: dict[tuple[str, str | None], list[Process]] = {}
    for process in wanted:
        if process.patches and process.packages:
            path = process.env.set.get(_PATH, os.environ.get(_PATH))
            grouped.setdefault((process.argv[0], path), []).append(process)
    return grouped


@functools.cache
def judged(python: str, path: str | None, names: tuple[str, ...]) -> Mapping[str, Verdict] | str:
    """The verdict of `python` on the patches of these names, with that PYTHONPATH; a text: why there is none."""
    environ = {name: value for name, value in os.environ.items() if name != _PATH}
    if path is not None:
        environ[_PATH] = path
    try:
        answer = ask_interpreter(python, MODULE, "verdicts", *names, timeout=_ASK_SECONDS, environ=environ)
        verdicts = VERDICTS.validate_python(answer)
    except NoAnswerError as why:
        return str(why)
    except ValidationError:
        return _SOMETHING_ELSE
    return verdicts if verdicts.keys() == set(names) else _SOMETHING_ELSE


def _of_verdicts(node: str, processes: Collection[Process], verdicts: Mapping[str, Verdict]) -> Iterator[Finding]:
    well = {"apply": 0, "not-needed": 0}
    for name, verdict in verdicts.items():
        patch = find(name)
        users = [process for process in processes if name in process.patches]
        allowed = {
            allowed_name for process in users for allowed_name in process.env.set.get(ALLOW_UNKNOWN, "").split(",")
        }
        decision = decide(patch, verdict, allowed)
        need = f"code that {name} knows, for {_listed(users)}"
        if decision == "refused":
            value = f"{name} would refuse to start: {verdict.why}"
            yield _finding(node, "failed", value, need, remedy(patch))
        elif decision == "left-out":
            without = f", and {patch.serves_without}" if patch.serves_without else f": {patch.summary}"
            yield _finding(node, "warning", f"{name} would be left out{without} ({verdict.why})", need)
        elif verdict.outcome == "unknown":
            value = f"{name} would be applied, because of allow_unknown_upstream: {verdict.why}"
            yield _finding(node, "warning", value, need, "prove it with pdserve verify")
        else:
            well[decision] += 1
    if any(well.values()):
        value = f"{well['apply']} would be applied, {well['not-needed']} are not needed"
        yield _finding(node, "ok", value, f"known code for the patches of {_listed(processes)}")


def _finding(node: str, status: Status, value: str, need: str, fix: str | None = None) -> Finding:
    return Finding(node=node, check="patches", status=status, value=value, need=need, fix=fix)


def _listed(processes: Iterable[Process]) -> str:
    return ", ".join(process.name for process in processes)
