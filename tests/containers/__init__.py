"""Deployments in real containers: a docker daemon on each node of a test's cluster, and an image without a registry.

The daemon is Debian's docker.io, from the machine or unpacked into .cache/docker. It runs inside a node of
tests.cluster: its socket, data and containers are on the node's own /run, its PIDs are the node's, and all of it ends
with the cluster. Nothing of the machine's own docker is touched.

An image is a tar of empty folders. The host's /usr, the interpreter and its environment are mounted read-only by the
recipe, so that the same vLLM, LMCache and Mooncake run inside as outside.

What is not like a user's container: there is no registry (nothing can be pulled), the storage driver is vfs, no device
is given to a container, and limits stay those of the machine's root, who may not raise them everywhere.
"""
