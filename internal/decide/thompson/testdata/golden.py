#!/usr/bin/env python3
"""Computes golden.json: what the formulas of docs/routing.md (thompson) give.

Run: python3 golden.py > golden.json (needs numpy). It shares no code with the
router: workers fade eagerly, matrices are whole, and theta is computed before
it meets the features. Draws are inputs, so no chance is compared.
"""
import json
import math

import numpy as np

NAMES = ["worker-baseline", "forgetting", "load-sign", "outstanding", "pin-ttl", "feedback", "cold-start"]
STATES = 64
DIM = 9

# The original's parameters (config.yaml).
CONFIG = dict(
    aff_base=0.30, aff_reuse=0.08, aff_iat=0.20, floor=0.01, ts=0.10, t_base=1.0, t_min=0.15, t_max=2.0,
    sw_base=0.10, sw_reuse=0.04, sw_iat=0.03, wq=1.5, wg=1.0, wo=0.45, cg=0.40, cq=0.20,
    scale=1024.0, weight=1.0, lam=1.0, v=0.25, forget=0.995, alpha=0.2,
)
DECODE = {"LOW": 1.0, "MEDIUM": 2.0, "HIGH": 3.0}
IAT = {"LOW": 1.5, "MEDIUM": 1.0, "HIGH": 0.6}
# Of the fixes.
LOAD_WEIGHT, FADE, PRIOR_WEIGHT, COOL = 0.25, 4, 8, 1 / 3
PRIOR = np.array([0.5, 0, 0.5, 0, 0, 0, -0.3, 0, 0])

rng = np.random.default_rng(20)


def rnd(low, high, digits=4):
    return round(float(rng.uniform(low, high)), digits)


def level():
    return str(rng.choice(["LOW", "MEDIUM", "HIGH"]))


class Bandit:
    def __init__(self, fixes):
        self.cold = "cold-start" in fixes
        self.lam = CONFIG["lam"] * (PRIOR_WEIGHT if self.cold else 1)
        self.theta = PRIOR if self.cold else np.zeros(DIM)
        self.A = self.lam * np.eye(DIM)
        self.b = self.lam * self.theta
        self.alpha = self.beta = 1.0

    def keep(self, f):
        self.A = f * self.A + (1 - f) * self.lam * np.eye(DIM)
        self.b = f * self.b + (1 - f) * self.lam * self.theta

    def keep_mean(self, f):
        self.alpha, self.beta = 1 + f * (self.alpha - 1), 1 + f * (self.beta - 1)

    def learn(self, x, r):
        self.A = self.A + np.outer(x, x)
        self.A = 0.5 * (self.A + self.A.T)
        self.b = self.b + r * x
        self.alpha += r
        self.beta += 1 - r

    def sample(self, x, z):
        L = np.linalg.cholesky(self.A + 1e-9 * np.eye(DIM))
        mu = np.linalg.solve(L.T, np.linalg.solve(L, self.b))
        theta = mu + CONFIG["v"] * np.linalg.solve(L.T, z)
        return float(theta @ x)


def update(bandits, fixes, w, x, r):
    if "forgetting" in fixes:
        gamma = CONFIG["forget"] ** min(1, FADE / len(bandits))
        for b in bandits:
            b.keep(gamma)
            b.keep_mean(gamma)
    else:
        bandits[w].keep(CONFIG["forget"])
    bandits[w].learn(x, r)


def prefill_cost(tokens, overlap):
    return tokens * (1 - overlap) / CONFIG["scale"] * CONFIG["weight"]


def decide(state, bandits, fixes):
    c = CONFIG
    D, F, R = DECODE[state["osl"]], IAT[state["iat"]], state["budget"]
    blocks = state["tokens"] // state["block_size"]
    work = [0.0] * len(bandits)
    for pin in state["pins"]:
        reuse = min(pin["reuse"], 1) if "outstanding" in fixes else pin["reuse"]
        work[pin["worker"]] += reuse * (pin["decode"] + pin["prefill"]) * pin["iat"]
        if "outstanding" in fixes and pin is state["pins"][0]:
            own = work[pin["worker"]]  # it is the first one there
    last = state["pins"][0]["worker"] if state["pins"] else None
    if last is not None and "outstanding" in fixes:
        work[last] = max(0, work[last] - own)
    T = min(max(c["t_base"] / (1 + R * F), c["t_min"]), c["t_max"])
    if "cold-start" in fixes:
        T = COOL * c["t_min"]
    out, scores = [], []
    for w, worker in enumerate(state["workers"]):
        p = worker["waits"]
        g, q = (worker["usage"], max(worker["waiting"], p)) if worker["fresh"] else (min(1, p / 20), p)
        o = worker["overlap"] / blocks if blocks else 0.0
        P = prefill_cost(state["tokens"], o)
        J, O = D + P, work[w]
        stays = last == w
        x = np.array([1, 1 / (1 + c["wg"] * g + c["wq"] * q), o, 1.0 if stays else 0.0, math.tanh(0.1 * O), D / 3,
                      math.tanh(P), F / 1.5, math.tanh(0.25 * R)])
        lin = bandits[w].sample(x, np.array(worker["z"]))
        s = lin + c["ts"] / (1 + R * F) * worker["e"]
        if stays and R > 0:
            s += (c["aff_base"] + c["aff_reuse"] * R + c["aff_iat"] * F) * (0.5 + 0.5 * o)
        if last is not None and not stays and R > 0:
            s -= c["sw_base"] + c["sw_reuse"] * R + c["sw_iat"] * F
        load = c["wg"] * g + c["wq"] * q + c["wo"] * max(0, O) + c["cg"] * J * g + c["cq"] * J * q
        M = 1 / (1 + max(0, load))
        if stays and R > 0:
            M = max(M, c["floor"])
        s = s + LOAD_WEIGHT * math.log(M) if "load-sign" in fixes else s * M
        scores.append(s)
        out.append(dict(x=x.tolist(), linear=lin, load=M, score=s))
    e = np.exp((np.array(scores) - max(scores)) / T)
    probs = e / e.sum()
    chosen = int(np.searchsorted(np.cumsum(probs), state["draw"]))
    for w, prob in zip(out, probs):
        w["prob"] = float(prob)
    return out, chosen if chosen < len(out) else 0


