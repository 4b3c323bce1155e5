"""The recipe: the description of a deployment that a user writes. Rules over several keys are in recipe/rules."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from pdserve.pd.config.serving import Serving
from pdserve.recipe.base import Count, EnvMap, FlagMap, Name, Port, Seconds, Strict
from pdserve.recipe.connectors.registry import Connector, ConnectorPorts
from pdserve.recipe.sections import Container as Container
from pdserve.recipe.sections import Fabric as Fabric
from pdserve.recipe.sections import Lmcache, Logs, SetupCommand
from pdserve.recipe.sections import MooncakeStore as MooncakeStore
from pdserve.recipe.sections import Network as Network
from pdserve.recipe.sections import OnNodeLoss as OnNodeLoss
from pdserve.recipe.sections import RestartPolicy as RestartPolicy
from pdserve.recipe.sections import Slurm as Slurm
from pdserve.recipe.sections import Timeouts as Timeouts
from pdserve.roles import EngineRole

VLLM_ROUTER = "vllm-router"

ROUTER_SETTINGS = frozenset(
    {
        "kind",
        "host",
        "request_timeout_seconds",
        "drain_seconds",
        "max_body_bytes",
        "routing",
        "health",
        "restart",
        "command",
    }
)
"""Keys of the section that mean the same there. It has a circuit breaker too, which never opens with prefill and
decode, so `breaker` is not among them."""

ROUTER_POLICIES = {"round_robin": "round_robin", "power_of_two": "power_of_two", "prefix_aware": "cache_aware"}
"""A recipe's policy -> the router's. Its kv_aware needs event sources with blocks of 16 tokens, its sticky and hashing
policies have no counterpart here."""

ROUTER_DEFAULT_POLICY = "power_of_two"
"""Of a pool for which the recipe names none: what comes nearest to pdserve's own least_loaded."""


class Proxy(Serving):
    """The prefill/decode proxy: what clients talk to."""

    kind: Literal["pdserve", "vllm-router"] = Field(
        default="pdserve",
        description="Which proxy: pdserve's own, or the official Rust router (`pip install 'pdserve[router]'`), which "
        "has fewer of these settings; see docs/vllm-router.md.",
    )
    workers: Count = Field(
        default=1,
        description="Processes that share the port and one view of load and limits; one keeps one core busy.",
    )
    restart: RestartPolicy = Field(
        default=RestartPolicy(policy="on-failure"),
        description="The proxy keeps no state and starts in a second, so it is restarted by default.",
    )
    command: list[str] | None = Field(
        default=None, min_length=1, description="Replaces `python -m pdserve.proxy`, or `vllm-router`."
    )


class Model(Strict):
    """The model that is served: exactly one of `path` and `id`."""

    path: str | None = Field(default=None, description="A local folder, relative to the recipe's file; on every node.")
    id: str | None = Field(default=None, description="A model id that the engine resolves (hub or cache).")
    revision: str | None = Field(
        default=None,
        description="Revision of `id`. Only the 40 digits of a commit pin it: a branch may move between two nodes, or "
        "two starts. null: the hub's main branch.",
    )
    download: bool = Field(
        default=True,
        description="With an `id` of the hub: fetch what vLLM needs of it before the engines start, once for each node "
        "(and once for all nodes that share a cache folder), with progress and a check of the disk. With "
        "HF_HUB_OFFLINE=1 it only checks that all is there. So is the model that writes drafts, where "
        "`speculative-config` names one of the hub. false, and with any other id (s3://..., ModelScope): each "
        "engine finds it by itself.",
    )
    served_name: str = Field(description="The one name that clients use; engines, proxy and canary agree on it.")
    kv_group_blocks: list[Count] | None = Field(
        default=None,
        min_length=1,
        description="Tokens of a block of each KV cache group, for a model that has several ('kv cache group sizes' in "
        "vLLM's log): lmcache.chunk_size is checked against them before anything starts. null: not known.",
    )


