"""Print what a person sees while a deployment starts: one line a fact, a heartbeat while nothing happens."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.text import Text

from pdserve.plan.model import Plan
from pdserve.printable import printable
from pdserve.run.directory import RunDir

EVENT_STYLES = {"ready": "green", "died": "bold red", "late": "bold red", "failed": "bold red", "up": "bold green"}
_QUIET_SECONDS = 15.0
"""Progress of one process is printed at most so often; other news always."""


class ProgressTerminal(Console):
    """Prints the lines of a verb that goes on when nothing takes them any more: their reader has left, or their disk is
    full."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, soft_wrap=True)
        self.also = ""
        """This ends the warning, for a reader who has no lines any more."""

    def on_broken_pipe(self) -> None:
        """Print nothing more: whoever read the lines has left. The deployment serves on: it is stopped by Ctrl-C or
        `down`, not by this."""
        self.quiet = True
        # What is still buffered must go somewhere at the next flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())

    def print(self, *objects: Any, **more: Any) -> None:
        """Print until a full disk does not take a line; stderr says so. What a line has of a
        log or of another process moves no terminal; its style is ours."""
        try:
            super().print(*map(_harmless, objects), **more)
        except OSError as failure:
            self.on_broken_pipe()
            if not self.stderr:
                why = f"stdout: the progress cannot be written: {failure.strerror}"
                text = f"warning: {why}. The command goes on without it{self.also}"
                ProgressTerminal(stderr=True).print(Text(text, style="yellow"))


def _harmless(shown: Any) -> Any:
    """Return a text or a string without control characters; tables and the like as they are."""
    if isinstance(shown, str):
        return printable(shown)
    if isinstance(shown, Text) and (text := printable(shown.plain)) != shown.plain:
        return Text(text, style=shown.style)
    return shown


class ShownProgress:
    """Prints a verb's progress as lines. Colours on a terminal, plain lines when piped."""

    def __init__(self, *, stdout: bool = True) -> None:
        """`stdout` False: all goes to stderr, because stdout is another program's."""
        self._err = ProgressTerminal(stderr=True)
        self._out = ProgressTerminal() if stdout else self._err
        self._out.also = "; pdserve status has the state"
        self._began = time.monotonic()
        self._progress: dict[str, float] = {}
        self._begun: Plan | None = None
        self._serves_here = False

    def warn(self, warnings: Iterable[str]) -> None:
        """Print each warning once, before anything starts."""
        for warning in dict.fromkeys(warnings):
            self._err.print(Text(f"warning: {warning}", style="yellow"))

    def note(self, *lines: str) -> None:
        """Print lines with the time, as those of events."""
        for line in lines:
            self._line(line)

    def result(self, line: str) -> None:
        """Print a line as it is."""
        self._out.print(Text(line))

    def begin(self, run: RunDir, plan: Plan, *, serves_here: bool) -> None:
        """Print the head: what starts, where it is recorded. `serves_here`: the launcher is in this process; one that
        only follows another ends with the error that it saw, and the entry point prints that."""
        self._serves_here = serves_here
        self._begun = plan
        self._out.also = f"; pdserve status has the state, and {run.events} the history"
        count = len(plan.processes)
        self._line(f"{plan.name}: {count} processes on {len(plan.nodes)} node(s), {plan.mode}; record: {run.path}")

    def event(self, event: dict[str, Any]) -> None:
        """Print an event of the history."""
        kind = event["event"]
        if kind == "progress" and not self._news(event["name"]):
            return
        if (text := event_text(event)) is not None:
            self._line(text, style=EVENT_STYLES.get(kind))
            if kind == "up" and self._begun is not None:
                self._ready(event, self._begun)
        if kind == "failed" and event.get("kept") and self._begun is not None and self._serves_here:
            self._print_survived_failure(event, self._begun)

    def _news(self, name: str) -> bool:
        now = time.monotonic()
        if now - self._progress.get(name, -_QUIET_SECONDS) < _QUIET_SECONDS:
            return False
        self._progress[name] = now
        return True

    def _print_survived_failure(self, event: dict[str, Any], plan: Plan) -> None:
        """Print a failure after which the command goes on: its error is not printed at exit."""
        sys.stdout.flush()
        self._err.print(Text(f"error: {event['error']}"))
        name = plan.name
        self._line(
            f"what is healthy was kept; next: pdserve status {name} | pdserve logs --deployment {name} | "
            f"pdserve up RECIPE (starts what is missing) | pdserve down {name} (or Ctrl-C)"
        )

    def _ready(self, event: dict[str, Any], plan: Plan) -> None:
        self._line(f"serving {plan.served_name} at {event['endpoint']}/v1{plan.proxy_place}")

    def end(self, *, detached: bool) -> None:
        """Say what to type next, if `detached`. The error, if any, is printed by the entry point."""
        if detached and self._begun is not None:
            name = self._begun.name
            self._line(f"next: pdserve status {name} | pdserve verify {name} | pdserve logs -f | pdserve down {name}")
        sys.stdout.flush()

    def _line(self, text: str, style: str | None = None) -> None:
        self._out.print(Text(f"[{time.monotonic() - self._began:6.1f}s] {text}", style=style or ""))


