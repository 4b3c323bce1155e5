"""Interfaces and routes in a network that the test has made; RDMA ports on a recorded tree of the kernel's files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from pdserve.plan.process import Process
from pdserve.preflight.finding import Finding
from pdserve.preflight.links import fastest_rdma, find_peer_memory, find_rdma, interfaces
from tests.plan import kit
from tests.preflight.kit import LOOPBACK, here, in_namespace
from tests.preflight.recorded import INFINIBAND, INFINIBAND_DOWN
from tests.tables import each_row

Tree = Mapping[str, Mapping[str, Mapping[str, str]]]
TWO_NETWORKS = (
    "link add net0 type veth peer name peer0",
    "link set net0 up",
    "link set peer0 up",
    "addr add 10.9.1.1/24 dev net0",
    "addr add 10.9.2.1/16 dev net0",
    "link add net1 type veth peer name peer1",
    "addr add 10.8.0.1/30 dev net1",
)


def told(expression: str, *network: str) -> Any:
    """What an expression over the module is in such a network."""
    code = f"import json; from pdserve.preflight import links; print(json.dumps({expression}))"
    return in_namespace(code, network=network)


@pytest.mark.process
def test_every_address_has_its_own_mask_and_state_and_the_route_decides_which_is_ours() -> None:
    assert LOOPBACK in interfaces()
    sources = "[links.route_source(target) for target in ('10.9.1.7', '10.9.7.7', '10.7.0.7')]"
    shown, routes = told(f"[[str(each) for each in links.interfaces()], {sources}]", *TWO_NETWORKS)
    assert shown == ["lo 127.0.0.1/8", "net0 10.9.1.1/24", "net0 10.9.2.1/16", "net1 10.8.0.1/30 (down)"]
    assert routes == ["10.9.1.1", "10.9.2.1", None]


@pytest.mark.process
@pytest.mark.parametrize(("driverless", "expected"), [(("veth", "tun"), None), ((), 10.0)])
def test_the_speed_of_a_link_is_what_its_driver_states_but_not_of_one_without_a_link(
    driverless: tuple[str, ...], expected: float | None
) -> None:
    """veth states 10 Gbit/s, whatever it gives; no other driver that states anything can be had without an adapter."""
    speeds = f"[setattr(links, '_NO_LINK', {driverless!r}), *map(links.speed, ('net0', 'lo', 'gone'))][1:]"
    assert told(speeds, *TWO_NETWORKS[:3]) == [expected, None, None]


@pytest.mark.process
def test_more_addresses_than_the_first_question_has_room_for() -> None:
    assert told("len(links.interfaces())", *(f"addr add 10.9.{n}.1/24 dev lo" for n in range(100))) == 101


def rdma(device_name: str = "") -> dict[str, Any]:
    connector = {"kind": "mooncake", "protocol": "rdma", "device_name": device_name}
    return {"prefill": {"connector": connector}, "decode": {"connector": connector}}


def find(
    folder: Path,
    tree: Tree = INFINIBAND,
    *,
    device_name: str = "",
    verbs: bool = True,
    processes: Sequence[Process] | None = None,
) -> Finding:
    sys, dev = folder / "infiniband", folder / "dev"
    for device, ports in tree.items():
        for port, files in ports.items():
            place = sys / device / "ports" / port
            place.mkdir(parents=True)
            for name, content in files.items():
                (place / name).parent.mkdir(exist_ok=True)
                (place / name).write_text(content + "\n")
    dev.mkdir()
    if verbs:
        (dev / "uverbs0").touch()
    starting = here(rdma(device_name)).processes if processes is None else processes
    [finding] = find_rdma("here", starting, sys=sys, verbs=dev)
    assert finding.unverified_on_hardware
    return finding


def with_state(device: str, state: str) -> Tree:
    return {**INFINIBAND, device: {port: {**files, "state": state} for port, files in INFINIBAND[device].items()}}


NIXL_BOTH = {"prefill": {"connector": kit.NIXL}, "decode": {"connector": kit.NIXL}}
STORE = {
    **NIXL_BOTH,
    "prefill": {"connector": {"kind": "multi", "of": [kit.NIXL, {"kind": "mooncake-store"}]}},
    "mooncake_store": {"segment_gib": 1, "protocol": "rdma", "device_name": "mlx5_0, mlx5_7"},
}
TCP_STORE = {**STORE, "mooncake_store": {"segment_gib": 1, "protocol": "tcp", "device_name": "mlx5_7"}}


@each_row("change", [{}, NIXL_BOTH, TCP_STORE])
def test_tcp_and_nixl_ask_for_none(change: dict[str, Any], tmp_path: Path) -> None:
    assert find_rdma("here", here(change).processes, sys=tmp_path / "none", verbs=tmp_path) == []


def test_a_connector_inside_multi_and_a_store_are_seen(tmp_path: Path) -> None:
    inside = {"kind": "multi", "of": [{"kind": "mooncake", "protocol": "rdma"}, kit.LMCACHE]}
    plan = here(kit.with_lmcache(), rdma(), {"prefill": {"connector": inside}})
    [finding] = find_rdma("here", [plan.process("prefill-0")], sys=tmp_path / "none", verbs=tmp_path)
    assert finding.value == "no RDMA device"
    processes = here(STORE).processes
    assert [process.name for process in processes if process.rdma_devices is not None] == ["prefill-0"]
    finding = find(tmp_path, processes=processes)
    assert (finding.status, finding.value) == ("failed", "no mlx5_7")
    assert "mooncake_store" in str(finding.fix)


@each_row("tree, name, verbs, status, value, fix", [
    (INFINIBAND, "", True, "ok", "mlx4_0 port 2: 4: ACTIVE, 40 Gb/sec (4X QDR)", "None"),
    ({}, "", True, "failed", "no RDMA device", "protocol: tcp"),
    (INFINIBAND, "", False, "failed", "devices that no process can open", "/dev/infiniband"),
    (INFINIBAND, "mlx5_0,mlx5_7", True, "failed", "no mlx5_7", "there are hfi1_0, mlx4_0, mlx5_0"),
    (with_state("mlx5_0", INFINIBAND_DOWN), "mlx5_0:1", True, "failed", "no active port on mlx5_0", "bring the link"),
    (with_state("mlx5_0", INFINIBAND_DOWN), "mlx4_0", True, "ok", "mlx4_0 port 1", "None"),
    # Without a name any may be taken.
    (with_state("mlx5_0", INFINIBAND_DOWN), "", True, "warning", "; no active port on mlx5_0", "name the good ones"),
    ({"mlx5_0": {"1": {"state": INFINIBAND_DOWN, "rate": "25 Gb/sec"}}}, "", True, "failed", "no active port on", ""),
])  # fmt: skip
def test_devices_must_be_there_open_and_up(
    tmp_path: Path, tree: Tree, name: str, verbs: bool, status: str, value: str, fix: str
) -> None:
    finding = find(tmp_path, tree, device_name=name, verbs=verbs)
    assert finding.status == status
    assert value in finding.value
    assert fix in str(finding.fix)
    assert (status == "ok") == (not finding.evidence) or not tree


@each_row("names, gbps", [([], 100.0), (["mlx4_0"], 40.0), (["mlx4_0:1"], 40.0), (["mlx5_9"], None)])
def test_what_the_fastest_active_port_should_give(tmp_path: Path, names: list[str], gbps: float | None) -> None:
    find(tmp_path)
    assert fastest_rdma(names, tmp_path / "infiniband") == gbps
    assert fastest_rdma(names, tmp_path / "nothing") is None


NO_GID, GID = "0000:0000:0000:0000:0000:0000:0000:0000", "0000:0000:0000:0000:0000:ffff:0a00:0001"


@each_row("gids, index, status, value", [
    ({"0": NO_GID}, None, "failed", "no GID on mlx5_0 port 1"),
    ({"0": GID, "3": NO_GID}, "3", "failed", "no GID 3 (MC_GID_INDEX) on mlx5_0 port 1"),
    ({"0": NO_GID, "3": GID}, "3", "ok", "mlx5_0 port 1: 4: ACTIVE, 400 Gb/sec"),
])  # fmt: skip
def test_a_port_without_an_address_is_named(
    tmp_path: Path, gids: Mapping[str, str], index: str | None, status: str, value: str
) -> None:
    files = {"state": "4: ACTIVE", "rate": "400 Gb/sec", **{f"gids/{number}": text for number, text in gids.items()}}
    env = {} if index is None else {"engine": {"env": {"MC_GID_INDEX": index}}}
    finding = find(tmp_path, {"mlx5_0": {"1": files}}, processes=here(rdma(), env).processes)
    assert (finding.status, finding.value) == (status, value)
    assert ("an address (RoCE)" in str(finding.fix)) == (status == "failed")


def test_device_memory_without_peer_memory_is_a_warning_on_cuda(tmp_path: Path) -> None:
    processes = here(rdma()).processes
    [finding] = find_peer_memory("here", "cuda", processes, modules=tmp_path)
    assert (finding.status, "modprobe nvidia_peermem" in str(finding.fix)) == ("warning", True)
    (tmp_path / "nvidia_peermem").mkdir()
    [finding] = find_peer_memory("here", "cuda", processes, modules=tmp_path)
    assert finding.status == "ok"
    assert find_peer_memory("here", "rocm", processes, modules=tmp_path) == []
    assert find_peer_memory("here", "cuda", here().processes, modules=tmp_path) == []
