"""containers/*.Dockerfile without a docker: what they pin is what the project pins, and what they copy is there.

tests/containers/test_build.py has docker read them.
"""

from __future__ import annotations

import re
import tomllib

from packaging.requirements import Requirement

from pdserve.installed.distributions import TORCH_CUDA, mooncake_wheel_for
from pdserve.installed.image_check import KERNELS, MOONCAKE
from tests.launch.deployment import REPOSITORY
from tests.tables import each_row

FOLDER = REPOSITORY / "containers"
PLATFORMS = sorted(KERNELS)
CONTEXT = ["requirements/cpu-stack.lock.txt", "pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "pdserve"]

Step = tuple[str, str]
"""Instruction and the rest of its line, continuations joined."""


def steps(text: str) -> list[Step]:
    """Of a Dockerfile. Comment lines may stand between continued lines."""
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n", " ", lines)
    split = (line.partition(" ") for line in joined.splitlines() if line.strip())
    return [(name, " ".join(rest.split())) for name, _, rest in split]


def steps_of(platform: str) -> list[Step]:
    return steps((FOLDER / f"{platform}.Dockerfile").read_text())


def arguments(platform: str) -> dict[str, str]:
    """Names of its ARGs and their defaults."""
    return dict(rest.split("=", 1) for name, rest in steps_of(platform) if name == "ARG")


def locked(name: str) -> str:
    """The version in the lock of the CPU stack, which is the one that the tests run on."""
    lock = (REPOSITORY / "requirements/cpu-stack.lock.txt").read_text()
    found = re.search(rf"^{re.escape(name)}==(\S+)$", lock, re.MULTILINE)
    assert found is not None, name
    return found[1]


def of_the_extra(name: str) -> Requirement:
    """The range in which pdserve takes it on CUDA."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    [requirement] = [each for each in map(Requirement, project["optional-dependencies"]["cuda"]) if each.name == name]
    return requirement


def test_what_docker_is_sent_is_what_is_copied() -> None:
    assert all((REPOSITORY / source).exists() for source in CONTEXT)
    lines = (REPOSITORY / ".dockerignore").read_text().splitlines()
    assert [line[1:] for line in lines if line.startswith("!")] == CONTEXT
    assert lines.index("*") < min(index for index, line in enumerate(lines) if line.startswith("!"))


@each_row("platform", PLATFORMS)
def test_pdserve_is_compiled_and_the_build_fails_where_it_cannot_be(platform: str) -> None:
    [install] = [rest for name, rest in steps_of(platform) if name == "RUN" and "/build &&" in rest]
    assert install.startswith("PDSERVE_COMPILE=1 ")
    assert "--no-deps" not in install  # the lock of the engines lacks something that pdserve imports
    assert install.endswith("&& rm -rf /build")


@each_row("platform", ["cuda", "rocm"])
def test_the_engines_are_those_that_pdserve_knows(platform: str) -> None:
    pins = arguments(platform)
    assert pins["LMCACHE"].removeprefix("v") == locked("lmcache")
    assert pins["LMCACHE"].removeprefix("v") in of_the_extra("lmcache").specifier
    assert pins["MOONCAKE"] in of_the_extra(mooncake_wheel_for(TORCH_CUDA)).specifier
    assert pins["VLLM"].removeprefix("v") in of_the_extra("vllm").specifier


@each_row("platform", PLATFORMS)
def test_mooncake_is_a_wheel_that_can_copy_the_memory_of_the_platform(platform: str) -> None:
    if platform == "cuda":
        named = {arguments(platform)["MOONCAKE_WHEEL"]}
    else:
        text = (FOLDER / "rocm.Dockerfile" if platform == "rocm" else REPOSITORY / CONTEXT[0]).read_text()
        named = set(re.findall(r"(mooncake-transfer-engine[a-z0-9-]*)==", text))
    assert len(named) == 1
    assert named <= set(MOONCAKE[platform])


def test_the_cpu_image_has_every_library_that_setup_installs() -> None:
    setup = (REPOSITORY / "scripts/setup").read_text()
    packages = re.findall(r"has_library \S+ \|\| packages\+=\((\S+)\)", setup)
    assert len(packages) == 4
    [install] = [rest for name, rest in steps_of("cpu") if "apt-get install" in rest]
    assert set(packages) <= set(install.split())
