"""Which methods answer for an architecture, and what the others say; and the page that tells it."""

import re

import numpy as np
from torch import Tensor, nn

from camscope.errors import CamscopeError
from camscope.explainers import METHODS, Explainer, GradCAM
from tests.refusals import ATTENTION
from tests.zoo import of_medical, of_ultralytics
from tests.zoo.row import Row

FEW = {"n_samples": 2, "n_steps": 2, "n_groups": 4, "n_channels": 6, "n_concepts": 2}
SMALL = 2e5  # parameters: such a model runs a hundred times in a second
PASSES = {
    *("1", "1 + n_samples", "1 + n_steps", "2 + n_steps", "2 + n_groups", "1 + K"),
    *(f"1 + {count} partial forwards" for count in ("L", "K", "cells", "2", "n_concepts")),
}
# often without an answer, which would end the passes that the others share
ALONE = {"cam", "finercam", "excitationbackprop", "guidedbackprop", "deconvnet", "refinecam", *ATTENTION}
HEAD = """# Models

{count} architectures are tested with random weights and small inputs. The only arguments are the model and the input. Models
without class scores also get a function of the output: a region, a query's class or an embedding's direction. The layer is
the one that camscope chooses by default.

- On each architecture, Grad-CAM and HiResCAM are compared with plain `torch.autograd.grad` in float64.
- Where tokens are laid out as a grid, changing a patch of the input changes the cell at the same position.
- `make models` measures this page again. The tests ask ten of these models. With `--thorough` they fail if the page differs.

The tests run the methods that need few forward passes. On small models they also run those that repeat the model, or the
part behind the layer, often:

| methods |
|---|
| {methods} |

A number in the last column stands for methods without a map on that architecture. [Reasons](#reasons) lists their error
messages.

"""


TAIL = """
## Without a target

`eigencam`, `kpcacam`, `fem` and the controls also explain models whose output has no class scores, without a target.
`tests/explainers/test_methods_without_target.py` compares Eigen-CAM with a singular value decomposition by NumPy, and asks
these models of Hugging Face and torchvision:

| architecture | output | layer chosen |
|---|---|---|
| two-scale detector, as YOLO | a tuple of tensors and a list | `deep`, before the heads |
| Faster R-CNN | a dict of boxes per image | `backbone.body.16` |
| SAM | masks and their scores | `vision_encoder` |
| Mask2Former | masks and classes of queries | `…encoder.hidden_states_norms.stage4` |
| ViT encoder | tokens and a pooled vector | `layernorm` |

## Videos of Hugging Face

These models take frames first, (N,T,C,H,W). `tests/explainers/test_huggingface_videos.py` compares their Grad-CAM maps with plain
`torch.autograd.grad` in float64, and changes single patches of single frames.

| architecture | input | layer chosen | map |
|---|---|---|---|
| VideoMAE | 6×3×32×32 | `videomae` | 3×4×4 tokens |
| TimeSformer | 6×3×32×32 | `timesformer.encoder.layer.0` | 6×4×4 tokens, time last, 1 before them |
| TimeSformer, joint | 6×3×32×32 | `timesformer.encoder.layer.1.layernorm_before` | 6×4×4 tokens, time last, 1 before them |
| ViViT | 6×3×32×32 | `vivit.layers.1.layernorm_before` | 3×4×4 tokens, 1 before them |
| V-JEPA 2 | 6×3×32×32 | `pooler.cross_attention_layer.layer_norm1` | 3×4×4 tokens |

## Detection transformers of Hugging Face

`tests/targets/test_huggingface_detectors.py` compares scores and boxes with the model's own `post_process_object_detection`, for
DETR, Table Transformer, YOLOS, Conditional DETR, Deformable DETR, DAB-DETR, RT-DETR, RT-DETR v2, D-FINE, LW-DETR, Grounding DINO
and OWL-ViT. Layers are chosen in the backbone:

| architecture | input | layer chosen | map |
|---|---|---|---|
| Conditional DETR | 3×64×96 | `model.backbone` | 8×12 |
| Deformable DETR | 3×64×96 | `model.backbone` | 8×12 |
| RT-DETR | 3×64×96 | `model.backbone.model.encoder.stages.1` | 8×12 |
| RT-DETR v2 | 3×64×96 | `model.backbone.model.encoder.stages.1` | 8×12 |
| D-FINE | 3×64×96 | `model.backbone.model.encoder.stages.1` | 8×12 |
| Grounding DINO | 3×64×64, a text | `model.backbone.conv_encoder.model.hidden_states_norms.stage2` | 8×8 |

## Encoders without a head

`tests/explainers/features` compares patch features, cosines, principal components and attention with plain PyTorch, NumPy,
scikit-learn and the attention that transformers returns. The architectures are small, with random weights.

| architecture | input | features at | map |
|---|---|---|---|
| DINOv2 | 3×64×64 | `layernorm` | 4×4 tokens, 1 before them |
| DINOv2, 4 registers | 3×64×64 | `layernorm` | 4×4 tokens, 5 before them |
| DINOv3 | 3×64×64 | `norm` | 4×4 tokens, 5 before them |
| SigLIP | 3×64×64 | `post_layernorm` | 4×4 tokens |
| timm: DINOv2 | 3×56×56 | `norm` | 4×4 tokens, 1 before them |
| timm: DINOv3 | 3×64×64 | `norm` | 4×4 tokens, 5 before them |
| timm: MAE | 3×64×64 | `norm` | 4×4 tokens, 1 before them |
| timm: SigLIP | 3×64×64 | `norm` | 4×4 tokens |
| timm: UNI | 3×64×64 | `norm` | 4×4 tokens, 1 before them |
| timm: CONCH, vision tower | 3×64×64 | `norm` | 4×4 tokens, 1 before them |

## Segmentation heads and prompts

`tests/targets/test_segmentation_heads.py` compares HiResCAM for a `Region` with plain `torch.autograd.grad` in float64. The
layer is chosen inside these modules:

| architecture | prompts | layer chosen in |
|---|---|---|
| BEiT | none | `beit` |
| Data2Vec | none | `data2vec_vision` |
| MobileNetV2 | none | `mobilenet_v2` |
| MobileViT | none | `mobilevit.encoder` |
| UperNet | none | `backbone` |
| SAM 2 | a point, or a box | `vision_encoder` |
| SAM 3 | a text, with or without a box | `vision_encoder` |
| SAM 3 tracker | a point, or a box | `vision_encoder` |
| Unet, Unet++, FPN, PSPNet, DeepLabV3+ and SegFormer of segmentation_models_pytorch | none | `encoder` |

## Without gradients

`tests/models/test_models_without_gradients.py` compares the maps of nine methods with those of the same network as a module,
to 1e-4 of the maximum, for each of these forms:

| form | differs in |
|---|---|
| TorchScript | traced, scripted, frozen |
| function | returns an array, a tensor or a list; a method; an object |
| ONNX file | any batch size, or a fixed one |
"""


