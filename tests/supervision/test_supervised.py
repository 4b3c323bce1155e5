"""One process and its agent's judgement of it, where only the log says what is wrong."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pdserve.node.supervised import Supervised
from pdserve.plan.process import Env, HttpProbe, Process
from pdserve.reach.protocol import Died, Late, Progress, Ready, Started
from pdserve.system.shared_memory import ShmLedger, segment_inodes
from tests.launch.deployment import free_ports
from tests.supervision.agents import Events, planned
from tests.test_log_lines import death

pytestmark = pytest.mark.process

ENGINE = Path(__file__).resolve().parents[1] / "fakes" / "engine.py"
FATAL = "EngineCore failed to start."
HUNG = {"FAKE_NEVER_READY": "1", "FAKE_PROGRESS": f"Starting to load model tiny\\n{FATAL}\\nTransfer Engine teardown"}


def engine(env: Mapping[str, str], *, ready_seconds: float = 60) -> Process:
    """A fake engine that the probe never finds ready: nobody listens on port 1."""
    process = planned("prefill-0", "", ready_seconds=ready_seconds)
    return process.model_copy(update={"argv": (sys.executable, str(ENGINE)), "env": Env(set=dict(env))})


class Watched(Events):
    """A supervised process, and what is reported of it."""

    def __init__(self, process: Process, folder: Path, *, fatal_grace: float) -> None:
        super().__init__()
        self.supervised = Supervised(
            process,
            run_dir=folder,
            marker="run-1/token/engine.1",
            environ=os.environ,
            emit=self.receive,
            ledger=ShmLedger(folder / "shm.json", strangers=segment_inodes()),
            fatal_grace=fatal_grace,
        )


@asynccontextmanager
async def watched(process: Process, folder: Path, *, fatal_grace: float = 0.0) -> AsyncIterator[Watched]:
    """Started; stopped with all that belongs to it when the block ends."""
    under_test = Watched(process, folder, fatal_grace=fatal_grace)
    under_test.supervised.start({})
    try:
        yield under_test
    finally:
        await under_test.supervised.stop(10)


@pytest.mark.parametrize("headless", [False, True])
async def test_an_engine_that_has_failed_but_hangs_is_dead_before_its_limit(tmp_path: Path, headless: bool) -> None:
    """A headless one is never probed, so it counts as ready from its first moment."""
    process = engine(HUNG).model_copy(update={"probe": None}) if headless else engine(HUNG)
    # It logs on after the line that tells: time for that.
    async with watched(process, tmp_path, fatal_grace=2) as under_test:
        died = await under_test.expect(Died)
        started = await under_test.expect(Started)
        assert started.id.alive(), "whether it is killed is the launcher's decision"
        assert not under_test.all(Late)
        assert len(under_test.all(Ready)) == headless
    assert under_test.all(Died) == [died], "the end of what was reported already is no news"
    assert died.how == "engine core failed; its processes did not end"
    assert (died.pid, died.code, died.member) == (started.id.pid, None, None)
    assert died.while_starting is not headless
    assert any(FATAL in line for line in died.log_tail)
    assert died.log_tail[-1].endswith("Transfer Engine teardown")


async def test_the_report_of_a_death_under_load_has_the_cause(tmp_path: Path) -> None:
    """Each request that the engine had repeats that it is dead, after the cause."""
    written = tmp_path / "written.log"
    written.write_text("\n".join(death(100)))
    dying = engine({}).model_copy(update={"argv": ("/bin/sh", "-c", f"cat {written}; exit 1")})

    async with watched(dying, tmp_path) as under_test:
        died = await under_test.expect(Died)
    assert any(line.endswith("TimeoutError: RPC call to execute_model timed out.") for line in died.log_tail)


async def test_what_it_has_mapped_is_on_record_before_it_is_ready(tmp_path: Path) -> None:
    """The agent's own look at shared memory does not run here: that may come seconds later."""

    [port] = free_ports(1)
    fake = engine({"FAKE_SHM": "1"})
    argv, probe = (*fake.argv, "--port", str(port)), HttpProbe(host="127.0.0.1", port=port, path="/health")
    async with watched(fake.model_copy(update={"argv": argv, "probe": probe}), tmp_path) as under_test:
        await under_test.expect(Ready)
        outcome = (tmp_path / "shm.json").read_text()
    assert "psm_" in outcome


async def test_an_engine_that_ends_within_the_grace_died_of_its_own_and_once(tmp_path: Path) -> None:
    dies = {"FAKE_PROGRESS": FATAL, "FAKE_DIE_AT": "load", "FAKE_EXIT_CODE": "3"}

    async with watched(engine(dies), tmp_path, fatal_grace=3600) as under_test:
        await under_test.expect(Died)
        (died,) = under_test.all(Died)
    assert (died.code, died.how) == (3, "exited with code 3")


async def test_one_whose_diagnostics_cannot_be_written_is_late_all_the_same(tmp_path: Path) -> None:
    """As on a full disk: a start or a recovery waits for that event, and for no other one."""
    (tmp_path / "diagnostics").write_text("a file where the folder should be")

    async with watched(engine({"FAKE_NEVER_READY": "1"}, ready_seconds=1), tmp_path) as under_test:
        late = await under_test.expect(Late)
    assert late.diagnostics is None
    assert late.last_answer


async def test_what_an_earlier_life_logged_does_not_end_a_later_one(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "prefill-0@here.log"
    log.parent.mkdir()
    log.write_text(f"{FATAL}\n")

    async with watched(engine({"FAKE_NEVER_READY": "1"}, ready_seconds=3), tmp_path) as under_test:
        assert (await under_test.expect(Progress)).text == "loading weights: 100 %"
        late = await under_test.expect(Late)
        assert not under_test.all(Died)
        outcome = late
    assert not [line for line in outcome.log_tail if FATAL in line]
