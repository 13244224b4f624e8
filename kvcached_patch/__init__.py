"""kvcached-patch: elastic, correct KV-cache pools for stock vLLM."""

__version__ = "0.1.0"
