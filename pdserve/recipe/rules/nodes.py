"""Rules of nodes, Slurm, the container, setup commands and paths."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Iterator
from typing import Any

from pdserve.recipe.container_options import can_be_left_out, is_set, read, uses_rdma
from pdserve.recipe.flags import env_instead
from pdserve.recipe.load import show
from pdserve.recipe.load.problems import Line, Path, Problem
from pdserve.recipe.load.recipe_document import PATHS
from pdserve.recipe.model import Recipe
from pdserve.recipe.sections import Container, Kind, Network, words_of
from pdserve.roles import ENGINE_ROLES

NODE_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9])?")
_INTERFACE = re.compile(r"[^\s/:]{1,15}")
_TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}|UNLIMITED|INFINITE", re.IGNORECASE)
_OPTION = re.compile(r"--([a-z][a-z0-9-]*)(=.*)?", re.DOTALL)
_OWN_KEY = {
    "nodes": "set slurm.nodes",
    "time": "set slurm.time",
    "partition": "set slurm.partition",
    "account": "set slurm.account",
    "qos": "set slurm.qos",
    "reservation": "set slurm.reservation",
    "constraint": "set slurm.constraint",
    "exclude": "set exclude_nodes",
    "no-kill": "set on_node_loss: degrade",
    "signal": "it gives the time to drain and stop, which pdserve knows",
    "ntasks": "there is one agent a node",
    "ntasks-per-node": "there is one agent a node",
    "array": "a job is one deployment",
    "wrap": "the job's script is pdserve's own",
    "chdir": "the job finds the repository by its submit folder",
    "export": "the job needs the variables of the shell that submits it",
    "job-name": "the job is named after the recipe",
}
"""sbatch option -> what to do instead."""


def network(recipe: Recipe) -> Iterator[Problem]:
    """Check the recipe's network."""
    if recipe.network is not None:
        yield from network_problems(recipe.network, ("network",))


def network_problems(network: Network, path: Path) -> Iterator[Problem]:
    """Yield what is wrong with a network section at `path`: exactly one key, and a subnet that is one."""
    if (network.interface is None) == (network.cidr is None):
        what = "neither interface nor cidr is set" if network.cidr is None else "both interface and cidr are set"
        todo = "set one of them; without the section the route between the nodes decides"
        yield Problem(path, what, todo, write=Line((*path, "interface"), "ib0", example=True))
    if network.interface is not None and not _INTERFACE.fullmatch(network.interface):
        yield Problem(
            (*path, "interface"),
            f"{show.value(network.interface)} is not the name of an interface: 15 characters at most, no / or :",
            "`ip -brief address` shows the names",
        )
    if network.cidr is not None:
        yield from _cidr(network.cidr, (*path, "cidr"))


def _cidr(text: str, path: Path) -> Iterator[Problem]:
    try:
        if "/" not in text:
            raise ValueError("no prefix length")
        subnet = ipaddress.IPv4Network(text, strict=False)
    except ValueError:
        yield Problem(path, f"{show.value(text)} is not an IPv4 subnet", write=Line(path, "10.1.0.0/16", example=True))
        return
    if str(subnet) != text:
        yield Problem(path, f"{text} is not written as a subnet", write=Line(path, str(subnet)))


def excluded_nodes(recipe: Recipe) -> Iterator[Problem]:
    """Refuse node names that are none, and names that are there twice."""
    yield from names_problems(recipe.exclude_nodes, ("exclude_nodes",))


def names_problems(names: list[str], path: Path) -> Iterator[Problem]:
    """Yield what is wrong with a list of node names at `path`."""
    for index, name in enumerate(names):
        if not NODE_NAME.fullmatch(name):
            yield Problem((*path, index), f"{show.value(name)} is not the name of a node", "list each node by its name")
        elif name in names[:index]:
            yield Problem((*path, index), f"{name} is there twice", "keep one of them")


def agent_lease(recipe: Recipe) -> Iterator[Problem]:
    """Refuse a lease that ends before the launcher notices the silence: processes that still count as alive would
    stop."""
    times = recipe.timeouts
    if times.agent_lease_seconds < times.heartbeat_seconds:
        yield Problem(
            ("timeouts", "agent_lease_seconds"),
            f"an agent would stop its processes after {times.agent_lease_seconds:g} s of silence, and is given up only "
            f"after {times.heartbeat_seconds:g} s",
            "raise it, three times the heartbeat is the default; or lower heartbeat_seconds",
            also=(("timeouts", "heartbeat_seconds"),),
            write=Line(("timeouts", "agent_lease_seconds"), f"{3 * times.heartbeat_seconds:g}", example=True),
        )


def slurm_job(recipe: Recipe) -> Iterator[Problem]:
    """Refuse values that sbatch would misread, and options that pdserve sets itself."""
    section = recipe.slurm
    if section.time is not None and not _TIME.fullmatch(section.time):
        yield Problem(
            ("slurm", "time"),
            f"{show.value(section.time)} is not a time that sbatch takes",
            'it takes minutes ("90"), "HH:MM:SS" or "D-HH:MM:SS"',
        )
    for key in ("partition", "account", "qos", "reservation", "constraint"):
        value = getattr(section, key)
        if value is not None and not _is_word(value):
            yield Problem(("slurm", key), f"{show.value(value)} is not one word")
    for index, option in enumerate(section.options):
        yield from option_problems(option, ("slurm", "options", index), _OWN_KEY, "sbatch", quotes=True)


