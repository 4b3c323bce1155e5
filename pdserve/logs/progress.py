"""Tell what a starting process is doing, by its log, so that a slow start differs from a stalled one."""

from __future__ import annotations

import re

from pdserve.logs.lines import message

_FATAL = "EngineCore failed to start"
"""vLLM's last word on a start. Its processes may hang in their own shutdown after it and never end."""

_STEPS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), text)
    for pattern, text in (
        (r"^weights: (?!failed: )(?P<text>.+)", "{text}"),
        # vLLM 0.21 to 0.33, in the order of its lines
        (
            r"pdserve patches active: [\w, -]+ \(pid \d+, process (?:[\w.]*\.)?(?P<process>[\w-]+)\)",
            "patches are active in {process}",
        ),
        (r"Initializing a V1 LLM engine \(v(?P<version>[\w.+]+)\)", "engine core starts (vLLM {version})"),
        (r"Waiting for (?P<local>\d+) local, (?P<remote>\d+) remote core engine", "waiting for the engine core"),
        (r"Starting to load model ", "loading the model"),
        (r"Prefetching checkpoint files: +(?P<percent>\d+)%", "reading weights into memory: {percent} %"),
        (
            r"(?:[Ll]oading .*shards|Loading safetensors using [\w ]+): +(?P<percent>\d+)% ?(?:Completed)?"
            r" ?\|[^|]*?(?P<done>\d+)/(?P<all>\d+)",
            "loading weights: {percent} % ({done} of {all} shards)",
        ),
        (r"[Ll]oading .*shards: +(?P<percent>\d+)%", "loading weights: {percent} %"),
        (r"Loading weights took (?P<seconds>[\d.]+) seconds", "weights loaded in {seconds} s"),
        (r"Model loading took (?P<size>[\d.]+ GiB)", "model loaded ({size})"),
        (r"Dynamo bytecode transform time|Compiling a graph for", "compiling"),
        (r"torch\.compile took (?P<seconds>[\d.]+) s in total", "compiled in {seconds} s"),
        (r"KV cache size: (?P<tokens>[\d,]+) tokens", "KV cache: {tokens} tokens"),
        (r"Capturing .{0,40}CUDA graphs?.{0,40}?: +(?P<percent>\d+)%", "capturing graphs: {percent} %"),
        (r"Graph capturing finished in (?P<seconds>\d+) secs", "graphs captured in {seconds} s"),
        (r"Registering kv_caches|[Rr]egister(?:ing|ed) KV caches", "registering the KV cache"),
        (r"init engine \(.*\) took (?P<seconds>[\d.]+) s", "engine core ready after {seconds} s"),
        (r"Starting vLLM (?:API )?server .*?on ", "HTTP server starts"),
        (_FATAL, "the engine core has failed, its processes are ending"),
        # LMCache 0.5
        (r"Starting LMCache HTTP server on ", "LMCache starts (allocating L1)"),
        (r"Supported transfer mode: (?P<mode>\w+)", "transfer mode {mode}"),
        (r"LMCache zmq cache server is running on (?P<address>\S+)", "request socket on {address}"),
        # With a URL: Mooncake's bootstrap server, inside an engine, names a socket.
        (r"^INFO: +Uvicorn running on http", "HTTP server is up"),
    )
)


def describe(line: str) -> str | None:
    """Return the progress of a start in a log line, None for most lines."""
    text = message(line)
    for pattern, template in _STEPS:
        if match := pattern.search(text):
            return template.format(**{key: value for key, value in match.groupdict().items() if value is not None})
    return None


def is_fatal(line: str) -> bool:
    """Return whether a log line means that this start has failed for good, whatever still lives."""
    return _FATAL in message(line)
