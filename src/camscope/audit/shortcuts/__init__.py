"""Shortcuts: what predictions and maps owe to regions that a correct model does not need."""
