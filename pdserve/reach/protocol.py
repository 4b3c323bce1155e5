"""The messages of launcher and agent: one JSON object a line, over the pipe that started the agent.

When the pipe closes, the agent stops what it owns. Over a network a cut cable closes nothing: there both sides also
send a beat, and silence ends the agent's lease. Secrets travel here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from pdserve.errors import AgentProtocolError
from pdserve.plan.process import Process
from pdserve.system.cgroup import CgroupId
from pdserve.system.procfs import Place, ProcessId

Method = Literal["GET", "POST", "CONNECT"]
"""CONNECT: to tcp://HOST:PORT, nothing is sent; 200 when the connection is accepted."""


class Message(BaseModel):
    """Takes exact keys: another version of pdserve on the other end is an error, not a guess."""

    model_config = ConfigDict(extra="forbid", frozen=True)


# Launcher to agent -------------------------------------------------------------------------------------------------


class Start(Message):
    """Start a process and report when it is ready. `secrets`: variable -> value, resolved by the launcher. `token`: of
    the run, for the name that it carries (system/process.py)."""

    do: Literal["start"] = "start"
    process: Process
    token: str = Field(min_length=1)
    secrets: dict[str, str] = {}
    cpu_share: tuple[int, int] | None = None
    """(i, n): the i-th of n equal parts of the CPUs that the agent may use. None: all of them."""


class Stop(Message):
    """Stop a process tree; answered by Stopped even when it is gone already."""

    do: Literal["stop"] = "stop"
    name: str
    grace: float


class Push(Message):
    """Write a line to the stdin of a process that has `control: stdin`. `about`: whose state it is; while the
    process does not read, a newer line takes the place of an older one about the same."""

    do: Literal["push"] = "push"
    name: str
    about: str
    line: str


class Beat(Message):
    """Says that the launcher lives. An agent with a lease that hears nothing for its length stops everything by
    itself."""

    do: Literal["beat"] = "beat"


class Ask(Message):
    """Make an HTTP request from the agent's node: LMCache and, by default, the proxy listen on its loopback only.
    `headers` may hold the engine key."""

    do: Literal["ask"] = "ask"
    id: int
    method: Method
    url: str
    headers: dict[str, str] = {}
    body: str | None = None
    seconds: float


class Shutdown(Message):
    """Stop whatever is left, in stop order, and leave."""

    do: Literal["shutdown"] = "shutdown"


Order = Start | Stop | Push | Beat | Ask | Shutdown

# Agent to launcher -------------------------------------------------------------------------------------------------


class Hello(Message):
    """Says that the agent is up. The guard is its parent: it finishes the agent's work if the agent is killed.
    `cgroup`: in which each of its processes gets one of its own; None: they get none, and `no_cgroup` is the reason."""

    event: Literal["hello"] = "hello"
    node: str
    agent: ProcessId
    guard: ProcessId
    hostname: str
    place: Place | None = None
    cgroup: CgroupId | None = None
    no_cgroup: str = ""


class Started(Message):
    """Says that the process exists."""

    event: Literal["started"] = "started"
    name: str
    id: ProcessId


class Progress(Message):
    """A starting process is doing this, by its log."""

    event: Literal["progress"] = "progress"
    name: str
    text: str


class LogCut(Message):
    """A log was cut where no copy of it had room: what it had is lost."""

    event: Literal["log_cut"] = "log_cut"
    name: str
    lost: int
    """Bytes."""
    why: str


class Ready(Message):
    """The probe passed, and the listening socket belongs to the process's own tree."""

    event: Literal["ready"] = "ready"
    name: str
    seconds: float
    ports: dict[str, int] = {}
    """Ports that the tree listens on and that the plan did not pin, by `port/pid command`."""


class Died(Message):
    """The process, or a member that it cannot live without, ended without being asked to."""

    event: Literal["died"] = "died"
    name: str
    pid: int
    code: int | None
    """Exit code; negative: the signal; None: could not be executed, or a member that is not our child."""
    how: str
    seconds: float
    """Since it was started."""
    while_starting: bool
    out_of_memory: bool = False
    """The kernel has killed it, or a process of it, for memory; `how` has the amounts."""
    member: str | None = None
    """Set when not the root but e.g. VLLM::EngineCore ended."""
    log_tail: tuple[str, ...] = ()


class Late(Message):
    """Says that a process lives, but was not ready within its time. Diagnostics were saved before this was sent, if
    they could be."""

    event: Literal["late"] = "late"
    name: str
    seconds: float
    last_answer: str
    diagnostics: str | None
    """Path relative to the run directory; None: no such file could be written."""
    log_tail: tuple[str, ...] = ()


