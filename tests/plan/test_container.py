"""The container around an agent: golden arguments, and the rules that they follow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pdserve.errors import PreflightError
from pdserve.plan.container import (
    Around,
    Wrapped,
    cache_of,
    docker_list_argv,
    docker_stop_argv,
    image_of,
    needed_paths,
    source_folder,
    wrap_agent,
)
from pdserve.recipe import effective
from pdserve.recipe.base import SecretRef
from pdserve.recipe.sections import Container, Kind
from tests.plan.container_golden import ARGUMENTS, IMAGE, KINDS, PLATFORMS, around, container, golden_files
from tests.plan.kit import on_gpus, recipe


def wrapped(kind: Kind, image: str = IMAGE, **keys: Any) -> Wrapped:
    return wrap_agent(Container(kind=kind, **keys), image, ARGUMENTS, around())


def words(wrapped: Wrapped) -> tuple[str, ...]:
    return (*wrapped.srun_options, *wrapped.argv)


@pytest.mark.parametrize("path", golden_files(), ids=lambda path: path.stem)
def test_the_arguments_are_those_of_the_golden_file(path: Any) -> None:
    assert path.read_text() == golden_files()[path], "python -m tests.plan.regenerate, and read the diff"


def test_there_is_a_golden_file_for_each_kind_and_platform_and_no_other() -> None:
    folder = next(iter(golden_files())).parent
    assert {path.name for path in folder.iterdir()} == {f"{k}-{p}.txt" for k in KINDS for p in PLATFORMS}


@pytest.mark.parametrize("kind", KINDS)
def test_it_runs_the_containers_own_interpreter_with_the_arguments_last(kind: Kind) -> None:
    assert wrapped(kind, python="/opt/venv/bin/python").argv[-7:] == ("/opt/venv/bin/python", *ARGUMENTS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_secret_is_in_no_argument_and_its_value_goes_with_the_engines_orders(kind: Kind) -> None:
    text = " ".join(words(wrap_agent(container(kind), IMAGE, ARGUMENTS, around())))
    assert "TOKEN" not in text
    assert "HF_HOME=/hub" in text
    section = container(kind).model_dump()
    made = recipe(on_gpus(4, 4), {"image": IMAGE, "container": section})
    for _, role in made.roles():
        assert effective.env_of(made, role)["HF_TOKEN"] == SecretRef(secret="MY_TOKEN")


def test_a_roles_own_variable_wins_over_the_containers() -> None:
    made = recipe(
        on_gpus(4, 4),
        {"image": IMAGE, "container": {"kind": "docker", "env": {"A": "c", "B": "c"}}, "engine": {"env": {"A": "e"}}},
    )
    assert {k: v for k, v in effective.env_of(made, made.roles()[0][1]).items() if k in "AB"} == {"A": "e", "B": "c"}


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_deployment_needs_is_mounted_at_its_own_path(kind: Kind) -> None:
    text = " ".join(words(wrapped(kind)))
    for mount in (
        "/nfs/runs/demo:/nfs/runs/demo",
        "/nfs/pdserve:/nfs/pdserve:ro",
        "/nfs/models/kimi:/nfs/models/kimi:ro",
    ):
        assert mount in text
    assert "PYTHONPATH=/nfs/pdserve" in text


@pytest.mark.parametrize(
    ("kind", "home"),
    [
        ("docker", "/tmp/pdserve-20260101-abc"),
        ("apptainer", "/nfs/runs/demo/home@n1"),
        ("pyxis", "/nfs/runs/demo/home@n1"),
    ],
)
def test_caches_lie_where_no_other_user_can_write(kind: Kind, home: str) -> None:
    """docker's /tmp is the container's own; that of the others may be the node's."""
    assert f"HOME={home}" in wrapped(kind).argv


@pytest.mark.parametrize("kind", KINDS)
def test_a_source_tree_is_mounted_and_installed_packages_of_the_node_are_not(kind: Kind) -> None:
    assert source_folder("/nfs/pdserve/pdserve") == "/nfs/pdserve"
    assert source_folder("/venv/lib/python3.12/site-packages/pdserve/") is None
    here = Around(run_id="r", run_dir="/run/r", node="n", platform="cpu", package=None, in_slurm=True)
    argv = wrap_agent(Container(kind=kind), IMAGE, ARGUMENTS, here).argv
    assert argv[argv.index("PYTHONPATH") - 1] == "-u"


@pytest.mark.parametrize("kind", KINDS)
def test_a_mount_of_the_recipe_takes_the_place_of_ours(kind: Kind) -> None:
    text = " ".join(words(wrapped(kind, mounts=["/local/kimi:/nfs/models/kimi:ro"])))
    assert "/local/kimi:/nfs/models/kimi:ro" in text
    assert "/nfs/models/kimi:/nfs/models/kimi" not in text


@pytest.mark.parametrize("path", ["/a:b", "/a,b", "relative"])
def test_a_path_that_no_mount_can_name_is_refused(path: str) -> None:
    here = Around(run_id="r", run_dir=path, node="n", platform="cpu", package="/p")
    with pytest.raises(PreflightError, match="cannot be mounted in a container"):
        wrap_agent(Container(kind="docker"), IMAGE, ARGUMENTS, here)


