"""What computes: torch, the card and a real operation on it, the packages of the lessons.

Not here: the machine around it (surroundings).
"""

from __future__ import annotations

import importlib.util

from nbutils import hardware, install
from nbutils.doctor.report import Check, Machine, first_line
from nbutils.platforms import Platform

GET_A_CARD = {
    "colab": "Runtime > Change runtime type > T4 GPU",
    "kaggle": "Settings > Accelerator > GPU T4 x2",
    "autodl": "it runs in the mode without a card (无卡模式): shut it down and start it normally",
}


def check_torch() -> Check:
    """torch as it is installed; importing it is the test."""
    install_it = "start any lesson: its first cells install what is missing"
    if importlib.util.find_spec("torch") is None:
        return Check("torch", "FAIL", "torch is not installed", install_it)
    try:
        import torch

        return Check("torch", "OK", str(torch.__version__))
    except Exception as problem:  # a broken installation shows as ImportError, OSError and others
        return Check("torch", "FAIL", f"torch cannot be imported ({first_line(problem)})", "reinstall torch")


def check_card(machine: Machine) -> Check | None:
    """The card, and a real operation on it."""
    if machine.torch.status != "OK":
        return None
    if machine.trouble:
        return Check("card", "FAIL", f"torch cannot ask the card ({machine.trouble})", "restart the machine")
    if machine.card is None:
        return _no_card(machine.platform, machine.torch.seen)
    done = hardware.working_operation(machine.card)
    if done.value:
        return Check("card", "OK", done.reason)
    return Check("card", "FAIL", done.reason, hardware.cure(machine.card, done.reason))


def _no_card(platform: Platform, torch: str) -> Check:
    driver = hardware.ask_driver("-L").partition("\n")[0]
    if driver.startswith("GPU "):
        todo = "install a torch build for CUDA, or a newer driver if it is one already"
        return Check("card", "WARN", f"nvidia-smi lists {driver.split(' (')[0]}, but torch {torch} cannot use it", todo)
    told = f" (nvidia-smi: {driver})" if driver else ""
    if platform.name == "local" and not driver:
        return Check("card", "OK", "none: lessons run on the CPU, which is enough for the bundled tiny model")
    todo = GET_A_CARD.get(platform.name, "start a machine with a card")
    return Check(
        "card", "WARN", f"none{told}: training here uses the CPU, enough for the bundled tiny model only", todo
    )


def check_precision(machine: Machine) -> Check | None:
    """The number format training will use."""
    if machine.torch.status != "OK":
        return None
    choice = hardware.precision(machine.card)
    return Check("precision", "OK", f"{choice.value}: {choice.reason}")


def check_packages(machine: Machine) -> Check:
    """What the lessons import, and what stands in their way."""
    wanted = install.requirements("train")
    blockers = [f"{name}{versions}" for name, versions in install.BLOCKERS.items()]
    blocking = [text for text in blockers if not install.unsatisfied([text])]
    missing = install.unsatisfied(wanted)
    problems = [f"missing: {', '.join(missing)}"] if missing else []
    problems += [f"in the way: {', '.join(blocking)}"] if blocking else []
    if problems:
        todo = "start any lesson: its first cells put this right and leave torch as it is"
        return Check("packages", "WARN", "; ".join(problems), todo)
    return Check("packages", "OK", f"all {len(wanted)} the lessons import" if wanted else "a checkout, not installed")
