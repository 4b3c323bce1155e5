"""Prometheus' own promtool reads what is made for it: the configuration, the rules, the expressions of the panels."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from pdserve.monitoring.prometheus import alerts_yml, parts_of, prometheus_yml, scrape
from pdserve.plan.model import Plan
from tests.cluster.machine import unpacked
from tests.monitoring.test_expressions import ALL
from tests.plan.golden import RECIPES, shipped_plan

pytestmark = pytest.mark.upstream

FIRING = 'count by (alertname, process, role) (ALERTS{alertstate="firing"})'
OF = 'deployment="d"'
DECODE = f'vllm:prompt_tokens_by_source_total{{{OF},process="decode-0",role="decode",source='
FAILED_PULL = 'patch="mooncake-pulls",effect="pulls-failed"'


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
    "failing requests": (
        {
            f'pdserve_proxy_errors_total{{{OF},blame="worker"}}': "0+2x90",
            f'pdserve_proxy_requests_total{{{OF},path="/v1/completions",status="200"}}': "0+100x90",
        },
        "15m",
        'alertname="PdserveErrors"',
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
    "stream errors of last week, which a new Prometheus reads": (
        {
            f'up{{{OF},process="proxy"}}': "1x60",
            f'pdserve_proxy_stream_errors_total{{{OF},process="proxy",worker="decode-0"}}': "20x60",
        },
        "5m30s",
        "",
    ),
    "the first request without a socket": (
        {
            f'up{{{OF},process="decode-0"}}': "1x60",
            f'pdserve_patch_effects_total{{{OF},process="decode-0",effect="out-of-sockets"}}': "_x31 1x20",
        },
        "5m30s",
        'alertname="EngineOutOfSockets",process="decode-0"',
    ),
    "an L1 that is too small for a prefix to come back, where each client has a salt of its own": (
        with_salts(hit_tokens=0),
        "2h20m",
        'alertname="LmcacheNeverHits",process="lmcache-0"',
    ),
    "such clients, whose prefixes come back": (with_salts(hit_tokens=500), "2h20m", ""),
}


def promtool(*arguments: str | Path) -> str:
    """What promtool prints. AssertionError, with that, unless it is content; LabError without a route to a mirror."""
    program = unpacked("prometheus", "prometheus") / "usr" / "bin" / "promtool"
    ended = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


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
