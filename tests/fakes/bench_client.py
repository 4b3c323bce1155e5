"""A stand-in for `vllm bench serve`: its options as far as pdserve uses them, its requests, its result file.

    bench_client.py -P PROGRAM --base-url URL --served-model-name N --random-input-len N --random-output-len N
        --num-prompts N --max-concurrency N | --request-rate R --seed N --extra-body JSON
        --result-dir D --result-filename F            (other options are ignored)

FAKE_CLIENT=die ends with code 3 and no result; hang never ends; other-tokenizer sends prompts of twice the length;
busy computes for half a second beside its requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import httpx

FAULT = os.environ.get("FAKE_CLIENT", "")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("-P", dest="program")
    for name in ("--base-url", "--served-model-name", "--result-dir", "--result-filename"):
        parser.add_argument(name, required=True)
    for name in ("--random-input-len", "--random-output-len", "--num-prompts", "--seed"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--max-concurrency", type=int, default=64)
    parser.add_argument("--extra-body", type=json.loads, required=True)
    return parser.parse_known_args()[0]


async def ask(client: httpx.AsyncClient, args: argparse.Namespace, prompt: list[int]) -> dict[str, Any]:
    body = {
        "model": args.served_model_name,
        "prompt": prompt,
        "max_tokens": args.random_output_len,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **args.extra_body,
    }
    began = last = time.perf_counter()
    record: dict[str, Any] = {"start": began, "ttft": 0.0, "itl": [], "input": len(prompt), "output": 0, "error": ""}
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                return record | {"error": response.reason_phrase, "latency": 0.0}
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event, now = json.loads(line.removeprefix("data: ")), time.perf_counter()
                if event.get("choices"):
                    if record["ttft"]:
                        record["itl"].append(now - last)
                    else:
                        record["ttft"] = now - began
                    last = now
                elif usage := event.get("usage"):
                    record |= {"input": usage["prompt_tokens"], "output": usage["completion_tokens"]}
    except httpx.HTTPError as error:
        return record | {"error": f"Traceback (most recent call last):\n{error!r}", "latency": 0.0}
    # As the client does, it counts what came when no usage did.
    output = record["output"] or (len(record["itl"]) + 1 if record["ttft"] else 0)
    return record | {"latency": last - began, "output": output}


async def main() -> None:
    args = arguments()
    if FAULT == "die":
        sys.exit("ValueError: the tokenizer cannot be loaded")
    if FAULT == "hang":
        await asyncio.Event().wait()
    numbers = random.Random(args.seed)
    length = args.random_input_len * (2 if FAULT == "other-tokenizer" else 1)
    prompts = [[numbers.randrange(97, 123) for _ in range(length)] for _ in range(args.num_prompts)]
    places = asyncio.Semaphore(args.max_concurrency)
    key = os.environ["OPENAI_API_KEY"]
    async with httpx.AsyncClient(
        base_url=args.base_url, headers={"Authorization": f"Bearer {key}"}, timeout=60, trust_env=True
    ) as client:

        async def limited(prompt: list[int]) -> dict[str, Any]:
            async with places:
                return await ask(client, args, prompt)

        records = await asyncio.gather(*map(limited, prompts))
    names = {
        "start_times": "start",
        "input_lens": "input",
        "output_lens": "output",
        "ttfts": "ttft",
        "itls": "itl",
        "latencies": "latency",
        "errors": "error",
    }
    result = {name: [record[key] for record in records] for name, key in names.items()}
    Path(args.result_dir, args.result_filename).write_text(json.dumps(result))


if __name__ == "__main__":
    asyncio.run(main())
