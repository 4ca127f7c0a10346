"""Results in the library that the operands come from."""

import sys


def shape_of(tensor, name, ndim):
    """The shape of a tensor argument, before it goes to C++, which checks the rest."""
    shape = getattr(tensor, "shape", None)
    if shape is None:
        kind = type(tensor)
        raise TypeError(f"{name} is a {kind.__module__}.{kind.__qualname__}; it must be a tensor "
                        "of torch, NumPy, JAX or another library with __dlpack__")
    if len(shape) != ndim:
        raise ValueError(f"{name} has shape {tuple(shape)}; it must have {ndim} dimensions")
    return shape


def empty(like, shape, dtype=None):
    """An uninitialised writable array in the library of `like`: NumPy's where that is JAX's on CPU.

    dtype: "float32", "bfloat16" and so on; None: that of `like`.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(like, torch.Tensor):
        return torch.empty(shape, dtype=like.dtype if dtype is None else getattr(torch, dtype),
                           device=like.device)
    numpy = sys.modules.get("numpy")
    on_cpu = not is_jax(like) or like.platform() == "cpu"
    if numpy is None or not on_cpu or not (isinstance(like, numpy.ndarray) or is_jax(like)):
        kind = type(like)
        where = "" if on_cpu else " on a GPU"
        raise TypeError(f"operands are {kind.__module__}.{kind.__qualname__}{where}: pass out (and "
                        "lse), since fovea makes results with torch and NumPy only")
    if dtype == "bfloat16":
        import ml_dtypes  # NumPy has no bfloat16 of its own.
        return numpy.empty(shape, ml_dtypes.bfloat16)
    return numpy.empty(shape, like.dtype if dtype is None else dtype)


def slots_beside(like, slots):
    """Slot ids of a list where an op on `like` can read them: on its GPU if it is on one."""
    torch = sys.modules.get("torch")
    if not isinstance(slots, (list, tuple)) or torch is None or not isinstance(like, torch.Tensor):
        return slots
    return torch.tensor(slots, dtype=torch.int64, device=like.device) if like.is_cuda else slots


def is_jax(array):
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(array, jax.Array)


def result_of(like, array):
    """`array` in the library of `like`: what empty() made, after it was written."""
    return sys.modules["jax"].numpy.asarray(array) if is_jax(like) else array
