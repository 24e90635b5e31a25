"""Which method, at which layer: `candidates` race over `samples`, a block at a time.

`judging` says what their maps are worth, `standing` keeps it, `race` says who drops out, `choose` is the whole, and `choice`
writes its outcome as a file.
"""
