"""DScale: block-diffusion speculative decoding with adaptive verification."""

__version__ = "0.1.0"
