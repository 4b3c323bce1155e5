"""KV offloading of vLLM's collection: options of its taxonomy, and stores, alone and beside prefill and decode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import RecipeError
from pdserve.importing.formats import imported
from pdserve.importing.launch import Draft, ImportChoice
from pdserve.operations.import_recipe import import_file
from tests.importing.kit import notes
from tests.tables import each_row

MODEL = """\
meta: {slug: small}
model: {model_id: org/small}
variants: {default: {precision: fp8, vram_minimum_gb: 100}}
compatible_strategies: [single_node_tp, single_node_dep, pd_cluster]
kv_offload_support: {tiers: verified, broken: unsupported}
"""
TAXONOMY = """\
hardware_profiles:
  h200: {brand: NVIDIA, generation: hopper, gpu_count: 8, vram_gb: 1128}
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
  broken: {args: []}
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
_NIXL = '{"kv_connector":"NixlConnector","kv_role":"%s"}'
BESIDE = {
    "taxonomy.yaml": TAXONOMY,
    "strategies/tp.yaml": "name: single_node_tp\ndeploy_type: single_node\n",
    "strategies/dep.yaml": "name: single_node_dep\ndeploy_type: single_node\nparallel_flag: --data-parallel-size\n",
    "strategies/pd.yaml": "name: pd_cluster\ndeploy_type: pd_cluster\n"
    f"prefill: {{vllm_args: [--kv-transfer-config, '{_NIXL % 'kv_producer'}']}}\n"
    f"decode: {{vllm_args: [--kv-transfer-config, '{_NIXL % 'kv_consumer'}']}}\n",
    "kv_store/shared.yaml": STORE,
    "kv_store/apart.yaml": STORE.replace("shared_store", "store_apart").replace("mode: embedded", "mode: standalone"),
}


def read(name: str, **choice: Any) -> Draft:
    return imported(MODEL, "models/org/small.yaml", ImportChoice(kv_offload=name, **choice), BESIDE)


def test_the_options_of_vllms_own_offloading_are_those_of_its_section() -> None:
    draft = read("host")
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
    document = read("tiers").document
    assert document["aggregated"]["connector"]["kind"] == "raw"
    assert document["engine"]["hash_seed"] == 7


def test_lmcaches_server_becomes_the_section_with_the_timeout_of_its_clients() -> None:
    draft = read("lmcache")
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


def test_a_flag_has_the_line_that_it_was_written_on() -> None:
    line = next(number for number, text in enumerate(TAXONOMY.splitlines(), 1) if "--l1-size-gb" in text)
    origin = read("lmcache").origins["lmcache", "l1_size_gb"]
    assert origin == f"{line}: taxonomy.yaml kv_offload.lmcache.companion.command"


def test_a_process_that_is_not_known_is_a_loss() -> None:
    assert [note.at.key for note in read("helper").losses()] == ["taxonomy.yaml kv_offload.helper.companion"]


def test_a_store_becomes_the_section_of_the_store_and_a_connector() -> None:
    draft = read("shared_store")
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
    draft = read("shared_store", strategy="pd_cluster")
    both = {"kind": "multi", "of": [{"kind": "nixl"}, {"kind": "mooncake-store"}]}
    assert draft.document["prefill"]["connector"] == draft.document["decode"]["connector"] == both
    key = "shared.yaml pd.prefill.args: NixlConnector.kv_load_failure_policy"
    assert notes(draft, "replaced")[key] == "vLLM reads it at the top level only"


@each_row("choice", [{"name": "lmcache"}, {"name": "shared_store", "strategy": "pd_cluster"}])
def test_the_recipe_loads_and_plans(tmp_path: Path, choice: dict[str, str]) -> None:
    for name, text in {**BESIDE, "models/org/small.yaml": MODEL}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    file = tmp_path / "models" / "org" / "small.yaml"
    choice = {**choice, "kv_offload": choice["name"]}
    del choice["name"]
    recipe = import_file(file, ImportChoice(**choice), environ={}).loaded.recipe  # type: ignore[arg-type]
    assert (recipe.lmcache is None) != (recipe.mooncake_store is None)


