"""srt-slurm's schema 2 in the shapes that its recipes have since September 2026: services, roles, Dynamo's flags."""

from __future__ import annotations

from pathlib import Path

from pdserve.recipe.load import yaml12
from tests.importing.kit import notes, read, refused, whole
from tests.tables import each_row

STORE_CHILD = '{"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both", "kv_connector_extra_config": %s}'
NIXL_CHILD = (
    '{"kv_connector": "NixlConnector", "kv_role": "kv_both", '
    '"kv_connector_extra_config": {"backends": ["UCX"], "num_threads": 8}}'
)


def both(store: str) -> str:
    return (
        '{"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_load_failure_policy": "fail", '
        f'"kv_connector_extra_config": {{"connectors": [{NIXL_CHILD}, {STORE_CHILD % store}]}}}}'
    )


AGENTS = f"""\
schema: 2
name: some-model-1p4d
model: {{path: org/some-model, container: &image "registry.example/vllm@sha256:0123", precision: fp4}}
identity:
  model: {{repo: org/some-model}}
  container: {{image: *image}}
  frameworks: {{dynamo: "1.5.0"}}
dynamo: {{install: true, source: {{wheel: "1.5.0"}}}}
environment: {{PYTHONHASHSEED: "0"}}
health_check: {{max_attempts: 2160, interval_seconds: 10}}
resources: {{gpu_type: gb200, gpus_per_node: 4}}
services:
  - name: etcd
    type: etcd
    placement: {{node: infra}}
  - name: nats
    type: nats
    placement: {{node: dedicated}}
    options: {{max_payload_mb: 32}}
  - name: mooncake-master
    type: mooncake-master
    args: [--default_kv_lease_ttl=60000]
    options:
      store_config:
        metadata_server: P2PHANDSHAKE
        global_segment_size: 100GB
        local_buffer_size: 4GB
        protocol: rdma
        device_name: mlx5_0,mlx5_1
        mode: embedded
        enable_offload: true
frontend:
  type: dynamo
  enable_multiple_frontends: true
  args:
    dyn-chat-processor: vllm
    trust-remote-code: true
    tool-call-parser: minimax_m3
    reasoning-parser: minimax_m3
    enable-auto-tool-choice: true
    router-mode: least-loaded
engine: {{type: vllm, connector: null, dp_launch_mode: per_gpu}}
roles:
  prefill:
    nodes: 1
    workers: 1
    gpus: 4
    env: &worker
      NCCL_CUMEM_ENABLE: "1"
      DYN_TCP_CONNECT_TIMEOUT: "120"
    args:
      served-model-name: org/some-model
      router-mode: least-loaded
      router-session-affinity-ttl-secs: 1800
      tensor-parallel-size: 1
      data-parallel-size: 4
      enable-expert-parallel: true
      kv-transfer-config: '{both('{"lookup_async": false}')}'
    kv_events: true
  decode:
    nodes: 2
    workers: 4
    gpus: 2
    env:
      <<: *worker
      VLLM_FLASHINFER_ALLREDUCE_BACKEND: mnnvl
    args:
      served-model-name: org/some-model
      tensor-parallel-size: 2
      max-num-seqs: 1
      dyn-default-thinking-mode: enabled
      kv-transfer-config: '{both('{"enable_lookup": false, "max_load_batch_keys": 2}')}'
srun_options: {{container-remap-root: ""}}
telemetry: {{enabled: true}}
observability: {{enabled: false}}
benchmark: {{type: custom, command: bash bench.sh}}
"""
VARIANTS = """\
schema: 2
base:
  model: {path: org/some-model, container: registry.example/vllm:v1, precision: fp4}
  resources: {gpu_type: gb300, gpus_per_node: 4}
  engine: {type: vllm, connector: nixl}
  roles: {}
override_small:
  name: small
  roles:
    prefill: {nodes: 1, workers: 1, gpus: 1, args: {tensor-parallel-size: 1}}
    decode: {nodes: colocate, workers: 1, gpus: 1, args: {tensor-parallel-size: 1}}
override_large:
  name: large
  roles:
    prefill: {nodes: 1, workers: 1, gpus: 4, args: {tensor-parallel-size: 4}}
    decode: {nodes: 1, workers: 1, gpus: 4, args: {tensor-parallel-size: 4}}
"""


def test_nothing_is_lost_of_a_recipe_for_agents(tmp_path: Path) -> None:
    imported = whole(AGENTS, tmp_path)
    assert imported.draft.losses() == []
    recipe = imported.loaded.recipe
    assert recipe.prefill is not None
    assert recipe.decode is not None
    assert (recipe.prefill.instances, recipe.decode.instances, recipe.decode.parallel.tp) == (1, 4, 2)
    assert recipe.decode.env["NCCL_CUMEM_ENABLE"] == "1"
    assert recipe.mooncake_store is not None
    assert recipe.mooncake_store.extra_args == {"default_kv_lease_ttl": 60000}


