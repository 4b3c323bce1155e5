"""The fabric check without a network: which pairs, in which order, what an answer means; and ends that cannot begin."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pdserve.cli.commands import app
from pdserve.preflight import transfer
from pdserve.preflight.fabric import find_untried, judge_end, judge_path, judge_untried, paths, rounds
from pdserve.preflight.finding import Finding
from pdserve.preflight.transfer import EndFailure, FabricPath, Link, Sent, Waiting, WaitingEnd, send
from tests.launch.deployment import free_ports
from tests.plan import kit
from tests.preflight.fabric_kit import MIB, end, path, receiver, wrote
from tests.recipe.kit import CPU, refused


def judged(sent: Sent, *, min_gbps: float | None = None, protocol: str = "tcp", mtu: int = 1500) -> list[Finding]:
    return judge_path(path(protocol=protocol), receiver(mtu), sent, min_gbps=min_gbps)


def on_nodes(prefills: int, decodes: int, *changes: dict[str, object]) -> tuple[FabricPath, ...]:
    recipe = kit.recipe(
        kit.on_gpus(),
        {"prefill": {"instances": prefills}, "decode": {"instances": decodes}},
        *changes,
    )
    return paths(kit.plan(recipe, *kit.hosts(*[1] * (prefills + decodes))))


# Which pairs


def test_prefill_writes_to_decode_on_every_other_node() -> None:
    pairs = {(each.source.node, each.target.node) for each in on_nodes(2, 2)}
    assert pairs == {("host0", "host2"), ("host0", "host3"), ("host1", "host2"), ("host1", "host3")}


def test_each_end_has_what_the_plan_gives_its_engine() -> None:
    [only] = on_nodes(1, 1)
    assert (only.source.address, only.target.address) == ("192.0.2.1", "192.0.2.2")
    assert only.source.protocol == "tcp"
    assert only.source.environment["MC_FORCE_TCP"] == "1"
    low, high = (int(only.target.environment[f"MC_{side}_RPC_PORT"]) for side in ("MIN", "MAX"))
    assert low < high
    assert str(only) == "host0 -> host1"


def test_rdma_has_the_devices_of_the_recipe() -> None:
    rdma = {"connector": {"kind": "mooncake", "protocol": "rdma", "device_name": "mlx5_0, mlx5_1"}}
    [only] = on_nodes(1, 1, {"prefill": rdma, "decode": rdma})
    assert (only.source.protocol, only.source.devices) == ("rdma", "mlx5_0,mlx5_1")
    assert "MC_FORCE_TCP" not in only.source.environment


def test_what_stays_on_a_node_is_not_tried() -> None:
    plan = kit.plan(kit.recipe(kit.on_gpus()), *kit.hosts(2))
    assert paths(plan) == ()
    untried = find_untried(plan)
    assert untried is not None
    assert "no prefill and decode are on different nodes" in untried.value


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


def test_a_connector_that_is_not_supported_is_named() -> None:
    nixl = {"connector": {**kit.NIXL, "backends": ["LIBFABRIC"]}}
    plan = kit.plan(kit.recipe(kit.on_gpus(), {"prefill": nixl, "decode": nixl}), *kit.hosts(1, 1))
    untried = find_untried(plan)
    assert untried is not None
    assert (untried.status, untried.value) == (
        "unknown",
        "no transfer was tried: the connectors of the plan are NixlConnector",
    )
    assert "pdserve verify" in str(untried.fix)


def test_no_node_sends_twice_or_receives_twice_in_a_round() -> None:
    wanted = [path(source, target) for source in "abc" for target in "xyz"]
    done = rounds(wanted)
    assert len(done) == 3
    assert sorted(str(each) for some in done for each in some) == sorted(map(str, wanted))
    for some in done:
        assert len({each.source.node for each in some}) == len({each.target.node for each in some}) == len(some)


def test_transfers_beyond_the_limit_are_counted() -> None:
    assert judge_untried(4, 4) == []
    [finding] = judge_untried(512, 4096)
    assert (finding.status, "512 of 4096 transfers" in finding.value) == ("unknown", True)


# What an answer means


def test_the_rate_is_that_of_the_largest_write() -> None:
    sent = wrote(125 * 10**6, 0.1, connect_seconds=0.0005)
    assert sent.gbps == pytest.approx(10)
    [finding] = judged(sent)
    assert finding.status == "ok"
    assert finding.value.startswith("a -> b: 10 Gbit/s (119 MiB in 100 ms), 4 KiB in 1.0 ms, connected in 0.5 ms")


@pytest.mark.parametrize(("least", "status"), [(10.0, "ok"), (10.1, "failed")])
def test_less_than_was_asked_for_fails(least: float, status: str) -> None:
    [finding] = judged(wrote(125 * 10**6, 0.1), min_gbps=least)
    assert finding.status == status
    if status == "failed":
        assert f"at least {least:g} Gbit/s" in finding.need
        assert "fabric.min_gbps" in str(finding.fix)


def test_ports_that_are_dropped_are_named_and_the_others_are_not() -> None:
    [finding] = judged(Sent(unreachable=((15075, "no answer within 2 s", "a firewall drops it"),)))
    assert finding.value == "a -> b at 127.0.0.1, port 15075: no answer within 2 s"
    assert str(finding.fix).startswith("open TCP 15075 on b")
    assert finding.evidence == ("port 15075: no answer within 2 s; a firewall drops it",)


@pytest.mark.parametrize(
    ("step", "protocol", "memlock", "cause", "fix"),
    [
        ("import", "tcp", None, "not there for the engines' interpreter", "engine.python"),
        ("initialize", "tcp", None, "is not an address of a", "ports.transfer"),
        ("initialize", "rdma", None, "no usable RDMA device", "protocol: tcp"),
        ("register", "rdma", 64 << 10, "64 KiB may be locked", "ulimit -l unlimited"),
        ("register", "rdma", None, "the device refuses the memory", "lines below"),
        ("compare", "tcp", None, "not what was sent", "exclude_nodes: [a]"),
        ("transfer", "tcp", None, "far too slow", "ip -s link"),
        ("import", "ucx", None, "NIXL, or a system library of it", "nixl package"),
        ("initialize", "ucx", None, "no transport or network device", "UCX_NET_DEVICES"),
    ],
)
def test_each_step_has_its_cause_and_its_fix(
    step: str, protocol: str, memlock: int | None, cause: str, fix: str
) -> None:
    failure = EndFailure(step=step, error="returned -1", memlock=memlock, output=("a line of the engine",))
    [of_path] = judged(Sent(failure=failure), protocol=protocol)
    of_end = judge_end(end("a", protocol=protocol), failure)
    for finding in (of_path, of_end):
        assert finding.status == "failed"
        assert f"{step} failed: returned -1" in finding.value
        assert cause in finding.evidence[0]
        assert finding.evidence[1] == "a line of the engine"
        assert fix in str(finding.fix)
        assert finding.unverified_on_hardware == (protocol == "rdma")
    assert "a -> b, port 15002" in of_path.value


def test_another_way_out_and_another_mtu_are_warnings() -> None:
    sent = wrote(MIB, 0.1, leaves_by="10.0.0.9")
    rate, route, mtu = judged(sent, mtu=9000)
    assert (rate.status, route.status, mtu.status) == ("ok", "warning", "warning")
    assert "packets leave from 10.0.0.9, not from 127.0.0.1" in route.value
    assert mtu.value == "a -> b: MTU 1500 on eth0, 9000 on eth0"


# What is refused


@pytest.mark.parametrize("least", ["0", "-1", ".inf", "fast"])
def test_a_least_rate_that_is_none_is_refused(tmp_path: Path, least: str) -> None:
    assert "fabric.min_gbps" in refused(tmp_path, CPU, f"fabric.min_gbps={least}")


def test_a_least_rate_without_the_check_is_refused() -> None:
    done = CliRunner().invoke(app, ["preflight", "recipe.yaml", "--min-gbps", "10"])
    assert done.exit_code == 2
    assert "--min-gbps belongs to --fabric" in done.output


# Ends that cannot begin


@pytest.mark.process
def test_an_interpreter_without_mooncake_is_named(tmp_path: Path) -> None:
    """-S: without what is installed."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    waiting = Waiting(end("b"), str(python), is_read=False)
    try:
        begun = waiting.begin()
    finally:
        waiting.close()
    assert isinstance(begun, EndFailure)
    assert (begun.step, begun.error) == ("import", "No module named 'mooncake'")
    sent = send(path(), WaitingEnd(session_port=1, pointer=1, ports=(), link=None), str(python))
    assert sent.failure is not None
    assert sent.failure.step == "import"


