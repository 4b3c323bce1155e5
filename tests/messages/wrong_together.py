"""Values that are right alone and wrong together: connectors, layouts, ports, nodes, containers; command lines; cluster
files."""

from __future__ import annotations

from tests.messages.kit import EXTENDED, HOSTS, Case, cluster, over, whole

MULTI = "{kind: multi, of: [{kind: mooncake}, {kind: lmcache-mp}]}"
LAYOUTS = (
    over(
        "a connector that moves nothing",
        "decode: {connector: {kind: lmcache-mp}}\nlmcache: {on: [prefill, decode]}\n",
        "decode: {}\n",
    ),
    over(
        "two ways between the roles",
        "decode: {connector: {kind: multi, of: [{kind: mooncake}, {kind: nixl}]}}\n",
        "decode: {connector: {kind: mooncake}}\n",
    ),
    over(
        "roles that do not speak to each other",
        "decode: {connector: {kind: nixl}}\n",
        "decode: {connector: {kind: mooncake}}\n",
    ),
    over(
        "protocols that differ",
        "decode: {connector: {kind: mooncake, protocol: tcp}}\n",
        "decode: {connector: {kind: mooncake, protocol: rdma}}\n",
    ),
    over(
        "a child twice",
        f"prefill: {{connector: {MULTI.replace('mooncake', 'lmcache-mp')}}}\n",
        f"prefill: {{connector: {MULTI}}}\n",
    ),
    over(
        "LMCache on decode without its consent",
        f"decode: {{connector: {MULTI}}}\n",
        f"decode: {{connector: {MULTI}}}\nlmcache: {{on: [prefill, decode]}}\n",
    ),
    over("LMCache without its section", f"lmcache: null\nprefill: {{connector: {MULTI}}}\n", "lmcache: null\n"),
    over("LMCache on a role of the other mode", "lmcache: {on: [aggregated]}\n", "lmcache: {on: [prefill]}\n"),
    over("a role of the other mode", "aggregated: {instances: 1}\n", ""),
    over("chunks that are no multiple of a block", "lmcache: {chunk_size: 100}\n", "lmcache: {chunk_size: 256}\n"),
    over("heartbeats that are too slow", "lmcache: {heartbeat_seconds: 60}\n", "lmcache: {heartbeat_seconds: 10}\n"),
    over(
        "a start of L1 larger than L1",
        "lmcache: {l1_size_gb: 10, l1_init_size_gb: 20}\n",
        "lmcache: {l1_size_gb: 10, l1_init_size_gb: 10}\n",
    ),
    over(
        "an adapter without a type",
        "lmcache: {l2: [{base_path: /kv}]}\n",
        "lmcache: {l2: [{type: fs, base_path: /kv}]}\n",
    ),
    over("devices on a CPU", "platform: cpu\nprefill: {devices: [0, 1, 2, 3]}\n", "platform: cuda\n"),
    over("too few devices", "prefill: {devices: [0, 1]}\n", "prefill: {devices: [0, 1, 2, 3]}\n"),
    over(
        "a device that the node does not have",
        "prefill: {devices: [5, 6, 7, 8]}\n",
        "prefill: {devices: [4, 5, 6, 7]}\n",
    ),
    over("a device twice", "prefill: {devices: [0, 1, 2, 2]}\n", "prefill: {devices: [0, 1, 2, 3]}\n"),
    over(
        "an instance larger than a node",
        "lmcache: null\nprefill: {parallel: {tp: 16}}\n",
        "lmcache: null\nprefill: {parallel: {tp: 16, nodes: 2}}\n",
    ),
    over(
        "ranks that no two nodes can share",
        "lmcache: null\nprefill: {parallel: {tp: 3, nodes: 2}}\n",
        "lmcache: null\nprefill: {parallel: {tp: 4, nodes: 2}}\n",
    ),
    over("experts of one rank", "decode: {parallel: {tp: 1, ep: true}}\n", "decode: {parallel: {tp: 4, ep: true}}\n"),
    over("a range of versions that is none", "requires: {vllm: latest}\n", "requires: {vllm: '>=0.26,<0.34'}\n"),
    over(
        "a pause that shrinks",
        "prefill: {restart: {backoff_seconds: 90}}\n",
        "prefill: {restart: {backoff_seconds: 90, backoff_max_seconds: 90}}\n",
    ),
    over("two services on one port", "ports: {proxy: 8100}\n"),
    over(
        "a range of ports that ends too high",
        "ports: {prefill: 65535}\nprefill: {instances: 2, parallel: {tp: 2}}\n",
        "prefill: {instances: 2, parallel: {tp: 2}}\nports: {prefill: 65534}\n",
    ),
    over(
        "a lease shorter than a heartbeat",
        "timeouts: {agent_lease_seconds: 2}\n",
        "timeouts: {agent_lease_seconds: 15}\n",
    ),
    over("no interface and no subnet", "network: {}\n", "network: {interface: ib0}\n"),
    over("a subnet that is an address", "network: {cidr: 10.1.0.7/16}\n", "network: {cidr: 10.1.0.0/16}\n"),
    over("a range of nodes", "exclude_nodes: ['gpu[1-4]']\n", "exclude_nodes: [gpu1, gpu2, gpu3, gpu4]\n"),
    over("an option of sbatch that pdserve sets", "slurm: {options: [--nodes=2]}\n", "slurm: {nodes: 2}\n"),
    over("a short option of sbatch", "slurm: {options: ['-p gpu']}\n", "slurm: {partition: gpu}\n"),
    over(
        "a mount that is relative",
        "container: {kind: docker, image: x, mounts: ['models:/models']}\n",
        "container: {kind: docker, image: x, mounts: ['/models:/models']}\n",
    ),
    over(
        "an option of docker that pdserve sets",
        "container: {kind: docker, image: x, options: [--network=host]}\n",
        "container: {kind: docker, image: x}\n",
    ),
    over(
        "two thresholds, none set",
        "proxy: {routing: {conditional: {}}}\n",
        "proxy: {routing: {conditional: {min_prompt_tokens: 100}}}\n",
    ),
    over(
        "a pool of the other mode",
        "proxy: {routing: {aggregated: {kind: round_robin}}}\n",
        "proxy: {routing: {prefill: {kind: round_robin}}}\n",
    ),
    over("a setting that the router does not have", "proxy: {kind: vllm-router, log: json}\n", "proxy: {log: json}\n"),
    whole(
        "everything at once",
        "schema: 1\nname: X\nplatform: gpu\nmodel: m\nprefil: {}\nlmcache: {l1_size_gb: 8GB}\n",
        "extends: good.yaml\n",
    ),
)
OTHERWISE = Case("", EXTENDED)
COMMANDS = (
    Case("--slurm without sbatch", argv=("up", "recipe.yaml", "--slurm"), fixed=OTHERWISE),
    Case(
        "--slurm with --dry-run",
        argv=("up", "recipe.yaml", "--slurm", "--dry-run"),
        fixed=Case("", argv=("render", "recipe.yaml", "--slurm")),
    ),
    Case("--slurm with --cluster", argv=("up", "recipe.yaml", "--slurm", "--cluster", "hosts.yaml"), fixed=OTHERWISE),
    Case("--slurm with --this-machine", argv=("up", "recipe.yaml", "--slurm", "--this-machine"), fixed=OTHERWISE),
    Case("--slurm with --replace", argv=("up", "recipe.yaml", "--slurm", "--replace"), fixed=OTHERWISE),
    Case("--slurm with --keep-on-failure", argv=("up", "recipe.yaml", "--slurm", "--keep-on-failure"), fixed=OTHERWISE),
    Case("--slurm without a recipe", argv=("up", "--slurm"), fixed=OTHERWISE),
    Case(
        "--cluster with --this-machine",
        argv=("up", "recipe.yaml", "--cluster", "hosts.yaml", "--this-machine"),
        fixed=OTHERWISE,
    ),
    Case(
        "two forms of a rendering",
        argv=("render", "recipe.yaml", "--slurm", "--json"),
        fixed=Case("", argv=("render", "recipe.yaml", "--json")),
    ),
    Case(
        "a slip in an option",
        argv=("validate", "recipe.yaml", "--sett", "ports.proxy=8001"),
        fixed=Case("", argv=("validate", "recipe.yaml", "--set", "ports.proxy=8001")),
    ),
    Case("a slip in a verb", argv=("valdate", "recipe.yaml"), fixed=OTHERWISE),
    Case("no recipe", argv=("validate",), fixed=OTHERWISE),
    Case(
        "a word too many",
        argv=("validate", "recipe.yaml", "prefill.instances=2"),
        fixed=Case("", argv=("validate", "recipe.yaml", "--set", "prefill.instances=2")),
    ),
    Case("a cluster file for a recipe", argv=("validate", "hosts.yaml"), fixed=OTHERWISE),
    Case("a deployment that never was", argv=("status", "good"), fixed=OTHERWISE),
    Case(
        "a dry run that removes nothing",
        argv=("list", "--dry-run"),
        fixed=Case("", argv=("list", "--prune", "--dry-run")),
    ),
)
CLUSTERS = (
    cluster("hosts as names", "schema: 1\nhosts: [gpu1, gpu2]\n"),
    cluster("hosts as one text", "schema: 1\nhosts: gpu1\n"),
    cluster("a slip in hosts", "schema: 1\nhost:\n  - name: gpu1\n"),
    cluster("no hosts", "schema: 1\nhosts: []\n", HOSTS),
    cluster("a host twice", HOSTS + "  - name: gpu1\n", HOSTS),
    cluster("a host without a name", "schema: 1\nhosts:\n  - address: 10.1.0.11\n"),
    cluster("an address that is a name", "schema: 1\nhosts:\n  - {name: gpu1, address: gpu1.example.org}\n", HOSTS),
    cluster("devices as a range", 'schema: 1\nhosts:\n  - {name: gpu1, devices: "0-3"}\n'),
    cluster(
        "a port behind a host",
        "schema: 1\nhosts:\n  - {name: gpu1, ssh: 'ops@gpu1:2222'}\n",
        "schema: 1\nhosts:\n  - {name: gpu1, ssh: 'ssh://ops@gpu1:2222'}\n",
    ),
    cluster(
        "an option of ssh with a dash", HOSTS + "ssh: {options: ['-p 2222']}\n", HOSTS + "ssh: {options: [Port=2222]}\n"
    ),
    cluster(
        "an option of ssh that pdserve sets",
        HOSTS + "ssh: {options: [ConnectTimeout=5]}\n",
        HOSTS + "ssh: {connect_seconds: 5}\n",
    ),
    cluster("a host to leave out that is none", HOSTS + "exclude_nodes: [gpu3]\n", HOSTS + "exclude_nodes: [gpu2]\n"),
    cluster("seconds with a unit", HOSTS + "ssh: {connect_seconds: 10s}\n"),
    cluster("a key of a recipe in a cluster file", HOSTS + "ports: {proxy: 8001}\n", HOSTS),
)
CASES = (*LAYOUTS, *COMMANDS, *CLUSTERS)
