"""Blocks of tiny models: the installed vLLM computes what is recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.upstream.run import INSTALLED_VLLM, probe

pytestmark = pytest.mark.upstream

RECORD = Path(__file__).parents[1] / "models" / "recorded_vllm.json"


def test_the_record_is_what_vllm_computes() -> None:
    """A CPU without AVX-512 BF16 has another type of recurrent state, and then other blocks."""
    theirs: dict[str, Any] = probe(INSTALLED_VLLM, "tests.upstream.probes.model_kv")
    if any(numbers["ssm_dtype"] != "float32" for numbers in theirs.values()):
        pytest.skip("this CPU has no AVX-512 BF16, on which the record was made")
    assert theirs == json.loads(RECORD.read_text())
