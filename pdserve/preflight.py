"""Checks of this machine before anything starts. Each finding names the value, the need and the fix."""

from __future__ import annotations

import shutil
import ssl
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from pdserve import distributions, host, procfs
from pdserve.errors import PreflightError
from pdserve.lmcache_server import check_memory
from pdserve.pd import keys
from pdserve.pd.config import ProxyConfig
from pdserve.pd.settings import Tls
from pdserve.plan import vllm_router
from pdserve.plan.model import Plan, Process

ENGINE_KEY = "engine_key"
"""The one secret that no recipe names: made at random for each deployment."""


def check(plan: Plan, starting: Sequence[Process], held_by_us: Collection[int] = ()) -> None:
    """Raises PreflightError with the first thing that this machine lacks for `starting` (processes of this node).

    `held_by_us`: ports of the running deployment itself, whose owners are stopped before they are needed again.
    """
    _check_model(plan)
    _check_proxy_files(plan.proxy)
    for process in starting:
        _check_program(process)
        if process.argv[0] == sys.executable and vllm_router.MODULE in process.argv:
            check_router(distributions.version_of("vllm-router"))
    _check_ports(starting, held_by_us)
    names = {process.name for process in starting}
    servers = [server for server in plan.lmcache if server.process in names]
    check_memory(servers, host.memory())


def _check_model(plan: Plan) -> None:
    if plan.model_path is None:
        return
    folder = Path(plan.model_path)
    if not (folder / "config.json").is_file():
        what = "has no config.json" if folder.is_dir() else "does not exist"
        raise PreflightError(
            f"the model folder {folder} {what}",
            where="model.path",
            cause="a wrong path, or a download that has not finished",
            todo="correct model.path, relative to the recipe that names it (the tiny model: ./scripts/tiny-model)",
        )


def _check_proxy_files(proxy: ProxyConfig) -> None:
    """The files that the proxy reads at its start. What is wrong inside one is told with its line."""
    named = {"proxy.auth.keys_file": proxy.auth.keys_file}
    if proxy.tls is not None:
        named |= {"proxy.tls.certificate": proxy.tls.certificate, "proxy.tls.key": proxy.tls.key}
    if proxy.admin is not None:
        named["proxy.admin.token_file"] = proxy.admin.token_file
    for key, path in named.items():
        if path is None:
            continue
        try:
            Path(path).read_bytes()
        except OSError as error:
            todo = "make it with: pdserve new-key NAME --file FILE" if key == "proxy.auth.keys_file" else None
            raise PreflightError(f"{path} cannot be read: {error.strerror}", where=key, todo=todo) from error
    if proxy.auth.keys_file is not None:
        keys.read(Path(proxy.auth.keys_file))
    if proxy.admin is not None and proxy.admin.token_file is not None:
        keys.read_token(Path(proxy.admin.token_file))
    if proxy.tls is not None:
        _check_pair(proxy.tls)


def _check_pair(tls: Tls) -> None:
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(tls.certificate, tls.key, password="")
    except (ssl.SSLError, ValueError) as error:
        raise PreflightError(
            f"certificate and key are not usable together: {error}",
            where="proxy.tls",
            cause="no PEM files, a key of another certificate, or a key with a passphrase",
        ) from error


def _check_program(process: Process) -> None:
    if shutil.which(process.argv[0]) is None:
        raise PreflightError(
            f"{process.argv[0]} is not an executable program",
            where=f"{process.name}@{process.node}",
            cause="the interpreter or command of the recipe (engine.python, *.command) is not on this host",
            todo="correct it, or leave it out to use the interpreter that runs pdserve",
        )


def check_router(version: str | None) -> None:
    """Raises PreflightError unless the vllm-router beside pdserve is the one whose flags a plan has."""
    if version == vllm_router.VERSION:
        return
    found = "is not installed" if version is None else f"{version} is installed"
    raise PreflightError(
        f"vllm-router {found}, and {vllm_router.VERSION} is the version whose flags are known",
        where="proxy.kind",
        todo=f"{sys.executable} -m pip install vllm-router=={vllm_router.VERSION}, or proxy.kind: pdserve; "
        "proxy.command names a router that is elsewhere",
    )


def _check_ports(starting: Sequence[Process], held_by_us: Collection[int]) -> None:
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


def resolve_secrets(plan: Plan, environ: Mapping[str, str], engine_key: str) -> dict[str, str]:
    """Values of all secrets that the plan names. Raises PreflightError naming those that are not set."""
    names = {name for process in plan.processes for name in process.env.secrets.values()} - {ENGINE_KEY}
    missing = sorted(name for name in names if not environ.get(name))
    if missing:
        raise PreflightError(
            f"the recipe uses secrets that are not set: {', '.join(missing)}",
            todo=f"export {missing[0]}=... before pdserve up; only its name is ever written down",
        )
    return {**{name: environ[name] for name in names}, ENGINE_KEY: engine_key}
