"""Configuration of Prometheus and Grafana for a plan. Pure: the command line writes the files."""
