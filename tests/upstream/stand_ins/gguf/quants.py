"""Names that vLLM 0.21 and 0.22 import."""


class GGMLQuantizationType:
    """Never read: no model here is a GGUF file."""
