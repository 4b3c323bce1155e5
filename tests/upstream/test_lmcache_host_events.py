"""lmcache-host-events on LMCache's own event backend: nothing of another process is opened, and the order is kept.

The device is made up: work on a stream is a list that another thread works off, and an event has happened when all that
was queued before it is done. An event of another process cannot be opened. The backend and the future are LMCache's.
"""

from __future__ import annotations

import threading
from typing import Any

from pdserve.patches.lmcache import host_events
from tests.upstream.run import IN_RELEASE, INSTALLED_VLLM, count, on

if IN_RELEASE:
    from lmcache.v1.multiprocess.futures import DeviceMessagingFuture, MessagingFuture
    from lmcache.v1.platform.base.event_ipc import DefaultEventIPCBackend

WITHIN_SECONDS = 60.0


class Hang(Exception):  # noqa: N818  # no error: what would go on for ever
    """A process opens an event of another one."""


class Stream:
    """What is queued on it is done when `idle` is set."""

    def __init__(self) -> None:
        self.idle = threading.Event()
        self.idle.set()


class Event:
    """Of one process; `interprocess` events have handles, but opening one never returns."""

    def __init__(self, interprocess: bool = False) -> None:
        self._before = threading.Event()
        self._before.set()
        self.waited_for = threading.Event()

    def record(self, stream: Stream) -> None:
        self._before = stream.idle

    def ipc_handle(self) -> bytes:
        return bytes(64)

    @classmethod
    def from_ipc_handle(cls, device: object, handle: bytes) -> Event:
        raise Hang

    def wait(self, stream: object) -> None:
        raise AssertionError("an event of the own process is waited for on a stream")

    def query(self) -> bool:
        return self._before.is_set()

    def synchronize(self) -> None:
        self.waited_for.set()
        assert self._before.wait(WITHIN_SECONDS)


class Device:
    """In place of torch.cuda."""

    Event = Event


def exported(backend: Any, pending: bool) -> dict[str, Any]:
    """What one side sends of a stream with work on it, and what the other makes of that. `pending`: the work is done
    only when it was asked for."""
    stream, event, sent = Stream(), Event(interprocess=True), []
    if pending:
        stream.idle.clear()
    backend.record_event(event, stream)
    sender = threading.Thread(target=lambda: sent.append(backend.export_event(event, "gpu")), daemon=True)
    sender.start()
    if pending:
        # Either the sender waits for the work, or it has sent a handle of work that is not done.
        while sender.is_alive() and not event.waited_for.wait(0.01):
            pass
    early = pending and bool(sent)
    stream.idle.set()
    sender.join(WITHIN_SECONDS)
    assert not sender.is_alive()
    try:
        opened = backend.import_event(sent[0], "gpu")
        backend.wait_event(opened, Stream())
        backend.synchronize_event(opened, "gpu")
        seen = "complete" if backend.query_event(opened) else "pending"
    except Hang:
        seen = "hangs"
    return {"sent_before_the_work_was_done": early, "the_other_side": seen}


def answered(backend: Any, handle: bytes) -> Any:
    """An engine's future, once the server has answered."""
    raw: Any = MessagingFuture()
    future = DeviceMessagingFuture(raw, "gpu", backend)
    before = future.query()
    raw.set_result((handle, True))
    try:
        return [before, future.query(), future.wait(WITHIN_SECONDS), future.result(WITHIN_SECONDS)]
    except Hang:
        return "hangs"


def look() -> dict[str, Any]:
    backend = DefaultEventIPCBackend(Device(), "gpu")
    return {
        "work is pending": exported(backend, pending=True),
        "nothing is pending": exported(backend, pending=False),
        "a future": answered(backend, backend.export_event(Event(), "gpu")),
        "a future without work": answered(backend, b""),
        "an unpatched other side": answered(backend, bytes(64)),
    }


@on(INSTALLED_VLLM)
def test_what_is_sent_is_done_with_the_patch_and_has_to_be_opened_without() -> None:
    """A handle of a side without the patch is opened as ever: it is no mark; the plan gives the patch to both sides."""
    unpatched = look()
    assert unpatched["work is pending"] == {"sent_before_the_work_was_done": True, "the_other_side": "hangs"}
    assert unpatched["a future"] == "hangs"
    host_events.SERVER.apply()
    host_events.SERVER.apply()
    complete = {"sent_before_the_work_was_done": False, "the_other_side": "complete"}
    assert look() == {
        "work is pending": complete,
        "nothing is pending": complete,
        "a future": [False, True, True, True],
        "a future without work": unpatched["a future without work"],
        "an unpatched other side": "hangs",
    }
    assert count(host_events.SERVER.name, host_events.AWAITED) == 3, "each wait once"
