"""Every kind of question: the number it reads, by hand; what it calls itself; what it refuses, before any backward pass."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from camscope import Preprocess
from camscope.errors import TargetError
from camscope.explainers import METHODS, AblationCAM, GradCAM, HiResCAM, LayerCAM
from camscope.loaded_model_metadata_and_weight_digest import LoadedModelMetadata, attach_loaded_model_metadata
from camscope.targets import (
    BestBox,
    Box,
    Class,
    Classes,
    DetectionRows,
    Difference,
    ImageContext,
    LogProbability,
    OutputPart,
    Region,
    Score,
    Similarity,
    TextSimilarity,
)
from tests.nets import Plain, plain, truth

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning"),
]
NAMES = ("cat", "dog", "fox")


def read(target, output, n_samples=1, size=(8, 8), **facts):
    """The score of an output, and its words for the first sample."""
    score = Score(nn.Identity(), target, input_size=size, **facts)
    return score.read_score(output, n_samples), score.describe(0)


class Dense(Plain):
    """A class score at every place: what segmentation models return, at half of the input's size."""

    def after(self, y):
        return F.conv2d(self.last(y), self.head.weight[:, :, None, None])


# --- several classes, probabilities


def test_a_class_is_its_index_or_name():
    output = torch.tensor([[1.0, 5.0, 3.0]])
    for target in (Class(1), Class("dog"), Class()):
        values, words = read(target, output, class_names=NAMES)
        assert (values.tolist(), words) == ([5.0], "dog")


def test_several_classes_are_their_mean():
    output = torch.tensor([[1.0, 5.0, 3.0], [2.0, 0.0, 8.0]])
    values, words = read(Classes(["cat", 2]), output, 2, class_names=NAMES)
    assert (values.tolist(), words) == ([2.0, 5.0], "cat and fox")
    for wrong, saying in ((Classes(["cow"]), "no class 'cow'"), (Classes([3]), "class 3 is out of range")):
        with pytest.raises(TargetError, match=saying):
            read(wrong, output, 2, class_names=NAMES)
    with pytest.raises(TargetError, match="a list of classes"):
        Classes("dog")


def test_probabilities_by_hand_and_where_a_float_would_have_rounded_them():
    output = torch.tensor([[math.log(1.0), math.log(3.0), math.log(4.0)]])
    values, words = read(LogProbability("dog"), output, class_names=NAMES)
    assert words == "log-probability of dog"
    assert float(values) == pytest.approx(math.log(3 / 8))
    assert float(read(LogProbability(), output)[0]) == pytest.approx(math.log(4 / 8))
    assert float(read(LogProbability(1, multilabel=True), output)[0]) == pytest.approx(math.log(3 / 4))
    assert float(read(LogProbability(), torch.tensor([[math.log(3.0)]]))[0]) == pytest.approx(math.log(3 / 4))
    sure = torch.tensor([[300.0, 0.0]], requires_grad=True)
    values, _ = read(LogProbability(1), sure)
    assert float(values.detach()) == -300
    (gradient,) = torch.autograd.grad(values.sum(), sure)
    assert gradient.tolist() == [[-1.0, 1.0]]
    with pytest.raises(TargetError, match="probabilities already"):
        read(LogProbability(), torch.tensor([[0.25, 0.75]]))


def test_a_probability_has_the_gradient_of_the_log_softmax():
    model, x = plain()
    found = HiResCAM(model, "middle").attribute(x, LogProbability(1))
    expected = HiResCAM(model, "middle").attribute(x, lambda output: output.log_softmax(1)[:, 1])
    torch.testing.assert_close(found, expected)


# --- places


def test_a_region_is_the_mean_over_it_by_hand():
    output = torch.arange(32.0).view(1, 2, 4, 4)
    mask = np.zeros((8, 8))
    mask[:2, :4] = 1  # two cells of the output
    values, words = read(Region(label=0, mask=mask), output, class_names=NAMES[:2])
    assert (values.tolist(), words) == ([0.5], "cat in a region")
    mask[2, 0] = 1  # a quarter of another, whose score is 4
    assert read(Region(label=0, mask=mask), output)[0].tolist() == [pytest.approx((0 + 1 + 0.25 * 4) / 2.25)]
    values, words = read(Region(label=1, point=(7, 3)), output)  # x, y on 8 x 8
    assert (values.tolist(), words) == ([16 + 4 + 3], "class 1 at (7, 3) of the model's input")


