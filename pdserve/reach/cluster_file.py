"""The cluster file: which machines there are without Slurm, how ssh reaches them, and what is known of them.

A recipe says what runs, a cluster file where. It is read as strictly as a recipe, with the same errors: file, line, key
and what was probably meant.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path as FilePath
from typing import Any, Literal
from urllib.parse import quote, unquote_plus

from pydantic import Field

from pdserve.errors import RecipeError
from pdserve.recipe.base import Count, Strict
from pdserve.recipe.load import environment, recipe_document, show
from pdserve.recipe.load.problems import Origin, Path, Problem, did_you_mean, error, locate
from pdserve.recipe.load.shape import Shape
from pdserve.recipe.load.validation import reset_nulls, validate
from pdserve.recipe.rules.nodes import names_problems, network_problems
from pdserve.recipe.sections import Network

_SSH_OPTION = re.compile(r"([A-Za-z][A-Za-z0-9]*)=(\S.*)")
_OWNED_OPTIONS = {
    "batchmode": "no password can be typed: use keys or an agent",
    "connecttimeout": "set ssh.connect_seconds",
    "requesttty": "the launcher speaks to the agent over ssh's stdin and stdout",
    "remotecommand": "the command is the agent",
    "sessiontype": "the command is the agent",
    "stdinnull": "the launcher speaks to the agent over ssh's stdin and stdout",
    "forkafterauthentication": "ssh lives as long as the agent's pipe",
    **dict.fromkeys(
        (
            "clearallforwardings",
            "localforward",
            "remoteforward",
            "dynamicforward",
            "forwardagent",
            "forwardx11",
            "tunnel",
        ),
        "nothing is forwarded: the nodes reach each other directly",
    ),
    **dict.fromkeys(("localcommand", "permitlocalcommand"), "run it before pdserve"),
    **dict.fromkeys(("controlmaster", "controlpath"), "a shared connection would end with a stranger's"),
}
"""ssh_config keyword in lower case -> what to do instead."""
_NO_NAME = "'`\"$\\\\;&<>|(){}"
"""Characters that ssh refuses in the name of a host; in a user's name it lets $ and \\ pass."""
_HOST = re.compile(rf"[^\s@\-{_NO_NAME}][^\s@{_NO_NAME}]*")
_HOST_IN_URI = re.compile(r"[A-Za-z0-9](?:\.?[A-Za-z0-9_-])*\.?")
_NO_USER = "'`\";&<>|(){}"
_USER = re.compile(rf"[^\s\-{_NO_USER}][^\s{_NO_USER}]*")
_USER_IN_URI = re.compile(rf"(?!-)(?:[^\s@%{_NO_USER}]|%[0-9A-Fa-f]{{2}})+")
_URI = "ssh://"
_BRACKETED = re.compile(r"\[([^\]]*)\](?::(\d*))?")
_WITH_PORT = re.compile(r"([^:\[\]]+):([0-9]+)")
_PLAIN = "write [user@]host"
_STAND_INS: dict[str, Any] = {"schema": 1, "name": "x", "hosts": [{"name": "x"}]}


class Host(Strict):
    """One machine."""

    name: str = Field(description="The node's name: in `status`, logs and exclude_nodes.")
    ssh: str | None = Field(
        default=None, description="Where ssh goes: [user@]host, an alias of ssh's config, ssh://host:port; null: name."
    )
    address: str | None = Field(
        default=None,
        description="IPv4 address at which the others reach it; null: found by `network`, or by the route to them.",
    )
    devices: list[int] | None = Field(
        default=None, description="Ids of the devices that may be used; null: all that the host shows."
    )
    python: str | None = Field(
        default=None,
        description="Interpreter there that has pdserve; null: the path of the one that runs pdserve here.",
    )


class SshSection(Strict):
    """The way in which ssh is called."""

    config: str | None = Field(
        default=None, description="A file for ssh's -F, relative to this file; null: the user's and the system's."
    )
    options: list[str] = Field(
        default=[], description="ssh_config settings, one `Keyword=value` each (Port=2222, ProxyJump=login)."
    )
    connect_seconds: Count = Field(default=10, description="How long a connection may take; whole seconds.")


class Cluster(Strict):
    """The machines of a deployment without Slurm, schema 1. An example with comments: clusters/example.yaml."""

    schema_: Literal[1] = Field(alias="schema", description="Version of this format.")
    hosts: list[Host] = Field(
        min_length=1, description="The machines; roles are placed on them in this order, the proxy on the first."
    )
    network: Network | None = Field(
        default=None, description="Where the hosts reach each other, as in a recipe; it wins over the recipe's."
    )
    exclude_nodes: list[str] = Field(default=[], description="Names of hosts of this file that are not used now.")
    ssh: SshSection = Field(default=SshSection(), description="How ssh is called for all hosts.")

    def usable(self, exclude: Sequence[str] = ()) -> tuple[Host, ...]:
        """Return the hosts that neither this file nor `exclude`, the recipe's exclude_nodes, leaves out."""
        out = {*self.exclude_nodes, *exclude}
        return tuple(host for host in self.hosts if host.name not in out)


