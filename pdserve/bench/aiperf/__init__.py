"""AIPerf as the load client: its environment, its configuration, its records."""

VERSION = "0.13.0"
NAME = f"AIPerf {VERSION}"
