"""Why a node cannot have an image, by what docker, apptainer or enroot print: cause and fix."""

from __future__ import annotations

import re
from typing import NamedTuple


class ImageFault(NamedTuple):
    """`cause` and `todo` of an error. What stands in braces is filled in: the node, the image, the program, the user,
    and groups of the pattern."""

    cause: str
    todo: str


_FAULTS: tuple[tuple[re.Pattern[str], ImageFault], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), ImageFault(cause, todo))
    for pattern, cause, todo in (
        (
            r"permission denied while trying to connect|dial unix \S+ connect: permission denied",
            "this user may not use the socket of docker there: it takes membership in the group docker",
            "on {node}: sudo usermod -aG docker {user}, then log in anew (`id` shows the group); where only `sudo "
            "docker` works pdserve cannot use docker, because it could not stop what sudo started: use apptainer",
        ),
        (
            r"Cannot connect to the Docker daemon at (?P<socket>\S+?)\.?\s",
            "no docker daemon answers at {socket}: dockerd does not run there, or DOCKER_HOST names another socket",
            "on {node}: sudo systemctl start docker; `docker info` must answer",
        ),
        (
            r"no space left on device|Disk quota exceeded",
            "the disk is full: the layers are kept beside what is unpacked from them",
            "make room on {node} (docker system df; apptainer unpacks in APPTAINER_TMPDIR, enroot in ENROOT_TEMP_PATH)",
        ),
        (
            r"toomanyrequests|rate limit",
            "the registry gives out no more to this address for now",
            "log in there (docker login), or take a mirror: set container.image",
        ),
        (
            r"no matching manifest for|does not match the (?:specified|detected) (?:host )?platform",
            "the image is of another processor architecture",
            "set container.image to one for that node's",
        ),
        (
            r"manifest unknown|not found: manifest|manifest for \S+ not found|repository does not exist"
            r"|pull access denied|requested access to the resource is denied|unauthorized|authentication required"
            r"|name unknown|invalid reference format|invalid repository name|\b40[134]\b",
            "the registry has no such image, or gives it only to those who have logged in",
            "correct container.image ({image}); for a private one log in on {node} (docker login, apptainer registry "
            "login, enroot's .credentials)",
        ),
        (
            r"dial tcp|no such host|i/o timeout|TLS handshake|connection refused|network is unreachable"
            r"|name resolution|Could not resolve|Client\.Timeout|proxyconnect|x509|connection reset",
            "the registry cannot be reached from there",
            "look at the node's network, and at the proxy of dockerd, apptainer or enroot; or carry it over: docker "
            "save on a machine that reaches it, docker load on {node}, or a .sif or .sqsh file as container.image",
        ),
        (
            r"executable file not found|command not found|: not found|No such file or directory",
            "there is no {program} in the PATH of a login on {node}",
            "install {program} there, or set another container.kind",
        ),
    )
)
_ABSENT = re.compile(r"No such (?:image|object)|image not known", re.IGNORECASE)  # docker, podman


def is_absent(text: str) -> bool:
    """Whether docker works, and has no such image yet."""
    return bool(_ABSENT.search(text))


def fault(text: str, *, node: str, image: str, program: str, user: str) -> ImageFault | None:
    """None where nothing is known about it."""
    for pattern, known in _FAULTS:
        if (match := pattern.search(text)) is not None:
            words = {"node": node, "image": image, "program": program, "user": user, **match.groupdict()}
            return ImageFault(*(part.format_map(words) for part in known))
    return None
