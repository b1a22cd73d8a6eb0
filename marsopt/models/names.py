"""The roles that names of parameters give: one table, with the libraries that use each
name.
"""

from __future__ import annotations

import re
from typing import Literal

from marsopt.functional.trees import plain_name

Role = Literal[
    "matrix",
    "experts",
    "convolution",
    "adapter",
    "embedding",
    "head",
    "router",
    "vector",
    "other",
]

# Modules with these names are heads anywhere, also inside a numbered block.
HEADS = {
    r"lm_head": "transformers, nanoGPT",
    r"lm_head\.decoder": "transformers' RoBERTa",
    r"embed_out": "transformers' GPT-NeoX",
    r"unembed": "TransformerLens",
    r"shared_head\.head": "DeepSeek-V3",
}
# Modules with these names are heads outside of numbered blocks: attention.output is
# hidden.
LIKE_HEADS = {
    r"output": "torchtitan",
    r"fc": "torchvision's ResNet",
    r"score(\.out_proj)?": "transformers' decoders that classify; T5Gemma",
    r"qa_outputs(\.out_proj)?": "transformers, for questions; LayoutLMv3",
    # head, mlp_head.1, classification_head.out_proj, ctc_head, classifier.6,
    # classifier.out_proj, classifier_distill.linear; pre_classifier is hidden
    r"(?![^.]*(att|multi|pre_))([^.]*_)?(head(_dist)?|classifier(_[^.]*)?)"
    r"(\.(out_proj|linear|linear_out|decoder|fc|\d+))?": (
        "timm; torchvision; transformers' RoBERTa, BART, Wav2Vec2, Levit, Funnel"
    ),
    r"class_labels_classifier\.layers\.\d+": "transformers' YOLOS",
    r"cls\.seq_relationship": "transformers' BERT",
    r"last_linear": "timm's NASNet",
    r"class_predictor": "transformers' Mask2Former, EoMT",
    r"(classifier|mlp_head)\.dense": "transformers' AST",
    r"([^.]*_)?heads(\.(head|\d+))?": "torchvision's ViT; MusicGen",
    r"([^.]*_)?logits(_[^.]*)?(\.\d+)?": "transformers' XLNet, Dia; x-transformers",
    r"sequence_summary\.summary": "transformers' XLNet",
    r"output_projection": "fairseq",
    r"generator(\.proj)?": "The Annotated Transformer, OpenNMT",
    r"final_layer(\.linear)?": "Perceiver; DiT",
}
_HEAD = rf"(^|\.)({'|'.join(HEADS)})\.weight$"
_LIKE_HEAD = rf"^((?!\d+\.)[^.]+\.)*({'|'.join(LIKE_HEADS)})\.weight$"

# Roles that a name gives, whatever the module is, in this order: as torchtitan,
# transformers, timm and nanoGPT name them. They are searched in plain names, and hold
# with wrappers too, so that torchtitan's groups can use them.
NAMES: dict[Role, str] = {
    # biases of experts and of attention, a bias for each head; scales of quantizers; A
    # of a state space model is a vector for each channel
    "vector": r"bias(_[^.]*)?$|(^|[._])scales?(_[^.]*)?$|(^|\.)A_log$",
    # torchtitan's fused w13: its rows of gate and up lie between each other, so that no
    # two of its dims are a matrix
    "other": r"(^|\.)w13(\.|_|$)",
    "head": f"{_HEAD}|{_LIKE_HEAD}",
    # tables, and projections of patches: patch_embed.proj; then, as parameters of the
    # model's own, positions, class tokens, latents
    "embedding": (
        r"(^|\.)(trainable_tokens_[^.]*|lora_embedding_[^.]*)(\.|$)"  # PEFT's
        r"|(^|\.)([^.]*embed[^.]*|([^.]*_)?emb|wte|wpe)(\.(?!lora_)[^.]+)?(\.weight)?$"
        r"|(^|\.)(([^.]*_)?pos(ition(al)?)?(s|_[hw])?|[^.]*_tokens?|latents)(\.\d+)?$"
    ),
    "router": r"(^|\.)router\.((?!lora_)[^.]+\.)*weight$|(^|\.)gate\.weight$",
}
# LoRA's two factors, as PEFT, torchtune, torchtitan, loralib and diffusers name them
ADAPTERS = re.compile(r"(^|\.)lora_(A|B|a|b|down|up)(\.|$)")

# Linear layers of grouped-query attention with rows of queries, keys and values, part
# after part. (By head lie the rows of torchtitan's and InternLM's wqkv and of
# GPT-NeoX's and Falcon's query_key_value.)
FUSED = {
    "qkv_proj": "transformers' Phi-3 and Phi-4",
    "Wqkv": "transformers' DBRX",
    "qkv": "transformers' EXAONE 4.5, for images",
}

# Roles in the group of the embeddings.
TABLES: tuple[Role, ...] = ("embedding", "head", "router")
# Roles that a matrix rule may take.
HIDDEN: tuple[Role, ...] = ("matrix", "experts", "convolution", "adapter")


def by_name(name: str) -> Role | None:
    """Return the role that a parameter's name gives, if it does."""
    plain = plain_name(name)
    return next((r for r, pattern in NAMES.items() if re.search(pattern, plain)), None)
