"""Numbers of camscope before and after a renaming: `write OUTDIR` in a checkout, `compare A B` anywhere.

    cd CHECKOUT && . renaming/env.sh && python renaming/snapshot.py write OUTDIR [--only maps,metrics]
    python renaming/snapshot.py compare A B [--only maps] [--short]

Exit 1: of `write`, if a part could not be computed; of `compare`, if a number of A is missing in B or differs by more than
1e-6 of the scale of its array, or a verdict's word or direction differs. When a rename breaks the tool, extend the tables below.
"""

import argparse
import collections
import dataclasses
import hashlib
import importlib
import inspect
import json
import math
import os
import pkgutil
import random
import re
import shutil
import sys
import time
import traceback
import warnings
from pathlib import Path

# ==== ADAPTER: all that depends on the names of the package; new names first, old names last ==========================

PACKAGE = "camscope"

# thing -> (names to try, modules to look in); if none has it, all modules of the package are searched for the names
THINGS = {
    "METHODS": (["METHODS"], ["camscope", "camscope.explainers"]),
    "METRICS": (["METRICS"], ["camscope.metrics"]),
    "draw": (["draw_radiograph", "draw_phantom", "draw"], ["camscope.phantom", "camscope.phantom.radiograph"]),
    "draw_volume": (["draw_volume"], ["camscope.phantom.volume"]),
    "as_input": (["as_input", "to_input", "to_model_input"], ["camscope.phantom", "camscope.phantom.network"]),
    "load_phantom_net": (["load_phantom_network", "load_phantom_model", "load_phantom_net"], ["camscope.phantom"]),
    "load_model": (["load_model"], ["camscope"]),
    "run_batch": (["run_batch"], ["camscope", "camscope.batch"]),
    "evaluate": (["evaluate", "evaluate_run", "measure"], ["camscope.evaluation", "camscope.measure"]),
    "phantom_audit": (["demo_audit", "demo_config", "phantom_audit", "write_demo", "demo_audit_config", "phantom_audit_config"],
                      ["camscope.audit.demo", "camscope.audit.demonstration"]),
    "audit_run": (["run_audit", "run", "audit"], ["camscope.audit", "camscope.audit.runner"]),
    "Test": (["PerturbationTest", "Trial"], ["camscope.metrics", "camscope.metrics.perturbation_test", "camscope.metrics.trial"]),
    "scoring": (["scoring", "model_probe", "score_context", "scoring_context", "evaluation_scores"],
                ["camscope.metrics", "camscope.metrics.model_probe", "camscope.metrics.scores"]),
    "randomisation": (["randomization", "weight_randomization", "randomization_test", "randomize_test", "randomisation"],
                      ["camscope.metrics", "camscope.metrics.sanity_checks", "camscope.metrics.sanity"]),
    "ScanPreprocess": (["ScanPreprocess"], ["camscope"]),
    "Preprocess": (["Preprocess"], ["camscope"]),
    "read_scan": (["read_scan"], ["camscope"]),
    "explain_slices": (["explain_slices"], ["camscope", "camscope.medical"]),
    "explain_patch": (["explain_patch"], ["camscope", "camscope.medical"]),
    "explain_patches": (["explain_patches"], ["camscope", "camscope.medical"]),
    "to_nifti": (["to_nifti"], ["camscope", "camscope.medical"]),
    "to_parametric_map": (["to_parametric_map"], ["camscope", "camscope.medical"]),
    "to_secondary_capture": (["to_secondary_capture"], ["camscope", "camscope.medical"]),
    "compare": (["compare"], ["camscope", "camscope.explainers"]),
    "fuse": (["fuse"], ["camscope", "camscope.explainers"]),
    "completeness": (["completeness"], ["camscope", "camscope.explainers"]),
    "extract": (["extract"], ["camscope", "camscope.hooks"]),
    "estimated": (["estimate_mean", "estimate", "clustered_mean", "estimated"],
                  ["camscope.metrics", "camscope.metrics.statistics"]),
    "difference": (["paired_difference", "mean_difference", "estimate_difference", "difference"],
                   ["camscope.metrics", "camscope.metrics.statistics"]),
    "holm": (["holm", "holm_adjust", "adjust_holm", "holm_correction"], ["camscope.metrics", "camscope.metrics.statistics"]),
    "Fused": (["Fused", "FusedExplainer", "Ensemble"], ["camscope", "camscope.explainers"]),
    "Augmented": (["Augmented", "AugmentedExplainer"], ["camscope", "camscope.explainers"]),
    "Denoised": (["Denoised", "DenoisedExplainer"], ["camscope", "camscope.explainers"]),
    "Contrast": (["Contrast", "ContrastExplainer"], ["camscope", "camscope.explainers"]),
    "Difference": (["Difference", "ClassDifference"], ["camscope", "camscope.targets"]),
    "Probability": (["Probability"], ["camscope", "camscope.targets"]),
    "Classes": (["Classes"], ["camscope", "camscope.targets"]),
    "DFF": (["DeepFeatureFactorization"], ["camscope", "camscope.explainers"]),
}

# keyword that this tool passes -> the names that a function or method may have for it
PARAMETERS = {
    "n_samples": ["n_samples", "samples"],
    "n_steps": ["n_steps", "steps"],
    "n_groups": ["n_groups", "groups"],
    "grid_size": ["grid_size", "cells"],
    "top": ["top", "top_k", "n_channels", "max_channels", "n_top"],
    "window": ["window", "window_size", "patch_size"],
    "segments": ["segments", "n_segments"],
    "areas": ["areas", "area_fractions"],
    "like": ["like", "reference", "source"],
    "profile": ["profile"],
    "masks": ["ground_truth", "masks"],
    "metrics": ["metrics"],
    "model": ["model"],
    "fill": ["fill", "imputation", "fill_value", "fill_values"],
    "fills": ["fills", "imputations", "fill_values"],
    "region": ["region", "region_size"],
    "normalize": ["normalize", "normalise"],
    "resize": ["resize"],
    "channels": ["channels"],
    "orientation": ["orientation"],
    "window_level": ["window"],
    "seeds": ["seeds"],
    "images": ["n_images", "images"],
    "how": ["how", "reduction", "mode", "method"],
    "axis": ["axis"],
    "groups": ["groups", "clusters"],
    "overlap": ["overlap"],
    "preprocess": ["preprocess"],
    "categories": ["class_names", "categories"],
}

# attributes of objects
ATTRIBUTES = {
    "attribution": ["attribution", "heat"],
    "numbers": ["numbers", "values"],
    "scores_x": ["x"],
    "attribute": ["attribute"],
    "explain": ["explain"],
    "slow": ["is_slow", "slow"],
    "needs": ["needs", "requires", "inputs"],
    "heatmap": ["heatmap"],
    "token_mask": ["marker_mask", "token_mask"],
    "standard_error": ["standard_error", "error"],
    "maps": ["maps", "attributions"],
    "factorise": ["factorize", "factorise", "find_concepts"],
}

