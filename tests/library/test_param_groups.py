"""marsopt.param_groups: which parameter of which model takes which rule, by which
numbers.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torch.nn.utils import parametrizations, parametrize, prune
from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers "fake")

import marsopt
from configs.published import LR, ONE_RATE, RULES, SIZES
from marsopt import MARS, REGISTRY, param_groups
from marsopt.models.names import HIDDEN, by_name
from marsopt.models.roles import roles, splits_of
from marsopt.models.walk import places
from train.gpt2 import GPT2, Shape

SHAPE = Shape(num_layers=2, num_heads=2, width=8, block_size=6, vocab_size=32)


def tree(parts: Mapping[str, nn.Module | nn.Parameter]) -> nn.Module:
    """A module with ``parts`` under dotted names."""
    root = nn.Module()
    for path, part in parts.items():
        *above, last = path.split(".")
        parent = root
        for name in above:
            if not hasattr(parent, name):
                parent.add_module(name, nn.Module())
            parent = getattr(parent, name)
        setattr(parent, last, part)
    return root


def zeros(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape))


def linear(cols: int = 8, rows: int = 8) -> nn.Linear:
    return nn.Linear(cols, rows, bias=False)


# ---- roles ---------------------------------------------------------------------------

# {role: {name: part}}
PARTS = {
    "embedding": {
        "wte": nn.Embedding(32, 8),
        "a": nn.Embedding(6, 8),  # whatever its name
        "patch_embed.proj": nn.Conv2d(3, 8, 4, bias=False),
        "cls_token": zeros(1, 1, 8),
        "encoder.position": zeros(5, 8),
        "extra.embeddings": nn.ParameterList([torch.zeros(1, 8)]),
    },
    "matrix": {
        "blocks.0.attn.qkv": linear(8, 24),
        "blocks.0.attn.output": linear(),
        "blocks.0.mlp.gate": linear(8, 16),  # no router, as there are no experts
        "attention_head.out_proj": linear(),
        "moe.experts.0": linear(),
        "cell.weight_hh": zeros(8, 8),
    },
    "router": {"moe.gate": linear(8, 4), "layers.3.feed_forward.router": linear(8, 4)},
    "experts": {
        "grouped_experts.w1_EFD": zeros(4, 6, 8),
        "counted.stack": zeros(2, 6, 8),  # its module counts them
    },
    "convolution": {"conv1": nn.Conv2d(3, 4, 3, bias=False)},
    "adapter": {"q.lora_A.default": linear(8, 2), "q.lora_B.default": linear(2, 8)},
    "vector": {
        "norm": nn.LayerNorm(8),
        "value": linear(8, 1),
        "attn.relative_position_bias_table": zeros(9, 2),
        "attn.r_w_bias": zeros(4, 4),
        "attn.pos_bias_u": zeros(4, 4),
        "attn.bias_v": zeros(4, 4),
        "moe.mlp1_bias_EG": zeros(4, 6),
        "quantizer.scale": zeros(8, 2),
        "quantizer.weight_scales": zeros(8, 2),
        "mixer.A_log": zeros(8, 4),
    },
    "other": {
        "grouped_experts.w13": zeros(4, 6, 2, 8),
        "einsum": zeros(2, 4, 8),
        "alpha": zeros(8, 2),  # of two dims, but no layer's weight
    },
    "head": {
        "cls.seq_relationship": linear(8, 2),
        "head_dist": linear(8, 9),
        "heads.1": linear(8, 2),
        "layers.7.lm_head": linear(8, 9),
        "last": linear(8, 32),  # the last Linear, over the vocabulary
    },
}


def everything() -> nn.Module:
    rows = [copy.deepcopy(row) for row in PARTS.values()]
    model = tree({name: part for row in rows for name, part in row.items()})
    model.counted.num_experts = 2
    return model


def test_roles_by_modules_names_and_shapes():
    found = {
        name.removesuffix(".weight"): role for name, _, role in roles(everything())
    }
    for role, row in PARTS.items():
        for name in row:
            told = {r for n, r in found.items() if n == name or f"{name}." in n}
            assert told == {role}, name


OF_HEADS = """
    module.output heads.head mlp_head.1 classifier.out_proj qa_outputs
    final_layer.linear decoder.output_projection layers.3.lm_head.decoder
    classifier_distill.linear model._orig_mod.lm_head._orig_mod
