"""The container around the agents: an image, mounts that are paths, no option that pdserve sets itself."""

from __future__ import annotations

from collections.abc import Iterator

from pdserve.recipe.container_options import can_be_left_out, is_set, read
from pdserve.recipe.flags import env_instead
from pdserve.recipe.load import show
from pdserve.recipe.load.problems import Line, Path, Problem
from pdserve.recipe.model import Recipe
from pdserve.recipe.rdma import uses_rdma
from pdserve.recipe.sections.container import Container, Kind

_IMAGE = Line(("container", "image"), "vllm/vllm-openai:latest", example=True)
_MOUNTS, _ENV = "set container.mounts", "set container.env"
_PIPE = "the launcher speaks to the agent over the container's stdin and stdout"
_WORKDIR = "the agent works in the run directory"
_NETWORK = "engines bind the node's own address: the container shares its network"
_SMALL_SHM = "it gives a /dev/shm of 64 MB; --no-home is set already"
_STEP = "one agent runs on each node, in a step of the job"
OWNED: dict[Kind, dict[str, str]] = {
    "docker": {
        "env-file": _ENV,
        "shm-size": "set container.shm_gib",
        "ipc": "set container.shm_gib, or leave it out for the node's own /dev/shm",
        "tty": _PIPE,
        "detach": _PIPE,
        "interactive": _PIPE,
        "attach": _PIPE,
        "entrypoint": "the container runs the agent, not the image's own program",
        "network": _NETWORK,
        "net": _NETWORK,  # docker's other name for it
        "name": "containers of pdserve are found by their labels",
        "rm": "a container of pdserve removes itself",
        "restart": "pdserve decides what is started again",
        "init": "a container of pdserve has an init",
        "workdir": _WORKDIR,
    },
    "apptainer": {
        "env-file": _ENV,
        "pwd": _WORKDIR,
        "cwd": _WORKDIR,
        "pid": "the agent is found by its PID on the node",
        "contain": _SMALL_SHM,
        "containall": _SMALL_SHM,
        "compat": _SMALL_SHM,  # it means --containall, and more
        "net": _NETWORK,
    },
    "pyxis": {
        "container-image": "set container.image",
        "container-mounts": _MOUNTS,
        "container-env": _ENV,
        "container-name": "one unpacked image serves all steps of a job",
        "container-workdir": _WORKDIR,
        "container-entrypoint": "the container runs the agent, not the image's own program",
        # They come behind pdserve's own on the line of srun, which takes the last one.
        "ntasks": _STEP,
        "nodes": _STEP,
        "nodelist": _STEP,
        "jobid": _STEP,
        "overlap": "the steps of a deployment share the job's nodes",
        "export": _ENV,
    },
}
"""Option of the container's program -> what to do instead."""


def container(recipe: Recipe) -> Iterator[Problem]:
    """Everything about the section."""
    section = recipe.container
    if section is None:
        return
    if section.image is None and recipe.image is None:
        todo = "set container.image, or image"
        yield Problem(("container",), "there is no image", todo, also=(("image",),), write=_IMAGE)
    for path, image in ((("container", "image"), section.image), (("image",), recipe.image)):
        if image is not None and (not image or image.startswith("-") or any(c.isspace() for c in image)):
            yield Problem(path, f"{show.value(image)} is not the name of an image")
    if not section.python or section.python.startswith("-") or "=" in section.python:
        yield Problem(("container", "python"), f"{show.value(section.python)} is not a program")
    if section.kind != "docker" and section.shm_gib is not None:
        yield Problem(
            ("container", "shm_gib"),
            f"{section.kind} shows the node's own /dev/shm",
            "remove it; preflight checks the size that the node has",
            also=(("container", "kind"),),
        )
    for key in ("store", "compile_cache"):
        folder = getattr(section, key)
        if folder is not None and (not folder.startswith("/") or set(folder) & set(":,") or not folder.isprintable()):
            yield Problem(("container", key), f"{show.value(folder)} is not an absolute path without : and ,")
    if section.store is not None and section.kind == "docker":
        yield Problem(
            ("container", "store"),
            "docker keeps images in a folder of its own on each node",
            "remove it",
            also=(("container", "kind"),),
        )
    yield from _mounts(section)
    yield from _options(section)
    yield from _left_out(recipe, section)
    for variable in section.env:
        if (instead := env_instead(variable, "engine")) is not None:
            yield Problem(("container", "env", variable), "pdserve sets this variable", instead)


def _mounts(section: Container) -> Iterator[Problem]:
    targets: list[str] = []
    for index, mount in enumerate(section.mounts):
        path: Path = ("container", "mounts", index)
        parts = mount.split(":")
        if len(parts) not in (2, 3) or not all(part.startswith("/") for part in parts[:2]):
            todo = "write SRC:DST or SRC:DST:ro, both absolute"
            yield Problem(path, f"{show.value(mount)} is not a mount", todo)
        elif len(parts) == 3 and parts[2] != "ro":
            yield Problem(
                path, f"{show.value(parts[2])} is no way to mount", "write :ro, or nothing for read and write"
            )
        elif "," in mount or not mount.isprintable():
            yield Problem(path, "a comma separates mounts on the way, so a path cannot have one")
        elif parts[1] in targets:
            yield Problem(path, f"{parts[1]} is mounted twice", "keep one of them")
        else:
            targets.append(parts[1])


def _options(section: Container) -> Iterator[Problem]:
    for index, option in read(section.kind, section.options):
        path: Path = ("container", "options", index)
        text = section.options[index]
        if option is None or not text.isprintable():
            todo = "write --name=value: one item for each option"
            yield Problem(path, f"{show.value(text)} is not an option of {section.kind}", todo)
        elif (instead := OWNED[section.kind].get(option.name)) is not None:
            yield Problem(path, f"pdserve sets --{option.name}", instead)
        elif option.name == "env":
            # apptainer's takes several at once.
            texts = (option.value or "").split(",") if section.kind == "apptainer" else [option.value or ""]
            for variable in texts:
                yield from _variable(variable, path)


def _variable(text: str, path: Path) -> Iterator[Problem]:
    variable, equals, value = text.strip('"').partition("=")
    if (instead := env_instead(variable, "engine")) is not None:
        yield Problem(path, f"pdserve sets {variable}", instead)
    elif equals and (show.secret_name(variable) or show.secret_value(value)):
        todo = f"write {variable}: {{secret: {variable}}} under container.env; only the name is saved"
        yield Problem(path, f"{variable} looks like a secret, and command lines are readable by others", todo)


def _left_out(recipe: Recipe, section: Container) -> Iterator[Problem]:
    if not section.leave_out:
        return
    rdma = uses_rdma(recipe)
    for index, option in read(section.kind, section.leave_out):
        if option is None or not is_set(option, section.kind, recipe.platform, rdma=rdma):
            ours = ", ".join(can_be_left_out(section.kind, recipe.platform, rdma=rdma))
            yield Problem(
                ("container", "leave_out", index),
                f"pdserve does not set {section.leave_out[index]} here",
                f"it sets {ours}" if ours else "remove it",
            )


def unused_image(recipe: Recipe) -> Iterator[Problem]:
    """Warning: an image alone starts no container."""
    if recipe.image is not None and recipe.container is None:
        yield Problem(
            ("image",),
            "it is not used: without a container section everything runs with the programs of the node",
            "add the line `container: {kind: docker}` (or apptainer, or pyxis); nothing is missing where pdserve "
            "itself runs inside the image",
        )
