"""The load clients, `vllm bench serve` and AIPerf: what each is given, how its output is read, AIPerf's environment.

That is a virtual environment in the user's cache folder, made by `pdserve bench --setup` once for each version. AIPerf
has dozens of pinned packages, some of which the engines have in other versions: it never shares theirs. A marker file
is written last: without it the environment is half made, and is made anew.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from pdserve.bench import vllm_program
from pdserve.bench.figures import RequestRecord, UnreadableResultError, last_line, read_vllm_records
from pdserve.bench.snapshot import Clocks
from pdserve.bench.workload import SESSION_HEADER, Load, RequestTrace, Workload
from pdserve.errors import PreflightError
from pdserve.logs.lines import end_of, split
from pdserve.plan.model import Plan
from pdserve.system.process import marker, new_token, spawn

AIPERF_VERSION = "0.13.0"
AIPERF = f"AIPerf {AIPERF_VERSION}"
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_PATCHES = "PDSERVE_PATCHES"
KEY = "OPENAI_API_KEY"
"""Where clients find the key of the deployment. It is in no argument and in no file."""


@dataclass(frozen=True)
class ClientRun:
    """A run of the client: what it sends, and where its files are."""

    plan: Plan
    workload: Workload
    load: Load
    salt: str
    """Prompts of another salt are not in any cache, so that the same prompts can be measured again."""
    seed: int
    folder: Path
    name: str
    """Its files begin with this."""
    warmup: bool = False

    @property
    def result(self) -> Path:
        """Return the client's own result, one file."""
        return self.folder / f"{self.name}.{'jsonl' if self.workload.client_for(self.load) == 'aiperf' else 'json'}"

    @property
    def log(self) -> Path:
        """Return the file of the client's own output."""
        return self.folder / f"{self.name}.log"


def without_site_proxy(environ: Mapping[str, str]) -> dict[str, str]:
    """Return our environment without what would send a client's requests through the site's proxy."""
    return {name: value for name, value in environ.items() if name.lower() not in _PROXIES and name != _PATCHES}


def trusts_remote_code(plan: Plan, tokenizer: str) -> bool:
    """Tell whether the tokenizer's own code may run: it is that of the model, whose code the engines run already
    (trust-remote-code of the recipe)."""
    own = tokenizer in (plan.model_path, plan.model)
    return own and any("--trust-remote-code" in process.argv for process in plan.processes if process.is_engine)


def pinned_revision(plan: Plan, tokenizer: str) -> str | None:
    """Return the revision of the hub's model whose tokenizer this is; None: the recipe names none."""
    return plan.revision if plan.model_path is None and tokenizer == plan.model else None


_VLLM_BENCH = "vllm bench serve"


