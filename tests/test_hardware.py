"""hardware: what each card gets, and why."""

from __future__ import annotations

import os
from typing import Any

import pytest

from nbutils import hardware
from nbutils.errors import CourseError
from nbutils.hardware import Card

T4 = Card("Tesla T4", (7, 5), 14.7, 2)
P100 = Card("Tesla P100", (6, 0), 15.9, 1)
A100 = Card("NVIDIA A100", (8, 0), 39.4, 1)


@pytest.mark.parametrize(
    ("card", "precision", "engine"),
    [(None, "fp32", "vllm-cpu"), (P100, "fp16", "transformers"), (T4, "fp16", "vllm"), (A100, "bf16", "vllm")],
)
def test_each_card_gets_what_it_can_do(card: Card | None, precision: str, engine: str) -> None:
    assert hardware.precision(card).value == precision
    assert hardware.engine(card).value == engine


def test_a_card_vllm_cannot_use_is_told_why() -> None:
    reason = hardware.engine(P100).reason
    assert "7.5" in reason and "6.0" in reason and "transformers serve" in reason


def test_old_cards_get_torchs_own_attention_and_no_triton_kernels() -> None:
    for card in (None, T4, P100):
        assert hardware.attention(card).value == "sdpa"
        assert hardware.liger(card).value is False


def test_every_choice_has_a_reason() -> None:
    for decide in (hardware.precision, hardware.attention, hardware.liger, hardware.engine):
        for card in (None, T4, P100, A100):
            assert len(decide(card).reason) > 10


def test_a_real_operation_runs_on_this_machine() -> None:
    done = hardware.working_operation(hardware.card())
    assert done.value is True, done.reason


KAGGLE_BUILD = ["sm_70", "sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that names no architecture and whose first operation fails, as a card without kernels makes it."""
    import torch

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nmore")

    monkeypatch.setattr(torch.cuda, "get_arch_list", list)
    monkeypatch.setattr(torch, "ones", refuse)


def test_a_failing_operation_is_reported_not_raised(refused: None) -> None:
    done = hardware.working_operation(P100)
    assert done.value is False and done.reason.endswith("on the device")
    assert "cu126" in hardware.cure(P100, done.reason)


def test_a_card_that_does_not_compute_stops_the_lesson_with_two_cures(refused: None) -> None:
    with pytest.raises(CourseError, match="no kernel image") as caught:
        hardware.require_working(P100)
    assert "GPU T4 x2" in caught.value.todo and "cu126" in caught.value.todo and "2.14" in caught.value.todo


def test_a_device_that_computes_stops_nothing() -> None:
    hardware.require_working(hardware.card())


def test_torch_is_asked_for_its_kernels_before_the_card_is(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: KAGGLE_BUILD)
    done = hardware.working_operation(P100)
    assert done.value is False and "no kernels for Tesla P100 (sm_60)" in done.reason and "sm_70" in done.reason
    newest = Card("Next", (13, 0), 99.0, 1)
    assert "newer torch" in hardware.cure(newest, hardware.working_operation(newest).reason)


@pytest.mark.parametrize(
    ("capability", "built", "works"),
    [
        ((6, 0), KAGGLE_BUILD, False), ((7, 5), KAGGLE_BUILD, True), ((8, 9), KAGGLE_BUILD, True),
        ((12, 1), KAGGLE_BUILD, True), ((13, 0), KAGGLE_BUILD, False), ((13, 0), ["sm_90", "compute_90"], True),
        ((6, 0), ["sm_50", "sm_60", "sm_70"], True), ((6, 0), ["sm_61"], False), ((9, 0), ["sm_90a"], True),
        ((9, 4), ["gfx942"], True), ((6, 0), [], True),
    ],
)  # fmt: skip
def test_a_binary_serves_its_generation_and_ptx_what_comes_after(
    capability: tuple[int, int], built: list[str], works: bool
) -> None:
    assert hardware.has_kernels(capability, built) is works


def test_several_cards_are_said() -> None:
    assert str(T4) == "2 x Tesla T4 (capability 7.5, 14.7 GiB)"


def test_compute_threads_sleep_when_idle_unless_asked_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY")
    hardware.share_processors()
    assert os.environ["OMP_WAIT_POLICY"] == "passive"
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    hardware.share_processors()
    assert os.environ["OMP_WAIT_POLICY"] == "active"


def test_peak_memory_is_positive() -> None:
    assert hardware.peak_memory_gib() > 0.01


def test_torch_leaves_no_gaps_in_the_cards_memory_where_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        supported, fails = 1, 0

        def cuInit(self, flags: int) -> int:
            return self.fails

        def cuDeviceGetAttribute(self, answer: Any, number: int, device: int) -> int:
            assert number == 102 and device == 0
            answer._obj.value = self.supported
            return 0

    def set_by(driver: Driver | None, release: str = "6.6.105+") -> str | None:
        def load(name: str) -> Driver:
            if driver is None:
                raise OSError(name)
            return driver

        monkeypatch.setattr("ctypes.CDLL", load)
        monkeypatch.setattr("platform.release", lambda: release)
        monkeypatch.setenv(names[0], "")
        monkeypatch.delenv(names[0])
        hardware.leave_no_gaps()
        return os.environ.get(names[0])

    names, virtual, broken = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"), Driver(), Driver()
    virtual.supported, broken.fails = 0, 100
    monkeypatch.delenv(names[1], raising=False)
    assert set_by(Driver()) == "expandable_segments:True"
    assert "expandable_segments:False" in hardware.cure(T4, "CUDA driver error: operation not supported")
    assert set_by(None) is set_by(virtual) is set_by(broken) is None
    assert set_by(Driver(), "6.6.87.2-microsoft-standard-WSL2") is None
    monkeypatch.setenv(names[1], "max_split_size_mb:64")  # the learner's own choice
    assert set_by(Driver()) is None
    assert "restart the machine" in hardware.cure(T4, "CUDA driver error: unknown error")


def test_torch_is_shown_one_card_unless_somebody_decided_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("LOCAL_RANK", "1")
    hardware.use_one_card()
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    monkeypatch.delenv("LOCAL_RANK")
    hardware.use_one_card()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    hardware.use_one_card()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
