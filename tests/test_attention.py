"""Packed rows: their logits are those of the unpacked rows, and no token sees another example."""

from __future__ import annotations

import logging
from itertools import chain
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from nbutils import attention, paths
from nbutils.errors import CourseError

ROWS = [[5, 6, 7, 8, 9], [20, 21, 22], [30, 31, 32, 33], [40, 41]]
on_cpu = pytest.mark.parametrize("backend", ["sdpa", "eager"])


def load(backend: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(paths.TINY_MODEL, dtype="float32", attn_implementation=backend).eval()


def packed(rows: list[list[int]]) -> dict[str, Any]:
    """Two packed rows, flattened by TRL's collator as the trainer's are."""
    half = len(rows) // 2
    parts = [rows[:half], rows[half:]]
    examples = [
        {"input_ids": [*chain(*part)], "labels": [*chain(*part)], "seq_lengths": [len(row) for row in part]}
        for part in parts
    ]
    collate = attention.with_boundaries(DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True))
    batch = collate(examples)
    batch.pop("labels")
    return batch


def logits(model: Any, **batch: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(**batch, use_cache=False).logits[0]


@on_cpu
def test_packed_logits_are_those_of_the_unpacked_rows(backend: str) -> None:
    model = load(backend)
    together = logits(model, **packed(ROWS))
    alone = torch.cat([logits(model, input_ids=torch.tensor([row])) for row in ROWS])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


@on_cpu
def test_no_token_sees_another_example(backend: str) -> None:
    model = load(backend)
    before = logits(model, **packed(ROWS))
    changed = logits(model, **packed([[50, 51, 52, 53, 54], *ROWS[1:]]))
    moved = (before - changed).abs().amax(dim=-1) > 1e-6
    assert moved[: len(ROWS[0])].all() and not moved[len(ROWS[0]) :].any()


def test_the_collator_says_where_examples_begin() -> None:
    batch = packed(ROWS)
    assert batch["cu_seq_lens_q"].tolist() == [0, 5, 8, 12, 14] and batch["cu_seq_lens_q"].dtype == torch.int32
    assert batch["max_length_q"] == batch["max_length_k"] == 5


def test_boundaries_of_several_rows_are_those_of_the_rows_laid_end_to_end() -> None:
    edges, longest = attention.boundaries(torch.tensor([[0, 1, 2, 0], [3, 4, 0, 1]]))
    assert edges.tolist() == [0, 3, 4, 6, 8] and longest == 3


def test_a_batch_without_positions_is_left_as_it_is() -> None:
    assert attention.with_boundaries(lambda rows: {"input_ids": rows})([1]) == {"input_ids": [1]}


def test_padded_batches_and_generation_go_to_torchs_ordinary_attention() -> None:
    varlen, ordinary = load(attention.register()), load("sdpa")
    ids = torch.tensor([[0, 0, 5, 6, 7], [8, 9, 10, 11, 12]])
    mask = (ids != 0).long()
    with torch.inference_mode():
        same = [model(input_ids=ids, attention_mask=mask).logits[mask.bool()] for model in (varlen, ordinary)]
    torch.testing.assert_close(*same)
    said = [model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False) for model in (varlen, ordinary)]
    assert torch.equal(*said)


def kernel(*flat: torch.Tensor, **rest: Any) -> torch.Tensor:
    """Torch's varlen kernel as its documentation describes it, in slow steps: it has no CPU form of its own."""
    query, key, value, edges, *_ = flat
    out = torch.zeros_like(query)
    group = query.shape[1] // key.shape[1]
    left = rest["window_size"][0]
    for start, end in zip(edges.tolist()[:-1], edges.tolist()[1:], strict=True):
        q = query[start:end].transpose(0, 1)
        k, v = (one[start:end].transpose(0, 1).repeat_interleave(group, dim=0) for one in (key, value))
        scores = q @ k.transpose(1, 2) * rest["scale"]
        distance = torch.arange(end - start)[:, None] - torch.arange(end - start)[None]
        hidden = (distance < 0) | ((distance > left) & (left >= 0))
        out[start:end] = scores.masked_fill(hidden, float("-inf")).softmax(-1).matmul(v).transpose(0, 1)
    return out


@pytest.mark.parametrize("drop", [(), attention.BOUNDARIES])
def test_varlen_feeds_the_kernel_the_right_shapes_and_boundaries(
    monkeypatch: pytest.MonkeyPatch, drop: tuple[str, ...]
) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    attention._grouped.cache_clear()
    model = load(attention.register())
    batch = {name: value for name, value in packed(ROWS).items() if name not in drop}
    together = logits(model, **batch)
    alone = torch.cat([logits(load("sdpa"), input_ids=torch.tensor([row])) for row in ROWS])
    attention._grouped.cache_clear()
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def test_rows_without_positions_are_one_example_each(monkeypatch: pytest.MonkeyPatch) -> None:
    query = torch.zeros(2, 4, 3, 8)
    edges, longest = attention._edges(query, {})
    assert edges.tolist() == [0, 3, 6] and longest == 3


def test_only_our_own_name_is_registered() -> None:
    assert attention.use("sdpa") == "sdpa" and attention.use("varlen") == "varlen"
    assert load("varlen").config._attn_implementation == "varlen"


@pytest.mark.parametrize("wish", [{"dropout": 0.1}, {"s_aux": torch.zeros(4)}, {"softcap": 50.0}])
def test_what_the_kernel_has_not_is_refused(wish: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    query = torch.zeros(1, 4, 3, 8)
    with pytest.raises(CourseError, match=f"attention has {next(iter(wish))}"):
        attention._attend(torch.nn.Module(), query, query, query, None, **wish)


def test_trls_warning_about_packing_is_not_shown_and_others_are(caplog: pytest.LogCaptureFixture) -> None:
    attention.use("sdpa")
    logger = logging.getLogger("trl.trainer.sft_trainer")
    for text in ("You are using packing, but the attention implementation is not set to…", "Something else"):
        logger.warning(text)
    assert [record.getMessage() for record in caplog.records] == ["Something else"]
