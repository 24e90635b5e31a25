"""SampledExplainer: what every method shares whose map is a mean over random masks, and how sure that mean is."""

from abc import abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor

from camscope.explainers.perturbations.base import Found, Masks, PerturbationExplainer, Veiled, doubt, settling
from camscope.explainers.scope import expect_count, expect_positive
from camscope.wording import plural

CHECKED = 64  # masks between two looks at the standard error, whatever the size of a pass
AT_ONCE = 2**22  # numbers of the masks that are added to the mean at once, in float64


@dataclass
class Running:
    """The mean of maps (*S) and its standard error, in float64, of blocks of maps that need not be kept (Chan et al. 1979)."""

    count: int = 0
    mean: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64, device="cpu"))
    squares: Tensor = field(
        default_factory=lambda: torch.zeros((), dtype=torch.float64, device="cpu")
    )  # of distances from the mean

    def add(self, weights: Tensor, masks: Tensor) -> None:
        """(R,), (R,*S): R more maps, each a mask times its weight."""
        rows, own = masks.flatten(1).double(), len(masks)
        mean = (weights @ rows).view(masks.shape[1:]) / own
        squares = (weights.square() @ rows.square()).view(masks.shape[1:]) - own * mean.square()
        away, together = mean - self.mean.to(mean), self.count + own
        self.mean = self.mean.to(mean) + away * (own / together)
        self.squares = self.squares.to(mean) + squares.clamp(min=0) + away.square() * (self.count * own / together)
        self.count = together

    @property
    def error(self) -> Tensor:
        """(*S): the standard error of the mean; of fewer than two maps it is as large as the mean."""
        if self.count < 2:
            return self.mean.abs()
        return (self.squares / (self.count - 1) / self.count).sqrt()

    @property
    def doubt(self) -> float:
        """See `doubt`."""
        return doubt(self.mean, self.error)


@dataclass(kw_only=True, eq=False, repr=False)
class SampledExplainer(PerturbationExplainer):
    """How the probability goes with random masks, and the standard error. A method writes `masks` and `weights`.

    The map is the mean of what each mask weighs at a pixel, 0 on the average, times the probability less that of the first
    masks' mean: a number that all probabilities have in common shows nothing, and would only add to the error.

    `samples`: masks. `until`: stop as soon as the largest standard error is at most so large a share of the map's range,
    from its least cell to its largest, so that the order of what differs by more than a few of that is settled; looked
    at after every 64 masks, however many of them run at a time.
    """

    samples: int = 4000
    until: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_count(samples=self.samples)
        expect_positive(None, until=self.until)

    @abstractmethod
    def masks(self, veiled: Veiled) -> Masks:
        """What makes the masks of some turns: the same ones each time, so that none is kept."""

    @abstractmethod
    def weights(self, masks: Tensor) -> Tensor:
        """(R,*S) -> (R,*S): what they weigh, 0 on the average."""

    def found(self, veiled: Veiled) -> Found:
        """Each mask's probability is kept; the mask is made again where whole blocks of them are added up.

        In this way the order of all sums is the same for any number of masks in a pass.
        """
        masks, running, level = self.masks(veiled), Running(), 0.0
        values = torch.empty(self.samples, dtype=torch.float64, device=veiled.x.device)
        block = CHECKED
        while block > 1 and block * veiled.x[0].numel() > AT_ONCE:
            block //= 2

        def work(part: slice) -> bool:
            nonlocal level
            values[part] = veiled.scores(masks(part), chance=True).mean(0)
            while (last := min(running.count + block, self.samples)) <= part.stop and running.count < last:
                added = slice(running.count, last)
                level = level if running.count else float(values[added].mean())
                running.add(values[added] - level, self.weights(masks(added)))
                if self.until is not None and last % CHECKED == 0 and running.doubt <= self.until:
                    return True
            return False

        veiled.runs.in_turns(veiled.sample, self.samples, work)
        words = settling(running.doubt, self.until, running.count < self.samples, self.samples)
        return Found(running.mean, running.error, (f"{plural(running.count, 'mask')}; {words}",))
