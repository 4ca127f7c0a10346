"""Checks attention kernels, anybody's, against float64 with inputs that break many."""

from fovea.checking.report import Finding, Report, compare
from fovea.checking.cases import cases_of
from fovea.checking.problem import Problem
from fovea.checking.signatures import signature_of

# Of the norm of a row or of lse + 1: float32 sums, and one rounding of the output.
TOLERANCE = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1.2e-2}
_DTYPE_OF_FORMAT = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}

__all__ = ["Finding", "Report", "TOLERANCE", "check"]


def check(call, dims, format="bf16", *, signature=None, library="torch", device="cpu",
          block_size=64, seed=0, tolerance=None):
    """Runs an attention kernel on hostile inputs and says which rules of meaning it breaks.

    Each case is compared, row by row, with float64 that shares no code with any kernel. Where a row
    is wrong, known mistakes are tried (another scale, a mask aligned to the wrong end, a window off
    by one, a sink in lse, lse in base 2, ...) and the one that gives the same numbers is named.
    What a kernel refuses with NotImplementedError or AssertionError is listed, not counted.

    Args:
        call: a callable with the signature of fovea's mla_decode, attention_decode or
            attention_prefill, of flash_mla's flash_mla_with_kvcache, or of flash_attn's
            flash_attn_varlen_func or flash_attn_with_kvcache.
        dims: MlaDims for mla_decode and flash_mla_with_kvcache, else GqaDims; their sm_scale is
            what the kernel is asked for.
        format: "bf16", "f16" or "f32", the dtype of operands and cache; with fovea's decodes any
            name of kv_format_names(): then operands are bfloat16 and float64 reads what is stored.
        signature: the name of one of those functions; None: the callable's own name.
        library: "torch" or "numpy": whose tensors the callable takes.
        device: where torch tensors go; results are read back.
        block_size: tokens of a block of the cache.
        seed: of the random inputs.
        tolerance: of the norm of a row; None: by the dtype, see TOLERANCE.

    Returns:
        A Report: `ok`, `findings` with the worst row of each broken case, `refused`; print it.
    """
    adapter = signature_of(signature or getattr(call, "__name__", type(call).__name__), dims)
    dtype = _DTYPE_OF_FORMAT.get(format, "bfloat16")
    if format not in _DTYPE_OF_FORMAT and not adapter.takes_formats:
        raise ValueError(f"format is {format!r}; {adapter.name} takes bf16, f16 and f32")
    limit = TOLERANCE[dtype] if tolerance is None else tolerance
    report = Report(adapter.name)
    for index, case in enumerate(cases_of(adapter, dims)):
        problem = Problem(case, adapter, dims, dtype, format, library, device, block_size,
                          seed + index)
        report.cases.append(case.name)
        try:
            out, lse = adapter.run(call, problem)
        except (NotImplementedError, AssertionError) as refusal:
            report.refused[case.name] = str(refusal)
            continue
        except Exception as error:  # Whatever it is, the other cases still say something.
            report.findings.append(Finding(case.name, case.rule, diagnosis=(
                f"raised {type(error).__name__}: {error}")))
            continue
        finding = compare(problem, out, lse, limit, adapter.empty_lse)
        report.worst_error = max(report.worst_error, problem.worst_error)
        if finding is not None:
            report.findings.append(finding)
    return report