def answers(row: Row, model: nn.Module, x: Tensor) -> dict[str, str]:
    """What the methods without an answer for one input (C,*S) say; AssertionError for a map that is none."""
    light = sum(parameter.numel() for parameter in model.parameters()) < SMALL
    names = [name for name in asked_of() if light or METHODS[name].forward_passes == "1"]
    names.sort(key=("cam", "finercam").__contains__)  # what they say comes last on the page
    refused: dict[str, str] = {}
    together = [name for name in names if name not in ALONE]
    try:
        found = GradCAM(model).explain_methods(x, [small(name, row, model) for name in together], row.target)
    except CamscopeError:
        found, together = [], []
    for name in (name for name in names if name not in together):
        try:
            found.append(small(name, row, model).explain(x, row.target))
        except CamscopeError as error:
            refused[name] = re.sub(r"\s+", " ", str(error))
    for one in found:
        assert np.isfinite(one.attribution).all(), one.method
        if one.layer == row.layer:
            assert one.grid == row.grid, one.method
        elif one.method in ATTENTION and row.kind == "tokens":
            prefix = (
                0 if row.name == "cait" else row.prefix
            )  # its patches look at each other before the class token comes
            assert one.layout == f"tokens {prefix}+{'x'.join(map(str, row.grid))}", one.method
    return refused


def asked_of() -> list[str]:
    """The methods of a few passes that are here whatever else is installed."""
    return [
        name for name, one in METHODS.items() if one.forward_passes in PASSES and ".adapters." not in one.__module__
    ]


def small(name: str, row: Row, model: nn.Module) -> Explainer:
    """A method with few samples, steps and groups: the question is whether it works at all."""
    given = {**FEW, "layer": row.layer}  # the one that it would choose, too, in two more passes
    fields = METHODS[name].__dataclass_fields__
    return METHODS[name](model, **{key: value for key, value in given.items() if key in fields})


def page(rows: dict[str, tuple[Row, dict[str, str]]]) -> str:
    """The document."""
    reasons: dict[tuple[str, tuple[str, ...]], int] = {}  # the number of a sentence and the methods that say it
    lines, family = [], ""
    for name, (row, refused) in rows.items():
        if family != (family := name.partition(": ")[0]):
            lines += [
                f"\n## {family}\n",
                "| architecture | input | layer chosen | map | without a map |",
                "|---|---|---|---|---|",
            ]
        marks = [str(reasons.setdefault(reason, len(reasons) + 1)) for reason in said_by(refused)]
        size, grid = ("×".join(map(str, shape)) for shape in (row.size, row.grid))
        kind = {"maps": grid, "last": f"{grid}, channels last", "tokens": f"{grid} tokens, {row.prefix} before them"}[
            row.kind
        ]
        lines.append(
            f"| {row.name} | {size} | `{row.layer}` | {kind.replace(', 0 before them', '')} | {', '.join(marks) or '–'} |"
        )
    cheap = ", ".join(f"`{name}`" for name in asked_of())
    told = [
        f"| {number} | {', '.join(f'`{one}`' for one in methods)} | {sentence} |"
        for (sentence, methods), number in reasons.items()
    ]
    head = HEAD.format(count=len(rows), methods=cheap)
    return (
        head.rstrip()
        + "\n"
        + "\n".join(lines)
        + "\n\n## Reasons\n\n| number | methods | message |\n|---|---|---|\n"
        + "\n".join(told)
        + "\n"
        + TAIL
        + of_medical.section()
        + of_ultralytics.section()
    )


def said_by(refused: dict[str, str]) -> list[tuple[str, tuple[str, ...]]]:
    """Each sentence of one architecture, without names, numbers and grids of its own, and the methods that say it."""
    speakers: dict[str, list[str]] = {}
    for method, sentence in refused.items():
        plain = re.sub(r"'[^']*'( or '[^']*')*|(\b[\dx+]+\b|…\+)+(, [\dx+]+)*", "…", sentence)
        plain = re.sub(r"\([^()]*\)", "(…)", plain)  # as names of steps, which differ between processors
        speakers.setdefault(re.sub(rf"^{re.escape(method)}\b", "the method", plain), []).append(method)
    return [(sentence, tuple(methods)) for sentence, methods in speakers.items()]