# keys and names that mean the same; both sides are put into the form on the right (after lower case, without - _ . and spaces)
RENAMES = {
    "heat": "attribution", "world": "affine", "seen": "modelinputimage", "samples": "nsamples", "steps": "nsteps",
    "cells": "gridsize", "speaks": "direction", "error": "standarderror", "tokenmask": "markermask", "token": "marker",
    "gradcamplusplus": "gradcam++", "gradcampp": "gradcam++", "smoothgradcamplusplus": "smoothgradcam++",
    "smoothgradcampp": "smoothgradcam++", "gradrollout": "gradientrollout", "attentionrollout": "rollout",
    "zhoucam": "cam", "deepfeaturefactorization": "dff", "centergaussian": "center", "edgedetector": "edges",
    "categories": "classnames", "replicates": "nresamples", "measure": "evaluate", "evidence": "groundtruth",
    "blanked": "maskedauroc", "leak": "probeleakage", "tools": "explainers", "strategies": "clusters",
}
# British -> American inside words
SPELLINGS = [("localis", "localiz"), ("randomis", "randomiz"), ("normalis", "normaliz"), ("centre", "center"), ("colour", "color"),
             ("optimis", "optimiz"), ("factoris", "factoriz"), ("grey", "gray"), ("standardis", "standardiz")]
# words of a verdict that mean the same: both sides are put into the form on the right
VERDICT_VALUES = {"against": "contradicts", "for": "supports", "neither": "neutral"}
VERDICT_KEYS = {"word", "direction", "verdict", "outcome"}  # (normalized) strings that must agree, in the sections of STRICT
STRICT = {"audit"}
# strings by which the items of a JSON list are recognized on both sides (normalized names of keys)
IDENTITY = {"question", "finding", "subject", "method", "metric", "name", "region", "within", "column", "level", "kind", "fill",
            "control", "row", "id", "target", "layer", "other", "donor", "stage", "code"}
# numbers that are clocks or sizes of files, not results (normalized keys)
IGNORED = re.compile(r"seconds|duration|elapsed|^time|bytes|memory|version|^pid$|^date|created|finished|started|foreseen")
# metric -> what its function takes, for metrics whose `needs` has a word that NEEDS does not know
NEEDS = {
    "map": ["map", "attribution"], "mask": ["mask", "groundtruth"], "pair": ["pair", "maps", "twomaps"],
    "trial": ["trial", "test", "perturbationtest", "perturbation"], "again": ["again", "rerun", "recompute", "testandexplainer"],
    "explainer": ["explainer", "method"],
}
NEEDS_BY_METRIC = {
    "map": "sparseness entropy effectivearea",
    "mask": "pointinggame energyinside enrichment rankaccuracy averageprecision iouotsu iou iouswept matcheddice peakdistance "
            "centroiddistance",
    "trial": "averagedrop averageincrease averagegain deletion insertion lerfmorfgap aopc necessity sufficiency roadmorf roadlerf "
             "road infidelity faithfulnesscorrelation sensitivityn completenessgap",
    "again": "adcc", "pair": "pearson spearman ssim hog jaccard",
    "explainer": "maxsensitivity averagesensitivity stability acquisitionstability determinism batchinvariance randomlogit",
}
# config of the demo audit: (path in the config, by any of these names) -> value
AUDIT_CONFIG = [
    ((["sizes"], ["faithfulness", "deletion"]), 8),
    ((["sizes"], ["robustness"]), 8),
    ((["sizes"], ["sanity", "sanity_checks"]), 5),
    ((["sizes"], ["gallery"]), 4),
    ((["margins"], ["prevalence"]), 0.25),
]
AUDIT_STEPS = {"steps", "nsteps"}  # settings of integrated gradients in the config

_log: list[str] = []  # what the adapter had to guess


def note(text):
    if text not in _log:
        _log.append(text)


def norm(name):
    """A name as it is compared: lower case, no separators, American, renamed."""
    plain = re.sub(r"[-_\s.·]+", "", str(name).lower())
    for british, american in SPELLINGS:
        plain = plain.replace(british, american)
    return RENAMES.get(plain, plain)


def _module(name):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except Exception:
        return None


def _modules():
    package = importlib.import_module(PACKAGE)
    for info in pkgutil.walk_packages(package.__path__, f"{PACKAGE}.", onerror=lambda name: None):
        if not info.name.endswith("__main__") and (module := _module(info.name)) is not None:
            yield module


def thing(key):
    """An object of the package by the names that it has or had."""
    names, homes = THINGS[key]
    for name in names:
        for home in homes:
            module = _module(home)
            found = getattr(module, name, None) if module is not None else None
            if found is not None and not inspect.ismodule(found):
                return found
    for name in names:
        for module in _modules():
            found = vars(module).get(name)
            if found is not None and not inspect.ismodule(found) and getattr(found, "__module__", PACKAGE).startswith(PACKAGE):
                note(f"{key}: found as {module.__name__}.{name}; add the module to THINGS")
                return found
    raise LookupError(f"{key}: none of {', '.join(names)} is in {PACKAGE}; extend THINGS at the top of {__file__}")


def attribute(thing_, key, *default):
    """An attribute by the names that it has or had."""
    for name in ATTRIBUTES.get(key, [key]):
        if hasattr(thing_, name):
            return getattr(thing_, name)
    if default:
        return default[0]
    raise LookupError(f"{type(thing_).__name__} has none of {ATTRIBUTES.get(key, [key])}; extend ATTRIBUTES in {__file__}")


def keywords(function, wanted, strict=True):
    """The keywords that a function has for what is wanted. Not strict: those that it has."""
    accepted = inspect.signature(function).parameters
    given = {}
    for key, value in wanted.items():
        name = next((name for name in PARAMETERS.get(key, [key]) if name in accepted), None)
        if name is not None:
            given[name] = value
        elif strict:
            raise LookupError(f"{getattr(function, '__name__', function)} has none of {PARAMETERS.get(key, [key])} "
                              f"(it has {', '.join(accepted)}); extend PARAMETERS in {__file__}")
    return given


def call(function, *args, **wanted):
    return function(*args, **keywords(function, wanted))


def registry(key):
    """Normalized name -> member."""
    members = thing(key)
    found = {norm(name): one for name, one in members.items()}
    if len(found) != len(members):
        twice = [name for name, count in collections.Counter(map(norm, members)).items() if count > 1]
        raise LookupError(f"{key}: RENAMES makes several names one: {', '.join(twice)}")
    return found


# ==== WRITING =========================================================================================================

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
SEED = 20240
SMALL = {"n_samples": 2, "n_steps": 2, "n_groups": 4, "top": 6, "grid_size": 2, "window": 8, "segments": 4, "areas": (0.5,)}
FITTED = {"lime", "kernelshap"}  # which need more samples than cells
# methods whose default number of passes is too long here, beside those that say that they are slow
NOT_BY_DEFAULT = {"sscam", "iscam", "extremalperturbation", "meaningfulperturbation", "rise", "drise", "sobol", "hsic"}
HEAVY_METRICS = {"sensitivityn", "infidelity", "faithfulnesscorrelation"}  # of one map, one image
REAL_METHODS = ["gradcam", "gradcam++", "hirescam", "layercam", "eigencam", "saliency", "integratedgradients", "smoothgrad",
                "guidedbackprop", "scorecam", "occlusion", "lrp"]
REAL_TOKENS = ["gradcam", "rollout", "gradientrollout", "chefer", "legrad", "saliency", "integratedgradients"]
REAL_SETTINGS = {"n_samples": 3, "n_steps": 4, "top": 12, "window": 64}


def reseed():
    import numpy as np
    import torch

    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


def array(value):
    import numpy as np

    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float() if str(value.dtype) == "torch.bfloat16" else value
        return value.numpy()
    return np.asarray(value)


