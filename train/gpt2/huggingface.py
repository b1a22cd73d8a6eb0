"""GPT-2 as Hugging Face's GPT2LMHeadModel keeps it, without transformers."""

from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, asdict, astuple, dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
from torch import Tensor

from train.errors import UserError
from train.files import Limits, read_json, write_json
from train.gpt2.model import GPT2, Depth, Shape, Size, tensor_sizes

CONFIG, WEIGHTS = "config.json", "model.safetensors"
INDEX = "model.safetensors.index.json"
AGAIN = "a Hugging Face GPT-2 folder, as of train.export: export or download it again"

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
# older releases saved the causal mask with the weights
MASKS = (".attn.bias", ".attn.masked_bias")
REAL = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


@dataclass(frozen=True)
class Config:
    """What config.json has to say for our forward pass to be its own: after the type
    the fields of our shape, in its order; absent = the default.
    """

    model_type: Literal["gpt2"]
    n_layer: Depth
    n_head: Size
    n_embd: Size
    n_positions: Size
    vocab_size: Size
    scale_attn_by_inverse_layer_idx: bool = False
    _: KW_ONLY
    n_inner: int | None = None  # 4 n_embd
    activation_function: Literal["gelu_new", "gelu_pytorch_tanh"] = "gelu_new"
    layer_norm_epsilon: Annotated[float, Limits(ge=1e-5, le=1e-5)] = 1e-5
    scale_attn_weights: Literal[True] = True
    add_cross_attention: Literal[False] = False
    tie_word_embeddings: Literal[True] = True

    def __post_init__(self) -> None:
        if self.n_inner not in (None, 4 * self.n_embd):
            raise ValueError(f"got n_inner={self.n_inner}, expected 4 n_embd")
        self.shape()

    def shape(self) -> Shape:
        """Return it as ours."""
        return Shape(*astuple(self)[1:7])


@dataclass(frozen=True)
class Index:
    """What says in which file each tensor lies: beside it, in no other folder."""

    weight_map: Annotated[
        dict[str, Annotated[str, Limits(pattern=r"^[^/\\\x00]+\.safetensors$")]],
        Limits(min_length=1),
    ]


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
    tensors: Iterable[tuple[str, Tensor]], shape: Shape, folder: Path
) -> dict[str, Tensor]:
    """Return their named tensors as our state dict, in fp32, where those that we have
    no place for have no effect; errors name ``folder``.
    """
    theirs = _by_name(tensors, folder)
    state, sizes = {}, tensor_sizes(shape)
    for ours, (name, turned) in _modules(shape).items():
        weight = theirs.pop(f"{name}.weight", torch.empty(0))
        weight = weight.T if turned and weight.ndim == 2 else weight
        if tuple(weight.shape) != sizes[f"{ours}.weight"]:
            raise UserError(
                f"got {name}.weight of shape {tuple(weight.shape)} in {folder}, "
                f"expected {sizes[f'{ours}.weight']} by its config.json: the folder is "
                "incomplete or mixed; export or download it again"
            )
        if theirs.pop(f"{name}.bias", torch.zeros(())).any():
            raise UserError(
                f"got {name}.bias that is not zero in {folder}, expected a GPT-2 "
                "without biases: this application cannot hold them; import a model "
                "that was trained without"
            )
        state[f"{ours}.weight"] = weight.contiguous()
    head = state["wte.weight"]
    if not theirs.pop("lm_head.weight", head).equal(head):
        raise UserError(
            f"got an lm_head.weight of its own in {folder}, expected the token "
            "embedding: import a model with a tied head"
        )
    if left := [name for name in theirs if not name.endswith(MASKS)]:
        raise UserError(
            f"got {left[0]} in {folder}, which its config.json has no place for, "
            "expected GPT-2's tensors: the folder is mixed; export it again"
        )
    return state


def _by_name(tensors: Iterable[tuple[str, Tensor]], folder: Path) -> dict[str, Tensor]:
    """Return {name without prefix: tensor in fp32}, each once and of finite numbers."""
    theirs: dict[str, Tensor] = {}
    for full, tensor in tensors:
        name = full.removeprefix("transformer.")
        if name in theirs:
            raise UserError(
                f"got {name} twice in {folder}, expected one tensor of that name: the "
                "folder is mixed; export or download it again"
            )
        if not name.endswith(MASKS):
            found = tensor.dtype
            if found not in REAL or not (tensor := tensor.float()).isfinite().all():
                raise UserError(
                    f"got {name} of {found} in {folder}, expected real numbers, finite "
                    "in float32: import another folder"
                )
        theirs[name] = tensor
    return theirs


def save(model: GPT2, folder: Path, end_of_text: int) -> None:
    """Write config.json, generation_config.json and model.safetensors (fp32)."""
    from safetensors.torch import save_file

    config = {
        "architectures": ["GPT2LMHeadModel"],
        **asdict(Config("gpt2", *astuple(model.shape))),
        "reorder_and_upcast_attn": False,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
        "initializer_range": 0.02,
        "use_cache": True,
        **dict.fromkeys(("bos_token_id", "eos_token_id"), end_of_text),
        "dtype": "float32",
    }
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

    config = read_json(folder / CONFIG, Config, AGAIN, extra="ignore")
    files = [WEIGHTS]
    if (folder / INDEX).exists():
        index = read_json(folder / INDEX, Index, AGAIN, extra="ignore")
        files = sorted(set(index.weight_map.values()))
    tensors: list[tuple[str, Tensor]] = []
    try:
        for name in files:
            tensors += load_file(folder / name).items()
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"got a {folder / name} that does not read ({error}), expected the weights "
            "as safetensors: export or download the folder again"
        ) from error
    state = from_huggingface(tensors, config.shape(), folder)
    model = GPT2(config.shape())
    model.load_state_dict(state)
    return model.eval()
