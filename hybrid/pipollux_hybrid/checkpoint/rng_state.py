"""Random generators that continue across restarts."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from pipollux_hybrid.job.context import JobContext

from .manager import load_state
from .state import State, States

STATE_NAME = "random.pt"
MARK = 0xFFFFF
"""Mask of a checksum: few enough bits for sums of squares to be exact in float64."""
CPU, PYTHON, NUMPY = 0, 1, 2
"""Indices in a replica's list of generators; those of CUDA devices follow, one per stage."""


class RandomState(State):
    """Every replica's generators: torch's on the CPU and the stages' devices, Python's, numpy's.

    With an unchanged number of replicas, each continues its own sequence. With another number, each
    gets a new sequence that only depends on the first numbers of the job, the step and its rank. A
    generator that was equal on all replicas, as for joint decisions, continues on all of them.
    """

    takes_over = False

    def __init__(self, ctx: JobContext) -> None:
        super().__init__(STATE_NAME)
        self._context = ctx
        self._states: list[list[Tensor]] = []
        self._restored: list[list[Tensor]] = []
        self._root: int | None = None
        self._remembered: tuple[Tensor, Any, Any] | None = None

    def agree_root(self) -> None:
        """Agree on the root of the sequences for another number of replicas. All replicas call it
        at the same point, so that survivors know it when replica 0 dies.
        """
        if self._root is None:
            mine = torch.tensor([_derived(torch.get_rng_state(), CPU)])
            self._root = int(self._context.control.gather(mine)[0])

    def sync(self) -> None:
        """Collect every replica's generators."""
        ours = _read(self._cuda_devices())
        lengths = [len(state) for state in ours]
        everyone = self._context.control.gather(torch.cat(ours))
        self._states = [list(packed.split(lengths)) for packed in everyone]

    def save(self, fileobj: BinaryIO) -> None:
        """Write all generators."""
        torch.save({"states": self._states, "root": self._root}, fileobj)

    def load(self, fileobj: BinaryIO) -> None:
        """Read all generators; :meth:`restore_once` applies this replica's."""
        content = torch.load(fileobj, weights_only=True)
        self._restored, self._root = content["states"], content["root"]

    def rejoined(self) -> None:
        """Continue as after a restart with this number of replicas."""
        self._restored = self._restored or self._states
        self.restore_once()

    def restore_once(self) -> None:
        """Apply the restored generators; does nothing when called again."""
        restored, self._restored = self._restored, []
        if not restored:
            return
        env, devices = self._context.env, self._cuda_devices()
        same = len(restored) == env.world_size
        for index in range(len(_read(devices))):
            states = [replica[index] for replica in restored if index < len(replica)]
            if same and states:
                _write(index, states[env.world_rank], devices)
            elif len(states) > 1 and _are_equal(states):
                _write(index, states[0], devices)
            else:
                # Additional stages are seeded from the CPU's generator.
                _seed(index, self._common_seed(restored[0][CPU], index) + env.rank, devices)

    def remember(self) -> Callable[[], None]:
        """Copy the generators of the CPU; those of other devices get new seeds."""
        # In their native form: that of a checkpoint takes some ten times as long.
        cpu, python = torch.get_rng_state(), random.getstate()
        numpy: Any = np.random.get_state(legacy=False)
        self._remembered = cpu, python, numpy

        def put_back() -> None:
            torch.set_rng_state(cpu)
            random.setstate(python)
            np.random.set_state(numpy)

        return put_back

    def marks(self) -> tuple[int, ...]:
        """Return checksums of the copies, which all replicas compare."""
        if self._remembered is None:
            return (0, 0, 0)
        cpu, (_, words, half), numpy = self._remembered
        twister = zlib.crc32(numpy["state"]["key"].data), numpy["state"]["pos"]
        # The hash of a tuple of numbers is equal in every process.
        python, other = hash((words, half or 0.0)), hash((*twister, float(numpy["gauss"])))
        sums = zlib.crc32(cpu.numpy().data), python, other
        return tuple(checksum & MARK for checksum in sums)

    def regroup(self, were_equal: Sequence[bool]) -> None:
        """Continue as after a restart with the surviving replicas; for each generator of the CPU,
        ``were_equal`` is whether it was equal at the last boundary on all replicas, including lost
        ones.
        """
        devices, rank = self._cuda_devices(), self._context.env.rank
        states = _read(devices)
        everyone = self._context.control.gather(torch.cat(states[: NUMPY + 1]))
        lengths = [len(state) for state in states[: NUMPY + 1]]
        parts = list(zip(*(packed.split(lengths) for packed in everyone), strict=True))
        seeds = [self._common_seed(parts[CPU][0], index) for index in range(len(states))]
        for index, seed in enumerate(seeds):
            if index > NUMPY or not (were_equal[index] and _are_equal(parts[index])):
                _seed(index, seed + rank, devices)

    def regrouped(self) -> None:
        """Do nothing: see :meth:`regroup`."""

    def _common_seed(self, state: Tensor, index: int) -> int:
        if self._root is None:
            return _derived(state, index)
        # The hash of a tuple of integers is equal in every process.
        return hash((self._root, self._context.step or 0, index)) % (1 << 62)

    def _cuda_devices(self) -> list[torch.device]:
        return [device for device in self._context.pipeline.devices if device.type == "cuda"]


