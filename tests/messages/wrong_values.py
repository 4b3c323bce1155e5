"""Values of the wrong type, unit or range, and mappings and lists in a shorter form than the format has."""

from __future__ import annotations

from tests.messages.kit import GOOD, VALIDATE, Case, option, over, whole

TYPES = (
    over("text for a count", "prefill: {instances: two}\n"),
    over("a quoted number", 'prefill: {instances: "2"}\n'),
    over("a fraction of an instance", "prefill: {instances: 1.5}\n"),
    over("a count written as 2.0", "decode: {parallel: {tp: 2.0}}\n"),
    over("true for a count", "decode: {instances: true}\n"),
    over("yes for a boolean", "engine:\n  cache_reset_endpoint: yes\n"),
    over("off for a boolean", "model:\n  download: off\n"),
    over("a quoted boolean", 'model: {download: "false"}\n'),
    over("a number for a text", "model: {served_name: 405}\n"),
    over("an account with a leading zero", "slurm:\n  account: 0123\n"),
    over("a boolean for a text", "slurm: {partition: on, qos: true}\n"),
    over("a slip in a choice", "mode: agregated\n", fact="mode: expected one of disaggregated and"),
    over("another schema", "schema: 2\n"),
    over("a quoted schema", 'schema: "1"\n'),
    over("capitals and a blank in a name", "name: My Deployment\n"),
    over("a date for a name", "name: 2026-11-24_run\n"),
    over("a boolean in the environment", "engine:\n  env: {NCCL_DEBUG: off, VLLM_USE_V1: true}\n"),
)
UNITS = (
    over("GiB behind a size", "lmcache: {l1_size_gb: 64GiB}\n"),
    over("an hour", "timeouts:\n  engine_seconds: 1h\n"),
    over("minutes", 'timeouts: {attach_seconds: "2 min"}\n'),
    over("MiB for bytes", "proxy: {max_body_bytes: 64MiB}\n"),
    over("GiB for MiB", "logs: {max_mib: 1GiB}\n"),
    option("a unit on the command line", "--set", "lmcache.l1_size_gb=64GiB"),
)
RANGES = (
    over("no instances", "prefill: {instances: 0}\n"),
    over("a negative count", "decode:\n  parallel: {tp: -4}\n"),
    over("600 instances", "prefill:\n  instances: 600\n", fact="prefill.instances: prefill 600 x 4 +"),
    whole(
        "600 instances on a CPU",
        "extends: cpu.yaml\nprefill: {instances: 600}\n",
        fact="ports.transfer: Mooncake transfers x601 needs ports",
    ),
    over("a port above the last one", "ports: {proxy: 80000}\n"),
    over("port 0", "ports: {decode: 0}\n"),
    over(
        "a size of nothing",
        "lmcache: {l1_size_gb: 0}\n",
        fact="lmcache.l1_size_gb: expected more than 0 and at most 1e+06, got",
    ),
    over(
        "a size beyond every node",
        "lmcache: {l1_size_gb: 1.0e+300}\n",
        fact="lmcache.l1_size_gb: expected more than 0 and at most 1e+06, got",
    ),
    over("a timeout of nothing", "timeouts: {engine_seconds: 0}\n"),
    over("a negative timeout", "timeouts: {stop_seconds: -1}\n"),
    over("infinity", "timeouts: {engine_seconds: .inf}\n"),
    option("a port out of range on the command line", "--set", "ports.proxy=80000"),
    option("no instances on the command line", "--set", "prefill.instances=0"),
)
SHORT = (
    over("a connector by its name", "decode: {connector: mooncake}\n"),
    over("a connector by vLLM's class", "decode: {connector: MooncakeConnector}\n"),
    over("a connector without kind", "decode: {connector: {protocol: rdma}}\n"),
    over("a slip in a connector", "decode: {connector: {kind: moncake}}\n"),
    over("a routing policy by its name", "proxy: {routing: {prefill: least_loaded}}\n"),
    whole(
        "a model by its id",
        GOOD.replace(GOOD[GOOD.index("model:") : GOOD.index("prefill:")], "model: org/model\n"),
        fact='model: expected a mapping, got "org/model"',
    ),
    over(
        "flags as text",
        "engine:\n  args: --max-model-len 4096 --enforce-eager\n",
        fact='engine.args: expected a mapping, got "--max-model-len 4096 --enf',
    ),
)
LISTS = (
    over("a range of devices", 'prefill: {devices: "0-3"}\n', fact='prefill.devices: expected a list, got "0-3"'),
    over("one role for a list", "lmcache: {on: prefill}\n", fact='lmcache.on: expected a list, got "prefill"'),
    over("an empty list", "lmcache: {on: []}\n", fact="lmcache.on: expected a list of at least 1, got an empty one"),
    over(
        "a command as text",
        "engine: {command: numactl --interleave=all vllm serve}\n",
        fact='engine.command: expected a list, got "numactl --interleave=all v',
    ),
    Case("a connector by its name on the command line", argv=(*VALIDATE, "--set", "decode.connector=mooncake")),
)
KINDS: tuple[tuple[Case, ...], ...] = (TYPES, UNITS, RANGES, SHORT, LISTS)
