"""srt-slurm: its recipes of both schemas, their jobs, services and variants."""
