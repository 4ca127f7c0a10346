"""Attention for LLM inference: MLA and grouped-query attention over paged caches.

Tensors are those of torch, NumPy, JAX or any library with DLPack, on the CPU or, in a build with
CUDA, on an NVIDIA GPU: float32, float16 and bfloat16 (NumPy's through ml_dtypes). They are read and
written where they are; only lengths, block tables and lists of integers may be copied, and results
for JAX, whose arrays never change. Nothing here is differentiable.

Errors: ValueError names the argument, what it was and what it must be; TypeError says what is no
tensor, or has a dtype that fovea lacks; NotImplementedError says what nothing here implements,
other devices among it. All are raised before anything is written.
"""

from fovea._core import (BatchPlan, BlockPool, Engine, GqaDims, KvCache, KvFormat, MlaDims, Model,
                         ModelConfig, RotaryEmbedding, Runtime, Workload, default_runtime,
                         kv_format_names, oracle_attention)
from fovea.cache import PagedKvCache, Sequence
from fovea.layers import AttentionLayer, MlaLayer
from fovea.ops import (attention_decode, attention_prefill, gqa_append, kv_append, kv_gather,
                       merge_state, mla_decode)

__all__ = [
    "AttentionLayer", "BatchPlan", "BlockPool", "Engine", "GqaDims", "KvCache", "KvFormat",
    "MlaDims", "MlaLayer", "Model", "ModelConfig", "PagedKvCache", "RotaryEmbedding", "Runtime",
    "Sequence", "Workload", "attention_decode", "attention_prefill", "check", "default_runtime",
    "gqa_append", "kv_append", "kv_format_names", "kv_gather", "merge_state", "mla_decode",
    "oracle_attention",
]


def __getattr__(name):
    if name == "check":  # Needs NumPy, which the rest does not.
        from fovea.checking import check
        return check
    raise AttributeError(f"module 'fovea' has no attribute {name!r}")
