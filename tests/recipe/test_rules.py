"""Combinations that mean nothing runnable, each refused with the key, the reason and what to write instead."""

from __future__ import annotations

from pathlib import Path

from tests.recipe.kit import AGGREGATED, CPU, GPU, Options, load, refused
from tests.tables import each_row

Case = tuple[str, Options, str]

STRUCTURE: list[Case] = [
    (AGGREGATED, "prefill={}", "prefill: mode aggregated has no role prefill (mode at"),
    (CPU, "model.path=null", "model: neither path nor id is set"),
    (CPU, "model.id=a/b", "model.path: both path and id are set"),
    (CPU, "model.served_name=' '", "model.served_name: is empty"),
    (CPU, "model.revision=main", "model.revision: a folder has no revision"),
    (CPU, "devices_per_node=4", "devices_per_node: a CPU node has no devices"),
    (CPU, "prefill.devices=[0]", "prefill.devices: a CPU node has no devices"),
    (GPU, "prefill.parallel.nodes=3", "prefill.parallel.nodes: tp 4 = 4 ranks cannot be spread evenly over 3"),
    (GPU, "decode.parallel={ep: true}", "decode.parallel.ep: expert parallelism needs more than one rank"),
    (GPU, "prefill.devices=[0,1,2]", "prefill.devices: 3 devices for 1 instance of tp 4: 4 are needed"),
    (GPU, "prefill.devices=[0,1,2,2]", "prefill.devices: instance 0 gets device 2 twice"),
    (GPU, "prefill.devices=[0,1,2,8]", "prefill.devices.3: there is no device 8, the last one is 7"),
    (CPU, "requires={vllm: latest}", 'requires.vllm: "latest" is not a range of versions'),
    (CPU, "proxy.restart={backoff_seconds: 90}", "proxy.restart.backoff_max_seconds: 60 is less than"),
]

LOADING: list[Case] = [
    (CPU, "prefill.connector.of.1.max_tokens_per_load=255", "of.1.max_tokens_per_load: LMCache loads whole chunks of"),
    (
        CPU,
        "prefill.connector.of.1={kind: lmcache-mp, max_tokens_per_load: 512, min_load_tokens: 1024}",
        "of.1.min_load_tokens: no load of at most 512 tokens has 1024 of them",
    ),
    (CPU, "prefill.env={CHUNKED_LMCACHE_MAX_TOKENS_PER_LOAD: '٥١٢'}", "٥١٢ is not a number of tokens"),
    (
        CPU,
        (
            "prefill.connector={kind: raw, config: {kv_connector: MooncakeConnector}}",
            "decode.connector={kind: raw, config: {kv_connector: MooncakeConnector}}",
            "prefill.load_timeout_seconds=5",
            "lmcache=null",
        ),
        "prefill.load_timeout_seconds: a raw connector is handed to vLLM as it is",
    ),
]

CONNECTORS: list[Case] = [
    (GPU, "decode.args.kv-cache-dtype=fp8", "decode.args.kv-cache-dtype: decode has fp8"),
    (CPU, "prefill.connector={kind: lmcache-mp}", "prefill.connector: nothing here moves KV"),
    (CPU, "decode.connector={kind: nixl}", "decode.connector: decode uses nixl, prefill uses mooncake"),
    (CPU, "decode.connector.protocol=rdma", "decode.connector: decode speaks rdma, prefill speaks tcp"),
    (CPU, "decode.connector={kind: raw, config: {}}", "one role has a raw connector"),
    (CPU, "prefill.connector.of.2={kind: lmcache-mp}", "prefill.connector.of.2: lmcache-mp is there twice"),
    (CPU, "prefill.connector.of.2={kind: nixl}", "mooncake and nixl together"),
    (
        AGGREGATED,
        "aggregated.connector={kind: multi, of: [{kind: mooncake}, {kind: lmcache-mp}]}",
        "aggregated.connector: mooncake moves KV between prefill and decode",
    ),
    (CPU, "decode.args.max-model-len=1024", "decode.args.max-model-len: decode has 1024, prefill has vLLM's default"),
]

