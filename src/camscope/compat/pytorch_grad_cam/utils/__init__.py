"""Utilities under the names of pytorch-grad-cam."""

from camscope.compat.pytorch_grad_cam.utils.svd_on_activations import (
    get_2d_projection,
    get_2d_projection_kernel,
    get_2d_projection_with_sign_correction,
)

__all__ = ["get_2d_projection", "get_2d_projection_kernel", "get_2d_projection_with_sign_correction"]
