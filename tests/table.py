"""The table of rules that the laws run over. A new rule is one row."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

import marsopt

NS = marsopt.NewtonSchulz(dtype=torch.float64)  # of pages
SHAPES = {"wide": (6, 20), "tall": (24, 8), "square": (8, 8), "bias": (7,)}
MATRICES = ("wide", "tall", "square")


def steady(mars_type: str) -> dict:
    """Options with which rounding stays small: where gradients are zero in some
    directions, eigenvectors there are left to chance, and without eps Adam divides what
    is seen along them, rounding, by its own size. Bases are refreshed every two steps.
    """
    if "soap" not in mars_type:
        return {}
    return dict(sides="short", eps=0.01, precondition_frequency=2)


@dataclass(frozen=True)
class Row:
    """A rule, the oracle's arguments for it, and what its state may hold."""

    mars_type: str
    oracle: dict
    buffers: int  # of the parameter's size
    matrix_only: bool = False
    kwargs: dict = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return MATRICES if self.matrix_only else tuple(SHAPES)

    @property
    def num_factors(self) -> int:
        """Buffers of other sizes that its matrices' owners keep: two factors and their
        bases.
        """
        return 4 if "soap" in self.oracle["kind"] else 0

    @property
    def has_gamma(self) -> bool:
        return self.oracle["kind"].startswith("mars")

    def counted(self, t: int) -> dict:
        """What a compiled step is given so that it need not ask how many steps were
        taken: one number for each stage, each a graph.
        """
        if not self.num_factors:
            return {}
        often = self.kwargs["precondition_frequency"]
        return dict(count=0 if t == 0 else often if t % often == 0 else 1)

    @property
    def of_class(self) -> dict:
        """Its options as ``MARS`` has them: ``betas`` in the place of momentums."""
        options = dict(self.kwargs)
        momentum = options.pop("momentum", None)
        if momentum is not None:
            options["betas"] = (momentum, options.pop("beta2", momentum))
        return options

    def rule(self, **more) -> marsopt.Rule:
        return marsopt.rule(self.mars_type, **{**self.kwargs, **more})


