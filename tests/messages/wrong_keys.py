"""Unknown keys, keys of another section or another tool, missing keys, flags and variables."""

from __future__ import annotations

from tests.messages.kit import CPU, GOOD, Case, option, over, whole

UNKNOWN = (
    over("a slip in a section", "prefil: {instances: 2}\n"),
    over("capitals in a key", "Prefill: {instances: 2}\n"),
    over("a hyphen for an underscore", "lmcache: {l1-size-gb: 64}\n"),
    over("a key that nothing resembles", "verify: {xyzzy: 1}\n", fact="verify.xyzzy: unknown key"),
    over("a null key that does not exist", "prefill: {instnaces: null}\n"),
    over("tp of a role", "decode: {tp: 4}\n", fact="decode.tp: unknown key"),
    over(
        "a flag of vLLM as a key",
        "decode: {gpu_memory_utilization: 0.9}\n",
        fact="decode.gpu_memory_utilization: unknown key",
    ),
    over(
        "a flag that pdserve sets as a key",
        "decode: {tensor_parallel_size: 4}\n",
        fact="decode.tensor_parallel_size: unknown key",
    ),
    over("a host at the top", "host: 0.0.0.0\n"),
    over("the size of L1 at the top", "l1_size_gb: 64\n"),
    over("restarts of a role at the top", "restart: {policy: never}\n", fact="restart: unknown key"),
    over("a slip in a key of a connector", "decode: {connector: {kind: mooncake, proto: rdma}}\n"),
    over(
        "a key of another connector",
        "decode: {connector: {kind: mooncake, backends: [UCX]}}\n",
        fact="decode.connector.backends: unknown key",
    ),
    option("a slip on the command line", "--set", "prefil.instances=2"),
    option("no value on the command line", "--set", "ports.proxy", fact="--set ports.proxy has no value"),
    option(
        "a key below a number",
        "--set",
        "prefill.parallel.tp.size=2",
        fact="--set prefill.parallel.tp.size=2: prefill.parallel.tp is 4, it",
    ),
    option(
        "an item that the list does not have",
        "--set",
        "prefill.devices.7=1",
        text="extends: good.yaml\nprefill: {devices: [0, 1, 2, 3]}\n",
        fact="--set prefill.devices.7=1: prefill.devices.7: the list has",
    ),
    option(
        "brackets that are not closed on the command line",
        "--set",
        "prefill.devices=[0,1",
        fact="--set prefill.devices=[0,1: not YAML: while parsing a flow seque",
    ),
)
MISSING = (
    whole("no schema", GOOD.replace("schema: 1\n", "")),
    whole("no name", GOOD.replace("name: good\n", ""), fact="name: missing"),
    whole("no platform", GOOD.replace("platform: cuda\n", ""), fact="platform: missing"),
    whole(
        "no model",
        CPU.replace("model: {path: model, served_name: model}\n", "").replace("cpu", "cuda"),
        fact="model: missing",
    ),
    whole("no served name", GOOD.replace("  served_name: model\n", ""), fact="model.served_name: missing"),
    over(
        "lmcache without a size", "lmcache: {l1_size_gb: null, chunk_size: 256}\n", fact="lmcache.l1_size_gb: missing"
    ),
    over("a secret without a name", "engine: {env: {HF_TOKEN: {}}}\n", fact="engine.env.HF_TOKEN.secret: missing"),
    over(
        "a raw connector without its mapping",
        "prefill: {connector: {kind: raw}}\ndecode: {connector: {kind: raw}}\nlmcache: null\n",
        fact="prefill.connector.config: missing",
    ),
    over("tls without a key", "proxy: {tls: {certificate: server.crt}}\n", fact="proxy.tls.key: missing"),
)
FLAGS = (
    over(
        "a flag turned off by its name",
        "engine: {args: {no-enable-prefix-caching: true}}\n",
        fact="engine.args.no-enable-prefix-caching: a flag is turned off",
    ),
)
SECRETS = (
    over(
        "a secret's value for its name",
        "engine: {env: {HF_TOKEN: {secret: hf-abc.def}}}\n",
        fact="engine.env.HF_TOKEN.secret: expected the name of an environment",
    ),
)
REFERENCES = (
    over(
        "a variable that is not set",
        "decode: {instances: '${DECODES}'}\n",
        fact="decode.instances: the environment variable DECODES is",
    ),
    over(
        "a reference without quotes in braces",
        "decode: {instances: ${DECODES}}\n",
        DECODES="2",
        fact="not YAML: while parsing a flow mapping expected ',' or '}', but",
    ),
)
KINDS: tuple[tuple[Case, ...], ...] = (UNKNOWN, MISSING, FLAGS, SECRETS, REFERENCES)
