"""Selection of the best attribution method and layer, in a race over images."""
