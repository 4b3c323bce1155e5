"""Values that are right alone and wrong together: connectors, layouts, ports, nodes, containers; command lines; cluster
files."""

from __future__ import annotations

from tests.messages.kit import HOSTS, Case, cluster, over, whole

MULTI = "{kind: multi, of: [{kind: mooncake}, {kind: lmcache-mp}]}"
LAYOUTS = (
    over("protocols that differ", "decode: {connector: {kind: mooncake, protocol: tcp}}\n", by_hand=True),
    over("LMCache on a role of the other mode", "lmcache: {on: [aggregated]}\n", by_hand=True),
    over("a role of the other mode", "aggregated: {instances: 1}\n", by_hand=True),
    over("devices on a CPU", "platform: cpu\nprefill: {devices: [0, 1, 2, 3]}\n", by_hand=True),
    over("an instance larger than a node", "lmcache: null\nprefill: {parallel: {tp: 16}}\n", by_hand=True),
    over("ranks that no two nodes can share", "lmcache: null\nprefill: {parallel: {tp: 3, nodes: 2}}\n", by_hand=True),
    over("two services on one port", "ports: {proxy: 8100}\n"),
    over(
        "a range of ports that ends too high",
        "ports: {prefill: 65535}\nprefill: {instances: 2, parallel: {tp: 2}}\n",
        by_hand=True,
    ),
    over("two thresholds, none set", "proxy: {routing: {conditional: {}}}\n", by_hand=True),
    whole(
        "everything at once",
        "schema: 1\nname: X\nplatform: gpu\nmodel: m\nprefil: {}\nlmcache: {l1_size_gb: 8GB}\n",
        by_hand=True,
    ),
)
COMMANDS = (
    Case("--slurm without sbatch", argv=("up", "recipe.yaml", "--slurm"), by_hand=True),
    Case("--slurm with --dry-run", argv=("up", "recipe.yaml", "--slurm", "--dry-run"), by_hand=True),
    Case("--slurm with --cluster", argv=("up", "recipe.yaml", "--slurm", "--cluster", "hosts.yaml"), by_hand=True),
    Case("--slurm with --this-machine", argv=("up", "recipe.yaml", "--slurm", "--this-machine"), by_hand=True),
    Case("--slurm with --replace", argv=("up", "recipe.yaml", "--slurm", "--replace"), by_hand=True),
    Case("--slurm with --keep-on-failure", argv=("up", "recipe.yaml", "--slurm", "--keep-on-failure"), by_hand=True),
    Case("--slurm without a recipe", argv=("up", "--slurm"), by_hand=True),
    Case(
        "--cluster with --this-machine",
        argv=("up", "recipe.yaml", "--cluster", "hosts.yaml", "--this-machine"),
        by_hand=True,
    ),
    Case("two forms of a rendering", argv=("render", "recipe.yaml", "--slurm", "--json"), by_hand=True),
    Case("a slip in an option", argv=("validate", "recipe.yaml", "--sett", "ports.proxy=8001"), by_hand=True),
    Case("a slip in a verb", argv=("valdate", "recipe.yaml"), by_hand=True),
    Case("no recipe", argv=("validate",), by_hand=True),
    Case("a word too many", argv=("validate", "recipe.yaml", "prefill.instances=2"), by_hand=True),
    Case("a cluster file for a recipe", argv=("validate", "hosts.yaml"), by_hand=True),
    Case("a deployment that never was", argv=("status", "good"), by_hand=True),
    Case("a dry run that removes nothing", argv=("list", "--dry-run"), by_hand=True),
)
CLUSTERS = (
    cluster("hosts as names", "schema: 1\nhosts: [gpu1, gpu2]\n"),
    cluster("hosts as one text", "schema: 1\nhosts: gpu1\n"),
    cluster("a slip in hosts", "schema: 1\nhost:\n  - name: gpu1\n"),
    cluster("a host twice", HOSTS + "  - name: gpu1\n", by_hand=True),
    cluster("a host without a name", "schema: 1\nhosts:\n  - address: 10.1.0.11\n"),
    cluster("devices as a range", 'schema: 1\nhosts:\n  - {name: gpu1, devices: "0-3"}\n'),
    cluster("seconds with a unit", HOSTS + "ssh: {connect_seconds: 10s}\n"),
    cluster("a key of a recipe in a cluster file", HOSTS + "ports: {proxy: 8001}\n", by_hand=True),
)
KINDS: tuple[tuple[Case, ...], ...] = (LAYOUTS, COMMANDS, CLUSTERS)