def test_a_region_chooses_the_class_that_scores_most_there_and_then_keeps_to_it():
    output = torch.zeros(1, 3, 4, 4)
    output[0, 2, :2, :2], output[0, 1, 2:, 2:] = 5.0, 1.0
    corner = np.zeros((4, 4), bool)
    corner[3, 3] = True
    score = Score(nn.Identity(), Region(mask=corner), input_size=(4, 4))
    assert score.read_score(output, 1).tolist() == [1.0]
    assert score.describe(0) == "class 1 in a region"
    assert score.read_score(output.flip(1), 1).tolist() == [1.0], "the class stays"
    everywhere = Score(nn.Identity(), Region(label=2), input_size=(4, 4))
    assert everywhere.read_score(output, 1).tolist() == [5.0]
    assert everywhere.describe(0) == "class 2 where it is predicted"
    with pytest.raises(TargetError, match="a sample has no pixel predicted as class"):
        Score(nn.Identity(), Region(label=1), input_size=(4, 4)).read_score(-output, 1)


def test_seg_grad_cam_is_grad_cam_of_the_region():
    model, x = plain(Dense)
    mask = np.zeros((8, 8), bool)
    mask[2:6, :4] = True
    half = F.adaptive_avg_pool2d(torch.as_tensor(mask, dtype=x.dtype)[None, None], model(x).shape[2:])[0, 0]
    for kind in (GradCAM, HiResCAM):
        found = kind(model, "middle").attribute(x, Region(label=1, mask=mask))
        expected = kind(model, "middle").attribute(x, lambda output: (output[:, 1] * half).sum((1, 2)) / half.sum())
        torch.testing.assert_close(found, expected)


def test_a_mask_of_the_photograph_is_carried_through_resize_and_crop():
    model, _ = plain(Dense)
    photograph = np.random.default_rng(0).integers(0, 255, (32, 48, 3), np.uint8)
    mask = np.zeros((32, 48), bool)
    mask[16:32, 8:24] = True  # the lower left quarter of what the crop of the middle leaves
    way = Preprocess(resize=8, crop=8, mean=(0.5,) * 3, std=(0.5,) * 3)
    tool = HiResCAM(model.float(), "middle", preprocess=way)
    found = tool.explain(photograph, Region(label=1, mask=mask))
    x, _ = way(photograph)
    own = np.zeros((8, 8), bool)
    own[4:, :4] = True
    expected = HiResCAM(model, "middle").attribute(x[None], Region(label=1, mask=own))
    torch.testing.assert_close(torch.from_numpy(found.attribution), expected[0])
    pointed = tool.explain(photograph, Region(label=1, point=(9, 17)))
    expected = HiResCAM(model, "middle").attribute(x[None], Region(label=1, point=(0.25, 4.25)))
    torch.testing.assert_close(torch.from_numpy(pointed.attribution), expected[0])
    gone = np.zeros((32, 48), bool)
    gone[:, :6] = True
    for wrong, saying in (
        (Region(mask=gone), "the crop has removed it"),
        (Region(point=(2, 2)), "outside of the model's input"),
        (Region(mask=np.ones((5, 5))), r"the mask has size \(5, 5\)"),
    ):
        with pytest.raises(TargetError, match=saying):
            tool.explain(photograph, wrong)


def test_a_region_asks_a_segmentation():
    with pytest.raises(TargetError, match="class scores at every position"):
        read(Region(), torch.zeros(1, 3))
    assert read(Region(label=0, point=(0, 0)), {"out": torch.ones(1, 2, 4, 4), "aux": torch.zeros(1, 2, 4, 4)})[
        0
    ].tolist() == [1]
    assert read(Region(label=0, point=(0, 0)), SimpleNamespace(logits=torch.ones(1, 2, 4, 4)))[0].tolist() == [1]


@pytest.mark.parametrize(
    ("target", "label", "index"),
    [(15, "15", "15"), ("dog", "'dog'", "index"), (None, "3", "3"), (Difference(7, 2), "7", "7"), ([9], "9", "9"),
     (LogProbability(11), "11", "11"), (Classes([5, 6]), "5", "5")],
)  # fmt: skip
def test_the_error_about_a_segmentation_quotes_the_class_of_the_caller(target, label, index):
    with pytest.raises(TargetError) as raised:
        read(target, torch.zeros(1, 21, 4, 4), class_names=[f"name {k}" for k in range(20)] + ["dog"])
    assert f"Region({label}, mask=mask)" in str(raised.value)
    assert f"output[:, {index}]." in str(raised.value)


# --- boxes


def listed(*found):
    """What a torchvision detector returns for one image: box, label, score each."""
    boxes, labels, scores = (torch.tensor([list(row[i]) if i == 0 else row[i] for row in found]) for i in range(3))
    return {"boxes": boxes, "labels": labels, "scores": scores}