@dataclass(frozen=True)
class VllmClient:
    """Starts vLLM's client against a deployment."""

    program: str
    """An interpreter that has vLLM."""
    tokenizer: str
    """A folder, or an id of the hub."""
    name: str = _VLLM_BENCH
    timing: tuple[str, ...] = ()
    """How the titles begin of the processes that send and receive. This client is a single process."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """The versions that the run of the deployment has not recorded: it has vLLM's."""

    def prepare(self, run: ClientRun) -> list[str]:
        """Return the command of a run: a closed loop at a concurrency, Poisson arrivals at a rate."""
        plan, workload, load = run.plan, run.workload, run.load
        argv = [
            # -P: the folder of the program is no place to import from.
            *(self.program, "-P", vllm_program.__file__),
            *("--backend", "openai", "--base-url", plan.proxy_url, "--endpoint", "/v1/completions"),
            *("--model", plan.model_path or plan.model, "--served-model-name", plan.served_name),
            *("--tokenizer", self.tokenizer, "--dataset-name", "random", "--random-range-ratio", "0"),
            *("--random-input-len", str(workload.input_tokens), "--random-output-len", str(workload.output_tokens)),
            *("--num-prompts", str(load.requests), "--seed", str(run.seed), "--temperature", "0"),
            *("--extra-body", json.dumps({"cache_salt": run.salt})),
            # Its own test request and warm-ups are the first prompt of the measurement, which is then in the caches.
            *("--ready-check-timeout-sec", "0", "--num-warmups", "0"),
            *("--save-result", "--save-detailed", "--disable-tqdm"),
            *("--result-dir", str(run.result.parent), "--result-filename", run.result.name),
        ]
        if load.concurrency is not None:
            argv += ["--max-concurrency", str(load.concurrency)]
        if load.rate is not None:
            argv += ["--request-rate", str(load.rate)]
        # It takes no revision: code that nobody has pinned does not run where the recipe pins it.
        if trusts_remote_code(plan, self.tokenizer) and pinned_revision(plan, self.tokenizer) is None:
            argv.append("--trust-remote-code")
        return argv + (["--insecure"] if plan.proxy.tls is not None else [])

    def environment(self, run: ClientRun, environ: Mapping[str, str], key: str) -> dict[str, str]:
        """Return our environment without the site's proxy, and without a look at the hub where the tokenizer is a
        folder. The key of the deployment is here and nowhere else."""
        offline = {"HF_HUB_OFFLINE": "1"} if Path(self.tokenizer).is_absolute() else {}
        return {**without_site_proxy(environ), **offline, "VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1", KEY: key}

    def records(self, run: ClientRun, clocks: Clocks) -> tuple[RequestRecord, ...]:
        """Read the requests of a run that is over. vLLM's client counts by the monotonic clock already. Raises OSError
        and UnreadableResultError."""
        return read_vllm_records(run.result.read_text(encoding="utf-8", errors="replace"))

    def clean(self, run: ClientRun) -> None:
        """Do nothing: vLLM's client leaves nothing."""


def vllm_client(plan: Plan, *, python: str | None, tokenizer: str | None) -> VllmClient:
    """Return vLLM's client. `python` None: the interpreter of the engines. Raises PreflightError when that is not
    known."""
    engine = next(process for process in plan.processes if process.is_engine and process.probe is not None)
    program = python or engine.argv[0]
    if not Path(program).name.startswith("python"):
        raise PreflightError(
            "there is no client: the interpreter of the engines is not known",
            where=engine.name,
            cause=f"its command is not Python but {program}",
            todo="--python /path/to/python of an environment that has vLLM",
        )
    return VllmClient(program, tokenizer or plan.model_path or plan.model)


_NANOSECONDS, _MILLISECONDS = 1e9, 1e3
_CANCELLED = re.compile(r"Phase profiling .*complete \| completed=\d+, cancelled=(\d+)")


def read_aiperf_records(
    text: str, clocks: Clocks, asked: Mapping[tuple[str, int], int] | None = None
) -> tuple[RequestRecord, ...]:
    """Read the requests of the measured phase, in the order in which they were sent. `clocks`: of one moment, because
    AIPerf has the wall clock. `asked`: the length of each answer by session and turn. Raises UnreadableResultError.

    A stream that ended early has no error: the count of its tokens gives it away.
    """
    records = []
    # Not splitlines: JSON may hold U+2028 and U+0085 as they are.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            raw: dict[str, Any] = json.loads(line)
            if raw["metadata"]["benchmark_phase"] == "profiling":
                records.append(_record(raw, clocks, asked))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise UnreadableResultError(f"line {number}: {type(error).__name__}: {error}") from error
    return tuple(sorted(records, key=lambda record: record.started))


def cut_records(log: str, records: Sequence[RequestRecord]) -> tuple[RequestRecord, ...]:
    """Return the requests that were open when the time was over. AIPerf keeps no record of them, only their number in
    its log."""
    counts = _CANCELLED.findall(log)
    ended = max((record.ended for record in records), default=0.0)
    one = RequestRecord(started=ended, ok=False, prompt_tokens=0, output_tokens=0, ttft=0.0, gaps=(), e2e=0.0, cut=True)
    return (one,) * (int(counts[-1]) if counts else 0)