@dataclass(frozen=True)
class LoadedCluster:
    """A valid cluster file and where it stands."""

    cluster: Cluster
    path: FilePath
    origins: Mapping[Path, Origin] = field(repr=False)

    def locate(self, dotted: str) -> str | None:
        """Return `cluster.yaml:12` for `hosts.1.address`, or the line of its nearest ancestor that is written down;
        None for a key whose section is not in this file, or has nothing there (null)."""
        path = tuple(int(part) if part.isdecimal() else part for part in dotted.split("."))
        if path[:1] not in self.origins or getattr(self.cluster, str(path[0]), None) is None:
            return None
        return str(locate(path, self.origins))

    @property
    def ssh_config(self) -> FilePath | None:
        """Return the file for ssh's -F."""
        return None if self.cluster.ssh.config is None else self.path.parent.absolute() / self.cluster.ssh.config


def load_cluster(path: FilePath, *, environ: Mapping[str, str]) -> LoadedCluster:
    """Return the cluster file at `path`, with `${NAME}` taken from `environ`. RecipeError has all that is wrong at
    once."""
    shape = Shape(Cluster)
    document = recipe_document.read_file(path, "cluster file")
    if "model" in document.data and "hosts" not in document.data:
        raise RecipeError(
            "this is a recipe, not a cluster file",
            where=str(document.origins.get(("model",), path)),
            todo="--cluster takes a file with `hosts:`, as clusters/example.yaml; the recipe stands before it",
        )
    failed = environment.resolve(document, environ, shape)
    reset_nulls(document.data, shape)
    problems = list(document.problems)
    known_bad = failed.union(*(p.spoils for p in problems))
    cluster, invalid = validate(Cluster, document.data, known_bad, _STAND_INS, document.spellings)
    problems += invalid
    if cluster is not None:
        bad = known_bad.union(*(p.spoils for p in invalid))
        problems += [p for p in _problems(cluster) if not any(p.concerns(b) for b in bad)]
    if problems or cluster is None:
        raise error(problems, document.origins, str(path))
    return LoadedCluster(cluster, path, document.origins)


def _problems(cluster: Cluster) -> Iterator[Problem]:
    yield from _names(cluster)
    for index, host in enumerate(cluster.hosts):
        yield from chain(_host(host, ("hosts", index)), _address(host, len(cluster.hosts), ("hosts", index, "address")))
    for key in ("address", "ssh"):
        yield from _twice(cluster, key)
    if cluster.network is not None:
        yield from network_problems(cluster.network, ("network",))
    yield from _excluded(cluster)
    for index, option in enumerate(cluster.ssh.options):
        yield from _option(option, ("ssh", "options", index))


def _names(cluster: Cluster) -> Iterator[Problem]:
    """Find names of hosts that are none or are there twice. `names_problems` speaks of a list of names; here each is
    the name of a host."""
    for problem in names_problems([host.name for host in cluster.hosts], ("hosts",)):
        also: tuple[Path, ...] = ()
        if "twice" in problem.what:
            name = cluster.hosts[int(problem.path[1])].name
            first = next(index for index, host in enumerate(cluster.hosts) if host.name == name)
            also = (("hosts", first, "name"),)
        yield Problem((*problem.path, "name"), problem.what, problem.todo, also=also)


def _host(host: Host, path: Path) -> Iterator[Problem]:
    if host.ssh is not None and (wrong := destination_problem(host.ssh)) is not None:
        yield Problem((*path, "ssh"), f"{show.value(host.ssh)} {wrong[0]}", wrong[1])
    if host.python is not None and (not host.python or host.python.startswith("-") or not host.python.isprintable()):
        yield Problem((*path, "python"), f"{show.value(host.python)} is not a program")
    devices = host.devices or []
    for index, device in enumerate(devices):
        if device < 0:
            yield Problem((*path, "devices", index), f"there is no device {device}")
        elif device in devices[:index]:
            yield Problem((*path, "devices", index), f"device {device} is there twice", "keep one of them")


