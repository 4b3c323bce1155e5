"""The Plan: every process of a deployment as data. `render` prints what `up` runs.

Plain frozen models, JSON both ways. Nothing here, and nothing in this package, does I/O.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from pydantic import Field

from pdserve.installed.versions import Versions as Versions
from pdserve.pd.config.proxy import ProxyConfig
from pdserve.plan.frozen import SCHEMA, SchemaVersion
from pdserve.plan.frozen import Frozen as Frozen
from pdserve.plan.node import Local, Node
from pdserve.plan.process import Process
from pdserve.recipe.model import Retention, Timeouts, Verify
from pdserve.recipe.sections import Logs


class LmcacheServer(Frozen):
    """An LMCache server as the launcher must know it, beyond its process."""

    process: str
    http_url: str
    instance_id: str
    engines: tuple[str, ...]
    """Names of the engine processes that attach to it."""
    workers_of: dict[str, int] = Field(default={})
    """Engine -> workers of it that register here."""
    expected_workers: int
    """All of them: they must be registered before the deployment is ready."""
    l1_bytes: int
    shm_name: str | None
    kv_bytes_on_host: int = 0
    """CPU with lmcache_driven only: the engines' KV moves into /dev/shm too."""
    on_death: Literal["restart", "fail"] = "restart"


class Exposure(Frozen):
    """A port that is reachable without the deployment's key, and why."""

    process: str
    address: str
    """0.0.0.0: every interface of the node, whatever its address is in the plan."""
    port: int
    """0: chosen by the process at random; what it chose is read from its sockets once it runs."""
    last_port: int | None = None
    """The process takes its ports from port..last_port."""
    what: str