def test_a_box_has_no_negative_zero():
    box = Box(-0.0, 0, 4, 4, label="dog").flipped([1], (8, 4))
    assert "-0.0" not in repr(box) + repr(Box(-0.0, 0, 4, 4))
    assert (
        Box(-0.01, 1, 5.00001, 123.4567).describe(0, str)
        == "an object in the box (0, 1, 5, 123.5) of the model's input"
    )


def test_a_box_is_its_overlap_times_the_probability_by_hand():
    output = [listed(((0.0, 0.0, 4.0, 4.0), 1, 0.5), ((2.0, 0.0, 6.0, 4.0), 2, 0.9), ((0.0, 0.0, 4.0, 8.0), 1, 0.8))]
    values, words = read(Box(0, 0, 4, 4, label="dog"), output, class_names=NAMES)
    assert (values.tolist(), words) == (
        [pytest.approx(0.5)],
        "dog in the box (0, 0, 4, 4) of the model's input",
    )  # 1 x 0.5; 0.5 x 0.8
    values, words = read(Box(0, 0, 4, 7, label=None), output)
    assert (values.tolist(), words) == (
        [pytest.approx(0.8 * 28 / 32)],
        "class 1 in the box (0, 0, 4, 7) of the model's input",
    )


def test_a_box_is_matched_anew_in_every_pass_and_nothing_left_is_zero():
    score = Score(nn.Identity(), Box(0, 0, 4, 4), input_size=(8, 8))
    score.read_score([listed(((0.0, 0.0, 4.0, 4.0), 1, 0.5))], 1)
    moved = [listed(((5.0, 5.0, 8.0, 8.0), 1, 0.9), ((0.0, 0.0, 4.0, 2.0), 1, 0.4))]
    assert score.read_score(moved, 1).tolist() == [pytest.approx(0.2)]
    assert score.read_score([listed(((0.0, 0.0, 4.0, 4.0), 2, 0.9))], 1).tolist() == [0.0], "another class is no match"
    empty = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.long), "scores": torch.zeros(0)}
    assert score.read_score([empty], 1).tolist() == [0.0]


def test_a_box_nobody_detected_is_an_error_that_names_the_nearest():
    output = [listed(((0.0, 0.0, 4.0, 4.0), 2, 0.5))]
    for box, saying in (
        (
            Box(5, 5, 8, 8),
            r"no detection that overlaps Box\(5, 5, 8, 8\) by half; the nearest: class 2 at \(0, 0, 4, 4\)",
        ),
        (Box(0, 0, 4, 4, label=1), "by half"),
        (Box(-0.0, -0.01, 1, 1), r"overlaps Box\(0, 0, 1, 1\) by half"),
    ):
        with pytest.raises(TargetError, match=saying):
            read(box, output)
    with pytest.raises(TargetError, match="a Box needs the output of a detector"):
        read(Box(0, 0, 4, 4), torch.zeros(1, 3))
    with pytest.raises(TargetError, match="left < right"):
        Box(4, 0, 4, 4)


def test_boxes_as_parts_of_the_input_with_logits():
    logits = torch.tensor([[[0.0, math.log(2.0), 0.0], [5.0, 0.0, 0.0]]])
    boxes = torch.tensor([[[0.25, 0.5, 0.5, 1.0], [0.75, 0.5, 0.5, 1.0]]])  # center x, y, width, height
    output = SimpleNamespace(logits=logits, pred_boxes=boxes)
    values, words = read(Box(0, 0, 10, 8, activation="softmax"), output, size=(8, 20), class_names=NAMES[:2])
    assert (values.tolist(), words) == ([pytest.approx(0.5)], "dog in the box (0, 0, 10, 8) of the model's input")


def test_a_box_is_named_in_pixels_of_the_original_image():
    context = ImageContext(
        (4, 8), (8, 16), lambda p: np.asarray(p) / 2, lambda p: np.asarray(p) * 2, lambda image: None
    )
    box = Box(2, 4, 6, 8, label=1).prepare_for_image(context)
    assert box.corners == (1, 2, 3, 4)
    assert box.describe(0, str) == "1 in the box (2, 4, 6, 8) of the image"
    assert box.flipped([1], (4, 8)).describe(0, str) == "1 in the box (2, 4, 6, 8) of the image"


# --- embeddings


