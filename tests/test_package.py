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
sys.argv = ["pdserve", *{arguments!r}]
from pdserve.cli.main import main
try:
    main()
except SystemExit as left:
    code = left.code or 0
else:
    code = 0
loaded = sorted({{name.partition(".")[0] for name in sys.modules}} & set({watched!r}))
print("CODE", code, "LOADED", *loaded, file=sys.stderr)
"""


def run(arguments: list[str], watched: tuple[str, ...], home: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(arguments=arguments, watched=watched)],
        env={"PATH": "/usr/bin:/bin", "PDSERVE_HOME": str(home)},
        cwd=Path(RECIPE).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
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
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_commands_that_start_no_engine_import_none(arguments: list[str], code: int, tmp_path: Path) -> None:
    assert run(arguments, ENGINES, tmp_path) == f"CODE {code} LOADED"


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    """It takes well under half a second because of this."""
    assert (
        run(["--help"], ("pydantic", "httpx", "fastapi", "rich", "yaml", "prometheus_client"), tmp_path)
        == "CODE 0 LOADED"
    )
