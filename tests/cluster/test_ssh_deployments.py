"""The same recipe over bare hosts: a cluster file, ssh, and nothing else; and what other nodes say of it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from pdserve.system import procfs
from tests.cluster.deployments import LIMIT, ORDER, PDSERVE, ClusterDeployment, Lab
from tests.cluster.spec import LOGIN
from tests.launch.deployment import wait_until

pytestmark = pytest.mark.cluster


def test_a_recipe_over_two_hosts_is_driven_from_a_third_machine_and_grows_by_a_prefill(hosts: Lab) -> None:
    first, second, _ = hosts.cluster.nodes
    recipe, cluster = hosts.recipe(), hosts.hosts()
    with hosts.up(LOGIN, recipe, "--cluster", cluster) as up:
        up.ready()
        assert (up.node_of("proxy"), up.node_of("prefill-0"), up.node_of("decode-0")) == (first, first, second)
        status, answer = up.complete()
        assert (status, answer["usage"]["completion_tokens"]) == (200, 4)
        table = hosts.pdserve(LOGIN, "status").stdout
        assert re.search(rf"^decode-0\s+\S+\s+{second}\s+\d+\s+ready", table, re.MULTILINE), table
        more: tuple[str | Path, ...] = ("up", recipe, "--cluster", cluster, "--set", "prefill.instances=2")
        engines = ("prefill-0", "decode-0", "lmcache-0")
        before = {name: (up.node_of(name), up.pid_of(name)) for name in engines}
        shown = json.loads(hosts.pdserve(LOGIN, *more, "--dry-run", "--json").stdout)["change"]
        assert "prefill-1" in shown["start"]
        assert {*engines} <= {*shown["stay"]}
        done = hosts.pdserve(LOGIN, *more)
        assert done.returncode == 0, done.stdout + done.stderr
        assert {name: (up.node_of(name), up.pid_of(name)) for name in engines} == before
        down = hosts.pdserve(LOGIN, "down")
        assert (down.returncode, down.stdout.strip()) == (0, "fake: stopped")
        assert up.ended() == "0"
        last = [name for name in up.stopped() if name in ORDER][-len(ORDER) :]
        assert last == ORDER


@pytest.mark.full
def test_the_launcher_may_be_on_one_of_the_hosts(hosts: Lab) -> None:
    with hosts.up(hosts.cluster.nodes[0], hosts.recipe(), "--cluster", hosts.hosts()) as up:
        up.ready()
        assert up.complete()[0] == 200
        up.process.send_signal(signal.SIGINT)
        assert up.ended() == "0"


def test_an_engine_that_dies_on_another_host_is_reported_with_its_host_and_its_last_words(hosts: Lab) -> None:
    recipe = hosts.recipe(decode__env={"FAKE_DIE_AT": "load", "FAKE_LAST_LINES": "RuntimeError: no such weights"})
    with hosts.up(LOGIN, recipe, "--cluster", hosts.hosts()) as up:
        line = up.expect("error: decode-0@")
        assert hosts.cluster.nodes[1] in line
        up.expect("RuntimeError: no such weights")
        assert up.ended() == "4"


def test_a_host_that_does_not_answer_is_named_in_the_words_of_ssh(hosts: Lab) -> None:
    silent = hosts.cluster.nodes[1]
    hosts.cluster.cut(silent)
    try:
        done = hosts.pdserve(LOGIN, "up", hosts.recipe(), "--cluster", hosts.hosts())
    finally:
        hosts.cluster.heal(silent)
    assert done.returncode == 3, done.stdout + done.stderr
    assert f"probe@{silent}: nothing can be started on {silent}" in done.stderr
    assert re.search(r"\| ssh: connect to host .* (timed out|No route to host)", done.stderr), done.stderr


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("IdentityFile=/dev/null", "Permission denied (publickey)"),
        ("UserKnownHostsFile=/dev/null", "Host key verification failed"),
        ("Port=2222", "Connection refused"),
    ],
)
@pytest.mark.full
def test_a_host_that_refuses_is_named_in_the_words_of_ssh(hosts: Lab, option: str, words: str) -> None:
    config = hosts.folder / "ssh_config"
    # The first value of a setting wins, but identities add up.
    text = hosts.cluster.ssh_config.read_text()
    config.write_text(text.replace("IdentityFile", "#") if option.startswith("IdentityFile") else text)
    file = hosts.hosts(ssh={"config": str(config), "options": [option]})
    done = hosts.pdserve(LOGIN, "up", hosts.recipe(), "--cluster", file)
    assert done.returncode == 3, done.stdout + done.stderr
    first, other, _ = hosts.cluster.nodes
    assert f"error: 2 of 2 nodes cannot be looked at: {first}, {other}" in done.stderr
    for node in (first, other):
        assert f"| probe@{node}: nothing can be started on {node}" in done.stderr
    assert done.stderr.count(words) == 2, done.stderr


@pytest.mark.full
def test_the_logs_that_preflight_names_are_there(hosts: Lab) -> None:
    file = hosts.hosts(ssh={"config": str(hosts.cluster.ssh_config), "options": ["Port=2222"]})
    done = hosts.pdserve(LOGIN, "preflight", hosts.recipe(), "--cluster", file)
    assert done.returncode == 3, done.stdout + done.stderr
    named = re.search(r"read (\S+)/probe@\*\.log", done.stderr)
    assert named is not None, done.stderr
    for node in hosts.cluster.nodes[:2]:
        assert "Connection refused" in (Path(named[1]) / f"probe@{node}.log").read_text()


@pytest.mark.full
def test_what_up_would_start_of_a_running_deployment_is_looked_at_on_its_node_first(hosts: Lab) -> None:
    """A port of the one that died is taken meanwhile; what runs is not blamed for the ports and the memory it has."""
    recipe, cluster = hosts.recipe(prefill__instances=2), hosts.hosts()
    with hosts.up(LOGIN, recipe, "--cluster", cluster) as up:
        up.ready()
        node = up.node_of("prefill-1")
        port = up.run.read_plan().process("prefill-1").ports["http"]
        os.kill(up.pid_of("prefill-1"), signal.SIGKILL)
        up.wait_for("phase", phase="degraded")
        wait_until("nothing of it is left", lambda: up.state().processes["prefill-1"].phase == "dead", LIMIT)
        with hosts.cluster.popen(node, ["python3", "-um", "http.server", str(port)], cwd=hosts.folder) as squatter:
            assert squatter.stdout is not None
            squatter.stdout.readline()
            done = hosts.pdserve(LOGIN, "up", recipe, "--cluster", cluster)
            squatter.kill()
        assert done.returncode == 3, done.stdout + done.stderr
        assert f"error: ports on {node}: 1 port(s) of the plan are in use" in done.stderr
        assert f"prefill-1 needs port {port} (http), held by" in done.stderr
        assert up.state().phase == "degraded"
        assert up.complete()[0] == 200
        again = hosts.pdserve(LOGIN, "up", recipe, "--cluster", cluster)
        assert again.returncode == 0, again.stdout + again.stderr
        assert "started prefill-1; ready" in again.stdout
        up.process.send_signal(signal.SIGINT)
        assert up.ended() == "0"


def test_a_killed_ssh_is_a_lost_node_and_leaves_nothing_there(hosts: Lab) -> None:
    with hosts.up(LOGIN, hosts.recipe(), "--cluster", hosts.hosts()) as up:
        up.ready()
        node = up.node_of("decode-0")
        client = [
            pid
            for pid, argv in hosts.cluster.processes(LOGIN)
            if argv[0] == "ssh" and node in argv and "pdserve.node.agent" in argv[-1]
        ]
        os.kill(client[0], signal.SIGKILL)
        line = up.expect(f"node {node} is lost")
        assert "its pipe closed" in line
        assert up.ended() == "5"


@pytest.mark.full
def test_a_killed_agent_is_named_as_the_cause(hosts: Lab) -> None:
    with hosts.up(LOGIN, hosts.recipe(), "--cluster", hosts.hosts()) as up:
        up.ready()
        node = up.node_of("decode-0")
        os.kill(agent_of(hosts, node), signal.SIGKILL)
        line = up.expect(f"node {node} is lost")
        assert "it was killed by SIGKILL" in line
        assert "its guard stops what it owned" in up.expect("likely cause:")
        assert up.ended() == "5"
        assert "deployment is degraded" not in up.printed()
    hosts.cluster.assert_nothing_left()


@pytest.mark.full
def test_an_agent_that_is_stopped_is_a_lost_node_within_the_heartbeat(hosts: Lab) -> None:
    with hosts.up(LOGIN, hosts.recipe(), "--cluster", hosts.hosts()) as up:
        up.ready()
        node = up.node_of("decode-0")
        stopped = agent_of(hosts, node)
        os.kill(stopped, signal.SIGSTOP)
        line = up.expect(f"node {node} is lost while serving, and with it decode-0: not heard for")
        assert "the agent hangs" in line
        assert "the agent was stopped by SIGSTOP" in up.expect("likely cause:")
        assert up.ended() == "5"
        assert "deployment is degraded" not in up.printed()
        os.kill(stopped, signal.SIGCONT)  # its pipe is closed: it stops what it has
    hosts.cluster.assert_nothing_left()


@pytest.mark.full
def test_a_launcher_that_is_held_longer_than_the_lease_reports_it(hosts: Lab) -> None:
    with hosts.up(LOGIN, hosts.recipe(), "--cluster", hosts.hosts()) as up:
        up.ready()
        nodes = hosts.cluster.nodes[:2]
        up.process.send_signal(signal.SIGSTOP)
        for node in nodes:
            wait_until(f"nothing of ours on {node}", lambda node=node: not agents(hosts, node), LIMIT)  # type: ignore[misc]
        os.kill(up.process.pid, signal.SIGCONT)  # nsenter stops with its child, and wakes it
        assert "it heard nothing from the launcher for 8 s, its lease" in up.expect("is lost while serving")
        assert "the launcher itself stood still for" in up.expect("likely cause:")
        assert up.ended() == "5"
        assert "deployment is degraded" not in up.printed()


@pytest.mark.full
def test_a_cut_while_engines_start_is_named_within_the_heartbeat(hosts: Lab) -> None:
    loads = hosts.recipe(decode__env={"FAKE_READY_AFTER": "300"})
    with hosts.up(LOGIN, loads, "--cluster", hosts.hosts()) as up:
        up.expect("decode-0     starting on")
        node = up.node_of("decode-0")
        hosts.cluster.cut(node)
        up.expect(f"node {node} is lost while starting, and with it decode-0: not heard for")
        wait_until(f"nothing of ours on {node}", lambda: not agents(hosts, node), LIMIT)
        hosts.cluster.heal(node)
        assert "needs a longer timeouts.heartbeat_seconds" in up.expect("what to do:")
        assert up.ended() == "4"
    hosts.cluster.assert_nothing_left(timeout=LIMIT)


@pytest.mark.full
def test_what_a_killed_agent_leaves_is_cleared_up_there_and_the_error_names_the_command(hosts: Lab) -> None:
    with hosts.up(LOGIN, hosts.recipe(), "--cluster", hosts.hosts()) as up:
        up.ready()
        node = up.node_of("decode-0")
        hosts.kill_agent_and_guard(node)
        assert f"`pdserve down fake`, typed on {node}" in up.expect("what to do:")
        assert up.ended() == "5"
    output = hosts.pdserve(LOGIN, "down").stdout
    assert f"{node} was lost: run `pdserve down" in output
    there = hosts.pdserve(node, "down")
    assert (there.returncode, there.stdout.splitlines()[-1]) == (0, "fake: stopped"), there.stdout + there.stderr
    hosts.cluster.assert_nothing_left()


@pytest.mark.full
def test_the_node_of_the_proxy_cannot_be_done_without(hosts: Lab) -> None:
    recipe = hosts.recipe(on_node_loss="degrade", prefill__instances=2, decode__instances=2)
    with hosts.up(LOGIN, recipe, "--cluster", hosts.hosts()) as up:
        up.ready()
        node = up.node_of("proxy")
        hosts.cluster.cut(node)
        up.expect(f"the agent of {node} is gone: not heard for")
        wait_until(f"nothing of ours on {node}", lambda: not agents(hosts, node), LIMIT)
        line = up.expect(f"node {node} is lost while serving, and with it")
        assert "decode-0" in line
        assert "proxy" in line
        hosts.cluster.heal(node)
        assert up.ended() == "5"
    # sshd hears of the end of its client when the client's machine tries again.
    hosts.cluster.assert_nothing_left(timeout=LIMIT)


def agent_of(hosts: Lab, node: str) -> int:
    """The PID of the agent on a host, as the test process sees it: the child of the other one of its name."""
    both = [pid for pid, argv in hosts.cluster.processes(node) if "pdserve.node.agent" in argv and "ssh" not in argv[0]]
    children = [pid for pid in both if any(pid in procfs.descendants(parent) for parent in both)]
    assert len(children) == 1, both
    return children[0]


def agents(hosts: Lab, node: str) -> list[str]:
    """What runs on a host besides sshd's sessions, which end when the network is back."""
    return [" ".join(argv) for _, argv in hosts.cluster.processes(node) if "sshd" not in argv[0]]


