"""The entry of the `pdserve` command: the one place where an error or a Ctrl-C becomes text and an exit code.

It imports little before `main` runs: the rest takes a good part of a second, and a Ctrl-C in one of these imports would
print a traceback.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys

_SIGPIPE_EXIT = 141
_CTRL_C_EXIT = 130


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

    queued_output.ensure_utf8()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what the locale has no character for is shown as its number
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _run()
        sys.stdout.flush()
    except (ReaderLeft, BrokenPipeError):
        # What is still buffered goes to /dev/null, where the interpreter's last flush cannot fail.
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
        print(f"error: {error.render()}", file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        return _CTRL_C_EXIT
    except SystemExit as done:
        return done.code
    return 0


if __name__ == "__main__":
    main()
