"""Sweeps: the file, the order of points, the record, the runner over fake engines."""
