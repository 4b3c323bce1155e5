"""Where our cgroup is, what its files say of memory, and whose cgroup is touched: folders with what kernels write."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest

from pdserve.system import cgroup
from pdserve.system.cgroup import (
    V1,
    Cgroup,
    CgroupId,
    MemoryCounts,
    OomWatch,
    closest_counted_cgroup,
    counts,
    find_recorded_cgroup,
)
from tests.tables import each_row

GIB = 2**30


def write(folder: Path, files: Mapping[str, object]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{content}\n")
    return folder


def proc(folder: Path, own: str, *mounts: str) -> Path:
    """What /proc/self says; the mounts are below `folder`."""
    return write(folder / "proc", {"cgroup": own, "mountinfo": "\n".join(mounts).replace("@", str(folder))})


ALONE = "25 30 0:23 / @/sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
HYBRID = (
    "35 31 0:32 / @/sys/fs/cgroup/memory rw - cgroup cgroup rw,memory",
    "41 31 0:38 / @/sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw",
)
PARTS = "41 31 0:38 /lxc/box @/sys/fs/my\\040cgroups rw - cgroup2 cgroup2 rw"


@each_row("own, mounts, controller, expected", [
    ("0::/user.slice/run-1.scope", [ALONE], "", "sys/fs/cgroup/user.slice/run-1.scope"),
    ("0::/", [ALONE], "", "sys/fs/cgroup"),
    ("4:memory:/box\n1:cpu,cpuacct:/\n0::/", HYBRID, "", "sys/fs/cgroup/unified"),
    ("4:memory:/box\n1:cpu,cpuacct:/\n0::/", HYBRID, "memory", "sys/fs/cgroup/memory/box"),
    ("0::/lxc/box/a", [PARTS], "", "sys/fs/my cgroups/a"),
])  # fmt: skip
def test_our_own_cgroup(tmp_path: Path, own: str, mounts: tuple[str, ...], controller: str, expected: str) -> None:
    write(tmp_path / expected, {"cgroup.procs": os.getpid()})
    assert cgroup.place(controller, proc(tmp_path, own, *mounts))[0] == tmp_path / expected


@each_row(
    "own, mounts",
    [("4:memory:/\n0::/", HYBRID[:1]), ("0::/../other", [ALONE]), ("0::/elsewhere", [PARTS]), ("0::/box", [ALONE])],
)
def test_an_own_cgroup_out_of_sight_is_none(tmp_path: Path, own: str, mounts: tuple[str, ...]) -> None:
    for folder in ("", "other", "box", "elsewhere"):
        write(tmp_path / "sys/fs/cgroup" / folder, {"cgroup.procs": 1})
    with pytest.raises(FileNotFoundError, match=r"no mount of cgroup v2 shows"):
        cgroup.place("", proc(tmp_path, own, *mounts))


@each_row("where, why", [
    (OSError(errno.EROFS, "Read-only file system", "/sys/fs/cgroup/x"), "/sys/fs/cgroup/x: Read-only file system"),
    (None, "this kernel has no cgroup.kill (Linux 5.14 has)"),
])  # fmt: skip
def test_why_none_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: OSError | None, why: str) -> None:
    def place(controller: str = "") -> tuple[Path, Path]:
        if where is not None:
            raise where
        return tmp_path, tmp_path

    monkeypatch.setattr(cgroup, "place", place)
    made = cgroup.make_own_cgroup("pdserve-run-1@n-1", {})
    assert made.cgroup is None
    assert why in made.why_not
    assert list(tmp_path.iterdir()) == []
    assert cgroup.make_own_cgroup("pdserve-run-1@n-1", {"PDSERVE_CGROUPS": "off"}) == (None, "PDSERVE_CGROUPS=off")


def test_a_strangers_cgroup_is_left_alone(tmp_path: Path) -> None:
    """Another run's name, another inode at the path, a link to it: none of it is killed or removed."""
    ours = tmp_path / "pdserve-run-1@n-7"
    ours.mkdir()
    identity = Cgroup.at(ours).id
    assert find_recorded_cgroup(identity, "run-1") is not None
    assert find_recorded_cgroup(identity, "run-2") is None
    assert find_recorded_cgroup(None, "run-1") is None
    ours.rename(tmp_path / "kept")
    assert find_recorded_cgroup(identity, "run-1") is None
    ours.symlink_to(tmp_path / "kept")
    assert find_recorded_cgroup(identity, "run-1") is None
    ours.unlink()
    stranger = write(ours, {"cgroup.procs": 1, "cgroup.kill": ""})
    group = Cgroup(CgroupId(path=str(ours), device=identity.device, inode=identity.inode, parent=identity.parent))
    group.kill()
    assert group.members() == set()
    assert group.remove(), "ours is gone"
    assert (stranger / "cgroup.kill").read_text() == "\n"


