"""marsopt.param_groups: which parameter of which model takes which rule, by which
numbers; and what is said where a matrix rule is given embeddings.
"""

from __future__ import annotations

import copy
import re

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
from torch.nn.utils import parametrizations, parametrize, prune
from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers "fake")

import marsopt
from configs.published import LR, ONE_RATE, RULES, SIZES
from marsopt import MARS, REGISTRY, param_groups
from marsopt.models.names import by_name
from marsopt.models.roles import roles, splits_of
from marsopt.models.walk import places
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


JETMOE = dict(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=24,
    num_hidden_layers=2,
    num_key_value_heads=2,
    kv_channels=8,
    num_local_experts=4,
    num_experts_per_tok=2,
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
    "deepseek_v3": titan("deepseek_v3"),
    "GPT2": transformers("GPT2", n_layer=2, n_embd=32, n_head=4, vocab_size=128),
    "JetMoe": transformers("JetMoe", **JETMOE),
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
# Names without ".weight", * for a number. Of all others those of two dims and more are
# matrices, the rest vectors.
INNER = "layers.*.moe.routed_experts.inner_experts.w"
MLP = "model.layers.*.mlp."
FROZEN = {
    "ours": dict(tables="wte wpe"),
    "llama3": dict(tables="tok_embeddings lm_head"),
    "deepseek_v3": dict(
        experts=f"{INNER}1_EFD {INNER}2_EDF {INNER}3_EFD",
        tables="tok_embeddings layers.*.moe.router.gate lm_head",
    ),
    "GPT2": dict(tables="transformer.wte transformer.wpe"),
    "JetMoe": dict(
        experts=f"model.layers.*.self_attention.experts.input_linear {MLP}input_linear"
        f" model.layers.*.self_attention.experts.output_linear {MLP}output_linear",
        tables=f"model.embed_tokens {MLP}router.layer lm_head"
        " model.layers.*.self_attention.experts.router.layer",
    ),
    "GptOss": dict(
        experts=f"{MLP}experts.gate_up_proj {MLP}experts.down_proj",
        tables=f"model.embed_tokens {MLP}router lm_head",
        vectors=f"{MLP}experts.gate_up_proj_bias {MLP}experts.down_proj_bias",
    ),
    "Mamba": dict(
        convolutions="backbone.layers.*.mixer.conv1d",
        tables="backbone.embeddings",
        vectors="backbone.layers.*.mixer.A_log",
    ),
    "ViT": dict(
        tables="cls_token pos_embed patch_embed.proj head",
        vectors="blocks.*.relative_position_bias_table",
    ),
    "ResNet": dict(convolutions="conv1 layer1.*", tables="fc"),
    "Unnamed": dict(tables="a b d", vectors="value"),
    "Experts": dict(
        experts="grouped_experts.w1_EFD",
        tables="moe.gate",
        vectors="heads grouped_experts.w13 grouped_experts.mlp1_bias_EG "
        "feed_forward.w13",
    ),
}


def kinds(groups) -> dict[str, str]:
    """{name: kind}, as they are."""
    return {
        name: KINDS[g["mars_type"], g.get("matrices", "2d"), g["weight_decay"]]
        for g in groups
        for name, _ in g["params"]
    }


def on_meta(name) -> nn.Module:
    with torch.device("meta"):
        return MODELS[name]()


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_has_its_place_under_its_name(name):
    """Tied ones once; frozen ones too, for when they thaw."""
    model = on_meta(name)
    next(iter(model.parameters())).requires_grad_(False)
    groups = param_groups(model, "muon", lr=0.02, convolutions=True)
    wanted, found = dict(model.named_parameters()), kinds(groups)
    assert len(wanted) == len(found) == sum(len(g["params"]) for g in groups)
    assert all(wanted[n] is p for g in groups for n, p in g["params"])
    told = {n: kind for kind, text in FROZEN[name].items() for n in text.split()}
    for parameter, p in wanted.items():
        plain = re.sub(r"\b\d+\b", "*", parameter.removesuffix(".weight"))
        kind = told.get(plain, "matrices") if p.ndim > 1 else "vectors"
        assert found[parameter] == kind, parameter


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
        ("model._orig_mod.lm_head._orig_mod.weight", "head"),
        ("layers.3.lm_head.decoder.weight", "head"),
        ("lm_head.parametrizations.weight.original", "head"),
        ("module.lm_head.weight_orig", "head"),
        ("encoder.attention.output.dense.weight", None),
        ("decoder.0.classifier.weight", None),
        ("layers.0.output.weight", None),
        ("attention_head.out_proj.weight", None),
        ("pre_classifier.weight", None),
        ("heads.0.qkv.weight", None),
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


class Net(nn.Module):
    """Modules under given names, after words and hidden blocks."""

    def __init__(self, **modules):
        super().__init__()
        self.words = nn.Embedding(9, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])
        for name, module in modules.items():
            self.add_module(name, module)


