"""The deployment under proof: where its parts listen, and the requests that proofs send to them."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import httpx

from pdserve.errors import VerifyError
from pdserve.observe.engine_metrics import VERIFY_SALT
from pdserve.pd.config.proxy import WorkerConfig
from pdserve.plan.model import Plan
from pdserve.time_limit import time_limit
from pdserve.verify.completion import Completion, json_object, read_completion

_SHORT_SECONDS = 5.0
_NUDGE_PROMPT = (1,)


@dataclass(frozen=True)
class Target:
    """The parts of a running deployment as `verify` reaches them."""

    plan: Plan
    client: httpx.AsyncClient
    engine_key: str = field(repr=False)
    run: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    """Part of every cache_salt: no run of `verify` finds the caches of another."""

    @property
    def proxy_url(self) -> str:
        return self.plan.proxy_url

    @property
    def through_router(self) -> bool:
        """The proxy is vllm-router."""
        return self.plan.proxy_kind == "vllm-router"

    @property
    def producers(self) -> tuple[WorkerConfig, ...]:
        """Engines that compute prompts: prefill, or every engine of an aggregated deployment."""
        return tuple(w for w in self.plan.proxy.workers if w.role != "decode")

    @property
    def decoders(self) -> tuple[WorkerConfig, ...]:
        return tuple(w for w in self.plan.proxy.workers if w.role == "decode")

    @property
    def reference(self) -> WorkerConfig:
        """The instance that is asked alone. It computes prompts anyway, and without kv_transfer_params it is an
        ordinary engine."""
        return self.producers[0]

    @property
    def chunk(self) -> int:
        """Tokens of an LMCache chunk; without LMCache its default, so that prompts are of the same kind."""
        return self.plan.chunk_size or 256

    def salt(self, leg: str) -> str:
        return f"{VERIFY_SALT}{self.run}-{leg}"

    def log(self, name: str) -> str:
        """Where the log of a process is, relative to the run directory."""
        return self.plan.process(name).log

    async def complete(
        self, url: str, prompt: tuple[int, ...], *, salt: str, max_tokens: int, **more: Any
    ) -> Completion:
        """Greedy, exactly `max_tokens` tokens. Raises VerifyError when it is not answered whole, in time, with 200: the
        end of a text is ignored, so a shorter answer is one that was broken off."""
        body = self.body(prompt, salt=salt, max_tokens=max_tokens, **more)
        answer = read_completion(await self.post(url, "/v1/completions", body), url)
        if len(answer.tokens) != max_tokens or answer.prompt_tokens != len(prompt):
            raise VerifyError(
                f"{answer.prompt_tokens} prompt tokens and {len(answer.tokens)} answer tokens came back "
                f"(finish_reason {answer.finish_reason}), {len(prompt)} and {max_tokens} were asked for",
                where=url,
                cause="it was broken off; or the engines have a smaller max_new_tokens (override-generation-config)",
            )
        return answer

    async def nudge(self, worker: WorkerConfig) -> None:
        """One token from one engine: an idle engine makes no steps, and steps set gauges and release blocks."""
        await self.complete(worker.url, _NUDGE_PROMPT, salt=self.salt("nudge"), max_tokens=1)

    def body(self, prompt: tuple[int, ...], *, salt: str, max_tokens: int, **more: Any) -> dict[str, Any]:
        """A completions request. The prompt is token ids, so that its length is known; ignore_eos, so that the
        output's is. No logprobs unless asked for: vLLM compiles a kernel for them at first use (17 s on CPU)."""
        return {
            "model": self.plan.served_name,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_salt": salt,
            "return_token_ids": True,
            **more,
        }

    def headers(self, url: str) -> dict[str, str]:
        """`url`: without a path. Engines want the deployment's key, and so does a proxy with API keys. vllm-router adds
        it itself."""
        if url == self.proxy_url and self.through_router:
            return {}
        return {"Authorization": f"Bearer {self.engine_key}"}

    async def post(self, url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The JSON object that is answered. Raises VerifyError otherwise, or when it takes longer than a canary may."""
        seconds = self.plan.canary_seconds
        began = time.monotonic()
        try:
            async with time_limit(seconds):
                response = await self.client.post(url + path, json=body, headers=self.headers(url), timeout=seconds)
        except TimeoutError as error:
            raise VerifyError(f"POST {path} was not answered within {seconds:g} s", where=url) from error
        except httpx.HTTPError as error:
            took = time.monotonic() - began
            raise VerifyError(f"POST {path} failed after {took:.1f} s: {describe(error)}", where=url) from error
        if response.status_code != 200:
            raise VerifyError(f"POST {path} was answered {response.status_code}: {response.text[:300]}", where=url)
        return json_object(response, f"POST {path}", url)

    async def get(self, url: str, path: str) -> httpx.Response | str:
        """The answer, or why there is none within a few seconds."""
        try:
            async with time_limit(_SHORT_SECONDS):
                return await self.client.get(url + path, headers=self.headers(url), timeout=_SHORT_SECONDS)
        except (httpx.HTTPError, TimeoutError) as error:
            return describe(error)


def describe(error: Exception) -> str:
    """An exception without a text is shown by its name."""
    return str(error) or type(error).__name__
