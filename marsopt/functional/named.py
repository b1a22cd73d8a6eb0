"""From a name and options to a ``Rule``: one named rule, or the authors' routing."""

from __future__ import annotations

from typing import Any, Unpack

from marsopt.functional.authors import (
    all_options,
    check_options,
    check_taken,
    matrix_values,
    rest_values,
)
from marsopt.functional.keywords import Options
from marsopt.functional.rule import Rule
from marsopt.rules.options import check_names, check_values
from marsopt.rules.registry import RuleName, named, resolve


def rule(name: RuleName, **options: Unpack[Options]) -> Rule:
    """Return the rule of this name, which updates every tensor.

        AdamW         "adamw", "nadamw", "mars-adamw"
        Lion          "lion"
        SignAverage   "mars-lion"
        Orthogonal    "muon", "moonlight", "mars-shampoo", "mars-m"
        NorMuon       "normuon", "mars-normuon"
        SOAP          "soap", "soap-muon", "mars-soap", "mars-soap-muon"

    The options of a rule are the fields of its dataclass, on the left, and of
    ``Matrices``; a rule named "mars-..." also has the fields of its correction.
    ``print(marsopt.REGISTRY["mars-m"])`` lists the options of "mars-m" with their
    defaults and descriptions. ``Orthogonal``, ``NorMuon`` and ``SOAP`` update matrices
    only; ``marsopt.mars`` gives the other tensors of a model to AdamW.

    Args:
        name: a name in ``marsopt.REGISTRY``, in any spelling: "MARS_M" is "mars-m".
        options: see above. Every rule also takes ``max_norm``, as ``Rule`` does, and
            ``state_dtype``, ``stochastic_rounding`` and ``master_weight_bits``, as
            ``Algorithm`` does. A rule named "mars-..." takes the name of its
            ``correction``: "approximate" (the default) or "exact". The authors'
            ``is_approx=False`` is "exact". ``log_time`` sets decays that are not given
            to 0.999, and ``nesterov`` to 0.2.

    Raises:
        TypeError: an option that the rule does not have.
        ValueError: an unknown name, or an option out of its range.

    Example:
        >>> rule = marsopt.rule("mars-adamw", betas=(0.95, 0.99))
        >>> params = {"w": torch.eye(2)}
        >>> state = rule.init(params)
        >>> for _ in range(3):      # the gradient of |w|^2 / 2 is w
        ...     params, state = rule.step(params, params, state, lr=0.1)
        >>> bool(params["w"].norm() < 1.41)     # the norm at the start
        True
    """
    row = named(name, "name")
    more = {"max_norm", "is_approx", "correction"} if row.is_mars else {"max_norm"}
    check_names(options, {*row.options, *more}, "marsopt.rule", f" for {row.name!r}")
    check_values(row.options, options)  # whether they are read or not
    correction = resolve(options)
    if row.is_mars:
        shared = {n: value for n, value in options.items() if n not in row.table}
        check_options(row, correction, shared)
    values = row.log_time_defaults(options.get("log_time")) | {**options}
    values["correction"] = correction.name
    return Rule(matrix=row.algorithm(values), max_norm=options.get("max_norm"))


def mars(*, mars_type: RuleName = "mars-adamw", **options: Unpack[Options]) -> Rule:
    """Return the authors' routing as a rule: ``mars_type`` updates matrices, and AdamW
    updates the other tensors. ``MARS`` takes the same options.

        OptimizerOptions
                       is_approx, correction, max_norm
        RestOptions    optimize_1d, base_lr, lr_1d, betas_1d, weight_decay_1d,
                       nesterov_1d
        Algorithm      state_dtype, stochastic_rounding, master_weight_bits
        Correction     gamma, clip, clip_per, h_dtype
        Matrices       matrices (the field ``kind``), splits
        AdamW          betas, eps, weight_decay, cautious_weight_decay, amsgrad,
                       epsilon_hat, nesterov, log_time
        Orthogonal     adjust_lr_fn
        NewtonSchulz   ns_steps, ns_coefficients, ns_dtype, ns_eps (the fields ``steps``
                       and so on)
        SOAP           shampoo_beta, sides, precondition_frequency, max_dim, stagger,
                       orthogonalize

    The dataclasses on the left explain the options on the right; the first two are in
    ``marsopt.functional.authors``. If rules have different defaults, None means the
    rule's own, which ``print(marsopt.REGISTRY[mars_type])`` lists. The two betas stand
    for the momentum and ``beta2`` of a rule that has these fields. ``log_time`` holds
    for all tensors; it sets betas that are not given to 0.999, and ``nesterov`` to 0.2.

    Args:
        mars_type: a name in ``marsopt.REGISTRY``: the rule of matrices.
        options: see above, and the fields of a dataclass of your own.

    Raises:
        TypeError: an option that no rule has.
        ValueError: an option that this rule does not have, or that is out of its range.

    Example:
        >>> rule = marsopt.mars(mars_type="moonlight")
        >>> params = {"weight": torch.eye(2), "bias": torch.ones(2)}
        >>> state = rule.init(params)
        >>> for _ in range(3):      # the gradient of |w|^2 / 2 is w
        ...     params, state = rule.step(params, params, state, lr=0.1)
        >>> bool(params["weight"].norm() < 1.41)        # the norm at the start
        True
    """
    # a step is given its lr, and ratios are of param groups
    known = all_options().keys() - {"lr", "lr_ratio", "lr_1d_ratio"}
    check_names(options, known, "marsopt.mars")
    row = named(mars_type)
    arguments: dict[str, Any] = {"mars_type": mars_type, **options}
    explicit = {n: value for n, value in arguments.items() if value is not None}
    correction = resolve(options)
    check_options(row, correction, explicit)
    check_taken([row.name], options.get("correction"))
    defaults = row.group_defaults(options.get("log_time"))
    values = {**arguments, **defaults, **explicit, "correction": correction.name}
    rest = rest_values(values)
    return Rule(
        matrix=row.algorithm(matrix_values(values)),
        rest=None if rest is None else named(rest["mars_type"]).algorithm(rest),
        rest_ratio=None if rest is None else rest.get("lr_ratio"),
        max_norm=options.get("max_norm"),
    )