class Engine(Strict):
    """Settings that all roles share."""

    args: FlagMap = Field(default={}, description="vLLM flags for every role; a role's own args win.")
    env: EnvMap = Field(default={}, description="Environment for every role; a role's own env wins.")
    python: str | None = Field(default=None, description="Interpreter that has vLLM; null: the one running pdserve.")
    command: list[str] | None = Field(
        default=None,
        min_length=1,
        description="Replaces `python -m vllm...` (a wrapper, numactl, ...); the flags are appended.",
    )
    hash_seed: int = Field(
        default=0, ge=0, description="PYTHONHASHSEED of engines and LMCache: their block hashes must agree."
    )
    cache_reset_endpoint: bool = Field(
        default=False,
        description="Start engines with VLLM_SERVER_DEV_MODE=1 so that `verify` can clear the prefix cache and prove "
        "the reload from LMCache. Development endpoints are not guarded by the key: not for production.",
    )


LoadBalancing = Literal["internal", "hybrid", "external"]


class Parallel(Strict):
    """Parallelism of one instance; devices needed = tp * pp * pcp * dp."""

    tp: Count = Field(default=1, description="Tensor parallel size.")
    pp: Count = Field(default=1, description="Pipeline parallel size.")
    pcp: Count = Field(
        default=1,
        description="Prefill context parallel size: workers that share the computation of a prompt. They are workers "
        "beside the tp * pp others, not a part of them.",
    )
    dp: Count = Field(default=1, description="Data parallel size: engine ranks of one instance.")
    load_balancing: LoadBalancing = Field(
        default="internal",
        description="Who chooses the data-parallel rank of a request. internal: one API server for all ranks. hybrid: "
        "an API server on each node, which chooses among the ranks of its node. external: an API server for each rank, "
        "in a process of its own. Every API server is a worker of the proxy.",
    )
    api_servers: Count = Field(
        default=1,
        description="Processes of an API server: they share its port and its ranks. vLLM starts dp of them by itself; "
        "more than one pays where tokenising or streaming fills a core.",
    )
    ep: bool = Field(default=False, description="Expert parallelism over the tp * pcp * dp ranks.")
    nodes: Count = Field(default=1, description="Nodes that one instance spans.")

    @property
    def workers(self) -> int:
        """Engine workers, and on accelerators devices, of one instance."""
        return self.tp * self.pp * self.pcp * self.dp

    @property
    def processes(self) -> int:
        """Processes of one instance: one for each rank with external load balancing, else one on each node."""
        return self.dp if self.load_balancing == "external" else self.nodes

    @property
    def servers(self) -> int:
        """Return the processes of an instance that have an API server."""
        return 1 if self.load_balancing == "internal" else self.processes

    @property
    def ranks_of_server(self) -> int:
        """Data-parallel ranks that an API server chooses among."""
        return self.dp // self.servers

    def product(self) -> str:
        """`tp 4 x dp 2`, for messages: the sizes above 1."""
        sizes = {"tp": self.tp, "pp": self.pp, "pcp": self.pcp, "dp": self.dp}
        return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "tp 1"


class Role(Strict):
    """One role: how many instances, on what, with which connector."""

    instances: Count = Field(default=1, description="xPyD: this many independent engines of the role.")
    parallel: Parallel = Field(default=Parallel(), description="How one instance is spread over devices and nodes.")
    devices: list[int] | None = Field(
        default=None,
        description="Device ids for each instance in turn (instances * tp * pp * pcp * dp of them); null: placed in "
        "order.",
    )
    connector: Connector | None = Field(
        default=None,
        description="null: mooncake, and on prefill multi(mooncake, lmcache-mp) when there is an lmcache section.",
    )
    kv_load_failure_policy: Literal["fail", "recompute"] | None = Field(
        default=None,
        description="What the engine does when external KV cannot be loaded; null: recompute beside a cache (LMCache, "
        "offloading, a store), fail on a plain decode (the proxy then reports the failure instead of hiding a "
        "recompute).",
    )
    load_timeout_seconds: Seconds | None = Field(
        default=None,
        description="A load of external KV that takes longer is given up and its request computed in fresh blocks; the "
        "old blocks stay reserved until the transfer has ended. null: a request waits as long as its connector does.",
    )
    args: FlagMap = Field(default={}, description="vLLM flags of this role, without the dashes.")
    env: EnvMap = Field(default={}, description="Environment of this role's engines.")
    restart: RestartPolicy = Field(
        default=RestartPolicy(), description="What happens when one instance of this role dies."
    )