LMCACHE: list[Case] = [
    (GPU, "prefill.args.enable-cumem-allocator=true", "prefill.args.enable-cumem-allocator: its memory"),
    (
        CPU,
        "decode.connector={kind: multi, of: [{kind: mooncake, protocol: tcp}, {kind: lmcache-mp}]}",
        "decode.connector.of.1: decode is not in lmcache.on: on decode its lookup competes",
    ),
    (CPU, "lmcache=null", "prefill.connector.of.1: there is no lmcache section"),
    (CPU, "prefill.connector={kind: mooncake, protocol: tcp}", "lmcache.on: prefill is listed, but its connector has"),
    (CPU, "lmcache.on=[prefill, decode]", "lmcache.on: decode is listed, but its connector has no lmcache-mp"),
    (CPU, "lmcache.l1_init_size_gb=2", "lmcache.l1_init_size_gb: 2 is more than the whole of L1, 1"),
    (CPU, "lmcache.chunk_size=100", "lmcache.chunk_size: 100 is not a multiple of the block size of prefill (128,"),
    (CPU, "engine.args.block-size=512", "lmcache.chunk_size: 256 is not a multiple of the block size of prefill (512)"),
    (GPU, ("lmcache.per=tp-rank", "prefill.parallel={tp: 2, dp: 2}"), "lmcache.per: tp-rank works with tensor"),
    (CPU, "lmcache.heartbeat_seconds=50", "lmcache.heartbeat_seconds: three heartbeats take 150 s"),
    (CPU, ("lmcache.shm_name=kv", "lmcache.transfer_mode=lmcache_driven"), "lmcache.shm_name: has no effect with"),
    (CPU, "lmcache.shm_name=a/b", "lmcache.shm_name: a name in /dev/shm: not empty and without /"),
    (CPU, "lmcache.l2=[{path: /x}]", "lmcache.l2.0: an L2 adapter needs a `type`"),
    (CPU, "lmcache.extra_args={l1-size-gb: 3}", "lmcache.extra_args.l1-size-gb: pdserve sets this flag"),
    (CPU, "lmcache.extra_args={hash_algorithm: x}", "flags are written with hyphens"),
    (CPU, "lmcache.env={PYTHONHASHSEED: 1}", "lmcache.env.PYTHONHASHSEED: pdserve sets it"),
    (CPU, "engine.args.enable-prefix-caching=false", "engine.args.enable-prefix-caching: LMCache finds KV by the"),
    (CPU, "engine.env.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=1", "a reused request id makes LMCache serve another"),
    (CPU, "prefill.env.LMCACHE_USE_UPSTREAM_MP=1", "prefill.env.LMCACHE_USE_UPSTREAM_MP: vLLM's own copy"),
    (
        GPU,
        "engine.env.PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True,max_split_size_mb:64'",
        "engine.env.PYTORCH_CUDA_ALLOC_CONF: expandable_segments: its memory cannot be shared",
    ),
]

OWNED_FLAGS: list[Case] = [
    (CPU, f"engine.args.{flag}=1", f"engine.args.{flag}: pdserve sets this flag")
    for flag in (
        "model", "host", "port", "served-model-name", "revision", "kv-transfer-config", "tensor-parallel-size",
        "pipeline-parallel-size", "data-parallel-size", "data-parallel-size-local", "data-parallel-hybrid-lb",
        "data-parallel-multi-port-external-lb", "data-parallel-rank", "api-server-count",
        "prefill-context-parallel-size", "enable-expert-parallel", "headless", "nnodes", "node-rank", "config",
        "device-ids", "kv-offloading-size",
    )
]  # fmt: skip

FLAGS: list[Case] = [
    (CPU, "engine.args.disable-log-stats=true", "engine.args.disable-log-stats: `status` and `verify`"),
    (CPU, "engine.args.enable-prompt-tokens-details=false", "`verify` proves the transfer"),
    (CPU, "engine.args.no-enforce-eager=true", "engine.args.no-enforce-eager"),
    (CPU, "engine.args.max_model_len=1", "engine.args.max_model_len: flags are written with"),
    (CPU, r"engine.args.compilation-config\.cudagraph_mode=NONE", "not the name of a flag"),
]

OWNED_VARIABLES: list[Case] = [
    (CPU, f"engine.env.{name}=1", f"engine.env.{name}: pdserve sets this variable")
    for name in (
        "VLLM_HOST_IP", "VLLM_PORT", "MC_MIN_RPC_PORT", "VLLM_MOONCAKE_BOOTSTRAP_PORT", "VLLM_SERVER_DEV_MODE",
        "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", "PYTHONHASHSEED", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES", "PDSERVE_PATCHES", "LMCACHE_MP_TRANSFER_MODE",
    )
]  # fmt: skip

