"""`pipollux predict --layers`: stages cut from a profile of the model's layers, within memory."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pipollux_perfmodel import (
    GoodputFunction,
    Layer,
    LayerProfile,
    Link,
    plan_stages,
    price_stages,
    stage_memory,
)
from tests.cli.modeling_cases import (
    INIT,
    LAYERS,
    MIB,
    ONE_STAGE,
    SQR,
    TWO_STAGES,
    VAR,
    complaints,
    here,
    params_json,
    pipollux,
    predicted,
    written,
)

GOOD = params_json(ONE_STAGE)
LAYER = LAYERS.to_json_object()["layers"][0]


def layers_written(folder: Path, content: Any = None) -> Path:
    path = folder / "layers.json"
    content = LAYERS.to_json_object() if content is None else content
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def all_cuts(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    ends = itertools.combinations(range(1, num_layers), num_stages - 1)
    return [tuple(b - a for a, b in itertools.pairwise((0, *inner, num_layers))) for inner in ends]


def fullest(balance: Sequence[int], atomic_bsz: int, num_microbatches: int) -> float:
    """Bytes of the fullest device of a cut; the micro-batch is the largest of those cut."""
    micro_bsz = -(-atomic_bsz // num_microbatches)
    return float(stage_memory(LAYERS, balance, micro_bsz, num_microbatches).max())


@pytest.mark.parametrize("link", [None, Link(latency=2e-3, bandwidth=4e9)])
def test_stages_not_measured_are_cut_from_the_layers(tmp_path: Path, link: Link | None) -> None:
    path = written(tmp_path, params_json(ONE_STAGE))
    layers = layers_written(tmp_path)
    args = ["--stages", "1:4", "--replicas", "1,3", "--max-batch-size", "128"]
    with_link = ["--link", "4GB/s,2ms"] if link else []
    answer = predicted(path, *args, "--layers", str(layers), *with_link)
    even = predicted(path, *args)
    for row, other in zip(answer["predictions"], even["predictions"], strict=True):
        num_stages = row["num_stages"]
        if num_stages == 1:
            assert row == other
            assert (row["measured"], row["from_layers"], row["balance"]) == (True, False, None)
            continue
        assert (row["measured"], row["from_layers"]) == (False, True)
        prices = {
            cut: GoodputFunction(
                price_stages(LAYERS, cut, ONE_STAGE, checkpoint="never", link=link),
                (SQR, VAR),
                INIT,
            )
            for cut in all_cuts(LAYERS.num_layers, num_stages)
        }
        balance = tuple(row["balance"])
        # Of the initial batch size, and the most micro-batches of those that may be chosen.
        spans = {cut: model.step_time(1, 1, INIT, 0, 8).accum_time for cut, model in prices.items()}
        assert spans[balance] == pytest.approx(min(spans.values()))
        shape = (row["num_nodes"], row["num_replicas"], row["atomic_bsz"], row["accum_steps"],
                 row["num_microbatches"])  # fmt: skip
        assert row["step_time"] == pytest.approx(prices[balance].step_time(*shape).total)
        assert row["goodput"] == pytest.approx(prices[balance].evaluate(*shape))
        assert row["step_time"] != pytest.approx(other["step_time"], rel=1e-3)


def test_with_layers_the_table_says_what_comes_from_them(tmp_path: Path) -> None:
    path = written(tmp_path, params_json(ONE_STAGE, TWO_STAGES))
    layers = layers_written(tmp_path)
    args = ("predict", path, "--stages", "1,2,4", "--replicas", "1", "--layers", layers)
    done = pipollux(*args, "--plot", tmp_path / "p.svg")
    assert done.returncode == 0, done.stderr
    marks = [line.split("│")[1].strip() for line in done.stdout.splitlines() if line[0] == "│"]
    assert marks[-3:] == ["1", "2", "4*"]
    text = " ".join(done.stdout.split())
    (balance,) = {
        tuple(row["balance"])
        for row in predicted(path, *map(str, args[2:]))["predictions"]
        if row["balance"]
    }
    assert "not measured (1, 2 were): they are predicted from layers, those of" in text
    assert f"layers.json cut {'+'.join(map(str, balance))};" in text
    assert "cut evenly" not in text
    assert ">4 stages (from layers)<" in (tmp_path / "p.svg").read_text()


@pytest.mark.exhaustive
def test_the_choice_keeps_within_memory(tmp_path: Path) -> None:
    path = written(tmp_path, params_json(ONE_STAGE, TWO_STAGES))
    layers = layers_written(tmp_path)
    args = ("--stages", "1,2,4", "--replicas", "1:4", "--max-batch-size", "256",
            "--accumulation", "--layers", str(layers))  # fmt: skip
    limit = 600 * MIB
    rows = predicted(path, *args, "--memory-limit", "600MiB")["predictions"]
    free = predicted(path, *args)["predictions"]
    smaller = 0
    for row, other in zip(rows, free, strict=True):
        assert row["measured"] == (row["num_stages"] < 4)
        assert len(row["balance"]) == row["num_stages"]
        sizes = row["atomic_bsz"], row["num_microbatches"]
        assert fullest(row["balance"], *sizes) <= limit
        smaller += row["atomic_bsz"] < other["atomic_bsz"]
        params = {1: ONE_STAGE, 2: TWO_STAGES}.get(row["num_stages"])
        params = params or price_stages(LAYERS, row["balance"], TWO_STAGES, checkpoint="never")
        model = GoodputFunction(params, (SQR, VAR), INIT)
        best = max(
            model.evaluate(row["num_nodes"], row["num_replicas"], a, s, count)
            for count in (2, 4, 8)
            for a in range(count, 257, count)
            for s in range(64)
            if INIT <= row["num_replicas"] * a * (s + 1) <= 256
            and fullest(row["balance"], a, count) <= limit
        )
        assert row["goodput"] >= 0.97 * best
    assert smaller >= 4
    assert len({row["num_stages"] for row in rows if row["atomic_bsz"] > 0}) == 3


def test_the_least_memory_limit_that_it_names_is_the_least(tmp_path: Path) -> None:
    path = written(tmp_path, params_json(ONE_STAGE))
    asked = (path, "--stages", "1,2", "--replicas", "1", "--accumulation", "--layers",
             str(layers_written(tmp_path)), "--memory-limit")  # fmt: skip
    whole = sum(4 * layer.parameter_bytes + layer.activation_bytes for layer in LAYERS.layers)
    half = min(fullest(cut, 1, 1) for cut in all_cuts(LAYERS.num_layers, 2))
    assert half < 250 * MIB < whole
    answer = predicted(*asked, "250MiB")
    rows = answer["predictions"]
    assert [row["atomic_bsz"] > 0 for row in rows] == [False, True]
    assert (rows[0]["balance"], rows[0]["goodput"], rows[0]["step_time"]) == (None, 0.0, None)
    (note,) = [note for note in answer["notes"] if "at least" in note]
    assert note == (
        f"1 stage needs at least {whole / MIB:.15g}MiB on one device, however the layers are cut; "
        "--memory-limit is 250MiB."
    )
    assert not any("No batch size" in note for note in answer["notes"])
    for limit, fits in ((whole, True), (whole - 1, False)):
        row = predicted(*asked, str(int(limit)))["predictions"][0]
        assert (row["atomic_bsz"] > 0) == fits
    notes = predicted(*asked, "10MiB")["notes"]
    assert sum("need at least" in note or "needs at least" in note for note in notes) == 2
    assert any(f"2 stages need at least {half / MIB:.15g}MiB" in note for note in notes)


def test_rows_that_memory_leaves_no_batch_are_dashes(tmp_path: Path) -> None:
    """A few samples fit, so more replicas or accumulation are needed for the initial batch."""
    path = written(tmp_path, params_json(ONE_STAGE))
    whole = sum(4 * layer.parameter_bytes for layer in LAYERS.layers)
    samples = 10 * sum(layer.activation_bytes for layer in LAYERS.layers)
    limit = ("--layers", str(layers_written(tmp_path)), "--memory-limit", str(int(whole + samples)))
    answer = predicted(path, "--replicas", "1,2,4", *limit)
    assert [row["atomic_bsz"] for row in answer["predictions"]] == [0, 0, 8]
    (note,) = [note for note in answer["notes"] if "No batch size" in note]
    assert "in 2 rows" in note
    assert "--memory-limit" in note
    (row,) = predicted(path, "--replicas", "1", "--accumulation", *limit)["predictions"]
    assert 0 < row["atomic_bsz"] <= 10
    assert row["batch_size"] == INIT


def test_the_cut_is_for_as_large_micro_batches_as_memory_allows(tmp_path: Path) -> None:
    """Of 8, 4, … samples: 8 fit no cut; 4 fit one, which is not that of 1."""
    limit = 920 * MIB
    for micro_bsz, fits in ((8, False), (4, True)):
        held = [fullest(cut, 8 * micro_bsz, 8) for cut in all_cuts(LAYERS.num_layers, 2)]
        assert any(one <= limit for one in held) == fits
    path = written(tmp_path, params_json(ONE_STAGE, init_batch_size=64))
    args = ("--stages", "2", "--replicas", "2", "--layers", str(layers_written(tmp_path)))
    (row,) = predicted(path, *args, "--memory-limit", "920MiB")["predictions"]
    assert row["balance"] == list(
        plan_stages(LAYERS, 2, 8, ONE_STAGE, micro_bsz=4, memory_limit=limit).balance
    )
    smallest = plan_stages(LAYERS, 2, 8, ONE_STAGE, micro_bsz=1, memory_limit=limit)
    assert row["balance"] != list(smallest.balance)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("1GiB", 2**30), ("1024 MiB", 2**30), ("1073741824", 2**30), ("1GB", 10**9),
     ("0.5GB", 5 * 10**8), ("500MB", 5 * 10**8)],
)  # fmt: skip
def test_sizes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, num_bytes: int
) -> None:
    """A layer of a byte per sample and a batch without bound show the limit as it was read."""
    layer = Layer(0, 1e-9, 0, 1e-9, parameter_bytes=num_bytes / 2)
    layers = layers_written(tmp_path, LayerProfile((layer,)).to_json_object())
    path = written(tmp_path, params_json(ONE_STAGE))
    args = ("predict", path, "-o", "json", "--replicas", "1", "--layers", layers, "--memory-limit")
    assert json.loads(here(capsys, *args, text).stdout)["predictions"][0]["atomic_bsz"] == INIT
    layers_written(tmp_path, LayerProfile((layer._replace(optimizer_bytes=1.0),)).to_json_object())
    assert json.loads(here(capsys, *args, text).stdout)["predictions"][0]["atomic_bsz"] == 0


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{", "not valid JSON: "),
        ("[]", '[] is not an object; it must begin with {"version": 1'),
        ({"version": 1}, "the profile has no layers; give it"),
        ({"version": 2, "layers": [LAYER]}, "version is 2; this reads 1"),
        ({"version": 1, "layers": []}, "layers is empty; give at least one layer"),
        ({"version": 1, "layers": [LAYER | {"forward_beta": -1}]}, "layers[0].forward_beta is -1"),
        ({"version": 1, "layers": [LAYER | {"forward_bta": 1}]}, "layers[0] has the unknown key "
         "'forward_bta'; did you mean forward_beta?"),
        ({"version": 1, "layers": [LAYER], "input_bytes": 10**400}, "a number is too large"),
        ({"version": 1, "layers": [LAYER]}, "1 layers cannot be cut into 4 stages; give fewer"),
        ({"version": 1, "layers": [dict.fromkeys(LAYER, 0)] * 4}, "the layers of the profile take "
         "no time at all"),
    ],
)  # fmt: skip
def test_layers_that_are_wrong_are_named_with_the_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: Any, expected: str
) -> None:
    layers = layers_written(tmp_path, content)
    path = written(tmp_path, GOOD)
    (text,) = complaints(here(capsys, "predict", path, "--stages", "4", "--layers", layers))
    assert text.startswith(f"{layers}: {expected}")


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--memory-limit", "40GiB"], "--memory-limit needs --layers"),
        (["--link", "20GB/s"], "--link needs --layers"),
        (["--layers", "none.json"], "none.json: there is no such file in"),
        (["--layers", "L", "--memory-limit", "40 giga"], "--memory-limit '40 giga' is not allowed; "
         "write a size above 0, such as 40GiB, 40GB or 512MiB"),
        (["--layers", "L", "--memory-limit", "0"], "--memory-limit '0' is not allowed"),
        (["--layers", "L", "--memory-limit=-1GiB"], "--memory-limit '-1GiB' is not allowed"),
        (["--layers", "L", "--memory-limit", "9" * 400 + "GB"], "is not allowed; write a size"),
        (["--layers", "L", "--link", "20GB"], "--link '20GB' is not allowed; write bytes per"),
        (["--layers", "L", "--link", "0GB/s"], "--link '0GB/s' is not allowed"),
        (["--layers", "L", "--link", "20GB/s,"], "--link '20GB/s,' is not allowed"),
        (["--layers", "L", "--link", "20GB/s,10"], "--link '20GB/s,10' is not allowed"),
    ],
)  # fmt: skip
def test_wrong_options_of_layers_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], expected: str
) -> None:
    layers = str(layers_written(tmp_path))
    args = [layers if arg == "L" else arg for arg in args]
    (text,) = complaints(here(capsys, "predict", written(tmp_path, GOOD), *args))
    assert expected in text


def test_standard_input_is_read_once(tmp_path: Path) -> None:
    (text,) = complaints(pipollux("predict", "-", "--layers", "-", stdin=json.dumps(GOOD)))
    assert text == "PARAMS.json and --layers are both -; give one of them a path"
    args = ("--stages", "2", "--replicas", "1")
    path, layers = written(tmp_path, GOOD), layers_written(tmp_path)
    done = pipollux("predict", path, "-o", "json", *args, "--layers", "-", stdin=layers.read_text())
    named = predicted(path, *args, "--layers", str(layers))
    assert json.loads(done.stdout)["predictions"] == named["predictions"]
