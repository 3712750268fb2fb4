"""The section [data]: what each kind of data takes.

Every kind but `digits` reads files that are on this machine: nothing is downloaded.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from hocket.recipes.config.settings import (
    Count,
    FunctionSettings,
    Probability,
    Settings,
    Share,
)


class DigitsSettings(Settings):
    """scikit-learn's 1797 handwritten digits (`hocket.recipes.data.digits`).

    Args:
        test_fraction: the share of each class that is kept for evaluation.
        shift_probability: the probability that a training image is shifted by up to one
            pixel in each direction, drawn for each image and epoch.
    """

    kind: Literal["digits"]
    test_fraction: Share = 0.25
    shift_probability: Probability = 0.5


class FileSettings(Settings):
    """Data that are read from files.

    Args:
        path: the folder, or the file. Relative to the recipe's folder where a recipe
            says it, to the current folder where `--set` does.
        max_samples: takes only so many samples, the first ones, to train on, and to
            evaluate on; for a try.
    """

    path: str
    max_samples: Count | None = None


class TextSettings(FileSettings):
    """Any text file, read as bytes (`hocket.recipes.data.load`).

    Args:
        window_bytes: how many bytes the model sees at once.
        validation_fraction: the last part of the file, kept for evaluation.
    """

    kind: Literal["text"]
    window_bytes: Count = 128
    validation_fraction: Share = 0.1


class WordPieceSettings(FileSettings):
    """Text in the word pieces of a BERT.

    Args:
        vocabulary: the file of an uncased BERT's word pieces, one in each line; built
            from the training texts when not given.
        num_pieces: the largest size of a vocabulary that is built.
        num_tokens: the tokens of each sample; longer ones are cut, shorter ones padded.
    """

    vocabulary: str | None = None
    num_pieces: Count = 30_522
    num_tokens: Annotated[int, Field(ge=8)] = 128

    @model_validator(mode="after")
    def _builds_or_reads(self) -> WordPieceSettings:
        if self.vocabulary is not None and self.num_pieces != 30_522:
            raise ValueError(
                "num_pieces has no effect where a vocabulary is read from a file"
            )
        return self


class GlueSettings(WordPieceSettings):
    """Sentences and pairs of them, as the GLUE benchmark's tables.

    Args:
        task: the name of the table.
    """

    kind: Literal["glue"]
    task: Literal["sst2", "mrpc", "qqp", "mnli"]


class SquadSettings(WordPieceSettings):
    """Questions about paragraphs, and the words that answer them (`data.squad`).

    Args:
        num_question_tokens: the most tokens of a question; longer ones are cut.
        stride: tokens from the beginning of one window of a paragraph to that of the
            next.
    """

    kind: Literal["squad"]
    num_question_tokens: Count = 64
    stride: Count = 128

    @model_validator(mode="after")
    def _windows_cover_the_paragraph(self) -> SquadSettings:
        room = self.num_tokens - 3 - self.num_question_tokens
        if self.stride > room:
            raise ValueError(
                f"stride {self.stride} is more than the {room} tokens of a window: "
                f"num_tokens {self.num_tokens} less num_question_tokens "
                f"{self.num_question_tokens} and 3 marks"
            )
        return self


class MaskedTextSettings(WordPieceSettings):
    """Any text file, of whose pieces some are to be guessed (`data.masked_text`).

    Args:
        validation_fraction: the last part of the file, kept for evaluation.
        mask_share: the share of each sample's pieces that is to be guessed.
    """

    kind: Literal["masked-text"]
    validation_fraction: Share = 0.1
    mask_share: Share = 0.15


class DataFunctionSettings(FunctionSettings):
    """A function that returns data to train on and data to evaluate on.

    Args:
        max_samples: takes only so many samples, the first ones, to train on, and to
            evaluate on; for a try.
    """

    max_samples: Count | None = None


DataSettings = (
    DigitsSettings
    | TextSettings
    | GlueSettings
    | SquadSettings
    | MaskedTextSettings
    | DataFunctionSettings
)