"""
OF_LAYERS = """
    decoder.0.classifier layers.0.output pre_classifier heads.0.qkv
    embedder.encoder.layers.0.wq bert.encoder.layer.0.attention.output.dense
    layers.0.mlp.gate_proj position_wise unbiased upscale
"""


@pytest.mark.parametrize(
    "role, names, end",
    [
        ("embedding", "embeddings.tok_embeddings", ".weight"),
        ("embedding", "attn.rel_pos_h decoder.query_tokens", ""),
        ("head", OF_HEADS, ".weight"),
        ("head", "lm_head.parametrizations", ".weight.original"),
        ("head", "module.lm_head", ".weight_orig"),
        (None, OF_LAYERS, ".weight"),
    ],
)
def test_what_names_tell(role, names, end):
    for name in names.split():
        assert by_name(name + end) == role, name


class Declaring(nn.Sequential):
    """A model of transformers, which declares its head if it has one."""

    def get_output_embeddings(self):
        if len(self) < 3:
            raise NotImplementedError
        return self[1]


@pytest.mark.parametrize("num, found", [(3, {"0.1.weight"}), (2, set())])
def test_heads_that_a_part_of_a_model_declares(num, found):
    model = nn.Sequential(Declaring(*(linear() for _ in range(num))))
    assert {name for name, _, role in roles(model) if role == "head"} == found


# ---- whole models --------------------------------------------------------------------


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
        suffix = dict(GPT2="LMHeadModel").get(kind, "ForCausalLM")
        return getattr(library, kind + suffix)(
            getattr(library, f"{kind}Config")(**options)
        )

    return build


LLAMA = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=128)
LLAMA |= dict(num_attention_heads=4, num_key_value_heads=2)
MODELS = {
    "ours": lambda: GPT2(SHAPE),
    "llama3": titan("llama3"),
    "deepseek_v3": titan("deepseek_v3"),
    "GPT2": transformers("GPT2", n_layer=2, n_embd=32, n_head=4, vocab_size=128),
    "GptOss": transformers("GptOss", **LLAMA, num_local_experts=4, head_dim=8),
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
    "GptOss": dict(
        experts=f"{MLP}experts.gate_up_proj {MLP}experts.down_proj",
        tables=f"model.embed_tokens {MLP}router lm_head",
        vectors=f"{MLP}experts.gate_up_proj_bias {MLP}experts.down_proj_bias",
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


@pytest.mark.parametrize("name", FROZEN)
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


OF_WEIGHTS = [pruned, parametrized, parametrizations.weight_norm]
OF_WEIGHTS += [parametrizations.spectral_norm, nn.utils.weight_norm]
OF_WEIGHTS += [nn.utils.spectral_norm]
OF_MODULES = [Replica, torch.compile, checkpoint_wrapper]
WRAPPED = {
    "embed": lambda: nn.Embedding(40, 8),
    "pos": lambda: nn.Embedding(5, 8),
    "layers.0.attn.qkv": lambda: linear(8, 24),
    "layers.0.mlp.gate": lambda: linear(8, 16),
    "layers.1.attn.qkv": lambda: linear(8, 24),
    "moe.gate": lambda: linear(8, 4),
    "moe.experts.0": lambda: linear(),
    "lm_head": lambda: linear(8, 40),
}


def wrapped_model():
    return tree({name: make() for name, make in WRAPPED.items()})


def roles_and_splits(model):
    """{plain name: role, parts} of matrices."""
    told = {id(p): role for _, p, role in roles(model)}
    parts = splits_of(model, {"qkv": 3, r"lm_head\.weight": 2})
    matrices = [x for x in places(model) if x.tensor.numel() > max(x.tensor.shape)]
    return {x.plain: (told[id(x.tensor)], parts.get(id(x.tensor))) for x in matrices}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("wrap", [*OF_WEIGHTS, *OF_MODULES])
def test_wrappers_change_names_alone(wrap):
    """Of each weight, or of a block, the head and the model."""
    model = wrapped_model()
    if wrap in OF_WEIGHTS:
        for part in WRAPPED:
            wrap(model.get_submodule(part))
    else:
        for part in ("layers.1", "lm_head"):
            path, _, last = part.rpartition(".")
            parent = model.get_submodule(path)
            parent.add_module(last, wrap(model.get_submodule(part)))
        model = Replica(wrap(model))
    assert roles_and_splits(model) == roles_and_splits(wrapped_model())


# ---- frozen, flattened, adapted ------------------------------------------------------


@pytest.mark.parametrize("rule", ["moonlight", "mars-adamw"])
def test_what_thaws_moves_as_if_it_had_never_been_frozen(rule):
    """And costs nothing before."""

    def build():
        torch.manual_seed(1)
        model = everything()
        some = [model.wte.weight, model.moe.gate.weight, model.norm.weight]
        return model, some, MARS(param_groups(model, rule, lr=0.02), compile=False)

    (cold, frozen, _), (plain, _, control) = build(), build()
    for p in frozen:
        p.requires_grad_(False)
    optimizer = MARS(param_groups(cold, rule, lr=0.02), compile=False)
    assert {*frozen}.isdisjoint(optimizer.state)
    cold.requires_grad_(True)
    for _ in range(2):
        for p, q in zip(cold.parameters(), plain.parameters(), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        optimizer.step()
        control.step()
    for (name, p), q in zip(cold.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q), name


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


# {kind: {name: part}} under PEFT's wrappers; * is the adapter's name
ADAPTED = {
    "tables": {
        "tok.original_module": lambda: nn.Embedding(32, 8),
        "tok.token_adapter.trainable_tokens_delta.*": lambda: zeros(3, 8),
        "pos.base_layer": lambda: nn.Embedding(6, 8),
        "pos.lora_embedding_A.*": lambda: zeros(2, 6),
        "pos_embed.modules_to_save.*": lambda: nn.Embedding(6, 8),
        "router.base_layer": lambda: linear(8, 4),
        "classifier.original_module": lambda: linear(8, 5),
        "classifier.modules_to_save.*": lambda: linear(8, 5),
        "lm_head.base_layer": lambda: linear(8, 32),
    },
    "matrices": {
        "layers.0.base_layer": linear,
        "layers.0.lora_A.*": lambda: linear(8, 2),
        "layers.0.lora_B.*": lambda: linear(2, 8),
        "experts.0": linear,
        "router.lora_A.*": lambda: linear(8, 2),
        "lm_head.lora_A.*": lambda: linear(8, 2),
        "lm_head.lora_B.*": lambda: linear(2, 32),
    },
    "vectors": {"layers.0.norm": lambda: nn.LayerNorm(8)},
}


def adapted(adapter="default") -> nn.Module:
    """A model under PEFT's wrappers."""
    rows = [row.items() for row in ADAPTED.values()]
    parts = {name: make() for row in rows for name, make in row}
    return tree({name.replace("*", adapter): part for name, part in parts.items()})


