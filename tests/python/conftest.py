import importlib.util
import os
import pathlib
import sys

import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import fovea  # noqa: E402
from problems import Library  # noqa: E402

if importlib.util.find_spec("torch"):
    import torch

    torch.set_num_threads(1)  # Of these sizes threads only wait for each other.

LIBRARIES = [name for name in ("torch", "numpy", "jax") if importlib.util.find_spec(name)]


def has_cuda():
    """A GPU, and a build of fovea that computes on it."""
    if "torch" not in LIBRARIES or not torch.cuda.is_available():
        return False
    try:
        fovea.Runtime(backend="cuda")
    except NotImplementedError:
        return False
    return True


if has_cuda():
    LIBRARIES.append("cuda")


@pytest.fixture(params=LIBRARIES)
def library(request):
    """Each installed library of tensors."""
    return Library(request.param)


@pytest.fixture
def rng():
    return np.random.default_rng(7)
