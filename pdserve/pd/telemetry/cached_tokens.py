"""The cached tokens in an answer's usage, corrected.

Decode counts all that it was sent by prefill as cached; only prefill knows what was in a cache. In a JSON text quotes
inside a string have a backslash, so that nothing here ever matches what a model has written.
"""

from __future__ import annotations

import re
from typing import Final

HINT: Final = b"cache"
"""Without it there is nothing to put right."""
USAGE: Final = b'"usage"'
"""Nor without this in a whole event."""
_LONGEST: Final = 512
"""Bytes of the longest passage that is replaced."""
_CACHED: Final = re.compile(rb'("cached_tokens" ?: ?)\d+')
_MESSAGES: Final = re.compile(rb'"usage" ?: ?\{[^{}]{0,400}\}')
"""Anthropic's usage, which is flat. Its input_tokens are those that were not cached: the sum is the prompt."""
_INPUT: Final = re.compile(rb'("input_tokens" ?: ?)(\d+)')
_READ: Final = re.compile(rb'("cache_read_input_tokens" ?: ?)(\d+)')


def with_cached_tokens(data: bytes, cached: int) -> bytes:
    """Return `data` with the numbers of a prompt of which `cached` tokens were in a cache. Everything else stays."""
    if b'"cache_read_input_tokens"' in data:
        data = _MESSAGES.sub(lambda usage: _messages_usage(usage[0], cached), data)
    # A template would be parsed again for each answer.
    return _CACHED.sub(lambda match: b"%b%d" % (match[1], cached), data)


def safe_length(data: bytes) -> int:
    """Return how much of `data` can be put right while what follows is not known yet."""
    end = max(0, len(data) - _LONGEST)
    for pattern in (_CACHED, _MESSAGES):
        for match in pattern.finditer(data, max(0, end - _LONGEST)):
            if match.start() < end < match.end():
                end = match.start()
    return end


def _messages_usage(usage: bytes, cached: int) -> bytes:
    computed, read = _INPUT.search(usage), _READ.search(usage)
    if computed is None or read is None:
        return usage
    prompt = int(computed[2]) + int(read[2])
    cached = min(cached, prompt)
    usage = _INPUT.sub(b"\\g<1>%d" % (prompt - cached), usage)
    return _READ.sub(b"\\g<1>%d" % cached, usage)