def draw_alike(ctx: JobContext) -> None:
    """Set the CPU generators of a replica's processes to those of its first process: all run the
    same script, whose random numbers must be equal; layers draw from their stage's device.
    """
    if ctx.mesh is None:
        return
    set_host_generators(ctx.mesh.gather_from_stages(host_generators())[0])


def host_generators() -> bytes:
    """Return the states of the generators of the CPU: torch's, Python's, numpy's."""
    return torch.cat(_read([])).numpy().tobytes()


def set_host_generators(content: bytes) -> None:
    """Set the states of the generators of the CPU to those of another process."""
    states = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    for index, state in enumerate(states.split([len(state) for state in _read([])])):
        _write(index, state, [])


def random_state(ctx: JobContext) -> RandomState:
    """Return the job's random state, registered at its first use."""
    state = ctx.component(States).get(STATE_NAME)
    if state is None:
        state = RandomState(ctx)
        load_state(state)
    assert isinstance(state, RandomState)  # noqa: S101  # the name is this module's own
    return state


def _read(devices: Sequence[torch.device]) -> list[Tensor]:
    """Return the generators' states as bytes, uint8 tensors of shape [length]."""
    _, words, gauss = random.getstate()
    python = _bytes(np.array(words, np.uint32), gauss)
    legacy: Any = np.random.get_state(legacy=True)
    _, keys, position, has_gauss, cached = legacy
    numpy = _bytes(np.append(keys, position).astype(np.uint32), cached if has_gauss else None)
    return [torch.get_rng_state(), python, numpy, *map(torch.cuda.get_rng_state, devices)]


def _write(index: int, state: Tensor, devices: Sequence[torch.device]) -> None:
    if index == CPU:
        torch.set_rng_state(state)
    elif index == PYTHON:
        words, gauss = _words(state)
        random.setstate((3, tuple(words.tolist()), gauss))
    elif index == NUMPY:
        words, gauss = _words(state)
        keys, position = words[:-1], int(words[-1])
        np.random.set_state(("MT19937", keys, position, int(gauss is not None), gauss or 0.0))
    else:
        torch.cuda.set_rng_state(state, devices[index - NUMPY - 1])


def _seed(index: int, seed: int, devices: Sequence[torch.device]) -> None:
    if index == CPU:
        torch.default_generator.manual_seed(seed)
    elif index == PYTHON:
        random.seed(seed)
    elif index == NUMPY:
        np.random.seed(seed % (1 << 32))
    else:
        with torch.cuda.device(devices[index - NUMPY - 1]):
            torch.cuda.manual_seed(seed)


def _bytes(words: np.ndarray[Any, Any], gauss: float | None) -> Tensor:
    """Return a Mersenne twister's words, and the cached second normal number, if any."""
    half = np.array([np.nan if gauss is None else gauss])
    return torch.frombuffer(bytearray(words.tobytes() + half.tobytes()), dtype=torch.uint8)


def _words(state: Tensor) -> tuple[np.ndarray[Any, Any], float | None]:
    content = state.numpy().tobytes()
    half = float(np.frombuffer(content[-8:], np.float64)[0])
    return np.frombuffer(content[:-8], np.uint32).copy(), None if np.isnan(half) else half


def _derived(state: Tensor, index: int) -> int:
    """Return a seed that depends on a generator's state, different for each index."""
    generator = torch.Generator()
    generator.set_state(state)
    return int(torch.randint(1 << 62, (index + 1,), generator=generator)[index].item())


def _are_equal(states: Sequence[Tensor]) -> bool:
    return all(torch.equal(states[0], state) for state in states[1:])
