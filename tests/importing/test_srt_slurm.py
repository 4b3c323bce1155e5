"""Recipes of srt-slurm, both schemas, become recipes that serve the same."""

from __future__ import annotations

from pathlib import Path

from pdserve.importing.departure import departures
from pdserve.recipe.connectors.nixl import NixlSection
from tests.importing.kit import NIXL, SCHEMA_1, SCHEMA_2, notes, read, refused, whole
from tests.tables import each_row

STORE = """\
  mooncake_kv_store:
    default_kv_lease_ttl_ms: 20000
    env: {MC_TE_METRIC: "0"}
    master_extra_args: [--eviction_ratio=0.10]
    store_config:
      metadata_server: P2PHANDSHAKE
      global_segment_size: 96GB
      local_buffer_size: 4GB
      protocol: rdma
      device_name: mlx5_0,mlx5_1
"""
MULTI = (
    '{"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute", '
    '"kv_connector_extra_config": {"connectors": [{"kv_connector": "NixlConnector", "kv_role": "kv_both"}, '
    '{"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both", '
    '"kv_connector_extra_config": {"load_async": true, "lookup_async": true}}]}}'
)


def test_the_roles_the_model_and_the_job_are_carried_over(tmp_path: Path) -> None:
    recipe = whole(SCHEMA_1, tmp_path).loaded.recipe
    assert recipe.name == "small-model-1p2d"
    assert (recipe.platform, recipe.devices_per_node, recipe.mode) == ("cuda", 4, "disaggregated")
    assert (recipe.model.id, recipe.model.served_name) == ("org/small-model", "small-model")
    assert recipe.prefill is not None
    assert recipe.decode is not None
    assert (recipe.prefill.instances, recipe.decode.instances) == (1, 2)
    prefill, decode = recipe.prefill.parallel, recipe.decode.parallel
    assert (prefill.tp, prefill.dp, prefill.ep, prefill.nodes) == (1, 4, True, 1)
    assert (decode.tp, decode.dp, decode.ep, decode.nodes) == (8, 1, False, 2)
    assert recipe.prefill.args == {
        "enable-prefix-caching": False,
        "max-model-len": 4096,
        "compilation-config": {"cudagraph_mode": "PIECEWISE"},
    }
    assert recipe.decode.args == {"max-model-len": 4096, "max-num-seqs": 64}
    assert recipe.prefill.env == {"NCCL_CUMEM_ENABLE": "1", "CACHE_DIR": "/tmp/cache-local"}
    assert recipe.prefill.connector == recipe.decode.connector == NixlSection()
    assert recipe.engine.hash_seed == 7
    assert recipe.timeouts.engine_seconds == 3600
    assert (recipe.slurm.time, recipe.slurm.options, recipe.exclude_nodes) == ("8:00:00", ["--mem=0"], ["gpu7"])
    assert recipe.container is not None
    assert (recipe.container.kind, recipe.image) == ("pyxis", "registry.example/vllm:v1")


def test_schema_2_says_the_same_as_schema_1(tmp_path: Path) -> None:
    assert departures(whole(SCHEMA_1, tmp_path).loaded.recipe, whole(SCHEMA_2, tmp_path).loaded.recipe) == []


@each_row("text", [SCHEMA_1, SCHEMA_2])
def test_what_was_not_carried_over_is_listed_with_its_reason(text: str) -> None:
    draft = read(text)
    assert draft.losses() == []
    lists = {"replaced": notes(draft, "replaced"), "unused": notes(draft, "unused")}
    assert {"frontend", "benchmark", "model.precision", "environment.ETCD_LEASE_TTL"} <= lists["unused"].keys()
    ends = {key.rpartition(".")[2] for key in lists["replaced"]}
    assert {"VLLM_SERVER_DEV_MODE", "data-parallel-rpc-port", "enable-expert-parallel"} <= ends


