"""The packages where the engines will run, by their own interpreter, and what is missing or wrong for a plan."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from pdserve.errors import PreflightError
from pdserve.installed import distributions
from pdserve.installed.distributions import NON_CUDA_WHEEL, TORCH_CUDA, MooncakeBuild, mooncake_wheel_for
from pdserve.installed.versions import PACKAGES, TITLES
from pdserve.logs.causes import explain
from pdserve.node.supervised import environment
from pdserve.patches.registry import find
from pdserve.patches.verdict import (
    FINGERPRINTED,
    MODULE,
    RELEASES,
    VERDICTS,
    Verdict,
    decide,
    is_untagged,
    of_installed,
    remedy,
    same_code,
)
from pdserve.plan.environment import ALLOW_UNKNOWN
from pdserve.plan.model import Plan, Versions
from pdserve.plan.process import Process
from pdserve.preflight.finding import Finding, NodeNeed
from pdserve.recipe.model import Recipe
from pdserve.system.interpreter import NoAnswerError, ask_interpreter

_ASK_SECONDS = 30.0
_JUDGE_SECONDS = 60.0
"""It parses a dozen large files, perhaps from a network file system."""
_LOAD_SECONDS = 120.0
"""It imports torch, perhaps from a network file system."""
_SOMETHING_ELSE = "it answered something else than was asked for"
_PATH = "PYTHONPATH"
_RUNTIMES = {"rocm": "hip", "cuda": "cuda"}
_BUILT_FOR = {"hip": "ROCm", "none": f"no device ({NON_CUDA_WHEEL})"}
ONLY_ITS_RUNTIME = (
    "Mooncake copies device memory, over tcp too, only through the runtime that it was compiled for (USE_CUDA, USE_HIP)"
)
_TWO_OWNERS = "the one that was installed last has overwritten the files of the other, which gives the version"


def read_versions(python: str | None, *, missing_ok: bool = False) -> Versions:
    """Read the versions in the environment of `python` (a path or a name on PATH; None: the running interpreter).

    Raises PreflightError when that interpreter cannot be run; with `missing_ok` (a plan for another host) nothing is
    known of it then.
    """
    try:
        installed = _installed(python)
    except PreflightError:
        if not missing_ok:
            raise
        return Versions()
    versions = {part: installed[part] for part in PACKAGES}
    return Versions(**versions, same_code=_same_code(python) if _untagged(versions) else {})


def check_installed(versions: Versions, plan: Plan, recipe: Recipe) -> None:
    """Check that this host has all packages that `plan` needs. Raises PreflightError with what it lacks, and how to get
    it.

    A command of the recipe's own (engine.command, lmcache.command) may run anything: nothing is asked of it.
    """
    used = {name for process in plan.processes for name in process.packages}
    lacking = [part for part in PACKAGES if part in used and getattr(versions, part) is None]
    if lacking:
        names = ", ".join(TITLES[part] for part in lacking)
        raise PreflightError(
            f"not installed for {recipe.engine.python or sys.executable}: {names}",
            where="engine.python" if recipe.engine.python else None,
            cause=f"the recipe's platform is {plan.platform}; {_origin(plan.platform)}",
            todo=_how_to_get(plan.platform, lacking, recipe.image),
        )
    if plan.platform == "rocm" and "lmcache" in used:
        _check_kernels(recipe.engine.python)
    if any(process.patches for process in plan.processes) and not recipe.engine.command:
        _check_plugin(recipe.engine.python)
    if "LD_LIBRARY_PATH" not in recipe.engine.env:
        _check_libraries({name: got for process in plan.processes for name, got in process.libraries.items()})


def _is_own(python: str | None) -> bool:
    return python in (None, sys.executable)


@functools.cache
def _installed(python: str | None) -> dict[str, str | None]:
    if python is None or _is_own(python):
        return distributions.installed()
    try:
        answer: dict[str, str | None] = ask_interpreter(python, distributions, "versions", timeout=_ASK_SECONDS)
    except NoAnswerError as why:
        raise PreflightError(
            f"{python} cannot be used as a Python interpreter: {why}",
            where="engine.python",
            cause="it is not on this host, or not a Python of this host",
            todo="correct engine.python, or leave it out to use the interpreter that runs pdserve",
        ) from None
    return answer


def _untagged(versions: Mapping[str, str | None]) -> bool:
    return any(
        version is not None and is_untagged(package, version)
        for package, version in versions.items()
        if package in FINGERPRINTED
    )


@functools.cache
def _same_code(python: str | None) -> Mapping[str, str]:
    """Return package -> release, as that interpreter finds it; nothing where it cannot be asked, or has no pdserve."""
    if python is None or _is_own(python):
        return same_code(distributions.installed(), of_installed)
    try:
        return RELEASES.validate_python(ask_interpreter(python, MODULE, "releases", timeout=_ASK_SECONDS))
    except (NoAnswerError, ValidationError):
        return {}


def _origin(platform: str) -> str:
    return {
        "rocm": "there the container image brings the engine",
        "cpu": "there the engine comes from this repository's pinned environment",
    }.get(platform, "there the engine comes with pdserve's cuda extra")


def _how_to_get(platform: str, lacking: Collection[str], image: str | None) -> str:
    if platform == "cpu":
        return "./scripts/setup, then run .venv/bin/pdserve"
    if platform == "rocm":
        inside = f"run pdserve inside the image ({image})" if image else "run pdserve inside an image that has it"
        lmcache = "; LMCache: a -rocm wheel of its releases" if "lmcache" in lacking else ""
        return f"{inside}, or name the interpreter that has it with engine.python{lmcache}"
    return "pip install 'pdserve[cuda]'"


def _check_kernels(python: str | None) -> None:
    """Refuse an LMCache without kernels for HIP: it copies in Python, out of the order of the device's stream."""
    kernels = _kernels(python)
    if kernels not in ("cuda", "none"):
        return
    raise PreflightError(
        f"the LMCache of {python or sys.executable} is not a ROCm build: it has "
        + ("kernels for CUDA only" if kernels == "cuda" else "no compiled kernels"),
        where="engine.python" if python else None,
        cause="PyPI's wheel has CUDA kernels only; on ROCm LMCache then copies in Python, not in the order of the "
        "device's stream, and stores wrong KV without a word (lmcache#4870)",
        todo="pip install --no-deps a -rocm wheel of LMCache's releases, or build it with BUILD_WITH_HIP=1",
    )


