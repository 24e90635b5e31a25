"""Methods computed by other packages: captum (extra `captum`) and zennit (extra `lrp`).

The classes can be imported without the package. METHODS contains them only if it is installed; otherwise the
constructor raises MissingExtraError.
"""

from camscope.explainers.adapters.deep_lift import DeepLIFT, DeepLIFTSHAP
from camscope.explainers.adapters.lrp import LRP
from camscope.explainers.adapters.surrogate import LIME, KernelSHAP

__all__ = ["LIME", "LRP", "DeepLIFT", "DeepLIFTSHAP", "KernelSHAP"]
