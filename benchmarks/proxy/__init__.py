"""What a proxy costs: the same mock engines and the same load in front of several proxies, interleaved in one run."""
