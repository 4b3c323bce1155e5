"""`pdserve bench` on the real stack, with the real client: what it wrote is what was asked for, and KV moved."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.deployment import Deployment, pdserve
from tests.real.conftest import brought_up

pytestmark = pytest.mark.real

REQUESTS, INPUT, OUTPUT = 6, 600, 8


@pytest.fixture(scope="module")
def tiny(home: Path) -> Iterator[Deployment]:
    yield from brought_up("tiny-cpu", home)


def test_the_figures_are_of_what_was_asked_for_and_the_kv_was_transferred(tiny: Deployment) -> None:
    lengths = ("--input-tokens", str(INPUT), "--output-tokens", str(OUTPUT), "--requests", str(REQUESTS))
    code, output = pdserve("bench", "--json", "--concurrency", "2", "--repeats", "1", "--warmup", "2", *lengths)
    result, _ = json.JSONDecoder().raw_decode(output, output.index("{\n"))
    (measured,) = result["measurements"]
    figures, window, verdict = measured["figures"], measured["window"], measured["verdict"]
    # On a machine with two cores the client may wait for the engines' threads: that alone may not count.
    assert {reason["check"] for reason in verdict["reasons"]} <= {"client-cpu"}, output
    assert code == (9 if verdict["reasons"] else 0)
    assert not verdict["unchecked"], verdict
    assert (figures["completed"], figures["output_tokens"]) == (REQUESTS, REQUESTS * OUTPUT)
    prompts = figures["input_tokens"]
    assert abs(prompts - REQUESTS * INPUT) <= 2 * REQUESTS
    assert (window["prefill"]["computed"], window["decode"]["received"]) == (prompts, prompts)
    assert window["decode"]["computed"] <= REQUESTS
    assert window["lmcache"]["written"] >= REQUESTS * (INPUT // 256)
    assert tiny.run.read_key() not in Path(result["folder"], measured["log"]).read_text()
