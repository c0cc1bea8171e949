"""Every kind of fault by name; each returns after the injection, not after the recovery."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import TypeAlias

import outer_faults as outer  # same folder
import process_faults as processes
import scheduler_faults as scheduler
from world import World

Injection: TypeAlias = Callable[[World, random.Random], str | None]

INJECTIONS: Mapping[str, tuple[int, Injection]] = {
    "scheduler killed": (3, scheduler.kill_scheduler),
    "scheduler killed in a move": (3, scheduler.kill_scheduler_in_a_move),
    "scheduler killed in an elastic resize": (3, scheduler.kill_scheduler_in_a_resize),
    "joining replica killed": (3, scheduler.kill_joining_replica),
    "scheduler killed in a submission": (3, scheduler.kill_scheduler_in_a_submission),
    "scheduler killed as it starts, twice": (2, scheduler.kill_scheduler_as_it_starts),
    "scheduler and an agent killed": (2, scheduler.kill_scheduler_and_agent),
    "worker frozen, scheduler killed": (1, scheduler.kill_scheduler_and_freeze_worker),
    "second scheduler started": (1, scheduler.serve_twice),
    "runner killed": (2, processes.kill_runner),
    "torchrun agent killed": (2, processes.kill_agent),
    "worker killed": (2, processes.kill_worker),
    "worker killed in a save": (2, processes.kill_worker_in_a_save),
    "whole attempt killed": (2, processes.kill_attempt),
    "worker frozen": (1, processes.freeze_worker),
    "agent stopped from outside": (1, processes.stop_from_outside),
    "disk full": (1, outer.fill_disk),
    "disk full in a move": (2, outer.fill_disk_in_a_move),
    "node drained": (1, outer.drain_node),
    "node dead": (1, outer.lose_node),
    "job suspended and resumed": (1, outer.suspend_and_resume),
    "hints of 10 MB": (1, outer.send_a_large_hint),
    "hints that are not numbers": (1, outer.send_a_nan_hint),
    "submission of 10 MB": (1, outer.send_a_large_submission),
    "wrong token": (1, outer.send_with_a_wrong_token),
    "clock set": (1, outer.set_clock),
}
"""Every kind of fault, and its relative frequency."""
