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
"""The proxy's option that only checks whether it could take over what is handed over in a FORMAT: used before there
is no way back."""
_VARIABLE = "PDSERVE_PROXY_SUCCESSION"
FORMAT = 1
"""Of what is handed over; raise it with any change of it. A program of another number is not handed anything: its check
fails, and the old one serves on."""


class Heir(NamedTuple):
    """A process that serves until the new ones do."""

    number: int
    """The number of the process: its index."""
    pid: int
    control: int
    asks: int
    retired: bool
    heard: str
    unread: str
    beats: int | None
    """File descriptor of the file in which it beats; None: it does not."""


class SharedFiles(NamedTuple):
    """The file descriptors that the processes of one generation share."""

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
    control_lines: list[str]
    """Those that a new process gets again."""
    states: dict[str, str]
    partial: str
    stdin_ended: bool
    config: str
    """The text of the configuration that the processes run with: they go on with it when the new one cannot be used."""
    shared: SharedFiles | None


def take_inheritance() -> Inheritance | None:
    """Return what this program was handed, once."""
    file = os.environ.pop(_VARIABLE, None)
    if file is None:
        return None
    with os.fdopen(int(file), "rb") as source:
        fields = json.load(source)
    children = [Heir(*child) for child in fields.pop("children")]
    shared = None if (files := fields.pop("shared")) is None else SharedFiles(*files)
    inheritance = Inheritance(**fields, children=children, shared=shared)
    for descriptor in _descriptors(inheritance):
        os.set_inheritable(descriptor, False)
    return inheritance


def start_trial() -> int:
    """Start the program as it is now, to see whether it could take over; return the PID of that process."""
    return os.posix_spawn(sys.executable, [*sys.orig_argv, CHECK, str(FORMAT)], os.environ)


def hand_over(inheritance: Inheritance, blocked: Collection[signal.Signals]) -> NoReturn:
    """Becomes the new program. It must unblock these signals when it can handle them. OSError."""
    file = os.memfd_create("pdserve-succession")
    environ = {**os.environ, _VARIABLE: str(file)}
    os.write(file, json.dumps(inheritance._asdict()).encode())
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
