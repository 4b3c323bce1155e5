"""Clients that leave, prefills that die and parameters that lie, at real engines, past the proxy that would hide them.

At the end the same departures at engines without the Mooncake patches.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from pdserve.node.supervised import environment
from pdserve.plan.model import Plan
from pdserve.system.process import send
from tests.launch.deployment import REPOSITORY, Deployment, pdserve, read_json
from tests.real import kv_faults
from tests.real.conftest import Shared, brought_up, member, serves

pytestmark = pytest.mark.real

ABORT_SECONDS = 20
CLIENTS = 25
MOONCAKE = ("mooncake-requests", "mooncake-sends", "mooncake-pulls", "mooncake-bootstrap")
KEY = "a key for engines that no deployment has"
LONG = 3500
"""Tokens of a prompt that prefill is still computing, or has not begun, when its client leaves."""


class Engines:
    """The engines of a deployment as a router reaches them."""

    def __init__(self, plan: Plan, client: httpx.AsyncClient) -> None:
        workers = plan.proxy.workers
        self._urls = {worker.name: worker.url for worker in workers}
        (self._bootstrap,) = (worker.bootstrap_url for worker in workers if worker.bootstrap_url)
        self._client = client
        self._prompts = iter(range(1, 10**6))

    def prompt(self, tokens: int) -> list[int]:
        """One that no engine has seen."""
        number = next(self._prompts)
        return [3 + (number * 31 + position * position + position // 7 * number) % 241 for position in range(tokens)]

    async def post(self, name: str, prompt: Sequence[int], *, timeout: float = 150, **more: Any) -> httpx.Response:
        body = {"model": "tiny", "prompt": list(prompt), "max_tokens": 6, "temperature": 0, **more}
        return await self._client.post(f"{self._urls[name]}/v1/completions", json=body, timeout=timeout)

    async def text(self, name: str, prompt: Sequence[int], **more: Any) -> str:
        answer = await self.post(name, prompt, **more)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    async def prefill(self, transfer: str, prompt: Sequence[int], **more: Any) -> httpx.Response:
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}
        leg = {"max_tokens": 1, "ignore_eos": True, "kv_transfer_params": params}
        return await self.post("prefill-0", prompt, **{**leg, **more})

    async def decode(self, transfer: str, prompt: Sequence[int]) -> httpx.Response:
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": transfer,
            "remote_bootstrap_addr": self._bootstrap,
            "remote_engine_id": await self.engine_id(),
        }
        return await self.post("decode-0", prompt, kv_transfer_params=params, ignore_eos=True)

    async def engine_id(self) -> str:
        ranks = (await self._client.get(f"{self._bootstrap}/query")).json()
        return str(ranks["0"]["engine_id"])

    async def metric(self, name: str, metric: str) -> float:
        text = (await self._client.get(f"{self._urls[name]}/metrics")).text
        return sum(float(value) for value in re.findall(rf"^vllm:{metric} (\S+)$", text, re.MULTILINE))

    async def until(self, name: str, metric: str, value: float, seconds: float) -> float | None:
        """How long it takes for a metric to have that value; None: longer."""
        began = time.monotonic()
        while await self.metric(name, metric) != value:
            if time.monotonic() - began > seconds:
                return None
            await asyncio.sleep(0.02)
        return time.monotonic() - began

    async def transferred(self) -> float:
        """Tokens that decode did not compute because prefill sent their KV."""
        return await self.metric("decode-0", r'prompt_tokens_by_source_total\{.*source="external_kv_transfer".*\}')


WAITING = r"num_requests_waiting\{.*\}"
USED = r"kv_cache_usage_perc\{.*\}"


@asynccontextmanager
async def reached(plan: Plan, key: str) -> AsyncIterator[Engines]:
    headers = {"Authorization": f"Bearer {key}"}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(headers=headers, timeout=60, limits=limits, trust_env=False) as client:
        yield Engines(plan, client)


def of(deployment: Deployment) -> AbstractAsyncContextManager[Engines]:
    return reached(deployment.run.read_plan(), deployment.run.read_key())


def patched(home: Path, folder: Path) -> Iterator[Deployment]:
    """recipes/tiny-cpu.yaml without LMCache. A prefill that dies is waited for longer than these tests take."""
    document = yaml.safe_load((REPOSITORY / "recipes" / "tiny-cpu.yaml").read_text())
    document["model"]["path"] = str(REPOSITORY / ".cache" / "tiny-model")
    document["prefill"] = {
        "connector": {"kind": "mooncake", "protocol": "tcp"},
        "restart": {"policy": "on-failure", "backoff_seconds": 600, "backoff_max_seconds": 600},
    }
    document["timeouts"] = {"transfer_abort_seconds": ABORT_SECONDS, "engine_seconds": 300}
    del document["lmcache"]
    recipe = folder / "departures.yaml"
    recipe.write_text(yaml.safe_dump(document | {"name": "departures"}))
    yield from brought_up("departures", home, recipe)


@dataclass(frozen=True)
class Unpatched:
    """Engines with no patch but the one that a CPU needs."""

    plan: Plan
    decode: subprocess.Popen[bytes]
    decode_log: Path
    faults: Path

    def serves(self) -> bool:
        return self.decode.poll() is None


@contextmanager
def started_by_hand(plan: Plan, tmp_path: Path) -> Iterator[Unpatched]:
    """A prefill and a decode of the same plan by themselves: `pdserve up` does not start engines without the patches
    that they need."""
    faults = kv_faults.installed(tmp_path / "orders")
    faults["VLLM_PLUGINS"] += ",pdserve"
    engines = []
    try:
        for process in (plan.process("prefill-0"), plan.process("decode-0")):
            env = environment(process.env, os.environ, {"VLLM_API_KEY": KEY})
            del env["PDSERVE_PATCH_RECORD"]
            with (tmp_path / process.name).open("w") as log:
                engine = subprocess.Popen(
                    process.argv,
                    env={**env, **faults, "PDSERVE_PATCHES": "mooncake-cpu-device"},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            engines.append(engine)
        asyncio.run(healthy(plan))
        yield Unpatched(plan, engines[1], tmp_path / "decode-0", tmp_path / "orders")
    finally:
        for engine in engines:
            engine.terminate()  # killed, it would leave its shared memory
        for engine in engines:
            end(engine)


@dataclass(frozen=True)
class Stacks:
    """Two that have the same ports: one at a time."""

    patched: Shared[Deployment]
    unpatched: Shared[Unpatched]


@pytest.fixture(scope="module")
def stacks(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stacks]:
    with_patches = Shared(lambda: contextmanager(patched)(home, tmp_path_factory.mktemp("recipe")), serves)

    def by_hand() -> AbstractContextManager[Unpatched]:
        plan = with_patches.get().run.read_plan()
        with_patches.close()
        return started_by_hand(plan, tmp_path_factory.mktemp("unpatched"))

    both = Stacks(with_patches, Shared(by_hand, Unpatched.serves))
    yield both
    both.unpatched.close()
    both.patched.close()


@pytest.fixture
def made_before(request: pytest.FixtureRequest, stacks: Stacks) -> None:
    if "unpatched" in request.fixturenames:
        stacks.unpatched.get()
    else:
        stacks.unpatched.close()
        stacks.patched.get()


@pytest.fixture
def tiny(stacks: Stacks) -> Deployment:
    return stacks.patched.get()


@pytest.fixture
def unpatched(stacks: Stacks) -> Unpatched:
    return stacks.unpatched.get()


def end(engine: subprocess.Popen[bytes]) -> None:
    """Waits for all of its processes, which remove their shared memory; after 40 s it kills what is left."""
    late = threading.Timer(40, os.killpg, (engine.pid, signal.SIGKILL))
    late.start()
    engine.wait()
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-engine.pid, 0)  # its orphans have become children of this process
    late.cancel()


async def healthy(plan: Plan) -> None:
    urls = [worker.url for worker in plan.proxy.workers]
    deadline = time.monotonic() + 200
    async with httpx.AsyncClient(timeout=5, trust_env=False) as client:
        for url in urls:
            while time.monotonic() < deadline:
                with suppress(httpx.TransportError):
                    if (await client.get(f"{url}/health")).status_code == 200:
                        break
                await asyncio.sleep(0.2)
    assert time.monotonic() < deadline


async def leave(engines: Engines) -> None:
    """25 clients come, each with a long prompt, and leave when decode has asked for the KV of all of them.

    Their prefill legs come last, so that however slow the machine is, prefill has none of it yet when they leave.
    """
    prompts = [engines.prompt(LONG) for _ in range(CLIENTS)]
    legs = []
    for number, prompt in enumerate(prompts):
        legs.append(asyncio.ensure_future(engines.decode(f"left-{number}", prompt)))
        # Apart, so that decode asks for each in a message of its own.
        assert await engines.until("decode-0", WAITING, number + 1, 10) is not None
    legs += [asyncio.ensure_future(engines.prefill(f"left-{number}", prompt)) for number, prompt in enumerate(prompts)]
    await engines.until("prefill-0", WAITING, CLIENTS - 1, 1)
    for leg in legs:
        leg.cancel()
    await asyncio.wait(legs)


async def next_request(engines: Engines) -> tuple[float, int]:
    """How long a client that comes now waits for its answer, and its status."""
    prompt = engines.prompt(300)
    transfer = f"next-{prompt[0]}-{time.monotonic()}"
    began = time.monotonic()
    prefilled, answer = await asyncio.gather(engines.prefill(transfer, prompt), engines.decode(transfer, prompt))
    assert prefilled.status_code == 200
    return time.monotonic() - began, answer.status_code


def test_the_patches_are_active_where_they_must_be(tiny: Deployment) -> None:
    status = read_json(pdserve("status", "--json")[1])
    for name in ("prefill-0", "decode-0"):
        assert set(MOONCAKE) <= set(status["processes"][name]["patches"])


def test_with_them_the_next_request_is_served_at_once_and_the_blocks_are_free(tiny: Deployment) -> None:
    async def departures() -> tuple[float | None, float, int]:
        async with of(tiny) as engines:
            await next_request(engines)
            await leave(engines)
            freed = await engines.until("decode-0", USED, 0, 10)
            return freed, *await next_request(engines)

    freed, took, status = asyncio.run(departures())
    print(f"blocks after {freed} s, next request after {took:.2f} s")
    assert freed is not None
    assert freed < ABORT_SECONDS / 4
    assert took < ABORT_SECONDS / 2
    assert status == 200


def test_a_prefill_that_ends_by_a_stop_token_delivers_its_kv(tiny: Deployment) -> None:
    async def stopped() -> tuple[str, str, str, float]:
        async with of(tiny) as engines:
            prompt = engines.prompt(500)
            expected = await engines.text("prefill-0", prompt, ignore_eos=True)
            first = (await engines.post("prefill-0", prompt, max_tokens=1, return_token_ids=True)).json()
            (token,) = first["choices"][0]["token_ids"]
            before = await engines.transferred()
            prefilled, answer = await asyncio.gather(
                engines.prefill("stopped", prompt, stop_token_ids=[token]), engines.decode("stopped", prompt)
            )
            reason = prefilled.json()["choices"][0]["finish_reason"]
            return expected, answer.json()["choices"][0]["text"], reason, await engines.transferred() - before

    expected, answer, reason, transferred = asyncio.run(stopped())
    assert reason == "stop"
    assert answer == expected
    assert transferred > 0


WHOLE = {
    "do_remote_prefill": True,
    "transfer_id": "lie",
    "remote_engine_id": "nobody",
    "remote_bootstrap_addr": "http://127.0.0.1:1",
}
LIES: tuple[tuple[str, Any], ...] = (
    ("decode-0", {"do_remote_prefill": True}),
    ("decode-0", {name: value for name, value in WHOLE.items() if name != "remote_engine_id"}),
    ("decode-0", WHOLE | {"remote_engine_id": ["nobody"]}),
    ("decode-0", {"do_remote_decode": True, "transfer_id": "lie"}),
    ("prefill-0", WHOLE),
    ("prefill-0", {"do_remote_decode": True}),
)


def test_false_parameters_cost_no_other_request_anything(tiny: Deployment) -> None:
    async def lied() -> list[int]:
        async with of(tiny) as engines:
            answers = [await engines.post(name, engines.prompt(200), kv_transfer_params=lie) for name, lie in LIES]
            text = {"kv_transfer_params": "do_remote_prefill"}
            answers.append(await engines.post("decode-0", engines.prompt(200), vllm_xargs=text))
            # For a client that leaves, the API server has EngineCore tell prefill, at an address that is not named.
            for _ in range(5):
                with pytest.raises(httpx.TimeoutException):
                    await engines.post("decode-0", engines.prompt(LONG), kv_transfer_params=LIES[1][1], timeout=0.001)
            assert (await next_request(engines))[1] == 200
            assert await engines.until("decode-0", USED, 0, 2) is not None
            return [answer.status_code for answer in answers]

    *answered, text = asyncio.run(lied())
    assert answered == [200] * 6
    assert text in (200, 400, 500), "from 0.32 on the API server itself fails on what is no mapping"
    assert tiny.state().phase == "ready"


def test_decode_notices_that_its_prefill_was_killed(tiny: Deployment) -> None:
    """The only prefill is gone then, and the next test gets another deployment."""
    core = member(tiny, "prefill-0", "VLLM::EngineCor")

    async def killed() -> tuple[float, float | None]:
        async with of(tiny) as engines:
            waiting = asyncio.ensure_future(engines.decode("killed", engines.prompt(900)))
            assert await engines.until("decode-0", WAITING, 1, 10) is not None
            began = time.monotonic()
            assert send(core, signal.SIGKILL)
            await asyncio.wait({waiting})
            took = time.monotonic() - began
            return took, await engines.until("decode-0", USED, 0, 5)

    took, freed = asyncio.run(killed())
    print(f"decode answered after {took:.2f} s, blocks free {freed} s later")
    assert took < ABORT_SECONDS / 2
    assert freed is not None
    status = read_json(pdserve("status", "--json")[1])
    # Each open pull counts; one without blocks, of a client that left before it was scheduled, may be open too.
    assert status["processes"]["decode-0"]["patch_effects"]["mooncake-pulls"]["peers-lost"] >= 1


@pytest.mark.full
def test_without_the_patches_departed_clients_stall_prefill(unpatched: Unpatched) -> None:
    async def departures() -> tuple[float, float, float, int]:
        async with reached(unpatched.plan, KEY) as engines:
            alone, _ = await next_request(engines)
            began = time.monotonic()
            await leave(engines)
            return alone, time.monotonic() - began, *await next_request(engines)

    alone, left, took, status = asyncio.run(departures())
    print(f"next request after {left:.2f} + {took:.2f} s with status {status}, {alone:.2f} s with nobody before it")
    assert alone < ABORT_SECONDS / 2
    assert left < ABORT_SECONDS, "else the first of them is given up by now"
    assert left + took > ABORT_SECONDS


@pytest.mark.full
def test_without_the_guard_a_late_report_ends_decode(unpatched: Unpatched) -> None:
    """Decode is gone then. With the guard: test_late_kv.py."""
    order = unpatched.faults / kv_faults.NOTICE
    order.with_suffix(".new").write_text("finished_recving")
    order.with_suffix(".new").rename(order)

    async def asked() -> None:
        async with reached(unpatched.plan, KEY) as engines:
            with suppress(httpx.HTTPError):
                await engines.post("decode-0", engines.prompt(200))

    asyncio.run(asked())
    unpatched.decode.wait(60)
    log = unpatched.decode_log.read_text()
    assert "_update_from_kv_xfer_finished" in log
    assert "AssertionError" in log
