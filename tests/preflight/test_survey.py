"""The look at all hosts of a cluster file, by an `ssh` that comes back to this machine: who is blamed, and where."""

from __future__ import annotations

import asyncio
import os
import re
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from pdserve.errors import PreflightError
from pdserve.plan.node import Local
from pdserve.preflight import survey
from pdserve.preflight.links import interfaces, is_loopback
from pdserve.reach.candidates import Candidate, Candidates
from pdserve.run.change import Change
from pdserve.run.directory import RunDir
from tests.launch.deployment import pdserve, recipe
from tests.plan import kit
from tests.preflight import kit as preflight_kit
from tests.tables import each_row

pytestmark = pytest.mark.process

OWN = [interface.address for interface in interfaces() if not is_loopback(interface.address)]
FOREIGN_ADDRESS = "203.0.113.7"
"""RFC 5737: nobody has it."""
CAUSES = {
    "refuses": "ssh: connect to host refuses port 22: Connection refused",
    "unknown": "ssh: Could not resolve hostname unknown: Name or service not known",
}

SSH = r"""#!/bin/sh
for last; do destination=$before before=$last; done
case "$destination" in
refuses) echo "ssh: connect to host refuses port 22: Connection refused" >&2; exit 255;;
unknown) echo "ssh: Could not resolve hostname unknown: Name or service not known" >&2; exit 255;;
hangs) exec cat;;
esac
exec sh -c "exec $last"
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pdserve_home: Path) -> Path:
    """A folder for recipes and cluster files."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "ssh"
    program.write_text(SSH)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return tmp_path


def refused(here: Path, *lines: str, file: Path | None = None) -> str:
    """What `pdserve preflight` says of a cluster file of these lines."""
    cluster = here / "cluster.yaml"
    cluster.write_text("\n".join(["schema: 1", *lines, ""]))
    code, output = pdserve("preflight", file or recipe(here), "--cluster", cluster)
    text = f"{output}\n"
    assert code == 3, text
    assert "Traceback" not in text
    return text


@each_row("lines, cidr, line", [
    (["network: {cidr: 203.0.113.0/24}"], "10.0.0.0/8", 2),
    ([], "203.0.113.0/24", None),
])  # fmt: skip
def test_a_network_that_no_node_has_is_a_line_of_the_file_that_names_it(
    here: Path, tmp_path: Path, lines: list[str], cidr: str, line: int | None
) -> None:
    file = recipe(tmp_path, network__cidr=cidr)
    text = refused(here, *lines, "hosts: [{name: a}]", file=file)
    own = next(n for n, words in enumerate(file.read_text().splitlines(), 1) if f"cidr: {cidr}" in words)
    place = f"{file}:{own}" if line is None else f"{here}/cluster.yaml:{line}"
    assert f"error: {place}: network.cidr: a has no address in 203.0.113.0/24" in text


@pytest.mark.skipif(not OWN, reason="no address besides loopback here")
def test_the_host_with_a_wrong_address_is_named_with_its_line_and_what_it_has(here: Path) -> None:
    hosts = ("hosts:", "- name: x", "- name: a", "- name: b", f"  address: {FOREIGN_ADDRESS}")
    text = refused(here, "exclude_nodes: [x]", *hosts)
    assert f"error: {here}/cluster.yaml:7: hosts.2.address: b does not have the address {FOREIGN_ADDRESS}\n" in text
    assert re.search(rf"  likely cause: there: .*{re.escape(OWN[0])}", text)
    assert "a does not" not in text
    assert "leave `address` out" in text


@pytest.mark.full
def test_all_hosts_that_do_not_answer_are_named_each_with_its_cause(here: Path) -> None:
    text = refused(here, "hosts: [{name: refuses}, {name: a}, {name: unknown}]")
    assert "error: 2 of 3 nodes cannot be looked at: refuses, unknown\n" in text
    for host, cause in CAUSES.items():
        assert f"  | probe@{host}: nothing can be started on {host}\n  |   {cause}\n" in text
    assert "exclude_nodes: [refuses, unknown]" in text
    logs = re.search(r"read (\S+)/probe@\*\.log", text)
    assert logs is not None
    assert sorted(log.name for log in Path(logs[1]).glob("probe@*.log") if log.stat().st_size) == [
        "probe@refuses.log",
        "probe@unknown.log",
    ]


def test_a_host_that_hangs_does_not_hide_one_that_refuses(here: Path) -> None:
    began = time.monotonic()
    text = refused(here, "ssh: {connect_seconds: 1}", "hosts: [{name: hangs}, {name: refuses}]")
    assert "error: probe@refuses: nothing can be started on refuses\n" in text
    assert f"  | {CAUSES['refuses']}\n  | hangs had not answered either when this was given up\n" in text
    assert time.monotonic() - began < 60, "far from the two minutes that a start may take"


def test_a_machine_without_ssh_is_an_error(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "bin" / "ssh").unlink()
    monkeypatch.setenv("PATH", str(here / "bin"))
    text = refused(here, "hosts: [{name: a}, {name: b}]")
    assert "error: probe@a: ssh cannot be run here: No such file or directory\n" in text
    assert "what to do:   install ssh on the machine where pdserve is called, or add its folder to PATH" in text


@pytest.mark.full
def test_a_larger_server_is_measured_against_what_the_one_that_runs_gives_back(tmp_path: Path) -> None:
    small, huge = (preflight_kit.here(kit.with_lmcache(l1_size_gb=size)) for size in (2, 900_000))
    RunDir(tmp_path).plan.write_text(small.model_dump_json())
    name = ("lmcache-0",)
    seen = asyncio.run(
        survey.survey(
            Candidates("a test", (Candidate("here", Local(), "here", address="127.0.0.1"),)),
            kit.recipe(),
            run_dir=tmp_path,
            plan_for=lambda nodes, versions: huge,
            change_for=lambda plan: Change(starting=name, replaced=name, gone=(), ports={"here": frozenset()}),
        )
    )
    memory = preflight_kit.only(seen.findings, "memory")
    assert memory.status == "failed"
    assert "(2.0 GiB of what is replaced counted as free)" in memory.need


@pytest.mark.full
def test_the_log_of_an_earlier_probe_is_not_taken_for_that_of_this_one(tmp_path: Path) -> None:
    for script, evidence in (("echo refused >&2", ("refused",)), ("exit 1", ())):
        machine = Candidate("a", Local(), "a", command=("sh", "-c", script))
        looked = survey.survey(Candidates("a test", (machine,)), kit.recipe(), run_dir=tmp_path, plan_for=Mock())
        with pytest.raises(PreflightError) as raised:
            asyncio.run(looked)
        assert raised.value.evidence == evidence
