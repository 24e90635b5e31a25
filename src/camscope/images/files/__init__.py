"""Image files and folders: which files are read, and under which names errors report them."""
