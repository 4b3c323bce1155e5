"""Blocks of tiny models: the installed vLLM computes what is recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.upstream.run import INSTALLED_VLLM, probe

pytestmark = pytest.mark.upstream

RECURRENT = ("granite-mamba2", "nemotron-mamba2", "jamba-mamba1", "qwen3-next")
RECORD = Path(__file__).parents[1] / "models" / "recorded_vllm.json"


def test_the_record_is_what_vllm_computes() -> None:
    """A CPU without AVX-512 BF16 has another type of recurrent state, and models with it then have other blocks: there
    the others are compared."""
    theirs: dict[str, Any] = probe(INSTALLED_VLLM, "tests.upstream.probes.model_kv")
    record: dict[str, Any] = json.loads(RECORD.read_text())
    assert theirs.keys() == record.keys()
    if any(numbers["ssm_dtype"] != "float32" for numbers in theirs.values()):
        theirs, record = (_without_recurrent_state(numbers) for numbers in (theirs, record))
    assert theirs == record


def _without_recurrent_state(models: dict[str, Any]) -> dict[str, Any]:
    return {
        name: {key: value for key, value in numbers.items() if key != "ssm_dtype"}
        for name, numbers in models.items()
        if not name.startswith(RECURRENT)
    }
