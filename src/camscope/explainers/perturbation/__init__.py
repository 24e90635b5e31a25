"""Methods that hide parts of the input and observe the score."""