def test_memory_of_a_cgroup_of_its_own(tmp_path: Path) -> None:
    """As systemd's Linux 6.1 shows it: the unit is limited, and the process's own cgroup is not."""
    unit = write(tmp_path / "unit", {"memory.max": 4 * GIB, "memory.events": "low 0\nhigh 0\nmax 9\noom 1\noom_kill 1"})
    own = write(
        unit / "decode-0.1",
        {
            "memory.max": "max",
            "memory.peak": 3 * GIB,
            "memory.events": "low 0\nhigh 0\nmax 0\noom 0\noom_kill 2\noom_group_kill 0",
        },
    )
    assert closest_counted_cgroup(own, tmp_path) == own
    assert counts(own, tmp_path) == MemoryCounts(kills=2, limit=4 * GIB, peak=3 * GIB)
    assert str(counts(own, tmp_path)) == "limit 4.0 GiB, peak 3.0 GiB"


def test_memory_where_only_a_cgroup_above_counts_it(tmp_path: Path) -> None:
    unit = write(tmp_path / "unit", {"memory.max": "max", "memory.events": "oom_kill 0"})
    (unit / "decode-0.1").mkdir()
    assert closest_counted_cgroup(unit / "decode-0.1", tmp_path) == unit
    assert str(counts(unit, tmp_path)) == "no limit below the machine's memory"
    assert closest_counted_cgroup(tmp_path / "other", tmp_path) is None


def test_memory_of_cgroup_v1(tmp_path: Path) -> None:
    job = write(
        tmp_path / "job",
        {
            "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1",
            "memory.limit_in_bytes": 512 * 2**20,
            "memory.max_usage_in_bytes": 512 * 2**20,
        },
    )
    write(tmp_path, {"memory.limit_in_bytes": 2**63 - 4096})
    assert str(counts(job, tmp_path, V1)) == "limit 512 MiB, peak 512 MiB"


@each_row("own, code, kills, how, out_of_memory", [
    (True, -signal.SIGKILL, 1, "killed by the kernel for memory (limit 4.0 GiB, peak 4.0 GiB)", True),
    (True, 1, 1, "ended, and the kernel had killed a process of it for memory (limit 4.0 GiB, peak 4.0 GiB)", True),
    (True, -signal.SIGKILL, 0, "ended", False),
    (False, -signal.SIGKILL, 1, "ended; meanwhile the kernel killed 1 for memory in {at} (limit 4.0 GiB, ", False),
    (False, 1, 1, "ended", False),
])  # fmt: skip
def test_the_cause_of_a_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool, code: int, kills: int, how: str, out_of_memory: bool
) -> None:
    files = {"memory.max": 4 * GIB, "memory.peak": 4 * GIB, "memory.events": "oom_kill 3"}
    unit = write(tmp_path / "unit", files)
    (unit / "decode-0.1").mkdir()
    if own:
        write(unit / "decode-0.1", files)
    monkeypatch.setattr(cgroup, "place", lambda controller: (unit, tmp_path))
    watch = OomWatch(Cgroup.at(unit / "decode-0.1"))
    write(unit / "decode-0.1" if own else unit, {"memory.events": f"oom_kill {3 + kills}"})
    cause, so = watch.explain("ended", code)
    assert cause.startswith(how.format(at=unit))
    assert so == out_of_memory
