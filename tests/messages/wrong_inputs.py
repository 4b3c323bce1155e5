"""Wrong inputs: one of a kind of error, and more where the message has a line to write, which is then tried."""

from __future__ import annotations

from tests.messages.kit import GOOD, HOSTS, VALIDATE, Case, cluster, option, over, whole

KEYS = (
    over("a slip in a section", "prefil: {instances: 2}\n"),
    over("capitals in a key", "Prefill: {instances: 2}\n"),
    over("a hyphen for an underscore", "lmcache: {l1-size-gb: 64}\n"),
    over("a key that nothing resembles", "verify: {xyzzy: 1}\n", fact="verify.xyzzy: unknown key"),
    over("a null key that does not exist", "prefill: {instnaces: null}\n"),
    over("a host at the top", "host: 0.0.0.0\n"),
    over("the size of L1 at the top", "l1_size_gb: 64\n"),
    over("a slip in a key of a connector", "decode: {connector: {kind: mooncake, proto: rdma}}\n"),
    option("a slip on the command line", "--set", "prefil.instances=2"),
    whole("no schema", GOOD.replace("schema: 1\n", "")),
    over("tls without a key", "proxy: {tls: {certificate: server.crt}}\n", fact="proxy.tls.key: missing"),
)
TYPES = (
    over("text for a count", "prefill: {instances: two}\n"),
    over("a quoted number", 'prefill: {instances: "2"}\n'),
    over("a fraction of an instance", "prefill: {instances: 1.5}\n"),
    over("a count written as 2.0", "decode: {parallel: {tp: 2.0}}\n"),
    over("true for a count", "decode: {instances: true}\n"),
    over("yes for a boolean", "engine:\n  cache_reset_endpoint: yes\n"),
    over("a quoted boolean", 'model: {download: "false"}\n'),
    over("a number for a text", "model: {served_name: 405}\n"),
    over("an account with a leading zero", "slurm:\n  account: 0123\n"),
    over("a boolean for a text", "slurm: {partition: on, qos: true}\n"),
    over("another schema", "schema: 2\n"),
    over("capitals and a blank in a name", "name: My Deployment\n"),
    over("a date for a name", "name: 2026-11-24_run\n"),
    over("a boolean in the environment", "engine:\n  env: {NCCL_DEBUG: off, VLLM_USE_V1: true}\n"),
    over("one role for a list", "lmcache: {on: prefill}\n", fact='lmcache.on: expected a list, got "prefill"'),
)
RANGES = (
    over("GiB behind a size", "lmcache: {l1_size_gb: 64GiB}\n"),
    over("an hour", "timeouts:\n  engine_seconds: 1h\n"),
    over("MiB for bytes", "proxy: {max_body_bytes: 64MiB}\n"),
    over("GiB for MiB", "logs: {max_mib: 1GiB}\n"),
    option("a unit on the command line", "--set", "lmcache.l1_size_gb=64GiB"),
    over("no instances", "prefill: {instances: 0}\n"),
    over("a negative count", "decode:\n  parallel: {tp: -4}\n"),
    over("600 instances", "prefill:\n  instances: 600\n", fact="prefill.instances: prefill 600 x 4 +"),
    over("a port above the last one", "ports: {proxy: 80000}\n"),
    over("a negative timeout", "timeouts: {stop_seconds: -1}\n"),
    over("infinity", "timeouts: {engine_seconds: .inf}\n"),
    option("a port out of range on the command line", "--set", "ports.proxy=80000"),
)
SHORT = (
    over("a connector by its name", "decode: {connector: mooncake}\n"),
    over("a connector by vLLM's class", "decode: {connector: MooncakeConnector}\n"),
    over("a connector without kind", "decode: {connector: {protocol: rdma}}\n"),
    over("a slip in a connector", "decode: {connector: {kind: moncake}}\n"),
    over("a routing policy by its name", "proxy: {routing: {prefill: least_loaded}}\n"),
    Case("a connector by its name on the command line", argv=(*VALIDATE, "--set", "decode.connector=mooncake")),
)
TEXTS = (
    over(
        "a colon in a value",
        "description: Kimi: two nodes\n",
        fact="not YAML: mapping values are not allowed here, at column 18",
    ),
    over("no in a list of texts", "exclude_nodes: [no, 7]\n"),
    over("a no-break space in quotes", 'mode: "disaggregated\u00a0"\n'),
    whole("UTF-16", ("\ufeff" + GOOD).encode("utf-16-le"), fact="the file is UTF-16, not UTF-8"),
    whole("line ends of Windows and a typo", GOOD.replace("lmcache:", "lmcahe:").replace("\n", "\r\n")),
)
TOGETHER = (
    over(
        "an instance larger than a node",
        "lmcache: null\nprefill: {parallel: {tp: 16}}\n",
        fact="prefill.parallel: an instance of prefill needs",
    ),
    over("two services on one port", "ports: {proxy: 8100}\n"),
)


