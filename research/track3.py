"""Muon with transport for the optimizer track of modded-nanogpt, in one file.

    torchrun --standalone --nproc-per-node 8 research/track3.py --gamma 0.05
    python research/track3.py --gamma 0.05 --miniature /tmp/track3

The first command is a run of the track (github.com/KellerJordan/modded-nanogpt, folder
records/track_3_optimization): its data, batch, model and tuned baseline (result #36),
one forward and backward a step, all code in the logfile, torch and NumPy alone. Without
options it is that baseline. The second runs the same code, small, on one CPU.

Nobody has run this at size. research/modded_nanogpt.md says what the options are.
"""

import argparse
import hashlib
import os
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

CODE = Path(__file__).read_text()  # as it is when the run starts, for the logfile


@dataclass(frozen=True)
class Sizes:
    """What the track fixes, and lengths in steps. Batches are counted in sequences."""

    vocabulary: int = 50304
    num_layers: int = 12
    width: int = 768
    head_dim: int = 128
    context: int = 1024
    batch: int = 512  # 524,288 tokens
    microbatch: int = 64
    validation: int = 20 * 512
    steps: int = 3250  # result #36
    two_from: int = 1000  # pull request 340
    ahead_from: int = 500  # pull request 308
    ahead_until: int = 2400
    validate_every: int = 125
    validate_every_late: int = 25  # in the last tenth


MINIATURE = Sizes(
    vocabulary=256,
    num_layers=2,
    width=64,
    head_dim=32,
    context=128,
    batch=16,
    microbatch=8,
    validation=64,
    steps=150,
    two_from=20,
    ahead_from=10,
    ahead_until=120,
    validate_every=30,
    validate_every_late=5,
)

# ---- data ----------------------------------------------------------------------------

MAGIC, VERSION, HEADER = 20240520, 1, 256  # of a shard: 256 int32, then uint16 tokens


def read_shard(path: Path) -> np.ndarray:
    """The tokens of a shard, uint16, left on disk until they are read."""
    found = np.fromfile(path, np.int32, 3).tolist()
    tokens = np.memmap(path, np.uint16, "r", offset=4 * HEADER)
    expected = [MAGIC, VERSION, len(tokens)]
    if found != expected:
        raise ValueError(f"{path}: got header {found}, expected {expected}")
    return tokens


