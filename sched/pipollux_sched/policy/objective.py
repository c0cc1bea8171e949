"""wip"""

from __future__ import annotations
from typing import Protocol
import numpy as np
from .options import Floats, Instance, NOTHING
from .problem import FLOOR, restart_factor


class Objective(Protocol):
    def gains(self, instance: Instance) -> list[Floats]: ...
    def gain(self, instance: Instance, j: int, speedups: Floats) -> Floats: ...


class FairSpeedup:
    def __init__(self, power=-1.0):
        self.p = power

    def fair(self, instance, j):
        o = instance.jobs[j]
        shape = o.job.all_shapes[0]
        need = instance.need(shape)
        share = max(need[t] / instance.total[t] for t in range(len(need)) if need[t])
        R = int(
            np.clip(
                np.ceil(1.0 / (share * instance.num_jobs) - 1e-9),
                max(o.job.min_replicas, 1),
                o.job.max_replicas,
            )
        )
        per = max(int(instance.fits(shape).max()), 1)
        v = float(shape.speedup_fn(-(-R // per), R))
        return v if v > 0 else 1.0

    def f(self, v):
        return np.sign(self.p) * np.maximum(v, FLOOR) ** self.p

    def gains(self, instance):
        self._fair = [self.fair(instance, j) for j in range(len(instance.jobs))]
        out = []
        for j, o in enumerate(instance.jobs):
            g = self.gain(instance, j, o.speedup)
            if o.stay is not None:
                g[o.stay] = self.f(o.speedup[o.stay] / self._fair[j])
            out.append(g)
        return out

    def gain(self, instance, j, speedups):
        o = instance.jobs[j]
        v = speedups / self._fair[j]
        if o.runs:
            v = v * restart_factor(o.job)
        return self.f(v)


class Progress:
    """sum of w_j * speedup * (H - D)/H"""

    def __init__(self, a=0.5, horizon=600.0, phi=0.0, unknown="min", conc=1.0, minH=60.0):
        self.a, self.h, self.phi, self.unknown, self.conc, self.minH = (
            a,
            horizon,
            phi,
            unknown,
            conc,
            minH,
        )

    def weights(self, instance):
        n = len(instance.jobs)
        rem = []
        for o in instance.jobs:
            r = o.job.remaining_work
            rem.append(r if r is not None else (0.0 if self.unknown == "min" else np.inf))
        rem = np.array(rem)
        rank = np.empty(n)
        order = np.argsort(-rem, kind="stable")
        rank[order] = np.arange(1, n + 1)
        return rank**self.a

    def gains(self, instance):
        self._w = self.weights(instance)
        out = []
        for j, o in enumerate(instance.jobs):
            g = self.gain(instance, j, o.speedup)
            if o.stay is not None:
                g[o.stay] = self._w[j] * o.speedup[o.stay] ** self.conc + 0.0
            g[NOTHING] = 0.0
            out.append(g)
        return out

    def gain(self, instance, j, speedups):
        o = instance.jobs[j]
        s = np.maximum(speedups, 1e-9)
        if not o.runs:
            return self._w[j] * speedups**self.conc
        rem = o.job.remaining_work
        T = (np.inf if rem is None else rem) / s
        H = np.clip(np.minimum(T, self.h), self.minH, None)
        f = np.maximum(1 - o.job.restart_seconds / H, 0.0)
        return self._w[j] * speedups**self.conc * f


class Price:
    """sum of w_j * speedup; w_j = min_k (1 + k/fair)/s(k) * age factor"""

    def __init__(self, a=0.5, horizon=600.0, mode="rank", new="short", lam=1.0, minH=60.0, p=1.0):
        self.a, self.h, self.mode, self.new, self.lam, self.minH, self.p = (
            a,
            horizon,
            mode,
            new,
            lam,
            minH,
            p,
        )

    def gains(self, instance):
        n = len(instance.jobs)
        t = int(instance.total.argmin()) if len(instance.total) else 0
        G = float(instance.total[t])
        kf = G / max(instance.num_jobs, 1) / self.lam
        base, T = [], []
        for o in instance.jobs:
            unit = np.array([instance.need(s)[t] for s in o.job.all_shapes])
            c = o.replicas * unit[o.shape]
            ok = o.speedup > 0
            # one that may grow is judged by what it could have, not by what it may have now
            cost = (1 + c[ok] / kf) / o.speedup[ok]
            k = int(cost.argmin()) if ok.any() else 0
            base.append(float(cost[k]) if ok.any() else 0.0)
            r = o.job.remaining_work
            T.append(np.nan if r is None or not ok.any() else r * float(cost[k]))
        T = np.array(T)
        known = ~np.isnan(T)
        T[~known] = 0.0 if self.new == "short" else (np.median(T[known]) if known.any() else 0.0)
        if self.mode == "rank":
            rank = np.empty(n)
            rank[np.argsort(-T, kind="stable")] = np.arange(1, n + 1)
            f = (rank / n) ** self.a
        else:
            f = (np.maximum(T, 60.0)) ** -self.a
        self._w = np.array(base) * f
        out = []
        for j, o in enumerate(instance.jobs):
            g = self.gain(instance, j, o.speedup)
            if o.stay is not None:
                g[o.stay] = self._w[j] * o.speedup[o.stay]
            g[NOTHING] = 0.0
            out.append(g)
        return out

    def gain(self, instance, j, speedups):
        o = instance.jobs[j]
        g = self._w[j] * speedups
        if not o.runs:
            return g
        rem = o.job.remaining_work
        T = (np.inf if rem is None else rem) / np.maximum(speedups, 1e-9)
        H = np.clip(np.minimum(T, self.h), self.minH, None)
        return g * np.maximum(1 - o.job.restart_seconds / H, 0.0)
