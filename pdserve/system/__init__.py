"""The only code that touches the operating system: processes, /proc, shared memory, cgroups, CPUs."""
