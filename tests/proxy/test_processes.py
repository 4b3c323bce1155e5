"""A proxy of several processes: one port, one view of load and limits, one end."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.proxy.deployment import MODEL, PLAIN, Deployment, keys_file

BODY: dict[str, Any] = {"model": MODEL, "prompt": "hello world", "max_tokens": 8}
PROCESSES = 3


def ask(deployment: Deployment, **headers: str) -> httpx.Response:
    """Over a connection of its own: the kernel gives it to one of the processes."""
    return httpx.post(f"{deployment.proxy.url}/v1/completions", json=BODY, headers=headers, **PLAIN)


def together(deployment: Deployment, count: int, **headers: str) -> list[httpx.Response]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda _: ask(deployment, **headers), range(count)))


def test_all_processes_serve_and_count_on_one_page(deployment: Deployment) -> None:
    deployment.up(2, 2, processes=PROCESSES)
    assert len(deployment.proxy.members) == PROCESSES
    assert {answer.status_code for answer in together(deployment, 24)} == {200}
    deployment.proxy.shows('pdserve_proxy_requests_total{path="/v1/completions",status="200"} 24.0')


def test_least_loaded_sees_the_load_of_all_processes(deployment: Deployment) -> None:
    # Streams alone: a fake's KV use grows with them, and each process reads it when its next check is due.
    streams_alone = {"load": {"kv_weight": 0}}
    deployment.up(1, 2, processes=PROCESSES, routing=streams_alone, decode={"hold": "first"})
    with ThreadPoolExecutor(12) as pool:
        answers = []
        for number in range(12):
            answers.append(pool.submit(ask, deployment))
            # Two that choose in the same moment may both see a decode that is free.
            while sum(decode.state()["received"] for decode in deployment.decodes) <= number:
                pass
        assert [decode.state()["received"] for decode in deployment.decodes] == [6, 6]
        for decode in deployment.decodes:
            decode.script(hold="")
        assert {answer.result().status_code for answer in answers} == {200}


def test_the_limits_of_a_key_and_of_a_pool_hold_over_all_processes(deployment: Deployment, tmp_path: Path) -> None:
    key = "a-client-key"
    auth = keys_file(tmp_path, ("team", key), max_requests=4)
    deployment.up(processes=PROCESSES, decode={"hold": "first"}, auth=auth)
    with ThreadPoolExecutor(20) as pool:
        answers = [pool.submit(ask, deployment, authorization=f"Bearer {key}") for _ in range(20)]
        deployment.decodes[0].wait(running=4)
        while sum(answer.done() for answer in answers) < 16:
            pass
        deployment.decodes[0].script(hold="")
        assert Counter(answer.result().status_code for answer in answers) == {429: 16, 200: 4}
    assert deployment.decodes[0].state()["received"] == 4


def test_transfers_are_bounded_over_processes(deployment: Deployment) -> None:
    """Also not after a process has died: what it had taken is its successor's to give back."""
    deployment.up(processes=PROCESSES, prefill={"hold": "prefill"}, transfer_slots=4)
    prefill = deployment.prefills[0]

    def fill(pool: ThreadPoolExecutor) -> list[Future[httpx.Response]]:
        answers = [pool.submit(ask, deployment) for _ in range(24)]
        prefill.wait(waiting=3)
        deployment.proxy.shows('pdserve_proxy_pool_requests{pool="prefill"} 24.0')
        return answers

    with ThreadPoolExecutor(24) as pool:
        answers = fill(pool)
        for member in deployment.proxy.members:
            os.kill(member, signal.SIGKILL)
        for _ in range(2 * PROCESSES - 1):  # the first of the old ones was heard at the start
            deployment.proxy.until("serving on")
        wait(answers)
        prefill.wait(waiting=0)
        answers = fill(pool)
        prefill.script(hold="")
        assert {answer.result().status_code for answer in answers} == {200}
    assert prefill.state()["most_waiting"] == 3


