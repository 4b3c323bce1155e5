"""What the rules of layouts say of vLLM, read in its source: no engine is imported."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.real


def source(path: str) -> str:
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return (Path(spec.origin).parent / "distributed/kv_transfer/kv_connector" / path).read_text()


def words(text: str) -> set[str]:
    """The strings of a module, in one piece each."""
    return {
        node.value
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def test_a_decode_of_nixl_refuses_stages() -> None:
    worker = source("v1/nixl/base_worker.py")
    condition = """        if self.pp_size > 1:
            if self._is_hma_required"""
    assert condition in worker
    assert 'kv_role == "kv_consumer":\n                raise NotImplementedError(' in worker
    assert "Number of KV layers must match between prefill and decode" in words(worker)


def test_nixl_divides_decodes_blocks_by_prefills() -> None:
    topology = source("utils.py")
    assert "assert self.block_size % remote_block_size == 0, (" in topology
    unequal = "Different local/remote block sizes are not supported when P TP > D TP."
    assert unequal in words(source("v1/nixl/base_worker.py"))


def test_mooncake_pairs_blocks_one_to_one() -> None:
    connector = source("v1/mooncake/mooncake_connector.py")
    assert "local_group = local_group[-n_remote:] if n_remote > 0 else []" in connector
    assert "P num blocks less than D" in words(connector)
