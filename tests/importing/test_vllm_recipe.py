"""Recipes of vLLM's collection: layers of flags for one variant, hardware, strategy and set of features."""

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
meta:
  slug: small
  hardware: {h200: verified, gb200: verified, mi300x: unsupported, xeon: verified}
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
  xeon: {brand: Intel, generation: cpu, gpu_count: 1}
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
}


def read(text: str = MODEL, **choice: Any) -> Draft:
    return imported(text, "models/org/small.yaml", ImportChoice(**choice), BESIDE)


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


def test_the_recipe_loads_and_plans(tmp_path: Path) -> None:
    for name, text in {**BESIDE, "models/org/small.yaml": MODEL}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    file = tmp_path / "models" / "org" / "small.yaml"
    recipe = import_file(file, ImportChoice(strategy="pd_cluster", hardware="gb200"), environ={}).loaded.recipe
    assert recipe.container is not None
    assert (recipe.container.kind, recipe.image, recipe.platform) == ("docker", "vllm/vllm-openai:latest", "cuda")


@each_row("choice, todo", [
    ({"variant": "other"}, "default, small4"),
    ({"strategy": "single_node_dep"}, "single_node_tp, multi_node_dep, pd_cluster"),
    ({"hardware": "mi300x"}, "h200, gb200"), ({"features": ("x",)}, "tools, spec"),
    ({"strategy": "multi_node_dep"}, "--nodes 2"),
    ({"hardware": "xeon"}, "--hardware"),
])  # fmt: skip
def test_a_choice_that_the_recipe_does_not_offer_names_those_that_it_does(choice: dict[str, Any], todo: str) -> None:
    with pytest.raises(RecipeError) as caught:
        read(**choice)
    assert todo in str(caught.value.todo)


def test_a_recipe_without_its_collection_or_for_another_server_is_refused() -> None:
    with pytest.raises(RecipeError, match="no taxonomy"):
        imported(MODEL, "small.yaml", ImportChoice())
    with pytest.raises(RecipeError, match="vLLM-Omni"):
        read(f"{MODEL}omni: {{tasks: []}}\n")
