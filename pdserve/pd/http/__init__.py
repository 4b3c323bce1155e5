"""HTTP/1.1 on both sides of the proxy: clients in front, pooled connections to engines behind. No policy in here."""
