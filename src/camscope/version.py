"""The version of camscope. It is defined only here."""

__version__ = "0.2.0"
