"""`pdserve` as a user runs it in a cluster: submitted to Slurm, typed on a node, looked at from another.

Over fake engines, or over the real ones of `recipes/tiny-cpu.yaml`, which take longer to start.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import httpx
import yaml

from tests.cluster.cluster import Cluster
from tests.cluster.commands import NodeProcess
from tests.cluster.spec import LOGIN
from tests.launch import deployment
from tests.launch.deployment import REPOSITORY, wait_until

Left = TypeVar("Left", bound="Leavable")
LIMIT = 240.0
"""Seconds until a test gives up waiting: a limit, not a measurement."""
_SLURM = "slurmstepd", "slurm_script"
ORDER = ["proxy", "decode-0", "prefill-0", "lmcache-0"]
"""In which a deployment of one prefill and one decode stops."""
PDSERVE = (sys.executable, "-m", "pdserve.cli.main")


class Leavable(Protocol):
    def assert_nothing_left(self) -> None: ...
    def reset(self) -> None: ...


def as_before(used: Left) -> Iterator[Left]:
    """Fail the test that leaves something, and take it away for the next one."""
    yield used
    try:
        used.assert_nothing_left()
    except AssertionError:
        used.reset()
        raise


class Lab:
    """A cluster, and a home for run directories on its shared file system."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.home = folder / "home"
        runtime = folder / "runtime"
        runtime.mkdir(mode=0o700, exist_ok=True)
        self.env = {
            "PDSERVE_HOME": str(self.home),
            "XDG_RUNTIME_DIR": str(runtime),
            # As on a real system, where a virtual environment was made active.
            "PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONPATH": str(REPOSITORY),
            "PYTHONUNBUFFERED": "1",
            "COLUMNS": "400",
        }

    def recipe(self, **changes: Any) -> Path:
        """1P1D with LMCache on two nodes. A node that is only slow must not count as lost: the defaults, and an agent
        that gives itself up soon after it was given up."""
        ours = {"slurm__nodes": 2, "timeouts__heartbeat_seconds": 5.0, "timeouts__agent_lease_seconds": 8.0}
        return deployment.recipe(self.folder, **ours | changes)

    def port(self, kind: str) -> int:
        """Return a port of the recipe that was made last."""
        written = yaml.safe_load((self.folder / "fake.yaml").read_text())
        return int(written["ports"][kind])

    def hosts(self, *, count: int = 2, python: Mapping[str, Path] | None = None) -> Path:
        """A cluster file of so many nodes. `python`: node -> interpreter."""
        section = {"config": str(self.cluster.ssh_config), "connect_seconds": 10}
        hosts: list[dict[str, str]] = [{"name": node} for node in self.cluster.nodes[:count]]
        for host in hosts:
            if python and host["name"] in python:
                host["python"] = str(python[host["name"]])
        file = self.folder / "cluster.yaml"
        file.write_text(json.dumps({"schema": 1, "hosts": hosts, "ssh": section}))
        return file

    def pdserve(
        self, node: str, *arguments: str | Path, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """A command, to its end, on a node."""
        argv = [*PDSERVE, *map(str, arguments)]
        return self.cluster.run(node, argv, env={**self.env, **(env or {})}, cwd=self.folder, timeout=3 * LIMIT)

    @contextmanager
    def up(
        self, node: str, *arguments: str | Path, env: Mapping[str, str] | None = None
    ) -> Iterator[ClusterDeployment]:
        """`pdserve up` in the foreground of a node; ended by Ctrl-C if the test has not ended it."""
        output = self.folder / "up.out"
        argv = [*PDSERVE, "up", *map(str, arguments)]
        with (
            output.open("w") as file,
            self.cluster.popen(node, argv, env={**self.env, **(env or {})}, stdout=file, stderr=file) as process,
        ):
            deployment = ClusterDeployment(self, output, process=process)
            try:
                yield deployment
            finally:
                process.send_signal(signal.SIGINT)
                process.wait(LIMIT)

    def sbatch(self, recipe: Path, *options: str, settings: Sequence[str] = ()) -> ClusterDeployment:
        """Submit slurm/disagg.sh with the recipe and these `--set`, from the repository."""
        changes = [word for setting in settings for word in ("--set", setting)]
        return self._sbatch(*options, "slurm/disagg.sh", str(recipe), *changes)

    def submit(self, script: str, *options: str) -> ClusterDeployment:
        file = self.folder / "job.sh"
        file.write_text(script)
        return self._sbatch(*options, str(file))

    def _sbatch(self, *arguments: str) -> ClusterDeployment:
        output = self.folder / "job.out"
        argv = ["sbatch", "--parsable", f"--output={output}", *arguments]
        done = self.cluster.run(LOGIN, argv, env=self.env, cwd=REPOSITORY)
        assert done.returncode == 0, done.stderr
        return ClusterDeployment(self, output, job=done.stdout.strip())


class ClusterDeployment(deployment.Deployment):
    """A `pdserve up` in a job or on a node, and what it says."""

    def __init__(self, lab: Lab, output: Path, *, job: str = "", process: NodeProcess | None = None) -> None:
        super().__init__(None, lab.home)
        self.lab = lab
        self.cluster = lab.cluster
        self.job = job
        self.output = output
        self._process = process

    @property
    def process(self) -> NodeProcess:
        """The `up` in the foreground; a job has none."""
        assert self._process is not None
        return self._process

    def printed(self) -> str:
        """All that the user has seen so far."""
        return self.output.read_text() if self.output.exists() else ""

    def expect(self, text: str) -> str:
        """The line with `text`; waits for it."""
        wait_until(f"{text!r} printed", lambda: self._over() or text in self.printed(), LIMIT, why=self.printed)
        lines = [line for line in self.printed().splitlines() if text in line]
        assert lines, f"ended without saying {text!r}:\n{self.printed()}"
        return lines[-1]

    def _over(self) -> bool:
        if self._process is None:
            return "\nerror: " in f"\n{self.printed()}"
        return self._process.poll() is not None

    def ready(self) -> ClusterDeployment:
        self.expect("serving fake at")
        return self

    def job_state(self) -> str:
        """Return what Slurm says of the job, an ended one too."""
        return dict(word.split("=", 1) for word in self.shown_by_slurm().split() if "=" in word)["JobState"]

    def shown_by_slurm(self) -> str:
        """All that Slurm shows of the job, in one line."""
        return self.cluster.output(LOGIN, ["scontrol", "--oneliner", "show", "job", self.job])

    def ended(self) -> str:
        """Waits until the job, or the command, is over; the job's state or the command's exit code."""
        if not self.job:
            return str(self.process.wait(LIMIT))
        wait_until(f"job {self.job} over", lambda: not self.cluster.steps(), 2 * LIMIT, why=self.printed)
        return self.job_state()

    def ours(self, node: str) -> list[str]:
        """Command lines of what runs on a node, without what Slurm itself has there."""
        everything = [" ".join(argv) for _, argv in self.cluster.processes(node)]
        return [line for line in everything if not any(name in line for name in _SLURM)]

    def pid_of(self, process: str) -> int:
        """Return the PID that the test process sees."""
        port = str(self.run.read_plan().process(process).ports["http"])
        pids = [pid for pid, argv in self.cluster.processes(self.node_of(process)) if port in argv]
        assert len(pids) == 1, pids
        return pids[0]

    # Requests, from the network of a node

    def complete(self, **body: Any) -> tuple[int, Any]:
        """A request through the proxy, made on its node."""
        with self.talk(**body) as answer:
            return answer.status_code, json.loads(answer.read())

    @contextmanager
    def talk(self, **body: Any) -> Iterator[httpx.Response]:
        """The answer of the proxy, once it has begun."""
        proxy = self.run.read_plan().proxy
        request = {"model": "fake", "prompt": "a b c d", "max_tokens": 4} | body
        with self._post("proxy", f"http://{proxy.host}:{proxy.port}/v1/completions", request) as answer:
            yield answer

    def script(self, engine: str, **faults: object) -> None:
        """Tell a fake engine what to do from now on."""
        host, port = self.cluster.address(self.node_of(engine)), self.run.read_plan().process(engine).ports["http"]
        with self._post(engine, f"http://{host}:{port}/fake/script", faults) as answer:
            assert answer.status_code == 200

    @contextmanager
    def _post(self, process: str, url: str, body: Mapping[str, Any]) -> Iterator[httpx.Response]:
        with httpx.Client(timeout=LIMIT, trust_env=False) as client:
            request = client.build_request("POST", url, json=body)
            answer = self.cluster.inside(self.node_of(process), lambda: client.send(request, stream=True))
            with closing(answer):
                yield answer


RECIPE = REPOSITORY / "recipes/tiny-cpu.yaml"
START_SECONDS = 900
PATIENT = {"heartbeat_seconds": 30, "agent_lease_seconds": 60, "engine_seconds": START_SECONDS}
"""Timeouts of recipes whose engines are real and whose tests are of other things than a node that is lost: engines that
load or compute beside other tests can keep an agent from its core, or from its pages, for five seconds."""
PROOFS = ("endpoints", "requests", "transfer", "stored", "output", "reload", "clean")


def until_ready(up: ClusterDeployment, name: str) -> None:
    up.name = name

    def over() -> bool:
        printed = f"\n{up.printed()}"
        return any(end in printed for end in ("serving tiny at", "\nerror: ", "deployment is draining"))

    wait_until("ready", over, START_SECONDS, why=up.printed)
    assert "serving tiny at" in up.printed(), up.printed()


def assert_all_proven(up: ClusterDeployment) -> None:
    """`pdserve verify`, called where its key is, proves all that it can prove of this recipe."""
    done = up.lab.pdserve(up.state().host, "verify", up.name, "--json")
    assert done.returncode == 0, done.stdout + done.stderr + up.printed()
    report = json.loads(done.stdout)
    assert {proof["name"]: proof["status"] for proof in report["proofs"]} == dict.fromkeys(PROOFS, "proven"), (
        done.stdout
    )
