#!/usr/bin/env python3
"""Computes sequence.json.gz: what the NeMo Agent Toolkit's router answers and learns.

Run: python3 sequence.py | gzip -9n > sequence.json.gz (the standard library is enough). It makes
up 1,200 requests with their feedback and follows the published rule (docs/routing.md,
thompson, without fixes) from the first to the last, with the state that the rule
keeps: pins, pending decisions, beliefs, latencies. It shares no code with the router.
Chance comes from splitmix64 on both sides.
"""
import heapq
import json
import math

DECISIONS, WORKERS, BLOCK, DIM, SEED = 1200, 3, 64, 9, 15
LEVELS = ["LOW", "MEDIUM", "HIGH"]
COST = dict(LOW=1.0, MEDIUM=2.0, HIGH=3.0)
FACTOR = dict(LOW=1.5, MEDIUM=1.0, HIGH=0.6)
TIMEOUT, SWEEP = 120_000, 5_000  # ms


class Chance:
    def __init__(self, seed):
        self.state = seed

    def uniform(self):
        mask = (1 << 64) - 1
        self.state = (self.state + 0x9E3779B97F4A7C15) & mask
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return ((z ^ (z >> 31)) >> 11) / (1 << 53)

    def normal(self):
        """Of mean 0 and variance 1, which is all that the arithmetic asks for."""
        return (self.uniform() - 0.5) * math.sqrt(12)

    def below(self, n):
        return int(self.uniform() * n)

    def pick(self, values):
        return values[self.below(len(values))]


def cholesky(a):
    n = len(a)
    low = [[0.0] * n for _ in range(n)]
    for i in range(n):
        for j in range(i + 1):
            rest = a[i][j] - sum(low[i][k] * low[j][k] for k in range(j))
            low[i][j] = math.sqrt(rest) if i == j else rest / low[j][j]
    return low


def solve_lower(low, b):
    y = []
    for i, row in enumerate(low):
        y.append((b[i] - sum(row[k] * y[k] for k in range(i))) / row[i])
    return y


def solve_upper(low, b):
    """Solves with the transpose of low."""
    n = len(b)
    y = [0.0] * n
    for i in reversed(range(n)):
        y[i] = (b[i] - sum(low[k][i] * y[k] for k in range(i + 1, n))) / low[i][i]
    return y


class Belief:
    def __init__(self):
        self.alpha = self.beta = 1.0
        self.A = [[float(i == j) for j in range(DIM)] for i in range(DIM)]
        self.b = [0.0] * DIM

    def learn(self, x, reward, keep=0.995):
        self.alpha += reward
        self.beta += 1 - reward
        for i in range(DIM):
            for j in range(DIM):
                self.A[i][j] = keep * self.A[i][j] + x[i] * x[j] + (1 - keep) * (i == j)
            self.b[i] = keep * self.b[i] + reward * x[i]

    def sample(self, x, z):
        low = cholesky([[v + 1e-9 * (i == j) for j, v in enumerate(row)] for i, row in enumerate(self.A)])
        mean = solve_upper(low, solve_lower(low, self.b))
        noise = solve_upper(low, z)
        return sum((m + 0.25 * e) * f for m, e, f in zip(mean, noise, x))


