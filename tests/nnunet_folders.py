"""Small model folders of nnU-Net v2 with random weights, as its trainer writes them."""

import json

import numpy as np
import torch

CONV = "torch.nn.modules.conv.Conv3d"
NORM = "torch.nn.modules.instancenorm.InstanceNorm3d"
IMPORTED = ["conv_op", "norm_op", "dropout_op", "nonlin"]
LABELS = {"background": 0, "liver": 1, "tumor": 2}
CT = {"mean": 50.0, "std": 40.0, "percentile_00_5": -60.0, "percentile_99_5": 180.0}


def architecture(name="PlainConvUNet", features=(4, 6, 8), strides=((1, 1, 1), (2, 2, 2), (2, 2, 2))):
    n = len(features)
    dimension = len(strides[0])
    blocks = "n_conv_per_stage" if name == "PlainConvUNet" else "n_blocks_per_stage"
    return {
        "network_class_name": f"dynamic_network_architectures.architectures.unet.{name}",
        "arch_kwargs": {
            "n_stages": n,
            "features_per_stage": list(features),
            "conv_op": CONV.replace("3", str(dimension)),
            "kernel_sizes": [[3] * dimension] * n,
            "strides": [list(stride) for stride in strides],
            blocks: [1] * n,
            "n_conv_per_stage_decoder": [1] * (n - 1),
            "conv_bias": True,
            "norm_op": NORM.replace("3", str(dimension)),
            "norm_op_kwargs": {"eps": 1e-5, "affine": True},
            "dropout_op": None,
            "dropout_op_kwargs": None,
            "nonlin": "torch.nn.LeakyReLU",
            "nonlin_kwargs": {"inplace": True},
        },
        "_kw_requires_import": IMPORTED,
    }


def configuration(**changes):
    return {
        "data_identifier": "nnUNetPlans_3d_fullres",
        "preprocessor_name": "DefaultPreprocessor",
        "batch_size": 2,
        "patch_size": [8, 16, 12],
        "median_image_size_in_voxels": [20.0, 30.0, 20.0],
        "spacing": [2.0, 1.0, 1.0],
        "normalization_schemes": ["ZScoreNormalization"],
        "use_mask_for_norm": [False],
        "resampling_fn_data": "resample_data_or_seg_to_shape",
        "resampling_fn_data_kwargs": {"is_seg": False, "order": 3, "order_z": 0, "force_separate_z": None},
        "resampling_fn_seg": "resample_data_or_seg_to_shape",
        "resampling_fn_seg_kwargs": {"is_seg": True, "order": 1, "order_z": 0, "force_separate_z": None},
        "architecture": architecture(),
        **changes,
    }


def plans(**changes):
    return {
        "dataset_name": "Dataset001_Tiny",
        "plans_name": "nnUNetPlans",
        "image_reader_writer": "SimpleITKIO",
        "transpose_forward": [0, 1, 2],
        "transpose_backward": [0, 1, 2],
        "configurations": {"3d_fullres": configuration(**changes)},
        "foreground_intensity_properties_per_channel": {"0": CT, "1": CT},
        "label_manager": "LabelManager",
        "experiment_planner_used": "ExperimentPlanner",
    }


def dataset(channels=("CT",), labels=None):
    return {
        "channel_names": {str(i): name for i, name in enumerate(channels)},
        "labels": labels or LABELS,
        "numTraining": 3,
        "file_ending": ".nii.gz",
    }


def random_network(content, n_channels, n_classes, seed=0):
    """The network that the plans describe, built by the package that nnU-Net uses."""
    from dynamic_network_architectures.architectures import unet
    from torch import nn

    arguments = dict(content["configurations"]["3d_fullres"]["architecture"]["arch_kwargs"])
    name = content["configurations"]["3d_fullres"]["architecture"]["network_class_name"].rpartition(".")[2]
    for key in IMPORTED:
        if arguments[key]:
            arguments[key] = getattr(nn, arguments[key].rpartition(".")[2])
    torch.manual_seed(seed)
    network = getattr(unet, name)(
        input_channels=n_channels, num_classes=n_classes, deep_supervision=True, **arguments
    ).eval()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return network


def checkpoint(network, content, description):
    """What the trainer of nnU-Net saves, with numbers of NumPy in its log."""
    return {
        "network_weights": network.state_dict(),
        "optimizer_state": torch.optim.SGD(network.parameters(), 0.01, momentum=0.99).state_dict(),
        "grad_scaler_state": None,
        "logging": {"mean_fg_dice": [np.float64(0.5), np.float32(0.25)], "epoch_end_timestamps": [1.5]},
        "_best_ema": np.float64(0.75),
        "current_epoch": 3,
        "init_args": {"plans": content, "configuration": "3d_fullres", "fold": 0, "dataset_json": description},
        "trainer_name": "nnUNetTrainer",
        "inference_allowed_mirroring_axes": (0, 1, 2),
    }


def write_folder(folder, *, channels=("CT",), labels=None, n_classes=3, seed=0, fold="fold_0", **changes):
    """Write a model folder. Return the network inside."""
    content, description = plans(**changes), dataset(channels, labels)
    network = random_network(content, len(channels), n_classes, seed)
    (folder / fold).mkdir(parents=True)
    (folder / "plans.json").write_text(json.dumps(content))
    (folder / "dataset.json").write_text(json.dumps(description))
    torch.save(checkpoint(network, content, description), folder / fold / "checkpoint_final.pth")
    return network
