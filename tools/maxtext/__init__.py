"""MaxText served by tpu-inference on CPU JAX: tiny models, stand-ins for the TPU kernels."""