def _record(raw: Mapping[str, Any], clocks: Clocks, asked: Mapping[tuple[str, int], int] | None) -> RequestRecord:
    about, metrics = raw["metadata"], raw.get("metrics") or {}
    error = _error(raw.get("error"))
    output = int(_value(metrics, "usage_completion_tokens", "output_sequence_length"))
    started = about["request_start_ns"] / _NANOSECONDS - clocks.wall + clocks.monotonic
    took = (about["request_end_ns"] - about["request_start_ns"]) / _NANOSECONDS
    wanted = None if asked is None else asked.get((about.get("conversation_id"), about.get("turn_index")))
    return RequestRecord(
        started=started,
        # Without a first token there is no time to it, which would be 0 and keep any SLO.
        ok=not error and output > 0 and not about["was_cancelled"] and "time_to_first_token" in metrics,
        prompt_tokens=int(_value(metrics, "usage_prompt_tokens", "input_sequence_length")),
        output_tokens=output,
        ttft=_value(metrics, "time_to_first_token") / _MILLISECONDS,
        gaps=tuple(gap / _MILLISECONDS for gap in _values(metrics, "inter_chunk_latency")),
        e2e=_value(metrics, "request_latency") / _MILLISECONDS if "request_latency" in metrics else took,
        error=error,
        asked_output=wanted,
        cut=bool(about["was_cancelled"]),
    )


def _error(error: Any) -> str:
    """Return an error's last line, with the code that the server gave."""
    if not error:
        return ""
    if not isinstance(error, Mapping):
        return last_line(str(error))
    parts = (error.get("code"), error.get("type"), error.get("message"))
    return " ".join(last_line(str(part)) for part in parts if part) or "error"


def _value(metrics: Mapping[str, Any], *names: str) -> float:
    """Return the first of these metrics that is there; 0: none is."""
    return next((float(metrics[name]["value"]) for name in names if name in metrics), 0.0)


def _values(metrics: Mapping[str, Any], name: str) -> Iterator[float]:
    for value in metrics.get(name, {}).get("value", ()):
        yield float(value)


def configuration(
    run: ClientRun, tokenizer: dict[str, Any], artifacts: Path, trace: RequestTrace | None, trace_file: Path | None
) -> dict[str, Any]:
    """Return AIPerf's configuration of a run. `tokenizer`: its section of that name; `trace_file`: the lines of `trace`
    that AIPerf reads."""
    plan, workload = run.plan, run.workload
    return {
        "schemaVersion": "2.0",
        "randomSeed": run.seed,
        "benchmark": {
            "model": plan.served_name,
            "endpoint": {
                "url": plan.proxy_url,
                # Text completions have no template: their prompts have the length that is asked for.
                "type": "completions" if trace is None else "chat",
                "streaming": True,
                "timeout": plan.proxy.request_timeout_seconds,
                "apiKey": f"${{{KEY}}}",
                "useServerTokenCount": True,
                "useLegacyMaxTokens": True,
                "sessionHeader": workload.session_header or SESSION_HEADER,
                "extra": {"ignore_eos": True, "temperature": 0, "cache_salt": run.salt},
            },
            "tokenizer": tokenizer,
            "dataset": _synthetic(run) if trace is None else _file(trace, trace_file),
            "profiling": _phase(run.load, trace),
            "artifacts": {"dir": str(artifacts), "summary": ["json"], "records": ["jsonl"]},
            # What the engines count is read by us, and over the same window.
            "gpuTelemetry": {"enabled": False},
            "serverMetrics": {"enabled": False},
            "runtime": {"ui": "none"},
        },
    }