def numbers(value, depth=0):
    """Numbers of any object as nested dicts, lists and arrays; words are left out, but for enumerations in `status`."""
    import numpy as np

    if depth > 8 or callable(value) and not dataclasses.is_dataclass(value):
        return None
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, (str, bytes, Path)):
        return None
    if isinstance(value, np.ndarray) or hasattr(value, "detach"):
        found = array(value)
        return found if found.dtype.kind in "biufc" else None
    if isinstance(value, np.generic):
        return value.item()
    if hasattr(value, "items"):
        return {str(key): numbers(one, depth + 1) for key, one in value.items() if not isinstance(one, (str, bytes))}
    if isinstance(value, (list, tuple)):
        if value and all(isinstance(one, (bool, int, float, np.generic)) for one in value):
            return np.asarray(value)
        return [numbers(one, depth + 1) for one in value if not isinstance(one, (str, bytes))]
    if dataclasses.is_dataclass(value):
        return {field.name: numbers(getattr(value, field.name), depth + 1) for field in dataclasses.fields(value)
                if hasattr(value, field.name) and not isinstance(getattr(value, field.name), (str, bytes))}
    if hasattr(value, "model_dump"):
        return numbers(value.model_dump(), depth + 1)
    return None


def of_explanation(one):
    """Its numbers, and the map on the image."""
    found = numbers(one)
    for name in list(found):
        if norm(name) in ("parameters", "versions"):  # settings and packages, in words of their own
            del found[name]
    view = attribute(one, "heatmap")
    for size in ("image", "input"):
        try:
            found[f"view_{size}"] = array(view(size, scale=None))
            found[f"view_{size}_scaled"] = array(view(size))
        except Exception as error:
            note(f"heatmap({size!r}): {type(error).__name__}")
    for name in ("peak", "stride", "grid"):
        if hasattr(one, name):
            found[name] = numbers(getattr(one, name))
    if hasattr(one, "covered"):
        found["covered"] = array(one.covered("input"))
    if attribute(one, "attribution").ndim == 2:
        try:
            found["overlay"] = array(one.overlay())
        except Exception as error:
            note(f"overlay(): {type(error).__name__}")
    return found


class Parts:
    """What is written: a tree for each file; a part that fails is an error, and the others go on."""

    def __init__(self, folder):
        self.folder, self.errors, self.times = folder, {}, {}

    def save(self, file, tree):
        import numpy as np

        path = self.folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        flat = {}
        plain = _split(tree, flat, "")
        if flat:
            np.savez_compressed(path.with_suffix(path.suffix + ".npz") if path.suffix != ".npz" else path, **flat)
        path.with_name(path.name.removesuffix(".npz") + ".json").write_text(json.dumps(plain, indent=0, sort_keys=True))

    def part(self, name, work, *args):
        begun = time.monotonic()
        reseed()
        try:
            return work(*args)
        except Exception as error:
            self.errors[name] = f"{type(error).__name__}: {error}"
            print(f"  FAILED {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            if os.environ.get("SNAPSHOT_TRACE"):
                traceback.print_exc()
            return {"failed": "error"}
        finally:
            self.times[name] = round(time.monotonic() - begun, 2)


def _split(tree, flat, path):
    """Arrays go to the npz under their path; the rest is JSON, with "npz:PATH" in their places."""
    import numpy as np

    if isinstance(tree, dict):
        return {str(key): _split(one, flat, f"{path}/{str(key).replace('/', '|')}") for key, one in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_split(one, flat, f"{path}/{n}") for n, one in enumerate(tree)]
    if isinstance(tree, np.ndarray):
        name = path.strip("/") or "value"
        flat[name] = tree
        return f"npz:{name}"
    if isinstance(tree, np.generic):
        return tree.item()
    return tree


# -- networks and images

def phantoms():
    """Drawn radiographs, their masks and labels, and the net's input."""
    import numpy as np

    draw, as_input = thing("draw"), thing("as_input")
    drawn = [draw(seed, finding) for seed, finding in ((3, 1), (5, 2), (8, 3), (13, 0))]
    images, masks = np.stack([one.image for one in drawn]), np.stack([one.mask for one in drawn])
    return images, masks, [one.label for one in drawn], as_input(images)


def own_nets():
    """Small networks of this file, with fixed weights: of 2-D with everything that rewrites, of 3-D, of 1-D, a transformer."""
    import torch
    from torch import nn
    from torchvision.models.vision_transformer import VisionTransformer

    class Net(nn.Module):
        def __init__(self, rank, channels, classes=3):
            super().__init__()
            conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1]
            norm_ = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[rank - 1]
            self.stem, self.norm = conv(channels, 6, 3, 2, 1), norm_(6)
            self.relu, self.block = nn.ReLU(inplace=True), conv(6, 6, 3, 1, 1)
            self.last, self.end = conv(6, 8, 3, 2, 1), nn.ReLU()
            self.head = nn.Linear(8, classes)

        def forward(self, x):
            x = self.relu(self.norm(self.stem(x)))
            y = self.block(x)
            y = y + x
            return self.head(self.end(self.last(y)).flatten(2).mean(2))

    torch.manual_seed(SEED)
    made = {
        "own2d": (Net(2, 3), torch.randn(2, 3, 32, 24)),
        "own3d": (Net(3, 1), torch.randn(2, 1, 12, 16, 16)),
        "own1d": (Net(1, 2), torch.randn(2, 2, 64)),
        "ownvit": (VisionTransformer(image_size=32, patch_size=8, num_layers=3, num_heads=2, hidden_dim=16, mlp_dim=32,
                                     num_classes=3), torch.randn(2, 3, 32, 32)),
    }
    vit = made["ownvit"][0]
    nn.init.normal_(vit.heads.head.weight, std=0.5)
    return {name: (net.eval(), x) for name, (net, x) in made.items()}


def photos(count):
    """Photographs as (N,3,224,224) in the models' normalization, made without the package; paths and labels."""
    import numpy as np
    import torch
    from PIL import Image

    listed = json.loads((DATA / "photos" / "annotations.json").read_text())["images"][1 : count + 1]
    inputs = []
    for one in listed:
        image = Image.open(DATA / "photos" / "images" / one["file_name"]).convert("RGB").resize((224, 224), Image.BILINEAR)
        x = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).float() / 255
        inputs.append((x - torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)) / torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1))
    return torch.stack(inputs), [one["imagenet_label"] for one in listed], [str(DATA / "photos" / "images" / one["file_name"])
                                                                           for one in listed]


# -- sections

def settings_of(name, kind, wanted):
    """Canonical settings that a method has."""
    wanted = {**wanted, **({"n_samples": 20, "segments": None} if name in FITTED else {})}
    accepted = inspect.signature(kind).parameters
    return {key: value for key, value in wanted.items() if any(one in accepted for one in PARAMETERS[key])}


def one_map(kind, model, x, target, settings):
    """The raw map, or "error" where the method is not for this network."""
    reseed()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return array(attribute(kind(model, **keywords(kind, settings)), "attribute")(x, target))
    except LookupError:
        raise
    except Exception as error:
        return f"error {type(error).__name__}"


