"""All checks of one node, carried out there; of files, programs, ports and the run directory here."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import ssl
import sys
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from pdserve.errors import PdserveError, PreflightError
from pdserve.installed import distributions
from pdserve.pd.config.proxy import ProxyConfig
from pdserve.pd.limits import keys
from pdserve.plan import proxy
from pdserve.plan.model import LmcacheServer, Plan
from pdserve.plan.process import Process
from pdserve.preflight.devices import find_devices, find_firmware, find_gpu_processes, find_shared_environment
from pdserve.preflight.engine_packages import find_mooncake_wheel, find_patches
from pdserve.preflight.facts import NodeFacts
from pdserve.preflight.finding import Check, Finding, NodeNeed, processes_on
from pdserve.preflight.links import find_peer_memory, find_rdma
from pdserve.preflight.resources import find_memlock, find_memory, find_open_files
from pdserve.system import procfs

_MARK_FILE = ".preflight-"
"""In the run directory while the nodes are checked. Its name ends in the mark: two launchers that look at the nodes of
one deployment leave one each."""
_WAIT_SECONDS = 5.0
_POLL_SECONDS = 0.1


def check_node(
    plan: Plan,
    node: str,
    *,
    facts: NodeFacts,
    starting: Collection[str] | None = None,
    gives_back: Collection[LmcacheServer] = (),
    held_by_us: Collection[int] = (),
    mark: str | None = None,
) -> list[Finding]:
    """Check everything that `node` must have for the processes that are `starting` on it (names; None: all of them).

    This is called on that node, with facts gathered there just before. `held_by_us`: ports of the running deployment,
    whose owners are stopped before they are needed again; `gives_back`: the LMCache servers of that deployment that are
    replaced here: their memory is free for the new ones, and is not asked for twice. `mark`: of `write_mark`; None: the
    run directory is not looked at.
    """
    wanted = [process for process in processes_on(plan, node) if starting is None or process.name in starting]
    findings = [] if mark is None else [find_run_dir(node, Path(plan.run_dir), mark)]
    if not wanted:
        return findings
    return [
        *findings,
        *_find_files(plan, node, wanted, held_by_us),
        *find_patches(node, wanted),
        *find_memory(plan, node, wanted, facts.memory, gives_back=gives_back, held_by_us=held_by_us),
        *find_open_files(node, wanted, facts),
        *find_memlock(node, wanted, facts),
        *find_devices(plan, node, wanted, facts),
        *find_gpu_processes(plan, node, wanted, facts.devices_present),
        *find_mooncake_wheel(plan, node, wanted),
        *find_shared_environment(plan, node, wanted, os.environ),
        *find_firmware(plan, node, wanted, os.environ),
        *find_rdma(node, wanted),
        *find_peer_memory(node, plan.platform, wanted),
    ]


def _find_files(plan: Plan, node: str, wanted: Collection[Process], held_by_us: Collection[int]) -> list[Finding]:
    programs = ", ".join(dict.fromkeys(process.argv[0] for process in wanted))
    findings = [_tried(node, "program", programs, programs, lambda: _check_programs(wanted))]
    if plan.model_path is not None and any(process.is_engine for process in wanted):
        need, folder = f"{plan.model_path}/config.json", Path(plan.model_path)
        findings.append(_tried(node, "model", plan.model_path, need, lambda: _check_model(folder)))
    if any(process.is_proxy for process in wanted):
        need = "the files that the proxy section names"
        findings.append(_tried(node, "proxy-files", "readable", need, lambda: _check_proxy_files(plan.proxy)))
    wants = [port for process in wanted for port in process.ports.values()]
    if wants:
        need = f"{len(wants)} free ports ({min(wants)}-{max(wants)})"
        findings.append(_tried(node, "ports", "free", need, lambda: _check_ports(wanted, held_by_us)))
    return findings


def _tried(node: str, check: Check, value: str, text: str, look: Callable[[], None]) -> Finding:
    need = NodeNeed(node, check, text)
    try:
        look()
    except PdserveError as error:
        return need.refused(error)
    return need.found("ok", value)


def _check_model(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        what = "has no config.json" if folder.is_dir() else "does not exist"
        raise PreflightError(
            f"the model folder {folder} {what}",
            where="model.path",
            cause="a wrong path, or a download that has not finished",
            todo="correct model.path, relative to the recipe that names it (the tiny model: ./scripts/tiny-model)",
        )


def _check_proxy_files(proxy: ProxyConfig) -> None:
    """Check the files that the proxy reads at its start. An error inside one has its line."""
    named = {"proxy.auth.keys_file": proxy.auth.keys_file}
    if proxy.tls is not None:
        named |= {"proxy.tls.certificate": proxy.tls.certificate, "proxy.tls.key": proxy.tls.key}
    upstream = proxy.upstream_tls
    if upstream is not None:
        named |= {
            "proxy.upstream_tls.ca": upstream.ca,
            "proxy.upstream_tls.certificate": upstream.certificate,
            "proxy.upstream_tls.key": upstream.key,
        }
    if proxy.admin is not None:
        named["proxy.admin.token_file"] = proxy.admin.token_file
    for key, path in named.items():
        if path is None:
            continue
        try:
            Path(path).read_bytes()
        except OSError as error:
            todo = f"make it with: pdserve new-key NAME --file {path}" if key == "proxy.auth.keys_file" else None
            raise PreflightError(f"{path} cannot be read: {error.strerror}", where=key, todo=todo) from error
    if proxy.auth.keys_file is not None:
        keys.read(Path(proxy.auth.keys_file))
    if proxy.admin is not None and proxy.admin.token_file is not None:
        keys.read_token(Path(proxy.admin.token_file))
    if proxy.tls is not None:
        _check_pair(proxy.tls.certificate, proxy.tls.key, where="proxy.tls")
    if upstream is not None:
        _check_ca(upstream.ca)
        if upstream.certificate is not None and upstream.key is not None:
            _check_pair(upstream.certificate, upstream.key, where="proxy.upstream_tls")


def _check_pair(certificate: str, key: str, *, where: str) -> None:
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, ValueError) as error:
        raise PreflightError(
            f"certificate and key are not usable together: {error}",
            where=where,
            cause="no PEM files, a key of another certificate, or a key with a passphrase",
        ) from error


def _check_ca(ca: str | None) -> None:
    if ca is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=ca)
    except ssl.SSLError as error:
        raise PreflightError(
            f"{ca} holds no CA that can be used: {error}",
            where="proxy.upstream_tls.ca",
            cause="no PEM file of certificates",
        ) from error


def _check_programs(processes: Iterable[Process]) -> None:
    """Check every program that is started, and the router's version where our own interpreter starts it."""
    setup_begins = True
    for process in processes:
        if process.is_setup and not setup_begins:
            continue  # a command before it may install it
        setup_begins = setup_begins and not process.is_setup
        if shutil.which(process.argv[0]) is None:
            cause = "the interpreter or command of the recipe (engine.python, *.command) is not on this host"
            todo = "correct it, or leave it out to use the interpreter that runs pdserve"
            if process.is_setup:
                cause = "the program of the first command of the recipe's setup is not on this host"
                todo = "correct `setup`; a command of a shell is written [bash, -c, ...]"
            raise PreflightError(
                f"{process.argv[0]} is not an executable program",
                where=f"{process.name}@{process.node}",
                cause=cause,
                todo=todo,
            )
        if process.argv[0] == sys.executable and proxy.ROUTER_PACKAGE in process.packages:
            check_router(distributions.version_of(proxy.ROUTER_PACKAGE))


