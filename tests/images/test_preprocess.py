"""The way into the model: equal to the libraries' own, and each input pixel at the place it came from."""

import json
import random

import numpy as np
import pytest
import torch
import torchvision.transforms as T
import torchvision.transforms.functional as TF
from PIL import Image, ImageFilter, ImageOps
from torchvision.transforms import InterpolationMode
from torchvision.transforms._presets import ImageClassification, SemanticSegmentation

from camscope.errors import GeometryError, PreprocessError
from camscope.explainers import GradCAM
from camscope.images.measure_callable_preprocess import CallablePreprocess, is_content_independent
from camscope.images.preprocess import Preprocess, as_preprocess

RNG = np.random.default_rng(0)
SIZES = [(151, 203), (203, 151), (60, 90), (97, 97), (21, 300)]
PHOTOS = [RNG.integers(0, 256, (*size, 3), np.uint8) for size in SIZES]
PLAIN = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}


def assert_same(value, transform, photos=PHOTOS):
    """Identical tensors, photo by photo."""
    for photo in photos:
        tensor, place = as_preprocess(value)(photo)
        assert torch.equal(tensor, transform(Image.fromarray(photo)))
        assert (place.image_size, place.input_size) == (photo.shape[:2], tuple(tensor.shape[1:]))


# ---- the same numbers as the libraries


@pytest.mark.parametrize("mode", ["NEAREST", "BILINEAR", "BICUBIC", "LANCZOS", "NEAREST_EXACT"])
@pytest.mark.parametrize(("crop", "resize"), [(64, 73), (65, 72), (96, 40), (50, 51)])
def test_a_torchvision_preset_to_the_last_bit(crop, resize, mode):
    transform = ImageClassification(crop_size=crop, resize_size=resize, interpolation=InterpolationMode[mode])
    assert isinstance(as_preprocess(transform), Preprocess)
    assert_same(transform, transform)


def test_segmentation_and_the_named_preset():
    segmentation = SemanticSegmentation(resize_size=52)
    assert_same(segmentation, segmentation)
    assert_same("imagenet", ImageClassification(crop_size=224))
    composed = T.Compose([T.Resize((40, 70)), T.CenterCrop((30, 80)), T.ToTensor(), T.Normalize([0.1] * 3, [0.2] * 3)])
    assert_same(Preprocess(resize=(40, 70), crop=(30, 80), mean=[0.1] * 3, std=[0.2] * 3), composed)


def test_gray_is_luminance():
    composed = T.Compose([T.Grayscale(), T.Resize(40), T.CenterCrop(48), T.ToTensor(), T.Normalize(0.5, 0.25)])
    assert_same(Preprocess(resize=40, crop=48, mean=(0.5,), std=(0.25,), channels=1), composed)


@pytest.mark.parametrize("mode", ["center", "squash", "border"])
@pytest.mark.parametrize("size", [(64, 64), (48, 80)])
@pytest.mark.parametrize("pct", [0.875, 0.95, 1.0])
def test_timm_to_the_last_bit(mode, size, pct):
    from timm.data import create_transform

    values = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4), "interpolation": "bicubic"}
    config = {"input_size": (3, *size), "crop_pct": pct, "crop_mode": mode, **values}
    assert_same(config, create_transform(**config, is_training=False))


def test_a_timm_model_speaks_for_itself():
    import timm

    model = timm.create_model("test_resnet.r160_in1k", pretrained=False)
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
    assert_same(model, transform)