class HttpPorts(Strict):
    """The ports of the proxy and of the engines' API servers."""

    proxy: Port = Field(default=8000, description="What clients talk to.")
    prefill: Port = Field(default=8100, description="HTTP of the prefill engines.")
    decode: Port = Field(default=8200, description="HTTP of the decode engines.")
    aggregated: Port = Field(default=8300, description="HTTP of the engines in mode aggregated.")


class Ports(ConnectorPorts, HttpPorts):
    """First port of each kind: the processes of a node take it and what follows, and prefill and decode take turns in
    a kind that both have there. The table is in plan/ports.py."""

    kv_events: Port = Field(
        default=5700,
        description="KV events of an engine (ZMQ, binds 0.0.0.0), where a routing policy listens to them: dp ports for "
        "the events and dp for asking again.",
    )
    router_metrics: Port = Field(
        default=29000, description="Prometheus figures of `proxy.kind: vllm-router`, on loopback."
    )
    lmcache: Port = Field(default=5555, description="LMCache request socket.")
    lmcache_http: Port = Field(default=8080, description="LMCache HTTP API (no authentication: stays on loopback).")
    mooncake_master: Port = Field(default=5051, description="Master of the Mooncake store (RPC), on the first node.")
    mooncake_master_http: Port = Field(
        default=9003, description="Health and figures of that master (no authentication: stays on loopback)."
    )
    dp_master: Port = Field(default=29500, description="Rendezvous of an instance of several processes.")


class Retention(Strict):
    """The rule by which old runs of the deployment are kept: `pdserve up` and `pdserve list --prune` remove the others.
    The last run always is, and one of which anything lives."""

    runs: Annotated[int, Field(ge=0)] = Field(
        default=10, description="The newest runs that are kept, the current one among them. 0: any number."
    )
    days: Annotated[int, Field(ge=0)] = Field(
        default=30, description="A run to which nothing was written for longer is removed. 0: never for its age."
    )


class Verify(Strict):
    """The comparison by `pdserve verify` of the deployment with one instance alone."""

    output: Literal["exact", "logprobs"] = Field(
        default="logprobs",
        description="exact: greedy tokens must be equal (tiny CPU models). logprobs: teacher-forced logprobs of the "
        "same tokens within the tolerance, because kernels and batch shapes differ between roles.",
    )
    logprob_tolerance: float = Field(default=0.3, gt=0, description="Largest |difference| of a token's logprob.")
    output_tokens: Count = Field(default=16, description="Tokens compared for each prompt.")