@pytest.mark.parametrize("processes", [1, PROCESSES])
def test_a_process_that_is_told_to_end_costs_no_request(deployment: Deployment, processes: int) -> None:
    """It serves until another one has its place, and finishes its streams."""
    deployment.up(processes=processes, decode={"hold": "token"}, transfer_slots=64)
    proxy, before = deployment.proxy, deployment.proxy.members
    for _ in range(processes - 1):
        proxy.until("serving on")

    def stream() -> list[str]:
        body = BODY | {"stream": True, "max_tokens": 20}
        url = f"{proxy.url}/v1/completions"
        with httpx.stream("POST", url, json=body, **PLAIN) as answer:
            begun.release()
            return [line for line in answer.iter_lines() if line]

    begun = threading.Semaphore(0)
    with deployment.clients(BODY | {"max_tokens": 1}, kept=True) as statuses, ThreadPoolExecutor(9) as pool:
        streams = [pool.submit(stream) for _ in range(9)]
        for _ in streams:
            assert begun.acquire(timeout=60)
        for member in before:
            os.kill(member, signal.SIGTERM)
            proxy.until("was told to end")
            proxy.until("serving on")
        deployment.decodes[0].script(hold="")
        assert {lines.result()[-1] for lines in streams} == {"data: [DONE]"}
        while proxy.members & before:
            pass
    assert set(statuses) == {200}
    assert len(proxy.members) == processes
    deployment.idle()
    proxy.shows('pdserve_proxy_in_flight{role="decode",worker="decode-0"} 0.0')


def test_members_die_with_their_parent(deployment: Deployment) -> None:
    deployment.up(processes=PROCESSES)
    before = deployment.proxy.members
    deployment.proxy.process.kill()
    deployment.proxy.process.wait()
    for pid in before:
        # Orphans become children of this process (tests/conftest.py).
        os.waitpid(pid, 0)


def test_a_new_process_has_the_configuration_read_again(deployment: Deployment) -> None:
    """But for what a running proxy does not take from the file: there is no worker in it."""
    deployment.up(processes=2, routing={"decode": {"kind": "round_robin"}})
    proxy = deployment.proxy
    deployment.rewrite(workers=[], routing={"decode": {"kind": "power_of_two"}})
    proxy.process.send_signal(signal.SIGHUP)
    proxy.until_each(*(f"proxy process {index} has read its configuration again" for index in range(2)))
    for member in proxy.members:
        os.kill(member, signal.SIGKILL)
    for _ in range(2):
        proxy.until("serving on")
    assert {answer.status_code for answer in together(deployment, 8)} == {200}
    decided = 'routing_decisions_total{policy="power_of_two",role="decode"'
    assert 'policy="round_robin",role="decode"' not in proxy.shows(decided)


# --- one that hangs


def test_a_process_that_hangs_is_replaced(deployment: Deployment) -> None:
    deployment.up(processes=PROCESSES, moments={"pdserve.pd.processes.heartbeat.HUNG_SECONDS": 4.0})
    for _ in range(PROCESSES - 1):
        deployment.proxy.until("serving on")  # one that does not serve yet has more time
    held = min(deployment.proxy.members)
    os.kill(held, signal.SIGSTOP)
    # Each over a connection of its own: some of them are the held one's.
    assert [answer.status_code for answer in together(deployment, 20)] == [200] * 20
    deployment.proxy.until(rf"proxy process \d \({held}\) has not answered for 4 s .*: it is killed")
    assert held not in deployment.proxy.members


def test_processes_that_were_all_stopped_go_on(deployment: Deployment) -> None:
    """As with a machine that was suspended: no one of them is to blame."""
    deployment.up(processes=PROCESSES, moments={"pdserve.pd.processes.heartbeat.HUNG_SECONDS": 2.5})
    before = deployment.proxy.members
    deployment.proxy.send_all(signal.SIGSTOP)
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(ask, deployment)
        assert wait([answer], timeout=5).not_done
        deployment.proxy.send_all(signal.SIGCONT)
        assert answer.result().status_code == 200
    assert deployment.proxy.members == before


def test_a_process_that_reads_nothing_does_not_hold_up_the_others(deployment: Deployment) -> None:
    deployment.up(1, 2, control=True, processes=PROCESSES)
    held = min(deployment.proxy.members)
    os.kill(held, signal.SIGSTOP)
    for number in range(4000):  # more than its pipe takes
        deployment.proxy.push_line(json.dumps({"worker": "decode-0", "state": ("draining", "dead")[number % 2]}))
    deployment.proxy.push_line(json.dumps({"worker": "decode-1", "state": "draining"}))
    for _ in range(PROCESSES - 1):
        deployment.proxy.until("decode-1 is draining")
    os.kill(held, signal.SIGCONT)
    deployment.proxy.until("decode-1 is draining")


# --- a rolling restart


