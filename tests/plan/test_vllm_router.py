"""vllm-router in a plan: its flags are read by its own parser, and the key is not among them."""

from __future__ import annotations

from typing import Any

import pytest
from vllm_router.launch_router import parse_router_args

from pdserve.plan.model import Plan
from pdserve.plan.proxy import ROUTER_MODULE, ROUTER_VERSION
from tests.plan.kit import plan, recipe

ROUTER: dict[str, Any] = {"proxy": {"kind": "vllm-router"}}
TWO: dict[str, Any] = {"prefill": {"instances": 2}, "decode": {"instances": 2}}


def arguments(built: Plan) -> Any:
    """As the router itself understands them."""
    argv = built.process("proxy").argv
    assert argv[:3] == ("python", "-m", ROUTER_MODULE)
    return parse_router_args(list(argv[3:]))


def test_the_parser_is_that_of_the_version_whose_flags_are_known() -> None:
    from vllm_router.version import __version__

    assert __version__ == ROUTER_VERSION


def test_it_gets_every_engine_and_where_prefills_are_asked_for_their_ids() -> None:
    args = arguments(plan(recipe(ROUTER, TWO)))
    assert args.vllm_pd_disaggregation
    assert args.kv_connector == "mooncake"
    assert args.prefill_urls == [("http://127.0.0.1:8100", 8998), ("http://127.0.0.1:8101", 8999)]
    assert args.decode_urls == ["http://127.0.0.1:8200", "http://127.0.0.1:8201"]


def test_what_the_recipe_sets_reaches_it() -> None:
    section = {
        "kind": "vllm-router",
        "host": "0.0.0.0",
        "request_timeout_seconds": 60,
        "max_body_bytes": 1000,
        "health": {"interval_seconds": 5, "timeout_seconds": 1, "failures": 4},
        "routing": {"prefill": {"kind": "prefix_aware"}, "decode": {"kind": "round_robin"}},
    }
    args = arguments(plan(recipe(TWO, {"proxy": section, "ports": {"proxy": 8001, "router_metrics": 8002}})))
    assert (args.host, args.port, args.prometheus_host, args.prometheus_port) == ("0.0.0.0", 8001, "127.0.0.1", 8002)
    assert (args.request_timeout_secs, args.max_payload_size) == (60, 1000)
    assert (args.health_check_interval_secs, args.health_check_timeout_secs) == (5, 1)
    assert args.health_failure_threshold == 4
    assert (args.prefill_policy, args.decode_policy) == ("cache_aware", "round_robin")


@pytest.mark.parametrize(("instances", "policy"), [(1, "round_robin"), (2, "power_of_two")])
def test_a_policy_that_no_recipe_names(instances: int, policy: str) -> None:
    """It refuses to start with power_of_two and one worker."""
    args = arguments(plan(recipe(ROUTER, {"prefill": {"instances": instances}})))
    assert args.prefill_policy == policy


def test_the_engines_key_is_in_its_environment_by_name_only() -> None:
    process = plan(recipe(ROUTER)).process("proxy")
    assert process.env.secrets == {"OPENAI_API_KEY": "engine_key"}
    assert process.env.base == "allow"
    assert not any("key" in word for word in process.argv)