class Block(nn.Module):
    """Hidden matrices under the names of heads."""

    def __init__(self, rows=6):
        super().__init__()
        self.attention = nn.ModuleDict(
            dict(qkv=nn.Linear(6, 18), output=nn.Linear(6, 6))
        )
        self.score, self.fc = nn.Linear(6, rows), nn.Linear(rows, 6)


class LikeTransformers(Net):
    def get_output_embeddings(self):
        return self.a


class LikeTimm(Net):
    def get_classifier(self):
        return self.a, self.b


class Undeclared(Net):
    def get_output_embeddings(self):
        raise NotImplementedError

    def get_classifier(self):
        return None


def linears(*widths):
    pairs = zip(widths, widths[1:], strict=False)
    layers = [(nn.Linear(*pair), nn.LayerNorm(pair[1]), nn.ReLU()) for pair in pairs]
    return nn.Sequential(nn.Dropout(), *sum(layers, ()))


def pair():
    return dict(a=nn.Linear(6, 7), b=nn.Linear(6, 3))


def dict_of(**modules):
    return nn.ModuleDict(modules)


HEADS_OF = {
    "linear": (Net(classifier=linears(6, 3)), "classifier.1"),
    "layers": (Net(classifier=linears(6, 6, 6, 3)), "classifier.7"),
    "growing": (Net(classifier=linears(6, 12, 3)), "classifier.4"),
    "dense alone": (Net(mlp_head=dict_of(dense=nn.Linear(6, 3))), "mlp_head.dense"),
    "dense and out_proj": (
        Net(classifier=dict_of(dense=nn.Linear(6, 6), out_proj=nn.Linear(6, 3))),
        "classifier.out_proj",
    ),
    "several": (
        Net(heads=nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 2)])),
        "heads.0 heads.1",
    ),
    "boxes after it": (
        Net(class_labels_classifier=nn.Linear(6, 4), box=linears(6, 6, 5)),
        "class_labels_classifier",
    ),
    "as wide as the model": (Net(head=nn.Linear(6, 6)), "head"),
    "transformers": (LikeTransformers(**pair()), "a"),
    "timm": (LikeTimm(**pair()), "a b"),
    "undeclared": (Undeclared(**pair()), ""),
    "a part of a model": (nn.Sequential(LikeTransformers(**pair())), "0.a"),
    "looped": (Net(lm_head=nn.Linear(6, 9), block=Block()), "lm_head"),
    "looped, head last": (Net(block=Block(), output=nn.Linear(6, 9)), "output"),
    "named": (
        Net(head=nn.Linear(6, 9), layer1=Block(), layer2=Block(12)),
        "head",
    ),
    "gated": (
        Net(block=dict_of(fc=nn.Linear(6, 24), down=nn.Linear(12, 6)), **pair()),
        "",
    ),
}


@pytest.mark.parametrize("name", HEADS_OF)
def test_heads_among_hidden_matrices(name):
    model, found = HEADS_OF[name]
    told = {n.removesuffix(".weight") for n, _, role in roles(model) if role == "head"}
    assert told == set(found.split())


# ---- wrappers ------------------------------------------------------------------------


class Replica(nn.Module):
    """As DistributedDataParallel and AveragedModel call what they hold."""

    def __init__(self, module):
        super().__init__()
        self.module = module


def pruned(module):
    prune.random_unstructured(module, "weight", 0.5)


def parametrized(module):
    parametrize.register_parametrization(module, "weight", nn.Identity())


OF_WEIGHTS = [
    pruned,
    parametrized,
    parametrizations.weight_norm,
    parametrizations.spectral_norm,
    nn.utils.weight_norm,
    nn.utils.spectral_norm,
]
OF_MODULES = [Replica, torch.compile, checkpoint_wrapper]
PARTS = ["embed", "pos", "layers.0.attn.qkv", "layers.0.mlp.gate", "moe.gate"]
PARTS += ["moe.experts.0", "lm_head"]


def wrapped_model():
    model = nn.Module()
    model.embed, model.pos = nn.Embedding(40, 8), nn.Embedding(5, 8)
    model.layers = nn.ModuleList([nn.Module() for _ in range(2)])
    for block in model.layers:
        block.attn, block.mlp, block.norm = Attention(8), GatedMLP(8), nn.LayerNorm(8)
    model.moe = nn.Module()
    model.moe.gate = nn.Linear(8, 4)
    model.moe.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
    model.lm_head = nn.Linear(8, 40)
    return model


def roles_and_splits(model):
    """{plain name: role, parts} of matrices."""
    told = {id(p): role for _, p, role in roles(model)}
    parts = splits_of(model, {"qkv": 3, r"lm_head\.weight": 2})
    matrices = [x for x in places(model) if x.tensor.numel() > max(x.tensor.shape)]
    return {x.plain: (told[id(x.tensor)], parts.get(id(x.tensor))) for x in matrices}


