"""Files and folders of images: which are read, and under which names they are reported."""