def test_similarities_by_hand():
    output = torch.tensor([[3.0, 4.0], [4.0, 3.0]])
    values, words = read(Similarity(torch.tensor([1.0, 0.0])), output, 2)
    assert (values.tolist(), words) == ([pytest.approx(0.6), pytest.approx(0.8)], "similarity to the reference")
    values, words = read(Similarity(torch.tensor([1.0, 2.0]), "dot"), output, 2)
    assert (values.tolist(), words) == ([11.0, 10.0], "dot product to the reference")
    prototype = torch.tensor([[10.0, 0.0], [0.0, 1.0]])  # each of length 1 first: their mean points to (1, 1)
    values, words = read(Similarity(prototype), output, 2)
    assert (values.tolist(), words) == ([pytest.approx(7 / 5 / 2**0.5)] * 2, "similarity to a prototype of 2")
    assert read(Similarity(torch.tensor([1.0, 0.0])), torch.zeros(1, 2))[0].tolist() == [0.0]
    for reference, saying in ((torch.ones(3), "has 2 numbers"), (torch.zeros(2), "zero or not finite")):
        with pytest.raises(TargetError, match=saying):
            read(Similarity(reference), output, 2)


def test_another_image_is_embedded_by_the_model_itself():
    model, x = plain()
    tool = HiResCAM(model, "middle")
    found = tool.explain(x[0], Similarity(x[1]))
    reference = model(x[1:])[0].detach()
    expected = tool.attribute(x[:1], lambda output: F.cosine_similarity(output, reference[None]))
    torch.testing.assert_close(torch.from_numpy(found.attribution), expected[0])
    assert found.label == "similarity to the reference"
    assert found.score == pytest.approx(float(F.cosine_similarity(model(x[:1]).detach(), reference[None])))
    several = tool.explain(x[0], Similarity([x[1], x[0]]))
    assert several.label == "similarity to a prototype of 2"


def test_a_reference_of_a_model_of_signals_is_a_signal():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 5, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten()).double()
    x = torch.randn(3, 2, 12, dtype=torch.float64)
    tool, own = HiResCAM(model, "0"), model(x).detach()
    found = tool.explain(x[0], Similarity(x[1]))
    np.testing.assert_allclose(found.attribution, tool.explain(x[0], Similarity(own[1])).attribution, rtol=1e-10)
    prototype = tool.explain(x[0], Similarity([own[1], x[2]]))
    np.testing.assert_allclose(prototype.attribution, tool.explain(x[0], Similarity(own[1:])).attribution, rtol=1e-10)
    assert prototype.label == "similarity to a prototype of 2"
    with pytest.raises(TargetError, match=r"different shapes \(5,\), \(4,\): expected embeddings of the same length"):
        tool.explain(x[0], Similarity([own[1], own[1, :4]]))


def test_a_text_is_encoded_by_what_is_given_or_known_of_the_model():
    model, x = plain()
    words = {"a cat": torch.tensor([1.0, 0.0, 0.0]), "a dog": torch.tensor([0.0, 2.0, 0.0])}
    tool = HiResCAM(model, "middle")
    with pytest.raises(TargetError, match="the model has no text encoder; pass encode="):
        tool.explain(x[0], TextSimilarity("a cat"))
    given = tool.explain(x[0], TextSimilarity("a cat", encode=words.__getitem__))
    expected = tool.explain(x[0], Similarity(words["a cat"].double()))
    np.testing.assert_allclose(given.attribution, expected.attribution)
    assert given.label == 'similarity to "a cat"'
    attach_loaded_model_metadata(model, LoadedModelMetadata("here", embed_text=words.__getitem__))
    known = tool.explain(x[0], TextSimilarity("a cat", contrast_prompt="a dog"))
    other = tool.explain(x[0], Similarity(words["a dog"].double()))
    np.testing.assert_allclose(known.attribution, expected.attribution - other.attribution, rtol=1e-6)
    assert known.label == 'similarity to "a cat" rather than "a dog"'


# --- parts of an output


def test_a_part_of_the_output_by_key_index_and_attribute():
    logits = torch.tensor([[1.0, 5.0], [2.0, 0.0]])
    nested = {"heads": [SimpleNamespace(age=logits), logits * 0]}
    values, words = read(OutputPart("heads.0.age", "dog"), nested, 2, class_names=NAMES[:2])
    assert (values.tolist(), words) == ([5.0, 0.0], "dog of the output 'heads.0.age'")
    assert read(OutputPart(1), (logits, logits + 1), 2)[0].tolist() == [6.0, 3.0]
    assert (
        read(OutputPart("a", LogProbability(0)), {"a": logits}, 2)[1] == "log-probability of class 0 of the output 'a'"
    )
    for name in ("heads.2.age", "nose", "heads.0.__class__"):
        with pytest.raises(TargetError, match="it has"):
            read(OutputPart(name), nested, 2)


# --- what is no question


