"""The versions of vllm, lmcache and mooncake that a launch file names: its image, what it installs, what it lists."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from packaging.version import InvalidVersion, Version

from pdserve.importing.launch import Launch, Sourced
from pdserve.installed.distributions import DISTRIBUTIONS
from pdserve.installed.versions import PACKAGES

_LABELLED = re.compile(r"(?:^|[_-])(?P<package>vllm|lmcache|mooncake)[_-]v?(?P<version>\d+\.\d+[\w.]*?)(?=[_-]|$)")
"""rocm6.4_vllm_0.9.1 in a tag."""
_TAGGED = re.compile(r"v?(?P<version>\d+\.\d+\.\d+(?:\.?(?:post|rc|dev)\d+)*)(?=[_-]|$)")
"""v0.20.1-ubuntu2404: the tag begins with the version of what the repository is named after."""
_REPOSITORIES = {"lmcache": "lmcache", "vllm-openai": "vllm", "vllm-openai-rocm": "vllm", "vllm": "vllm"}
"""First or last part of an image's name -> what its tags count. The first part wins: lmcache/vllm-openai:v0.5.4 is of
LMCache."""
_PARTS = {name: part for part in PACKAGES for name in DISTRIBUTIONS[part]}
_INSTALLED = re.compile(
    rf"(?<![\w.-])(?P<name>{'|'.join(sorted(map(re.escape, _PARTS), key=len, reverse=True))})(?:\[[\w,-]*\])?"
    r"==(?P<version>\d[\w.+!-]*)"
)
_COMMENT = re.compile(r"^\s*#")


def named_versions(launch: Launch, text: str) -> dict[str, Sourced]:
    """Package -> its version, and where the file has it. The most exact source wins: what the file lists as the
    contents of its image, then what it installs, then the tag of its image. A tag without a version (nightly) names
    none."""
    versions: dict[str, Sourced] = {}
    for package, at in (*_listed(launch), *_installed(text), *_of_image(launch.image)):
        if package not in versions and _is_version(at.value):
            versions[package] = at
    return versions


def _listed(launch: Launch) -> Iterator[tuple[str, Sourced]]:
    yield from launch.frameworks.items()


def _installed(text: str) -> Iterator[tuple[str, Sourced]]:
    """`pip install lmcache==0.5.4`, wherever it stands but in a comment. Of two the first counts."""
    for number, written in enumerate(text.splitlines(), start=1):
        if "install" in written and not _COMMENT.match(written):
            for match in _INSTALLED.finditer(written):
                yield _PARTS[match["name"]], Sourced(match["version"], f"install {match['name']}", number)


def _of_image(image: Sourced | None) -> Iterator[tuple[str, Sourced]]:
    # NVIDIA counts its own releases of vLLM's image: 25.09.
    if image is None or not isinstance(image.value, str) or image.value.startswith("nvcr.io"):
        return
    name, _, tag = image.value.rpartition("/")[2].partition("@")[0].partition(":")
    labelled = {match["package"]: match["version"] for match in _LABELLED.finditer(tag)}
    for package, version in labelled.items():
        yield package, image.of(version)
    first = image.value.split("/")[-2] if "/" in image.value else ""
    package = _REPOSITORIES.get(first if first == "lmcache" else name)
    if package is not None and not labelled and (match := _TAGGED.match(tag)) is not None:
        yield package, image.of(match["version"])


def frameworks(listed: Mapping[str, Any], key: str, line: int) -> dict[str, Sourced]:
    """Of a mapping like `vllm: 0.26.1`; other names are of other tools."""
    return {name: Sourced(str(value), f"{key}.{name}", line) for name, value in listed.items() if name in PACKAGES}


def _is_version(text: Any) -> bool:
    try:
        Version(str(text))
    except InvalidVersion:
        return False
    return True
