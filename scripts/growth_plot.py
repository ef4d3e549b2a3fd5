"""Plots the results of `make growth`: python3 scripts/growth_plot.py TABLE.csv PICTURE.svg

Prints the same as Markdown tables. Both axes of each plot are logarithmic: linear
growth is a line with the slope of the grey line.
"""

import csv
import html
import math
import sys

WIDTH, HEIGHT, MARGIN = 400, 280, 48  # of one picture, pixels
COLOURS = ["#1b6ca8", "#c2410c", "#15803d", "#7e22ce", "#0f766e"]
NAMES = {"decision work, us": "work", "decision kv, us": "kv", "decision standalone, us": "standalone",
         "lookup, us": "lookup", "store and remove, us": "store and remove"}
DECISIONS = ["decision work, us", "decision kv, us", "decision standalone, us"]
INDEX = ["lookup, us", "store and remove, us"]


def read(path):
    """what -> (workers, blocks) -> value."""
    table = {}
    with open(path, newline="") as f:
        for what, workers, blocks, value in csv.reader(f):
            if float(value) > 0:  # below what was measured in; a logarithmic axis has no place for it
                table.setdefault(what, {})[int(workers), int(blocks)] = float(value)
    return table


def curve(table, what, over, fixed):
    """Points of one measure, over workers (at the most blocks) or over blocks (at fixed workers)."""
    values = table.get(what, {})
    if over == "workers":
        most = max((b for _, b in values), default=0)
        return sorted((n, v) for (n, b), v in values.items() if b == most)
    return sorted((b, v) for (n, b), v in values.items() if n == fixed)


def ticks(low, high):
    return [10.0**e for e in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]


def number(x):
    for size, unit in ((1e6, " M"), (1e3, " k")):
        if x >= size and x % (size / 10) == 0:
            return f"{x / size:g}{unit}"
    return f"{x:,.0f}" if x >= 1e3 else f"{x:g}"


def picture(left, top, title, x_title, lines):
    """One picture; lines are (name, points)."""
    lines = [(name, points) for name, points in lines if points]
    xs = [x for _, points in lines for x, _ in points]
    y_ticks = ticks(min(y for _, points in lines for _, y in points), max(y for _, points in lines for _, y in points))
    x_low, x_high, y_low, y_high = min(xs), max(xs), y_ticks[0], y_ticks[-1]
    x0, y0, w, h = left + MARGIN, top + HEIGHT - MARGIN, WIDTH - 2 * MARGIN, HEIGHT - 2 * MARGIN

    def place(x, y):
        return x0 + w * math.log(x / x_low) / math.log(x_high / x_low), y0 - h * math.log(y / y_low) / math.log(y_high / y_low)

    out = [f'<text x="{left + 8}" y="{top + 18}" font-weight="bold">{html.escape(title)}</text>',
           f'<text x="{x0 + w / 2:.0f}" y="{top + HEIGHT - 10}" text-anchor="middle">{x_title}</text>']
    for y in y_ticks:
        _, py = place(x_low, y)
        out.append(f'<path d="M{x0} {py:.1f}h{w}" stroke="#ddd"/><text x="{x0 - 5}" y="{py + 4:.1f}" text-anchor="end">{number(y)}</text>')
    for x in sorted(set(xs)):
        px, _ = place(x, y_low)
        out.append(f'<path d="M{px:.1f} {y0}v{-h}" stroke="#ddd"/><text x="{px:.1f}" y="{y0 + 15}" text-anchor="middle">{number(x)}</text>')
    # In proportion: from the middle of the lowest line, as far as there is room.
    x1, y1 = lines[0][1][0]
    end = min(x_high / x1, y_high / y1)
    (ax, ay), (bx, by) = place(x1, y1), place(x1 * end, y1 * end)
    out.append(f'<path d="M{ax:.1f} {ay:.1f}L{bx:.1f} {by:.1f}" stroke="#bbb" stroke-dasharray="4 3"/>')
    for i, (name, points) in enumerate(lines):
        path = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in points)
        out.append(f'<polyline fill="none" stroke="{COLOURS[i]}" stroke-width="2" points="{path}"/>')
        out += ['<circle cx="{:.1f}" cy="{:.1f}" r="3" fill="{}"/>'.format(*place(x, y), COLOURS[i]) for x, y in points]
        out.append(f'<text x="{left + WIDTH - 8}" y="{top + 18 + 14 * i}" text-anchor="end" fill="{COLOURS[i]}">{html.escape(name)}</text>')
    return "\n".join(out)


def draw(table):
    most = max(n for n, _ in table["lookup, us"])
    named = lambda whats, over, fixed=0: [(NAMES.get(what, what), curve(table, what, over, fixed)) for what in whats]
    pictures = [
        ("CPU of a decision, us", "workers", named(DECISIONS, "workers")),
        (f"the same, {most} workers", "blocks", named(DECISIONS, "blocks", most)),
        ("index, 62 blocks, us", "workers", named(INDEX, "workers")),
        (f"the same, {most} workers", "blocks", named(INDEX, "blocks", most)),
        ("a router without requests", "workers", named(["idle CPU, % of a core", "resident, MB", "/metrics, ms", "start, s"], "workers")),
        ("KV events of all workers", "workers", named(["KV events a second of CPU"], "workers")),
    ]
    rows = math.ceil(len(pictures) / 2)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * WIDTH}" height="{rows * HEIGHT}" font-family="sans-serif" font-size="11">',
             '<rect width="100%" height="100%" fill="#fff"/>']
    parts += [picture(i % 2 * WIDTH, i // 2 * HEIGHT, *p) for i, p in enumerate(pictures)]
    return "\n".join(parts + ["</svg>\n"])


def tables(table):
    """The measures as Markdown, a column for each number of workers."""
    workers = sorted({n for values in table.values() for n, _ in values})
    print("| | blocks | " + " | ".join(f"{n} workers" for n in workers) + " |\n|" + "---|" * (len(workers) + 2))
    for what, values in table.items():
        sizes = sorted({b for _, b in values})
        for b in sizes:
            cells = " | ".join(f"{values[n, b]:.4g}" if (n, b) in values else "" for n in workers)
            print(f"| {what} | {number(b) if b else ''} | {cells} |")


if __name__ == "__main__":
    measured = read(sys.argv[1])
    with open(sys.argv[2], "w") as f:
        f.write(draw(measured))
    tables(measured)
