#!/usr/bin/env python3
"""Compares two results of `fovea bench --json`: compare.py BEFORE.json AFTER.json

Prints each case that both have: time before and after, how many times faster it became, and the shares of its
limit. Shares are what two runs on a shared machine can be compared by: each run measured its own limits.
"""
import json
import sys


def cases_of(path):
    with open(path, encoding="utf-8") as file:
        return {case["case"]: case for case in json.load(file)["cases"]}


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    before, after = cases_of(sys.argv[1]), cases_of(sys.argv[2])
    names = [name for name in after if name in before]
    if not names:
        sys.exit(f"compare.py: {sys.argv[1]} and {sys.argv[2]} have no case in common")
    width = max(map(len, names))
    print(f"{'case':{width}}  {'before us':>12}  {'after us':>12}  {'faster':>7}  % of limit")
    for name in names:
        a, b = before[name], after[name]
        shares = [f"{case['percent_of_limit']:.1f}" for case in (a, b) if "percent_of_limit" in case]
        print(f"{name:{width}}  {a['time_us']:12.1f}  {b['time_us']:12.1f}  "
              f"{a['time_us'] / b['time_us']:6.2f}x  {' -> '.join(shares)}")
    for name in sorted(before.keys() ^ after.keys()):
        print(f"only {'before' if name in before else 'after'}: {name}")


if __name__ == "__main__":
    main()
