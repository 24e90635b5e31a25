"""Maps of text that vision-language models write, against hooks and autograd written out, for each family."""

import copy
import functools

import numpy as np
import pytest
import torch
from PIL import Image

from camscope import METHODS, GradCAM
from camscope.errors import CamscopeError, InputError, LayerError, ModelError, TargetError
from camscope.explainers.vision_language.processor_inputs import build_inputs
from camscope.layers.image_token_grids import compose_token_map, list_placed_tokens
from camscope.targets import Answer, Token
from tests.vision_language_families import (
    FAMILIES,
    IMAGE,
    IMAGE_ID,
    IMAGE_SIZE,
    VOCABULARY,
    build,
    draw_noise,
    write_prompt,
)

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation:DeprecationWarning"
)  # the processor of PaliGemma

QUERY_FAMILIES = ("blip_2", "idefics2")  # their image tokens have no place, so the vision tower is explained
PLAIN_FAMILIES = tuple(family for family in FAMILIES if family not in QUERY_FAMILIES)
QUICK = ("llava", "paligemma", "qwen2_vl")
CAT, DOG = VOCABULARY.index("cat"), VOCABULARY.index("dog")
TOLERANCE = 1e-5

by_family = pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in QUICK else pytest.mark.one_in(3)) for name in FAMILIES]
)


@functools.cache
def built(family):
    return build(family)


def run_processor(family, image, text=None, seed=0):
    _, processor = built(family)
    inputs = processor(images=[[Image.fromarray(image)]], text=[text or write_prompt(family)], return_tensors="pt")
    inputs.pop("labels", None)
    return inputs


def find_language_model(model):
    names = [n for n, _ in model.named_modules() if n.rpartition(".")[2] in ("language_model", "text_model")]
    module = model.get_submodule(names[0])
    return getattr(module, "encoder", module) if model.config.is_encoder_decoder else module


def record_image_tokens(model, inputs, **options):
    """The image tokens (T,K) that enter the language model, still in the graph, and the output of the model."""
    records = []

    def record(module, args, kwargs):
        kwargs["inputs_embeds"].retain_grad() if kwargs["inputs_embeds"].requires_grad else None
        records.append(kwargs["inputs_embeds"])

    handle = find_language_model(model).register_forward_pre_hook(record, with_kwargs=True)
    try:
        output = model(**inputs, use_cache=False, **options)
    finally:
        handle.remove()
    return records[0], output


def plain_features(family, inputs):
    """The projector's output and its gradient as tokens (T,K), without any code of the package: hooks and `backward`."""
    model, records = copy.deepcopy(built(family)[0]), []
    name = {
        "blip_2": "vision_model.encoder.layers.1",
        "idefics2": "model.vision_model.encoder.layers.1",
        "gemma4": "model.embed_vision",
        "idefics3": "model.connector",
        "smolvlm": "model.connector",
        **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"), "model.visual"),
    }.get(family, "model.multi_modal_projector")

    def record(module, args, output):
        tensor = output if isinstance(output, torch.Tensor) else getattr(output, "pooler_output", None)
        tensor = output[0] if tensor is None else tensor
        tensor.retain_grad()
        records.append(tensor)

    model.get_submodule(name).register_forward_hook(record)
    options = {"decoder_input_ids": torch.tensor([[2]])} if model.config.is_encoder_decoder else {}
    logits = model(**inputs, use_cache=False, **options).logits[0, -1]
    logits.float().log_softmax(0)[CAT].backward()
    return records[0].detach(), records[0].grad, float(logits.detach().log_softmax(0)[CAT])


def plain_gradcam(features, gradients):
    """relu Σ_k mean(g_k) A_k over tokens (T,K)."""
    return (features * gradients.mean(0)).sum(1).relu().numpy()


