"""What the user says about the cache of frozen layers' outputs: `hocket.Cache`."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from hocket.errors import ConfigError
from hocket.freeze.policy import is_whole

_DTYPES = (None, "bfloat16")


@dataclass(frozen=True, slots=True)
class Cache:
    """Keeps the outputs of frozen layers, of each sample, in memory and on disk.

    Args:
        folder: where the files are; made if it does not exist. Workers and jobs may
            share it, and hosts may have their own.
        ram_bytes: the most memory that each worker keeps outputs in; 0 for none.
        disk_bytes: the most that each worker writes to the folder; 0 for none.
        dtype: "bfloat16" keeps half as many bytes, rounded; as computed when not given.
        draws_once: random transforms of a sample are drawn once, and are the same in
            each epoch (as with `SampleLoader(varied=False)`); without it, loaders whose
            samples vary are refused.

    Raises:
        ConfigError: an argument is of another type, or out of its range; names all
            such arguments.
    """

    folder: str | Path
    _: KW_ONLY
    ram_bytes: int
    disk_bytes: int
    dtype: str | None = None
    draws_once: bool = False

    def __post_init__(self) -> None:
        """Check the folder and the numbers."""
        faults = [
            f"{name} is {value!r}: give a number of bytes, such as 8 << 30, 0 for none"
            for name, value in self._budgets.items()
            if not is_whole(value, 0)
        ]
        folder: object = self.folder
        if not isinstance(folder, str | Path):
            faults.append(f"folder is {folder!r}: give a path")
        if not any(self._budgets.values()):
            faults.append("ram_bytes and disk_bytes are both 0: give one of them")
        if self.dtype not in _DTYPES:
            faults.append(
                f'dtype is {self.dtype!r}: take "bfloat16", or leave it out to keep '
                "outputs as they are computed"
            )
        if faults:
            raise ConfigError(f"Cache({self.folder!s}): {'; '.join(faults)}")

    @property
    def _budgets(self) -> dict[str, int]:
        return {"ram_bytes": self.ram_bytes, "disk_bytes": self.disk_bytes}
