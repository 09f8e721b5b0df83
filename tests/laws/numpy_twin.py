"""Deep Gradient Compression once more: slow, in NumPy, tensor by tensor, to compare.

One function per line of the paper. It shares nothing with the package but the record
of settings. The letters are those of the paper: g gradient, u velocity, v residual,
m momentum; N workers.

References:
    Lin, Han, Mao, Wang, Dally: Deep Gradient Compression, ICLR 2018,
    https://arxiv.org/abs/1712.01887
"""

from typing import Any

import numpy as np

from tf_dgc.config import DGCConfig

Tensors = list[np.ndarray]


def warm_up(step: int, config: DGCConfig) -> float:
    """Return the sparsity of a step: equal stretches, then the final sparsity."""
    climbing = [s for s in config.warmup_stages if s < config.sparsity]
    for i, sparsity in enumerate(climbing):
        if step < (i + 1) * config.warmup_steps // len(climbing):
            return sparsity
    return config.sparsity


def clip(tensors: Tensors, clip_norm: float | None, workers: int) -> Tensors:
    """g <- clip(g, clip_norm * N^-1/2), over the norm of all tensors together."""
    if clip_norm is None:
        return tensors
    norm = np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in tensors))
    allowed = clip_norm * workers**-0.5
    return [np.float32(min(1.0, allowed / norm)) * g for g in tensors]


def correct(
    u: np.ndarray, g: np.ndarray, m: float, nesterov: bool, rate: float
) -> tuple[np.ndarray, np.ndarray]:
    """u <- m*u + lr*g; return u and what v gains by it."""
    m, g = np.float32(m), np.float32(rate) * g
    if nesterov:
        u = m * (u + g)
        return u, u + g
    u = m * u + g
    return u, u


def fall(rate: float, last: float) -> np.float32:
    """Return lr / lr', where lr' is that of the last step and lr at most half of it."""
    return np.float32(rate / last if 0 < rate <= last / 2 else 1.0)


def accumulate(v: np.ndarray, gain: np.ndarray) -> np.ndarray:
    """v <- v + u."""
    return v + gain


def threshold(v: np.ndarray, sparsity: float) -> float:
    """Return the k-th largest |v|."""
    k = max(1, round(v.size * (1 - sparsity)))
    return np.sort(np.abs(v), axis=None)[-k]


def select(v: np.ndarray, least: float) -> np.ndarray:
    """S <- the elements that reach the threshold, as a mask; never a zero."""
    return (np.abs(v) >= least) & (v != 0)


