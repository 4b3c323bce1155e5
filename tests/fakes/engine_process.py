"""The life of the fake engine's process: its argv, loading, signals, children, shared memory and end."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import mmap
import os
import secrets
import signal
import subprocess
import sys
import traceback
from pathlib import Path

from tests.fakes.engine_api import Engine
from tests.fakes.engine_kv import Connectors, MoriioProducer, NixlProducer, Producer
from tests.fakes.engine_script import Script, die
from tests.fakes.microhttp import serve

MAPPED: list[mmap.mmap] = []
"""Keeps the segment mapped for the life of the process."""

CHILD = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
open("/proc/self/comm", "w").write("VLLM::EngineCor")
print("EngineCore started", flush=True)
while True:
    time.sleep(3600)
"""

DAEMON = """
import os, sys, time
if os.fork():
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
print(f"daemon {os.getpid()}", flush=True)
while True:
    time.sleep(3600)
"""


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    for name in ("--served-model-name", "--kv-transfer-config", "--api-key"):
        parser.add_argument(name)
    for name in ("--data-parallel-size-local", "--data-parallel-rank"):
        parser.add_argument(name, type=int)
    parser.add_argument("--enable-prompt-tokens-details", action="store_true")
    for name, default in (("--model", "fake-model"), ("--host", "127.0.0.1")):
        parser.add_argument(name, default=default)
    numbers = {"--port": 8000, "--block-size": 16, "--data-parallel-size": 1, "--tensor-parallel-size": 1}
    for name, number in (numbers | {"--max-model-len": 100_000}).items():
        parser.add_argument(name, type=int, default=number)
    args, rest = parser.parse_known_args(argv)
    if rest[:1] == ["serve"] and len(rest) > 1:
        args.model = rest[1]
    args.served_model_name = args.served_model_name or args.model
    if args.data_parallel_rank is not None:
        args.data_parallel_size = 1
    elif args.data_parallel_size_local is not None:
        args.data_parallel_size = args.data_parallel_size_local
    return args


def log(level: str, text: str) -> None:
    print(f"(APIServer pid={os.getpid()}) {level} 01-01 00:00:00 [fake.py:1] {text}", flush=True)


def spawn_child(kind: str) -> None:
    """The process that a KILL of the API server alone leaves behind. `daemon`: nothing in it tells whose it is."""
    if kind == "daemon":
        subprocess.run([sys.executable, "-c", DAEMON], env={}, check=True)
        return
    subprocess.Popen([sys.executable, "-c", CHILD, "VLLM::EngineCore"], start_new_session=kind == "setsid")


def report_patches(args: argparse.Namespace, script: Script) -> None:
    """A record for each process that a real engine would have, as pdserve's plugin leaves it there."""
    folder = os.environ.get("PDSERVE_PATCH_RECORD")
    names = [name for name in os.environ.get("PDSERVE_PATCHES", "").split(",") if name]
    if not folder or not names or script.unpatched == "all":
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    kinds = ["api-server", *["engine-core"] * args.data_parallel_size, *["worker"] * args.tensor_parallel_size]
    for index, kind in enumerate(kinds):
        active = [] if script.unpatched == "EngineCore" and kind == "engine-core" else names
        record = {"pid": os.getpid(), "session": os.getsid(0), "process": kind, "kind": kind, "active": active}
        Path(folder, f"{os.getpid()}-{index}.json").write_text(json.dumps(record))


def map_segment() -> Path:
    # In a test: a name by which that test knows what is its own (tests/isolation.py).
    path = Path(f"/dev/shm/{os.environ.get('PDSERVE_TEST_MEMORY', '')}psm_{secrets.token_hex(4)}")
    with path.open("w+b") as file:
        file.truncate(4096)
        MAPPED.append(mmap.mmap(file.fileno(), 4096))
    return path


async def load(script: Script) -> None:
    """Everything between the first line of the log and listening."""
    log("INFO", "Starting to load model")
    lines = script.progress.split("\\n") if script.progress else ["Loading safetensors checkpoint shards: 100%"]
    for line in lines:
        log("INFO", line)
        await asyncio.sleep(script.ready_after / len(lines))
    if script.die_at == "load":
        die(script, "RuntimeError: Engine core initialization failed. See root cause above.")
    if script.never_ready:
        await asyncio.Event().wait()


def producer(ranks: int, connectors: Connectors) -> Producer | NixlProducer | None:
    if connectors.role not in ("kv_producer", "kv_both"):
        return None
    if connectors.moriio:
        return MoriioProducer(ranks, connectors.lease)
    return NixlProducer(ranks, connectors.lease) if connectors.nixl else Producer(ranks)


async def run(args: argparse.Namespace, script: Script) -> None:
    report_patches(args, script)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, (lambda: None) if script.ignore_term else stop.set)
    segment = map_segment() if script.shm else None
    if script.child:
        spawn_child(script.child)
    connectors = Connectors.parse(args.kv_transfer_config)
    engine = Engine(args, script, connectors, producer(args.data_parallel_size, connectors))
    async with contextlib.AsyncExitStack() as servers:
        if isinstance(engine.producer, NixlProducer):
            port = int(os.environ.get("VLLM_NIXL_SIDE_CHANNEL_PORT", "5600"))
            side = await servers.enter_async_context(await serve("127.0.0.1", port, engine.producer.handle))
            engine.producer.port = side.sockets[0].getsockname()[1]
        elif engine.producer:
            port = int(os.environ.get("VLLM_MOONCAKE_BOOTSTRAP_PORT", "8998"))
            bootstrap = await servers.enter_async_context(await serve("0.0.0.0", port, engine.producer.handle))
            port = bootstrap.sockets[0].getsockname()[1]
            engine.producer.side_channel = f"tcp://{args.host}:{port}"
            log("INFO", f"Bootstrap server on port {port}")
        loading, stopping = asyncio.ensure_future(load(script)), asyncio.ensure_future(stop.wait())
        await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set():
            server = await serve(args.host, args.port, engine.handle)
            log("INFO", f"Starting vLLM server on http://{args.host}:{server.sockets[0].getsockname()[1]}")
            log("INFO", "Application startup complete.")
            await stop.wait()
        log("INFO", "Shutting down")
        if segment and script.shm != "leak":
            segment.unlink()
        sys.stdout.flush()
        os._exit(0)  # as upstream: running requests are cut


def main() -> None:
    script = Script.from_env()
    if script.die_at == "import" or (script.die_if and Path(script.die_if).exists()):
        die(
            script, "Traceback (most recent call last):", "ImportError: libcudart.so.12: cannot open shared object file"
        )
    try:
        asyncio.run(run(arguments(sys.argv[1:]), script))
    except OSError:
        traceback.print_exc()
        sys.exit(1)