def _address(host: Host, hosts: int, path: Path) -> Iterator[Problem]:
    if host.address is None:
        return
    try:
        address = ipaddress.IPv4Address(host.address)
    except ValueError:
        yield Problem(path, f"{show.value(host.address)} is not an IPv4 address", "write for example 10.1.0.11")
        return
    if address.is_unspecified or address.is_multicast or address == ipaddress.IPv4Address("255.255.255.255"):
        yield Problem(path, f"nothing can be reached at {address}")
    elif address.is_loopback and hosts > 1:
        yield Problem(path, f"{address} is every host's own, the others cannot reach this one there")


def _twice(cluster: Cluster, key: str) -> Iterator[Problem]:
    first: dict[str, int] = {}
    for index, host in enumerate(cluster.hosts):
        value = getattr(host, key)
        if value is not None and first.setdefault(value, index) != index:
            before = ("hosts", first[value], key)
            what = f"{value} is {cluster.hosts[first[value]].name} already"
            yield Problem(("hosts", index, key), what, "one machine is one host", also=(before,))


def _excluded(cluster: Cluster) -> Iterator[Problem]:
    known = [host.name for host in cluster.hosts]
    yield from names_problems(cluster.exclude_nodes, ("exclude_nodes",))
    for index, name in enumerate(cluster.exclude_nodes):
        if name not in known:
            guess = did_you_mean(name, known)
            todo = f"did you mean {guess}?" if guess else None
            yield Problem(("exclude_nodes", index), f"no host is called {show.value(name)}", todo)
    if not cluster.usable():
        yield Problem(("exclude_nodes",), "no host is left", "take a name out", also=(("hosts",),))


def _option(option: str, path: Path) -> Iterator[Problem]:
    match = _SSH_OPTION.fullmatch(option)
    if match is None or not option.isprintable():
        yield Problem(path, f"{show.value(option)} is not a setting of ssh", "write Keyword=value, as ssh -o takes it")
    elif (instead := _OWNED_OPTIONS.get(match.group(1).lower())) is not None:
        yield Problem(path, f"pdserve sets {match.group(1)}", instead)


def destination_problem(destination: str) -> tuple[str, str] | None:
    """Say what is wrong with a destination argument of ssh, and what to write; None where ssh would take it.

    As tried with OpenSSH 9.2: brackets around an IPv6 address are part of the name that it looks up, in ssh:// they are
    refused, and `host:port` is a name as well. The last @ ends the user; in ssh:// it is the only one, %40 is one of
    the user's name, and the host is one that DNS could have."""
    is_uri = destination.startswith(_URI)
    user, at, host = destination.removeprefix(_URI).rpartition("@")
    port = ""
    if is_uri:
        host = host.removesuffix("/")
        if (match := _WITH_PORT.fullmatch(host)) is not None:
            host, port = match.groups()
    if not destination.isprintable() or (at and not (_USER_IN_URI if is_uri else _USER).fullmatch(user)):
        return "is not a destination of ssh", _PLAIN
    name = unquote_plus(user) if is_uri else user
    if (bracketed := _BRACKETED.fullmatch(host)) is not None:
        return "has brackets, which ssh takes for a part of the name", _without(f"{name}{at}", *bracketed.groups())
    if not _HOST.fullmatch(host):
        return "is not a destination of ssh", _PLAIN
    if is_uri and (":" in host or (port and not 0 < int(port) < 1 << 16)):
        return "is not a destination of ssh", f"write {_URI}[user@]host:port"
    if is_uri and not _HOST_IN_URI.fullmatch(host):
        return "is not a destination of ssh", _PLAIN
    if not is_uri and ":" in host and not _is_ipv6(host):
        with_port = _WITH_PORT.fullmatch(host)
        todo = f"write {_uri(name + at)}{host}" if with_port else f"{_PLAIN}, or {_URI}[user@]host:port"
        return "has a colon, which ssh takes for a part of the name", todo
    return None


def machine_of(destination: str) -> str:
    """Return the host in a destination that ssh takes."""
    host = destination.removeprefix(_URI).rpartition("@")[2]
    if not destination.startswith(_URI):
        return host
    return host.removesuffix("/").partition(":")[0].removesuffix(".")


def _without(user: str, address: str, port: str | None) -> str:
    """Say how to write an address without its port, which has no place beside an IPv6 address."""
    if not _is_ipv6(address):
        return f"write {_uri(user)}HOST:{port}" if port else _PLAIN
    port_hint = f", and the port for all hosts in `ssh: {{options: [Port={port}]}}`, or for one in ssh's own config"
    return f"write {user}{address}" + (port_hint if port else "")


def _uri(user: str) -> str:
    """Return the beginning of a URI. `user`: nothing, or a name and its @."""
    return f"{_URI}{quote(user[:-1], safe='')}{user[-1:]}"


def _is_ipv6(text: str) -> bool:
    """Tell whether a text is an IPv6 address, with or without a zone (%eth0)."""
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True