def write_maps(parts):
    methods, (images, masks, labels, x) = registry("METHODS"), phantoms()
    nets, net = own_nets(), thing("load_phantom_net")()
    load_model, applied = thing("load_model"), {}
    for name, kind in methods.items():
        small = settings_of(name, kind, SMALL)
        applied[name] = sorted(small)

        def maps(name=name, kind=kind, small=small):
            made, slow = {}, attribute(kind, "slow", False) or name in NOT_BY_DEFAULT
            made["phantom_small"] = one_map(kind, net, x[:2], labels[:2], small)
            if not slow:
                made["phantom_default"] = one_map(kind, net, x[1:2], labels[1], {})
            for title, (own, inputs) in nets.items():
                made[title] = one_map(kind, own, inputs, [1, 2], small)
            return made

        def explained(kind=kind, small=small):
            reseed()
            model = load_model("phantom")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return of_explanation(kind(model, **keywords(kind, small)).explain(images[0], labels[0]))

        tree = parts.part(f"maps/{name}", maps)
        if not str(tree.get("phantom_small", "")).startswith("error"):
            tree["explanation"] = parts.part(f"maps/{name}/explain", explained)
        parts.save(f"maps/{name}.npz", tree)
    parts.save("settings.npz", {"count": len(methods), "small": {name: {key: 1 for key in keys} for name, keys in applied.items()}})
    print(f"  {len(methods)} methods")


def write_real(parts):
    sys.path.insert(0, str(DATA))
    import models

    methods, (x, labels, paths) = registry("METHODS"), photos(2)
    preprocess = thing("Preprocess")
    for title, names in (("resnet18", REAL_METHODS), ("mobilenet_v2", REAL_METHODS), ("deit_tiny", REAL_TOKENS)):
        model, tree = getattr(models, title)(), {}
        for name in names:
            kind = methods.get(norm(name))
            if kind is None:
                parts.errors[f"real/{title}/{name}"] = "no such method"
                continue
            settings, heavy = settings_of(name, kind, REAL_SETTINGS), name in ("scorecam", "lrp", "smoothgrad", "occlusion")
            if title == "mobilenet_v2" and name in ("scorecam", "lrp", "occlusion"):
                continue
            inputs = x[:1] if heavy else x
            tree[name] = parts.part(f"real/{title}/{name}", one_map, kind, model, inputs, labels[: len(inputs)], settings)
        tree["explain"] = parts.part(f"real/{title}/explain", lambda model=model: of_explanation(
            methods["gradcam"](model, models.TARGET_LAYER[title], preprocess=call(
                preprocess, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), resize=256, crop=224)).explain(paths[0])))
        parts.save(f"real/{title}.npz", tree)


def write_api(parts):
    """What is not a method: phantoms, wrappers, targets, comparison, fusion, concepts, completeness, statistics."""
    import numpy as np
    import torch

    images, masks, labels, x = phantoms()
    methods, net = registry("METHODS"), thing("load_phantom_net")()
    gradcam, layercam = methods["gradcam"], methods["layercam"]
    model = thing("load_model")("phantom")

    def wrapped(make):
        return lambda: array(attribute(make(), "attribute")(x[:2], labels[:2]))

    def statistics():
        rng = np.random.default_rng(1)
        values, other, groups = rng.normal(size=60), rng.normal(size=60), np.arange(60) // 3
        return {"estimate": numbers(thing("estimated")(values, groups.tolist())),
                "difference": numbers(thing("difference")(values, other, groups.tolist())),
                "holm": numbers(list(thing("holm")([0.01, 0.04, 0.03, 0.2])))}

    def compared():
        made = thing("compare")(model, images[0])
        return {"correlations": array(made.correlations()), "spearman": array(made.correlations("spearman")),
                "maps": {norm(one.method): array(attribute(one, "attribution")) for one in made.explanations}}

    def fused():
        made = [gradcam(model, layer).explain(images[0], labels[0]) for layer in ("layer3", "layer4")]
        return of_explanation(thing("fuse")(made))

    def drawn():
        volume = thing("draw_volume")(4, True)
        found = {"images": images, "masks": masks, "labels": np.array(labels), "x": array(x), "volume": volume.values,
                 "volume_mask": volume.mask}
        return found

    def concepts():
        tool = thing("DFF")(model)
        return numbers(attribute(tool, "factorise")([images[0], images[1]]))

    tree = {
        "phantoms": parts.part("api/phantoms", drawn),
        "logits": parts.part("api/logits", lambda: array(net(x))),
        "augmented": parts.part("api/augmented", wrapped(lambda: thing("Augmented")(gradcam(net)))),
        "denoised": parts.part("api/denoised", wrapped(lambda: thing("Denoised")(gradcam(net)))),
        "contrast": parts.part("api/contrast", lambda: array(attribute(thing("Contrast")(gradcam(net), 1, 2), "attribute")(x[:2]))),
        "fused": parts.part("api/fused", wrapped(lambda: thing("Fused")([gradcam(net, "layer3"), gradcam(net, "layer4")]))),
        "difference": parts.part("api/difference", lambda: array(gradcam(net).attribute(x[:2], thing("Difference")(1, 2)))),
        "probability": parts.part("api/probability", lambda: array(gradcam(net).attribute(x[:2], thing("Probability")(1)))),
        "classes": parts.part("api/classes", lambda: [of_explanation(one) for one in
                                                      gradcam(model).explain_classes(images[0], [0, 1, 2, 3])]),
        "batch": parts.part("api/explain_batch", lambda: [of_explanation(one) for one in
                                                          gradcam(model).explain_batch(list(images), labels)]),
        "several": parts.part("api/explain_methods", lambda: [array(attribute(one, "attribution")) for one in
                                                              gradcam(model).explain_methods(
                                                                  images[0], [gradcam, layercam, methods["hirescam"]], 1)]),
        "completeness": parts.part("api/completeness", lambda: numbers(vars(thing("completeness")(net, x[:2], labels[:2])))),
        "compare": parts.part("api/compare", compared),
        "fuse": parts.part("api/fuse", fused),
        "concepts": parts.part("api/concepts", concepts),
        "extract": parts.part("api/extract", lambda: numbers(thing("extract")(net, ["layer2", "layer4"], x[:1]))),
        "statistics": parts.part("api/statistics", statistics),
    }
    parts.save("api.npz", tree)


def needs_of(metric, name):
    word = norm(attribute(metric, "needs", ""))
    for canonical, words in NEEDS.items():
        if word in words:
            return canonical
    found = next((canonical for canonical, names in NEEDS_BY_METRIC.items() if name in names.split()), None)
    if found is None:
        raise LookupError(f"metric {name} needs {word!r}: extend NEEDS or NEEDS_BY_METRIC in {__file__}")
    note(f"metric {name}: needs {word!r} is taken as {found!r}")
    return found


def number_of(work):
    """A number, numbers, or "undefined"."""
    reseed()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = work()
    except Exception as error:
        if "Undefined" in type(error).__name__:
            return "error undefined"
        raise
    if hasattr(found, "reasons") or hasattr(found, "numbers"):  # values of a batch
        found = [math.nan if one is None else one for one in attribute(found, "numbers")]
    return array(found).astype("float64")


