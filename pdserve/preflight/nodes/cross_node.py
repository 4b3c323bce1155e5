"""Which ports of a plan other nodes connect to: pure. Loopback ports (LMCache, the proxy's admin) are not here."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from urllib.parse import urlsplit

from pdserve.plan.model import Frozen, Plan
from pdserve.plan.process import Process
from pdserve.preflight.interfaces import is_loopback
from pdserve.preflight.of_plan import address_of, on_node


class CrossNodePort(Frozen):
    """A port on one node that another node must reach."""

    source: str
    """The node that connects."""
    node: str
    """The node that listens."""
    address: str
    port: int
    purpose: str
    """For people: `bootstrap of prefill-0`."""
    greets: bool = True
    """Whether the listener there sends the name of its node; a stranger's would never come."""


def cross_node(plan: Plan) -> tuple[CrossNodePort, ...]:
    """Before the start: the pinned ports. In plan order, each once.

    Who connects is in the plan's `reached_by`; of a range the first port stands for all. The followers of an instance
    that spans nodes connect to their leader.
    """
    return tuple(dict.fromkeys(target for target in _all(plan) if target.source != target.node))


def side_channels(plan: Plan, prefill: str, answer: str | bytes) -> tuple[CrossNodePort, ...]:
    """After the start: the side channels that Mooncake's workers of a prefill have bound at random, from the answer of
    its bootstrap server to /query, and who connects to them: decode, on every node.

    The answer (vLLM 0.26-0.33): {"<dp rank>": {"engine_id": ..., "worker_addr": {"<tp>": {"<pp>": "tcp://ip:port"}}}}.
    Raises ValueError when it is something else.
    """
    process = plan.process(prefill)
    targets = [
        CrossNodePort(
            source=source, node=process.node, address=address, port=port, purpose=f"{prefill} side channel of {who}"
        )
        for who, address, port in _workers(answer)
        for source in _nodes_of(plan, ("decode",))
    ]
    return tuple(dict.fromkeys(target for target in targets if target.source != target.node))


def _workers(answer: str | bytes) -> Iterator[tuple[str, str, int]]:
    try:
        ranks = json.loads(answer)
        for dp, entry in ranks.items():
            for tp, stages in entry["worker_addr"].items():
                for pp, url in stages.items():
                    where = urlsplit(url)
                    if where.hostname is None or where.port is None:
                        raise ValueError(f"{url!r} is no address")
                    yield f"dp {dp} tp {tp} pp {pp}", where.hostname, where.port
    except (AttributeError, TypeError, KeyError) as error:
        raise ValueError(f"not the answer of a bootstrap server: {error!r}") from None


def _all(plan: Plan) -> Iterator[CrossNodePort]:
    for process in plan.processes:
        ranges = {purpose: taken.first for purpose, taken in process.port_ranges.items()}
        for purpose, port in {**process.ports, **ranges}.items():
            kind = purpose.partition("-")[0]  # the second one of a purpose has a number
            if roles := process.reached_by.get(kind):
                yield from _to(plan, process, purpose, port, _nodes_of(plan, roles))
            elif kind == "dp_master":
                followers = plan.instance_of(process.name)[1:]
                yield from _to(plan, process, purpose, port, dict.fromkeys(follower.node for follower in followers))


def _to(plan: Plan, process: Process, purpose: str, port: int, sources: Iterable[str]) -> Iterator[CrossNodePort]:
    address = address_of(plan, process.node)
    if is_loopback(address):
        return
    for source in sources:
        yield CrossNodePort(
            source=source, node=process.node, address=address, port=port, purpose=f"{purpose} of {process.name}"
        )


def _nodes_of(plan: Plan, roles: Collection[str]) -> list[str]:
    return [node.name for node in plan.nodes if any(process.role in roles for process in on_node(plan, node.name))]
