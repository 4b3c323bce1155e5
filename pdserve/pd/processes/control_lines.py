"""The control lines that a member gets again which replaces another one, or comes with a new program."""

from __future__ import annotations

import json
from typing import Any


class ControlLines:
    """Which workers came and went, in that order, and behind that the last state of each."""

    def __init__(self) -> None:
        self.changes: list[bytes] = []
        self.states: dict[str, bytes] = {}

    def remember(self, line: bytes) -> dict[str, Any]:
        """The message of a line; an empty one if it cannot be read."""
        try:
            message = json.loads(line)
        except ValueError:
            return {}
        if not isinstance(message, dict):
            return {}
        if isinstance(message.get("worker"), str):
            self.states[message["worker"]] = line
        elif "add" in message or "remove" in message:
            # A worker that comes later under this name is another one: that one was draining or dead, not this one.
            name = _name_of(message["add"]) if "add" in message else message["remove"]
            if isinstance(name, str):
                self.states.pop(name, None)
            self.changes.append(line)
        return message

    def again(self) -> list[bytes]:
        """What a new member is to hear."""
        return [*self.changes, *self.states.values()]


def _name_of(worker: object) -> object:
    return worker.get("name") if isinstance(worker, dict) else None
