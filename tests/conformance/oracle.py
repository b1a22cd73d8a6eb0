"""The papers' algorithm boxes in float64 NumPy: literal, slow, sharing no code.

One tensor at a time, one plain loop, letters as in MARS (arXiv 2411.10438) and MARS-M
(arXiv 2510.21800); where the authors' code deviates, as in their code.
"""

import numpy as np

A, B, C = 3.4445, -4.7750, 2.0315


def ns5(m, eps=5e-10):
    x = m / (np.linalg.norm(m) + eps)
    if m.shape[0] > m.shape[1]:
        x = x.T
    for _ in range(5):
        gram = x @ x.T
        x = A * x + (B * gram + C * gram @ gram) @ x
    return x.T if m.shape[0] > m.shape[1] else x


class Oracle:
    """One tensor under one algorithm; call step(g, lr, h=None) for each gradient."""

    def __init__(
        self,
        x,
        kind,
        *,
        beta1=0.95,
        beta2=0.99,
        eps=1e-8,
        wd=0.0,
        gamma=0.025,
        clip=1.0,
        amsgrad=False,
        epsilon_hat=False,
        sides="both",
        frequency=10,
        max_dim=10_000,
        cautious=False,
        delta=None,
        w=None,
    ):
        self.x = np.array(x, dtype=np.float64)
        self.kind, self.beta1, self.beta2, self.eps, self.wd = (
            kind,
            beta1,
            beta2,
            eps,
            wd,
        )
        self.gamma, self.clip, self.amsgrad, self.hat = (
            gamma,
            clip,
            amsgrad,
            epsilon_hat,
        )
        self.sides, self.frequency, self.max_dim = sides, frequency, max_dim
        self.cautious, self.delta, self.w = cautious, delta, w
        self.t = 0
        self.m = np.zeros_like(self.x)
        self.v = np.zeros_like(self.x)
        self.v_max = np.zeros_like(self.x)
        self.last = np.zeros_like(self.x)

    def decays(self, t):
        """Log time (ADANA, arXiv 2602.05298): both decays are t/(t + delta)."""
        if self.delta is not None:
            self.beta1 = self.beta2 = t / (t + self.delta)

    def power(self, beta, t):
        """The product of the decays so far."""
        if self.delta is None:
            return beta**t
        return np.prod([i / (i + self.delta) for i in range(1, t + 1)])

    def weighted(self, m_hat, c):
        """Quasi-hyperbolic momentum (arXiv 1810.06801)."""
        return m_hat if self.w is None else (1 - self.w) * m_hat + self.w * c

    @property
    def k(self):
        return self.gamma * self.beta1 / (1 - self.beta1)

    def step(self, g, lr, h=None):
        c = self.corrected(g, h)
        return self.advance(self.clipped(c, np.linalg.norm(c)), lr)

    def corrected(self, g, h=None):
        self.t += 1
        self.decays(self.t)
        self.g = np.array(g, dtype=np.float64)
        h = self.last if h is None else np.array(h, dtype=np.float64)
        self.last = self.g
        if not self.kind.startswith("mars"):
            return self.g
        return self.g + self.k * (self.g - h)

    def clipped(self, c, norm):
        if not self.kind.startswith("mars") or self.clip is None or norm <= self.clip:
            return c
        return c / norm * self.clip

    def advance(self, c, lr):
        getattr(self, self.kind.replace("-", "_"))(c, lr)
        return self.x

    def move(self, step, lr):
        """Decoupled decay; cautious: arXiv 2510.12402."""
        agrees = step * self.x >= 0 if self.cautious else np.ones_like(self.x)
        self.x = self.x - step - lr * self.wd * agrees * self.x

    def adamw(self, c, lr):
        self.m = self.beta1 * self.m + (1 - self.beta1) * c
        m_hat = self.m / (1 - self.power(self.beta1, self.t))
        self.adam_step(self.weighted(m_hat, c), c, lr)

    def nadamw(self, c, lr):
        """Dozat 2016, Algorithm 2, mu_t = beta1."""
        self.m = self.beta1 * self.m + (1 - self.beta1) * c
        products = [self.power(self.beta1, t) for t in (self.t, self.t + 1)]
        c_hat, m_hat = c / (1 - products[0]), self.m / (1 - products[1])
        weight = 1 - self.beta1
        self.decays(self.t + 1)
        direction = weight * c_hat + self.beta1 * m_hat
        self.decays(self.t)
        self.adam_step(direction, c, lr)

    def adam_step(self, m_hat, c, lr):
        self.v = self.beta2 * self.v + (1 - self.beta2) * c**2
        self.v_max = np.maximum(self.v_max, self.v)
        v = self.v_max if self.amsgrad else self.v
        self.move(lr * m_hat / self.denominator(v), lr)

    def denominator(self, v):
        root = np.sqrt(1 - self.power(self.beta2, self.t))
        if self.hat:
            return (np.sqrt(v) + self.eps) / root
        return np.sqrt(v) / root + self.eps

    mars_adamw = adamw

    def lion(self, c, lr):
        direction = np.sign(self.beta1 * self.m + (1 - self.beta1) * c)
        self.m = self.beta2 * self.m + (1 - self.beta2) * c
        self.move(lr * direction, lr)

    def mars_lion(self, c, lr):
        self.m = self.beta1 * self.m + (1 - self.beta1) * c
        self.move(lr * np.sign(self.m), lr)

    def mars_shampoo(self, c, lr):
        self.m = self.beta1 * self.m + (1 - self.beta1) * c
        rows, cols = c.shape
        o = ns5(self.m / (1 - self.beta1), eps=1e-8)
        self.move(lr * np.sqrt(max(1, rows / cols)) * o, lr)

    def mars_m(self, c, lr):
        self.m = self.beta1 * self.m + (1 - self.beta1) * c
        self.move(lr * 0.2 * np.sqrt(max(c.shape)) * ns5(self.m), lr)

    def muon(self, c, lr):
        rows, cols = c.shape
        o = ns5(self.nesterov(c))
        self.move(lr * np.sqrt(max(1, rows / cols)) * o, lr)

    def nesterov(self, c):
        if self.w is None:
            self.m = self.beta1 * self.m + c
            return c + self.beta1 * self.m
        self.m = self.beta1 * self.m + (1 - self.beta1) * c
        return self.weighted(self.m / (1 - self.power(self.beta1, self.t)), c)

    def normuon(self, c, lr, beta2=0.95, eps=1e-8):
        """arXiv 2510.05491, Algorithm 1, with the norm of the factor kept."""
        beta2 = beta2 if self.delta is None else self.beta2
        self.m = self.beta1 * self.m + (1 - self.beta1) * c
        o = ns5(self.weighted(self.m / (1 - self.power(self.beta1, self.t)), c))
        rows = np.array([np.mean(row**2) for row in o])
        self.r = beta2 * getattr(self, "r", np.zeros(len(o))) + (1 - beta2) * rows
        scaled = np.array(
            [row / (np.sqrt(r) + eps) for row, r in zip(o, self.r, strict=True)]
        )
        scaled = scaled * np.linalg.norm(o) / np.linalg.norm(scaled)
        self.move(lr * 0.2 * np.sqrt(max(c.shape)) * scaled, lr)

    mars_normuon = normuon

    def soap(self, c, lr):
        """nikhilvyas/SOAP, soap.py, in the order of its operations; their counter is
        one behind, since the first step is none.
        """
        t = self.t - 1
        if t > 0:
            o = self.adam_in_basis(c)
            rate = lr * np.sqrt(1 - self.power(self.beta2, t))
            agrees = o * self.x >= 0 if self.cautious else np.ones_like(self.x)
            self.x = self.x - rate * o
            self.x = self.x + self.x * (-lr * self.wd) * agrees
        self.follow(c, t)

    mars_soap = soap

    def soap_muon(self, c, lr):
        t = self.t - 1
        if t > 0:
            o = ns5(self.adam_in_basis(c))
            self.move(lr * 0.2 * np.sqrt(max(c.shape)) * o, lr)
        self.follow(c, t)

    mars_soap_muon = soap_muon

    def adam_in_basis(self, c):
        turned, t = self.turn(c), self.t - 1
        self.decays(t)
        self.m = self.beta1 * self.m + (1 - self.beta1) * turned
        self.v = self.beta2 * self.v + (1 - self.beta2) * turned**2
        m_hat = self.m / (1 - self.power(self.beta1, t))
        u = self.turn_back(self.weighted(m_hat, turned) / (np.sqrt(self.v) + self.eps))
        self.decays(self.t)
        return u

    def turn(self, a):
        for axis, q in self.q.items():
            a = np.moveaxis(np.tensordot(q, a, axes=(0, axis)), 0, axis)
        return a

    def turn_back(self, a):
        for axis, q in self.q.items():
            a = np.moveaxis(np.tensordot(q, a, axes=(1, axis)), 0, axis)
        return a

    def follow(self, c, t):
        """Factors, and their bases; m goes out of the old ones and into the new."""
        if t == 0:
            short = 0 if c.shape[0] < c.shape[1] else 1
            axes = (0, 1) if self.sides == "both" else (short,)
            axes = [axis for axis in axes if c.shape[axis] <= self.max_dim]
            self.gg = {axis: np.zeros((c.shape[axis],) * 2) for axis in axes}
        else:
            self.m = self.turn_back(self.m)
        for axis, gg in self.gg.items():
            outer = np.tensordot(c, c, axes=((1 - axis,), (1 - axis,)))
            self.gg[axis] = self.beta2 * gg + (1 - self.beta2) * outer
        if t == 0:
            self.q = {
                axis: np.linalg.eigh(gg)[1][:, ::-1] for axis, gg in self.gg.items()
            }
            return
        if t % self.frequency == 0:
            for axis, gg in self.gg.items():
                q = self.q[axis]
                order = np.argsort(-np.diag(q.T @ gg @ q))
                self.v = np.take(self.v, order, axis=axis)
                self.q[axis] = np.linalg.qr(gg @ q[:, order])[0]
        self.m = self.turn(self.m)

    def moonlight(self, c, lr):
        o = ns5(self.nesterov(c))
        self.move(lr * 0.2 * np.sqrt(max(c.shape)) * o, lr)