def up(title: str, *options: str, fact: str) -> Case:
    """Options of `up` that contradict each other."""
    return Case(title, argv=("up", *options), fact=fact)


COMMANDS = (
    up("--slurm without sbatch", "recipe.yaml", "--slurm", fact="--slurm: there is no sbatch on"),
    up(
        "--slurm with --dry-run",
        "recipe.yaml",
        "--slurm",
        "--dry-run",
        fact="--slurm submits the job, --dry-run starts",
    ),
    up(
        "--slurm with --cluster",
        *("recipe.yaml", "--slurm", "--cluster", "hosts.yaml"),
        fact="--slurm takes nodes of Slurm, --cluster",
    ),
    up(
        "--slurm with --this-machine",
        *("recipe.yaml", "--slurm", "--this-machine"),
        fact="--slurm takes nodes of Slurm, --this-machine",
    ),
    up("--slurm with --replace", "recipe.yaml", "--slurm", "--replace", fact="--slurm submits a new job, --replace"),
    up("--slurm, kept", "recipe.yaml", "--slurm", "--keep-on-failure", fact="the job of --slurm is over"),
    up("--slurm without a recipe", "--slurm", fact="--slurm submits the job of a"),
    up(
        "--cluster with --this-machine",
        *("recipe.yaml", "--cluster", "hosts.yaml", "--this-machine"),
        fact="--cluster names the hosts to use",
    ),
    Case(
        "two forms of a rendering",
        argv=("render", "recipe.yaml", "--slurm", "--json"),
        fact="--slurm is a script and --json",
    ),
    option("a slip in an option", "--sett", "ports.proxy=8001", fact="No such option: --sett (Possible options"),
    Case("a slip in a verb", argv=("valdate", "recipe.yaml"), fact="No such command 'valdate'. Did you"),
    Case("no recipe", argv=("validate",), fact="Missing argument 'recipe'"),
    option("a word too many", "prefill.instances=2", fact="Got unexpected extra argument(s) (prefill.instances=2)"),
    Case("a cluster file for a recipe", argv=("validate", "hosts.yaml"), fact="this is a cluster file, not"),
    Case("a deployment that never was", argv=("status", "good"), fact="home: no deployment called 'good' was"),
    Case("a dry run that removes nothing", argv=("list", "--dry-run"), fact="--dry-run belongs to --prune"),
)
CLUSTERS = (
    cluster("a slip in hosts", "schema: 1\nhost:\n  - name: gpu1\n"),
    cluster("a host twice", HOSTS + "  - name: gpu1\n", fact="hosts.2.name: gpu1 is there twice (hosts.0.name"),
    cluster("seconds with a unit", HOSTS + "ssh: {connect_seconds: 10s}\n"),
)
CASES: tuple[Case, ...] = (*KEYS, *TYPES, *RANGES, *SHORT, *TEXTS, *TOGETHER, *COMMANDS, *CLUSTERS)
