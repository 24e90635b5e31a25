"""Explainer: the template that every method fills in, and METHODS, the registry of them all."""

import difflib
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

from camscope.errors import InputError, MissingExtraError, TargetError
from camscope.explainers.core.dispatch import asked_of, explain_each, explanations, run
from camscope.explainers.core.inputs import Companions, Item
from camscope.explainers.core.keyword_arguments import ALIASES, extra_inputs, our_settings, split_keywords, value_of
from camscope.explainers.core.method import Method
from camscope.explanation import Explanation
from camscope.model_card import digest
from camscope.plurals import plural
from camscope.targets import Difference, Question

METHODS: dict[str, type["Explainer"]] = {}
WITHOUT_PACKAGE: dict[str, tuple[str, str]] = {}  # methods that are not in METHODS, for want of a package of an extra

ExplainerClass = TypeVar("ExplainerClass", bound="type[Explainer]")


@dataclass_transform(kw_only_default=True, eq_default=False)
def register(cls: ExplainerClass) -> ExplainerClass:
    """Put a method into METHODS under its `name`: the CLI, the docs and the axiom tests find it there.

    A setting of a method is an annotated attribute with its default, `samples: int = 25`; its constructor takes it.
    """
    _as_dataclass(cls)
    missing = [fact for fact in ("name", "paper") if not isinstance(getattr(cls, fact, None), str)]
    if missing or isabstract(cls):
        raise TypeError(f"{cls.__name__} cannot be registered: {', '.join(missing) or 'an abstract method'} is missing")
    if METHODS.setdefault(cls.name, cls) is not cls:
        raise ValueError(f"a method named {cls.name!r} is registered already: {METHODS[cls.name].__qualname__}")
    return cls


@dataclass_transform(kw_only_default=True, eq_default=False)
def register_with(package: str, extra: str) -> Callable[[ExplainerClass], ExplainerClass]:
    """`register`, where a package is installed; else whoever asks for the name is told of the extra that brings it."""

    def registered(cls: ExplainerClass) -> ExplainerClass:
        if find_spec(package) is not None:
            return register(cls)
        WITHOUT_PACKAGE[cls.name] = package, extra
        _as_dataclass(cls)
        return cls

    return registered


def _as_dataclass(cls: type["Explainer"]) -> None:
    """Make a dataclass of a method, whose constructor also knows other toolkits' names of its settings."""
    dataclass(kw_only=True, eq=False, repr=False)(cls)
    init, names = cls.__init__, frozenset(signature(cls).parameters)

    @wraps(init)
    def __init__(self: Any, *args: Any, **settings: Any) -> None:  # noqa: N807 - it is one
        init(self, *args, **our_settings(settings, names, cls.__name__))

    cls.__init__ = __init__  # type: ignore[method-assign]


