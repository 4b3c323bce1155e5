"""A stand-in for `vllm bench serve`: its options as far as pdserve uses them, its requests, its result file.

    bench_client.py -P PROGRAM --base-url URL --served-model-name N --random-input-len N --random-output-len N
        --num-prompts N --max-concurrency N | --request-rate R --seed N --extra-body JSON
        --result-dir D --result-filename F            (other options are ignored)

FAKE_CLIENT=die ends with code 3 and no result; hang never ends; other-tokenizer sends prompts of twice the length.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

FAULT = os.environ.get("FAKE_CLIENT", "")


@dataclass
class Answer:
    """A streamed answer: when its request was sent and each of its chunks came, in seconds, and what was in them."""

    began: float = field(default_factory=time.perf_counter)
    chunks: list[float] = field(default_factory=list)
    usage: dict[str, int] = field(default_factory=dict)
    text: str = ""
    status: int = 0
    error: str = ""

    @property
    def between(self) -> list[float]:
        return [after - before for before, after in itertools.pairwise(self.chunks)]


async def ask(client: httpx.AsyncClient, path: str, body: dict[str, Any], headers: Mapping[str, str] = {}) -> Answer:
    answer = Answer()
    streamed = {"stream": True, "stream_options": {"include_usage": True}, **body}
    try:
        async with client.stream("POST", path, json=streamed, headers=headers) as response:
            answer.status = response.status_code
            if response.status_code != 200:
                answer.error = response.reason_phrase
            async for line in response.aiter_lines():
                event = json.loads(line.removeprefix("data: ")) if line.startswith("data: {") else {}
                for choice in event.get("choices", ()):
                    if text := choice.get("text") or choice.get("delta", {}).get("content"):
                        answer.chunks.append(time.perf_counter())
                        answer.text += text
                answer.usage |= event.get("usage") or {}
    except httpx.HTTPError as error:
        answer.error = f"Traceback (most recent call last):\n{error!r}"
    return answer


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
    same = {"model": args.served_model_name, "max_tokens": args.random_output_len, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    async with httpx.AsyncClient(base_url=args.base_url, headers=headers, timeout=60) as client:

        async def limited(prompt: list[int]) -> Answer:
            async with places:
                return await ask(client, "/v1/completions", {**same, "prompt": prompt, **args.extra_body})

        answers = await asyncio.gather(*map(limited, prompts))
    result = {
        "start_times": [each.began for each in answers],
        "input_lens": [each.usage.get("prompt_tokens", length) for each in answers],
        # As the client does, it counts what came when no usage did.
        "output_lens": [each.usage.get("completion_tokens", len(each.chunks)) for each in answers],
        "ttfts": [each.chunks[0] - each.began if each.chunks else 0.0 for each in answers],
        "itls": [each.between for each in answers],
        "latencies": [0.0 if each.error or not each.chunks else each.chunks[-1] - each.began for each in answers],
        "errors": [each.error for each in answers],
    }
    Path(args.result_dir, args.result_filename).write_text(json.dumps(result))


if __name__ == "__main__":
    asyncio.run(main())