@pytest.mark.parametrize("kind", [Class, LogProbability, Region, lambda of: Box(0, 0, 4, 4, of)])
def test_a_class_inside_a_question_is_what_it_is_as_a_target(kind):
    for one in (np.int64(1), np.uint8(1), torch.tensor(1), np.array(1)):
        assert type(kind(one).label) is int
        assert kind(one).label == 1
    for wrong, saying in (
        (1.5, "target 1.5 is a float"),
        (True, "target True is a bool"),
        ([1], r"label=\[1\] of a \w+: expected one class index or name"),
        (-1, "class -1 is negative"),
        (Difference(0, 1), r"label=Difference\(a=0, b=1\) of a \w+: expected one class"),
        ({"class": 1}, "is a dict"),
    ):
        with pytest.raises(TargetError, match=saying):
            kind(wrong)


def test_several_classes_may_come_as_an_array_but_none_twice():
    output = torch.tensor([[1.0, 5.0, 3.0]])
    for some in (np.array([0, 2]), torch.tensor([0, 2]), (np.int64(0), torch.tensor(2)), range(0, 3, 2)):
        assert Classes(some)(output).tolist() == [2.0]
        assert read(Classes(some), output)[0].tolist() == [2.0]
    for wrong, saying in (
        ([1, 1], "a class twice"),
        (torch.tensor([1, 1]), "a class twice"),
        ([True, 2], "is a bool"),
        ([0, None], "labels=None of a Classes"),
        ([[0], [1]], r"labels=\[0\] of a Classes"),
        (np.array([]), "a list of classes"),
        (torch.tensor(1), "a list of classes"),
        (None, "a list of classes"),
    ):
        with pytest.raises(TargetError, match=saying):
            Classes(wrong)
    with pytest.raises(TargetError, match="a class twice"):
        read(Classes(["cat", 0]), output, class_names=NAMES)
    with pytest.raises(TargetError, match="class 3 is out of range"):
        Classes([0, 3])(output)


@pytest.mark.parametrize(
    ("make", "saying"),
    [
        (lambda: Region(point=5), r"point=5 of a Region: expected finite numbers \(x, y\)"),
        (lambda: Region(point="ab"), "point='ab' of a Region"),
        (lambda: Region(point=(1, None)), "finite numbers"),
        (lambda: Region(point=(1, math.nan)), "finite numbers"),
        (lambda: Region(mask=[[1, 0], [1]]), "rows of different lengths"),
        (lambda: Region(mask=[["a", "b"]]), "has NaN, or values that are not numbers"),
        (lambda: Region(mask=np.array([[0, math.nan]])), "NaN"),
        (lambda: Region(mask=torch.tensor([[1, math.nan]])), "NaN"),
        (lambda: Box("a", 0, 4, 4), r"Box\('a', 0, 4, 4\): expected four finite numbers"),
        (lambda: Box(0, 0, 4, None), "four finite numbers"),
        (lambda: Box(0, 0, 4, math.inf), "four finite numbers"),
        (lambda: Box(0, 0, 4, math.nan), "four finite numbers"),
        (lambda: OutputPart(1.5), r"OutputPart\(1.5\): expected a key, an index or an attribute"),
        (lambda: OutputPart(None), r"OutputPart\(None\)"),
        (lambda: OutputPart(True), r"OutputPart\(True\)"),
        (lambda: TextSimilarity("a cat", encode="clip"), "encode='clip' of a TextSimilarity: expected a function"),
        (lambda: TextSimilarity(5), "expected a sentence"),
        (
            lambda: Score(nn.Identity(), Classes),
            r"the target is the class Classes itself: pass an instance, e.g. Classes\(",
        ),
        (lambda: Score(nn.Identity(), Difference), "the class Difference itself"),
        (lambda: read([Region, 1], torch.zeros(2, 3), 2), "the class Region itself"),
    ],
)
def test_what_is_no_question_is_one_clear_error(make, saying):
    with pytest.raises(TargetError, match=saying):
        make()


def test_numbers_of_any_library_are_numbers():
    assert Region(point=torch.tensor([1, 2])).point == (1, 2)
    assert Region(point=np.array([1.5, 2])).point == (1.5, 2)
    assert Box(*torch.tensor([0.0, 1.0, 4.0, 5.0], requires_grad=True), label=np.int8(2)).corners == (0, 1, 4, 5)
    assert read(OutputPart(np.int64(1)), (torch.zeros(1, 2), torch.ones(1, 2)))[0].tolist() == [1]


def test_a_question_asked_without_a_first_pass_is_right_or_an_error():
    output = torch.tensor([[1.0, 5.0, 3.0]])
    for wrong, saying in ((LogProbability("cat"), "class names are not known"), (LogProbability(3), "out of range")):
        with pytest.raises(TargetError, match=saying):
            wrong(output)
    with pytest.raises(TargetError, match="resolved in a first forward pass"):
        Region(0, point=(0, 0))(torch.zeros(1, 2, 4, 4))


