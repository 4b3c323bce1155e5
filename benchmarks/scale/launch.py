"""One launch over many nodes: namespaces of this machine with a real sshd each, and `pdserve up` as a user types it."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.scale.processes import Meter, Use
from pdserve.run.directory import RunDir
from tests.cluster.cluster import Cluster
from tests.launch.deployment import wait_until

REPOSITORY = Path(__file__).resolve().parents[2]
NAME = "scale"
START_SECONDS = 600.0
SERVING_SECONDS = 20.0
HEARTBEAT_SECONDS = 60.0


@dataclass(frozen=True)
class Launch:
    """Seconds, CPU seconds and MiB."""

    nodes: int
    instances: int
    looked_at: float
    """From the command to the first process: all nodes looked at, planned for, checked, agents started."""
    ready: float
    """From the command to a deployment that is proven."""
    launcher_start: Use
    """While it starts; memory at its highest."""
    agents_start: Use
    """Of all nodes together: agents and guards."""
    ways: Use
    """ssh and sshd, at both ends."""
    launcher_serving: float
    """Share of one core once it serves."""
    agents_serving: float
    """Of all nodes together."""
    death: float
    """From the SIGKILL of an engine on the last node to its event."""
    down: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def launch(nodes: int, instances: int) -> Launch:
    """Brings up `instances` on each of `nodes`, serves for a while, kills one engine, takes everything down."""
    with tempfile.TemporaryDirectory(prefix="bench-scale-") as text, Cluster.up(nodes=nodes, slurm=False) as cluster:
        return _Trial(cluster, Path(text), instances).run()


class _Trial:
    def __init__(self, cluster: Cluster, folder: Path, instances: int) -> None:
        self._cluster = cluster
        self._folder = folder
        self._instances = instances
        self._env = {
            "PDSERVE_HOME": str(folder / "home"),
            "XDG_RUNTIME_DIR": str(folder),
            "PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONPATH": str(REPOSITORY),
        }

    def run(self) -> Launch:
        nodes = len(self._cluster.nodes)
        argv = [sys.executable, "-m", "pdserve.cli.main", "up", str(self._recipe()), "--cluster", str(self._hosts())]
        output = self._folder / "output"
        began = time.time()
        with (
            output.open("w") as file,
            self._cluster.popen(self._cluster.nodes[0], argv, env=self._env, stdout=file, stderr=file) as up,
        ):
            run = RunDir(self._folder / "home" / NAME / "current")
            wait_until("ready", lambda: up.poll() is not None or _event(run, "up"), START_SECONDS, why=output.read_text)
            assert up.poll() is None, output.read_text()
            meter = Meter(self._launcher(run))
            started = meter.read()
            first, ready = _event(run, "start")["at"], _event(run, "up")["at"]
            time.sleep(SERVING_SECONDS)
            serving = meter.read()
            death = self._kill_an_engine(run)
            leaving = time.time()
            up.send_signal(signal.SIGINT)
            code = up.wait(START_SECONDS)
            down = time.time() - leaving
            assert code == 0, output.read_text()
        return Launch(
            nodes=nodes,
            instances=self._instances,
            looked_at=first - began,
            ready=ready - began,
            launcher_start=started.launcher,
            agents_start=started.agents,
            ways=started.ways,
            launcher_serving=(serving.launcher.cpu - started.launcher.cpu) / SERVING_SECONDS,
            agents_serving=(serving.agents.cpu - started.agents.cpu) / SERVING_SECONDS,
            death=death,
            down=down,
        )

    def _launcher(self, run: RunDir) -> int:
        """Its PID as this process sees it."""
        pids = [pid for pid, argv in self._cluster.processes(self._cluster.nodes[0]) if "pdserve.cli.main" in argv]
        assert len(pids) == 1, pids
        return pids[0]

    def _kill_an_engine(self, run: RunDir) -> float:
        last = self._cluster.nodes[-1]
        engines = [pid for pid, argv in self._cluster.processes(last) if any("engine.py" in word for word in argv)]
        at = time.time()
        os.kill(engines[-1], signal.SIGKILL)
        wait_until("the death", lambda: _event(run, "died"), 60)
        return float(_event(run, "died")["at"]) - at

    def _recipe(self) -> Path:
        model = self._folder / "model"
        model.mkdir()
        (model / "config.json").write_text("{}")
        engine = [sys.executable, "-S", "-E", str(Path(__file__).with_name("engine.py"))]
        document = {
            "schema": 1,
            "name": NAME,
            "platform": "cpu",
            "mode": "aggregated",
            "model": {"path": str(model), "served_name": "m"},
            "engine": {"command": engine, "env": {"VLLM_CPU_KVCACHE_SPACE": 1}},
            "aggregated": {"instances": self._instances * len(self._cluster.nodes)},
            "patches": [],
            # Hundreds of Pythons that start on two cores leave an agent without a turn for seconds; see the README.
            "timeouts": {
                "engine_seconds": 300,
                "stop_seconds": 5,
                "heartbeat_seconds": HEARTBEAT_SECONDS,
                "agent_lease_seconds": 2 * HEARTBEAT_SECONDS,
            },
        }
        file = self._folder / "recipe.yaml"
        file.write_text(yaml.safe_dump(document))
        return file

    def _hosts(self) -> Path:
        file = self._folder / "cluster.yaml"
        hosts = [{"name": node, "address": self._cluster.address(node)} for node in self._cluster.nodes]
        file.write_text(json.dumps({"schema": 1, "hosts": hosts, "ssh": {"config": str(self._cluster.ssh_config)}}))
        return file


def _event(run: RunDir, kind: str) -> dict[str, Any]:
    """The first of a kind; empty: none yet."""
    return next((event for event in run.read_events()[0] if event["event"] == kind), {})
