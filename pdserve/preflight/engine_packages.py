"""What is installed where the engines will run, without importing any of it, and what is missing for a plan."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Collection, Mapping

from pydantic import ValidationError

from pdserve.errors import PreflightError
from pdserve.installed import distributions, lmcache_kernels
from pdserve.installed.versions import PACKAGES, TITLES
from pdserve.patches.verdict import FINGERPRINTED, MODULE, RELEASES, of_installed, same_code, untagged
from pdserve.plan.model import Plan, Versions
from pdserve.recipe.model import Recipe
from pdserve.system.interpreter import NoAnswerError, ask_interpreter

_ASK_SECONDS = 30.0


def read_versions(python: str | None, *, missing_ok: bool = False) -> Versions:
    """Versions in the environment of `python` (a path or a name on PATH; None: the running interpreter).

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
    """Raises PreflightError with all that `plan` needs and this host lacks, and how to get it.

    A command of the recipe's own (engine.command, lmcache.command) may run anything: nothing is asked of it.
    """
    needed = _needed(plan)
    lacking = [part for part in needed if getattr(versions, part) is None]
    if lacking:
        names = ", ".join(TITLES[part] for part in lacking)
        raise PreflightError(
            f"not installed for {recipe.engine.python or sys.executable}: {names}",
            where="engine.python" if recipe.engine.python else None,
            cause=f"the recipe's platform is {plan.platform}; {_origin(plan.platform)}",
            todo=_how_to_get(plan.platform, lacking, recipe.image),
        )
    if plan.platform == "rocm" and "lmcache" in needed:
        _check_kernels(plan, recipe.engine.python)
    if any(process.patches for process in plan.processes) and not recipe.engine.command:
        _check_plugin(recipe.engine.python)
    if "LD_LIBRARY_PATH" not in recipe.engine.env:
        _check_libraries({name: got for process in plan.processes for name, got in process.libraries.items()})


@functools.cache
def _installed(python: str | None) -> dict[str, str | None]:
    if python is None or python == sys.executable:
        return distributions.installed()
    try:
        answer: dict[str, str | None] = ask_interpreter(python, distributions, timeout=_ASK_SECONDS)
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
        version is not None and untagged(package, version)
        for package, version in versions.items()
        if package in FINGERPRINTED
    )


@functools.cache
def _same_code(python: str | None) -> Mapping[str, str]:
    """Package -> release, as that interpreter finds it; nothing where it cannot be asked, or pdserve is not there."""
    if python is None or python == sys.executable:
        return same_code(distributions.installed(), of_installed)
    try:
        return RELEASES.validate_python(ask_interpreter(python, MODULE, "releases", timeout=_ASK_SECONDS))
    except (NoAnswerError, ValidationError):
        return {}


def _needed(plan: Plan) -> list[str]:
    used = {name for process in plan.processes for name in process.packages}
    return [name for name in PACKAGES if name in used]


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


def _check_kernels(plan: Plan, python: str | None) -> None:
    """Without kernels for HIP LMCache copies in Python there, out of the order of the device's stream."""
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
    if python is None or python == sys.executable:
        return lmcache_kernels.compiled_for()
    try:
        kernels: str | None = ask_interpreter(python, lmcache_kernels, timeout=_ASK_SECONDS)
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
