"""The two ends of a channel exchange schemas and addresses through the store.

Each value is exchanged once: an address, or the schema for one shape signature.
"""

from __future__ import annotations

from enum import Enum
from typing import assert_never

from torch.distributed.distributed_c10d import Store

from hocket.errors import SchemaError, WaitError
from hocket.run.cluster.store.poll import poll
from hocket.run.comm.schema import Schema
from hocket.run.comm.transport import Channel


class ChannelEnd(Enum):
    """The end of a channel that a worker has."""

    SENDER = "sender"
    RECEIVER = "receiver"


def agree_on_schema(
    store: Store,
    channel: Channel,
    signature: str,
    schema: Schema | None,
    end: ChannelEnd,
    timeout_s: float,
) -> Schema:
    """Make both ends of a channel use one schema for messages of one signature.

    The sender stores its schema and goes on. The receiver waits for it, and
    compares it with what it knows beforehand.

    Args:
        store: the job's, with a prefix of its own for every attempt.
        channel: the messages' channel.
        signature: determines the shapes, such as `train 8x64`; the same text on
            both ends.
        schema: the sender's, complete; or the receiver's, with `ANY` for dimensions
            that depend on the batch, or None.
        end: the end that calls this.
        timeout_s: how long the receiver waits for the sender.

    Returns:
        The schema that both ends now have.

    Raises:
        SchemaError: the two ends disagree; the message names both.
        WaitError: the sender wrote nothing in time.
    """
    key = schema_key(channel, signature)
    match end:
        case ChannelEnd.SENDER:
            assert schema is not None, "the sender passes its schema"
            store.set(key, str(schema))
            return schema
        case ChannelEnd.RECEIVER:
            what = f"the schema of messages of signature {signature!r}"
            agreed = Schema.parse(wait_for_value(store, channel, key, what, timeout_s))
            if schema is not None and not agreed.fits(schema):
                raise SchemaError(
                    f"{channel}, signature {signature!r}: rank {channel.from_rank} "
                    f"sends {agreed}, rank {channel.to_rank} expects {schema}"
                )
            return agreed
        case _:
            assert_never(end)


def schema_key(channel: Channel, signature: str) -> str:
    """Return where in the store the schema of messages of a signature is."""
    return f"schema/{channel.key}/{signature}"


def wait_for_value(
    store: Store, channel: Channel, key: str, what: str, timeout_s: float
) -> str:
    """Wait for a value that the other end of a channel writes to the store.

    Args:
        store: the job's store.
        channel: the channel, for errors.
        key: the value's key in the store.
        what: describes the value, for errors.
        timeout_s: how long to wait.

    Raises:
        WaitError: it did not come in time.
    """
    try:
        # Not `store.wait`, which lets no signal through: Ctrl-C would take a minute.
        if poll(lambda: store.check([key]), timeout_s):
            return store.get(key).decode()
    except RuntimeError as error:  # of whatever kind a store's errors are
        raise WaitError(
            f"{channel}: lost the job's store while waiting for {what}: {error}"
        ) from error
    raise WaitError(
        f"{channel}: waited {timeout_s:.1f} s for {what}; the other end may have "
        "ended, be stuck, or be slower than the timeout allows"
    )
