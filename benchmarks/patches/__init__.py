"""What pdserve's patches cost a step of vLLM's scheduler."""
