"""Memory, disks and files."""

from __future__ import annotations

from pdserve.logs.known_causes.rule import ENGINES, Rule, rule

MEMORY: tuple[Rule, ...] = (
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
)