@functools.cache
def _kernels(python: str | None) -> str | None:
    if python is None or _is_own(python):
        return distributions.lmcache_kernels()
    try:
        kernels: str | None = ask_interpreter(python, distributions, "kernels", timeout=_ASK_SECONDS)
    except NoAnswerError:
        return None
    return kernels


def _check_plugin(python: str | None) -> None:
    if _installed(python)["pdserve"] is None:
        raise PreflightError(
            f"pdserve is not installed for {python or sys.executable}, so the patches of this plan cannot be loaded",
            where="engine.python" if python else None,
            cause="vLLM finds them through an entry point of the installed package, not through the source folder",
            todo=f"{python or sys.executable} -m pip install pdserve (from a clone: pip install -e .), or patches: []",
        )


def _check_libraries(needed: Mapping[str, str]) -> None:
    missing = [name for name in needed if not _loads(name)]
    if missing:
        raise PreflightError(
            f"system libraries that the engines' packages link to are missing: {', '.join(missing)}",
            cause="minimal images leave them out; they are needed whatever the connector's protocol is",
            todo=f"apt-get install -y {' '.join(needed[name] for name in missing)}",
        )


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def find_mooncake_wheel(plan: Plan, node: str, starting: Collection[Process]) -> list[Finding]:
    """Judge whether the Mooncake of the engines can be loaded, and can copy the memory of the plan's devices: one
    finding for each interpreter whose engines use it; on CPU only where something is wrong.

    vLLM hides the import that fails: its engines end with "Mooncake is not available". Of a process whose command is
    the recipe's own nothing is said."""
    users: dict[str, list[Process]] = {}
    for process in starting:
        if process.is_engine and "mooncake" in process.packages:
            users.setdefault(process.argv[0], []).append(process)
    found = (_look_at_wheel(plan.platform, node, python, processes) for python, processes in users.items())
    return [finding for finding in found if finding is not None]


def mooncake_replacement(platform: str, build: MooncakeBuild | None = None) -> str:
    """Say how to come to a Mooncake that copies the memory of the platform's devices."""
    if platform == "rocm":
        return "install a Mooncake that was built for ROCm (cmake -DUSE_HIP=ON) in its place, or use connector nixl"
    wanted = NON_CUDA_WHEEL
    if platform != "cpu":
        wanted = mooncake_wheel_for((build and build.torch_cuda) or TORCH_CUDA)
    # All of them: the one that is uninstalled takes along files that the others have too.
    there = " ".join(build.distributions) if build is not None else NON_CUDA_WHEEL
    return f"pip uninstall -y {there}, then pip install {wanted}" if there else f"pip install {wanted}"