@pytest.mark.parametrize("processes", [1, 2])
def test_a_rolling_restart_refuses_and_breaks_nothing(deployment: Deployment, processes: int) -> None:
    deployment.up(1, 1, processes=processes, control=True, decode={"hold": "token"})
    proxy, (decode,) = deployment.proxy, deployment.decodes
    before, running, refused = proxy.members, threading.Event(), []

    def knock() -> None:
        while not running.is_set():
            try:
                answer = httpx.get(f"{proxy.url}/health", **PLAIN)
                assert answer.status_code == 200
            except (httpx.HTTPError, AssertionError) as error:
                refused.append(error)

    stream = BODY | {"stream": True, "max_tokens": 20}
    deployment.rewrite(max_body_bytes=200)
    with ThreadPoolExecutor() as pool:
        knocking = [pool.submit(knock) for _ in range(2)]
        with proxy.begun("/v1/completions", stream) as lines:
            proxy.push_line(json.dumps({"restart": True}))
            for _ in range(processes):
                proxy.until("serving on")
            for _ in range(processes):
                proxy.until("draining")
            # The new ones serve, and know of the workers, while the old stream runs.
            new = pool.submit(ask, deployment)
            decode.wait(received=2)
            decode.script(hold="")
            assert [*lines][-1] == "data: [DONE]"
        assert new.result().status_code == 200
        for _ in range(processes):
            proxy.until("the old proxy process . has ended")
        running.set()
        wait(knocking)
    assert refused == []
    assert len(proxy.members) == processes
    assert not proxy.members & before
    assert httpx.get(f"{proxy.url}/health", **PLAIN).json()["generation"] == 2
    assert deployment.complete("x" * 200).status_code == 413, "the configuration was read anew"


def test_a_proxy_that_could_not_start_replaces_none(deployment: Deployment) -> None:
    deployment.up()
    before = deployment.proxy.members
    (deployment.folder / "proxy.json").write_text("{}")
    for _ in range(2):
        deployment.proxy.process.send_signal(signal.SIGUSR2)
        deployment.proxy.until("rolling restart: it does not start .exit code 2.; the proxy that ran serves on")
    assert deployment.proxy.members == before
    assert ask(deployment).status_code == 200


def test_after_a_failed_restart_processes_are_as_before(deployment: Deployment, tmp_path: Path) -> None:
    """With the configuration that they had, although the file has another one, and within one limit with those that
    go on."""
    limit = {"decode": {"max_requests": 2, "queue_size": 0}}
    deployment.up(processes=2, admission=limit, moments={"pdserve.pd.processes.heartbeat.HUNG_SECONDS": 4.0})
    hung, other = sorted(deployment.proxy.members)
    nowhere = {"certificate": str(tmp_path / "none.pem"), "key": str(tmp_path / "none.pem")}
    deployment.rewrite(tls=nowhere)
    deployment.proxy.process.send_signal(signal.SIGUSR2)
    deployment.proxy.until("rolling restart: its processes end before they serve")
    os.kill(hung, signal.SIGSTOP)
    deployment.proxy.until(rf"\({hung}\) has not answered for 4 s")
    deployment.proxy.until("serving on")
    (decode,) = deployment.decodes
    decode.script(hold="first")
    with ThreadPoolExecutor(20) as pool:
        answers = [pool.submit(ask, deployment) for _ in range(20)]
        while sum(answer.done() for answer in answers) < 18:
            pass
        decode.script(hold="")
        assert Counter(answer.result().status_code for answer in answers) == {429: 18, 200: 2}
    deployment.proxy.shows('pdserve_proxy_requests_total{path="/v1/completions",status="429"} 18.0')
    os.kill(other, signal.SIGKILL)
    deployment.proxy.until("serving on")
    assert {httpx.get(f"{deployment.proxy.url}/health", **PLAIN).status_code for _ in range(20)} == {200}
    assert not {hung, other} & deployment.proxy.members


def test_restarts_leave_no_files_open(deployment: Deployment) -> None:
    """But for one more or less of the generation before, until the collector has come."""
    deployment.up()
    opened = []
    for _ in range(4):
        deployment.proxy.process.send_signal(signal.SIGUSR2)
        deployment.proxy.until("the old proxy process 0 has ended")
        opened.append(len(list(Path(f"/proc/{deployment.proxy.process.pid}/fd").iterdir())))
    assert opened[3] < opened[0] + 3


def test_the_end_of_the_proxy_ends_the_look_at_a_new_one(deployment: Deployment) -> None:
    deployment.up()
    path = deployment.folder / "proxy.json"
    path.unlink()
    os.mkfifo(path)  # the check waits for a writer
    deployment.proxy.process.send_signal(signal.SIGUSR2)
    deployment.proxy.until("looking whether the new proxy could start")
    deployment.proxy.process.terminate()
    assert deployment.proxy.process.wait() == 0
    with pytest.raises(OSError, match="No such device or address"):
        os.open(path, os.O_WRONLY | os.O_NONBLOCK)  # nobody reads it
