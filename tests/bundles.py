"""Small MONAI bundles, written by the tests."""

import json

import torch

UNET = {
    "_target_": "UNet",
    "spatial_dims": 3,
    "in_channels": 1,
    "out_channels": 2,
    "channels": [4, 8],
    "strides": [2],
    "norm": "batch",
}
METADATA = {
    "version": "0.1.0",
    "network_data_format": {"outputs": {"pred": {"channel_def": {"0": "background", "1": "spleen"}}}},
}


def write_bundle(folder, weights, *, suffix="json", **config):
    """Write a bundle. The config is JSON, which is YAML as well."""
    for part in ("configs", "models"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    content = {"bundle_root": ".", "network_def": UNET, **config}
    (folder / "configs" / f"inference.{suffix}").write_text(json.dumps(content))
    (folder / "configs" / "metadata.json").write_text(json.dumps(METADATA))
    torch.save(weights, folder / "models" / "model.pt")
    return folder
