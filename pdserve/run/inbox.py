"""Requests to a running launcher, through its run directory.

A file in, a file out: this works from any terminal and, over a shared file system, from another machine; it needs no
port and no secret, because the run directory belongs to one user. Writers rename, so a reader never sees half a file.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from pdserve.errors import StateError
from pdserve.plan.model import Plan, Versions
from pdserve.reach.protocol import Method
from pdserve.run.directory import RunDir

POLL_SECONDS = 0.2


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Down(_Request):
    """Stop everything, in order."""

    verb: Literal["down"] = "down"


class Restart(_Request):
    """Stop and start one process."""

    verb: Literal["restart"] = "restart"
    name: str


class Apply(_Request):
    """Change the deployment to this plan. `replace`: also running engines whose command changed."""

    verb: Literal["apply"] = "apply"
    plan: Plan
    recipe: str
    versions: Versions = Versions()
    """What is installed now. Engines of other versions may not understand each other."""
    replace: bool = False


class Fetch(_Request):
    """Make an HTTP request on a node, where LMCache listens on loopback only. The reply's message is the Answered."""

    verb: Literal["fetch"] = "fetch"
    node: str
    method: Method
    url: str
    body: str | None = None
    seconds: float


Request = Down | Restart | Apply | Fetch
_REQUESTS: TypeAdapter[Request] = TypeAdapter(Annotated[Request, Field(discriminator="verb")])


class Reply(BaseModel):
    """Answers a request. `error` is the rendered text of what went wrong; `exit_code` is what the command returns."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    exit_code: int
    message: str


class NotAskedError(StateError):
    """The request cannot be written: no space, or a folder that is not ours."""


def ask(
    run: RunDir,
    request: Request,
    *,
    seconds: float,
    alive: Callable[[], bool],
    taken_within: float | None = None,
    look: Callable[[], None] = lambda: None,
) -> Reply:
    """Puts a request and waits for the reply. Raises StateError when the launcher dies or does not answer, and
    NotAskedError when the request cannot be written.

    `taken_within`: seconds in which it must have been taken; `look` is called again and again meanwhile.
    """
    name = f"{time.time():.6f}-{secrets.token_hex(3)}"
    answer = run.inbox / f"{name}.reply"
    waiting = run.inbox / f"{name}.json"
    try:
        run.write(waiting, request.model_dump_json())
    except OSError as error:
        raise NotAskedError(
            "the request to the launcher cannot be written",
            where=str(run.inbox),
            cause=f"{error.strerror or error}: the disk is full, a quota is used up, or the folder is another user's",
            todo="make room there; `pdserve down` on the launcher's machine needs none",
        ) from error
    began = time.monotonic()
    while (passed := time.monotonic() - began) < seconds:
        if (reply := _take_reply(answer)) is not None:
            return reply
        if not alive() or (taken_within is not None and passed > taken_within and waiting.exists()):
            break
        look()
        time.sleep(POLL_SECONDS / 2)
    waiting.unlink(missing_ok=True)
    if (reply := _take_reply(answer)) is not None:  # the last that a launcher does before it ends
        return reply
    log = run.logs / "launcher.log"
    raise StateError(
        "the launcher did not answer" if alive() else "the launcher ended before it answered",
        where=str(run.path),
        todo=f"pdserve status; the launcher's output is in {log if log.exists() else 'the terminal of pdserve up'}",
    )


def _take_reply(answer: Path) -> Reply | None:
    """Return the reply, which is removed; None: there is none yet."""
    if not answer.exists():
        return None
    reply = Reply.model_validate_json(answer.read_text(encoding="utf-8"))
    answer.unlink()
    return reply


def take(run: RunDir) -> list[tuple[str, Request]]:
    """Return the requests that wait, oldest first, removed from the inbox. What cannot be read is answered and
    dropped."""
    taken: list[tuple[str, Request]] = []
    for file in sorted(run.inbox.glob("*.json")):
        if not file.is_file():
            continue
        try:
            content = file.read_bytes()
            file.unlink()
        except OSError:
            continue  # the request was taken back, or the next look may succeed
        try:
            taken.append((file.stem, _REQUESTS.validate_json(content)))
        except ValidationError as error:
            unreadable = StateError(
                "the launcher cannot read the request: it is of another version of pdserve",
                where=str(run.path),
                cause=f"{error.error_count()} fields differ",
                todo="take the deployment down with the version that started it",
            )
            # What else was taken is in no other place any more: it must not be lost with this answer.
            with contextlib.suppress(OSError):
                answer(run, file.stem, Reply(exit_code=unreadable.exit_code, message=unreadable.render()))
    return taken


def answer(run: RunDir, name: str, reply: Reply) -> None:
    """Writes the reply to a request."""
    run.write(run.inbox / f"{name}.reply", json.dumps(reply.model_dump()))
