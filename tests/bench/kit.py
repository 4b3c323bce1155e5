"""A fake deployment that is measured, programs that stand for the interpreter of a client, and what `bench` says."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.launch.deployment import REPOSITORY, Deployment, home_in, pdserve, recipe, serving, up

AGENTIC_SESSIONS, AGENTIC_TURNS = 8, 5
"""Of the trace agentic-tiny."""


@contextmanager
def serving_at(folder: Path, token_seconds: float) -> Iterator[Deployment]:
    """A deployment for all tests of a module: every test gives back what it changes."""
    with home_in(folder) as home, pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKE_TOKEN_SECONDS", str(token_seconds))
        file = recipe(folder)
        port = yaml.safe_load(file.read_text())["ports"]["lmcache_http"]
        patch.setenv("FAKE_LMCACHE_URL", f"http://127.0.0.1:{port}")
        with up(file, home) as deployment:
            yield serving(deployment)


def stand_in(folder: Path, client: str) -> str:
    """What stands for the interpreter that has a client: it runs the one of tests/fakes."""
    program = folder / "python-fake"
    program.write_text(
        f'#!/bin/sh\nexec {shlex.join([sys.executable, str(REPOSITORY / "tests/fakes" / client)])} "$@"\n'
    )
    program.chmod(0o755)
    return str(program)


def bench(*arguments: str) -> tuple[int, Any, str]:
    """Exit code, result, and all that was printed."""
    code, output = pdserve("bench", "--json", *arguments)
    result, _ = json.JSONDecoder().raw_decode(output, output.index("{\n"))  # an error follows
    return code, result, output


def reasons(result: Any) -> set[str]:
    return {reason["check"] for each in result["measurements"] for reason in each["verdict"]["reasons"]}
