"""Where the image of a container comes from, and the tools that look for it and fetch it. Argument lists only.

docker keeps images on each node. apptainer and pyxis get one file that all nodes share, made once: a pull on every
node would unpack the same tens of gigabytes as many times.
"""

from __future__ import annotations

import hashlib
import posixpath
import re

from pdserve.recipe.sections import Container, Kind

_REGISTRY = re.compile(r"(?P<registry>localhost|[^/]*[.:][^/]*)/(?P<rest>.+)")
_ENDING = {"apptainer": ".sif", "pyxis": ".sqsh"}


def is_file(image: str) -> bool:
    """Whether it is a file (or an unpacked folder) of the node, and no name in a registry."""
    return image.startswith(("/", "./", "../")) or image.endswith((".sif", ".sqsh"))


def shared_file(kind: Kind, image: str, store: str) -> str | None:
    """The file in the folder `store` that is made of an image of a registry; None: there is no need of one."""
    bare = image.removeprefix("docker://")
    if kind == "docker" or is_file(bare) or (kind == "pyxis" and "://" in bare):
        return None
    return posixpath.join(store, f"{named_after(image)}{_ENDING[kind]}")


def named_after(*parts: str) -> str:
    """A file name that people recognise, and that no other text has."""
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:10]
    return f"{re.sub('[^A-Za-z0-9.]+', '-', parts[-1].removeprefix('docker://')).strip('-')[-80:]}-{digest}"


def as_docker(image: str) -> str:
    """As docker names it."""
    return image.removeprefix("docker://")


def as_apptainer(image: str) -> str:
    """As apptainer names it."""
    return image if is_file(image) or "://" in image else f"docker://{image}"


def as_enroot(image: str) -> str:
    """`registry/name:tag` as enroot writes it: `registry#name:tag`."""
    bare = image.removeprefix("docker://")
    if is_file(bare) or "#" in bare or "://" in bare:
        return bare
    match = _REGISTRY.fullmatch(bare)
    if match is None:
        return bare
    rest = match.group("rest")
    return rest if match.group("registry") == "docker.io" else f"{match.group('registry')}#{rest}"


def look_argv(container: Container, image: str) -> tuple[str, ...]:
    """Ends with 0 where the node has it; docker prints its id."""
    if container.kind == "docker":
        return ("docker", "image", "inspect", "--format={{.Id}}", as_docker(image))
    return ("test", "-r", image)


def fetch_argv(kind: Kind, image: str, file: str) -> tuple[str, ...]:
    """Gets it out of its registry; `file`: what apptainer or enroot shall write."""
    if kind == "docker":
        return ("docker", "pull", as_docker(image))
    if kind == "apptainer":
        return ("apptainer", "pull", file, as_apptainer(image))
    return ("enroot", "import", f"--output={file}", f"docker://{as_enroot(image)}")


def docker_root_argv() -> tuple[str, ...]:
    """Prints the folder in which docker keeps images."""
    return ("docker", "info", "--format={{.DockerRootDir}}")


def free_argv(folder: str) -> tuple[str, ...]:
    """Prints a head and then the free bytes of a folder's disk."""
    return ("df", "--output=avail", "--block-size=1", folder)


def layers(text: str) -> str | None:
    """How far `docker pull` is, by what it prints without a terminal: a line for each step of each layer."""
    states: dict[str, str] = dict(re.findall(r"^([0-9a-f]{12}): (.+?)\s*$", text, re.MULTILINE))
    if not states:
        return None
    unpacked = sum(state in ("Pull complete", "Already exists") for state in states.values())
    here = unpacked + sum(state == "Download complete" for state in states.values())
    return f"{here} of {len(states)} layers downloaded, {unpacked} unpacked"
