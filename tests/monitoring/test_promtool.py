"""Prometheus itself reads what is made for it: the configuration, the rules, the expressions of the panels."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from pdserve.monitoring.prometheus import alerts_yml, parts_of, prometheus_yml, scrape
from pdserve.pd.telemetry.metrics import Metrics
from pdserve.plan.model import Plan
from tests.launch.deployment import free_ports, wait_until
from tests.monitoring.expressions import ALL
from tests.monitoring.prometheus import promtool, running
from tests.monitoring.test_expressions import RECORDED
from tests.plan.golden import RECIPES, shipped_plan
from tests.plan.kit import plan, recipe, with_lmcache

pytestmark = pytest.mark.upstream

FIRING = 'count by (alertname, process, role) (ALERTS{alertstate="firing"})'
OF = 'deployment="d"'
DECODE = f'vllm:prompt_tokens_by_source_total{{{OF},process="decode-0",role="decode",source='
FAILED_PULL = 'patch="mooncake-pulls",effect="pulls-failed"'
LMCACHE = f'{{{OF},process="lmcache-0"}}'


def with_salts(*, hit_tokens: int) -> dict[str, str]:
    """Thirty clients, one after the other, with a cache_salt each: every series appears at its full value."""
    counted = {
        "lmcache_mp_l1_evicted_chunks_total": 10,
        "lmcache_mp_lookup_hit_tokens_total": hit_tokens,
        "lmcache_mp_lookup_requested_tokens_total": 5000,
    }
    return {
        f'up{{{OF},process="lmcache-0"}}': "1x900",
        **{
            f'{metric}{{{OF},process="lmcache-0",cache_salt="{salt}"}}': f"_x{30 * salt} {value}x870"
            for salt in range(30)
            for metric, value in counted.items()
        },
    }


ALERTING: dict[str, tuple[dict[str, str], str, str]] = {
    # series and their values every 10 s, when it is looked, what fires then
    "a process that does not answer": (
        {f'up{{{OF},process="decode-0"}}': "1x5 0x12"},
        "2m30s",
        'alertname="PdserveProcessDown",process="decode-0"',
    ),
    "a target of another job": ({'up{process="node-exporter"}': "0x30"}, "5m", ""),
    "a role without a ready engine": (
        {f'pdserve_proxy_worker_ready{{{OF},role="decode",worker="decode-{i}"}}': "0x12" for i in (0, 1)},
        "2m",
        'alertname="PdserveRoleGone",role="decode"',
    ),
    "a role with one ready engine of two": (
        {f'pdserve_proxy_worker_ready{{{OF},role="decode",worker="decode-{i}"}}': f"{i}x12" for i in (0, 1)},
        "2m",
        "",
    ),
    "failing requests": (
        {
            f'pdserve_proxy_errors_total{{{OF},blame="worker"}}': "0+2x90",
            f'pdserve_proxy_requests_total{{{OF},path="/v1/completions",status="200"}}': "0+100x90",
        },
        "15m",
        'alertname="PdserveErrors"',
    ),
    "requests that fail by the client's fault": (
        {
            f'pdserve_proxy_errors_total{{{OF},blame="client"}}': "0+90x90",
            f'pdserve_proxy_requests_total{{{OF},path="/v1/completions",status="400"}}': "0+100x90",
        },
        "15m",
        "",
    ),
    "a decode that computes prompts": (
        {f'{DECODE}"local_compute"}}': "0+500x150", f'{DECODE}"external_kv_transfer"}}': "0+500x150"},
        "25m",
        'alertname="VllmDecodeComputesPrompts",process="decode-0"',
    ),
    "a decode that computes the last token of each prompt": (
        {f'{DECODE}"local_compute"}}': "0+1x150", f'{DECODE}"external_kv_transfer"}}': "0+500x150"},
        "25m",
        "",
    ),
    "a pull that failed": (
        {f'pdserve_patch_effects_total{{{OF},process="decode-0",{FAILED_PULL}}}': "0x6 1x6"},
        "1m30s",
        'alertname="MooncakePullsFail",process="decode-0"',
    ),
    "a stream error of a worker that had none: its series begins with it": (
        {
            f'up{{{OF},process="proxy"}}': "1x60",
            f'pdserve_proxy_stream_errors_total{{{OF},process="proxy",worker="decode-0"}}': "_x31 20x20",
        },
        "5m30s",
        'alertname="PdserveStreamErrors"',
    ),
    "the same, soon after the start": (
        {
            f'up{{{OF},process="proxy"}}': "1x60",
            f'pdserve_proxy_stream_errors_total{{{OF},process="proxy",worker="decode-0"}}': "_x6 1x50",
        },
        "5m30s",
        'alertname="PdserveStreamErrors"',
    ),
    "stream errors of five minutes ago": (
        {
            f'up{{{OF},process="proxy"}}': "1x120",
            f'pdserve_proxy_stream_errors_total{{{OF},process="proxy",worker="decode-0"}}': "_x31 20x90",
        },
        "12m",
        "",
    ),
    "stream errors of last week, which a new Prometheus reads": (
        {
            f'up{{{OF},process="proxy"}}': "1x60",
            f'pdserve_proxy_stream_errors_total{{{OF},process="proxy",worker="decode-0"}}': "20x60",
        },
        "5m30s",
        "",
    ),
    "the first pull that failed": (
        {
            f'up{{{OF},process="decode-0"}}': "1x60",
            f'pdserve_patch_effects_total{{{OF},process="decode-0",{FAILED_PULL}}}': "_x31 1x20",
        },
        "5m30s",
        'alertname="MooncakePullsFail",process="decode-0"',
    ),
    "a pull that failed where only vllm counts it": (
        {f'vllm:mooncake_num_failed_recvs_total{{{OF},process="decode-0"}}': "0x6 1x6"},
        "1m30s",
        'alertname="MooncakePullsFail",process="decode-0"',
    ),
    "a transfer that failed on prefill, which only vllm counts": (
        {f'vllm:mooncake_num_failed_transfers_total{{{OF},process="prefill-0"}}': "0x6 1x6"},
        "1m30s",
        'alertname="MooncakePullsFail",process="prefill-0"',
    ),
    "the first request without a socket": (
        {
            f'up{{{OF},process="decode-0"}}': "1x60",
            f'pdserve_patch_effects_total{{{OF},process="decode-0",effect="out-of-sockets"}}': "_x31 1x20",
        },
        "5m30s",
        'alertname="EngineOutOfSockets",process="decode-0"',
    ),
    "an L1 that is too small for a prefix to come back": (
        {
            f"lmcache_mp_l1_evicted_chunks_total{LMCACHE}": "0+10x900",
            f"lmcache_mp_lookup_hit_tokens_total{LMCACHE}": "0x900",
            f"lmcache_mp_lookup_requested_tokens_total{LMCACHE}": "0+5000x900",
        },
        "2h20m",
        'alertname="LmcacheNeverHits",process="lmcache-0"',
    ),
    "the same, where each client has a salt of its own": (
        with_salts(hit_tokens=0),
        "2h20m",
        'alertname="LmcacheNeverHits",process="lmcache-0"',
    ),
    "such clients, whose prefixes come back": (with_salts(hit_tokens=500), "2h20m", ""),
    "an L1 that evicts and hits": (
        {
            f"lmcache_mp_l1_evicted_chunks_total{LMCACHE}": "0+10x900",
            f"lmcache_mp_lookup_hit_tokens_total{LMCACHE}": "0+500x900",
            f"lmcache_mp_lookup_requested_tokens_total{LMCACHE}": "0+5000x900",
        },
        "2h20m",
        "",
    ),
}


def written(planned: Plan, folder: Path) -> Path:
    """Configuration and rules as `pdserve monitoring` writes them."""
    (folder / "alerts.yml").write_text(alerts_yml(parts_of(planned)))
    config = folder / "prometheus.yml"
    config.write_text(prometheus_yml(planned, scrape(planned, planned.process("proxy").node)))
    return config


@pytest.mark.parametrize("name", RECIPES)
def test_configuration_and_rules_of_every_recipe_are_valid(name: str, tmp_path: Path) -> None:
    assert "rules found" in promtool("check", "config", written(shipped_plan(name), tmp_path))


def test_every_expression_of_the_dashboard_is_promql(tmp_path: Path) -> None:
    rules = [{"record": f"r{number}", "expr": expression.concrete} for number, expression in enumerate(ALL)]
    file = tmp_path / "panels.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    assert f"{len(ALL)} rules found" in promtool("check", "rules", file)


def test_alerts_fire_when_they_should_and_at_no_other_time(tmp_path: Path) -> None:
    every = {alert for name in RECIPES for alert in parts_of(shipped_plan(name))}
    (tmp_path / "alerts.yml").write_text(alerts_yml(every))
    cases = [
        {
            "name": name,
            "interval": "10s",
            "input_series": [{"series": key, "values": values} for key, values in series.items()],
            "promql_expr_test": [
                {
                    "expr": FIRING,
                    "eval_time": at,
                    "exp_samples": [{"labels": f"{{{fires}}}", "value": 1}] if fires else [],
                }
            ],
        }
        for name, (series, at, fires) in ALERTING.items()
    ]
    file = tmp_path / "test.yml"
    file.write_text(yaml.safe_dump({"rule_files": ["alerts.yml"], "evaluation_interval": "10s", "tests": cases}))
    assert "SUCCESS" in promtool("test", "rules", file)


# A Prometheus that asks ----------------------------------------------------------------------------------------------


def proxy_page() -> str:
    """Of a proxy that has answered one request."""
    metrics = Metrics()
    metrics.count("requests", ("/v1/completions", "200"))
    metrics.ttft.observe(0.1)
    metrics.read_gauges_from(lambda: [("worker_ready", ("decode", "decode-0"), 1.0)])
    return metrics.page().decode()


@contextmanager
def served(pages: dict[str, str]) -> Iterator[dict[str, int]]:
    """Each text under /metrics of a port of its own."""

    def handler(page: bytes) -> type[BaseHTTPRequestHandler]:
        class Page(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.end_headers()
                self.wfile.write(page)

            def log_message(self, *_: Any) -> None:
                pass

        return Page

    with ExitStack() as stack:
        ports = {}
        for name, text in pages.items():
            server = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), handler(text.encode())))
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            ports[name] = server.server_port
        yield ports


def asked(prometheus: httpx.Client, query: str) -> list[dict[str, Any]]:
    answer = prometheus.get("/query", params={"query": query}).json()
    assert answer["status"] == "success", answer
    result: list[dict[str, Any]] = answer["data"]["result"]
    return result


def test_prometheus_reads_every_process_and_finds_what_the_panels_ask_for(tmp_path: Path) -> None:
    pages = {
        "proxy": proxy_page(),
        "prefill": (RECORDED / "vllm-0.32.0-prefill.metrics").read_text(),
        "decode": (RECORDED / "vllm-0.32.0-decode.metrics").read_text(),
        "lmcache_http": (RECORDED / "lmcache-0.5.6.metrics").read_text(),
    }
    with served(pages) as ports:
        config = written(plan(recipe(with_lmcache(), {"name": "tiny-cpu", "ports": ports})), tmp_path)
        config.write_text(config.read_text().replace(": 10s", ": 1s").replace(": 5s", ": 1s"))
        with running(config, free_ports(1)[0]) as prometheus:

            def all_up() -> bool:
                try:
                    return len(asked(prometheus, "up == 1")) == len(pages)
                except (httpx.TransportError, ValueError):  # it listens before it answers with JSON
                    return False

            wait_until("every target is up", all_up, 120)
            (ready,) = asked(prometheus, "pdserve_proxy_worker_ready")
            assert ready["metric"]["role"] == "decode"
            assert ready["metric"]["process"] == "proxy"
            gauges = {
                expression.where
                for expression in ALL
                if not expression.counted and asked(prometheus, expression.concrete)
            }
            assert {
                "Clients/Workers that get requests/{{worker}}",
                "Engines/KV cache in use/{{process}}",
                "LMCache/L1 in use/{{process}}",
            } <= gauges
