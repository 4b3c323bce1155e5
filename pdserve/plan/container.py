"""The container around a node's agent: argument lists only.

The container wraps the agent and not each engine, so that the agent's PIDs, its /proc and its /dev/shm are those of its
processes, and one pipe holds all of them: when it closes, the agent leaves and the container with it.

What the three kinds share: the run directory, the folder of the pdserve package, a local model and the proxy's files
are mounted at their own paths; the home is not, because its packages and settings would shadow the image's; variables
come after the image's, through `env`. A secret is in no argument: `effective.env_of` gives it to the engines, whose
start orders carry it over the pipe.

docker keeps images on each node. apptainer and pyxis get one file that all nodes share, made once: a pull on every
node would unpack the same tens of gigabytes as many times.

Each name was read where it is used: VLLM_CACHE_ROOT in vllm/envs.py, TRITON_CACHE_DIR in triton/knobs.py,
TORCHINDUCTOR_CACHE_DIR in torch/_inductor/runtime/cache_dir_utils.py (vLLM 0.32 points it below VLLM_CACHE_ROOT by
itself, in compilation/compiler_interface.py), AITER_JIT_DIR in aiter/jit/core.py of ROCm/aiter, which is not installed
on a machine without ROCm, and FLASHINFER_WORKSPACE_BASE in flashinfer/jit/env.py.

AITER loads compiled modules from AITER_JIT_DIR alone once it is set, so what an image has built before does not count:
the first start with an empty folder compiles them all.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import assert_never

from pdserve.errors import PreflightError
from pdserve.recipe.base import SecretRef
from pdserve.recipe.container_options import VERBS, Platform, defaults, merge_options, targets
from pdserve.recipe.model import Recipe
from pdserve.recipe.sections import Container, Kind

_REGISTRY = re.compile(r"(?P<registry>localhost|[^/]*[.:][^/]*)/(?P<rest>.+)")
_ENDING = {"apptainer": ".sif", "pyxis": ".sqsh"}


def is_file(image: str) -> bool:
    """Return whether an image is a file (or an unpacked folder) of the node, and no name in a registry."""
    return image.startswith(("/", "./", "../")) or image.endswith((".sif", ".sqsh"))


def shared_file(kind: Kind, image: str, store: str) -> str | None:
    """Return the file in the folder `store` that is made of an image of a registry; None: there is no need of one."""
    bare = image.removeprefix("docker://")
    if kind == "docker" or is_file(bare) or (kind == "pyxis" and "://" in bare):
        return None
    return posixpath.join(store, f"{readable_file_name(image)}{_ENDING[kind]}")


def readable_file_name(*parts: str) -> str:
    """Return a file name that people recognise, and that no other text has."""
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:10]
    return f"{re.sub('[^A-Za-z0-9.]+', '-', parts[-1].removeprefix('docker://')).strip('-')[-80:]}-{digest}"


def as_docker(image: str) -> str:
    """Return the image as docker names it."""
    return image.removeprefix("docker://")


def as_apptainer(image: str) -> str:
    """Return the image as apptainer names it."""
    return image if is_file(image) or "://" in image else f"docker://{image}"


def as_enroot(image: str) -> str:
    """Return an image's name as enroot writes it: `registry#name:tag` for `registry/name:tag`."""
    bare = image.removeprefix("docker://")
    if is_file(bare) or "#" in bare or "://" in bare:
        return bare
    match = _REGISTRY.fullmatch(bare)
    if match is None:
        return bare
    rest = match.group("rest")
    return rest if match.group("registry") == "docker.io" else f"{match.group('registry')}#{rest}"


def find_image_argv(container: Container, image: str) -> tuple[str, ...]:
    """Ends with 0 where the node has it; docker prints its id."""
    if container.kind == "docker":
        return ("docker", "image", "inspect", "--format={{.Id}}", as_docker(image))
    return ("test", "-r", image)


def fetch_image_argv(kind: Kind, image: str, file: str) -> tuple[str, ...]:
    """Return the command that gets an image out of its registry; `file`: what apptainer or enroot shall write."""
    if kind == "docker":
        return ("docker", "pull", as_docker(image))
    if kind == "apptainer":
        return ("apptainer", "pull", file, as_apptainer(image))
    return ("enroot", "import", f"--output={file}", f"docker://{as_enroot(image)}")