class Plan(Frozen):
    """Holds everything that `up` will do, decided before it starts."""

    schema_version: SchemaVersion = SCHEMA
    name: str
    run_dir: str = "."
    """The run directory: `log` and `files` of the processes are relative to it."""
    mode: Literal["disaggregated", "aggregated"]
    platform: Literal["cpu", "cuda", "rocm"]
    served_name: str
    model: str
    """What the engines get as --model: a path or an id. LMCache keys contain this string."""
    model_path: str | None
    """Set when the model is a local folder that must exist on every node."""
    revision: str | None = None
    """The revision, where the model is one of the hub; None: its main branch."""
    nodes: tuple[Node, ...]
    processes: tuple[Process, ...]
    lmcache: tuple[LmcacheServer, ...] = ()
    proxy: ProxyConfig
    """The proxy's configuration; vllm-router gets a part of it as flags."""
    proxy_kind: Literal["pdserve", "vllm-router"] = "pdserve"
    canary_seconds: float
    timeouts: Timeouts
    on_node_loss: Literal["fail", "degrade"] = "fail"
    retention: Retention = Retention()
    verify: Verify
    cache_reset_endpoint: bool
    chunk_size: int | None
    """LMCache's chunk in tokens; None without LMCache."""
    max_tokens_per_load: int | None = None
    """The smallest cap of a reload from LMCache in any role; None: no cap."""
    min_load_tokens: int | None = None
    """The largest minimum of a reload in any role; None: none."""
    exposed: tuple[Exposure, ...] = ()
    warnings: tuple[str, ...] = ()
    """What a user must know before trusting this plan: unverified connectors, unknown versions, ..."""

    def lacking(self) -> list[str]:
        """Return the names that the plan uses and does not have. A plan that was made has everything; one that was read
        may be edited."""
        processes = {process.name for process in self.processes}
        nodes = {node.name for node in self.nodes}
        named = {name for server in self.lmcache for name in (server.process, *server.engines)}
        named |= {worker.name for worker in self.proxy.workers}
        proxy = () if any(process.is_proxy for process in self.processes) else ("the proxy",)
        return [*proxy, *sorted(named - processes), *sorted({process.node for process in self.processes} - nodes)]

    def has_l2(self, server: LmcacheServer) -> bool:
        """Return whether a server's command line names a second tier (L2)."""
        argvs = [process.argv for process in self.processes if process.name == server.process]
        return any(argument.startswith("--l2-adapter") for argv in argvs for argument in argv)

    def process(self, name: str) -> Process:
        """Return the process of that name. Raises KeyError where there is none."""
        for process in self.processes:
            if process.name == name:
                return process
        raise KeyError(name)

    def gives_router_new_ids(self, started: Collection[str]) -> bool:
        """Tell whether vllm-router lacks the ids of what was started: it reads the engine ids of prefills when it
        starts, and never again."""
        ids = (worker.name for worker in self.proxy.workers if worker.bootstrap_url is not None)
        return self.proxy_kind == "vllm-router" and not set(started).isdisjoint(ids)

    @property
    def logs(self) -> Logs:
        """Return the limits of each process's log."""
        return self.processes[0].logs

    def node(self, name: str) -> Node:
        """Return the node of that name. Raises KeyError where there is none."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(name)

    @property
    def proxy_url(self) -> str:
        """Return the proxy's URL: on its node, and from other nodes if it does not listen on loopback only."""
        host = self.proxy.host
        if host in ("0.0.0.0", "::", ""):
            host = self.node(self.process("proxy").node).address
        scheme = "http" if self.proxy.tls is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.proxy.port}"

    @property
    def proxy_on_loopback(self) -> bool:
        """Tell whether only the proxy's own node reaches it."""
        return self.proxy.host in ("127.0.0.1", "localhost", "::1")

    @property
    def proxy_place(self) -> str:
        """Return the node where the proxy's URL holds, for people: empty if everywhere that the nodes' network
        reaches."""
        proxy = self.process("proxy")
        here = all(isinstance(node.reach, Local) for node in self.nodes)
        if here or not self.proxy_on_loopback:
            return ""
        return f" on {proxy.node} only (proxy.host opens it to others)"

    def instance_of(self, name: str) -> tuple[Process, ...]:
        """Return all processes of the engine instance that one belongs to, its leader first; of anything else,
        itself."""
        process = self.process(name)
        if process.instance is None:
            return (process,)
        return tuple(p for p in self.processes if p.instance == process.instance)

    def names(self) -> tuple[str, ...]:
        """Return the names of all processes, in plan order."""
        return tuple(p.name for p in self.processes)


_CPU_BINDING = "VLLM_CPU_OMP_THREADS_BIND"
_ENGINE_PROCESSES = "VLLM_ENABLE_V1_MULTIPROCESSING"
"""0: a single worker lives in its EngineCore, and nothing reads the setting above (vLLM 0.32, multiproc_executor)."""
_NO_CPUS_NAMED = ("nobind", "auto")
"""Values of vLLM's own setting that name no CPUs. `auto` takes all that the engine may use: its part."""


def cpu_share(plan: Plan, name: str) -> tuple[int, int] | None:
    """Return (i, n): a process may use the i-th of n equal parts of its node's CPUs; None: all. It is no part of
    `Process`: another engine beside one that runs changes what both get at their next start, and is no reason to start
    that one anew."""
    node = plan.process(name).node
    engines = [process for process in plan.processes if process.ranks is not None and process.node == node]
    bound = any(map(_binds_cpus, engines))
    names = [engine.name for engine in engines]
    if plan.platform != "cpu" or bound or len(names) < 2 or name not in names:
        return None
    return names.index(name), len(names)


def _binds_cpus(engine: Process) -> bool:
    """Return whether vLLM binds its workers to CPUs that the recipe names."""
    single = engine.ranks is not None and engine.ranks.workers == engine.ranks.cores
    if single and engine.env.set.get(_ENGINE_PROCESSES) == "0":
        return False
    return engine.env.set.get(_CPU_BINDING, "auto") not in _NO_CPUS_NAMED
