"""Saves what can be learnt of a process that lives but does not become ready: stacks, children, sockets.

Apart from supervision, which asks for it once, after a time limit."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from pdserve.system import procfs
from pdserve.system.process import output_of

_STACK_SECONDS = 10.0


async def snapshot(name: str, pids: Iterable[int], file: Path, *, last_answer: str) -> OSError | None:
    """Write what can be seen of processes into a text file; return why there is none. Best effort by design: what a
    tool cannot see is noted in it."""
    try:
        _write(file, await _snapshot_lines(name, pids, last_answer))
    except OSError as error:  # a full disk, a deleted run directory, no room for a tool
        return error
    return None


async def _snapshot_lines(name: str, pids: Iterable[int], last_answer: str) -> list[str]:
    members = sorted(pids)
    parts = [f"{name}: alive, not ready; last answer of its probe: {last_answer}", time.strftime("%FT%T%z"), ""]
    parts.append(f"process tree ({len(members)}):")
    held = {process.pid for process in procfs.identities(members) if procfs.is_stopped(process)}
    parts += [f"  {pid}{' (stopped)' if pid in held else ''}  {procfs.command(pid)}" for pid in members]
    parts.append("\nlistening TCP ports:")
    parts += [f"  {port}  PID {pid}" for port, pid in sorted(procfs.listening_ports(members).items())] or ["  none"]
    stacks = await asyncio.gather(*(asyncio.to_thread(_python_stack, pid) for pid in members))
    for pid, stack in zip(members, stacks, strict=True):
        parts += [f"\nPython stack of {pid}:", stack]
        parts += [f"kernel: {_wait_channel(pid)}"]
    return parts


def _write(file: Path, parts: list[str]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(parts) + "\n", encoding="utf-8")
    except OSError:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)  # a beginning of it would look like all of it
        raise


def _python_stack(pid: int) -> str:
    tool = shutil.which("py-spy") or str(Path(sys.executable).with_name("py-spy"))
    if not Path(tool).exists():
        return "unknown: py-spy is not installed (pip install 'pdserve[diagnose]')"
    output = output_of([tool, "dump", "--pid", str(pid)], timeout=_STACK_SECONDS)
    return output.out.rstrip() if output.code == 0 else f"unknown: py-spy: {output.err.strip()}"


def _wait_channel(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/wchan").read_text(encoding="utf-8") or "running"
    except OSError as error:
        return f"unknown ({error.strerror})"
