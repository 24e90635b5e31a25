"""Hugging Face detectors: classes, probabilities and boxes are those of each family's own post-processing."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from camscope import LayerCAM, Layout, Preprocess, load_model
from camscope.errors import LayerError, TargetError
from camscope.targets import Box, OutputPart, Score
from camscope.targets.detection_box import (
    infer_softmax_or_sigmoid,
    parse_detections,
    read_huggingface_detector_settings,
)

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning"),
]
LABELS, HEIGHT, WIDTH = 3, 64, 96
CODER = {
    "d_model": 16,
    "num_queries": 5,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
}
HYBRID = {
    **CODER,
    "encoder_in_channels": [8, 8],
    "feat_strides": [4, 8],
    "encoder_hidden_dim": 16,
    "encode_proj_layers": [1],
    "decoder_in_channels": [16, 16],
    "num_feature_levels": 2,
    "decoder_n_points": 2,
    "num_denoising": 0,
    "anchor_image_size": None,
}


def resnet(kind="ResNetConfig", stages=("stage2",)):
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1], "layer_type": "basic"}
    return getattr(transformers, kind)(out_features=list(stages), **sizes)


def encoder_decoder(family, **settings):
    """A small model of a family whose backbone is a ResNet of its own."""
    config = getattr(transformers, f"{family}Config")(
        use_timm_backbone=False,
        backbone=None,
        use_pretrained_backbone=False,
        backbone_config=resnet(),
        num_labels=LABELS,
        **{**CODER, **settings},
    )
    return getattr(transformers, f"{family}ForObjectDetection")(config)


def hybrid(family, **settings):
    """A small model of the RT-DETR line."""
    stages = resnet("RTDetrResNetConfig", ("stage1", "stage2"))
    config = getattr(transformers, f"{family}Config")(
        backbone_config=stages, num_labels=LABELS, **{**HYBRID, **settings}
    )
    return getattr(transformers, f"{family}ForObjectDetection")(config)


def yolos():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return transformers.YolosForObjectDetection(
        transformers.YolosConfig(
            image_size=[HEIGHT, WIDTH], patch_size=16, num_detection_tokens=5, num_labels=LABELS, **sizes
        )
    )


def owlvit():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    text = {**sizes, "vocab_size": 32, "max_position_embeddings": 8, "pad_token_id": 0, "bos_token_id": 1}
    config = transformers.OwlViTConfig(
        text_config={**text, "eos_token_id": 2},
        vision_config={**sizes, "image_size": 64, "patch_size": 16},
        projection_dim=16,
    )
    return transformers.OwlViTForObjectDetection(config)


def grounding_dino():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    swin = {"image_size": 64, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 1], "window_size": 2}
    config = transformers.GroundingDinoConfig(
        backbone_config=transformers.SwinConfig(**swin, out_features=["stage1", "stage2"]),
        use_timm_backbone=False,
        text_config=transformers.BertConfig(vocab_size=1030, max_position_embeddings=8, **sizes),
        max_text_len=8,
        num_feature_levels=2,
        **{**CODER, "d_model": 32},
    )
    return transformers.GroundingDinoForObjectDetection(config)


def lw_detr():
    vit = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 16, "image_size": 64}
    backbone = transformers.LwDetrViTConfig(
        **vit, window_block_indices=[0], out_indices=[2], num_windows=4, pretrain_image_size=64
    )
    config = transformers.LwDetrConfig(
        backbone_config=backbone,
        d_model=16,
        num_queries=5,
        decoder_layers=1,
        decoder_ffn_dim=16,
        decoder_self_attention_heads=2,
        decoder_cross_attention_heads=2,
        group_detr=1,
        projector_scale_factors=[1.0],
        num_labels=LABELS,
    )
    return transformers.LwDetrForObjectDetection(config)


FAMILIES = {
    "DETR": (lambda: encoder_decoder("Detr"), "DetrImageProcessor"),
    "Table Transformer": (lambda: encoder_decoder("TableTransformer"), "DetrImageProcessor"),
    "YOLOS": (yolos, "YolosImageProcessor"),
    "Conditional DETR": (lambda: encoder_decoder("ConditionalDetr"), "ConditionalDetrImageProcessor"),
    "Deformable DETR": (
        lambda: encoder_decoder("DeformableDetr", num_feature_levels=1, d_model=32),
        "DeformableDetrImageProcessor",
    ),
    "DAB-DETR": (
        lambda: encoder_decoder("DabDetr", hidden_size=16),
        "ConditionalDetrImageProcessor",
    ),
    "RT-DETR": (lambda: hybrid("RTDetr"), "RTDetrImageProcessor"),
    "RT-DETR v2": (lambda: hybrid("RTDetrV2", decoder_n_levels=2), "RTDetrImageProcessor"),
    "D-FINE": (lambda: hybrid("DFine"), "RTDetrImageProcessor"),
    "LW-DETR": (lw_detr, "DeformableDetrImageProcessor"),
    "Grounding DINO": (grounding_dino, "GroundingDinoImageProcessor"),
    "OWL-ViT": (owlvit, "OwlViTImageProcessor"),
}


def small(family):
    torch.manual_seed(5)
    model = FAMILIES[family][0]().eval()
    for name, parameter in model.named_parameters():
        if "class" in name:  # untrained heads give all classes nearly one score
            nn.init.normal_(parameter)
    return model


def inputs_of(family):
    torch.manual_seed(6)
    if family in ("OWL-ViT", "Grounding DINO"):
        words = torch.tensor([[1, 5, 2, 0], [1, 6, 2, 0], [1, 7, 2, 0]])  # three queries
        if family == "Grounding DINO":
            words = torch.tensor([[101, 7, 8, 1012, 9, 1012, 102]])  # one text of two phrases
        return torch.rand(1, 3, 64, 64), {"input_ids": words, "attention_mask": (words > 0).long()}
    side = 64 if family == "LW-DETR" else WIDTH
    return torch.rand(1, 3, HEIGHT, side), {}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.one_in(2)
def test_a_box_is_read_as_the_familys_own_post_processing_reads_it(family):
    model, (x, more) = small(family), inputs_of(family)
    size = tuple(x.shape[2:])
    with torch.no_grad():
        output = model(pixel_values=x, **more)
    processor = getattr(transformers, FAMILIES[family][1])()
    (expected,) = processor.post_process_object_detection(output, threshold=0.0, target_sizes=torch.tensor([size]))
    assert len(expected["labels"]) > 1
    (found,) = parse_detections(
        output, size, infer_softmax_or_sigmoid(read_huggingface_detector_settings(model), output.logits.shape[-1])
    )
    for label, score, corners in zip(*(expected[key] for key in ("labels", "scores", "boxes")), strict=True):
        same = (found.boxes - corners).abs().amax(1) < 1e-3
        assert same.any()
        assert (found.probabilities[same, label] - score).abs().min() < 1e-5
    # a detection of the last class, which a softmax would have dropped, is explained
    last = int((found.probabilities.amax(0) > 0).nonzero().max())  # behind it are the padding's, of Grounding DINO
    query = int(found.probabilities[:, last].argmax())
    corners = found.boxes[query].tolist()
    score = model_score(model, x, Box(*corners, label=last), more)
    rivals = (found.boxes - found.boxes[query]).abs().amax(1) < 1e-3
    assert score == pytest.approx(float(found.probabilities[rivals, last].max()), abs=1e-4)


TRANSFORMERS_OF_IMAGES = [name for name in FAMILIES if name not in ("Grounding DINO", "OWL-ViT", "LW-DETR")]


@pytest.mark.slow
@pytest.mark.parametrize("family", TRANSFORMERS_OF_IMAGES)
@pytest.mark.one_in(6)
def test_a_box_of_the_post_processing_has_its_score_under_its_name_in_pixels_of_the_image(family, tmp_path):
    """A model of a folder and a photograph: corners, class and score are those that the family's processor states."""
    model = small(family)
    model.config.id2label = {0: "cat", 1: "dog", 2: "bird"}
    model.save_pretrained(tmp_path / "model")
    loaded = load_model(f"hf:{tmp_path / 'model'}")
    pixels = np.random.default_rng(3).integers(0, 255, (48, 160, 3), dtype=np.uint8)  # stretched to 64 x 96
    preprocess = Preprocess(resize=(HEIGHT, WIDTH), mean=(0.5,) * 3, std=(0.5,) * 3)
    explainer = LayerCAM(loaded, preprocess=preprocess)
    x = explainer.prepare_input(pixels).x[None]
    with torch.no_grad():
        output = model(pixel_values=x)
    processor = getattr(transformers, FAMILIES[family][1])()
    (found,) = processor.post_process_object_detection(output, 0.0, target_sizes=torch.tensor([pixels.shape[:2]]))
    best = int(found["scores"].argmax())
    corners, name = found["boxes"][best].tolist(), model.config.id2label[int(found["labels"][best])]
    explanation = explainer.explain(pixels, Box(*corners, label=name))
    assert explanation.score == pytest.approx(float(found["scores"][best]), rel=1e-3)
    assert explanation.label.startswith(f"{name} in the box (")
    assert explanation.label.endswith("of the image")
    assert explanation.attribution.any()