def test_a_place_that_is_not_on_the_input_is_refused_with_or_without_an_image():
    model, x = plain(Dense)
    tool, other = HiResCAM(model, "middle"), np.zeros((4, 4))
    other[0] = 1
    for wrong, saying in (
        (Region(1, mask=other), r"the mask has size \(4, 4\); expected .*the model's input \(8, 8\)"),
        (Region(1, mask=np.ones((1, 8, 8))), r"the mask has size \(1, 8, 8\)"),
        (Region(1, point=(-3, 2)), r"the point \(-3, 2\) lies outside"),
        (Region(1, point=(2, 8)), r"the point \(2, 8\) lies outside"),
        (Region(1, point=(1, 2, 3)), r"the point \(1, 2, 3\) has 3 numbers; expected 2"),
        (Region(7, point=(1, 2)), "class 7 is out of range"),
    ):
        for ask in (lambda one: tool.attribute(x, one), lambda one: tool.explain(x[0], one)):
            with pytest.raises(TargetError, match=saying):
                ask(wrong)


def test_a_detectors_classes_are_those_of_its_logits_or_its_categories():
    queries = SimpleNamespace(logits=torch.zeros(1, 1, 3), pred_boxes=torch.tensor([[[0.5, 0.5, 1.0, 1.0]]]))
    with pytest.raises(TargetError, match=r"class 2 is out of range: the model has 2 classes"):
        read(Box(0, 0, 8, 8, 2, activation="softmax"), queries)
    one = [listed(((0.0, 0.0, 8.0, 8.0), 1, 0.5))]
    with pytest.raises(TargetError, match=r"class 9 is out of range: the model has 3 classes"):
        read(Box(0, 0, 8, 8, 9), one, class_names=NAMES)
    with pytest.raises(TargetError, match="no detection that overlaps"):
        read(Box(0, 0, 8, 8, 9), one)


def test_of_a_detector_only_a_box_is_asked():
    rows = [listed(((0.0, 0.0, 4.0, 4.0), 2, 0.5))]
    queries = SimpleNamespace(logits=torch.zeros(1, 4, 3), pred_boxes=torch.zeros(1, 4, 4))
    for output in (
        rows,
        [listed(((0.0, 0.0, 4.0, 4.0), 2, 0.5), ((1.0, 1.0, 4.0, 4.0), 1, 0.5))],
        queries,
        vars(queries),
    ):
        for target in (None, 2, Classes([0, 1]), LogProbability(1), Region(1), Region(1, point=(1, 1))):
            with pytest.raises(TargetError, match=r"comes from a detector.*pass target=Box"):
                read(target, output)
    beside = {"logits": torch.tensor([[1.0, 5.0]]), "pred_boxes": torch.zeros(1, 4)}  # one box an image has one class
    assert read(1, beside)[0].tolist() == [5.0]


def test_places_on_other_axes_than_the_inputs_are_refused():
    for target in (Region(1), Region(1, point=(1, 1)), OutputPart("logits", Region(1))):
        for output in ({"logits": torch.zeros(1, 4, 3)}, SimpleNamespace(logits=torch.zeros(1, 4, 3))):
            with pytest.raises(
                TargetError,
                match=r"grid \(3,\) and the input \(8, 8\) differ in number of axes: pass a function",
            ):
                read(target, output)


def test_words_tell_questions_apart():
    output = torch.tensor([[1.0, 5.0, 3.0]])
    assert read(lambda out: out[:, 0], output)[1] == "the output of a function"
    assert read(LogProbability(1, multilabel=True), output)[1] == "log-probability of class 1 by itself"
    assert read(LogProbability(1), output)[1] == "log-probability of class 1"


# --- through the methods


class Queries(Plain):
    """Two queries, as DETR has them: the left half reads the left half of the input, the right one the right."""

    def after(self, y):
        halves = torch.sigmoid(self.last(F.elu(y))).unflatten(3, (2, -1)).mean((2, 4)).transpose(1, 2)
        boxes = halves.new_tensor([[0.25, 0.5, 0.5, 1.0], [0.75, 0.5, 0.5, 1.0]]).expand(len(y), 2, 4)
        return SimpleNamespace(logits=self.head(halves), pred_boxes=boxes)


