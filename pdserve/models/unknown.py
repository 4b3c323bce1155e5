"""What is raised where a config.json does not allow to compute something."""

from __future__ import annotations


class UnknownModelError(Exception):
    """The config.json does not allow to compute this. The message is a clause: why."""
