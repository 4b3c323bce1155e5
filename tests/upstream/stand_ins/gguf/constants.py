"""Names that vLLM 0.21 and 0.22 import."""


class Keys:
    """Never read: no model here is a GGUF file."""


class VisionProjectorType:
    """Likewise."""
