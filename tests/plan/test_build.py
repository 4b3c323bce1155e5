"""The plan as a whole beyond the golden files: interpreters, probes, open ports, and that planning reads nothing."""

from __future__ import annotations

from typing import Any

from pdserve.pd.config.proxy import ProxyConfig
from pdserve.plan.node import Node
from pdserve.plan.process import HttpProbe
from tests.plan.kit import MULTI, hosts, on_gpus, plan, recipe, with_lmcache
from tests.plan.shapes import SHAPES, shape
from tests.tables import each_row


def interpreters(*changes: dict[str, Any]) -> dict[str, str]:
    """Of each process, where the interpreters of two nodes differ and the second one's is in a container."""
    first, second = hosts(8, 8)
    first = first.model_copy(update={"command": ("/a/python",)})
    second = second.model_copy(update={"command": ("docker", "run", "image", "/b/python")})
    model = {"model": {"path": None, "id": "org/x"}}
    cached = {"decode": {"connector": MULTI}}
    made = recipe(on_gpus(8, 8), model, with_lmcache(on=["prefill", "decode"]), cached, *changes)
    built = plan(made, first, second)
    return {process.name: process.argv[0] for process in built.processes}


def test_each_process_gets_the_interpreter_of_its_node_or_of_the_recipe_but_for_the_proxy() -> None:
    here = ("weights-0", "lmcache-0", "prefill-0", "proxy")
    there = ("weights-1", "lmcache-1", "decode-0")
    assert interpreters() == {**dict.fromkeys(here, "/a/python"), **dict.fromkeys(there, "/b/python")}
    own = interpreters({"engine": {"python": "/vllm/python"}})
    assert own.pop("proxy") == "/a/python"
    assert set(own.values()) == {"/vllm/python"}


@each_row("host, probed", [("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("192.0.2.7", "192.0.2.7")])
def test_a_proxy_for_everybody_is_probed_on_loopback(host: str, probed: str) -> None:
    probe = plan(recipe({"proxy": {"host": host}})).process("proxy").probe
    assert isinstance(probe, HttpProbe)
    assert probe.host == probed


@each_row("name", SHAPES)
def test_the_proxys_file_is_its_configuration(name: str) -> None:
    built = shape(name)
    assert ProxyConfig.model_validate_json(built.process("proxy").files["proxy.json"]) == built.proxy


def test_addresses_of_ipv6_are_bracketed() -> None:
    built = plan(recipe(), Node(name="six", address="2001:db8::1"))
    assert built.proxy.workers[1].url == "http://[2001:db8::1]:8200"
    assert plan(recipe({"proxy": {"host": "::1"}})).proxy_url == "http://[::1]:8000"


@each_row("name", SHAPES)
def test_every_pinned_port_is_listed_as_open(name: str) -> None:
    built = shape(name)
    for process in built.processes:
        opened = [(e.port, e.last_port or e.port) for e in built.exposed if e.process == process.name]
        for port in process.ports.values():
            assert any(first <= port <= last for first, last in opened), (process.name, port)
