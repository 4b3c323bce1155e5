"""Patches of the LMCache server: loaded by our main, some asked for by its environment, unknown to the engines."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.errors import RecipeError
from pdserve.plan.model import Plan
from tests.plan.kit import VERSIONS, hosts, on_gpus, plan, recipe, with_lmcache

GROW = {"LMCACHE_ROCM_DEMAND_PINNED_ALLOCATOR": 1}
ALWAYS = ("lmcache-identity",)
GROWING = (*ALWAYS, "lmcache-demand-pinned", "lmcache-final-capacity")


def planned(env: dict[str, Any], version: str | None = "0.5.6", platform: str = "rocm", **changes: Any) -> Plan:
    wanted = recipe(on_gpus(platform=platform), with_lmcache(transfer_mode="lmcache_driven", env=env), changes)
    return plan(wanted, *hosts(8), versions=VERSIONS.model_copy(update={"lmcache": version}))


def without_its_own() -> Plan:
    """With a list that has all patches of engines."""
    engines = {name for process in planned({}).processes if process.role != "lmcache" for name in process.patches}
    return planned({}, patches=sorted(engines))


def test_without_patches_the_server_is_upstreams_own_and_knows_nothing_of_them() -> None:
    server = without_its_own().process("lmcache-0")
    assert server.argv[:3] == ("python", "-m", "lmcache.v1.multiprocess.http_server")
    assert server.patches == ()
    assert not [name for name in server.env.set if name.startswith("PDSERVE_")]


def test_a_command_that_does_not_load_patches_gets_none_that_nobody_has_asked_for() -> None:
    section = {**with_lmcache()["lmcache"], "command": ["numactl", "lmcache", "server"]}
    assert planned({}, lmcache=section).process("lmcache-0").patches == ()


def test_it_is_started_through_our_main_with_the_same_flags() -> None:
    plain = without_its_own().process("lmcache-0")
    for off in (planned({}), planned({"LMCACHE_ROCM_DEMAND_PINNED_ALLOCATOR": 0}), planned(GROW, platform="cuda")):
        assert off.process("lmcache-0").patches == ALWAYS
    server = planned(GROW).process("lmcache-0")
    assert server.argv[:3] == ("python", "-m", "pdserve.patches.lmcache_server_main")
    assert server.argv[3:] == plain.argv[3:]
    assert server.patches == GROWING
    assert server.env.set["PDSERVE_PATCHES"] == ",".join(GROWING)
    assert server.env.set["PDSERVE_PATCH_RECORD"] == "/run/pdserve/test/patches/lmcache-0"


def test_a_list_of_patches_that_leaves_out_what_the_environment_asks_for_is_refused() -> None:
    with pytest.raises(RecipeError, match="LMCACHE_ROCM_DEMAND_PINNED_ALLOCATOR needs the patch lmcache-demand-pinned"):
        planned(GROW, patches=["multiconnector-prom-metrics"])


def test_a_command_of_the_recipes_own_must_load_them_itself() -> None:
    with pytest.raises(RecipeError, match=r"pdserve\.patches\.lmcache_server_main, which lmcache.command replaces"):
        planned(GROW, lmcache={**with_lmcache()["lmcache"], "env": GROW, "command": ["numactl", "lmcache", "server"]})
    own = ["numactl", "python", "-m", "pdserve.patches.lmcache_server_main"]
    section = {**with_lmcache(transfer_mode="lmcache_driven")["lmcache"], "env": GROW, "command": own}
    assert planned(GROW, lmcache=section).process("lmcache-0").argv[:4] == tuple(own)


def test_unknown_code_is_allowed_for_the_server_by_name() -> None:
    server = planned(GROW, allow_unknown_upstream=["lmcache-final-capacity"]).process("lmcache-0")
    assert server.env.set["PDSERVE_PATCHES_ALLOW_UNKNOWN"] == "lmcache-final-capacity"


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


@pytest.mark.parametrize("left_out", ["lmcache-host-events", "lmcache-host-events-server"])
def test_a_list_must_name_both_halves_of_host_events(left_out: str) -> None:
    names = {name for process in planned(HOST_EVENTS).processes for name in process.patches}
    with pytest.raises(RecipeError, match=f"LMCACHE_ROCM_HOST_EVENTS needs the patch {left_out}, not in"):
        planned(HOST_EVENTS, patches=sorted(names - {left_out}))