def size_class(n):
    return 1 + int(math.floor(math.log2(max(n, 1))))


class Latencies:
    def __init__(self, fixes):
        self.cross, self.split, self.ema = "worker-baseline" in fixes, "feedback" in fixes, {}

    def compare(self, metric, success, w, bucket, kind):
        """The baselines to look at, in this order; all are updated."""
        keys = []
        if not self.cross:
            keys.append((w, *bucket))
            if kind is not None:
                keys.append((w, *kind))
        elif kind is not None:
            keys.append(("all", *bucket))
        keys.append(("all", *(kind if kind is not None else bucket)))
        baseline = next((self.ema[k] for k in keys if k in self.ema), max(1.0, metric))
        if not success:
            return baseline, 0.0
        reward = 1 / (1 + metric / max(1e-3, baseline))
        for k in keys:
            self.ema[k] = metric if k not in self.ema else CONFIG["alpha"] * metric + (1 - CONFIG["alpha"]) * self.ema[k]
        return baseline, reward

    def judge(self, f):
        w, ok, out = f["worker"], f["ok"], f["out"]
        if not self.split:
            per = out > 0
            m = f["latency"] / out if per else f["latency"]
            b = "LOW" if f["prefill"] < 0.25 else "MEDIUM" if f["prefill"] < 0.75 else "HIGH"
            return (*self.compare(m, ok, w, (per, f["osl"], b), (per,)), m)
        size = size_class(f["tokens"])
        if f["first"] <= 0:
            return (*self.compare(f["latency"], ok, w, ("whole", size, size_class(out)), None), f["latency"])
        base, reward = self.compare(f["first"], ok, w, ("first", size), None)
        if out > 1:
            gap = (f["latency"] - f["first"]) / (out - 1)
            gbase, greward = self.compare(gap, ok, w, ("gap",), None)
            base, reward = base + gbase * (out - 1), (reward + greward) / 2
        return base, reward, f["latency"] if out > 1 else f["first"]


def state(i):
    n = int(rng.integers(1, 7))
    if i < STATES // 2:
        fixes = []
    elif i < 3 * STATES // 4:
        fixes = list(NAMES)
    else:
        fixes = [name for name in NAMES if rng.random() < 0.5]
    block = int(rng.choice([16, 64]))
    tokens = int(rng.choice([0, 10, 16, 300, 1024, 5000, 30000]))
    s = dict(fixes=fixes, block_size=block, tokens=tokens, osl=level(), iat=level(),
             budget=int(rng.choice([0, 0, 1, 3, 9, 40])), draw=rnd(0, 1, 6), workers=[], pins=[], updates=[], feedback=[])
    for _ in range(n):
        s["workers"].append(dict(
            fresh=bool(rng.random() < 0.7), usage=rnd(0, 1), waiting=int(rng.integers(0, 40)), waits=int(rng.integers(0, 30)),
            overlap=int(rng.integers(0, tokens // block + 1)), z=[round(float(v), 4) for v in rng.standard_normal(DIM)], e=rnd(0, 1)))
    for _ in range(int(rng.integers(0, 5))):
        s["pins"].append(dict(worker=int(rng.integers(0, n)), reuse=int(rng.integers(1, 12)), decode=DECODE[level()],
                              prefill=rnd(0, 8), iat=IAT[level()]))
    for _ in range(int(rng.integers(0, 12))):
        s["updates"].append(dict(worker=int(rng.integers(0, n)), x=[1.0] + [rnd(0, 1, 3) for _ in range(DIM - 1)], reward=rnd(0, 1)))
    for _ in range(8):
        latency = rnd(5, 9000, 3)
        s["feedback"].append(dict(
            worker=int(rng.integers(0, n)), ok=bool(rng.random() < 0.85), latency=latency,
            first=round(latency * rnd(0, 1), 3) if rng.random() < 0.7 else 0, out=int(rng.choice([0, 1, 2, 50, 1000])),
            tokens=int(rng.choice([1, 60, 64, 1000, 20000])), osl=level(), prefill=rnd(0, 1.2)))
    return s


states = []
for i in range(STATES):
    s = state(i)
    bandits = [Bandit(s["fixes"]) for _ in s["workers"]]
    for u in s["updates"]:
        update(bandits, s["fixes"], u["worker"], np.array(u["x"]), u["reward"])
    want, chosen = decide(s, bandits, s["fixes"])
    latencies = Latencies(s["fixes"])
    for f in s["feedback"]:
        f["baseline"], f["reward"], f["metric"] = latencies.judge(f)
    s["want"] = dict(
        workers=want, chosen=chosen, alpha=[b.alpha for b in bandits], beta=[b.beta for b in bandits],
        b=[b.b.tolist() for b in bandits], a=bandits[0].A[np.triu_indices(DIM)].tolist())
    states.append(s)
print("[" + ",\n".join(json.dumps(s, separators=(",", ":")) for s in states) + "]")