class Health(Message):
    """A ready process stopped answering (or was SIGSTOPped), or answers again."""

    event: Literal["health"] = "health"
    name: str
    responsive: bool
    why: str = ""


class Sockets(Message):
    """A ready engine has run out of sockets or file descriptors, or has had enough of them for a while."""

    event: Literal["sockets"] = "sockets"
    name: str
    short: bool
    times: int
    """How often since it was started."""


class Swapped(Message):
    """Memory of a ready process was written to swap: enough to be seen, or twice what was reported before."""

    event: Literal["swapped"] = "swapped"
    name: str
    bytes: int
    """The bytes of its whole tree, now."""
    read_back: int
    """Bytes that its node has read from swap since the process was ready, for whichever process."""


class Stopped(Message):
    """The tree is gone, but for what is left."""

    event: Literal["stopped"] = "stopped"
    name: str
    forced: bool
    seconds: float
    left: tuple[int, ...] = ()
    """PIDs that were killed and live: they wait for a device in the kernel, or stand in a frozen cgroup."""


class Pulse(Message):
    """Says that the agent lives."""

    event: Literal["pulse"] = "pulse"


class SignalReceived(Message):
    """The agent has got a signal to end, and it stops all of its processes: Slurm signals every step at scancel, and
    at preemption the steps only."""

    event: Literal["signal-received"] = "signal-received"
    node: str
    signal: str


STOPPED = "the agent was stopped by"
"""The beginning of its guard's line in the log: an agent that is stopped writes none itself."""
NOT_HEARD = "not heard for"
"""The beginning of what the link reports of an agent whose heartbeat did not come."""
Because = Literal["lease", "signal", "killed"]


class Leaving(Message):
    """The agent stops everything and leaves without an order from here; when it was killed, its guard reports it."""

    event: Literal["leaving"] = "leaving"
    because: Because
    how: str


class Answered(Message):
    """The answer to an Ask. `status` None: there is none, for the reason `error`; `refused`: nothing listens there."""

    event: Literal["answered"] = "answered"
    id: int
    status: int | None
    body: str = ""
    error: str = ""
    refused: bool = False


class Gone(Message):
    """The agent's pipe has closed, or it was not heard within the heartbeat. Made by the link, not sent by an agent."""

    event: Literal["gone"] = "gone"
    node: str
    how: str
    because: Because | None = None
    """None: there was none before."""
    exit_code: int | None = None
    """The exit code of the `docker run` that held it. None: another program, or it had not ended."""
    held: float = 0.0
    """Seconds for which the launcher itself had not run when that became known."""


Event = (
    Hello
    | Started
    | Progress
    | LogCut
    | Ready
    | Died
    | Late
    | Health
    | Sockets
    | Swapped
    | Stopped
    | SignalReceived
    | Gone
)
"""What a link hands on. Pulse, Leaving and Answered end in the link."""
AgentMessage = Event | Pulse | Leaving | Answered


class AskNode(Protocol):
    """Makes an HTTP request from one node. Never raises for what comes of it."""

    async def __call__(
        self,
        method: Method,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: str | None = None,
        seconds: float,
    ) -> Answered: ...


_ORDERS: TypeAdapter[Order] = TypeAdapter(Annotated[Order, Field(discriminator="do")])
_EVENTS: TypeAdapter[AgentMessage] = TypeAdapter(Annotated[AgentMessage, Field(discriminator="event")])


def line_of(message: BaseModel) -> bytes:
    """Return a message as it travels, line end included."""
    return message.model_dump_json().encode() + b"\n"


def decode_order(line: bytes) -> Order:
    """Decode a line of the launcher. Raises AgentProtocolError when it is no order."""
    try:
        return _ORDERS.validate_json(line)
    except ValidationError as error:
        # The line may carry secrets: name the problem, never the text.
        raise AgentProtocolError(f"unreadable order: {error.error_count()} problem(s)") from None


def decode_event(line: bytes, node: str) -> AgentMessage:
    """Decode a line of a node's agent. Raises AgentProtocolError when it is no event."""
    try:
        return _EVENTS.validate_json(line)
    except ValidationError:
        raise AgentProtocolError(
            "an agent wrote something that is not an event",
            where=f"agent@{node}",
            cause="another version of pdserve on that node, or a program that prints to the agent's stdout",
            todo="compare `pdserve --version` on both nodes",
            evidence=(line.decode(errors="replace").rstrip()[:200],),
        ) from None
