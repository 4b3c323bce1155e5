"""What logs, engines and other users' processes say moves no terminal; our own colours stay."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import typer

from pdserve.cli import recipe as recipe_verbs
from pdserve.cli.status import status
from pdserve.observe import status as observed
from pdserve.operations.progress import ShownProgress
from pdserve.preflight.finding import Finding
from pdserve.run import directory
from tests.launch.deployment import recipe
from tests.watch.test_frames import ONE_NODE, frame

CLIPBOARD = "\x1b]52;c;cm0gLXJm\x07"
SHOWN = "\\x1b]52;c;cm0gLXJm"
FINDING = Finding(
    node="n0",
    check="gpu-processes",
    status="failed",
    value=f"PID 7 {CLIPBOARD}",
    need="devices idle",
    fix=f"stop {CLIPBOARD}",
    evidence=(f"device 0: PID 7 (python {CLIPBOARD}\x1b[2J)", "two\nlines"),
)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> pytest.CaptureFixture[str]:
    for name in ("NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (("TERM", "xterm"), ("COLUMNS", "300"), ("FORCE_COLOR", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    return capsys


def harmless(text: str) -> bool:
    return CLIPBOARD[:4] not in text and "\x1b[2J" not in text and "\x07" not in text and SHOWN in text


def test_progress_notes_and_warnings_of_a_start(terminal: pytest.CaptureFixture[str]) -> None:
    console = ShownProgress()
    console.event({"event": "progress", "name": "weights-0", "text": f"weights: {CLIPBOARD} fetching"})
    console.event({"event": "ready", "name": "decode-0", "seconds": 1.0})
    console.note(f"a note {CLIPBOARD}")
    console.result(f"a result {CLIPBOARD}")
    console.warn([f"a warning {CLIPBOARD}"])
    out, err = terminal.readouterr()
    assert out.count(SHOWN) == 3
    assert harmless(out)
    assert harmless(err)
    assert "\x1b[32m" in out, "what is ready is green"


@pytest.mark.parametrize("on_a_terminal", [True, False])
def test_findings_of_preflight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: pytest.CaptureFixture[str], *, on_a_terminal: bool
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: on_a_terminal, raising=False)
    monkeypatch.setattr(recipe_verbs, "find_all", lambda *_, **__: [FINDING])
    with pytest.raises(typer.Exit):
        recipe_verbs.preflight(recipe(tmp_path), this_machine=True)
    out = terminal.readouterr().out
    assert harmless(out)
    assert out.count(SHOWN) == 3
    assert ("\x1b[1;31mfailed" in out) == on_a_terminal


@pytest.mark.parametrize("on_a_terminal", [True, False])
def test_reasons_in_status(
    monkeypatch: pytest.MonkeyPatch, terminal: pytest.CaptureFixture[str], *, on_a_terminal: bool
) -> None:
    view = frame(ONE_NODE, phases={"decode-0": "dead"}).view
    view.state.processes["decode-0"].note = f"exited: {CLIPBOARD}"
    view.state.note = f"why: {CLIPBOARD}"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: on_a_terminal, raising=False)
    monkeypatch.setattr(observed, "look", lambda _: view)
    monkeypatch.setattr(directory, "find", lambda *_: None)
    with pytest.raises(typer.Exit):
        status()
    out = terminal.readouterr().out
    assert harmless(out)
    assert out.count(SHOWN) == 2
    assert ("\x1b[1;31mdead" in out) == on_a_terminal
