"""Recipes of vLLM's collection: layers of flags for one variant, hardware, strategy and set of features; and where
KV is kept beside the devices, by options of its taxonomy and by stores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import RecipeError
from pdserve.importing.formats import import_launch
from pdserve.importing.launch import Draft, ImportChoice
from pdserve.operations.import_recipe import import_file
from tests.importing.kit import notes
from tests.tables import each_row

MODEL = """\
meta:
  slug: small
  hardware: {h200: verified, gb200: verified, mi300x: unsupported}
model:
  model_id: org/small
  base_args: [--trust-remote-code, "--max-model-len 4096", --attention_config.backend, X]
  base_env: {SHARED: "1"}
features:
  tools: {args: [--tool-call-parser, hermes, --enable-auto-tool-choice]}
  spec:
    default_mode: mtp
    modes:
      mtp: {args: [--speculative-config, '{"method": "mtp"}']}
      eagle: {args: [--speculative-config, '{"method": "eagle"}'], hardware: {hopper: unsupported}}
opt_in_features: [spec]
kv_offload_support: {tiers: verified}
variants:
  default: {precision: fp8, vram_minimum_gb: 100}
  small4: {precision: nvfp4, model_id: org/small-fp4, vram_minimum_gb: 900, extra_args: [--quantization, fp4]}
compatible_strategies: [single_node_tp, multi_node_dep, pd_cluster]
hardware_overrides:
  hopper: {extra_args: [--max-num-seqs, "16"], extra_env: {HOPPER: "1"}}
strategy_overrides:
  multi_node_dep:
    hardware_overrides:
      hopper: {extra_args: [--max-num-seqs, "32"]}
  pd_cluster:
    env: {NCCL_MNNVL_ENABLE: "1"}
    prefill: {nodes: {default: 2, gb200: 1}, parallelism: dep, vllm_args: [--max-num-seqs, "8"]}
    decode: {nodes: 1, parallelism: tep}
"""
TAXONOMY = """\
hardware_profiles:
  h200: {brand: NVIDIA, generation: hopper, gpu_count: 8, vram_gb: 1128}
  gb200: {brand: NVIDIA, generation: blackwell, gpu_count: 4, vram_gb: 768}
  b200: {brand: NVIDIA, generation: blackwell, gpu_count: 8, vram_gb: 1440}
  mi300x: {brand: AMD, generation: amd, gpu_count: 8, vram_gb: 1536}
  mi355x: {brand: AMD, generation: amd, gpu_count: 8, vram_gb: 2304}
kv_offload:
  host:
    args: [--kv-transfer-config, '{"kv_connector":"OffloadingConnector","kv_role":"kv_both",
      "kv_connector_extra_config":{"cpu_bytes_to_use":549755813888,"blocks_per_chunk":4,"eviction_policy":"arc",
      "store_threshold":2,"offload_prompt_only":false}}']
  tiers:
    requires_opt_in: true
    env: {PYTHONHASHSEED: "7"}
    args: [--kv-transfer-config, '{"kv_connector":"OffloadingConnector","kv_role":"kv_both",
      "kv_connector_extra_config":{"cpu_bytes_to_use":1073741824,"spec_name":"TieringOffloadingSpec"}}']
  closed: {requires_opt_in: true, args: []}
  nvidia: {brands: [NVIDIA], args: []}
  lmcache:
    strategies: [single_node_tp]
    args: [--kv-transfer-config, '{"kv_connector":"LMCacheMPConnector","kv_role":"kv_both",
      "kv_connector_extra_config":{"lmcache.mp.port":5555,"lmcache.mp.mq_timeout":300}}']
    install: pip install lmcache
    companion:
      command: |
        # Before the engines.
        lmcache server \\
          --port 5555 \\
          --l1-size-gb 512 \\
          --max-gpu-workers 1 \\
          --chunk-size 1024 \\
          --eviction-trigger-watermark 0.85 \\
          --eviction-policy LRU \\
          --supported-transfer-mode lmcache_driven
  helper:
    args: [--max-num-seqs, "4"]
    companion: {command: some-daemon --fast}
