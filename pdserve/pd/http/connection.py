"""One client connection: HTTP/1.1 requests in, replies out.

A StreamProtocol (http.connecting) over httptools' parser. A request reaches the handler when it is complete; a handler
may refuse it as soon as its headers are there. Requests of one connection are answered one after the other, and nothing
is read behind the one that is being answered.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import sys
import termios
from typing import Final, cast

import httptools

from pdserve.pd.errors import ApiError
from pdserve.pd.http.client_connection import ClientConnection
from pdserve.pd.http.front import Front
from pdserve.pd.http.incoming import ClientLimits, Request
from pdserve.pd.http.places import NO_PLACE, PROBE_PLACE
from pdserve.pd.http.reply import HttpReply, ReplyWithHeaders


class Behind:
    """Wait for a client that lags, as long as it reads on, up to a limit. Whether it does is seen when the longest
    pause is over, so that one which stops is waited for up to two of them."""

    __slots__ = ("_limits", "_transport", "_unread", "_until", "deadline")

    def __init__(self, transport: asyncio.WriteTransport, limits: ClientLimits, now: float) -> None:
        self._transport, self._limits = transport, limits
        self._until = now + limits.body_seconds
        self._unread = _unread(transport)
        self.deadline = min(now + limits.body_idle_seconds, self._until)
        """Loop time at which it is looked at."""

    def reads_on(self, now: float) -> bool:
        """It has read something since the last look, and may go on."""
        before, self._unread = self._unread, _unread(self._transport)
        self.deadline = min(now + self._limits.body_idle_seconds, self._until)
        return self._unread < before and now < self._until


def _unread(transport: asyncio.WriteTransport) -> int:
    """Bytes, in this process and in the kernel, that the client's machine has not acknowledged. The kernel may have
    megabytes, and takes more of ours only when a third of them has left. A system call: not for each write."""
    size = transport.get_write_buffer_size()
    sock = transport.get_extra_info("socket")
    if sock is None or sock.fileno() < 0:  # it has just ended
        return size
    try:
        # SIOCOUTQ, by its other name.
        kernel = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4))
    except OSError:  # no such count of this kind of connection
        return size
    return size + int.from_bytes(kernel, sys.byteorder)


MAX_HEADERS: Final = 256
"""The most headers of one request: each takes far more memory than its bytes."""
RETRY_SECONDS: Final = 1
NO_PLACE_RESPONSE: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: %d\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
    % RETRY_SECONDS
)
"""The answer to a connection that nothing is read from."""
_ONCE: Final = (b"host", b"content-length", b"transfer-encoding")
"""Headers that decide who is asked and where a request ends."""


def refuse_head(request: Request, version: str, max_body_bytes: int) -> ApiError | None:
    """Return what is wrong with a request's head, as HTTP defines it; None: nothing, and `announced` is known."""
    named = request.named()
    if named.get(b"host") is None if version == "1.1" else version != "1.0":
        return ApiError(400, "This is not a valid HTTP/1.1 request: it needs one Host header.")
    coding = named.get(b"transfer-encoding")
    if coding is not None and (version != "1.1" or coding.lower() != b"chunked"):
        return ApiError(400, "The only transfer coding of a request may be chunked.")
    if len(named) < len(request.headers):
        names = [name for name, _ in request.headers]
        if any(names.count(name) > 1 for name in _ONCE):
            return ApiError(400, "This is not a valid HTTP/1.1 request: a header comes twice that may come once.")
    length = named.get(b"content-length")
    if length is not None:
        request.announced = int(length)
        if request.announced > max_body_bytes:
            return too_large(max_body_bytes)
    return None


def too_large(most: int) -> ApiError:
    return ApiError(413, f"The request body is larger than {most} bytes.")


def headers_too_large() -> ApiError:
    return ApiError(431, "The request's headers are too large.")


def only_probes() -> ApiError:
    return ApiError(503, "The proxy has as many clients as it may have.", retry_after=RETRY_SECONDS)


def no_memory() -> ApiError:
    return ApiError(503, "The proxy holds too many large requests at the moment.", retry_after=RETRY_SECONDS)


_LINGER_SECONDS: Final = 2.0
_REQUEST_BYTES: Final = 2048
"""Of a request that waits, beside its headers and its body."""
_PAST_PARSER_BYTES: Final = 65_536
"""Of a body, and more: what is left of it by its length need not go through the parser, which would copy it."""
_NO_LINGER: Final = struct.pack("ii", 1, 0)
_SLASH: Final = b"/"
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


