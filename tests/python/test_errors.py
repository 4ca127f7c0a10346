"""Bad calls raise what is documented, change nothing, and leak nothing."""

import os
import pathlib

import numpy as np
import pytest

import fovea

F32 = np.float32
OUT = np.full((2, 4, 16), np.nan, F32)
GOOD = dict(q_latent=np.zeros((2, 4, 16), F32), q_pe=np.zeros((2, 4, 8), F32),
            cache=np.zeros((3, 4, 24), F32), block_table=np.zeros((2, 1), np.int32),
            seq_lens=np.ones(2, np.int32), sm_scale=0.1, out=OUT)

# What is replaced, with what, the error and a part of its text.
BAD_MLA = [
    ({"q_latent": "rows"}, TypeError, "q_latent is a builtins.str; it must be a tensor"),
    ({"q_latent": np.zeros((2, 4, 16))}, TypeError, "q_latent is a numpy.ndarray of float64"),
    ({"q_latent": np.zeros((2, 4, 16), complex)}, TypeError, "complex128"),
    ({"q_latent": np.zeros((2, 64), F32)}, ValueError, "q_latent has shape (2, 64)"),
    ({"q_pe": np.zeros((2, 3, 8), F32)}, ValueError, "q_pe"),
    ({"q_pe": np.zeros((2, 4, 8), ">f4")}, ValueError, "q_pe has swapped bytes"),
    ({"q_pe": np.frombuffer(bytes(257), F32, offset=1).reshape(2, 4, 8)}, ValueError,
     "q_pe is not aligned"),
    ({"q_pe": np.ma.zeros((2, 4, 8), F32)}, TypeError, "whose mask would be lost"),
    ({"q_pe": np.zeros((2, 4, 8), np.float16)}, ValueError, "q_pe"),
    ({"q_pe": None}, TypeError, "q_pe is a NoneType"),
    ({"cache": np.zeros((3, 4, 23), F32)}, ValueError, "cache"),
    ({"cache": np.zeros((12, 24), F32)}, ValueError, "cache is f32[12, 24]"),
    ({"cache": np.zeros((3, 4, 48), F32)[..., ::2]}, ValueError, "rows must be contiguous"),
    ({"cache": np.zeros((3, 4, 24), np.int8)}, ValueError, "make a PagedKvCache over it"),
    ({"cache": fovea.PagedKvCache.heads(2, 8, num_blocks=2)}, ValueError, "of latent rows"),
    ({"block_table": np.zeros((2, 1), F32)}, TypeError, "block_table"),
    ({"block_table": np.zeros(2, np.int32)}, ValueError, "block_table"),
    ({"block_table": [[0], [3]]}, ValueError, "3"),
    ({"block_table": [[0]]}, ValueError, "block_table"),
    ({"block_table": [[0], [0.5]]}, TypeError, "block_table holds a float"),
    ({"block_table": [0, 0]}, TypeError, "block_table holds a int"),
    ({"seq_lens": [1, 99]}, ValueError, "block_table"),
    ({"seq_lens": [1, -1]}, ValueError, "seq_lens"),
    ({"seq_lens": [1, 2**40]}, ValueError, "does not fit 32 bits"),
    ({"seq_lens": [1, 2**70]}, ValueError, "does not fit 64 bits"),
    ({"seq_lens": [1, 1, 1]}, ValueError, "query_start_loc is None"),
    ({"seq_lens": None}, TypeError, "seq_lens is a NoneType"),
    ({"seq_lens": np.ones(2)}, TypeError, "seq_lens"),
    ({"query_start_loc": [0, 2]}, ValueError, "query_start_loc"),
    ({"sm_scale": float("nan")}, ValueError, "sm_scale"),
    ({"sm_scale": "0.1"}, TypeError, "incompatible function arguments"),
    ({"sinks": np.zeros(3, F32)}, ValueError, "sinks"),
    ({"out": np.zeros((2, 4, 15), F32)}, ValueError, "out"),
    ({"out": np.broadcast_to(F32(0), (2, 4, 16))}, ValueError, "out is read-only"),
    ({"lse": np.zeros((2, 4), F32)}, ValueError, "lse"),
    ({"causal": False, "attention_chunk": 2}, NotImplementedError, "attention_chunk"),
    ({"plan": "plan"}, TypeError, "plan is a str; it must be a fovea.BatchPlan"),
    ({"runtime": 2}, TypeError, "runtime is a int; it must be a fovea.Runtime or None"),
]


