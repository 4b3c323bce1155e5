"""Prometheus is given every /metrics of a plan that it can reach, with labels that collide with none of theirs."""

from __future__ import annotations

from pathlib import Path

import yaml
from prometheus_client.parser import text_string_to_metric_families

from pdserve.monitoring.prometheus import prometheus_yml, scrape
from pdserve.plan.model import Plan
from pdserve.recipe.model import Recipe
from tests.monitoring.test_expressions import RECORDED, exported_by_the_proxy
from tests.plan.golden import RECIPES, shipped_plan
from tests.plan.kit import hosts, on_gpus, plan, recipe, with_lmcache
from tests.tables import each_row


def targets(planned: Plan, node: str | None = None) -> dict[str, str]:
    """Process -> JOB HOST:PORT, for a Prometheus on that node, or beside the proxy."""
    asked = scrape(planned, node or planned.process("proxy").node)
    return {target.process: f"{target.job} {target.address}" for target in asked.targets}


def proxied(**proxy: object) -> Recipe:
    return recipe({"proxy": proxy})


def test_on_one_machine_everything_is_asked_on_loopback() -> None:
    assert targets(plan(recipe(with_lmcache()))) == {
        "proxy": "pdserve-proxy 127.0.0.1:8000",
        "prefill-0": "vllm 127.0.0.1:8100",
        "decode-0": "vllm 127.0.0.1:8200",
        "lmcache-0": "lmcache 127.0.0.1:8080",
    }


def test_a_proxy_on_every_address_is_asked_on_loopback_by_its_own_node_only() -> None:
    """`proxy.allowed_hosts` may refuse the node's address, and never refuses loopback."""
    two = plan(recipe(on_gpus(8, 8), {"lmcache": None, "proxy": {"host": "0.0.0.0"}}), *hosts(8, 8))
    assert targets(two, "host0")["proxy"] == "pdserve-proxy 127.0.0.1:8000"
    assert targets(two, "host1")["proxy"] == "pdserve-proxy 192.0.2.1:8000"


def test_a_proxy_with_tls_is_asked_over_it() -> None:
    tls = plan(proxied(tls={"certificate": "a.pem", "key": "b.pem"}))
    (job,) = [job for job in written(tls)["scrape_configs"] if job["job_name"] == "pdserve-proxy"]
    assert job["scheme"] == "https"
    assert job["tls_config"] == {"insecure_skip_verify": True}


def test_vllm_router_has_its_figures_on_a_port_of_their_own() -> None:
    assert targets(shipped_plan("tiny-cpu-router"))["proxy"].startswith("vllm-router 127.0.0.1:29")


def written(planned: Plan) -> dict[str, list[dict[str, object]]]:
    document: dict[str, list[dict[str, object]]] = yaml.safe_load(
        prometheus_yml(planned, scrape(planned, planned.process("proxy").node))
    )
    return document


@each_row("name", RECIPES)
def test_each_process_with_figures_is_asked_once(name: str) -> None:
    planned = shipped_plan(name)
    asked = scrape(planned, planned.process("proxy").node)
    every = [target.process for target in (*asked.targets, *asked.unreachable)]
    assert len(set(every)) == len(every)
    leaders = {process.name for process in planned.processes if process.is_engine and process.probe is not None}
    caches = {server.process for server in planned.lmcache}
    masters = {process.name for process in planned.processes if process.is_store_master}
    assert set(every) == {"proxy"} | leaders | caches | masters


def labels_of(page: str) -> set[str]:
    families = text_string_to_metric_families(Path(RECORDED / page).read_text())
    return {label for family in families for sample in family.samples for label in sample.labels}


def test_no_label_of_a_target_is_one_of_its_series() -> None:
    """Prometheus would rename that of the series, and no expression would find it."""
    store = shipped_plan("tiny-cpu-mooncake-store")
    of_series = {
        "pdserve-proxy": set().union(*exported_by_the_proxy().values()),
        "vllm": labels_of("vllm-0.32.0-prefill.metrics") | {"patch", "effect", "operation", "status"},
        "lmcache": labels_of("lmcache-0.5.6.metrics"),
    }
    for planned in (shipped_plan("tiny-cpu"), store):
        for job in written(planned)["scrape_configs"]:
            for group in job["static_configs"]:  # type: ignore[attr-defined]
                assert not group["labels"].keys() & of_series.get(str(job["job_name"]), set())