def event_text(event: dict[str, Any]) -> str | None:
    """Return an event of the history as a line. None: it is not for people."""
    text: str | None = _TEXTS.get(event["event"], lambda _: None)(event)
    return text


def _death_text(event: dict[str, Any]) -> str:
    member = f" ({event['member']})" if event["member"] else ""
    return f"{event['name']:<12} died{member}: {event['how']} after {event['seconds']:.1f} s"


def _bad_peer(event: dict[str, Any]) -> str:
    shown = f", and does between that and {', '.join(event['crossed'])}" if event["crossed"] else ""
    then = "restarting it" if event["restarted"] else "it was restarted for that already: look at the network between"
    return f"{event['name']:<12} no KV crosses between it and {event['new']}, which is new{shown}; {then}"


def _stop_text(event: dict[str, Any]) -> str:
    if left := event.get("left"):
        pids = ", ".join(map(str, left))
        return f"{event['name']:<12} was killed and did not end: PID {pids} waits in the kernel, for a device perhaps"
    return f"{event['name']:<12} stopped in {event['seconds']:.1f} s" + (" (killed)" if event["forced"] else "")


def _change(event: dict[str, Any]) -> str | None:
    name = event.get("name", "")
    match event["step"]:
        case "replace":
            return f"{name:<12} is drained, then started anew"
        case "stop":
            return f"{name:<12} is drained, then stopped"
        case "back":
            return f"{name:<12} returns to its former command: {event['why']}"
        case "generation":
            return (
                f"old and new engines cannot exchange KV: {', '.join(event['first'])} start first and take over, then "
                f"{', '.join(event['second']) or 'none'} follow"
            )
        case "stopped":
            return f"the change has stopped; as before: {', '.join(event['left']) or 'nothing'}"
    return None


_TEXTS: dict[str, Any] = {
    "change": _change,
    "started": lambda e: f"{e['name']:<12} starting on {e['node']} (PID {e['pid']})",
    "progress": lambda e: f"{e['name']:<12} {e['text']}",
    "ready": lambda e: f"{e['name']:<12} ready after {e['seconds']:.1f} s",
    "weights": lambda e: f"weights: every node has commit {e['commit']}",
    "attached": lambda e: "LMCache: " + ", ".join(f"{s} has {n} worker(s)" for s, n in e["servers"].items()),
    "canary": lambda e: (
        f"{e['name']:<12} canary{' with ' + e['peer'] if 'peer' in e else ''}: {e['text']} in {e['seconds']:.2f} s"
    ),
    "bad_peer": _bad_peer,
    "up": lambda e: (
        f"ready after {e['total_seconds']:.1f} s (LMCache {e['lmcache_seconds']:.1f}, engines "
        f"{e['engine_seconds']:.1f}, canary {e['canary_seconds']:.2f}, pdserve {e['orchestration_seconds']:.2f})"
    ),
    "died": _death_text,
    "late": lambda e: f"{e['name']:<12} not ready after {e['seconds']:.0f} s",
    "unresponsive": lambda e: f"{e['name']:<12} does not answer: {e['why']}",
    "responsive": lambda e: f"{e['name']:<12} answers again",
    "out_of_sockets": lambda e: f"{e['name']:<12} ran out of sockets or file descriptors: {e['todo']}",
    "log_cut": lambda e: f"{e['name']:<12} {e['lost'] >> 20} MiB of its log are lost, cut without a copy: {e['why']}",
    "swapped": lambda e: (
        f"{e['name']:<12} {e['bytes'] >> 20} MiB of its memory are in swap: {e['node']} has too little"
    ),
    "sockets_again": lambda e: f"{e['name']:<12} has sockets again",
    "given_up": lambda e: f"{e['name']:<12} {e['why']}; treated as dead",
    "restarting": lambda e: f"{e['name']:<12} restart {e['attempt']} in {e['after_seconds']:.0f} s",
    "rolling": lambda e: f"{e['name']:<12} is replaced; the old processes serve until the new ones do",
    "rolled": lambda e: f"{e['name']:<12} was replaced",
    "not_rolled": lambda e: f"{e['name']:<12} was not replaced: {e['why']}",
    "cache_down": lambda e: f"{e['name']:<12} is down: {', '.join(e['engines'])} get no traffic until it is back",
    "engine_not_back": lambda e: f"{e['name']:<12} did not attach again; restarting it",
    "phase": lambda e: f"deployment is {e['phase']}",
    # What follows it is the teardown; the whole error comes at the end, where nothing scrolls it away.
    "failed": lambda e: None if e.get("kept") else f"failed: {e['error'].splitlines()[0]}",
    "stopped": _stop_text,
    "signal_received": lambda e: f"the agent of {e['node']} was ended from outside ({e['signal']})",
    "command": lambda e: e["text"],
    "not_reached": lambda e: e["text"],
    "note": lambda e: e["text"],
    "record_deleted": lambda e: e["text"],
    "agent_gone": lambda e: f"the agent of {e['node']} is gone: {e['how']}",
}
