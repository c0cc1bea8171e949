"""A user's mistake meets one sentence that names the argument, its value and the fix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset, IterableDataset

from pipollux_hybrid import (
    Accumulator,
    AdaptiveBPTTIterator,
    AdaptiveDataLoader,
    AdaScale,
    ConfigurationError,
    HybridParallel,
    init_process_group,
    remaining_epochs_until,
)
from pipollux_hybrid.job import context as contexts
from pipollux_hybrid.job.env import JobEnvironment
from pipollux_hybrid.partition.placement import choose_devices
from tests.hybrid.models import make_data, make_model


@pytest.fixture(autouse=True)
def fresh_context() -> Iterator[None]:
    contexts.reset()
    yield
    contexts.reset()


def wrap(module: nn.Module | None = None, **options: object) -> HybridParallel:
    module = module or make_model("mlp")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return HybridParallel(module, optimizer, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_stages": 0}, r"num_stages=0: a whole number of at least 1"),
        ({"num_stages": 99}, r"num_stages=99: the module has only 9 layers"),
        ({"balance": [4, 4]}, r"balance=\[4, 4\] covers 8 layers, the module has 9"),
        ({"balance": [9, 0]}, r"balance=\[9, 0\]: each stage needs at least one layer"),
        ({"balance": [5, 4], "num_stages": 3}, r"makes 2 stages, but 3 were asked for"),
        ({"num_microbatches": 0}, r"num_microbatches=0"),
        ({"num_microbatches": 2.5}, r"num_microbatches=2.5"),
        (
            {"activation_checkpoint": "sometimes"},
            r"activation_checkpoint='sometimes': 'always', 'except_last', 'never'",
        ),
        ({"num_stages": 2, "devices": ["cpu"]}, r"2 stages need 2 devices, devices give 1"),
        (
            {"activation_checkpoint": ["never", "often"]},
            r"activation_checkpoint=\['never', 'often'\]: .* or in a multi-process pipeline a list",
        ),
        (
            {"activation_checkpoint": ["never", "always"]},
            r"\['never', 'always'\] has 2 modes, and the number of stages is 1 .*: give one mode",
        ),
        (
            {"activation_checkpoint": ["never", "always"], "num_stages": 2},
            r"\['never', 'always'\]: one process drives all 2 stages .* one mode together: give",
        ),
        ({"balance": 3}, r"balance=3: a list with the number of layers of each stage is allowed"),
        ({"balance": torch.tensor([4, 5])}, r"balance is a Tensor: a list with"),
        ({"devices": "cpu"}, r"devices='cpu': a list with one device for each stage is needed"),
        ({"devices": ["tpu:0"]}, r"devices ask for 'tpu:0', and stages can run on 'cpu'"),
        ({"devices": ["meta"]}, r"devices ask for 'meta', and stages can run on 'cpu'"),
        ({"devices": ["cuda:77"]}, r"devices ask for 'cuda:77', and stages can run on 'cpu'"),
        ({"memory_limit": "80GB"}, r"memory_limit='80GB': a number of bytes above 0 is needed"),
        ({"scaling_rule": "adascale"}, r"scaling_rule='adascale': .* such as AdaScale\(\)"),
        ({"scaling_rule": AdaScale}, r"scaling_rule is the class AdaScale: an object with factor"),
        ({"lr_scheduler": "cosine"}, r"lr_scheduler='cosine': a scheduler over the optimizer"),
        ({"lr_scheduler": StepLR}, r"lr_scheduler is the class StepLR: a scheduler over"),
        ({"broadcast_buffers": "no"}, r"broadcast_buffers='no': True or False is needed"),
    ],
)
def test_hybrid_parallel(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        wrap(**options)


def test_modules() -> None:
    with pytest.raises(ConfigurationError, match=r"Linear is no plain nn.Sequential, .* example"):
        wrap(nn.Linear(2, 2))
    shared = nn.Linear(6, 6)
    with pytest.raises(ConfigurationError, match=r"layers '0' and '2' .* the same object"):
        wrap(nn.Sequential(shared, nn.Tanh(), shared))
    module, other = make_model("mlp"), make_model("mlp")
    with pytest.raises(ConfigurationError, match=r"that is not in module"):
        HybridParallel(module, torch.optim.SGD(other.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (torch.optim.SGD, r"optimizer is the class SGD: one optimizer over module.parameters\(\)"),
        ("sgd", r"optimizer='sgd': one optimizer"),
        ([make_model("mlp")], r"optimizer is a list: one optimizer"),
        (
            torch.optim.LBFGS(make_model("mlp").parameters()),
            r"optimizer is a LBFGS, whose step\(closure\) evaluates the loss more .*AdamW",
        ),
    ],
)
def test_optimizers(optimizer: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        HybridParallel(make_model("mlp"), optimizer)


def test_a_scheduler_over_another_optimizer() -> None:
    other = torch.optim.Adam(make_model("mlp").parameters())
    with pytest.raises(ConfigurationError, match=r"a StepLR over another optimizer \(Adam\) than"):
        wrap(lr_scheduler=StepLR(other, 1))


def test_a_scheduler_need_not_tell_its_optimizer() -> None:
    class Constant:
        def step(self) -> None: ...

        def state_dict(self) -> dict[str, object]:
            return {}

        def load_state_dict(self, state: object) -> None: ...

    wrap(lr_scheduler=Constant())


def test_keyword_arguments() -> None:
    model = wrap(nn.Sequential(nn.Linear(6, 3)))
    with pytest.raises(
        ConfigurationError, match=r"model\({'ids': ids, 'mask': mask}\); docs/howto/layers"
    ):
        model(ids=torch.zeros(2, 6), mask=None)


def test_inputs() -> None:
    model = wrap(nn.Sequential(nn.Linear(6, 3)))
    for inputs, message in [
        ((3.0,), "the model got a float"),
        ((torch.tensor(1.0),), "a scalar"),
        ((torch.zeros(0, 6),), "an empty batch"),
        ((torch.zeros(2, 6), torch.zeros(3, 6)), r"different size \(\(2, 6\), \(3, 6\)\)"),
    ]:
        with pytest.raises(ConfigurationError, match=message):
            model(*inputs)


def test_state_dict_is_the_plain_models() -> None:
    plain = make_model("mlp")
    model = wrap(num_stages=3)
    assert list(model.state_dict()) == list(plain.state_dict())
    model.load_state_dict(plain.state_dict())
    plain.load_state_dict(model.state_dict())


def test_evaluation_gives_the_plain_models_outputs() -> None:
    plain = make_model("mlp")
    model = wrap(num_stages=3, num_microbatches=4)
    inputs = make_data("mlp", 10).tensors[0]
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(inputs), plain(inputs))


class Lengthless(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_loader() -> None:
    data = make_data("mlp", 10)
    for batch_size in (0, -1, 2.5, True):
        with pytest.raises(ConfigurationError, match=r"batch_size=.*at least 1"):
            AdaptiveDataLoader(data, batch_size=batch_size)
    for dataset, name in [
        (DataLoader(data), "is a DataLoader"),
        (AdaptiveDataLoader(data), "is an AdaptiveDataLoader"),
        ({"train": data}, "is a dict"),
        ("data.csv", "='data.csv'"),
        (Stream, " is the class Stream"),
    ]:
        with pytest.raises(ConfigurationError, match=rf"dataset ?{name}: a data set is needed"):
            AdaptiveDataLoader(dataset)
    for name, value in [("shuffle", "yes"), ("shuffle", 1), ("seed", "x"), ("seed", 0.5)]:
        with pytest.raises(ConfigurationError, match=rf"{name}={value!r}: .* is needed"):
            AdaptiveDataLoader(data, **{name: value})
    assert AdaptiveDataLoader(data, shuffle=None).current_index == 0, "as DataLoader has it"
    with pytest.raises(ConfigurationError, match=r"takes no sampler"):
        AdaptiveDataLoader(data, sampler=[1, 2])
    with pytest.raises(ConfigurationError, match=r"Lengthless has no length"):
        AdaptiveDataLoader(Lengthless())
    with pytest.raises(ConfigurationError, match=r"in_order=False"):
        AdaptiveDataLoader(data, num_workers=1, in_order=False)
    loader = AdaptiveDataLoader(data, batch_size=4)
    for name in ("batch_size", "drop_last", "sampler"):
        with pytest.raises(ConfigurationError, match=rf"{name} of an AdaptiveDataLoader cannot"):
            setattr(loader, name, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shuffle": True}, r"shuffle=True with an iterable data set"),
        ({"num_workers": 2}, r"num_workers=2 with an iterable data set: .* use 0 or 1"),
        ({"num_workers": 1, "persistent_workers": True}, r"persistent_workers=True with an iter"),
    ],
)
def test_stream_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        AdaptiveDataLoader(Stream(), **options)


def test_loader_of_a_stream_has_no_length() -> None:
    with pytest.raises(TypeError, match=r"has no len"):
        len(AdaptiveDataLoader(Stream()))


def test_only_one_loader_autoscales() -> None:
    data = make_data("mlp", 10)
    AdaptiveDataLoader(data).autoscale_batch_size(4)
    with pytest.raises(ConfigurationError, match=r"called on two loaders"):
        AdaptiveDataLoader(data).autoscale_batch_size(4)


@pytest.mark.parametrize(
    ("tokens", "bptt_len", "message"),
    [
        (torch.zeros(4, 2, dtype=torch.int64), 2, r"tokens of shape \(4, 2\)"),
        (torch.zeros(4), 2, r"tokens of shape \(4,\) and type torch.float32"),
        (torch.zeros(1, dtype=torch.int64), 2, r"at least two integers"),
        (torch.zeros(4, dtype=torch.int64), 0, r"bptt_len=0: a whole number"),
    ],
)
def test_bptt_arguments(tokens: torch.Tensor, bptt_len: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        AdaptiveBPTTIterator(tokens, 2, bptt_len)


def test_loops_do_not_nest() -> None:
    loader, other = (AdaptiveDataLoader(make_data("mlp", 10), batch_size=4) for _ in range(2))
    for _ in loader:
        for what in (lambda: list(other), lambda: list(loader), Accumulator):
            with pytest.raises(ConfigurationError, match=r"inside the body of a loop"):
                what()
    assert len(list(other)) == 3, "and afterwards nothing is in the way"
    for _ in remaining_epochs_until(2):
        with pytest.raises(ConfigurationError, match=r"inside another loop over epochs"):
            next(remaining_epochs_until(3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4,), r"max_batch_size=4: must be at least batch_size=8"),
        (("16",), r"max_batch_size='16': a whole number is needed"),
        ((16, 8), r"local_bsz_bounds=8: \(smallest, largest\) of one replica"),
        ((16, (1, 2, 3)), r"local_bsz_bounds=\(1, 2, 3\): \(smallest, largest\) of one replica"),
        ((16, (1.5, 8)), r"local_bsz_bounds=\(1\.5, 8\): \(smallest, largest\) of one replica"),
        ((16, None, "no"), r"gradient_accumulation='no': True or False"),
        ((16, (0, 4)), r"local_bsz_bounds=\(0, 4\): \(smallest, largest\)"),
        ((16, (8, 4)), r"local_bsz_bounds=\(8, 4\)"),
        ((16, (32, 64)), r"at least 32 samples per replica on 1 replica exceed max_batch_size=16"),
        ((16, (1, 4)), r"do not reach batch_size=8; pass gradient_accumulation=True"),
    ],
)
def test_batch_size_limits(arguments: tuple[object, ...], message: str) -> None:
    loader = AdaptiveDataLoader(make_data("mlp", 10), batch_size=8)
    with pytest.raises(ConfigurationError, match=message):
        loader.autoscale_batch_size(*arguments)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, r"RANK is 2 but WORLD_SIZE is 2"),
        ({"RANK": "one"}, r"environment variable RANK='one'"),
        ({"PIPOLLUX_HINTS_INTERVAL": "0"}, r"PIPOLLUX_HINTS_INTERVAL='0': a positive number"),
        ({"PIPOLLUX_NUM_STAGES": "-2"}, r"PIPOLLUX_NUM_STAGES='-2'"),
    ],
)
def test_environment(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        JobEnvironment.read(environment)


def test_several_replicas_need_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match="start the script with torchrun"):
        init_process_group()
    with pytest.raises(ConfigurationError, match=r"call pipollux.init_process_group\(\)"):
        make_loader()
    with pytest.raises(ConfigurationError, match=r"'nccl' and 'gloo' are allowed"):
        init_process_group("mpi")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-5a")
    with pytest.raises(ConfigurationError, match="NCCL does not support MIG slices"):
        init_process_group("nccl")


def make_loader() -> AdaptiveDataLoader[object]:
    return AdaptiveDataLoader(make_data("mlp", 4))


def test_epochs() -> None:
    with pytest.raises(ValueError, match="num_epochs=-1"):
        list(remaining_epochs_until(-1))
    assert list(remaining_epochs_until(3)) == [0, 1, 2]
    assert list(remaining_epochs_until(3)) == [], "they are over"


def test_devices_of_the_environment() -> None:
    env = JobEnvironment.read({"PIPOLLUX_DEVICES": "cpu, cpu"})
    assert choose_devices(env, 2, None) == [torch.device("cpu")] * 2
    with pytest.raises(
        ConfigurationError, match="3 stages need 3 devices, PIPOLLUX_DEVICES give 2"
    ):
        choose_devices(env, 3, None)
    env = JobEnvironment.read({"PIPOLLUX_DEVICES": "cpu, cuda:77"})
    assert choose_devices(env, 1, None) == [torch.device("cpu")], "the second is not wanted"
    with pytest.raises(ConfigurationError, match="PIPOLLUX_DEVICES ask for 'cuda:77'"):
        choose_devices(env, 2, None)


def test_devices_of_a_scheduler_that_torch_does_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script cannot choose others there, so it is told what its job or the scheduler needs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    env = JobEnvironment.read({"PIPOLLUX_DEVICES": "cuda:0"})
    with pytest.raises(ConfigurationError, match="give the job a torch built for CUDA"):
        choose_devices(env, 1, None)
    with pytest.raises(ConfigurationError, match="leave devices out to train on the CPU"):
        choose_devices(env, 1, ["cuda:0"])
