"""How an agent is started on a node. Every way gives the launcher the same thing: a link over a pipe."""
