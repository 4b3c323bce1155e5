"""The connection of a leg that finds none idle. By itself, as all that connects is: see http.connecting."""

from __future__ import annotations

from collections.abc import Callable

from pdserve.pd.http.connecting import lacks_descriptors
from pdserve.pd.http.upstream import Pool, UpstreamConnection


async def dial(
    pool: Pool, connected: Callable[[UpstreamConnection], None], unreachable: Callable[[str, bool], None]
) -> None:
    """Connect to a worker, and call one of the two functions. `unreachable`: how, and whether this process has no
    descriptor left. It is cancelled when the leg is closed first."""
    try:
        connection = await pool.connect()
    except TimeoutError:
        unreachable(" in time", False)
    except OSError as error:
        unreachable("", lacks_descriptors(error))
    else:
        connected(connection)