def _synthetic(run: ClientRun) -> dict[str, Any]:
    """Describe the prompts: one of its own for every request, from a random place of AIPerf's text. AIPerf's corpus
    `random` has ids that follow each other, which in a small vocabulary are the same ones in many prompts."""
    prompts = {
        "isl": {"mean": run.workload.input_tokens, "stddev": 0},
        "osl": {"mean": run.workload.output_tokens, "stddev": 0},
    }
    return {"type": "synthetic", "entries": run.load.requests, "prompts": prompts}


def _file(trace: RequestTrace, file: Path | None) -> dict[str, Any]:
    # A log of messages becomes lines of this format too, with the messages in them.
    block = {} if trace.block is None else {"blockSize": trace.block}
    return {"type": "file", "path": str(file), "format": "mooncake_trace", "sampling": "sequential", **block}


def _phase(load: Load, trace: RequestTrace | None) -> dict[str, Any]:
    """Return the phase that measures: until all is sent, or the time is over."""
    end: dict[str, Any] = {"requests": load.requests} if trace is None else {"sessions": len(trace.sessions)}
    if load.seconds is not None:
        end |= {"duration": load.seconds, "gracePeriod": load.grace}
    if load.rate is not None:
        return {"type": "poisson", "rate": load.rate, **end}
    return {"type": "concurrency", "concurrency": load.concurrency, **end}


_EXPORT = "profile_export.jsonl"
_NOT_THEIRS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
"""What leads to packages of ours; and offline, AIPerf takes a tokenizer's folder for an id of the hub."""


@dataclass(frozen=True)
class AiperfClient:
    """Starts AIPerf against a deployment."""

    program: str
    """The interpreter of its own environment."""
    tokenizer: str
    """The folder of the model: its built-in tokenizer needs the network."""
    trace: RequestTrace | None = None
    name: str = AIPERF
    timing: tuple[str, ...] = ("aiperf worker_",)
    """They send, and take the times. Others read its records and are busy after each answer; the loop of its timing
    manager never sleeps (0.13.0), so that its use of a CPU says nothing."""
    versions: Mapping[str, str] = field(default_factory=lambda: {"aiperf": AIPERF_VERSION})

    def prepare(self, run: ClientRun) -> list[str]:
        """Write AIPerf's configuration and the lines of the trace."""
        run.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _temporary(run).mkdir(mode=0o700)
        tokenizer: dict[str, Any] = {"name": self.tokenizer}
        if self._has_folder:
            tokenizer["name"] = put_into_cache(Path(self.tokenizer), _hub_cache(run))
        elif (revision := pinned_revision(run.plan, self.tokenizer)) is not None:
            tokenizer["revision"] = revision
        if trusts_remote_code(run.plan, self.tokenizer):
            tokenizer["trustRemoteCode"] = True
        trace, file = self._of(run), None
        if trace is not None:
            file = run.folder / ("trace.warmup.jsonl" if run.warmup else "trace.jsonl")
            if not file.exists():
                rows = (row for session in trace.sessions for row in session.rows)
                file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        config = run.folder / f"{run.name}.config.json"
        settings = configuration(run, tokenizer, _artifacts(run), trace, file)
        config.write_text(json.dumps(settings, indent=1), encoding="utf-8")
        # -I: no package but its own.
        return [self.program, "-I", "-m", "aiperf", "profile", "--config", str(config)]

    def environment(self, run: ClientRun, environ: Mapping[str, str], key: str) -> dict[str, str]:
        """Return AIPerf's environment. The key is where AIPerf's configuration names it."""
        ours = {name: value for name, value in without_site_proxy(environ).items() if name not in _NOT_THEIRS}
        insecure = {"AIPERF_HTTP_SSL_VERIFY": "false"} if run.plan.proxy.tls is not None else {}
        # It would keep every prompt in the user's cache folder, and leave its files and sockets in /tmp.
        places = {"AIPERF_DATASET_MMAP_CACHE_ENABLED": "false", "TMPDIR": str(_temporary(run))}
        hub = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(_hub_cache(run))} if self._has_folder else {}
        return {**ours, **insecure, **places, **hub, KEY: key}

    @property
    def _has_folder(self) -> bool:
        """Tell whether the tokenizer is a folder, rather than a name at Hugging Face."""
        return Path(self.tokenizer).is_dir()

    def records(self, run: ClientRun, clocks: Clocks) -> tuple[RequestRecord, ...]:
        """Move AIPerf's record of each request to the result's own file, and read it. `clocks`: read before the run
        began. Raises OSError and UnreadableResultError."""
        export = _artifacts(run) / _EXPORT
        export.replace(run.result)
        asked = None if self.trace is None else self.trace.asked_output()
        records = read_aiperf_records(run.result.read_text(encoding="utf-8", errors="replace"), clocks, asked)
        return records + cut_records(run.log.read_text(encoding="utf-8", errors="replace"), records)

    def clean(self, run: ClientRun) -> None:
        """Remove AIPerf's temporary files."""
        shutil.rmtree(_temporary(run), ignore_errors=True)

    def _of(self, run: ClientRun) -> RequestTrace | None:
        """Return the trace; for a warm-up only as many sessions as have its requests."""
        if self.trace is None or not run.warmup:
            return self.trace
        requests = itertools.accumulate(len(session.turns) for session in self.trace.sessions)
        enough = sum(so_far < run.load.requests for so_far in requests) + 1
        return replace(self.trace, sessions=self.trace.sessions[:enough])


