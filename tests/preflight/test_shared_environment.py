"""What an engine and its LMCache server on ROCm must have in common before they share handles to device memory."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.plan.model import Plan
from pdserve.preflight.devices import find_shared_environment
from pdserve.preflight.finding import Finding
from tests.plan.kit import hosts, on_gpus, plan, recipe, with_lmcache

MODE = "HSA_ENABLE_IPC_MODE_LEGACY"


def planned(platform: str = "rocm", engine: dict[str, Any] | None = None, **section: Any) -> Plan:
    changes = {"engine": {"env": engine or {}}}
    wanted = recipe(on_gpus(platform=platform), with_lmcache(transfer_mode="lmcache_driven", **section), changes)
    return plan(wanted, *hosts(2))


def look(wanted: Plan, **environ: str) -> list[Finding]:
    return find_shared_environment(wanted, "host0", wanted.processes, environ)


@pytest.mark.parametrize("environ", [{}, {MODE: "1"}, {MODE: "0"}])
def test_what_both_inherit_is_the_same(environ: dict[str, str]) -> None:
    [finding] = look(planned(), **environ)
    assert finding.status == "ok"


def test_a_value_of_the_engines_alone_names_both_sides_and_the_line_to_add() -> None:
    [finding] = look(planned(engine={MODE: 0}), **{MODE: "1"})
    assert (finding.status, finding.check, finding.node) == ("failed", "environment", "host0")
    assert finding.value == f"{MODE} is '0' for prefill-0 and '1' for lmcache-0"
    assert f"set lmcache.env.{MODE}: 0" in str(finding.fix)
    assert finding.where == f"engine.env.{MODE}"


def test_a_value_of_the_server_alone_is_to_be_removed() -> None:
    """A warning: the engines have the runtime's default, which may be the same."""
    [finding] = look(planned(env={MODE: 1}))
    assert finding.status == "warning"
    assert finding.value == f"{MODE} is not set for prefill-0 and '1' for lmcache-0"
    assert f"remove lmcache.env.{MODE}" in str(finding.fix)
    assert finding.where == f"lmcache.env.{MODE}"


def test_a_value_of_the_engines_where_nothing_is_inherited_is_a_warning_too() -> None:
    [finding] = look(planned(engine={MODE: 0}))
    assert (finding.status, finding.value) == ("warning", f"{MODE} is '0' for prefill-0 and not set for lmcache-0")


def test_the_same_value_written_on_both_sides_is_right() -> None:
    [finding] = look(planned(engine={MODE: 0}, env={MODE: 0}), **{MODE: "1"})
    assert finding.status == "ok"


def test_other_platforms_engines_without_lmcache_and_other_nodes_have_nothing_to_share() -> None:
    assert look(planned("cuda", engine={MODE: 0}), **{MODE: "1"}) == []
    alone = plan(recipe(on_gpus(platform="rocm")), *hosts(2))
    assert look(alone) == []
    wanted = planned(engine={MODE: 0})
    decode = [wanted.process("decode-0")]
    assert find_shared_environment(wanted, "host0", decode, {MODE: "1"}) == [], "nothing of the pair is started"
    assert find_shared_environment(wanted, "host1", wanted.processes, {MODE: "1"}) == []
