"""The connection of a leg that finds none idle. By itself because it waits: see http.connecting."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.pd.http.connecting import lacks_descriptors

if TYPE_CHECKING:
    from pdserve.pd.relay.leg import Leg


async def dial(leg: Leg) -> None:
    """Tells the leg how it went. Cancelled when the leg is closed first."""
    try:
        connection = await leg.worker.pool.connect()
    except TimeoutError:
        leg.unreachable(" in time")
    except OSError as error:
        leg.unreachable("", ours=lacks_descriptors(error))
    else:
        leg.connected(connection)
