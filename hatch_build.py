"""Compiles the proxy's hot modules with mypyc when a wheel is built: a quarter to a half less CPU for each request.

- Only what does not wait while it handles an exception: see the list in pyproject.toml.
- An editable installation is never compiled: an extension module hides the source file beside it, and an edit would
  change nothing.
- Without a C compiler that finds Python's headers the wheel is pure Python; `pdserve --version` says which one it is.
  PDSERVE_COMPILE=1 makes that an error, PDSERVE_COMPILE=0 never compiles.

hatch-mypyc would do this too, but it builds inside the source tree, leaves its results there (the trap above) and has
no way to do without a compiler.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from contextlib import ExitStack
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_SETUP = """
import sys
from mypyc.build import mypycify
from setuptools import setup

# What it type-checks on the way is the tests' to judge.
arguments = ["--ignore-missing-imports", *sys.argv.pop().split(",")]
setup(name="pdserve", packages=[], ext_modules=mypycify(arguments, opt_level="3", debug_level="0"))
"""


class CompiledProxy(BuildHookInterface[Any]):
    """`modules` of its table in pyproject.toml are compiled, together: calls between them are then those of C."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """Only where there is something to compile: what it is built with, and what its modules import. An editable
        installation gets them too: it is not known here which one is asked for."""
        if self.target_name != "wheel" or _asked() is False or _lacking() is not None:
            return []
        return [*self.config["compile-requires"], *self.metadata.core.dependencies]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel" or version == "editable" or _asked() is False:
            return
        lacking = _lacking() or ("there is no mypyc" if find_spec("mypyc") is None else None)
        if lacking and _asked():
            raise RuntimeError(f"{lacking}, and PDSERVE_COMPILE=1 asks for a compiled proxy")
        if lacking:
            self.app.display_warning(f"{lacking}: the proxy is not compiled and takes more CPU")
            return
        with ExitStack() as stack:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="pdserve-build-")))
            for file in self._compile(folder):
                build_data["force_include"][str(file)] = str(file.relative_to(folder))
            self._until_packed = stack.pop_all()
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "_until_packed"):
            self._until_packed.close()

    def _compile(self, folder: Path) -> list[Path]:
        """The extension modules, in `folder` as they are to be in the wheel."""
        source = Path(self.root) / "pdserve"
        shutil.copytree(source, folder / "pdserve", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        (folder / "setup.py").write_text(_SETUP, encoding="utf-8")
        modules = _matching(folder, self.config["modules"])
        argv = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace", ",".join(modules)]
        done = subprocess.run(
            argv, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"mypyc failed; PDSERVE_COMPILE=0 does without it:\n{done.stdout}")
        return sorted(folder.glob("*.so")) + sorted((folder / "pdserve").rglob("*.so"))


def _matching(root: Path, patterns: list[str]) -> list[str]:
    """The modules that `modules` of pyproject.toml lists, below `root`. What matches nothing is an error."""
    modules = []
    for pattern in patterns:
        matches = sorted(str(path.relative_to(root)) for path in root.glob(pattern))
        if not matches:
            raise ValueError(f"pyproject.toml, modules to compile: {pattern} is no file; correct or remove it")
        modules += matches
    return modules


def _asked() -> bool | None:
    """What PDSERVE_COMPILE says; None: nothing."""
    said = os.environ.get("PDSERVE_COMPILE", "")
    if said not in ("", "0", "1"):
        raise ValueError(f"PDSERVE_COMPILE is 0 or 1, not {said!r}")
    return said == "1" if said else None


@cache
def _lacking() -> str | None:
    """What is missing to compile for this Python; None: nothing. Tried, for a compiler alone is not enough."""
    command = shlex.split(os.environ.get("CC", "")) or shlex.split(sysconfig.get_config_var("CC") or "cc")
    if shutil.which(command[0]) is None:
        return f"there is no {command[0]}"
    with TemporaryDirectory(prefix="pdserve-build-") as folder:
        probe = Path(folder) / "probe.c"
        probe.write_text("#include <Python.h>\n#include <stdlib.h>\n", encoding="utf-8")
        argv = [*command, f"-I{sysconfig.get_path('include')}", "-c", str(probe), "-o", f"{folder}/probe.o"]
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        said = done.stdout.strip().splitlines()
        return f"{command[0]} cannot compile for Python.h ({said[0] if said else f'exit code {done.returncode}'})"
    return None