def write_metrics(parts):
    import numpy as np
    import torch

    images, masks, labels, x = phantoms()
    methods, metrics, net = registry("METHODS"), registry("METRICS"), thing("load_phantom_net")()
    model = thing("load_model")("phantom")
    chosen = [name for name in ("gradcam", "integratedgradients", "edges") if name in methods]
    tools = {name: methods[name](model, **keywords(methods[name], settings_of(name, methods[name], {"n_steps": 8})))
             for name in chosen}
    maps = {name: np.stack([array(attribute(tool.explain(images[i], labels[i]), "heatmap")("input", scale=None)) for i in range(3)])
            for name, tool in tools.items()}
    parts.save("metrics/maps.npz", maps)
    Test, scoring = thing("Test"), thing("scoring")

    def again(tool):
        import torch.nn.functional as F

        def made(masked):
            raw = tool.attribute(masked, labels[: len(masked)])
            return F.interpolate(raw[:, None], masked.shape[2:], mode="bilinear")[:, 0]

        return made

    def values(name, metric):
        needs, tree = needs_of(metric, name), {}
        for title, heat in maps.items():
            tool = tools[title]
            if needs == "map":
                tree[title] = [number_of(lambda i=i: metric(heat[i])) for i in range(3)]
            elif needs == "mask":
                tree[title] = [number_of(lambda i=i: metric(heat[i], masks[i])) for i in range(3)]
            elif needs == "pair":
                tree[title] = [number_of(lambda i=i: metric(heat[i], maps["gradcam"][(i + 1) % 3])) for i in range(3)]
            elif needs == "explainer":
                if title != "edges" or name != "randomlogit":
                    tree[title] = [number_of(lambda i=i: metric(tool, x[i : i + 1], labels[i])) for i in range(1)]
            else:
                count = 1 if name in HEAVY_METRICS else 3
                if count == 1 and title != "gradcam":
                    continue
                for setting in ({}, {"fill": "blur", "n_steps": 6, "region": 16}):
                    if setting and title == "edges":
                        continue
                    with scoring(net, x[:count], labels[:count]) as scores:
                        test = call(Test, heat[:count], scores, **setting)
                        more = (again(tool),) if needs == "again" else ()
                        tree[f"{title}{'_blur' if setting else ''}"] = number_of(lambda: metric(test, *more))
        return tree

    tree = {name: parts.part(f"metrics/{name}", values, name, metric) for name, metric in metrics.items()}
    for order in ("cascading", "independent"):
        tree[f"sanity test {order}"] = parts.part(f"metrics/randomisation/{order}", lambda order=order: numbers(
            call(thing("randomisation"), methods["gradcam"](net), x[:3], labels[:3], order=order, seeds=(0, 1))))
    parts.save("metrics/values.npz", tree)
    print(f"  {len(metrics)} metrics")


def table_of(path):
    """A Parquet or CSV table as rows: numbers, arrays, and strings by which rows are recognized."""
    import numpy as np
    import pyarrow.parquet as parquet

    rows = []
    for row in parquet.read_table(path).to_pylist():
        kept = {}
        for name, value in row.items():
            if IGNORED.search(norm(name)):
                continue
            if isinstance(value, list) and value and all(isinstance(one, (bool, int, float)) for one in value):
                kept[name] = np.asarray(value)
            elif isinstance(value, str):
                if norm(name) in IDENTITY or norm(name) == "status":
                    kept[name] = value
            elif value is None or isinstance(value, (bool, int, float)):
                kept[name] = value
        rows.append(kept)
    return rows


def tables(folder):
    """All tables in a folder by their place in it; the parts of one dataset are one table."""
    found = collections.defaultdict(list)
    for path in sorted(Path(folder).rglob("*.parquet")):
        place = path.relative_to(folder)
        name = "/".join(place.parts[:-1]) if re.match(r"part-\d+", path.name) else str(place.with_suffix(""))
        found[name.replace("/parts", "") or "rows"] += table_of(path)
    return dict(found)


def write_batch(parts):
    from PIL import Image

    work = parts.folder / "work" / "batch"
    shutil.rmtree(work, ignore_errors=True)
    (work / "images").mkdir(parents=True)
    (work / "masks").mkdir()
    draw, lines = thing("draw"), ["path,id,target,age"]
    for n in range(12):
        one = draw(100 + n, n % 4)
        Image.fromarray(one.image).save(work / "images" / f"image{n:02}.png")
        Image.fromarray((one.mask * 255).astype("uint8")).save(work / "masks" / f"image{n:02}.png")
        lines.append(f"images/image{n:02}.png,image{n:02},{n % 4},{40 + n}")
    (work / "manifest.csv").write_text("\n".join(lines) + "\n")
    model, methods = thing("load_model")("phantom"), registry("METHODS")
    tools = [methods["gradcam"](model), methods["saliency"](model),
             methods["integratedgradients"](model, **keywords(methods["integratedgradients"], {"n_steps": 4}))]

    def run():
        thing("run_batch")(tools, str(work / "manifest.csv"), str(work / "run"))
        return tables(work / "run")

    def evaluated():
        function = thing("evaluate")
        call(function, str(work / "run"), str(work / "measures"), masks=str(work / "masks"))
        call(function, str(work / "run"), str(work / "asked"), model=model, n_steps=4, region=32)
        return {"alone": tables(work / "measures"), "asked": tables(work / "asked")}

    parts.save("batch/run.npz", parts.part("batch/run", run))
    parts.save("batch/evaluation.npz", parts.part("batch/evaluation", evaluated))


def _entry(table, names):
    return next((name for name in table if norm(name) in {norm(one) for one in names}), None)


def write_audit(parts):
    work = parts.folder / "work" / "audit"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    for title, p in (("confounded", 0.95), ("clean", 0.5)):

        def audited(title=title, p=p):
            config = call(thing("phantom_audit"), work / title, p, images=72)
            plain = config.model_dump()
            for places, value in AUDIT_CONFIG:
                table = plain
                for names in places[:-1]:
                    table = table[_entry(table, names)]
                if (key := _entry(table, places[-1])) is None:
                    raise LookupError(f"the audit's config has none of {places[-1]} (it has {', '.join(table)}): extend AUDIT_CONFIG")
                table[key] = value
            explain = plain[_entry(plain, ["explain", "explanation", "explanations"])]
            for settings in explain[_entry(explain, ["settings", "parameters", "options"])].values():
                for name in settings:
                    if norm(name) in {norm(one) for one in AUDIT_STEPS}:
                        settings[name] = 2
            if title == "clean":
                plain[_entry(plain, ["skip", "skip_stages"])] = skipped(plain)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                thing("audit_run")(type(config).model_validate(plain), work / title / "audit")
            folder = work / title / "audit"
            (summary,) = folder.rglob("summary.json")
            found = tables(folder)
            return {"summary": json.loads(summary.read_text()), "tables": found}

        parts.save(f"audit/{title}.npz", parts.part(f"audit/{title}", audited))


def skipped(plain):
    """The stages that the second audit leaves out, by the names that the config takes."""
    return ("faithfulness", "sanity")


