"""What must be set before JAX, vLLM or MaxText are imported."""

from __future__ import annotations

import os

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "NEW_MODEL_DESIGN": "1",  # tpu-inference's mesh with the axes that MaxText names
    "TPU_BACKEND_TYPE": "jax",
    # Nobody is asked what TPU this is.
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v6e-1",
    "TPU_WORKER_ID": "0",
    "TPU_NAME": "none",
    "HF_HUB_OFFLINE": "1",
    # Two devices, to show sharding; code is compiled fast rather than made fast.
    "XLA_FLAGS": "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0 "
    "--xla_llvm_disable_expensive_passes=true",
}


def prepare(toggle: str, scan: str = "") -> None:
    """Set it, and how MaxText is patched, in this process and its children.

    scan: KVCACHED_PATCH_SCAN; what it adds is patched or not when tpu-inference is imported.
    """
    os.environ.update(ENVIRONMENT, KVCACHED_PATCH=toggle, KVCACHED_PATCH_SCAN=scan)
    if toggle == "1":
        from kvcached_patch import _startup

        _startup.install()