def batches(
    root: Path, split: str, sequences: int, context: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's part of each batch: inputs and labels, (sequences / ranks, context).

    In the track's order: shards by name, each from its beginning, a rest that is
    smaller than a batch left out; ranks stand side by side in a batch.
    """
    size = sequences * context
    local = size // dist.get_world_size()
    for path in sorted(root.glob(f"data/fineweb10B/fineweb_{split}_*.bin")):
        tokens = read_shard(path)
        for start in range(0, len(tokens) - size - 1, size):
            start += dist.get_rank() * local
            part = torch.from_numpy(tokens[start : start + local + 1].astype(np.int64))
            part = part.to(device)
            yield part[:-1].view(-1, context), part[1:].view(-1, context)
    raise ValueError(
        f"got too few tokens in {root}/data/fineweb10B/fineweb_{split}_*.bin, "
        "expected the shards of the track's data/cached_fineweb10B.py, 20 of them"
    )


def write_shards(root: Path) -> None:
    """Bytes of Python's standard library as shards: every tenth file for validation,
    of the others two shards of a mebitoken each.
    """
    folder = root / "data" / "fineweb10B"
    if folder.exists():
        return
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    held_out = b"\0".join(path.read_bytes() for path in sources[::10])
    del sources[::10]
    rest = b"\0".join(path.read_bytes() for path in sources)
    shards = {"val_000000": held_out[: 1 << 20]}
    for i in range(2):
        shards[f"train_{i + 1:06}"] = rest[i << 20 : i + 1 << 20]
    folder.mkdir(parents=True)
    for name, text in shards.items():
        header = np.zeros(HEADER, np.int32)
        header[:3] = MAGIC, VERSION, len(text)
        tokens = np.frombuffer(text, np.uint8).astype(np.uint16)
        path = folder / f"fineweb_{name}.bin"
        path.write_bytes(header.tobytes() + tokens.tobytes())


# ---- model ---------------------------------------------------------------------------


class RMSNorm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.gains = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.gains.to(x.dtype))


class Linear(nn.Linear):
    """float32 weights, used in the type of what comes in."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


class Rotary(nn.Module):
    """Rotates the first half of the pairs (i, i + head_dim / 2), in float32."""

    def __init__(self, context: int, head_dim: int):
        super().__init__()
        turning = (1 / 1024) ** torch.linspace(0, 1, head_dim // 4)
        frequencies = torch.cat([turning, torch.zeros_like(turning)])
        angles = torch.outer(torch.arange(context).float(), frequencies)[:, None]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: (sequences, context, heads, head_dim)."""
        first, second = x.float().chunk(2, dim=-1)
        turned = (
            first * self.cos + second * self.sin,
            second * self.cos - first * self.sin,
        )
        return torch.cat(turned, dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, sizes: Sizes):
        super().__init__()
        self.head_dim = sizes.head_dim
        self.q = Linear(sizes.width, sizes.width)
        self.k = Linear(sizes.width, sizes.width)
        self.v = Linear(sizes.width, sizes.width)
        self.proj = Linear(sizes.width, sizes.width)
        self.rotary = Rotary(sizes.context, sizes.head_dim)

    def forward(self, x: Tensor) -> Tensor:
        heads = (-1, self.head_dim)
        q, k, v = (f(x).unflatten(-1, heads) for f in (self.q, self.k, self.v))
        q, k = (self.rotary(F.rms_norm(y, (self.head_dim,))) for y in (q, k))
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.12)
        return self.proj(y.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.fc = Linear(width, 4 * width)
        self.proj = Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.fc(x).relu().square())


class Block(nn.Module):
    def __init__(self, sizes: Sizes):
        super().__init__()
        self.norm1, self.attn = RMSNorm(sizes.width), Attention(sizes)
        self.norm2, self.mlp = RMSNorm(sizes.width), MLP(sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """The track's model: activations and the embedding in bfloat16."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.embed = nn.Embedding(sizes.vocabulary, sizes.width, dtype=torch.bfloat16)
        self.norm1 = RMSNorm(sizes.width)
        self.blocks = nn.Sequential(*(Block(sizes) for _ in range(sizes.num_layers)))
        self.norm2 = RMSNorm(sizes.width)
        self.proj = Linear(sizes.width, sizes.vocabulary)

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """The sum of the cross-entropies of all tokens, in nats; logits below 15."""
        x = self.blocks(self.norm1(self.embed(inputs)))
        logits = self.proj(self.norm2(x)).float()
        logits = 15 * logits * (logits.square() + 15**2).rsqrt()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    @torch.no_grad()
    def initialize(self) -> None:
        """As the baseline: projections back and the head 0, other weights normal."""
        for name, p in self.named_parameters():
            kind = name.rpartition(".")[2]
            if kind == "gains":
                p.fill_(1.0)
            elif kind == "bias" or "proj" in name:
                p.zero_()
            else:
                p.normal_(std=1.0 if "embed" in name else (0.33 / p.shape[-1]) ** 0.5)


# ---- optimizers ----------------------------------------------------------------------

MU, BETA1 = 0.95, 0.8  # the decays of Muon's and of AdamW's momentum, result #36
FAST, SLOW, WEIGHT = 0.85, 0.98, 0.5615  # two averages, the slow one's weight: PR 340


def orthogonalize(matrix: Tensor) -> Tensor:
    """12 Newton-Schulz steps of (2, -1.5, 0.5) in bfloat16: result #36."""
    x = matrix.bfloat16()
    is_tall = x.shape[0] > x.shape[1]
    x = x.mT if is_tall else x
    x = x / (x.norm() + 1e-7)
    for _ in range(12):
        gram = x @ x.mT
        x = 2 * x + (-1.5 * gram + 0.5 * gram @ gram) @ x
    return x.mT if is_tall else x


def muon_update(
    grad: Tensor, averages: list[Tensor], memory: list[tuple[float, float]], mix: float
) -> Tensor:
    """Move the averages on, in place; the update, bfloat16.

    ``memory`` has a decay and a weight for each average. ``mix`` is the momentum's part
    in what is orthogonalized, beside the gradient's: mu is Nesterov's form, 1 has none.
    """
    for average, (decay, _) in zip(averages, memory, strict=True):
        average.lerp_(grad, 1 - decay)
    terms = [w * m for m, (_, w) in zip(averages, memory, strict=True)]
    momentum = sum(terms[1:], terms[0])
    rows, columns = grad.shape
    return orthogonalize(grad.lerp(momentum, mix)) * max(1, rows / columns) ** 0.5


class Muon(torch.optim.Optimizer):
    """Muon over ranks: each updates every n-th matrix, and sends it to the others.

    The momentum is one average, and from step ``two_from`` on, where that is not None,
    the mixture of a fast and a slow one (pull request 340): both begin as the single
    one at the end of that step.
    """

    def __init__(
        self,
        params: list[nn.Parameter],
        lr: float,
        weight_decay: float,
        nesterov: bool = True,
        two_from: int | None = None,
    ):
        params = sorted(params, key=lambda p: p.shape, reverse=True)
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay))
        self.mix, self.two_from, self.num_steps = MU if nesterov else 1.0, two_from, 0
        self.update = muon_update
        if params[0].is_cuda:
            self.update = torch.compile(muon_update, dynamic=False)

    @torch.no_grad()
    def step(self) -> None:
        is_two = self.two_from is not None and self.num_steps > self.two_from
        memory = [(FAST, 1 - WEIGHT), (SLOW, WEIGHT)] if is_two else [(MU, 1.0)]
        (group,) = self.param_groups
        sent = []
        for i, p in enumerate(group["params"]):
            owner = i % dist.get_world_size()
            if owner == dist.get_rank():
                if p not in self.state:
                    self.state[p]["averages"] = [torch.zeros_like(p)]
                averages = self.state[p]["averages"]
                if len(averages) < len(memory):
                    averages.append(averages[0].clone())
                update = self.update(p.grad, averages, memory, self.mix)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"])
            sent.append(dist.broadcast(p.detach(), owner, async_op=True))
        for work in sent:
            work.wait()
        self.num_steps += 1


