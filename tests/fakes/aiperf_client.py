"""A stand-in for AIPerf: its command line, the parts of its configuration that pdserve writes, its records.

    aiperf_client.py -I -m aiperf profile --config FILE
    aiperf_client.py -I -c CODE                     prints the version, as the check of --setup asks it

It reads traces of its Mooncake format and fixed lengths. Sessions go on turn by turn, at a concurrency.
FAKE_AIPERF=die ends with code 1 and no records.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import httpx

# Started by path, from any folder: the repository, not this folder, is where modules come from.
sys.path[0] = str(Path(__file__).resolve().parents[2])

from tests.fakes.bench_client import ask  # noqa: E402


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


async def profile(config: dict[str, Any]) -> None:
    benchmark = config["benchmark"]
    endpoint = benchmark["endpoint"]
    assert endpoint["apiKey"] == "${OPENAI_API_KEY}"
    path = "/v1/chat/completions" if endpoint["type"] == "chat" else "/v1/completions"
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    places = asyncio.Semaphore(benchmark["profiling"].get("concurrency", 64))
    records: list[Any] = []
    async with httpx.AsyncClient(base_url=endpoint["url"], headers=headers, timeout=60) as client:

        async def play(name: str, turns: list[dict[str, Any]]) -> None:
            session = {endpoint["sessionHeader"]: str(uuid.uuid4())}
            async with places:
                history: list[dict[str, str]] = []
                for index, turn in enumerate(turns):
                    body = turn
                    if "said" in turn:  # each turn follows the model's own answer to the one before
                        history.append({"role": "user", "content": turn["said"]})
                        body = {"messages": history, "max_tokens": turn["max_tokens"]}
                    wall = time.time_ns()
                    answer = await ask(
                        client, path, {"model": benchmark["model"], **body, **endpoint["extra"]}, session
                    )
                    history.append({"role": "assistant", "content": answer.text})
                    metrics: dict[str, Any] = {f"usage_{kind}": tokens for kind, tokens in answer.usage.items()}
                    if answer.chunks:
                        metrics["time_to_first_token"] = (answer.chunks[0] - answer.began) * 1e3
                        metrics["request_latency"] = (answer.chunks[-1] - answer.began) * 1e3
                        metrics["inter_chunk_latency"] = [seconds * 1e3 for seconds in answer.between]
                    about = {
                        "x_correlation_id": session[endpoint["sessionHeader"]],
                        "request_start_ns": wall,
                        "request_end_ns": time.time_ns(),
                        "benchmark_phase": "profiling",
                        "was_cancelled": False,
                        "conversation_id": name,
                        "turn_index": index,
                    }
                    values = {name: {"value": value} for name, value in metrics.items()}
                    records.append({"metadata": about, "metrics": values, "error": None})

        await asyncio.gather(*(play(*each) for each in sessions(benchmark, config["randomSeed"]).items()))
    artifacts = Path(benchmark["artifacts"]["dir"])
    artifacts.mkdir(parents=True)
    (artifacts / "profile_export.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))


def main() -> None:
    if "-c" in sys.argv:
        print("0.13.0")
        return
    if os.environ.get("FAKE_AIPERF") == "die":
        sys.exit("TokenizerError: Failed to load tokenizer")
    asyncio.run(profile(json.loads(Path(sys.argv[sys.argv.index("--config") + 1]).read_text())))


if __name__ == "__main__":
    main()
