"""marsopt.param_groups: which parameter of which model takes which rule, by which
numbers; and what is said where a matrix rule is given embeddings.
"""

from __future__ import annotations

import copy
import re
import string

import hypothesis
import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers "fake")

import marsopt
from configs.published import LR, ONE_RATE, RULES, SIZES
from marsopt import MARS, REGISTRY, param_groups
from marsopt.models import names
from marsopt.models.names import by_name
from marsopt.models.roles import roles
from tests.library.test_hyperparameters import DRAWN
from train.gpt2 import GPT2, Shape

SHAPE = Shape(num_layers=2, num_heads=2, width=8, block_size=6, vocab_size=32)

# ---- models --------------------------------------------------------------------------


def titan(name):
    """torchtitan's debug model of this name, its first two blocks."""

    def build():
        from tests import titan_models

        return titan_models.configuration(name, None).model_spec.model.build()

    return build


def transformers(kind, **options):
    """A small model of transformers, by the prefix of its classes."""

    def build():
        library = pytest.importorskip("transformers")
        suffix = dict(GPT2="LMHeadModel", ViT="ForImageClassification")
        config = getattr(library, f"{kind}Config")(**options)
        return getattr(library, kind + suffix.get(kind, "ForCausalLM"))(config)

    return build


LLAMA = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=128,
)


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)


class GatedMLP(nn.Module):
    """``gate`` is no router here, and ``output`` no head."""

    def __init__(self, width):
        super().__init__()
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.output = nn.Linear(2 * width, width, bias=False)


class ViT(nn.Module):
    """Under timm's names."""

    def __init__(self, width=8):
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, 5, width))
        self.patch_embed = nn.Module()
        self.patch_embed.proj = nn.Conv2d(3, width, 4, stride=4)
        self.blocks = nn.ModuleList(nn.Module() for _ in range(2))
        for block in self.blocks:
            block.norm1, block.attn = nn.LayerNorm(width), Attention(width)
            block.mlp = GatedMLP(width)
            block.relative_position_bias_table = nn.Parameter(torch.zeros(9, 2))
        self.head = nn.Linear(width, 10)


class ResNet(nn.Module):
    """Under torchvision's names."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.layer1 = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
        self.fc = nn.Linear(4, 10)


class Unnamed(nn.Module):
    """Nothing but types and shapes tell what is what."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Embedding(32, 8), nn.Embedding(6, 8)
        self.c = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.value = nn.Linear(8, 1)  # a row is no matrix
        self.d = nn.Linear(8, 32, bias=False)


class Experts(nn.Module):
    """Two kinds of them, and torchtitan's fused weights."""

    def __init__(self):
        super().__init__()
        self.moe = nn.Module()
        self.moe.gate = nn.Linear(8, 4, bias=False)
        self.moe.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.grouped_experts = nn.Module()
        self.grouped_experts.w1_EFD = nn.Parameter(torch.zeros(4, 6, 8))
        self.grouped_experts.w13 = nn.Parameter(torch.zeros(4, 6, 2, 8))
        self.grouped_experts.mlp1_bias_EG = nn.Parameter(torch.zeros(4, 6))
        self.feed_forward = nn.Module()
        self.feed_forward.w13 = nn.Parameter(torch.zeros(6, 2, 8))
        self.heads = nn.Parameter(torch.zeros(2, 4, 8))  # einsum: nobody can tell


MODELS = {
    "ours": lambda: GPT2(SHAPE),
    "llama3": titan("llama3"),
    "qwen3": titan("qwen3"),
    "deepseek_v3": titan("deepseek_v3"),
    "GPT2": transformers("GPT2", n_layer=2, n_embd=32, n_head=4, vocab_size=128),
    "Llama": transformers("Llama", **LLAMA),
    "Mixtral": transformers("Mixtral", **LLAMA, num_local_experts=4),
    "GptOss": transformers("GptOss", **LLAMA, num_local_experts=4, head_dim=8),
    "Mamba": transformers("Mamba", hidden_size=32, num_hidden_layers=2, vocab_size=128),
    "ViT": ViT,
    "ResNet": ResNet,
    "Unnamed": Unnamed,
    "Experts": Experts,
}

