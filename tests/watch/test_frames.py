"""What `status --watch` shows of one look, on a terminal and in a pipe."""

from __future__ import annotations

import io
import time
from typing import Any

from rich.console import Console

from pdserve.cli.status import plain, render
from pdserve.observe.metrics import EngineSnapshot, LmcacheSnapshot
from pdserve.observe.status import StatusView
from pdserve.observe.watch import CacheMinute, EngineMinute, Frame, Latency, MinuteTraffic
from pdserve.plan.model import Plan
from pdserve.run.state import NodeState, ProcessState
from tests.launch.records import own_identity, recorded_state
from tests.plan.kit import plan, recipe, with_lmcache
from tests.tables import each_row

SELF = own_identity()
BUSY = MinuteTraffic(
    measured_by="proxy",
    seconds=60.0,
    requests=12.0,
    errors=0.5,
    refused=0.0,
    failovers=0.0,
    prompt_tokens=20000.0,
    output_tokens=900.0,
    ttft=Latency(720, 0.21, 0.4, 0.8, 600.0),
    itl=Latency(9000, 0.5, 9.0, 10.0, 10.0),
    kv_transfer=Latency(0, None, None, None, 600.0),
)
QUIET = MinuteTraffic("engines", 0.0, *[None] * 9)
DECODE = EngineMinute(0.0, 5000.0, 900.0, 0.0, 1.0, 0.0, None)


def frame(
    planned: Plan, *, traffic: MinuteTraffic = BUSY, phases: dict[str, str] | None = None, **changes: Any
) -> Frame:
    """A deployment that serves; `phases` of processes that are not ready, `changes` of the frame."""
    nodes = {node.name: NodeState(agent=SELF, guard=SELF, hostname=node.name) for node in planned.nodes}
    processes = {}
    for process in planned.processes:
        fields = {"role": process.role, "node": process.node, "started_at": time.time() - 65, "phase": "ready"}
        if process.name in (phases or {}):
            fields |= {"phase": (phases or {})[process.name], "note": "SIGKILL\x1b]0;title\x07"}
        processes[process.name] = ProcessState.model_validate(fields)
    state = recorded_state(
        name="test",
        run_id="r1",
        phase="ready",
        host="host0",
        launcher=SELF,
        nodes=nodes,
        processes=processes,
        endpoint="http://127.0.0.1:8000",
        started_at=time.time() - 65,
    )
    view = StatusView(
        state,
        planned,
        "degraded" if phases else "ready",
        "/run/r1",
        [],
        engines={"decode-0": EngineSnapshot("", running=7, waiting=2, kv_cache_usage=0.41)},
        caches={"lmcache-0": LmcacheSnapshot("", bytes_used=3 << 30, bytes_total=4 << 30)},
        launcher_lives=True,
    )
    event = {"at": 0.0, "event": "ready", "name": "decode-0", "seconds": 3.0}
    whole: dict[str, Any] = {
        "view": view,
        "traffic": traffic,
        "engines": {"decode-0": DECODE},
        "caches": {"lmcache-0": CacheMinute(0.3, 12.0, 4.0, None)},
        "waiting_at_proxy": 3,
        "proxy_error": None,
        "events": (event,),
        "news": (event,),
    }
    return Frame(**{**whole, **changes})


def screen(shown: Frame, width: int = 100) -> str:
    terminal = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    terminal.print(render(shown))
    assert isinstance(terminal.file, io.StringIO)
    return terminal.file.getvalue()


ONE_NODE = plan(recipe(with_lmcache()))
MANY_DECODES = plan(recipe({"decode": {"instances": 12}}))


@each_row("width", [80, 100, 200])
def test_load_kv_hits_latencies_and_events_are_there_at_any_width(width: int) -> None:
    text = " ".join(screen(frame(ONE_NODE), width).split())
    assert "test: ready endpoint: http://127.0.0.1:8000/v1" in text
    assert "last 60 s (proxy): requests 12/s errors 0.5/s 429 0/s second attempts 0/s waiting 3" in text
    assert "tokens (engines): prompt 20,000/s answer 900/s" in text
    assert "TTFT 210/400/800 ms ITL 0.5/9.0/>10.0 s KV transfer, at most -" in text
    assert "decode-0 ready 1m05s 7 2 41% 0% 100% 0/s 5,000/s 900/s" in text
    assert "lmcache-0 ready 1m05s 75% 30% 12/s 4.0/s -" in text
    assert "decode-0 ready after 3.0 s" in text


def test_what_is_not_ready_comes_first_with_its_reason_and_what_failed_is_noted() -> None:
    minute = EngineMinute(0.0, 0.0, 0.0, None, None, 4.0, 2.0)
    many = {f"decode-{number}": "dead" for number in range(12)}
    engines = {"prefill-0": minute}
    shown = frame(MANY_DECODES, phases=many, engines=engines, traffic=QUIET, proxy_error="no answer within 3 s")
    text = screen(shown)
    assert text.index("decode-0   dead") < text.index("prefill-0  ready")
    assert "decode-0: SIGKILL" in text
    assert "\x1b]0;" not in text, "a note must not set the terminal's title"
    lines = plain(shown)
    assert "clients: no figures yet" in lines
    assert any(line.startswith("and ") and line.endswith(" more: pdserve status test") for line in lines)
    text = screen(frame(ONE_NODE, engines={"decode-0": minute}, traffic=QUIET, proxy_error="no answer within 3 s"))
    assert "decode-0: 2 failed KV transfers in the last minute" in text
    assert "decode-0: 4 preemptions in the last minute" in text
    assert "proxy: no answer within 3 s" in text


def test_a_pipe_gets_tabs_and_only_new_events() -> None:
    lines = plain(frame(ONE_NODE, news=()))
    assert lines[0] == "test: ready"
    assert next(line for line in lines if line.startswith("decode-0\t")).split("\t")[3:6] == ["7", "2", "41%"]
    assert not any("ready after" in line for line in lines)
