"""Decays of averages: numbers, or with ``log_time`` decays that grow with the run, so
that the average remembers a fixed share of it (log-time momentum, as ADANA has it,
arXiv 2602.05298).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# The values of ``log_time`` if its user gives neither betas nor ``nesterov``: caps that
# a run of some thousand steps does not reach, and the weight of the gradient.
LOG_TIME_BETA, LOG_TIME_NESTEROV = 0.999, 0.2


def at(beta: Any, t: Tensor, log_time: Any) -> Any:
    """Return the decay in steps t = 1, 2, ... (N,): min(beta, t / (t + log_time)), and
    ``beta`` itself if ``log_time`` is None.

    Example:
        >>> t = torch.tensor([1.0, 10.0, 990.0, 1e6])
        >>> at(0.999, t, log_time=10.0)
        tensor([0.0909, 0.5000, 0.9900, 0.9990])
    """
    if log_time is None:
        return beta
    t, beta, log_time = _alike(t, beta, log_time)
    return torch.minimum(t / (t + log_time), beta)


def complement(beta: Any, t: Tensor, log_time: Any) -> Any:
    """Return 1 minus the decay in steps t, with the digits that a difference loses."""
    if log_time is None:
        return 1 - beta
    t, beta, log_time = _alike(t, beta, log_time)
    return torch.maximum(log_time / (t + log_time), 1 - beta)


def product(beta: Any, t: Tensor, log_time: Any) -> Any:
    """Return the product of the first t decays: beta^t if ``log_time`` is None.

    The first s decays grow, s = floor(beta log_time / (1 - beta)), and later decays are
    beta. With L = log_time the product is

        Gamma(s+1) Gamma(1+L) / Gamma(s+1+L) * beta^(t-s)
    """
    if log_time is None:
        return beta**t
    t, beta, log_time = _alike(t, beta, log_time)
    growing = torch.minimum(t, torch.floor(beta * log_time / (1 - beta)))
    log = torch.lgamma(growing + 1) - torch.lgamma(growing + 1 + log_time)
    log = log + torch.lgamma(1 + log_time)
    return (log + torch.special.xlogy(t - growing, beta)).exp()


def _alike(t: Tensor, beta: Any, log_time: Any) -> tuple[Tensor, Tensor, Tensor]:
    zero = torch.zeros_like(t)
    return t, zero + beta, zero + log_time
