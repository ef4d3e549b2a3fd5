#!/usr/bin/env python3
"""Runs a grid of loads with several policies through `kvrouter simulate`, and compares one policy with the others.

A grid is a TOML file such as testdata/grids/grid.toml; docs/simulation.md lists the words of a load. Prints a table for
each load, then the ratios of one policy (--of) to the best of the others in each column, by load and as geometric means.
Arguments that are not listed here are passed to each simulation. Needs Python 3.11.
"""

import argparse
import concurrent.futures
import csv
import json
import math
import os
import re
import subprocess
import sys
import time
import tomllib


def busiest(balance):
    """Returns the busy time of the busiest worker over that of the mean one."""
    times = [worker["busy"] for worker in balance]
    return max(times) * len(times) / sum(times)


def lost_share(report):
    lost = sum(report.get("lost", {}).values())
    return lost / (lost + report["requests"]) if lost else 0.0


# Columns: name in the CSV file, title of the tables (None: not shown), format, value in a report.
COLUMNS = [
    ("requests", None, "", lambda r: r["requests"]),
    ("reuse", "reuse", ".3f", lambda r: r["reuse"]),
    ("ttft_mean_ms", "TTFT ms mean", ".1f", lambda r: r["ttft_ms"]["mean"]),
    ("ttft_p99_ms", "p99", ".0f", lambda r: r["ttft_ms"]["p99"]),
    ("itl_mean_ms", "ITL ms mean", ".1f", lambda r: r["itl_ms"]["mean"]),
    ("e2e_mean_ms", "e2e ms mean", ".0f", lambda r: r["end_to_end_ms"]["mean"]),
    ("e2e_p99_ms", "p99", ".0f", lambda r: r["end_to_end_ms"]["p99"]),
    ("output_tokens_per_s", "out tok/s", ".0f", lambda r: r["output_tokens_per_s"]),
    ("busiest_to_mean_worker", "busiest / mean worker", ".2f", lambda r: busiest(r["balance"])),
    ("lost_share", "lost", ".4f", lost_share),
]
NAMES = [name for name, *_ in COLUMNS] + ["seconds"]  # seconds: the time of the run
COMPARED = {"ttft_mean_ms": "ttft", "e2e_mean_ms": "end-to-end"}  # column: its limit's key in the file
LIMITS = {"ttft": 1.06, "end-to-end": 1.01}
TENANTS = ["tenant", "tenants", "class", "weight", "requests", "lost", "computed_tokens", "answered_tokens"]

# Words of a load: its flags. {} is the value, and a word without {} takes none.
COMMON = {
    "c": "--concurrency {}", "w": "--workers {}", "lag": "--event-lag {}", "routers": "--routers {}", "untold": "--untold-cache",
    "kv": "--mock num-gpu-blocks={}", "host": "--mock host-blocks={}", "hostbw": "--mock host-bandwidth={}",
    "disk": "--mock disk-blocks={}", "diskbw": "--mock disk-bandwidth={}", "peerbw": "--mock peer-bandwidth={}",
}
TRACE = {"x": "--speedup {}"}
CHAT = {
    "g": "--synthetic-groups {}", "s": "--synthetic-skew {}", "p": "--synthetic-prefix-tokens {}",
    "u": "--synthetic-user-tokens {}", "o": "--synthetic-output-tokens {}", "r": "--synthetic-rate {}",
    "th": "--synthetic-think-time {}", "t": "--synthetic-turns {}", "n": "--synthetic-conversations {}",
    "burst": "--synthetic-burst {}", "shifts": "--synthetic-shifts {}",
}
AGENTS = {
    "g": "--agentic-kinds {}", "s": "--agentic-skew {}", "p": "--agentic-prefix-tokens {}", "u": "--agentic-task-tokens {}",
    "o": "--agentic-output-tokens {}", "r": "--agentic-rate {}", "n": "--agentic-workflows {}",
}


class Wrong(Exception):
    """A file or an argument that cannot be used."""


