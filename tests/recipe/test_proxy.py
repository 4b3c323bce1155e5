"""The `proxy:` section: what contradicts itself is refused, with the key, the reason and what to write instead."""

from __future__ import annotations

from pathlib import Path

from pdserve.pd.config import routing as routing_settings
from tests.recipe.kit import AGGREGATED, CPU, GPU, Options, load, refused
from tests.tables import each_row

NO_LMCACHE = ("lmcache=null", "prefill.connector={kind: mooncake, protocol: tcp}")
REFUSED = [
    # Pools
    (CPU, "proxy.admission.aggregated={max_requests: 1}", "proxy.admission.aggregated: mode disaggregated has no pool"),
    (AGGREGATED, "proxy.on_empty_pool=aggregate", "proxy.on_empty_pool: there is one pool, so no other pool can take"),
    (CPU, "proxy={on_empty_pool: fail, hold_seconds: 5}", "proxy.hold_seconds: on_empty_pool is fail, so no request"),
    (AGGREGATED, "proxy.routing.conditional={min_prompt_tokens: 5}", "proxy.routing.conditional: mode aggregated has"),
    # Policies
    (CPU, "proxy.routing.decode={kind: random}", 'proxy.routing.decode.kind: no policy is called "random"'),
    (CPU, "proxy.routing.decode={block_bytes: 5}", "proxy.routing.decode: a policy needs a `kind`: one of"),
    (
        CPU,
        ("proxy.routing.prefill={kind: kv_events}", "engine.args.enable-prefix-caching=false", *NO_LMCACHE),
        "engine.args.enable-prefix-caching: there is no cache that an engine could publish events about",
    ),
    (
        CPU,
        ("proxy.routing.decode={kind: kv_events}", "decode.args={kv-events-config: {enable_kv_cache_events: false}}"),
        "decode.args.kv-events-config: pdserve sets this flag for the policy kv_events (proxy.routing.decode.kind at",
    ),
    (
        GPU,
        ("proxy.routing.decode={kind: kv_events}", "decode.parallel={dp: 16, nodes: 2}"),
        "proxy.routing.decode.kind: the ranks of a decode publish on the nodes they run on",
    ),
    # Conditions and sessions
    (CPU, "proxy.routing.conditional={}", "proxy.routing.conditional: has no threshold, so no prompt skips prefill"),
    (
        CPU,
        "proxy.routing.conditional={max_missing_tokens: 100}",
        "proxy.routing.conditional.max_missing_tokens: least_loaded does not know what a decode holds",
    ),
    # Times
    (CPU, "proxy.health={interval_seconds: 1, timeout_seconds: 3}", "proxy.health.timeout_seconds: a check may take 3"),
    (CPU, "proxy.request_timeout_seconds=60", "proxy.admission.prefill.queue_seconds: a request that waits for 60 s"),
    # Admin and TLS
    (CPU, "proxy.admin={}", "proxy.admin: neither port nor socket is set"),
    (CPU, "proxy.admin={socket: s, host: 127.0.0.1}", "proxy.admin.host: a socket has no address (proxy.admin.socket"),
    (CPU, "proxy.admin={port: 9000, host: 0.0.0.0}", "proxy.admin.host: anybody who reaches 0.0.0.0 could add and"),
    (CPU, "proxy.admin={port: 8000, token_file: t}", "proxy.admin.port: port 8000 is needed twice: by the proxy's"),
    (CPU, "proxy.upstream_tls={ca: c.pem}", "proxy.upstream_tls: only workers that are added while serving can have a"),
    (
        CPU,
        ("proxy.admin={socket: s}", "proxy.upstream_tls={certificate: c.pem}"),
        "proxy.upstream_tls: our own certificate needs its key too",
    ),
]


@each_row("text, options, what", REFUSED)
def test_it_is_refused(tmp_path: Path, text: str, options: Options, what: str) -> None:
    assert what in refused(tmp_path, text, options)


WARNED = [
    (("proxy.host=0.0.0.0",), "the proxy asks for no key", "set proxy.auth.keys_file"),
    (("proxy.host=0.0.0.0", "proxy.auth.keys_file=k"), "keys and prompts travel to 0.0.0.0 in the clear", "proxy.tls"),
    (("proxy.admin={port: 9000}",), "every user of this machine can add and remove workers", "use socket"),
    (("proxy.auth.client_authorization=forward",), "take only its own key", "write replace"),
]


@each_row("set_, what, todo", WARNED)
def test_it_is_warned_about(tmp_path: Path, set_: tuple[str, ...], what: str, todo: str) -> None:
    [warning] = [warning for warning in load(tmp_path, CPU, *set_).warnings if what in warning]
    assert todo in warning


def test_a_guarded_proxy_is_not_warned_about(tmp_path: Path) -> None:
    guarded = (
        "proxy.host=0.0.0.0",
        "proxy.auth.keys_file=k",
        "proxy.tls={certificate: c, key: k}",
        "proxy.admin={port: 9000, host: 0.0.0.0, token_file: t}",
    )
    assert not [warning for warning in load(tmp_path, CPU, *guarded).warnings if "proxy" in warning]


def test_another_policy_replaces_that_of_a_base(tmp_path: Path) -> None:
    routing = "{decode: {kind: prefix_aware, block_bytes: 128}, conditional: {min_prompt_tokens: 32}}"
    (tmp_path / "base.yaml").write_text(CPU + f"proxy: {{routing: {routing}}}\n")
    other = "extends: base.yaml\nproxy: {routing: {decode: {kind: power_of_two}, conditional: null}}\n"
    assert load(tmp_path, other).recipe.proxy.routing.decode == routing_settings.PowerOfTwoSettings()


def test_files_are_relative_to_the_file_that_names_them(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site/base.yaml").write_text(
        CPU + "proxy: {auth: {keys_file: keys.jsonl}, tls: {certificate: /etc/c.pem, key: k.pem},"
        " admin: {port: 9000, token_file: ../token}}\n"
    )
    loaded = load(tmp_path, "extends: site/base.yaml\n")
    proxy = loaded.recipe.proxy
    assert proxy.auth.keys_file == "site/keys.jsonl"
    assert proxy.tls is not None
    assert (proxy.tls.certificate, proxy.tls.key) == ("/etc/c.pem", "site/k.pem")
    assert proxy.admin is not None
    assert proxy.admin.token_file == "token"
    saved = tmp_path / "elsewhere" / "saved.yaml"
    saved.parent.mkdir()
    again = load(saved.parent, loaded.to_yaml(), name=saved.name).recipe.proxy
    assert again.auth.keys_file == f"{tmp_path}/site/keys.jsonl"