@each_row("text", [SCHEMA_1, SCHEMA_2])
def test_each_value_of_the_file_is_in_the_recipe_or_in_a_list(text: str) -> None:
    """A key that nobody expects is not lost either: it counts as something that changes what is served."""
    draft = read(text + "wholly_new: {nested: 1}\n")
    assert [note.at.key for note in draft.losses()] == ["wholly_new.nested"]


SEQS, LENGTH = "max-num-seqs: 64", "max-model-len: 4096\n      max-num-seqs"


@each_row("old, new, role, found", [
    # srtctl passes nothing for it, and a recipe would pass --no-enforce-eager.
    (SEQS, "enforce-eager: false", "decode", {"max-model-len": 4096}),
    (LENGTH, "max-model-len: 2048\n      max-num-seqs", "decode", {"max-model-len": 2048, "max-num-seqs": 64}),
    (SEQS, "dyn-tool-call-parser: minimax_m3", "decode",
     {"max-model-len": 4096, "tool-call-parser": "minimax_m3", "enable-auto-tool-choice": True}),
])  # fmt: skip
def test_what_means_the_same_by_another_word_is_no_loss(old: str, new: str, role: str, found: object) -> None:
    draft = read(SCHEMA_1.replace(old, new))
    assert draft.document[role]["args"] == found
    assert draft.losses() == []
    assert draft.document["prefill"]["args"]["max-model-len"] == draft.document["decode"]["args"]["max-model-len"]


@each_row("old, new, key, why", [
    (LENGTH, "max-model-len: 8192\n      max-num-seqs", "max-model-len", "both roles must have the same: 4096"),
    (SEQS, "dyn-thing: x", "dyn-thing", "vLLM has none like"),
    ("/tmp/cache-{job_id}", "/tmp/{node}", "CACHE_DIR", "{node} is filled in by srtctl"),
    ("gpus_per_decode: 8", "gpus_per_decode: 16", "gpus_per_decode", "its flags use 8: pdserve gives it 8"),
    ("gpus_per_decode: 8", "gpus_per_decode: all", "gpus_per_decode", "devices for an instance"),
    ("tensor-parallel-size: 8", "tensor-parallel-size: auto", "tensor-parallel-size", '"auto" is no number of ranks'),
    ("decode_workers: 2", "decode_workers: many", "decode_workers", "no number of instances"),
    ("slurm:", "setup_script: other.sh\nslurm:", "setup_script", "setup: [[bash, /configs/other.sh]]"),
    ("slurm:", "setup_script: 'x -H \"Bearer hunter2\"'\nslurm:", "setup_script", "setup: [[bash, /configs/FILE]]"),
])  # fmt: skip
def test_what_a_recipe_cannot_have_is_a_loss_with_its_reason(old: str, new: str, key: str, why: str) -> None:
    assert old in SCHEMA_1
    found = [note.why for note in read(SCHEMA_1.replace(old, new)).losses() if note.at.key.endswith(key)]
    assert found
    assert why in found[0]
    assert "hunter2" not in found[0]


@each_row("old, new, key", [
    ("hf:org/small-model", "small", "model.path"),
    ("registry.example/vllm:v1", "nightly", "model.container"),
    ("slurm:", "container_mounts:\n  /data: /data\n  $HOME/x: /x\nslurm:", "container_mounts.$HOME/x"),
])  # fmt: skip
def test_what_the_file_leaves_to_its_site_is_to_be_confirmed(old: str, new: str, key: str) -> None:
    draft = read(SCHEMA_1.replace(old, new))
    assert list(notes(draft, "confirm")) == [key]
    assert draft.document["model"]["id"] in ("small", "org/small-model")
    assert draft.document["container"].get("mounts", ["/data:/data"]) == ["/data:/data"]


def test_the_setup_script_that_is_known_installs_numactl_where_it_is_needed() -> None:
    known = f"{SCHEMA_1}setup_script: vllm-container-deps.sh\n"
    assert "setup" not in read(known).document
    bound = read(known.replace(SEQS, "numa-bind: true"))
    assert [words[0] for words in bound.document["setup"]] == ["apt-get", "apt-get"]
    assert bound.losses() == []


