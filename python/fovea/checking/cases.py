"""The cases: lengths, rules and hostile bytes, each with the rule of meaning that it holds to."""

import dataclasses

SOFTMAX = "a row is the softmax of its scaled scores over the keys that it sees"
ALIGNED = "query tokens stand at the end of their sequence: the last one sees every key"
EMPTY = "a row without keys comes out as 0, with lse the empty state's"
MASKED = "what is masked never changes a result, whatever bytes it holds"
NAN = "a NaN in a visible key comes out as NaN in the rows that see it, and in no other"
SCALE = "there is one softmax scale, the one that is passed"
WINDOW = "window_left w lets a query see itself and the w keys before it"
CHUNK = "attention_chunk c lets a query see keys from the last multiple of c on"
CAP = "scaled scores s become soft_cap * tanh(s / soft_cap)"
SINK = "a sink is a raw logit that joins the denominator once, and is no part of lse"
SHARED = "sequences may share blocks"


@dataclasses.dataclass
class Case:
    name: str
    rule: str
    query_lens: list
    key_lens: list
    causal: bool = True
    window_left: int = -1
    attention_chunk: int = 0
    soft_cap: float = 0.0
    sinks: bool = False
    scale: float = 1.0      # Times the dims' sm_scale.
    score_size: float = 2.0  # Standard deviation of the scaled scores, about.
    garbage: str = "nan"    # What unused slots hold: nan, inf or large.
    nan_key: bool = False   # The first key of the second sequence.
    shared: bool = False    # The second sequence starts with the first one's blocks.

    @property
    def rules(self):
        return dict(causal=self.causal, window_left=self.window_left,
                    attention_chunk=self.attention_chunk, soft_cap=self.soft_cap)


def cases_of(adapter, dims):
    """The cases that a signature can express."""
    long = [1, 63, 64, 65, 200]
    cases = [
        Case("random lengths", SOFTMAX, [1] * 5, long),
        Case("unused slots hold infinity", MASKED, [1] * 5, long, garbage="inf"),
        Case("unused slots hold large numbers", MASKED, [1] * 5, long, garbage="large"),
        Case("several query tokens", ALIGNED, [3] * 3, [3, 40, 130]),
        Case("no mask", SOFTMAX, [3] * 3, [3, 40, 130], causal=False),
        Case("more query tokens than keys", EMPTY, [4] * 2, [2, 70]),
        Case("no keys", EMPTY, [1] * 3, [0, 33, 0]),
        Case("a NaN key", NAN, [2] * 3, [20, 70, 20], nan_key=True),
        Case("another scale", SCALE, [1] * 3, [9, 64, 100], scale=0.37),
        Case("large scores", SOFTMAX, [1] * 3, [9, 64, 100], score_size=2000.0),
        Case("window", WINDOW, [2] * 3, [5, 64, 150], window_left=6),
        Case("attention chunks", CHUNK, [2] * 3, [5, 64, 150], attention_chunk=24),
        Case("soft cap", CAP, [2] * 3, [5, 64, 150], soft_cap=1.5),
        Case("sinks", SINK, [2] * 3, [5, 64, 150], sinks=True),
        Case("shared blocks", SHARED, [1] * 2, [150, 140], shared=True),
    ]
    if not adapter.uniform_queries:
        cases.append(Case("ragged query lengths", ALIGNED, [1, 17, 5, 130], [1, 20, 130, 130]))
    return [case for case in cases if adapter.expresses(case)]
