"""The decisions of nixl-push: when a registration ends, when a WRITE may begin, and what is owed to whom.

The worker is stood in for: what NIXL and vLLM's own classes do is in tests/upstream/test_nixl_push_ends.py.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections import defaultdict
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.patches.nixl.push_decode import ASK_SECONDS, GONE_SECONDS, Presence, Withdrawals, presence_of
from pdserve.patches.nixl.push_messages import PREFIX, PushPeer, PushWord, base_of, decode
from pdserve.patches.nixl.push_prefill import Writes
from pdserve.patches.nixl.push_scheduler import METHODS, RELEASES
from pdserve.patches.nixl.push_worker import METHODS as WORKER_METHODS

PREFILL = PushPeer("prefill-engine", "10.0.0.1", 5600, 1)
DECODE = PushPeer("decode-engine", "10.0.0.2", 5600, 1)
HERE, THERE = "cmpl-x-0-aaaaaaaa", "cmpl-x-0-bbbbbbbb"
"""Ids of one request at prefill and at decode."""
REGISTRATION = {
    "request_id": THERE,
    "decode_engine_id": DECODE.engine,
    "decode_host": DECODE.host,
    "decode_port": DECODE.port,
    "decode_tp_size": 1,
    "remote_engine_id": PREFILL.engine,
    "remote_host": PREFILL.host,
    "remote_port": PREFILL.port,
    "remote_tp_size": 1,
}


# --- the words


def test_a_message_is_read_as_it_was_written() -> None:
    message = PushWord("withdraw", THERE, DECODE, 3)
    assert decode(message.encode()) == message


@pytest.mark.parametrize(
    "notification",
    [
        b"HB:cmpl-x-0-aaaaaaaa",
        b"cmpl-x-0-bbbbbbbb:1",
        b"PUSH_REG:\\x80",
        PREFIX,
        PREFIX + b"{",
        PREFIX + b"[]",
        PREFIX + b'{"what": "write", "request_id": "x", "rank": 0, "sender": {}}',
        PREFIX + PushWord("clear", "x", PREFILL, 0).encode()[len(PREFIX) :].replace(b"clear", b"write"),
        PREFIX + b"\xff\xfe",
    ],
)
def test_what_is_none_of_ours_is_left_to_vllm(notification: bytes) -> None:
    assert decode(notification) is None


def test_both_legs_of_a_request_share_what_stands_before_the_ids_last_part() -> None:
    assert base_of(HERE) == base_of(THERE) == "cmpl-x-0"
    assert base_of("cmpl-x-0") == "cmpl-x-0"


# --- decode


class Decode:
    """A worker of decode that has sent one registration, with a clock and a prefill that the test decides on."""

    def __init__(self, presence: Presence = "here", *, workers: int = 1) -> None:
        self.presence = presence
        self.now = 1000.0
        self.asked: list[str] = []
        agents = {(0, rank): f"agent-{rank}" for rank in range(workers)}
        self.worker = SimpleNamespace(
            _handshake_lock=threading.RLock(),
            _remote_agents={PREFILL.engine: agents},
            _recving_metadata={THERE: object()},
            _failed_recv_reqs=queue.Queue(),
        )
        self.withdrawals = Withdrawals(self.worker, clock=lambda: self.now, presence=lambda _: self.presence)

    def _ask(self, prefill: PushPeer, decode: PushPeer, name: str) -> None:
        assert (prefill, decode) == (PREFILL, DECODE)
        self.asked.append(name)

    def registered(self) -> Decode:
        self.withdrawals.sends(THERE, REGISTRATION)
        return self

    def tick(self, seconds: float = 0.0) -> None:
        """Time passes, and a probe that was begun has its answer."""
        self.now += seconds
        self.withdrawals.tick(self._ask)
        for registration in self.withdrawals._sent.values():
            if registration.probe is not None:
                registration.probe.result()

    def clear(self, rank: int = 0, engine: str = PREFILL.engine) -> None:
        self.withdrawals.cleared(PushWord("clear", THERE, PushPeer(engine, "", 0, 1), rank))

    @property
    def failed(self) -> list[str]:
        """What vLLM's worker is told to report as failed."""
        return list(self.worker._failed_recv_reqs.queue)