SINGLE_GRIDS = {
    "llava": (4, 4),
    "paligemma": (4, 4),
    "gemma3": (4, 4),
    "qwen2_vl": (3, 5),
    "qwen2_5_vl": (3, 5),
    "qwen3_vl": (3, 5),
    "qwen3_5": (3, 5),
    "blip_2": (4, 4),
    "florence2": (4, 4),
}


@by_family
def test_gradcam_is_that_of_plain_hooks(family):
    model, processor = built(family)
    image, prompt = draw_noise(), write_prompt(family)
    explanation = GradCAM(model).explain(image, Token("cat"), prompt=prompt, processor=processor, views="all")
    features, gradients, score = plain_features(family, run_processor(family, image))
    assert explanation.score == pytest.approx(score, abs=1e-4)
    features, gradients = features.flatten(0, -2), gradients.flatten(0, -2)
    if family in ("blip_2", "florence2"):  # a class token, or the mean of all cells, comes first
        features, gradients = features[1:], gradients[1:]
    if family in SINGLE_GRIDS:
        assert explanation.grid == SINGLE_GRIDS[family]
    if family in ("llava_next", "llava_onevision"):  # the model drops the padding, which then has no gradient
        used = gradients.any(1)
        assert int(used.sum()) < len(used) or family == "llava_onevision"
        if family == "llava_onevision":
            return  # its tokens are interpolated cells: see the test of its input
        features, gradients = features[used], gradients[used]
    expected = plain_gradcam(features, gradients)
    scale = float(expected.max())
    if len(explanation.layout.split("+")) == 1:
        assert np.abs(explanation.attribution.ravel() - expected).max() <= TOLERANCE * scale
        return
    for views in ("overview", "tiles"):
        part = GradCAM(model).explain(image, Token("cat"), prompt=prompt, processor=processor, views=views)
        if views == "overview":
            cells = expected[:16] if family == "llava_next" else expected[-16:]
            assert np.abs(part.attribution.ravel() - cells).max() <= TOLERANCE * scale
        elif family == "llava_next":
            assert np.abs(np.sort(part.attribution.ravel()) - np.sort(expected[16:])).max() <= TOLERANCE * scale
        else:
            rows, columns = part.grid[0] // 4, part.grid[1] // 4
            cells = expected[:-16].reshape(rows, columns, 4, 4).transpose(0, 2, 1, 3).reshape(part.grid)
            assert np.abs(part.attribution - cells).max() <= TOLERANCE * scale


@pytest.mark.parametrize("family", [pytest.param(f, marks=pytest.mark.one_in(3)) for f in PLAIN_FAMILIES])
def test_the_gradient_is_that_at_the_input_of_the_language_model(family):
    model, processor = built(family)
    image = draw_noise()
    inputs = run_processor(family, image)
    options = {"decoder_input_ids": torch.tensor([[2]])} if model.config.is_encoder_decoder else {}
    embeddings, output = record_image_tokens(copy.deepcopy(model), inputs, **options)
    output.logits[0, -1].float().log_softmax(0)[CAT].backward()
    mask = inputs["input_ids"][0] == IMAGE_ID
    tokens, gradients = embeddings[0][mask].detach(), embeddings.grad[0][mask]
    built_inputs = build_inputs(
        model, processor, [image], [write_prompt(family)], [Token("cat").encode(processor.tokenizer)], {}
    )
    placed = list_placed_tokens(built_inputs.grids[0])
    values = np.zeros(len(tokens))
    values[placed] = plain_gradcam(tokens[placed], gradients[placed])
    expected = compose_token_map(values, built_inputs.grids[0], IMAGE_SIZE).attribution
    explanation = GradCAM(model).explain(image, Token("cat"), prompt=write_prompt(family), processor=processor)
    assert np.abs(explanation.attribution - expected).max() <= TOLERANCE * expected.max()


ATTENTION_OUTPUTS = ("out_proj", "o_proj", "proj", "projection", "projection_layer")


