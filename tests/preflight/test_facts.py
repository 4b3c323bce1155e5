"""What a node says of itself: data that travels, and no error where something is not there."""

from __future__ import annotations

import resource
import socket
import sys

import pytest

import pdserve
from pdserve.preflight.facts import NodeFacts, gather, source_digest
from tests.preflight.kit import in_namespace


def test_this_machine() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "1", "KEY": "secret"}
    facts = gather(platform="cpu", targets=["127.0.0.1", "no-such-host.invalid"], environ=environ)
    assert NodeFacts.model_validate_json(facts.model_dump_json()) == facts
    assert "secret" not in facts.model_dump_json()
    assert (facts.hostname, facts.interpreter) == (socket.gethostname(), sys.executable)
    assert (facts.pdserve_version, facts.pdserve_digest) == (pdserve.__version__, source_digest())
    assert facts.routes == {"127.0.0.1": "127.0.0.1", "no-such-host.invalid": None}
    assert 0 < facts.memory.available <= facts.memory_total
    limits = [None if each == resource.RLIM_INFINITY else each for each in resource.getrlimit(resource.RLIMIT_NOFILE)]
    assert [facts.open_files.soft, facts.open_files.hard] == limits
    assert (facts.devices_present, facts.devices_visible) == ((), ())


@pytest.mark.process
def test_capabilities_of_a_user_namespace_do_not_count() -> None:
    code = "import json; from pdserve.preflight.facts import gather; print(json.dumps(gather(platform='cpu').ipc_lock))"
    assert in_namespace(code) is False
