"""`proxy.kind: vllm-router`: what the router has too is taken, everything else is refused by its key."""

from __future__ import annotations

from pathlib import Path

from tests.recipe.kit import AGGREGATED, CPU, load, refused
from tests.tables import each_row

ROUTER = "proxy.kind=vllm-router"
NIXL = ("prefill.connector={kind: nixl}", "decode.connector={kind: nixl}", "lmcache=null")


@each_row("set_", [
    (), NIXL, ("proxy.host=::1",),
    ("proxy.command=[/opt/router/bin/vllm-router]",),
    ("proxy.request_timeout_seconds=60", "proxy.drain_seconds=1.5", "proxy.max_body_bytes=1000"),
    ("proxy.health={interval_seconds: 5, timeout_seconds: 1, failures: 1}",),
    ("proxy.routing={prefill: {kind: prefix_aware}, decode: {kind: power_of_two}}",),
    ("proxy.restart={policy: never}",),
])  # fmt: skip
def test_it_is_taken(tmp_path: Path, set_: tuple[str, ...]) -> None:
    assert load(tmp_path, CPU, ROUTER, *set_).warnings == ()


REFUSED = [
    ("proxy.workers=2", "proxy.workers: vllm-router has no such setting (proxy.kind at"),
    ("proxy.auth={keys_file: k}", "proxy.auth: vllm-router has no such setting"),
    ("proxy.routing.decode={kind: kv_events}", "proxy.routing.decode.kind: vllm-router has no policy like kv_events"),
    (
        "proxy.routing.prefill={kind: prefix_aware, block_bytes: 64}",
        "proxy.routing.prefill.block_bytes: vllm-router has no such setting",
    ),
    ("proxy.request_timeout_seconds=90.5", "proxy.request_timeout_seconds: vllm-router takes whole seconds"),
    ("ports.router_metrics=8000", "ports.router_metrics: port 8000 is needed twice: by the router's metrics (8000)"),
]


@each_row("option, what", REFUSED)
def test_it_is_refused(tmp_path: Path, option: str, what: str) -> None:
    assert what in refused(tmp_path, CPU, (ROUTER, option))


def test_engines_of_mode_aggregated_would_get_no_key(tmp_path: Path) -> None:
    message = refused(tmp_path, AGGREGATED, ROUTER)
    assert "proxy.kind: in mode aggregated vllm-router sends engines no key" in message
    assert "write kind: pdserve" in message


def test_a_door_that_is_open_to_everybody_is_warned_about(tmp_path: Path) -> None:
    (warning,) = load(tmp_path, CPU, ROUTER, "proxy.host=0.0.0.0").warnings
    assert "anybody who reaches 0.0.0.0 can use the model and remove workers" in warning
    assert "put a gateway in front" in warning
