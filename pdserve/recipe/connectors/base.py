"""Define what a KV connector is to a deployment. Data and pure functions: nothing here knows nodes or other
connectors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from pydantic import Field

from pdserve.pd.config.proxy import Protocol
from pdserve.recipe.base import Strict, TrialTransfer
from pdserve.recipe.sections import Lmcache
from pdserve.roles import ENGINE_ROLES, EngineRole, ProcessRole

Config = dict[str, Any]
"""A mapping for vLLM's --kv-transfer-config, or a child of one."""

_KV_ROLE: Mapping[EngineRole, str] = {"prefill": "kv_producer", "decode": "kv_consumer", "aggregated": "kv_both"}


@dataclass(frozen=True, kw_only=True)
class ConnectorPort:
    """Ports that engines with a connector open, one kind of them."""

    key: str
    """The field of the recipe's `ports`."""
    purpose: str
    """The name of the port in a plan's process."""
    what: str
    """For messages, in the plural."""
    exposes: str
    """What a client that reaches the port can do without a key."""
    used_by: str
    roles: tuple[EngineRole, ...] = ENGINE_ROLES
    """Whose engines open it."""
    reached_by: Mapping[EngineRole, tuple[ProcessRole, ...]] = field(default_factory=dict)
    """Role of the engine that listens -> roles of the processes that connect to it."""
    server_only: bool = False
    """Only a process with an API server has it: of an instance with one for all nodes, the first."""
    count: int = 1
    per_rank: bool = False
    """`count` ports for each data-parallel rank behind its API server."""
    per_worker: bool = False
    """`count` ports for each tensor-parallel rank."""
    chosen: bool = False
    """A range out of which the engine chooses; otherwise each port is pinned."""
    everywhere: bool = False
    """Bound on every interface; otherwise on the node's address."""

    def shared_with(self, other: ConnectorPort) -> ConnectorPort:
        """Return this port of a process that has both connectors."""
        roles = {*self.reached_by, *other.reached_by}
        peers = {
            role: tuple(dict.fromkeys((*self.reached_by.get(role, ()), *other.reached_by.get(role, ()))))
            for role in sorted(roles)
        }
        both = tuple(role for role in ENGINE_ROLES if role in self.roles or role in other.roles)
        return replace(self, roles=both, reached_by=peers)

    def how_many(self, ranks: int, tp: int) -> int:
        """Return the ports of one engine process whose API server has so many data-parallel ranks, of so many workers
        each."""
        return self.count * (ranks if self.per_rank else 1) * (tp if self.per_worker else 1)


@dataclass(frozen=True)
class EngineSide:
    """The facts that the environment of an engine process depends on."""

    address: str
    ports: Mapping[str, range]
    """Purpose -> ports; on followers those of their API server."""
    transfer_abort_seconds: int
    first_rank: int = 0
    """The data-parallel rank that has the first of the ports that there is one of for each rank."""


@dataclass(frozen=True)
class HostMemory:
    """The memory of a node that a connector takes, in bytes."""

    total: int = 0
    in_shm: int = 0
    """The part of it that is in /dev/shm."""

    def __add__(self, other: HostMemory) -> HostMemory:
        return HostMemory(self.total + other.total, self.in_shm + other.in_shm)


@dataclass(frozen=True)
class Context:
    """The facts that a connector's mapping depends on beside its own section."""

    role_name: EngineRole
    platform: str
    lmcache: Lmcache | None
    lmcache_ports: tuple[int, ...]
    """Request ports of the node's LMCache servers, in TP-rank order; empty: none is attached."""
    modules: Mapping[str, str] = field(default_factory=dict)
    """Class name -> module of our subclass of it, for the classes that a patch of this role replaces."""
    address: str = ""
    """The address of the instance's first process."""
    ports: Mapping[str, range] = field(default_factory=dict)
    """Its ports by purpose; empty where there is no plan yet."""
    request_seconds: float = 0.0
    """When the proxy ends a request."""

    @property
    def kv_role(self) -> str:
        return _KV_ROLE[self.role_name]

    def module(self, class_name: str, upstream: str | None = None) -> Config:
        """Return where vLLM finds the class: our subclass of that name, else `upstream`, else vLLM's own registry."""
        module = self.modules.get(class_name, upstream)
        return {} if module is None else {"kv_connector_module_path": module}


