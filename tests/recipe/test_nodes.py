"""Networks, node lists, Slurm and containers of a recipe: what is accepted, and what is refused with what to write."""

from __future__ import annotations

from pathlib import Path

from pdserve.recipe.base import SecretRef
from pdserve.recipe.rules.nodes import OWNED
from tests.recipe.kit import GPU, Options, load, refused
from tests.tables import each_row

DOCKER = GPU + "image: docker.io/org/image:1\ncontainer: {kind: docker}\n"

REFUSED = [
    ("network={}", "network: neither interface nor cidr is set"),
    ("network={interface: eth0, cidr: 10.0.0.0/8}", "network: both interface and cidr are set"),
    ("network={interface: 'a b'}", 'network.interface: "a b" is not the name of an interface'),
    ("network={cidr: 10.0.0.0}", 'network.cidr: "10.0.0.0" is not an IPv4 subnet'),
    ("network={cidr: 10.1.2.3/16}", "network.cidr: 10.1.2.3/16 is not written as a subnet"),
    ("exclude_nodes=[n1, n2, n1]", "exclude_nodes.2: n1 is there twice"),
    ("exclude_nodes=['n[1-3]']", 'exclude_nodes.0: "n[1-3]" is not the name of a node'),
    ("timeouts.agent_lease_seconds=4", "timeouts.agent_lease_seconds: an agent would stop"),
    ("timeouts.heartbeat_seconds=16", "after 15 s of silence, and is given up only after 16 s"),
    ("slurm.time=8h", 'slurm.time: "8h" is not a time that sbatch takes'),
    ("slurm.partition='a b'", 'slurm.partition: "a b" is not one word'),
    ("slurm.options=['--time=1']", "slurm.options.0: pdserve sets --time"),
    ("slurm.options=['-p gpu']", 'slurm.options.0: "-p gpu" is not an option of sbatch'),
    ("slurm.options=['--comment gpu', gpu]", 'slurm.options.1: "gpu" is not an option of sbatch'),
    ('slurm.options=["--comment=a\\nb"]', "slurm.options.0:"),
    ("container={kind: docker}", "container: there is no image"),
    ("container={kind: docker, image: '-v'}", 'container.image: "-v" is not the name of an image'),
    ("container={kind: docker, image: x, python: '-c'}", 'container.python: "-c" is not a program'),
    ("container={kind: apptainer, image: x, shm_gib: 4}", "container.shm_gib: apptainer shows the node's own"),
    ("container={kind: docker, image: x, mounts: [data]}", 'container.mounts.0: "data" is not a mount'),
    ("container={kind: docker, image: x, mounts: ['/a:/b:rw']}", 'mounts.0: "rw" is no way to mount'),
    ("container={kind: docker, image: x, mounts: ['/a:/b,c']}", "container.mounts.0: a comma separates"),
    ("container={kind: docker, image: x, mounts: ['/a:/b', '/c:/b']}", "mounts.1: /b is mounted twice"),
    ("container={kind: docker, image: x, options: ['-it']}", "pdserve sets --interactive"),
    ("container={kind: docker, image: x, options: ['-e', 'VLLM_PORT=1']}", "pdserve sets VLLM_PORT"),
    ("container={kind: docker, image: x, options: ['-e=HF_TOKEN=abc']}", "HF_TOKEN looks like a secret"),
    (
        "container={kind: apptainer, image: x, options: ['--env=A=1,HASH=7,WANDB_API_KEY=0123abcd']}",
        "WANDB_API_KEY looks like a secret",
    ),
    (
        "container={kind: apptainer, image: x, options: ['--env=A=1,PYTHONHASHSEED=7']}",
        "options.0: pdserve sets PYTHONHASHSEED",
    ),
    ('container={kind: apptainer, image: x, options: [\'--env="A=1","VLLM_PORT=7"\']}', "sets VLLM_PORT"),
    ("container={kind: docker, image: x, leave_out: [--gpu]}", "does not set --gpu here"),
    ("container={kind: docker, image: x, leave_out: [--device=/dev/kfd]}", "container.leave_out.0:"),
    ("container={kind: docker, image: x, store: /s}", "container.store: docker keeps images in a folder"),
    ("container={kind: docker, image: x, compile_cache: cache}", "container.compile_cache:"),
    ("container={kind: docker, image: x, env: {VLLM_PORT: 1}}", "env.VLLM_PORT: pdserve sets this variable"),
]


@each_row("options, what", REFUSED)
def test_it_is_refused_with_what_to_write(tmp_path: Path, options: Options, what: str) -> None:
    assert what in refused(tmp_path, GPU, options)


@each_row("kind, option", [(kind, option) for kind, owned in OWNED.items() for option in owned])
def test_an_option_of_the_container_that_pdserve_sets_is_refused(tmp_path: Path, kind: str, option: str) -> None:
    text = refused(tmp_path, GPU, f"container={{kind: {kind}, image: x, options: ['--{option}=x']}}")
    assert f"container.options.0: pdserve sets --{option}" in text


@each_row("kind, options, name", [
    ("docker", "--net=host", "net"), ("docker", "--net=bridge", "net"), ("apptainer", "--compat", "compat"),
    ("pyxis", "--ntasks=4", "ntasks"), ("pyxis", "-n4", "ntasks"), ("pyxis", "-N, 2", "nodes"),
    ("pyxis", "-w n1", "nodelist"), ("pyxis", "--nodelist=n1", "nodelist"), ("pyxis", "--export=NONE", "export"),
    ("pyxis", "--jobid=7", "jobid"), ("pyxis", "--overlap", "overlap"),
])  # fmt: skip
def test_another_name_of_such_an_option_is_refused_too(tmp_path: Path, kind: str, options: str, name: str) -> None:
    text = refused(tmp_path, GPU, f"container={{kind: {kind}, image: x, options: [{options}]}}")
    assert f"container.options.0: pdserve sets --{name}" in text


def test_a_secret_of_the_container_is_a_name(tmp_path: Path) -> None:
    recipe = load(tmp_path, DOCKER, "container.env.HF_TOKEN={secret: HF_TOKEN}").recipe
    assert recipe.container is not None
    assert recipe.container.env == {"HF_TOKEN": SecretRef(secret="HF_TOKEN")}


def test_an_image_without_a_container_is_not_used_and_a_warning_has_the_line_to_add(tmp_path: Path) -> None:
    [warning] = [text for text in load(tmp_path, GPU, "image=docker.io/org/image:1").warnings if "not used" in text]
    assert "recipe.yaml" in warning or "--set" in warning
    assert "container: {kind: docker}" in warning
    assert not [text for text in load(tmp_path, DOCKER).warnings if "container: {kind" in text]


def test_a_value_of_docker_may_have_commas(tmp_path: Path) -> None:
    recipe = load(tmp_path, DOCKER, "container.options=['--env=LIST=a,VLLM_PORT=1']").recipe
    assert recipe.container is not None
    assert recipe.container.options == ["--env=LIST=a,VLLM_PORT=1"]
