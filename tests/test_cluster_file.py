"""The cluster file: what it means, and everything that is refused with its line and what to write."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from pdserve.cli.recipe import cluster_schema
from pdserve.errors import RecipeError
from pdserve.reach.candidates import of_cluster
from pdserve.reach.cluster_file import Host, LoadedCluster, load_cluster
from pdserve.recipe.load import yaml12
from pdserve.recipe.sections import Network
from tests.tables import each_row

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "clusters" / "example.yaml"
TWO = "schema: 1\nhosts:\n- name: a\n- name: b\n"

REFUSED = [
    ("", "the file is empty"),
    ("schema: 1\n", "hosts: missing"),
    ("schema: 1\nhost:\n- name: a\n", "cluster.yaml:2: host: unknown key"),
    (TWO + "  adress: 10.0.0.1\n", "cluster.yaml:5: hosts.1.adress: unknown key"),
    (TWO + "- ssh: c\n", "hosts.2.name: missing"),
    (TWO + "- name: a\n", "cluster.yaml:5: hosts.2.name: a is there twice (hosts.0.name at"),
    (TWO + "- name: -oProxyCommand=x\n", "cluster.yaml:5: hosts.2.name: "),
    (TWO + "- {name: c, ssh: -oProxyCommand=x}\n", 'hosts.2.ssh: "-oProxyCommand=x" is not a destination'),
    (TWO + "- {name: c, address: 10.0.0.300}\n", 'hosts.2.address: "10.0.0.300" is not an IPv4 address'),
    (TWO + "- {name: c, address: 0.0.0.0}\n", "hosts.2.address: nothing can be reached at 0.0.0.0"),
    (TWO + "- {name: c, address: 127.0.0.1}\n", "127.0.0.1 is every host's own"),
    (TWO + "- {name: c, address: 10.0.0.1}\n- {name: d, address: 10.0.0.1}\n", "hosts.3.address: 10.0.0.1 is c"),
    (TWO + "- {name: c, ssh: u@x}\n- {name: d, ssh: u@x}\n", "hosts.3.ssh: u@x is c already"),
    (TWO + "- {name: c, devices: [0, 0]}\n", "hosts.2.devices.1: device 0 is there twice"),
    (TWO + "- {name: c, devices: [-1]}\n", "hosts.2.devices.0: there is no device -1"),
    (TWO + "exclude_nodes: [aa]\n", 'exclude_nodes.0: no host is called "aa"'),
    (TWO + "exclude_nodes: [a, b]\n", "exclude_nodes: no host is left"),
    (TWO + "ssh: {options: ['-v']}\n", 'ssh.options.0: "-v" is not a setting of ssh'),
    (TWO + "ssh: {options: [requestTTY=yes]}\n", "ssh.options.0: pdserve sets requestTTY"),
    (TWO + "ssh: {options: [ForwardAgent=yes]}\n", "pdserve sets ForwardAgent"),
    (TWO + "- {name: c, python: '${NO}'}\n", "the environment variable NO is not set"),
]

DESTINATIONS = [
    ("ops@h1", "h1"), ("h1", "h1"), ("ssh://ops@h1:2222", "h1"), ("ssh://h1", "h1"), ("ssh://h1/", "h1"),
    ("10.0.0.1", "10.0.0.1"), ("ops@fd00::1", "fd00::1"), ("::1", "::1"), ("fe80::1%eth0", "fe80::1%eth0"),
    ("first.last@h.x", "h.x"), ("DOMAIN\\me@h_x", "h_x"), ("me@example.org@h1", "h1"),
    ("me@example.org@fd00::1", "fd00::1"), ("ssh://me%40example.org@h1:22", "h1"),
    ("ssh://h-1.x_y.example.org", "h-1.x_y.example.org"),
    ("ssh://h1.example.org.:22", "h1.example.org"), ("höst", "höst"),
]  # fmt: skip
"""And the machine that is meant."""

NAME, BRACKETS, COLON = "is not a destination of ssh", "has brackets", "has a colon"
NO_DESTINATIONS = [
    ("root@[::1]", BRACKETS, "write root@::1"),
    (
        "root@[fd00::1]:2222", BRACKETS,
        "write root@fd00::1, and the port for all hosts in `ssh: {options: [Port=2222]}`, or for one in ssh's own "
        "config",
    ),
    ("me@[host]:22", BRACKETS, "write ssh://me@HOST:22"),
    ("me@[]", BRACKETS, "write [user@]host"), ("me@h1:2222", COLON, "write ssh://me@h1:2222"),
    ("h1:/tmp", COLON, "write [user@]host, or ssh://[user@]host:port"),
    ("ssh://h1:x", NAME, "write ssh://[user@]host:port"), ("ssh://h1:70000", NAME, "write ssh://[user@]host:port"),
    ("ssh://fd00::1", NAME, "write ssh://[user@]host:port"),
    ("ssh://", NAME, "write [user@]host"), ("ssh://u@-oX", NAME, "write [user@]host"),
    ("-oProxyCommand=x", NAME, "write [user@]host"), ("-u@h1", NAME, "write [user@]host"),
    ("@h1", NAME, "write [user@]host"), ("u@", NAME, "write [user@]host"),
    ("a@b@h1:2222", COLON, "write ssh://a%40b@h1:2222"), ("a@b@[host]:22", BRACKETS, "write ssh://a%40b@HOST:22"),
    ("ssh://a%40b@[fd00::1]", BRACKETS, "write a@b@fd00::1"),
    ("ssh://u%zz@c", NAME, "write [user@]host"), ("ssh://h*st", NAME, "write [user@]host"),
    ("ssh://h..st", NAME, "write [user@]host"), ("a b", NAME, "write [user@]host"), ("h1\n", NAME, "write [user@]host"),
    ("$(reboot)@h1", NAME, "write [user@]host"),
]  # fmt: skip


def load(folder: Path, text: str, **environ: str) -> LoadedCluster:
    (folder / "cluster.yaml").write_text(text)
    return load_cluster(folder / "cluster.yaml", environ=environ)


@each_row("text, what", REFUSED)
def test_it_is_refused_with_its_line_and_what_to_write(tmp_path: Path, text: str, what: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load(tmp_path, text)
    assert what in caught.value.render().replace(f"{tmp_path}/", "")


def test_all_errors_of_a_file_are_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        load(tmp_path, TWO + "- name: a\n  port: 22\nnetwork: {cidr: x}\nssh: {option: []}\n")
    lines = [line.replace(f"{tmp_path}/", "") for line in caught.value.evidence]
    assert [line.split(": ")[:2] for line in lines] == [
        ["cluster.yaml:5", "hosts.2.name"],
        ["cluster.yaml:6", "hosts.2.port"],
        ["cluster.yaml:7", "network.cidr"],
        ["cluster.yaml:8", "ssh.option"],
    ]


def test_variables_are_taken_from_the_environment(tmp_path: Path) -> None:
    text = TWO + "- {name: c, devices: ['${FIRST}', 1], python: '${VENV:-/opt}/bin/python'}\n"
    assert load(tmp_path, text, FIRST="0").cluster.hosts[2] == Host(
        name="c", devices=[0, 1], python="/opt/bin/python"
    )  # fmt: skip


@each_row("ssh, machine", DESTINATIONS)
def test_destinations_are_what_ssh_takes(tmp_path: Path, ssh: str, machine: str) -> None:
    loaded = load(tmp_path, TWO + f"- {{name: c, ssh: '{ssh}'}}\n")
    assert loaded.cluster.hosts[2].ssh == ssh
    assert of_cluster(loaded, []).machines[2].target == machine


@each_row("ssh, what, todo", NO_DESTINATIONS)
def test_what_ssh_takes_for_something_else_is_refused(tmp_path: Path, ssh: str, what: str, todo: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load(tmp_path, TWO + f"- name: c\n  ssh: {json.dumps(ssh)}\n")
    assert caught.value.where == f"{tmp_path}/cluster.yaml:6"
    assert caught.value.what.startswith("hosts.2.ssh: ")
    assert what in caught.value.what
    assert caught.value.todo == todo


def asked(ssh: str) -> subprocess.CompletedProcess[str]:
    """What ssh itself says of a destination: -G prints what would be done, and does nothing."""
    argv = ["ssh", "-G", "-F", "/dev/null", "--", ssh]
    return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.process
@pytest.mark.skipif(shutil.which("ssh") is None, reason="no ssh here")
@each_row("ssh, machine", DESTINATIONS)
def test_ssh_itself_reads_a_destination_as_we_do(ssh: str, machine: str) -> None:
    done = asked(ssh)
    assert f"\nhostname {machine.lower()}\n" in f"\n{done.stdout}", done.stderr


def test_sshs_own_file_is_relative_to_the_cluster_file(tmp_path: Path) -> None:
    assert load(tmp_path, TWO).ssh_config is None
    assert load(tmp_path, TWO + "ssh: {config: lab/ssh_config}\n").ssh_config == tmp_path / "lab" / "ssh_config"
    assert load(tmp_path, TWO + "ssh: {config: /etc/x}\n").ssh_config == Path("/etc/x")


def test_keys_are_found_with_their_line_where_the_file_says_something(tmp_path: Path) -> None:
    loaded = load(tmp_path, TWO + "network: {cidr: 10.0.0.0/8}\n")
    assert loaded.locate("network.cidr") == f"{tmp_path}/cluster.yaml:5"
    assert loaded.locate("hosts.1.address") == f"{tmp_path}/cluster.yaml:4", "its nearest ancestor"
    assert loaded.locate("schema") == f"{tmp_path}/cluster.yaml:1"
    assert loaded.locate("exclude_nodes") is None
    assert loaded.locate("model.path") is None


def test_the_example_means_what_it_shows() -> None:
    cluster = load_cluster(EXAMPLE, environ={}).cluster
    assert [host.name for host in cluster.usable()] == ["gpu-a", "gpu-b"]
    assert [host.name for host in cluster.usable(["gpu-a", "elsewhere"])] == ["gpu-b"], "the recipe may exclude more"
    assert cluster.hosts[1] == Host(
        name="gpu-b", address="10.1.0.12", devices=[0, 1, 2, 3], python="/opt/pdserve/bin/python"
    )
    assert cluster.network == Network(cidr="10.1.0.0/24")


def test_editors_have_a_schema_that_knows_the_example() -> None:
    first = EXAMPLE.read_text().splitlines()[0]
    path = (EXAMPLE.parent / first.removeprefix("# yaml-language-server: $schema=")).resolve()
    assert path == ROOT / "schema" / "cluster.schema.json"
    schema = json.loads(path.read_text())
    assert schema == cluster_schema(), "run: pdserve schema --cluster > schema/cluster.schema.json"
    validator = importlib.import_module("jsonschema").Draft202012Validator
    validator.check_schema(schema)
    assert validator(schema).is_valid(yaml12.parse(EXAMPLE.read_text(), "example").data)
    assert not validator(schema).is_valid({"schema": 1, "hosts": [{"name": "a", "adress": "x"}]})
    for model in (schema, *schema["$defs"].values()):
        assert all(len(p.get("description", "")) > 8 for p in model.get("properties", {}).values())
