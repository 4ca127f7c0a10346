"""Comparison with float64, and what it found."""

import dataclasses

import numpy as np


@dataclasses.dataclass
class Finding:
    """The worst row of a case that went wrong."""

    case: str
    rule: str
    what: str = ""          # "out" or "lse".
    row: tuple = ()         # (request, query token, head).
    error: float = np.nan   # Of the row's norm, or of lse.
    expected: np.ndarray | float | None = None
    got: np.ndarray | float | None = None
    diagnosis: str = ""

    def __str__(self):
        text = f"{self.case}: broke the rule that {self.rule}"
        if self.row:
            request, token, head = self.row
            text += (f"\n  worst {self.what} row: request {request}, query token {token}, head "
                     f"{head}, off by {self.error:.2e}"
                     f"\n  expected {_few(self.expected)}\n  got      {_few(self.got)}")
        return text + (f"\n  {self.diagnosis}" if self.diagnosis else "")


@dataclasses.dataclass
class Report:
    """What check() found.

    Attributes:
        cases: names of the cases that were run.
        findings: one Finding for each case that went wrong.
        refused: the reason of each case that the kernel refused.
        worst_error: the largest error of all rows, of the row's norm.
    """

    signature: str
    cases: list = dataclasses.field(default_factory=list)
    findings: list = dataclasses.field(default_factory=list)
    refused: dict = dataclasses.field(default_factory=dict)
    worst_error: float = 0.0

    @property
    def ok(self):
        return not self.findings

    def __str__(self):
        held = len(self.cases) - len(self.findings) - len(self.refused)
        lines = [f"{self.signature}: {held} of {len(self.cases)} cases hold, worst error "
                 f"{self.worst_error:.2e}"]
        lines += [f"refused {case}: {reason}" for case, reason in self.refused.items()]
        return "\n".join(lines + [str(finding) for finding in self.findings])


def _few(values):
    values = np.atleast_1d(values)
    return np.array2string(values[:6], precision=5) + (" ..." if len(values) > 6 else "")


def compare(problem, out, lse, limit, empty_lse):
    """The worst row of out, else of lse, as a Finding; None where all are within the limit.

    lse may be None: not returned. `empty_lse`: what it may be where there are no keys.
    """
    expected_out, expected_lse = problem.expected()
    if out.shape != expected_out.shape:
        return _finding(problem, diagnosis=f"out has {out.shape} for [tokens, heads, width]; it "
                        f"must have {expected_out.shape}")
    nan_rows = problem.nan_rows()
    errors = _row_errors(expected_out, out, nan_rows)
    problem.worst_error = float(np.nanmax(np.where(np.isfinite(errors), errors, 0)))
    if not errors.max() <= limit:
        token, head = np.unravel_index(np.argmax(errors), errors.shape)
        seen = nan_rows[token, head]
        expected = np.full(out.shape[2], np.nan) if seen else expected_out[token, head]
        return _finding(problem, "out", token, head, errors[token, head], expected,
                        out[token, head], _diagnose_out(problem, out, limit))
    if lse is None:
        return None
    if lse.shape != expected_lse.shape:
        return _finding(problem, diagnosis=f"lse has {lse.shape} for [heads, tokens]; it must have "
                        f"{expected_lse.shape}")
    errors = _lse_errors(expected_lse, lse, nan_rows.T, empty_lse)
    if not errors.max() <= limit:
        head, token = np.unravel_index(np.argmax(errors), errors.shape)
        return _finding(problem, "lse", token, head, errors[head, token],
                        expected_lse[head, token], lse[head, token],
                        _diagnose_lse(problem, lse, limit, empty_lse))
    return None


def _finding(problem, what="", token=None, head=None, error=np.nan, expected=None, got=None,
             diagnosis=""):
    row = () if token is None else (*problem.where(token), int(head))
    return Finding(problem.case.name, problem.case.rule, what, row, float(error), expected, got,
                   diagnosis)


