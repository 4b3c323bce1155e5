"""The entry of the `pdserve` command: the one place where an error or a Ctrl-C becomes text and an exit code.

It imports little before `main` runs: the rest takes a good part of a second, and a Ctrl-C in one of these imports would
print a traceback.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from typing import TextIO

_SIGPIPE_EXIT = 141
_CTRL_C_EXIT = 130
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


def main() -> None:
    """Run the `pdserve` command, and exit with its code."""
    try:
        code = _main()
    except KeyboardInterrupt:
        code = _CTRL_C_EXIT
    sys.exit(code)


def _main() -> int | str | None:
    from pdserve.cli.commands import ReaderLeft
    from pdserve.system import queued_output

    _open_closed_streams()
    queued_output.ensure_utf8()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what the locale has no character for is shown as its number
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _run()
        sys.stdout.flush()
    except (ReaderLeft, BrokenPipeError):
        _discard(sys.stdout)
        code = _SIGPIPE_EXIT
    except OSError as error:
        if (failure := _output_failure(error)) is None:
            raise
        _discard(sys.stdout)
        code = _report(failure)
    return code


def _open_closed_streams() -> None:
    """Opens /dev/null for each standard stream that is closed (`>&-`), so that no file of ours becomes it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115  (for the rest of the process)
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115  (for the rest of the process)


def _output_failure(error: OSError) -> OSError | None:
    """Return why stdout takes nothing (a full disk), or None if `error` is of something else.

    What was not written is still buffered, and fails again. Without a buffer (PYTHONUNBUFFERED) the errno has to do:
    our own files have errors of their own.
    """
    try:
        sys.stdout.flush()
    except OSError as failure:
        return failure
    unbuffered = isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.write_through
    return error if unbuffered and error.filename is None and error.errno in _NO_ROOM else None


def _discard(stream: TextIO) -> None:
    """Sends what is still buffered to /dev/null, where the interpreter's last flush cannot fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _report(failure: OSError) -> int:
    """Prints that stdout cannot be written, on stderr if that takes it, and returns the exit code."""
    from pdserve.errors import StateError

    ours = StateError(
        f"the output cannot be written: {failure.strerror}",
        where="stdout",
        cause="the disk of the file that it goes to is full, or has gone",
        todo="make room on that disk, or send the output to a file on another one",
    )
    _print_error(f"error: {ours.render()}")
    return ours.exit_code


def _print_error(text: str) -> None:
    """Print an error on stderr. Where that takes nothing, the exit code is right all the same."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        _discard(sys.stderr)


def _run() -> int | str | None:
    from pdserve.cli.commands import command
    from pdserve.errors import PdserveError

    try:
        command()()
    except PdserveError as error:
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.flush()
        _print_error(f"error: {error.render()}")
        return error.exit_code
    except KeyboardInterrupt:
        return _CTRL_C_EXIT
    except SystemExit as done:
        return done.code
    return 0


if __name__ == "__main__":
    main()