@pytest.fixture(autouse=True)
def _probes_end() -> Any:
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(10)


@pytest.fixture
def decode_worker() -> Any:
    made: list[Decode] = []

    def make(*args: Any, **kwargs: Any) -> Decode:
        made.append(Decode(*args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.withdrawals.close()


def test_nothing_is_asked_of_a_registration_that_nobody_withdraws(decode_worker: Any) -> None:
    decode = decode_worker().registered()
    decode.tick(10_000)
    assert (decode.asked, decode.failed) == ([], [])


def test_one_that_is_withdrawn_is_asked_for_until_it_is_answered_and_then_ends(decode_worker: Any) -> None:
    decode = decode_worker().registered()
    decode.withdrawals.order([THERE], [])
    decode.tick()
    decode.tick(ASK_SECONDS / 2)
    assert decode.asked == [THERE]
    decode.tick(ASK_SECONDS)
    assert decode.asked == [THERE, THERE]
    assert decode.failed == []
    decode.clear()
    decode.tick(10_000)
    assert (len(decode.asked), decode.failed) == (2, [THERE])


def test_all_workers_of_prefill_must_have_answered(decode_worker: Any) -> None:
    decode = decode_worker(workers=2).registered()
    decode.clear(0)
    decode.clear(0)
    assert decode.failed == []
    decode.clear(1)
    assert decode.failed == [THERE]


def test_an_answer_of_another_engine_is_none(decode_worker: Any) -> None:
    decode = decode_worker().registered()
    decode.clear(engine="another life of it")
    assert decode.failed == []


def test_one_that_was_never_sent_ends_at_once_and_is_not_sent_later(decode_worker: Any) -> None:
    decode = decode_worker()
    decode.withdrawals.order([THERE], [])
    decode.tick()
    assert (decode.asked, decode.failed) == ([], [THERE])
    assert not decode.withdrawals.may_send(THERE)


def test_an_order_for_one_whose_kv_is_there_does_nothing(decode_worker: Any) -> None:
    decode = decode_worker().registered()
    decode.withdrawals.received([THERE])
    del decode.worker._recving_metadata[THERE]
    decode.withdrawals.order([THERE], [])
    decode.tick()
    assert (decode.asked, decode.failed) == ([], [])


def test_blocks_are_given_back_when_prefills_engine_has_been_gone_for_a_while(decode_worker: Any) -> None:
    decode = decode_worker("gone").registered()
    decode.withdrawals.order([THERE], [])
    decode.tick()
    decode.tick(ASK_SECONDS)
    decode.tick(GONE_SECONDS - 1)
    assert decode.failed == []
    decode.tick(1)
    assert decode.failed == [THERE]


@pytest.mark.parametrize("presence", ["here", "unknown"])
def test_silence_and_life_prove_nothing(decode_worker: Any, presence: Presence) -> None:
    decode = decode_worker(presence).registered()
    decode.withdrawals.order([THERE], [])
    for _ in range(20):
        decode.tick(GONE_SECONDS)
    assert decode.failed == []


def test_an_engine_that_answers_again_counts_anew(decode_worker: Any) -> None:
    decode = decode_worker("gone").registered()
    decode.withdrawals.order([THERE], [])
    decode.tick()
    decode.tick(ASK_SECONDS)
    decode.presence = "unknown"
    decode.tick(ASK_SECONDS)
    decode.tick(ASK_SECONDS)
    decode.presence = "gone"
    decode.tick(GONE_SECONDS)
    decode.tick(ASK_SECONDS)
    assert decode.failed == []


def test_prefill_is_told_of_a_request_that_decode_never_registered(decode_worker: Any) -> None:
    decode = decode_worker()
    told: list[tuple[PushPeer, PushPeer, str]] = []
    pending: list[Any] = [Future(), None]

    def ask(prefill: PushPeer, decode: PushPeer, name: str) -> Any:
        told.append((prefill, decode, name))
        return pending.pop(0)

    decode.withdrawals.order([], [(THERE, PREFILL, DECODE)])
    for _ in range(3):
        decode.withdrawals.tick(ask)
    assert told == [(PREFILL, DECODE, THERE)] * 2
    assert decode.failed == []


def test_a_refused_side_channel_is_an_engine_that_is_gone() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    assert presence_of(PushPeer("x", "127.0.0.1", port, 1)) == "gone"


def test_a_side_channel_that_cannot_be_found_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", unreachable)
    assert presence_of(PREFILL) == "unknown"


# --- decode's scheduler


class Half:
    """As much of upstream's as an allocation without external tokens needs."""

    engine_id, side_channel_host, side_channel_port = DECODE.engine, DECODE.host, DECODE.port
    vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=1))

    def __init__(self) -> None:
        self.stopped: list[str] = []

    def _stop_heartbeat(self, name: str) -> None:
        self.stopped.append(name)