def write_medical(parts):
    import nibabel
    import numpy as np
    import pydicom
    import torch

    os.environ[f"{PACKAGE.upper()}_KEY"] = "key of the snapshot"
    work = parts.folder / "work" / "medical"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    volumes = sorted((DATA / "hippocampus" / "images").iterdir())[:2]
    nets = own_nets()
    torch.manual_seed(SEED)
    import torch.nn as nn

    flat = nn.Sequential(nn.Conv2d(1, 6, 3, 2, 1), nn.ReLU(), nn.Conv2d(6, 8, 3, 1, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
                         nn.Flatten(), nn.Linear(8, 3)).eval()
    deep = nets["own3d"][0]
    gradcam, saliency, Scan = registry("METHODS")["gradcam"], registry("METHODS")["saliency"], thing("ScanPreprocess")

    def way(**settings):
        return call(Scan, **settings)

    def scans():
        found = {path.name: numbers(thing("read_scan")(str(path))) for path in volumes}
        for file in ("CT_small.dcm", "MR_small.dcm"):
            found[file] = numbers(thing("read_scan")(str(dicoms / file)))
        return found

    def sliced(axis):
        made = call(thing("explain_slices"), gradcam(flat, "3", preprocess=way(normalize="range")), str(volumes[0]), 2, axis=axis)
        found = {"volume": of_explanation(made.volume), "scores": array(made.scores), "probabilities": array(made.probabilities),
                 "highest": int(made.highest)}
        return found

    def volume(kind, path, **settings):
        return kind(deep, preprocess=way(**settings)).explain(str(path), 1)

    def nifti():
        one = volume(gradcam, volumes[0], normalize="zscore", orientation="RAS")
        path = work / "map.nii.gz"
        call(thing("to_nifti"), one, path, like=str(volumes[0]))
        back = nibabel.load(path)
        header = {name: np.asarray(back.header[name]) for name in ("pixdim", "sform_code", "qform_code", "cal_min", "cal_max", "dim")}
        return {"data": np.asarray(back.dataobj), "affine": back.affine, "header": header, "explanation": of_explanation(one)}

    dicoms = Path(pydicom.__file__).parent / "data" / "test_files"

    def dicom(file):
        source = dicoms / file
        one = gradcam(flat, "3", preprocess=way(normalize="range", resize=64)).explain(str(source), 2)
        path = work / f"map-{file}"
        call(thing("to_parametric_map"), one, str(source), path, profile="clinical")
        back = pydicom.dcmread(path)
        data = np.frombuffer(back.FloatPixelData, "<f4").reshape(int(back.NumberOfFrames), back.Rows, back.Columns)
        places = [[float(value) for value in group.PlanePositionSequence[0].ImagePositionPatient]
                  for group in back.PerFrameFunctionalGroupsSequence]
        call(thing("to_nifti"), one, work / f"map-{file}.nii", like=str(source))
        flat_back = nibabel.load(work / f"map-{file}.nii")
        return {"data": data, "positions": np.array(places), "explanation": of_explanation(one),
                "nifti": np.asarray(flat_back.dataobj), "nifti_affine": flat_back.affine}

    parts.save("medical.npz", {
        "scans": parts.part("medical/scans", scans),
        "slices0": parts.part("medical/slices0", sliced, 0),
        "slices2": parts.part("medical/slices2", sliced, 2),
        "volume": parts.part("medical/volume", lambda: of_explanation(volume(gradcam, volumes[1], normalize="zscore"))),
        "volume_saliency": parts.part("medical/saliency", lambda: of_explanation(volume(saliency, volumes[1], normalize="zscore", resize=32))),
        "patch": parts.part("medical/patch", lambda: of_explanation(
            thing("explain_patch")(gradcam(deep, preprocess=way(normalize="zscore")), str(volumes[0]), (4, 8, 4), (16, 24, 16), 1))),
        "patches": parts.part("medical/patches", lambda: of_explanation(
            thing("explain_patches")(gradcam(deep, preprocess=way(normalize="zscore", resize=32)), str(volumes[0]), (16, 16, 16), 1))),
        "nifti": parts.part("medical/nifti", nifti),
        "ct": parts.part("medical/ct", dicom, "CT_small.dcm"),
        "mr": parts.part("medical/mr", dicom, "MR_small.dcm"),
    })


SECTIONS = {"maps": write_maps, "real": write_real, "api": write_api, "metrics": write_metrics, "batch": write_batch,
            "audit": write_audit, "medical": write_medical}


def write(folder, only):
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    package, begun = importlib.import_module(PACKAGE), time.monotonic()
    print(f"{PACKAGE} {package.__version__} of {Path(package.__file__).parent}, torch {torch.__version__}", flush=True)
    if not Path(package.__file__).resolve().is_relative_to(Path.cwd().resolve()):
        print(f"WARNING: that is not the checkout {Path.cwd()}: source out/env.sh after cd into it")
    folder = Path(folder).resolve()
    if folder.exists() and any(folder.iterdir()) and not (folder / "meta.json").exists():
        sys.exit(f"{folder} holds something else; choose another folder")
    for name in SECTIONS if not only else only:
        for path in (folder / name, *folder.glob(f"{name}.*")):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    meta_file, names = folder / "meta.json", list(only or SECTIONS)
    old = json.loads(meta_file.read_text()) if only and meta_file.exists() else {}
    if old and old.get("package") != str(Path(package.__file__).parent):
        old = {} if not old.get("package") else sys.exit(f"{folder} is of {old['package']}: write all of it, or choose another folder")
    if not old:
        meta_file.write_text("{}")
    parts, took = Parts(folder), {}
    for name in names:
        start = time.monotonic()
        print(f"{name} ...", flush=True)
        parts.part(name, SECTIONS[name], parts)
        took[name] = round(time.monotonic() - start, 1)
        print(f"  {took[name]} s", flush=True)
    shutil.rmtree(folder / "work", ignore_errors=True) if not os.environ.get("SNAPSHOT_KEEP") else None
    before = {name: error for name, error in old.get("errors", {}).items() if name.split("/")[0] not in names}
    meta = {"package": str(Path(package.__file__).parent), "version": package.__version__,
            "sections": [name for name in SECTIONS if name in names or name in old.get("sections", [])],
            "seconds": {**old.get("seconds", {}), **took}, "errors": {**before, **parts.errors},
            "slowest": dict(sorted(parts.times.items(), key=lambda one: -one[1])[:25]), "notes": _log}
    meta_file.write_text(json.dumps(meta, indent=1))
    for text in _log:
        print("note:", text)
    for name, error in parts.errors.items():
        print(f"FAILED {name}: {error[:400]}")
    count = sum(size(one) for section in sections_of(folder, meta["sections"]).values() for one in section.values())
    print(f"{count:,} values, {len(parts.errors)} parts failed, {time.monotonic() - begun:.0f} s -> {folder}")
    return 1 if parts.errors else 0


# ==== COMPARING =======================================================================================================

LIMIT = 1e-6


def load(path):
    """A tree of a file and the arrays beside it."""
    import numpy as np

    plain = json.loads(path.read_text())
    npz = path.with_suffix(".npz")
    arrays = dict(np.load(npz)) if npz.exists() else {}

    def joined(one):
        if isinstance(one, dict):
            return {key: joined(value) for key, value in one.items()}
        if isinstance(one, list):
            return [joined(value) for value in one]
        return arrays[one[4:]] if isinstance(one, str) and one.startswith("npz:") else one

    return joined(plain)


def sections_of(folder, names):
    """Section -> file -> tree."""
    found = {}
    for name in names:
        files = sorted((folder / name).rglob("*.json")) if (folder / name).is_dir() else sorted(folder.glob(f"{name}.json"))
        found[name] = {str(path.relative_to(folder).with_suffix("")): load(path) for path in files}
    if "maps" in names and (folder / "settings.json").exists():
        found["maps"]["settings"] = load(folder / "settings.json")
    return found


def keys_of(table):
    """Normalized key -> key; those that RENAMES would make one keep their own names."""
    counts = collections.Counter(map(norm, table))
    return {norm(key) if counts[norm(key)] == 1 else str(key): key for key in table if not IGNORED.search(norm(key))}


def size(tree):
    """How many numbers there are in it."""
    if isinstance(tree, dict):
        return sum(size(one) for key, one in tree.items() if not IGNORED.search(norm(key)))
    if isinstance(tree, list):
        return sum(map(size, tree))
    return int(tree.size) if hasattr(tree, "size") else int(isinstance(tree, (int, float)))


def leaves(tree, path=""):
    if isinstance(tree, dict):
        for key, one in tree.items():
            if not IGNORED.search(norm(key)):
                yield from leaves(one, f"{path}/{norm(key)}")
    elif isinstance(tree, list):
        for n, one in enumerate(tree):
            yield from leaves(one, f"{path}/{n}")
    elif tree is not None:
        yield path, tree


def digest_leaf(value):
    import numpy as np

    if isinstance(value, str):
        return None
    whole = np.asarray(value)
    whole = whole.astype(np.float64) if whole.dtype.kind != "c" else whole
    return hashlib.sha256(str(whole.shape).encode() + np.ascontiguousarray(whole + 0.0).tobytes()).hexdigest()


def digest(tree):
    """Of the numbers, whatever their names and order; None for too little to be recognized by."""
    each = [one for _, value in leaves(tree) if (one := digest_leaf(value)) is not None]
    weight = sum(getattr(value, "size", 1) for _, value in leaves(tree)
                 if not isinstance(value, str) and (hasattr(value, "size") or isinstance(value, float)))
    return hashlib.sha256("".join(sorted(each)).encode()).hexdigest() if each and weight else None


class Row:
    """A line of the table."""

    def __init__(self):
        self.values, self.exact, self.absolute, self.relative, self.problems = 0, True, 0.0, 0.0, []


class Comparison:
    def __init__(self):
        self.rows, self.renamed, self.texts, self.missing, self.new = {}, [], [], [], []
        self.group = None
        self.strict = False
        self.words = collections.Counter()

    @property
    def row(self):
        return self.rows.setdefault(self.group, Row())

    def problem(self, text):
        self.row.problems.append(text)

    def trees(self, a, b, path):
        if isinstance(a, dict) and isinstance(b, dict):
            return self.dicts(a, b, path)
        if isinstance(a, list) and isinstance(b, list):
            return self.lists(a, b, path)
        if isinstance(a, (dict, list)) or isinstance(b, (dict, list)):
            self.without(a, path)
            self.added(b, path)
            return None
        return self.values(a, b, path)

    def dicts(self, a, b, path):
        one, two = keys_of(a), keys_of(b)
        for key in [key for key in one if key in two]:
            self.trees(a[one[key]], b[two[key]], f"{path}/{key}")
        gone, come = [key for key in one if key not in two], [key for key in two if key not in one]
        marks = collections.defaultdict(list)
        for key in come:
            marks[digest(b[two[key]])].append(key)
        for key in gone:
            mark = digest(a[one[key]])
            if mark is not None and len(marks.get(mark, ())) == 1:
                other = marks.pop(mark)[0]
                come.remove(other)
                self.renamed.append(f"{path}/{one[key]} -> {two[other]}")
                self.trees(a[one[key]], b[two[other]], f"{path}/{key}")
            else:
                self.without(a[one[key]], f"{path}/{key}")
        for key in come:
            self.added(b[two[key]], f"{path}/{key}")

    def lists(self, a, b, path):
        rest = (list(range(len(a))), list(range(len(b))))
        if a and b and all(isinstance(one, dict) for one in (*a, *b)):
            keys = sorted(set.intersection(*({norm(key) for key, value in one.items() if isinstance(value, (str, int))} & IDENTITY
                                             for one in (*a, *b))))
            places = collections.defaultdict(list)
            for n, one in enumerate(b):
                places[self.identity(one, keys)].append(n)
            left = []
            for n, one in enumerate(a):
                name = self.identity(one, keys)
                if keys and places.get(name):
                    other = places[name].pop(0)
                    rest[1].remove(other)
                    self.trees(one, b[other], f"{path}/{' '.join(map(str, name))}")
                else:
                    left.append(n)
            rest = (left, rest[1])
        elif all(not isinstance(one, (dict, list)) for one in (*a, *b)) and not any(isinstance(one, str) for one in (*a, *b)):
            if len(a) == len(b):
                for n, pair in enumerate(zip(a, b)):
                    self.values(*pair, f"{path}/{n}")
                return
        elif all(isinstance(one, str) for one in (*a, *b)):
            self.texts += [f"{path}: {a} -> {b}"] if a != b else []
            return
        left, come = rest
        if not left and not come:
            return
        if len(left) != len(a) or len(a) != len(b):  # some were recognized: the others by their numbers
            marks = collections.defaultdict(list)
            for n in come:
                marks[digest(b[n])].append(n)
            for n in list(left):
                mark = digest(a[n])
                if mark is not None and marks.get(mark):
                    other = marks[mark].pop(0)
                    left.remove(n)
                    come.remove(other)
                    self.renamed.append(f"{path}[{n}] -> [{other}], by its numbers")
                    self.trees(a[n], b[other], f"{path}/{n}")
        if len(left) == len(come):
            for n, other in zip(left, come):
                self.trees(a[n], b[other], f"{path}/{n}")
            return
        for n in left:
            self.without(a[n], f"{path}/{n}")
        for n in come:
            self.added(b[n], f"{path}/{n}")

    @staticmethod
    def identity(one, keys):
        known = {norm(key): value for key, value in one.items()}
        return tuple(norm(known[key]) if isinstance(known[key], str) else known[key] for key in keys)

    def without(self, tree, path):
        self.missing += [(self.group, f"{path}{end}", value) for end, value in leaves(tree)]

    def added(self, tree, path):
        self.new += [(self.group, f"{path}{end}", value) for end, value in leaves(tree)]

    def values(self, a, b, path):
        import numpy as np

        key = path.rsplit("/", 1)[-1]
        if isinstance(a, str) or isinstance(b, str):
            if isinstance(a, str) and isinstance(b, str):
                broken = a.startswith("error"), b.startswith("error")
                if self.strict and key in VERDICT_KEYS:
                    self.words[key] += 1
                    if VERDICT_VALUES.get(a, a) != VERDICT_VALUES.get(b, b):
                        self.problem(f"{path}: {a!r} -> {b!r}")
                elif norm(a) != norm(b) and broken != (True, True):
                    self.texts.append(f"{path}: {a!r} -> {b!r}")
            elif str(a).startswith("error") or str(b).startswith("error"):
                self.problem(f"{path}: {_short(a)} -> {_short(b)}")
            return
        if a is None or b is None:
            if a is not b:
                self.problem(f"{path}: {_short(a)} -> {_short(b)}")
            return
        one, two, row = np.asarray(a), np.asarray(b), self.row
        row.values += one.size
        if one.shape != two.shape:
            row.exact = False
            self.problem(f"{path}: shape {one.shape} -> {two.shape}")
            return
        if one.dtype != two.dtype and {one.dtype.kind, two.dtype.kind} != {"i", "f"}:
            self.texts.append(f"{path}: {one.dtype} -> {two.dtype}")
        one, two = one.astype(np.float64), two.astype(np.float64)
        if one.tobytes() == two.tobytes():
            return
        same = (one == two) | (np.isnan(one) & np.isnan(two))
        if same.all():
            if (np.signbit(one) != np.signbit(two))[~np.isnan(one)].any():
                self.texts.append(f"{path}: the sign of a zero")
            return
        row.exact = False
        gap = np.abs(np.where(same, 0, one - two))
        absolute = float(gap.max())
        scale = float(max(np.nanmax(np.abs(np.where(np.isfinite(one), one, 0))), np.nanmax(np.abs(np.where(np.isfinite(two), two, 0)))))
        relative = absolute / scale if scale else math.inf
        row.absolute, row.relative = max(row.absolute, absolute), max(row.relative, relative)
        if not relative <= LIMIT:  # NaN and infinity too
            self.problem(f"{path}: absolute {absolute:.3g}, relative {relative:.3g}"
                         + (f" ({_short(a)} -> {_short(b)})" if one.size == 1 else f" in {int((~same).sum())} of {one.size}"))

    def settle(self):
        """Numbers that stand elsewhere in B, under the same last name first; what is then left of A is missing."""
        for same_name in (True, False):
            places, taken = collections.defaultdict(list), set()
            for entry in self.new:
                name = entry[1].rsplit("/", 1)[-1] if same_name else ""
                places[entry[0].split("/")[0], name, digest_leaf(entry[2])].append(entry)
            left = []
            for group, path, value in self.missing:
                mark = group.split("/")[0], path.rsplit("/", 1)[-1] if same_name else "", digest_leaf(value)
                if mark[2] is not None and places.get(mark):
                    other = places[mark].pop(0)
                    taken.add(id(other))
                    self.renamed.append(f"{path} -> {other[1]}, the same number elsewhere")
                    self.rows.setdefault(group, Row()).values += getattr(value, "size", 1)
                else:
                    left.append((group, path, value))
            self.missing, self.new = left, [entry for entry in self.new if id(entry) not in taken]
        for group, path, value in self.missing:
            row = self.rows.setdefault(group, Row())
            if not isinstance(value, str):
                row.exact = False
                row.problems.append(f"{path}: {_short(value)} is missing in B")
            elif self_key(path) in VERDICT_KEYS and group.split("/")[0] in STRICT:
                row.problems.append(f"{path}: {value!r} is missing in B")
            else:
                self.texts.append(f"{path}: {value!r} is missing in B")


def self_key(path):
    return path.rsplit("/", 1)[-1]


def _short(value):
    return f"array {value.shape}" if getattr(value, "ndim", 0) else repr(value)[:60]


def groups(section, files):
    """Lines of the table: a file, or the entries of one that holds many."""
    for file, tree in files.items():
        if isinstance(tree, dict) and file.split("/")[-1] in ("values", "api", "medical", "resnet18", "mobilenet_v2", "deit_tiny",
                                                              "run", "evaluation", "confounded", "clean", "maps"):
            for key, one in tree.items():
                yield f"{file}/{norm(key)}", one
        else:
            yield "/".join(norm(part) if n else part for n, part in enumerate(file.split("/"))), tree


def compare(a, b, only, short):
    a, b = Path(a), Path(b)
    metas = [json.loads((one / "meta.json").read_text()) for one in (a, b)]
    names = only or metas[0].get("sections") or list(SECTIONS)
    made, failed = Comparison(), [name for name in names if name not in metas[1].get("sections", [])]
    for title, meta in zip("AB", metas):
        print(f"{title}: {meta.get('package')}, {meta.get('version')}, {len(meta.get('errors', {}))} parts failed")
        for text in meta.get("notes", []):
            print(f"   note: {text}")
        for name, error in meta.get("errors", {}).items():
            print(f"   FAILED {name}: {error[:200]}")
    one, two = (sections_of(folder, names) for folder in (a, b))
    for section in names:
        first, second = dict(groups(section, one[section])), dict(groups(section, two[section]))
        made.strict = section in STRICT
        unmatched = [key for key in second if key not in first]
        marks = {digest(second[key]): key for key in unmatched}
        for key, tree in first.items():
            made.group = key
            made.rows.setdefault(key, Row())
            other = key if key in second else marks.get(digest(tree))
            if other is None:
                made.without(tree, key)
                continue
            if other != key:
                unmatched.remove(other)
                made.renamed.append(f"{key} -> {other}, by its numbers")
            made.trees(tree, second[other], key)
        for key in unmatched:
            made.group = key
            made.added(second[key], key)
    made.settle()
    width = max([len(key) for key in made.rows] + [20])
    print(f"\n{'what':{width}} {'values':>11}  result")
    sums = collections.OrderedDict()
    for key, row in made.rows.items():
        total = sums.setdefault(key.split("/")[0], [0, 0, 0, 0.0, 0.0, 0])
        total[0] += row.values
        total[1] += 1
        total[2] += row.exact and not row.problems
        total[3], total[4], total[5] = max(total[3], row.absolute), max(total[4], row.relative), total[5] + len(row.problems)
        if not short or not row.exact or row.problems:
            result = "equal to the bit" if row.exact else f"absolute {row.absolute:.3g}, relative {row.relative:.3g}"
            print(f"{key:{width}} {row.values:>11,}  {result}{f'; {len(row.problems)} PROBLEMS' if row.problems else ''}")
            for text in row.problems[:6]:
                print(f"    {text}")
            if len(row.problems) > 6:
                print(f"    ... and {len(row.problems) - 6} more")
    print()
    for key, (values, count, exact, absolute, relative, problems) in sums.items():
        result = "all equal to the bit" if exact == count else \
            f"{exact} of {count} lines equal to the bit, largest absolute {absolute:.3g}, relative {relative:.3g}, {problems} problems"
        print(f"{key:{width}} {values:>11,}  {result}")
    for title, listed in (("matched under another name or place", made.renamed),
                          ("texts, types and signs of zero that differ (no failure)", made.texts),
                          ("new in B (no failure)", [f"{path}: {_short(value)}" for _, path, value in made.new])):
        if listed:
            print(f"\n{len(listed)} {title}:")
            for text in listed[:25]:
                print(f"    {text[:220]}")
            if len(listed) > 25:
                print(f"    ... and {len(listed) - 25} more")
    problems = sum(len(row.problems) for row in made.rows.values())
    total = sum(row.values for row in made.rows.values())
    exact = all(row.exact for row in made.rows.values())
    broken = bool(metas[1].get("errors")) or bool(metas[0].get("errors"))
    words = ", ".join(f"{count} x {key}" for key, count in made.words.items()) or "none"
    print(f"\n{total:,} values in {len(made.rows)} lines, verdict texts compared: {words}; {problems} problems"
          + (f"; sections missing in B: {', '.join(failed)}" if failed else "") + ("; some parts failed" if broken else "")
          + ("; ALL EQUAL TO THE BIT" if exact and not problems and not failed and not broken and total else ""))
    return 1 if problems or failed or broken or not total else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write")
    writing.add_argument("folder")
    comparing = commands.add_parser("compare")
    comparing.add_argument("a")
    comparing.add_argument("b")
    comparing.add_argument("--short", action="store_true", help="only the lines that differ")
    for one in (writing, comparing):
        one.add_argument("--only", type=lambda text: text.split(","), help=", ".join(SECTIONS))
    given = parser.parse_args()
    if unknown := set(given.only or ()) - set(SECTIONS):
        sys.exit(f"no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    if given.command == "compare":
        return compare(given.a, given.b, given.only, given.short)
    fixed = {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
             "MKL_CBWR": "AVX2,STRICT", "CUDA_VISIBLE_DEVICES": ""}
    if any(os.environ.get(key) != value for key, value in fixed.items()):  # before anything is imported
        os.nice(5)
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **fixed})
    return write(given.folder, given.only)


if __name__ == "__main__":
    sys.exit(main())