@pytest.mark.parametrize("change, error, text", BAD_MLA, ids=lambda value: str(value)[:40])
def test_mla_decode(change, error, text):
    with pytest.raises(error) as raised:
        fovea.mla_decode(**{**GOOD, **change})
    assert text in str(raised.value)
    assert np.isnan(OUT).all()


class OnAnotherDevice:
    """DLPack of a tensor on the first GPU, as a library would export it."""

    shape = (2, 4, 16)
    dtype = "float32"

    def __dlpack__(self, **_):
        import ctypes

        class Tensor(ctypes.Structure):
            _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32),
                        ("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32),
                        ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
                        ("lanes", ctypes.c_uint16), ("shape", ctypes.c_void_p),
                        ("strides", ctypes.c_void_p), ("byte_offset", ctypes.c_uint64),
                        ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]

        self.extents = (ctypes.c_int64 * 3)(*self.shape)
        self.exported = Tensor(None, 2, 0, 3, 2, 32, 1, ctypes.addressof(self.extents))
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p,
                                                       ctypes.c_void_p]
        return new(ctypes.addressof(self.exported), b"dltensor", None)


def test_other_devices_are_refused():
    with pytest.raises(NotImplementedError, match="q_latent is on cuda:0; "):
        fovea.mla_decode(**{**GOOD, "q_latent": OnAnotherDevice()})


def test_negative_views_of_torch_are_refused():
    torch = pytest.importorskip("torch")
    q = torch.view_as_complex(torch.randn(2, 4, 16, 2)).conj().imag
    assert q.is_neg()
    with pytest.raises(ValueError, match="q has its negative bit set"):
        fovea.attention_prefill(q, q, q)


def test_arrays_of_jax_are_not_written_to():
    jnp = pytest.importorskip("jax.numpy")
    out = jnp.zeros((2, 4, 16))
    with pytest.raises(ValueError, match="out is a jaxlib.* which never changes"):
        fovea.mla_decode(**{**GOOD, "out": out})
    assert (out == 0).all()


def test_prefill_over_a_cache_needs_lengths():
    q = np.zeros((2, 4, 8), F32)
    cache = fovea.PagedKvCache.heads(4, 8, num_blocks=1, format="f32")
    with pytest.raises(ValueError, match="cu_seqlens_k is None"):
        fovea.attention_prefill(q, q, q, cache=cache, block_table=[[0]])


def test_tensors_without_memory_are_refused():
    torch = pytest.importorskip("torch")
    with pytest.raises((TypeError, NotImplementedError), match="q is "):
        fovea.attention_prefill(*(torch.empty(2, 1, 8, device="meta") for _ in range(3)))


def test_forked_children_are_told(tmp_path):
    runtime = fovea.Runtime(num_threads=2)
    q = np.ones((2, 1, 8), F32)
    answer = tmp_path / "answer"
    child = os.fork()
    if child == 0:
        try:
            fovea.attention_prefill(q, q, q, runtime=runtime)
        except ValueError as error:
            answer.write_text(str(error))
        out = fovea.attention_prefill(q, q, q)  # The default runtime is made anew.
        os._exit(0 if (out == 1).all() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert "make a new fovea.Runtime here" in answer.read_text()


def resident_bytes():
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_ten_thousand_bad_calls_leak_nothing():
    torch = pytest.importorskip("torch")
    calls = [{**GOOD, **change} for change, _, _ in BAD_MLA]
    calls += [{**GOOD, "q_latent": torch.zeros(2, 4, 16, dtype=dtype)}
              for dtype in (torch.float64, torch.int16, torch.bfloat16)]
    calls.append({**GOOD, "q_latent": OnAnotherDevice()})

    def run(rounds):
        for _ in range(rounds):
            for call in calls:
                with pytest.raises((TypeError, ValueError, NotImplementedError)):
                    fovea.mla_decode(**call)

    run(20)
    before = resident_bytes()
    run(10_000 // len(calls) + 1)
    assert resident_bytes() - before < 2 << 20
