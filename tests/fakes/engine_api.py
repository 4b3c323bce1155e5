"""The fake's HTTP side: the OpenAI endpoints, /health, /metrics, and /fake/* for tests.

/fake/requests   every generation request, in order of arrival: path, headers, body
/fake/state      running, waiting, most_waiting (at once, ever), held (KV nobody fetched), delivered, expired, late,
                 finished, aborted, checks (GETs of /health)
/fake/wait?K=V   answers once the state has these values (408 after a minute)
/fake/script     POST: changes the script (engine_script.Script)
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from argparse import Namespace
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from tests.fakes.engine_kv import Connectors, KvLoadError, MoriioProducer, NixlProducer, Producer, fetch, pull
from tests.fakes.engine_metrics import metrics_page
from tests.fakes.engine_model import EOS, PrefixCache, extend, logprob, next_token, prefill
from tests.fakes.engine_openai import (
    BATCH,
    CHAT,
    INVOCATIONS,
    JOBS,
    RESPONSES,
    ApiError,
    Job,
    ResponsesJob,
    Token,
    error_body,
    parse,
    shape_of,
)
from tests.fakes.engine_script import Gate, Script, die
from tests.fakes.engine_store import Store
from tests.fakes.microhttp import Request, Responder, get_json

GENERATE = ("/v1/completions", CHAT, BATCH, INVOCATIONS, *JOBS)


@dataclass
class Engine:
    """State and behaviour of one instance."""

    args: Namespace
    script: Script
    connectors: Connectors
    producer: Producer | NixlProducer | None
    gate: Gate = field(default_factory=Gate)
    running: int = 0
    waiting: int = 0
    most_waiting: int = 0
    finished: int = 0
    aborted: int = 0
    checks: int = 0
    requests: list[dict[str, Any]] = field(default_factory=list)
    source_tokens: dict[str, int] = field(
        default_factory=lambda: {"local_compute": 0, "local_cache_hit": 0, "external_kv_transfer": 0}
    )
    generated: int = 0
    stored_keys: int = 0
    loaded_keys: int = 0
    _next_rank: int = 0

    def __post_init__(self) -> None:
        self.local = PrefixCache(self.args.block_size)
        self.external = PrefixCache(256)
        self.store = Store(self.gate)
        if self.producer is not None:
            self.producer.changed = self.gate.notify

    # --- HTTP

    async def handle(self, request: Request, responder: Responder) -> None:
        try:
            responder.drops_next = self.script.stale and request.path in GENERATE
            await self._route(request, responder)
        except ApiError as error:
            if responder.started:
                raise
            await responder.send(error.status, error_body(request.path, error))
        except (TypeError, ValueError, AttributeError) as error:
            # What upstream's validation would refuse.
            if responder.started:
                raise
            await responder.send(400, ApiError(400, str(error)).body())

    async def _route(self, request: Request, responder: Responder) -> None:
        key = self.args.api_key or os.environ.get("VLLM_API_KEY")
        if request.path.startswith("/v1") and key and request.headers.get("authorization") != f"Bearer {key}":
            await responder.send(401, {"error": "Unauthorized"})
            return
        match request.path:
            case "/health":
                self.checks += 1
                await self.gate.until(lambda: self.script.hold != "health")
                await responder.send(200, b"")
                if self.script.die_at == "ready":
                    die(self.script, "RuntimeError: Engine core proc died unexpectedly.")
            case "/v1/models":
                card = {"id": self.args.served_model_name, "object": "model", "owned_by": "vllm", "created": 0}
                card |= {"root": self.args.model, "max_model_len": self.args.max_model_len}
                await responder.send(200, {"object": "list", "data": [card]})
            case "/version":
                await responder.send(200, {"version": "0.0.0+fake"})
            case "/metrics":
                await self.gate.until(lambda: self.script.hold != "metrics")
                await responder.send(200, metrics_page(self), content_type="text/plain; version=0.0.4")
            case "/tokenize":
                shape = parse(json.loads(request.body) | {"max_tokens": 1}, chat="messages" in json.loads(request.body))
                await responder.send(200, {"count": len(shape.prompts[0]), "tokens": shape.prompts[0]})
            case "/reset_prefix_cache":
                self.local.chains.clear()
                if request.query.get("reset_external", "").lower() in ("1", "true"):
                    self.external.chains.clear()
                    await _ask_lmcache("forget")
                await responder.send(200, {"success": True})
            case "/generative_scoring":
                body = json.loads(request.body)
                data = [{"index": index, "score": 0.5} for index, _ in enumerate(body["items"])]
                await responder.send(200, {"object": "list", "data": data})
            case path if path in GENERATE:
                await self._generate(request, responder)
            case "/fake/forget":
                end = request.query["salt"]
                self.external.chains = {chain for chain in self.external.chains if not chain[0].endswith(end)}
                await _ask_lmcache("forget", salt=end)
                await responder.send(200, {})
            case "/fake/requests":
                await responder.send(200, self.requests)
            case "/fake/state":
                await responder.send(200, self.state())
            case "/fake/wait":
                await self._wait(request, responder)
            case "/fake/script":
                for name, value in json.loads(request.body).items():
                    self.script.set(name, value)
                self.gate.notify()
                await responder.send(200, {})
            case _:
                if not await self.store.handle(request, responder):
                    await responder.send(404, b'{"detail":"Not Found"}')

    def state(self) -> dict[str, int]:
        return {
            "running": self.running,
            "waiting": self.waiting,
            "most_waiting": self.most_waiting,
            "held": self.producer.held if self.producer else 0,
            "delivered": self.producer.delivered if self.producer else 0,
            "expired": self.producer.expired if self.producer else 0,
            "late": self.producer.late if self.producer else 0,
            "finished": self.finished,
            "aborted": self.aborted,
            "received": len(self.requests),
            "checks": self.checks,
        }

    async def _wait(self, request: Request, responder: Responder) -> None:
        wanted = {name: int(value) for name, value in request.query.items()}
        try:
            async with asyncio.timeout(60):
                await self.gate.until(lambda: wanted.items() <= self.state().items())
        except TimeoutError:
            await responder.send(408, self.state())
        else:
            await responder.send(200, self.state())

    # --- generation

    async def _generate(self, request: Request, responder: Responder) -> None:
        body = json.loads(request.body)
        self.requests.append(
            {"path": request.path, "headers": request.headers, "body": body, "raw": request.body.decode()}
        )
        self.gate.notify()
        if self.script.cut:
            responder.abort()
            return
        if self.script.die_at == "request" or self.script.lethal in body:
            die(self.script, "RuntimeError: Engine core proc died unexpectedly.")
        params = body.get("kv_transfer_params") or {}
        try:
            status = self.script.prefill_status if params.get("do_remote_decode") else self.script.decode_status
            if status:
                raise ApiError(status, "scripted failure", "InternalServerError")
            if self.script.poison in body:
                raise ApiError(500, "'str' object has no attribute 'get'", "InternalServerError")
            if isinstance(body.get("stop"), list) and len(body["stop"]) > 4:
                # Upstream's HTTP layer: no connector hears of it.
                raise ValueError("stop: List should have at most 4 items after validation")
            shape = shape_of(request.path, body)
            if request.path == RESPONSES:
                self.store.check(body)
            shape.check(self.args.served_model_name, self.args.max_model_len)
        except ApiError:
            if params.get("do_remote_prefill") and "remote_engine_id" in params:
                await self._pulled(params, release=True)
            raise
        # Until here a client that leaves is not noticed by any scheduler.
        await self.gate.until(lambda: self.script.hold != "arrival")
        if self.connectors.mooncake:
            self._check_role(params)
        job = JOBS.get(request.path, Job)(
            shape, request.headers.get("x-request-id") or f"{time.monotonic_ns():x}", self.args
        )
        rank = self._rank(request)
        self.waiting += 1
        self.most_waiting = max(self.most_waiting, self.waiting)
        if body.get("background") and isinstance(job, ResponsesJob):
            await responder.send(200, self.store.begin(job, self._in_background(job, body)))
            return
        try:
            if shape.stream:
                await self._stream(job, rank, params, responder)
            else:
                choices = [[token async for token in self._tokens(job, i, params)] for i in range(job.choices)]
                self._finish(job, rank, params)
                await self.gate.until(lambda: self.script.hold != "answer")
                answer = job.reply(choices)
                self.store.keep(body if request.path == RESPONSES else {"store": False}, answer)
                await responder.send(200, answer)
            self.finished += 1
        except asyncio.CancelledError:
            self.aborted += 1
            self.running += self.script.lingers
            if params.get("do_remote_prefill") and "remote_engine_id" not in params and "transfer_id" in params:
                die(self.script, "KeyError: 'remote_engine_id'")
            raise
        finally:
            self._left(job)

    async def _in_background(self, job: Job, body: dict[str, Any]) -> None:
        try:
            choices = [[token async for token in self._tokens(job, i, {})] for i in range(job.choices)]
            self.store.keep(body, job.reply(choices))
            self.finished += 1
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self._left(job)

    def _left(self, job: Job) -> None:
        if job.started:
            self.running -= 1
        else:
            self.waiting -= 1
        self.gate.notify()

    async def _stream(self, job: Job, rank: int, params: dict[str, Any], responder: Responder) -> None:
        # Like upstream: 200 and the headers at once, whatever happens to the KV later.
        await responder.open_stream("text/event-stream; charset=utf-8")
        try:
            for event in job.opening():
                await responder.chunk(event)
            for index in range(job.choices):
                count = 0
                async for token in self._tokens(job, index, params):
                    for event in job.events(index, token, first=count == 0):
                        await responder.chunk(event)
                    count += 1
                    if self.script.drop_after and count >= self.script.drop_after:
                        responder.abort()
                        return
                await responder.chunk(job.last_event(index))
            self._finish(job, rank, params)
            if usage := job.usage_event():
                await responder.chunk(usage)
        except ApiError as error:
            await responder.chunk(job.error_event(error))
        if closing := job.closing():
            await responder.chunk(closing)
        await responder.close_stream()

    async def _tokens(self, job: Job, index: int, params: dict[str, Any]) -> AsyncIterator[Token]:
        """Tokens of one choice, as (token, logprob)."""
        state = await self._prompt_kv(job, index, params)
        await self.gate.until(lambda: self.script.hold != "first")
        for position in range(job.shape.max_tokens):
            await asyncio.sleep(self.script.token_seconds)
            stops = self.script.eos > int(job.shape.ignore_eos) and position == 0
            token = EOS if stops else next_token(state)
            if token == EOS or token in job.shape.stop_token_ids:
                job.finish_reason = "stop"
                return
            self.generated += 1
            yield token, logprob(state, token)
            if not self.script.dummy_weights:
                state = extend(state, token)
            await self.gate.until(lambda: self.script.hold != "token")
        job.finish_reason = "length"

    async def _prompt_kv(self, job: Job, index: int, params: dict[str, Any]) -> bytes:
        tokens, salt = job.prompt(index), "" if self.script.ignore_salt else job.shape.cache_salt
        local = self.local.lookup(tokens, salt)
        if params.get("do_remote_prefill") and self.connectors.moves and not self.script.recomputes:
            self.external.queries += len(tokens) - local
            state, external = await self._remote_kv(params, job), len(tokens) - local
            self.external.hits += external
        else:
            await asyncio.sleep(self.script.prefill_seconds)
            await self.gate.until(lambda: self.script.hold != "prefill")
            state, external = prefill(tokens), 0
            if self.connectors.external:
                hit, written = await self._cached_beside(tokens, salt, local)
                external = max(0, hit - local)
                self.stored_keys += len(tokens) // self.external.block if self.script.store_fails else written
                self.loaded_keys += external // self.external.block
        self.local.store(tokens, salt)
        if not job.started:
            job.started = True
            self.waiting, self.running = self.waiting - 1, self.running + 1
            self.gate.notify()
        job.cached = max(job.cached, local + external)
        self.source_tokens["local_cache_hit"] += local
        self.source_tokens["external_kv_transfer"] += external
        self.source_tokens["local_compute"] += len(tokens) - local - external
        if self.script.dummy_weights:
            job.sees_context = False
            return b"\0\0"
        return prefill([0, *state]) if self.script.wrong_kv else state

    async def _cached_beside(self, tokens: list[int], salt: str, local: int) -> tuple[int, int]:
        """Tokens that the cache beside this engine has of a prompt, and the chunks that are new to it. Engines beside
        one LMCache server share what it has."""
        if not os.environ.get("FAKE_LMCACHE_URL"):
            hit = self.external.lookup(tokens, salt)
            return hit, 0 if self.script.store_fails else self.external.store(tokens, salt)
        block = self.external.block
        answer = await _ask_lmcache(
            "use",
            salt=salt,
            chunks=",".join(state[:8].hex() for _, state in self.external.block_states(tokens)),
            # The last token of a prompt is always computed; what the engine has itself is not read.
            longest=(len(tokens) - 1) // block,
            local=math.ceil(local / block),
            store=int(not self.script.store_fails),
        )
        hit = answer["known"] * block
        self.external.queries += len(tokens)
        self.external.hits += hit
        return hit, answer["written"]

    async def _remote_kv(self, params: dict[str, Any], job: Job) -> bytes:
        needed = {"remote_engine_id", "remote_bootstrap_addr", "transfer_id"}
        if self.connectors.mooncake and not needed <= params.keys():
            await asyncio.Event().wait()  # upstream parks it in WAITING_FOR_REMOTE_KVS for ever
        try:
            state = bytes.fromhex(await self._pulled(params))
            if self.script.kv_fails:
                raise KvLoadError("scripted failure")
            return state
        except KvLoadError as error:
            print(f"ERROR KV load failed: {error}", flush=True)
            raise ApiError(500, "Internal server error", "InternalServerError") from error

    async def _pulled(self, params: dict[str, Any], *, release: bool = False) -> str:
        return await (fetch(params, release=release) if self.connectors.mooncake else pull(params))

    def _finish(self, job: Job, rank: int, params: dict[str, Any]) -> None:
        if not params.get("do_remote_decode"):
            return
        # By a stop too: NIXL, and the patch mooncake-requests.
        kv = prefill(job.prompt(0)).hex()
        if isinstance(self.producer, MoriioProducer):
            if not self.script.keeps_nothing and job.finish_reason == "length":
                job.transfer = self.producer.keep_for(params["transfer_id"], kv)
        elif isinstance(self.producer, NixlProducer):
            if not self.script.keeps_nothing:
                job.transfer = self.producer.keep(rank, kv)
        elif self.producer and params.get("transfer_id"):
            self.producer.keep(rank, params["transfer_id"], kv)

    def _check_role(self, params: dict[str, Any]) -> None:
        """The engine dies of what it cannot be: the scheduler's assertions."""
        if params.get("do_remote_prefill") and self.connectors.role == "kv_producer":
            die(self.script, "    assert not self.is_kv_producer", "AssertionError")
        if params.get("do_remote_decode") and self.connectors.role == "kv_consumer":
            die(self.script, "    assert not self.is_kv_consumer", "AssertionError")

    def _rank(self, request: Request) -> int:
        if (header := request.headers.get("x-data-parallel-rank")) is not None:
            return int(header)
        self._next_rank += 1
        return self._next_rank % int(self.args.data_parallel_size)


async def _ask_lmcache(what: str, **query: object) -> Any:
    """A client of the fake server beside this engine; without one nothing is asked."""
    if url := os.environ.get("FAKE_LMCACHE_URL"):
        _, answer = await get_json(f"{url}/fake/{what}?{urlencode(query)}")
        return answer
    return None