@pytest.mark.parametrize("family", ["Deformable DETR", "RT-DETR", "Grounding DINO"])
def test_both_samples_of_a_batch_are_read(family):
    model, (x, more) = small(family), inputs_of(family)
    x, size = torch.cat([x, x.flip(3)]), tuple(x.shape[2:])
    more = {name: value.repeat(2, 1) for name, value in more.items()}
    with torch.no_grad():
        output = model(pixel_values=x, **more)
    processor = getattr(transformers, FAMILIES[family][1])()
    expected = processor.post_process_object_detection(output, threshold=0.0, target_sizes=torch.tensor([size] * 2))
    found = parse_detections(output, size, "sigmoid")
    boxes = [
        Box(*row["boxes"][int(row["scores"].argmax())].tolist(), label=int(row["labels"][int(row["scores"].argmax())]))
        for row in expected
    ]
    scores = Score(model, boxes, kwargs=more)(x)  # a box for each sample
    wrapped = Score(Nested(model), [OutputPart("detector", box) for box in boxes], kwargs=more)(x)
    torch.testing.assert_close(wrapped, scores)
    for detections, row, score in zip(found, expected, scores.detach(), strict=True):
        torch.testing.assert_close(detections.probabilities.amax(), row["scores"].max())
        assert float(score) == pytest.approx(float(row["scores"].max()), rel=1e-3)