def remove_attention(model):
    """Silence all attention of the vision tower, so that each token sees only its own part of the image."""
    for name, module in model.named_modules():
        path = name.split(".")
        is_vision = any(part in ("vision_tower", "vision_model", "visual") for part in path)
        is_attention = any("attn" in part or part in ("attention", "self_attn") for part in path)
        if is_vision and is_attention and isinstance(module, torch.nn.Linear):
            last = next((part for part in reversed(path) if part != "linear"), "")
            if last in ATTENTION_OUTPUTS:
                torch.nn.init.zeros_(module.weight)
                if module.bias is not None:
                    torch.nn.init.zeros_(module.bias)


@by_family
@pytest.mark.parametrize("size", [(48, 80), (70, 50)], ids=str)
def test_a_changed_part_of_the_image_is_found_where_it_is(family, size):
    model, processor = built(family)
    model = copy.deepcopy(model)
    remove_attention(model)
    prompt = write_prompt(family)
    target = Token("cat").encode(processor.tokenizer)

    def read_tokens(image):
        inputs = build_inputs(model, processor, [image], [prompt], [target], {})
        with torch.no_grad():
            if family in QUERY_FAMILIES:
                records = []
                tower = model.vision_model if family == "blip_2" else model.model.vision_model
                handle = tower.encoder.layers[-1].register_forward_hook(
                    lambda module, args, output: records.append(output if torch.is_tensor(output) else output[0])
                )
                model(**inputs.model_inputs, use_cache=False)
                handle.remove()
                return records[0].flatten(0, 1), inputs
            embeddings, _ = record_image_tokens(model, inputs.model_inputs)
        return embeddings[0][inputs.image_token_mask[0]], inputs

    image = draw_noise(size)
    before, inputs = read_tokens(image)
    if family in QUERY_FAMILIES:
        grid = GradCAM(model).explain(image, Token("cat"), prompt=prompt, processor=processor)
        shape, prefix = grid.grid, len(before) - grid.attribution.size
    covered, block = 0, 10
    for top in (4, 20, size[0] - block - 6):
        for left in (5, 22, size[1] - block - 6):
            changed = image.copy()
            changed[top : top + block, left : left + block] = 255 - changed[top : top + block, left : left + block]
            after, _ = read_tokens(changed)
            change = (after - before).norm(dim=1).double().numpy()
            if family in QUERY_FAMILIES:
                values, place = change[prefix:].reshape(shape), grid.placement
            else:
                placed = compose_token_map(change, inputs.grids[0], size)
                values, place = placed
                unplaced = sorted(set(range(len(change))) - set(list_placed_tokens(inputs.grids[0])))
                assert family == "florence2" or not change[unplaced].any()
            if not change.any():
                continue  # a part that the processor crops
            covered += 1
            row, column = np.unravel_index(values.argmax(), values.shape)
            y, x = place.to_image([(row + 0.5, column + 0.5)])[0]
            cell_height, cell_width = (abs(edge) for edge in np.diff(place.to_image([(0, 0), (1, 1)]), axis=0)[0])
            reach = int(family == "florence2")  # in cells: the convolutions of its tower overlap
            assert abs(y - (top + block / 2)) <= (cell_height + block) / 2 + 1 + reach * cell_height
            assert abs(x - (left + block / 2)) <= (cell_width + block) / 2 + 1 + reach * cell_width
    assert covered >= 3


