"""The control lines that a member gets again which replaces another one, or comes with a new program."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

TOLD = b'{"told": true}'
"""The line behind those that a new member hears at its start: now it knows what its siblings know, and may serve."""


class ControlLines:
    """The last line that names all workers, if there was one; which workers came and went, as far as that differs from
    it or from the configuration; and behind that the last state of each. No more than two lines for a worker and its
    state, however often it comes and goes."""

    def __init__(self) -> None:
        self._all: bytes | None = None
        self._changes: dict[str, list[bytes]] = {}
        """Name -> that the configured worker of this name has gone, then that another one has come; either may lack."""
        self.states: dict[str, bytes] = {}

    @property
    def changes(self) -> list[bytes]:
        """Return the changes that are there, in the order in which they came."""
        changes = [line for lines in self._changes.values() for line in lines]
        return changes if self._all is None else [self._all, *changes]

    def remember(self, line: bytes) -> dict[str, Any]:
        """The message of a line; an empty one if it cannot be read."""
        try:
            message = json.loads(line)
        except ValueError:
            return {}
        if not isinstance(message, dict):
            return {}
        if isinstance(message.get("workers"), list):
            self._name_all(line, message["workers"])
        elif isinstance(message.get("worker"), str):
            self.states[message["worker"]] = line
        elif "add" in message or "remove" in message:
            # A worker that comes later under this name is another one: that one was draining or dead, not this one.
            name = _name_of(message["add"]) if "add" in message else message["remove"]
            if isinstance(name, str):
                self.states.pop(name, None)
                self._change(name, line, comes="add" in message)
        return message

    def take_over(self, changes: Iterable[bytes], states: dict[str, bytes]) -> None:
        """Take over what the program before has remembered."""
        for line in changes:
            self.remember(line)
        self.states = states

    def _name_all(self, line: bytes, workers: list[object]) -> None:
        """It has their states too. What an admin has added beside them stays; what he has removed of them is back."""
        self._all = line
        names = {_name_of(worker) for worker in workers}
        added = {name: lines[-1:] for name, lines in self._changes.items() if "add" in json.loads(lines[-1])}
        self._changes = {name: lines for name, lines in added.items() if name not in names}
        self.states = {name: state for name, state in self.states.items() if name in self._changes}

    def _change(self, name: str, line: bytes, *, comes: bool) -> None:
        before = self._changes.pop(name, [])
        gone = [each for each in before if "remove" in json.loads(each)]
        if comes:
            self._changes[name] = [*gone, line]
        elif gone or not before:
            self._changes[name] = gone or [line]
        # Else it came and went: the configuration, which never had it, is right again.

    def again(self) -> list[bytes]:
        """Return the lines that a new member is to hear."""
        return [*self.changes, *self.states.values()]


def _name_of(worker: object) -> object:
    return worker.get("name") if isinstance(worker, dict) else None
