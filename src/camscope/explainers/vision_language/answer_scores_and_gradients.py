"""Run a vision-language model once, and compute the gradients of the scores of its answers."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from camscope.errors import LayerError, ModelError
from camscope.explainers.core.run_methods_in_shared_passes import MAX_TOP_CLASSES
from camscope.explainers.vision_language.processor_inputs import PromptInputs
from camscope.explanation import ClassScore
from camscope.hooks.find_layers import find_layer
from camscope.hooks.thread_local_hooks import Hooks, thread_local_hook
from camscope.plurals import plural
from camscope.pytree import find_main_tensor, replace_leaf
from camscope.targets.token_and_answer import (
    Answer,
    BaseTextTarget,
    ScoredTokens,
    group_tokens_by_word,
    sum_token_scores,
)

LANGUAGE_MODEL_NAMES = ("language_model", "text_model")
PROJECTOR_NAMES = ("multi_modal_projector", "connector", "merger", "embed_vision")
CACHED_ATTRIBUTES = ("rope_deltas",)  # that a forward pass stores in a module


class ScoredAnswer(NamedTuple):
    """The score of one target: the sum over its tokens, which may be part of the answer that the model was given."""

    value: Tensor
    token: int | None  # the id of a single token
    logits: Tensor  # (V,) outputs of the model at the first scored position


@dataclass(frozen=True)
class ImageTokenTap:
    """What was recorded in a forward pass: the tokens that enter the language model, or the output of a layer."""

    embeddings: list[Tensor]


def find_language_model(model: nn.Module, is_encoder_decoder: bool) -> tuple[str, nn.Module]:
    """Return the part of a vision-language model that receives text and image tokens together, and its name."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in LANGUAGE_MODEL_NAMES:
            encoder = getattr(module, "encoder", None)
            return (f"{name}.encoder", encoder) if is_encoder_decoder and encoder is not None else (name, module)
    raise ModelError(f"{type(model).__name__} has no part named {' or '.join(LANGUAGE_MODEL_NAMES)}")


def find_projector_name(model: nn.Module) -> str | None:
    """Return the name of the module that projects image tokens into the language model, or None if it has no usual name."""
    names = [name for name, _ in model.named_modules() if name.rpartition(".")[2] in PROJECTOR_NAMES]
    return min(names, key=lambda name: name.count("."), default=None)


def find_last_vision_layer(model: nn.Module) -> str:
    """Return the name of the last block of the vision tower."""
    for tower, module in model.named_modules():
        if tower.rpartition(".")[2] in ("vision_model", "vision_tower", "visual"):
            lists = [(name, part) for name, part in module.named_modules() if isinstance(part, nn.ModuleList)]
            blocks = [(name, part) for name, part in lists if name.rpartition(".")[2] in ("layers", "layer", "blocks")]
            if blocks:
                return f"{tower}.{blocks[0][0]}.{len(blocks[0][1]) - 1}"
    raise ModelError(f"{type(model).__name__} has no vision tower with a list of blocks")


