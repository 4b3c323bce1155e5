"""Make prometheus.yml and alerts.yml of a plan.

Every /metrics of the deployment that Prometheus reaches from one of the nodes is a target. Labels of a target must not
be labels of its own series: Prometheus would rename those. So the proxy's target has no `role`, which the proxy's
series have for the worker that they are about.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import yaml

from pdserve.plan.model import Plan
from pdserve.plan.process import HttpProbe, Process
from pdserve.plan.proxy import WILDCARDS

PROMETHEUS_FILE = "prometheus.yml"
ALERTS_FILE = "alerts.yml"
DASHBOARD_FILE = "dashboard.json"
_INTERVAL = "10s"
"""The proxy makes its page 20 times a second at most, and an engine's takes milliseconds."""
_TIMEOUT = "5s"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")

Part = Literal["proxy", "engines", "disaggregated", "mooncake", "nixl", "lmcache", "mooncake-store"]
"""What a deployment may lack: then it gets no alert and no row of the dashboard for it. proxy: pdserve's own;
vllm-router has metrics of its own, which are scraped and have no panels here."""

Job = Literal["pdserve-proxy", "vllm-router", "vllm", "lmcache", "mooncake-store"]


def parts_of(plan: Plan) -> frozenset[Part]:
    """Return the parts of this plan."""
    classes = {connector.class_name for process in plan.processes for connector in process.connectors}
    present: dict[Part, bool] = {
        "proxy": plan.proxy_kind == "pdserve",
        "engines": True,
        "disaggregated": plan.mode == "disaggregated",
        "mooncake": "MooncakeConnector" in classes,
        "nixl": "NixlConnector" in classes,
        "lmcache": bool(plan.lmcache),
        "mooncake-store": any(process.is_store_master for process in plan.processes),
    }
    return frozenset(part for part, there in present.items() if there)


def read_alerts() -> list[dict[str, Any]]:
    """Return all rules, each with its `part`."""
    rules: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("alerts.yml").read_text())
    return rules


def alerts_yml(parts: Collection[Part]) -> str:
    """Return the file of rules for a deployment with these parts."""
    rules = [{key: rule[key] for key in rule if key != "part"} for rule in read_alerts() if rule["part"] in parts]
    return yaml.safe_dump({"groups": [{"name": "pdserve", "rules": rules}]}, sort_keys=False, width=120)


@dataclass(frozen=True)
class ScrapeTarget:
    """A /metrics that Prometheus reads."""

    job: Job
    process: str
    node: str
    host: str
    port: int
    role: str | None = None
    """None: it is no engine."""
    scheme: Literal["http", "https"] = "http"

    @property
    def address(self) -> str:
        """Return HOST:PORT as Prometheus takes it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def reached_from(self, node: str) -> bool:
        """Tell if Prometheus on that node can ask it: loopback is only on its own node."""
        return self.node == node or self.host not in _LOOPBACK


@dataclass(frozen=True)
class Scrape:
    """The targets that a Prometheus on one node asks, and those that it cannot reach."""

    node: str
    targets: tuple[ScrapeTarget, ...]
    unreachable: tuple[ScrapeTarget, ...]
    """They listen on the loopback of other nodes."""


def scrape(plan: Plan, node: str) -> Scrape:
    """Sort all targets of the plan by whether a Prometheus on `node` reaches them."""
    targets = tuple(_targets(plan, node))
    reached = tuple(target for target in targets if target.reached_from(node))
    return Scrape(node, reached, tuple(target for target in targets if target not in reached))


def prometheus_yml(plan: Plan, asked: Scrape) -> str:
    """Return the file for `prometheus --config.file`; the alerts are a file beside it."""
    jobs: dict[tuple[Job, str], list[ScrapeTarget]] = {}
    for target in asked.targets:
        jobs.setdefault((target.job, target.scheme), []).append(target)
    document: dict[str, Any] = {
        "global": {"scrape_interval": _INTERVAL, "scrape_timeout": _TIMEOUT, "evaluation_interval": _INTERVAL},
        "rule_files": [ALERTS_FILE],
        "scrape_configs": [_job(plan, job, scheme, targets) for (job, scheme), targets in jobs.items()],
    }
    head = f"# {plan.name}, for a Prometheus on {asked.node}. Made by `pdserve monitoring`: make it again after `up`.\n"
    left_out = "".join(
        f"# Not here: {target.process} on {target.node}, which listens on the loopback of its node.\n"
        for target in asked.unreachable
    )
    return head + left_out + yaml.safe_dump(document, sort_keys=False)


def _job(plan: Plan, job: Job, scheme: str, targets: list[ScrapeTarget]) -> dict[str, Any]:
    # The certificate names what clients call the proxy, and Prometheus asks by address.
    tls = {"scheme": "https", "tls_config": {"insecure_skip_verify": True}} if scheme == "https" else {}
    return {
        "job_name": job,
        **tls,
        "static_configs": [{"targets": [t.address], "labels": _labels(plan, t)} for t in targets],
    }


def _labels(plan: Plan, target: ScrapeTarget) -> dict[str, str]:
    labels = {"deployment": plan.name, "process": target.process, "node": target.node}
    return labels if target.role is None else {**labels, "role": target.role}


def _targets(plan: Plan, node: str) -> Iterator[ScrapeTarget]:
    yield _proxy(plan, plan.process("proxy"), node)
    for process in plan.processes:
        if process.is_engine and isinstance(process.probe, HttpProbe):
            yield ScrapeTarget("vllm", process.name, process.node, process.probe.host, process.probe.port, process.role)
        elif process.is_store_master:
            yield ScrapeTarget("mooncake-store", process.name, process.node, "127.0.0.1", process.ports["http"])
    for server in plan.lmcache:
        url = urlsplit(server.http_url)
        place = plan.process(server.process).node
        yield ScrapeTarget("lmcache", server.process, place, url.hostname or "127.0.0.1", url.port or 80)


def _proxy(plan: Plan, proxy: Process, node: str) -> ScrapeTarget:
    if plan.proxy_kind == "vllm-router":
        return ScrapeTarget("vllm-router", proxy.name, proxy.node, "127.0.0.1", proxy.ports["metrics"])
    # Where it listens on every address, loopback is the one that `proxy.allowed_hosts` never refuses.
    host, everywhere = plan.proxy.host, plan.proxy.host in WILDCARDS
    if everywhere:
        host = WILDCARDS[plan.proxy.host] if node == proxy.node else plan.node(proxy.node).address
    scheme: Literal["http", "https"] = "http" if plan.proxy.tls is None else "https"
    return ScrapeTarget("pdserve-proxy", proxy.name, proxy.node, host, plan.proxy.port, scheme=scheme)
