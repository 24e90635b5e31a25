"""The stages of an audit. Each is a function of the context and of the results of earlier stages."""
