"""Every series that alerts and panels take from vLLM, LMCache and Mooncake is one that the installed versions export.

Read from their sources: most of LMCache's series appear only when what they count happens for the first time.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.monitoring.test_expressions import NAMES

pytestmark = pytest.mark.real

SUFFIXES = {"gauge": ("",), "counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}

OF_MOONCAKE = {
    "vllm:mooncake_bytes_transferred_sum",
    "vllm:mooncake_xfer_time_seconds_bucket",
    "vllm:mooncake_num_failed_transfers_total",
    "vllm:mooncake_num_failed_recvs_total",
    "vllm:mooncake_num_kv_expired_reqs_total",
}
"""Of vllm 0.33. Before, the patch mooncake-prom-metrics makes them: tests/upstream/test_metrics.py."""


def folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def made(package: str, *, beginning: str) -> Iterator[tuple[str, str, str]]:
    """(kind, name, unit) of each metric that a source of the package makes under a literal name, by the function that
    makes it: `Gauge(name=...)`, `self._counter_cls(...)`, `meter.create_histogram(...)`, `register_gauge(...)`."""
    for file in folder(package).rglob("*.py"):
        text = file.read_text(errors="replace")
        if f'"{beginning}' not in text:
            continue
        for call in ast.walk(ast.parse(text)):
            if not isinstance(call, ast.Call):
                continue
            function = ast.unparse(call.func).rpartition(".")[2].lower()
            kind = next((kind for kind in SUFFIXES if kind in function), None)
            words = {keyword.arg: keyword.value for keyword in call.keywords}
            names = [
                value.value
                for value in (*call.args, words.get("name"))
                if isinstance(value, ast.Constant)
                and isinstance(value.value, str)
                and value.value.startswith(beginning)
            ]
            unit = words.get("unit")
            if kind is not None and names:
                yield kind, names[0], str(unit.value) if isinstance(unit, ast.Constant) else ""


def test_vllm_exports_what_is_asked_of_it() -> None:
    exported = {
        name.removesuffix("_total") + suffix
        for kind, name, _ in made("vllm", beginning="vllm:")
        for suffix in SUFFIXES[kind]
    }
    asked = {name for name in NAMES if name.startswith("vllm:")}
    assert len(asked) > 10
    assert asked - exported <= OF_MOONCAKE


def test_lmcache_exports_what_is_asked_of_it() -> None:
    """Under the names that OpenTelemetry's exporter for Prometheus gives them: dots become _, and the unit follows."""
    from opentelemetry.exporter.prometheus._mapping import map_unit, sanitize_full_name

    exported = set()
    for kind, name, unit in made("lmcache", beginning="lmcache_mp."):
        base = sanitize_full_name(name)
        whole = f"{base}_{map_unit(unit)}" if unit and not base.endswith(map_unit(unit)) else base
        exported |= {whole + suffix for suffix in SUFFIXES[kind]}
    asked = {name for name in NAMES if name.startswith("lmcache_mp_")}
    assert len(asked) > 5
    assert asked - exported == set()


def test_mooncake_master_exports_what_is_asked_of_it() -> None:
    """Its names are text in the program."""
    program = (folder("mooncake") / "mooncake_master").read_bytes()
    asked = {name for name in NAMES if name.startswith("master_")}
    assert len(asked) == 3
    assert {name for name in asked if name.encode() + b"\0" not in program} == set()
