"""What a record that cannot be written is for its user: an error with its fix, not a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pdserve.errors import MAKE_ROOM, StateError
from pdserve.run.directory import RunDir


@contextmanager
def written(run: RunDir) -> Iterator[None]:
    """The block writes the record of this run. An OSError of it becomes a StateError."""
    try:
        yield
    except OSError as error:
        raise StateError(
            "the record of this run cannot be written",
            where=str(run.path),
            cause=error.strerror or str(error),
            todo=MAKE_ROOM,
        ) from error
