"""A cluster of real nodes on this machine: Slurm, munge and sshd, for the tests of many nodes.

Nothing is installed and nothing of the machine's network, files or processes is touched. A sandbox (own mounts, PIDs,
network) holds the nodes; each has its own address, hostname, loopback, /etc/hosts, /proc, /dev/shm and /run. The
machine's files (the repository, /tmp) are the same everywhere, like a shared file system; /usr and /etc are overlays.

    with Cluster.up(nodes=3) as cluster:                 # tests.cluster.cluster
        first, *others = cluster.nodes                   # names: pdn0, pdn1, pdn2 (the prefix differs when taken)
        cluster.run(LOGIN, ["srun", "-N3", "hostname"])  # tests.cluster.spec.LOGIN: controller and login node

Node addresses exist in the namespaces only: connected to from the test process itself, packets would leave the machine
by its default route. What `inside` runs must make its connections before it returns: a client that connects later does
so from outside.

The fixtures of conftest.py (`slurm`, `bare`) share one cluster in a session; each test that uses one must leave it as
it was, which they check. Below: spec (the files of a cluster), machine (what it needs and shares), commands (what the
test process does on a node).
"""
