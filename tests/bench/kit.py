"""A fake deployment that is measured, and programs that stand for the interpreter of a client."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from tests.launch.deployment import REPOSITORY, Deployment, recipe, up

AGENTIC_SESSIONS, AGENTIC_TURNS, AGENTIC_SEED = 8, 5, 20_261
"""How the trace agentic-tiny was made."""


def agentic_file(kind: str) -> str:
    """Return the lines of agentic-tiny (jsonl), or what AIPerf's generator was given for it (json)."""
    return (REPOSITORY / f"pdserve/bench/agentic-tiny.{kind}").read_text(encoding="utf-8")


@contextmanager
def serving_at(folder: Path, token_seconds: float) -> Iterator[Deployment]:
    """A deployment for all tests of a module: every test gives back what it changes."""
    (folder / "runtime").mkdir(mode=0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PDSERVE_HOME", str(folder / "home"))
        patch.setenv("XDG_RUNTIME_DIR", str(folder / "runtime"))
        patch.setenv("FAKE_TOKEN_SECONDS", str(token_seconds))
        file = recipe(folder)
        port = yaml.safe_load(file.read_text())["ports"]["lmcache_http"]
        patch.setenv("FAKE_LMCACHE_URL", f"http://127.0.0.1:{port}")
        with up(file, folder / "home") as deployment:
            deployment.command.expect("serving fake")
            yield deployment


def stand_in(folder: Path, client: str) -> str:
    """What stands for the interpreter that has a client: it runs the one of tests/fakes."""
    program = folder / "python-fake"
    program.write_text(
        f'#!/bin/sh\nexec {shlex.join([sys.executable, str(REPOSITORY / "tests/fakes" / client)])} "$@"\n'
    )
    program.chmod(0o755)
    return str(program)