@by_family
def test_an_answer_is_the_sum_of_its_words(family):
    model, processor = built(family)
    prompt, image = write_prompt(family), draw_noise()
    answer = GradCAM(model).explain(image, Answer("cat dog"), prompt=prompt, processor=processor)
    words = GradCAM(model).explain_words(image, "cat dog", prompt=prompt, processor=processor)
    first = GradCAM(model).explain(image, Token("cat"), prompt=prompt, processor=processor)
    second = GradCAM(model).explain(image, Token("dog", after="cat"), prompt=prompt, processor=processor)
    assert [word.label for word in words] == ["cat", "dog"]
    assert answer.score == pytest.approx(first.score + second.score, abs=1e-3)
    assert [word.score for word in words] == pytest.approx([first.score, second.score], abs=1e-3)
    scale = max(second.attribution.max(), first.attribution.max())
    assert np.abs(words[1].attribution - second.attribution).max() <= 1e-3 * scale
    inputs = run_processor(family, image)
    with torch.no_grad():
        if model.config.is_encoder_decoder:
            logits = model(**inputs, decoder_input_ids=torch.tensor([[2, CAT]])).logits[0, -1]
        else:  # as `generate` extends its inputs, without its cache
            kinds = {
                "input_ids": CAT,
                "attention_mask": 1,
                "token_type_ids": int(family == "paligemma"),
                "mm_token_type_ids": 0,
            }
            for name in set(kinds) & set(inputs):
                inputs[name] = torch.cat([inputs[name], torch.tensor([[kinds[name]]])], 1)
            logits = model(**inputs, use_cache=False).logits[0, -1]
    assert second.score == pytest.approx(float(logits.float().log_softmax(0)[DOG]), abs=2e-3)


@by_family
def test_a_batch_with_padding_on_the_left_has_the_maps_of_its_images(family):
    model, processor = built(family)
    images = [draw_noise(), draw_noise(seed=1)]
    prompts = [write_prompt(family, "a cat on mat what {} is this"), write_prompt(family)]
    targets = [Token("cat"), Token("dog")]
    batch = GradCAM(model).explain_batch(images, targets, prompt=prompts, processor=processor)
    for explanation, image, prompt, target in zip(batch, images, prompts, targets, strict=True):
        alone = GradCAM(model).explain(image, target, prompt=prompt, processor=processor)
        assert explanation.score == pytest.approx(alone.score, abs=1e-3)
        assert np.abs(explanation.attribution - alone.attribution).max() <= 1e-3 * alone.attribution.max()


@by_family
def test_the_state_of_the_model_stays(family):
    model, processor = built(family)
    with torch.no_grad():  # the first call of transformers leaves its own hooks
        options = {"decoder_input_ids": torch.tensor([[2]])} if model.config.is_encoder_decoder else {}
        model(**run_processor(family, draw_noise()), use_cache=False, **options)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    hooks = [(list(module._forward_hooks), list(module._forward_pre_hooks)) for module in model.modules()]
    extra = {name: dict(vars(module)).get("rope_deltas") for name, module in model.named_modules()}
    GradCAM(model).explain(draw_noise(), Token("cat"), prompt=write_prompt(family), processor=processor)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(dict(vars(module)).get("rope_deltas") is extra[name] for name, module in model.named_modules())
    assert hooks == [(list(module._forward_hooks), list(module._forward_pre_hooks)) for module in model.modules()]
    assert all(parameter.grad is None for parameter in model.parameters())


# --- attention


@pytest.mark.parametrize(
    "family", [*QUICK, *(pytest.param(f, marks=pytest.mark.one_in(3)) for f in ("internvl", "gemma3"))]
)
@pytest.mark.parametrize("n_blocks", [1, None])
def test_chefer_is_attention_times_gradient_written_out(family, n_blocks):
    model, processor = built(family)
    explanation = METHODS["chefer"](model, n_blocks=n_blocks).explain(
        draw_noise(), Token("cat"), prompt=write_prompt(family), processor=processor, views="overview"
    )
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    inputs = run_processor(family, draw_noise())
    output = plain(**inputs, use_cache=False, output_attentions=True)
    attentions = [a for a in output.attentions if a.shape[-1] == inputs["input_ids"].shape[1]]
    score = output.logits[0, -1].float().log_softmax(0)[CAT]
    gradients = torch.autograd.grad(score, attentions)
    length = attentions[0].shape[-1]
    relevance, identity = torch.zeros(length, length), torch.eye(length)
    for attention, gradient in list(zip(attentions, gradients, strict=True))[-n_blocks if n_blocks else 0 :]:
        relevance = relevance + (attention * gradient)[0].relu().mean(0) @ (identity + relevance)
    row = relevance[-1][inputs["input_ids"][0] == IMAGE_ID].detach().numpy()
    row = row[-explanation.attribution.size :] if family == "internvl" else row
    assert np.abs(explanation.attribution.ravel() - row).max() <= TOLERANCE * row.max()