@dataclass(eq=False, repr=False)
class Explainer(Method):
    """Where a model looked: what a user calls. A method writes `heat`; its settings are in `Method`.

    What else the model takes goes with every call: positional arguments after the target; keywords that the model's
    `forward` names; and `additional_forward_args`, a tuple of positional arguments, a dict of keywords, or one argument.
    `n_steps`, `n_samples` and `baselines`, as captum has them, are settings of that call alone. Any other keyword is an
    InputError.
    """

    @final
    def attribute(
        self,
        inputs: Tensor,
        target: Question = None,
        *args: Any,
        additional_forward_args: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """(N,C,*S) -> raw maps (N,*s). `target`: see Score. The rest: see `Explainer`."""
        (tool,), extra = called([self], args, additional_forward_args, kwargs)
        if self.frames_first and isinstance(inputs, Tensor) and inputs.ndim == 5:
            inputs = inputs.transpose(1, 2)
        return run([tool], inputs, [target], extra)[0].maps[0].heat

    @final
    def explain(
        self, image: Any, target: Question = None, *args: Any, additional_forward_args: Any = None, **kwargs: Any
    ) -> Explanation:
        """One image (path, PIL image, uint8 array (H,W,3), or float tensor (C,H,W): the model's input) -> Explanation.

        The rest goes to the model with a batch of one: `explain(image, 1, row[None])`; see `Explainer`.
        """
        tools, extra = called([self], args, additional_forward_args, kwargs)
        return explain_each(tools, image, [target], extra)[0][0]

    @final
    def explain_classes(
        self,
        image: Any,
        targets: Sequence[Question],
        *args: Any,
        additional_forward_args: Any = None,
        **kwargs: Any,
    ) -> list[Explanation]:
        """Several questions about one image, answered from one forward pass where the method allows it; see `explain`."""
        if isinstance(targets, str | int | Difference) or callable(targets):
            raise TargetError(f"explain_classes takes a list of questions; for one, explain(image, {targets!r})")
        tools, extra = called([self], args, additional_forward_args, kwargs)
        return explain_each(tools, image, list(targets), extra)[0]

    @final
    def explain_methods(
        self,
        image: Any,
        methods: "Sequence[str | type[Explainer] | Explainer]",
        target: Question = None,
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
        siblings = [one if isinstance(one, Explainer) else self.sibling(one) for one in methods]
        tools, extra = called(siblings, args, additional_forward_args, kwargs)
        return [row[0] for row in explain_each(tools, image, [target], extra)]

    @property
    def setting_names(self) -> frozenset[str]:
        """The keywords of the constructor."""
        return frozenset(signature(type(self)).parameters)

    def with_settings(self, **settings: Any) -> Self:
        """The same method with other settings."""
        return replace(self, **settings) if settings else self

    def sibling(self, method: "str | type[Explainer]") -> "Explainer":
        """Another method for the same model, with this one's settings where it has them; what is as usual is as usual there."""
        kind, own = kind_of(method), signature(type(self)).parameters
        shared = [name for name in signature(kind).parameters if _declared(name, kind) is _declared(name, type(self))]
        given = {name: getattr(self, name) for name in shared}
        return kind(**{name: value for name, value in given.items() if value is not own[name].default})

    @final
    def explain_batch(
        self,
        images: Sequence[Any],
        targets: Question = None,
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
        extra = extra_inputs(args, for_model, additional_forward_args)
        items = [self.read(image) for image in images]
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
            own = extra.of(rows, len(items))
            tool = _for_call(self, for_method, partial(_rows_of, rows=rows, items=items))
            question = asked_of(tool, [plain if each is None else each[i] for i in rows], [items[i] for i in rows], own)
            made = run([tool], torch.stack([items[i].x for i in rows]), [question], own)[0]
            found = explanations(tool, [items[i] for i in rows], made, 0, digest(made.known.model))
            results.update(zip(rows, found, strict=True))
        return [results[i] for i in range(len(items))]


def called(
    tools: Sequence[Explainer], args: tuple[Any, ...], additional_forward_args: Any, keywords: Mapping[str, Any]
) -> tuple[list[Explainer], Companions]:
    """The methods with the settings of one call, and what goes to the model with the image; see `Explainer`."""
    if not keywords:
        return list(tools), extra_inputs(args, {}, additional_forward_args)
    where = " and ".join(dict.fromkeys(type(tool).__name__ for tool in tools))
    names = frozenset[str]().union(*(tool.setting_names for tool in tools))
    for_model, for_method = split_keywords(tools[0].model if tools else nn.Identity(), keywords, names, where)
    extra = extra_inputs(args, for_model, additional_forward_args)
    return [_for_call(tool, for_method) for tool in tools], extra


def _for_call(
    tool: Explainer, aliased: Mapping[str, Any], part: Callable[[Any], Any] = lambda value: value
) -> Explainer:
    """A method with settings under other toolkits' names, those that it has. `part`: of a baseline for each image."""
    settings = {}
    for word, value in aliased.items():
        for own in ALIASES[word]:
            if own in tool.setting_names and (known := value_of(own, value)) is not None:
                settings[own] = part(known) if own == "baseline" else known
    return tool.with_settings(**settings)


def _rows_of(value: Any, rows: Sequence[int], items: Sequence[Item]) -> Any:
    """Of baselines (N,C,*S), one an image, those of some images; any other baseline unchanged."""
    each = isinstance(value, Tensor) and value.ndim == items[rows[0]].x.ndim + 1 and len(value) == len(items)
    return value[list(rows)] if each else value


def kind_of(method: str | type[Explainer]) -> type[Explainer]:
    """The method of a name, or the class itself; InputError for a name that is none, MissingExtraError without its package."""
    kind = method if isinstance(method, type) else METHODS.get(method)
    if kind is None and method in WITHOUT_PACKAGE:
        raise MissingExtraError(*WITHOUT_PACKAGE[method])
    if kind is None:
        near = difflib.get_close_matches(str(method), METHODS, n=3, cutoff=0.0)
        raise InputError(f"no method {method!r}; nearest names: {', '.join(near)}")
    return kind


def _declared(setting: str, kind: type) -> type | None:
    """The class that a setting comes from first: one of the same name may mean something else elsewhere."""
    return next((one for one in reversed(kind.__mro__) if setting in vars(one).get("__annotations__", {})), None)