SETUP: list[Case] = [
    (CPU, "setup=['echo \"x']", "setup.0: a quote is not closed"),
    (CPU, "setup=['']", "setup.0: there is no command"),
]

PATHS: list[Case] = [
    (CPU, "model.path='~/models/x'", "model.path: ~ is not expanded"),
    (CPU, "engine.python='~/venv/bin/python'", "engine.python: ~ is not expanded"),
    (CPU, "engine.command=['~/run.sh']", "engine.command.0: ~ is not expanded"),
    *(
        (GPU, f"model.id='{path}'", "model.id: this is a path, and an id names a model of the hub")
        for path in ("/models/x", "../x", "~/x")
    ),
]

UTILIZATION: list[Case] = [
    (GPU, f"engine.args.{flag}={value}", f"engine.args.{flag}: {shown} is no part of the device's memory")
    for flag, value, shown in (
        ("gpu-memory-utilization", "'85%'", '"85%"'),
        ("device-memory-utilization", "1.5", "1.5"),
    )
]

UNEQUAL_TP: list[Case] = [
    (
        GPU,
        (*kinds, "prefill.parallel.tp=4", "decode.parallel.tp=6"),
        f"decode.parallel.tp: {name} moves KV between unequal tensor parallel sizes only where one divides the other",
    )
    for name, kinds in (
        ("MooncakeConnector", ()),
        ("NixlConnector", ("lmcache=null", "prefill.connector={kind: nixl}", "decode.connector={kind: nixl}")),
    )
]

PORTS: list[Case] = [
    (CPU, "ports.decode=8100", "port 8100 is needed twice: by decode x1 (8100) and by prefill x1 (8100)"),
    (CPU, ("prefill.instances=4", "ports.decode=8103"), "ports.decode: port 8103 is needed twice: by decode x1"),
    (CPU, "ports.transfer=8190", "port 8200 is needed twice: by Mooncake transfers x2 (8190 to 8389)"),
    (CPU, ("ports.decode=65535", "decode.instances=2"), "decode x2 needs ports 65535 to 65536"),
]


STORE = "mooncake_store={segment_gib: 1, protocol: tcp}"
BESIDE = "prefill.connector={kind: multi, of: [{kind: mooncake, protocol: tcp}, {kind: mooncake-store}]}"
RAW = (
    "prefill.connector={kind: raw, config: {kv_connector: MultiConnector, kv_connector_extra_config: "
    "{connectors: [{kv_connector: MooncakeConnector, kv_role: kv_producer, %s}]}}}"
)
RAW_DECODE = "decode.connector={kind: raw, config: {kv_connector: MooncakeConnector, kv_role: kv_consumer}}"
CHILD = "prefill.connector.config.kv_connector_extra_config.connectors.0"

STORES: list[Case] = [
    (CPU, (BESIDE, "lmcache=null"), "prefill.connector.of.1: there is no mooncake_store section"),
    (CPU, STORE, "mooncake_store: no connector uses the store"),
    (CPU, (BESIDE, "lmcache=null", "mooncake_store={segment_gib: 1}"), "prefill.connector.of.1: the store uses rdma,"),
    (
        CPU,
        (BESIDE, "lmcache=null", STORE, "prefill.env={MOONCAKE_CONFIG_PATH: /etc/store.json}"),
        "prefill.env.MOONCAKE_CONFIG_PATH: pdserve writes this file from the mooncake_store section",
    ),
    (
        CPU,
        (BESIDE, "lmcache=null", STORE, "prefill.args.enable-prefix-caching=false"),
        "prefill.args.enable-prefix-caching: mooncake-store keeps KV by the block hashes",
    ),
    (
        CPU,
        (BESIDE, "lmcache=null", "mooncake_store={segment_gib: 1, protocol: tcp, extra_args: {rpc_port: 1}}"),
        "mooncake_store.extra_args.rpc_port: pdserve sets this flag",
    ),
    (
        CPU,
        (BESIDE, "lmcache=null", "mooncake_store={segment_gib: 1, protocol: tcp, extra_args: {eviction-ratio: 0.1}}"),
        "mooncake_store.extra_args.eviction-ratio: flags of mooncake_master have underscores",
    ),
    (CPU, ("prefill.connector.of.2={kind: mooncake-store}", STORE), "prefill.connector: lmcache-mp and mooncake-store"),
    (
        CPU,
        (RAW % "kv_load_failure_policy: recompute", RAW_DECODE, "lmcache=null"),
        f"{CHILD}.kv_load_failure_policy: vLLM reads it at the top level only",
    ),
    (
        CPU,
        (
            "prefill.connector={kind: raw, config: {kv_connector: NixlPushConnector}}",
            "decode.connector={kind: raw, config: {kv_connector: NixlPushConnector}}",
            "lmcache=null",
        ),
        "prefill.connector: NixlPushConnector: NIXL push is not supported: it ran on no device here",
    ),
    (
        GPU,
        (
            "prefill.connector={kind: raw, config: {kv_connector: MoRIIOConnector, kv_role: kv_producer}}",
            "decode.connector={kind: raw, config: {kv_connector: MoRIIOConnector, kv_role: kv_consumer}}",
            "lmcache=null",
        ),
        "prefill.connector: MoRIIOConnector: in vllm 0.32 decode computes on before its KV has arrived",
    ),
]


