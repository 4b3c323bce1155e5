"""Networks, node names and what is asked of Slurm."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator

from pdserve.recipe.load import show
from pdserve.recipe.load.problems import Line, Path, Problem
from pdserve.recipe.model import Recipe
from pdserve.recipe.sections.nodes import Network

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
    """The recipe's network."""
    if recipe.network is not None:
        yield from network_problems(recipe.network, ("network",))


def network_problems(network: Network, path: Path) -> Iterator[Problem]:
    """What is wrong with a network section at `path`: exactly one key, and a subnet that is one."""
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


def excluded(recipe: Recipe) -> Iterator[Problem]:
    """Node names that are none, and names that are there twice."""
    yield from names_problems(recipe.exclude_nodes, ("exclude_nodes",))


def names_problems(names: list[str], path: Path) -> Iterator[Problem]:
    """What is wrong with a list of node names at `path`."""
    for index, name in enumerate(names):
        if not NODE_NAME.fullmatch(name):
            yield Problem((*path, index), f"{show.value(name)} is not the name of a node", "list each node by its name")
        elif name in names[:index]:
            yield Problem((*path, index), f"{name} is there twice", "keep one of them")


def lease(recipe: Recipe) -> Iterator[Problem]:
    """A lease that ends before the launcher notices the silence: processes that still count as alive would stop."""
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


def slurm(recipe: Recipe) -> Iterator[Problem]:
    """Values that sbatch would misread, and options that pdserve sets itself."""
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
    """What is wrong with one `--name=value` for `program`; `owned`: options of pdserve -> what to do instead. `quotes`:
    the value may hold quotes and backslashes."""
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
