"""The verbs around benchmarks: `pdserve bench` and `pdserve compare`."""
