"""Launches that others have written (srt-slurm, vLLM's recipes, shell scripts), read as recipes."""
