"""The container around a node's agent: argument lists only.

The container wraps the agent and not each engine, so that the agent's PIDs, its /proc and its /dev/shm are those of its
processes, and one pipe holds all of them: when it closes, the agent leaves and the container with it.

What the three kinds share: the run directory, the folder of the pdserve package, a local model and the proxy's files
are mounted at their own paths; the home is not, because its packages and settings would shadow the image's; variables
come after the image's, through `env`. A secret is in no argument: `effective.env_of` gives it to the engines, whose
start orders carry it over the pipe.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import assert_never

from pdserve.errors import PreflightError
from pdserve.plan.nodes.compile_cache import cache_folder, cache_variables
from pdserve.plan.nodes.image import as_apptainer, as_docker, as_enroot
from pdserve.recipe.base import SecretRef
from pdserve.recipe.container_options import VERBS, Platform, defaults, merged, targets
from pdserve.recipe.model import Recipe
from pdserve.recipe.sections import Container

LABEL_RUN, LABEL_NODE = "pdserve.run", "pdserve.node"


@dataclass(frozen=True)
class Around:
    """What the container must know of the deployment and of its node."""

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
class Wrapped:
    """What to run on the node instead of the bare agent."""

    argv: tuple[str, ...]
    srun_options: tuple[str, ...] = ()
    """pyxis: options for the srun that runs `argv`; it has no command of its own."""


def wrap(container: Container, image: str, arguments: Sequence[str], around: Around) -> Wrapped:
    """Runs `container.python` with `arguments` (`-m pdserve.node.agent ...`) in `image`, stdin and stdout connected.

    Raises PreflightError where it cannot be: pyxis without Slurm, or a path that no mount option can name.
    """
    inside = ("env", *_environment(container, around), container.python, *arguments)
    match container.kind:
        case "docker":
            return Wrapped(_docker(container, image, inside, around))
        case "apptainer":
            return Wrapped(_apptainer(container, image, inside, around))
        case "pyxis":
            if not around.in_slurm:
                raise PreflightError(
                    "container.kind: pyxis is an option of srun, and these nodes are not reached through Slurm",
                    where="container.kind",
                    todo="use docker or apptainer, or start it in a Slurm job",
                )
            return Wrapped(inside, tuple(_pyxis(container, image, around)))
        case _:
            assert_never(container.kind)


def source_folder(package: str) -> str | None:
    """The folder to mount for the package `package` (.../pdserve): its parent, if that is a source tree. None where it
    is installed, because the other packages beside it are the node's and would shadow the image's."""
    folder = posixpath.dirname(package.rstrip("/"))
    return None if posixpath.basename(folder) in ("site-packages", "dist-packages") else folder


def cache_of(recipe: Recipe) -> str | None:
    """The folder of compiled kernels for the recipe's image and model; None: none is kept."""
    root = None if recipe.container is None else recipe.container.compile_cache
    if root is None:
        return None
    return cache_folder(root, image=image_of(recipe), model=recipe.model.path or recipe.model.id or "")


def image_of(recipe: Recipe) -> str:
    """The image of the recipe's container. Rules guarantee that there is one."""
    image = (recipe.container.image if recipe.container is not None else None) or recipe.image
    assert image is not None
    return image


def needed_paths(recipe: Recipe, recipe_dir: str) -> tuple[str, ...]:
    """What the deployment's processes read outside the run directory: a local model and the proxy's files, each file by
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
    """Asks the daemon for its version. Ends with 124, on the node itself, where it has not answered in time."""
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
        *merged("docker", ours, container.options, container.leave_out),
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
        *merged(
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
    yield from merged("pyxis", ours, container.options, container.leave_out)


def _environment(container: Container, around: Around) -> Iterator[str]:
    """Arguments of env: variables that would mislead Python are unset, then ours are set, then the recipe's."""
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
    """The node's home is not there; caches need a place that the user may write to.

    Only docker's /tmp is the container's own and goes with it. Apptainer's is the node's, and enroot's may be: there
    any user could make the folder first and fill the caches, which hold code. The run directory is the user's alone.
    """
    if container.kind == "docker":
        return f"/tmp/pdserve-{around.run_id}"  # noqa: S108
    return posixpath.join(around.run_dir, f"home@{around.node}")


def _mounts(container: Container, around: Around) -> list[str]:
    """SRC:DST[:ro]; what the recipe mounts at one of our paths is meant to be there."""
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
