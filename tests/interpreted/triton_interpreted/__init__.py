"""A CPU backend for Triton that compiles nothing: its kernels run under TRITON_INTERPRET=1.

vLLM's V2 model runner wants a Triton that has a CPU backend. There is none to install, but Triton's
own interpreter runs the runner's kernels on CPU tensors. Found by the entry point in the metadata
beside this package, whose parent is to be put on PYTHONPATH.
"""
