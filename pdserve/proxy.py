"""The prefill/decode proxy: what clients talk to.

    python -m pdserve.proxy --config proxy.json [--no-control]

The configuration is pd.config.proxy.ProxyConfig as JSON; PDSERVE_ENGINE_KEY is the bearer token of the engines.
Worker states come as JSON lines on stdin (pd.serve.control), unless --no-control is given or stdin is no pipe: then all
workers count as ready. Ends itself only on SIGTERM or SIGINT, after running requests have had `drain_seconds` to
finish. SIGHUP reads keys, policies and limits again. SIGUSR2 is a rolling restart, which refuses no connection
(pd.processes.supervisor).

This is the parent of the processes that serve (pd.serve.member). It has what starts them and no more: with one
member, the modules that serve are imported after the fork. Several members share the memory of what is imported before
it. For the same reason there are no dataclasses here and in what it imports: they take 1.4 MB.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pdserve import __version__
from pdserve.errors import PdserveError, StartError
from pdserve.installed import proxy_build
from pdserve.pd.config.defaults import HOST, PROCESSES
from pdserve.pd.processes import handover, shared_numbers
from pdserve.pd.processes.child import MemberConfiguration
from pdserve.pd.processes.handover import Inheritance, SharedFiles
from pdserve.pd.processes.heartbeat import Beats
from pdserve.pd.processes.shared_pages import Pages
from pdserve.pd.processes.supervisor import Processes, line_of

if TYPE_CHECKING:
    from pdserve.pd.config.proxy import ProxyConfig

log = logging.getLogger("pdserve.proxy")

ENGINE_KEY_VARIABLE = "PDSERVE_ENGINE_KEY"
BACKLOG = 2048
_LAYOUT = f"{__version__}/{shared_numbers.LAYOUT}"


class ListenSettings(NamedTuple):
    """Holds what the parent needs of the configuration."""

    host: str
    port: int
    processes: int
    text: bytes
    """The whole file: it may be gone when a member that died is started anew."""


def start_of(path: Path) -> ListenSettings:
    """Read the file, as far as it can be read without the modules that serve; else their error. Raises RecipeError when
    the file cannot be used."""
    try:
        text = path.read_bytes()
    except OSError:
        load_config(path)  # raises the reason
        raise
    try:
        fields = json.loads(text)
        host, port, processes = fields.get("host", HOST), fields["port"], fields.get("processes", PROCESSES)
        if type(host) is str and type(port) is int and processes == 1 and 0 <= port < 1 << 16:
            return ListenSettings(host, port, 1, text)
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    from pdserve.pd.serve import member  # see the top of this module

    config = member.parse_config(text, path)
    return ListenSettings(config.host, config.port, config.processes, text)


def load_config(path: Path) -> ProxyConfig:
    """Read the proxy's configuration. Raises RecipeError when the file cannot be read, or describes what this proxy
    cannot do."""
    from pdserve.pd.serve import member  # see the top of this module

    return member.load_config(path)


def bound(host: str, port: int, *, shared: bool) -> socket.socket:
    """Return a socket that is bound but does not listen yet. `shared`: other processes bind the same port. Raises
    StartError when the address cannot be had."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise StartError(
            f"error while attempting to bind on address ({host!r}, {port}): {(error.strerror or str(error)).lower()}",
            where="proxy",
            todo="see who has the port (ss -ltnp), or give the proxy another one: ports.proxy",
        ) from error
    return sock


def listening(wanted: ListenSettings) -> list[socket.socket]:
    """Return one socket for each process. Raises StartError when the address cannot be had."""
    # Members share the port with any process that asks so: that no other has it is seen here.
    alone = bound(wanted.host, wanted.port, shared=False)
    if wanted.processes == 1:
        sockets = [alone]
    else:
        with alone:
            port = alone.getsockname()[1]
        sockets = [bound(wanted.host, port, shared=True) for _ in range(wanted.processes)]
    for sock in sockets:
        # From here on no connection is refused, whichever of the processes is there.
        sock.listen(BACKLOG)
    return sockets


def shared_with(inherited: Inheritance) -> SharedFiles | None:
    """Return what members need to share limits and figures with those of the program before. None: there is nothing
    that this program can use, as another version may count elsewhere in it."""
    shared = inherited.shared
    return shared if shared is not None and shared.version == _LAYOUT else None


