"""Every port comes from one table; no two processes of a node get the same one."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.errors import RecipeError
from pdserve.plan.ports import TABLE
from pdserve.recipe.model import Ports as RecipePorts
from tests.plan.kit import MOONCAKE, NIXL, hosts, on_gpus, plan, recipe, with_lmcache
from tests.tables import each_row


def test_the_table_and_the_recipe_know_the_same_ports() -> None:
    assert set(TABLE) == set(RecipePorts.model_fields)


def test_a_role_that_is_alone_on_its_node_leaves_no_port_out() -> None:
    nixl = {"prefill": {"connector": NIXL}, "decode": {"connector": NIXL, "instances": 2}}
    built = plan(recipe(on_gpus(2, 1), nixl), *hosts(2, 2))
    assert [built.process(name).ports["nixl"] for name in ("prefill-0", "decode-0", "decode-1")] == [5600, 5600, 5601]


@each_row("more", ["prefill", "decode"])
def test_one_more_of_a_role_moves_no_port_of_what_was_planned(more: str) -> None:
    """Also in a plan that knows nothing of one that runs."""
    for connector in (MOONCAKE, NIXL):
        both = {"connector": connector, "instances": 2}
        few = plan(recipe({"prefill": both, "decode": both}))
        many = plan(recipe({"prefill": both, "decode": both}, {more: {"instances": 3}}))
        for process in few.processes:
            assert many.process(process.name).ports == process.ports
            assert many.process(process.name).port_ranges == process.port_ranges


@each_row(
    "ports, first, second",
    [
        ({"decode": 8100}, ("prefill-0", "ports.prefill"), ("decode-0", "ports.decode")),
        ({"proxy": 8998}, ("prefill-0", "ports.bootstrap"), ("proxy", "ports.proxy")),
        ({"lmcache": 8080}, ("lmcache-0", "ports.lmcache"), ("lmcache-0", "ports.lmcache_http")),
        ({"transfer": 8090}, ("prefill-0", "ports.prefill"), ("prefill-0", "ports.transfer")),
    ],
)
def test_a_clash_names_both_processes_and_both_keys(
    ports: dict[str, int], first: tuple[str, str], second: tuple[str, str]
) -> None:
    with pytest.raises(RecipeError) as caught:
        plan(recipe(with_lmcache(), {"ports": ports}))
    text = caught.value.render()
    for word in (*first, *second):
        assert word in text
    assert caught.value.where in (first[1], second[1])


@each_row("admin, other", [(8000, "ports.proxy"), (8080, "ports.lmcache_http")])
def test_the_port_of_the_admin_endpoints_is_checked_on_several_nodes_too(admin: int, other: str) -> None:
    sizes = {"prefill": {"instances": 2}, "decode": {"instances": 2}, "proxy": {"admin": {"port": admin}}}
    with pytest.raises(RecipeError, match=f"port {admin} on host0 goes to") as caught:
        plan(recipe(on_gpus(), with_lmcache(), sizes), *hosts(2, 2))
    assert caught.value.where == "proxy.admin.port"
    assert f"--set proxy.admin.port=PORT or --set {other}=PORT" in caught.value.render()


def test_the_same_port_on_two_nodes_is_no_clash() -> None:
    both = {"ports": {"decode": 8100}, "proxy": {"admin": {"port": 8100}}}
    with pytest.raises(RecipeError, match="port 8100 on host0"):
        plan(recipe(on_gpus(8, 8), both), *hosts(8, 8))
    built = plan(recipe(on_gpus(8, 8), {"ports": {"decode": 8100}}), *hosts(8, 8))
    assert built.process("prefill-0").ports["http"] == built.process("decode-0").ports["http"] == 8100


@each_row("change", [{"ports": {"transfer": 65500}}, {"ports": {"decode": 65535}}])
def test_ports_past_the_last_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="past 65535"):
        plan(recipe(change, {"decode": {"instances": 2, "connector": MOONCAKE}}))