SQUARE, SHORTER = {"height": 48, "width": 56}, {"shortest_edge": 50}
HUGGING_FACE = {
    "ViT": {"size": SQUARE, "resample": 2},
    "ViT without normalization": {"size": SQUARE, "resample": 3, "do_normalize": False},
    "ViT without rescaling": {"size": SQUARE, "do_rescale": False, "image_mean": [99.0] * 3, "image_std": [50.0] * 3},
    "ViT by 1/127.5": {"size": SQUARE, "rescale_factor": 1 / 127.5},
    "CLIP": {"size": SHORTER, "crop_size": {"height": 43, "width": 47}},
    "CLIP padded": {"size": SHORTER, "crop_size": {"height": 61, "width": 63}},
    "CLIP uncropped": {"size": SHORTER, "do_center_crop": False},
    "DeiT": {"size": {"height": 64, "width": 64}, "crop_size": {"height": 51, "width": 51}, "resample": 3},
    "ConvNext": {"size": {"shortest_edge": 56}, "crop_pct": 0.875},
    "ConvNext large": {"size": {"shortest_edge": 384}},
    "Bit": {"size": SHORTER, "crop_size": {"height": 50, "width": 50}},
    "Siglip": {"size": SQUARE},
    "MobileNetV2": {"size": SHORTER, "crop_size": {"height": 43, "width": 43}},
    "Beit": {"size": SQUARE, "do_center_crop": False},
    "Segformer": {"size": SQUARE},
}


@pytest.mark.parametrize("backend", ["pil", "torchvision"])
@pytest.mark.parametrize("case", HUGGING_FACE)
def test_hugging_face_gives_its_own_pixel_values(case, backend):
    import transformers

    name = f"{case.split()[0]}ImageProcessor" + ("Pil" if backend == "pil" else "")
    processor = getattr(transformers, name)(**HUGGING_FACE[case])
    assert processor.backend == backend
    preprocess = Preprocess.from_huggingface(processor)
    assert (
        as_preprocess(processor)
        == as_preprocess(json.loads(processor.to_json_string()) | {"image_processor_type": name})
        == preprocess
    )
    level = preprocess.scale / min(preprocess.std)
    for photo in PHOTOS[:4]:
        tensor, _ = preprocess(photo)
        theirs = processor(Image.fromarray(photo), return_tensors="pt")["pixel_values"][0]
        assert tensor.shape == theirs.shape
        # Pillow's resampling on both sides is equal but for the float's last bits; torchvision resamples tensors with
        # weights of its own precision, so a pixel may be rounded to the next of the 256 levels, seldom one more
        difference = (tensor - theirs).abs()
        assert difference.max() <= (3e-6 * max(1, tensor.abs().max()) if backend == "pil" else 2.01 * level)
        assert difference.mean() <= 0.25 * level