@each_row("role", ["prefill", "decode"])
def test_each_engine_does_what_dynamo_did_to_answers(role: str) -> None:
    """Prefill too: both render the prompt, and it must be the same one."""
    args = read(AGENTS).document[role]["args"]
    assert (args["tool-call-parser"], args["reasoning-parser"]) == ("minimax_m3", "minimax_m3")
    assert args["enable-auto-tool-choice"] is True
    assert args["default-chat-template-kwargs"] == {
        "thinking": True,
        "enable_thinking": True,
        "thinking_mode": "enabled",
    }
    assert not [name for name in args if name.startswith(("dyn-", "router-"))]


def test_the_role_s_own_parser_holds_over_that_of_the_frontend() -> None:
    text = AGENTS.replace("      max-num-seqs: 1\n", "      reasoning-parser: kimi_k3\n")
    document = read(text).document
    assert document["decode"]["args"]["reasoning-parser"] == "kimi_k3"
    assert document["prefill"]["args"]["reasoning-parser"] == "minimax_m3"


LOSSES = [
    ("", "host_setup: {commands: [nvidia-smi -lgc 1500]}\n", "host_setup"),
    ("protocol: rdma", "protocol: efa", "protocol"),
    ('PYTHONHASHSEED: "0"', 'PYTHONHASHSEED: "0", SRT_HCA_MAP: mlx5_0', "SRT_HCA_MAP"),
    ('NCCL_CUMEM_ENABLE: "1"', "DYN_REASONING_PARSER: kimi", "DYN_REASONING_PARSER"),
    ("    workers: 4\n", "    workers: 4\n    container: registry.example/other:v1\n", "container"),
    ("connector: null,", "connector: null, failover: {shadow_engines: 1},", "failover"),
    ("dyn-default-thinking-mode: enabled", "dyn-default-thinking-mode: adaptive", "dyn-default-thinking-mode"),
    ("dyn-chat-processor: vllm", "dyn-chat-processor: sglang", "tool-call-parser"),
    ("      max-num-seqs: 1\n", "      dyn-structural-tag-scope: always\n", "dyn-structural-tag-scope"),
    ("    workers: 4\n", "    workers: 4\n    wholly_new: 1\n", "wholly_new"),
]


@each_row("old, new, key", LOSSES)
def test_what_a_recipe_has_no_word_for_is_a_loss_with_its_reason(old: str, new: str, key: str) -> None:
    losses = read(AGENTS.replace(old, new) if old else AGENTS + new).losses()
    assert losses
    assert key in {note.at.key.rpartition(".")[2] for note in losses}
    assert all(note.why for note in losses)


NIC = "chooses one of device_name"
KEPT = [
    # Which NIC a rank uses changes how fast KV moves, not what is served.
    ("      store_config:\n", "      device_names_by_gpu: [mlx5_0, mlx5_1]\n      store_config:\n", NIC),
    ('PYTHONHASHSEED: "0"', 'PYTHONHASHSEED: "0", SRT_MOONCAKE_RANK_LOCAL_HCA_MAP: "mlx5_0,mlx5_1"', NIC),
    ("    workers: 4\n", "    workers: 4\n    container: registry.example/vllm@sha256:0123\n", ""),
    ("    workers: 4\n", "    workers: 4\n    critical: false\n    restart: {policy: always}\n", ""),
    ("connector: null,", "connector: null, set_visible_devices: true,", ""),
    ("      max-num-seqs: 1\n", "      grpc: true\n      namespace: mine\n      custom-jinja-template: /t.jinja\n", ""),
]


@each_row("old, new, confirm", KEPT)
def test_what_pdserve_decides_itself_or_the_site_confirms_is_no_loss(old: str, new: str, confirm: str) -> None:
    draft = read(AGENTS.replace(old, new))
    assert draft.losses() == []
    assert confirm in "".join(notes(draft, "confirm").values())


def test_moriio_by_its_name_is_its_section_in_both_roles(tmp_path: Path) -> None:
    """As srtctl makes it: decode reads, and prefill is the producer. What it needs accepted stays for the user."""
    variants = VARIANTS.replace("connector: nixl", "connector: moriio").replace("gb300", "mi355x")
    recipe = whole(variants, tmp_path, "override_small")
    document = yaml12.parse(recipe.text, "recipe.yaml").data
    assert document["prefill"]["connector"] == document["decode"]["connector"] == {"kind": "moriio"}
    assert "accept_unsafe_aborts: true" in recipe.text.partition("schema:")[0], "among the comments at its top"


def test_a_base_without_roles_is_no_deployment(tmp_path: Path) -> None:
    error = refused(VARIANTS)
    assert "describes 2 deployments" in error.what
    assert "--variant: override_small override_large" in str(error.todo)
    assert whole(VARIANTS, tmp_path, "override_small").draft.losses() == []
    assert "no role has workers" in refused(VARIANTS, "base").what