# --- prompts


class MaskingProcessor:
    """A processor that hides the first tokens of each prompt, as padding is hidden."""

    def __init__(self, processor, n_hidden):
        self._processor, self._n_hidden = processor, n_hidden

    def __getattr__(self, name):
        return getattr(self._processor, name)

    def __call__(self, **options):
        batch = self._processor(**options)
        batch["attention_mask"][:, : self._n_hidden] = 0
        return batch


@pytest.mark.parametrize("family", QUICK)
@pytest.mark.parametrize("method", ["gradcam", "chefer"])
def test_words_before_the_image_shift_nothing(family, method):
    model, processor = built(family)
    explainer, image, extra = METHODS[method](model), draw_noise(), "a cat dog on mat"
    short, long = f"{IMAGE} what is this", f"{extra} {IMAGE} what is this"
    expected = explainer.explain(image, Token("cat"), prompt=short, processor=processor)
    shifted = explainer.explain(image, Token("cat"), prompt=long, processor=processor)
    assert shifted.placement == expected.placement
    assert shifted.grid == expected.grid
    hidden = explainer.explain(
        image, Token("cat"), prompt=long, processor=MaskingProcessor(processor, len(extra.split()))
    )
    assert np.abs(hidden.attribution - expected.attribution).max() <= 1e-3 * expected.attribution.max()


@by_family
def test_the_place_of_the_image_in_the_prompt_moves_no_cell(family):
    model, processor = built(family)
    places = [
        GradCAM(model).explain(draw_noise(), Token("cat"), prompt=write_prompt(family, text), processor=processor)
        for text in ("{} what is this", "what {} is this", "what is this {}")
    ]
    assert len({explanation.placement for explanation in places}) == 1
    assert len({explanation.layout for explanation in places}) == 1


def test_a_chat_template_places_the_image():
    model, processor = built("llava")
    processor = copy.copy(processor)
    processor.chat_template = (
        "{% for message in messages %}{% for part in message['content'] %}"
        "{% if part['type'] == 'image' %}<image> {% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
    )
    chat = GradCAM(model).explain(draw_noise(), Token("cat"), prompt="what is this", processor=processor)
    text = GradCAM(model).explain(draw_noise(), Token("cat"), prompt="<image> what is this", processor=processor)
    assert np.array_equal(chat.attribution, text.attribution)


# --- layers and methods


@pytest.mark.parametrize("layer", ["model.language_model.layers.0", "model.vision_tower.encoder.layers.0"])
def test_a_named_layer_is_explained(layer):
    model, processor = built("llava")
    layer = layer if layer.startswith("model.l") else next(
        name for name, _ in model.named_modules() if name.startswith("model.vision_tower") and name.endswith("encoder.layers.0")
    )  # fmt: skip
    plain, records = copy.deepcopy(model), []
    plain.get_submodule(layer).register_forward_hook(
        lambda module, args, output: records.append(output if torch.is_tensor(output) else output[0])
    )
    inputs = run_processor("llava", draw_noise())
    score = plain(**inputs, use_cache=False).logits[0, -1].log_softmax(0)[CAT]
    (gradient,) = torch.autograd.grad(score, records[0])
    mask = inputs["input_ids"][0] == IMAGE_ID if "language" in layer else slice(1, None)
    expected = plain_gradcam(records[0][0][mask].detach(), gradient[0][mask])
    explanation = GradCAM(model, layer).explain(
        draw_noise(), Token("cat"), prompt=write_prompt("llava"), processor=processor
    )
    assert explanation.layer == layer
    assert np.abs(explanation.attribution.ravel() - expected).max() <= TOLERANCE * expected.max()