def _look_at_wheel(platform: str, node: str, python: str, processes: list[Process]) -> Finding | None:
    does = "can be loaded" if platform == "cpu" else f"copies the memory of {platform} devices"
    need, mooncake = (
        NodeNeed(node, "versions", f"one that {does}, for {_names(processes)}"),
        f"the Mooncake of {python}",
    )
    try:
        environ = environment(processes[0].env, os.environ, {})
        answer = ask_interpreter(python, distributions, "mooncake", timeout=_LOAD_SECONDS, environ=environ)
    except NoAnswerError as why:
        return need.found("unknown", f"{mooncake} could not be tried: {why}")
    if answer is None:
        return None
    build, error = MooncakeBuild(**answer["build"]), answer["error"]
    value = f"{mooncake} was built for {_BUILT_FOR.get(build.device) or f'CUDA {build.cuda}'}"
    replace = mooncake_replacement(platform, build)
    if platform in _RUNTIMES and build.device not in ("unknown", _RUNTIMES[platform]):
        return need.found("failed", value, replace, [f"likely cause: {ONLY_ITS_RUNTIME}"])
    if error is not None:
        return need.found("failed", f"{mooncake} cannot be loaded: {error}", *_why_not_loaded(error, build, replace))
    if build.cuda is not None and build.torch_cuda not in (None, build.cuda):
        value += f", and torch brings CUDA {build.torch_cuda}: it loads by a runtime of this host"
        return need.found("warning", value, replace)
    if len(build.distributions) > 1:
        value = f"{mooncake} is of several wheels, {' and '.join(build.distributions)}: {_TWO_OWNERS}"
        return need.found("warning", value, replace)
    return need.found("ok", value) if platform in _RUNTIMES and build.device != "unknown" else None


def _why_not_loaded(error: str, build: MooncakeBuild, replace: str) -> tuple[str, list[str]]:
    """Return the fix, and the evidence."""
    if build.cuda is not None and f"libcudart.so.{build.cuda}" in error:
        brings = f"CUDA {build.torch_cuda}" if build.torch_cuda is not None else "no CUDA"
        return replace, [f"likely cause: it was built for CUDA {build.cuda}, and torch brings {brings}"]
    hint = explain([error], exit_code=None, role="")
    if hint is None:
        return "python -c 'import torch, mooncake.engine' shows the whole error", []
    return hint.todo, [f"likely cause: {hint.cause}"]


def find_patches(node: str, wanted: Iterable[Process]) -> list[Finding]:
    """Say which patches the engines would get and which would refuse to start: one finding for each patch that needs a
    word, and one for all others of an interpreter.

    The interpreter that the plan gives the engines judges its own sources by the function that the engines decide with
    when they start (patches/verdict.py), so the verdict here is what happens there. Of a process whose command is the
    recipe's own nothing is known.
    """
    users: dict[tuple[str, str | None], list[Process]] = {}
    for process in wanted:
        if process.patches and process.packages:
            path = process.env.set.get(_PATH, os.environ.get(_PATH))
            users.setdefault((process.argv[0], path), []).append(process)
    findings: list[Finding] = []
    for (python, path), processes in users.items():
        names = tuple(dict.fromkeys(name for process in processes for name in process.patches))
        verdicts = _judged(python, path, names)
        if isinstance(verdicts, str):
            text = f"an interpreter that can judge the patches of {_names(processes)}"
            fix = "correct engine.python; its engines will judge when they start"
            findings.append(NodeNeed(node, "patches", text).found("unknown", f"{python}: {verdicts}", fix))
        else:
            findings += _judge_patches(node, processes, verdicts)
    return findings


@functools.cache
def _judged(python: str, path: str | None, names: tuple[str, ...]) -> Mapping[str, Verdict] | str:
    """Return the verdict of `python` on the patches of these names, with that PYTHONPATH; a text: why there is none."""
    environ = {name: value for name, value in os.environ.items() if name != _PATH}
    if path is not None:
        environ[_PATH] = path
    try:
        answer: Any = ask_interpreter(python, MODULE, "verdicts", *names, timeout=_JUDGE_SECONDS, environ=environ)
        verdicts = VERDICTS.validate_python(answer)
    except NoAnswerError as why:
        return str(why)
    except ValidationError:
        return _SOMETHING_ELSE
    return verdicts if verdicts.keys() == set(names) else _SOMETHING_ELSE


def _judge_patches(node: str, processes: Collection[Process], verdicts: Mapping[str, Verdict]) -> Iterator[Finding]:
    well = {"apply": 0, "not-needed": 0}
    for name, verdict in verdicts.items():
        patch = find(name)
        users = [process for process in processes if name in process.patches]
        allowed = {each for process in users for each in process.env.set.get(ALLOW_UNKNOWN, "").split(",")}
        decision = decide(patch, verdict, allowed)
        need = NodeNeed(node, "patches", f"code that {name} knows, for {_names(users)}")
        if decision == "refused":
            yield need.found("failed", f"{name} would refuse to start: {verdict.why}", remedy(patch))
        elif decision == "left-out":
            without = f", and {patch.serves_without}" if patch.serves_without else f": {patch.summary}"
            yield need.found("warning", f"{name} would be left out{without} ({verdict.why})")
        elif verdict.outcome == "unknown":
            value = f"{name} would be applied, because of allow_unknown_upstream: {verdict.why}"
            yield need.found("warning", value, "prove it with pdserve verify")
        else:
            well[decision] += 1
    if any(well.values()):
        need = NodeNeed(node, "patches", f"known code for the patches of {_names(processes)}")
        yield need.found("ok", f"{well['apply']} would be applied, {well['not-needed']} are not needed")


def _names(processes: Iterable[Process]) -> str:
    return ", ".join(process.name for process in processes)
