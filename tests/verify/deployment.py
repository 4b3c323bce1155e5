"""A whole deployment of fakes behind the real proxy, and the plan that `verify` is given for it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from pdserve.pd.config.proxy import Protocol
from pdserve.plan.model import Plan
from pdserve.recipe.model import Verify
from pdserve.verify import Proof, Report, run_proofs
from pdserve.verify.load import LoadReport
from pdserve.verify.target import Target
from tests.bench.evidence import lmcache_server, plan, process
from tests.launch.deployment import free_ports
from tests.proxy.deployment import KEY, KV_ROLES, MODEL, Child, Fake, Proxy, proxy_config

DETAILS = "--enable-prompt-tokens-details"
Result = TypeVar("Result")


def proof(report: Report | LoadReport, name: str) -> Proof:
    (match,) = [proof for proof in report.proofs if proof.name == name]
    return match


def asked(
    answer: Callable[[httpx.Request], httpx.Response],
    ask: Callable[[Target], Awaitable[Result]],
    of: Plan | None = None,
) -> Result:
    """What `ask` makes of a deployment in which everything is answered so."""

    async def run() -> Result:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            return await ask(Target(of or plan(), client, "key"))

    return asyncio.run(run())


class FakeLmcache(Child):
    def __init__(self, name: str, **faults: object) -> None:
        argv = [sys.executable, "tests/fakes/lmcache.py", "--port", "0", "--http-port", str(port := free_ports(1)[0])]
        argv += ["--l1-size-gb", "1", "--eviction-policy", "LRU", "--instance-id", name]
        super().__init__(argv, {f"FAKE_LMCACHE_{key.upper()}": str(value) for key, value in faults.items()})
        self._http_port = port

    def ready(self) -> None:
        self.until("Uvicorn running")
        self.listens(self._http_port)


class FakeEngine(Fake):
    """Beside an LMCache server, or with the connector `beside`, it also stores."""

    def __init__(
        self,
        name: str,
        role: str,
        lmcache: str | None,
        *,
        model: str = MODEL,
        flags: tuple[str, ...],
        beside: str | None = None,
        **faults: object,
    ) -> None:
        self.name, self.role, self.ranks, self.connector, self.bootstrap = name, role, 1, "MooncakeConnector", 0
        argv = [sys.executable, "tests/fakes/engine.py", "--served-model-name", model, "--port", "0", *flags]
        connectors: list[dict[str, Any]] = []
        if role in KV_ROLES:
            connectors.append({"kv_connector": "MooncakeConnector", "kv_role": KV_ROLES[role]})
        if lmcache and role != "decode":
            connectors.append({"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"})
        if beside and role != "decode":
            connectors.append({"kv_connector": beside, "kv_role": "kv_both"})
        if connectors:
            multi = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": connectors}}
            argv += ["--kv-transfer-config", json.dumps(multi)]
        env = {"VLLM_API_KEY": KEY, "VLLM_MOONCAKE_BOOTSTRAP_PORT": "0", "FAKE_LMCACHE_URL": lmcache or ""}
        Child.__init__(self, argv, env | {f"FAKE_{key.upper()}": str(value) for key, value in faults.items()})

    def forget_external(self) -> None:
        """What its LMCache server has is gone."""
        self.http.post("/reset_prefix_cache?reset_external=true").raise_for_status()

    def forget_salt(self, end: str) -> None:
        """What the cache beside it has of salts that end so is gone, and nothing else."""
        self.http.get("/fake/forget", params={"salt": end}).raise_for_status()


class Deployment:
    """Everything it starts ends with it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self.lmcache: FakeLmcache | None = None
        self.engines: dict[str, FakeEngine] = {}
        self.plan: Plan

    def up(
        self,
        prefills: int = 1,
        decodes: int = 1,
        *,
        aggregated: int = 0,
        lmcache: dict[str, object] | None = None,
        cached: bool = True,
        beside: str | None = None,
        flags: tuple[str, ...] = (DETAILS,),
        faults: dict[str, dict[str, object]] | None = None,
        **fields: Any,
    ) -> Self:
        """`cached`: with LMCache, whose faults are `lmcache`; `beside`: another connector that caches;
        `flags`: of all engines; `faults`: by engine or role; `fields`: others of the plan."""
        if cached:
            self.lmcache = FakeLmcache("lmcache-0", **(lmcache or {}))
            self._stack.callback(self.lmcache.end)
            self.lmcache.ready()
        roles = ["aggregated"] * aggregated or ["prefill"] * prefills + ["decode"] * decodes
        for role in roles:
            name = f"{role}-{sum(engine.role == role for engine in self.engines.values())}"
            own = (faults or {}).get(role, {}) | (faults or {}).get(name, {})
            url = self.lmcache.url if self.lmcache else None
            engine = FakeEngine(name, role, url, beside=beside, **{"flags": flags, **own})  # type: ignore[arg-type]
            self._stack.callback(engine.end)
            engine.ready()
            self.engines[name] = engine
        self._beside = beside
        self.plan = self._plan("aggregated" if aggregated else "mooncake", flags, fields)
        return self

    def verify(self, on_proof: Callable[[Proof], None] | None = None, key: str = KEY) -> Report:
        return asyncio.run(run_proofs(self.plan, engine_key=key, on_proof=on_proof))

    def _plan(self, protocol: Protocol, flags: tuple[str, ...], fields: dict[str, Any]) -> Plan:
        workers = [engine.config() for engine in self.engines.values()]
        config = proxy_config(protocol=protocol, workers=workers, connect_timeout_seconds=5, drain_seconds=5)
        proxy = Proxy(self._folder / "proxy.json", config, key=KEY, control=False)
        self._stack.callback(proxy.end)
        port = int(proxy.until(r"serving on http://127.0.0.1:(\d+)")[1])
        processes = [
            process(
                name,
                engine.role,
                *([self._beside] if self._beside and engine.role != "decode" else []),
                argv=flags,
                log=f"logs/{name}.log",
            )
            for name, engine in self.engines.items()
        ]
        servers = []
        if self.lmcache:
            processes.append(process("lmcache-0", "lmcache", log="logs/lmcache-0.log"))
            stores = tuple(name for name, engine in self.engines.items() if engine.role != "decode")
            servers.append(lmcache_server(http_url=self.lmcache.url, engines=stores, expected_workers=len(stores)))
        values: dict[str, Any] = {
            "name": "fakes",
            "served_name": MODEL,
            "processes": (*processes, process("proxy", "proxy", log="logs/proxy.log")),
            "proxy": config.model_copy(update={"port": port}),
            "canary_seconds": 20,
            "verify": Verify(output="exact"),
        }
        mode = "aggregated" if protocol == "aggregated" else "disaggregated"
        return plan(mode=mode, lmcache=tuple(servers), **(values | fields))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()