def lag_free_of_two(p: float, q: float, weight: float) -> tuple[float, float, float]:
    """(a, b, rho) of the point y = x + a d + b e at whose gradients the momentum
    (1 - weight) EMA(p) + weight EMA(q) is the gradient at x, where that is linear in x.

    d = x_t - x_{t-1}, and e its EMA of decay rho, 0 before the first step. It is the
    inverse of the mixture's transfer function, n (1 - rho z) / ((1 - p z)(1 - q z)).
    """
    n = (1 - weight) * (1 - p) + weight * (1 - q)
    rho = ((1 - weight) * (1 - p) * q + weight * (1 - q) * p) / n
    return p * q / (n * rho), (rho - p) * (q - rho) / (rho * n * (1 - rho) ** 2), rho


Point = Callable[[int], tuple[float, float, float]]


def transport(gamma: float, decay: float, two_from: int | None = None) -> Point:
    """gamma of the way to the point without lag (implicit gradient transport, arXiv
    1906.03532, with MARS's gamma, arXiv 2411.10438); gamma = 0: x.

    Of one average y = x + gamma decay / (1 - decay) d. The other average, e, begins
    with the mixture of two: a decay of 1 keeps it at 0 until then.
    """

    def point(step: int) -> tuple[float, float, float]:
        if two_from is None or step <= two_from:
            return gamma * decay / (1 - decay), 0.0, 1.0
        a, b, rho = lag_free_of_two(FAST, SLOW, WEIGHT)
        return gamma * a, gamma * b, rho

    return point


def ema_nesterov(sizes: Sizes) -> Point:
    """Pull request 308: 0.6 of an average displacement, falling with the rate."""

    def point(step: int) -> tuple[float, float, float]:
        is_on = sizes.ahead_from <= step < sizes.ahead_until
        return 0.0, 0.6 * rate(step, sizes.steps) if is_on else 0.0, 0.99

    return point


