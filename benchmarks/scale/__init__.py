"""What orchestration costs as a deployment grows: `scripts/bench-scale`."""