SUPPORTED = {
    "bagcam", "chefer", "eigencam", "eigengradcam", "fem", "gradcam", "gradcam-elementwise", "gradcam++", "gradrollout",
    "hirescam", "kpcacam", "layercam", "randomcam", "rollout", "segeigencam", "xgradcam",
}  # fmt: skip
SLOW = ("rise", "drise", "lime", "kernelshap", "hsic", "sobol")
SUPPORTED_ON_PIXELS = {
    "occlusion", "segmentablation", "rise", "drise", "sobol", "hsic", "lime", "kernelshap", "center", "edges",
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::camscope.errors.CamscopeWarning")
def test_each_method_has_a_map_or_one_error():
    model, processor = built("llava")
    with_map = set()
    for name, method in METHODS.items():
        try:
            explanation = method(model, **({"n_samples": 16} if name in SLOW else {})).explain(
                draw_noise(), Token("cat"), prompt=write_prompt("llava"), processor=processor
            )
        except CamscopeError:
            continue
        assert explanation.grid == (IMAGE_SIZE if name in SUPPORTED_ON_PIXELS else (4, 4))
        with_map.add(name)
    assert with_map == SUPPORTED | SUPPORTED_ON_PIXELS


# --- errors


def explain_llava(target=None, **options):
    model, processor = built("llava")
    options = {"prompt": write_prompt("llava"), "processor": processor, **options}
    return GradCAM(model).explain(draw_noise(), target or Token("cat"), **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"processor": None}, InputError, "needs the processor of the model"),
        ({"prompt": None}, InputError, "needs the prompt"),
        ({"prompt": "what is this"}, InputError, "no place for the image"),
        ({"prompt": ["<image>", "<image>"]}, InputError, "2 prompts for 1 image"),
        ({"views": "half"}, InputError, "expected 'all', 'tiles' or 'overview'"),
        ({"verbose": True}, InputError, "verbose: a text target takes the keywords"),
        ({"target": Token("zebra")}, TargetError, "no single token"),
    ],
)
def test_a_wrong_argument_is_one_error(options, error, message):
    with pytest.raises(error, match=message):
        explain_llava(**options)


def test_padding_on_the_right_is_an_error():
    model, processor = built("llava")
    with pytest.raises(InputError, match="padded on the right"):
        GradCAM(model).explain_batch(
            [draw_noise()] * 2,
            Token("cat"),
            prompt=["<image> what", "<image> what is this"],
            processor=processor,
            processor_kwargs={"padding_side": "right"},
        )


def test_a_family_without_a_known_layout_is_an_error():
    from transformers import ViTConfig, ViTForImageClassification

    model = ViTForImageClassification(
        ViTConfig(
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            image_size=16,
            patch_size=8,
        )
    )
    with pytest.raises(ModelError, match=r"where the image tokens of ViTForImageClassification .vit. lie on the image"):
        GradCAM(model).explain(draw_noise(), Token("cat"), prompt="<image>", processor=built("llava")[1])


@pytest.mark.parametrize("family", QUERY_FAMILIES)
def test_learned_queries_have_no_place(family):
    model, processor = built(family)
    layer = next(n for n, _ in model.named_modules() if n.endswith("layers.0") and ("text" in n or "language" in n))
    for explainer in (METHODS["chefer"](model), GradCAM(model, layer)):
        with pytest.raises(LayerError, match="learned queries without a place on the image"):
            explainer.explain(draw_noise(), Token("cat"), prompt=write_prompt(family), processor=processor)


def test_a_figure_has_one_panel_for_each_word():
    from camscope.explainers.vision_language.draw_words import draw_words

    model, processor = built("llava")
    words = GradCAM(model).explain_words(
        draw_noise(), "a cat on mat", prompt=write_prompt("llava"), processor=processor
    )
    figure = draw_words(words, columns=4, height=64)
    assert figure.shape[1] > 3 * figure.shape[0] / 2
    with pytest.raises(InputError, match="at least one word"):
        draw_words([])