class Lookahead:
    """Gradients at y = x + a d + b e, for any optimizers.

    Between steps parameters hold y, and this object x. d is the last displacement of
    x, e its average of decay rho, in float32 where parameters are narrower. ``groups``
    has parameters, and (a, b, rho) for each step at which a gradient is taken. Steps
    are taken from x (transport) or from y (EMA-Nesterov).
    """

    def __init__(self, groups: list[tuple[list[nn.Parameter], Point]], from_x: bool):
        self.from_x = from_x
        self.held = []
        for params, point in groups:
            for p in params:
                wide = torch.promote_types(p.dtype, torch.float32)
                x, e = p.detach().clone(), torch.zeros_like(p, dtype=wide)
                self.held.append((p, x, e, point))

    @torch.no_grad()
    def before_step(self) -> None:
        """The gradients are there: parameters hold what the step is taken from."""
        if self.from_x:
            for p, x, _, _ in self.held:
                p.copy_(x)

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Parameters hold the new x: go to the y of the gradient of ``step``."""
        for p, x, e, point in self.held:
            a, b, rho = point(step)
            d = p.to(e.dtype) - x
            e.lerp_(d, 1 - rho)
            x.copy_(p)
            p.copy_(x + a * d + b * e)

    @torch.no_grad()
    def exchange(self) -> None:
        """x for y in the parameters, and back: contents, so that no bit changes."""
        for p, x, _, _ in self.held:
            y = p.clone()
            p.copy_(x)
            x.copy_(y)


def rate(step: int, steps: int) -> float:
    """The part of the peak rate: constant, then 70% of the steps linearly to 0."""
    return min(1.0, (1 - step / steps) / 0.7)


def take_step(
    optimizers: list[torch.optim.Optimizer], lookahead: Lookahead, step: int, steps: int
) -> None:
    """From the gradients of ``step``, of ``steps``, to where the next are taken."""
    lookahead.before_step()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            peak = group.setdefault("peak", group["lr"])
            group["lr"] = peak * rate(step, steps)
        optimizer.step()
        optimizer.zero_grad()
    lookahead.after_step(step + 1)


def optimizers_of(
    model: GPT, sizes: Sizes, options: argparse.Namespace
) -> tuple[list[torch.optim.Optimizer], Lookahead]:
    """Result #36, whose numbers these are, and where its gradients are taken."""
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        dict(params=[model.embed.weight], lr=0.7),
        dict(params=[model.proj.weight], lr=0.004),
        dict(params=vectors, lr=0.015),
    ]
    aux = dict(betas=(BETA1, 0.95), eps=1e-10, weight_decay=0.001, fused=True)
    adamw = torch.optim.AdamW(groups, **aux)
    two_from = sizes.two_from if options.two_averages else None
    muon = Muon(matrices, 0.025, 0.05, options.nesterov, two_from)

    ahead = []
    if options.gamma is not None:
        ahead.append((matrices, transport(options.gamma, MU, two_from)))
        if options.transport != "matrices":
            others = [model.embed.weight, model.proj.weight, *vectors]
            ahead.append((others, transport(options.gamma, BETA1)))
    if options.ema_nesterov:
        ahead.append((list(model.parameters()), ema_nesterov(sizes)))
    return [adamw, muon], Lookahead(ahead, from_x=not options.ema_nesterov)


# ---- a run ---------------------------------------------------------------------------


class Log:
    """A new file below logs/, which begins with this file, and what is printed."""

    def __init__(self, root: Path):
        self.is_first = dist.get_rank() == 0
        self.path = root / "logs" / f"{uuid.uuid4()}.txt"
        if self.is_first:
            self.path.parent.mkdir(exist_ok=True)
            self.path.write_text(CODE)
            print(self.path)

    def __call__(self, line: str) -> None:
        if self.is_first:
            print(line, flush=True)
            with self.path.open("a") as file:
                print(line, file=file)


@torch.no_grad()
def validate(model: GPT, tokens: tuple[Tensor, Tensor], sizes: Sizes) -> float:
    """The mean loss of the validation tokens of all ranks, nats a token."""
    parts = zip(*(part.split(sizes.microbatch) for part in tokens), strict=True)
    loss = sum(model(inputs, labels) for inputs, labels in parts)
    dist.all_reduce(loss)
    return loss.item() / (sizes.validation * sizes.context)


