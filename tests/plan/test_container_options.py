"""Options of a recipe beside pdserve's own: what is added, what is replaced, what is left out."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.plan.container import wrap_agent
from pdserve.recipe.container_options import defaults, targets, uses_rdma
from pdserve.recipe.sections import Container, Kind
from tests.plan.container_golden import ARGUMENTS, IMAGE, KINDS, around
from tests.plan.kit import MOONCAKE, NIXL, on_gpus, recipe

ROCM = defaults("docker", "rocm", rdma=False)


def words(*options: str, kind: Kind = "docker", rdma: bool = False, **keys: Any) -> list[str]:
    """Everything between the program and the image, on a node with ROCm."""
    container = Container(kind=kind, options=list(options), **keys)
    wrapped = wrap_agent(container, IMAGE, ARGUMENTS, around(rdma=rdma))
    return [*wrapped.srun_options, *wrapped.argv]


def named(name: str, line: list[str]) -> list[str]:
    return [word.partition("=")[2] for word in line if word.partition("=")[0] == f"--{name}"]


@pytest.mark.parametrize(
    "option",
    [
        "--device=/dev/infiniband",
        "--ulimit=core=0",
        "--group-add=27",
        "--cap-add=IPC_LOCK",
        "--security-opt=label=disable",
        "--mount=type=bind,src=/a,dst=/b",
        "--volume=/a:/b",
        "--env=A=1",
    ],
)
def test_one_that_may_stand_several_times_is_added_and_takes_nothing_away(option: str) -> None:
    line = words(option)
    assert option in line
    assert set(words()) <= set(line)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (["--device", "/dev/infiniband"], "--device=/dev/infiniband"),
        (["--device /dev/infiniband"], "--device=/dev/infiniband"),
        (["-v", "/a:/b:ro"], "--volume=/a:/b:ro"),
        (["-v /a:/b"], "--volume=/a:/b"),
        (["-v=/a:/b"], "--volume=/a:/b"),
        (["-v/a:/b"], "--volume=/a:/b"),
        (["-e", "A=1 2"], "--env=A=1 2"),
        (["-u 0:0"], "--user=0:0"),
        (["--privileged"], "--privileged"),
    ],
)
def test_two_words_and_short_options_are_the_same_option(written: list[str], meant: str) -> None:
    assert meant in words(*written)


def test_the_same_device_limit_capability_or_profile_again_takes_the_place_of_ours() -> None:
    line = words(
        "--device=/dev/kfd:/dev/kfd:r", "--ulimit=memlock=1024", "--cap-add=CAP_SYS_PTRACE", "--security-opt=seccomp=/p"
    )
    assert named("device", line) == ["/dev/dri", "/dev/kfd:/dev/kfd:r"]
    assert named("ulimit", line) == ["nofile=1048576:1048576", "memlock=1024"]
    assert named("cap-add", line) == ["CAP_SYS_PTRACE"]
    assert named("security-opt", line) == ["seccomp=/p"]


def test_one_that_stands_once_takes_the_place_of_ours() -> None:
    assert named("user", words("--user=0:0")) == ["0:0"]
    line = [
        *words("--container-readonly", "--container-mount-home", kind="pyxis"),
    ]
    assert "--container-readonly" in line
    assert "--container-writable" not in line
    assert "--no-container-mount-home" not in line


@pytest.mark.parametrize(
    ("leave_out", "gone"),
    [
        ("--device", {"--device=/dev/kfd", "--device=/dev/dri"}),
        ("--device=/dev/dri", {"--device=/dev/dri"}),
        ("--ulimit=memlock", {"--ulimit=memlock=-1:-1"}),
        ("--cap-add=CAP_SYS_PTRACE", {"--cap-add=SYS_PTRACE"}),
        ("--group-add", {"--group-add=44", "--group-add=109"}),
        ("--group-add=44", {"--group-add=44"}),
        ("-u", {"--user=1000:100"}),
    ],
)
def test_one_of_ours_is_left_out_by_its_name_or_its_value(leave_out: str, gone: set[str]) -> None:
    assert set(words()) - set(words(leave_out=[leave_out])) == gone


def test_rdma_brings_its_device_files_by_itself() -> None:
    assert "/dev/infiniband" in named("device", words(rdma=True))
    assert not any("/dev/infiniband" in word for word in words())
    for kind in ("apptainer", "pyxis"):
        assert any("/dev/infiniband:/dev/infiniband" in word for word in words(kind=kind, rdma=True))
    assert named("device", words("--device=/dev/infiniband/uverbs0", rdma=True))[-1] == "/dev/infiniband/uverbs0"
    assert "/dev/infiniband" not in named("device", words(rdma=True, leave_out=["--device=/dev/infiniband"]))


@pytest.mark.parametrize(
    ("connector", "env", "rdma"),
    [
        ({"kind": "mooncake", "protocol": "rdma"}, {}, True),
        ({"kind": "mooncake"}, {}, True),
        (MOONCAKE, {}, False),
        ({"kind": "mooncake", "protocol": "rdma"}, {"MC_FORCE_TCP": 1}, False),
        (NIXL, {}, False),
        ({"kind": "raw", "config": {"kv_connector": "MooncakeConnector"}}, {}, True),
        ({"kind": "raw", "config": {"kv_connector": "Other"}}, {}, False),
    ],
)
def test_what_asks_for_rdma_is_known_without_a_plan(connector: dict[str, Any], env: dict[str, Any], rdma: bool) -> None:
    sides = {"prefill": {"connector": connector}, "decode": {"connector": connector}}
    assert uses_rdma(recipe(on_gpus(), sides, {"engine": {"env": env}})) is rdma


def test_the_multi_that_lmcache_brings_by_default_moves_kv_by_rdma() -> None:
    made = recipe(on_gpus(), {"prefill": {"connector": None}, "lmcache": {"l1_size_gb": 1, "on": ["prefill"]}})
    assert uses_rdma(made)


def test_a_volume_of_an_option_takes_the_place_of_a_mount_of_ours() -> None:
    line = words("-v /fast/kimi:/nfs/models/kimi:ro")
    assert named("volume", line).count("/fast/kimi:/nfs/models/kimi:ro") == 1
    assert "/nfs/models/kimi:/nfs/models/kimi:ro" not in named("volume", line)
    assert list(targets("docker", ["--mount=type=bind,src=/a,target=/b", "-v/c:/d"])) == ["/b", "/d"]
    assert list(targets("apptainer", ["-B /a:/b:ro,/c"])) == ["/b", "/c"]


@pytest.mark.parametrize("kind", KINDS)
def test_without_options_everything_that_pdserve_sets_is_there(kind: Kind) -> None:
    assert set(defaults(kind, "rocm", rdma=False)) <= set(words(kind=kind))


def test_amds_own_list_is_whole() -> None:
    assert {"--device=/dev/kfd", "--device=/dev/dri", "--security-opt=seccomp=unconfined"} <= set(ROCM)
