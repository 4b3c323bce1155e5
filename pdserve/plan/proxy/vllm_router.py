"""vllm-router as the proxy: its command line, its environment, and when it starts.

Measured on the wheel of 0.1.17: before it listens it waits for /health of every engine and reads the engine ids of each
prefill from Mooncake's bootstrap server. It ends when an engine is not there in time, and finds data parallel ranks in
the engines' metrics. The engines' key it takes from OPENAI_API_KEY, in place of the client's Authorization.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from urllib.parse import urlsplit

from pdserve.pd.config.proxy import ProxyConfig
from pdserve.plan.environment import vllm_router_env
from pdserve.plan.nodes.node import Node
from pdserve.plan.ports import AssignedPorts, Need
from pdserve.plan.process import HttpProbe, Process
from pdserve.plan.proxy.pdserve_proxy import EXIT_SECONDS, NAME, STOP_STAGE, WILDCARDS
from pdserve.recipe.model import ROUTER_DEFAULT_POLICY, ROUTER_POLICIES, Recipe

VERSION = "0.1.17"
"""The flags below are those of this version."""
MODULE = "vllm_router.launch_router"
PACKAGE = "vllm-router"
START_STAGE = 2
"""After the engines: it ends by itself when they take longer than it waits."""
METRICS_HOST = "127.0.0.1"


def metrics_need(node: Node) -> Need:
    """The port of its figures, which cannot be turned off."""
    return Need(node.name, NAME, "router_metrics", role="proxy")


def router_process(recipe: Recipe, node: Node, config: ProxyConfig, ports: AssignedPorts, *, python: str) -> Process:
    """The router, on `node`. It does not get worker states from the launcher."""
    program = recipe.proxy.command if recipe.proxy.command is not None else [python, "-m", MODULE]
    return Process(
        name=NAME,
        role="proxy",
        node=node.name,
        argv=(*program, *_arguments(recipe, config, ports)),
        env=vllm_router_env(),
        ports=ports.pinned(NAME),
        log=f"logs/{NAME}@{node.name}.log",
        # /health says 503 while it finds an engine unhealthy, which is no fault of its own.
        probe=HttpProbe(host=WILDCARDS.get(config.host, config.host), port=config.port, path="/liveness"),
        start_stage=START_STAGE,
        stop_stage=STOP_STAGE,
        ready_seconds=recipe.timeouts.proxy_seconds,
        stop_seconds=max(recipe.timeouts.stop_seconds, config.drain_seconds + EXIT_SECONDS),
        restart=recipe.proxy.restart,
        packages=(PACKAGE,) if recipe.proxy.command is None else (),
    )


def _arguments(recipe: Recipe, config: ProxyConfig, ports: AssignedPorts) -> Iterator[str]:
    yield from ("--host", config.host, "--port", str(config.port))
    yield from ("--vllm-pd-disaggregation", "--kv-connector", config.protocol)
    for worker in config.workers:
        yield from (f"--{worker.role}", worker.url)
        if worker.bootstrap_url is not None:
            yield str(urlsplit(worker.bootstrap_url).port)
    yield from ("--prefill-policy", _policy(recipe, "prefill"), "--decode-policy", _policy(recipe, "decode"))
    yield from ("--request-timeout-secs", f"{config.request_timeout_seconds:.0f}")
    yield from ("--max-payload-size", str(config.max_body_bytes))
    yield from ("--health-check-interval-secs", f"{config.health.interval_seconds:.0f}")
    yield from ("--health-check-timeout-secs", f"{config.health.timeout_seconds:.0f}")
    yield from ("--health-failure-threshold", str(config.health.failures))
    yield from ("--worker-startup-timeout-secs", str(math.ceil(recipe.timeouts.proxy_seconds)))
    yield from ("--worker-startup-check-interval", "1")
    yield from ("--prometheus-host", METRICS_HOST, "--prometheus-port", str(ports.first(NAME, "metrics")))


def _policy(recipe: Recipe, pool: str) -> str:
    """With one worker it refuses to start with power_of_two, and every policy is the same."""
    if dict(recipe.roles())[pool].instances == 1:  # type: ignore[index]
        return "round_robin"
    routing = recipe.proxy.routing
    chosen = getattr(routing, pool).kind if pool in routing.model_fields_set else ROUTER_DEFAULT_POLICY
    return ROUTER_POLICIES[chosen]
