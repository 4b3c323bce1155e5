"""The container around an agent, beyond its golden arguments: images, mounts, secrets and options of a recipe."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pdserve.errors import PreflightError
from pdserve.plan.container import Around, WrappedCommand, cache_of, image_of, needed_paths, source_folder, wrap_agent
from pdserve.recipe import effective
from pdserve.recipe.base import SecretRef
from pdserve.recipe.container_options import targets
from pdserve.recipe.sections import Container, Kind
from tests.plan.container_golden import ARGUMENTS, IMAGE, KINDS, around, container
from tests.plan.kit import on_gpus, recipe
from tests.tables import each_row


def wrapped(kind: Kind, image: str = IMAGE, *, rdma: bool = False, **keys: Any) -> WrappedCommand:
    return wrap_agent(Container(kind=kind, **keys), image, ARGUMENTS, around(rdma=rdma))


def words(wrapped: WrappedCommand) -> tuple[str, ...]:
    return (*wrapped.srun_options, *wrapped.argv)


@each_row("kind", KINDS)
def test_it_runs_the_containers_own_interpreter_with_the_arguments_last(kind: Kind) -> None:
    assert wrapped(kind, python="/opt/venv/bin/python").argv[-7:] == ("/opt/venv/bin/python", *ARGUMENTS)


@each_row("kind", KINDS)
def test_a_secret_is_in_no_argument_and_its_value_goes_with_the_engines_orders(kind: Kind) -> None:
    text = " ".join(words(wrap_agent(container(kind), IMAGE, ARGUMENTS, around())))
    assert "TOKEN" not in text
    assert "HF_HOME=/hub" in text
    made = recipe(on_gpus(4, 4), {"image": IMAGE, "container": container(kind).model_dump()})
    for _, role in made.roles():
        assert effective.env_of(made, role)["HF_TOKEN"] == SecretRef(secret="MY_TOKEN")


def test_a_roles_own_variable_wins_over_the_containers() -> None:
    section = {"kind": "docker", "env": {"A": "c", "B": "c"}}
    made = recipe(on_gpus(4, 4), {"image": IMAGE, "container": section, "engine": {"env": {"A": "e"}}})
    assert {k: v for k, v in effective.env_of(made, made.roles()[0][1]).items() if k in "AB"} == {"A": "e", "B": "c"}


@each_row("kind", KINDS)
def test_a_source_tree_is_mounted_and_installed_packages_of_the_node_are_not(kind: Kind) -> None:
    assert source_folder("/nfs/pdserve/pdserve") == "/nfs/pdserve"
    assert source_folder("/venv/lib/python3.12/site-packages/pdserve/") is None
    here = Around(run_id="r", run_dir="/run/r", node="n", platform="cpu", package=None, in_slurm=True)
    argv = wrap_agent(Container(kind=kind), IMAGE, ARGUMENTS, here).argv
    assert argv[argv.index("PYTHONPATH") - 1] == "-u"


@each_row("kind", KINDS)
def test_a_mount_of_the_recipe_takes_the_place_of_ours(kind: Kind) -> None:
    text = " ".join(words(wrapped(kind, mounts=["/local/kimi:/nfs/models/kimi:ro"])))
    assert "/local/kimi:/nfs/models/kimi:ro" in text
    assert "/nfs/models/kimi:/nfs/models/kimi" not in text


@each_row("path", ["/a:b", "/a,b", "relative"])
def test_a_path_that_no_mount_can_name_is_refused(path: str) -> None:
    here = Around(run_id="r", run_dir=path, node="n", platform="cpu", package="/p")
    with pytest.raises(PreflightError, match="cannot be mounted in a container"):
        wrap_agent(Container(kind="docker"), IMAGE, ARGUMENTS, here)
    with pytest.raises(PreflightError, match="pyxis is an option of srun"):
        wrap_agent(Container(kind="pyxis"), IMAGE, ARGUMENTS, around(in_slurm=False))


@each_row("kind", KINDS)
def test_a_compile_cache_is_mounted_where_its_variables_lead_but_for_those_of_the_recipe(kind: Kind) -> None:
    here = replace(around(), compile_cache="/scratch/cache/m")
    own = Container(kind=kind, env={"TRITON_CACHE_DIR": "/mine"})
    line = words(wrap_agent(own, IMAGE, ARGUMENTS, here))
    assert any("/scratch/cache/m:/scratch/cache/m" in word for word in line)
    for variable in ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "AITER_JIT_DIR"):
        assert any(word.startswith(f"{variable}=/scratch/cache/m/") for word in line), variable
    assert [word for word in line if word.startswith("TRITON_CACHE_DIR=")] == ["TRITON_CACHE_DIR=/mine"]
    assert not any("/scratch" in word for word in words(wrapped(kind)))


@each_row(
    "kind, image, shown",
    [
        ("docker", "docker://docker.io/org/x:1", "docker.io/org/x:1"),
        ("apptainer", "docker.io/org/x:1", "docker://docker.io/org/x:1"),
        ("apptainer", "/images/x.sif", "/images/x.sif"),
        ("apptainer", "oras://r/x:1", "oras://r/x:1"),
        ("pyxis", "docker.io/org/x:1", "--container-image=org/x:1"),
        ("pyxis", "docker://ghcr.io/org/x:1", "--container-image=ghcr.io#org/x:1"),
        ("pyxis", "localhost:5000/x:1", "--container-image=localhost:5000#x:1"),
        ("pyxis", "ubuntu:24.04", "--container-image=ubuntu:24.04"),
        ("pyxis", "nvcr.io#nvidia/x:1", "--container-image=nvcr.io#nvidia/x:1"),
        ("pyxis", "/images/x.sqsh", "--container-image=/images/x.sqsh"),
    ],
)
def test_an_image_is_named_as_the_kind_names_images(kind: Kind, image: str, shown: str) -> None:
    assert shown in words(wrapped(kind, image))


def test_the_image_is_the_containers_own_or_the_recipes_and_a_compile_cache_is_of_one_image_and_one_model() -> None:
    for own, image in ({}, "x:1"), ({"image": "y:1"}, "y:1"):
        assert image_of(recipe({"image": "x:1", "container": {"kind": "docker", **own}})) == image
    folders = {
        cache_of(
            recipe({"image": image, "container": {"kind": "docker", "compile_cache": "/c"}}, {"model": {"path": model}})
        )
        for image in ("x:1", "x:2")
        for model in ("a", "b")
    }
    assert len(folders) == 4


def test_local_models_and_the_folders_of_the_proxys_files_are_needed() -> None:
    made = recipe(
        on_gpus(4, 4),
        {
            "model": {"id": None, "path": "../models/m"},
            "proxy": {
                "auth": {"keys_file": "keys/keys.yaml"},
                "tls": {"certificate": "/etc/tls/a.pem", "key": "/etc/tls/a.key"},
                "upstream_tls": {"ca": "/etc/ca/b.pem"},
                "admin": {"socket": "admin.sock"},
            },
        },
    )
    assert needed_paths(made, "/nfs/recipes") == ("/nfs/models/m", "/nfs/recipes/keys", "/etc/tls", "/etc/ca")
    made = recipe(on_gpus(4, 4), {"model": {"id": "org/m", "path": None}})
    assert needed_paths(made, "/nfs/recipes") == ()


def line(*options: str, kind: Kind = "docker", rdma: bool = False, **keys: Any) -> set[str]:
    """Everything between the program and the image, on a node with ROCm."""
    return set(words(wrapped(kind, rdma=rdma, options=list(options), **keys)))


def named(name: str, line: set[str]) -> set[str]:
    return {word.partition("=")[2] for word in line if word.partition("=")[0] == f"--{name}"}


@each_row(
    "written, meant",
    [
        (["--device=/dev/infiniband"], "--device=/dev/infiniband"),
        (["--ulimit=core=0"], "--ulimit=core=0"),
        (["--device", "/dev/infiniband"], "--device=/dev/infiniband"),
        (["--device /dev/infiniband"], "--device=/dev/infiniband"),
        (["-v", "/a:/b:ro"], "--volume=/a:/b:ro"),
        (["-v/a:/b"], "--volume=/a:/b"),
        (["-e", "A=1 2"], "--env=A=1 2"),
        (["--privileged"], "--privileged"),
    ],
)
def test_an_option_is_added_in_whatever_form_and_takes_nothing_away(written: list[str], meant: str) -> None:
    assert line(*written) == {*line(), meant}


def test_the_same_device_limit_capability_profile_or_user_again_takes_the_place_of_ours() -> None:
    ours = "--device=/dev/kfd:/dev/kfd:r", "--ulimit=memlock=1024", "--cap-add=CAP_SYS_PTRACE"
    made = line(*ours, "--security-opt=seccomp=/p", "-u 0:0")
    assert named("device", made) == {"/dev/dri", "/dev/kfd:/dev/kfd:r"}
    assert named("ulimit", made) == {"nofile=1048576:1048576", "memlock=1024"}
    assert named("cap-add", made) == {"CAP_SYS_PTRACE"}
    assert named("security-opt", made) == {"seccomp=/p"}
    assert named("user", made) == {"0:0"}
    pyxis = line("--container-readonly", "--container-mount-home", kind="pyxis")
    assert "--container-readonly" in pyxis
    assert not {"--container-writable", "--no-container-mount-home"} & pyxis


@each_row(
    "leave_out, gone",
    [
        ("--device", {"--device=/dev/kfd", "--device=/dev/dri"}),
        ("--cap-add=CAP_SYS_PTRACE", {"--cap-add=SYS_PTRACE"}),
        ("--group-add=44", {"--group-add=44"}),
        ("-u", {"--user=1000:100"}),
    ],
)
def test_one_of_ours_is_left_out_by_its_name_or_its_value(leave_out: str, gone: set[str]) -> None:
    assert line() - line(leave_out=[leave_out]) == gone


def test_rdma_brings_its_device_files_by_itself() -> None:
    assert "/dev/infiniband" in named("device", line(rdma=True))
    assert not any("/dev/infiniband" in word for word in line())
    for kind in ("apptainer", "pyxis"):
        assert any("/dev/infiniband:/dev/infiniband" in word for word in line(kind=kind, rdma=True))
    assert "/dev/infiniband" not in named("device", line(rdma=True, leave_out=["--device=/dev/infiniband"]))


def test_a_volume_of_an_option_takes_the_place_of_a_mount_of_ours() -> None:
    volumes = named("volume", line("-v /fast/kimi:/nfs/models/kimi:ro"))
    assert "/fast/kimi:/nfs/models/kimi:ro" in volumes
    assert "/nfs/models/kimi:/nfs/models/kimi:ro" not in volumes
    assert list(targets("docker", ["--mount=type=bind,src=/a,target=/b", "-v/c:/d"])) == ["/b", "/d"]
    assert list(targets("apptainer", ["-B /a:/b:ro,/c"])) == ["/b", "/c"]