def option_problems(
    option: str, path: Path, owned: dict[str, str], program: str, *, quotes: bool = False
) -> Iterator[Problem]:
    """Yield what is wrong with one `--name=value` for `program`; `owned`: options of pdserve -> what to do instead.
    `quotes`: the value may hold quotes and backslashes."""
    match = _OPTION.fullmatch(option)
    if match is None or not option.isprintable():
        todo = "write --name=value: one item for each option, in its long form"
        yield Problem(path, f"{show.value(option)} is not an option of {program}", todo)
    elif not quotes and ('"' in option or "\\" in option):
        yield Problem(path, "quotes and backslashes would be read once more on the way")
    elif (instead := owned.get(match.group(1))) is not None:
        yield Problem(path, f"pdserve sets --{match.group(1)}", instead)


def _is_word(value: str) -> bool:
    return bool(value) and value.isprintable() and not set(value) & set(" \"'\\#") and not value.startswith("-")


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


def container_section(recipe: Recipe) -> Iterator[Problem]:
    """Check the section of the container."""
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
    """Warn of an image without a container section: alone it starts no container."""
    if recipe.image is not None and recipe.container is None:
        yield Problem(
            ("image",),
            "it is not used: without a container section everything runs with the programs of the node",
            "add the line `container: {kind: docker}` (or apptainer, or pyxis); nothing is missing where pdserve "
            "itself runs inside the image",
        )


_OPERATORS = re.compile(r"&&|\|\|?|;|&|[0-9]*[<>]{1,2}(&[0-9])?")
_EXPANDED = re.compile(r"\$[A-Za-z_(]|~(/|$)|`")


def setup_commands(recipe: Recipe) -> Iterator[Problem]:
    """Refuse commands of setup with nothing to run, or with words that cannot be split."""
    for index, command in enumerate(recipe.setup):
        path: Path = ("setup", index)
        try:
            words = words_of(command)
        except ValueError:
            yield Problem(path, "a quote is not closed", "close it, or write the words as a list: [pip, install, x]")
            continue
        if not words or not words[0].strip():
            yield Problem(path, "there is no command", "write the program first, or remove the item")
        elif any("\0" in word for word in words):
            yield Problem(path, "an argument cannot hold a NUL character")


def unexpanded_setup(recipe: Recipe) -> Iterator[Problem]:
    """Warn of what a shell would act on: it is an argument like any other, because no shell reads it."""
    for index, command in enumerate(recipe.setup):
        words = words_of(command)
        if words[0].rpartition("/")[2] in ("bash", "sh", "dash", "zsh", "env") or not isinstance(command, str):
            continue
        for word in words:
            if _OPERATORS.fullmatch(word) or word.endswith(";") or _EXPANDED.match(word):
                yield Problem(
                    ("setup", index),
                    f"no shell reads this command: {word} is passed on",
                    f"write [bash, -c, {json.dumps(command, ensure_ascii=False)}]",
                )
                break


_OURS: tuple[Path, ...] = (
    *PATHS,
    ("engine", "python"),
    *((section, "command", 0) for section in ("engine", "lmcache", "proxy")),
)
_LOCAL = re.compile(r"\.{0,2}/|~|\.{1,2}$")


def tilde_paths(recipe: Recipe) -> Iterator[Problem]:
    """Refuse a path of the recipe itself that begins with `~`, or did so in the file that it extends."""
    document = recipe.model_dump(by_alias=True)
    for path in _OURS:
        value = _value_at(document, path)
        if isinstance(value, str) and "~" in value.split("/"):
            yield Problem(path, "~ is not expanded: it would be a folder of that name", f"write {_with_home(value)}")


def unexpanded_tildes(recipe: Recipe) -> Iterator[Problem]:
    """Warn of a tilde in flags and variables. It is passed on; some programs expand it, and in a container the home is
    another one."""
    for section in ("engine", *ENGINE_ROLES):
        for key in ("args", "env"):
            for name, value in getattr(getattr(recipe, section), key, {}).items():
                if isinstance(value, str) and value.startswith("~/"):
                    yield Problem(
                        (section, key, name),
                        "~ is passed on as it is, and not every program expands it",
                        f"write {_with_home(value)}",
                    )


def local_model_id(recipe: Recipe) -> Iterator[Problem]:
    """Refuse a folder as an id: it would be neither looked for on the nodes nor made absolute."""
    name = recipe.model.id
    if name is not None and _LOCAL.match(name):
        yield Problem(
            ("model", "id"),
            "this is a path, and an id names a model of the hub",
            f"write path: {_with_home(name) if name.startswith('~') else name} in the place of id",
        )


def _with_home(path: str) -> str:
    return "${HOME}/" + path.split("~/", 1)[-1] if "~/" in path else "${HOME}"


def _value_at(value: Any, path: Path) -> Any:
    for part in path:
        if isinstance(value, dict):
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        else:
            return None
    return value
