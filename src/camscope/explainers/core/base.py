"""Explainer: the template that every method fills in, and METHODS, the registry of them all."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from importlib.util import find_spec
from inspect import isabstract, signature
from typing import Any, Self, TypeVar, dataclass_transform, final

import numpy as np
import torch
from torch import Tensor, nn

from camscope.errors import InputError, TargetError
from camscope.explainers.core.dispatch import bind_targets, build_explanations, explain_grid, run_methods
from camscope.explainers.core.inputs import ExtraInputs, ModelInput
from camscope.explainers.core.keyword_arguments import (
    CAPTUM_SETTING_NAMES,
    build_extra_inputs,
    split_keywords,
    translate_setting_names,
    translate_setting_value,
)
from camscope.explainers.core.method import BaseMethod
from camscope.explanation import Explanation
from camscope.model_card import compute_model_digest
from camscope.plurals import plural
from camscope.registry import Registry
from camscope.targets import Difference, TargetLike

METHODS: Registry[type["Explainer"]] = Registry("method")

ExplainerClass = TypeVar("ExplainerClass", bound="type[Explainer]")


@dataclass_transform(kw_only_default=True, eq_default=False)
def register(cls: ExplainerClass) -> ExplainerClass:
    """Add a method to METHODS, where the command line, the documentation and the axiom tests find it by its `name`.

    A setting of a method is an annotated attribute with its default, `n_samples: int = 25`; the constructor takes it.
    A class without a `title` is displayed under its own name.
    """
    _prepare_class(cls)
    missing = [fact for fact in ("name", "paper") if not isinstance(getattr(cls, fact, None), str)]
    if missing or isabstract(cls):
        raise TypeError(f"{cls.__name__} cannot be registered: {', '.join(missing) or 'an abstract method'} is missing")
    METHODS.add(cls)
    return cls


@dataclass_transform(kw_only_default=True, eq_default=False)
def register_optional(package: str, extra: str) -> Callable[[ExplainerClass], ExplainerClass]:
    """Register a method if a package is installed; otherwise looking up its name raises a MissingExtraError."""

    def registered(cls: ExplainerClass) -> ExplainerClass:
        if find_spec(package) is not None:
            return register(cls)
        _prepare_class(cls)
        METHODS.add_unavailable(cls.name, cls.title, package, extra)
        return cls

    return registered


def _prepare_class(cls: type["Explainer"]) -> None:
    """Make a method a dataclass whose constructor also accepts captum's names of its settings, and give it a title."""
    if "title" not in vars(cls):
        cls.title = cls.__name__
    dataclass(kw_only=True, eq=False, repr=False)(cls)
    init, names = cls.__init__, frozenset(signature(cls).parameters)

    @wraps(init)
    def __init__(self: Any, *args: Any, **settings: Any) -> None:  # noqa: N807 - it is one
        init(self, *args, **translate_setting_names(settings, names, cls.__name__))

    cls.__init__ = __init__  # type: ignore[method-assign]


