"""`pdserve bench --setup` with a local index of one package: made once, and anew when it is not whole."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import zipfile
from pathlib import Path

import pytest

from pdserve.bench import clients as environment
from pdserve.bench.clients import AIPERF_VERSION
from pdserve.errors import PreflightError
from tests.launch.deployment import LINE_SECONDS, Command, wait_until

pytestmark = pytest.mark.process


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels in place of the package index, and a cache folder of its own."""
    folder = tmp_path / "index"
    folder.mkdir()
    wheel(folder, AIPERF_VERSION)
    pins = tmp_path / "requirements.txt"
    pins.write_text(f"# pins\naiperf=={AIPERF_VERSION}\n")
    monkeypatch.setattr(environment, "aiperf_requirements", lambda: pins)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


def wheel(folder: Path, version: str) -> None:
    """A package called aiperf, with the module that the check imports."""
    about = f"aiperf-{version}.dist-info"
    with zipfile.ZipFile(folder / f"aiperf-{version}-py3-none-any.whl", "w") as file:
        file.writestr("aiperf/__init__.py", "")
        file.writestr("aiperf/cli.py", "")
        file.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: aiperf\nVersion: {version}\n")
        file.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{about}/RECORD", "")


def make() -> tuple[Path, list[str]]:
    """The folder, and what was shown."""
    shown: list[str] = []
    return asyncio.run(environment.make_aiperf(os.environ, shown.append)), shown


def refused() -> PreflightError:
    with pytest.raises(PreflightError) as error:
        make()
    return error.value


def test_it_is_made_once_and_used_again(index: Path) -> None:
    with pytest.raises(PreflightError, match="is not installed"):
        environment.installed_interpreter(os.environ)
    folder, shown = make()
    assert "setup.log" in shown[1], "where pip says how far it is"
    assert environment.installed_interpreter(os.environ) == str(folder / "bin" / "python")
    assert folder.name.startswith(f"aiperf-{AIPERF_VERSION}-")
    again, (only,) = make()
    assert again == folder
    assert only.startswith(f"AIPerf {AIPERF_VERSION} is installed: {folder}"), "nothing is downloaded again"


def test_one_that_was_cut_off_is_not_used_and_is_made_anew(index: Path) -> None:
    folder = environment.aiperf_folder(os.environ)
    environment.aiperf_interpreter(folder).parent.mkdir(parents=True)
    environment.aiperf_interpreter(folder).touch(0o755)
    with pytest.raises(PreflightError, match="is not installed") as error:
        environment.installed_interpreter(os.environ)
    assert "half made" in str(error.value.cause)
    make()
    assert environment.is_made(folder)


def test_an_index_without_it_is_named_with_the_end_of_the_log(index: Path) -> None:
    shutil.rmtree(index)
    error = refused()
    assert "could not be installed" in error.what
    assert "PIP_INDEX_URL" in str(error.todo)
    assert any("No matching distribution" in line for line in error.evidence)
    assert not environment.is_made(environment.aiperf_folder(os.environ))


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_ends_the_step_that_runs_too(index: Path, signum: signal.Signals) -> None:
    cache = environment.aiperf_folder(os.environ).parent
    command = Command("bench", "--setup")
    command.expect("gets an environment of its own")
    wait_until("venv has begun", lambda: list(cache.glob("aiperf-*/pyvenv.cfg")), LINE_SECONDS)
    command.popen.send_signal(signum)
    assert command.finish() == 128 + signum, command.output
    assert not any(map(environment.is_made, cache.glob("aiperf-*")))


def test_the_pins_of_the_wheel_are_complete_and_of_this_version() -> None:
    lines = [line for line in environment.aiperf_requirements().read_text().splitlines() if line[:1].isalnum()]
    assert f"aiperf=={AIPERF_VERSION}" in lines
    assert len(lines) > 100
    assert all("==" in line for line in lines), "every package is pinned"