class Load:
    """A load of a grid: the flags of its requests and workers, and its seeds."""

    def __init__(self, text, grid, folder):
        self.text, self.flags, self.seeds, self.tenants = text, [], [], False
        words = text.split()
        traces, tenants = grid.get("traces", {}), grid.get("tenants", {})
        first = words[0] if words else ""
        if first == "agents":
            self.flags, known, words = ["--synthetic", "agentic"], COMMON | AGENTS, words[1:]
        elif first in traces:
            self.flags, known, words = ["--trace", os.path.join(folder, traces[first])], COMMON | TRACE, words[1:]
        elif re.fullmatch(r"g\d+", first):
            self.flags, known = ["--synthetic", "chat"], COMMON | CHAT
        else:
            raise Wrong(f"load {text!r}: the first word must be agents, gN (chats of N groups) or a trace: {', '.join(traces)}")
        values = {}
        for word in words:
            key, value = re.fullmatch(r"([^0-9.]*)(.*)", word).groups()
            takes = key == "#" or key == "pd" or "{}" in known.get(key, "")
            if key in values or not (takes or key in known or key[:1] == "@" and key[1:] in tenants) or takes != (value != ""):
                names = sorted([*known, "pd", "#", *("@" + name for name in tenants)])
                raise Wrong(f"load {text!r}: {word!r} is unknown, given twice or has a wrong value; known: {', '.join(names)}")
            values[key] = value
        for key, value in values.items():
            if key == "#":
                self.seeds = value.split(",")
            elif key == "pd":
                prefill, _, decode = value.partition("+")
                self.flags += ["--prefill-workers", prefill, "--decode-workers", decode]
            elif key[0] == "@":
                self.flags += ["--tenants", tenants[key[1:]]]
                self.tenants = True
            elif key == "lag":
                self.flags += ["--event-lag", repr(milliseconds(text, value))]
            else:
                self.flags += known[key].format(value).split()
        if first == "agents" and "n" not in values:  # enough that most begin after others have ended
            self.flags += ["--agentic-workflows", str(max(300, 5 * int(values.get("c", 0))))]
        elif first not in traces and "n" not in values:
            chats = math.ceil(10_000 / float(values.get("t", 5)))
            self.flags += ["--synthetic-conversations", str(max(chats, 2 * int(values.get("c", 0))))]


def milliseconds(text, value):
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s)", value)
    if not found:
        raise Wrong(f"load {text!r}: lag{value}: give a time such as 2s or 50ms")
    return float(found[1]) * (1000 if found[2] == "s" else 1)


def read_grid(name):
    """Returns the policies (name: arguments), the loads ([set, Load]) and the limits of a file."""
    with open(name, "rb") as file:
        grid = tomllib.load(file)
    for key, kind in {"traces": dict, "tenants": dict, "policies": dict, "loads": dict, "limits": dict}.items():
        if not isinstance(grid.get(key, {}), kind):
            raise Wrong(f"{key} must be a table")
    if unknown := set(grid) - {"traces", "tenants", "policies", "loads", "limits"}:
        raise Wrong(f"unknown: {', '.join(sorted(unknown))}; known are traces, tenants, policies, loads, limits")
    loads = []
    for set_name, texts in grid.get("loads", {}).items():
        if not isinstance(texts, list):
            raise Wrong(f'loads: {set_name} must be a list of loads, such as ["g3 c32"]')
        loads += [(set_name, Load(str(text), grid, os.path.dirname(name))) for text in texts]
    policies = {name: str(text).split() for name, text in grid.get("policies", {}).items()}
    if len(policies) < 2 or not loads:
        raise Wrong(f"{len(policies)} policies and {len(loads)} loads: give at least two policies and one load")
    return policies, loads, LIMITS | grid.get("limits", {})


def simulate(binary, load, policy, seed, more):
    """Runs one simulation and returns its figures, by column, and the reports of its tenants."""
    command = [binary, "simulate", "--json", *more, *load.flags, "--policy", policy[0], *policy[1:]]
    if seed is not None:
        command += ["--seed", seed]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Wrong(f"load {load.text}: {done.stderr.strip()}\n  {' '.join(command)}")
    report = json.loads(done.stdout)
    report = report[0] if isinstance(report, list) else report
    figures = {name: float(value(report)) for name, _, _, value in COLUMNS}
    return figures | {"seconds": time.monotonic() - began}, report.get("tenants", [])


def read_known(name):
    """Returns the figures of an earlier --csv file, by load and policy."""
    with open(name, newline="", encoding="utf-8") as file:
        lines = csv.DictReader(file)
        if lines.fieldnames != ["set", "load", "policy", *NAMES]:
            raise Wrong(f"--known {name}: it is not a --csv file of this version")
        return {(line["load"], line["policy"]): {name: float(line[name]) for name in NAMES} for line in lines}


def print_table(rows, left=1):
    """Prints rows of text, the first columns aligned left, the others right."""
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(max(map(len, rows)))]
    for row in rows:
        print("  ".join(f"{cell:<{widths[i]}}" if i < left else f"{cell:>{widths[i]}}" for i, cell in enumerate(row)).rstrip())
    print()


