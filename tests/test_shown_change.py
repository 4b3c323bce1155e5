"""What is said of a change before it is made, from the plans and what lives."""

from __future__ import annotations

from pdserve.operations.shown_change import ShownChange, shown_change
from pdserve.plan.model import Plan
from pdserve.plan.running import Running
from pdserve.run.change import change
from tests.plan import kit


def planned(prefill: int, *, running: Plan | None = None, kind: str = "pdserve", setup: tuple[str, ...] = ()) -> Plan:
    moved = {"connector": kit.MOONCAKE}
    wanted = kit.recipe(
        {"proxy": {"kind": kind}, "prefill": {**moved, "instances": prefill}, "decode": moved, "setup": list(setup)}
    )
    return kit.plan(wanted, *kit.hosts(0), running=Running(running, wanted.ports))


def seen(old: Plan, new: Plan, *dead: str) -> ShownChange:
    living = [name for name in old.names() if name not in dead]
    return shown_change("/run/x", old, new, change(old, new, living), living)


def test_what_comes_and_what_goes() -> None:
    old = planned(1)
    more = seen(old, planned(2, running=old))
    assert (more.start, more.stop, more.stay) == (("prefill-1",), (), ("prefill-0", "decode-0", "proxy"))
    old = planned(3)
    less = seen(old, planned(1, running=old))
    assert (less.start, less.stop, less.stay) == ((), ("prefill-1", "prefill-2"), ("prefill-0", "decode-0", "proxy"))


def test_what_is_dead_is_started_or_gone_already() -> None:
    old = planned(2)
    assert seen(old, planned(2, running=old), "prefill-1").start == ("prefill-1",)
    assert seen(old, planned(1, running=old), "prefill-1").stop == ()


def test_vllm_router_that_lives_is_restarted_for_a_new_prefill() -> None:
    old = planned(1, kind="vllm-router")
    assert seen(old, planned(2, running=old, kind="vllm-router")).restart == ("proxy",)


def test_a_command_of_the_setup_that_is_done_neither_stays_nor_stops() -> None:
    old = planned(1, setup=("prepare",))
    assert "setup-0" not in seen(old, planned(1, running=old, setup=("prepare",))).stay
    assert seen(old, planned(1, running=old)).stop == ()