"""
_MULTI = (
    '{"kv_connector":"MultiConnector","kv_role":"kv_both","kv_connector_extra_config":{"connectors":['
    '{"kv_connector":"NixlConnector","kv_role":"%s","kv_load_failure_policy":"fail"},'
    '{"kv_connector":"MooncakeStoreConnector","kv_role":"kv_both",'
    '"kv_connector_extra_config":{"load_async":true,"lookup_async":true}}]}}'
)
STORE = f"""\
name: shared_store
deploy_type: kv_store_lb
router: {{policy: cache_aware}}
vllm:
  vllm_args: [--kv-transfer-config, '{{"kv_connector":"MooncakeStoreConnector","kv_role":"kv_both"}}']
  env: {{MOONCAKE_CONFIG_PATH: $MOONCAKE_CONFIG_PATH, PYTHONHASHSEED: 0}}
pd:
  prefill: {{args: [--kv-transfer-config, '{_MULTI % "kv_producer"}']}}
  decode: {{args: [--kv-transfer-config, '{_MULTI % "kv_consumer"}']}}
mooncake_master:
  command: |-
    # One for all nodes.
    mooncake_master \\
      -rpc_port=50051 \\
      -eviction_ratio=0.1 \\
      -logtostderr
mooncake_vllm_config:
  template:
    mode: embedded
    metadata_server: P2PHANDSHAKE
    master_server_address: $MASTER:50051
    global_segment_size: 100GB
    local_buffer_size: 4GB
    protocol: rdma
    device_name: $DEVICES
    enable_offload: false