@pytest.mark.parametrize("adapter", ["default", "0"])
def test_pefts_wrappers_are_looked_through(adapter):
    found = kinds(param_groups(adapted(adapter), "muon", lr=0.1))
    for kind, row in ADAPTED.items():
        for name in row:
            prefix = name.replace("*", adapter)
            assert {k for n, k in found.items() if n.startswith(prefix)} == {kind}, name


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


GIVEN = dict(lr_1d=1e-4, betas_1d=(0.8, 0.9), weight_decay_1d=0.3)


def test_arguments_of_the_class_for_the_rule_do_not_reach_adamw():
    options = dict(nesterov=True, epsilon_hat=True, betas=(0.5, 0.6), compile=False)
    groups = MARS(param_groups(GPT2(SHAPE), "muon", lr=0.1), **options).param_groups
    found = [[g[n] for n in ("nesterov", "epsilon_hat", "betas")] for g in groups]
    assert found == [[True, True, (0.5, 0.6)], *[[False, False, (0.9, 0.95)]] * 2]


def test_experts_and_kernels_are_options():
    def rules(rule, **options):
        groups = param_groups(everything(), rule, lr=0.1, weight_decay=0.5, **options)
        return {
            n: (g["mars_type"], g["weight_decay"])
            for g in groups
            for n, _ in g["params"]
        }

    experts, kernel = "grouped_experts.w1_EFD", "conv1.weight"
    for taken, rule in ((True, "muon"), (False, "adamw")):
        assert rules("muon", experts=taken)[experts][0] == rule
        assert rules("muon", convolutions=taken)[kernel][0] == rule
    assert rules("lion")[kernel] == ("lion", 0.5)  # a weight, not a vector


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
    for name in ("GPT2", "llama3", "ours"):
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
    "transposed": lambda: module_with((6, 12), in_features=6, out_features=12),
    "Llama 4": lambda: module_with((4, 6, 12), num_experts=4, expert_dim=6),
    "GPT-OSS": lambda: module_with((4, 6, 12), is_transposed=True),
    "ConvTranspose": lambda: nn.ConvTranspose2d(6, 12, 3),
}