@each_row("text, options, expected", [
    *STRUCTURE,
    *LOADING,
    *CONNECTORS,
    *LMCACHE,
    *OWNED_FLAGS,
    *FLAGS,
    *OWNED_VARIABLES,
    (CPU, "engine.env.A-B=1", "engine.env.A-B: not the name of an environment variable"),
    *SETUP,
    *PATHS,
    *UTILIZATION,
    *UNEQUAL_TP,
    *PORTS,
    *STORES,
])  # fmt: skip
def test_impossible_is_refused(tmp_path: Path, text: str, options: Options, expected: str) -> None:
    assert expected in refused(tmp_path, text, options)


@each_row("text, options, todo", [
    (GPU, "engine.args.gpu-memory-utilization=90", "write 0.9"),
    (GPU, "engine.args.gpu-memory-utilization='85%'", "write 0.85"),
    (GPU, ("prefill.parallel.tp=4", "decode.parallel.tp=6"), "write 3 for 4, or 6 for both"),
    (CPU, "engine.args.block-size=512", "use a multiple of 512: write for example `chunk_size: 512`"),
    (CPU, "prefill.connector.of.1.max_tokens_per_load=255", "use a multiple of 256"),
    (CPU, "engine.args.tensor-parallel-size=2", "set prefill.parallel.tp"),
    (CPU, "engine.args.no-enforce-eager=true", "write enforce-eager: false"),
    (CPU, "engine.env.VLLM_PORT=1", "set ports.prefill"),
    (CPU, "lmcache.extra_args={--port: 3}", "set ports.lmcache"),
    (CPU, "model.path='~/models/x'", "write ${HOME}/models/x"),
    (GPU, "model.id='../x'", "path: ../x"),
])  # fmt: skip
def test_the_fix_has_the_right_value(tmp_path: Path, text: str, options: Options, todo: str) -> None:
    assert todo in refused(tmp_path, text, options)


@each_row("platform, server, client, fits", [
    ("cpu", "auto", "engine_driven", True), ("cuda", "auto", "engine_driven", True),
    ("cpu", "lmcache_driven", "auto", False), ("cuda", "lmcache_driven", "auto", True),
    ("rocm", "lmcache_driven", "engine_driven", False), ("cpu", "lmcache_driven", "lmcache_driven", True),
    ("cpu", "engine_driven", "auto", True), ("rocm", "engine_driven", "auto", False),
    ("cpu", "engine_driven", "lmcache_driven", False), ("cuda", "engine_driven", "engine_driven", True),
])  # fmt: skip
def test_transfer_modes_must_match(tmp_path: Path, platform: str, server: str, client: str, fits: bool) -> None:
    text = (CPU if platform == "cpu" else GPU).replace("platform: cuda", f"platform: {platform}")
    protocol = "tcp" if platform == "cpu" else "rdma"
    lmcache = f"{{kind: lmcache-mp, transfer_mode: {client}}}"
    # LMCache first, so that the order is no problem in any mode.
    options = (
        f"prefill.connector={{kind: multi, of: [{lmcache}, {{kind: mooncake, protocol: {protocol}}}]}}",
        f"lmcache.transfer_mode={server}",
    )
    if fits:
        assert load(tmp_path, text, *options).recipe.lmcache is not None
    else:
        message = refused(tmp_path, text, *options)
        assert "prefill.connector.of.0.transfer_mode: the engine asks for" in message
        assert f"the server only accepts {server}" in message
        assert "set lmcache.transfer_mode: auto" in message


