"""What the adapters share: rounds of calls on the cases of a fovea result, and a result of the same form."""
import datetime
import json
import statistics
import sys
import time

ROUNDS = 9
SECONDS = 0.05


def fovea_result(doc):
    """The result that the first argument names: its threads, limits and amounts of work count for the peer too."""
    if len(sys.argv) != 3:
        sys.exit(doc)
    with open(sys.argv[1], encoding="utf-8") as file:
        return json.load(file)


def call_us(call):
    """Of one round: calls for SECONDS after one that does not count."""
    call()
    start, calls = time.perf_counter(), 0
    while calls == 0 or time.perf_counter() - start < SECONDS:
        call()
        calls += 1
    return (time.perf_counter() - start) / calls * 1e6


def time_and_write(fovea, peer, version, calls):
    """Times calls, {case name: function}, and writes what the second argument names."""
    if not calls:
        sys.exit(f"{sys.argv[0]}: {sys.argv[1]} has no case that the peer takes")
    rounds = [{name: call_us(call) for name, call in calls.items()} for _ in range(ROUNDS)]
    result = {"version": version, "peer": peer,
              "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
              "machine": {key: fovea["machine"][key] for key in ("processor", "features", "threads")},
              "peaks": fovea["peaks"], "rounds": {"run": ROUNDS, "steady": ROUNDS}, "cases": []}
    for case in fovea["cases"]:
        if case["case"] not in calls:
            continue
        us = statistics.median(times[case["case"]] for times in rounds)
        faster = case["time_us"] / us
        result["cases"].append({"case": case["case"], "time_us": us, "gflops": case["gflops"] * faster,
                                "gbps": case["gbps"] * faster, "limit": case["limit"],
                                "percent_of_limit": case["percent_of_limit"] * faster})
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        json.dump(result, file, indent=2)
        file.write("\n")
