"""Files and programs that must be on the node that uses them. Each check raises PreflightError for what is missing."""

from __future__ import annotations

import shutil
import ssl
import sys
from collections.abc import Iterable
from pathlib import Path

from pdserve.errors import PreflightError
from pdserve.installed import distributions
from pdserve.pd.config.proxy import ProxyConfig
from pdserve.pd.limits import keys
from pdserve.plan import proxy
from pdserve.plan.model import Plan
from pdserve.plan.process import Process


def check_model(plan: Plan) -> None:
    """A model that is a folder must have its config.json."""
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


def check_proxy_files(proxy: ProxyConfig) -> None:
    """The files that the proxy reads at its start. An error inside one has its line."""
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


def check_programs(processes: Iterable[Process]) -> None:
    """Every program that is started, and the router's version where it is started by our own interpreter."""
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
    """Raises PreflightError unless the vllm-router beside pdserve is the one whose flags a plan has."""
    if version == proxy.ROUTER_VERSION:
        return
    installed = "is not installed" if version is None else f"{version} is installed"
    raise PreflightError(
        f"vllm-router {installed}, and {proxy.ROUTER_VERSION} is the version whose flags are known",
        where="proxy.kind",
        todo=f"{sys.executable} -m pip install vllm-router=={proxy.ROUTER_VERSION}, or proxy.kind: pdserve; "
        "proxy.command names a router in another place",
    )
