"""Output heads of a model: as the model declares them, else by their names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable

from torch import nn

# The modules that have these names, and where the names come from. The first kind is a
# head wherever it stands, also inside a numbered block.
ANYWHERE = {
    r"lm_head": "transformers, nanoGPT",
    r"lm_head\.decoder": "transformers' RoBERTa",
    r"embed_out": "transformers' GPT-NeoX",
    r"unembed": "TransformerLens",
    r"shared_head\.head": "DeepSeek-V3",
}
# Inside a numbered block the second kind is something else, such as attention.output.
OUTSIDE_BLOCKS = {
    r"output": "torchtitan",
    r"fc": "torchvision's ResNet",
    r"score(\.out_proj)?": "transformers' decoders that classify; T5Gemma",
    r"qa_outputs(\.out_proj)?": "transformers, for questions; LayoutLMv3",
    # head, mlp_head.1, classification_head.out_proj, ctc_head, classifier.6,
    # classifier.out_proj, classifier_distill.linear; pre_classifier is hidden
    r"(?![^.]*(att|multi|pre_))([^.]*_)?(head|classifier(_[^.]*)?)"
    r"(\.(out_proj|linear|linear_out|decoder|fc|\d+))?": (
        "timm; torchvision; transformers' RoBERTa, BART, Wav2Vec2, Levit, Funnel"
    ),
    r"(classifier|mlp_head)\.dense": "transformers' AST",
    r"([^.]*_)?heads(\.(head|\d+))?": "torchvision's ViT; MusicGen",
    r"([^.]*_)?logits(_[^.]*)?(\.\d+)?": "transformers' XLNet, Dia; x-transformers",
    r"sequence_summary\.summary": "transformers' XLNet",
    r"output_projection": "fairseq",
    r"generator(\.proj)?": "The Annotated Transformer, OpenNMT",
    r"final_layer(\.linear)?": "Perceiver; DiT",
}
PATTERN = (
    rf"(^|\.)({'|'.join(ANYWHERE)})\.weight$"
    rf"|^((?!\d+\.)[^.]+\.)*({'|'.join(OUTSIDE_BLOCKS)})\.weight$"
)
_SEVERAL_LAYERS = re.compile(r"^(.*(?<!heads))\.(\d+|dense)\.weight$")


@runtime_checkable
class _HasOutputEmbeddings(Protocol):
    def get_output_embeddings(self) -> Any: ...


@runtime_checkable
class _HasClassifier(Protocol):
    def get_classifier(self) -> Any: ...


def declared_heads(model: nn.Module) -> set[int]:
    """Return the ids of the parameters of the heads that a model, or a part of it,
    declares: ``get_output_embeddings()`` of transformers, ``get_classifier()`` of timm.
    """
    return {id(p) for head in _declared(model) for p in head.parameters()}


def _declared(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        heads: list[Any] = []
        with suppress(NotImplementedError, AttributeError):  # this model declares none
            if isinstance(module, _HasOutputEmbeddings):
                heads.append(module.get_output_embeddings())
            if isinstance(module, _HasClassifier):
                classifier = module.get_classifier()
                # timm's distilled models have two
                several = isinstance(classifier, tuple | list)
                heads += classifier if several else [classifier]
        yield from (head for head in heads if isinstance(head, nn.Module))


def ends_head(name: str, matrices: Set[str]) -> bool:
    """Return whether a matrix that is named like a head is the last of its head: a
    classifier of several layers begins with hidden matrices.

    Args:
        name: of the matrix, without wrappers.
        matrices: the names of all matrices.
    """
    found = _SEVERAL_LAYERS.match(name)
    if found is None:
        return True
    head, place = found.groups()
    beside = {n for n in matrices if n.startswith(f"{head}.")} - {name}
    if place == "dense":  # as RoBERTa's, before out_proj; AST has no such layer
        return not beside
    numbers = (n.removeprefix(f"{head}.").partition(".")[0] for n in beside)
    return all(int(n) < int(place) for n in numbers if n.isdigit())
