"""One process of a plan: all that the agent of its node has to know of the plan to start, watch and stop it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pdserve.plan.frozen import Frozen
from pdserve.recipe.base import TrialTransfer
from pdserve.recipe.sections import Logs, RestartPolicy
from pdserve.roles import ProcessRole, is_engine


class HttpProbe(Frozen):
    """Is passed when GET `path` on the process's own listening socket answers 200 with a body that contains
    `body_contains` (if given)."""

    kind: Literal["http"] = "http"
    host: str
    port: int
    path: str
    body_contains: str | None = None
    scheme: Literal["http", "https"] = "http"
    """https: without a look at the certificate."""


class LmcacheProbe(Frozen):
    """Is passed when /healthcheck is 200 AND /config names our instance id: a stale server on the port also answers 200
    while ours is still dying."""

    kind: Literal["lmcache"] = "lmcache"
    host: str
    port: int
    instance_id: str


class ExitProbe(Frozen):
    """Is passed when a process that does one thing has ended with code 0. Any other end is a death."""

    kind: Literal["exit"] = "exit"


Probe = Annotated[HttpProbe | LmcacheProbe | ExitProbe, Field(discriminator="kind")]


class Env(Frozen):
    """The environment of a process, as a rule rather than a dump.

    base `inherit`: the agent's environment minus `unset`; base `allow`: only the names in `allow`, where `PREFIX_*`
    stands for every name that begins with `PREFIX_`.
    Then `set`, then `secrets` (variable -> name of the secret, resolved when the process is started).
    """

    base: Literal["inherit", "allow"] = "inherit"
    allow: tuple[str, ...] = ()
    unset: tuple[str, ...] = ()
    set: dict[str, str] = Field(default={})
    secrets: dict[str, str] = Field(default={})

    def inherits(self, name: str) -> bool:
        """Return whether a variable of the agent's environment is passed on; `set` and `secrets` come on top."""
        if self.base == "inherit":
            return name not in self.unset
        prefixes = tuple(rule.removesuffix("*") for rule in self.allow if rule.endswith("*"))
        return name in self.allow or name.startswith(prefixes)


class Ranks(Frozen):
    """The EngineCores and workers inside an engine's process tree."""

    cores: int
    """EngineCores: its DP ranks on the node."""
    workers: int
    """TP x PP x DP workers on the node. A single one may live inside its EngineCore."""


class PortRange(Frozen):
    """Holds the ports first..last, both included."""

    first: int
    last: int


class PlannedConnector(Frozen):
    """A KV connector that an engine loads; the children of a MultiConnector, instead of itself."""

    class_name: str
    """vLLM's."""
    package: str | None = None
    """The engine package that it imports; None: not known."""
    rdma_devices: tuple[str, ...] | None = None
    """The RDMA devices that it uses, none when it may choose; None: it moves KV without RDMA."""
    trial: TrialTransfer | None = None
    """How a transfer of it is tried before the start; None: none is."""


class Process(Frozen):
    """Describes one operating-system process tree: started, watched and stopped by its node's agent."""

    name: str
    """Unique in the deployment: prefill-0, decode-1, lmcache-0, proxy."""
    role: ProcessRole
    node: str
    argv: tuple[str, ...]
    env: Env
    devices: tuple[int, ...] = ()
    ports: dict[str, int] = Field(default={})
    """Pinned ports by purpose: http, bootstrap, kv_events, request, ..."""
    log: str
    """Log file, relative to the run directory."""
    logs: Logs = Logs()
    files: dict[str, str] = Field(default={})
    """Files to write before the start: path relative to the run directory -> content. No secrets."""
    probe: Probe | None
    """None: never probed (headless followers of a multi-node instance)."""
    start_stage: int
    """Stages start in ascending order; the next one waits until this one is ready."""
    stop_stage: int
    """Stages stop in ascending order."""
    ready_seconds: float
    stop_seconds: float
    control: Literal["none", "stdin"] = "none"
    """stdin: the launcher pushes JSON lines to it through the agent (the proxy's worker states)."""
    restart: RestartPolicy = RestartPolicy()
    lmcache: str | None = None
    """Name of the LMCache server that this engine attaches to (the first one when `per: tp-rank`)."""
    patches: tuple[str, ...] = ()
    """Names, in the order in which they are applied."""
    ranks: Ranks | None = None
    """None: not an engine."""
    instance: str | None = None
    """The name of its instance's leader, for an engine. On several nodes an instance lives and dies as one."""
    connectors: tuple[PlannedConnector, ...] = ()
    packages: tuple[str, ...] = ()
    """The packages that its command runs (vllm, lmcache, ...). (): a command of the recipe's own may run anything."""
    libraries: dict[str, str] = Field(default={})
    """System library that its packages link to -> the Debian package that has it."""
    port_ranges: dict[str, PortRange] = Field(default={})
    """By purpose: ranges out of which it chooses ports by itself."""
    host_bytes: int = 0
    """Memory of its node that its connectors take, beside what the engine itself needs."""
    shm_bytes: int = 0
    """The part of it that is in /dev/shm."""
    reached_by: dict[str, tuple[ProcessRole, ...]] = Field(default={})
    """Purpose of a port or range -> roles of the processes that connect to it, on whatever node."""

    @property
    def is_engine(self) -> bool:
        """Return True for a vLLM engine, and a follower of one."""
        return is_engine(self.role)

    @property
    def is_lmcache(self) -> bool:
        """Return True for an LMCache server."""
        return self.role == "lmcache"

    @property
    def is_store_master(self) -> bool:
        """Return True for the master of a Mooncake store."""
        return self.role == "mooncake-master"

    @property
    def is_proxy(self) -> bool:
        """Return True for what clients talk to."""
        return self.role == "proxy"

    @property
    def fetches_weights(self) -> bool:
        """Return True for a download of the model."""
        return self.role == "weights"

    @property
    def is_setup(self) -> bool:
        """Return True for a command of the recipe's setup."""
        return self.role == "setup"

    @property
    def ends_when_done(self) -> bool:
        """Return True if it does one thing before the others start, and ends."""
        return isinstance(self.probe, ExitProbe)

    @property
    def rdma_devices(self) -> tuple[str, ...] | None:
        """Return the RDMA devices that the process's connectors use, none when they may choose; None: it moves KV
        without RDMA."""
        used = [connector.rdma_devices for connector in self.connectors if connector.rdma_devices is not None]
        return tuple(dict.fromkeys(name for names in used for name in names)) if used else None
