"""The faults that a fake engine has been told to have, by environment at start or over HTTP while it runs."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NoReturn, Self


@dataclass
class Faults:
    """Fields that are set by environment at start, or over HTTP."""

    PREFIX: ClassVar[str]
    exit_code: int = 1
    last_lines: str = ""
    """Printed to stderr before it dies; a literal \\n separates lines."""

    @classmethod
    def from_env(cls) -> Self:
        script = cls()
        for field in fields(cls):
            if value := os.environ.get(cls.PREFIX + field.name.upper()):
                script.set(field.name, value)
        return script

    def set(self, name: str, value: Any) -> None:
        """An unknown name or a bad value is a bug of the test and raises."""
        kind = type(getattr(self, name))
        setattr(self, name, str(value).lower() in ("1", "true") if kind is bool else kind(value))


@dataclass
class Script(Faults):
    """Faults and delays. Each field is the environment variable FAKE_<NAME>; those marked * can be changed with
    `POST /fake/script {"name": value}`."""

    PREFIX = "FAKE_"
    ready_after: float = 0.0
    """Seconds until it listens (a real engine loads weights meanwhile)."""
    never_ready: bool = False
    """Never listens, lives on."""
    die_if: str = ""
    """A path: dies at once, if it exists. A start that works once and not again."""
    die_at: str = ""
    """import | load | ready (after the first 200 of /health) | request (*: the next generation)."""
    unpatched: str = ""
    """all: no process reports its patches, as when the plugin was not loaded; EngineCore: that one does not."""
    ignore_term: bool = False
    child: str = ""
    """1: a child named like VLLM::EngineCore in the same session that ignores TERM and outlives us; setsid: in its
    own session."""
    shm: str = ""
    """1: maps a segment /dev/shm/psm_<hex>, removed at a clean stop; leak: not removed then either."""
    progress: str = ""
    """Lines printed while it becomes ready; a literal \\n separates lines."""
    prefill_seconds: float = 0.0
    """* Time a local prefill takes."""
    token_seconds: float = 0.0
    """* Time each generated token takes."""
    prefill_status: int = 0
    """* HTTP status with which every request is refused by a prefill (do_remote_decode)."""
    decode_status: int = 0
    """* HTTP status with which every request is refused otherwise."""
    wrong_kv: bool = False
    """* Decode computes on other KV than it was sent."""
    dummy_weights: bool = False
    """* The output does not depend on the prompt, as with --load-format dummy."""
    ignore_salt: bool = False
    """* cache_salt does not keep caches apart."""
    kv_fails: bool = False
    """* Decode cannot load the KV that it was sent (kv_load_failure_policy: fail)."""
    recomputes: bool = False
    """* Decode computes the prompts whose KV it was sent."""
    lingers: bool = False
    """* A request whose client has left stays among those that run."""
    store_fails: bool = False
    """* The Mooncake store takes nothing: every key counts as failed."""
    eos: int = 0
    """* 1: the first token is EOS, unless the request says ignore_eos; 2: always (an operator's stop token)."""
    poison: str = ""
    """* A member of a body: a request that has it is answered with 500, as by an exception that nobody caught."""
    lethal: str = ""
    """* A member of a body: a request that has it ends the engine."""
    cut: bool = False
    """* Every request ends with its connection, without an answer."""
    stale: bool = False
    """* A connection that has been used is closed when its next request comes, unread: as uvicorn does behind
    an exception that nobody caught, and after a pause."""
    drop_after: int = 0
    """* Closes the connection in the middle of a stream, after so many tokens."""
    out_of_sockets: int = 0
    """* How often a worker of it has had no socket, as the patches count it."""
    keeps_nothing: bool = False
    """* NIXL: a prefill keeps no KV and its answer says nothing of it."""
    hold: str = ""
    """* Wait at this point until it is changed: arrival (before the scheduler has it) | prefill | first (before the
    first token) | token (after it) | answer (done, but nothing of an answer that is no stream was sent); or answer no
    GET of this page: metrics, health."""


class Gate:
    """Lets coroutines wait until a condition over shared state holds, without polling."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()


def die(script: Faults, *default: str) -> NoReturn:
    """Crash: last words, no cleanup."""
    print(*(script.last_lines.split("\\n") if script.last_lines else default), sep="\n", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(script.exit_code)
