"""Simulations as one self-contained HTML file: a table, curves, Gantt charts."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from typing import NamedTuple

from jinja2 import Environment, FunctionLoader, StrictUndefined

from pipollux_sched import report
from pipollux_sched.report.charts.specs import Chart, chart_data, chart_scripts
from pipollux_simulator.engine.metrics import measure
from pipollux_simulator.engine.outcome import SimulationOutcome
from pipollux_utils.text import clean, count

from .charts import completion_chart, use_chart
from .gantt import gantt
from .table import HEADERS, cells


class Gantt(NamedTuple):
    """The Gantt chart of a policy: the name of the chart."""

    policy: str
    chart: str


class Section(NamedTuple):
    """The charts of one workload."""

    name: str
    summary: str
    applications: list[str]
    completion_times: str
    use: str
    gantts: list[Gantt]


def render_plots(outcomes: Sequence[SimulationOutcome]) -> str:
    """Return the page of simulations, with a section per workload.

    Example:
        >>> from pipollux_simulator import Experiment, JobArrival, Workload, make_nodes
        >>> jobs = (JobArrival("a", 0.0, "gpt-1.3b", 1, 32),)
        >>> outcome = Experiment(make_nodes({"": (1, 2)})).run(Workload("one", jobs), "fifo")
        >>> render_plots([outcome]).startswith("<!doctype html>")
        True
    """
    workloads = dict.fromkeys(outcome.workload for outcome in outcomes)
    charts: dict[str, Chart] = {}
    sections = [
        _section(index, [one for one in outcomes if one.workload == name], charts)
        for index, name in enumerate(workloads)
    ]
    policies = list(dict.fromkeys(outcome.policy for outcome in outcomes))
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            title="Policies compared" if len(policies) > 1 else f"Policy {policies[0]}",
            headers=HEADERS,
            rows=[cells(measure(outcome)) for outcome in outcomes],
            sections=sections,
            chart_data=chart_data(charts),
            chart_scripts=chart_scripts(),
        )
    )


def _section(
    index: int, outcomes: Sequence[SimulationOutcome], charts: dict[str, Chart]
) -> Section:
    """Return the section of a workload; its charts are added to `charts`."""
    jobs, slots = outcomes[0].jobs, outcomes[0].slots
    applications = sorted({job.application for job in jobs})
    colours = {name: number for number, name in enumerate(applications)}
    until = max(outcome.end for outcome in outcomes)
    gantts = [Gantt(one.policy, f"gantt-{index}-{n}") for n, one in enumerate(outcomes)]
    charts[f"jct-{index}"] = completion_chart(outcomes)
    charts[f"use-{index}"] = use_chart(outcomes)
    for outcome, shown in zip(outcomes, gantts, strict=True):
        charts[shown.chart] = gantt(outcome, colours, until)
    return Section(
        name=clean(outcomes[0].workload),
        summary=f"{count(len(jobs), 'job')} on {count(sum(slots.values()), 'GPU')} "
        f"of {count(len(slots), 'node')}",
        applications=applications,
        completion_times=f"jct-{index}",
        use=f"use-{index}",
        gantts=gantts,
    )


def _environment() -> Environment:
    def load(name: str) -> str:
        # All pages share one style sheet.
        folder = resources.files(report if name.endswith(".css") else __package__)
        return folder.joinpath(name).read_text(encoding="utf-8")

    return Environment(
        loader=FunctionLoader(load),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