class Report:
    """The figures of all loads and policies."""

    def __init__(self, policies, of, limits):
        self.policies, self.of, self.limits, self.rows = policies, of, limits, []

    def to_best(self, means, column):
        """Returns the ratio of the compared policy to the best of the others, and which that is."""
        own, others = means[self.of], []
        for name, figures in means.items():
            # A policy that loses more requests is not better for serving the others sooner.
            if name != self.of and figures["lost_share"] <= own["lost_share"]:
                others.append((figures[column], name))
        if not others:
            return 1.0, ""
        least, best = min(others)
        return own[column] / least, best

    def beyond(self, means):
        return ", ".join(key for column, key in COMPARED.items() if self.to_best(means, column)[0] > self.limits[key])

    def add(self, set_name, load, means, tenants):
        """Prints the table of a load."""
        self.rows.append((set_name, load, means))
        seconds = sum(figures["seconds"] for figures in means.values())
        print(f"{set_name}: {load.text} ({means[self.of]['requests']:.0f} requests, {seconds:.1f} s)\n")
        shown = [column for column in COLUMNS if column[1]]
        print_table([["policy", *(title for _, title, _, _ in shown)]]
                    + [[name, *(format(figures[column], form) for column, _, form, _ in shown)] for name, figures in means.items()])
        if load.tenants:
            rows = [["policy", *TENANTS, "TTFT ms p50", "p99"]]
            for name, reports in tenants.items():
                for group in reports:
                    ttft = group["ttft_ms"]
                    rows.append([name, *(str(group[key]) for key in TENANTS), f"{ttft['p50']:.0f}", f"{ttft['p99']:.0f}"])
            print_table(rows, left=2)
        (ttft, first), (end, second) = (self.to_best(means, column) for column in COMPARED)
        beyond = self.beyond(means)
        print(f"{self.of} to the best of the others: TTFT {ttft:.3f} ({first}), e2e {end:.3f} ({second})"
              f"{'; beyond its limit: ' + beyond if beyond else ''}\n", flush=True)

    def sums(self):
        """Prints all loads, and the geometric means of each set and of all."""
        rows = [[self.of, "TTFT ms", "e2e ms", "TTFT to the best", "of", "e2e to the best", "of", "beyond"]]
        for _, load, means in self.rows:
            (ttft, first), (end, second) = (self.to_best(means, column) for column in COMPARED)
            own = means[self.of]
            rows.append([load.text, f"{own['ttft_mean_ms']:.1f}", f"{own['e2e_mean_ms']:.0f}", f"{ttft:.3f}", first, f"{end:.3f}", second, self.beyond(means)])
        print_table(rows)
        sets = {}
        for set_name, _, means in self.rows:
            sets.setdefault(set_name, []).append(means)
        if len(sets) > 1:
            sets["all"] = [means for _, _, means in self.rows]
        rows = [["geometric means", "rows"]]
        for title, (column, key) in zip(("TTFT", "e2e"), COMPARED.items()):
            rows[0] += [f"{title} to the best", "worst", f"above {self.limits[key]:g}"]
        for name, all_means in sets.items():
            row = [name, str(len(all_means))]
            for column, key in COMPARED.items():
                ratios = [self.to_best(means, column)[0] for means in all_means]
                row += [f"{geometric(ratios):.3f}", f"{max(ratios):.3f}", str(sum(ratio > self.limits[key] for ratio in ratios))]
            rows.append(row)
        print_table(rows)
        rows = [["TTFT, e2e to", *sets]]
        for other in self.policies:
            if other != self.of:
                rows.append([other] + [", ".join(f"{geometric([m[self.of][column] / m[other][column] for m in all_means]):.3f}"
                                                 for column in COMPARED) for all_means in sets.values()])
        print_table(rows)

    def write(self, name):
        with open(name, "w", newline="", encoding="utf-8") as file:
            lines = csv.writer(file, lineterminator="\n")
            lines.writerow(["set", "load", "policy", *NAMES])
            for set_name, load, means in self.rows:
                for policy, figures in means.items():
                    lines.writerow([set_name, load.text, policy, *(f"{figures[column]:.17g}" for column in NAMES)])


def geometric(ratios):
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("grid", help="TOML file of loads and policies")
    parser.add_argument("--binary", default="./kvrouter", help="kvrouter to run (default: %(default)s)")
    parser.add_argument("--of", default="work", help="policy to compare with the best of the others (default: %(default)s)")
    parser.add_argument("--only", default="", help="run only loads whose name or set name contains this text")
    parser.add_argument("--known", help="earlier --csv file; its results of the other policies are reused")
    parser.add_argument("--csv", help="file for the figures of each load and policy")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="number of concurrent runs (default: number of cores)")
    args, more = parser.parse_known_args()
    policies, loads, limits = read_grid(args.grid)
    loads = [(name, load) for name, load in loads if args.only in name or args.only in load.text]
    if not loads:
        raise Wrong(f"--only {args.only}: no load or set contains it")
    if args.of not in policies:
        raise Wrong(f"--of {args.of}: the grid has no policy of that name")
    known = read_known(args.known) if args.known else {}
    report = Report(policies, args.of, limits)
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        runs = []
        for _, load in loads:
            runs.append({name: [pool.submit(simulate, args.binary, load, policy, seed, more) for seed in load.seeds or [None]]
                         for name, policy in policies.items() if name == args.of or (load.text, name) not in known})
        try:
            for (set_name, load), row in zip(loads, runs):
                means, tenants = {}, {}
                for name in policies:
                    if name not in row:
                        means[name] = known[load.text, name]
                        continue
                    results = [run.result() for run in row[name]]
                    means[name] = {column: sum(figures[column] for figures, _ in results) / len(results) for column in NAMES}
                    tenants[name] = [group for _, groups in results for group in groups]
                report.add(set_name, load, means, tenants)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    report.sums()
    if args.csv:
        report.write(args.csv)


if __name__ == "__main__":
    try:
        main()
    except (Wrong, OSError, tomllib.TOMLDecodeError) as error:
        sys.exit(f"grid.py: {error}")
