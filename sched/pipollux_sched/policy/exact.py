"""wip"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .allocation import Allocation, shape_of
from .floor import Floor
from .job_info import JobInfo, NodeInfo
from .knapsack import knapsack
from .options import NOTHING, Floats, Instance, JobOptions, Row, build_instance
from .objective import Objective


class ExactPolicy:
    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self.gaps = []

    def optimize(self, jobs, nodes, base_allocations, node_template):
        instance = build_instance(jobs, nodes, base_allocations)
        gains = self._objective.gains(instance)
        problem = _Problem(instance, gains, self._objective)
        chosen, bound = problem.relax()
        state = problem.place(chosen)
        problem.improve(state)
        stay = problem.staying()
        v, v0 = problem.value(state), problem.value(stay) if stay is not None else -np.inf
        if stay is not None and v <= v0 + 1e-9 * abs(v0):
            state = stay
            v = v0
        self.gaps.append((bound, v))
        out = {name: list(a) for name, a in instance.pinned.items()}
        for j, o in enumerate(instance.jobs):
            out[o.name] = problem.allocation(state, j, base_allocations)
        return out, len(nodes)


class _Problem:
    def __init__(self, instance, gains, objective):
        self.instance, self.gains, self.objective = instance, gains, objective
        self.J = len(instance.jobs)
        usable = instance.free.sum(axis=0)
        # resource in scarcest supply
        self.kind = (
            int(
                np.argmin(
                    [
                        usable[t]
                        / max(
                            max(
                                (
                                    max((instance.need(s)[t] for s in o.job.all_shapes))
                                    for o in instance.jobs
                                ),
                                default=1,
                            ),
                            1,
                        )
                        if any(instance.need(o.job.all_shapes[0])[t] for o in instance.jobs)
                        else np.inf
                        for t in range(len(instance.kinds))
                    ]
                )
            )
            if instance.kinds
            else 0
        )
        self.capacity = int(usable[self.kind]) if instance.kinds else 0
        self.costs = []
        for o in instance.jobs:
            unit = np.array([instance.need(s)[self.kind] for s in o.job.all_shapes])
            self.costs.append(o.replicas * unit[o.shape])

    def relax(self):
        vals = []
        for o, g in zip(self.instance.jobs, self.gains):
            g = g.copy()
            if o.stay is not None:
                g[o.stay] += 1e-9 * abs(g[o.stay])
            vals.append(g)
        return knapsack(self.costs, vals, self.capacity)

    def staying(self):
        floor = Floor(self.instance)
        rows = []
        for o in self.instance.jobs:
            if o.base:
                s = o.job.all_shapes[o.shape[-1]]
                if not floor.accepts(o.base, self.instance.need(s)):
                    return None
                floor.put(o.base, self.instance.need(s))
                rows.append((int(o.shape[-1]), o.base))
            else:
                rows.append((0, ()))
        return {"floor": floor, "rows": rows}

    def row_gain(self, j, shape, row):
        o = self.instance.jobs[j]
        if not row:
            return self.gains[j][NOTHING]
        if o.base and row == o.base and shape == o.shape[-1]:
            return self.gains[j][o.stay]
        R = sum(c for _, c in row)
        m = len(row)
        k = np.flatnonzero((o.shape == shape) & (o.replicas == R) & (o.num_nodes == m))
        k = [i for i in k if i != o.stay and i != NOTHING]
        if k:
            return self.gains[j][k[0]]
        sp = float(o.job.all_shapes[shape].speedup_fn(m, R))
        return float(self.objective.gain(self.instance, j, np.array([sp]))[0])

    def value(self, state):
        return sum(self.row_gain(j, *r) for j, r in enumerate(state["rows"]))

    def place(self, chosen):
        inst = self.instance
        floor = Floor(inst)
        rows = [(0, ())] * self.J
        todo = []
        for j, (o, c) in enumerate(zip(inst.jobs, chosen)):
            if o.stay is not None and c == o.stay:
                floor.put(o.base, inst.need(o.job.all_shapes[o.shape[c]]))
                rows[j] = (int(o.shape[c]), o.base)
            elif c != NOTHING:
                todo.append((j, c))
        todo.sort(key=lambda t: (-inst.jobs[t[0]].num_nodes[t[1]], -self.costs[t[0]][t[1]], t[0]))
        state = {"floor": floor, "rows": rows}
        for j, c in todo:
            o = inst.jobs[j]
            s = int(o.shape[c])
            shape = o.job.all_shapes[s]
            row = floor.find(inst.need(shape), inst.runs_on(shape), int(o.replicas[c]))
            if row is None:
                self.best(state, j)
            else:
                floor.put(row, inst.need(shape))
                rows[j] = (s, row)
        return state

    def best(self, state, j):
        """Give job j the best that fits."""
        inst = self.instance
        o = inst.jobs[j]
        floor, rows = state["floor"], state["rows"]
        s0, r0 = rows[j]
        if r0:
            floor.take(r0, inst.need(o.job.all_shapes[s0]))
        g = self.row_gain(j, s0, r0)
        best = (s0, r0)
        order = np.argsort(-self.gains[j], kind="stable")
        for c in order:
            if self.gains[j][c] <= g + 1e-12 * abs(g):
                break
            s = int(o.shape[c])
            need = inst.need(o.job.all_shapes[s])
            if c == NOTHING:
                row = ()
            elif c == o.stay:
                row = o.base if floor.accepts(o.base, need) else None
            else:
                row = floor.find(need, inst.runs_on(o.job.all_shapes[s]), int(o.replicas[c]))
            if row is None:
                continue
            gg = self.row_gain(j, s, row)
            if gg > g + 1e-12 * abs(g):
                g, best = gg, (s, row)
        s, r = best
        if r:
            floor.put(r, inst.need(o.job.all_shapes[s]))
        rows[j] = best
        return best != (s0, r0)

    def improve(self, state):
        for _ in range(3):
            changed = False
            for j in range(self.J):
                changed |= self.best(state, j)
            if not changed:
                break

    def allocation(self, state, j, base_allocations):
        o = self.instance.jobs[j]
        s, row = state["rows"][j]
        if not row:
            return Allocation()
        if o.base and row == o.base and s == o.shape[-1]:
            return Allocation(base_allocations[o.name], o.job.all_shapes[s])
        return Allocation(
            [self.instance.node_names[n] for n, c in row for _ in range(c)], o.job.all_shapes[s]
        )
