"""As for the kernels: on the GPU where there is one, else in Triton's interpreter."""

from tests.engine.kernels.conftest import device, dtype, gpu, seed

__all__ = ["device", "dtype", "gpu", "seed"]