@each_row("name, choice, cause", [
    ("closed", {}, "does not have it as verified"),
    ("broken", {}, "has it as unsupported"),
    ("nvidia", {"hardware": "mi355x"}, "devices of NVIDIA"),
    ("lmcache", {"strategy": "single_node_dep"}, "it is for single_node_tp"),
    ("lmcache", {"strategy": "pd_cluster"}, "the place of the one between prefill and decode"),
    ("store_apart", {}, "mooncake_store_service"),
    ("other", {}, "None"),
])  # fmt: skip
def test_what_cannot_be_offloaded_names_the_reason(name: str, choice: dict[str, Any], cause: str) -> None:
    with pytest.raises(RecipeError) as caught:
        read(name, **choice)
    assert cause in str(caught.value.cause)
    assert "shared_store" in str(caught.value.todo)
    assert "store_apart" not in str(caught.value.todo)


SCRIPT, SRT = "#!/bin/sh\nvllm serve org/small\n", "name: x\nbackend: {type: vllm}\n"


@each_row("text, file, choice, said", [
    (SCRIPT, "serve.sh", {"nodes": 2, "kv_offload": "lmcache"}, "--nodes and --kv-offload choose nothing"),
    (SCRIPT, "serve.sh", {"variant": "a"}, "--variant chooses nothing"),
    (SRT, "serve.yaml", {"hardware": "h200"}, "--hardware chooses nothing"),
    (SRT, "serve.yaml", {"variables": {"TP": "2"}}, "--var chooses nothing"),
    (MODEL, "small.yaml", {"variables": {"TP": "2"}}, "--var chooses nothing"),
])  # fmt: skip
def test_an_option_that_chooses_nothing_is_refused(text: str, file: str, choice: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        imported(text, file, ImportChoice(**choice), BESIDE)


def taxonomy(*flags: str) -> dict[str, str]:
    """With LMCache's server given these flags too."""
    more = "".join(f" \\\n          {flag}" for flag in flags)
    return {**BESIDE, "taxonomy.yaml": TAXONOMY.replace("mode lmcache_driven", f"mode lmcache_driven{more}")}


def test_load_balancing_that_lmcache_does_not_go_with_is_a_loss_with_the_keys_to_write() -> None:
    model = MODEL.replace(
        "model_id: org/small", "model_id: org/small, base_args: [-dp, '2', --data-parallel-external-lb]"
    )
    draft = imported(model, "models/org/small.yaml", ImportChoice(kv_offload="lmcache"), BESIDE)
    assert "load_balancing" not in draft.document["aggregated"]["parallel"]
    assert [note.why for note in draft.losses()] == [
        "pdserve connects LMCache to instances with one API server only, which chooses among all ranks: take "
        "aggregated out of lmcache.on and set aggregated.parallel.load_balancing: external"
    ]


def test_storage_behind_l1_is_carried_over() -> None:
    beside = taxonomy("""--l2-adapter '{"type": "fs", "base_path": "/mnt/kv"}'""", "--lookup-hash-log-dir /var/log/kv")
    draft = imported(MODEL, "models/org/small.yaml", ImportChoice(kv_offload="lmcache"), beside)
    assert draft.document["lmcache"]["l2"] == [{"type": "fs", "base_path": "/mnt/kv"}]
    assert draft.document["lmcache"]["extra_args"]["lookup-hash-log-dir"] == "/var/log/kv"
    assert draft.losses() == []


def test_storage_that_cannot_be_read_is_a_loss() -> None:
    draft = imported(MODEL, "models/org/small.yaml", ImportChoice(kv_offload="lmcache"), taxonomy("--l2-adapter fs"))
    assert [note.why for note in draft.losses()] == ["--l2-adapter is no JSON object"]


def test_a_flag_that_pdserve_sets_on_a_cpu_alone_is_carried_over() -> None:
    beside = taxonomy("--no-l1-use-lazy")
    draft = imported(MODEL, "models/org/small.yaml", ImportChoice(kv_offload="lmcache"), beside)
    assert "no-l1-use-lazy" in draft.document["lmcache"]["extra_args"]


@each_row("flag", ["-enable_ha=true", "-config_path=/etc/master.yaml"])
def test_a_flag_of_the_master_that_is_more_than_a_place_is_a_loss(flag: str) -> None:
    beside = {**BESIDE, "kv_store/shared.yaml": STORE.replace("-logtostderr", flag)}
    draft = imported(MODEL, "models/org/small.yaml", ImportChoice(kv_offload="shared_store"), beside)
    assert [note.at.key for note in draft.losses()] == ["shared.yaml mooncake_master.command"]
