#!/usr/bin/env python3
"""Draws docs/pulls.svg from the --csv file of the grid testdata/grids/pulls.yaml.

Mean time to first token with pulls and of placement by load, relative to affinity alone,
over the bandwidth of pulls: a panel for each number of requests in flight.
"""
import csv
import math
import re
import sys

COLOURS = {"pull": "#1f77b4", "load-first": "#d62728"}
WIDTH, HEIGHT, LEFT, TOP = 300, 260, 60, 40
LEAST, MOST = 0.5, 32.0


def at(x, y, panel):
    """Returns the pixel of a bandwidth and a ratio; both axes are logarithmic."""
    px = LEFT + panel * (WIDTH + 40) + math.log(x) / math.log(50) * WIDTH
    py = TOP + (1 - math.log(y / LEAST) / math.log(MOST / LEAST)) * HEIGHT
    return px, py


def main():
    source, target = sys.argv[1:]
    figures = {}
    with open(source, newline="") as file:
        for row in csv.DictReader(file):
            word = re.search(r"c(\d+) .*peerbw(\d+)", row["load"])
            figures.setdefault(int(word[1]), {}).setdefault(row["policy"], {})[int(word[2])] = float(row["ttft_mean_ms"])
    width = LEFT + len(figures) * (WIDTH + 40)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{TOP + HEIGHT + 60}" font-family="sans-serif" font-size="12">',
           '<rect width="100%" height="100%" fill="white"/>']
    for panel, (flight, policies) in enumerate(sorted(figures.items())):
        left, bottom = at(1, LEAST, panel)
        right, _ = at(50, LEAST, panel)
        out.append(f'<text x="{(left + right) / 2}" y="20" text-anchor="middle" font-weight="bold">{flight} requests in flight</text>')
        for ratio in (0.5, 1, 2, 4, 8, 16, 32):
            _, y = at(1, ratio, panel)
            out.append(f'<path d="M{left} {y}H{right}" stroke="{"#333" if ratio == 1 else "#ddd"}"/>')
            if panel == 0:
                out.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{ratio:g}</text>')
        for bandwidth in (1, 2, 5, 10, 25, 50):
            x, _ = at(bandwidth, 1, panel)
            out.append(f'<path d="M{x} {TOP}V{bottom}" stroke="#eee"/><text x="{x}" y="{bottom + 16}" text-anchor="middle">{bandwidth}</text>')
        out.append(f'<text x="{(left + right) / 2}" y="{bottom + 34}" text-anchor="middle">bandwidth of pulls, GB/s</text>')
        for name, colour in COLOURS.items():
            points = [at(b, policies[name][b] / policies["affinity"][b], panel) for b in sorted(policies[name])]
            out.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>')
            out.extend(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points)
            if panel == 0:
                x, y = points[1]
                out.append(f'<text x="{x + 12:.1f}" y="{y - 8:.1f}" fill="{colour}">{name}</text>')
        if panel == 0:
            out.append(f'<text x="{right}" y="{at(1, 1, 0)[1] + 18}" text-anchor="end">affinity = 1</text>')
    out.append(f'<text x="14" y="{TOP + HEIGHT / 2}" transform="rotate(-90 14 {TOP + HEIGHT / 2})" text-anchor="middle">mean first token, relative to affinity</text></svg>')
    with open(target, "w") as file:
        file.write("\n".join(out) + "\n")


if __name__ == "__main__":
    main()
