"""The same recipe over bare hosts: a cluster file, ssh, and nothing else; and what other nodes say of it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.cluster.deployments import LIMIT, ORDER, PDSERVE, Lab
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


def test_an_engine_that_dies_on_another_host_is_reported_with_its_host_and_its_last_words(hosts: Lab) -> None:
    recipe = hosts.recipe(decode__env={"FAKE_DIE_AT": "load", "FAKE_LAST_LINES": "RuntimeError: no such weights"})
    with hosts.up(LOGIN, recipe, "--cluster", hosts.hosts()) as up:
        line = up.expect("error: decode-0@")
        assert hosts.cluster.nodes[1] in line
        up.expect("RuntimeError: no such weights")
        assert up.ended() == "4"


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
def test_what_a_killed_agent_leaves_is_cleared_up_there_and_the_error_names_the_command(hosts: Lab) -> None:
    """Also with the launcher on one of the hosts."""
    with hosts.up(hosts.cluster.nodes[0], hosts.recipe(), "--cluster", hosts.hosts()) as up:
        up.ready()
        assert up.complete()[0] == 200
        node = up.node_of("decode-0")
        both = [
            pid for pid, argv in hosts.cluster.processes(node) if "pdserve.node.agent" in argv and "ssh" not in argv[0]
        ]
        # Stopped first, so that neither sees the other die. What they own lives on.
        for signum in (signal.SIGSTOP, signal.SIGKILL):
            for pid in both:
                os.kill(pid, signum)
        assert f"`pdserve down fake`, typed on {node}" in up.expect("what to do:")
        assert up.ended() == "5"
    hint = f"{node} was lost: run `pdserve down"
    assert hint in hosts.pdserve(LOGIN, "down").stdout
    there = hosts.pdserve(node, "down")
    assert (there.returncode, there.stdout.splitlines()[-1]) == (0, "fake: stopped"), there.stdout + there.stderr
    assert hint not in hosts.pdserve(LOGIN, "down").stdout
    hosts.cluster.assert_nothing_left()


@pytest.mark.full
def test_the_node_of_the_proxy_cannot_be_done_without(hosts: Lab) -> None:
    recipe = hosts.recipe(on_node_loss="degrade", prefill__instances=2, decode__instances=2)
    with hosts.up(LOGIN, recipe, "--cluster", hosts.hosts()) as up:
        up.ready()
        node = up.node_of("proxy")
        with hosts.cluster.silent(node):
            up.expect(f"the agent of {node} is gone: not heard for")
            wait_until(f"nothing of ours on {node}", lambda: not agents(hosts, node), LIMIT)
            line = up.expect(f"node {node} is lost while serving, and with it")
        assert "decode-0" in line
        assert "proxy" in line
        assert up.ended() == "5"
    # sshd hears of the end of its client when the client's machine tries again.
    hosts.cluster.assert_nothing_left(timeout=LIMIT)


def agents(hosts: Lab, node: str) -> list[str]:
    """What runs on a host besides sshd's sessions, which end when the network is back."""
    return [" ".join(argv) for _, argv in hosts.cluster.processes(node) if "sshd" not in argv[0]]


def test_a_killed_launcher_takes_everything_along(hosts: Lab) -> None:
    with hosts.up(LOGIN, hosts.recipe(), "--cluster", hosts.hosts()) as up:
        up.ready()
        up.process.send_signal(signal.SIGKILL)
        hosts.cluster.assert_nothing_left()


@pytest.mark.full
def test_a_node_that_is_cut_off_while_it_stops_is_named_with_what_happens_there(hosts: Lab) -> None:
    recipe = hosts.recipe(decode__env={"FAKE_IGNORE_TERM": "1"}, timeouts__stop_seconds=20)
    with hosts.up(LOGIN, recipe, "--cluster", hosts.hosts()) as up:
        up.ready()
        node = up.node_of("decode-0")
        with hosts.cluster.popen(
            LOGIN, [*PDSERVE, "down"], env=hosts.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as down:
            up.wait_for("stop", name="decode-0")
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