# What muon's groups are told by: the rule takes matrices, experts and convolutions;
# AdamW embeddings, heads and routers ("tables"), and the rest ("vectors").
KINDS = {
    ("muon", "2d", 0.1): "matrices",
    ("muon", "batched", 0.1): "experts",
    ("muon", "flattened", 0.1): "convolutions",
    ("adamw", "2d", 0.0): "tables",
    ("adamw", "2d", 0.1): "vectors",
}
# Names, in which * stands for a number.
FROZEN = {
    "ours": """
        matrices layers.*.attn_in.weight layers.*.attn_out.weight layers.*.mlp_in.weight
            layers.*.mlp_out.weight
        tables wte.weight wpe.weight
        vectors layers.*.attn_norm.weight layers.*.mlp_norm.weight norm.weight
    """,
    "llama3": """
        matrices layers.*.attention.qkv_linear.wqkv.weight layers.*.attention.wo.weight
            layers.*.feed_forward.w1.weight layers.*.feed_forward.w2.weight
            layers.*.feed_forward.w3.weight
        tables tok_embeddings.weight lm_head.weight
        vectors layers.*.attention_norm.weight layers.*.ffn_norm.weight norm.weight
    """,
    "qwen3": """
        matrices layers.*.attention.qkv_linear.wqkv.weight layers.*.attention.wo.weight
            layers.*.feed_forward.w1.weight layers.*.feed_forward.w2.weight
            layers.*.feed_forward.w3.weight
        tables tok_embeddings.weight
        vectors layers.*.attention.q_norm.weight layers.*.attention.k_norm.weight
            layers.*.attention_norm.weight layers.*.ffn_norm.weight norm.weight
    """,
    "deepseek_v3": """
        matrices layers.*.attention.wq.weight layers.*.attention.wkv_a.weight
            layers.*.attention.wkv_b.weight layers.*.attention.wo.weight
            layers.*.feed_forward.w1.weight layers.*.feed_forward.w2.weight
            layers.*.feed_forward.w3.weight layers.*.moe.shared_experts.w1.weight
            layers.*.moe.shared_experts.w2.weight layers.*.moe.shared_experts.w3.weight
        experts layers.*.moe.routed_experts.inner_experts.w1_EFD
            layers.*.moe.routed_experts.inner_experts.w2_EDF
            layers.*.moe.routed_experts.inner_experts.w3_EFD
        tables tok_embeddings.weight layers.*.moe.router.gate.weight lm_head.weight
        vectors layers.*.attention.kv_norm.weight layers.*.attention_norm.weight
            layers.*.ffn_norm.weight norm.weight
    """,
    "GPT2": """
        matrices transformer.h.*.attn.c_attn.weight transformer.h.*.attn.c_proj.weight
            transformer.h.*.mlp.c_fc.weight transformer.h.*.mlp.c_proj.weight
        tables transformer.wte.weight transformer.wpe.weight
        vectors transformer.h.*.ln_1.weight transformer.h.*.ln_1.bias
            transformer.h.*.attn.c_attn.bias transformer.h.*.attn.c_proj.bias
            transformer.h.*.ln_2.weight transformer.h.*.ln_2.bias
            transformer.h.*.mlp.c_fc.bias transformer.h.*.mlp.c_proj.bias
            transformer.ln_f.weight transformer.ln_f.bias
    """,
    "Llama": """
        matrices model.layers.*.self_attn.q_proj.weight
            model.layers.*.self_attn.k_proj.weight
            model.layers.*.self_attn.v_proj.weight
            model.layers.*.self_attn.o_proj.weight model.layers.*.mlp.gate_proj.weight
            model.layers.*.mlp.up_proj.weight model.layers.*.mlp.down_proj.weight
        tables model.embed_tokens.weight lm_head.weight
        vectors model.layers.*.input_layernorm.weight
            model.layers.*.post_attention_layernorm.weight model.norm.weight
    """,
    "Mixtral": """
        matrices model.layers.*.self_attn.q_proj.weight
            model.layers.*.self_attn.k_proj.weight
            model.layers.*.self_attn.v_proj.weight
            model.layers.*.self_attn.o_proj.weight
        experts model.layers.*.mlp.experts.gate_up_proj
            model.layers.*.mlp.experts.down_proj
        tables model.embed_tokens.weight model.layers.*.mlp.gate.weight lm_head.weight
        vectors model.layers.*.input_layernorm.weight
            model.layers.*.post_attention_layernorm.weight model.norm.weight
    """,
    "GptOss": """
        matrices model.layers.*.self_attn.q_proj.weight
            model.layers.*.self_attn.k_proj.weight
            model.layers.*.self_attn.v_proj.weight
            model.layers.*.self_attn.o_proj.weight
        experts model.layers.*.mlp.experts.gate_up_proj
            model.layers.*.mlp.experts.down_proj
        tables model.embed_tokens.weight model.layers.*.mlp.router.weight lm_head.weight
        vectors model.layers.*.self_attn.sinks model.layers.*.self_attn.q_proj.bias
            model.layers.*.self_attn.k_proj.bias model.layers.*.self_attn.v_proj.bias
            model.layers.*.self_attn.o_proj.bias model.layers.*.mlp.router.bias
            model.layers.*.mlp.experts.gate_up_proj_bias
            model.layers.*.mlp.experts.down_proj_bias
            model.layers.*.input_layernorm.weight
            model.layers.*.post_attention_layernorm.weight model.norm.weight
    """,
    "Mamba": """
        matrices backbone.layers.*.mixer.in_proj.weight
            backbone.layers.*.mixer.x_proj.weight backbone.layers.*.mixer.dt_proj.weight
            backbone.layers.*.mixer.out_proj.weight
        convolutions backbone.layers.*.mixer.conv1d.weight
        tables backbone.embeddings.weight
        vectors backbone.layers.*.norm.weight backbone.layers.*.mixer.A_log
            backbone.layers.*.mixer.D backbone.layers.*.mixer.conv1d.bias
            backbone.layers.*.mixer.dt_proj.bias backbone.norm_f.weight
    """,
    "ViT": """
        matrices blocks.*.attn.qkv.weight blocks.*.attn.proj.weight
            blocks.*.mlp.gate.weight blocks.*.mlp.output.weight
        tables cls_token pos_embed patch_embed.proj.weight head.weight
        vectors patch_embed.proj.bias blocks.*.relative_position_bias_table
            blocks.*.norm1.weight blocks.*.norm1.bias blocks.*.attn.qkv.bias
            blocks.*.attn.proj.bias head.bias
    """,
    "ResNet": """
        convolutions conv1.weight layer1.*.weight
        tables fc.weight
        vectors bn1.weight bn1.bias layer1.*.bias layer1.*.weight fc.bias
    """,
    "Unnamed": """
        matrices c.*.weight
        tables a.weight b.weight d.weight
        vectors c.*.bias value.weight value.bias
    """,
    "Experts": """
        matrices moe.experts.*.weight
        experts grouped_experts.w1_EFD
        tables moe.gate.weight
        vectors heads moe.experts.*.bias grouped_experts.w13
            grouped_experts.mlp1_bias_EG feed_forward.w13
    """,
}


