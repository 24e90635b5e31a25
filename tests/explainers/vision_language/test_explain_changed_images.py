"""Text explained by methods that change the image: each score is that of the processor and the model alone."""

import copy

import numpy as np
import pytest
import torch

from camscope import METHODS
from camscope.targets import Token
from tests.explainers.vision_language.test_vision_language_models import built, run_processor
from tests.vision_language_families import FAMILIES, IMAGE_SIZE, VOCABULARY, draw_noise, write_prompt

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # the processor of PaliGemma
]
CAT = VOCABULARY.index("cat")
by_family = pytest.mark.parametrize("family", [pytest.param(name, marks=pytest.mark.one_in(5)) for name in FAMILIES])


def score_of_image(family, image, token=CAT):
    """The log-probability of a token by the processor and the model alone."""
    model, _ = built(family)
    options = {"decoder_input_ids": torch.tensor([[2]])} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        logits = model(**run_processor(family, image), use_cache=False, **options).logits
    return float(logits[0, -1].double().log_softmax(0)[token])


@by_family
def test_occlusion_is_the_loss_of_the_score_when_the_processor_sees_a_gray_window(family):
    model, processor = built(family)
    image, prompt = draw_noise(), write_prompt(family)
    tool = METHODS["occlusion"](model, window=(24, 40), stride=(24, 40), baseline="dark")
    explanation = tool.explain(image, Token("cat"), prompt=prompt, processor=processor)
    clean = score_of_image(family, image)
    assert explanation.score == pytest.approx(clean, abs=1e-4)
    assert explanation.attribution.shape == IMAGE_SIZE
    darkest = image.reshape(-1, 3).min(0)
    for rows in (slice(0, 24), slice(24, 48)):
        for columns in (slice(0, 40), slice(40, 80)):
            hidden = image.copy()
            hidden[rows, columns] = darkest
            expected = clean - score_of_image(family, hidden)
            cells = explanation.attribution[rows, columns]
            assert np.abs(cells - expected).max() <= 2e-4 + 1e-3 * abs(expected)
    assert explanation.placement.to_image([(0, 0), IMAGE_SIZE]).tolist() == [[0, 0], list(IMAGE_SIZE)]


@pytest.mark.parametrize("name", ["rise", "hsic", "sobol", "lime", "kernelshap", "segmentablation", "center"])
def test_methods_that_need_only_scores_explain_words(name):
    model, processor = built("llava")
    if name in ("lime", "kernelshap"):
        pytest.importorskip("captum")
    settings = {"rise": {"n_samples": 30}, "hsic": {"n_samples": 30}, "sobol": {"n_samples": 4}}.get(name, {})
    if name in ("lime", "kernelshap"):
        settings = {"n_samples": 30, "grid_size": 3}
    if name == "segmentablation":
        settings = {"segments": torch.arange(4).view(2, 2).repeat_interleave(24, 0).repeat_interleave(40, 1)}
    tool = METHODS[name](model, **settings)
    words = tool.explain_words(draw_noise(), "cat dog", prompt=write_prompt("llava"), processor=processor)
    assert [word.label for word in words] == ["cat", "dog"]
    assert words[0].method == name
    assert words[0].score == pytest.approx(score_of_image("llava", draw_noise()), abs=1e-4)
    assert words[0].parameters["prompt"] == write_prompt("llava")
    assert (name == "center") == np.array_equal(words[0].attribution, words[1].attribution)


@pytest.mark.parametrize("family", ["blip_2", "florence2"])  # these have dropout
@pytest.mark.parametrize(
    ("name", "settings"), [("occlusion", {"window": 24, "stride": 24}), ("rise", {"n_samples": 6})]
)
def test_a_model_in_training_is_explained_in_eval_mode_and_stays_as_it_was(family, name, settings):
    model, processor = copy.deepcopy(built(family)[0]), built(family)[1]
    question = {"prompt": write_prompt(family), "processor": processor}
    expected = METHODS[name](model.eval(), **settings).explain(draw_noise(), Token("cat"), **question)
    model.train()
    modes = [module.training for module in model.modules()]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    explanation = METHODS[name](model, **settings).explain(draw_noise(), Token("cat"), **question)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert explanation.score == pytest.approx(expected.score, abs=1e-6)
    np.testing.assert_allclose(explanation.attribution, expected.attribution, atol=1e-6)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_error_in_the_middle_leaves_the_model_as_it_was():
    model = copy.deepcopy(built("llava")[0]).train()
    calls = []

    def fail(module, args):
        calls.append(module)
        if len(calls) >= 2:
            raise ValueError("in the middle")

    handle = model.register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="in the middle"):
        METHODS["occlusion"](model, batch_size=1).explain(
            draw_noise(), Token("cat"), prompt=write_prompt("llava"), processor=built("llava")[1]
        )
    handle.remove()
    assert all(module.training for module in model.modules())
