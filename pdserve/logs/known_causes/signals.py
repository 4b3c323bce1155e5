"""What ends a process without a word in its log."""

from __future__ import annotations

import signal

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
