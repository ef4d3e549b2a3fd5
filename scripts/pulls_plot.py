#!/usr/bin/env python3
"""Draws docs/pulls.svg from the --csv file of the grid testdata/grids/pulls.toml.

Mean time to first token with pulls and of placement by load, relative to affinity alone,
over the bandwidth of pulls: a row for each trace, a panel for each number of requests in
flight.
"""
import csv
import math
import re
import sys

TRACES = {"synt": "synthetic trace", "conv": "conversation trace"}
COLOURS = {"pull": "#1f77b4", "load-first": "#d62728"}
BANDWIDTHS = (1, 2, 5, 10, 25, 50)
WIDTH, HEIGHT, LEFT, TOP, GAP, FOOT = 300, 240, 60, 40, 40, 90
LEAST, MOST = 0.5, 40.0


def text(x, y, words, more=""):
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{words}</text>'


def panel(left, top, title, policies):
    """Returns the elements of one panel; policies has the first tokens by bandwidth."""

    def at(bandwidth, ratio):
        """Returns the pixel of a bandwidth and a ratio; both axes are logarithmic."""
        return left + math.log(bandwidth) / math.log(50) * WIDTH, top + (1 - math.log(ratio / LEAST) / math.log(MOST / LEAST)) * HEIGHT

    middle = 'text-anchor="middle"'
    out = [text(left + WIDTH / 2, top - 12, title, middle + ' font-weight="bold"')]
    for ratio in (0.5, 1, 2, 4, 8, 16, 32):
        _, y = at(1, ratio)
        out.append(f'<path d="M{left} {y:.1f}h{WIDTH}" stroke="{"#333" if ratio == 1 else "#ddd"}"/>')
        if left == LEFT:
            out.append(text(left - 6, y + 4, f"{ratio:g}", 'text-anchor="end"'))
    for bandwidth in BANDWIDTHS:
        x, _ = at(bandwidth, 1)
        out += [f'<path d="M{x:.1f} {top}v{HEIGHT}" stroke="#eee"/>', text(x, top + HEIGHT + 16, bandwidth, middle)]
    out.append(text(left + WIDTH / 2, top + HEIGHT + 34, "bandwidth of pulls, GB/s", middle))
    for name, colour in COLOURS.items():
        points = [at(b, policies[name][b] / policies["affinity"][b]) for b in BANDWIDTHS]
        out.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>')
        out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
        if left == LEFT:
            x, y = points[1]
            out.append(text(x + 12, y - 8, name, f'fill="{colour}"'))
    if left == LEFT:
        out.append(text(left + WIDTH, at(1, 1)[1] + 18, "affinity = 1", 'text-anchor="end"'))
    return out


def main():
    source, target = sys.argv[1:]
    figures = {}
    with open(source, newline="") as file:
        for row in csv.DictReader(file):
            trace, flight, bandwidth = re.search(r"(\w+) c(\d+) .*peerbw(\d+)", row["load"]).groups()
            figures.setdefault(trace, {}).setdefault(int(flight), {}).setdefault(row["policy"], {})[int(bandwidth)] = float(row["ttft_mean_ms"])
    width = LEFT + max(map(len, figures.values())) * (WIDTH + GAP)
    height = TOP + len(figures) * (HEIGHT + FOOT)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="12">',
           '<rect width="100%" height="100%" fill="white"/>']
    for i, (trace, panels) in enumerate(figures.items()):
        top = TOP + i * (HEIGHT + FOOT)
        for j, (flight, policies) in enumerate(sorted(panels.items())):
            out += panel(LEFT + j * (WIDTH + GAP), top, f"{TRACES[trace]}, {flight} in flight", policies)
        y = top + HEIGHT / 2
        out.append(text(14, y, "mean first token, relative to affinity", f'transform="rotate(-90 14 {y})" text-anchor="middle"'))
    with open(target, "w") as file:
        file.write("\n".join([*out, "</svg>"]) + "\n")


if __name__ == "__main__":
    main()
