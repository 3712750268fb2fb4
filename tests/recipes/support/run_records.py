"""Records of steps and evaluations, for tests of what reads them."""

from __future__ import annotations

from hocket.recipes.training.records import (
    EpochRecord,
    EvaluationRecord,
    StepRecord,
    SummaryRecord,
)


def step_record(
    step: int = 0,
    *,
    loss: float = 1.0,
    num_samples: int = 8,
    seconds: float = 0.5,
    bubble_fraction: float = 0.25,
) -> StepRecord:
    """A step; two steps are an epoch."""
    return StepRecord(
        step=step,
        epoch=step // 2,
        loss=loss,
        losses={"loss": loss, "extra": 3.0},
        num_samples=num_samples,
        seconds=seconds,
        bubble_fraction=bubble_fraction,
        learning_rate=0.1,
        grad_norm=2.0,
        peak_bytes=3 * 2**20,
    )


def evaluation_record(num_steps: int = 2, *, accuracy: float = 0.5) -> EvaluationRecord:
    """An evaluation at the end of an epoch."""
    return EvaluationRecord(
        num_steps=num_steps,
        epoch=num_steps // 2 - 1,
        loss=0.75,
        metrics={"accuracy": accuracy, "bits_per_byte": 2.5},
        num_samples=10,
    )


def epoch_record(num_steps: int = 2) -> EpochRecord:
    """An epoch of two steps, in which half of the parameters were frozen."""
    return EpochRecord(
        epoch=num_steps // 2 - 1,
        num_steps=num_steps,
        layout="2x1",
        num_frozen=3,
        num_active_parameters=600,
        num_frozen_parameters=400,
        num_samples=16,
        seconds=2.0,
        data_s=0.25,
        transition_s=0.5,
        forward_s=0.5,
        backward_s=0.75,
        reduce_s=0.0,
        cache_s=0.125,
        cache_hits=5,
        num_reductions=4,
        reduced_bytes=8_000_000,
        message_bytes=2_000_000,
        link_bytes_per_s=1e9,
        ring_bytes_per_s=5e8,
    )


def summary_record() -> SummaryRecord:
    """A run of four steps."""
    return SummaryRecord(
        num_steps=4,
        num_samples=32,
        seconds=75.0,
        training_s=2.0,
        evaluation=evaluation_record(4, accuracy=0.975),
        peak_bytes=3 * 2**20,
        predicted_bubble_fraction=0.125,
        measured_bubble_fraction=0.25,
        predicted_step_s=0.010,
        measured_step_s=0.012,
    )
