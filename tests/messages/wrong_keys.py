"""Unknown keys, keys of another section or another tool, missing keys, flags and variables."""

from __future__ import annotations

from tests.messages.kit import CPU, GOOD, Case, option, over, whole

UNKNOWN = (
    over("a slip in a section", "prefil: {instances: 2}\n"),
    over("capitals in a key", "Prefill: {instances: 2}\n"),
    over("a hyphen for an underscore", "lmcache: {l1-size-gb: 64}\n"),
    over("a key that nothing resembles", "verify: {xyzzy: 1}\n", "verify: {}\n"),
    over("a null key that does not exist", "prefill: {instnaces: null}\n"),
    over("replicas of a role", "prefill: {replicas: 2}\n"),
    over("gpus of a role", "prefill: {gpus: [0, 1, 2, 3]}\n"),
    over("tp of a role", "decode: {tp: 4}\n", "decode: {parallel: {tp: 4}}\n"),
    over(
        "a flag of vLLM as a key",
        "decode: {gpu_memory_utilization: 0.9}\n",
        "decode: {args: {gpu-memory-utilization: 0.9}}\n",
    ),
    over("a flag that pdserve sets as a key", "decode: {tensor_parallel_size: 4}\n", "decode: {parallel: {tp: 4}}\n"),
    over("the port of the proxy in its section", "proxy: {port: 30000}\n"),
    over("the port of a role in its section", "prefill: {port: 8110}\n"),
    over("a port at the top", "port: 30000\n"),
    over("a host at the top", "host: 0.0.0.0\n"),
    over("the size of L1 at the top", "l1_size_gb: 64\n"),
    over("restarts of a role at the top", "restart: {policy: never}\n", "prefill: {restart: {policy: never}}\n"),
    over("a slip in a key of a connector", "decode: {connector: {kind: mooncake, proto: rdma}}\n"),
    over(
        "a key of another connector",
        "decode: {connector: {kind: mooncake, backends: [UCX]}}\n",
        "decode: {connector: {kind: mooncake}}\n",
    ),
    over("a policy at the proxy", "proxy: {policy: least_loaded}\n"),
    over("a name of a served model", "model: {served_model_name: x}\n"),
    over("a tool that is none", "requires: {torch: '>=2'}\n", "requires: {vllm: '>=0.26'}\n"),
    option("the port of the proxy on the command line", "--set", "proxy.port=30000"),
    option("a slip on the command line", "--set", "prefil.instances=2"),
    option("an unset key that is not there", "--unset", "prefill.instances", fixed=()),
    option("no value on the command line", "--set", "ports.proxy", fixed=("--set", "ports.proxy=8001")),
    option(
        "a slip in a path of the command line", "--set", "prefill..instances=2", fixed=("--set", "prefill.instances=2")
    ),
    option("a key below a number", "--set", "prefill.parallel.tp.size=2", fixed=("--set", "prefill.parallel.tp=2")),
    option(
        "an item that the list does not have",
        "--set",
        "prefill.devices.7=1",
        text="extends: good.yaml\nprefill: {devices: [0, 1, 2, 3]}\n",
        fixed=(),
    ),
    option(
        "brackets that are not closed on the command line",
        "--set",
        "prefill.devices=[0,1",
        fixed=("--set", "prefill.devices=[0,1,2,3]"),
    ),
    option("extends on the command line", "--set", "extends=other.yaml", fixed=()),
)
MISSING = (
    whole("no schema", GOOD.replace("schema: 1\n", "")),
    whole("no name", GOOD.replace("name: good\n", "")),
    whole("no platform", GOOD.replace("platform: cuda\n", "")),
    whole("no model", CPU.replace("model: {path: model, served_name: model}\n", "").replace("cpu", "cuda")),
    whole("no served name", GOOD.replace("  served_name: model\n", "")),
    whole("neither path nor id", CPU.replace("path: model, ", ""), CPU),
    over("both path and id", "model: {path: /models/x}\n", "model: {id: null, path: /models/x, revision: null}\n"),
    over("lmcache without a size", "lmcache: {l1_size_gb: null, chunk_size: 256}\n"),
    over("a secret without a name", "engine: {env: {HF_TOKEN: {}}}\n"),
    over(
        "a raw connector without its mapping",
        "prefill: {connector: {kind: raw}}\ndecode: {connector: {kind: raw}}\nlmcache: null\n",
    ),
    over("tls without a key", "proxy: {tls: {certificate: server.crt}}\n"),
    over("a container without an image", "container: {kind: docker}\n", "container: {kind: docker, image: x}\n"),
)
FLAGS = (
    over("underscores in a flag", "engine: {args: {max_model_len: 4096}}\n", "engine: {args: {max-model-len: 4096}}\n"),
    over(
        "dashes before a flag",
        "engine:\n  args:\n    --max-model-len: 4096\n",
        "engine: {args: {max-model-len: 4096}}\n",
    ),
    over(
        "a flag turned off by its name",
        "engine: {args: {no-enable-prefix-caching: true}}\n",
        "lmcache: null\nengine: {args: {enable-prefix-caching: false}}\n",
    ),
    over("a flag that pdserve sets", "prefill: {args: {port: 8101}}\n", "ports: {prefill: 8101}\n"),
    over("parallelism as a flag", "prefill: {args: {tensor-parallel-size: 4}}\n", "prefill: {parallel: {tp: 4}}\n"),
    over(
        "the connector as a flag",
        "prefill: {args: {kv-transfer-config: {kv_connector: NixlConnector}}}\n",
        "prefill: {}\n",
    ),
    over("metrics turned off", "engine: {args: {disable-log-stats: true}}\n", "engine: {}\n"),
    over(
        "a variable that pdserve sets",
        "prefill: {env: {CUDA_VISIBLE_DEVICES: '0,1'}}\n",
        "prefill: {devices: [0, 1, 2, 3]}\n",
    ),
    over("a hyphen in a variable", "engine: {env: {NCCL-DEBUG: INFO}}\n", "engine: {env: {NCCL_DEBUG: INFO}}\n"),
    over(
        "lengths that differ",
        "prefill: {args: {max-model-len: 4096}}\ndecode: {args: {max-model-len: 8192}}\n",
        "engine: {args: {max-model-len: 8192}}\n",
    ),
    over("a flag of the server that pdserve sets", "lmcache: {extra_args: {port: 1}}\n", "ports: {lmcache: 5556}\n"),
)
SECRETS = (
    over(
        "a token in the environment",
        "engine: {env: {HF_TOKEN: hf_abcdef}}\n",
        "engine: {env: {HF_TOKEN: {secret: HF_TOKEN}}}\n",
    ),
    over(
        "a key as a flag", "engine: {args: {hf-token: hf_abcdef}}\n", "engine: {env: {HF_TOKEN: {secret: HF_TOKEN}}}\n"
    ),
    over(
        "a password in a URL",
        "engine: {env: {HTTPS_PROXY: 'http://me:pw@proxy:3128'}}\n",
        "engine: {env: {HTTPS_PROXY: {secret: HTTPS_PROXY}}}\n",
    ),
    over("a secret's value for its name", "engine: {env: {HF_TOKEN: {secret: hf-abc.def}}}\n"),
    over("a secret for LMCache", "lmcache: {env: {AWS_SECRET_ACCESS_KEY: abc}}\n", "lmcache: {env: {}}\n"),
    over(
        "a secret on a command line",
        "engine: {args: {api-token: {secret: T}}}\n",
        "engine: {env: {API_TOKEN: {secret: T}}}\n",
    ),
    option(
        "a token on the command line",
        "--set",
        "engine.env.HF_TOKEN=hf_abcdef",
        fixed=("--set", "engine.env.HF_TOKEN={secret: HF_TOKEN}"),
    ),
)
REFERENCES = (
    over("a variable that is not set", "decode: {instances: '${DECODES}'}\n", "decode: {instances: '${DECODES:-1}'}\n"),
    over("an empty variable", "model: {served_name: '${NAME}'}\n", "model: {served_name: '${NAME:-x}'}\n", NAME=""),
    over(
        "a reference without braces", "model: {served_name: '${NAME'}\n", "model: {served_name: '${NAME}'}\n", NAME="x"
    ),
    over("a shell expression", "model: {served_name: '${NAME-x}'}\n", "model: {served_name: '${NAME:-x}'}\n"),
    over(
        "a secret as a reference",
        "engine: {env: {HF_TOKEN: '${HF_TOKEN}'}}\n",
        "engine: {env: {HF_TOKEN: {secret: HF_TOKEN}}}\n",
        HF_TOKEN="x",
    ),
    over(
        "a reference that is no number",
        "decode: {instances: '${DECODES}'}\n",
        "decode: {instances: 2}\n",
        DECODES="two",
    ),
    over(
        "a reference without quotes in braces",
        "decode: {instances: ${DECODES}}\n",
        "decode: {instances: '${DECODES}'}\n",
        DECODES="2",
    ),
)
CASES: tuple[Case, ...] = (*UNKNOWN, *MISSING, *FLAGS, *SECRETS, *REFERENCES)