@DRAWN
@hypothesis.given(
    weights=st.dictionaries(st.sampled_from(PARTS), st.sampled_from(OF_WEIGHTS)),
    inside=st.dictionaries(
        st.sampled_from(["layers.1", "layers.0", "lm_head"]),
        st.sampled_from(OF_MODULES),
    ),
    outside=st.lists(st.sampled_from(OF_MODULES), unique=True),
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_wrappers_change_names_alone(weights, inside, outside):
    model = wrapped_model()
    for part, wrap in weights.items():
        wrap(model.get_submodule(part))
    for part, wrap in inside.items():
        path, _, last = part.rpartition(".")
        parent = model.get_submodule(path)
        parent.add_module(last, wrap(model.get_submodule(part)))
    for wrap in outside:
        model = wrap(model)
    assert roles_and_splits(model) == roles_and_splits(wrapped_model())


def test_sharded_models():
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        model = GPT2(SHAPE)
        for part in (*model.layers.values(), model):
            fully_shard(part, mesh=init_device_mesh("cpu", (2,)))
        found = kinds(param_groups(model, "muon", lr=0.02))
    finally:
        dist.destroy_process_group()
    assert found == kinds(param_groups(GPT2(SHAPE), "muon", lr=0.02))


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


TABLES = """
    tok.original_module.weight tok.token_adapter.trainable_tokens_delta.*
    pos.base_layer.weight pos.lora_embedding_A.* pos_embed.original_module.weight
    pos_embed.modules_to_save.*.weight router.base_layer.weight
    classifier.original_module.weight classifier.modules_to_save.*.weight
    out.base_layer.weight
"""


@pytest.mark.parametrize("adapter", ["default", "second", "0"])
def test_pefts_wrappers_are_looked_through(adapter):
    found = kinds(param_groups(adapted(adapter), "muon", lr=0.1))
    found = {name.replace(f".{adapter}", ".*"): kind for name, kind in found.items()}
    for table in TABLES.split():
        assert found[table] == "tables", table
    assert found["classifier.modules_to_save.*.bias"] == "vectors"
    factors = [n for n in found if ".lora_A." in n or ".lora_B." in n]
    assert len(factors) == 8 and {found[n] for n in factors} == {"matrices"}
    rows = {kind for n, kind in found.items() if n.startswith("embeddings.extra_rows")}
    assert rows == {"tables"}


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
    for name in ("GPT2", "JetMoe", "llama3", "ours"):
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


@pytest.mark.parametrize(
    "value, told",
    [
        (2, "got splits=2, expected a dict by patterns of names"),
        ({"qvk": 2}, r"got the patterns \['qvk'\] in splits, expected each to match"),
        ({"bias": 2}, r"got the patterns \['bias'\] in splits, expected each to match"),
        ({"(": 2}, r"got the pattern '\(' of splits \(.*\), expected a regular"),
        ({b"qkv": 2}, "got the pattern b'qkv' of splits .*, expected a regular"),
        ({"qkv": 0}, "got splits=0, expected None, a whole number"),
        ({"gate_up": 5}, "splits=5 for parameter 'gate_up.weight' of"),
    ],
)
def test_splits_that_are_refused(value, told):
    with pytest.raises(ValueError, match=told):
        marsopt.for_model(Fused(), lr=0.1, splits=value, compile=False)


def module_with(shape, **attributes):
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(shape))
    vars(module).update(attributes)
    return module


INPUTS_FIRST = {
    "Conv1D": lambda: module_with((6, 6), nx=6, nf=6),
    "a Linear, transposed": lambda: module_with(
        (6, 12), in_features=6, out_features=12
    ),
    "Llama 4's experts": lambda: module_with((4, 6, 12), num_experts=4, expert_dim=6),
    "GPT-OSS's experts": lambda: module_with((4, 6, 12), is_transposed=True),
    "ConvTranspose": lambda: nn.ConvTranspose2d(6, 12, 3),
}


@pytest.mark.parametrize("kind", INPUTS_FIRST)
def test_parts_of_weights_whose_rows_are_inputs_are_refused(kind):
    model = Net(fused=INPUTS_FIRST[kind]())
    with pytest.raises(ValueError, match=r"'fused.weight' of a \w+, which stores"):
        param_groups(model, "moonlight", lr=0.1, splits={"fused": 2})
    assert splits(model, splits={"fused": None}) == {}
    model.fused.weight_splits = 2
    with pytest.raises(ValueError, match="splits=2 for 'fused.weight'"):
        param_groups(model, "moonlight", lr=0.1)
    right = Net(fused=module_with((12, 6), in_features=6, out_features=12))
    assert splits(right, splits={"fused": 2}) == {"fused.weight": 2}


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


@pytest.mark.parametrize("name", ["llama3", "deepseek_v3", "GptOss", "Experts"])
def test_names_alone_tell_as_much_to_torchtitan(name):
    """What default_mars gives to AdamW is what is no matrix; norms stay with the rule,
    which gives them to its AdamW.
    """
    from marsopt.interop.torchtitan import BESIDE

    for parameter, p, role in roles(on_meta(name)):
        if p.ndim > 1 and parameter != "heads":
            hidden = role in ("matrix", "experts")
            assert bool(re.search(BESIDE, parameter)) is not hidden, parameter