@pytest.mark.parametrize(
    ("kind", "questions"),
    [
        (Dense, [Region(1, point=(1, 2)), Region(1, point=(6, 5)), Region(2)]),
        (Queries, [Box(0, 0, 4, 8, 0, activation="softmax"), Box(4, 0, 8, 8, 1, activation="softmax")]),
    ],
)
def test_several_questions_know_the_size_of_the_input(kind, questions):
    model, x = plain(kind)
    tool = HiResCAM(model, "middle")
    for one, question in zip(tool.explain_classes(x[0], questions), questions, strict=True):
        np.testing.assert_array_equal(one.attribution, tool.explain(x[0], question).attribution)


class Stages(nn.Module):
    """A class score at every place, of two resolutions: its backbone is no more than its first stage."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 4, 2, 2), nn.Tanh())
        self.neck, self.head = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 3, 1)

    def forward(self, x):
        return {"out": self.head(torch.tanh(self.neck(self.backbone(x)))), "aux": x}


def test_a_question_of_a_place_has_its_layer_however_it_is_wrapped():
    torch.manual_seed(0)
    model, x = Stages().double(), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    question = Region(1, point=(1, 2))
    tool = HiResCAM(model)
    alone = tool.explain(x[0], question)
    assert alone.layer == "backbone"
    for same in (
        tool.explain(x[0], OutputPart("out", question)),
        tool.explain_batch(list(x), [question, Region(2)])[0],
    ):
        assert same.layer == alone.layer
        np.testing.assert_allclose(same.attribution, alone.attribution, rtol=1e-10)


def test_every_sample_of_a_batch_is_asked_its_own_question():
    model, x = plain(samples=3)
    tool = HiResCAM(model, "middle")
    questions = [Classes([0, 1]), 2, LogProbability(1)]
    together = tool.explain_batch(list(x), questions)
    assert [one.label for one in together] == ["class 0 and class 1", "class 2", "log-probability of class 1"]
    for image, question, one in zip(x, questions, together, strict=True):
        np.testing.assert_allclose(one.attribution, tool.explain(image, question).attribution, rtol=1e-12)
    torch.testing.assert_close(
        torch.stack([torch.from_numpy(one.attribution) for one in together]), tool.attribute(x, questions)
    )
    with pytest.raises(TargetError, match="2 targets for a batch of 3"):
        tool.attribute(x, questions[:2])


def test_altered_activations_are_asked_the_question_of_their_own_sample():
    model, x = plain(Dense)
    masks = np.zeros((2, 8, 8), bool)
    masks[0, :4], masks[1, 4:] = True, True
    questions = [Region(label=1, mask=mask) for mask in masks]
    both = AblationCAM(model, "middle").attribute(x, questions)
    for n, question in enumerate(questions):
        alone = AblationCAM(model, "middle").attribute(x[n : n + 1], question)
        torch.testing.assert_close(both[n : n + 1], alone, rtol=1e-8, atol=1e-14)


def test_a_linear_question_is_the_same_sum_of_maps():
    model, x = plain()
    both = HiResCAM(model, "middle").attribute(x, Classes([0, 2]))
    torch.testing.assert_close(both, (truth(model, x, 0) + truth(model, x, 2)) / 2)


def test_a_question_outlives_its_first_use():
    model, x = plain()
    question, tool = LogProbability(), LayerCAM(model, "middle")
    first, second = tool.explain(x[0], question), tool.explain(x[1], question)
    assert first.label == f"log-probability of class {int(model(x[:1]).argmax())}"
    assert second.label == f"log-probability of class {int(model(x[1:]).argmax())}"
    np.testing.assert_array_equal(tool.explain(x[0], question).attribution, first.attribution)


@pytest.mark.parametrize("name", ["integratedgradients", "scorecam", "occlusion"])
def test_a_list_with_a_target_object_goes_with_altered_inputs(name):
    model, x = plain()
    method, questions = METHODS[name](model), [LogProbability(0), 2]
    apart = torch.cat([method.attribute(x[n : n + 1], question) for n, question in enumerate(questions)])
    torch.testing.assert_close(method.attribute(x, questions), apart, rtol=1e-8, atol=1e-14)


# --- the best detection of a class


def found(boxes, scores, labels):
    return {"boxes": torch.tensor(boxes), "scores": torch.tensor(scores), "labels": torch.tensor(labels)}


def test_the_best_box_is_that_of_the_highest_score_and_stays_the_target():
    sample = found([[0.0, 0, 4, 4], [4.0, 4, 8, 8], [5.0, 1, 5, 9]], [0.5, 0.7, 0.9], [1, 1, 1])
    score = Score(nn.Identity(), BestBox(1), input_size=(8, 8))
    assert score.read_score([sample], 1).tolist() == pytest.approx([0.7])  # 0.9 is the score of a box without area
    assert score.describe(0) == "class 1 in the box (4, 4, 8, 8) of the model's input"
    changed = found([[0.0, 0, 4, 4], [4.0, 4, 8, 8]], [0.8, 0.2], [1, 1])
    assert score.read_score([changed], 1).tolist() == pytest.approx([0.2])  # not 0.8 of the other object


def test_the_best_box_of_each_sample_is_its_own():
    samples = [found([[0.0, 0, 4, 4]], [0.5], [2]), found([[4.0, 4, 8, 8]], [0.7], [1])]
    score = Score(nn.Identity(), BestBox(), input_size=(8, 8))
    assert score.read_score(samples, 2).tolist() == pytest.approx([0.5, 0.7])
    assert [score.describe(i)[:17] for i in (0, 1)] == ["class 2 in the bo", "class 1 in the bo"]


@pytest.mark.parametrize(
    ("label", "expected"), [(0, "of class 0"), (3, "of class 3"), (None, "sample 0 has no detection$")]
)
def test_a_class_that_is_not_detected_is_one_error(label, expected):
    boxes = [] if label is None else [[0.0, 0, 4, 4]]
    sample = found(torch.tensor(boxes).reshape(-1, 4).tolist(), [0.5] * len(boxes), [1] * len(boxes))
    sample["boxes"] = sample["boxes"].reshape(-1, 4)
    names = [f"kind {i}" for i in range(5)]
    with pytest.raises(TargetError, match=expected):
        Score(nn.Identity(), BestBox(label), class_names=names, input_size=(8, 8)).read_score([sample], 1)


class RowsOfCells(nn.Module):
    """A detector of two classes that predicts a square of 4 pixels around each cell of a 4 x 4 grid, as YOLO does."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.features = nn.Conv2d(3, 6, 3, stride=4, padding=1)
        self.head = nn.Conv2d(6, 2, 1)

    def forward(self, x):
        logits = self.head(self.features(x).relu()).flatten(2).transpose(1, 2)
        rows, columns = torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")
        corner = 4.0 * torch.stack([columns, rows], -1).reshape(1, 16, 2).expand(len(x), -1, -1)
        boxes = torch.cat([corner, corner + 4], 2)
        return DetectionRows(boxes, logits.sigmoid(), torch.full(boxes.shape[:2], 4.0))