def checksum(model: GPT) -> str:
    """SHA-256 of all weights."""
    weights = [p.detach().float().cpu().numpy() for p in model.parameters()]
    return hashlib.sha256(b"".join(w.tobytes() for w in weights)).hexdigest()


def train(root: Path, sizes: Sizes, options: argparse.Namespace, log: Log) -> None:
    """One run: the seed's initial weights, ``sizes.steps`` steps, the loss at x."""
    device = torch.get_default_device()
    torch.manual_seed(options.seed)
    model = GPT(sizes)
    model.initialize()
    for p in model.parameters():
        dist.broadcast(p.detach(), 0)
    if device.type == "cuda":
        model.compile(dynamic=False)
    optimizers, lookahead = optimizers_of(model, sizes, options)
    what = (sizes.context, device)
    held_out = next(batches(root, "val", sizes.validation, *what))
    data = batches(root, "train", sizes.batch, *what)

    trained, started = 0.0, time.perf_counter()
    for step in range(sizes.steps + 1):
        is_late = step >= 0.9 * sizes.steps
        every = sizes.validate_every_late if is_late else sizes.validate_every
        if step % every == 0 or step == sizes.steps:
            dist.barrier()
            trained += time.perf_counter() - started
            lookahead.exchange()
            loss = validate(model, held_out, sizes)
            average = 1e3 * trained / max(step, 1)
            log(
                f"step:{step}/{sizes.steps} val_loss:{loss:.5f} "
                f"train_time:{trained:.3f}s step_avg:{average:.2f}ms"
            )
            if step == sizes.steps:
                log(f"weights sha256:{checksum(model)}")
                return
            lookahead.exchange()
            dist.barrier()
            started = time.perf_counter()

        parts = (part.split(sizes.microbatch) for part in next(data))
        for inputs, labels in zip(*parts, strict=True):
            model(inputs, labels).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        take_step(optimizers, lookahead, step, sizes.steps)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--gamma", type=float, help="transport, with this gamma")
    parser.add_argument(
        "--transport", choices=["all", "matrices"], help="what --gamma is for: all"
    )
    parser.add_argument(
        "--ema-nesterov", action="store_true", help="pull request 308's lookahead"
    )
    parser.add_argument(
        "--two-averages", action="store_true", help="pull request 340's momentum"
    )
    parser.add_argument(
        "--no-nesterov", dest="nesterov", action="store_false", help="momentum alone"
    )
    parser.add_argument("--steps", type=int, help="another length, rates with it")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights")
    parser.add_argument(
        "--miniature", type=Path, metavar="DIR", help="small, with data written to DIR"
    )
    options = parser.parse_args(argv)
    if options.ema_nesterov and options.gamma is not None:
        parser.error("got --ema-nesterov and --gamma, expected one of them")
    if options.transport and options.gamma is None:
        parser.error("got --transport without --gamma")
    return options


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    sizes = MINIATURE if options.miniature else Sizes()
    sizes = replace(sizes, steps=options.steps or sizes.steps)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    torch.set_default_device(device)
    group: dict = dict(backend="gloo")
    if device.type == "cuda":
        group = dict(backend="nccl", device_id=device)
    if "RANK" not in os.environ:  # not started by torchrun
        group.update(store=dist.HashStore(), rank=0, world_size=1)
    dist.init_process_group(**group)
    world_size = dist.get_world_size()
    for name in ("batch", "validation"):
        if getattr(sizes, name) % (world_size * sizes.microbatch):
            raise ValueError(
                f"got {world_size} processes, expected a divisor of "
                f"{getattr(sizes, name) // sizes.microbatch}"
            )

    root = options.miniature or Path.cwd()
    if options.miniature and dist.get_rank() == 0:
        write_shards(root)
    dist.barrier()
    log = Log(root)
    log("=" * 100)
    log(f"PyTorch {torch.__version__} on {device}, {world_size} processes")
    log(f"{asdict(sizes)}\n{vars(options)}")
    log("=" * 100)
    train(root, sizes, options, log)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
