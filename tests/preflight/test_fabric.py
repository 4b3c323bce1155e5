"""The fabric check without a network: which pairs, in which order, what an answer means; and ends that cannot begin."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from pdserve.preflight import transfer
from pdserve.preflight.fabric import (
    Wish,
    find_untried,
    judge_end,
    judge_path,
    judge_rails,
    judge_untried,
    paths,
    rounds,
    split_by_rail,
    try_fabric,
)
from pdserve.preflight.finding import Finding
from pdserve.preflight.node_probe import HasSent, Question, Send, Wait, Waits
from pdserve.preflight.transfer import End, EndFailure, FabricPath, Link, OpenEnd, TransferOutcome, WaitingEnd, send
from tests.launch.deployment import free_ports
from tests.plan import kit
from tests.tables import each_row

MIB = 1 << 20
NOTHING_LISTENS = WaitingEnd(session_port=1, pointer=1, ports=(), link=None)


def end(node: str, protocol: str = "tcp", *, platform: str = "cpu", **more: object) -> End:
    nixl = protocol == "ucx"
    values = {
        "node": node,
        "address": "127.0.0.1",
        "connector": "NixlConnector" if nixl else "MooncakeConnector",
        "engine": "nixl" if nixl else "mooncake",
        "platform": platform,
        "on_device": platform != "cpu",
        "protocol": protocol,
        "devices": "",
        "environment": {},
        "process": "decode-0",
        **more,
    }
    return End.model_validate(values)


def path(source: str = "a", target: str = "b", protocol: str = "tcp", **more: Any) -> FabricPath:
    ends = (end(node, protocol, **more) for node in (source, target))
    return FabricPath(source=next(ends), target=next(ends), reads=protocol == "ucx")


def receiver(mtu: int = 1500, gbps: float | None = None) -> WaitingEnd:
    link = Link(name="eth0", mtu=mtu, gbps=gbps)
    return WaitingEnd(session_port=15002, pointer=1, ports=(15002, 15075), link=link)


def wrote(size: int, seconds: float, **more: object) -> TransferOutcome:
    values = {"timings": ((4096, 0.001), (size, seconds)), "link": Link(name="eth0", mtu=1500), **more}
    return TransferOutcome.model_validate(values)


def judged(
    sent: TransferOutcome, *, min_gbps: float | None = None, protocol: str = "tcp", mtu: int = 1500
) -> list[Finding]:
    return judge_path(path(protocol=protocol), receiver(mtu), sent, min_gbps=min_gbps)


def on_nodes(prefills: int, decodes: int, *changes: dict[str, object]) -> tuple[FabricPath, ...]:
    instances = {"prefill": {"instances": prefills}, "decode": {"instances": decodes}}
    recipe = kit.recipe(kit.on_gpus(), instances, *changes)
    return paths(kit.plan(recipe, *kit.hosts(*[1] * (prefills + decodes))))


def test_prefill_writes_to_decode_on_every_other_node() -> None:
    pairs = {(each.source.node, each.target.node) for each in on_nodes(2, 2)}
    assert pairs == {("host0", "host2"), ("host0", "host3"), ("host1", "host2"), ("host1", "host3")}


def test_each_end_has_what_the_plan_gives_its_engine() -> None:
    [only] = on_nodes(1, 1)
    assert (only.source.address, only.target.address, str(only)) == ("192.0.2.1", "192.0.2.2", "host0 -> host1")
    assert only.source.protocol == "tcp"
    assert only.source.environment["MC_FORCE_TCP"] == "1"
    assert "MC_MIN_RPC_PORT" in only.target.environment
    rdma = {"connector": {"kind": "mooncake", "protocol": "rdma", "device_name": "mlx5_0, mlx5_1"}}
    [only] = on_nodes(1, 1, {"prefill": rdma, "decode": rdma})
    assert (only.source.protocol, only.source.devices) == ("rdma", "mlx5_0,mlx5_1")
    assert "MC_FORCE_TCP" not in only.source.environment


def test_nixl_is_pulled_and_in_the_memory_that_the_engines_will_use() -> None:
    def only(**settings: object) -> FabricPath:
        nixl = {"connector": {**kit.NIXL, **settings}}
        [path] = on_nodes(1, 1, {"prefill": nixl, "decode": nixl})
        return path

    pulled = only()
    assert (pulled.caller.node, pulled.waiting.node) == ("host1", "host0")
    assert (pulled.source.engine, pulled.source.protocol, pulled.source.connector) == ("nixl", "ucx", "NixlConnector")
    assert pulled.source.on_device
    assert not only(buffer_device="cpu").source.on_device


def test_a_plan_without_transfers_says_why_nothing_is_tried() -> None:
    near = find_untried(kit.plan(kit.recipe(kit.on_gpus()), *kit.hosts(2)))
    assert near is not None
    assert "no prefill and decode are on different nodes" in near.value
    nixl = {"connector": {**kit.NIXL, "backends": ["LIBFABRIC"]}}
    other = find_untried(kit.plan(kit.recipe(kit.on_gpus(), {"prefill": nixl, "decode": nixl}), *kit.hosts(1, 1)))
    assert other is not None
    assert (other.status, other.value.partition(": ")[2]) == ("unknown", "the connectors of the plan are NixlConnector")
    assert judge_untried(4, 4) == []
    [finding] = judge_untried(512, 4096)
    assert (finding.status, "512 of 4096 transfers" in finding.value) == ("unknown", True)


def test_no_node_sends_twice_or_receives_twice_in_a_round() -> None:
    wanted = [path(source, target) for source in "abc" for target in "xyz"]
    done = rounds(wanted)
    assert len(done) == 3
    assert sorted(str(each) for some in done for each in some) == sorted(map(str, wanted))
    for some in done:
        assert len({each.source.node for each in some}) == len({each.target.node for each in some}) == len(some)


def rails(ours: str, theirs: str) -> list[FabricPath]:
    return split_by_rail([FabricPath(source=end("a", "rdma", devices=ours), target=end("b", "rdma", devices=theirs))])


def test_each_device_that_both_ends_name_is_a_rail() -> None:
    first, second = rails("mlx5_0,mlx5_1", "mlx5_0,mlx5_1")
    assert (first.source.devices, first.target.devices, str(first)) == ("mlx5_0", "mlx5_0", "a -> b by mlx5_0")
    assert second.rail == "mlx5_1"
    assert len(rounds([first, second])) == 2, "two rails of a node share its memory and its buses"
    assert [str(path) for path in (*rails("mlx5_0", "mlx5_0"), *rails("a,b", "a"))] == ["a -> b", "a -> b"]


@each_row("rate, slow", [(0.49, True), (0.51, False)])
def test_a_rail_at_less_than_half_the_rate_of_the_fastest_is_named(rate: float, slow: bool) -> None:
    fast, other = rails("mlx5_0,mlx5_1", "mlx5_0,mlx5_1")
    failed = TransferOutcome(failure=EndFailure(step="transfer", error="returned -1"))
    found = judge_rails([(fast, wrote(125 * 10**6, 0.1)), (other, wrote(125 * 10**6, 0.1 / rate)), (other, failed)])
    assert [finding.status for finding in found] == (["warning"] if slow else [])
    if slow:
        assert found[0].value == "a -> b by mlx5_1: 4.9 Gbit/s, and 10 by mlx5_0"


class Scripted:
    """A probe that answers what it is asked."""

    def __init__(self) -> None:
        self.asked: list[Question] = []

    async def ask(self, question: Question, kind: type[Any]) -> Any:
        self.asked.append(question)
        if isinstance(question, Send):
            return HasSent(sent=wrote(MIB, 0.4 if question.path.rail == "mlx5_1" else 0.1))
        return Waits(waiting=receiver())


def test_with_several_rails_each_has_a_waiting_end_of_its_own() -> None:
    rdma = {"connector": {"kind": "mooncake", "protocol": "rdma", "device_name": "mlx5_0,mlx5_1"}}
    recipe = kit.recipe(kit.on_gpus(), {"prefill": rdma, "decode": rdma})
    probes = {"host0": Scripted(), "host1": Scripted()}
    found = asyncio.run(try_fabric(probes, kit.plan(recipe, *kit.hosts(1, 1)), Wish(rails=True), []))
    assert [type(question) for question in probes["host1"].asked] == [Wait, Wait]
    assert [type(question) for question in probes["host0"].asked] == [Send, Send]
    assert [finding.status for finding in found] == ["ok", "ok", "warning"]
    assert "host0 -> host1 by mlx5_1" in found[2].value


@each_row("least, status", [(None, "ok"), (10.0, "ok"), (10.1, "failed")])
def test_the_rate_is_that_of_the_largest_write_and_less_than_was_asked_for_fails(
    least: float | None, status: str
) -> None:
    sent = wrote(125 * 10**6, 0.1, connect_seconds=0.0005)
    [finding] = judged(sent, min_gbps=least)
    assert finding.status == status
    assert finding.value.startswith("a -> b: 10 Gbit/s (119 MiB in 100 ms), 4 KiB in 1.0 ms, connected in 0.5 ms")
    if status == "failed":
        assert f"at least {least:g} Gbit/s" in finding.need
        assert "fabric.min_gbps" in str(finding.fix)


@each_row("protocol, port, fix", [("tcp", 15075, "open TCP 15075 on b"), ("ucx", 40001, "UCX_TCP_PORT_RANGE")])
def test_ports_that_are_dropped_are_named_and_the_others_are_not(protocol: str, port: int, fix: str) -> None:
    [finding] = judged(
        TransferOutcome(unreachable=((port, "no answer within 2 s", "a firewall drops it"),)), protocol=protocol
    )
    assert finding.value == f"a -> b at 127.0.0.1, port {port}: no answer within 2 s"
    assert fix in str(finding.fix)
    assert finding.evidence == (f"port {port}: no answer within 2 s; a firewall drops it",)


WITHOUT_CUDA_COPY = (
    "E1126 20:19:08.698741    1666 config.cpp:84] Invalid UCX_TLS=tcp for NIXL UCX backend: NVIDIA GPU(s) are present, "
    "but this setting does not enable CUDA memory support. Add cuda_copy for basic GPU support, or cuda to also "
    "include NVLink support."
)
"""As NIXL 1.5.1 answered beside an H100."""
BAD_ADDRESS = (
    "E1126 20:50:04.165088 755 tcp_transport_session_impl.h:890] ClientSession::writeBody failed. Attempt to write "
    "data 0x7fd9ba000000 using buffer 0x7fd9ba000000. Error: Bad address (value: 14)"
)
"""As an H100 and mooncake-transfer-engine-non-cuda 0.3.13.post1 answered."""


@each_row("step, protocol, platform, memlock, line, cause, fix", [
    ("import", "tcp", "cpu", None, "", "not there for the engines' interpreter", "engine.python"),
    ("initialize", "tcp", "cpu", None, "", "is not an address of a", "ports.transfer"),
    ("initialize", "rdma", "cpu", None, "", "no usable RDMA device", "protocol: tcp"),
    ("register", "rdma", "cpu", 64 << 10, "", "64 KiB may be locked", "ulimit -l unlimited"),
    ("register", "rdma", "cpu", None, "", "the device refuses the memory", "lines below"),
    ("register", "rdma", "rocm", None, "", "dmabuf", "fabric.check: false"),
    ("transfer", "rdma", "rocm", None, "", "dmabuf", "fabric.check: false"),
    ("transfer", "tcp", "cuda", None, BAD_ADDRESS, "the runtime that it was compiled for",
     "pip uninstall -y mooncake-transfer-engine-non-cuda, then pip install"),
    ("compare", "tcp", "cpu", None, "", "not what was sent", "exclude_nodes: [a]"),
    ("transfer", "tcp", "cpu", None, "", "far too slow", "ip -s link"),
    ("import", "ucx", "cpu", None, "", "NIXL, or a system library of it", "nixl package"),
    ("initialize", "ucx", "cpu", None, "", "no transport or network device", "UCX_NET_DEVICES"),
    ("initialize", "ucx", "cuda", None, WITHOUT_CUDA_COPY, "UCX_TLS leaves out device memory", "add cuda_copy to"),
])  # fmt: skip
def test_each_step_has_its_cause_and_its_fix(
    step: str, protocol: str, platform: str, memlock: int | None, line: str, cause: str, fix: str
) -> None:
    failure = EndFailure(step=step, error="returned -1", memlock=memlock, output=(line,))
    [of_path] = judge_path(
        path(protocol=protocol, platform=platform), receiver(), TransferOutcome(failure=failure), min_gbps=None
    )
    of_end = judge_end(end("a", protocol, platform=platform), failure)
    for finding in (of_path, of_end):
        assert finding.status == "failed"
        assert f"{step} failed: returned -1" in finding.value
        assert cause in finding.evidence[0]
        assert finding.evidence[1] == line
        assert fix in str(finding.fix)
        assert finding.unverified_on_hardware == ("rdma" in protocol or platform == "rocm")
    assert "a -> b, port 15002" in of_path.value


def test_another_way_out_and_another_mtu_are_warnings() -> None:
    rate, route, mtu = judged(wrote(MIB, 0.1, leaves_by="10.0.0.9"), mtu=9000)
    assert (rate.status, route.status, mtu.status) == ("ok", "warning", "warning")
    assert "packets leave from 10.0.0.9, not from 127.0.0.1" in route.value
    assert mtu.value == "a -> b: MTU 1500 on eth0, 9000 on eth0"
    far = Link(name="eth9", mtu=1500)
    rate, route = judged(wrote(MIB, 0.00031, link=far, leaves_by="10.0.0.9"), protocol="ucx")
    assert (rate.node, rate.value.endswith("eth0 (MTU 1500) -> eth9 (MTU 1500)")) == ("b", True), "decode reads"
    assert route.value.startswith("a -> b: from b to a: packets leave from 10.0.0.9")


@each_row("protocol, sender, receives, shown, status", [
    ("tcp", 25.0, 100.0, "3 Gbit/s of 25 (", "ok"),
    ("tcp", 100.0, 40.0, "3 Gbit/s of 40 (", "warning"),
    ("rdma", 400.0, 25.0, "3 Gbit/s of 25 (", "ok"),
    ("tcp", None, 100.0, "3 Gbit/s (", "ok"),
])  # fmt: skip
def test_the_rate_stands_beside_what_the_slower_end_should_give(
    protocol: str, sender: float | None, receives: float, shown: str, status: str
) -> None:
    """A tenth is enough: one sender does not fill a fast link."""
    sent = wrote(3 * 10**9 // 8, 1.0, link=Link(name="eth9", mtu=1500, gbps=sender))
    [finding] = judge_path(path(protocol=protocol), receiver(gbps=receives), sent, min_gbps=None)
    assert finding.status == status
    assert finding.value.startswith(f"a -> b: {shown}")
    [wished] = judge_path(path(protocol=protocol), receiver(gbps=receives), sent, min_gbps=1)
    assert wished.status == "ok"


def interpreter(folder: Path, script: str) -> str:
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    return str(python)


def begun(python: str) -> WaitingEnd | EndFailure:
    waiting = OpenEnd(end("b"), python, is_read=False)
    try:
        return waiting.begin()
    finally:
        waiting.close()


@pytest.mark.process
def test_an_interpreter_without_mooncake_is_named(tmp_path: Path) -> None:
    """-S: without what is installed."""
    python = interpreter(tmp_path, f'exec {sys.executable} -S "$@"')
    for failure in (begun(python), send(path(), NOTHING_LISTENS, python).failure):
        assert isinstance(failure, EndFailure)
        assert (failure.step, failure.error) == ("import", "No module named 'mooncake'")


@pytest.mark.process
def test_an_interpreter_that_ends_at_once_or_is_not_there_is_a_failure_and_no_slow_link(tmp_path: Path) -> None:
    ended = "its program ended, or was not ready in time"
    failure = EndFailure(step="start", error=ended, output=("no such library",))
    assert begun(interpreter(tmp_path, "echo no such library >&2; exit 1")) == failure
    sent = send(path(), NOTHING_LISTENS, "/none/python")
    assert sent.failure == EndFailure(step="start", error="No such file or directory")


@pytest.mark.process
def test_a_port_that_refuses_is_named_before_the_engine_tries_it() -> None:
    [closed_port] = free_ports(1)
    sent = send(path(), NOTHING_LISTENS.model_copy(update={"ports": (closed_port,)}), "/none/python")
    [(port, problem, cause)] = sent.unreachable
    assert (port, problem) == (closed_port, "refused")
    assert "firewall refuses it" in cause


ENGINE = """
import ctypes, threading

