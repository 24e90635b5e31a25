"""`MapLogger`: a callback of Lightning that logs maps of the same samples before the training and after its epochs."""

from typing import Any

from torch import nn

from camscope.hooks.find_layers import find_layer
from camscope.integrations.log_maps_of_samples import SampleMaps
from camscope.optional_packages import require


class LightningMapHooks:
    """A callback that logs maps of fixed samples to the loggers of a Lightning trainer.

    The first maps come before the training. An error there is raised at once, and a later one is a warning. In
    distributed training only the first process logs.

    Args:
        samples: As for `SampleMaps`: a tensor of model inputs, a list of images, or a data set.
        model: Name of the part of the LightningModule that is explained, such as "model". None: the module itself.
        writer: A writer as `Explanation.log` takes it. None: all loggers of the trainer that take pictures.
        **options: `indices`, `targets`, `methods`, `layer`, `tag`, `every_n_epochs`, `height`, `preprocess`, `class_names`
            and `settings`, as for `SampleMaps`.

    >>> import torch
    >>> callback = LightningMapHooks(torch.zeros(2, 1, 128, 128), targets=1, layer="layer4", every_n_epochs=2)
    >>> callback.maps.indices
    [0, 1]

    """

    def __init__(self, samples: Any, *, model: str | None = None, writer: Any = None, **options: Any) -> None:
        self.maps, self._model_name, self._writer = SampleMaps(samples, **options), model, writer

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Log the maps before the first epoch."""
        self._log(trainer, pl_module, first=True)

    def on_train_epoch_end(self, trainer: Any, pl_module: nn.Module) -> None:
        """Log the maps after each n-th epoch."""
        if (trainer.current_epoch + 1) % self.maps.every_n_epochs == 0:
            self._log(trainer, pl_module)

    def _log(self, trainer: Any, pl_module: nn.Module, *, first: bool = False) -> None:
        if trainer.is_global_zero:
            model = pl_module if self._model_name is None else find_layer(pl_module, self._model_name)[1]
            writers = trainer.loggers if self._writer is None else [self._writer]
            self.maps.log(model, writers, trainer.global_step, first=first)


def __getattr__(name: str) -> Any:
    """Build the class `MapLogger` when it is imported, because Lightning is optional and slow to import."""
    if name != "MapLogger":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    base = require("lightning.pytorch", extra="lightning").Callback
    facts = {"__module__": __name__, "__doc__": LightningMapHooks.__doc__}
    return globals().setdefault("MapLogger", type("MapLogger", (LightningMapHooks, base), facts))