def check_router(version: str | None) -> None:
    """Check that the vllm-router beside pdserve is the one whose flags a plan has. Raises PreflightError."""
    if version == proxy.ROUTER_VERSION:
        return
    installed = "is not installed" if version is None else f"{version} is installed"
    raise PreflightError(
        f"vllm-router {installed}, and {proxy.ROUTER_VERSION} is the version whose flags are known",
        where="proxy.kind",
        todo=f"{sys.executable} -m pip install vllm-router=={proxy.ROUTER_VERSION}, or proxy.kind: pdserve; "
        "proxy.command names a router in another place",
    )


def _check_ports(starting: Iterable[Process], held_by_us: Collection[int]) -> None:
    """Check that nobody uses the ports of the processes that are started. Raises PreflightError that names the owner of
    each port in use."""
    taken = [
        f"{process.name} needs port {port} ({purpose}), held by {owner}"
        for process in starting
        for purpose, port in process.ports.items()
        if port not in held_by_us and (owner := procfs.listener_owner(port)) is not None
    ]
    if taken:
        raise PreflightError(
            f"{len(taken)} port(s) of the plan are in use",
            cause="another deployment, or what is left of an earlier run",
            todo="stop the owner (pdserve list shows deployments of this user), or move ours: --set ports.KIND=PORT",
            evidence=tuple(taken),
        )


def write_mark(run_dir: Path) -> str:
    """Leave a mark in the launcher's run directory; return what the nodes must find. Raises OSError."""
    mark = secrets.token_hex(8)
    _mark_file(run_dir, mark).touch()
    return mark


def remove_mark(run_dir: Path, mark: str) -> None:
    """Remove the mark of a run directory, after the nodes were checked."""
    _mark_file(run_dir, mark).unlink(missing_ok=True)


def _mark_file(run_dir: Path, mark: str) -> Path:
    return run_dir / f"{_MARK_FILE}{mark}"


def find_run_dir(
    node: str, run_dir: Path, mark: str, *, seconds: float = _WAIT_SECONDS, pause: Callable[[float], None] = time.sleep
) -> Finding:
    """Look for the mark, and try to write beside it: every process there logs into that folder from its first byte.

    It waits a little: a network file system may show a new file late."""
    deadline = time.monotonic() + seconds
    while (why := _missing_mark(run_dir, mark)) and time.monotonic() < deadline:
        pause(_POLL_SECONDS)
    need = NodeNeed(node, "run-dir", "the launcher's run directory, shared by all nodes and writable")
    fix = "set PDSERVE_HOME to a folder of a shared file system, mounted under the same path on every node (in a "
    problem = why or _not_writable(node, run_dir, mark)
    return need.found("failed", problem, f"{fix}container too)") if problem else need.found("ok", str(run_dir))


def _missing_mark(run_dir: Path, mark: str) -> str | None:
    try:
        _mark_file(run_dir, mark).read_bytes()
    except FileNotFoundError:
        return f"{run_dir} is not the launcher's" if run_dir.is_dir() else f"{run_dir} does not exist here"
    except OSError as error:
        return f"{run_dir} cannot be read: {error.strerror}"
    return None


def _not_writable(node: str, run_dir: Path, mark: str) -> str | None:
    mine = _mark_file(run_dir, f"{mark}-{node}")
    try:
        mine.write_text(node, encoding="utf-8")
    except OSError as error:
        return f"{run_dir} cannot be written: {error.strerror}"
    finally:
        with contextlib.suppress(OSError):
            mine.unlink(missing_ok=True)
    return None
