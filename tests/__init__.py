"""The tests. Imported before PyTorch: processes with OpenMP that run side by side use one thread each and do not spin."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
