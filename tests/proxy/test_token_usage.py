"""The tokens of prompt and answer that an answer reports, and the end of a prefill: the engine's word counts, whatever
else stands in it."""

from __future__ import annotations

import json
from typing import Any

from pdserve.pd.errors import ApiError
from pdserve.pd.protocols.prefill_leg import bad_end, good_end
from pdserve.pd.requests.dialects import RESPONSES
from pdserve.pd.serve.accounting import read_last_usage
from pdserve.pd.telemetry.usage_counts import cached_in, of_answer
from tests.tables import each_row

ECHO = b'"tools":[{"parameters":{"x":{},"usage":{"input_tokens":%s,"output_tokens":%s}}}]'
TOO_LARGE = b"9" * 400


@each_row("prompt, answer", [(b"0", b"0"), (b"-1000000", b"-5"), (TOO_LARGE, TOO_LARGE)])
def test_what_a_client_has_written_into_an_answer_is_not_its_usage(prompt: bytes, answer: bytes) -> None:
    own = b'"usage":{"input_tokens":500,"output_tokens":40,"output_tokens_details":{"reasoning_tokens":3}}'
    whole = b'{"id":"r",' + own + b"," + ECHO % (prompt, answer) + b"}"
    assert of_answer(whole) == (500, 40)
    event = b'event: response.completed\ndata: {"type":"response.completed","response":' + whole + b"}\n\n"
    assert read_last_usage(event, stream=True) == (500, 40)


@each_row(
    "usage, cached",
    [
        (b'{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":4}}', 4),
        (b'{"input_tokens":9,"input_tokens_details":{"cached_tokens":4}}', 4),
        (b'{"input_tokens":5,"cache_read_input_tokens":4}', 4),
        (b'{"prompt_tokens":9,"prompt_tokens_details":null}', None),
        (b'{"prompt_tokens_details":{"cached_tokens":' + TOO_LARGE + b"}}", None),
        (b"null", None),
    ],
)
def test_cached_tokens_are_those_of_the_engines_usage(usage: bytes, cached: int | None) -> None:
    tools = b'"tools":[{"parameters":{"cached_tokens":' + TOO_LARGE + b',"cache_read_input_tokens":7}}]'
    assert cached_in(b'{"id":"r",' + tools + b',"usage":' + usage + b"}") == cached


@each_row(
    "answer",
    [
        b'{"choices":[5]}',
        b'{"choices":5}',
        b'{"choices":{"a":1}}',
        b'{"choices":"abc"}',
        b"null",
        b"[]",
        b"",
        b"x",
        b"[" * 50000,
        b'{"a":' * 20000,
        b'{"choices":[{"finish_reason":[]}]}'[:-4],
    ],
)
def test_a_prefill_whose_answer_cannot_be_read_has_failed(answer: bytes) -> None:
    assert bad_end(answer) == "an unreadable answer"


@each_row("reason, end", [(b'"abort"', "abort"), (b'"error"', "error"), (b'"stop"', None)])
def test_a_prefill_that_was_aborted_has_failed(reason: bytes, end: str | None) -> None:
    assert bad_end(b'{"choices":[{"finish_reason":' + reason + b"}]}") == end


@each_row(
    "echoed",
    [
        {"user": "usage"},
        {"user": "message_start"},
        {"user": 'event: message_start "usage": {"output_tokens": 1}'},
        {"tools": [{"parameters": {"choices": [1], "index": 0}}]},
        {"tools": [{"parameters": {"a": 1, "usage": {"input_tokens": 1, "output_tokens": 1 << 52}}}]},
        {"metadata": {"type": "message_start"}, "user": "usage"},
    ],
)
@each_row("padding", [0, 5000])
def test_whatever_an_event_repeats_of_a_request_its_own_usage_counts(echoed: dict[str, Any], padding: int) -> None:
    """As vLLM orders them: tools before the usage, the user behind it; of any length."""
    response = {
        "instructions": "x" * padding,
        "tools": echoed.get("tools", []),
        "metadata": echoed.get("metadata"),
        "usage": {"input_tokens": 50_000, "output_tokens": 700, "output_tokens_details": {"reasoning_tokens": 0}},
        "user": echoed.get("user"),
    }
    last = (
        b"event: response.completed\ndata: %b\n\n"
        % json.dumps({"type": "response.completed", "sequence_number": 9, "response": response}).encode()
    )
    assert read_last_usage(last, stream=True) == (50_000, 700)
    assert read_last_usage(b'"instructions": "' + last, stream=True) == (50_000, 700), "of one that was cut"


def test_a_huge_echoed_number_ends_no_error() -> None:
    event = RESPONSES.error_event(
        ApiError(504, "late"), b'"sequence_number": 7, "tools": "sequence_number": ' + b"9" * 4300
    )
    assert json.loads(event.partition(b"data: ")[2])["sequence_number"] == 8


@each_row(
    "answer",
    [
        b'{"choices":[{"text":"stop","finish_reason":"abort"}]}',
        b'{"choices":[{"text":"a","logprobs":{"tokens":["length"]},"finish_reason":"error"}]}',
    ],
)
def test_a_token_of_a_prefill_is_not_its_end(answer: bytes) -> None:
    assert not good_end(answer)
    assert bad_end(answer) is not None


@each_row("count", [b"-1", TOO_LARGE, b"1.5", b'"7"'])
def test_what_is_no_number_of_tokens_is_none(count: bytes) -> None:
    answer = b'{"usage":{"prompt_tokens":%s,"completion_tokens":3}}' % count
    assert of_answer(answer) == (None, None)
    assert read_last_usage(b'{"id":"x",' + answer[1:], stream=False) == (None, None)


def test_a_usage_with_many_details_counts() -> None:
    details = b",".join(b'"turn_%d_details":{"tokens":%d}' % (turn, turn) for turn in range(200))
    usage = b'"usage":{"input_tokens":200000,%s,"output_tokens":20000}' % details
    assert of_answer(b'{"id":"r",' + usage + b"}") == (200_000, 20_000)


def test_of_a_stream_that_counts_in_each_event_the_last_one_counts() -> None:
    """Who asks for that and leaves in the middle has got so much."""
    usage = b'"usage":{"prompt_tokens":5,"completion_tokens":%d}'
    event = b'data: {"choices":[{"index":0,"delta":{"content":"%s"}}],' + usage + b"}\n\n"
    in_text = rb",\"usage\":{\"completion_tokens\":99}"
    assert read_last_usage(event % (b"a", 1) + event % (in_text, 2), stream=True) == (5, 2)
    assert read_last_usage(b'data: {"choices":[]}\n\n', stream=True) == (None, None)
