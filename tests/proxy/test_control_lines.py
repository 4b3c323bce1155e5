"""What a new process of the proxy hears of what came before it."""

from __future__ import annotations

import json
from typing import Any

from pdserve.pd.processes.control_lines import ControlLines
from tests.proxy.rows import each

ADD: dict[str, Any] = {"add": {"name": "decode-3", "role": "decode", "url": "http://node:1"}}
REMOVE: dict[str, Any] = {"remove": "decode-3"}


def state(name: str, what: str) -> dict[str, Any]:
    return {"worker": name, "state": what}


def heard_again(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    lines = ControlLines()
    for message in messages:
        assert lines.remember(json.dumps(message).encode()) == message
    return [json.loads(line) for line in lines.again()]


def test_only_the_last_state_of_a_worker_counts() -> None:
    heard = heard_again(state("decode-0", "ready"), state("decode-1", "ready"), state("decode-0", "dead"))
    assert heard == [state("decode-0", "dead"), state("decode-1", "ready")]


def test_workers_come_and_go_in_their_order_and_states_are_those_of_who_is_there() -> None:
    assert heard_again(state("decode-0", "ready"), ADD, state("decode-3", "draining"), {"reload": True}) == [
        ADD,
        state("decode-0", "ready"),
        state("decode-3", "draining"),
    ]


@each("was", ["draining", "dead"])
def test_a_new_worker_is_not_what_the_one_before_it_was(was: str) -> None:
    assert heard_again(ADD, state("decode-3", was), REMOVE, ADD) == [ADD]
    assert heard_again(state("decode-3", was), REMOVE, ADD) == [REMOVE, ADD]
    assert heard_again(state("decode-3", was), ADD) == [ADD]


def test_a_state_of_the_new_one_counts() -> None:
    heard = heard_again(state("decode-3", "dead"), REMOVE, ADD, state("decode-3", "draining"))
    assert heard == [REMOVE, ADD, state("decode-3", "draining")]


@each("before, kept", [((), []), ((REMOVE,), [REMOVE])])
def test_however_often_a_worker_comes_and_goes_only_how_it_ended_is_heard_again(
    before: tuple[dict[str, Any], ...], kept: list[dict[str, Any]]
) -> None:
    other = {"add": {"name": "decode-4", "role": "decode", "url": "http://node:2"}}
    often = [ADD, REMOVE] * 1000
    assert heard_again(*before, *often) == kept
    assert heard_again(*before, *often, other, ADD) == [other, *kept, ADD]


def test_a_line_that_names_all_workers_takes_the_place_of_what_was_heard_of_them() -> None:
    all_workers = {"workers": [{"name": "decode-0"}, {"name": "decode-1"}], "states": {"decode-0": "ready"}}
    others = {"workers": [{"name": "decode-1"}], "states": {}}
    assert heard_again(state("decode-0", "dead"), others, all_workers, state("decode-1", "ready")) == [
        all_workers,
        state("decode-1", "ready"),
    ]


def test_an_admins_worker_stays_beside_them_and_one_that_he_removed_is_back() -> None:
    all_workers = {"workers": [{"name": "decode-0"}], "states": {}}
    draining = state("decode-3", "draining")
    assert heard_again({"remove": "decode-0"}, ADD, draining, all_workers) == [all_workers, ADD, draining]
    assert heard_again(ADD, draining, all_workers | {"workers": [ADD["add"]]}) == [
        all_workers | {"workers": [ADD["add"]]}
    ]


def test_what_an_older_program_has_remembered_is_not_more_than_what_a_new_one_would() -> None:
    lines = ControlLines()
    lines.take_over([json.dumps(message).encode() for message in (ADD, REMOVE, ADD)], {"decode-3": b"a state"})
    assert [json.loads(line) for line in lines.changes] == [ADD]
    assert lines.again()[1:] == [b"a state"]


@each("line", [b"", b"no json", b"[1]", b"\xff", b"1"])
def test_what_is_no_message_is_not_heard_again(line: bytes) -> None:
    lines = ControlLines()
    assert lines.remember(line) == {}
    assert lines.again() == []


@each("line", [b'{"add": 1}', b'{"add": {}}', b'{"remove": ["a"]}', b'{"remove": null}'])
def test_a_line_that_names_nobody_changes_nothing(line: bytes) -> None:
    lines = ControlLines()
    lines.remember(b'{"worker": "decode-0", "state": "ready"}')
    lines.remember(line)
    assert lines.again() == [b'{"worker": "decode-0", "state": "ready"}']