CAUTIOUS = dict(weight_decay=0.5, cautious_weight_decay=True)
ROWS = {
    "mars_adamw": Row(
        "mars-adamw",
        dict(kind="mars-adamw", wd=0.1),
        3,
        kwargs=dict(weight_decay=0.1),
    ),
    "mars_adamw-noclip": Row(
        "mars-adamw",
        dict(kind="mars-adamw", clip=None),
        3,
        kwargs=dict(clip=None),
    ),
    "mars_adamw-amsgrad": Row(
        "mars-adamw",
        dict(kind="mars-adamw", amsgrad=True),
        4,
        kwargs=dict(amsgrad=True),
    ),
    "mars_adamw-cautious": Row(
        "mars-adamw",
        dict(kind="mars-adamw", wd=0.5, cautious=True),
        3,
        kwargs=CAUTIOUS,
    ),
    "mars_lion": Row("mars-lion", dict(kind="mars-lion"), 2),
    "mars_lion-noclip": Row(
        "mars-lion", dict(kind="mars-lion", clip=None), 2, kwargs=dict(clip=None)
    ),
    "mars_shampoo": Row(
        "mars-shampoo",
        dict(kind="mars-shampoo", wd=0.1),
        2,
        True,
        dict(ns_dtype=torch.float64, weight_decay=0.1),
    ),
    "mars_shampoo-noclip": Row(
        "mars-shampoo",
        dict(kind="mars-shampoo", clip=None),
        2,
        True,
        dict(ns_dtype=torch.float64, clip=None),
    ),
    "mars_m": Row("mars-m", dict(kind="mars-m"), 2, True, dict(ns_dtype=torch.float64)),
    "mars_m-noclip": Row(
        "mars-m",
        dict(kind="mars-m", clip=None),
        2,
        True,
        dict(ns_dtype=torch.float64, clip=None),
    ),
    "adamw": Row("adamw", dict(kind="adamw", beta1=0.9, beta2=0.999, wd=0.01), 2),
    "adamw-cautious": Row(
        "adamw",
        dict(kind="adamw", beta1=0.9, beta2=0.999, wd=0.5, cautious=True),
        2,
        kwargs=CAUTIOUS,
    ),
    "adamw-nesterov": Row(  # with epsilon beside the raw v, and the largest v
        "adamw",
        dict(kind="nadamw", beta1=0.9, beta2=0.999, wd=0.01, amsgrad=True)
        | dict(epsilon_hat=True),
        3,
        kwargs=dict(nesterov=True, amsgrad=True, epsilon_hat=True),
    ),
    "nadamw": Row("nadamw", dict(kind="nadamw", beta1=0.9, beta2=0.999, wd=0.01), 2),
    "lion": Row("lion", dict(kind="lion", beta1=0.9, beta2=0.99), 1),
    "lion-cautious": Row(
        "lion",
        dict(kind="lion", beta1=0.9, beta2=0.99, wd=0.5, cautious=True),
        1,
        kwargs=CAUTIOUS,
    ),
    "muon-cautious": Row(
        "muon",
        dict(kind="muon", wd=0.5, cautious=True),
        1,
        True,
        CAUTIOUS | dict(ns_dtype=torch.float64),
    ),
    "muon": Row(
        "muon", dict(kind="muon", wd=0.1), 1, True, dict(ns_dtype=torch.float64)
    ),
    "normuon": Row(
        "normuon",
        dict(kind="normuon", wd=0.1),
        1,
        True,
        dict(ns_dtype=torch.float64),
    ),
    "normuon-cautious": Row(
        "normuon",
        dict(kind="normuon", wd=0.5, cautious=True),
        1,
        True,
        CAUTIOUS | dict(ns_dtype=torch.float64),
    ),
    "mars_normuon": Row(
        "mars-normuon",
        dict(kind="mars-normuon"),
        2,
        True,
        dict(ns_dtype=torch.float64),
    ),
    "moonlight": Row(
        "moonlight",
        dict(kind="moonlight", wd=0.1),
        1,
        True,
        dict(ns_dtype=torch.float64),
    ),
    # short sides alone: of a long one the first gradient says too little, so that its
    # eigenvectors are any (test_soap.py has both)
    "soap": Row(
        "soap",
        dict(kind="soap", beta2=0.95, wd=0.1, sides="short", frequency=3),
        2,
        True,
        dict(weight_decay=0.1, sides="short", precondition_frequency=3),
    ),
    "soap-cautious": Row(
        "soap",
        dict(
            kind="soap", beta2=0.95, wd=0.5, sides="short", frequency=3, cautious=True
        ),
        2,
        True,
        CAUTIOUS | dict(sides="short", precondition_frequency=3),
    ),
    "mars_soap": Row(
        "mars-soap",
        dict(kind="mars-soap", beta2=0.95, wd=0.01, sides="short", frequency=2),
        3,
        True,
        dict(sides="short", precondition_frequency=2),
    ),
    "soap_muon": Row(
        "soap-muon",
        dict(kind="soap-muon", beta2=0.95, wd=0.01, sides="short", frequency=1),
        2,
        True,
        dict(sides="short", precondition_frequency=1, ns_dtype=torch.float64),
    ),
    "mars_soap_muon": Row(
        "mars-soap-muon",
        dict(kind="mars-soap-muon", beta2=0.95, wd=0.01, sides="short", frequency=3),
        3,
        True,
        dict(sides="short", precondition_frequency=3, ns_dtype=torch.float64),
    ),
}
ROWS |= {
    f"{name}-log_time": Row(
        ROWS[name].mars_type,
        ROWS[name].oracle | dict(delta=3) | weight,
        ROWS[name].buffers,
        ROWS[name].matrix_only,
        ROWS[name].kwargs | dict(log_time=3.0) | nesterov,
    )
    # without ``nesterov``, 0.2 is the weight of the gradient
    for name, weight, nesterov in (
        ("adamw", dict(w=0.2), {}),
        ("nadamw", {}, dict(nesterov=True)),
        ("lion", {}, {}),
        ("mars_adamw", {}, dict(nesterov=False)),
        ("mars_lion-noclip", {}, {}),
        ("mars_m", {}, dict(nesterov=False)),
        ("moonlight", dict(w=0.2), {}),
        ("normuon", dict(w=0.2), {}),
        ("soap", dict(w=0.2), dict(nesterov=0.2)),
        ("soap_muon", {}, dict(nesterov=False)),
    )
}


def tensors(names, seed: int, scale: float = 1.0, dtype=torch.float32) -> dict:
    """{name: random tensor}"""
    g = torch.Generator().manual_seed(seed)
    return {
        n: (scale * torch.randn(SHAPES[n], generator=g, dtype=torch.float64)).to(dtype)
        for n in names
    }