def test_a_store_beside_nixl_becomes_sections(tmp_path: Path) -> None:
    text = SCHEMA_1.replace(NIXL, MULTI).replace("  connector: null\n", f"  connector: null\n{STORE}")
    recipe = whole(text.replace("      no-enable-prefix-caching: true\n", ""), tmp_path)
    assert recipe.draft.losses() == []
    assert recipe.draft.document["prefill"]["connector"] == {
        "kind": "multi",
        "of": [{"kind": "nixl"}, {"kind": "mooncake-store"}],
    }
    assert recipe.draft.document["prefill"]["kv_load_failure_policy"] == "recompute"
    store = recipe.loaded.recipe.mooncake_store
    assert store is not None
    assert (store.segment_gib, store.buffer_gib, store.device_name) == (96, 4, "mlx5_0,mlx5_1")
    assert store.extra_args == {"eviction_ratio": 0.1, "default_kv_lease_ttl": 20000}


def test_a_service_of_lmcache_becomes_its_section(tmp_path: Path) -> None:
    child = (
        '{"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", '
        '"kv_connector_extra_config": {"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": 8750}}'
    )
    both = (
        '{"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"connectors": ['
        f"{NIXL}, {child}]}}}}"
    )
    service = '  - {name: l, type: lmcache-server, args: [--l1-size-gb, "16", --chunk-size, "256", --l1-align, "8"]}\n'
    text = SCHEMA_2.replace(NIXL, both, 1).replace("      no-enable-prefix-caching: true\n", "")
    recipe = whole(text.replace("services:\n", f"services:\n{service}"), tmp_path)
    assert recipe.draft.losses() == []
    assert recipe.draft.document["lmcache"] == {
        "l1_size_gb": 16,
        "chunk_size": 256,
        "extra_args": {"l1-align": 8},
        "on": ["prefill"],
    }
    assert any(key.endswith("lmcache.mp.port") for key in notes(recipe.draft, "replaced"))


def test_a_secret_is_named_and_its_value_is_nowhere(tmp_path: Path) -> None:
    text = SCHEMA_1.replace('NCCL_CUMEM_ENABLE: "1"', "HF_TOKEN: hf_abcdefghijklmnopqrstuvwxyz")
    recipe = whole(text, tmp_path)
    assert recipe.draft.document["prefill"]["env"]["HF_TOKEN"] == {"secret": "HF_TOKEN"}
    assert "abcdefghij" not in recipe.text


@each_row("old, new, what", [
    ("type: vllm", "type: sglang", "the engine is sglang"),
    ("name: Small", "schema: 3\nname: Small", "schema 3"),
    (SCHEMA_1, "just text", "no mapping"), (SCHEMA_1, "a: [1", "not YAML: while parsing a flow sequence"),
    (SCHEMA_1, "a: 1\n\0", "not YAML"), (SCHEMA_1, "a: &x [*x]", "nested too deeply"),
    (SCHEMA_1, "name: a\nbackend: " + "{a: " * 200 + "1" + "}" * 200, "nested too deeply"),
    (SCHEMA_1, "services: {}", "no launch"),
])  # fmt: skip
def test_what_is_no_deployment_of_vllm_is_refused(old: str, new: str, what: str) -> None:
    assert old in SCHEMA_1
    assert what in str(refused(SCHEMA_1.replace(old, new)))


def test_roles_without_a_connector_are_refused() -> None:
    text = "\n".join(line for line in SCHEMA_1.splitlines() if "kv-transfer-config" not in line)
    assert "no KV connector" in refused(text).what


def test_srt_slurms_default_connector_is_nixl() -> None:
    without = ("kv-transfer-config", "connector: null")
    lines = [line for line in SCHEMA_1.splitlines() if not any(word in line for word in without)]
    assert read("\n".join(lines)).document["decode"]["connector"] == {"kind": "nixl"}
