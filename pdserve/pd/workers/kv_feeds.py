"""Get what the policy kv_events needs of the deployment: the engines' KV events, and the token ids of each prompt."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pdserve.pd.http.fetch import FetchError, fetch
from pdserve.pd.requests.body import Body, encode
from pdserve.pd.requests.dialects import CHAT, COMPLETIONS, Dialect
from pdserve.pd.routing.build import kv_events_of
from pdserve.pd.routing.kv_sources import Source, sources_from, sources_of
from pdserve.pd.workers.engines import Engines
from pdserve.pd.workers.pools import Pools
from pdserve.pd.workers.registry import Registry, Worker

if TYPE_CHECKING:
    from pdserve.pd.routing.kv_subscriber import KvSubscriber

log = logging.getLogger("pdserve.proxy")

_TOKENIZE_SECONDS = 2.0
_SHAPING = frozenset(
    ("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs", "tools")
)
"""What shapes a chat's prompt beside its messages and is known to /tokenize."""
_NOT_BY_IDS = frozenset(("cache_salt", "prompt_embeds", "mm_processor_kwargs", "truncate_prompt_tokens"))
"""With these the token ids do not name the KV blocks, or are not those of the whole prompt."""


class KvFeeds:
    """One subscriber for each role whose policy listens. Must be made inside the event loop."""

    def __init__(self, registry: Registry, pools: Pools, engines: Engines) -> None:
        self._registry, self._pools, self._engines = registry, pools, engines
        self._tasks: set[asyncio.Task[None]] = set()
        self._subscribers = self._made()
        registry.on_ready(self._follow)
        registry.on_lost(self._leave)

    def restart(self) -> None:
        """The policies are other ones: follows all over again."""
        old, self._subscribers = self._subscribers, self._made()
        for subscriber in old.values():
            self._start(subscriber.close())
        for role in self._subscribers:
            for worker in self._registry.workers.values():
                if worker.config.role == role and worker.state == "ready":
                    self._follow(worker)

    async def close(self) -> None:
        for subscriber in self._subscribers.values():
            await subscriber.close()

    def _made(self) -> dict[str, KvSubscriber]:
        listening = {role: kv_events_of(policy) for role, policy in self._pools.policies.items()}
        if not any(listening.values()):
            return {}
        # Only who listens needs ZMQ.
        from pdserve.pd.routing.kv_subscriber import KvSubscriber

        return {
            role: KvSubscriber(policy.index, policy.replay_timeout_seconds)
            for role, policy in listening.items()
            if policy is not None
        }

    async def tokens(self, dialect: Dialect, body: Body, served_name: str) -> Sequence[int] | None:
        """The ids of a prompt; None when they are not known, or do not name its KV."""
        if any(name in body for name in _NOT_BY_IDS) or body.get("model", served_name) != served_name:
            return None
        if dialect is COMPLETIONS:
            prompt = body.raw_value("prompt")
            if prompt is not None and prompt.startswith(b"["):
                ids = body.get("prompt")
                return ids if all(type(token_id) is int for token_id in ids) else None
            fields = {"prompt": prompt}
        elif dialect is CHAT:
            messages = body.raw_value("messages")
            if messages is None or b'"type"' in messages:
                # Parts may be images, whose placeholders are the same for all of them.
                return None
            fields = {"messages": messages, **{name: body.raw_value(name) for name in _SHAPING}}
        else:
            return None
        return await self._tokenize(served_name, {name: value for name, value in fields.items() if value is not None})

    async def _tokenize(self, model: str, fields: dict[str, bytes]) -> Sequence[int] | None:
        workers = [worker for role in self._registry.roles for worker in self._registry.ready(role)]
        if not workers:
            return None
        worker = min(workers, key=lambda candidate: candidate.requests)
        raw = b"{" + b",".join(b'"%b":%b' % (name.encode(), value) for name, value in fields.items())
        raw += b',"model":' + encode(model) + b"}"
        headers = b"content-type: application/json\r\n" + self._engines.key_header
        try:
            answer = await fetch(
                worker.pool, "POST", "/tokenize", headers=headers, body=raw, timeout=_TOKENIZE_SECONDS, reuse=True
            )
            tokens = json.loads(answer.body)["tokens"] if answer.status == 200 else None
        except (FetchError, ValueError, KeyError, TypeError) as error:
            log.info("%s does not tokenize: %s", worker.name, error)
            return None
        return tokens if isinstance(tokens, list) else None

    def _follow(self, worker: Worker) -> None:
        if worker.config.role in self._subscribers:
            self._start(self._subscribe(self._subscribers[worker.config.role], worker))

    def _leave(self, worker: Worker) -> None:
        if worker.config.role in self._subscribers:
            self._start(self._subscribers[worker.config.role].stop(worker.name))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _subscribe(self, subscriber: KvSubscriber, worker: Worker) -> None:
        life = worker.life
        sources = await self._sources(worker)
        known = self._registry.workers.get(worker.name) is worker and worker.state != "dead" and worker.life == life
        if not known or self._subscribers.get(worker.config.role) is not subscriber:
            return  # it has gone, or come anew, meanwhile
        if not sources:
            log.warning("%s publishes no KV events: kv_events knows nothing of it", worker.name)
        subscriber.start(worker.name, sources)

    async def _sources(self, worker: Worker) -> Sequence[Source]:
        host = urlsplit(worker.config.url).hostname or ""
        if worker.config.kv_events_url is not None:
            return sources_of(worker.config.kv_events_url, worker.config.kv_replay_url, "", host, 1)
        try:
            answer = await fetch(worker.pool, "GET", "/kv_event_sources", headers=self._engines.key_header)
            return sources_from(json.loads(answer.body), host) if answer.status == 200 else ()
        except (FetchError, ValueError) as error:
            log.warning("%s does not answer where its KV events are: %s", worker.name, error)
            return ()
