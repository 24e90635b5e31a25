"""pytorch-grad-cam 1.5.7 on camscope's explainers: its names, its signatures and its numbers.

    from camscope.compat.pytorch_grad_cam import GradCAM        # instead of: from pytorch_grad_cam import GradCAM

The maps equal those of pytorch-grad-cam to 1e-4. Where its numbers have a known defect, one CamscopeWarning names the call of
camscope that avoids the defect. Between calls the model has no hooks. The gradients of its parameters stay unchanged.
"""

import sys

from camscope.compat.pytorch_grad_cam import cam_classes, finer_cam_refine_cam_and_sess
from camscope.compat.pytorch_grad_cam.ablation_layer import AblationLayer, AblationLayerFasterRCNN, AblationLayerVit
from camscope.compat.pytorch_grad_cam.activations_and_gradients import ActivationsAndGradients
from camscope.compat.pytorch_grad_cam.cam_classes import (
    FEM,
    KPCA_CAM,
    AblationCAM,
    EigenCAM,
    EigenGradCAM,
    FullGrad,
    GradCAM,
    GradCAMElementWise,
    GradCAMPlusPlus,
    HiResCAM,
    LayerCAM,
    RandomCAM,
    ScoreCAM,
    SegEigenCAM,
    ShapleyCAM,
    XGradCAM,
)
from camscope.compat.pytorch_grad_cam.feature_factorization.deep_feature_factorization import (
    DeepFeatureFactorization,
    run_dff_on_image,
)
from camscope.compat.pytorch_grad_cam.finer_cam_refine_cam_and_sess import SESS, FinerCAM, RefineCAM
from camscope.compat.pytorch_grad_cam.guided_backprop import GuidedBackpropReLUModel

__all__ = [
    "FEM",
    "KPCA_CAM",
    "SESS",
    "AblationCAM",
    "AblationLayer",
    "AblationLayerFasterRCNN",
    "AblationLayerVit",
    "ActivationsAndGradients",
    "DeepFeatureFactorization",
    "EigenCAM",
    "EigenGradCAM",
    "FinerCAM",
    "FullGrad",
    "GradCAM",
    "GradCAMElementWise",
    "GradCAMPlusPlus",
    "GuidedBackpropReLUModel",
    "HiResCAM",
    "LayerCAM",
    "RandomCAM",
    "RefineCAM",
    "ScoreCAM",
    "SegEigenCAM",
    "ShapleyCAM",
    "XGradCAM",
    "run_dff_on_image",
]

# pytorch-grad-cam has one module for each class; here they are other names of two modules
_METHOD_MODULES = """
    ablation_cam eigen_cam eigen_grad_cam fem fullgrad_cam grad_cam grad_cam_elementwise grad_cam_plusplus hirescam kpca_cam
    layer_cam random_cam score_cam seg_eigen_cam shapley_cam xgrad_cam
"""
_COMBINED_CAM_MODULES = "finer_cam refine_cam sess"
for _names, _module in ((_METHOD_MODULES, cam_classes), (_COMBINED_CAM_MODULES, finer_cam_refine_cam_and_sess)):
    for _name in _names.split():
        sys.modules[f"{__name__}.{_name}"] = globals()[_name] = _module