def test_an_old_hugging_face_configuration_with_bare_numbers():
    old = {"resample": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    vit = Preprocess.from_huggingface({"feature_extractor_type": "ViTFeatureExtractor", "size": 48, **old})
    assert (vit.resize, vit.crop) == ((48, 48), None)
    clip = Preprocess.from_huggingface(
        {"feature_extractor_type": "CLIPFeatureExtractor", "size": 48, "crop_size": 40, **old}
    )
    assert (clip.resize, clip.crop) == (48, (40, 40))


# ---- the same place


def bright(size):
    """A photo that is dark but for one square off the center, and the square's center."""
    photo, side = np.zeros((*size, 3), np.uint8), max(9, min(size) // 25)
    top, left = (int(size[0] * 0.475) - side // 2, int(size[1] * 0.52) - side // 2)
    photo[top : top + side, left : left + side] = 255
    return photo, np.array([top, left]) + side / 2


def middle(light):
    """Where the light of a tensor (C,H,W) is, on average."""
    plane = light.sum(0).double().numpy()
    rows, columns = (np.arange(length) + 0.5 for length in plane.shape)
    return np.array([(plane.sum(1) * rows).sum(), (plane.sum(0) * columns).sum()]) / plane.sum()


@pytest.mark.parametrize("size", [(900, 1350), (1350, 900), (130, 170)])
@pytest.mark.parametrize(
    "preprocess",
    [
        Preprocess.from_preset("imagenet"),
        Preprocess(resize=(96, 160), crop=130, **PLAIN),
        Preprocess(resize=(96, 96), fit="inside", crop=112, fill=(9, 9, 9), **PLAIN),
        Preprocess(crop=(121, 124), rounding="down", **PLAIN),
        Preprocess(resize=128, crop=301, rounding="zero", **PLAIN),
    ],
    ids=["imagenet", "stretch", "inside", "crop", "pad"],
)
def test_a_square_is_found_where_the_placement_says(preprocess, size):
    photo, center = bright(size)
    tensor, place = preprocess(photo)
    dark, _ = preprocess(np.zeros_like(photo))
    seen = middle(tensor - dark)
    assert np.abs(place.to_input(center[None])[0] - seen).max() < 0.05
    assert np.abs(place.to_image(seen[None])[0] - center).max() < 0.05 * np.divide(size, place.input_size).max() * 1.5


NORMALISED = [T.ToTensor(), T.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])]
CALLABLES = {
    "usual": T.Compose([T.Resize(256), T.CenterCrop(224), *NORMALISED]),
    "crop only": T.Compose([T.CenterCrop(120), T.ToTensor()]),
    "pad": T.Compose([T.Pad((30, 10, 0, 50), fill=80), T.Resize((160, 200)), T.ToTensor()]),
    "flip": T.Compose([T.Resize((120, 90)), TF.hflip, *NORMALISED]),
    "quarter turn": T.Compose([T.Resize((120, 90)), lambda image: image.transpose(Image.Transpose.ROTATE_90), T.ToTensor()]),
    "transpose": T.Compose([lambda image: image.transpose(Image.Transpose.TRANSPOSE), T.Resize(100), T.ToTensor()]),
    "tilt": T.Compose([T.Resize((120, 120)), lambda i: TF.rotate(i, 10, InterpolationMode.BILINEAR), T.ToTensor()]),
    "gray, nearest, batched": lambda i: TF.to_tensor(TF.resize(i.convert("L"), [64, 64], InterpolationMode.NEAREST))[None],
}  # fmt: skip


@pytest.mark.parametrize("size", [(480, 700), (900, 640), (150, 133)])
@pytest.mark.parametrize("name", CALLABLES)
@pytest.mark.one_in(5)
def test_any_callable_is_placed_to_a_quarter_of_a_pixel(name, size):
    photo, center = bright(size)
    tensor, place = as_preprocess(CALLABLES[name])(photo)
    black, _ = as_preprocess(CALLABLES[name])(np.zeros_like(photo))
    slack = 0.5 if "nearest" in name else 0.25  # a square drawn by nearest neighbors is itself off by up to a half
    assert tensor.ndim == 3
    assert np.abs(place.to_input(center[None])[0] - middle(tensor - black)).max() < slack


@pytest.mark.parametrize("size", [(480, 641), (641, 480), (1500, 1000), (150, 133)])
def test_the_measured_placement_is_the_known_one(size):
    measured = as_preprocess(CALLABLES["usual"]).measure_placement(size)
    known = Preprocess.from_preset("imagenet")(np.zeros((*size, 3), np.uint8))[1]
    corners = np.array([[0, 0], [0, 224], [224, 0], [224, 224]])
    assert np.abs(known.to_input(measured.to_image(corners)) - corners).max() < 0.25
    assert measured.matrix[0, 1] == measured.matrix[1, 0] == 0


WAVES = torch.zeros(1, 120, 120, 2)
WAVES[..., 0] = 0.05 * torch.sin(torch.linspace(0, 12, 120))[:, None]
UNKNOWN = {
    "random crop": T.Compose([T.RandomCrop(100), T.ToTensor()]),
    "random flip": T.Compose([T.RandomHorizontalFlip(), T.ToTensor()]),
    "python's random": lambda image: T.ToTensor()(image.crop((random.randint(0, 9), 0, 100, 100))),
    "numpy's random": lambda image: T.ToTensor()(image.crop((np.random.randint(0, 9), 0, 100, 100))),
    "own generator": lambda image: T.ToTensor()(image.crop((int(RNG.integers(90)), 0, 99, 99)).resize((50, 50))),
    "mirrored border": T.Compose([T.Pad(40, padding_mode="reflect"), T.Resize((120, 120)), T.ToTensor()]),
    "waves": T.Compose([T.Resize((120, 120)), lambda image: TF.elastic_transform(image, WAVES), T.ToTensor()]),
    "constant": lambda image: torch.zeros(3, 20, 20),
    "one line": lambda image: T.ToTensor()(image.resize((30, 1))).expand(3, 20, 30),
    "mean": lambda image: T.ToTensor()(image.resize((1, 1))).expand(3, 20, 20),
    "not for black": lambda image: T.ToTensor()(image) if image.getextrema() != ((0, 0),) * 3 else 1 / 0,
}  # fmt: skip


@pytest.mark.parametrize("name", UNKNOWN)
def test_random_and_bent_is_stated_as_unknown(name):
    tensor, place = as_preprocess(UNKNOWN[name])(bright((200, 260))[0])
    assert tensor.ndim == 3
    assert place is None


def test_measuring_draws_on_nobodys_random_state():
    def states():
        return (
            random.getstate(),
            np.random.get_state()[1].tolist(),
            np.random.get_state()[2],
            torch.get_rng_state().tolist(),
        )

    probed = CallablePreprocess(lambda image: torch.rand(3, 9, 9) * random.random() * np.random.rand())
    before = states()
    assert probed.measure_placement((50, 60)) is None
    assert states() == before


def test_a_placement_is_measured_once_and_not_kept_forever():
    calls = []
    probed = CallablePreprocess(lambda image: calls.append(1) or T.ToTensor()(image))
    assert probed.measure_placement((20, 30)) is probed.measure_placement((20, 30))
    assert len(calls) == 9
    for width in range(31, 31 + 40):
        probed.measure_placement((20, width))
    assert len(probed._placement_cache) == 32


@pytest.mark.parametrize("ground", [0, 255])
def test_a_crop_that_follows_the_content_has_no_known_placement(ground):
    def cropping(image):
        ink = image.convert("L").point(lambda level: 255 * (abs(level - ground) > 30))
        return T.ToTensor()(image.crop(ink.getbbox() or (0, 0, *image.size)).resize((64, 64)))

    photo = np.full((200, 300, 3), ground, np.uint8)
    photo[90:180, 140:290] = 128
    tensor, placement = CallablePreprocess(cropping)(photo)
    assert tensor.shape == (3, 64, 64)
    assert placement is None


def boxed(image, mask):
    """The image, cropped to a mask; the whole image where the mask is empty."""
    rows, columns = np.nonzero(mask)
    return image.crop((columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)) if len(rows) else image


def saturated(image):
    return boxed(image, np.asarray(image.convert("HSV"))[..., 1] > 100)


def red(image):
    levels = np.asarray(image).astype(int)
    return boxed(image, levels[..., 0] - levels[..., 1] > 100)


def turned_to_the_right(image):
    """As a breast is flipped to one side: what is colored comes to the right."""
    left, right = np.array_split(np.ptp(np.asarray(image), axis=2), 2, 1)
    return TF.hflip(image) if left.mean() > right.mean() + 5 else image


def centered(image):
    """Moved so that the saturated region is in the middle."""
    pixels = np.asarray(image)
    rows, columns = np.nonzero(np.ptp(pixels, axis=2) > 100)
    if not len(rows):
        return image
    way = pixels.shape[0] // 2 - int(rows.mean()), pixels.shape[1] // 2 - int(columns.mean())
    return Image.fromarray(np.roll(pixels, way, (0, 1)))


def small_object(image):
    """Cropped to an object that covers a small part of the image."""
    mask = np.abs(np.asarray(image.convert("L")).astype(int) - 235) > 60
    return boxed(image, mask) if 0 < mask.mean() < 0.15 else image


def sharp_edges(image):
    slopes = np.hypot(*np.gradient(np.asarray(image.convert("L")).astype(float)))
    return boxed(image, slopes > 40) if 0 < (slopes > 40).mean() < 0.1 else image


def tissue():
    """(H,W,3): a slide with a region of tissue, and a spot in it."""
    pixels = np.full((96, 160, 3), 235, np.uint8)
    pixels[30:62, 20:70] = (200, 60, 120)
    pixels[36:42, 50:56] = (255, 30, 90)
    return pixels


FOLLOWING = [saturated, red, turned_to_the_right, centered, small_object, sharp_edges]


@pytest.mark.parametrize("side", [64, 224])
@pytest.mark.parametrize("following", FOLLOWING, ids=lambda one: one.__name__)
def test_what_follows_the_content_has_no_known_placement_on_an_image_with_that_content(following, side):
    probed = CallablePreprocess(lambda image: T.ToTensor()(TF.resize(following(image), [side, side])))
    photo = tissue()
    moved = np.asarray(following(Image.fromarray(photo)))
    assert moved.shape != photo.shape or not np.array_equal(moved, photo)
    assert probed(photo)[1] is None
    assert probed(np.full_like(photo, 200))[1] == probed.measure_placement(
        (96, 160)
    )  # nothing to follow: the whole image


PLACED = {
    "gamma": lambda image: T.ToTensor()(image) ** 2.2,
    "contrast of its own": lambda image: T.ToTensor()(ImageOps.autocontrast(image)),
    "HSV": lambda image: T.ToTensor()(image.convert("HSV")),
    "negative": lambda image: 1 - T.ToTensor()(image),
    "median": lambda image: T.ToTensor()(image.filter(ImageFilter.MedianFilter(3))),
    "padding": lambda image: T.ToTensor()(ImageOps.pad(image, (120, 120))),
    "middle": lambda image: T.ToTensor()(TF.center_crop(image, [40, 50])),
    "tilt": lambda image: T.ToTensor()(TF.rotate(image, 15, InterpolationMode.BILINEAR)),
}
CONTENT = {
    "tissue": tissue(),
    "black": np.zeros((96, 160, 3), np.uint8),
    "white": np.full((96, 160, 3), 255, np.uint8),
    "red": np.full((96, 160, 3), (255, 0, 0), np.uint8),
    "noise": np.random.default_rng(3).integers(0, 256, (96, 160, 3)).astype(np.uint8),
    "small": np.random.default_rng(4).integers(90, 99, (28, 28, 3)).astype(np.uint8),
}


@pytest.mark.parametrize("content", CONTENT)
@pytest.mark.parametrize("name", PLACED)
@pytest.mark.one_in(5)
def test_what_does_not_follow_the_content_keeps_its_placement(name, content):
    photo = CONTENT[content]
    probed = CallablePreprocess(PLACED[name])
    assert probed(photo)[1] == probed.measure_placement(photo.shape[:2]) is not None


@pytest.mark.parametrize(("share", "noticed"), [(0.0, False), (0.03, True), (0.1, True), (0.5, True)])
def test_a_shift_of_a_single_image_by_three_percent_is_noticed(share, noticed):
    photo = CONTENT["noise"]

    def shifted(image):
        pixels = np.asarray(image)
        close = np.abs(pixels.astype(int) - photo).mean() < 20
        return T.ToTensor()(TF.resize(Image.fromarray(np.roll(pixels, round(160 * share) * close, 1)), [224, 224]))

    assert (CallablePreprocess(shifted)(photo)[1] is None) == noticed


def test_transforms_that_cannot_look_at_the_content_are_not_run_twice():
    calls = []
    usual = T.Compose([T.Resize(32), T.CenterCrop(32), T.ToTensor(), T.Normalize([0.5] * 3, [0.5] * 3)])
    assert is_content_independent(usual)
    assert not is_content_independent(T.Compose([usual, T.Lambda(lambda x: x)]))
    assert not is_content_independent(
        T.Compose([type("Resize", (T.Resize,), {"__module__": "mine"})(32), T.ToTensor()])
    )
    probed = CallablePreprocess(T.Compose([lambda image: calls.append(1) or image, usual]))
    photo = CONTENT["noise"]
    assert probed(photo)[1] is not None
    measured = len(calls)
    assert probed(photo)[1] is not None
    assert len(calls) == measured + 2  # the image, and the image with squares


def test_an_explanation_says_that_the_place_is_unknown():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 2, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    one = GradCAM(model, "0", preprocess=lambda image: T.ToTensor()(saturated(image).resize((64, 64)))).explain(
        tissue(), 0
    )
    assert one.placement is None
    assert "placement unknown" in one.notes[-1]
    with pytest.raises(GeometryError):
        one.heatmap("image")


# ---- values in, values out, errors


def test_the_background_is_the_picture_the_model_sees():
    preprocess = Preprocess.from_preset("imagenet")
    photo = PHOTOS[0][:150, :150]
    tensor, _ = Preprocess(mean=preprocess.mean, std=preprocess.std)(photo)
    assert np.array_equal(preprocess.denormalize(tensor), photo)
    assert np.array_equal(preprocess.denormalize(tensor[None]), photo)
    assert preprocess.denormalize(torch.full((3, 2, 2), 99.0)).tolist() == [[[255] * 3] * 2] * 2
    gray = Preprocess(mean=(0.5,), std=(0.5,), channels=1)
    assert gray.denormalize(torch.zeros(1, 2, 2)).tolist() == [[[128] * 3] * 2] * 2
    with pytest.raises(PreprocessError, match="expected 1 channel"):
        gray.denormalize(torch.zeros(3, 2, 2))


def test_it_is_a_value_of_plain_words():
    preprocess = Preprocess(resize=(9, 8), crop=7, fit="cover", fill=(1, 2, 3), rounding="down", **PLAIN)
    stored = json.loads(json.dumps(preprocess.to_dict()))
    assert Preprocess.from_dict(stored) == preprocess == as_preprocess(stored)
    assert hash(preprocess) == hash(Preprocess.from_dict(stored))


VIT = {
    "image_processor_type": "ViTImageProcessor",
    "size": 48,
    "resample": 2,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}
TIMM = {"input_size": (3, 48, 48), "interpolation": "bicubic", **PLAIN}


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("imagnet", "'imagnet'; expected one of imagenet"),
        (3, "the preprocessing is a int; expected a Preprocess"),
        (VIT | {"do_pad": True}, "do_pad=True"),
        (VIT | {"image_processor_type": "LevitImageProcessor"}, "image_processor_type='LevitImageProcessor'"),
        (VIT | {"size": {"shortest_edge": 4, "longest_edge": 9}}, "size=.*longest_edge"),
        (VIT | {"resample": None}, "no 'resample'"),
        (VIT | {"crop_pct": 0.9}, "crop_pct=0.9"),
        (TIMM | {"crop_border_pixels": 2}, "crop_border_pixels=2"),
        (TIMM | {"crop_mode": "corner"}, "crop_mode='corner'"),
        (TIMM | {"interpolation": "random"}, "interpolation='random'"),
        (TIMM | {"input_size": (1, 48, 48)}, "mean has 3 numbers for 1 channel"),
        ({"input_size": (3, 48, 48)}, "no 'mean'"),
        ({"resize": 3}, "lacks 'mean'"),
        (VIT | {"size": {"height": "many", "width": 3}}, "image processor: it is damaged, .*'many'"),
        (VIT | {"resample": []}, "image processor: it is damaged"),
        (VIT | {"rescale_factor": {"a": 1}}, "scale=.*expected finite numbers"),
        (TIMM | {"input_size": 3}, "timm configuration: it is damaged"),
        (TIMM | {"crop_pct": "many"}, "timm configuration: it is damaged"),
        ({"rezise": 3, **PLAIN}, "unknown key 'rezise'"),
    ],
)
def test_what_has_no_exact_word_is_named(value, says):
    with pytest.raises(PreprocessError, match=says):
        as_preprocess(value)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"resize": 0}, "resize=0"),
        ({"crop": (3, 4, 5)}, r"crop=\(3, 4, 5\)"),
        ({"resize": True}, "resize=True"),
        ({"resize": (10**30, 3)}, "up to 65536"),
        ({"fit": "squash"}, "fit='squash'; expected one of 'stretch', 'cover', 'inside'"),
        ({"std": (1, 0, 1)}, "expected numbers other than 0"),
        ({"channels": 4}, "channels=4"),
        ({"fill": (0,)}, "fill="),
        ({"mean": (0, 0)}, "mean has 2 numbers for 3 channels"),
        ({"mean": "many"}, "mean='many'; expected finite numbers"),
        ({"std": None}, "std=None; expected finite numbers"),
        ({"scale": "many"}, "expected finite numbers"),
        ({"scale": float("nan")}, "expected finite numbers"),
        ({"fill": 3}, "fill=3; expected finite numbers"),
    ],
)
def test_wrong_settings_are_named(changed, says):
    with pytest.raises(PreprocessError, match=says):
        Preprocess(**PLAIN | changed)


