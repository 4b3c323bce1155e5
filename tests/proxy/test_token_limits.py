"""Tokens a minute of a key: an answer's tokens are counted, whatever the client asks for and whenever it leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdserve.pd.errors import ApiError
from pdserve.pd.protocols.prefill_leg import bad_end, good_end
from pdserve.pd.requests.body import Body
from pdserve.pd.requests.dialects import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from pdserve.pd.telemetry.usage_counts import cached_in, of_answer
from pdserve.pd.telemetry.usage_meter import Fingerprints, UsageMeter, last_in, metered
from tests.proxy.deployment import MODEL, Deployment, keys_file
from tests.tables import each_row

LIMITED, FREE = "a-limited-key", "a-free-key"
USAGE, CONTINUOUS = {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}
PROMPT = "one two three"
CHAT_BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 7}
TEXT_BODY: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 7}


@pytest.fixture
def limited(deployment: Deployment, tmp_path: Path) -> Deployment:
    """1P1D and two keys: one with a limit of tokens, and one without."""
    keys = ("limited", LIMITED), ("free", FREE)
    return deployment.up(auth=keys_file(tmp_path, *keys, tokens_per_minute=1_000_000))


def stream(deployment: Deployment, key: str, path: str, body: dict[str, Any]) -> bytes:
    headers = {"authorization": f"Bearer {key}", "x-request-id": "the-same"}
    answer = deployment.proxy.http.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.content


@pytest.mark.parametrize("options", [None, {}, USAGE, CONTINUOUS, {"continuous_usage_stats": True}])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT_BODY), ("/v1/completions", TEXT_BODY)])
def test_the_client_gets_the_same_bytes_and_all_is_counted(
    limited: Deployment, path: str, body: dict[str, Any], n: int, options: dict[str, Any] | None
) -> None:
    whole = {**body, "stream": True, "n": n, **({} if options is None else {"stream_options": options})}
    # From now on the prompt is in a cache, and all answers say so.
    stream(limited, FREE, path, {**body, "stream": True})
    # Twice: what the engine calls itself is known the second time.
    for _ in range(2):
        assert stream(limited, LIMITED, path, whole) == stream(limited, FREE, path, whole)
    page = limited.proxy.http.get("/metrics").text
    total = next(line for line in page.splitlines() if line.startswith("pdserve_proxy_completion_tokens_total"))
    # The free key's count too where the client asks for usage.
    times = 4 if options and options.get("include_usage") else 2
    assert float(total.split()[1]) == times * 7 * n


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT_BODY),
        ("/v1/completions", TEXT_BODY),
        ("/v1/chat/completions", {**CHAT_BODY, "stream_options": USAGE}),
        ("/v1/messages", CHAT_BODY),
        ("/v1/responses", {"model": MODEL, "input": PROMPT, "max_output_tokens": 7}),
    ],
)
def test_who_leaves_in_the_middle_has_used_what_it_got(limited: Deployment, path: str, body: dict[str, Any]) -> None:
    limited.decodes[0].script(hold="token")
    headers = {"authorization": f"Bearer {LIMITED}"}
    with limited.proxy.http.stream("POST", path, json={**body, "stream": True}, headers=headers) as answer:
        # The first token, and not what comes before it.
        next(line for line in answer.iter_lines() if "delta" in line or line.startswith('data: {"id"'))
    while "pdserve_proxy_cancellations_total{" not in (page := limited.proxy.http.get("/metrics").text):
        pass
    limited.decodes[0].script(hold="")
    assert "pdserve_proxy_completion_tokens_total 1.0" in page


EVENT = b'data: {"id":"x","choices":[{"index":%d,"delta":{"content":"%s"},"logprobs":null,"finish_reason":%s}]%s}\n\n'
COUNT = b',"usage":{"prompt_tokens":5,"total_tokens":%d,"completion_tokens":%d,"completion_tokens_details":{"x":1}}'
NAMED = b',"system_fingerprint":"vllm-0.32.0-tp1"'
TOTAL = b'data: {"id":"x","choices":[]' + COUNT % (15, 10) + NAMED + b"}\n\n"
DONE = b"data: [DONE]\n\n"


def from_engine(index: int, text: bytes, tokens: int, finish: bytes = b"null") -> bytes:
    return EVENT % (index, text, finish, COUNT % (5 + tokens, tokens))


def to_client(index: int, text: bytes, finish: bytes = b"null") -> bytes:
    return EVENT % (index, text, finish, b"" if finish == b"null" else NAMED)


def test_last_events_wait_for_the_name_of_the_engine() -> None:
    prints = Fingerprints()
    sent = [
        (0, b"a", 3, b"null"),
        (1, b"b", 4, b"null"),
        (0, b"c", 4, b'"stop"'),
        (1, b"d", 6, b'"length"'),
    ]
    meter = UsageMeter(prints, hides=True, hides_total=True)
    got = [meter.events(from_engine(*event)) for event in sent]
    assert got[2:] == [b"", b""]
    assert meter.answer == 10
    got += [meter.events(TOTAL), meter.events(DONE)]
    expected = [to_client(index, text, finish) for index, text, _, finish in sent]
    assert b"".join(got) == b"".join(expected) + DONE
    assert (meter.prompt, meter.answer) == (5, 10)
    again = UsageMeter(prints, hides=True, hides_total=True)
    assert [again.events(from_engine(*event)) for event in sent] == expected
    prints.forget("")
    third = UsageMeter(prints, hides=True, hides_total=True)
    assert third.events(from_engine(*sent[2])) == b""
    # Cut before it was known: what the client would have had is not lost.
    assert third.rest() == EVENT % (0, b"c", b'"stop"', b"")


def test_the_text_of_a_model_is_not_taken_for_a_count() -> None:
    meter = UsageMeter(Fingerprints(), hides=True, hides_total=True)
    in_text = rb",\"usage\":{\"completion_tokens\":99}, \"choices\":[]"
    assert meter.events(from_engine(0, in_text, 2)) == to_client(0, in_text)
    assert meter.answer == 2


def test_a_larger_interval_between_events_hides_no_tokens() -> None:
    meter = UsageMeter(Fingerprints(), hides=True, hides_total=True)
    meter.events(from_engine(0, b"a lot of text", 1000))
    assert meter.answer == 1000


def test_an_engine_that_does_not_count_is_counted_by_its_text() -> None:
    meter = UsageMeter(Fingerprints(), hides=True, hides_total=True)
    texts = (b"a", b"x" * 40, b"", b"y" * 8, b'say \\"' + b"z" * 33 + b'\\"', b"b")
    for text in texts:
        event = EVENT % (0, text, b"null", b"")
        assert meter.without_usage(event) == event
    assert meter.answer == 1 + 10 + 0 + 2 + 10 + 1
    several = EVENT % (0, b"a", b"null", b"") + EVENT % (0, b"x" * 40, b"null", b"")
    assert meter.without_usage(several) == several
    assert meter.answer == 24 + 11


ECHO = b'"tools":[{"parameters":{"x":{},"usage":{"input_tokens":%s,"output_tokens":%s}}}]'
TOO_LARGE = b"9" * 400


@each_row("prompt, answer", [(b"0", b"0"), (b"-1000000", b"-5"), (TOO_LARGE, TOO_LARGE)])
def test_what_a_client_has_written_into_an_answer_is_not_its_usage(prompt: bytes, answer: bytes) -> None:
    own = b'"usage":{"input_tokens":500,"output_tokens":40,"output_tokens_details":{"reasoning_tokens":3}}'
    whole = b'{"id":"r",' + own + b"," + ECHO % (prompt, answer) + b"}"
    assert of_answer(whole) == (500, 40)
    event = b'event: response.completed\ndata: {"type":"response.completed","response":' + whole + b"}\n\n"
    meter = UsageMeter(Fingerprints())
    assert meter.events(event) == event
    assert (meter.prompt, meter.answer) == (500, 40)


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
    """As vLLM orders them: tools before the usage, the user behind it; of any length, with a limit of tokens or not."""
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
    meter = UsageMeter(Fingerprints())
    assert meter.events(last) == last
    assert (meter.prompt, meter.answer) == (50_000, 700)
    assert last_in(last, stream=True) == (50_000, 700)
    assert last_in(b'"instructions": "' + last, stream=True) == (50_000, 700), "of one that was cut"


@each_row("text", ["a", " token", "x" * 63, "\\n", ""])
def test_an_event_with_a_usage_is_never_taken_for_one_more_text(text: str) -> None:
    """Whatever its length: most events are not looked at beyond their end, as they are like the one before them."""
    of_text = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"%b"},"finish_reason":null}]}\n\n'
    meter = UsageMeter(Fingerprints())
    for _ in range(2):
        assert meter.without_usage(of_text % b"four") == of_text % b"four"
    assert meter.took(of_text % b"more")
    before = meter.answer
    assert before is not None
    assert meter.took(of_text % b"a" + of_text % b"eight888"), "two of them in one read"
    assert meter.answer == before + 1 + 2
    small = b',"usage":{"prompt_tokens":5,"completion_tokens":9}'
    for event in (
        of_text[:-6] % text.encode() + b"]" + small + b"}\n\n",
        b'data: {"id":"c","choices":[]' + small + b"}\n\n",
        b'data: {"id":"c","choices":[]' + small + b',"system_fingerprint":"%b"}\n\n' % (b"f" * len(text)),
    ):
        assert not meter.took(event)
        assert not meter.took(event + of_text % b"a")
        assert not meter.took(of_text % b"a" + event)
        meter.events(event)
        assert meter.answer == 9


def test_events_of_one_read_are_counted_as_if_each_had_come_alone() -> None:
    """However reads fall: an engine under load writes faster than the proxy reads."""
    of_text = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"%b"},"finish_reason":null}]}\n\n'
    finish = b'data: {"id":"c","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
    two = b'data: {"id":"c","choices":[{"delta":{"content":"abcd"}},{"delta":{"content":"efgh"}}]}\n\n'
    events = [of_text % (b"x" * size) for size in (1, 9, 40, 63, 64, 200, 2)] + [two, of_text % b"\\n", two, finish]
    events += [b": ping\n\n", *events]

    def counted(reads: list[bytes]) -> int | None:
        meter = UsageMeter(Fingerprints())
        for read in reads:
            if not meter.took(read):
                assert meter.without_usage(read) == read
        return meter.answer

    alone = counted(events)
    for size in range(1, len(events) + 1):
        assert counted([b"".join(events[at : at + size]) for at in range(0, len(events), size)]) == alone


def test_who_leaves_before_the_end_pays_for_its_prompt() -> None:
    """decode says it with every event; an estimate knows nothing of images and templates."""
    meter = UsageMeter(Fingerprints(), hides=True, hides_total=True)
    event = (
        b'data: {"choices":[{"index":0,"delta":{"content":"a"}}],"usage":{"prompt_tokens":50000,"completion_tokens":3}}'
    )
    assert meter.events(event + b"\n\n") == b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
    assert (meter.prompt, meter.answer) == (50_000, 3)


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
    meter = UsageMeter(Fingerprints())
    meter.part(b'{"id":"x",' + answer[1:])
    assert (meter.prompt, meter.answer) == (None, None)


def test_a_usage_with_many_details_counts() -> None:
    details = b",".join(b'"turn_%d_details":{"tokens":%d}' % (turn, turn) for turn in range(200))
    usage = b'"usage":{"input_tokens":200000,%s,"output_tokens":20000}' % details
    assert of_answer(b'{"id":"r",' + usage + b"}") == (200_000, 20_000)


def test_of_an_answer_in_parts_the_largest_usage_counts() -> None:
    own = b',"usage":{"input_tokens":500,"output_tokens":40}'
    answer = b'{"id":"r"' + own + b"," + ECHO % (b"0", b"0") + b"}"
    meter = UsageMeter(Fingerprints())
    for start in range(0, len(answer), 50):
        meter.part(answer[start : start + 50])
    assert (meter.prompt, meter.answer) == (500, 40)


def test_usage_is_found_wherever_it_stands() -> None:
    answer = b'{"choices":[{"text":"hi"}]' + COUNT % (12, 7) + b',"prompt_token_ids":[' + b"1," * 5000 + b"1]}"
    whole, pieces = UsageMeter(Fingerprints()), UsageMeter(Fingerprints())
    whole.part(answer)
    for start in range(0, len(answer), 40):
        pieces.part(answer[start : start + 40])
    assert (whole.prompt, whole.answer) == (pieces.prompt, pieces.answer) == (5, 7)


@each_row(
    "options, sent",
    [
        ("", {"include_usage": True, "continuous_usage_stats": True}),
        (',"stream_options":null', {"include_usage": True, "continuous_usage_stats": True}),
        (
            ',"stream_options":{"include_usage":0,"other":[1]}',
            {"include_usage": True, "other": [1], "continuous_usage_stats": True},
        ),
    ],
)
@each_row("stream", ["true", "1", '"on"'])
def test_decode_is_asked_to_count_and_other_options_stay(options: str, sent: dict[str, Any], stream: str) -> None:
    body, _ = metered(CHAT, Body(f'{{"messages":[],"stream":{stream}{options}}}'.encode()), Fingerprints())
    assert body.get("stream_options") == sent
    assert body.raw_value("stream") == stream.encode()


@each_row(
    "dialect, body",
    [
        (CHAT, b'{"stream":false}'),
        (CHAT, b'{"stream":"what"}'),
        (COMPLETIONS, b'{"stream":true,"stream_options":[]}'),
        (COMPLETIONS, b'{"stream":true,"stream_options":{"include_usage":"what"}}'),
        (RESPONSES, b'{"stream":true}'),
        (MESSAGES, b'{"stream":true}'),
    ],
)
def test_other_bodies_stay_as_they_are(dialect: Any, body: bytes) -> None:
    assert metered(dialect, Body(body), Fingerprints())[0].raw == body


@pytest.mark.parametrize(
    "options",
    ['{"a": 1e99999}', '{"a": "\\x"}', '{"include_usage": false, "x": "%s"}' % ("y" * 2000)],
    ids=["number", "escape", "long"],
)
def test_what_cannot_be_counted_is_refused_and_takes_nobodys_place(
    deployment: Deployment, tmp_path: Path, options: str
) -> None:
    deployment.up(auth=keys_file(tmp_path, ("team", LIMITED), max_requests=1, tokens_per_minute=1_000_000))
    headers = {"authorization": f"Bearer {LIMITED}", "content-type": "application/json"}
    bad = f'{{"model": "{MODEL}", "prompt": "hi", "stream": true, "stream_options": {options}}}'
    for _ in range(2):
        answer = deployment.proxy.http.post("/v1/completions", content=bad, headers=headers)
        assert answer.status_code == 400, answer.text
    assert deployment.proxy.http.post("/v1/completions", json=TEXT_BODY, headers=headers).status_code == 200


def test_tokens_of_an_answer_count_for_the_limit(deployment: Deployment, tmp_path: Path) -> None:
    deployment.up(auth=keys_file(tmp_path, ("team", LIMITED), tokens_per_minute=60))
    headers = {"authorization": f"Bearer {LIMITED}"}

    def ask() -> httpx.Response:
        body = {**TEXT_BODY, "max_tokens": 50, "stream": True}
        return deployment.proxy.http.post("/v1/completions", json=body, headers=headers)

    assert [ask().status_code for _ in range(2)] == [200, 429]