def _hub_cache(run: ClientRun) -> Path:
    return _temporary(run) / "hub"


def _artifacts(run: ClientRun) -> Path:
    return run.folder / f"{run.name}.aiperf"


def _temporary(run: ClientRun) -> Path:
    """Return a folder of this run alone. Its sockets are there, so that it cannot be in the folder of the result: the
    name of a socket has 107 bytes at most."""
    return (
        Path(tempfile.gettempdir()) / f"pdserve-{hashlib.sha256(f'{run.salt}{run.folder}'.encode()).hexdigest()[:16]}"
    )


LoadClient = VllmClient | AiperfClient
"""A program that sends requests and records each of them."""


def client_of(
    plan: Plan,
    workload: Workload,
    load: Load,
    trace: RequestTrace | None,
    environ: Mapping[str, str],
    *,
    python: str | None,
    tokenizer: str | None,
) -> LoadClient:
    """Return the client for a workload and a load. `python` None: the interpreter of the engines, or that of `pdserve
    bench --setup`. Raises PreflightError when there is none."""
    if workload.client_for(load) == "vllm":
        return vllm_client(plan, python=python, tokenizer=tokenizer)
    return AiperfClient(python or installed_interpreter(environ), tokenizer or plan.model_path or plan.model, trace)


_COMMIT = "0" * 40


def put_into_cache(folder: Path, cache: Path) -> str:
    """Return the id that `folder` has in `cache`, offline: nothing of it is copied. Raises OSError."""
    # The hub's ids have letters, digits, and single dashes and dots.
    name = re.sub(r"[^A-Za-z0-9]+", "-", folder.resolve().name).strip("-")[:80] or "model"
    entry = cache / f"models--folder--{name}"
    (entry / "snapshots").mkdir(parents=True, mode=0o700)
    (entry / "refs").mkdir(mode=0o700)
    (entry / "refs" / "main").write_text(_COMMIT, encoding="ascii")
    (entry / "snapshots" / _COMMIT).symlink_to(folder.resolve(), target_is_directory=True)
    return f"folder/{name}"


DOWNLOAD = "1.2 GB on disk"
_REQUIREMENTS = "aiperf-requirements.txt"
_MARKER = "complete"
_LOG = "setup.log"
_STOP_SECONDS = 5.0
_LAST_LINES, _LOG_BYTES = 6, 8192

