"""What docker and the interpreter inside say of a container that cannot be had, and what a user is told."""

from __future__ import annotations

from pathlib import Path

from pdserve.launch.failure import container_end, serve_error
from pdserve.reach.containers import container_cause, is_absent
from pdserve.reach.protocol import Gone
from pdserve.run.directory import RunDir
from tests.plan.kit import hosts, plan, recipe
from tests.tables import each_row

RESET = "read unix @->/run/docker.sock: read: connection reset by peer"
CAUSES = [
    (
        "docker: Got permission denied while trying to connect to the Docker daemon socket at unix:///var/run/x.sock",
        "this user may not use the socket of docker there",
        "usermod -aG docker USER",
    ),
    (
        "docker: Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?.",
        "no docker daemon answers at unix:///var/run/docker.sock",
        "systemctl start docker",
    ),
    (
        'docker: failed to create shim task: exec: "env": executable file not found in $PATH',
        "the image has no env",
        "container.python",
    ),
    ("[FATAL tini (7)] exec env failed: No such file or directory", "the image has no env", "container.python"),
    ("env: ‘/opt/no/python3’: No such file or directory", "the image has no /opt/no/python3", "container.python"),
    ("env: '/opt/no/python3': No such file or directory", "the image has no /opt/no/python3", "container.python"),
    (
        "ModuleNotFoundError: No module named 'pdserve'",
        "the interpreter of the image has no pdserve",
        "version as here",
    ),
    ("ModuleNotFoundError: No module named 'pydantic'", "image lacks pydantic", "pip install pydantic"),
    (
        'docker: Error response from daemon: could not select device driver "" with capabilities: [[gpu]].',
        "docker there cannot give the container its GPUs",
        "NVIDIA Container Toolkit",
    ),
    (
        'docker: error gathering device information while adding custom device "/dev/kfd": no such file or directory.',
        "the node has no device /dev/kfd",
        "ls -l /dev/kfd",
    ),
    (
        "error setting rlimits for ready process: error setting rlimit type 8: operation not permitted: unknown.",
        "docker there may not raise a limit",
        "--ulimit=memlock=",
    ),
    (
        "Error: crun: setrlimit `RLIMIT_NPROC`: Operation not permitted: OCI permission denied",
        "podman there may not raise a limit of its containers (RLIMIT_NPROC)",
        "--ulimit=nproc=",
    ),
    (
        "Error: OCI runtime error: crun: cgroups in hybrid mode not supported, drop all controllers from cgroupv2",
        "crun, the runtime of podman there, takes cgroups of version 1 or 2",
        'runtime = "runc"',
    ),
    (
        "Error: container-init binary not found on the host: stat /usr/libexec/podman/catatonit: no such file",
        "podman there has no program for --init",
        "catatonit",
    ),
    ("sh: 1: docker: not found", "there is no docker in the PATH of a login on gpu1", "install docker there"),
    ("execve(): docker: No such file or directory", "there is no docker in the PATH of a login", "install docker"),
    # Of programs that fetch an image
    ("denied: requested access to the resource is denied", "no such image", "docker login"),
    ("[ERROR] URL https://r/v2/x/manifests/1 returned error code: 404 Not Found", "no such image", ""),
    ("dial tcp: lookup registry-1.docker.io: no such host", "cannot be reached", "docker load"),
    ("write /usr/lib/x.so: no space left on device", "a disk of gpu1 is full", "docker system df"),
    ("toomanyrequests: You have reached your pull rate limit.", "gives out no more", "mirror"),
    ("no matching manifest for linux/arm64/v8 in the manifest list", "another processor", "container.image"),
]


@each_row("output, cause, todo", CAUSES)
def test_a_cause_is_named_with_what_to_do(output: str, cause: str, todo: str) -> None:
    hint = container_cause(f"an earlier line\n{output}\n", node="gpu1", fetching=True)
    assert hint is not None
    assert cause in hint.cause
    assert todo in hint.todo
    assert not is_absent(output)


def test_what_is_not_known_is_not_guessed() -> None:
    assert container_cause("Welcome to node 7\n", node="gpu1", fetching=True) is None
    assert is_absent("Error response from daemon: No such image: x:latest")
    assert is_absent("Error: inspecting object: registry.invalid/vllm:9: image not known")  # podman 4.3


DAEMON_GONE = "docker itself failed"


@each_row("code, last, words", [
    (125, "", DAEMON_GONE), (127, "", "cannot be run in this image"),
    (137, "", "everything in the container was killed at once"),
    (143, "", "the container was stopped from outside"),
    (1, 'time="2026-11-27T20:04:57Z" level=error msg="error waiting for container: unexpected EOF"', DAEMON_GONE),
    (1, RESET, DAEMON_GONE),
    (1, "write tcp 10.0.0.1:41234->10.0.0.7:2376: write: broken pipe", DAEMON_GONE),
    (1, "ERRO[0012] error waiting for container: unexpected EOF", DAEMON_GONE),
    (1, "", None), (1, "ConnectionResetError: [Errno 104] read: reset", None),
    (1, "RuntimeError: error waiting for container: exit status 7", None),
    (None, "", None), (0, "", None), (-9, "", None), (255, "", None),
])  # fmt: skip
def test_the_exit_code_of_docker_run_has_a_meaning(code: int | None, last: str, words: str | None) -> None:
    hint = container_end(code, last)
    assert (hint is None) == (words is None)
    assert hint is None or str(words) in hint.cause


def test_of_what_several_agents_have_written_only_the_last_line_counts(tmp_path: Path) -> None:
    planned = plan(recipe(), *hosts(8))
    [node] = planned.nodes
    run = RunDir.create(tmp_path, "tiny", "run")
    log = run.logs / f"agent@{node.name}.log"
    gone = Gone(node=node.name, how="docker run ended with exit code 1", exit_code=1)
    log.write_text(f"{RESET}\n")
    assert "docker itself failed" in serve_error(gone, planned, run).render()
    log.write_text(f"{RESET}\n/usr/bin/python3: No module named pdserve\n")
    assert "docker itself failed" not in serve_error(gone, planned, run).render()
