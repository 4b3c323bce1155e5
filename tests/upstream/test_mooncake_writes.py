"""What Mooncake has reported as written is there (vllm#44238, over TCP): with the library's own transfer engine.

Of 0.3.11.post1 the same probe says: a write to a stopped receiver is done at once, and of 32 transfers one had other
bytes when it was reported as done.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.upstream.probes.mooncake_writes import ROUNDS, SLOTS
from tests.upstream.run import INSTALLED_VLLM, probe

pytestmark = pytest.mark.upstream


@cache
def seen() -> dict[str, Any]:
    results: dict[str, Any] = probe(INSTALLED_VLLM, "tests.upstream.probes.mooncake_writes")
    return results


def test_a_write_is_done_when_the_receiver_has_it() -> None:
    assert seen()["stopped"] == {"done_while_it_is_stopped": False, "done_after_it": True}


def test_of_many_transfers_at_once_each_has_its_bytes_in_place() -> None:
    assert seen()["at_once"] == {"same": SLOTS * ROUNDS, "other": 0, "failed": 0}
