"""MultiConnector of upstream and ours, with mocks for children, in the real Scheduler: what each does, as JSON."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.platforms import current_platform

from pdserve.patches import effects
from pdserve.patches.multiconnector.selection import PATCH
from pdserve.patches.verdict import judge
from tests.upstream.probes.multiconnector_metrics import versions_here
from tests.upstream.scheduler_lab import Lab, mock, multi

OURS = "pdserve.connectors.multi"


def lab(ours: bool, *children: dict[str, Any], extra: dict[str, Any] | None = None, **options: Any) -> Lab:
    config = multi(*(children or (mock("a"), mock("b"))), **(extra or {}))
    if ours:
        config["kv_connector_module_path"] = OURS
    return Lab(connector=config, **options)


def loaded_from(under_test: Lab) -> dict[str, int]:
    """Mock -> tokens that it was told to load, as one of the loads that were started."""
    return {child.name: sum(load.tokens for load in child.book.loads) for child in under_test.connector._connectors}


def remaining(under_test: Lab) -> dict[str, int]:
    """Everything that is kept per request, by what keeps it."""
    connector = under_test.connector
    kept = {
        "choices": connector._requests_to_connector,
        "answers": getattr(connector, "_answers", {}),
        "waits": getattr(connector, "_waiting_since", {}),
        "unanswered": getattr(connector, "_unanswered", {}),
        "loads": connector._counts._loading if hasattr(connector, "_counts") else {},
    }
    return {name: len(value) for name, value in kept.items() if value}


def weights(ours: bool) -> Any:
    results = {}
    for name, first, second, tokens_a, tokens_b in (
        ("more tokens", None, None, 32, 48),
        ("equal", None, None, 48, 48),
        ("weight", 1.0, 2.0, 48, 32),
        ("weight that does not suffice", 1.0, 1.25, 48, 32),
        ("zero", 0, 1, 48, 16),
    ):
        extra = [{} if weight is None else {"load_weight": weight} for weight in (first, second)]
        under_test = lab(ours, mock("a", **extra[0]), mock("b", **extra[1]))
        under_test.add("r", 64, {"a": {"matched": tokens_a}, "b": {"matched": tokens_b}})
        under_test.step()
        results[name] = loaded_from(under_test)
        under_test.run()
    return results


def pending(ours: bool) -> Any:
    """Steps until each request is scheduled or loading (None: not within 20), and who loads it then."""
    never = 10**6
    results = {}
    for name, weight, patience, a, b in (
        ("other has tokens", 1.0, 1.0, {"defers": never}, {"matched": 48}),
        ("nobody has tokens", 1.0, 1.0, {"defers": never}, {}),
        ("heavier answers soon", 2.0, 60.0, {"defers": 3, "matched": 32}, {"matched": 48}),
        ("heavier never answers", 2.0, 0.0, {"defers": never}, {"matched": 48}),
    ):
        under_test = lab(ours, mock("a", load_weight=weight), mock("b"), extra={"lookup_patience_seconds": patience})
        under_test.add("r", 64, {"a": a, "b": b})
        steps = next((step for step in range(1, 21) if under_test.step() and under_test.status("r") != "WAITING"), None)
        results[name] = {"steps": steps, "loaded": loaded_from(under_test)}
        under_test.abort("r")
        under_test.step()
        results[name]["left"] = remaining(under_test)
    return results


def polls(ours: bool) -> Any:
    """How often each child is asked: one has nothing, the other answers at the sixth question."""
    under_test = lab(ours)
    under_test.add("r", 64, {"a": {}, "b": {"defers": 5, "matched": 48}})
    for _ in range(6):
        under_test.step()
    return {
        "asked": {child.name: child.book.polls["r"] for child in under_test.connector._connectors},
        **loaded_from(under_test),
    }


def stale(ours: bool) -> Any:
    """A request that starves for blocks while its first answer becomes void."""
    under_test = lab(ours, num_blocks=8)
    under_test.add("big", 64, max_tokens=8)
    under_test.step()
    request = under_test.add("r", 96, {"a": {"matched": 96}})
    under_test.step()
    starving = {"status": under_test.status("r"), "choices": dict(under_test.connector._requests_to_connector)}
    request.kv_transfer_params = {}
    under_test.step()
    after = {"status": under_test.status("r"), "choices": dict(under_test.connector._requests_to_connector)}
    under_test.run()
    return {"starving": starving, "after": after, "end": remaining(under_test), "free": under_test.free_blocks}


def wear(ours: bool) -> Any:
    """Random requests in too few blocks, with aborts and preemptions: what is left at the end."""
    dice = random.Random(7)
    under_test = lab(ours, num_blocks=24)
    preempted: set[str] = set()
    for number in range(60):
        under_test.add(f"r{number}", dice.randrange(20, 160), _script(dice), max_tokens=dice.randrange(1, 60))
        for _ in range(dice.randrange(3)):
            _step(under_test)
        preempted |= {name for name, request in under_test.scheduler.requests.items() if request.num_preemptions}
        if dice.random() < 0.3:
            under_test.abort(dice.choice(sorted(under_test.scheduler.requests)))
    for _ in range(3000):
        if not under_test.scheduler.requests:
            break
        _step(under_test)
        preempted |= {name for name, request in under_test.scheduler.requests.items() if request.num_preemptions}
    under_test.step()
    return {
        "unfinished": sorted(under_test.scheduler.requests),
        "left": remaining(under_test),
        "missing blocks": under_test.pool.num_gpu_blocks - 1 - under_test.free_blocks,
        "preempted": bool(preempted),
        "loads": sum(len(child.book.loads) for child in under_test.connector._connectors) > 0,
    }


def _script(dice: random.Random) -> dict[str, Any]:
    script = {}
    for child in ("a", "b"):
        load_async = dice.choice((True, False))
        # The last token of a prompt is left to compute when the load is not asynchronous; the shortest prompt has 20.
        matched = dice.choice((0, 16, 64, 128) if load_async else (0, 16))
        script[child] = {"matched": matched, "defers": dice.choice((0, 0, 1, 5)), "load_async": load_async}
    return script


def _step(under_test: Lab) -> None:
    """Every load that is under way arrives; those of aborted requests, too."""
    ended = {name for name, request in under_test.scheduler.requests.items() if request.is_finished()}
    under_test.step(finished_recving=(under_test.loading() | ended) - under_test.scheduler.finished_recving_kv_req_ids)


def async_saves(ours: bool) -> Any:
    """Both children save the same request: its blocks are free when both have said so (counted on the workers)."""
    under_test = lab(ours)
    under_test.add("r", 40, {"a": {"delay_free": True}, "b": {"delay_free": True}}, max_tokens=1)
    under_test.step()
    output = under_test.step()
    before = under_test.free_blocks
    under_test.step(finished_sending={"r"})
    return {
        "extra": output.kv_connector_metadata.extra_async_saves,
        "held": before < under_test.free_blocks,
        "left": remaining(under_test),
        "still": dict(under_test.connector._extra_async_saves),
    }


def hybrid(ours: bool) -> Any:
    """Two KV groups, where upstream allows them: the name and the class must be what it looks for."""
    # Upstream's code run from sources alone does not know its platform; those that it was built for support hybrids.
    type(current_platform).support_hybrid_kv_cache = classmethod(lambda cls: True)
    under_test = lab(ours, sliding_window=32, scheduler={"disable_hybrid_kv_cache_manager": False})
    under_test.add("r", 64, {"a": {"matched": 48}})
    under_test.step()
    under_test.run()
    supports = getattr(KVConnectorFactory, "supports_hma_config", None)
    return {
        "class": type(under_test.connector).__name__,
        "all support": under_test.connector._all_support_hma,
        "config": None if supports is None else supports(under_test.config.kv_transfer_config),
        "groups": len(under_test.connector._connectors[0].book.loads[0].blocks),
    }


CASES: tuple[Callable[[bool], Any], ...] = (weights, pending, polls, stale, wear, async_saves, hybrid)


def measure() -> dict[str, Any]:
    """Case -> upstream's and ours; `effects` are of ours."""
    results: dict[str, Any] = {case.__name__: {"upstream": case(False), "ours": case(True)} for case in CASES}
    results["verdict"] = judge(PATCH, versions_here()).outcome
    return {**results, "effects": {name: value for (_, name), value in effects.totals().items()}}