Show = Callable[[str], None]


def aiperf_requirements() -> Path:
    """Return the pins, as the wheel has them."""
    return Path(str(resources.files("pdserve.bench") / _REQUIREMENTS))


def aiperf_folder(environ: Mapping[str, str], python: str = sys.executable) -> Path:
    """Return the folder of the environment, made or not. The pins and the interpreter it is made with are in its
    name."""
    cache = environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    pins = hashlib.sha256(aiperf_requirements().read_bytes() + str(Path(python).resolve()).encode()).hexdigest()[:8]
    return Path(cache) / "pdserve" / f"aiperf-{AIPERF_VERSION}-{pins}"


def aiperf_interpreter(folder: Path) -> Path:
    """Return the path of the environment's own Python."""
    return folder / "bin" / "python"


def is_made(folder: Path) -> bool:
    """Return whether the environment was made to its end and the interpreter that it was made with is still there."""
    return (folder / _MARKER).is_file() and os.access(aiperf_interpreter(folder), os.X_OK)


def installed_interpreter(environ: Mapping[str, str]) -> str:
    """Return the interpreter that has AIPerf. Raises PreflightError when `--setup` has not made it."""
    folder = aiperf_folder(environ)
    if is_made(folder):
        return str(aiperf_interpreter(folder))
    half = "its environment is half made" if folder.exists() else "it is installed on demand only"
    raise PreflightError(
        f"{AIPERF} is not installed",
        where=str(folder),
        cause=f"{half}; it never shares the engines' environment",
        todo=f"pdserve bench --setup ({DOWNLOAD}), or --python of an environment that has it",
    )


async def make_aiperf(environ: Mapping[str, str], show: Show) -> Path:
    """Make AIPerf's environment, unless it is there, and return its folder. Raises PreflightError."""
    folder = aiperf_folder(environ)
    if is_made(folder):
        show(f"{AIPERF} is installed: {folder} (to make it anew, remove this folder)")
        return folder
    log = folder.with_name(f"{folder.name}.{_LOG}")
    show(f"{AIPERF} gets an environment of its own ({DOWNLOAD}), which takes minutes: {folder}")
    show(f"what pip says: {log}")
    pip = [str(aiperf_interpreter(folder)), "-I", "-m", "pip", "install", "--progress-bar", "off"]
    await _step([sys.executable, "-I", "-m", "venv", "--clear", str(folder)], environ, log)
    await _step([*pip, "--disable-pip-version-check", "-r", str(aiperf_requirements())], environ, log)
    (folder / _MARKER).write_text(f"{AIPERF_VERSION}\n")
    show(f"{AIPERF} is installed")
    return folder


async def _step(argv: list[str], environ: Mapping[str, str], log: Path) -> None:
    """Run one program, without what leads to packages of ours. Raises PreflightError."""
    ours = ("PYTHON", "PDSERVE_", "VIRTUAL_ENV")
    env = {name: value for name, value in environ.items() if not name.startswith(ours)}
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        child = spawn(argv, env=env, log=log, marker=marker("setup", new_token(), "setup"), control_stdin=False)
    except OSError as error:
        raise PreflightError(
            f"{AIPERF} could not be installed: {argv[0]} cannot be started",
            where=str(log),
            cause=error.strerror or str(error),
            todo="another folder: XDG_CACHE_HOME",
        ) from error
    try:
        ended = await child.wait()
    finally:
        await child.stop(_STOP_SECONDS)
    if ended.code != 0:
        raise PreflightError(
            f"{AIPERF} could not be installed: {Path(argv[0]).name} {ended}",
            where=str(log),
            cause="the last lines of its log say why",
            todo="correct it and run pdserve bench --setup again; pip.conf and PIP_INDEX_URL choose the package index",
            evidence=tuple(split(end_of(log, _LOG_BYTES))[-_LAST_LINES:]),
        )
