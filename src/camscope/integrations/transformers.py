"""`MapLogger`: a callback for the Trainer of transformers that logs maps of the same samples during a training."""

from typing import Any

from torch import nn

from camscope.hooks.find_layers import unwrap
from camscope.integrations.log_maps_of_samples import SampleMaps
from camscope.optional_packages import require


class TrainerMapHooks:
    """A callback that logs maps of fixed samples during a training by the `Trainer` of transformers.

    The first maps come before the training. An error there is raised at once, and a later one is a warning. In
    distributed training only the first process logs. The Trainer also needs the package accelerate.

    Args:
        samples: As for `SampleMaps`: a tensor of model inputs, a list of images, or a data set.
        writer: A writer as `Explanation.log` takes it, such as a SummaryWriter, the run of `wandb.init()`, or `mlflow`.
        **options: `indices`, `targets`, `methods`, `layer`, `tag`, `every_n_epochs`, `height`, `preprocess`, `class_names`
            and `settings`, as for `SampleMaps`.

    >>> import torch
    >>> callback = TrainerMapHooks(torch.zeros(2, 1, 128, 128), writer=None, targets=1, tag="validation")
    >>> callback.maps.tag
    'validation'

    """

    def __init__(self, samples: Any, writer: Any, **options: Any) -> None:
        self.maps, self._writer = SampleMaps(samples, **options), writer

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        """Log the maps before the first epoch."""
        self._log(state, model, first=True)

    def on_epoch_end(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        """Log the maps after each n-th epoch."""
        if round(state.epoch) % self.maps.every_n_epochs == 0:
            self._log(state, model)

    def _log(self, state: Any, model: nn.Module, *, first: bool = False) -> None:
        if state.is_world_process_zero:
            self.maps.log(unwrap(model), [self._writer], state.global_step, first=first)


def __getattr__(name: str) -> Any:
    """Build the class `MapLogger` when it is imported, because transformers is optional and slow to import."""
    if name != "MapLogger":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    base = require("transformers", extra="hub").TrainerCallback
    facts = {"__module__": __name__, "__doc__": TrainerMapHooks.__doc__}
    return globals().setdefault("MapLogger", type("MapLogger", (TrainerMapHooks, base), facts))
