"""The plan as a whole: stages, probes, the proxy's part, what stays open."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import pdserve.plan
from pdserve.pd.config.proxy import ProxyConfig, WorkerConfig
from pdserve.plan.model import Exposure
from pdserve.plan.node import Node
from pdserve.plan.process import HttpProbe
from tests.plan.kit import MOONCAKE, MULTI, NIXL, aggregated, hosts, on_gpus, plan, recipe, with_lmcache


def test_lmcache_starts_first_and_the_proxy_beside_the_engines() -> None:
    built = plan(recipe(with_lmcache()))
    assert {p.name: p.start_stage for p in built.processes} == {
        "lmcache-0": 0,
        "prefill-0": 1,
        "decode-0": 1,
        "proxy": 1,
    }


def test_they_stop_from_the_client_inwards() -> None:
    built = plan(recipe(with_lmcache()))
    order = sorted(built.processes, key=lambda process: process.stop_stage)
    assert [p.name for p in order] == ["proxy", "decode-0", "prefill-0", "lmcache-0"]
    assert len({p.stop_stage for p in built.processes}) == 4


def test_every_process_has_a_log_of_its_own() -> None:
    built = plan(recipe(on_gpus(8, 8)), *hosts(8, 8))
    assert [p.log for p in built.processes] == [
        "logs/prefill-0@host0.log",
        "logs/decode-0@host1.log",
        "logs/proxy@host0.log",
    ]


def test_engines_and_the_proxy_are_probed_where_they_listen() -> None:
    built = plan(recipe(on_gpus(8, 8)), *hosts(8, 8))
    assert built.process("decode-0").probe == HttpProbe(host="192.0.2.2", port=8200, path="/health")
    assert built.process("proxy").probe == HttpProbe(host="127.0.0.1", port=8000, path="/health")


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


def test_each_process_gets_the_interpreter_of_its_node() -> None:
    here = ("weights-0", "lmcache-0", "prefill-0", "proxy")
    there = ("weights-1", "lmcache-1", "decode-0")
    assert interpreters() == {**dict.fromkeys(here, "/a/python"), **dict.fromkeys(there, "/b/python")}


def test_the_interpreter_of_the_recipe_wins_for_all_but_the_proxy() -> None:
    got = interpreters({"engine": {"python": "/vllm/python"}})
    assert got.pop("proxy") == "/a/python"
    assert set(got.values()) == {"/vllm/python"}


@pytest.mark.parametrize(("host", "probed"), [("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("192.0.2.7", "192.0.2.7")])
def test_a_proxy_for_everybody_is_probed_on_loopback(host: str, probed: str) -> None:
    probe = plan(recipe({"proxy": {"host": host}})).process("proxy").probe
    assert isinstance(probe, HttpProbe)
    assert probe.host == probed


def test_each_stage_has_the_recipes_time() -> None:
    timeouts = {"lmcache_seconds": 11, "engine_seconds": 12, "proxy_seconds": 13, "stop_seconds": 4}
    built = plan(recipe(with_lmcache(), {"timeouts": timeouts}))
    assert [(p.name, p.ready_seconds) for p in built.processes] == [
        ("lmcache-0", 11),
        ("prefill-0", 12),
        ("decode-0", 12),
        ("proxy", 13),
    ]
    assert built.process("decode-0").stop_seconds == 4


def test_the_proxy_may_drain_before_it_is_killed() -> None:
    assert plan(recipe({"proxy": {"drain_seconds": 90}})).process("proxy").stop_seconds > 90


def test_the_proxy_gets_its_configuration_as_a_file_and_its_news_on_stdin() -> None:
    built = plan(recipe({"prefill": {"instances": 2}}))
    proxy = built.process("proxy")
    assert proxy.argv == ("python", "-m", "pdserve.proxy", "--config", "/run/pdserve/test/proxy.json")
    assert proxy.control == "stdin"
    assert ProxyConfig.model_validate_json(proxy.files["proxy.json"]) == built.proxy


def test_the_proxy_knows_every_instance() -> None:
    built = plan(recipe(on_gpus(8, 8), {"prefill": {"instances": 2}}), *hosts(8, 8, 8))
    assert built.proxy.workers == (
        WorkerConfig(
            name="prefill-0", role="prefill", url="http://192.0.2.1:8100", bootstrap_url="http://192.0.2.1:8998"
        ),
        WorkerConfig(
            name="prefill-1", role="prefill", url="http://192.0.2.2:8100", bootstrap_url="http://192.0.2.2:8998"
        ),
        WorkerConfig(name="decode-0", role="decode", url="http://192.0.2.3:8200"),
    )


def test_addresses_of_ipv6_are_bracketed() -> None:
    built = plan(recipe(), Node(name="six", address="2001:db8::1"))
    assert built.proxy.workers[1].url == "http://[2001:db8::1]:8200"


def test_the_proxy_knows_how_many_transfers_a_prefill_runs() -> None:
    many = {**MOONCAKE, "num_workers": 32}
    assert plan(recipe({"prefill": {"connector": many}})).proxy.transfer_slots == 64
    assert plan(recipe()).proxy.transfer_slots == 20


@pytest.mark.parametrize(("connector", "protocol"), [(MOONCAKE, "mooncake"), (NIXL, "nixl")])
def test_the_proxy_speaks_the_connectors_protocol(connector: dict[str, str], protocol: str) -> None:
    change = {"prefill": {"connector": connector}, "decode": {"connector": connector}}
    assert plan(recipe(change)).proxy.protocol == protocol


def test_an_aggregated_deployment_has_one_role() -> None:
    built = plan(recipe(aggregated(instances=2)))
    assert built.names() == ("lmcache-0", "aggregated-0", "aggregated-1", "proxy")
    assert built.proxy.protocol == "aggregated"
    assert {w.bootstrap_url for w in built.proxy.workers} == {None}


def test_the_model_is_one_string_for_all_because_lmcache_keys_contain_it() -> None:
    built = plan(recipe({"model": {"path": "../models/tiny"}}))
    assert built.model == built.model_path == "/srv/models/tiny"
    assert {p.argv[4] for p in built.processes if p.role in ("prefill", "decode")} == {"/srv/models/tiny"}


def test_what_is_open_without_the_key_is_listed() -> None:
    built = plan(recipe(with_lmcache(), {"engine": {"cache_reset_endpoint": True}}))
    open_ports = {(e.process, e.address, e.port, e.last_port) for e in built.exposed}
    assert open_ports == {
        ("lmcache-0", "127.0.0.1", 5555, None),
        ("lmcache-0", "127.0.0.1", 8080, None),
        ("prefill-0", "127.0.0.1", 8100, None),
        ("prefill-0", "0.0.0.0", 8998, None),
        ("prefill-0", "0.0.0.0", 15000, 15099),
        ("prefill-0", "127.0.0.1", 0, None),
        ("decode-0", "127.0.0.1", 8200, None),
        ("decode-0", "0.0.0.0", 15100, 15199),
        ("proxy", "127.0.0.1", 8000, None),
    }
    assert [e for e in built.exposed if e.process == "prefill-0" and "development endpoints" in e.what]


def test_every_pinned_port_is_listed_as_open() -> None:
    change = {
        "prefill": {"connector": NIXL, "parallel": {"tp": 2, "dp": 2, "nodes": 2}},
        "decode": {"connector": NIXL},
    }
    built = plan(recipe(on_gpus(), change), *hosts(4, 4))

    def covers(entry: Exposure, port: int) -> bool:
        return entry.port <= port <= (entry.last_port or entry.port)

    for process in built.processes:
        for port in process.ports.values():
            assert [e for e in built.exposed if e.process == process.name and covers(e, port)]


@pytest.mark.process
def test_planning_imports_no_engine() -> None:
    code = (
        "import sys, pdserve.plan.build, pdserve.plan.bash; "
        "print([m for m in ('vllm', 'lmcache', 'mooncake', 'torch', 'fastapi') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


IMPURE = {
    "os",
    "pathlib",
    "time",
    "datetime",
    "random",
    "uuid",
    "secrets",
    "socket",
    "subprocess",
    "shutil",
    "tempfile",
}


def test_planning_cannot_read_files_clocks_or_the_environment() -> None:
    """None of its modules imports anything that could."""
    for path in Path(pdserve.plan.__path__[0]).glob("*.py"):
        imported = {
            (node.module if isinstance(node, ast.ImportFrom) else alias.name)
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        assert not {(name or "").partition(".")[0] for name in imported} & IMPURE, path.name