@each_row("text, mode, first, fits", [
    (CPU, "engine_driven", "mooncake", True), (CPU, "lmcache_driven", "mooncake", False),
    (CPU, "lmcache_driven", "lmcache-mp", True), (GPU, "lmcache_driven", "mooncake", True),
])  # fmt: skip
def test_on_a_cpu_lmcache_driven_must_come_before_mooncake(
    tmp_path: Path, text: str, mode: str, first: str, fits: bool
) -> None:
    children = [f"{{kind: mooncake, protocol: {'tcp' if text == CPU else 'rdma'}}}", "{kind: lmcache-mp}"]
    if first == "lmcache-mp":
        children.reverse()
    options = (f"prefill.connector={{kind: multi, of: [{', '.join(children)}]}}", f"lmcache.transfer_mode={mode}")
    if fits:
        assert load(tmp_path, text, *options).recipe.lmcache is not None
    else:
        message = refused(tmp_path, text, *options)
        assert "prefill.connector.of: on a CPU lmcache_driven moves the KV" in message
        assert "put lmcache-mp first" in message


def test_decode_may_opt_in_to_lmcache_with_mooncake_first(tmp_path: Path) -> None:
    both = "{kind: mooncake, protocol: tcp}, {kind: lmcache-mp}"
    options = (f"decode.connector={{kind: multi, of: [{both}]}}", "lmcache.on=[prefill, decode]")
    assert load(tmp_path, CPU, *options).recipe.lmcache is not None
    swapped = "{kind: lmcache-mp}, {kind: mooncake, protocol: tcp}"
    options = (f"decode.connector={{kind: multi, of: [{swapped}]}}", "lmcache.on=[prefill, decode]")
    assert "decode.connector.of: on decode the KV from prefill must win" in refused(tmp_path, CPU, *options)


def test_a_null_flag_drops_an_inherited_one_and_is_no_flag(tmp_path: Path) -> None:
    options = ("engine.args.disable-log-stats=true", "engine.args.disable-log-stats=null")
    assert load(tmp_path, CPU, *options).recipe.engine.args == {"disable-log-stats": None}
    assert load(tmp_path, CPU, "prefill.args={tensor-parallel-size: null}").recipe.name == "small"


def test_ports_of_different_nodes_are_left_to_the_planner(tmp_path: Path) -> None:
    options = ("prefill.parallel.tp=8", "decode.parallel.tp=8", "ports.decode=8100")
    assert load(tmp_path, GPU, *options).recipe.ports.decode == 8100
    assert "port 8100 is needed twice" in refused(tmp_path, GPU, "ports.decode=8100")


@each_row("text, set_, expected", [
    (CPU, "lmcache.l1_read_ttl_seconds=300", "lmcache.l1_read_ttl_seconds: KV that was found may be gone after 300 s"),
    (CPU, "proxy.host=0.0.0.0", "proxy.host: anybody who reaches 0.0.0.0 can use the model"),
    (GPU, "engine.cache_reset_endpoint=true", "engine.cache_reset_endpoint: engines offer development endpoints"),
    (CPU, "engine.args.max-modle-len=1", "engine.args.max-modle-len: vLLM 0.32 has no such flag -> did you mean max-"),
    (
        CPU,
        "engine.env.VLLM_LOGING_LEVEL=DEBUG",
        "engine.env.VLLM_LOGING_LEVEL: vLLM 0.32 reads no such variable -> did you mean VLLM_LOGGING_LEVEL?",
    ),
    (
        CPU,
        "engine.env.HF_HOME='~/hf'",
        "engine.env.HF_HOME: ~ is passed on as it is, and not every program expands it -> write ${HOME}/hf",
    ),
    (CPU, "engine.args.download-dir='~/hf'", "engine.args.download-dir: ~ is passed on as it is"),
    (CPU, "setup=['ls $HOME']", "setup.0: no shell reads this command: $HOME is passed on"),
    (CPU, "setup=['a && b']", 'setup.0: no shell reads this command: && is passed on -> write [bash, -c, "a && b"]'),
])  # fmt: skip
def test_what_may_be_meant_is_only_warned_about(tmp_path: Path, text: str, set_: str, expected: str) -> None:
    warnings = load(tmp_path, text, set_).warnings
    assert any(expected in line and line.startswith(f"--set {set_.partition('=')[0]}") for line in warnings), warnings


