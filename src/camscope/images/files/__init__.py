"""Find, open and check image files, and keep patient data out of error messages."""