def _row_errors(expected, got, nan_rows):
    """[T, N] distance over the expected norm; infinite where NaN is on one side only."""
    norm = np.maximum(np.linalg.norm(expected, axis=-1), 1e-3)
    errors = np.linalg.norm(got - expected, axis=-1) / norm
    errors = np.where(np.isfinite(errors), errors, np.inf)
    return np.where(nan_rows, np.where(np.isnan(got).all(-1), 0, np.inf), errors)


def _lse_errors(expected, got, nan_rows, empty_lse):
    """[N, T] distance over 1 + |lse|; rows that see NaN have none that is defined."""
    empty = np.isneginf(expected)
    with np.errstate(invalid="ignore"):
        errors = np.abs(got - expected) / (1 + np.abs(expected))
    errors = np.where(empty, np.where(np.isin(got, empty_lse), 0, np.inf), errors)
    errors = np.where(nan_rows, 0, errors)
    return np.where(np.isnan(errors), np.inf, errors)


def _diagnose_out(problem, out, limit):
    """The known mistake that gives these numbers, or what hints at one."""
    case = problem.case
    default_scale = problem.qk_dim ** -0.5
    mistakes = [
        ("the scale is the width's own, %.4g, instead of the one that was passed" % default_scale,
         dict(sm_scale=default_scale)),
        ("the causal mask is aligned to the first key instead of the last",
         dict(aligned_to_end=False)),
        ("the causal mask is missing", dict(causal=False, attention_chunk=0)),
        ("there is a causal mask although none was asked for", dict(causal=True)),
        ("the window is ignored", dict(window_left=-1)),
        ("the window is one key too wide", dict(window_left=case.window_left + 1)),
        ("the window is one key too narrow", dict(window_left=case.window_left - 1)),
        ("attention chunks are ignored", dict(attention_chunk=0)),
        ("the soft cap is ignored", dict(soft_cap=0.0)),
        ("sinks are ignored", dict(sinks=None)),
        ("heads read key heads in turn (n % kv_heads) instead of in groups",
         dict(q=[_turned(q, problem) for q in problem.q])),
    ]
    if problem.sinks is not None:
        mistakes += [("sinks are scaled by the softmax scale",
                      dict(sinks=problem.sinks * problem.sm_scale))]
    right, _ = problem.expected()
    nan_rows = problem.nan_rows()
    for text, changes in mistakes:
        wrong, _ = problem.expected(**changes)
        if "q" in changes:
            wrong = _turned_back(wrong, problem)
        differs = _row_errors(right, wrong, nan_rows).max() > limit
        if differs and _row_errors(wrong, out, nan_rows).max() <= limit:
            return text
    if np.isnan(out[~nan_rows]).any():
        return "NaN comes through from slots that no query sees, or from rows without keys"
    return ""


def _turned(q, problem):
    """Heads in an order in which groups of them are what reads key heads in turn."""
    return q[:, _turned_order(problem)]


def _turned_order(problem):
    return np.arange(problem.heads).reshape(-1, problem.kv_heads).T.ravel()


def _turned_back(out, problem):
    back = np.empty_like(out)
    back[:, _turned_order(problem)] = out
    return back


def _diagnose_lse(problem, lse, limit, empty_lse):
    _, right = problem.expected()
    nan_rows = problem.nan_rows().T
    mistakes = [("lse is in base 2", right / np.log(2)),
                ("lse leaves the softmax scale out", problem.expected(sm_scale=1.0)[1])]
    if right.shape[0] == right.shape[1]:
        mistakes.append(("lse is [tokens, heads]", right.T))
    if problem.sinks is not None:
        mistakes.append(("lse has the sinks in it",
                         np.logaddexp(right, problem.sinks[:, None])))
    for text, wrong in mistakes:
        differs = _lse_errors(right, wrong, nan_rows, empty_lse).max() > limit
        if differs and _lse_errors(wrong, lse, nan_rows, empty_lse).max() <= limit:
            return text
    return ""