def where(groups) -> dict[str, list[str]]:
    """{kind: names}, numbers as *, each once, in the order of the model."""
    found = {}
    for group in groups:
        key = group["mars_type"], group.get("matrices", "2d"), group["weight_decay"]
        names = [re.sub(r"\b\d+\b", "*", name) for name, _ in group["params"]]
        found[KINDS[key]] = [*dict.fromkeys(names)]
    return found


def on_meta(name) -> nn.Module:
    with torch.device("meta"):
        return MODELS[name]()


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_has_its_place(name):
    lines = re.sub(r"\n {12}", " ", FROZEN[name]).split("\n")
    frozen = [line.split() for line in lines if line.strip()]
    groups = param_groups(on_meta(name), "muon", lr=0.02, convolutions=True)
    assert where(groups) == {kind: names for kind, *names in frozen}


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_is_in_one_group_under_its_name(name):
    """Tied ones once; frozen ones too, in the place that they have when they thaw."""
    model = on_meta(name)
    before = where(param_groups(model, "muon", lr=0.1, convolutions=True))
    next(iter(model.parameters())).requires_grad_(False)
    assert where(param_groups(model, "muon", lr=0.1, convolutions=True)) == before
    wanted = dict(model.named_parameters())
    pairs = [pair for g in param_groups(model, lr=0.1) for pair in g["params"]]
    assert len(pairs) == len(wanted)
    assert all(wanted[n] is p for n, p in pairs)


@pytest.mark.parametrize(
    "name, role",
    [
        ("transformer.wte.weight", "embedding"),
        ("emb.weight", "embedding"),
        ("embeddings.tok_embeddings.weight", "embedding"),
        ("encoder.position", "embedding"),
        ("attn.rel_pos_h", "embedding"),
        ("decoder.query_tokens", "embedding"),
        ("module.output.weight", "head"),
        ("heads.head.weight", "head"),
        ("mlp_head.1.weight", "head"),
        ("heads.0.weight", "head"),
        ("classifier.out_proj.weight", "head"),
        ("qa_outputs.weight", "head"),
        ("final_layer.linear.weight", "head"),
        ("decoder.output_projection.weight", "head"),
        ("distillation_classifier.weight", "head"),
        ("classifier_distill.linear.weight", "head"),
        ("encoder.attention.output.dense.weight", None),
        ("layers.3.feed_forward.router.weight", "router"),
        ("embedder.encoder.layers.0.wq.weight", None),  # a model inside
        ("bert.encoder.layer.0.attention.output.dense.weight", None),
        ("layers.0.mlp.gate_proj.weight", None),
        ("attn.queries.weight", None),
        ("position_wise.weight", None),
    ],
)
def test_what_names_tell(name, role):
    assert by_name(name) == role


def modules(name):
    """Drawn names of modules in the form of a regular expression, in which x, y and z
    are the free letters.
    """
    letters = string.ascii_letters + "0123456789_."
    name = name.replace("[^.]*", "[xyz]{0,3}")
    return st.from_regex(name, fullmatch=True, alphabet=letters)


