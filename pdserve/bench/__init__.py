"""`pdserve bench`: load on a running deployment, what the client and the engines measured, and whether it counts."""
