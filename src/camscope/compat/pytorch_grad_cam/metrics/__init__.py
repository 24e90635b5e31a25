"""Metrics of maps, under the names of pytorch-grad-cam."""
