#!/usr/bin/env python3
"""Draws random synthetic loads for a grid (scripts/grid.py): each quantity is uniform or log-uniform between two
bounds. A seed always gives the same loads. testdata/grids/holdout.toml was drawn with the seed in its first lines; its
results were not used in the design of the policies.

Half of the loads are closed: a fixed number of conversations is in flight. The others are open: conversations begin at
random times, at a rate that keeps a drawn number of requests in flight on each worker, up to the capacity of its engine
(docs/benchmarks.md).
"""

import argparse
import math
import random


def log_even(rng, least, most):
    return math.exp(rng.uniform(math.log(least), math.log(most)))


def rounded(x):
    """x rounded to two significant digits."""
    digits = 1 - int(math.floor(math.log10(x)))
    return round(x, digits) if digits > 0 else int(round(x, digits))


def rate(workers, in_flight, groups, prefix, user, output, turns):
    """Conversations a second that keep so many requests in flight on each worker with the default engine: 5.74 to 33.99 ms a
    pass of decoding by the share of 16,384 blocks of 64 tokens, 16.5 ms and 0.0152 ms a token for a prompt."""
    context = prefix + (user + output) * turns
    share = min(1.0, in_flight * context / (16384 * 64))
    decode = output * (5.74 + 54.01 * share - 25.74 * share**2)
    missed = prefix * (0.3 if groups * prefix > 4 * 16384 * 64 else 0.02)
    prefill = 16.5 + 0.0152 * (user + missed)
    busy = 0.6 / prefill  # requests a ms that may be computed at all
    return 1000 * workers * min(in_flight / (decode + prefill), busy) / turns


def draw(rng):
    groups = round(log_even(rng, 3, 1000))
    prefix, output = rounded(log_even(rng, 500, 16000)), rounded(log_even(rng, 20, 800))
    user = rounded(log_even(rng, 50, 1500))
    workers, turns = rng.choice([2, 4, 6, 8, 12, 16, 24, 32]), rng.choice([1, 3, 5, 8])
    think = rng.choice([0, 1, 4, 10])
    words = [f"g{groups}", f"s{round(rng.uniform(0, 1.2), 2)}", f"p{prefix}", f"u{user}", f"o{output}", f"w{workers}"]
    if rng.random() < 0.5:
        words.append(f"c{round(workers * log_even(rng, 3, 60))}")
    else:
        words.append(f"r{rounded(rate(workers, log_even(rng, 1, 20), groups, prefix, user, output, turns))}")
    return " ".join([*words, f"th{think}s", f"t{turns}", f"#{rng.randint(10, 99)}"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=32)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    for _ in range(args.count):
        print(f'  "{draw(rng)}",')


if __name__ == "__main__":
    main()
