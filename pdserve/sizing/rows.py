"""A sizing as lines that a reader sees: in `pdserve plan`, and beside what was measured. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from pdserve.sizing.engines import RoleSize
from pdserve.sizing.given import GIB, Span
from pdserve.sizing.lmcache import L1Size
from pdserve.sizing.whole import Sizing

_MIB, _KIB = 1 << 20, 1 << 10
_UNKNOWN = "not known"


def rows(sizing: Sizing) -> Iterator[tuple[str, str, str]]:
    """What it is about, what it is, and its value."""
    yield sizing.name, "model", f"{sizing.model} ({sizing.architecture})"
    if sizing.lacking is not None:
        yield sizing.name, "weights", f"not counted: this machine lacks {sizing.lacking}"
    for role in sizing.roles:
        yield from ((str(role.role), label, value) for label, value in _role(role))
    for server in sizing.l1:
        yield from ((f"L1 of {server.role}", label, value) for label, value in _l1(server))
    if (moved := sizing.transfer) is not None:
        copies = f", {moved.copies} copies" if moved.copies > 1 else ""
        yield "transfer", f"KV of {moved.prompt_tokens} tokens", f"{_size(moved.request_bytes)}{copies}"
        if moved.seconds is not None:
            yield "transfer", "alone on the link", f"{moved.seconds:.3g} s"
    if (rates := sizing.balance) is not None:
        yield "balance", "prefill", f"{rates.prefill:.3g} requests a second"
        yield "balance", "decode", f"{rates.decode:.3g} requests a second"
    if (start := sizing.start) is not None:
        read = (
            "at a speed that is not given (--disk)" if start.read_seconds is None else f"in {start.read_seconds:.0f} s"
        )
        yield "start", "weights to read on a node", f"{_size(start.weights_bytes)} {read}"
        yield "start", "engine beside them", f"{_span(start.engine_seconds, '.0f')} s"


def _role(role: RoleSize) -> Iterator[tuple[str, str]]:
    ranks = role.tp * role.pp * role.dp
    yield "instances", f"{role.instances} of {ranks} rank(s): TP {role.tp}, PP {role.pp}, DP {role.dp}"
    yield "weights of a rank", _UNKNOWN if role.weights_bytes is None else _sizes(role.weights_bytes)
    yield "KV of a token and rank", _size(role.token_bytes)
    yield (
        "KV groups",
        ", ".join(
            f"{group.layers} x {group.keeps} (block {group.block}, page {_size(group.page_bytes)}"
            + (f", {group.padding:.1%} padding)" if group.padding else ")")
            for group in role.groups
        ),
    )
    yield "bytes of a block", _size(role.block_bytes)
    yield (
        "memory for KV",
        f"{_UNKNOWN} (--device-memory or --kv-memory)" if role.kv_bytes is None else _sizes(role.kv_bytes),
    )
    if role.blocks is not None and role.requests is not None and role.tokens is not None:
        yield "blocks of a rank", _span(role.blocks, ".0f")
        yield f"requests of {role.model_len} tokens", f"{_span(role.requests, '.2f')} at once in an instance"
        yield "tokens", f"{_span(role.tokens, ',.0f')} in an instance"
    for text in role.assumed:
        yield "assumed", text


def _l1(server: L1Size) -> Iterator[tuple[str, str]]:
    yield "size", f"{server.l1_gib:g} GiB, one a {server.per}"
    yield "KV of a token", f"{_size(server.token_bytes)}; of a chunk {_size(server.chunk_bytes)}"
    yield "tokens", f"{server.tokens:,} at most, {server.kept_tokens:,} before eviction starts"
    if server.engine_tokens is not None:
        yield "tokens in one of its engines", f"{server.engine_tokens:,.0f} at most"
    if server.registration_seconds:
        yield "to register", f"{server.pinned_gib:.0f} GiB, about {server.registration_seconds:.0f} s at a second a GiB"
    if server.shm_gib:
        yield "in /dev/shm", f"{server.shm_gib:g} GiB"


def _span(span: Span, style: str) -> str:
    return format(span.low, style) if span.exact else f"{span.low:{style}} to {span.high:{style}}"


def _sizes(span: Span) -> str:
    return _size(span.low) if span.exact else f"{_size(span.low)} to {_size(span.high)}"


def _size(size: float) -> str:
    for unit, name in ((GIB, "GiB"), (_MIB, "MiB"), (_KIB, "KiB")):
        if size >= unit:
            return f"{size / unit:.4g} {name}"
    return f"{size:g} bytes"
