"""Runs each test in a process of its own (`-p tests.alone --alone`), so that it sees nothing of what another one left.

The process is a fork of one that has collected the tests and run none. Its fixtures, those of the session among them,
are set up in it and taken down in it: it is a run of pytest with one test, without the start of the interpreter.
Ours, because pytest-forked 1.7.5 cannot marshal the reports of pytest 9.2.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
from typing import NoReturn

import pytest
from _pytest.runner import runtestprotocol

_PR_SET_PDEATHSIG = 1


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--alone", action="store_true", help="a process of its own for each test")


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.getoption("alone"):
        # What is collected is shared by all forks for as long as no collection of garbage writes to it.
        gc.collect()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    if not item.config.getoption("alone"):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _reports(item):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _reports(item: pytest.Item) -> list[pytest.TestReport]:
    """Of set-up, call and take-down; a failure of the set-up for a process that did not come so far."""
    here, there = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(here)
        _become(item, there)
    os.close(there)
    try:
        with os.fdopen(here, "rb") as pipe:
            answer = pipe.read()
    except BaseException:  # also a Ctrl-C and the limit of a test: the fork must not outlive its parent's wait
        os.kill(pid, signal.SIGKILL)
        raise
    finally:
        _, status = os.waitpid(pid, 0)
    if code := os.waitstatus_to_exitcode(status):
        text = f"the process of the test ended with {code}"
        return [pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "setup")]
    restore = item.config.hook.pytest_report_from_serializable
    return [restore(config=item.config, data=data) for data in json.loads(answer)]


def _become(item: pytest.Item, there: int) -> NoReturn:
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        reports = runtestprotocol(item, log=False, nextitem=None)
        serialize = item.config.hook.pytest_report_to_serializable
        data = [serialize(config=item.config, report=report) for report in reports]
        with os.fdopen(there, "w") as pipe:
            json.dump(data, pipe, default=str)
        code = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
