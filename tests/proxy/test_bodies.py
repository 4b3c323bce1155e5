"""Properties of the bodies that the two legs get."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.pd.errors import ApiError
from pdserve.pd.requests import (
    INTERNAL,
    NOT_FOR_PREFILL,
    check_disaggregated,
    decode_body,
    encode,
    parse,
    prefill_body,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from([*INTERNAL, *NOT_FOR_PREFILL, "max_tokens", "max_completion_tokens", "prompt", "model"])
BODIES = st.dictionaries(NAMES | st.text(), JSON, max_size=8)
TRANSFER = {"transfer_id": "ours"}


@contextlib.contextmanager
def refusals_are_400() -> Iterator[None]:
    """Lets a 400 pass, and no other error."""
    try:
        yield
    except ApiError as error:
        if error.status != 400:
            raise


def escaped(text: str) -> str:
    """A JSON string in which every character is escaped."""
    units = text.encode("utf-16-be", "surrogatepass")
    return '"' + "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2)) + '"'


@given(BODIES)
def test_decode_gets_the_clients_body_and_our_transfer(body: dict[str, Any]) -> None:
    leg = json.loads(encode(decode_body(parse(json.dumps(body).encode()), TRANSFER)))
    expected = {name: value for name, value in body.items() if name not in INTERNAL}
    assert leg == expected | {"kv_transfer_params": TRANSFER}


@given(BODIES)
def test_prefill_always_is_one_token_that_only_length_can_end(body: dict[str, Any]) -> None:
    leg = prefill_body(parse(json.dumps(body).encode()), TRANSFER)
    assert (leg["max_tokens"], leg["stream"], leg["ignore_eos"]) == (1, False, True)
    assert leg.get("max_completion_tokens", 1) == 1
    assert leg["kv_transfer_params"] == TRANSFER
    assert not NOT_FOR_PREFILL & leg.keys()


@given(BODIES)
def test_prefill_keeps_every_field_that_it_need_not_change(body: dict[str, Any]) -> None:
    leg = prefill_body(parse(json.dumps(body).encode()), TRANSFER)
    ours = {*NOT_FOR_PREFILL, *INTERNAL, "max_tokens", "max_completion_tokens", "stream", "ignore_eos"}
    assert {n: v for n, v in leg.items() if n not in ours} == {n: v for n, v in body.items() if n not in ours}


@given(st.sampled_from(INTERNAL), JSON)
def test_no_spelling_of_an_internal_name_gets_through(name: str, value: object) -> None:
    raw = f"{{{escaped(name)}: {json.dumps(value)}, {json.dumps(name)}: 1}}"
    assert parse(raw.encode()) == {}


@given(st.binary(max_size=64))
def test_any_bytes_are_parsed_or_refused(raw: bytes) -> None:
    with refusals_are_400():
        assert isinstance(parse(raw), dict)


@given(BODIES)
def test_what_passes_the_checks_is_one_sequence_of_one_prompt(body: dict[str, Any]) -> None:
    with refusals_are_400():
        check_disaggregated("completions", body)
        assert body.get("n") in (None, 1)
        prompt = body["prompt"]
        assert isinstance(prompt, str) or len(prompt) == 1 or all(isinstance(token, int) for token in prompt)


@given(BODIES)
def test_checking_a_chat_fails_only_by_a_400(body: dict[str, Any]) -> None:
    with refusals_are_400():
        check_disaggregated("chat", body)


@pytest.mark.parametrize("text", ["0.123456789", "1e-7", "123456789012345678901234567890", '"\\ud83d\\ude00"', "1.0"])
def test_numbers_and_text_survive_the_way_to_decode(text: str) -> None:
    sent = json.loads(encode(decode_body(parse(f'{{"x": {text}}}'.encode()), TRANSFER)))["x"]
    assert (sent, type(sent)) == (json.loads(text), type(json.loads(text)))