def _no_variables(side: EngineSide) -> dict[str, str]:
    return {}


def _no_rdma(config: Mapping[str, Any], variables: Mapping[str, str]) -> tuple[str, ...] | None:
    return None


def _no_trial(config: Mapping[str, Any]) -> TrialTransfer | None:
    return None


@dataclass(frozen=True, kw_only=True)
class ConnectorKind:
    """The facts of a connector class of vLLM, whether a section or a raw mapping names it."""

    class_name: str
    """vLLM's."""
    package: str
    """The engine package that it imports (installed/distributions.py)."""
    protocol: Protocol | None = None
    """How the proxy moves KV from prefill to decode with it; None: it does not move KV between engines."""
    experimental: bool = False
    """No message offers it, and a deployment that has it is untested whatever its recipe says."""
    tp_must_divide: bool = False
    """Whether vLLM asserts that of the tensor parallel sizes of prefill and decode one divides the other (the source is
    in rules/connectors.py)."""
    attaches_lmcache: bool = False
    """Whether its engines register at the node's LMCache server."""
    uses_store: bool = False
    """Whether its engines need the master of a Mooncake store."""
    caches: bool = False
    """It keeps KV by the block hashes of prefix caching. What it has promised may be gone when it is loaded."""
    ports: tuple[ConnectorPort, ...] = ()
    random_ports: Mapping[EngineRole, str] = field(default_factory=dict)
    """Role -> what its engines open at ports of the system's choice, which cannot be pinned."""
    environment: Callable[[EngineSide], dict[str, str]] = _no_variables
    """The variables that the plan alone decides."""
    owned_variables: Mapping[str, str] = field(default_factory=dict)
    """Each of them -> what a recipe sets instead."""
    libraries: Mapping[str, str] = field(default_factory=dict)
    """System library that its package links to -> Debian package."""
    rdma_devices: Callable[[Mapping[str, Any], Mapping[str, str]], tuple[str, ...] | None] = _no_rdma
    """Its mapping, and the engine's environment -> the RDMA devices that it uses, none when it may choose; None: it
    moves KV without RDMA."""
    trial: Callable[[Mapping[str, Any]], TrialTransfer | None] = _no_trial
    """Its mapping -> how a transfer of it is tried; None: none is."""


class LeafSection(Strict, ABC):
    """The section of a connector in a recipe, alone or as a child of a multi."""

    ABOUT: ClassVar[ConnectorKind]
    AGREED: ClassVar[tuple[str, ...]] = ()
    """Keys that prefill and decode must set to the same value."""

    load_weight: float | None = Field(
        default=None,
        gt=0,
        description="Child of a multi: its tokens count so many times when the child that loads is chosen (1 if null).",
    )

    @abstractmethod
    def config(self, context: Context) -> Config:
        """Return vLLM's mapping for the connector. Raises RecipeError for what this role cannot have."""

    def default_environment(self) -> dict[str, str]:
        """Return the variables of the connector's engines that a recipe may override."""
        return {}

    def doubts(self, platform: str) -> tuple[tuple[str, str], ...]:
        """Return what rarely works on this platform, each with what to write instead. They become warnings."""
        return ()

    def features(self) -> frozenset[str]:
        """Return what the connector uses, in the words of the table of known defects."""
        return frozenset()

    def host_memory(self, *, ranks: int, workers: int, platform: str) -> HostMemory:
        """Return the memory of the part of one instance that is on one node: so many data-parallel ranks, so many
        workers."""
        return HostMemory()

    def proxy_settings(self) -> dict[str, Any]:
        """Return the fields of the proxy's configuration that follow from it, when it moves KV from prefill to
        decode."""
        return {}