@pytest.mark.parametrize("kind", INPUTS_FIRST)
def test_parts_of_weights_whose_rows_are_inputs_are_refused(kind):
    model = nn.ModuleDict(dict(hidden=linear(), fused=INPUTS_FIRST[kind]()))
    with pytest.raises(ValueError, match=r"'fused.weight' of a \w+, which stores"):
        param_groups(model, "moonlight", lr=0.1, splits={"fused": 2})
    assert splits(model, splits={"fused": None}) == {}
    model.fused.weight_splits = 2
    with pytest.raises(ValueError, match="splits=2 for 'fused.weight'"):
        param_groups(model, "moonlight", lr=0.1)
    right = tree(dict(fused=module_with((12, 6), in_features=6, out_features=12)))
    assert splits(right, splits={"fused": 2}) == {"fused.weight": 2}


def test_what_it_does_not_take():
    model = on_meta("ours")
    with pytest.raises(TypeError, match="got list, expected a torch.nn.Module"):
        param_groups([*model.parameters()], lr=0.1)
    with pytest.raises(ValueError, match="got mars_type='moon"):
        param_groups(model, "moon", lr=0.1)
    with pytest.raises(ValueError, match="got lr=-1"):
        param_groups(model, lr=-1)
    with pytest.raises(ValueError, match="got adapters='lion', expected one of"):
        param_groups(model, lr=0.1, adapters="lion")
    with pytest.raises(ValueError, match="got a model without a parameter"):
        param_groups(model.requires_grad_(False), lr=0.1)


# ---- torchtitan's patterns -----------------------------------------------------------


@pytest.mark.parametrize("name", ["llama3", "deepseek_v3", "GptOss"])
def test_names_alone_tell_as_much_to_torchtitan(name):
    """What default_mars gives to AdamW is what is no matrix; norms stay with the rule,
    which gives them to its AdamW.
    """
    from marsopt.interop.torchtitan import BESIDE

    for parameter, p, role in roles(on_meta(name)):
        if p.ndim > 1:
            told = bool(re.search(BESIDE, parameter))
            assert told is (role not in HIDDEN), parameter
