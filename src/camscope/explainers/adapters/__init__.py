"""Methods that other packages compute: captum's (extra `captum`) and zennit's (extra `lrp`).

The classes are here without the package; METHODS has them where it is installed, and making one asks for it.
"""

from camscope.explainers.adapters.deep_lift import DeepLIFT, DeepLIFTSHAP
from camscope.explainers.adapters.lrp import LRP
from camscope.explainers.adapters.surrogate import LIME, KernelSHAP

__all__ = ["LIME", "LRP", "DeepLIFT", "DeepLIFTSHAP", "KernelSHAP"]
