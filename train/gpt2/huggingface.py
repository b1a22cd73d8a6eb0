"""GPT-2 as Hugging Face's GPT2LMHeadModel keeps it: config.json and model.safetensors,
written and read without transformers.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from train.errors import UserError
from train.files import read_json, write_json
from train.gpt2.model import GPT2, Shape, tensor_sizes

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
AGAIN = "a JSON object: export or download the folder again"

# ours: (theirs, whether the matrix is turned: their Conv1D keeps it as (in, out))
OUTSIDE = {"wte": ("wte", False), "wpe": ("wpe", False), "norm": ("ln_f", False)}
BLOCK = {
    "attn_norm": ("ln_1", False),
    "attn_in": ("attn.c_attn", True),
    "attn_out": ("attn.c_proj", True),
    "mlp_norm": ("ln_2", False),
    "mlp_in": ("mlp.c_fc", True),
    "mlp_out": ("mlp.c_proj", True),
}
# what a folder has to say for our forward pass to be its own; absent = the default
FIXED = {
    "model_type": (None, {"gpt2"}),
    "activation_function": ("gelu_new", {"gelu_new", "gelu_pytorch_tanh"}),
    "layer_norm_epsilon": (1e-5, {1e-5}),
    "scale_attn_weights": (True, {True}),
    "add_cross_attention": (False, {False}),
    "tie_word_embeddings": (True, {True}),
}
SIZES = {
    "num_layers": "n_layer",
    "num_heads": "n_head",
    "width": "n_embd",
    "block_size": "n_positions",
    "vocab_size": "vocab_size",
}


def _modules(shape: Shape) -> dict[str, tuple[str, bool]]:
    inside = {
        f"layers.{i}.{ours}": (f"h.{i}.{theirs}", turned)
        for i in range(shape.num_layers)
        for ours, (theirs, turned) in BLOCK.items()
    }
    return OUTSIDE | inside


def to_huggingface(state: Mapping[str, Tensor], shape: Shape) -> dict[str, Tensor]:
    """Return our state dict under their names: biases, which we have not, as zeros;
    the head left out, since it is the token embedding.
    """
    tensors = {}
    for ours, (theirs, turned) in _modules(shape).items():
        weight = state[f"{ours}.weight"]
        weight = weight.T if turned else weight
        tensors[f"transformer.{theirs}.weight"] = weight.contiguous()
        if ours not in ("wte", "wpe"):
            bias = torch.zeros(weight.shape[-1], dtype=weight.dtype)
            tensors[f"transformer.{theirs}.bias"] = bias
    return tensors


def from_huggingface(
    tensors: Mapping[str, Tensor], shape: Shape, folder: Path
) -> dict[str, Tensor]:
    """Return their tensors as our state dict, in fp32; errors name ``folder``."""
    theirs = {name.removeprefix("transformer."): t for name, t in tensors.items()}
    state, sizes = {}, tensor_sizes(shape)
    for ours, (name, turned) in _modules(shape).items():
        weight = theirs.get(f"{name}.weight", torch.empty(0))
        weight = weight.T if turned and weight.ndim == 2 else weight
        if tuple(weight.shape) != sizes[f"{ours}.weight"]:
            raise UserError(
                f"got {name}.weight of shape {tuple(weight.shape)} in {folder}, "
                f"expected {sizes[f'{ours}.weight']} by its config.json: the folder is "
                "incomplete or mixed; export or download it again"
            )
        state[f"{ours}.weight"] = weight.float().contiguous()
    _check_rest(theirs, shape, folder)
    return state


def _check_rest(theirs: Mapping[str, Tensor], shape: Shape, folder: Path) -> None:
    """Check that what we have no place for has no effect."""
    modules = {name for name, _ in _modules(shape).values()}
    # older releases saved the causal mask with the weights
    masks = (".attn.bias", ".attn.masked_bias")
    for name, tensor in theirs.items():
        module, _, kind = name.rpartition(".")
        if module in modules and kind == "bias":
            if tensor.any():
                raise UserError(
                    f"got {name} that is not zero in {folder}, expected a GPT-2 "
                    "without biases: this application cannot hold them; import a model "
                    "that was trained without"
                )
        elif name == "lm_head.weight":
            if not tensor.equal(theirs["wte.weight"]):
                raise UserError(
                    f"got an lm_head.weight of its own in {folder}, expected the token "
                    "embedding: import a model with a tied head"
                )
        elif (module not in modules or kind != "weight") and not name.endswith(masks):
            raise UserError(
                f"got {name} in {folder}, which its config.json has no place for, "
                "expected GPT-2's tensors: the folder is mixed; export it again"
            )


def config_json(shape: Shape, end_of_text: int) -> dict:
    """Return config.json of a model of ours, which GPT2Config reads."""
    sizes = {theirs: getattr(shape, ours) for ours, theirs in SIZES.items()}
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **sizes,
        "n_inner": None,  # 4 n_embd
        **{key: default for key, (default, _) in FIXED.items() if default is not None},
        "scale_attn_by_inverse_layer_idx": shape.inverse_layer_scale,
        "reorder_and_upcast_attn": False,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
        "initializer_range": 0.02,
        "use_cache": True,
        **dict.fromkeys(("bos_token_id", "eos_token_id"), end_of_text),
        "dtype": "float32",
    }


def read_shape(folder: Path) -> Shape:
    """Return the shape that ``folder``'s config.json describes."""
    path = folder / "config.json"
    if not path.exists():
        raise UserError(
            f"got no {path}, expected a Hugging Face GPT-2 folder: python -m "
            "train.export makes one"
        )
    config = read_json(path, AGAIN)

    def refused(got: str, expected: str) -> UserError:
        return UserError(
            f"got {got} in {path}, expected {expected}: this application holds GPT-2 "
            "alone; import another folder"
        )

    for key, (default, accepted) in FIXED.items():
        if (value := config.get(key, default)) not in accepted:
            known = " or ".join(map(repr, sorted(accepted)))
            raise refused(f"{key}={value!r}", known)
    if config.get("n_inner") not in (None, 4 * config.get("n_embd", 0)):
        raise refused(f"n_inner={config['n_inner']}", "4 n_embd")
    absent = [name for name in SIZES.values() if not isinstance(config.get(name), int)]
    if absent:
        raise refused(f"no number for {', '.join(absent)}", "GPT-2's config.json")
    if config["n_embd"] % config["n_head"]:
        got = f"n_head={config['n_head']} with n_embd={config['n_embd']}"
        raise refused(got, "a divisor")
    return Shape(
        **{ours: config[theirs] for ours, theirs in SIZES.items()},
        inverse_layer_scale=config.get("scale_attn_by_inverse_layer_idx", False),
    )


def save(model: GPT2, folder: Path, end_of_text: int) -> None:
    """Write config.json, generation_config.json and model.safetensors (fp32)."""
    from safetensors.torch import save_file

    config = config_json(model.shape, end_of_text)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", ids)
    state = {name: t.cpu() for name, t in model.state_dict().items()}
    tensors = to_huggingface(state, model.shape)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    # safetensors makes it readable by its owner alone
    (folder / WEIGHTS).chmod((folder / "config.json").stat().st_mode)


def load(folder: Path) -> GPT2:
    """Return the model in a Hugging Face folder, in one file or several."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    shape = read_shape(folder)
    files = [WEIGHTS]
    if (folder / INDEX).exists():
        where = read_json(folder / INDEX, AGAIN).get("weight_map", {})
        files = sorted(set(where.values()))
    tensors: dict[str, Tensor] = {}
    try:
        for name in files:
            tensors |= load_file(folder / name)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"got a {folder / name} that does not read ({error}), expected the weights "
            "as safetensors: export or download the folder again"
        ) from error
    model = GPT2(shape)
    model.load_state_dict(from_huggingface(tensors, shape, folder))
    return model.eval()
