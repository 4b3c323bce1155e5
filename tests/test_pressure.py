"""What holds a process back on its host, from files as the kernel writes them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pdserve.system.pressure import Pressure, cpu_seconds, largest_cpu_share, pressure_of, wanted_seconds

PID = 4242


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    folder = tmp_path / "proc"
    (folder / str(PID)).mkdir(parents=True)
    (folder / str(PID) / "status").write_text("Name:\tpython\nVmRSS:\t  100 kB\nVmSwap:\t   2048 kB\n")
    (folder / str(PID) / "cgroup").write_text("1:name=systemd:/\n0::/job/step\n")
    return folder


def cgroup(top: Path, path: str, periods: int, throttled: int, microseconds: int) -> None:
    folder = top / path
    folder.mkdir(parents=True, exist_ok=True)
    text = f"usage_usec 9\nnr_periods {periods}\nnr_throttled {throttled}\nthrottled_usec {microseconds}\n"
    (folder / "cpu.stat").write_text(text)


def test_swapped_memory_is_read_in_bytes(proc: Path) -> None:
    assert pressure_of(PID, None, proc=proc) == Pressure(2048 << 10, None)


def test_the_limit_above_that_took_most_counts(proc: Path, tmp_path: Path) -> None:
    top = tmp_path / "cgroup"
    cgroup(top, "job/step", 0, 0, 0)
    cgroup(top, "job", 1000, 300, 12_500_000)
    assert pressure_of(PID, top, proc=proc) == Pressure(2048 << 10, 12.5, 1000, 300)


def test_limits_of_cgroup_v1_are_read_too(proc: Path, tmp_path: Path) -> None:
    """There the time is in nanoseconds, and the path is that of the cpu controller."""
    (proc / str(PID) / "cgroup").write_text("9:name=systemd:/other\n2:cpuacct,cpu:/job/step\n1:memory:/none\n0::/\n")
    (tmp_path / "cpu" / "job" / "step").mkdir(parents=True)
    stat = tmp_path / "cpu" / "job" / "step" / "cpu.stat"
    stat.write_text("nr_periods 100\nnr_throttled 40\nthrottled_time 2500000000\n")
    assert pressure_of(PID, None, tmp_path / "cpu", proc=proc) == Pressure(2048 << 10, 2.5, 100, 40)
    assert pressure_of(PID, tmp_path / "nothing", None, proc=proc).throttled_seconds is None


def test_what_is_not_counted_is_unknown_not_zero(proc: Path, tmp_path: Path) -> None:
    top = tmp_path / "cgroup"
    (top / "job" / "step").mkdir(parents=True)
    (top / "job" / "cpu.stat").write_text("usage_usec 9\n")
    assert pressure_of(PID, top, proc=proc).throttled_seconds is None


def test_a_process_that_has_gone_and_torn_files_break_nothing(proc: Path, tmp_path: Path) -> None:
    assert pressure_of(PID + 1, tmp_path, proc=proc) == Pressure(0, None)
    (proc / str(PID) / "status").write_bytes(b"VmSwap:\nVmSwap:\t\xff kB\n")
    (proc / str(PID) / "cgroup").write_bytes(b"\xff\n0::\n")
    assert pressure_of(PID, tmp_path, proc=proc) == Pressure(0, None)


def test_the_share_of_a_cpu_is_that_of_the_busiest_process() -> None:
    assert largest_cpu_share({1: 10.0, 2: 5.0, 3: 0.0}, {1: 10.4, 2: 5.9}, 1.0) == pytest.approx(0.9)
    assert largest_cpu_share({1: 1.0}, {}, 1.0) is None


def test_our_own_cpu_time_is_seen() -> None:
    used = cpu_seconds(os.getpid())[os.getpid()]
    assert 0 < used <= sum(os.times()[:2]) + 0.05


def test_the_time_that_was_waited_for_a_cpu_counts_as_wanted_where_the_kernel_counts_it(proc: Path) -> None:
    (proc / str(PID) / "schedstat").write_text("1500000000 500000000 12\n")
    assert wanted_seconds([PID], proc=proc) == {PID: 2.0}
    for text in ("", "1\n", "a b c\n"):
        (proc / str(PID) / "schedstat").write_text(text)
        assert wanted_seconds([PID], proc=proc) == {}
    (proc / str(PID) / "schedstat").unlink()
    assert wanted_seconds([PID], proc=proc) == {}
