"""The doctor's report: what this machine is, what it allows, what works, and what to do about the rest.

Not here: mending anything. It looks, mounts nothing, asks for no secret, and never crashes over what it finds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

from nbutils import hardware, platforms, record
from nbutils.doctor import computing, surroundings
from nbutils.doctor.report import Check, Machine, Report, first_line

__all__ = ["Check", "Machine", "Report", "examine"]

CHECKS: dict[str, Callable[[Machine], Check | None]] = {
    "platform": surroundings.check_platform,
    "python": surroundings.check_python,
    "processors": surroundings.check_processors,
    "memory": surroundings.check_memory,
    "time": surroundings.check_time,
    **{name: partial(surroundings.check_folder, name) for name in ("work", "scratch", "keep")},
    "keep lasts": surroundings.check_lasting,
    "inputs": surroundings.check_inputs,
    "drive": surroundings.check_drive,
    "torch": lambda machine: machine.torch,
    "card": computing.check_card,
    "precision": computing.check_precision,
    "packages": computing.check_packages,
    "model hub": surroundings.check_hub,
    "secrets": surroundings.check_secrets,
}


def examine() -> Report:
    """Look at everything; takes a few seconds, most of them for torch and for the network."""
    machine = _machine()
    looked = [_safely(name, look, machine) for name, look in CHECKS.items()]
    versions = {"python": sys.version.split()[0]} | record.versions()
    numbers, room = surroundings.limits(machine.platform), surroundings.room(machine.folders)
    checks = tuple(check for check in looked if check)
    return Report(machine.platform, machine.folders, room, numbers, machine.card, checks, versions)


def _machine() -> Machine:
    platform = platforms.detect()
    folders, torch = platforms.folders(platform), computing.check_torch()
    try:
        return Machine(platform, folders, torch, hardware.card() if torch.status == "OK" else None)
    except Exception as problem:  # a driver may fail in any way; the report says which
        return Machine(platform, folders, torch, None, first_line(problem))


def _safely(name: str, look: Callable[[Machine], Check | None], machine: Machine) -> Check | None:
    try:
        return look(machine)
    except Exception as problem:  # a report with one gap is worth more than none
        seen = f"could not be looked at ({first_line(problem)})"
        return Check(name, "WARN", seen, "go on; if a lesson stops, show this line to whoever helps you")
