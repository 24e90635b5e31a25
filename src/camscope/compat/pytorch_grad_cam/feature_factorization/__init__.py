"""Deep Feature Factorization, under the names of pytorch-grad-cam."""