def test_docker_keeps_stdin_open_and_has_no_terminal() -> None:
    argv = wrapped("docker").argv
    assert "--interactive" in argv
    assert not {"-t", "--tty", "-it", "--detach", "-d"} & set(argv)


def test_dockers_image_does_not_run_its_own_program() -> None:
    argv = wrapped("docker").argv
    assert argv[argv.index(IMAGE) - 1] == "--entrypoint=env"
    assert argv[argv.index(IMAGE) + 1] == "-u"


def test_docker_has_the_nodes_shared_memory_or_its_own_of_a_size() -> None:
    assert "--ipc=host" in wrapped("docker").argv
    assert not any(word.startswith("--shm-size") for word in wrapped("docker").argv)
    own = wrapped("docker", shm_gib=1.5).argv
    assert {"--ipc=private", "--shm-size=1536m"} <= set(own)
    assert "--ipc=host" not in own


def test_docker_runs_as_the_user_who_owns_the_run_directory() -> None:
    assert {"--user=1000:100", "--group-add=44", "--group-add=109"} <= set(wrapped("docker").argv)
    root = wrapped("docker", options=["--user=0:0"]).argv
    assert "--user=0:0" in root
    assert "--user=1000:100" not in root


@pytest.mark.parametrize("kind", KINDS)
def test_a_compile_cache_is_mounted_where_its_variables_lead(kind: Kind) -> None:
    here = replace(around(), compile_cache="/scratch/cache/m")
    line = words(wrap_agent(Container(kind=kind), IMAGE, ARGUMENTS, here))
    assert any("/scratch/cache/m:/scratch/cache/m" in word for word in line)
    for variable in ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "AITER_JIT_DIR"):
        assert any(word.startswith(f"{variable}=/scratch/cache/m/") for word in line), variable
    assert not any("/scratch" in word for word in words(wrapped(kind)))


def test_the_recipes_own_variable_wins_over_the_compile_caches() -> None:
    here = replace(around(), compile_cache="/c")
    argv = wrap_agent(Container(kind="docker", env={"TRITON_CACHE_DIR": "/mine"}), IMAGE, ARGUMENTS, here).argv
    assert [word for word in argv if word.startswith("TRITON_CACHE_DIR=")] == ["TRITON_CACHE_DIR=/mine"]


def test_a_compile_cache_is_of_one_image_and_one_model() -> None:
    folders = {
        cache_of(recipe({"image": image, "container": {"kind": "docker", "compile_cache": "/c"}}, {"model": model}))
        for image in ("x:1", "x:2")
        for model in ({"id": "o/a", "path": None}, {"id": "o/b", "path": None})
    }
    assert len(folders) == 4
    assert all(folder is not None and folder.startswith("/c/o-") for folder in folders)
    assert cache_of(recipe({"image": "x:1", "container": {"kind": "docker"}})) is None


@pytest.mark.parametrize(
    ("kind", "image", "shown"),
    [
        ("docker", "docker://docker.io/org/x:1", "docker.io/org/x:1"),
        ("docker", "localhost:5000/x@sha256:00", "localhost:5000/x@sha256:00"),
        ("apptainer", "docker.io/org/x:1", "docker://docker.io/org/x:1"),
        ("apptainer", "/images/x.sif", "/images/x.sif"),
        ("apptainer", "x.sif", "x.sif"),
        ("apptainer", "oras://r/x:1", "oras://r/x:1"),
        ("pyxis", "docker.io/org/x:1", "--container-image=org/x:1"),
        ("pyxis", "docker://ghcr.io/org/x:1", "--container-image=ghcr.io#org/x:1"),
        ("pyxis", "localhost:5000/x:1", "--container-image=localhost:5000#x:1"),
        ("pyxis", "org/x:1", "--container-image=org/x:1"),
        ("pyxis", "ubuntu:24.04", "--container-image=ubuntu:24.04"),
        ("pyxis", "nvcr.io#nvidia/x:1", "--container-image=nvcr.io#nvidia/x:1"),
        ("pyxis", "/images/x.sqsh", "--container-image=/images/x.sqsh"),
    ],
)
def test_an_image_is_named_as_the_kind_names_images(kind: Kind, image: str, shown: str) -> None:
    assert shown in words(wrapped(kind, image))


def test_pyxis_is_srun_and_nothing_else() -> None:
    with pytest.raises(PreflightError, match="pyxis is an option of srun"):
        wrap_agent(Container(kind="pyxis"), IMAGE, ARGUMENTS, around(in_slurm=False))


def test_containers_of_a_run_are_found_by_its_label_and_stopped_in_their_own_time() -> None:
    assert "--label=pdserve.run=20260101-abc" in wrapped("docker").argv
    assert docker_list_argv("20260101-abc")[-1] == "--filter=label=pdserve.run=20260101-abc"
    assert docker_list_argv("r", "n1")[-1] == "--filter=label=pdserve.node=n1"
    assert docker_stop_argv(["a", "b"], 59.6) == ("docker", "stop", "-t", "60", "a", "b")


def test_the_image_is_the_containers_own_or_the_recipes() -> None:
    made = recipe(on_gpus(4, 4), {"image": "x:1", "container": {"kind": "docker"}})
    assert image_of(made) == "x:1"
    made = recipe(on_gpus(4, 4), {"image": "x:1", "container": {"kind": "docker", "image": "y:1"}})
    assert image_of(made) == "y:1"


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
