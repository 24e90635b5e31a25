"""Wrapper: what every explainer shares that is made of others."""

from abc import abstractmethod
from collections.abc import Sequence
from inspect import signature
from typing import Any, ClassVar, Self

from torch import Tensor

from camscope.errors import InputError
from camscope.explainers.base import Explainer
from camscope.explainers.maps import Maps
from camscope.explainers.together import expect_alike
from camscope.targets import Difference, Question, Score


class Wrapper(Explainer):
    """An explainer made of others, whose model, preprocessing, mode and precision it keeps. A wrapper writes `maps`."""

    paper: ClassVar[str] = ""  # that of what is inside
    inner: tuple[Explainer, ...]

    def __init__(self, *inner: Explainer) -> None:
        for one in inner:
            if not isinstance(one, Explainer):
                raise InputError(
                    f"{type(self).__name__} goes round an explainer, as GradCAM(model); {one!r:.80} came instead"
                )
        expect_alike(inner)
        first, self.inner = inner[0], inner
        for one in inner[1:]:
            if (one.mode, one.precision, one.call_settings) != (first.mode, first.precision, first.call_settings):
                raise InputError(f"{first!r} and {one!r} differ in mode, precision, input_key or frames_first")
        super().__init__(
            first.model,
            preprocess=first.preprocess,
            categories=first.categories,
            mode=first.mode,
            on_nonfinite=first.on_nonfinite,
            precision=first.precision,
            **first.call_settings,
        )

    @abstractmethod
    def maps(self, x: Tensor, scores: Sequence[Score]) -> list[Maps]:
        """(N,C,*S) -> a map of each score, made of the inner ones."""

    def settled(self, x: Tensor, score: Score) -> Self:
        """The same wrapper round inner ones that have chosen for this input."""
        return self._round([one.settled(x, score) for one in self.inner])

    def heat(self, x: Tensor, score: Score) -> Tensor:
        """(N,C,*S) -> (N,*s): see `maps`."""
        return self.maps(x, [score])[0].heat

    @property
    def setting_names(self) -> frozenset[str]:
        """Those of the inner ones, too."""
        return super().setting_names.union(*(one.setting_names for one in self.inner))

    def with_settings(self, **settings: Any) -> Self:
        """The same wrapper round inner ones with other settings, each with those that it has."""
        return self._round(
            [
                one.with_settings(**{name: value for name, value in settings.items() if name in one.setting_names})
                for one in self.inner
            ]
        )

    @property
    def title(self) -> str:
        """`gradcam, denoised`."""
        return f"{' + '.join(dict.fromkeys(one.title for one in self.inner))}, {self.name}"

    @property
    def takes_gradients(self) -> bool:
        """Whether an inner one does."""
        return any(one.takes_gradients for one in self.inner)

    @property
    def takes_integers(self) -> bool:
        """Whether all inner ones do."""
        return all(one.takes_integers for one in self.inner)

    def asked(self, target: Question) -> Question:
        """The question as the inner ones put it, which must be one."""
        questions = [one.asked(target) for one in self.inner]
        for one, question in zip(self.inner, questions, strict=True):
            same = isinstance(question, Difference) and question == questions[0]
            if question is not questions[0] and not same:
                raise InputError(f"{self.inner[0]!r} and {one!r} ask different questions: {self.name} needs one")
        return questions[0]

    def sibling(self, method: str | type[Explainer]) -> Explainer:
        """The same wrapper round another method."""
        return self._round([one.sibling(method) for one in self.inner])

    def _round(self, inner: Sequence[Explainer]) -> Self:
        return type(self)(inner[0], **self._own)

    @property
    def _own(self) -> dict[str, Any]:
        """The wrapper's own settings: all but the first argument, which is what is inside."""
        return {name: getattr(self, name) for name in list(signature(type(self)).parameters)[1:]}

    def __repr__(self) -> str:
        inside = repr(self.inner[0]) if len(self.inner) == 1 else repr(list(self.inner))
        usual = {name: one.default for name, one in signature(type(self)).parameters.items()}
        changed = [f"{name}={value!r}" for name, value in self._own.items() if value != usual[name]]
        return f"{type(self).__name__}({', '.join([inside, *changed])})"
