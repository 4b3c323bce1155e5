"""Proof `endpoints`: every part answers, and all of them mean the same model."""

from __future__ import annotations

import httpx

from pdserve.verify.outcome import Outcome, failed, proven
from pdserve.verify.report import Numbers
from pdserve.verify.target import Target

_NO_KEY = (
    "vllm-router asks an engine for its models with the Authorization of the client, and clients have none that "
    "engines take: they can send requests and cannot list models"
)
CLAIM = "Every engine, the proxy and every LMCache server answers, and all of them serve the same model name."


async def prove(target: Target) -> Outcome:
    checks = [(worker.name, worker.url, "/health") for worker in target.plan.proxy.workers]
    checks += [(server.process, server.http_url, "/healthcheck") for server in target.plan.lmcache]
    checks.append(("proxy", target.proxy_url, "/readiness" if target.through_router else "/ready"))
    wrong = []
    for name, url, path in checks:
        if trouble := _trouble(await target.get(url, path)):
            wrong.append(f"{name} ({url}{path}): {trouble}")
    for worker in target.plan.proxy.workers:
        wrong += await _models(target, worker.name, worker.url)
    listed = await _models(target, "proxy", target.proxy_url)
    numbers: Numbers = {"processes": len(checks), "served name": target.plan.served_name}
    if listed and target.through_router and not wrong:
        return failed(f"{listed[0].rstrip(': ')}. {_NO_KEY}", numbers, goes_on=True)
    if wrong or listed:
        return failed("; ".join(wrong + listed) + ". `pdserve status` shows which processes live", numbers)
    return proven(numbers)


async def _models(target: Target, name: str, url: str) -> list[str]:
    """What is wrong with a list of models; nothing, if nothing is."""
    answer = await target.get(url, "/v1/models")
    trouble = _trouble(answer)
    if trouble is None and isinstance(answer, httpx.Response):
        trouble = _other_models(answer, target.plan.served_name)
    return [f"{name} ({url}/v1/models): {trouble}"] if trouble else []


def _trouble(answer: httpx.Response | str) -> str | None:
    if isinstance(answer, str):
        return answer
    return None if answer.status_code == 200 else f"HTTP {answer.status_code} {answer.text[:200]}".strip()


def _other_models(answer: httpx.Response, served_name: str) -> str | None:
    try:
        names = [str(card["id"]) for card in answer.json()["data"]]
    except (ValueError, KeyError, TypeError):
        return "the answer is no list of models"
    return None if served_name in names else f"serves {', '.join(names) or 'nothing'}, not {served_name}"
