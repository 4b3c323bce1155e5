"""RDMA devices and links where a connector wants them, on a recorded tree of the kernel's files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from pdserve.plan.process import Process
from pdserve.preflight.finding import Finding
from pdserve.preflight.links import fastest_rdma, find_peer_memory, find_rdma
from tests.plan import kit
from tests.preflight.kit import here
from tests.preflight.recorded import INFINIBAND, INFINIBAND_DOWN

Tree = Mapping[str, Mapping[str, Mapping[str, str]]]


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
                (place / name).write_text(content + "\n")
    if verbs:
        dev.mkdir()
        (dev / "uverbs0").touch()
    starting = here(rdma(device_name)).processes if processes is None else processes
    [finding] = find_rdma("here", starting, sys=sys, verbs=dev)
    assert finding.unverified_on_hardware
    return finding


def with_state(device: str, state: str) -> Tree:
    return {**INFINIBAND, device: {port: {**files, "state": state} for port, files in INFINIBAND[device].items()}}


@pytest.mark.parametrize("change", [{}, {"prefill": {"connector": kit.NIXL}, "decode": {"connector": kit.NIXL}}])
def test_tcp_and_nixl_ask_for_none(change: dict[str, Any], tmp_path: Path) -> None:
    assert find_rdma("here", here(change).processes, sys=tmp_path / "none", verbs=tmp_path) == []


def test_a_connector_inside_multi_is_seen(tmp_path: Path) -> None:
    inside = {"kind": "multi", "of": [{"kind": "mooncake", "protocol": "rdma"}, kit.LMCACHE]}
    plan = here(kit.with_lmcache(), rdma(), {"prefill": {"connector": inside}})
    [finding] = find_rdma("here", [plan.process("prefill-0")], sys=tmp_path / "none", verbs=tmp_path)
    assert finding.value == "no RDMA device"


def test_the_devices_that_a_store_names_are_looked_for(tmp_path: Path) -> None:
    """Also where prefill and decode move KV without RDMA devices that are known."""
    change = {
        "prefill": {"connector": {"kind": "multi", "of": [kit.NIXL, {"kind": "mooncake-store"}]}},
        "decode": {"connector": kit.NIXL},
        "mooncake_store": {"segment_gib": 1, "protocol": "rdma", "device_name": "mlx5_0, mlx5_7"},
    }
    processes = here(change).processes
    wanting = [process.name for process in processes if process.rdma_devices is not None]
    assert wanting == ["prefill-0"]
    finding = find(tmp_path, processes=processes)
    assert (finding.status, finding.value) == ("failed", "no mlx5_7")
    assert "mooncake_store" in str(finding.fix)


def test_a_store_over_tcp_asks_for_no_device(tmp_path: Path) -> None:
    store = {"segment_gib": 1, "protocol": "tcp", "device_name": "mlx5_7"}
    multi = {"kind": "multi", "of": [kit.NIXL, {"kind": "mooncake-store"}]}
    change = {"prefill": {"connector": multi}, "decode": {"connector": kit.NIXL}, "mooncake_store": store}
    assert find_rdma("here", here(change).processes, sys=tmp_path / "none", verbs=tmp_path) == []


def test_all_links_up(tmp_path: Path) -> None:
    finding = find(tmp_path)
    assert finding.status == "ok"
    assert "mlx4_0 port 2: 4: ACTIVE, 40 Gb/sec (4X QDR)" in finding.value


@pytest.mark.parametrize(("names", "gbps"), [([], 100.0), (["mlx4_0"], 40.0), (["mlx4_0:1"], 40.0), (["mlx5_9"], None)])
def test_what_the_fastest_active_port_should_give(tmp_path: Path, names: list[str], gbps: float | None) -> None:
    find(tmp_path)
    assert fastest_rdma(names, tmp_path / "infiniband") == gbps
    assert fastest_rdma(names, tmp_path / "nothing") is None


def test_no_device(tmp_path: Path) -> None:
    finding = find(tmp_path, {})
    assert (finding.status, finding.value) == ("failed", "no RDMA device")
    assert finding.fix is not None
    assert "protocol: tcp" in finding.fix


def test_devices_that_a_container_may_not_open(tmp_path: Path) -> None:
    finding = find(tmp_path, verbs=False)
    assert finding.status == "failed"
    assert "/dev/infiniband" in str(finding.fix)


def test_a_named_device_that_is_not_there(tmp_path: Path) -> None:
    finding = find(tmp_path, device_name="mlx5_0,mlx5_7")
    assert (finding.status, finding.value) == ("failed", "no mlx5_7")
    assert "there are hfi1_0, mlx4_0, mlx5_0" in str(finding.fix)


def test_a_named_device_whose_link_is_down(tmp_path: Path) -> None:
    finding = find(tmp_path, with_state("mlx5_0", INFINIBAND_DOWN), device_name="mlx5_0:1")
    assert (finding.status, finding.value) == ("failed", "no active port on mlx5_0")
    assert "mlx5_0 port 1: 1: DOWN, 25 Gb/sec (1X EDR)" in finding.evidence


def test_another_device_that_is_down_does_not_matter_when_one_is_named(tmp_path: Path) -> None:
    assert find(tmp_path, with_state("mlx5_0", INFINIBAND_DOWN), device_name="mlx4_0").status == "ok"


def test_without_a_name_a_device_that_is_down_may_be_taken(tmp_path: Path) -> None:
    finding = find(tmp_path, with_state("mlx5_0", INFINIBAND_DOWN))
    assert finding.status == "warning"
    assert finding.value.endswith("no active port on mlx5_0")


def test_all_links_down(tmp_path: Path) -> None:
    tree = {"mlx5_0": {"1": {"state": INFINIBAND_DOWN, "rate": "25 Gb/sec (1X EDR)"}}}
    assert find(tmp_path, tree).status == "failed"


def with_gids(folder: Path, gids: Mapping[str, str]) -> None:
    place = folder / "infiniband" / "mlx5_0" / "ports" / "1"
    (place / "gids").mkdir(parents=True)
    for index, text in gids.items():
        (place / "gids" / index).write_text(f"{text}\n")
    (place / "state").write_text("4: ACTIVE\n")
    (place / "rate").write_text("400 Gb/sec (4X NDR)\n")


_NO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
_GID = "0000:0000:0000:0000:0000:ffff:0a00:0001"


@pytest.mark.parametrize(
    ("gids", "index", "value"),
    [
        ({"0": _NO_GID}, None, "no GID on mlx5_0 port 1"),
        ({}, None, "no GID on mlx5_0 port 1"),
        ({"0": _GID, "3": _NO_GID}, "3", "no GID 3 (MC_GID_INDEX) on mlx5_0 port 1"),
    ],
)
def test_a_port_without_an_address_is_named(
    tmp_path: Path, gids: Mapping[str, str], index: str | None, value: str
) -> None:
    with_gids(tmp_path, gids)
    env = {} if index is None else {"engine": {"env": {"MC_GID_INDEX": index}}}
    finding = find(tmp_path, {}, processes=here(rdma(), env).processes)
    assert (finding.status, finding.value) == ("failed", value)
    assert "an address (RoCE)" in str(finding.fix)


def test_the_gid_that_is_asked_for_is_there(tmp_path: Path) -> None:
    with_gids(tmp_path, {"0": _NO_GID, "3": _GID})
    processes = here(rdma(), {"engine": {"env": {"MC_GID_INDEX": "3"}}}).processes
    assert find(tmp_path, {}, processes=processes).status == "ok"


def test_device_memory_without_peer_memory_is_a_warning_on_cuda(tmp_path: Path) -> None:
    processes = here(rdma()).processes
    [finding] = find_peer_memory("here", "cuda", processes, modules=tmp_path)
    assert (finding.status, "modprobe nvidia_peermem" in str(finding.fix)) == ("warning", True)
    (tmp_path / "nvidia_peermem").mkdir()
    [finding] = find_peer_memory("here", "cuda", processes, modules=tmp_path)
    assert finding.status == "ok"
    assert find_peer_memory("here", "rocm", processes, modules=tmp_path) == []
    assert find_peer_memory("here", "cuda", here().processes, modules=tmp_path) == []


def test_a_tree_that_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    tree = tmp_path / "infiniband"
    (tree / "mlx5_0").mkdir(parents=True)
    [finding] = find_rdma("here", here(rdma()).processes, sys=tree, verbs=tmp_path)
    assert finding.status == "unknown"
