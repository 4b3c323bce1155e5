"""The patches on vLLM's own classes, reached as vLLM reaches them: through the entry points of the installed
distributions. `python -m tests.patches.test_real`: one interpreter, because patches leak.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.real
def test_the_plugin_has_the_defects_first_and_not_when_it_is_loaded(tmp_path: Path) -> None:
    """pdserve's entry points are put on the path, as an installation of it does."""
    metadata = tmp_path / "pdserve-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: pdserve\nVersion: 0\n")
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = [f"[{group}]\n{name} = {value}" for group in groups for name, value in groups[group].items()]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PDSERVE_", "VLLM_PLUGINS"))}
    done = subprocess.run(
        [sys.executable, "-m", "tests.patches.test_real"],
        cwd=ROOT,
        env={**env, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}", "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("pdserve patches active: ") == 1


def main() -> None:
    import torch
    from prometheus_client import Counter, Gauge, Histogram
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    from pdserve.patches import effects, plugin

    children = [{"kv_connector": f"{name}Connector", "kv_role": "kv_producer"} for name in ("Mooncake", "Nixl")]
    transfer = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_producer", kv_connector_extra_config={"connectors": children}
    )
    metrics = multi_connector.MultiConnector.build_prom_metrics(
        SimpleNamespace(kv_transfer_config=transfer),
        {Gauge: Gauge, Counter: Counter, Histogram: Histogram},
        ["engine"],
        {0: ["0"]},
    )
    seen: list[tuple[Any, int]] = []
    # Mooncake reports statistics and registers no metrics: its first ones are fatal.
    ((nixl, child),) = metrics._prom_metrics.items()  # upstream's name for it differs between versions
    child.observe = lambda data, engine_idx=0: seen.append((data, engine_idx))
    statistics = {"MooncakeConnector": {"transfers": 1}, nixl: {"transfers": 2}}
    with pytest.raises(AssertionError, match="MooncakeConnector is not contained"):
        metrics.observe(statistics, 7)
    lacks_accelerator = not torch.accelerator.is_available()
    if lacks_accelerator:
        with pytest.raises(RuntimeError, match="Cannot access accelerator device"):
            torch.accelerator.current_device_index()
    seen.clear()
    os.environ["PDSERVE_PATCHES"] = "multiconnector-prom-metrics,mooncake-cpu-device"
    load_general_plugins()
    plugin.load()
    metrics.observe(statistics, 7)
    assert seen == [({"transfers": 2}, 7)]
    assert effects.totals()["multiconnector-prom-metrics", "observations-dropped"] == 1
    current_platform.set_device(torch.accelerator.current_device_index())


if __name__ == "__main__":
    main()
