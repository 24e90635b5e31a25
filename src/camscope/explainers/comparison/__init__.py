"""Comparison of several methods, layers and targets on one image."""