def test_a_killed_launcher_takes_everything_along(hosts: Lab) -> None:
    with hosts.up(LOGIN, hosts.recipe(), "--cluster", hosts.hosts()) as up:
        up.ready()
        up.process.send_signal(signal.SIGKILL)
        hosts.cluster.assert_nothing_left()


@pytest.mark.full
def test_a_run_directory_that_a_host_does_not_share_is_found_before_anything_starts(hosts: Lab) -> None:
    other = hosts.cluster.nodes[1]
    hosts.home.mkdir()
    hosts.cluster.output(other, ["mount", "-t", "tmpfs", "none", str(hosts.home)])
    try:
        done = hosts.pdserve(LOGIN, "up", hosts.recipe(), "--cluster", hosts.hosts())
    finally:
        hosts.cluster.output(other, ["umount", str(hosts.home)])
    assert done.returncode == 3, done.stdout + done.stderr
    assert f"run-dir on {other}" in done.stderr, done.stderr


def stop_order_of(up: ClusterDeployment, process: str) -> None:
    wait_until(
        f"{process} told to stop", lambda: any(e["name"] == process for e in up.events("stop")), LIMIT, why=up.printed
    )


@pytest.mark.full
def test_a_node_that_is_cut_off_while_it_stops_is_named_with_what_happens_there(hosts: Lab) -> None:
    recipe = hosts.recipe(decode__env={"FAKE_IGNORE_TERM": "1"}, timeouts__stop_seconds=20)
    with hosts.up(LOGIN, recipe, "--cluster", hosts.hosts()) as up:
        up.ready()
        node = up.node_of("decode-0")
        with hosts.cluster.popen(
            LOGIN, [*PDSERVE, "down"], env=hosts.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as down:
            stop_order_of(up, "decode-0")
            hosts.cluster.cut(node)
            output, _ = down.communicate(timeout=LIMIT)
        assert down.returncode == 0, output
        assert output.startswith(f"fake: stopped; {node} was not reached (not heard for"), output
        assert "stops what runs there by itself, at the latest 8 s after it last heard from here" in output
        assert "`pdserve down fake`, typed there, clears up what else is left" in output
        up.expect(f"{node} was not reached (not heard for")
        assert up.ended() == "0"
        wait_until(f"nothing of ours on {node}", lambda: not agents(hosts, node), LIMIT)
        hosts.cluster.heal(node)
    hosts.cluster.assert_nothing_left(timeout=LIMIT)


@pytest.mark.full
def test_a_killed_launcher_is_shown_on_another_node_as_not_heard_and_down_is_no_failure(hosts: Lab) -> None:
    other_node = hosts.cluster.nodes[2]  # nothing of it runs there
    with hosts.up(LOGIN, hosts.recipe(), "--cluster", hosts.hosts()) as up:
        up.ready()
        assert hosts.pdserve(other_node, "status").returncode == 0
        up.process.send_signal(signal.SIGKILL)

        def not_heard() -> bool:
            return "when its launcher was last heard" in hosts.pdserve(other_node, "status").stdout

        wait_until("not heard", not_heard, LIMIT)
        done = hosts.pdserve(other_node, "status")
        assert done.returncode == 5
        assert done.stdout.startswith("fake: unresponsive; it was ready when its launcher was last heard, "), (
            done.stdout
        )
        down = hosts.pdserve(other_node, "down")
        assert down.returncode == 0, down.stdout + down.stderr
        assert "was not heard for" in down.stdout.splitlines()[0]
        assert "was gone before it could stop anything: the agents of" in down.stdout
        assert hosts.pdserve(other_node, "status").stdout.startswith("fake: lost")
    hosts.cluster.assert_nothing_left()


@pytest.mark.full
def test_once_a_lost_node_was_cleared_it_is_not_named_again(hosts: Lab) -> None:
    with hosts.up(LOGIN, hosts.recipe(), "--cluster", hosts.hosts()) as up:
        up.ready()
        node = up.node_of("decode-0")
        hosts.kill_agent_and_guard(node)
        assert up.ended() == "5"
    hint = f"{node} was lost: run `pdserve down"
    assert hint in hosts.pdserve(LOGIN, "down").stdout
    assert hosts.pdserve(node, "down").returncode == 0
    assert hint not in hosts.pdserve(LOGIN, "down").stdout
    hosts.cluster.assert_nothing_left()
