"""`Explainer`: the public base class of all methods, with `explain`, and the functions that register a method."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from importlib.util import find_spec
from inspect import isabstract, signature
from typing import Any, NoReturn, TypeVar, dataclass_transform, final

import numpy as np
import torch
from torch import Tensor

from camscope import registry
from camscope.errors import InputError, ModelError, TargetError
from camscope.explainers.core.base_method import BaseMethod
from camscope.explainers.core.differentiable_map import compute_map_with_graph
from camscope.explainers.core.evaluation_context import run_uncompiled
from camscope.explainers.core.run_methods_in_shared_passes import build_explanations, explain_grid, run_methods
from camscope.explainers.core.split_keywords_for_model_and_method import (
    build_extra_inputs,
    resolve_explainers_and_extra_inputs,
    split_keywords,
)
from camscope.explainers.core.translate_keywords_of_other_toolkits import (
    apply_captum_settings,
    select_baseline_rows,
    translate_setting_names,
)
from camscope.explanation import Explanation
from camscope.loaded_model_metadata_and_weight_digest import compute_model_digest
from camscope.plurals import plural
from camscope.targets import Difference, TargetLike
from camscope.targets.class_targets import convert_tensor_target_to_list
from camscope.targets.token_and_answer import Answer, BaseTextTarget

METHODS: registry.Registry[type["Explainer"]] = registry.METHODS
ExplainerClass = TypeVar("ExplainerClass", bound="type[Explainer]")


@dataclass_transform(kw_only_default=True, eq_default=False)
def register(cls: ExplainerClass) -> ExplainerClass:
    """Add a method class to the registry METHODS, with its `name` as the key.

    A setting of a method is an annotated attribute with its default, `n_samples: int = 25`; the constructor takes it.
    Describe it in an `Args` section of the class: the settings of base classes are added. A class without a `title` is
    displayed under its own name.

    Args:
        cls: The class, with the constants `name` and `paper`. It implements the abstract methods of its base class.

    Returns:
        The class, so that this function is a decorator.

    Raises:
        TypeError: A constant is missing, or an abstract method is not implemented.

    >>> from camscope import METHODS, SPATIAL_AXIS, BaseCAM
    >>> @register
    ... class MaxCAM(BaseCAM):
    ...     name, paper = "max-cam", ""
    ...     def weights(self, activation, gradient):
    ...         return gradient.amax(SPATIAL_AXIS, keepdim=True)
    >>> METHODS["max-cam"].title
    'MaxCAM'
    >>> del METHODS["max-cam"]

    """
    _make_dataclass_with_captum_names(cls)
    missing = [fact for fact in ("name", "paper") if not isinstance(getattr(cls, fact, None), str)]
    if missing or isabstract(cls):
        raise TypeError(f"{cls.__name__} cannot be registered: {', '.join(missing) or 'an abstract method'} is missing")
    METHODS.add(cls)
    return cls


@dataclass_transform(kw_only_default=True, eq_default=False)
def register_optional(package: str, extra: str) -> Callable[[ExplainerClass], ExplainerClass]:
    """Return a decorator for method classes. If `package` is installed, the decorator registers the class.

    Otherwise, an error names the missing extra when a user looks the method up.
    """

    def register_if_installed(cls: ExplainerClass) -> ExplainerClass:
        if find_spec(package) is not None:
            return register(cls)
        _make_dataclass_with_captum_names(cls)
        METHODS.add_unavailable(cls.name, cls.title, package, extra)
        return cls

    return register_if_installed


def _make_dataclass_with_captum_names(cls: type["Explainer"]) -> None:
    """Turn a method class into a dataclass. Its constructor also accepts the names that captum uses for settings."""
    dataclass(kw_only=True, eq=False, repr=False)(cls)
    init, names = cls.__init__, frozenset(signature(cls).parameters)

    @run_uncompiled
    @wraps(init)
    def __init__(self: Any, *args: Any, **settings: Any) -> None:  # noqa: N807 - the function is a method
        init(self, *args, **translate_setting_names(settings, names, cls.__name__))

    cls.__init__ = __init__  # type: ignore[method-assign] # of the class, once


@dataclass(eq=False, repr=False)
class Explainer(BaseMethod):
    """Base class of all methods: what a user calls. A method implements `attribution`.

    Extra inputs of the model are passed with every call: positional arguments after the target, keywords that the
    model's `forward` names, and `additional_forward_args` (a tuple of positional arguments, a dict of keywords, or one
    argument). The keywords `n_steps`, `n_samples` and `baselines` have the meaning of captum and apply to that call
    alone. Any other keyword raises an InputError.

    >>> from camscope import METHODS, Explainer
    >>> all(issubclass(method, Explainer) for method in METHODS.values())
    True
    >>> METHODS["gradcam"].title, METHODS["gradcam"].paper
    ('Grad-CAM', 'arXiv:1610.02391')
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "title" not in vars(cls):
            cls.title = cls.__name__

    @final
    @run_uncompiled
    def attribute(
        self,
        inputs: Tensor,
        target: TargetLike = None,
        *args: Any,
        additional_forward_args: Any = None,
        differentiable: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        """Return the raw attribution maps of an input tensor.

        Args:
            inputs: The model's input (N,C,*S).
            target: A class index or name, a list with one target per sample, a target object, or a function of the output;
                None: the class with the highest score of each sample.
            *args: Extra positional inputs of the model.
            additional_forward_args: Extra inputs of the model as captum takes them.
            differentiable: Whether the maps are returned with their graph, for a loss. The whole graph is kept: the input and
                all parameters receive gradients, those before the layer too. The model stays in its mode, `mode` is
                ignored, and in train mode batch norm updates its statistics as in any forward pass. No `.grad` changes.
                The first call for an input size also computes an ordinary map, which finds the layer and its layout.
            **kwargs: Extra keyword inputs of the model; `n_steps`, `n_samples` and `baselines` are settings of this call.

        Returns:
            Signed maps (N,*s) at the resolution of the method, in units of the score.

        Raises:
            CamscopeError: The input, the target or the model cannot be explained; the subclass and message say why.
            InputError: `differentiable=True` for a method whose map is not a differentiable formula.

        >>> import torch
        >>> from camscope import Saliency
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(144, 2))
        >>> Saliency(model).attribute(torch.rand(2, 3, 8, 8), 1).shape
        torch.Size([2, 8, 8])

        """
        (explainer,), extra = resolve_explainers_and_extra_inputs([self], args, additional_forward_args, kwargs)
        if self.frames_first and isinstance(inputs, Tensor) and inputs.ndim == 5:
            inputs = inputs.transpose(1, 2)
        if differentiable:
            return compute_map_with_graph(explainer, inputs, target, extra)
        return run_methods([explainer], inputs, [target], extra)[0].maps[0].attribution

    __call__ = attribute

    def __enter__(self) -> NoReturn:
        name = type(self).__name__
        raise ModelError(
            f"{name} is not a context manager: it leaves no hooks; call {name}(model).attribute(x, target)"
        )

    def __exit__(self, *details: object) -> None:
        """Do nothing. A `with` never gets here, because `__enter__` raises an error."""

    @final
    @run_uncompiled
    def explain(
        self, image: Any, target: TargetLike = None, *args: Any, additional_forward_args: Any = None, **kwargs: Any
    ) -> Explanation:
        """Return the explanation of one image.

        Args:
            image: A path, a PIL image, a uint8 array (H,W,3), a scan, or a float tensor (C,H,W) that is the model's
                input.
            target: See `attribute`. `targets.Token` and `targets.Answer` explain what a vision-language model writes.
            *args: Extra inputs of the model, each with a batch of one: `explain(image, 1, row[None])`.
            additional_forward_args: See `attribute`.
            **kwargs: See `attribute`. A Token or an Answer needs `prompt`, a text or a chat, and `processor`, that of the
                model in transformers. It also takes `processor_kwargs`, and `views` for models that cut the image into
                tiles: "all", "tiles" or "overview".

        Returns:
            The raw map with the model's answer, the settings and the placement of the map on the image.

        Raises:
            CamscopeError: The image, the target or the model cannot be explained; the subclass and message say why.

        >>> from camscope import GradCAM, load_model
        >>> from camscope.phantom import draw_radiograph
        >>> explanation = GradCAM(load_model("phantom")).explain(draw_radiograph(0, "nodule").image, "nodule")
        >>> explanation.label, explanation.target, explanation.status
        ('nodule', 1, 'ok')

        """
        if isinstance(target, BaseTextTarget):
            from camscope.explainers.vision_language.explain_texts import explain_texts
            from camscope.explainers.vision_language.text_options import parse_text_options

            return explain_texts(self, [image], [[target]], parse_text_options(kwargs, 1))[0][0]
        explainers, extra = resolve_explainers_and_extra_inputs([self], args, additional_forward_args, kwargs)
        return explain_grid(explainers, image, [target], extra)[0][0]

    @final
    @run_uncompiled
    def explain_words(self, image: Any, answer: "str | Answer", **kwargs: Any) -> list[Explanation]:
        """Return one explanation for each word of an answer that a vision-language model writes.

        The score of a word is the sum over its tokens, each given the prompt and the words before it. One forward pass
        serves all words. `draw_words` draws the result as one figure.

        Args:
            image: See `explain`.
            answer: The text, or a `targets.Answer`.
            **kwargs: `prompt`, `processor`, `processor_kwargs` and `views`, as for `explain`.

        Returns:
            One explanation per word, with the word as its label.

        Raises:
            CamscopeError: The image, the answer or the model cannot be explained; the subclass and message say why.

        >>> from camscope import GradCAM, load_model
        >>> GradCAM(load_model("phantom")).explain_words("cat.jpg", "a cat")
        Traceback (most recent call last):
        ...
        camscope.errors.InputError: processor=NoneType: a text target needs the processor of the model; ...

        """
        from camscope.explainers.vision_language.explain_texts import explain_words
        from camscope.explainers.vision_language.text_options import parse_text_options

        return explain_words(self, image, answer, parse_text_options(kwargs, 1))

    @final
    @run_uncompiled
    def explain_classes(
        self,
        image: Any,
        targets: Sequence[TargetLike],
        *args: Any,
        additional_forward_args: Any = None,
        **kwargs: Any,
    ) -> list[Explanation]:
        """Return the explanations of one image for several targets, in the order of `targets`.

        Methods that can do so share one forward pass among the targets.

        Args:
            image: See `explain`.
            targets: The targets, each as `attribute` takes it.
            *args: See `explain`.
            additional_forward_args: See `attribute`.
            **kwargs: See `attribute`.

        Returns:
            One explanation per target.

        Raises:
            TargetError: `targets` is one target and not a list.

        >>> from camscope import GradCAM, load_model
        >>> from camscope.phantom import draw_radiograph
        >>> image = draw_radiograph(0, "nodule").image
        >>> [e.target for e in GradCAM(load_model("phantom")).explain_classes(image, ["nodule", "effusion"])]
        [1, 2]

        """
        if isinstance(targets, str | int | Difference) or callable(targets):
            raise TargetError(
                f"explain_classes expects a list of targets; for one target use explain(image, {targets!r})"
            )
        if any(isinstance(target, BaseTextTarget) for target in targets):
            return [self.explain(image, target, **kwargs) for target in targets]
        explainers, extra = resolve_explainers_and_extra_inputs([self], args, additional_forward_args, kwargs)
        return explain_grid(explainers, image, list(targets), extra)[0]

    @final
    @run_uncompiled
    def explain_methods(
        self,
        image: Any,
        methods: "Sequence[str | type[Explainer] | Explainer]",
        target: TargetLike = None,
        *args: Any,
        additional_forward_args: Any = None,
        **kwargs: Any,
    ) -> list[Explanation]:
        """Return the explanations of one image by several methods. The methods use the settings of this explainer.

        Args:
            image: See `explain`.
            methods: Names, classes, or explainers of the same model. Methods that look at layers share one forward and
                one backward pass.
            target: See `attribute`.
            *args: See `explain`.
            additional_forward_args: See `attribute`.
            **kwargs: See `attribute`. `n_steps`, `n_samples` and `baselines` apply to the methods that have such a
                setting.

        Returns:
            One explanation per method, in the order of `methods`.

        Raises:
            InputError: `methods` is one method and not a list, or a method is unknown.

        >>> from camscope import GradCAM, load_model
        >>> from camscope.phantom import draw_radiograph
        >>> explainer, image = GradCAM(load_model("phantom"), "layer4"), draw_radiograph(0, "nodule").image
        >>> [e.method_title for e in explainer.explain_methods(image, ["gradcam", "xgradcam"], "nodule")]
        ['Grad-CAM', 'XGrad-CAM']

        """
        if isinstance(methods, str):
            raise InputError(
                f"explain_methods expects a list of methods; for one method use explain_methods(image, [{methods!r}])"
            )
        siblings = [method if isinstance(method, Explainer) else self.with_method(method) for method in methods]
        if isinstance(target, BaseTextTarget):
            return [sibling.explain(image, target, **kwargs) for sibling in siblings]
        explainers, extra = resolve_explainers_and_extra_inputs(siblings, args, additional_forward_args, kwargs)
        return [row[0] for row in explain_grid(explainers, image, [target], extra)]

    def with_method(self, method: "str | type[Explainer]") -> "Explainer":
        """Create another method for the same model. It gets all settings that the user changed in this method.

        Args:
            method: Name or class of the other method.

        Returns:
            An explainer of the same model.

        >>> from camscope import GradCAM, load_model
        >>> GradCAM(load_model("phantom"), "layer3").with_method("layercam")
        LayerCAM(PhantomNet, layer='layer3')

        """
        method_cls, parameters = get_explainer_class(method), signature(type(self)).parameters
        settings = {
            name: getattr(self, name)
            for name in signature(method_cls).parameters
            if _find_declaring_class(name, method_cls) is _find_declaring_class(name, type(self))
        }
        return method_cls(**{name: value for name, value in settings.items() if value is not parameters[name].default})

    @final
    @run_uncompiled
    def explain_batch(
        self,
        images: Sequence[Any],
        targets: TargetLike = None,
        *args: Any,
        additional_forward_args: Any = None,
        **kwargs: Any,
    ) -> list[Explanation]:
        """Return the explanations of several images. Images with model inputs of equal shape run in the same passes.

        Args:
            images: Images as `explain` takes them.
            targets: One target for all images, or a list with one target per image.
            *args: Extra inputs of the model. A tensor with one entry per image is split accordingly.
            additional_forward_args: See `attribute`.
            **kwargs: See `attribute`. `baselines` may hold one baseline per image.

        Returns:
            One explanation per image, in the order of `images`.

        Raises:
            InputError: There is no image, or the number of targets differs from that of the images.

        >>> from camscope import GradCAM, load_model
        >>> from camscope.phantom import draw_radiograph
        >>> images = [draw_radiograph(seed, "nodule").image for seed in (0, 1)]
        >>> [e.label for e in GradCAM(load_model("phantom")).explain_batch(images, ["nodule", "effusion"])]
        ['nodule', 'effusion']

        """
        if isinstance(images, str | os.PathLike):
            raise InputError(f"explain_batch expects a list of images; for one image use explain({str(images)!r})")
        targets_of_images = targets if isinstance(targets, list | tuple) else [targets] * len(images)
        text_targets = [target for target in targets_of_images if isinstance(target, BaseTextTarget)]
        if text_targets:
            from camscope.explainers.vision_language.explain_texts import explain_texts
            from camscope.explainers.vision_language.text_options import parse_text_options

            if len(text_targets) != len(images):
                raise InputError(
                    f"{plural(len(text_targets), 'text target')} for {plural(len(images), 'image')}: give one, or one per image"
                )
            options, single = parse_text_options(kwargs, len(images)), [[target] for target in text_targets]
            return [explanations[0] for explanations in explain_texts(self, images, single, options)]
        names = self.setting_names if kwargs else ()
        for_model, for_method = split_keywords(self.model, kwargs, names, type(self).__name__)
        extra = build_extra_inputs(args, for_model, additional_forward_args)
        items = [self.prepare_input(image) for image in images]
        if not items:
            raise InputError("the batch is empty")
        values = convert_tensor_target_to_list(targets) if isinstance(targets, Tensor | np.ndarray) else targets
        image_targets = list(values) if isinstance(values, list | tuple) else [values] * len(items)
        if len(image_targets) != len(items):
            raise InputError(
                f"{plural(len(image_targets), 'target')} for {plural(len(items), 'image')}: give one, or one per image"
            )
        results: dict[int, Explanation] = {}
        for shape in dict.fromkeys(item.x.shape for item in items):
            rows = [i for i, item in enumerate(items) if item.x.shape == shape]
            batch_items, batch_inputs = [items[i] for i in rows], extra.select_rows(rows, len(items))
            explainer = apply_captum_settings(self, select_baseline_rows(self, for_method, rows, items))
            target = explainer.prepare_each_target_for_its_image(
                [image_targets[i] for i in rows], batch_items, batch_inputs
            )
            result = run_methods([explainer], torch.stack([item.x for item in batch_items]), [target], batch_inputs)[0]
            digest = compute_model_digest(result.model_info.model)
            results.update(zip(rows, build_explanations(explainer, batch_items, result, 0, digest), strict=True))
        return [results[i] for i in range(len(items))]


def get_explainer_class(method: str | type[Explainer]) -> type[Explainer]:
    """Return the method class with this name. If the argument is a class already, return it unchanged."""
    return method if isinstance(method, type) else METHODS.find(method)


def _find_declaring_class(setting: str, explainer_cls: type) -> type | None:
    """Return the base class that first declares a setting, or None if all base classes lack the setting."""
    return next(
        (base for base in reversed(explainer_cls.__mro__) if setting in vars(base).get("__annotations__", {})), None
    )
