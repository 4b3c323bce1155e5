"""A cluster of real nodes on this machine: Slurm, munge and sshd, for the tests of many nodes.

Nothing is installed and nothing of the machine's network, files or processes is touched. A sandbox (own mounts, PIDs,
network) holds the nodes; each has its own address, hostname, loopback, /etc/hosts, /proc, /dev/shm and /run. The
machine's files (the repository, /tmp) are the same everywhere, like a shared file system; /usr and /etc are read-only.

    with Cluster.up(nodes=3) as cluster:                 # tests.cluster.cluster
        first, *others = cluster.nodes                   # names: pdn0, pdn1, pdn2 (the prefix differs when taken)
        cluster.run(LOGIN, ["srun", "-N3", "hostname"])  # tests.cluster.spec.LOGIN: controller and login node

`Cluster.up(nodes, slurm=True)`
    slurm=False is quicker (bare hosts); slurm=SlurmSettings(more=("...",)) adds to slurm.conf.
    Raises LabError with what the machine lacks, or with the logs of what did not come up.
`run(node, argv, env=, cwd=, timeout=, stdin=)`   CompletedProcess with text; `output(...)` for what must succeed
`popen(node, argv, ...)`                          NodeProcess, a Popen whose signals reach the program itself
`connect(node, target, port)`, `inside(node, work)`   a socket, or any code of the test process, there
`address(node)`, `ssh_config`                     the latter for `ssh -F CONFIG NODE` on any node
`cut`/`heal`, `isolated`, `power_off`/`power_on`  faults of nodes
`wait_idle(nodes=)`, `states()`, `steps()`        what Slurm says
`processes(node)`, `segments(node)`, `left()`, `assert_nothing_left()`

Node addresses exist in the namespaces only: connected to from the test process itself, packets would leave the machine
by its default route. What `inside` runs must make its connections before it returns: a client that connects later does
so from outside.

The fixtures of conftest.py (`slurm`, `bare`) share one cluster in a session; each test that uses one must leave it as
it was, which they check. Below: spec (what a cluster is), machine (what it needs and shares), keeper -> sandbox
(processes and network), cluster and commands (the test process's side).
"""
