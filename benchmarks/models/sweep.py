"""Convert many models into layers, and compare each with the original.

    .venv/bin/python -m benchmarks.models.sweep                    # all of transformers
    .venv/bin/python -m benchmarks.models.sweep --sources torchvision timm
    .venv/bin/python -m benchmarks.models.sweep --only llama t5 --verbose
    .venv/bin/python -m benchmarks.models.sweep --pipeline         # torch's, on the same rows
    .venv/bin/python -m benchmarks.models.sweep --table            # write the tables only

Each row runs in a process of its own, two at a time, on one thread each.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import re
import resource
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed.pipelining  # once, before rows are forked

from . import architectures, check, table
from .architectures import NotBuiltError, Row

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
CPU_SECONDS = 90
WARM = (
    *("LlamaForCausalLM", "T5ForConditionalGeneration", "ViTForImageClassification"),
    *("WhisperForConditionalGeneration", "BertForMaskedLM", "MixtralForCausalLM"),
    *("Wav2Vec2ForCTC", "MambaForCausalLM", "LlavaForConditionalGeneration"),
)
"""Classes imported before processes are forked: what they share is imported once."""


def main() -> None:
    """Run the rows that were asked for, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sources", nargs="+", default=["transformers"])
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="model types, or names of models")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--pipeline", action="store_true", help="run torch's pipeline() instead")
    parser.add_argument("--seconds", type=int, help="CPU time after which a row is stopped")
    parser.add_argument("--missing", action="store_true", help="only rows that have no result yet")
    parser.add_argument("--result", nargs="+", help="only rows that had one of these results")
    parser.add_argument("--verbose", action="store_true", help="show what the models print")
    parser.add_argument("--table", action="store_true", help="write the tables and run nothing")
    options = parser.parse_args()
    results = json.loads(options.results.read_text()) if options.results.exists() else {}
    if not options.table:
        chosen = _chosen(options, results)
        for row, result in run(chosen, options):
            known = results.setdefault(key(row), {})
            result["detail"] = _without_folders(result.get("detail", known.get("detail", "")))
            known.update(asdict(row), **result)
            print(f"{key(row)}: {_shown(result)}", flush=True)
            options.results.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    if options.results == RESULTS:
        table.write(results, HERE)


def key(row: Row) -> str:
    """Return the name of a row in the results."""
    return f"{row.source}/{row.kind}"


def _without_folders(text: str) -> str:
    """Return a text with files relative to the folder of packages."""
    return re.sub(r"\S*/(site-packages|benchmarks)/", "", text)


def _shown(result: dict[str, Any]) -> str:
    return " ".join(
        str(x) for x in (result.get("result"), result.get("detail"), result.get("pipeline")) if x
    )


def _chosen(options: argparse.Namespace, results: dict[str, Any]) -> list[Row]:
    rows = [row for source in options.sources for row in ROWS[source]()]
    if options.only:
        rows = [row for row in rows if row.kind in options.only]
    field = "pipeline" if options.pipeline else "result"
    if options.pipeline:
        rows = [x for x in rows if results.get(key(x), {}).get("result") == "exact"]
    if options.missing:
        rows = [row for row in rows if field not in results.get(key(row), {})]
    if options.result:
        rows = [row for row in rows if results.get(key(row), {}).get("result") in options.result]
    return rows


ROWS = {
    "transformers": architectures.rows,
    "torchvision": architectures.torchvision_rows,
    "timm": architectures.timm_rows,
}


def run(rows: Sequence[Row], options: argparse.Namespace) -> Iterator[tuple[Row, dict[str, Any]]]:
    """Run rows in processes of their own."""
    _warm_up(options.sources)
    context = mp.get_context("fork")
    waiting = list(rows)
    running: dict[Any, tuple[Row, Any]] = {}
    while waiting or running:
        while waiting and len(running) < options.workers:
            ours, theirs = context.Pipe(duplex=False)
            row = waiting.pop(0)
            process = context.Process(target=_one, args=(row, options, theirs))
            process.start()
            theirs.close()
            running[ours] = row, process
        for connection in wait(list(running)):
            row, process = running.pop(connection)
            try:
                result = connection.recv()
            except EOFError:
                process.join()
                code = process.exitcode
                late = f"not done in {_seconds(row, options)} s of CPU"
                result = _failed(options, late if code in (-9, -24) else f"exit code {code}")
            process.join()
            yield row, result


def _seconds(row: Row, options: argparse.Namespace) -> int:
    slow = options.pipeline or row.source != "transformers"
    return options.seconds or CPU_SECONDS * (3 if slow else 1)


def _failed(options: argparse.Namespace, why: str) -> dict[str, Any]:
    if options.pipeline:
        return {"pipeline": f"fails: {why}"}
    return asdict(check.Result("not tried", why))


def _warm_up(sources: Sequence[str]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    if "timm" in sources:
        architectures.declare_operators()
        import timm  # noqa: F401  # once, before rows are forked
    if "transformers" in sources:
        import transformers

        for name in WARM:
            getattr(transformers, name)


def _one(row: Row, options: argparse.Namespace, connection: Connection) -> None:
    os.setsid()
    limit = _seconds(row, options)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 1))
    if not options.verbose:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
    torch.set_default_dtype(torch.float64)
    started = time.process_time()
    result: dict[str, Any]
    try:
        case = architectures.build(row)
        if options.pipeline:
            result = {"pipeline": check.check_pipeline(case)}
        else:
            result = asdict(check.check(case))
            result["seconds"] = round(time.process_time() - started, 1)
    except NotBuiltError as error:
        result = _failed(options, str(error))
    except Exception as error:  # a row that fails is a result
        if options.verbose:
            import traceback

            traceback.print_exc()
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        result = (
            {"pipeline": f"fails: {text}"}
            if options.pipeline
            else asdict(check.Result("wrong", f"the check fails: {text}"))
        )
    connection.send(result)
    connection.close()


if __name__ == "__main__":
    main()
