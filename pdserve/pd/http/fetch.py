"""One small request whose whole answer is wanted: health, engine ids, models."""

from __future__ import annotations

from pdserve.pd.http.connecting import lacks_descriptors
from pdserve.pd.http.upstream import Pool, UpstreamConnection
from pdserve.pd.http.whole_answer import Answer as Answer
from pdserve.pd.http.whole_answer import FetchError as FetchError
from pdserve.pd.http.whole_answer import WholeAnswer
from pdserve.time_limit import time_limit


async def fetch(
    pool: Pool,
    method: str,
    path: str,
    *,
    headers: bytes = b"",
    body: bytes = b"",
    timeout: float = 5.0,
    reuse: bool = False,
) -> Answer:
    """`headers`: complete lines, each with its end. `reuse`: an open connection will do; by default a new one is made,
    because rare requests find old ones, which may just be closing. Raises FetchError."""
    length = b"content-length: %d\r\n" % len(body) if body or method == "POST" else b""
    head = b"%b %b HTTP/1.1\r\nhost: %b\r\n%b%b\r\n" % (
        method.encode(),
        path.encode(),
        pool.host_header,
        headers,
        length,
    )
    connection: UpstreamConnection | None = None
    sink = WholeAnswer()
    try:
        async with time_limit(timeout):
            connection = (pool.take() if reuse else None) or await pool.connect()
            connection.send(head, body, sink)
            return await sink.done
    except TimeoutError:
        raise FetchError(f"no answer within {timeout:g} s") from None
    except OSError as error:
        what = f"cannot be reached: {error.strerror or type(error).__name__}"
        raise FetchError(what, ours=lacks_descriptors(error)) from error
    finally:
        complete = sink.done.done() and not sink.done.cancelled() and sink.done.exception() is None
        if connection is not None and not complete:
            connection.abort()
