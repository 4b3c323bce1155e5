"""What can have many reasons: the death of a worker, messages with a text of their own, and pointers to others."""

from __future__ import annotations

from pdserve.logs.known_causes.rule import Rule, rule

GENERAL: tuple[Rule, ...] = (
    # Deaths inside
    rule(
        r"Worker proc (?P<name>\S+) died unexpectedly \(exit code: -9\)",
        "the worker {name} was killed (SIGKILL): most often by the kernel, out of memory",
        "dmesg | grep -i oom shows it; ask for less memory, or run fewer instances on this host",
    ),
    rule(
        r"Worker proc (?P<name>\S+) died unexpectedly \(exit code: (?P<code>-?\d+)\)",
        "the worker {name} died (exit code {code}), and the engine with it",
        "look for the worker's own last lines above",
    ),
    rule(
        r"TimeoutError: RPC call to (?P<call>execute_model|sample_tokens) timed out",
        "a worker has not answered {call} within VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS (300 s if not set): it hangs, in a "
        "kernel, a collective or a transfer, or gets no CPU",
        "py-spy dump --pid of the worker shows where, while it hangs; other ranks and nodes may be the cause",
    ),
    # What has a text of its own, but no rule
    rule(
        r"FileNotFoundError: \[Errno 2\] No such file or directory: '(?P<path>[^']+)'",
        "{path} does not exist, or cannot be created",
        "correct the path where the recipe names it, or create it on this host",
    ),
    rule(
        r"ModuleNotFoundError: No module named '(?P<name>[^']+)'",
        "the Python module {name} is not installed where this process runs",
        "install it into that environment, or correct engine.python and kv_connector_module_path",
    ),
    rule(
        r"^ +Value error, (?P<why>.+?)(?: \[type=value_error|$)",
        "vLLM refuses its configuration: {why}",
        "correct {args} or {role}.connector",
    ),
)

LAST_RESORT: tuple[Rule, ...] = (
    rule(
        r"retrieving ncclUniqueId from \[(?P<rank>\d+)\] via c10d key-value store.* got error",
        "rank {rank} of the instance ended before the ranks were connected",
        "look for the first error in the log of that rank, on its node",
    ),
    rule(
        r"^\((?:EngineCore|Worker)[^)]*\) ERROR [^\]]*\] "
        r"(?P<why>(?!Exception: WorkerProc initialization failed)[\w.]+(?:Error|Exception): .+)",
        "the engine core failed: {why}",
        "its traceback is the first one of EngineCore or Worker in the log; look there for what it was doing",
    ),
    rule(
        r"Engine core initialization failed|EngineCore (?:encountered an issue|failed to start)|EngineDeadError",
        "the engine core failed; its own error stands earlier in the log",
        "read the first ERROR of EngineCore or Worker in the log, not the last traceback",
    ),
    rule(
        r"Application startup failed",
        "the server failed while it started; the reason stands above that line",
        "read the traceback above 'Application startup failed' in the log",
    ),
)
"""Messages that only point at another one."""
