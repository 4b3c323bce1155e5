"""`pdserve report`: results of benchmarks and sweeps as a page of one file, with pictures."""