@pytest.mark.process
def test_an_interpreter_that_ends_at_once_is_a_failure_with_its_output(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no such library >&2\nexit 1\n")
    python.chmod(0o755)
    waiting = Waiting(end("b"), str(python), is_read=False)
    try:
        begun = waiting.begin()
    finally:
        waiting.close()
    assert begun == EndFailure(
        step="start", error="its program ended, or was not ready in time", output=("no such library",)
    )


ENGINE = """
import ctypes, threading

class TransferEngine:
    def initialize(self, *_):
        {start}
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
"""A stand-in for Mooncake, to hang or to be slow where it is asked for."""


TORCH = """
import ctypes
from types import SimpleNamespace

uint8, cuda = "uint8", SimpleNamespace(synchronize=lambda: None)

class Tensor:
    def __init__(self, buffer, size):
        self.buffer, self.size = buffer, size

    def data_ptr(self):
        return ctypes.addressof(self.buffer)

    def __getitem__(self, part):
        return Tensor((ctypes.c_char * (part.stop - part.start)).from_buffer(self.buffer, part.start), None)

    def copy_(self, other):
        ctypes.memmove(self.buffer, other, len(other))

    def cpu(self):
        return SimpleNamespace(tolist=lambda: list(bytes(self.buffer)))

def empty(size, dtype, device):
    {device}
    return Tensor(ctypes.create_string_buffer(size), size)

def frombuffer(data, dtype):
    return bytes(data)
"""
"""A stand-in for torch, whose device is host memory."""


def sent_by(
    folder: Path, *, start: str = "pass", write: str = "pass", on_device: bool = False, device: str = "pass"
) -> Sent:
    package = folder / "mooncake"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "engine.py").write_text(ENGINE.format(start=start, write=write))
    (folder / "torch.py").write_text(TORCH.format(device=device))
    source = end("a", on_device=on_device).model_copy(update={"environment": {"PYTHONPATH": str(folder)}})
    there = WaitingEnd(session_port=1, pointer=1, ports=(), link=None)
    return send(path().model_copy(update={"source": source}), there, sys.executable)


@pytest.mark.process
def test_a_transfer_that_does_not_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_SEND_SECONDS", 1)
    sent = sent_by(tmp_path, write="threading.Event().wait()")
    assert sent.failure == EndFailure(step="transfer", error="not done within 1 s")


@pytest.mark.process
def test_memory_of_a_device_is_written_and_compared_by_torch(tmp_path: Path) -> None:
    sent = sent_by(tmp_path, on_device=True)
    assert sent.failure is None
    assert sent.timings


@pytest.mark.process
def test_bytes_of_a_device_that_do_not_arrive_are_seen(tmp_path: Path) -> None:
    sent = sent_by(tmp_path, on_device=True, write="ctypes.memset(here[0] + sizes[0] - 9, 0, 9)")
    assert sent.failure is not None
    assert sent.failure.step == "compare"


@pytest.mark.process
def test_without_a_device_nothing_is_tried_and_nothing_is_blamed(tmp_path: Path) -> None:
    sent = sent_by(tmp_path, on_device=True, device="raise RuntimeError('No HIP GPUs are available')")
    assert sent.failure is not None
    assert (sent.failure.step, sent.failure.error) == ("device", "RuntimeError: No HIP GPUs are available")
    [finding] = judge_path(path(on_device=True), receiver(), sent, min_gbps=None)
    assert (finding.status, finding.unverified_on_hardware) == ("unknown", True)
    assert "the driver is not loaded" in finding.evidence[0]


@pytest.mark.parametrize("step", ["register", "transfer"])
def test_what_fails_in_memory_of_a_device_names_peer_memory(step: str) -> None:
    sent = Sent(failure=EndFailure(step=step, error="returned -1"))
    [finding] = judge_path(path(protocol="rdma", on_device=True), receiver(), sent, min_gbps=None)
    assert finding.status == "failed"
    assert "dmabuf" in finding.evidence[0]
    assert "fabric.check: false" in str(finding.fix)


def on_cuda(each: FabricPath) -> FabricPath:
    ends = {name: getattr(each, name).model_copy(update={"platform": "cuda"}) for name in ("source", "target")}
    return each.model_copy(update=ends)


def test_over_tcp_a_mooncake_without_cuda_is_the_cause() -> None:
    """As an H100 and mooncake-transfer-engine-non-cuda 0.3.13.post1 answered."""
    sent = Sent(
        failure=EndFailure(
            step="transfer",
            error="writing 4 KiB returned -1",
            output=(
                "E1126 20:50:04.165088 755 tcp_transport_session_impl.h:890] ClientSession::writeBody failed. "
                "Attempt to write data 0x7fd9ba000000 using buffer 0x7fd9ba000000. Error: Bad address (value: 14)",
            ),
        )
    )
    [finding] = judge_path(on_cuda(path(on_device=True)), receiver(), sent, min_gbps=None)
    assert (finding.status, finding.unverified_on_hardware) == ("failed", False)
    assert "the runtime that it was compiled for" in finding.evidence[0]
    assert str(finding.fix).startswith("pip uninstall -y mooncake-transfer-engine-non-cuda, then pip install")


def test_a_choice_of_ucx_without_device_memory_is_the_cause() -> None:
    """As NIXL 1.5.1 answered beside an H100."""
    line = (
        "E1126 20:19:08.698741    1666 config.cpp:84] Invalid UCX_TLS=tcp for NIXL UCX backend: NVIDIA GPU(s) are "
        "present, but this setting does not enable CUDA memory support. Add cuda_copy for basic GPU support, or cuda "
        "to also include NVLink support."
    )
    failure = EndFailure(step="initialize", error="nixlBackendError: NIXL_ERR_BACKEND", output=(line, "another"))
    finding = judge_end(on_cuda(path(protocol="ucx", on_device=True)).source, failure)
    assert finding.evidence[0] == "likely cause: UCX_TLS leaves out device memory"
    assert str(finding.fix).startswith("add cuda_copy to UCX_TLS in engine.env")


@pytest.mark.parametrize(
    ("protocol", "sender", "receives", "shown", "status"),
    [
        ("tcp", 25.0, 100.0, "3 Gbit/s of 25 (", "ok"),
        ("tcp", 100.0, 40.0, "3 Gbit/s of 40 (", "warning"),
        ("ucx", 40.0, 40.0, "3 Gbit/s of 40 (", "warning"),
        ("rdma", 400.0, 25.0, "3 Gbit/s of 25 (", "ok"),
        ("rdma", 400.0, 400.0, "3 Gbit/s of 400 (", "warning"),
        ("tcp", None, 100.0, "3 Gbit/s (", "ok"),
    ],
)
def test_the_rate_stands_beside_what_the_slower_end_should_give(
    protocol: str, sender: float | None, receives: float, shown: str, status: str
) -> None:
    """A tenth is enough: one sender does not fill a fast link."""
    sent = wrote(3 * 10**9 // 8, 1.0, link=Link(name="eth9", mtu=1500, gbps=sender))
    [finding] = judge_path(path(protocol=protocol), receiver(gbps=receives), sent, min_gbps=None)
    assert finding.status == status
    assert finding.value.startswith(f"a -> b: {shown}")
    assert (status == "warning") == ("fabric.min_gbps" in str(finding.fix))
    [wished] = judge_path(path(protocol=protocol), receiver(gbps=receives), sent, min_gbps=1)
    assert wished.status == "ok"


def test_a_transfer_of_less_than_a_millisecond_has_its_figure() -> None:
    [finding] = judged(wrote(64 * MIB, 0.00031))
    assert "(64 MiB in 0.31 ms)" in finding.value


def test_where_decode_reads_the_link_is_still_shown_from_prefill_to_decode() -> None:
    sent = wrote(MIB, 0.1, link=Link(name="eth9", mtu=1500), leaves_by="10.0.0.9")
    rate, route = judged(sent, protocol="ucx")
    assert rate.node == "b"
    assert rate.value.endswith("eth0 (MTU 1500) -> eth9 (MTU 1500)")
    assert "NixlConnector with ucx reads from 127.0.0.1, host memory to host memory" in rate.need
    assert route.value.startswith("a -> b: from b to a: packets leave from 10.0.0.9")


def test_ports_of_ucx_have_a_fix_of_their_own() -> None:
    sent = Sent(unreachable=((40001, "no answer within 2 s", "a firewall drops it"),))
    [finding] = judged(sent, protocol="ucx")
    assert finding.value == "a -> b at 127.0.0.1, port 40001: no answer within 2 s"
    assert "UCX_TCP_PORT_RANGE" in str(finding.fix)


@pytest.mark.process
def test_an_engine_that_starts_slowly_is_no_slow_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_SEND_SECONDS", 4)  # a busy machine writes for more than one
    sent = sent_by(tmp_path, start="threading.Event().wait(4.5)")
    assert sent.failure is None
    assert sent.timings


@pytest.mark.process
def test_an_interpreter_that_is_not_on_the_sending_node_is_no_slow_link() -> None:
    sent = send(path(), WaitingEnd(session_port=1, pointer=1, ports=(), link=None), "/none/python")
    assert sent.failure == EndFailure(step="start", error="No such file or directory")


@pytest.mark.process
def test_a_port_that_refuses_is_named_before_the_engine_tries_it() -> None:
    [closed_port] = free_ports(1)
    sent = send(path(), WaitingEnd(session_port=1, pointer=1, ports=(closed_port,), link=None), "/none/python")
    [(port, problem, cause)] = sent.unreachable
    assert (port, problem) == (closed_port, "refused")
    assert "firewall refuses it" in cause


@pytest.mark.process
def test_an_interpreter_that_is_not_there_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(OSError, match="No such file"):
        Waiting(end("b"), "/none/python", is_read=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.process
def test_an_end_whose_owner_is_killed_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot be closed then: there must be nothing to remove at any time."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nread order; echo a word >&2; echo \'{"session_port": 1, "pointer": 1}\'; read end\n')
    python.chmod(0o755)
    waiting = Waiting(end("b"), str(python), is_read=False)
    try:
        assert isinstance(waiting.begin(), WaitingEnd)
        assert list(tmp_path.iterdir()) == [python]
    finally:
        waiting.close()