@pytest.mark.parametrize(
    ("transform", "says"),
    [
        (lambda image: np.zeros((3, 4, 4)), "returned ndarray; expected a float tensor"),
        (lambda image: torch.zeros(3, 4, 4, dtype=torch.uint8), r"returned a tensor \(3, 4, 4\) of torch.uint8"),
        (lambda image: torch.zeros(2, 3, 4, 4), r"\(2, 3, 4, 4\)"),
        (lambda image: torch.zeros(4, 4), r"\(4, 4\)"),
        (lambda image: image.nonsense, "raised AttributeError"),
    ],
)
def test_a_callable_that_returns_no_input_is_told_so(transform, says):
    with pytest.raises(PreprocessError, match=says):
        as_preprocess(transform)(PHOTOS[0])


# --- the letterbox of YOLO


@pytest.mark.parametrize(
    ("size", "padded", "start", "resized"),
    [
        ((480, 640), (480, 640), (0, 0), (480, 640)),
        ((375, 500), (480, 640), (0, 0), (480, 640)),
        ((100, 300), (224, 640), (5, 0), (213, 640)),  # 213.3 rows and a padding of 11, of which 5 are above
        ((640, 90), (640, 96), (0, 3), (640, 90)),
    ],
)
def test_the_letterbox_keeps_proportions_and_pads_with_gray(size, padded, start, resized):
    pixels = np.full((*size, 3), 255, np.uint8)
    x, place = Preprocess.letterbox(640)(pixels)
    assert tuple(x.shape[1:]) == padded
    expected = torch.full((3, *padded), 114 / 255)
    expected[:, start[0] : start[0] + resized[0], start[1] : start[1] + resized[1]] = 1
    torch.testing.assert_close(x, expected)
    ends = place.to_input([[0, 0], size])
    np.testing.assert_allclose(ends, [start, np.add(start, resized)])
    np.testing.assert_allclose(place.to_image(ends), [[0, 0], size], atol=1e-9)