def send(v: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Return v[S], zero elsewhere."""
    return np.where(chosen, v, np.float32(0))


def round_to_8_bits(number: float) -> np.float32:
    """Return the nearest number of 8 significant bits."""
    fraction, exponent = np.frexp(number)
    return np.float32(np.ldexp(np.round(fraction * 256) / 256, exponent))


def coarsen(sent: np.ndarray, value_dtype: str) -> np.ndarray:
    """Round what is sent of a tensor to a scale times its signs, or 8 magnitudes."""
    magnitudes = np.abs(sent[sent != 0]).astype(np.float64)
    if value_dtype == "float32" or not magnitudes.size:
        return sent
    mean, levels = magnitudes.mean(), np.ones(1)
    scale = round_to_8_bits(mean)
    if value_dtype == "log4":
        scale = round_to_8_bits(min(magnitudes.max(), 8 * mean))
        levels = np.round(256 * 0.5 ** (np.arange(8) / 2)) / 256
    distances = np.abs(np.abs(sent)[..., np.newaxis] - scale * levels)
    nearest = scale * levels.astype(np.float32)[np.argmin(distances, axis=-1)]
    return np.sign(sent) * nearest


def keep(v: np.ndarray, sent: np.ndarray) -> np.ndarray:
    """v <- v - sent."""
    return v - sent


def mask(u: np.ndarray, chosen: np.ndarray, masking: bool) -> np.ndarray:
    """u[S] <- 0."""
    return np.where(chosen, np.float32(0), u) if masking else u


def message_bytes(sizes: list[int], sparsity: float, value_dtype: str) -> int:
    """Return the bytes of a message: header, scales, values, positions, padding."""
    bits = {"float32": 32, "sign": 1, "log4": 4}[value_dtype]
    k = sum(max(1, round(size * (1 - sparsity))) for size in sizes)
    arena = sum(-(-size // 128) * 128 for size in sizes)
    bodies = []
    for low_bits in (8, 16):
        high_bits = k + arena // 2**low_bits
        scales = 0 if bits == 32 else 2 * len(sizes)
        bodies.append(
            scales + -(-bits * k // 8) + k * low_bits // 8 + -(-high_bits // 8)
        )
    return 20 + min(-(-body // 4) * 4 for body in bodies)


def all_goes(sizes: list[int], sparsity: float, workers: int, dtype: str) -> bool:
    """Tell whether sparse messages would cost more than a dense ring all-reduce."""
    received = workers * message_bytes(sizes, sparsity, dtype)
    return sparsity == 0 or received >= 8 * sum(sizes)


class Worker:
    """What one worker keeps: u and v of the compressed tensors."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        self.u = [np.zeros(shape, np.float32) for shape in shapes]
        self.v = [np.zeros(shape, np.float32) for shape in shapes]


class Cluster:
    """N workers in lockstep; tensors of rank 2 and more are compressed."""

    def __init__(
        self,
        shapes: list[tuple[int, ...]],
        workers: int,
        config: DGCConfig,
        momentum: float | None = None,
        nesterov: bool = False,
    ) -> None:
        self.config = config
        self.momentum, self.nesterov = momentum, nesterov
        self.compressed = [i for i, shape in enumerate(shapes) if len(shape) > 1]
        own = [shapes[i] for i in self.compressed]
        self.sizes = [int(np.prod(shape)) for shape in own]
        self.workers = [Worker(own) for _ in range(workers)]
        self.steps, self.rate = 0, 0.0

    def step(self, gradients: list[Tensors], rate: float) -> Tensors:
        """Take each worker's gradients; return the sum of what all sent."""
        sparsity = warm_up(self.steps, self.config)
        dtype = self.config.value_dtype
        everything = all_goes(self.sizes, sparsity, len(self.workers), dtype)
        self.steps += 1
        if self.momentum is not None and self.config.rate_correction:
            for worker in self.workers:
                worker.v = [fall(rate, self.rate) * v for v in worker.v]
        self.rate = rate or self.rate
        sums = [np.zeros_like(g) for g in gradients[0]]
        for worker, local in zip(self.workers, gradients, strict=True):
            local = clip(local, self.config.clip_norm, len(self.workers))
            for i, g in enumerate(local):
                sent = g
                if i in self.compressed:
                    j = self.compressed.index(i)
                    sent = self._compress(worker, j, g, sparsity, everything, rate)
                sums[i] = sums[i] + sent
        return sums

    def _compress(
        self,
        worker: Worker,
        j: int,
        g: np.ndarray,
        sparsity: float,
        everything: bool,
        rate: float,
    ) -> np.ndarray:
        u, v, gain = worker.u[j], worker.v[j], g
        if self.momentum is not None:
            u, gain = correct(u, g, self.momentum, self.nesterov, rate)
        v = accumulate(v, gain)
        chosen = select(v, 0.0 if everything else threshold(v, sparsity))
        sent = send(v, chosen)
        if not everything:
            sent = coarsen(sent, self.config.value_dtype)
        worker.v[j] = keep(v, sent)
        masking = self.config.momentum_masking and not everything
        worker.u[j] = mask(u, chosen, masking)
        return sent


BLOCK = 128


class Owners(Cluster):
    """The same where each block of the arena has an owner, which adds up what comes.

    An owner passes the largest sums on; the others wait with it. Values float32, of
    which no two are equal.
    """

    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self.ends = np.cumsum([-(-size // BLOCK) * BLOCK for size in self.sizes])
        self.waiting = np.zeros(self.ends[-1], np.float32)  # z of all owners
        self.owner = np.arange(self.ends[-1]) // BLOCK % len(self.workers)

    def step(self, gradients: list[Tensors], rate: float) -> Tensors:
        """Take each worker's gradients; return the sum that all apply."""
        sparsity = warm_up(self.steps, self.config)
        if self.momentum is not None and self.config.rate_correction:
            fell = fall(rate, self.rate)
            self.waiting = fell * self.waiting
            for worker in self.workers:
                worker.v = [fell * v for v in worker.v]
        self.steps, self.rate = self.steps + 1, rate or self.rate
        sums = [np.zeros_like(g) for g in gradients[0]]
        slots = sum(max(1, round(size * (1 - sparsity))) for size in self.sizes)
        workers = len(self.workers)
        region = -(-self.ends[-1] // (BLOCK * workers)) * BLOCK
        room = min(-(-5 * slots // (4 * workers)), slots, region)
        for worker, local in zip(self.workers, gradients, strict=True):
            local = clip(local, self.config.clip_norm, workers)
            for i, g in enumerate(local):
                if i not in self.compressed:
                    sums[i] = sums[i] + g
            self._accumulate(worker, [local[i] for i in self.compressed], rate)
            self.waiting = self.waiting + self._sent(worker, sparsity, room)
        passed = workers * room
        if self.config.growth < workers:
            passed = int(np.ceil(self.config.growth * slots / workers))
        applied = self._largest(self.waiting, min(passed, region))
        self.waiting = self.waiting - applied
        for i, part in zip(self.compressed, self._tensors(applied), strict=True):
            sums[i] = part.reshape(gradients[0][i].shape)
        return sums

    def _accumulate(self, worker: Worker, local: Tensors, rate: float) -> None:
        for j, g in enumerate(local):
            gain = g
            if self.momentum is not None:
                args = self.momentum, self.nesterov, rate
                worker.u[j], gain = correct(worker.u[j], g, *args)
            worker.v[j] = accumulate(worker.v[j], gain)

    def _sent(self, worker: Worker, sparsity: float, room: int) -> np.ndarray:
        """Return what goes to owners of v, as an arena; keep the rest."""
        chosen = [select(v, threshold(v, sparsity)) for v in worker.v]
        pairs = zip(worker.v, chosen, strict=True)
        arena = self._arena([send(v, mask) for v, mask in pairs])
        arena = self._largest(arena, room)
        for j, part in enumerate(self._tensors(arena)):
            sent = part.reshape(worker.v[j].shape)
            worker.v[j] = keep(worker.v[j], sent)
            masking = self.config.momentum_masking
            worker.u[j] = mask(worker.u[j], sent != 0, masking)
        return arena

    def _largest(self, arena: np.ndarray, count: int) -> np.ndarray:
        """Return so many of each owner's largest elements, zero elsewhere."""
        kept = np.zeros_like(arena)
        for own in range(len(self.workers)):
            (where,) = np.nonzero(self.owner == own)
            best = where[np.argsort(-np.abs(arena[where]), kind="stable")[:count]]
            kept[best] = arena[best]
        return kept

    def _arena(self, tensors: Tensors) -> np.ndarray:
        arena = np.zeros(self.ends[-1], np.float32)
        for end, before, tensor in zip(
            self.ends, [0, *self.ends[:-1]], tensors, strict=True
        ):
            assert before + tensor.size <= end
            arena[before : before + tensor.size] = tensor.ravel()
        return arena

    def _tensors(self, arena: np.ndarray) -> Tensors:
        begins = [0, *self.ends[:-1]]
        return [arena[b : b + s] for b, s in zip(begins, self.sizes, strict=True)]
