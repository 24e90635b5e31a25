"""Selection of a method and a layer by a race over images."""
