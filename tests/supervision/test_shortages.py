"""What an engine lacks, told once: sockets, from the first lack to ten seconds without another; and memory, by swap."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pdserve.node.supervised import QUIET_SECONDS, SocketShortage, SwapUse

MIB = 1 << 20
PAGE = os.sysconf("SC_PAGE_SIZE")
TITLE = "Filename\tType\tSize\tUsed\tPriority\n"


class Host:
    """A /proc as the kernel writes it, and a clock."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.now = folder, 100.0
        (folder / "swaps").write_text(f"{TITLE}/swapfile\tfile\t67104768\t0\t-2\n")
        self.read_back(5)

    def read_back(self, pages: int) -> None:
        (self.proc / "vmstat").write_text(f"nr_free_pages 7\npswpin {pages}\npswpout 9\n")

    def swapped(self, pid: int, mib: int) -> None:
        (self.proc / str(pid)).mkdir(exist_ok=True)
        (self.proc / str(pid) / "status").write_text(f"Name:\tpython\nVmSwap:\t{mib << 10:8} kB\n")

    def looked(self, use: SwapUse, *pids: int) -> bool:
        self.now += 10
        return use.look(pids)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@pytest.fixture
def use(host: Host) -> SwapUse:
    return SwapUse(proc=host.proc, clock=lambda: host.now)


def test_the_whole_tree_counts_and_what_was_read_back_since_it_was_ready(host: Host, use: SwapUse) -> None:
    host.swapped(1, 40)
    host.swapped(2, 30)
    host.read_back(5 + 256)
    assert host.looked(use, 1, 2)
    assert (use.swapped, use.read_back) == (70 * MIB, 256 * PAGE)


def test_it_is_news_once_and_again_when_it_has_doubled(host: Host, use: SwapUse) -> None:
    told = []
    for mib in (10, 63, 64, 65, 127, 128, 130, 20, 300):
        host.swapped(1, mib)
        told.append(host.looked(use, 1))
    assert told == [False, False, True, False, False, True, False, False, True]


def test_it_looks_every_ten_seconds_only(host: Host, use: SwapUse) -> None:
    assert not host.looked(use, 1)
    host.swapped(1, 200)
    host.now += 9
    assert not use.look([1])
    host.now += 1
    assert use.look([1])


def test_a_host_without_swap_is_not_asked_about_its_processes(host: Host, use: SwapUse) -> None:
    host.swapped(1, 200)
    (host.proc / "swaps").write_text(TITLE)
    assert not host.looked(use, 1)
    (host.proc / "swaps").unlink()
    assert not host.looked(use, 1)


def test_what_has_gone_or_cannot_be_read_counts_nothing(host: Host, use: SwapUse) -> None:
    (host.proc / "vmstat").write_text("pswpin many\n")
    (host.proc / "7").mkdir()
    (host.proc / "7" / "status").write_text("VmSwap:\tmuch kB\n")
    assert not host.looked(use, 7, 8)
    assert (use.swapped, use.read_back) == (0, 0)


def has_lacked(folder: Path, times: int, process: str = "worker") -> None:
    """What an engine's process has recorded."""
    effects = {"mooncake-pulls": {"out-of-sockets": times, "peers-lost": 1}}
    record = {"pid": 1, "session": 1, "process": process, "kind": process, "active": [], "effects": effects}
    (folder / f"{process}.json").write_text(json.dumps(record))


def test_a_shortage_of_sockets_begins_once_and_ends_when_no_process_of_the_engine_lacked_any_for_a_while(
    tmp_path: Path,
) -> None:
    now = 0.0
    shortage = SocketShortage(tmp_path, clock=lambda: now)
    assert not shortage.look()
    told = []
    for seconds, process, times in (
        (0, "worker", 0),
        (0, "worker", 1),
        (QUIET_SECONDS / 2, "worker", 90),
        (QUIET_SECONDS / 2, "engine-core", 1),
        (QUIET_SECONDS / 2, "engine-core", 1),
        (QUIET_SECONDS / 2, "engine-core", 1),
        (0, "engine-core", 2),
    ):
        now += seconds
        has_lacked(tmp_path, times, process)
        told.append((shortage.look(), shortage.lasts))
    begins, goes_on, ends = (True, True), (False, True), (True, False)
    assert told == [(False, False), begins, goes_on, goes_on, goes_on, ends, begins]
    assert shortage.times == 92
