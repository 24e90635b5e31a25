"""Clusters of attribution maps, and what the images of each cluster have in common."""