WRAPPED = st.lists(
    st.sampled_from(["_orig_mod.", "_checkpoint_wrapped_module.", "module.", "model."]),
    max_size=2,
).map("".join)
INSIDE = st.sampled_from(["", "encoder.", "decoder."])
NUMBERED = st.sampled_from(["layers.0.", "decoder.0.", "h.11.", "decoder.layers.3."])
ANYWHERE = modules("|".join(names.HEADS))
OUTSIDE_BLOCKS = modules("|".join(names.LIKE_HEADS))
HEADS = st.tuples(INSIDE, OUTSIDE_BLOCKS) | st.tuples(INSIDE | NUMBERED, ANYWHERE)
# in a block; or a part of a head, or a layer before it
ONLY_LIKE_HEADS = (
    st.tuples(NUMBERED, OUTSIDE_BLOCKS)
    | st.tuples(INSIDE, OUTSIDE_BLOCKS, modules(r"\.(qkv|mlp|key)"))
    | st.tuples(
        INSIDE, modules(r"(attention|multi|pre)_(head|classifier)(\.out_proj)?")
    )
)


def mover(name):
    """The rule that moves the weight of the module of this name, in a model that has
    other matrices.
    """
    root = model = nn.Module()
    model.words, model.hidden = nn.Embedding(9, 6), nn.Linear(6, 6)
    *parents, last = name.split(".")
    for parent in parents:
        model.add_module(parent, nn.Module())
        model = model.get_submodule(parent)
    model.add_module(last, nn.Linear(6, 3, bias=False))
    for group in param_groups(root, "moonlight", lr=0.1):
        rules = {n: group["mars_type"] for n, _ in group["params"]}
        if f"{name}.weight" in rules:
            return rules[f"{name}.weight"]


@DRAWN
@hypothesis.given(
    wrappers=WRAPPED,
    name=HEADS.map("".join),
    inside=st.sampled_from(["", "._orig_mod", "._checkpoint_wrapped_module"]),
)
def test_adamw_moves_what_has_the_name_of_a_head(wrappers, name, inside):
    assert mover(wrappers + name + inside) == "adamw"


@DRAWN
@hypothesis.given(wrappers=WRAPPED, name=ONLY_LIKE_HEADS.map("".join))
def test_the_rule_moves_what_is_only_named_like_a_head(wrappers, name):
    assert mover(wrappers + name) == "moonlight"


def hidden_and(**heads):
    blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])
    return nn.ModuleDict({"words": nn.Embedding(9, 6), "layers": blocks, **heads})


def linears(*widths):
    pairs = zip(widths, widths[1:], strict=False)
    layers = [(nn.Linear(*pair), nn.LayerNorm(pair[1]), nn.ReLU()) for pair in pairs]
    return nn.Sequential(nn.Dropout(), *sum(layers, ()))


@pytest.mark.parametrize(
    "heads, found",
    [
        (dict(classifier=linears(6, 3)), {"classifier.1"}),
        (dict(classifier=linears(6, 6, 6, 3)), {"classifier.7"}),
        (dict(mlp_head=nn.ModuleDict(dict(dense=nn.Linear(6, 3)))), {"mlp_head.dense"}),
        (
            dict(
                classifier=nn.ModuleDict(
                    dict(dense=nn.Linear(6, 6), out_proj=nn.Linear(6, 3))
                )
            ),
            {"classifier.out_proj"},
        ),
        (
            dict(heads=nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 2)])),
            {"heads.0", "heads.1"},
        ),
    ],
    ids=["linear", "layers", "dense alone", "dense and out_proj", "several heads"],
)
def test_a_head_of_several_layers_begins_with_hidden_matrices(heads, found):
    model = hidden_and(**heads)
    told = {n.removesuffix(".weight") for n, _, role in roles(model) if role == "head"}
    assert told == found


class Declares(nn.Module):
    """Heads as transformers and timm declare them, under names that say nothing."""

    def __init__(self):
        super().__init__()
        self.body, self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 9), nn.Linear(6, 3)


class LikeTransformers(Declares):
    def get_output_embeddings(self):
        return self.a


class LikeTimm(Declares):
    def get_classifier(self):
        return self.a, self.b


class Undeclared(Declares):
    def get_output_embeddings(self):
        raise NotImplementedError

    def get_classifier(self):
        return None


@pytest.mark.parametrize(
    "model, found",
    [
        (LikeTransformers(), {"a"}),
        (LikeTimm(), {"a", "b"}),
        (Undeclared(), set()),
        (nn.Sequential(LikeTransformers()), {"0.a"}),
    ],
    ids=["transformers", "timm", "undeclared", "a part of a model"],
)
def test_heads_that_a_model_declares(model, found):
    told = {n.removesuffix(".weight") for n, _, role in roles(model) if role == "head"}
    assert told == found
    assert param_groups(torch.compile(model), lr=0.1)


