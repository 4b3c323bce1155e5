"""The whole path on the real stack: up, status, verify, chat with the official client, faults, down, nothing left."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic import Anthropic
from openai import OpenAI
from openai.types.chat import ChatCompletionUserMessageParam

from pdserve.system import procfs
from pdserve.system.process import send
from tests.launch.deployment import Deployment, pdserve, read_json, wait_until
from tests.real.conftest import assert_proven, member, status_of_all
from tests.real.reached import SECONDS, Reached
from tests.real.tiny_cpu.conftest import ABORT_SECONDS

pytestmark = pytest.mark.real

PROOFS = ("endpoints", "requests", "transfer", "stored", "output", "reload", "clean")


@pytest.fixture
def client(tiny: Deployment) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{tiny.state().endpoint}/v1", api_key="none", max_retries=0) as openai:
        yield openai


def test_status_shows_the_figures_of_the_engines(tiny: Deployment) -> None:
    code, status = status_of_all()
    assert (code, status["phase"]) == (0, "ready")
    assert {name: process["phase"] for name, process in status["processes"].items()} == dict.fromkeys(
        ("lmcache-0", "prefill-0", "decode-0", "proxy"), "ready"
    )
    assert status["processes"]["lmcache-0"]["lmcache"]["workers"] >= 1, "one that was killed is there for a while"
    assert status["processes"]["decode-0"]["engine"]["running"] == 0
    assert status["processes"]["prefill-0"]["open_ports"], "ports that cannot be pinned are read after the start"
    up = tiny.events("up")[0]
    parts = ("lmcache_seconds", "engine_seconds", "canary_seconds", "orchestration_seconds")
    assert up["total_seconds"] == pytest.approx(sum(up[part] for part in parts), abs=0.01)


def test_every_process_of_every_engine_proves_its_patches(tiny: Deployment) -> None:
    plan = tiny.run.read_plan()
    status = read_json(pdserve("status", "--json")[1])
    for name in ("prefill-0", "decode-0"):
        wanted = plan.process(name).patches
        assert "mooncake-cpu-device" in wanted
        reported = status["processes"][name]["patch_processes"]
        assert sorted(record["kind"] for record in reported) == ["api-server", "engine-core"]
        for record in reported:
            assert (tuple(record["active"]), record["skipped"], record["allowed_unknown"]) == (wanted, {}, []), record


async def test_the_effects_of_patches_are_on_the_engines_own_metrics(tiny: Deployment, reached: Reached) -> None:
    line = 'pdserve_patch_active_processes{patch="multiconnector-prom-metrics"} 2.0'
    assert line in await reached.page("prefill-0")


def test_every_proof_is_proven(tiny: Deployment) -> None:
    assert_proven(*PROOFS)


def test_a_streamed_chat_with_the_official_client(client: OpenAI) -> None:
    question = "Say something, anything at all, about prefill and decode."
    messages: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": question}]
    stream = client.chat.completions.create(
        model="tiny",
        messages=messages,
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    plain = client.chat.completions.create(model="tiny", messages=messages, max_tokens=12, temperature=0)
    assert streamed == plain.choices[0].message.content
    assert plain.choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_a_request_cannot_reach_into_the_transfer(tiny: Deployment, client: OpenAI) -> None:
    """Handed to an engine, these parameters end its EngineCore or point it at an address of the client's choice."""
    evil = {"do_remote_prefill": True, "do_remote_decode": True, "remote_bootstrap_addr": "http://127.0.0.1:1"}
    answer = client.completions.create(
        model="tiny", prompt="hello", max_tokens=2, extra_body={"kv_transfer_params": evil}
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2
    assert read_json(pdserve("status", "--json")[1])["phase"] == "ready"


def test_several_prompts_and_several_answers_are_those_of_one_engine(client: OpenAI) -> None:
    """One transfer feeds one sequence: vLLM itself answers a list over prefill and decode with other prompts' KV."""
    prompts = ["one, two, three", "a quite different beginning", "and a third"]
    alone = [
        client.completions.create(model="tiny", prompt=prompt, max_tokens=8, temperature=0).choices[0].text
        for prompt in prompts
    ]
    together = client.completions.create(model="tiny", prompt=prompts, max_tokens=8, temperature=0)
    assert [choice.text for choice in together.choices] == alone
    two = [
        client.completions.create(model="tiny", prompt=prompts[0], n=2, max_tokens=8, temperature=1, seed=7)
        for _ in range(2)
    ]
    assert len({choice.text for choice in two[0].choices}) == 2
    assert [choice.text for choice in two[0].choices] == [choice.text for choice in two[1].choices]
    scored = client.completions.create(
        model="tiny", prompt=prompts[0], max_tokens=8, temperature=0, extra_body={"prompt_logprobs": 0}
    )
    assert scored.choices[0].text == alone[0]
    assert len(scored.choices[0].model_extra["prompt_logprobs"]) > 1  # type: ignore[index]


def test_all_generating_apis_are_answered(tiny: Deployment, client: OpenAI) -> None:
    response = client.responses.create(model="tiny", input="hello", max_output_tokens=8, temperature=0)
    assert response.usage is not None
    assert response.usage.output_tokens == 8
    messages = Anthropic(base_url=tiny.state().endpoint, api_key="none", max_retries=0)
    greedy = {"temperature": 0}
    answer = messages.messages.create(
        model="tiny", max_tokens=8, messages=[{"role": "user", "content": "hello"}], extra_body=greedy
    )
    assert answer.usage.output_tokens <= 8
    with messages.messages.stream(
        model="tiny", max_tokens=8, messages=[{"role": "user", "content": "hello"}], extra_body=greedy
    ) as stream:
        assert stream.get_final_text() == "".join(block.text for block in answer.content if block.type == "text")
    page = httpx.get(f"{tiny.state().endpoint}/metrics", trust_env=False, timeout=60).text
    assert 'disagg_decisions_total{decision="disaggregated",why="disaggregated"}' in page
    for path in ("/v1/responses", "/v1/messages"):
        assert f'requests_total{{path="{path}",status="200"}}' in page


def test_engines_refuse_whoever_has_no_key(tiny: Deployment) -> None:
    for process in tiny.run.read_plan().proxy.workers:
        body = {"model": "tiny", "prompt": "x"}
        answer = httpx.post(f"{process.url}/v1/completions", json=body, trust_env=False, timeout=60)
        assert answer.status_code == 401


REFUSED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", {"model": "tiny", "messages": [], "max_tokens": 3}),
    ("/v1/chat/completions", {"model": "nobody", "messages": [{"role": "user", "content": "hi"}]}),
    ("/v1/completions", {"model": "nobody", "prompt": "hi"}),
    ("/v1/completions", {"model": "tiny", "prompt": [7] * 9000, "max_tokens": 3}),
    ("/v1/responses", {"model": "nobody", "input": "hi"}),
)


