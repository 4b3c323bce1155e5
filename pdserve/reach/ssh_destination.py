"""The destination argument of ssh, and which machine that is. Pure.

As tried with OpenSSH 9.2: brackets around an IPv6 address are part of the name that it looks up, in ssh:// they are
refused, and `host:port` is a name as well. The last @ ends the user; in ssh:// it is the only one, %40 is one of the
user's name, and the host is one that DNS could have.
"""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import quote, unquote_plus

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


def problem(destination: str) -> tuple[str, str] | None:
    """What is wrong with it, and what to write; None where ssh would take it."""
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
    """The host in a destination that ssh takes."""
    host = destination.removeprefix(_URI).rpartition("@")[2]
    if not destination.startswith(_URI):
        return host
    return host.removesuffix("/").partition(":")[0].removesuffix(".")


def _without(user: str, address: str, port: str | None) -> str:
    """A port has no place beside an IPv6 address."""
    if not _is_ipv6(address):
        return f"write {_uri(user)}HOST:{port}" if port else _PLAIN
    port_hint = f", and the port for all hosts in `ssh: {{options: [Port={port}]}}`, or for one in ssh's own config"
    return f"write {user}{address}" + (port_hint if port else "")


def _uri(user: str) -> str:
    """The beginning of a URI. `user`: nothing, or a name and its @."""
    return f"{_URI}{quote(user[:-1], safe='')}{user[-1:]}"


def _is_ipv6(text: str) -> bool:
    """With or without a zone (%eth0)."""
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True