class TransferEngine:
    def initialize(self, *_):
        return 0

    def batch_register_memory(self, *_):
        return 0

    def batch_transfer_sync_write(self, _, here, there, sizes):
        {write}
        self.base, self.far = there[0], ctypes.string_at(here[0], sizes[0])
        return 0

    def batch_transfer_sync_read(self, _, here, there, sizes):
        begin = there[0] - self.base
        ctypes.memmove(here[0], self.far[begin : begin + sizes[0]], sizes[0])
        return 0
"""
"""A stand-in for Mooncake, to hang or to write what is wrong."""


def sent_by(folder: Path, write: str) -> TransferOutcome:
    package = folder / "mooncake"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "engine.py").write_text(ENGINE.format(write=write))
    source = end("a", environment={"PYTHONPATH": str(folder)})
    return send(path().model_copy(update={"source": source}), NOTHING_LISTENS, sys.executable)


@pytest.mark.process
@each_row("write, step", [("pass", None), ("ctypes.memset(here[0] + sizes[0] - 9, 0, 9)", "compare")])
def test_what_was_written_is_read_back_and_compared(tmp_path: Path, write: str, step: str | None) -> None:
    sent = sent_by(tmp_path, write)
    assert (sent.failure.step if sent.failure else None, bool(sent.timings)) == (step, step is None)


def test_without_a_device_nothing_is_blamed() -> None:
    failed = TransferOutcome(failure=EndFailure(step="device", error="No HIP GPUs are available"))
    [finding] = judge_path(path(platform="rocm"), receiver(), failed, min_gbps=None)
    assert finding.status == "unknown"


@pytest.mark.process
def test_a_transfer_that_does_not_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_SEND_SECONDS", 1)
    sent = sent_by(tmp_path, "threading.Event().wait()")
    assert sent.failure == EndFailure(step="transfer", error="not done within 1 s")
