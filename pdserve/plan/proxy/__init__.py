"""The proxy, or vllm-router in its place, and what either leaves open."""