class Recipe(Strict):
    """schema 1."""

    schema_: Literal[1] = Field(alias="schema", description="Version of this format.")
    name: Name = Field(description="Name of the deployment; `status`, `logs` and `down` use it.")
    description: str = Field(default="", description="One line for `pdserve list`.")
    status: Literal["tested", "untested"] = Field(
        default="untested", description="Whether this recipe was run on the hardware it names."
    )
    platform: Literal["cpu", "cuda", "rocm"] = Field(
        description="What the engines run on. On `cpu` the engines of a node divide its CPUs among them, unless "
        "VLLM_CPU_OMP_THREADS_BIND binds them."
    )
    devices_per_node: Annotated[int, Field(ge=0)] = Field(
        default=0, description="Devices of the node type this was written for: `render` plans for such nodes."
    )
    image: str | None = Field(default=None, description="Public container image that has the engines.")
    requires: dict[Literal["vllm", "lmcache", "mooncake"], Annotated[str, StringConstraints(min_length=1)]] = Field(
        default={}, description="Version ranges (PEP 440), checked against what is installed."
    )
    mode: Literal["disaggregated", "aggregated"] = Field(
        default="disaggregated",
        description="disaggregated: the roles prefill and decode. aggregated: engines that do both (role aggregated).",
    )
    model: Model = Field(description="What is served.")
    setup: list[SetupCommand] = Field(
        default=[],
        description="Commands that each node with an engine runs before anything else, one after the other, inside the "
        "container where there is one. Text is split into words as a shell does it, a list is taken as it is; no shell "
        "runs it, unless it is named: [bash, -c, ...]. They get the environment of `engine.env`. One that ends with "
        "another code than 0, or lasts longer than `timeouts.setup_seconds`, ends the start.",
    )
    engine: Engine = Field(default=Engine(), description="What the engines of all roles share.")
    prefill: Role | None = Field(
        default=None, description="Engines that compute the KV of prompts; null: one instance on one device."
    )
    decode: Role | None = Field(
        default=None, description="Engines that write the answers; null: one instance on one device."
    )
    aggregated: Role | None = Field(
        default=None, description="Engines of mode aggregated; null: one instance on one device."
    )
    lmcache: Lmcache | None = Field(
        default=None, description="LMCache servers that keep KV in host memory; null: none."
    )
    mooncake_store: MooncakeStore | None = Field(
        default=None, description="A pool of host memory that the engines share, with its master; null: none."
    )
    proxy: Proxy = Field(default=Proxy(), description="The process that clients talk to.")
    ports: Ports = Field(default=Ports(), description="First port of each kind.")
    timeouts: Timeouts = Field(default=Timeouts(), description="How long each stage may take.")
    logs: Logs = Field(default=Logs(), description="The size of the log files in the run directory.")
    retention: Retention = Field(default=Retention(), description="Which old runs of the deployment are kept.")
    verify: Verify = Field(default=Verify(), description="How `pdserve verify` proves the deployment.")
    network: Network | None = Field(
        default=None,
        description="Where the nodes reach each other; null: the address from which a node reaches the other nodes.",
    )
    fabric: Fabric = Field(default=Fabric(), description="The transfers that `up` tries between nodes.")
    exclude_nodes: list[str] = Field(default=[], description="Names of nodes that are never used: known bad hosts.")
    on_node_loss: OnNodeLoss = Field(
        default="fail",
        description="A node that is lost while others serve. fail: the deployment ends. degrade: as if its processes "
        "had died; the others serve on while each role has an instance.",
    )
    slurm: Slurm = Field(default=Slurm(), description="The job that is asked of Slurm; read nowhere else.")
    container: Container | None = Field(
        default=None, description="The container in which each node's agent and its processes run; null: none."
    )
    patches: Literal["auto"] | list[str] = Field(
        default="auto", description="auto: what these versions and connectors need. A list: exactly those."
    )
    allow_unknown_upstream: list[str] = Field(
        default=[],
        description="Names of patches that may be applied to upstream code that pdserve does not know (a nightly "
        "build), at your own risk; `status` shows it. Without it preflight refuses what does not serve without its "
        "patch, and leaves the other patches out with a warning.",
    )

    def roles(self) -> list[tuple[EngineRole, Role]]:
        """The roles of this mode, in start order. Rules guarantee that they are present."""
        if self.mode == "aggregated":
            return [("aggregated", self.aggregated or Role())]
        return [("prefill", self.prefill or Role()), ("decode", self.decode or Role())]


RecipeDocument = dict[str, Any]
"""A recipe as YAML gives it, after `extends` and overrides and before validation."""