@dataclass(eq=False, repr=False)
class Explainer(BaseMethod):
    """Where a model looked: what a user calls. A method writes `attribution`; its settings are in `BaseMethod`.

    What else the model takes goes with every call: positional arguments after the target; keywords that the model's
    `is_forward` names; and `additional_forward_args`, a tuple of positional arguments, a dict of keywords, or one argument.
    `n_steps`, `n_samples` and `baselines`, as captum has them, are settings of that call alone. Any other keyword is an
    InputError.
    """

    @final
    def attribute(
        self,
        inputs: Tensor,
        target: TargetLike = None,
        *args: Any,
        additional_forward_args: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """(N,C,*S) -> raw maps (N,*s). `target`: see Score. The rest: see `Explainer`."""
        (tool,), extra = resolve_call_arguments([self], args, additional_forward_args, kwargs)
        if self.frames_first and isinstance(inputs, Tensor) and inputs.ndim == 5:
            inputs = inputs.transpose(1, 2)
        return run_methods([tool], inputs, [target], extra)[0].maps[0].attribution

    def __call__(
        self,
        inputs: Tensor,
        target: TargetLike = None,
        *args: Any,
        additional_forward_args: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the raw maps (N,*s) of an input tensor (N,C,*S): `cam(x, 3)` is `cam.attribute(x, 3)`."""
        return self.attribute(inputs, target, *args, additional_forward_args=additional_forward_args, **kwargs)

    @final
    def explain(
        self, image: Any, target: TargetLike = None, *args: Any, additional_forward_args: Any = None, **kwargs: Any
    ) -> Explanation:
        """One image (path, PIL image, uint8 array (H,W,3), or float tensor (C,H,W): the model's input) -> Explanation.

        The rest goes to the model with a batch of one: `explain(image, 1, row[None])`; see `Explainer`.
        """
        tools, extra = resolve_call_arguments([self], args, additional_forward_args, kwargs)
        return explain_grid(tools, image, [target], extra)[0][0]

    @final
    def explain_classes(
        self,
        image: Any,
        targets: Sequence[TargetLike],
        *args: Any,
        additional_forward_args: Any = None,
        **kwargs: Any,
    ) -> list[Explanation]:
        """Several questions about one image, answered from one forward pass where the method allows it; see `explain`."""
        if isinstance(targets, str | int | Difference) or callable(targets):
            raise TargetError(f"explain_classes takes a list of questions; for one, explain(image, {targets!r})")
        tools, extra = resolve_call_arguments([self], args, additional_forward_args, kwargs)
        return explain_grid(tools, image, list(targets), extra)[0]

    @final
    def explain_methods(
        self,
        image: Any,
        methods: "Sequence[str | type[Explainer] | Explainer]",
        target: TargetLike = None,
        *args: Any,
        additional_forward_args: Any = None,
        **kwargs: Any,
    ) -> list[Explanation]:
        """One question about one image, answered by several methods with this one's settings, from as few passes as possible.

        `methods`: names, classes, or explainers of the same model. Those that look at layers share one forward and one
        backward pass. The rest: see `explain`; `n_steps`, `n_samples` and `baselines` go to the methods that have them.
        """
        if isinstance(methods, str):
            raise InputError(f"explain_methods takes a list of methods; for one, explain_methods(image, [{methods!r}])")
        siblings = [one if isinstance(one, Explainer) else self.create_sibling(one) for one in methods]
        tools, extra = resolve_call_arguments(siblings, args, additional_forward_args, kwargs)
        return [row[0] for row in explain_grid(tools, image, [target], extra)]

    @property
    def setting_names(self) -> frozenset[str]:
        """The keywords of the constructor."""
        return frozenset(signature(type(self)).parameters)

    def with_settings(self, **settings: Any) -> Self:
        """The same method with other settings."""
        return replace(self, **settings) if settings else self

    def create_sibling(self, method: "str | type[Explainer]") -> "Explainer":
        """Another method for the same model, with this one's settings where it has them; what is as usual is as usual there."""
        kind, own = get_explainer_class(method), signature(type(self)).parameters
        shared = [
            name
            for name in signature(kind).parameters
            if _find_declaring_class(name, kind) is _find_declaring_class(name, type(self))
        ]
        given = {name: getattr(self, name) for name in shared}
        return kind(**{name: value for name, value in given.items() if value is not own[name].default})

    @final
    def explain_batch(
        self,
        images: Sequence[Any],
        targets: TargetLike = None,
        *args: Any,
        additional_forward_args: Any = None,
        **kwargs: Any,
    ) -> list[Explanation]:
        """Several images, each with its own target or all with one; inputs of one size share their passes.

        The rest: see `Explainer`. Of a tensor with one entry an image, each entry goes with its own image.
        """
        if isinstance(images, str | os.PathLike):
            raise InputError(f"explain_batch takes a list of images; for one, explain({str(images)!r})")
        names = self.setting_names if kwargs else ()
        for_model, for_method = split_keywords(self.model, kwargs, names, type(self).__name__)
        extra = build_extra_inputs(args, for_model, additional_forward_args)
        items = [self.prepare_input(image) for image in images]
        if not items:
            raise InputError("the batch is empty")
        plain = targets.tolist() if isinstance(targets, Tensor | np.ndarray) else targets
        each = list(plain) if isinstance(plain, list | tuple) else None
        if each is not None and len(each) != len(items):
            raise InputError(
                f"{plural(len(each), 'target')} for {plural(len(items), 'image')}: give one, or one per image"
            )
        results: dict[int, Explanation] = {}
        for shape in dict.fromkeys(item.x.shape for item in items):
            rows = [i for i, item in enumerate(items) if item.x.shape == shape]
            own = extra.select_rows(rows, len(items))
            tool = _with_aliased_settings(self, for_method, partial(_select_baseline_rows, rows=rows, inputs=items))
            question = bind_targets(
                tool, [plain if each is None else each[i] for i in rows], [items[i] for i in rows], own
            )
            made = run_methods([tool], torch.stack([items[i].x for i in rows]), [question], own)[0]
            found = build_explanations(
                tool, [items[i] for i in rows], made, 0, compute_model_digest(made.model_info.model)
            )
            results.update(zip(rows, found, strict=True))
        return [results[i] for i in range(len(items))]


def resolve_call_arguments(
    explainers: Sequence[Explainer], args: tuple[Any, ...], additional_forward_args: Any, keywords: Mapping[str, Any]
) -> tuple[list[Explainer], ExtraInputs]:
    """The methods with the settings of one call, and what goes to the model with the image; see `Explainer`."""
    if not keywords:
        return list(explainers), build_extra_inputs(args, {}, additional_forward_args)
    where = " and ".join(dict.fromkeys(type(tool).__name__ for tool in explainers))
    names = frozenset[str]().union(*(tool.setting_names for tool in explainers))
    for_model, for_method = split_keywords(explainers[0].model if explainers else nn.Identity(), keywords, names, where)
    extra = build_extra_inputs(args, for_model, additional_forward_args)
    return [_with_aliased_settings(tool, for_method) for tool in explainers], extra


def _with_aliased_settings(
    explainer: Explainer,
    aliased_settings: Mapping[str, Any],
    select_baseline: Callable[[Any], Any] = lambda value: value,
) -> Explainer:
    """A method with settings under other toolkits' names, those that it has. `select_baseline`: of a baseline for each image."""
    settings = {}
    for word, value in aliased_settings.items():
        for own in CAPTUM_SETTING_NAMES[word]:
            if own in explainer.setting_names and (known := translate_setting_value(own, value)) is not None:
                settings[own] = select_baseline(known) if own == "baseline" else known
    return explainer.with_settings(**settings)


def _select_baseline_rows(baseline: Any, rows: Sequence[int], inputs: Sequence[ModelInput]) -> Any:
    """Of baselines (N,C,*S), one an image, those of some images; any other baseline unchanged."""
    each = isinstance(baseline, Tensor) and baseline.ndim == inputs[rows[0]].x.ndim + 1 and len(baseline) == len(inputs)
    return baseline[list(rows)] if each else baseline


def get_explainer_class(method: str | type[Explainer]) -> type[Explainer]:
    """Return the method of a name, or the class itself; see `Registry.find` for the errors."""
    return method if isinstance(method, type) else METHODS.find(method)


def _find_declaring_class(setting: str, explainer_cls: type) -> type | None:
    """The class that a setting comes from first: one of the same name may mean something else elsewhere."""
    return next(
        (one for one in reversed(explainer_cls.__mro__) if setting in vars(one).get("__annotations__", {})), None
    )