def serve_together(path: Path, inherited: Inheritance | None, key: str | None, *, with_control: bool) -> int:
    """Run as many processes on one port as the configuration has; return the exit code. Raises RecipeError when it
    cannot be used. StartError: the address cannot be had."""
    wanted = None
    refused = ""
    try:
        wanted = start_of(path)
    except PdserveError as error:
        if inherited is None or not inherited.config:
            raise
        # It could be used a moment ago, when it was checked.
        refused = " ".join(error.what.split())
    if inherited is None:
        assert wanted is not None
        sockets = listening(wanted)
    else:
        sockets = [socket.socket(fileno=descriptor) for descriptor in inherited.sockets]
    before = b"" if inherited is None else inherited.config.encode("latin-1")
    count = len(sockets)
    configured = MemberConfiguration(
        b"" if wanted is None else wanted.text,
        before,
        refused,
        shared=SharedFiles(os.memfd_create("pdserve-proxy"), Pages.create(count), _LAYOUT),
        shared_before=None if inherited is None else shared_with(inherited),
    )
    if wanted is not None and count != wanted.processes:
        log.warning("it stays at %d process(es): another number takes a restart of the deployment's proxy", count)
    generation = 1 if inherited is None else inherited.generation + 1
    signs = Beats.create(count)
    processes: Processes

    def serve(index: int, lines: int, asks: int) -> int:
        from pdserve.pd.serve import member  # see the top of this module
        from pdserve.pd.serve.gateway import Gateway

        def notify(message: dict[str, Any]) -> None:
            os.write(asks, line_of(message))

        try:
            config = member.parse_config(configured.text, path).model_copy(update={"processes": count})
        except PdserveError as error:
            print(error.render(), file=sys.stderr, flush=True)
            return error.exit_code
        size = Gateway.numbers(config)
        shared = configured.shared
        assert shared is not None
        # Who reads it closes it.
        source = os.fdopen(lines, "rb", closefd=False)
        place = member.MemberContext(
            numbers=shared_numbers.private_numbers(size)
            if count == 1
            else shared_numbers.shared_numbers(
                Path(f"/proc/self/fd/{shared.numbers}"), size, process=index, processes=count
            ),
            sock=sockets[index],
            control=source,
            with_states=with_control,
            pages=None if count == 1 else Pages(shared.pages, index),
            notify=notify,
            beats=signs,
            generation=generation,
            succeeds=processes.rolling or processes.has_predecessor(index),
        )
        return member.serve(path, config, key, place)

    def configure(text: str) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            log.warning("the configuration cannot be written to %s: %s", path, error)

    processes = Processes(
        count,
        serve,
        sys.stdin.fileno() if with_control else None,
        configured,
        beats=signs,
        sockets=[sock.fileno() for sock in sockets],
        inherited=inherited,
        configure=configure,
    )
    return processes.run()


def check(path: Path, handover_format: int) -> None:
    """Check that a running proxy can hand over to one with this configuration. Raises RecipeError where the
    configuration cannot be used, StartError where the proxy that runs hands over in another format."""
    if handover_format != handover.FORMAT:
        raise StartError(
            "the running proxy was started by another version of pdserve",
            cause=f"it hands over in format {handover_format}, and this version takes format {handover.FORMAT}",
            todo="take the deployment down with that version, and start it with this one",
        )
    load_config(path)


def stdin_is_control() -> bool:
    """Tell whether a launcher talks on stdin: it does so through a pipe or a socket; a terminal, a file or nothing at
    all is standalone use."""
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pdserve.proxy", description="Prefill/decode proxy for vLLM.")
    parser.add_argument("--config", type=Path, required=True, help="ProxyConfig as JSON")
    parser.add_argument("--no-control", action="store_true", help="all workers are ready from the start")
    parser.add_argument(
        handover.CHECK, type=int, metavar="FORMAT", help="only check whether it could take over a proxy"
    )
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    log.info("pdserve %s, %s", __version__, proxy_build())
    try:
        if args.check is not None:
            check(args.config, args.check)
            return 0
        with_control = not args.no_control and stdin_is_control()
        key = os.environ.get(ENGINE_KEY_VARIABLE)
        return serve_together(args.config, handover.take_inheritance(), key, with_control=with_control)
    except PdserveError as error:
        print(error.render(), file=sys.stderr, flush=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
