"""Metrics, the request log, spans, token usage."""
