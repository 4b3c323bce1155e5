"""MultiConnector chooses by tokens x load_weight and never waits in vain: the real class in the real Scheduler."""

from __future__ import annotations

from typing import Any

from pdserve.patches import effects
from pdserve.patches.multiconnector import SELECTION
from tests.upstream.run import IN_RELEASE, VLLM_VERSIONS, all_hold, on, verdict

if IN_RELEASE:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from tests.upstream.scheduler_lab import Lab, mock, multi

NEVER = 10**6
UPSTREAM, OURS = False, True


def lab(ours: bool, *children: dict[str, Any], extra: dict[str, Any] | None = None, **options: Any) -> Any:
    config = multi(*(children or (mock("a"), mock("b"))), **(extra or {}))
    return Lab(connector=config | ({"kv_connector_module_path": "pdserve.connectors.multi"} if ours else {}), **options)


def loaded(under_test: Any) -> list[int]:
    """Tokens that each mock was told to load, as one of the loads that were started."""
    return [sum(load.tokens for load in book.loads) for book in under_test.books]


def weights() -> None:
    """The first child with tokens always loads unless they are weighed."""
    for weight, matched, winner in ((1, (32, 48), 1), (1.25, (48, 32), 0)):
        for ours, loads in ((UPSTREAM, 0), (OURS, winner)):
            under_test = lab(ours, mock("a"), mock("b", load_weight=weight))
            under_test.add("r", 64, {"a": {"matched": matched[0]}, "b": {"matched": matched[1]}})
            under_test.step()
            expected = [0, 0]
            expected[loads] = matched[loads]
            assert loaded(under_test) == expected, (weight, matched, ours)
            under_test.run()


def pending() -> None:
    """A child without an answer holds the others up unless it is overtaken. It is waited for when no other has tokens,
    or when it has more weight, but not for ever."""
    held_up = (None, [0, 0])
    for weight, patience, a, b, upstream, ours in (
        (1.0, 1.0, {"defers": NEVER}, {"matched": 48}, held_up, (1, [0, 48])),
        (1.0, 1.0, {"defers": NEVER}, {}, held_up, held_up),
        (2.0, 60.0, {"defers": 3, "matched": 32}, {"matched": 48}, (4, [32, 0]), (4, [32, 0])),
        (2.0, 0.0, {"defers": NEVER}, {"matched": 48}, held_up, (2, [0, 48])),
    ):
        for whose, expected in ((UPSTREAM, upstream), (OURS, ours)):
            children, extra = (mock("a", load_weight=weight), mock("b")), {"lookup_patience_seconds": patience}
            under_test = lab(whose, *children, extra=extra)
            under_test.add("r", 64, {"a": a, "b": b})
            steps = (step for step in range(1, 21) if under_test.step() and under_test.status("r") != "WAITING")
            assert (next(steps, None), loaded(under_test)) == expected, (weight, a, b, whose)
            under_test.abort("r")
            under_test.step()
            assert under_test.kept_by_the_connector == {}


def polls() -> None:
    """While no child has tokens only one without an answer is asked again. In the end the others are, too: what they
    said may be old by then."""
    for ours, asked in ((UPSTREAM, [6, 6]), (OURS, [2, 6])):
        under_test = lab(ours)
        under_test.add("r", 64, {"a": {}, "b": {"defers": 5, "matched": 48}})
        for _ in range(6):
            under_test.step()
        assert ([book.polls["r"] for book in under_test.books], loaded(under_test)) == (asked, [0, 48])


def stale() -> None:
    """A choice that no longer holds, of a request that starves for blocks, is kept by upstream and dropped here."""
    for ours, left in ((UPSTREAM, {"r": 0}), (OURS, {})):
        under_test = lab(ours, num_blocks=8)
        under_test.add("big", 64, max_tokens=8)
        under_test.step()
        request = under_test.add("r", 96, {"a": {"matched": 96}})
        under_test.step()
        assert under_test.connector._requests_to_connector == {"r": 0}
        request.kv_transfer_params = {}
        under_test.step()
        assert (under_test.status("r"), under_test.connector._requests_to_connector) == ("WAITING", left)
        under_test.run()
        assert not ours or (under_test.kept_by_the_connector, under_test.free_blocks) == ({}, 7)


def async_saves() -> None:
    """Both children save the same request: its blocks are free when both have said so (counted on the workers)."""
    for ours in (UPSTREAM, OURS):
        under_test = lab(ours)
        under_test.add("r", 40, {"a": {"delay_free": True}, "b": {"delay_free": True}}, max_tokens=1)
        under_test.step()
        output = under_test.step()
        before = under_test.free_blocks
        under_test.step(finished_sending={"r"})
        assert output.kv_connector_metadata.extra_async_saves == {"r": 1}
        assert before < under_test.free_blocks
        assert (under_test.kept_by_the_connector, under_test.connector._extra_async_saves) == ({}, {})


def hybrid() -> None:
    """Two KV groups, where upstream allows them: the name and the class must be what it looks for."""
    supports = getattr(KVConnectorFactory, "supports_hma_config", None)
    for ours in (UPSTREAM, OURS):
        under_test = lab(ours, sliding_window=32, scheduler={"disable_hybrid_kv_cache_manager": False})
        under_test.add("r", 64, {"a": {"matched": 48}})
        under_test.step()
        under_test.run()
        connector = under_test.connector
        assert (type(connector).__name__, connector._all_support_hma) == ("MultiConnector", True)
        assert len(under_test.books[0].loads[0].blocks) == 2
        assert supports is None or supports(under_test.config.kv_transfer_config)


@on(*VLLM_VERSIONS)
def test_ours_chooses_as_promised_and_upstream_does_not() -> None:
    assert verdict(SELECTION) == "apply", "the code that it overrides is known"
    all_hold(weights, pending, polls, stale, async_saves, hybrid)
    counted = {name for _, name in effects.totals()}
    assert counted >= {"instances", "chosen-by-weight", "pending-lookups-overtaken", "stale-choices-dropped"}
