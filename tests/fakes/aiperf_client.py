"""A stand-in for AIPerf: its command line, the parts of its configuration that pdserve writes, its records.

    aiperf_client.py -I -m aiperf profile --config FILE
    aiperf_client.py -I -c CODE                     prints the version, as the check of --setup asks it

It reads traces of its Mooncake format and fixed lengths. Sessions go on turn by turn, at a concurrency.
FAKE_AIPERF=die ends with code 1 and no records; wrong-length asks for half of each answer; hang leaves a temporary file
and does not end before it gets a TERM.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import httpx

FAULT = os.environ.get("FAKE_AIPERF", "")


def sessions(benchmark: dict[str, Any], seed: int) -> dict[str, list[dict[str, Any]]]:
    """By id: what each turn adds to the body of a request."""
    dataset = benchmark["dataset"]
    if dataset["type"] == "synthetic":
        isl, osl = (int(dataset["prompts"][name]["mean"]) for name in ("isl", "osl"))
        return {
            f"session_{n:06}": [{"prompt": [97 + (seed + 7 * n + i) % 26 for i in range(isl)], "max_tokens": osl}]
            for n in range(dataset["entries"])
        }
    grouped: dict[str, list[dict[str, Any]]] = {}
    for line in Path(dataset["path"]).read_text().splitlines():
        row = json.loads(line)
        shown = {"messages": row["messages"]} if "messages" in row else {"said": text(row, dataset["blockSize"])}
        grouped.setdefault(row["session_id"], []).append({**shown, "max_tokens": row["output_length"]})
    return grouped


def text(row: dict[str, Any], block: int) -> str:
    """Of the row's length, and for equal hash ids the same."""
    blocks = [f"{number:08}".ljust(block, ".") for number in row["hash_ids"]]
    return "".join(blocks)[: row["input_length"]]


async def ask(
    client: httpx.AsyncClient, benchmark: dict[str, Any], turn: dict[str, Any], session: str
) -> tuple[Any, str]:
    """Its record, and the text of the answer."""
    endpoint = benchmark["endpoint"]
    path = "/v1/chat/completions" if endpoint["type"] == "chat" else "/v1/completions"
    body = {
        "model": benchmark["model"],
        "stream": True,
        "stream_options": {"include_usage": True},
        **turn,
        **endpoint["extra"],
    }
    if FAULT == "wrong-length":
        body["max_tokens"] = max(1, body["max_tokens"] // 2)
    wall, began = time.time_ns(), time.perf_counter_ns()
    chunks: list[int] = []
    answer = ""
    metrics: dict[str, Any] = {}
    error = None
    async with client.stream("POST", path, json=body, headers={endpoint["sessionHeader"]: session}) as response:
        if response.status_code != 200:
            error = {"code": response.status_code, "type": "HTTPError", "message": response.reason_phrase}
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if event.get("usage"):
                metrics["usage_prompt_tokens"] = event["usage"]["prompt_tokens"]
                metrics["usage_completion_tokens"] = event["usage"]["completion_tokens"]
            elif event.get("choices") and (
                event["choices"][0].get("text") or event["choices"][0].get("delta", {}).get("content")
            ):
                chunks.append(time.perf_counter_ns())
                answer += event["choices"][0].get("delta", {}).get("content") or ""
    if chunks:
        metrics["time_to_first_token"] = (chunks[0] - began) / 1e6
        metrics["request_latency"] = (chunks[-1] - began) / 1e6
        metrics["inter_chunk_latency"] = [(b - a) / 1e6 for a, b in itertools.pairwise(chunks)]
    about = {
        "x_correlation_id": session,
        "request_start_ns": wall,
        "request_end_ns": time.time_ns(),
        "benchmark_phase": "profiling",
        "was_cancelled": False,
    }
    record = {"metadata": about, "metrics": {name: {"value": v} for name, v in metrics.items()}, "error": error}
    return record, answer


async def profile(config: dict[str, Any]) -> None:
    benchmark = config["benchmark"]
    assert benchmark["endpoint"]["apiKey"] == "${OPENAI_API_KEY}"
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    places = asyncio.Semaphore(benchmark["profiling"].get("concurrency", 64))
    records: list[Any] = []
    async with httpx.AsyncClient(base_url=benchmark["endpoint"]["url"], headers=headers, timeout=60) as client:

        async def play(name: str, turns: list[dict[str, Any]]) -> None:
            session = str(uuid.uuid4())
            async with places:
                history: list[dict[str, str]] = []
                for index, turn in enumerate(turns):
                    body = turn
                    if "said" in turn:  # each turn follows the model's own answer to the one before
                        history.append({"role": "user", "content": turn["said"]})
                        body = {"messages": history, "max_tokens": turn["max_tokens"]}
                    record, answer = await ask(client, benchmark, body, session)
                    history.append({"role": "assistant", "content": answer})
                    record["metadata"] |= {"conversation_id": name, "turn_index": index}
                    records.append(record)

        await asyncio.gather(*(play(*each) for each in sessions(benchmark, config["randomSeed"]).items()))
    artifacts = Path(benchmark["artifacts"]["dir"])
    artifacts.mkdir(parents=True)
    (artifacts / "profile_export.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))


def main() -> None:
    if "-c" in sys.argv:
        print("0.13.0")
        return
    if FAULT == "hang":
        Path(os.environ["TMPDIR"], "prompts").write_text("a prompt")
        signal.pause()
    if FAULT == "die":
        sys.exit("TokenizerError: Failed to load tokenizer")
    asyncio.run(profile(json.loads(Path(sys.argv[sys.argv.index("--config") + 1]).read_text())))


if __name__ == "__main__":
    main()
