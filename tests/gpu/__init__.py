"""What only an NVIDIA GPU can tell; ``python -m tests.gpu`` runs it without pytest.

Needs torch built with CUDA, Triton and cuda-bindings.
"""