class Router:
    def __init__(self, chance):
        self.chance = chance
        self.beliefs = [Belief() for _ in range(WORKERS)]
        self.counted = {}  # series: [total, processed]
        self.pins = {}  # series: (worker, R, D, P, F)
        self.pending = {}  # decision: (worker, x, osl, bin, began)
        self.usual = {}
        self.swept = -10 * SWEEP
        self.timeouts = 0

    def remaining(self, request, series):
        if "budget" in request:
            return max(0, request["budget"])
        count = self.counted.setdefault(series, [0, 0])
        count[0] = max(count[0], request["total"])
        count[1] += 1
        left = max(count[0] - count[1], 0)
        if left == 0:
            del self.counted[series]
        return left

    def outstanding(self, worker):
        return sum(r * (d + max(p, 0)) * f for w, r, d, p, f in self.pins.values() if w == worker)

    def features(self, worker, load, overlap, last, R, D, P, F):
        g, q = load
        return [1.0, 1 / (1 + 1.0 * g + 1.5 * q), overlap, 1.0 if last == worker else 0.0, math.tanh(0.1 * self.outstanding(worker)),
                D / 3, math.tanh(P), F / 1.5, math.tanh(0.25 * R)]

    def sweep(self, now):
        if now - self.swept < SWEEP:
            return
        self.swept = now
        for number in [n for n, d in self.pending.items() if now - d[4] >= TIMEOUT]:
            worker, x, _, _, _ = self.pending.pop(number)
            self.beliefs[worker].learn(x, 0.0)
            self.timeouts += 1

    def decide(self, number, request):
        now = request["t"]
        self.sweep(now)
        series = request["id"] or f"auto-{number}"
        R = self.remaining(request, series)
        D, F = COST[request["osl"]], FACTOR[request["iat"]]
        last = self.pins[series][0] if series in self.pins else None
        seen = {}
        scores = []
        for worker, fresh, usage, waiting, cached in request["workers"]:
            p = sum(d[0] == worker for d in self.pending.values())
            load = (usage, max(waiting, p)) if fresh else (min(1.0, p / 20), p)
            blocks = request["tokens"] // BLOCK
            o = cached / blocks if blocks else 0.0
            P = request["tokens"] * (1 - o) / 1024
            seen[worker] = (load, o, P)
            x = self.features(worker, load, o, last, R, D, P, F)
            z = [self.chance.normal() for _ in range(DIM)]
            s = self.beliefs[worker].sample(x, z) + 0.1 / (1 + R * F) * self.chance.uniform()
            if last == worker and R > 0:
                s += (0.30 + 0.08 * R + 0.20 * F) * (0.5 + 0.5 * o)
            if last is not None and last != worker and R > 0:
                s -= 0.10 + 0.04 * R + 0.03 * F
            g, q = load
            M = 1 / (1 + 1.0 * g + 1.5 * q + 0.45 * self.outstanding(worker) + 0.40 * (D + P) * g + 0.20 * (D + P) * q)
            if last == worker and R > 0:
                M = max(M, 0.01)
            scores.append(s * M)
        T = min(max(1 / (1 + R * F), 0.15), 2.0)
        weights = [math.exp((s - max(scores)) / T) for s in scores]
        draw, reach, chosen = self.chance.uniform(), 0.0, 0
        for i, weight in enumerate(weights):
            reach += weight / sum(weights)
            if draw <= reach:
                chosen = i
                break
        worker = request["workers"][chosen][0]
        load, o, P = seen[worker]
        if R > 0:
            self.pins[series] = (worker, R, D, P, F)
        else:
            self.pins.pop(series, None)
        x = self.features(worker, load, o, last, R, D, P, F)  # with the pin that was just set
        size = "LOW" if P < 0.25 else "MEDIUM" if P < 0.75 else "HIGH"
        self.pending[number] = (worker, x, request["osl"], size, now)
        return scores, worker, x

    def feedback(self, number, latency, out, success):
        if number not in self.pending:
            return None
        worker, x, osl, size, _ = self.pending.pop(number)
        per_token = out > 0
        metric = latency / out if per_token else latency
        levels = [(worker, osl, size, per_token), (worker, per_token), (per_token,)]
        baseline = next((self.usual[k] for k in levels if k in self.usual), max(1.0, metric))
        reward = 1 / (1 + metric / max(1e-3, baseline)) if success else 0.0
        if success:
            for k in levels:
                self.usual[k] = 0.2 * metric + 0.8 * self.usual[k] if k in self.usual else metric
        self.beliefs[worker].learn(x, reward)
        return worker, reward, baseline


def make_request(c, now):
    series = c.below(20)
    tokens = c.pick([0, 40, 200, 1000, 3000, 9000])
    r = dict(t=now, id="" if series < 2 else f"s{series}", osl=c.pick(LEVELS), iat=c.pick(LEVELS), tokens=tokens)
    if series < 10:
        r["total"] = c.pick([1, 1, 2, 4, 9])
    else:
        r["budget"] = c.pick([0, 0, 1, 3, 9])
    present = [w for w in range(WORKERS) if c.uniform() < 0.93] or [0]
    r["workers"] = [[w, c.uniform() < 0.8, round(c.uniform(), 3), c.below(4), c.below(tokens // BLOCK + 1)] for w in present]
    return r


def make_feedback(c, now, number):
    """When a decision's end is told, in ms, and what; None: never."""
    latency = round(c.uniform() * 4000 + 20, 3)
    if c.uniform() < 0.04:
        latency = round(116_000 + c.uniform() * 12_000, 3)  # about when it is given up
    how = c.pick(["finished"] * 16 + ["failed"] * 2 + ["left"] * 2)
    return (now + math.ceil(latency), number, latency, c.pick([0, 1, 7, 150]), how)


def short(v):
    return float(f"{v:.12g}") if isinstance(v, float) else [short(e) for e in v]


def main():
    story, router, steps, due, now = Chance(SEED + 1), Router(Chance(SEED)), [], [], 0
    for number in range(1, DECISIONS + 1):
        now += story.below(600)
        while due and (due[0][0] <= now):
            at, of, latency, out, how = heapq.heappop(due)
            step = dict(t=at, of=of, end=how, ms=latency, out=out)
            if how != "left":
                result = router.feedback(of, latency, out, how == "finished")
                step["known"] = result is not None
                if result:
                    w = router.beliefs[result[0]]
                    step.update(worker=result[0], reward=short(result[1]), baseline=short(result[2]), alpha=short(w.alpha), beta=short(w.beta))
            steps.append(step)
        request = make_request(story, now)
        scores, worker, x = router.decide(number, request)
        request.update(scores=short(scores), chosen=worker, x=short(x), timeouts=router.timeouts)
        if number % 200 == 0:
            request["beliefs"] = [dict(alpha=short(w.alpha), beta=short(w.beta), b=short(w.b), a=short(w.A)) for w in router.beliefs]
        steps.append(request)
        heapq.heappush(due, make_feedback(story, now, number))
    print("[" + ",\n".join(json.dumps(s, separators=(",", ":")) for s in steps) + "]")


if __name__ == "__main__":
    main()