def test_debug_lists_the_names_of_each_group(caplog):
    with caplog.at_level("DEBUG", "marsopt.models.param_groups"):
        param_groups(LikeTimm(), "moonlight", lr=0.1)
    assert [record.getMessage() for record in caplog.records] == [
        "marsopt: matrix to moonlight: body.weight",
        "marsopt: tables to adamw: a.weight, b.weight",
        "marsopt: vectors to adamw: body.bias, a.bias, b.bias",
    ]


def test_wrappers_change_names_alone():
    plain, wrapped = GPT2(SHAPE), GPT2(SHAPE)
    wrapped.layers["0"] = checkpoint_wrapper(wrapped.layers["0"])
    wrapped.layers["1"] = torch.compile(wrapped.layers["1"])
    wrapped.wte = torch.compile(wrapped.wte)
    wrapped = torch.compile(wrapped)
    found = {n: role for n, _, role in roles(wrapped)}
    assert "_orig_mod.layers.0._checkpoint_wrapped_module.attn_in.weight" in found
    assert [*found.values()] == [role for _, _, role in roles(plain)]
    assert by_name("_orig_mod.lm_head._orig_mod.weight") == "head"


def test_sharded_models():
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        model = GPT2(SHAPE)
        for part in (*model.layers.values(), model):
            fully_shard(part, mesh=init_device_mesh("cpu", (2,)))
        groups = param_groups(model, "muon", lr=0.02)
    finally:
        dist.destroy_process_group()
    assert where(groups) == where(param_groups(GPT2(SHAPE), "muon", lr=0.02))


# ---- frozen, flattened, adapted ------------------------------------------------------


@pytest.mark.parametrize("rule", ["moonlight", "muon", "mars-adamw"])
def test_what_thaws_moves_as_if_it_had_never_been_frozen(rule):
    """And loads what was saved before, and costs nothing before."""

    def step(model, optimizer, seed):
        g = torch.Generator().manual_seed(seed)
        tokens = torch.randint(SHAPE.vocab_size, (2, 6), generator=g)
        optimizer.zero_grad()
        model(tokens).square().mean().backward()
        optimizer.step()

    def build(freeze):
        torch.manual_seed(1)
        model = GPT2(SHAPE)
        model.init_weights()
        for name in ("wpe.weight", "layers.0.mlp_in.weight", "norm.weight"):
            model.get_parameter(name).requires_grad_(not freeze)
        return model, MARS(param_groups(model, rule, lr=0.02), compile=False)

    (cold, optimizer), (plain, control) = build(True), build(False)
    frozen = {p for p in cold.parameters() if not p.requires_grad}
    assert len(frozen) == 3 and frozen.isdisjoint(optimizer.state)
    cold.requires_grad_(True)
    for seed in range(2):
        step(cold, optimizer, seed)
        step(plain, control, seed)
    for (name, p), q in zip(cold.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q), name
    model, again = build(True)
    again.load_state_dict(optimizer.state_dict())
    model.load_state_dict(cold.state_dict())
    model.requires_grad_(True)
    step(model, again, 2)
    step(cold, optimizer, 2)
    assert all(map(torch.equal, model.parameters(), cold.parameters()))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("originals", [False, True])
def test_what_fsdp1_has_flattened_is_refused(originals):
    from torch.distributed.fsdp import FullyShardedDataParallel

    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 5))
        model = FullyShardedDataParallel(
            model, use_orig_params=originals, device_id=torch.device("cpu")
        )
        rule, refused = marsopt.rule("moonlight"), "FSDP1 .*fully_shard"
        with pytest.raises(ValueError, match=refused):
            param_groups(model, "moonlight", lr=0.1)
        with pytest.raises(ValueError, match=refused):
            MARS(model.parameters(), mars_type="moonlight", compile=False)
        with pytest.raises(ValueError, match=refused):
            rule.init(dict(model.named_parameters()))
        model.requires_grad_(False)  # what nobody moves may be flat
        head = nn.Linear(4, 3)
        MARS([*model.parameters(), *head.parameters()], compile=False)
    finally:
        dist.destroy_process_group()


class Kept(nn.Module):
    """A module and the copy of it that PEFT trains (``modules_to_save``)."""

    def __init__(self, module, adapter):
        super().__init__()
        self.original_module = module
        self.modules_to_save = nn.ModuleDict({adapter: copy.deepcopy(module)})


class LoRA(nn.Module):
    """A module and its low rank adapter."""

    def __init__(self, module, adapter, rank=2):
        super().__init__()
        self.base_layer = module
        if isinstance(module, nn.Embedding):
            tables, width = module.num_embeddings, module.embedding_dim
            self.lora_embedding_A = nn.ParameterDict(
                {adapter: torch.zeros(rank, tables)}
            )
            self.lora_embedding_B = nn.ParameterDict(
                {adapter: torch.zeros(width, rank)}
            )
        else:
            rows, columns = module.weight.shape
            self.lora_A = nn.ModuleDict({adapter: nn.Linear(columns, rank, bias=False)})
            self.lora_B = nn.ModuleDict({adapter: nn.Linear(rank, rows, bias=False)})


