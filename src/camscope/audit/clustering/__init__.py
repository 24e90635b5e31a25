"""Clusters of maps: whether a model uses several strategies, and what each cluster consists of."""
