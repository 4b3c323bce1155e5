"""The entry of the `pdserve` command: the one place where an error or a Ctrl-C becomes text and an exit code.

It imports little before `main` has taken care of Ctrl-C: the rest takes a good part of a second, and a Ctrl-C in an
import would print where that was. Before the first line of this file the interpreter itself is what prints it.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys

_SIGPIPE_EXIT = 141
_CTRL_C_EXIT = 130


def main() -> None:
    """Console entry."""
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not below nohup or a script's `&`
    if interruptible:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing has been begun: the signal itself is the end
    try:
        code = _main(interruptible=interruptible)
    except KeyboardInterrupt:
        code = _CTRL_C_EXIT
    if interruptible:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # in the interpreter's own end too
    sys.exit(code)


def _main(*, interruptible: bool) -> int | str | None:
    from pdserve.cli.commands import ReaderLeft
    from pdserve.system import utf8

    utf8.ensure()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what the locale has no character for is shown as its number
            stream.reconfigure(errors="backslashreplace")
    if interruptible:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code = _run()
        sys.stdout.flush()
    except (ReaderLeft, BrokenPipeError):
        # What is still buffered must go somewhere when the interpreter flushes once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = _SIGPIPE_EXIT
    return code


def _run() -> int | str | None:
    from pdserve.cli.commands import command
    from pdserve.errors import PdserveError

    try:
        command()()
    except PdserveError as error:
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.flush()
        print(f"error: {error.render()}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return _CTRL_C_EXIT
    except RuntimeError as error:
        # Python 3.11 makes one of whatever is raised in a `__set_name__`: a Ctrl-C while a verb's classes are made.
        if not isinstance(error.__cause__, KeyboardInterrupt):
            raise
        return _CTRL_C_EXIT
    except SystemExit as done:
        return done.code
    return 0


if __name__ == "__main__":
    main()
