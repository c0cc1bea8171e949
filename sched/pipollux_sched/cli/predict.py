"""`pipollux predict`: predict a job's performance on allocations."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .console import USAGE, CommandError, OutputFormat, print_data
from .model_options import (
    ChunksPerStage,
    GradSqr,
    GradVar,
    InitBatchSize,
    grad_params,
    num_chunks,
    write_file,
)

if TYPE_CHECKING:
    from pipollux_perfmodel.modeling.cutting import Layers, ScheduleWish
    from pipollux_perfmodel.modeling.params_file import Bounds, ModelFile
    from pipollux_perfmodel.modeling.prediction import Placement

GPUS_PER_NODE = 8


class ScheduleChoice(StrEnum):
    """A pipeline schedule, or all of them."""

    gpipe = "gpipe"
    one_f_one_b = "1f1b"
    interleaved = "interleaved"
    all = "all"


def predict(
    params: Annotated[
        str,
        typer.Argument(
            metavar="PARAMS.json",
            help="Output of pipollux fit, or the hints of a job; - reads standard input.",
            show_default=False,
        ),
    ],
    replicas: Annotated[
        str, typer.Option("--replicas", "-r", metavar="RANGE", help="Numbers of replicas.")
    ] = "1:16",
    stages: Annotated[
        str | None,
        typer.Option(metavar="RANGE", help="Numbers of stages.", show_default="those measured"),
    ] = None,
    micro_batches: Annotated[
        str | None,
        typer.Option(
            metavar="RANGE",
            help="Numbers of micro-batches to choose from.",
            show_default="1,2,4,8, or the number in the hints",
        ),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Nodes that the replicas are spread over; at most one per replica.",
            show_default="as few as possible",
        ),
    ] = None,
    gpus_per_node: Annotated[
        int | None,
        typer.Option(min=1, metavar="G", help="GPUs per node.", show_default=str(GPUS_PER_NODE)),
    ] = None,
    max_batch_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="B",
            help="Largest batch size.",
            show_default="the initial batch size, or that of the hints",
        ),
    ] = None,
    atomic_bsz: Annotated[
        str | None,
        typer.Option(
            metavar="LO:HI",
            help="Smallest and largest atomic batch size; HI is limited by memory.",
            show_default="unlimited, or the bounds in the hints",
        ),
    ] = None,
    accumulation: Annotated[
        bool | None,
        typer.Option(
            "--accumulation/--no-accumulation",
            help="Allow gradient accumulation.",
            show_default="no, or as in the hints",
        ),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            metavar="LAYERS.json",
            help="Layer profile of the model, from which unmeasured stages are built.",
            show_default="unmeasured stages are equal parts",
        ),
    ] = None,
    memory_limit: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="GPU memory that stages must fit into, such as 40GiB; needs --layers.",
            show_default="unlimited",
        ),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            metavar="SPEED",
            help="Bandwidth, and optionally latency, between stages built from --layers: 20GB/s or "
            "20GB/s,10us.",
            show_default="copies are free",
        ),
    ] = None,
    schedule: Annotated[
        ScheduleChoice | None,
        typer.Option(
            help="Pipeline schedule; all compares them.",
            show_default="the schedule of the measurements",
        ),
    ] = None,
    chunks_per_stage: ChunksPerStage = None,
    sync_every: Annotated[
        str | None,
        typer.Option(
            metavar="H",
            help="Push to servers and pull from them every H steps, or auto.",
            show_default="as measured",
        ),
    ] = None,
    init_batch_size: InitBatchSize = None,
    grad_sqr: GradSqr = None,
    grad_var: GradVar = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Plot goodput and speedup: .png, .svg or .pdf."),
    ] = None,
    output: Annotated[
        OutputFormat, typer.Option("--output", "-o", help="Output format.")
    ] = OutputFormat.table,
) -> None:
    """Predict step time, throughput, goodput and speedup of allocations.

    For each number of stages and replicas, predict shows the batch size, accumulation
    steps and micro-batches with the best goodput, as the job would choose them, and
    the speedup. A replica runs on one node; replicas use as few nodes as possible.

        pipollux fit examples/measurements.jsonl --checkpoint except_last --save params.json
        pipollux predict params.json --init-batch-size 32 --max-batch-size 256 --replicas 1:8

    [bold]RANGE[/bold] is 8, or 1,2,4, or 1:16, or 1:16:2, or several of these separated by commas.

    With [bold]--layers[/bold], numbers of stages that were not measured are predicted from the
    layer profile and the network of the nearest measured number. The layers are
    partitioned for the largest number of micro-batches and the initial batch size on
    one replica.

        pipollux predict params.json --stages 1,2,4 --layers layers.json --memory-limit 40GiB

    With [bold]--schedule[/bold], measurements of one schedule predict another; "all" compares the
    schedules, with the memory of the fullest device, and marks the best.

        pipollux predict params.json --stages 4 --layers layers.json --schedule all

    With [bold]--sync-every[/bold], replicas push to servers and pull from them every H steps, which
    is taken to be as slow as an all-reduce, and keep the batch size of --atomic-bsz.

        pipollux predict params.json --sync-every 100 --atomic-bsz 32:32 --max-batch-size 4096

    Without gradient statistics, from options or the file, efficiency is unknown:
    predict chooses the fastest batch size and shows throughput only.

    Exit code: 0 predicted; 1 the plot cannot be written; 2 a file or an option is invalid.
    """
    from pipollux_perfmodel.modeling.arguments import (
        parse_numbers,
        parse_sync_every,
        picture_format,
    )
    from pipollux_perfmodel.modeling.prediction import Question
    from pipollux_perfmodel.modeling.prediction import predict as answer_question

    # Before the predictions, so that an invalid file name fails at once.
    picture = picture_format(plot) if plot else ""
    gradients = grad_params(grad_sqr, grad_var)
    question = Question(
        replicas=parse_numbers(replicas, "--replicas"),
        stages=None if stages is None else parse_numbers(stages, "--stages"),
        bounds=_bounds(micro_batches, max_batch_size, atomic_bsz, accumulation),
        placement=_placement(nodes, gpus_per_node),
        layers=_layers(layers, memory_limit, link, params),
        schedules=_schedules(schedule, chunks_per_stage),
    )
    model = _model(params, init_batch_size=init_batch_size, grad_params=gradients)
    if sync_every is not None:
        interval = parse_sync_every(sync_every)
        pushing = tuple(one._replace(sync_every=interval) for one in model.perf_params)
        model = replace(model, perf_params=pushing)
    answer = answer_question(model, question)
    if plot is not None:
        from pipollux_perfmodel.modeling.plots import draw_answer

        write_file(plot, "--plot", draw_answer(answer, picture))
    if output is OutputFormat.table:
        from .prediction_table import print_answer

        print_answer(answer)
    else:
        print_data(answer.to_dict(), output)


def _bounds(
    micro_batches: str | None,
    max_batch_size: int | None,
    atomic_bsz: str | None,
    accumulation: bool | None,
) -> Bounds:
    from pipollux_perfmodel.modeling.arguments import parse_bounds, parse_numbers
    from pipollux_perfmodel.modeling.params_file import Bounds

    return Bounds(
        max_batch_size=max_batch_size,
        atomic_bsz_range=None if atomic_bsz is None else parse_bounds(atomic_bsz, "--atomic-bsz"),
        accumulation=accumulation,
        num_microbatches=(
            None if micro_batches is None else parse_numbers(micro_batches, "--micro-batches")
        ),
    )


def _schedules(
    choice: ScheduleChoice | None, chunks_per_stage: int | None
) -> tuple[ScheduleWish, ...]:
    from pipollux_perfmodel.modeling.cutting import ScheduleWish
    from pipollux_perfmodel.timing.params import SCHEDULES

    several = choice in (ScheduleChoice.interleaved, ScheduleChoice.all)
    chunks = num_chunks(chunks_per_stage, interleaved=several)
    kinds = (kind for kind in SCHEDULES if choice in (ScheduleChoice.all, kind))
    return tuple(ScheduleWish(kind, chunks if kind == "interleaved" else 1) for kind in kinds)


def _placement(nodes: int | None, gpus_per_node: int | None) -> Placement:
    from pipollux_perfmodel.modeling.prediction import Placement

    if nodes is not None and gpus_per_node is not None:
        raise CommandError("give --nodes or --gpus-per-node, not both", USAGE)
    return Placement(num_nodes=nodes, gpus_per_node=gpus_per_node or GPUS_PER_NODE)


def _layers(
    path: str | None, memory_limit: str | None, link: str | None, params: str
) -> Layers | None:
    from pipollux_perfmodel.modeling.arguments import parse_link, parse_size
    from pipollux_perfmodel.modeling.cutting import Layers
    from pipollux_perfmodel.modeling.files import STANDARD_INPUT, read_layers

    if path is None:
        for option, value in (("--memory-limit", memory_limit), ("--link", link)):
            if value is not None:
                raise CommandError(
                    f"{option} needs --layers, the profile with the sizes of activations and "
                    "layers; give --layers LAYERS.json",
                    USAGE,
                )
        return None
    if path == params == STANDARD_INPUT:
        raise CommandError("PARAMS.json and --layers are both -; give one of them a path", USAGE)
    return Layers(
        name=path,
        link=None if link is None else parse_link(link, "--link"),
        memory_limit=None if memory_limit is None else parse_size(memory_limit, "--memory-limit"),
        profile=read_layers(path),
    )


def _model(path: str, **given: Any) -> ModelFile:
    from pipollux_perfmodel.modeling.params_file import read_model

    said = {name: value for name, value in given.items() if value is not None}
    return replace(read_model(path), **said)