@pytest.mark.parametrize("tokens", [0, 16])
def test_a_prompt_that_decode_has_already_lets_prefill_go(tokens: int) -> None:
    """Else decode's heartbeats would hold prefill's blocks until it has answered."""
    params = {
        "do_remote_prefill": True,
        "remote_engine_id": PREFILL.engine,
        "remote_host": PREFILL.host,
        "remote_port": PREFILL.port,
        "tp_size": 1,
    }
    half, request = Half(), SimpleNamespace(request_id=THERE, kv_transfer_params=params)
    METHODS["update_state_after_alloc"](lambda *_: None)(half, request, None, tokens)
    assert half.stopped == ([] if tokens else [THERE])
    assert vars(half).get(RELEASES, []) == ([] if tokens else [(THERE, PREFILL, DECODE)])
    assert params["do_remote_prefill"] is (tokens > 0)


# --- prefill


class Prefill:
    """A worker of prefill: leases, and WRITEs under way, are what the test says."""

    def __init__(self) -> None:
        self.worker = SimpleNamespace(
            _reqs_to_send={},
            _sending_transfers=defaultdict(list),
            _sending_transfers_lock=threading.Lock(),
            _send_failures=set(),
            _pending_d_registrations={},
            _push_finished_blocks={},
            _ensure_handshake=lambda *_: self.handshake,
            _deferred_push_inbox=queue.Queue(),
            _push_writer_wake=threading.Event(),
        )
        self.handshake: Future[Any] | None = None
        """With decode; None: it is done."""
        self.writes = Writes(self.worker)
        self.begun: list[str] = []
        self.told: list[tuple[str, str]] = []

    def computed(self, lease: float = 30.0) -> Prefill:
        self.writes.begin_step([HERE], [])
        self.worker._reqs_to_send[HERE] = time.perf_counter() + lease
        return self

    def begin(self) -> None:
        self.writes.begin(lambda name, *_: self._write(name), HERE, ([1],), REGISTRATION)

    def _write(self, name: str) -> None:
        self.begun.append(name)
        self.worker._sending_transfers[name].append(7)

    def reap(self) -> set[str]:
        """What is freed, as upstream's method does it."""
        done: set[str] = set()

        def upstream(freed: set[str]) -> None:
            now = time.perf_counter()
            for name in [name for name, end in self.worker._reqs_to_send.items() if now >= end]:
                del self.worker._reqs_to_send[name]
                freed.add(name)

        self.writes.end_leases(upstream, done)
        return done

    def written(self, *, well: bool = True) -> None:
        """The WRITE has ended."""

        def upstream() -> Any:
            self.worker._sending_transfers.pop(HERE, None)
            if well:
                self.worker._reqs_to_send.pop(HERE, None)
            return SimpleNamespace(finished_sending={HERE} if well else set())

        self.writes.end_writes(upstream)

    def withdraw(self) -> None:
        self.writes.withdrawn(PushWord("withdraw", THERE, DECODE, 0))

    def answer(self) -> list[tuple[str, str]]:
        def say(peer: PushPeer, name: str) -> None:
            self.told.append((peer.engine, name))

        self.writes.answer(say)
        return self.told


