"""How the two ends of a channel come to one schema."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch.distributed as dist

from hocket.errors import SchemaError, WaitError
from hocket.run.comm.schema import ANY, Schema, TensorSpec
from hocket.run.comm.schema_exchange import ChannelEnd, agree_on_schema, wait_for_value
from hocket.run.comm.transport import Channel

CHANNEL = Channel("F0>1", 4, 5)
SENT = Schema.parse("float32[4, 8], int64[4]")


def test_the_receiver_learns_what_the_sender_sends() -> None:
    """Per channel and signature: another signature has another schema."""
    store = dist.HashStore()
    small = Schema.parse("float32[1, 8], int64[1]")
    agree_on_schema(store, CHANNEL, "4", SENT, ChannelEnd.SENDER, 1.0)
    agree_on_schema(store, CHANNEL, "1", small, ChannelEnd.SENDER, 1.0)
    agree_on_schema(store, Channel("F0>1", 0, 1), "4", small, ChannelEnd.SENDER, 1.0)

    assert agree_on_schema(store, CHANNEL, "4", None, ChannelEnd.RECEIVER, 1.0) == SENT
    assert agree_on_schema(store, CHANNEL, "1", None, ChannelEnd.RECEIVER, 1.0) == small


def test_accepts_what_fits_the_receivers_knowledge() -> None:
    """The receiver may know all but the batch's dimensions."""
    store = dist.HashStore()
    agree_on_schema(store, CHANNEL, "4", SENT, ChannelEnd.SENDER, 1.0)
    pattern = Schema((TensorSpec((ANY, 8), "float32"), TensorSpec((ANY,), "int64")))

    assert (
        agree_on_schema(store, CHANNEL, "4", pattern, ChannelEnd.RECEIVER, 1.0) == SENT
    )


@pytest.mark.parametrize(
    "expected",
    [
        "float32[4, 9], int64[4]",
        "float64[4, 8], int64[4]",
        "int64[4], float32[4, 8]",
        "float32[4, 8]",
    ],
    ids=["shape", "type", "order", "number"],
)
def test_a_disagreement_names_both_sides(expected: str) -> None:
    """Channel, signature, ranks, and both schemas, in one message."""
    store = dist.HashStore()
    agree_on_schema(store, CHANNEL, "train 4x8", SENT, ChannelEnd.SENDER, 1.0)
    with pytest.raises(SchemaError) as caught:
        agree_on_schema(
            store,
            CHANNEL,
            "train 4x8",
            Schema.parse(expected),
            ChannelEnd.RECEIVER,
            1.0,
        )

    assert str(caught.value) == (
        "F0>1 (rank 4 to rank 5), signature 'train 4x8': rank 4 sends "
        f"float32[4, 8], int64[4], rank 5 expects {expected}"
    )


def test_a_silent_sender_ends_in_an_error(tmp_path: Path) -> None:
    """It names the channel, both ranks and the seconds, and comes in time."""
    store = dist.FileStore(str(tmp_path / "store"), 2)
    begin_s = time.monotonic()
    with pytest.raises(WaitError, match=r"F0>1 \(rank 4 to rank 5\): waited 0\.2 s"):
        agree_on_schema(store, CHANNEL, "4", None, ChannelEnd.RECEIVER, 0.2)

    assert 0.2 <= time.monotonic() - begin_s < 5.0


def test_a_word_already_there_is_read_at_once() -> None:
    """Even by those who have no time."""
    store = dist.HashStore()
    store.set("key", "word")

    assert wait_for_value(store, CHANNEL, "key", "a word", 0.0) == "word"
