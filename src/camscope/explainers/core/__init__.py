"""The base classes of the methods, and the code that prepares inputs, baselines and batches for them."""
