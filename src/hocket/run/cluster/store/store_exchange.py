"""Exchanges small JSON values between workers through the store.

For what is rare (agreeing on a plan, a barrier at the end): a round takes milliseconds.

    ranks 1, 2, ...   write 7/1, 7/2, ...                       read 7/all
    rank 0            writes 7/0, reads all of them, writes 7/all

So a worker's requests do not grow with the number of workers, but for rank 0's.
Every worker must make the same exchanges in the same order; each has its own keys. A
value comes with the call that it belongs to, so that workers which call different
functions find out at once, and say which.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, Final

import torch.distributed as dist

from hocket.errors import SchemaError, WaitError
from hocket.run.cluster.store.poll import poll
from hocket.run.diagnostics.job_folder import Json

MAX_BYTES: Final = 16 * 2**20  # of one worker's JSON
_LOOK_S: Final = 1.0  # between looks at all others, of those that wait for rank 0
_MEETING: Final = "begin"  # of a call that every worker must make


@dataclass(slots=True)
class StoreExchange:
    """One worker's end of the exchanges.

    Args:
        store: the store that all workers share, with a prefix of this attempt's own.
        rank: this worker's rank.
        world_size: number of workers.
        timeout_s: how long to wait for the others.
        rank_0_holds_store: whether rank 0's own process hosts the store; after a
            barrier it then ends last.

    Attributes:
        call: the user's call that makes the exchanges now, such as "evaluate()".
        turn: the number of the next exchange.
    """

    store: dist.Store
    rank: int
    world_size: int
    timeout_s: float
    rank_0_holds_store: bool = False
    call: str = ""
    turn: int = 0

    def meet(self, run: int, step: int) -> None:
        """Begin the user's call on every worker.

        Args:
            run: the number of the run whose call it is, equal on all workers.
            step: the steps that this run has begun, for `elsewhere` on other workers.

        Raises:
            WaitError: ranks that the message names did not come.
            SchemaError: another worker made another call.
        """
        self.gather(_MEETING, [run, step])

    def elsewhere(self, run: int, step: int) -> SchemaError | None:
        """Return the error of workers that part, asked while this one is in a step.

        It is that another worker has begun a call that all must make, and has not begun
        this step: each would wait for the other. The other worker raises it, too.

        Args:
            run: the number of the run whose step it is.
            step: the steps that it has begun.
        """
        turn = self.turn
        for rank in range(self.world_size):
            key = f"exchange/{turn}/{rank}"
            if rank == self.rank or not self.store.check([key]):
                continue
            call, what, value = json.loads(self.store.get(key))
            if what == _MEETING and value[0] == run and value[1] < step:
                here = f"step() or train() for step {step - 1}"
                self._set(turn, _MEETING, None, here)
                return self._parted({rank: call, self.rank: here})
        return None

    def gather(self, name: str, value: Json) -> list[Any]:
        """Return every worker's value, by rank, on every worker.

        Raises:
            WaitError: ranks that the message names did not come.
            SchemaError: a value is longer than 16 MiB; or another worker made another
                call.
        """
        return self._gather(name, value, self.timeout_s)

    def broadcast(
        self, name: str, value: Json, from_rank: int = 0, timeout_s: float | None = None
    ) -> Any:
        """Return one worker's value; those of the others are ignored.

        Args:
            name: the exchange's name, for errors.
            value: the value to send, on the sending rank.
            from_rank: the rank that sends.
            timeout_s: how long to wait for it; the exchange's timeout when not given.

        Raises:
            WaitError: the sending worker did not come.
            SchemaError: the value is longer than 16 MiB; or the sending worker made
                another call.
        """
        turn = self._next_turn()
        if self.rank == from_rank:
            self._set(turn, name, value)
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        return self._wait(turn, name, timeout_s, [from_rank])[from_rank]

    def barrier(self, name: str, timeout_s: float | None = None) -> None:
        """Return when every worker has called this.

        Raises:
            WaitError: ranks that the message names did not come.
            SchemaError: another worker made another call.
        """
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        self._gather(name, None, timeout_s)
        if self.rank_0_holds_store:
            self._leave_in_order(self.turn - 1, name, timeout_s)

    def _gather(self, name: str, value: Json, timeout_s: float) -> list[Any]:
        turn, everyone = self._next_turn(), range(self.world_size)
        self._set(turn, name, value)
        key = f"exchange/{turn}/all"
        found = self._wait(turn, name, timeout_s, everyone, key if self.rank else "")
        values = [found[rank] for rank in everyone]
        if self.rank == 0 and self.world_size > 1:
            self._write(key, name, json.dumps([self.call, name, values]))
        return values

    def _leave_in_order(self, turn: int, name: str, timeout_s: float) -> None:
        """Let rank 0 return last, since the store ends with it."""
        seen = f"{turn}/seen"
        if self.rank:
            self._set(seen, name, None)
        else:
            self._wait(seen, name, timeout_s, range(1, self.world_size))

    def _next_turn(self) -> int:
        self.turn += 1
        return self.turn - 1

    def _set(
        self, turn: int | str, name: str, value: Json, call: str | None = None
    ) -> None:
        text = json.dumps([self.call if call is None else call, name, value])
        if len(text) > MAX_BYTES:
            raise SchemaError(
                f"rank {self.rank} wants to send the others {len(text):,} bytes "
                f"({name}); exchanges are for at most {MAX_BYTES:,}"
            )
        self._write(f"exchange/{turn}/{self.rank}", name, text)

    def _write(self, key: str, name: str, text: str) -> None:
        try:
            self.store.set(key, text)
        except dist.DistError as error:
            raise self._lost(name, error) from error

    def _wait(
        self,
        turn: int | str,
        name: str,
        timeout_s: float,
        ranks: Sequence[int],
        relay: str = "",
    ) -> dict[int, Any]:
        """Poll the store for the values of some ranks; name those that do not come.

        Args:
            turn: the exchange's number.
            name: its name, for errors.
            timeout_s: how long to poll.
            ranks: whose values.
            relay: the key under which rank 0 writes all of them; empty for none. Then
                each by itself is looked at now and then only, for what is wrong.
        """
        missing, values = set(ranks), dict[int, Any]()
        look_s = monotonic() + _LOOK_S

        def have_come() -> bool:
            nonlocal look_s
            if relay and self.store.check([relay]):
                call, what, found = json.loads(self.store.get(relay))
                self._compare(0, call, what, name)
                values.update(enumerate(found))
                return True
            if relay and monotonic() < look_s:
                return False
            look_s = monotonic() + _LOOK_S
            return self._take(turn, name, missing, values)

        try:
            if poll(have_come, timeout_s) or self._take(turn, name, missing, values):
                return values
        except dist.DistError as error:
            raise self._lost(name, error) from error
        names = ", ".join(map(str, sorted(missing)))
        late = f"rank{'s' if len(missing) > 1 else ''} {names}"
        why = f", which never called {self.call}" if self.call else ""
        raise WaitError(
            f"rank {self.rank} waited {timeout_s:g} s at {name!r} for {late}{why}"
        )

    def _take(
        self, turn: int | str, name: str, missing: set[int], values: dict[int, Any]
    ) -> bool:
        """Read the values that have come; return whether none is missing any more."""
        for rank in sorted(missing):
            key = f"exchange/{turn}/{rank}"
            if self.store.check([key]):
                missing.remove(rank)
                call, what, values[rank] = json.loads(self.store.get(key))
                self._compare(rank, call, what, name)
        return not missing

    def _lost(self, name: str, error: Exception) -> WaitError:
        return WaitError(
            f"rank {self.rank} lost the store at {name!r}; its holder (the launcher of "
            f"the first host) is gone: {error}"
        )

    def _compare(self, rank: int, call: str, what: str, name: str) -> None:
        """Refuse another worker's value that belongs to another call than this one's.

        Raises:
            SchemaError: it does; names both ranks and both calls.
        """
        if (call, what) == (self.call, name):
            return
        calls = {rank: call or repr(what), self.rank: self.call or repr(name)}
        if call == self.call:  # parted within it
            calls = {rank: repr(what), self.rank: repr(name)}
        raise self._parted(calls)

    def _parted(self, calls: dict[int, str]) -> SchemaError:
        first, second = sorted(calls)
        return SchemaError(
            f"rank {second} never called {calls[first]}: it called {calls[second]} "
            f"where rank {first} called {calls[first]}. Every worker must make the "
            "same calls in the same order"
        )
