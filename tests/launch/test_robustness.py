"""What stands in the way of a plain answer: damaged files, closed pipes, folders that cannot be made."""

from __future__ import annotations

from pathlib import Path

from pdserve.failure import start_error
from pdserve.protocol import Late
from pdserve.rundir import RunDir
from tests.plan.kit import plan
from tests.plan.kit import recipe as planned_recipe

# Reports ------------------------------------------------------------------------------------------------------------


def late(*log_tail: str) -> Late:
    return Late(
        name="prefill-0",
        seconds=250.0,
        last_answer="nothing listens on port 8100",
        diagnostics="diagnostics/prefill-0-1.txt",
        log_tail=log_tail,
    )


def test_a_late_process_whose_log_tells_the_cause_is_explained(tmp_path: Path) -> None:
    tail = ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",)
    error = start_error(late(*tail), plan(planned_recipe()), RunDir(tmp_path))
    assert error.cause is not None
    assert "device ran out" in error.cause
    assert error.cause.endswith("last answer of its probe: nothing listens on port 8100")
    assert error.todo is not None
    assert "prefill.args" in error.todo
    assert str(tmp_path / "diagnostics/prefill-0-1.txt") in error.todo


def test_a_late_process_whose_log_tells_nothing_has_its_probe_as_the_cause(tmp_path: Path) -> None:
    error = start_error(late("thinking"), plan(planned_recipe()), RunDir(tmp_path))
    assert error.cause == "last answer of its probe: nothing listens on port 8100"
    assert error.todo is not None
    assert "timeouts.*" in error.todo
