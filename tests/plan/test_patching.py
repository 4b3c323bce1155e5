"""Which patches a plan gives to engines and LMCache servers, and what follows for their connectors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdserve.errors import RecipeError
from pdserve.patches.registry import REGISTRY
from pdserve.plan.model import Plan
from tests.plan.kit import LMCACHE, MOONCAKE, VERSIONS, aggregated, hosts, on_gpus, plan, recipe, with_lmcache
from tests.tables import each_row

CRASH = "multiconnector-prom-metrics"


def config_of(planned: Plan, process: str = "prefill-0") -> dict[str, Any]:
    argv = planned.process(process).argv
    config: dict[str, Any] = json.loads(argv[argv.index("--kv-transfer-config") + 1])
    return config


def lmcache_child(planned: Plan) -> dict[str, Any]:
    children = config_of(planned)["kv_connector_extra_config"]["connectors"]
    (child,) = [connector for connector in children if connector["kv_connector"] == "LMCacheMPConnector"]
    connector: dict[str, Any] = child
    return connector


def on_child(**settings: Any) -> dict[str, Any]:
    return {"prefill": {"connector": {"kind": "multi", "of": [MOONCAKE, {**LMCACHE, **settings}]}}}


def test_unknown_upstream_code_is_allowed_for_patches_that_there_are() -> None:
    with pytest.raises(RecipeError, match="there is no patch named 'multi'") as caught:
        plan(recipe(with_lmcache(), {"allow_unknown_upstream": ["multi"]}))
    assert caught.value.where == "allow_unknown_upstream"


def test_settings_reach_the_connector_that_they_are_about() -> None:
    child = {**on_child(max_tokens_per_load=512, min_load_tokens=256, load_weight=0.5)}
    planned = plan(recipe(with_lmcache(), child, {"prefill": {"load_timeout_seconds": 7}}))
    assert config_of(planned)["kv_connector_extra_config"]["load_timeout_seconds"] == 7
    extra = lmcache_child(planned)["kv_connector_extra_config"]
    assert (extra["pdserve.max_tokens_per_load"], extra["pdserve.min_load_tokens"]) == (512, 256)
    assert extra["load_weight"] == 0.5


def test_a_setting_whose_patch_is_not_in_the_list_is_refused() -> None:
    (cap,) = [patch for patch in REGISTRY if "max_tokens_per_load" in patch.settings]
    others = [patch.name for patch in REGISTRY if patch.name != cap.name]
    with pytest.raises(RecipeError, match=f"the setting max_tokens_per_load needs the patch {cap.name}"):
        plan(recipe(with_lmcache(), on_child(max_tokens_per_load=512), {"patches": others}))


@pytest.mark.parametrize(
    ("patches", "module"),
    [("auto", "pdserve.connectors.lmcache_mp"), ("others", "lmcache.integration.vllm.lmcache_mp_connector")],
)
def test_lmcache_alone_gives_locks_back_by_our_class_unless_a_list_leaves_it_out(patches: str, module: str) -> None:
    """Without MultiConnector nobody else would."""
    others = [patch.name for patch in REGISTRY if patch.vehicle != "subclass"]
    chosen = {"patches": "auto" if patches == "auto" else others}
    planned = plan(recipe(aggregated(), chosen))
    assert ("lmcache-lookup-locks" in planned.process("aggregated-0").patches) == (patches == "auto")
    assert config_of(planned, "aggregated-0")["kv_connector_module_path"] == module


def test_a_raw_multi_gets_the_patch_for_whatever_its_children_are_called() -> None:
    store, mooncake = {"kv_connector": "MooncakeStoreConnector"}, {"kv_connector": "MooncakeConnector"}
    nixl = {"kv_connector": "NixlConnector"}

    def chosen(*children: dict[str, Any]) -> tuple[str, ...]:
        both = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": list(children)}}
        raw = {"connector": {"kind": "raw", "config": both}}
        return plan(recipe({"prefill": raw, "decode": raw})).process("prefill-0").patches

    for children in ((mooncake, store), (nixl, store), (nixl, {"kv_connector": "OtherConnector"})):
        assert CRASH in chosen(*children)
    assert CRASH not in chosen(nixl, nixl)
    subclasses = {patch.name for patch in REGISTRY if patch.vehicle == "subclass"}
    assert not subclasses & set(chosen(mooncake)), "its author chose the class"


@each_row("changes, cap, least", [
    ({}, None, None),
    (on_child(max_tokens_per_load=512, min_load_tokens=256), 512, 256),
    ({"prefill": {"env": {"CHUNKED_LMCACHE_MAX_TOKENS_PER_LOAD": 1024}}}, 1024, None),
    ({"prefill": {"env": {"CHUNKED_LMCACHE_MAX_TOKENS_PER_LOAD": "0"}}}, None, None),
])  # fmt: skip
def test_the_plan_sets_how_much_of_a_prompt_is_reloaded(
    changes: dict[str, Any], cap: int | None, least: int | None
) -> None:
    planned = plan(recipe(with_lmcache(), changes))
    assert (planned.max_tokens_per_load, planned.min_load_tokens) == (cap, least)


GROW = {"LMCACHE_ROCM_DEMAND_PINNED_ALLOCATOR": 1}
ALWAYS = ("lmcache-identity",)
GROWING = (*ALWAYS, "lmcache-demand-pinned", "lmcache-final-capacity")


def planned(env: dict[str, Any], version: str | None = "0.5.6", platform: str = "rocm", **changes: Any) -> Plan:
    wanted = recipe(on_gpus(platform=platform), with_lmcache(transfer_mode="lmcache_driven", env=env), changes)
    return plan(wanted, *hosts(8), versions=VERSIONS.model_copy(update={"lmcache": version}))


def test_its_main_is_ours_with_the_same_flags_unless_a_list_leaves_its_patches_out() -> None:
    engines = {name for process in planned({}).processes if process.role != "lmcache" for name in process.patches}
    plain = planned({}, patches=sorted(engines)).process("lmcache-0")
    assert plain.argv[:3] == ("python", "-m", "lmcache.v1.multiprocess.http_server")
    assert plain.patches == ()
    assert not [name for name in plain.env.set if name.startswith("PDSERVE_")]
    for off in (planned({}), planned({"LMCACHE_ROCM_DEMAND_PINNED_ALLOCATOR": 0}), planned(GROW, platform="cuda")):
        assert off.process("lmcache-0").patches == ALWAYS
    server = planned(GROW).process("lmcache-0")
    assert server.argv[:3] == ("python", "-m", "pdserve.patches.lmcache_server_main")
    assert server.argv[3:] == plain.argv[3:]
    assert server.patches == GROWING
    assert server.env.set["PDSERVE_PATCHES"] == ",".join(GROWING)


def test_a_command_of_the_recipes_own_must_load_them_itself() -> None:
    with pytest.raises(RecipeError, match=r"pdserve\.patches\.lmcache_server_main, which lmcache.command replaces"):
        planned(GROW, lmcache={**with_lmcache()["lmcache"], "env": GROW, "command": ["numactl", "lmcache", "server"]})
    unasked = {**with_lmcache()["lmcache"], "command": ["numactl", "lmcache", "server"]}
    assert planned({}, lmcache=unasked).process("lmcache-0").patches == ()
    own = ["numactl", "python", "-m", "pdserve.patches.lmcache_server_main"]
    section = {**with_lmcache(transfer_mode="lmcache_driven")["lmcache"], "env": GROW, "command": own}
    assert planned(GROW, lmcache=section).process("lmcache-0").argv[:4] == tuple(own)


HOST_EVENTS = {"LMCACHE_ROCM_HOST_EVENTS": 1}


def test_host_events_are_for_both_sides_or_neither() -> None:
    """A side that sends marks and one that opens handles cannot talk."""
    on = planned(HOST_EVENTS)
    assert on.process("lmcache-0").patches == (*ALWAYS, "lmcache-host-events-server")
    assert "lmcache-host-events" in on.process("prefill-0").patches
    assert "lmcache-host-events" not in on.process("decode-0").patches, "it has no LMCache"
    for env, platform in (({}, "rocm"), ({"LMCACHE_ROCM_HOST_EVENTS": 0}, "rocm"), (HOST_EVENTS, "cuda")):
        off = planned(env, platform=platform)
        assert not [name for process in off.processes for name in process.patches if "host-events" in name]


@each_row("env, left_out", [
    (GROW, "lmcache-demand-pinned"), (HOST_EVENTS, "lmcache-host-events"), (HOST_EVENTS, "lmcache-host-events-server"),
])  # fmt: skip
def test_a_list_of_patches_that_leaves_out_what_the_environment_asks_for_is_refused(
    env: dict[str, Any], left_out: str
) -> None:
    names = {name for process in planned(env).processes for name in process.patches}
    with pytest.raises(RecipeError, match=f"{next(iter(env))} needs the patch {left_out}, not in"):
        planned(env, patches=sorted(names - {left_out}))
