"""What the proxy is told, and what engines are told for its sake."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdserve.pd.config.proxy import ProxyConfig
from pdserve.pd.config.settings import AuthSettings, PoolLimits, UpstreamTlsSettings
from pdserve.plan.node import Local, Node, Reach, Srun
from tests.plan.kit import aggregated, hosts, on_gpus, plan, recipe, value_of

EVENTS = {"proxy": {"routing": {"decode": {"kind": "kv_events"}}}}


def test_every_section_of_the_recipe_reaches_the_proxy() -> None:
    section = {
        "workers": 3,
        "routing": {"prefill": {"kind": "prefix_aware"}},
        "on_empty_pool": "aggregate",
        "admission": {"decode": {"max_requests": 7}},
        "breaker": {"failures": 2},
        "health": {"failures": 9},
        "limits": {"max_connections": 11},
        "log": "json",
        "otel": {"endpoint": "http://collector:4318/v1/traces"},
    }
    proxy = plan(recipe({"proxy": section})).proxy
    assert proxy.processes == 3
    assert proxy.routing.prefill.kind == "prefix_aware"
    assert proxy.on_empty_pool == "aggregate"
    assert proxy.admission.decode == PoolLimits(max_requests=7)
    assert (proxy.breaker.failures, proxy.health.failures, proxy.limits.max_connections) == (2, 9, 11)
    assert proxy.log == "json"
    assert proxy.otel is not None
    assert proxy.otel.endpoint == "http://collector:4318/v1/traces"


def test_a_configuration_of_the_least_is_complete() -> None:
    """One that was written before these sections existed is still read, and means the same."""
    config = plan(recipe()).proxy
    least = {name: value for name, value in config.model_dump(mode="json").items() if name in _LEAST}
    assert ProxyConfig.model_validate_json(json.dumps(least)) == config


@pytest.mark.parametrize(
    ("reach", "changes", "place"),
    [
        (Local(), {}, ""),
        (Srun(job="1", kill_wait=30), {}, " on gpu1 only (proxy.host opens it to others)"),
        (Srun(job="1", kill_wait=30), {"proxy": {"host": "0.0.0.0"}}, ""),
    ],
    ids=["this machine", "the node of a job", "open to others"],
)
def test_a_loopback_address_is_shown_with_its_node_where_that_is_another_machine(
    reach: Reach, changes: dict[str, Any], place: str
) -> None:
    node = Node(name="gpu1", address="10.1.0.1", reach=reach)
    assert plan(recipe(changes), node).proxy_place == place


_LEAST = (
    "host", "port", "served_name", "protocol", "workers", "request_timeout_seconds", "connect_timeout_seconds",
    "drain_seconds", "max_body_bytes",
)  # fmt: skip


def test_files_are_named_from_the_recipes_folder_and_the_socket_from_the_run_directory() -> None:
    built = plan(
        recipe(
            {
                "proxy": {
                    "auth": {"keys_file": "../keys.jsonl"},
                    "tls": {"certificate": "/etc/c.pem", "key": "k.pem"},
                    "upstream_tls": {"ca": "ca.pem", "certificate": "/etc/our.pem", "key": "our.key"},
                    "admin": {"socket": "admin.sock", "token_file": "token"},
                }
            }
        )
    ).proxy
    assert built.auth == AuthSettings(keys_file="/srv/keys.jsonl")
    assert built.tls is not None
    assert (built.tls.certificate, built.tls.key) == ("/etc/c.pem", "/srv/recipes/k.pem")
    assert built.upstream_tls == UpstreamTlsSettings(
        ca="/srv/recipes/ca.pem", certificate="/etc/our.pem", key="/srv/recipes/our.key"
    )
    assert built.admin is not None
    assert (built.admin.socket, built.admin.token_file) == ("/run/pdserve/test/admin.sock", "/srv/recipes/token")


def test_the_admin_port_is_a_port_of_the_proxy() -> None:
    built = plan(recipe({"proxy": {"admin": {"port": 9000, "token_file": "t"}}}))
    assert built.process("proxy").ports == {"http": 8000, "admin": 9000}
    assert [(e.port, e.what) for e in built.exposed if e.process == "proxy"] == [
        (8000, "the OpenAI API: clients need no key"),
        (9000, "admin of the proxy: workers, reloading; asks for its token"),
    ]


def test_with_keys_clients_need_one() -> None:
    built = plan(recipe({"proxy": {"auth": {"keys_file": "k"}}}))
    assert built.exposed[-1].what == "the OpenAI API: clients need a key"


def test_engines_publish_events_only_for_a_policy_that_listens() -> None:
    built = plan(recipe(EVENTS, {"decode": {"instances": 2}}))
    assert "--kv-events-config" not in built.process("prefill-0").argv
    assert built.proxy.workers[0].kv_events_url is None
    for index, port in ((0, 5700), (1, 5702)):
        process = built.process(f"decode-{index}")
        assert json.loads(value_of(process, "--kv-events-config")) == {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{port}",
            "replay_endpoint": f"tcp://*:{port + 1}",
        }
        assert "--enable-prefix-caching" in process.argv
        worker = built.proxy.workers[1 + index]
        assert worker.kv_events_url == f"tcp://127.0.0.1:{port}"
        assert worker.kv_replay_url == f"tcp://127.0.0.1:{port + 1}"


def test_every_rank_has_a_port_to_publish_and_one_to_repeat() -> None:
    parallel = {"decode": {"parallel": {"dp": 4}}}
    built = plan(recipe(on_gpus(), EVENTS, parallel), *hosts(8, 8))
    ports = built.process("decode-0").ports
    assert [port for name, port in ports.items() if name.startswith("kv_events")] == list(range(5700, 5708))
    config = json.loads(value_of(built.process("decode-0"), "--kv-events-config"))
    assert (config["endpoint"], config["replay_endpoint"]) == ("tcp://*:5700", "tcp://*:5704")


def test_the_content_of_events_is_shown_among_what_is_open() -> None:
    entries = [entry for entry in plan(recipe(EVENTS)).exposed if "KV events" in entry.what]
    assert [(e.process, e.address, e.port, e.last_port) for e in entries] == [("decode-0", "0.0.0.0", 5700, 5701)]


@pytest.mark.parametrize("kind", ["round_robin", "least_loaded", "power_of_two", "prefix_aware"])
def test_other_policies_change_nothing_about_engines(kind: str) -> None:
    routing = {"proxy": {"routing": {"aggregated": {"kind": kind}}}}
    assert plan(recipe(aggregated(), routing)).process("aggregated-0") == plan(recipe(aggregated())).process(
        "aggregated-0"
    )
