"""Methods that hide parts of the input and measure the change of the score."""
