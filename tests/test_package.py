"""The package as installed: no engine is imported by what starts no engine, and --help imports next to nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

RECIPE = str(Path(__file__).resolve().parents[1] / "recipes" / "tiny-cpu.yaml")
ENGINES = ("vllm", "lmcache", "mooncake", "torch", "nixl")

PROBE = """
import sys
from pdserve.cli.main import main
for arguments in {commands!r}:
    sys.argv = ["pdserve", *arguments]
    try:
        main()
    except SystemExit as left:
        code = left.code or 0
    else:
        code = 0
    loaded = sorted({{name.partition(".")[0] for name in sys.modules}} & set({watched!r}))
    print("ENDED", " ".join(arguments), code, *loaded, file=sys.stderr)
"""


def run(commands: list[list[str]], watched: tuple[str, ...], home: Path) -> list[str]:
    """Return, of each command in one interpreter, its words, its code, and what of `watched` is imported by then."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(commands=commands, watched=watched)],
        env={"PATH": "/usr/bin:/bin", "PDSERVE_HOME": str(home)},
        cwd=Path(RECIPE).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    return [line.removeprefix("ENDED ") for line in done.stderr.splitlines() if line.startswith("ENDED ")]


def test_commands_that_start_no_engine_import_none(tmp_path: Path) -> None:
    commands: list[tuple[list[str], int]] = [
        (["--version"], 0),
        (["validate", RECIPE], 0),
        (["init", "--model", "org/model", "--hardware", "cpu"], 0),
        (["render", RECIPE], 0),
        (["render", RECIPE, "--json"], 0),
        (["up", RECIPE, "--dry-run"], 0),
        (["schema"], 0),
        (["list"], 0),
        (["status"], 8),
        (["logs"], 8),
        (["down"], 8),
        (["restart", "proxy"], 8),
        (["verify"], 8),
        (["doctor"], 8),
        (["eval", "gsm8k", "--threshold", "1", "--harness", "/bin/true"], 8),
    ]
    ended = run([arguments for arguments, _ in commands], ENGINES, tmp_path)
    assert ended == [f"{' '.join(arguments)} {code}" for arguments, code in commands]


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    """It takes well under half a second because of this."""
    heavy = ("pydantic", "httpx", "fastapi", "rich", "yaml", "prometheus_client")
    assert run([["--help"]], (*heavy, *ENGINES), tmp_path) == ["--help 0"]
