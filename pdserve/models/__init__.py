"""The one place that knows models: config.json and safetensors headers to facts, and pure functions over them."""
