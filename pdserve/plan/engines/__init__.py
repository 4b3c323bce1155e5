"""Engine instances: command line, KV transfer, patches, CPUs and devices."""
