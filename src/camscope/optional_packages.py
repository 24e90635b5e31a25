"""Import optional packages when they are used. If one is missing, the error names the extra to install."""

from importlib import import_module
from typing import Any

from camscope.errors import MissingExtraError

DISTRIBUTIONS = {"skimage": "scikit-image", "sklearn": "scikit-learn"}  # where the name on PyPI is not the import name


def require(module: str, *, extra: str) -> Any:
    """Import a module of an optional package. Raise MissingExtraError if the package is not installed.

    Args:
        module: The full name of the module, such as `scipy.stats`.
        extra: The extra of camscope that installs the package.

    Returns:
        The module.

    Raises:
        MissingExtraError: The module cannot be imported. The message names the `pip install` command.

    """
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingExtraError(DISTRIBUTIONS.get(package, package), extra) from error
