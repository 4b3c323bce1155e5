"""A node's eyes before anything is started there: what it has, what it lacks, whom it reaches.

Run as `python -m pdserve.preflight.node_probe` by whatever way reaches the node, and in the container in which
its agent will run. It answers questions, one JSON object a line, until its stdin closes; it owns no process and leaves
nothing behind.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import ExitStack
from typing import Annotated, Literal, assert_never

from pydantic import Field, TypeAdapter

from pdserve.plan.frozen import Frozen
from pdserve.plan.model import LmcacheServer, Plan
from pdserve.preflight.facts import NodeFacts, gather
from pdserve.preflight.finding import Finding
from pdserve.preflight.node_checks import check_node
from pdserve.preflight.reachability import CrossNodePort, connect, listen
from pdserve.preflight.transfer import End, EndFailure, FabricPath, OpenEnd, TransferOutcome, WaitingEnd, send
from pdserve.reach.protocol import line_of
from pdserve.system import queued_output


class WhatIs(Frozen):
    """Asks what is there. It is answered by Here. `targets`: names or addresses of the other nodes."""

    ask: Literal["what-is"] = "what-is"
    platform: str
    targets: tuple[str, ...] = ()
    python: str | None = None
    """The interpreter of the engines; None: the one that runs the probe."""


class Check(Frozen):
    """Ask whether everything is there that the plan needs. Answered by Findings.

    `mark`: what the run directory must hold; the other fields are of a deployment that runs (`check_node`)."""

    ask: Literal["check"] = "check"
    plan: Plan
    node: str
    mark: str
    starting: tuple[str, ...] | None = None
    gives_back: tuple[LmcacheServer, ...] = ()
    held_by_us: tuple[int, ...] = ()


class Listen(Frozen):
    """Listen on the plan's ports of this node until the next question. Answered by Listens."""

    ask: Literal["listen"] = "listen"
    node: str
    targets: tuple[CrossNodePort, ...]


class Connect(Frozen):
    """Connect to the ports of other nodes. The listening goes on. Answered by Findings."""

    ask: Literal["connect"] = "connect"
    node: str
    targets: tuple[CrossNodePort, ...]


class Wait(Frozen):
    """Hold memory that others write to or read by the transfer engine, until the probe leaves. Answered by Waits."""

    ask: Literal["wait"] = "wait"
    is_read: bool
    end: End
    python: str | None


class Send(Frozen):
    """Write to the memory of another node's waiting end, or read it. Answered by HasSent."""

    ask: Literal["send"] = "send"
    path: FabricPath
    to: WaitingEnd
    python: str | None


class ProbeReady(Frozen):
    """Is the first line: the probe is there."""

    answers: Literal["ready"] = "ready"


class Here(Frozen):
    """Answers WhatIs."""

    answers: Literal["here"] = "here"
    facts: NodeFacts


class Listens(Frozen):
    """Answers Listen. `taken`: addresses and ports on which another program listens."""

    answers: Literal["listens"] = "listens"
    findings: tuple[Finding, ...] = ()
    taken: tuple[tuple[str, int], ...] = ()


class Waits(Frozen):
    """Answers Wait: where it waits, or why not."""

    answers: Literal["waits"] = "waits"
    waiting: WaitingEnd | None = None
    failure: EndFailure | None = None


class HasSent(Frozen):
    """Answers Send."""

    answers: Literal["sent"] = "sent"
    sent: TransferOutcome


class Findings(Frozen):
    """Answers everything else."""

    answers: Literal["found"] = "found"
    findings: tuple[Finding, ...] = ()


Question = WhatIs | Check | Listen | Connect | Wait | Send
Answer = ProbeReady | Here | Listens | Waits | HasSent | Findings
QUESTIONS: TypeAdapter[Question] = TypeAdapter(Annotated[Question, Field(discriminator="ask")])
ANSWERS: TypeAdapter[Answer] = TypeAdapter(Annotated[Answer, Field(discriminator="answers")])


class Probe:
    """Answers one question after the other."""

    def __init__(self) -> None:
        self._facts: NodeFacts | None = None
        self._listening = ExitStack()

    def answer(self, question: Question) -> Answer:
        """Do what is asked, which may take seconds, and return the answer."""
        match question:
            case WhatIs():
                self._facts = gather(platform=question.platform, targets=question.targets, python=question.python)
                return Here(facts=self._facts)
            case Check():
                self.close()
                facts = self._facts or gather(platform=question.plan.platform)
                findings = check_node(
                    question.plan,
                    question.node,
                    facts=facts,
                    starting=question.starting,
                    gives_back=question.gives_back,
                    held_by_us=question.held_by_us,
                    mark=question.mark,
                )
                return Findings(findings=tuple(findings))
            case Listen():
                self.close()
                listening = self._listening.enter_context(listen(question.node, question.targets))
                return Listens(findings=listening.findings, taken=listening.taken)
            case Connect():
                return Findings(findings=tuple(asyncio.run(connect(question.node, question.targets))))
            case Wait():
                return self._wait(question)
            case Send():
                return HasSent(sent=send(question.path, question.to, question.python))
            case _:
                assert_never(question)

    def _wait(self, question: Wait) -> Waits:
        try:
            waiting = OpenEnd(question.end, question.python, is_read=question.is_read)
        except OSError as error:
            return Waits(
                failure=EndFailure(step="start", error=f"{question.python or sys.executable}: {error.strerror}")
            )
        self._listening.callback(waiting.close)
        begun = waiting.begin()
        return Waits(failure=begun) if isinstance(begun, EndFailure) else Waits(waiting=begun)

    def close(self) -> None:
        """Listens and waits no longer."""
        self._listening.close()


def main() -> int:
    """Answer questions on stdin, on stdout."""
    queued_output.ensure_utf8()
    probe = Probe()
    try:
        _send(ProbeReady())
        for line in sys.stdin.buffer:
            _send(probe.answer(QUESTIONS.validate_json(line)))
    except BrokenPipeError:
        return 1
    finally:
        probe.close()
    return 0


def _send(answer: Answer) -> None:
    sys.stdout.buffer.write(line_of(answer))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
