"""Each RDMA device by itself: which are tried, and which of them is slow."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pdserve.preflight.fabric import Wish, by_rails, judge_rails, rounds, try_fabric
from pdserve.preflight.node_probe import HasSent, Question, Send, Wait, Waits
from pdserve.preflight.transfer import EndFailure, FabricPath, Sent
from tests.plan import kit
from tests.preflight.fabric_kit import MIB, end, receiver, wrote


def rails(*devices: str) -> list[FabricPath]:
    ends = [end(node, protocol="rdma").model_copy(update={"devices": ",".join(devices)}) for node in "ab"]
    return by_rails([FabricPath(source=ends[0], target=ends[1])])


def test_each_device_that_both_ends_name_is_a_rail() -> None:
    first, second = rails("mlx5_0", "mlx5_1")
    assert (first.source.devices, first.target.devices, str(first)) == ("mlx5_0", "mlx5_0", "a -> b by mlx5_0")
    assert second.rail == "mlx5_1"
    assert [str(path) for path in rails("mlx5_0")] == ["a -> b"]
    assert len(rounds([first, second])) == 2, "two rails of a node share its memory and its buses"


def test_devices_of_other_number_are_tried_together() -> None:
    source, target = (end(node, protocol="rdma") for node in "ab")
    path = FabricPath(source=source.model_copy(update={"devices": "a,b"}), target=target)
    assert by_rails([path]) == [path]


@pytest.mark.parametrize(("rate", "slow"), [(0.49, True), (0.51, False)])
def test_a_rail_at_less_than_half_the_rate_of_the_fastest_is_named(rate: float, slow: bool) -> None:
    fast, other = rails("mlx5_0", "mlx5_1")
    done = [(fast, wrote(125 * 10**6, 0.1)), (other, wrote(125 * 10**6, 0.1 / rate))]
    found = judge_rails(done)
    assert [finding.status for finding in found] == (["warning"] if slow else [])
    if slow:
        assert found[0].value == "a -> b by mlx5_1: 4.9 Gbit/s, and 10 by mlx5_0"
        assert "error counters of mlx5_1" in str(found[0].fix)


def test_a_rail_that_failed_is_not_compared() -> None:
    fast, other = rails("mlx5_0", "mlx5_1")
    failed = Sent(failure=EndFailure(step="transfer", error="returned -1"))
    assert judge_rails([(fast, wrote(125 * 10**6, 0.1)), (other, failed)]) == []


class Scripted:
    """A probe that answers what it is asked, one question at a time: as if from another thread, so that a second
    question would come in between."""

    def __init__(self) -> None:
        self.asked: list[Question] = []
        self._busy = asyncio.Lock()

    async def ask(self, question: Question, kind: type[Any]) -> Any:
        assert not self._busy.locked()
        async with self._busy:
            await asyncio.to_thread(self.asked.append, question)
        if isinstance(question, Wait):
            return Waits(waiting=receiver())
        assert isinstance(question, Send)
        return HasSent(sent=wrote(MIB, 0.4 if question.path.rail == "mlx5_1" else 0.1))


def test_with_several_rails_each_has_a_waiting_end_of_its_own() -> None:
    rdma = {"connector": {"kind": "mooncake", "protocol": "rdma", "device_name": "mlx5_0,mlx5_1"}}
    recipe = kit.recipe(kit.on_gpus(), {"prefill": rdma, "decode": rdma})
    probes = {"host0": Scripted(), "host1": Scripted()}
    plan = kit.plan(recipe, *kit.hosts(1, 1))
    found = asyncio.run(try_fabric(probes, plan, Wish(rails=True), []))
    assert [type(question) for question in probes["host1"].asked] == [Wait, Wait]
    assert [type(question) for question in probes["host0"].asked] == [Send, Send]
    assert [finding.status for finding in found] == ["ok", "ok", "warning"]
    assert "host0 -> host1 by mlx5_1" in found[2].value