class TokenRows(nn.Module):
    """A table some of whose rows are trained."""

    def __init__(self, module, rows):
        super().__init__()
        self.original_module = module
        self.token_adapter = nn.Module()
        self.token_adapter.base_layer = module
        self.token_adapter.trainable_tokens_delta = rows


class Rows(nn.Module):
    """Rows of a table in a list."""

    def __init__(self, *rows):
        super().__init__()
        self.extra_rows = nn.ParameterList(rows)


def adapted(adapter="default"):
    """Under PEFT's wrappers, whose names say nothing but for the head's."""
    model = nn.Module()
    model.tok = TokenRows(
        nn.Embedding(32, 8), nn.ParameterDict({adapter: torch.zeros(3, 8)})
    )
    model.pos = LoRA(nn.Embedding(6, 8), adapter)
    model.pos_embed = Kept(nn.Embedding(6, 8), adapter)
    model.embeddings = Rows(torch.zeros(8), torch.zeros(1, 8))
    model.layers = nn.ModuleList(LoRA(nn.Linear(8, 8), adapter) for _ in range(2))
    model.router = LoRA(nn.Linear(8, 4, bias=False), adapter)
    model.experts = nn.ModuleList([nn.Linear(8, 8, bias=False)])
    model.classifier = Kept(nn.Linear(8, 5), adapter)
    model.out = LoRA(nn.Linear(8, 32), adapter)  # over the vocabulary
    return model


@pytest.mark.parametrize("adapter", ["default", "second", "0"])
def test_pefts_wrappers_are_looked_through(adapter):
    found = {
        name.replace(f".{adapter}", ".*"): group
        for group in param_groups(adapted(adapter), "muon", lr=0.1)
        for name, _ in group["params"]
    }
    kinds = {
        name: KINDS[g["mars_type"], g.get("matrices", "2d"), g["weight_decay"]]
        for name, g in found.items()
    }
    for table in (
        "tok.original_module.weight",
        "tok.token_adapter.trainable_tokens_delta.*",
        "pos.base_layer.weight",
        "pos.lora_embedding_A.*",
        "pos_embed.original_module.weight",
        "pos_embed.modules_to_save.*.weight",
        "router.base_layer.weight",
        "classifier.original_module.weight",
        "classifier.modules_to_save.*.weight",
        "out.base_layer.weight",
    ):
        assert kinds[table] == "tables", table
    assert kinds["classifier.modules_to_save.*.bias"] == "vectors"
    factors = [n for n in kinds if ".lora_A." in n or ".lora_B." in n]
    assert len(factors) == 8 and {kinds[n] for n in factors} == {"matrices"}


def test_rows_of_a_table_in_a_list_are_tables():
    found = where(param_groups(adapted(), "muon", lr=0.1))
    assert "embeddings.extra_rows.*" in found["tables"]
    assert "embeddings.extra_rows.*" not in found["vectors"]


def test_the_factors_of_adapters_may_be_adamws():
    model = adapted().requires_grad_(False)
    for name, p in model.named_parameters():
        p.requires_grad_("lora_A" in name or "lora_B" in name)
    for rule in ("moonlight", "muon", "mars-adamw"):
        groups = param_groups(model, rule, lr=0.1, adapters="adamw")
        trained = [g for g in groups if any(p.requires_grad for _, p in g["params"])]
        assert [g["mars_type"] for g in trained] == ["adamw"]
        optimizer = MARS(groups, compile=False)
        for p in model.parameters():
            p.grad = torch.ones_like(p) if p.requires_grad else None
        optimizer.step()
    with pytest.raises(ValueError, match="got adapters='lion', expected one of"):
        param_groups(model, lr=0.1, adapters="lion")


# ---- numbers -------------------------------------------------------------------------


def numbers(group):
    rate = group["lr"] * group.get("lr_ratio", 1.0)
    return group["mars_type"], rate, group["weight_decay"]


@pytest.mark.parametrize("key", LR)
def test_numbers_are_those_of_the_recipes_for_gpt2_small(key):
    """But for matrix rules to which the recipes give the embeddings too."""
    rule, lr, decay = key.replace("_", "-"), LR[key]["small"], RULES[key]
    lr_1d = lr if key in ONE_RATE else SIZES["small"].lr_1d
    by_rule = REGISTRY[rule].fallback == "itself"
    matrices, tables, vectors = param_groups(
        on_meta("ours"), rule, lr=lr, weight_decay=decay.matrices
    )
    beside = rule if by_rule else "adamw"
    assert numbers(matrices) == (rule, lr, decay.matrices)
    assert numbers(vectors) == pytest.approx((beside, lr_1d, decay.vectors))
    if REGISTRY[rule].matrix_only:
        expected = ("adamw", lr_1d, decay.embeddings)
    else:
        expected = (rule, lr, decay.embeddings)
    assert numbers(tables) == pytest.approx(expected)
    for group in (matrices, tables, vectors):
        other = group["mars_type"] != rule
        assert group.get("betas") == ((0.9, 0.95) if other else None)
        eps_first = other and REGISTRY[rule].fallback == "adamw"
        assert group.get("epsilon_hat", False) == eps_first


