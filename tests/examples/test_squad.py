"""SQuAD: the answer's pieces say the answer, in every window that holds it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from examples.zoo.squad import Squad, exact_match, f1, loss, squad
from hocket.errors import DataError
from hocket.run.data.sample_loader import SampleLoader
from hocket.run.pipeline import Pipeline

CONTEXT = "The tower, built in 1889 by Gustave Eiffel's firm, stands in Paris."


def question(context: str, answer: str | None, **changed: Any) -> dict[str, Any]:
    """One entry of `qas`; without an answer as in version 2.0."""
    entry: dict[str, Any] = {"id": "q", "question": "Who built it, and when?"}
    if answer is None:
        entry |= {"answers": [], "is_impossible": True}
    else:
        start = context.index(answer)
        entry["answers"] = [{"text": answer, "answer_start": start}]
    return entry | changed


def file_of(context: str, *questions: dict[str, Any]) -> str:
    """A file of one paragraph."""
    paragraph = {"context": context, "qas": list(questions)}
    article = {"title": "A tower", "paragraphs": [paragraph]}
    return json.dumps({"version": "1.1", "data": [article]})


def write(folder: Path, text: str, version: str = "1.1") -> Path:
    """Both files of a version, the same."""
    for part in ("train", "dev"):
        (folder / f"{part}-v{version}.json").write_text(text)
    return folder


def answers(samples: Squad) -> list[str]:
    """What the targets say, with spaces between words; empty where nothing."""
    rows = torch.arange(samples.num_samples)
    ids = samples.inputs(rows, None)["input_ids"]
    said = []
    for row, (start, end) in zip(
        ids, samples.targets(rows, None).tolist(), strict=True
    ):
        pieces = [samples.words.entries[i] for i in row[start : end + 1]]
        said.append("" if end == 0 else " ".join(pieces).replace(" ##", ""))
    return said


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("1889", "1889"),
        ("Gustave Eiffel", "gustave eiffel"),
        ("Eiffel's firm,", "eiffel ' s firm ,"),
        ("ustave Eiff", "gustave eiffel"),
        ("Paris.", "paris ."),
        (
            CONTEXT,
            "the tower , built in 1889 by gustave eiffel ' s firm , stands in paris .",
        ),
        (None, ""),
    ],
)
def test_spans_of_characters_become_spans_of_pieces(
    tmp_path: Path, answer: str | None, said: str
) -> None:
    """Widened to whole words; none for a question without an answer."""
    write(tmp_path, file_of(CONTEXT, question(CONTEXT, answer)))
    samples, _ = squad(str(tmp_path), num_tokens=64, num_question_tokens=16, stride=8)
    assert samples.num_samples == 1
    assert answers(samples) == [said]


@given(
    num_words=st.integers(1, 60),
    at=st.integers(0, 59),
    length=st.integers(1, 4),
    num_tokens=st.integers(14, 40),
    stride=st.integers(1, 8),
)
def test_windows_cover_the_paragraph(
    tmp_path_factory: pytest.TempPathFactory,
    num_words: int,
    at: int,
    length: int,
    num_tokens: int,
    stride: int,
) -> None:
    """Every piece is in one; each that holds the whole answer says it, others none."""
    words = [f"w{i}" for i in range(num_words)]
    answer = words[at % num_words :][:length]
    context = " ".join(words) + " "
    entry = question(context, " ".join(answer) + " ", question="is it")
    folder = write(tmp_path_factory.mktemp("squad"), file_of(context, entry))
    room = num_tokens - 3 - 2
    stride = min(stride, room)
    samples, _ = squad(
        str(folder), num_tokens=num_tokens, num_question_tokens=2, stride=stride
    )

    rows = torch.arange(samples.num_samples)
    inputs = samples.inputs(rows, None)
    types = inputs["token_type_ids"].bool()
    seen: set[int] = set()
    for begin, ids, kind in zip(
        samples.windows[:, 1].tolist(), inputs["input_ids"], types, strict=True
    ):
        in_window = ids[kind][:-1]  # without the mark at its end
        assert len(in_window) <= room
        seen |= set(range(begin, begin + len(in_window)))
    assert seen == set(range(len(samples.asked[0].context)))
    assert set(answers(samples)) <= {"", " ".join(answer)}


def test_windows_hold_long_paragraphs_of_many_questions(tmp_path: Path) -> None:
    """Samples of all questions, in order; version 2.0 where there is no 1.1."""
    context = " ".join(f"w{i}" for i in range(30))
    entries = [question(context, "w0"), question(context, None)]
    write(tmp_path, file_of(context, *entries), version="2.0")
    samples, _ = squad(str(tmp_path), num_tokens=30, num_question_tokens=7, stride=10)
    assert samples.windows[:, 0].tolist() == sorted(samples.windows[:, 0].tolist())
    assert set(samples.windows[:, 0].tolist()) == {0, 1}
    assert answers(samples)[0] == "w0"
    assert not any(answers(samples)[1:])


WRONG = [{"text": "1889", "answer_start": 19}]
NO_ANSWER: list[Any] = []
FAULTS = {
    "no JSON": ('{"data": [\n}', "JSONDecodeError.*line 2 column 1"),
    "a list": ("[]", "TypeError"),
    "no paragraphs": ('{"data": [{"title": "x"}]}', "KeyError: 'paragraphs'"),
    "no question": (file_of("text"), "_NoQuestionError"),
    "context of numbers": (
        '{"data": [{"paragraphs": [{"context": 3, "qas": [{"question": "x"}]}]}]}',
        "AttributeError: 'int'",
    ),
    "another place": (
        file_of(CONTEXT, question(CONTEXT, "1889", answers=WRONG)),
        "'1889' is not at character 19 of its context",
    ),
    "no answer": (
        file_of(CONTEXT, question(CONTEXT, "1889", answers=NO_ANSWER)),
        "IndexError",
    ),
    "answers missing": (
        file_of(CONTEXT, {"id": "q", "question": "x"}),
        "KeyError: 'answers'",
    ),
}


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_fault_names_file_and_way_out(tmp_path: Path, fault: str) -> None:
    """What is wrong, and where the official ones are."""
    text, message = FAULTS[fault]
    with pytest.raises(DataError, match=message) as caught:
        squad(str(write(tmp_path, text)))
    assert "train-v1.1.json" in str(caught.value)
    assert "get version 1.1 or 2.0 from https://rajpurkar" in str(caught.value)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"data": [\n' + "9" * 5000 + "]}", "{", "\ufeff", "\0"]
)
def test_no_document_ends_in_a_traceback(tmp_path: Path, text: str) -> None:
    """Deep nesting, long integers: the file is named."""
    with pytest.raises(
        DataError, match=r"train-v1.1.json (is no file of SQuAD|is empty)"
    ):
        squad(str(write(tmp_path, text)))


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda x: st.lists(x, max_size=2) | st.dictionaries(st.text(max_size=3), x),
    max_leaves=3,
)
PLACES = ["data", "paragraphs", "context", "qas", "question", "answers", "text"]
PLACES += ["answer_start", "is_impossible"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    place=st.sampled_from(PLACES),
    value=ANY | st.integers(-(10**40), 10**40) | st.just("\ud800"),
)
def test_any_value_anywhere_is_read_or_refused(
    tmp_path: Path, place: str, value: Any
) -> None:
    """With its file; half a surrogate pair is text to JSON."""

    def replaced(found: Any) -> Any:
        if isinstance(found, dict):
            return {k: value if k == place else replaced(x) for k, x in found.items()}
        return [replaced(x) for x in found] if isinstance(found, list) else found

    document = replaced(json.loads(file_of(CONTEXT, question(CONTEXT, "1889"))))
    write(tmp_path, json.dumps(document))
    try:
        message = f"train-v1.1.json {squad(str(tmp_path))[0].num_samples}"
    except DataError as error:
        message = str(error)
    assert "train-v1.1.json" in message
    assert len(message) < 1000


def test_missing_files_are_reported(tmp_path: Path) -> None:
    """All of them, or one."""
    with pytest.raises(
        DataError, match=r"train-v2\.0\.json cannot be read.*github\.io"
    ):
        squad(str(tmp_path))
    write(tmp_path, file_of(CONTEXT, question(CONTEXT, "1889")))
    (tmp_path / "dev-v1.1.json").unlink()
    with pytest.raises(DataError, match=r"dev-v1\.1\.json cannot be read"):
        squad(str(tmp_path))


def test_numbers_that_leave_no_window_are_refused(tmp_path: Path) -> None:
    """A stride wider than the window would leave pieces out."""
    with pytest.raises(DataError, match=r"data\.stride 14: .* leave windows of 13"):
        squad(str(tmp_path), num_tokens=32, num_question_tokens=16, stride=14)


def test_a_bert_learns_the_answers(tmp_path: Path) -> None:
    """By a pipeline: samples are what Hugging Face's model takes, targets what it says.

    Four questions in turn, each about another word of one paragraph.
    """
    from transformers import BertConfig, BertForQuestionAnswering

    asked = ("which year", "whose firm", "what was built", "which town")
    reported = ("1889", "Gustave Eiffel", "tower", "Paris")
    questions = [
        question(CONTEXT, answer, question=words)
        for words, answer in zip(asked, reported, strict=True)
    ]
    write(tmp_path, file_of(CONTEXT, *questions))
    samples, _ = squad(str(tmp_path), num_tokens=32, num_question_tokens=4, stride=8)
    config = BertConfig(
        num_hidden_layers=1,
        hidden_size=32,
        num_attention_heads=2,
        intermediate_size=32,
        vocab_size=len(samples.words.entries),
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    loader = SampleLoader(samples, samples.num_samples, num_batches=40)
    with Pipeline(
        BertForQuestionAnswering(config),
        loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, 1e-2),
        example=loader.example(),
        num_microbatches=2,
    ) as pipeline:
        losses = [result.loss for result in pipeline.train(loader)]

    assert losses[-1] < losses[0] / 4


@pytest.mark.parametrize(
    ("found", "right", "exact", "words"),
    [
        ("Denver Broncos", ["Denver Broncos"], 1.0, 1.0),
        ("the DENVER  broncos!", ["Denver Broncos", "no"], 1.0, 1.0),
        ("Broncos", ["Denver Broncos"], 0.0, 2 / 3),
        ("Broncos", ["no", "Denver Broncos", "the Broncos"], 1.0, 1.0),
        ("to to be", ["to be or"], 0.0, 2 / 3),  # each word as often as in both
        ("an", ["Denver"], 0.0, 0.0),
        ("", [], 1.0, 1.0),  # rightly no answer
        ("Denver", [], 0.0, 0.0),
        ("", ["Denver"], 0.0, 0.0),
    ],
)
def test_scores_are_the_official_ones(
    found: str, right: list[str], exact: float, words: float
) -> None:
    """Case, punctuation, articles and spaces do not count; the best answer does."""
    assert exact_match(found, right) == exact
    assert f1(found, right) == pytest.approx(words)
