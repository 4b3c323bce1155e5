"""Streams one chat answer with the official openai client: what any client of the deployment does."""

from __future__ import annotations

import argparse
import sys
import time

from openai import OpenAI, OpenAIError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="http://127.0.0.1:8000/v1")
    parser.add_argument("prompt")
    parser.add_argument("--max-tokens", type=int, default=48)
    flags = parser.parse_args()
    start = time.monotonic()
    first: float | None = None
    chunks = 0
    try:
        client = OpenAI(base_url=flags.url, api_key="none", max_retries=0)
        stream = client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=[{"role": "user", "content": flags.prompt}],
            max_tokens=flags.max_tokens,
            temperature=0,
            stream=True,
        )
        for chunk in stream:
            if chunk.choices and (text := chunk.choices[0].delta.content):
                first = first or time.monotonic() - start
                chunks += 1
                print(text, end="", flush=True)
    except OpenAIError as error:
        print(f"\nno answer from {flags.url}: {error}", file=sys.stderr)
        return 1
    if first is None:
        print(f"{flags.url} streamed nothing", file=sys.stderr)
        return 1
    print(f"\n({chunks} chunks, the first after {first:.2f} s, all in {time.monotonic() - start:.2f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
