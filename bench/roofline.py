#!/usr/bin/env python3
"""Draws a result of `fovea bench --json` under the limits of its run: roofline.py RESULT.json OUT.png

Needs matplotlib. Lines are the measured peaks of arithmetic and of reading; a point is a case.
"""
import json
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator, NullLocator


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    with open(sys.argv[1], encoding="utf-8") as file:
        result = json.load(file)
    peaks = result["peaks"]
    cases = [case for case in result["cases"] if case["gflops"] > 0 and case["gbps"] > 0]
    if not cases:
        sys.exit(f"roofline.py: {sys.argv[1]} has no case that both computes and reads")
    intensity = [case["gflops"] / case["gbps"] for case in cases]

    figure, axes = plt.subplots(figsize=(12, 7))
    low, high = min(intensity) / 2, max(intensity) * 2
    for name, label in (("f32_fma_gflops", "f32 FMA"), ("bf16_dot_gflops", "bf16 dot products")):
        peak = peaks[name]
        if peak <= 0:
            continue
        xs = sorted({low, min(max(peak / peaks["read_gbps"], low), high), high})
        axes.plot(xs, [min(x * peaks["read_gbps"], peak) for x in xs], label=f"{label}: {peak:.0f} GFLOP/s")
    # Names would cover each other: numbers stand beside the points, names in the legend.
    by_intensity = sorted(zip(intensity, cases), key=lambda point: point[0])
    for number, (x, case) in enumerate(by_intensity, start=1):
        name = f"{number}  {case['case']}: {case['percent_of_limit']:.0f} %"
        axes.plot(x, case["gflops"], "ko", markersize=4, label=name)
        axes.annotate(str(number), (x, case["gflops"]), fontsize=8, textcoords="offset points",
                      xytext=(5, 3) if number % 2 else (-5, -10))
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="GFLOP/s")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(NullLocator())
    axes.grid(linewidth=0.2)
    machine = result["machine"]
    axes.set_title(f"{machine['processor']}, {machine['threads']} threads, {machine['isa']}, "
                   f"reads {peaks['read_gbps']:.1f} GB/s ({result['date']})", fontsize=9)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=7, handlelength=1)
    figure.tight_layout()
    figure.savefig(sys.argv[2], dpi=100)


if __name__ == "__main__":
    main()
