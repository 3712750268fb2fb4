"""BERT-base cut short: four of its twelve layers, and all else as it is."""

from __future__ import annotations

from typing import Final

from torch import Tensor, nn

from bench.models import Case

NUM_LAYERS: Final = 4
NUM_WORDS: Final = 30522
NUM_TOKENS: Final = 128  # as WPipe's authors had it
NUM_CLASSES: Final = 2  # whether two questions ask the same


class Answer(nn.Module):
    """BERT's pooler and a classifier on top: x_BTW -> y_BC.

    Args:
        pooler: BERT's pooler.
        classifier: BERT's classifier.
    """

    def __init__(self, pooler: nn.Module, classifier: nn.Module) -> None:
        super().__init__()
        self.pooler = pooler
        self.classifier = classifier

    def forward(self, x: Tensor) -> Tensor:
        """From what stands at the first token."""
        y: Tensor = self.classifier(self.pooler(x))
        return y


def bert() -> nn.Sequential:
    """With random weights, and without dropout, so that gradients can be compared."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(  # type: ignore[call-arg]
        num_hidden_layers=NUM_LAYERS,
        vocab_size=NUM_WORDS,
        num_labels=NUM_CLASSES,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    whole = BertForSequenceClassification(config)
    assert whole.bert.pooler is not None
    return nn.Sequential(
        whole.bert.embeddings,
        *whole.bert.encoder.layer,
        Answer(whole.bert.pooler, whole.classifier),
    )


BERT: Final = Case(
    "bert",
    bert,
    (NUM_TOKENS,),
    num_microbatches=8,
    microbatch_size=2,
    classes=NUM_CLASSES,
    num_words=NUM_WORDS,
)