ANSWER = [(DECODE.engine, THERE)]


def test_a_write_begins_within_the_lease_and_nobody_is_told() -> None:
    prefill = Prefill().computed()
    prefill.begin()
    assert (prefill.begun, prefill.answer()) == ([HERE], [])


def test_none_begins_after_the_lease_and_decode_is_told() -> None:
    prefill = Prefill().computed(lease=0.0)
    assert prefill.reap() == {HERE}
    prefill.begin()
    assert (prefill.begun, prefill.answer()) == ([], ANSWER)


def test_none_begins_after_the_lease_that_nobody_has_ended_yet() -> None:
    prefill = Prefill().computed(lease=0.0)
    prefill.begin()
    assert prefill.begun == []
    assert prefill.reap() == {HERE}


def test_blocks_outlive_their_lease_while_a_write_reads_them() -> None:
    prefill = Prefill().computed(lease=0.2)
    prefill.begin()
    prefill.worker._reqs_to_send[HERE] = 0.0
    assert prefill.reap() == set()
    prefill.worker._sending_transfers.clear()
    assert prefill.reap() == {HERE}


def test_a_write_that_is_just_beginning_holds_them_too() -> None:
    """Upstream publishes what it has posted at the end."""
    prefill = Prefill().computed()
    freed: list[set[str]] = []

    def posting(*_: object) -> None:
        prefill.worker._reqs_to_send[HERE] = 0.0
        freed.append(prefill.reap())

    prefill.writes.begin(posting, HERE, ([1],), REGISTRATION)
    assert freed == [set()]


def test_a_withdrawal_is_answered_when_the_write_has_ended() -> None:
    prefill = Prefill().computed()
    prefill.begin()
    prefill.withdraw()
    assert prefill.answer() == []
    prefill.written()
    assert prefill.answer() == ANSWER


def test_a_withdrawal_before_the_prompt_is_computed_is_answered_at_once_and_frees_it_later() -> None:
    """Nothing asks for a WRITE then: there is no registration any more that upstream would match it with."""
    prefill = Prefill()
    prefill.worker._pending_d_registrations[THERE] = REGISTRATION
    prefill.withdraw()
    assert prefill.answer() == ANSWER
    assert prefill.worker._pending_d_registrations == {}
    assert prefill.computed().reap() == {HERE}


def test_the_writer_does_not_hear_of_a_prompt_that_decode_has_withdrawn() -> None:
    """It would look for a registration, a thousand times a second, if it heard of the end of the lease first."""
    prefill, other = Prefill(), "cmpl-other-0-cccccccc"
    prefill.withdraw()
    half = SimpleNamespace(pdserve_push=SimpleNamespace(writes=prefill.writes, withdrawals=Decode().withdrawals))
    metadata = SimpleNamespace(push_finished_blocks={HERE: ([1],), other: ([2],)}, reqs_not_processed=set())
    heard: list[Any] = []
    WORKER_METHODS["start_load_kv"](lambda _, metadata: heard.append(metadata.push_finished_blocks))(half, metadata)
    assert heard == [{other: ([2],)}]


def test_none_begins_after_a_withdrawal_that_came_before_the_prompt_was_computed() -> None:
    prefill = Prefill()
    prefill.withdraw()
    prefill.computed().begin()
    assert prefill.begun == []


