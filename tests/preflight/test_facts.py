"""What a node says of itself, on this machine and in a network that the test has made."""

from __future__ import annotations

import socket
import sys

import pytest

import pdserve
from pdserve.preflight.facts import NodeFacts, gather, source_digest
from pdserve.preflight.links import interfaces, is_loopback
from tests.preflight.kit import LOOPBACK, in_namespace


def test_facts_travel() -> None:
    facts = gather(platform="cpu", targets=["127.0.0.1"], environ={"CUDA_VISIBLE_DEVICES": "1", "KEY": "secret"})
    assert NodeFacts.model_validate_json(facts.model_dump_json()) == facts
    assert "secret" not in facts.model_dump_json()


def test_this_machine() -> None:
    facts = gather(platform="cpu", targets=["127.0.0.1", "no-such-host.invalid"])
    assert (facts.hostname, facts.interpreter) == (socket.gethostname(), sys.executable)
    assert facts.pdserve_version == pdserve.__version__
    assert facts.pdserve_digest == source_digest()
    assert facts.routes == {"127.0.0.1": "127.0.0.1", "no-such-host.invalid": None}
    assert 0 < facts.memory.available <= facts.memory_total
    assert facts.open_files.soft is None or facts.open_files.soft > 0
    assert (facts.devices_present, facts.devices_visible) == ((), ())


@pytest.mark.process
def test_an_interpreter_that_is_not_there_is_a_fact_not_an_error() -> None:
    facts = gather(platform="cpu", python="/no/such/python")
    assert facts.versions_problem is not None
    assert "/no/such/python cannot be used as a Python interpreter" in facts.versions_problem
    assert facts.versions.vllm is None


def test_loopback_is_among_the_interfaces() -> None:
    assert LOOPBACK in interfaces()


@pytest.mark.process
def test_every_address_has_its_own_mask_and_state() -> None:
    output = in_namespace(
        "import json; from pdserve.preflight.links import interfaces;"
        "print(json.dumps([str(interface) for interface in interfaces()]))",
        network=[
            "link add net0 type veth peer name peer0",
            "link set net0 up",
            "link set peer0 up",
            "addr add 10.9.1.1/24 dev net0",
            "addr add 10.9.2.1/16 dev net0",
            "link add net1 type veth peer name peer1",
            "addr add 10.8.0.1/30 dev net1",
        ],
    )
    assert output == ["lo 127.0.0.1/8", "net0 10.9.1.1/24", "net0 10.9.2.1/16", "net1 10.8.0.1/30 (down)"]


@pytest.mark.process
@pytest.mark.parametrize(("driverless", "expected"), [(("veth", "tun"), None), ((), 10.0)])
def test_the_speed_of_a_link_is_what_its_driver_states_but_not_of_one_without_a_link(
    driverless: tuple[str, ...], expected: float | None
) -> None:
    """veth states 10 Gbit/s, whatever it gives; no other driver that states anything can be had without an adapter."""
    output = in_namespace(
        f"import json; from pdserve.preflight import links as here; here._NO_LINK = {driverless!r};"
        "print(json.dumps([here.speed(name) for name in ('net0', 'lo', 'gone')]))",
        network=["link add net0 type veth peer name peer0", "link set net0 up", "link set peer0 up"],
    )
    assert output == [expected, None, None]


@pytest.mark.process
def test_more_addresses_than_the_first_question_has_room_for() -> None:
    output = in_namespace(
        "import json; from pdserve.preflight.links import interfaces; print(json.dumps(len(interfaces())))",
        network=[f"addr add 10.9.{n}.1/24 dev lo" for n in range(100)],
    )
    assert output == 101


@pytest.mark.process
def test_the_route_decides_which_address_is_ours() -> None:
    output = in_namespace(
        "import json; from pdserve.preflight.links import route_source;"
        "print(json.dumps([route_source('10.9.0.7'), route_source('10.8.0.7'), route_source('10.7.0.7')]))",
        network=[
            "link add net0 type veth peer name peer0",
            "link set net0 up",
            "link set peer0 up",
            "addr add 10.9.0.1/24 dev net0",
            "link add net1 type veth peer name peer1",
            "link set net1 up",
            "link set peer1 up",
            "addr add 10.8.0.1/24 dev net1",
        ],
    )
    assert output == ["10.9.0.1", "10.8.0.1", None]


def test_loopback_by_name() -> None:
    assert is_loopback("127.0.1.1")
    assert is_loopback("::1")
    assert is_loopback("localhost")
    assert not is_loopback("10.0.0.1")
    assert not is_loopback("node7")


@pytest.mark.process
def test_capabilities_of_a_user_namespace_do_not_count() -> None:
    output = in_namespace(
        "import json; from pdserve.preflight.facts import gather; print(json.dumps(gather(platform='cpu').ipc_lock))"
    )
    assert output is False