async def test_the_proxy_refuses_in_the_words_of_the_engine(reached: Reached) -> None:
    for path, body in REFUSED:
        engine = await reached.ask(body, of="decode-0", path=path)
        proxy = await reached.ask(body, path=path)
        assert (proxy.status_code, proxy.json()) == (engine.status_code, engine.json()), (path, body)


async def test_what_engines_refuse_or_fail_with_costs_the_others_nothing(tiny: Deployment, reached: Reached) -> None:
    """440 prompts that were too long once held 1,000 sockets of decode for a minute, in which every request failed."""
    url = tiny.state().endpoint
    text = {"model": "tiny", "messages": [{"role": "user", "content": "hello world " * 20_000}]}
    hostile: list[dict[str, Any]] = [text] * 440
    # Prefill's leg of these has nothing wrong.
    hostile += [
        {"model": "tiny", "messages": [{"role": "user", "content": f"{i} " * 300}], "stop": [""]} for i in range(9)
    ]
    hostile += [{"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "structured_outputs": "x"}] * 20
    before = {name: files(tiny, name) for name in reached.engines}

    def attack() -> set[int]:
        with httpx.Client(base_url=url, trust_env=False, timeout=120) as client:
            return {client.post("/v1/chat/completions", json=body).status_code for body in hostile}

    with ThreadPoolExecutor() as pool:
        attacker = pool.submit(attack)
        asked = 0
        while not attacker.done():
            await reached.tokens(f"prompt {asked}", 4)
            asked += 1
        assert attacker.result() == {400, 500}
    assert {name: files(tiny, name) <= count + 50 for name, count in before.items()} == dict.fromkeys(before, True)
    await reached.free(reached.engines, 0.75 * ABORT_SECONDS)


def test_a_bench_measures_what_was_asked_for_and_that_the_kv_was_transferred(tiny: Deployment) -> None:
    # Long enough that its client's use of CPU can be measured on a fast machine too.
    requests, length, answer = 16, 600, 64
    lengths = ("--input-tokens", str(length), "--output-tokens", str(answer), "--requests", str(requests))
    code, output = pdserve("bench", "--json", "--concurrency", "2", "--repeats", "1", "--warmup", "2", *lengths)
    result, _ = json.JSONDecoder().raw_decode(output, output.index("{\n"))
    (measured,) = result["measurements"]
    figures, window, verdict = measured["figures"], measured["window"], measured["verdict"]
    # On a machine with two cores the client may wait for the engines' threads: that alone may not count.
    assert {reason["check"] for reason in verdict["reasons"]} <= {"client-cpu"}, output
    assert code == (9 if verdict["reasons"] else 0)
    assert not verdict["unchecked"], verdict
    assert (figures["completed"], figures["output_tokens"]) == (requests, requests * answer)
    prompts = figures["input_tokens"]
    assert abs(prompts - requests * length) <= 2 * requests
    # Random prompts of so small a vocabulary may share a first block, which is in the engine's own cache then.
    prefill, decode = window["prefill"], window["decode"]
    assert (prefill["computed"] + prefill["local_hits"], prefill["received"]) == (prompts, 0)
    assert decode["received"] + decode["local_hits"] + decode["computed"] == prompts
    assert prefill["computed"] >= decode["received"] >= 0.9 * prompts
    assert decode["computed"] <= requests
    assert window["lmcache"]["written"] >= requests * (length // 256)
    assert tiny.run.read_key() not in Path(result["folder"], measured["log"]).read_text()


def files(tiny: Deployment, engine: str) -> int:
    """Descriptors of the engine's process that has most of them."""
    root = tiny.id_of(engine).pid
    return max(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in (root, *procfs.descendants(root)))


def test_a_killed_lmcache_comes_back_and_stores_again_and_requests_wait_for_a_killed_engine_core(
    tiny: Deployment,
) -> None:
    """Both at once, because a start costs much. There is one decode, which is started again."""
    before = {name: tiny.id_of(name) for name in ("lmcache-0", "prefill-0")}
    tiny.send_signal("lmcache-0", signal.SIGKILL)
    assert send(member(tiny, "decode-0", "VLLM::EngineCor"), signal.SIGKILL)
    tiny.wait_for("died", name="decode-0")
    body = {"model": "tiny", "prompt": "who waits is served", "max_tokens": 2}
    while (code := tiny.post("/v1/completions", body)[0]) == 503:  # a slow machine takes longer than they wait
        pass
    assert code == 200
    tiny.wait_for("died", name="lmcache-0")
    wait_until("all of it serves", lambda: tiny.state().phase == "ready", SECONDS, why=tiny.post_mortem)
    assert tiny.id_of("lmcache-0") != before["lmcache-0"]
    assert tiny.id_of("prefill-0") == before["prefill-0"]
    assert_proven(*PROOFS)
