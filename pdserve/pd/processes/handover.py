"""A proxy that goes on as a new program: what the old one hands over, so that nothing of it is lost in between.

The parent of the proxy's processes replaces itself by exec: its PID stays, and its children, its listening sockets and
the pipe of its launcher are the new program's. Connections that are not accepted yet wait in those sockets.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Collection
from typing import NamedTuple, NoReturn

CHECK = "--check"
"""The proxy's option that only checks whether it could start: used before there is no way back."""
_VARIABLE = "PDSERVE_PROXY_SUCCESSION"
_SHARED = "PDSERVE_PROXY_SHARED"
"""Beside the rest: a program that is older knows no other fields, and ends where it gets one."""


class Heir(NamedTuple):
    """A process that serves until the new ones do."""

    number: int
    """Of the process: its index."""
    pid: int
    control: int
    asks: int
    retired: bool
    heard: str
    unread: str
    beats: int | None = None
    """File descriptor of the file in which it beats; None: an older program did not hand it over."""


class SharedFiles(NamedTuple):
    """What the processes of one generation share: file descriptors."""

    numbers: int
    pages: list[int]
    """One for each process."""
    version: str
    """How the numbers are laid out (shared_numbers.LAYOUT), and by which version."""


class Inheritance(NamedTuple):
    """All that is handed over. File descriptors are numbers."""

    generation: int
    sockets: list[int]
    children: list[Heir]
    told: list[str]
    """Control lines that a new process gets again. Named as older programs hand it over."""
    states: dict[str, str]
    partial: str
    stdin_ended: bool
    config: str = ""
    """The text of the configuration that the processes run with: they go on with it when the new one cannot be used."""
    shared: SharedFiles | None = None
    """None: an older program did not hand it over."""


def taken() -> Inheritance | None:
    """What this program was handed, once."""
    file = os.environ.pop(_VARIABLE, None)
    if file is None:
        return None
    with os.fdopen(int(file), "rb") as source:
        fields = json.load(source)
    fields = {name: value for name, value in fields.items() if name in Inheritance._fields}  # a newer one may have more
    fields["children"] = [
        Heir(**{name: value for name, value in child.items() if name in Heir._fields}) for child in fields["children"]
    ]
    if (shared := os.environ.pop(_SHARED, None)) is not None:
        fields["shared"] = SharedFiles(**json.loads(shared))
    inheritance = Inheritance(**fields)
    for descriptor in _descriptors(inheritance):
        os.set_inheritable(descriptor, False)
    return inheritance


def check() -> int:
    """Starts the program as it is now, to see whether it could take over; the PID of that process."""
    return os.posix_spawn(sys.executable, [*sys.orig_argv, CHECK], os.environ)


def hand_over(inheritance: Inheritance, blocked: Collection[signal.Signals]) -> NoReturn:
    """Becomes the new program. It must unblock these signals when it can handle them. OSError."""
    file = os.memfd_create("pdserve-succession")
    fields = inheritance._asdict() | {"children": [child._asdict() for child in inheritance.children]}
    del fields["shared"]
    environ = {**os.environ, _VARIABLE: str(file)}
    if inheritance.shared is not None:
        environ[_SHARED] = json.dumps(inheritance.shared._asdict())
    os.write(file, json.dumps(fields).encode())
    os.lseek(file, 0, os.SEEK_SET)
    for descriptor in (file, *_descriptors(inheritance)):
        os.set_inheritable(descriptor, True)
    signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    os.execve(sys.executable, sys.orig_argv, environ)  # noqa: S606  (no shell is wanted)


def _descriptors(inheritance: Inheritance) -> list[int]:
    pipes = [end for child in inheritance.children for end in (child.control, child.asks)]
    beats = {child.beats for child in inheritance.children if child.beats is not None}
    shared = inheritance.shared
    return [*inheritance.sockets, *pipes, *beats, *([] if shared is None else [shared.numbers, *shared.pages])]