@pytest.mark.parametrize("rule", ["mars-m", "mars-adamw"])
def test_a_step_is_that_of_groups_written_by_hand(rule):
    def trained(groups):
        torch.manual_seed(0)
        model = GPT2(SHAPE)
        model.init_weights()
        optimizer = MARS(groups(model), lr=0.02, mars_type=rule, compile=False)
        for _ in range(3):
            tokens = torch.randint(SHAPE.vocab_size, (2, SHAPE.block_size))
            model(tokens).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return dict(model.named_parameters())

    def by_hand(model):
        tables = [model.wte.weight, model.wpe.weight]
        others = [p for n, p in model.named_parameters() if not n.startswith("w")]
        own = {"weight_decay": 0.0}
        if rule == "mars-m":
            own |= {"mars_type": "adamw", "betas": (0.9, 0.95), "epsilon_hat": True}
        return [{"params": others}, {"params": tables, **own}]

    ours = trained(lambda model: param_groups(model, rule, lr=0.02))
    for name, p in trained(by_hand).items():
        torch.testing.assert_close(ours[name], p, rtol=1e-6, atol=0, msg=name)


@pytest.mark.parametrize("rule", REGISTRY)
@pytest.mark.parametrize("name", ["ViT", "Experts"])
def test_every_rule_takes_its_groups(rule, name):
    model = MODELS[name]()
    optimizer = MARS(param_groups(model, rule, lr=0.1), compile=False)
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    for _ in range(2):  # the first one of SOAP moves nothing
        optimizer.step()
    for old, p in zip(before, model.parameters(), strict=True):
        assert p.isfinite().all() and not torch.equal(old, p)
    assert {g["mars_type"] for g in optimizer.param_groups} <= {rule, "adamw"}


def test_adamw_keeps_its_form_beside_a_rule_with_options():
    """An argument of MARS for the rule does not reach it."""
    model = GPT2(SHAPE)
    options = dict(nesterov=True, epsilon_hat=True, betas=(0.5, 0.6), compile=False)
    matrices, tables, vectors = MARS(
        param_groups(model, "muon", lr=0.1), **options
    ).param_groups
    assert (matrices["nesterov"], matrices["betas"]) == (True, (0.5, 0.6))
    for group in (tables, vectors):
        found = [group[name] for name in ("nesterov", "epsilon_hat", "betas")]
        assert found == [False, False, (0.9, 0.95)]


def test_what_is_given_holds_for_all_that_adamw_moves():
    given = dict(lr_1d=1e-4, betas_1d=(0.8, 0.9), weight_decay_1d=0.3)
    moved = dict(lr=0.1, lr_ratio=1e-4 / 0.1, betas=(0.8, 0.9), weight_decay=0.3)
    for rule in ("moonlight", "muon"):
        _, *beside = param_groups(on_meta("ours"), rule, lr=0.1, **given)
        assert [g.items() >= moved.items() for g in beside] == [True, True]
    _, tables, vectors = param_groups(on_meta("ours"), lr=0.1, **given)
    assert (tables["mars_type"], tables["lr"]) == ("mars-adamw", 0.1)
    assert vectors.items() >= moved.items()


def test_without_a_decay_it_is_that_of_the_rule():
    matrices, tables, _ = param_groups(on_meta("ours"), "moonlight", lr=0.1)
    assert matrices["weight_decay"] == tables["weight_decay"] == 0.1
    assert param_groups(on_meta("ours"), lr=0.1)[0]["weight_decay"] == 0.0


def test_experts_and_kernels_are_options():
    def rules(name, rule, **options):
        groups = param_groups(on_meta(name), rule, lr=0.1, **options)
        return {n: g["mars_type"] for g in groups for n, _ in g["params"]}

    for experts, mover in ((True, "muon"), (False, "adamw")):
        found = rules("Experts", "muon", experts=experts)
        assert found["grouped_experts.w1_EFD"] == mover
    for convolutions, mover in ((True, "muon"), (False, "adamw")):
        found = rules("ResNet", "muon", convolutions=convolutions)
        assert found["conv1.weight"] == mover
    (group,) = (
        g
        for g in param_groups(on_meta("ResNet"), "lion", lr=0.1, weight_decay=0.5)
        if any(name == "conv1.weight" for name, _ in g["params"])
    )
    assert group["weight_decay"] == 0.5  # a weight, not a vector


