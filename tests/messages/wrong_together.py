"""Values that are right alone and wrong together: connectors, layouts, ports, nodes, containers; command lines; cluster
files."""

from __future__ import annotations

from tests.messages.kit import HOSTS, Case, cluster, over, whole

MULTI = "{kind: multi, of: [{kind: mooncake}, {kind: lmcache-mp}]}"
LAYOUTS = (
    over(
        "protocols that differ",
        "decode: {connector: {kind: mooncake, protocol: tcp}}\n",
        fact="decode.connector: decode speaks tcp, prefill speaks",
    ),
    over(
        "LMCache on a role of the other mode",
        "lmcache: {on: [aggregated]}\n",
        fact="lmcache.on.0: mode disaggregated has no role",
    ),
    over("a role of the other mode", "aggregated: {instances: 1}\n", fact="aggregated: mode disaggregated has no role"),
    over(
        "devices on a CPU",
        "platform: cpu\nprefill: {devices: [0, 1, 2, 3]}\n",
        fact="devices_per_node: a CPU node has no",
    ),
    over(
        "an instance larger than a node",
        "lmcache: null\nprefill: {parallel: {tp: 16}}\n",
        fact="prefill.parallel: an instance of prefill needs",
    ),
    over(
        "ranks that no two nodes can share",
        "lmcache: null\nprefill: {parallel: {tp: 3, nodes: 2}}\n",
        fact="3 ranks cannot be spread evenly over 2",
    ),
    over("two services on one port", "ports: {proxy: 8100}\n"),
    over(
        "a range of ports that ends too high",
        "ports: {prefill: 65535}\nprefill: {instances: 2, parallel: {tp: 2}}\n",
        fact="ports.prefill: prefill x2 needs ports 65535",
    ),
    over(
        "two thresholds, none set",
        "proxy: {routing: {conditional: {}}}\n",
        fact="proxy.routing.conditional: has no threshold, so no",
    ),
    whole(
        "everything at once",
        "schema: 1\nname: X\nplatform: gpu\nmodel: m\nprefil: {}\nlmcache: {l1_size_gb: 8GB}\n",
        fact="name: expected a name of lower-case",
    ),
)
COMMANDS = (
    Case("--slurm without sbatch", argv=("up", "recipe.yaml", "--slurm"), fact="--slurm: there is no sbatch on"),
    Case(
        "--slurm with --dry-run",
        argv=("up", "recipe.yaml", "--slurm", "--dry-run"),
        fact="--slurm submits the job, --dry-run starts",
    ),
    Case(
        "--slurm with --cluster",
        argv=("up", "recipe.yaml", "--slurm", "--cluster", "hosts.yaml"),
        fact="--slurm takes nodes of Slurm, --cluster",
    ),
    Case(
        "--slurm with --this-machine",
        argv=("up", "recipe.yaml", "--slurm", "--this-machine"),
        fact="--slurm takes nodes of Slurm, --this-machine",
    ),
    Case(
        "--slurm with --replace",
        argv=("up", "recipe.yaml", "--slurm", "--replace"),
        fact="--slurm submits a new job, --replace",
    ),
    Case(
        "--slurm with --keep-on-failure",
        argv=("up", "recipe.yaml", "--slurm", "--keep-on-failure"),
        fact="the job of --slurm is over",
    ),
    Case("--slurm without a recipe", argv=("up", "--slurm"), fact="--slurm submits the job of a"),
    Case(
        "--cluster with --this-machine",
        argv=("up", "recipe.yaml", "--cluster", "hosts.yaml", "--this-machine"),
        fact="--cluster names the hosts to use",
    ),
    Case(
        "two forms of a rendering",
        argv=("render", "recipe.yaml", "--slurm", "--json"),
        fact="--slurm is a script and --json",
    ),
    Case(
        "a slip in an option",
        argv=("validate", "recipe.yaml", "--sett", "ports.proxy=8001"),
        fact="No such option: --sett (Possible options",
    ),
    Case("a slip in a verb", argv=("valdate", "recipe.yaml"), fact="No such command 'valdate'. Did you"),
    Case("no recipe", argv=("validate",), fact="Missing argument 'recipe'"),
    Case(
        "a word too many",
        argv=("validate", "recipe.yaml", "prefill.instances=2"),
        fact="Got unexpected extra argument(s) (prefill.instances=2)",
    ),
    Case("a cluster file for a recipe", argv=("validate", "hosts.yaml"), fact="this is a cluster file, not"),
    Case("a deployment that never was", argv=("status", "good"), fact="home: no deployment called 'good' was"),
    Case("a dry run that removes nothing", argv=("list", "--dry-run"), fact="--dry-run belongs to --prune"),
)
CLUSTERS = (
    cluster("hosts as names", "schema: 1\nhosts: [gpu1, gpu2]\n", fact='hosts.0: expected a mapping, got "gpu1"'),
    cluster("hosts as one text", "schema: 1\nhosts: gpu1\n", fact='hosts: expected a list, got "gpu1"'),
    cluster("a slip in hosts", "schema: 1\nhost:\n  - name: gpu1\n"),
    cluster("a host twice", HOSTS + "  - name: gpu1\n", fact="hosts.2.name: gpu1 is there twice (hosts.0.name"),
    cluster("a host without a name", "schema: 1\nhosts:\n  - address: 10.1.0.11\n", fact="hosts.0.name: missing"),
    cluster("seconds with a unit", HOSTS + "ssh: {connect_seconds: 10s}\n"),
    cluster("a key of a recipe in a cluster file", HOSTS + "ports: {proxy: 8001}\n", fact="ports: unknown key"),
)
KINDS: tuple[tuple[Case, ...], ...] = (LAYOUTS, COMMANDS, CLUSTERS)