def docker_root_argv() -> tuple[str, ...]:
    """Prints the folder in which docker keeps images."""
    return ("docker", "info", "--format={{.DockerRootDir}}")


def free_bytes_argv(folder: str) -> tuple[str, ...]:
    """Prints a head and then the free bytes of a folder's disk."""
    return ("df", "--output=avail", "--block-size=1", folder)


def pull_progress(text: str) -> str | None:
    """Return how far `docker pull` is, by what it prints without a terminal: a line for each step of each layer."""
    states: dict[str, str] = dict(re.findall(r"^([0-9a-f]{12}): (.+?)\s*$", text, re.MULTILINE))
    if not states:
        return None
    unpacked = sum(state in ("Pull complete", "Already exists") for state in states.values())
    here = unpacked + sum(state == "Download complete" for state in states.values())
    return f"{here} of {len(states)} layers downloaded, {unpacked} unpacked"


_CACHES = {"VLLM_CACHE_ROOT": "vllm", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
_PLATFORM_CACHES: dict[Platform, dict[str, str]] = {
    "cpu": {},
    "cuda": {"FLASHINFER_WORKSPACE_BASE": "flashinfer"},
    "rocm": {"AITER_JIT_DIR": "aiter"},
}


def cache_folder(root: str, *, image: str, model: str) -> str:
    """Return the folder of one image and one model: what another compiler built must not be loaded."""
    return posixpath.join(root, readable_file_name(image, model))


def cache_variables(folder: str, platform: Platform) -> dict[str, str]:
    """Return the variables of everything that runs in the container."""
    return {name: posixpath.join(folder, part) for name, part in {**_CACHES, **_PLATFORM_CACHES[platform]}.items()}


def make_cache_argv(folder: str) -> tuple[str, ...]:
    """Return the command that makes a cache folder as the user's own, before a container would make it as root's."""
    return ("mkdir", "-p", "-m", "0700", folder)


def inspect_cache_argv(folder: str) -> tuple[str, ...]:
    """Prints `owner UID MODE`, and `file` where there is any."""
    return (
        *("find", folder, "(", "-path", folder, "-printf", "owner %U %m\\n", ")"),
        *("-o", "(", "-type", "f", "-printf", "file\\n", "-quit", ")"),
    )


LABEL_RUN, LABEL_NODE = "pdserve.run", "pdserve.node"


@dataclass(frozen=True)
class Around:
    """The deployment and the node around a container."""

    run_id: str
    run_dir: str
    node: str
    platform: Platform
    package: str | None
    """`source_folder`: mounted and on PYTHONPATH, so that the code inside is the code outside. None: the image has
    pdserve."""
    paths: tuple[str, ...] = ()
    """What the processes read besides: `needed_paths`."""
    user: str | None = None
    """docker: `UID:GID` inside, those of the user, so that an NFS that squashes root takes the logs. None: the
    image's user."""
    groups: tuple[int, ...] = ()
    """docker: the user's other groups; those of the device files are among them where the user may use devices."""
    forward: tuple[str, ...] = ()
    """docker and pyxis: names of variables that keep the node's value inside. apptainer passes all of them on."""
    in_slurm: bool = False
    """Whether srun is what starts it."""
    rdma: bool = False
    """Whether the engines open RDMA devices."""
    compile_cache: str | None = None
    """The folder for compiled kernels; None: they go with the run."""


@dataclass(frozen=True)
class WrappedCommand:
    """A command for the node in place of the bare agent."""

    argv: tuple[str, ...]
    srun_options: tuple[str, ...] = ()
    """pyxis: options for the srun that runs `argv`; it has no command of its own."""


def wrap_agent(container: Container, image: str, arguments: Sequence[str], around: Around) -> WrappedCommand:
    """Runs `container.python` with `arguments` (`-m pdserve.node.agent ...`) in `image`, stdin and stdout connected.

    Raises PreflightError where it cannot be: pyxis without Slurm, or a path that no mount option can name.
    """
    inside = ("env", *_environment(container, around), container.python, *arguments)
    match container.kind:
        case "docker":
            return WrappedCommand(_docker(container, image, inside, around))
        case "apptainer":
            return WrappedCommand(_apptainer(container, image, inside, around))
        case "pyxis":
            if not around.in_slurm:
                raise PreflightError(
                    "container.kind: pyxis is an option of srun, and these nodes are not reached through Slurm",
                    where="container.kind",
                    todo="use docker or apptainer, or start it in a Slurm job",
                )
            return WrappedCommand(inside, tuple(_pyxis(container, image, around)))
        case _:
            assert_never(container.kind)


def source_folder(package: str) -> str | None:
    """Return the folder to mount for the package `package` (.../pdserve): its parent, if that is a source tree. None
    where it is installed, because the other packages beside it are the node's and would shadow the image's."""
    folder = posixpath.dirname(package.rstrip("/"))
    return None if posixpath.basename(folder) in ("site-packages", "dist-packages") else folder


def cache_of(recipe: Recipe) -> str | None:
    """Return the folder of compiled kernels for the recipe's image and model; None: none is kept."""
    root = None if recipe.container is None else recipe.container.compile_cache
    if root is None:
        return None
    return cache_folder(root, image=image_of(recipe), model=recipe.model.path or recipe.model.id or "")


def image_of(recipe: Recipe) -> str:
    """Return the image of the recipe's container. Rules guarantee that there is one."""
    image = (recipe.container.image if recipe.container is not None else None) or recipe.image
    assert image is not None
    return image


def needed_paths(recipe: Recipe, recipe_dir: str) -> tuple[str, ...]:
    """Return the paths that processes read outside the run directory: a local model and the proxy's files, each file by
    its folder, because a file that is replaced would stay the old one inside."""
    proxy = recipe.proxy
    files = [proxy.auth.keys_file]
    files += [proxy.tls.certificate, proxy.tls.key] if proxy.tls is not None else []
    upstream = proxy.upstream_tls
    files += [upstream.ca, upstream.certificate, upstream.key] if upstream is not None else []
    files += [proxy.admin.token_file] if proxy.admin is not None else []
    folders = [posixpath.dirname(posixpath.join(recipe_dir, file)) for file in files if file is not None]
    models = [posixpath.join(recipe_dir, recipe.model.path)] if recipe.model.path is not None else []
    return tuple(dict.fromkeys(posixpath.normpath(path) for path in (*models, *folders)))


def docker_list_argv(run_id: str, node: str | None = None) -> tuple[str, ...]:
    """Prints the ids of the containers of a run, on its node or on all nodes that share this docker."""
    labels = [f"{LABEL_RUN}={run_id}", *([f"{LABEL_NODE}={node}"] if node is not None else [])]
    return ("docker", "ps", "--quiet", "--no-trunc", *(f"--filter=label={label}" for label in labels))


def docker_version_argv(seconds: int) -> tuple[str, ...]:
    """Return the command that asks the daemon for its version. It ends with 124, on the node itself, where the daemon
    has not answered in time."""
    return ("timeout", str(seconds), "docker", "version", "--format={{.Server.Version}}")


def docker_stop_argv(ids: Iterable[str], seconds: float) -> tuple[str, ...]:
    """Stops containers of ours: TERM, on which the agent stops everything in order, and KILL after `seconds`."""
    return ("docker", "stop", "-t", str(max(1, round(seconds))), *ids)  # its long form has two names


def _docker(container: Container, image: str, inside: Sequence[str], around: Around) -> tuple[str, ...]:
    program, *arguments = inside
    # With the node's IPC namespace /dev/shm is the node's, and --shm-size means nothing.
    shm = ["--ipc=host"]
    if container.shm_gib is not None:
        shm = ["--ipc=private", f"--shm-size={round(container.shm_gib * 1024)}m"]
    ours = [
        *shm,
        *defaults("docker", around.platform, rdma=around.rdma),
        *([f"--user={around.user}"] if around.user is not None else []),
        *(f"--group-add={group}" for group in around.groups),
    ]
    return (
        *("docker", "run", "--rm", "--init", "--interactive", "--network=host"),
        f"--label={LABEL_RUN}={around.run_id}",
        f"--label={LABEL_NODE}={around.node}",
        *merge_options("docker", ours, container.options, container.leave_out),
        f"--workdir={around.run_dir}",
        *(f"--volume={mount}" for mount in _mounts(container, around)),
        *(f"--env={name}" for name in around.forward),
        # An image's own entry point (`vllm serve`) would take ours for its arguments.
        f"--entrypoint={program}",
        as_docker(image),
        *arguments,
    )


def _apptainer(container: Container, image: str, inside: Sequence[str], around: Around) -> tuple[str, ...]:
    return (
        *("apptainer", "exec", "--no-home"),
        *merge_options(
            "apptainer",
            defaults("apptainer", around.platform, rdma=around.rdma),
            container.options,
            container.leave_out,
        ),
        f"--pwd={around.run_dir}",
        *(f"--bind={mount}" for mount in _mounts(container, around)),
        as_apptainer(image),
        *inside,
    )


def _pyxis(container: Container, image: str, around: Around) -> Iterator[str]:
    yield f"--container-image={as_enroot(image)}"
    # The steps of a job find it by its name: the image is unpacked once a node, and removed with the job.
    yield f"--container-name=pdserve-{around.run_id}"
    yield f"--container-mounts={','.join(_mounts(container, around))}"
    yield f"--container-workdir={around.run_dir}"
    if around.forward:
        yield f"--container-env={','.join(around.forward)}"
    ours = defaults("pyxis", around.platform, rdma=around.rdma)
    yield from merge_options("pyxis", ours, container.options, container.leave_out)


def _environment(container: Container, around: Around) -> Iterator[str]:
    """Yield arguments of env: variables that would mislead Python are unset, then ours are set, then the recipe's."""
    yield from ("-u", "PYTHONHOME", "-u", "LD_PRELOAD")
    if around.package is None:
        yield from ("-u", "PYTHONPATH")
    values = {
        **({"PYTHONPATH": around.package} if around.package is not None else {}),
        "PYTHONNOUSERSITE": "1",
        "HOME": _home(container, around),
        **({} if around.compile_cache is None else cache_variables(around.compile_cache, around.platform)),
        # A bare user id has no name, and getpass.getuser() of torch's compile cache asks for one.
        **({"USER": "pdserve"} if container.kind == "docker" and around.user is not None else {}),
        **{name: str(value) for name, value in container.env.items() if not isinstance(value, SecretRef)},
    }
    yield from (f"{name}={value}" for name, value in values.items())


def _home(container: Container, around: Around) -> str:
    """Return the home in the container: the node's is not there; caches need a place that the user may write to.

    Only docker's /tmp is the container's own and goes with it. Apptainer's is the node's, and enroot's may be: there
    any user could make the folder first and fill the caches, which hold code. The run directory is the user's alone.
    """
    if container.kind == "docker":
        return f"/tmp/pdserve-{around.run_id}"  # noqa: S108
    return posixpath.join(around.run_dir, f"home@{around.node}")


def _mounts(container: Container, around: Around) -> list[str]:
    """Return the mounts as SRC:DST[:ro]; what the recipe mounts at one of our paths is meant to be there."""
    taken = {mount.split(":")[1] for mount in container.mounts} | set(targets(container.kind, container.options))
    read = [*([around.package] if around.package is not None else []), *around.paths]
    own = {around.run_dir: "", **{path: ":ro" for path in read if path != around.run_dir}}
    if around.rdma and container.kind != "docker":  # docker is given devices by an option of its own
        own[VERBS] = ""
    if around.compile_cache is not None:
        own[around.compile_cache] = ""
    for path in own:
        if not path.startswith("/") or set(path) & set(":,"):
            raise PreflightError(
                f"{path} cannot be mounted in a container",
                cause="a mount is an absolute path, and : and , separate its parts",
                todo="use another folder",
            )
    return [*(f"{path}:{path}{mode}" for path, mode in own.items() if path not in taken), *container.mounts]