# ---- fused weights -------------------------------------------------------------------


class Fused(nn.Module):
    """Grouped-query attention of four heads that share two keys, and a gated MLP."""

    def __init__(self, num_kv=2, name="qkv_proj"):
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.head_dim = 4, num_kv, 8
        self.add_module(name, nn.Linear(32, 8 * (4 + 2 * num_kv)))
        self.o_proj, self.gate_up = nn.Linear(32, 32), nn.Linear(32, 48, bias=False)


def splits(model, rule="moonlight", **options):
    """The parts of each weight that has several."""
    groups = param_groups(model, rule, lr=0.1, **options)
    return {n: g["splits"] for g in groups if "splits" in g for n, _ in g["params"]}


QKV = {"qkv_proj.weight": (32, 16, 16)}


@pytest.mark.parametrize(
    "model, found",
    [
        (Fused(), QKV),
        (Fused(num_kv=4), {}),  # no weight of grouped-query attention
        (Fused(name="wqkv"), {}),  # whose rows lie by head
        (torch.compile(Fused()), {"_orig_mod.qkv_proj.weight": (32, 16, 16)}),
    ],
    ids=["queries, keys, values", "equal heads", "by head", "compiled"],
)
def test_grouped_query_attention_declares_its_parts(model, found):
    assert splits(model) == found


def test_transformers_attention_declares_its_parts():
    phi = transformers("Phi3", **LLAMA, pad_token_id=0)()
    names = [f"model.layers.{i}.self_attn.qkv_proj.weight" for i in (0, 1)]
    assert splits(phi) == dict.fromkeys(names, (32, 16, 16))
    for name in ("GPT2", "Llama", "Mixtral", "llama3", "ours"):
        assert splits(on_meta(name)) == {}


def test_a_module_and_then_a_pattern_declare_parts():
    model = Fused()
    model.qkv_proj.weight_splits, model.o_proj.weight_splits = 8, [16, 16]
    assert splits(model) == {"qkv_proj.weight": 8, "o_proj.weight": (16, 16)}
    by_pattern = {"qkv": (32, 32), "proj": None, "gate_up": 2}
    found = {"qkv_proj.weight": (32, 32), "gate_up.weight": 2}
    assert splits(model, splits=by_pattern) == found
    optimizer = marsopt.for_model(model, lr=0.1, compile=False, splits=by_pattern)
    parts = [group.get("splits") for group in optimizer.param_groups]
    assert parts == [None, (32, 32), 2, None]
    whole = splits(on_meta("Mixtral"), splits={"gate_up_proj": 2})
    assert set(whole.values()) == {2} and len(whole) == 2


@pytest.mark.parametrize(
    "value, told",
    [
        (2, "got splits=2, expected a dict by patterns of names"),
        ({"qvk": 2}, r"got the patterns \['qvk'\] in splits, expected each to match"),
        ({"bias": 2}, r"got the patterns \['bias'\] in splits, expected each to match"),
        ({"(": 2}, r"got the pattern '\(' of splits \(.*\), expected a regular"),
        ({b"qkv": 2}, "got the pattern b'qkv' of splits .*, expected a regular"),
        ({"qkv": 0}, "got splits=0, expected None, a whole number"),
    ],
)
def test_splits_that_are_refused(value, told):
    with pytest.raises(ValueError, match=told):
        splits(Fused(), splits=value)


def test_parts_that_do_not_fit_are_refused_by_name():
    with pytest.raises(ValueError, match="splits=5 for parameter 'gate_up.weight' of"):
        marsopt.for_model(Fused(), lr=0.1, splits={"gate_up": 5})


def test_what_it_does_not_take():
    model = on_meta("ours")
    with pytest.raises(TypeError, match="got list, expected a torch.nn.Module"):
        param_groups([*model.parameters()], lr=0.1)
    with pytest.raises(ValueError, match="got mars_type='moon"):
        param_groups(model, "moon", lr=0.1)
    with pytest.raises(ValueError, match="got lr=-1"):
        param_groups(model, lr=-1)
    with pytest.raises(ValueError, match="got a model without a parameter"):
        param_groups(model.requires_grad_(False), lr=0.1)


# ---- torchtitan's patterns -----------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["llama3", "qwen3", "deepseek_v3", "Llama", "Mixtral", "GptOss", "Experts"]
)
def test_names_alone_tell_as_much_to_torchtitan(name):
    """What default_mars gives to AdamW is what is no matrix; norms stay with the rule,
    which gives them to its AdamW.
    """
    from marsopt.interop.torchtitan import BESIDE

    for parameter, p, role in roles(on_meta(name)):
        if p.ndim > 1 and parameter != "heads":
            hidden = role in ("matrix", "experts")
            assert bool(re.search(BESIDE, parameter)) is not hidden, parameter