def test_a_class_alone_is_the_best_box_where_the_card_says_how():
    model = RowsOfCells().eval()
    attach_loaded_model_metadata(model, LoadedModelMetadata("rows", layer="features", build_class_target=BestBox))
    x = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    rows = model(x)
    best = rows.probabilities[:, :, 1].argmax(1)
    maps, score = LayerCAM(model).attribute(x, 1), Score(model, 1)
    torch.testing.assert_close(score(x), rows.probabilities[torch.arange(2), best, 1])
    for n, row in enumerate(best.tolist()):
        x0, y0, x1, y1 = rows.boxes[n, row].tolist()
        assert (
            score.describe(n)
            == f"class 1 in the box ({x0:g}, {y0:g}, {x1:g}, {y1:g}) of the model's input, predicted at stride 4"
        )
        assert score.class_index(n) == 1
        alone = LayerCAM(model).attribute(x[n : n + 1], Box(x0, y0, x1, y1, label=1))[0]
        torch.testing.assert_close(maps[n], alone)
        assert maps[n].flatten().nonzero()[:, 0].tolist() in ([row], [])  # one cell of the layer enters the row
    mixed = Score(model, [0, Box(0, 0, 4, 4, label=1)])
    assert mixed(x)[1] == rows.probabilities[1, 0, 1]
    assert (mixed.class_index(0), mixed.class_index(1)) == (0, None)


def test_a_box_of_rows_takes_the_class_of_the_most_probable_row():
    boxes = torch.tensor([[[0.0, 0, 4, 4], [0.0, 0, 4, 3.5], [8.0, 8, 9, 9]]])
    rows = DetectionRows(boxes, torch.tensor([[[0.1, 0.2], [0.9, 0.0], [1.0, 1.0]]]), torch.tensor([[8.0, 16.0, 32.0]]))
    score = Score(nn.Identity(), Box(0, 0, 4, 4), input_size=(16, 16))
    assert score.read_score(rows, 1).tolist() == pytest.approx([0.9 * 3.5 / 4])
    assert score.describe(0) == "class 0 in the box (0, 0, 4, 4) of the model's input, predicted at stride 16"


def test_a_class_needs_a_box_where_the_card_says_nothing():
    with pytest.raises(TargetError, match="a class alone does not select a box"):
        Score(RowsOfCells(), 1)(torch.rand(1, 3, 16, 16))