def test_what_is_kept_for_a_decode_that_withdraws_is_freed_at_once() -> None:
    prefill = Prefill().computed()
    prefill.worker._push_finished_blocks[HERE] = ([1],)
    prefill.withdraw()
    assert prefill.worker._push_finished_blocks == {}
    assert prefill.reap() == {HERE}


def test_a_decode_that_registers_for_a_prompt_that_was_aborted_is_told() -> None:
    prefill = Prefill()
    prefill.writes.begin_step([], [HERE])
    taken: list[str] = []
    prefill.writes.registered(lambda: taken.append("it"), REGISTRATION)
    assert (taken, prefill.answer()) == ([], ANSWER)


def test_a_decode_that_has_registered_before_the_abort_is_told_too() -> None:
    prefill = Prefill()
    prefill.writes.registered(
        lambda: prefill.worker._pending_d_registrations.update({THERE: REGISTRATION}), REGISTRATION
    )
    prefill.writes.begin_step([], [HERE])
    assert prefill.answer() == ANSWER
    assert prefill.worker._pending_d_registrations == {}


def test_a_write_that_fails_ends_the_lease_and_decode_is_told() -> None:
    prefill = Prefill().computed()
    prefill.begin()
    prefill.written(well=False)
    assert prefill.answer() == ANSWER
    assert prefill.reap() == {HERE}


def test_a_write_that_has_failed_before_anybody_saw_it_under_way_is_told_too() -> None:
    """NIXL posts it, and the engine's thread finds it in error, both while that thread asks for what has ended. Decode
    would wait until `push_registration_timeout`, and its heartbeats would hold prefill's blocks for as long."""
    prefill = Prefill().computed()

    def upstream() -> Any:
        prefill.begin()
        prefill.worker._sending_transfers.pop(HERE)
        return SimpleNamespace(finished_sending=set())

    prefill.writes.end_writes(upstream)
    assert prefill.answer() == ANSWER
    assert prefill.reap() == {HERE}


def test_a_write_that_waits_for_its_handshake_begins_after_it() -> None:
    prefill = Prefill().computed()
    prefill.handshake = Future()
    prefill.begin()
    prefill.written(well=False)
    assert (prefill.begun, prefill.answer(), prefill.reap()) == ([], [], set())
    prefill.handshake.set_result(({}, 0.0))
    assert prefill.worker._deferred_push_inbox.get_nowait() == (HERE, ([1],), REGISTRATION)
    assert prefill.worker._push_writer_wake.is_set()
    prefill.handshake = None
    prefill.begin()
    assert prefill.begun == [HERE]


def test_a_handshake_that_fails_ends_the_lease_and_decode_is_told() -> None:
    prefill = Prefill().computed()
    prefill.handshake = Future()
    prefill.begin()
    prefill.handshake.set_exception(TimeoutError())
    assert prefill.worker._push_writer_wake.is_set()
    assert prefill.answer() == ANSWER
    assert prefill.reap() == {HERE}


def test_one_that_cannot_be_posted_is_told_as_well() -> None:
    prefill = Prefill().computed()
    prefill.writes.begin(lambda name, *_: prefill.worker._send_failures.add(name), HERE, ([1],), REGISTRATION)
    assert prefill.answer() == ANSWER


def test_an_answer_waits_for_the_handshake_and_is_given_up_with_it() -> None:
    prefill = Prefill()
    prefill.withdraw()
    handshake: Future[Any] = Future()
    asked: list[str] = []

    def say(_: PushPeer, name: str) -> Any:
        asked.append(name)
        return handshake

    prefill.writes.answer(say)
    prefill.writes.answer(say)
    assert asked == [THERE]
    handshake.set_exception(ConnectionError())
    prefill.writes.answer(say)
    assert asked == [THERE]
    assert prefill.answer() == []


def test_heartbeats_name_decodes_own_id_and_extend_prefills_lease() -> None:
    prefill = Prefill().computed()
    assert prefill.writes.heartbeat(f"{THERE},cmpl-other-0-cccccccc") == f"{HERE},cmpl-other-0-cccccccc"