def model_score(model, x, box, more):
    """The score that an explanation of a box states."""
    layer = next(name for name, part in model.named_modules() if isinstance(part, nn.Conv2d))
    keywords = {**more}
    if keywords:  # its image is not its first argument
        return LayerCAM(FirstImage(model, keywords), f"model.{layer}").explain(x[0], box).score
    return LayerCAM(model, layer).explain(x[0], box).score


class FirstImage(nn.Module):
    """A detector as a part of a user's own module."""

    def __init__(self, model, keywords):
        super().__init__()
        self.model, self.keywords = model, keywords

    def forward(self, x):
        return self.model(pixel_values=x, **self.keywords)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Detr", "ConditionalDetr"])
@pytest.mark.one_in(2)
def test_queries_are_no_image_though_their_number_is_that_of_a_grid(family):
    torch.manual_seed(0)
    model = encoder_decoder(family, num_queries=16).eval()  # 4 x 4 cells of 64 x 64 pixels
    x, asked = torch.rand(3, 64, 64), {"target": lambda output: output.logits.sum((1, 2))}
    layers = [name for name, _ in model.named_modules() if name.endswith(("decoder.layers.0", "decoder.layers.1"))]
    assert len(layers) == 2
    for layer in (*layers, "class_labels_classifier"):
        with pytest.raises(
            LayerError, match=r"16 queries|as many tokens as the model has queries|react to other parts"
        ):
            LayerCAM(model, layer).explain(x, **asked)
    assert LayerCAM(model, layers[1], layout=Layout("tokens", (4, 4))).explain(x, **asked).layer == layers[1]
    assert "decoder" not in LayerCAM(model).explain(x, **asked).layer


def test_logits_that_no_config_explains_are_an_error_that_names_both_ways():
    logits = torch.tensor([[[0.0, 2.0, 1.0]]])
    output = SimpleNamespace(logits=logits, pred_boxes=torch.tensor([[[0.5, 0.5, 1.0, 1.0]]]))
    model, x = Constant(output), torch.zeros(1, 3, 8, 8)
    with pytest.raises(TargetError, match=r"activation='softmax'.*activation='sigmoid'"):
        Score(model, Box(0, 0, 8, 8))(x)
    assert Score(model, Box(0, 0, 8, 8, activation="softmax"))(x).item() == pytest.approx(
        float(logits.softmax(2)[0, 0, 1])
    )
    assert Score(model, Box(0, 0, 8, 8, 2, activation="sigmoid"))(x).item() == pytest.approx(
        float(logits.sigmoid()[0, 0, 2])
    )
    with pytest.raises(TargetError, match="expected 'softmax', 'sigmoid' or None"):
        Box(0, 0, 8, 8, activation="relu")


LAYERS = {
    "Conditional DETR": "model.backbone",
    "Deformable DETR": "model.backbone",
    "RT-DETR": "model.backbone.model.encoder.stages.1",
    "RT-DETR v2": "model.backbone.model.encoder.stages.1",
    "D-FINE": "model.backbone.model.encoder.stages.1",
    "Grounding DINO": "model.backbone.conv_encoder.model.hidden_states_norms.stage2",
}


@pytest.mark.slow
@pytest.mark.parametrize("family", LAYERS)
@pytest.mark.one_in(6)
def test_the_layer_of_a_box_lies_in_the_backbone(family):
    model, (x, more) = small(family), inputs_of(family)
    with torch.no_grad():
        (found,) = parse_detections(model(pixel_values=x, **more), tuple(x.shape[2:]), "sigmoid")
    query, label = divmod(int(found.probabilities.argmax()), found.probabilities.shape[1])
    box = Box(*found.boxes[query].tolist(), label=label)
    explanation = LayerCAM(model).explain(x[0], box, additional_forward_args=more or None)
    assert explanation.layer == LAYERS[family]
    assert explanation.grid == (8, x.shape[3] // 8)
    assert explanation.score == pytest.approx(float(found.probabilities.max()), rel=1e-3)


class Nested(nn.Module):
    """A detector whose output is a part of a dict."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, pixel_values, **more):
        return {"detector": self.model(pixel_values=pixel_values, **more)}


class Constant(nn.Module):
    def __init__(self, output):
        super().__init__()
        self.output = output

    def forward(self, x):
        return self.output