@contextmanager
def tap_image_tokens(module: nn.Module) -> Iterator[ImageTokenTap]:
    """Until the `with` ends, record what enters the language model. The graph starts there, as a new leaf."""
    tap = ImageTokenTap([])

    def start_graph(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        embeddings = kwargs.get("inputs_embeds")
        if not isinstance(embeddings, Tensor) or tap.embeddings:
            return None
        leaf = embeddings.detach().clone().requires_grad_()
        tap.embeddings.append(leaf)
        torch.set_grad_enabled(True)
        return args, {**kwargs, "inputs_embeds": leaf.clone()}

    with Hooks() as hooks:
        hooks._enter_gradient_scope()
        hooks.add_handle(module.register_forward_pre_hook(thread_local_hook(start_graph), with_kwargs=True))
        yield tap


@contextmanager
def tap_layer_output(model: nn.Module, layer: str, output_index: str | int | None) -> Iterator[ImageTokenTap]:
    """Until the `with` ends, record the output of a layer. The graph starts there, as a new leaf.

    The hook comes before those by which transformers collects hidden states, so that they collect the leaf. LLaVA projects
    such a hidden state.
    """
    tap = ImageTokenTap([])

    def start_graph(part: nn.Module, args: object, output: Any) -> Any:
        path, tensor = find_main_tensor(layer, output, output_index)
        if tap.embeddings:
            raise LayerError(f"layer {layer!r} ran several times: choose another layer")
        leaf = tensor.detach().clone().requires_grad_()
        tap.embeddings.append(leaf)
        torch.set_grad_enabled(True)
        return replace_leaf(output, path, leaf.clone())

    with Hooks() as hooks:
        hooks._enter_gradient_scope()
        module = find_layer(model, layer)[1]
        hooks.add_handle(module.register_forward_hook(thread_local_hook(start_graph), prepend=True))
        yield tap


@contextmanager
def cached_attributes_restored(model: nn.Module) -> Iterator[None]:
    """Restore what a forward pass stores in the model, such as the position offsets of Qwen2-VL."""
    stored = [
        (module, name, vars(module)[name])
        for module in model.modules()
        for name in CACHED_ATTRIBUTES
        if name in vars(module)
    ]
    try:
        yield
    finally:
        for module, name, value in stored:
            setattr(module, name, value)


def run_model(model: nn.Module, inputs: PromptInputs, n_answer_tokens: int) -> Tensor:
    """Run the model and return its outputs (N,T,V) from the position that predicts the first token of the answer."""
    output = model(**inputs.model_inputs, use_cache=False)
    logits: Tensor = output.logits if hasattr(output, "logits") else output[0]
    length = inputs.model_inputs["decoder_input_ids" if inputs.is_encoder_decoder else "input_ids"].shape[1]
    if logits.ndim != 3 or logits.shape[1] != length:
        raise ModelError(
            f"{type(model).__name__} returned {tuple(logits.shape)} for {plural(length, 'token')}: expected one output per token"
        )
    return logits[:, inputs.first_answer_position :][:, : max(1, n_answer_tokens)]


def score_answer(logits: Tensor, target: BaseTextTarget, answer: ScoredTokens) -> ScoredAnswer:
    """Compute the score of one sample from the outputs (T,V) that predict its answer."""
    positions, first = list(answer.scored), logits[answer.scored[0]].detach()
    if answer.candidates:
        best = max(answer.candidates, key=lambda token: float(first[token]))
        return ScoredAnswer(sum_token_scores(logits, positions, [best], target.score), best, first)
    tokens = [answer.ids[position] for position in positions]
    value = sum_token_scores(logits, positions, tokens, target.score)
    return ScoredAnswer(value, tokens[0] if len(tokens) == 1 else None, first)


def compute_gradients(score: Tensor, tensors: Sequence[Tensor], *, retain_graph: bool) -> list[Tensor]:
    """Compute the gradient of a score at each tensor. Raise LayerError if the score depends on none of them."""
    if not score.requires_grad:
        raise LayerError("the score does not depend on the image tokens: the model turns gradients off")
    gradients = torch.autograd.grad(score, list(tensors), retain_graph=retain_graph, allow_unused=True)
    if all(gradient is None for gradient in gradients):
        raise LayerError("the score does not depend on this layer")
    return [
        torch.zeros_like(tensor) if gradient is None else gradient
        for tensor, gradient in zip(tensors, gradients, strict=True)
    ]


def describe_answer(target: BaseTextTarget, answer: ScoredAnswer, tokenizer: Any) -> dict[str, Any]:
    """Return what an explanation says about a target: label, token, score, probability and the likeliest tokens."""
    value, label = float(answer.value.detach()), target.describe(0, str)
    if isinstance(target, Answer) and target.word is not None:
        label = group_tokens_by_word(tokenizer, target.encode(tokenizer).ids)[target.word].text
    return {
        "target": answer.token,
        "label": label,
        "score": value,
        "probability": math.exp(value) if target.score == "log_probability" else None,
        "top_classes": _collect_top_tokens(answer, tokenizer),
    }


def _collect_top_tokens(answer: ScoredAnswer, tokenizer: Any) -> tuple[ClassScore, ...]:
    """Return the likeliest tokens at the position of the first scored token."""
    logits = answer.logits.double()
    best = logits.topk(min(MAX_TOP_CLASSES, len(logits)))
    shares = logits.softmax(0)[best.indices].tolist()
    return tuple(
        ClassScore(token, tokenizer.decode([token]), value, share)
        for token, value, share in zip(best.indices.tolist(), best.values.tolist(), shares, strict=True)
    )