def test_raw_connectors_are_taken_and_marked_unverified(tmp_path: Path) -> None:
    top = "prefill.connector.config.kv_load_failure_policy=recompute"
    loaded = load(tmp_path, CPU, RAW % "kv_connector_extra_config: {}", RAW_DECODE, "lmcache=null", top)
    assert len([line for line in loaded.warnings if "this deployment is unverified" in line]) == 2


def test_rdma_on_a_cpu_is_warned_about(tmp_path: Path) -> None:
    bare = "schema: 1\nname: bare\nplatform: cpu\nmodel: {path: m, served_name: m}\n"
    loaded = load(tmp_path, bare)
    assert any("mooncake uses rdma" in line and "set protocol: tcp" in line for line in loaded.warnings)


@each_row("command", ["bash -c 'a && b'", "[echo, a, '&&', b]", "'grep -E ''a|b'' f'", "pip install 'a>1'"])
def test_a_setup_whose_words_are_meant_is_not_warned_of(tmp_path: Path, command: str) -> None:
    assert load(tmp_path, CPU, f"setup=[{command}]").warnings == ()


@each_row("prefill, decode", [(4, 8), (6, 3)])
def test_unequal_sizes_of_which_one_divides_the_other_are_taken(tmp_path: Path, prefill: int, decode: int) -> None:
    sizes = (f"prefill.parallel.tp={prefill}", f"decode.parallel.tp={decode}")
    assert load(tmp_path, GPU, *sizes).recipe.name == "large"


def test_one_length_may_be_written_in_two_ways(tmp_path: Path) -> None:
    lengths = ("prefill.args.max-model-len=4k", "decode.args.max-model-len=4000")
    assert load(tmp_path, CPU, *lengths).recipe.name


def test_names_of_the_hub_and_of_other_stores_are_no_paths(tmp_path: Path) -> None:
    for name in ("gpt2", "org/model", "s3://bucket/model", "org/model:Q4_K_M"):
        assert load(tmp_path, GPU, f"model.id='{name}'").recipe.model.id == name


@each_row("change, warned", [
    ("decode.devices=[1, 2]", True), ("decode.devices=[2, 3]", False), ("devices_per_node=3", False),
    ("slurm.nodes=2", False),
])  # fmt: skip
def test_devices_that_two_instances_of_a_node_name_are_warned_of(tmp_path: Path, change: str, warned: bool) -> None:
    tp = ("prefill.parallel.tp=2", "decode.parallel.tp=2", "prefill.devices=[0, 1]", "decode.devices=[1, 2]")
    warnings = load(tmp_path, GPU, *tp, change).warnings
    assert any("decode-0 and prefill-0 both name device 1: no node can hold both" in w for w in warnings) is warned


@each_row("text", [CPU, AGGREGATED])
def test_a_quiet_recipe_warns_of_nothing_but_weights_that_may_change(tmp_path: Path, text: str) -> None:
    assert [line for line in load(tmp_path, text).warnings if "not pinned" not in line] == []


@each_row("settings, warned", [
    ((), "model.id: revision main is not pinned"),
    (("model.revision=v1",), "model.revision: revision v1 is not pinned"),
    ((f"model.revision='{'0' * 40}'",), None),
    (
        (f"model.revision='{'0' * 40}'", "decode.args.speculative-config={model: org/draft, revision: v2}"),
        "decode.args.speculative-config: revision v2 of the draft model org/draft is not pinned",
    ),
    (("model.download=false",), None),
    ((f"model.revision='{'0' * 40}'", "container.kind=docker", "image=x:1"), "into the container's own home"),
])  # fmt: skip
def test_weights_that_may_change_are_warned_of(tmp_path: Path, settings: tuple[str, ...], warned: str | None) -> None:
    warnings = load(tmp_path, GPU, *settings).warnings
    assert [warned in warning for warning in warnings] == [True] if warned else warnings == ()


def test_offloading_was_run_on_no_gpu_and_a_warning_has_it(tmp_path: Path) -> None:
    change = "aggregated.connector={kind: offloading, cpu_gib: 4}"
    warnings = load(tmp_path, AGGREGATED, change, "lmcache=null").warnings
    assert any("offloading was checked against vLLM's classes only" in line for line in warnings)
