"""Flags of a recipe as the words of a command line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pdserve.recipe.owned import Each


def flag_words(values: Mapping[str, Any]) -> Iterator[str]:
    """A typed flag map as arguments: true --flag, false --no-flag, list --flag a b, mapping --flag JSON,
    Each --flag a --flag b."""
    for name, value in values.items():
        if value is None:
            continue
        if isinstance(value, bool):
            yield f"--{name}" if value else f"--no-{name}"
        elif isinstance(value, Each):
            yield from (word for item in value.values for word in (f"--{name}", item))
        elif isinstance(value, list):
            yield f"--{name}"
            yield from (_text(item) for item in value)
        elif (text := _text(value)).startswith("-"):
            yield f"--{name}={text}"  # argparse would take it for a flag
        else:
            yield f"--{name}"
            yield text


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, dict | list | bool) or value is None:
        return json.dumps(value, default=str)  # dates of YAML: the rules of a recipe refuse them later
    return str(value)
