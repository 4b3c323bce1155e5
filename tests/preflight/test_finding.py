"""Findings are data that travels, and one error when they end a start."""

from __future__ import annotations

import pytest

from pdserve.errors import PreflightError
from pdserve.preflight.finding import Finding, Status, raise_failed


def finding(status: Status = "failed", node: str = "a", **changes: object) -> Finding:
    fields = {"node": node, "check": "ports", "status": status, "value": "held", "need": "free", **changes}
    return Finding.model_validate(fields)


def test_a_line_has_the_node_the_value_the_need_and_the_fix() -> None:
    assert finding(fix="stop it").line() == "failed: ports on a: held; needed: free; fix: stop it"
    assert "(unverified on hardware)" in finding(unverified_on_hardware=True).line()


def test_a_single_failure_is_the_error_itself_and_nothing_else_is_one() -> None:
    raise_failed([finding(status) for status in ("ok", "warning", "unknown")])
    with pytest.raises(PreflightError) as raised:
        raise_failed([finding("ok"), finding(fix="stop it", where="ports.proxy", evidence=("PID 1",))])
    error = raised.value
    assert (error.what, error.where, error.todo) == ("ports on a: held; needed: free", "ports.proxy", "stop it")
    assert error.evidence == ("PID 1",)


def test_several_failures_are_all_reported() -> None:
    with pytest.raises(PreflightError, match="3 checks failed on 2 nodes") as raised:
        raise_failed([finding(), finding(evidence=("PID 1",)), finding(node="b")])
    assert raised.value.exit_code == 3
    assert sum(line.startswith("failed: ports on") for line in raised.value.evidence) == 3
    assert "  PID 1" in raised.value.evidence