class Connection(ClientConnection):
    """One client. Owned by its transport; `front.connections` has it while it is open."""

    __slots__ = (
        "_behind",
        "_body_until",
        "_budget",
        "_current",
        "_for_probes",
        "_front",
        "_header_bytes",
        "_http10",
        "_in_head",
        "_loop",
        "_max_header_bytes",
        "_nothing_new",
        "_parser",
        "_past_parser",
        "_paused_reading",
        "_ready",
        "_refused",
        "_reply",
        "_resuming",
        "_tls",
        "_transport",
        "_watched",
    )

    def __init__(self, front: Front) -> None:
        self._front = front
        self._budget = front.budget
        self._max_header_bytes = front.limits.max_header_bytes
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport
        self.peer = ""
        self._tls = False
        self._current: Request | None = None
        """The request that is arriving."""
        self._http10 = self._in_head = self._past_parser = self._refused = False
        self._body_until = 0.0
        """Loop time at which it must be there; 0: it has not begun."""
        self._header_bytes = 0
        self._nothing_new = 0
        """Bytes since the parser last called back: it keeps what is not complete, however long that gets."""
        self._resuming = False
        """The head that a parser reads was made here and has nothing new."""
        self._ready: list[tuple[Request, HttpReply]] = []
        """Complete requests that wait for the reply before theirs."""
        self._reply: HttpReply | None = None
        self._paused_reading = False
        self._watched = -1  # the descriptor, while nothing is read
        self._for_probes = self.asked = False
        """It answers nothing else; a request was complete."""
        self.congested = False
        self._behind: Behind | None = None  # how it was when it last was
        self.deadline = self._loop.time() + front.limits.header_seconds

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        front = self._front
        place = NO_PLACE if front.closed else front.place_for_new(self._loop.time())
        if place == NO_PLACE:
            self._refused = True
            self._transport.write(b"" if front.closed else NO_PLACE_RESPONSE)
            self._transport.close()
            return
        self._for_probes = place == PROBE_PLACE
        front.connections.add(self)
        self._transport.set_write_buffer_limits(high=front.limits.write_buffer_bytes)
        peer = transport.get_extra_info("peername")
        self.peer = str(peer[0]) if isinstance(peer, tuple) else ""
        self._tls = transport.get_extra_info("ssl_object") is not None

    def connection_lost(self, _: Exception | None) -> None:
        self._front.connections.discard(self)
        self._watch_no_more()
        self._drop_ready()
        self._drop_current()
        if self._reply is not None:
            reply, self._reply = self._reply, None
            reply.lost()

    def data_received(self, data: bytes) -> None:
        if self._past_parser and not self._refused:
            data = self._take_body(data)
        if self._refused or not data:
            return
        self._nothing_new += len(data)
        rest: bytes | memoryview = data
        while True:
            try:
                self._parser.feed_data(rest)
                if self._nothing_new > self._max_header_bytes:
                    self._refuse(headers_too_large())
                elif self._current is not None or self._ready:
                    self._hold_back_or_wait()
            except httptools.HttpParserUpgrade as upgrade:
                if self._current is not None:
                    rest = memoryview(rest)[upgrade.args[0] :]
                    self._read_body_all_the_same()
                    if rest:
                        continue
                else:
                    # No other protocol is spoken here: the request is answered as it is, and nothing is read after it.
                    self._refused = True
                    self._last_reply_closes()
            except httptools.HttpParserCallbackError as error:
                # What a callback raised is what httptools lets through only as the cause.
                cause = error.__context__
                self._refuse(cause if isinstance(cause, ApiError) else ApiError(400, "The request cannot be read."))
            except httptools.HttpParserError:
                self._refuse(ApiError(400, "This is not a valid HTTP/1.1 request."))
            return

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self.congested = True
        self._wait_for_reader()
        if self._reply is not None and self._reply.on_pressure is not None:
            self._reply.on_pressure(True)

    def resume_writing(self) -> None:
        self.congested = False
        self._expect_next()
        if self._reply is not None and self._reply.on_pressure is not None:
            self._reply.on_pressure(False)
        elif self._reply is None:
            self._serve_next()

    # --- httptools

    def on_message_begin(self) -> None:
        if self._resuming:
            return
        self._current = Request(self.peer, self._budget, tls=self._tls)
        self._in_head, self._body_until = True, 0.0
        self._header_bytes = self._nothing_new = 0
        if self._reply is None:
            self._wait(self._front.limits.header_seconds)

    def on_url(self, url: bytes) -> None:
        assert self._current is not None
        if self._resuming:
            return
        self._header_bytes += len(url)
        if self._header_bytes > self._max_header_bytes:
            raise headers_too_large()
        self._current.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        assert self._current is not None
        self._header_bytes += len(name) + len(value) + 4
        if self._header_bytes > self._max_header_bytes or len(self._current.headers) == MAX_HEADERS:
            raise headers_too_large()
        if not self._in_head:
            # A head that was made here, or a trailer: that comes after everything that a header decides.
            return
        self._current.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        request = self._current
        assert request is not None
        if self._resuming:
            return
        self._in_head = False
        self._nothing_new = 0
        request.method = self._parser.get_method()
        version = self._parser.get_http_version()
        self._http10 = version != "1.1"
        invalid = refuse_head(request, version, self._front.limits.max_body_bytes)
        if invalid is not None:
            raise invalid
        if request.target[:1] != _SLASH:
            request.to_origin_form()
        refusal = self._front.handler.refuse(request)
        if refusal is not None:
            raise refusal
        if self._for_probes and request.path not in self._front.probes:
            raise only_probes()
        if request.announced and not self._budget.fits(request.announced, more=request.announced):
            raise no_memory()
        expected = None if self._http10 else request.header(b"expect")
        if expected is not None and expected.lower() == b"100-continue" and self._reply is None:
            self.send(_CONTINUE)

    def on_body(self, data: bytes) -> None:
        request = self._current
        assert request is not None
        self._nothing_new = 0
        if request.body_bytes + len(data) > self._front.limits.max_body_bytes:
            raise too_large(self._front.limits.max_body_bytes)
        if not request.take(data):
            raise no_memory()

    def on_message_complete(self) -> None:
        if self._offers_upgrade_and_has_body():
            return
        request, self._current = self._current, None
        assert request is not None
        request.taken_all()
        self._nothing_new = 0
        reply = self._new_reply(request)
        if self._reply is None and not self._ready and not self.congested:
            self._serve(request, reply)
            return
        self._ready.append((request, reply))
        if not request.hold(_REQUEST_BYTES + self._header_bytes):
            raise no_memory()

    # --- for HttpReply

    def send(self, data: bytes) -> None:
        self._transport.write(data)

    def replied(self, reply: HttpReply) -> None:
        """The reply has ended: the next request has its turn, or the connection waits or closes."""
        self._reply = None
        if not reply.keep_alive or self._front.closed:
            self._drop_ready()
            self._last_words()
            return
        self._expect_next()
        if self._ready or self._paused_reading:
            # Not from within the handler of the reply before it.
            self._loop.call_soon(self._serve_next)

    def abort(self) -> None:
        self._transport.abort()

    def reset(self) -> None:
        """Ends the connection so that it cannot look like a good end: with a RST."""
        self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self._transport.abort()

    # --- for Front

    @property
    def unsent(self) -> bool:
        return self._transport.get_write_buffer_size() > 0

    def late(self) -> None:
        """The deadline has passed: 408 for an unfinished request, more time for one that reads on, else the end."""
        if self._reply is None and self._current is not None and not self._refused and not self.congested:
            self._refuse(ApiError(408, "The request took too long to arrive."))
        elif self.unsent and self._behind is not None and self._behind.reads_on(self._loop.time()):
            self.deadline = self._behind.deadline
        else:
            self.abort()

    @property
    def answering(self) -> bool:
        return self._reply is not None or bool(self._ready)

    @property
    def arriving(self) -> bool:
        return self._current is not None

    def close_if_idle(self) -> None:
        if self._reply is None and self._current is None and not self._ready:
            self._transport.close()
        elif self._reply is not None:
            self._last_reply_closes()

    # --- inside

    def _serve(self, request: Request, reply: HttpReply) -> None:
        self._reply = reply
        self.asked = True
        self.deadline = float("inf")
        self._front.handler.handle(request, reply)

    def _serve_next(self) -> None:
        """A client that does not read gets no further reply: they would all wait in our memory."""
        if self._ready and self._reply is None and not self.congested and not self._transport.is_closing():
            self._serve(*self._ready.pop(0))
        elif self._paused_reading and not self._ready and not self.congested and self._reply is None:
            self._watch_no_more()
            self._paused_reading = False
            if not self._transport.is_closing():
                self._transport.resume_reading()

    def _hold_back_or_wait(self) -> None:
        """Something has come behind a request that is being answered, or a part of a request."""
        if self._reply is not None or self.congested or self._ready:
            if not self._paused_reading and not self._transport.is_closing():
                self._paused_reading = True
                self._transport.pause_reading()
                self._watched = self._transport.get_extra_info("socket").fileno()
                self._front.watch(self._watched, self.abort)
        elif not self._in_head:
            self._wait_for_body()
            # Only the parser itself knows that nothing may follow the last request of a connection.
            long = self._current is not None and self._current.left >= _PAST_PARSER_BYTES
            self._past_parser = long and self._parser.should_keep_alive()

    def _take_body(self, data: bytes) -> bytes:
        """Return what follows the body, for a parser that knows nothing of this request; empty: the body takes all."""
        request = self._current
        assert request is not None
        left = request.left
        try:
            self.on_body(data if len(data) <= left else data[:left])
            if len(data) < left:
                self._wait_for_body()
                return b""
            self.on_message_complete()
        except ApiError as error:
            self._refuse(error)
            return b""
        self._past_parser, self._parser = False, httptools.HttpRequestParser(self)
        return data[left:]

    def _watch_no_more(self) -> None:
        if self._watched >= 0:
            self._front.watch_no_more(self._watched, self.abort)
            self._watched = -1

    def _drop_ready(self) -> None:
        for request, _ in self._ready:
            request.release()
        self._ready.clear()

    def _drop_current(self) -> None:
        request, self._current = self._current, None
        if request is not None:
            request.release()

    def _expect_next(self) -> None:
        """Sets the limit for what the client has to do next."""
        limits = self._front.limits
        if self.congested:
            self._wait_for_reader()
        elif self._reply is not None or self._ready:
            self.deadline = float("inf")
        elif self._refused:
            self._linger()
        elif self._current is None:
            self._wait(limits.keep_alive_seconds)
        elif self._in_head:
            self._wait(limits.header_seconds)
        else:
            self._wait_for_body()

    def _last_words(self) -> None:
        """Nothing more will be answered: the connection ends when what was written has been sent."""
        if self._refused and self._transport.can_write_eof():
            # The client may still be sending. Closing now would reset its connection before it has read the answer.
            self._linger()
            self._transport.write_eof()
        else:
            self._wait_for_reader()
            self._transport.close()

    def _linger(self) -> None:
        """It need only read what was written, or end its connection."""
        self._wait_for_reader() if self.unsent else self._wait(_LINGER_SECONDS)

    def _new_reply(self, request: Request) -> HttpReply:
        keep = self._parser.should_keep_alive() and not self._refused and not self._front.closing
        return self._reply_to(request, keep_alive=keep, head_only=request.method == b"HEAD", http10=self._http10)

    def _reply_to(self, request: Request | None, *, keep_alive: bool, head_only: bool, http10: bool) -> HttpReply:
        headers = self._front.headers
        if headers is None or request is None:
            return HttpReply(self, keep_alive=keep_alive, head_only=head_only, http10=http10)
        more = headers(request)
        return ReplyWithHeaders(self, more, keep_alive=keep_alive, head_only=head_only, http10=http10)

    def _offers_upgrade_and_has_body(self) -> bool:
        """The parser then leaves the body to what takes the connection over."""
        request, offered = self._current, self._parser.should_upgrade()
        return request is not None and offered and request.method != b"CONNECT" and request.has_body()

    def _read_body_all_the_same(self) -> None:
        """An upgrade is an offer, and Java's client makes it with its first request. We do not take it: a new parser
        goes on behind the head, knowing of it only how the body is framed."""
        request = self._current
        assert request is not None
        head = request.framing(keep_alive=self._parser.should_keep_alive())
        self._parser = httptools.HttpRequestParser(self)
        self._resuming = True
        self._parser.feed_data(head)
        self._resuming = False
        if self._reply is None:
            self._wait_for_body()

    def _refuse(self, error: ApiError) -> None:
        """Answers a request that will not be read to its end, after those before it; then the connection closes."""
        self._refused = True
        if self._reply is not None or self._ready:
            # Requests before it are being answered; this one gets nothing but the end of the connection.
            self._drop_current()
            self._last_reply_closes()
            return
        request = self._current
        self._drop_current()
        reply = self._reply_to(request, keep_alive=False, head_only=self._parser.get_method() == b"HEAD", http10=False)
        self._reply = reply
        self._wait(self._front.limits.body_idle_seconds)
        self._front.handler.failed(request, reply, error)

    def _last_reply_closes(self) -> None:
        if self._ready:
            self._ready[-1][1].keep_alive = False
        elif self._reply is not None:
            self._reply.keep_alive = False
        else:
            self._last_words()

    def _wait_for_body(self) -> None:
        now, limits = self._loop.time(), self._front.limits
        self._body_until = self._body_until or now + limits.body_seconds
        self.deadline = min(now + limits.body_idle_seconds, self._body_until)

    def _wait_for_reader(self) -> None:
        self._behind = Behind(self._transport, self._front.limits, self._loop.time())
        self.deadline = self._behind.deadline

    def _wait(self, seconds: float) -> None:
        self.deadline = self._loop.time() + seconds