"""
NIXL = '{"kv_connector":"NixlConnector","kv_role":"%s","kv_load_failure_policy":"fail"}'
BESIDE = {
    "taxonomy.yaml": TAXONOMY,
    "strategies/tp.yaml": "name: single_node_tp\ndeploy_type: single_node\n",
    "strategies/dep.yaml": "name: multi_node_dep\ndeploy_type: multi_node\nparallel_flag: --data-parallel-size\n"
    "vllm_args: [--enable-expert-parallel, --data-parallel-hybrid-lb]\nenv: {GLOO_SOCKET_IFNAME: $IFACE_NAME}\n",
    "strategies/pd.yaml": "name: pd_cluster\ndeploy_type: pd_cluster\nrouter: {policy: round_robin}\n"
    f"prefill: {{vllm_args: [--port, '8001', --kv-transfer-config, '{NIXL % 'kv_producer'}']}}\n"
    f"decode: {{vllm_args: [--kv-transfer-config, '{NIXL % 'kv_consumer'}']}}\n",
    "kv_store/shared.yaml": STORE,
    "kv_store/apart.yaml": STORE.replace("shared_store", "store_apart").replace("mode: embedded", "mode: standalone"),
}


def read(text: str = MODEL, beside: dict[str, str] = BESIDE, **choice: Any) -> Draft:
    return import_launch(text, "models/org/small.yaml", ImportChoice(**choice), beside)


def aggregated(**choice: Any) -> dict[str, Any]:
    role: dict[str, Any] = read(**choice).document["aggregated"]
    return role


def test_the_layers_are_laid_over_each_other() -> None:
    draft = read()
    assert draft.document["model"] == {"id": "org/small", "served_name": "org/small"}
    assert draft.document["aggregated"]["args"] == {
        "trust-remote-code": True,
        "max-model-len": 4096,
        "max-num-seqs": 16,
        "tool-call-parser": "hermes",
        "enable-auto-tool-choice": True,
        "attention-config": {"backend": "X"},
    }
    assert draft.document["aggregated"]["env"] == {"SHARED": "1", "HOPPER": "1"}
    assert draft.losses() == []


def test_one_device_where_the_weights_fit_else_the_whole_node() -> None:
    assert "parallel" not in aggregated()
    assert aggregated(hardware="b200", variant="small4")["parallel"] == {"tp": 8}


def test_a_variant_has_its_own_model_flags_and_hardware() -> None:
    document = read(variant="small4").document
    assert document["model"]["id"] == "org/small-fp4"
    assert document["aggregated"]["args"]["quantization"] == "fp4"
    assert document["name"].startswith("small-b200-")


def test_a_strategys_change_for_a_generation_takes_the_place_of_the_recipes() -> None:
    role = aggregated(strategy="multi_node_dep", nodes=2)
    assert role["args"]["max-num-seqs"] == 32
    assert role["parallel"] == {"dp": 16, "ep": True, "nodes": 2, "load_balancing": "hybrid"}
    assert role["env"] == {"SHARED": "1"}


def test_features_that_are_opt_in_are_off_unless_they_are_named() -> None:
    assert "speculative-config" not in aggregated()["args"]
    args = aggregated(features=("spec",))["args"]
    assert args["speculative-config"] == {"method": "mtp"}
    assert "tool-call-parser" not in args


def test_prefill_and_decode_have_pools_of_their_own() -> None:
    draft = read(strategy="pd_cluster")
    prefill, decode = draft.document["prefill"], draft.document["decode"]
    assert prefill["parallel"] == {"dp": 16, "ep": True, "nodes": 2}
    assert decode["parallel"] == {"tp": 8, "ep": True}
    assert prefill["connector"] == decode["connector"] == {"kind": "nixl"}
    assert prefill["kv_load_failure_policy"] == "fail"
    assert prefill["args"]["max-num-seqs"] == 16, "that of the hardware comes after that of the strategy"
    assert "NCCL_MNNVL_ENABLE" not in prefill["env"], "for GB200 and GB300 only"
    assert draft.losses() == []
    assert "pd_cluster.yaml" not in notes(draft, "unused")
    trays = read(strategy="pd_cluster", hardware="gb200").document["prefill"]
    assert trays["parallel"] == {"dp": 4, "ep": True}
    assert trays["args"]["max-num-seqs"] == 8
    assert trays["env"]["NCCL_MNNVL_ENABLE"] == "1"


@each_row("choice", [
    {"hardware": "gb200"}, {"kv_offload": "shared_store"}, {"kv_offload": "lmcache", "strategy": "single_node_tp"},
])  # fmt: skip
def test_the_recipe_loads_and_plans(tmp_path: Path, choice: dict[str, Any]) -> None:
    for name, text in {**BESIDE, "models/org/small.yaml": MODEL}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    file = tmp_path / "models" / "org" / "small.yaml"
    recipe = import_file(file, ImportChoice(**{"strategy": "pd_cluster", **choice}), environ={}).loaded.recipe
    assert recipe.container is not None
    assert (recipe.container.kind, recipe.image, recipe.platform) == ("docker", "vllm/vllm-openai:latest", "cuda")
    assert (recipe.mooncake_store is None) == (choice.get("kv_offload") != "shared_store")
    assert (recipe.lmcache is None) == (choice.get("kv_offload") != "lmcache")


@each_row("choice, todo", [
    ({"variant": "other"}, "default, small4"),
    ({"strategy": "single_node_dep"}, "single_node_tp, multi_node_dep, pd_cluster"),
    ({"hardware": "mi300x"}, "h200, gb200"), ({"features": ("x",)}, "tools, spec"),
    ({"strategy": "multi_node_dep"}, "--nodes 2"),
])  # fmt: skip
def test_a_choice_that_the_recipe_does_not_offer_names_those_that_it_does(choice: dict[str, Any], todo: str) -> None:
    with pytest.raises(RecipeError) as caught:
        read(**choice)
    assert todo in str(caught.value.todo)


def test_a_recipe_without_its_collection_or_for_another_server_is_refused() -> None:
    with pytest.raises(RecipeError, match="no taxonomy"):
        import_launch(MODEL, "small.yaml", ImportChoice())
    with pytest.raises(RecipeError, match="vLLM-Omni"):
        read(f"{MODEL}omni: {{tasks: []}}\n")


# --- where KV is kept beside the devices


def test_the_options_of_vllms_own_offloading_are_those_of_its_section() -> None:
    draft = read(kv_offload="host")
    assert draft.document["aggregated"]["connector"] == {
        "kind": "offloading",
        "cpu_gib": 512,
        "blocks_per_chunk": 4,
        "eviction": "arc",
        "store_threshold": 2,
        "prompts_only": False,
    }
    assert draft.losses() == []


def test_what_no_section_has_stays_raw_and_its_variables_are_carried_over() -> None:
    document = read(kv_offload="tiers").document
    assert document["aggregated"]["connector"]["kind"] == "raw"
    assert document["engine"]["hash_seed"] == 7


def test_lmcaches_server_becomes_the_section_with_the_timeout_of_its_clients() -> None:
    draft = read(kv_offload="lmcache")
    assert draft.document["aggregated"]["connector"] == {"kind": "lmcache-mp"}
    assert draft.document["lmcache"] == {
        "on": ["aggregated"],
        "l1_size_gb": 512,
        "extra_args": {"max-gpu-workers": 1},
        "chunk_size": 1024,
        "eviction": {"watermark": 0.85, "policy": "LRU"},
        "transfer_mode": "lmcache_driven",
        "mq_timeout_seconds": 300,
    }
    assert draft.losses() == []
    flags = notes(draft, "replaced")["taxonomy.yaml kv_offload.lmcache.companion.command"]
    assert flags == "pdserve sets --port: set ports.lmcache"
    assert list(notes(draft, "confirm")) == ["taxonomy.yaml kv_offload.lmcache.install"]


def test_a_process_that_is_not_known_is_a_loss() -> None:
    assert [note.at.key for note in read(kv_offload="helper").losses()] == ["taxonomy.yaml kv_offload.helper.companion"]


def test_a_store_becomes_the_section_of_the_store_and_a_connector() -> None:
    draft = read(kv_offload="shared_store")
    assert draft.document["aggregated"]["connector"] == {"kind": "mooncake-store"}
    assert draft.document["engine"] == {"hash_seed": 0}
    assert draft.document["mooncake_store"] == {
        "segment_gib": 100,
        "buffer_gib": 4,
        "protocol": "rdma",
        "extra_args": {"eviction_ratio": 0.1, "logtostderr": True},
    }
    assert draft.losses() == []
    flags = notes(draft, "replaced")["shared.yaml mooncake_master.command"]
    assert flags == "pdserve sets -rpc_port: set ports.mooncake_master"
    device = "shared.yaml mooncake_vllm_config.template.device_name"
    assert list(notes(draft, "confirm")) == [device], "its variable is filled in by the site"


def test_beside_prefill_and_decode_a_store_is_the_second_of_two_connectors() -> None:
    draft = read(kv_offload="shared_store", strategy="pd_cluster")
    both = {"kind": "multi", "of": [{"kind": "nixl"}, {"kind": "mooncake-store"}]}
    assert draft.document["prefill"]["connector"] == draft.document["decode"]["connector"] == both
    key = "shared.yaml pd.prefill.args: NixlConnector.kv_load_failure_policy"
    assert notes(draft, "replaced")[key] == "vLLM reads it at the top level only"


@each_row("name, choice, cause", [
    ("closed", {}, "does not have it as verified"),
    ("nvidia", {"hardware": "mi355x"}, "devices of NVIDIA"),
    ("lmcache", {"strategy": "multi_node_dep"}, "it is for single_node_tp"),
    ("lmcache", {"strategy": "pd_cluster"}, "the place of the one between prefill and decode"),
    ("store_apart", {}, "mooncake_store_service"),
])  # fmt: skip
def test_what_cannot_be_offloaded_names_the_reason(name: str, choice: dict[str, Any], cause: str) -> None:
    with pytest.raises(RecipeError) as caught:
        read(kv_offload=name, **choice)
    assert cause in str(caught.value.cause)
    assert "shared_store" in str(caught.value.todo)
    assert "store_apart" not in str(caught.value.todo)


SCRIPT, SRT = "#!/bin/sh\nvllm serve org/small\n", "name: x\nbackend: {type: vllm}\n"


@each_row("text, file, choice, said", [
    (SCRIPT, "serve.sh", {"nodes": 2, "kv_offload": "lmcache"}, "--nodes and --kv-offload choose nothing"),
    (SRT, "serve.yaml", {"hardware": "h200"}, "--hardware chooses nothing"),
    (MODEL, "small.yaml", {"variables": {"TP": "2"}}, "--var chooses nothing"),
])  # fmt: skip
def test_an_option_that_chooses_nothing_is_refused(text: str, file: str, choice: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        import_launch(text, file, ImportChoice(**choice), BESIDE)