def test_the_letterbox_of_a_fixed_size_and_its_settings():
    x, _ = Preprocess.letterbox((64, 96), multiple=None)(np.zeros((10, 10, 3), np.uint8))
    assert tuple(x.shape) == (3, 64, 96)
    gray, _ = Preprocess.letterbox(64, channels=1)(np.zeros((10, 20, 3), np.uint8))
    assert tuple(gray.shape) == (1, 32, 64)
    letterbox = Preprocess.letterbox(320)
    assert Preprocess.from_dict(letterbox.to_dict()) == letterbox
    for settings in ({"multiple": 0}, {"multiple": 2.5}, {"multiple": 32, "crop": 64}):
        with pytest.raises(PreprocessError, match="expected a positive number and no crop"):
            Preprocess(mean=(0,) * 3, std=(1,) * 3, **settings)


def test_bilinear_of_opencv_has_no_antialiasing():
    """Of a half as many columns, each is the mean of the two in its middle, so a line beside the middle is gone."""
    pixels = np.zeros((4, 16, 3), np.uint8)
    pixels[:, 4] = 200  # of the columns 4 to 7 that become one, 5 and 6 are read
    x, _ = Preprocess(mean=(0,) * 3, std=(1,) * 3, resize=(4, 4), interpolation="opencv-bilinear")(pixels)
    assert float(x.max()) == 0
    smooth, _ = Preprocess(mean=(0,) * 3, std=(1,) * 3, resize=(4, 4))(pixels)
    assert float(smooth.max()) > 0.1
