"""Operators of traced steps: a record's gradient does not depend on its neighbours, whatever they hold."""

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from pl_privknn import _tracing
from pl_privknn._tracing import APART, UntraceableError, packet_of
from pl_privknn.testing import clipped_sum
from pl_privknn.training.gradients import RecordGradients
from pl_privknn.training.records import PrivateData
from pl_privknn.training.traced_step import RecordStep

ROWS, WIDTH, IDS = 4, 36, 6
INF, NAN = float("inf"), float("nan")
# What adversarial records hold: values of some of their numbers, and ids in some places.
VALUES = (NAN, INF, -INF, 1e20, 0.0)
NUMBERS = (-1, ROWS, -ROWS - 1, WIDTH, 10**6)


def image(a, channels=4):
    return a.reshape(1, channels, -1, 6)


def square(a):
    return a[:, :ROWS]


def column(i):
    return i[:, None].expand(IDS, WIDTH)


def rows(i, a):
    """Values at least as many as the ids."""
    return torch.cat([a, a])[: len(i)]


def fixed(*shape):
    return torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape)


# By name: a function of a table `a` (4, 36), another one `b` (4, 36) and ids `i` (6,) in [0, 4).
CASES = {
    # ---------------------------------------------------------------- ids
    "embedding": lambda a, b, i: F.embedding(i, a),
    "embedding, padding": lambda a, b, i: F.embedding(i, a, padding_idx=2),
    "embedding, by frequency": lambda a, b, i: F.embedding(i, a, scale_grad_by_freq=True),
    "embedding, two-dimensional": lambda a, b, i: F.embedding(i.reshape(2, 3), a) * b[0],
    "gather": lambda a, b, i: a.gather(0, column(i)),
    "gather, last dimension": lambda a, b, i: a.gather(1, i[None].expand(ROWS, IDS)),
    "gather, negative dimension": lambda a, b, i: a.gather(-1, i[None].expand(ROWS, IDS)),
    "take_along_dim": lambda a, b, i: a.take_along_dim(i[:, None], 0),
    "take": lambda a, b, i: a.take(i),
    "index": lambda a, b, i: a[i],
    "index, last dimension": lambda a, b, i: a[:, i],
    "index, two dimensions": lambda a, b, i: a[i, i.flip(0)],
    "index, apart": lambda a, b, i: a.reshape(4, 6, 6)[i, :, i],
    "index, one id": lambda a, b, i: a[i[:1]],
    "index_select": lambda a, b, i: a.index_select(0, i),
    "index_select, last dimension": lambda a, b, i: a.index_select(1, i),
    "index_add": lambda a, b, i: a.index_add(0, i, rows(i, b)),
    "index_copy": lambda a, b, i: a.index_copy(0, i, rows(i, b)),
    "index_fill": lambda a, b, i: a.index_fill(0, i, 0.5),
    "index_put": lambda a, b, i: a.index_put((i,), rows(i, b)),
    "index_put, accumulate": lambda a, b, i: a.index_put((i,), rows(i, b), accumulate=True),
    "index_reduce": lambda a, b, i: a.index_reduce(0, i, rows(i, b), "amax"),
    "put": lambda a, b, i: a.put(i, b[0, :IDS]),
    "scatter": lambda a, b, i: a.scatter(0, column(i), rows(i, b)),
    "scatter, value": lambda a, b, i: a.scatter(0, column(i), 0.5),
    "scatter_add": lambda a, b, i: a.scatter_add(0, column(i), rows(i, b)),
    "scatter_add, last dimension": lambda a, b, i: a.scatter_add(1, i[None].expand(ROWS, IDS), b[:, :IDS]),
    "scatter_reduce, sum": lambda a, b, i: a.scatter_reduce(0, column(i), rows(i, b), "sum"),
    "scatter_reduce, mean": lambda a, b, i: a.scatter_reduce(0, column(i), rows(i, b), "mean"),
    "scatter_reduce, amax": lambda a, b, i: a.scatter_reduce(0, column(i), rows(i, b), "amax"),
    "masked_scatter": lambda a, b, i: a.masked_scatter(i[:4, None] > 1, b),
    "embedding_bag": lambda a, b, i: F.embedding_bag(i.reshape(2, 3), a),
    "one_hot": lambda a, b, i: F.one_hot(i, ROWS).float() @ a,
    "segments": lambda a, b, i: torch.zeros(ROWS, WIDTH).index_add(0, i, rows(i, a)) / i.numel(),
    "message passing": lambda a, b, i: a + torch.zeros_like(a).index_add(0, i, b[i.flip(0)]),
    "bincount": lambda a, b, i: torch.bincount(i, a[0, :IDS], ROWS),
    "segment_reduce": lambda a, b, i: torch.segment_reduce(a, "sum", lengths=torch.tensor([1, 3])),
    "repeat_interleave": lambda a, b, i: a.repeat_interleave(2, dim=0),
    "narrow": lambda a, b, i: a.narrow(1, 3, 5),
    "unfold": lambda a, b, i: a.unfold(1, 4, 2),
    "max_unpool2d": lambda a, b, i: F.max_unpool2d(*F.max_pool2d(image(a), 2, 1, return_indices=True)[:2], 2, 1),
    # ---------------------------------------------------------------- losses of classes
    "cross_entropy": lambda a, b, i: F.cross_entropy(rows(i, a)[:, :ROWS], i),
    "cross_entropy, ignored": lambda a, b, i: F.cross_entropy(rows(i, a)[:, :ROWS], i, ignore_index=1),
    "cross_entropy, ignored outside": lambda a, b, i: F.cross_entropy(rows(i, a)[:, :ROWS], i, ignore_index=-1),
    "cross_entropy, weights": lambda a, b, i: F.cross_entropy(rows(i, a)[:, :ROWS], i, weight=b[0, :ROWS].sigmoid()),
    "cross_entropy, smoothing": lambda a, b, i: F.cross_entropy(rows(i, a)[:, :ROWS], i, label_smoothing=0.1),
    "cross_entropy, sum": lambda a, b, i: F.cross_entropy(rows(i, a)[:, :ROWS], i, reduction="sum"),
    "cross_entropy, images": lambda a, b, i: F.cross_entropy(a.reshape(1, 4, 6, 6), i.repeat(6).reshape(1, 6, 6)),
    "cross_entropy, probabilities": lambda a, b, i: F.cross_entropy(a, b.softmax(1)),
    "nll_loss": lambda a, b, i: F.nll_loss(rows(i, a)[:, :ROWS].log_softmax(1), i, ignore_index=0),
    "multi_margin_loss": lambda a, b, i: F.multi_margin_loss(rows(i, a)[:, :ROWS], i),
    "multilabel_margin_loss": lambda a, b, i: F.multilabel_margin_loss(a[0, :IDS], i),
    "multilabel_soft_margin_loss": lambda a, b, i: F.multilabel_soft_margin_loss(a, (b > 0).float()),
    "binary_cross_entropy": lambda a, b, i: F.binary_cross_entropy(a.sigmoid(), (b > 0).float()),
    "binary_cross_entropy_with_logits": lambda a, b, i: F.binary_cross_entropy_with_logits(a, (b > 0).float()),
    "mse_loss": lambda a, b, i: F.mse_loss(a, b),
    "l1_loss": lambda a, b, i: F.l1_loss(a, b),
    "smooth_l1_loss": lambda a, b, i: F.smooth_l1_loss(a, b),
    "huber_loss": lambda a, b, i: F.huber_loss(a, b, delta=0.3),
    "kl_div": lambda a, b, i: F.kl_div(a.log_softmax(1), b.softmax(1), reduction="batchmean"),
    "poisson_nll_loss": lambda a, b, i: F.poisson_nll_loss(a, b.abs()),
    "gaussian_nll_loss": lambda a, b, i: F.gaussian_nll_loss(a, b, b.square() + 0.1),
    "soft_margin_loss": lambda a, b, i: F.soft_margin_loss(a, b.sign()),
    "hinge_embedding_loss": lambda a, b, i: F.hinge_embedding_loss(a, b.sign()),
    "margin_ranking_loss": lambda a, b, i: F.margin_ranking_loss(a, b, torch.ones(ROWS, WIDTH)),
    "cosine_embedding_loss": lambda a, b, i: F.cosine_embedding_loss(a, b, torch.ones(ROWS)),
    "triplet_margin_loss": lambda a, b, i: F.triplet_margin_loss(a, b, a.flip(0)),
    "cosine_similarity": lambda a, b, i: F.cosine_similarity(a, b),
    "pairwise_distance": lambda a, b, i: F.pairwise_distance(a, b),
    "cdist": lambda a, b, i: torch.cdist(a, b),
    # ---------------------------------------------------------------- layers
    "linear": lambda a, b, i: F.linear(a, b, b[0, :ROWS]),
    "matmul": lambda a, b, i: a @ b.T,
    "bmm": lambda a, b, i: a.reshape(4, 6, 6) @ b.reshape(4, 6, 6),
    "outer": lambda a, b, i: torch.outer(a[0], b[0]),
    "mv": lambda a, b, i: torch.mv(a, b[0]),
    "dot": lambda a, b, i: torch.dot(a[0], b[0]),
    "addmm": lambda a, b, i: torch.addmm(b[:, :4], a, b.T),
    "baddbmm": lambda a, b, i: torch.baddbmm(a.reshape(4, 6, 6), b.reshape(4, 6, 6), a.reshape(4, 6, 6)),
    "einsum": lambda a, b, i: torch.einsum("ij,kj->ik", a, b),
    "bilinear": lambda a, b, i: F.bilinear(a[:, :6], b[:, :4], fixed(3, 6, 4)),
    "conv1d": lambda a, b, i: F.conv1d(a[None], b.reshape(4, 4, 9), padding=4),
    "conv2d": lambda a, b, i: F.conv2d(image(a), b.reshape(4, 4, 3, 3), padding=1),
    "conv2d, stride and dilation": lambda a, b, i: F.conv2d(image(a), b.reshape(4, 4, 3, 3), None, 2, 2, 2),
    "conv2d, two groups": lambda a, b, i: F.conv2d(image(a), b.reshape(-1)[:72].reshape(4, 2, 3, 3), groups=2),
    "conv2d, depthwise": lambda a, b, i: F.conv2d(image(a), b.reshape(-1)[:36].reshape(4, 1, 3, 3), groups=4),
    "conv3d": lambda a, b, i: F.conv3d(a.reshape(1, 1, 4, 6, 6), b.reshape(-1)[:8].reshape(1, 1, 2, 2, 2)),
    "conv_transpose2d": lambda a, b, i: F.conv_transpose2d(image(a), b.reshape(4, 4, 3, 3), stride=2),
    "conv_transpose2d, groups": lambda a, b, i: F.conv_transpose2d(
        image(a), b.reshape(-1)[:72].reshape(4, 2, 3, 3), groups=2
    ),
    "layer_norm": lambda a, b, i: F.layer_norm(a, (WIDTH,), b[0], b[1]),
    "rms_norm": lambda a, b, i: a * (a.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * b[0],
    "group_norm": lambda a, b, i: F.group_norm(image(a), 2, b[0, :4], b[1, :4]),
    "instance_norm": lambda a, b, i: F.instance_norm(image(a)),
    "batch_norm, frozen": lambda a, b, i: F.batch_norm(a, torch.zeros(WIDTH), torch.ones(WIDTH), b[0], b[1]),
    "local_response_norm": lambda a, b, i: F.local_response_norm(image(a), 2),
    "normalize": lambda a, b, i: F.normalize(a),
    "weight_norm": lambda a, b, i: a @ (b / b.norm(dim=1, keepdim=True)).T,
    "attention": lambda a, b, i: F.scaled_dot_product_attention(
        a.reshape(1, 2, 4, 18), b.reshape(1, 2, 4, 18), a.reshape(1, 2, 4, 18)
    ),
    "attention, causal": lambda a, b, i: F.scaled_dot_product_attention(image(a), image(b), image(a), is_causal=True),
    "attention, mask": lambda a, b, i: F.scaled_dot_product_attention(
        a[None], b[None], a[None], attn_mask=(i[:4, None] >= i[None, :4])
    ),
    "gru cell": lambda a, b, i: torch.gru_cell(a, b[:, :6], fixed(18, WIDTH), fixed(18, 6), fixed(18), fixed(18)),
    "lstm cell": lambda a, b, i: torch.lstm_cell(
        a, (b[:, :6], b[:, 6:12]), fixed(24, WIDTH), fixed(24, 6), fixed(24), fixed(24)
    )[0],
    "lstm": lambda a, b, i: torch.lstm(
        a[None], (b[None, :1, :6], b[None, 1:2, :6]), [fixed(24, WIDTH), fixed(24, 6)],
        False, 1, 0.0, False, False, True,
    )[0],
    "gru": lambda a, b, i: torch.gru(
        a[None], b[None, :1, :6], [fixed(18, WIDTH), fixed(18, 6)], False, 1, 0.0, False, False, True
    )[0],
    "rnn": lambda a, b, i: torch.rnn_tanh(
        a[None], b[None, :1, :6], [fixed(6, WIDTH), fixed(6, 6)], False, 1, 0.0, False, False, True
    )[0],
    "scan": lambda a, b, i: [h := torch.zeros(6)] and [h := (h * 0.5 + part).tanh() for part in a[:, :6]][-1],
    # ---------------------------------------------------------------- pooling, grids, shapes
    "max_pool1d": lambda a, b, i: F.max_pool1d(a[None], 3),
    "max_pool2d": lambda a, b, i: F.max_pool2d(image(a), 2),
    "max_pool2d, overlapping": lambda a, b, i: F.max_pool2d(image(a), 3, stride=1, padding=1),
    "max_pool3d": lambda a, b, i: F.max_pool3d(a.reshape(1, 1, 4, 6, 6), 2),
    "avg_pool1d": lambda a, b, i: F.avg_pool1d(a[None], 3),
    "avg_pool2d": lambda a, b, i: F.avg_pool2d(image(a), 2),
    "avg_pool3d": lambda a, b, i: F.avg_pool3d(a.reshape(1, 1, 4, 6, 6), 2),
    "lp_pool2d": lambda a, b, i: F.lp_pool2d(image(a), 2, 2),
    "adaptive_avg_pool2d": lambda a, b, i: F.adaptive_avg_pool2d(image(a), 4),
    "adaptive_avg_pool2d, one": lambda a, b, i: F.adaptive_avg_pool2d(image(a), 1),
    "adaptive_avg_pool3d": lambda a, b, i: F.adaptive_avg_pool3d(a.reshape(1, 1, 4, 6, 6), 2),
    "adaptive_max_pool2d": lambda a, b, i: F.adaptive_max_pool2d(image(a), 4),
    "fold": lambda a, b, i: F.fold(F.unfold(image(a), 3), (6, 6), 3),
    "interpolate, nearest": lambda a, b, i: F.interpolate(image(a), scale_factor=2),
    "interpolate, bilinear": lambda a, b, i: F.interpolate(image(a), scale_factor=2, mode="bilinear"),
    "interpolate, linear": lambda a, b, i: F.interpolate(a[None], scale_factor=2, mode="linear"),
    "interpolate, trilinear": lambda a, b, i: F.interpolate(
        a.reshape(1, 1, 4, 6, 6), scale_factor=2, mode="trilinear"
    ),
    "interpolate, bicubic": lambda a, b, i: F.interpolate(image(a), size=(5, 7), mode="bicubic"),
    "grid_sample": lambda a, b, i: F.grid_sample(image(a), b[:2, :25].reshape(1, 5, 5, 2), align_corners=False),
    "grid_sample, nearest": lambda a, b, i: F.grid_sample(
        image(a), b.reshape(-1)[:50].reshape(1, 5, 5, 2), "nearest", "border", False
    ),
    "affine_grid": lambda a, b, i: F.grid_sample(
        image(a), F.affine_grid(b[:1, :6].reshape(1, 2, 3), [1, 4, 6, 6], align_corners=False), align_corners=False
    ),
    "pad, constant": lambda a, b, i: F.pad(image(a), (1, 2, 1, 0)),
    "pad, reflect": lambda a, b, i: F.pad(image(a), (1, 2, 1, 0), mode="reflect"),
    "pad, replicate": lambda a, b, i: F.pad(image(a), (1, 2, 1, 0), mode="replicate"),
    "pad, circular": lambda a, b, i: F.pad(image(a), (1, 2, 1, 0), mode="circular"),
    "pixel_shuffle": lambda a, b, i: F.pixel_shuffle(image(a), 2),
    "pixel_unshuffle": lambda a, b, i: F.pixel_unshuffle(image(a), 2),
    "channel_shuffle": lambda a, b, i: F.channel_shuffle(image(a), 2),
    "roll": lambda a, b, i: a.roll(1, 0) - a.roll(-2, 1),
    "flip": lambda a, b, i: a.flip(0, 1) * b,
    "rot90": lambda a, b, i: image(a).rot90(1, (2, 3)),
    "permute": lambda a, b, i: image(a).permute(0, 2, 3, 1) @ fixed(4, 2),
    "cat": lambda a, b, i: torch.cat([a, b], 1),
    "stack": lambda a, b, i: torch.stack([a, b]),
    "split": lambda a, b, i: torch.cat(a.split(9, 1)[::-1]) + torch.cat(b.chunk(4, 1)),
    "expand": lambda a, b, i: a[:1].expand(4, WIDTH) * b,
    "repeat": lambda a, b, i: a.repeat(2, 1),
    "alias": lambda a, b, i: a[...] * b[:],
    "squeeze": lambda a, b, i: a[:1].squeeze(0) * b.unsqueeze(0),
    "select": lambda a, b, i: a.select(1, 3) + a.diagonal()[0] + a.unbind(0)[2][0],
    "slice_scatter": lambda a, b, i: a.slice_scatter(b[:, :5], 1, 2, 7),
    "select_scatter": lambda a, b, i: a.select_scatter(b[0], 0, 2),
    "diagonal": lambda a, b, i: torch.diag_embed(a[0, :5]) + torch.diagonal(b)[0],
    "tril": lambda a, b, i: a.tril() + b.triu(1),
    "as_strided": lambda a, b, i: a.reshape(6, 24).transpose(0, 1),
    # ---------------------------------------------------------------- sorting and reductions
    "sort": lambda a, b, i: a.sort(1)[0],
    "sort, rows": lambda a, b, i: a.sort(0, descending=True)[0],
    "argsort": lambda a, b, i: a.gather(1, b.argsort(1)),
    "topk": lambda a, b, i: a.topk(3, 1)[0],
    "kthvalue": lambda a, b, i: a.kthvalue(2, 1)[0],
    "median": lambda a, b, i: a.median(1)[0],
    "mode": lambda a, b, i: a.mode(1)[0],
    "searchsorted": lambda a, b, i: a * torch.searchsorted(b[0].sort()[0], a).float(),
    "bucketize": lambda a, b, i: a * torch.bucketize(b, fixed(5)).float(),
    "max": lambda a, b, i: a.max(1)[0] + b.max(),
    "min": lambda a, b, i: a.min(0)[0] + b.min(),
    "amax": lambda a, b, i: a.amax(1) + b.amin(1),
    "argmax": lambda a, b, i: a.gather(1, b.argmax(1, keepdim=True)) + a.gather(1, b.argmin(1, keepdim=True)),
    "maximum": lambda a, b, i: torch.maximum(a, b) + torch.minimum(a, b),
    "sum": lambda a, b, i: a.sum(0) * b.sum(),
    "mean": lambda a, b, i: a.mean(1) + b.mean(),
    "prod": lambda a, b, i: a[:, :5].prod(1),
    "var": lambda a, b, i: a.var(1) + b.std(1),
    "norm": lambda a, b, i: a.norm(dim=1) + b.norm(1, dim=1) + torch.linalg.vector_norm(a),
    "logsumexp": lambda a, b, i: a.logsumexp(1),
    "cumsum": lambda a, b, i: a.cumsum(1) + b.cumsum(0),
    "cumprod": lambda a, b, i: a[:, :6].cumprod(1),
    "cummax": lambda a, b, i: a.cummax(1)[0],
    "logcumsumexp": lambda a, b, i: a.logcumsumexp(1),
    "any": lambda a, b, i: a * (b > 0).any(1, keepdim=True) * (a != 0).all(),
    # ---------------------------------------------------------------- elementwise
    "softmax": lambda a, b, i: a.softmax(1) * b.log_softmax(1),
    "where": lambda a, b, i: torch.where(i[:4, None] > 1, a, b),
    "masked_fill": lambda a, b, i: a.masked_fill(b > 0, 0.0),
    "clamp": lambda a, b, i: a.clamp(-0.5, 0.5) + b.clamp(min=0.1) + a.clamp(max=0.2),
    "nan_to_num": lambda a, b, i: a.nan_to_num() * b,
    "relu": lambda a, b, i: F.relu(a) + F.leaky_relu(b) + F.relu6(a),
    "elu": lambda a, b, i: F.elu(a) + F.selu(b) + F.celu(a),
    "gelu": lambda a, b, i: F.gelu(a) + F.gelu(b, approximate="tanh"),
    "silu": lambda a, b, i: F.silu(a) + F.mish(b) + F.hardswish(a),
    "prelu": lambda a, b, i: F.prelu(a, b[0, :1]),
    "glu": lambda a, b, i: F.glu(a) + F.softplus(b[:, :18]),
    "hardtanh": lambda a, b, i: F.hardtanh(a) + F.hardsigmoid(b) + F.tanhshrink(a) + F.softshrink(b),
    "sigmoid": lambda a, b, i: a.sigmoid() + b.tanh() + F.logsigmoid(a) + F.softsign(b),
    "exp": lambda a, b, i: a.exp() + b.square().log1p() + a.expm1(),
    "log": lambda a, b, i: (a.abs() + 0.1).log() + b.exp().log2() + b.exp().log10() + (a.abs() + 0.1).sqrt(),
    "power": lambda a, b, i: a.pow(3) + b.square().rsqrt() + (a.abs() + 0.1) ** 0.5 + 2.0**b,
    "sin": lambda a, b, i: a.sin() + b.cos() + a.atan() + torch.atan2(a, b) + b.sinh() + a.cosh(),
    "erf": lambda a, b, i: a.erf() + b.sigmoid().erfinv() + a.asinh() + b.tan() + a.tanh().acos() + b.tanh().asin(),
    "divide": lambda a, b, i: a / (b.abs() + 0.5) + a.reciprocal() + b.remainder(0.7) + a.fmod(0.3),
    "round": lambda a, b, i: a + (a.round() - a).detach() + b.floor() * a + a.ceil() + b.trunc(),
    "sign": lambda a, b, i: a.abs() * b.sign(),
    "compare": lambda a, b, i: a * ((a > b) & (b <= 1) | ~(a == b)).float() + (i[:4, None] != 2).float() * (a >= 0),
    "lerp": lambda a, b, i: torch.lerp(a, b, 0.3) + torch.addcmul(a, b, a) + torch.addcdiv(a, b, a.square() + 1),
    "logical": lambda a, b, i: a * torch.logical_or(a > 0, b > 0) + b * torch.logical_xor(a > 0, b > 0),
    "hyperbolic": lambda a, b, i: (b.tanh() * 0.9).atanh() + (b.square() + 1.1).acosh() + torch.hypot(a, b),
    "special": lambda a, b, i: a.exp2() + b.erfc() + (b.abs() + 1).lgamma() + (a.abs() + 1).digamma(),
    "copysign": lambda a, b, i: a.copysign(b) + a.heaviside(b) + a.hardshrink() + a.frac() + a // 1.0,
    "isnan": lambda a, b, i: torch.where(a.isnan() | b.isinf(), 0.0, a),
    "cast": lambda a, b, i: a.double().float() + b.to(torch.bfloat16).float() + i[:4, None].float() * a,
    "full": lambda a, b, i: a + torch.full_like(b, 2) + torch.ones(WIDTH) + torch.eye(4, WIDTH) + torch.zeros_like(a),
    "integers": lambda a, b, i: a * (i[:4, None] // 2 + i[:4, None] % 2 + (i[:4, None] & 1)).float(),
    "mesh": lambda a, b, i: a * torch.meshgrid(torch.arange(4.0), torch.arange(36.0), indexing="ij")[1],
    "straight through": lambda a, b, i: (a > 0).float() + a - a.detach(),
    "cross": lambda a, b, i: torch.linalg.cross(a[:, :3], b[:, :3]),
    "cholesky": lambda a, b, i: torch.linalg.cholesky(a[:, :4] @ a[:, :4].T + torch.eye(4)),
    "solve": lambda a, b, i: torch.linalg.solve(a[:, :4] @ a[:, :4].T + torch.eye(4), b),
    "inverse": lambda a, b, i: torch.linalg.inv(a[:, :4] + 3 * torch.eye(4)),
    "det": lambda a, b, i: torch.logdet(a[:, :4] @ a[:, :4].T + torch.eye(4)),
    "fft": lambda a, b, i: torch.fft.rfft(a).abs() + torch.fft.irfft(torch.fft.rfft(b)).sum(),
    # ---------------------------------------------------------------- random numbers
    "dropout": lambda a, b, i: F.dropout(a, 0.5) * b,
    "dropout2d": lambda a, b, i: F.dropout2d(image(a), 0.5),
    "alpha_dropout": lambda a, b, i: F.alpha_dropout(a, 0.5, training=True),
    "randn": lambda a, b, i: a + torch.randn(WIDTH) + torch.randn_like(b) * b,
    "rand": lambda a, b, i: a * (torch.rand(WIDTH) + torch.rand_like(b)),
    "bernoulli": lambda a, b, i: a * torch.bernoulli(torch.full((WIDTH,), 0.5)),
    "randint": lambda a, b, i: a[:, torch.randint(0, WIDTH, (5,))],
    "randperm": lambda a, b, i: a[:, torch.randperm(WIDTH)],
    "gumbel_softmax": lambda a, b, i: F.gumbel_softmax(a, hard=True),
    "multinomial": lambda a, b, i: a[:, torch.multinomial(torch.ones(WIDTH), 3)],
    "rrelu": lambda a, b, i: F.rrelu(a, training=True),
    "fractional_max_pool2d": lambda a, b, i: F.fractional_max_pool2d(image(a), 2, output_size=3),
}  # fmt: skip
OWN = {"_inside", "_clamped", "_finite_inside", "_copied"}
TABLE_OF = torch.torch_version.TorchVersion("2.15")
RANDOM = {
    "bernoulli",
    "rand",
    "randn",
    "rand_like",
    "randn_like",
    "randint",
    "randperm",
    "multinomial",
    "exponential",
}
# They read values, write in place or take no ids that are constants.
UNTRACEABLE = {"bincount", "gaussian_nll_loss", "one_hot", "rrelu"}
FIXED = torch.tensor([1, 0, 3, 2, 2, 1])


class Uses(pl.LightningModule):
    """A loss by an operator of a record (or weights) and ids of the record (or fixed ones)."""

    def __init__(self, function, first, ids):
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.scale = nn.Parameter(torch.randn(2, ROWS, WIDTH)), nn.Parameter(torch.ones(WIDTH))
        self.function, self.first, self.own = function, first, ids

    def training_step(self, batch, batch_idx):
        x, i = batch[0][0], batch[1][0] if self.own else FIXED
        a = x * self.weight[0] * self.scale if self.first == "record" else self.weight[0]
        b = x.flip(0) * self.weight[1] if self.first == "record" else x * self.scale
        out = self.function(a, b, i)
        return (out.float() * torch.linspace(0.5, 1.5, out.numel()).reshape(out.shape)).sum()


WAYS = (("record", True), ("weights", True), ("record", False))


def records(count, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 1, ROWS, WIDTH, generator=generator)
    return x, torch.randint(0, ROWS, (count, 1, IDS), generator=generator)


def adversaries():
    """Records with bad values in some of their numbers, or bad ids in a part of their ids."""
    x, i = records(2 * len(VALUES) + len(NUMBERS), seed=1)
    for place, value in enumerate(VALUES):
        x[2 * place, 0, 1, :9] = x[2 * place + 1] = value
    for place, number in enumerate(NUMBERS, 2 * len(VALUES)):
        i[place, 0, -2:] = number
    return x, i


def between(plain, others):
    """Plain records and others by turns."""
    return [torch.stack([a, b], 1).flatten(0, 1) for a, b in zip(plain, others, strict=True)]


def clipped(gradient):
    """What a record adds to the sum: zero where its gradient is not finite."""
    flat = torch.cat([part.double().flatten() for part in gradient])
    norm = flat.norm()
    return flat / norm.clamp(min=1.0) if bool(norm.isfinite()) else torch.zeros_like(flat)


ADVERSE = adversaries()
PLAIN = records(len(ADVERSE[0]), seed=2)
HOSTILE = between(PLAIN, ADVERSE)
FRIENDLY = between(PLAIN, records(len(ADVERSE[0]), seed=3))


def by_vmap(graph, stack):
    torch.manual_seed(5)
    found = graph.rows(stack)
    return [clipped([part[row] for part in found]) for row in range(len(stack[0]))]


def traced(name, way):
    return RecordStep(Uses(CASES[name], *way)).trace([part[0] for part in PLAIN])


def operators_of(graph):
    return {packet_of(node) for node in graph.graph.graph.nodes if node.op == "call_function"}


def uses_ids(graph):
    return bool([node for node in graph.graph.graph.nodes if node.op == "placeholder"][-1].users)


def depends_on_neighbours(graph):
    """Whether plain records have other gradients among hostile ones, or hostile ones others than alone."""
    among, apart = by_vmap(graph, HOSTILE), by_vmap(graph, FRIENDLY)
    if any(not torch.equal(a, b) for a, b in zip(among[::2], apart[::2], strict=True)):
        return True
    if torch.manual_seed(7) and operators_of(graph) & RANDOM:
        return False  # draws differ alone
    alone = (clipped(graph.gradient([part[row] for part in ADVERSE])) for row in range(len(ADVERSE[0])))
    return any(float((a - b).abs().max()) > 1e-5 for a, b in zip(among[1::2], alone, strict=True))


@pytest.mark.long("all ways")
@pytest.mark.parametrize("ways", [WAYS[:1], WAYS], ids=["one way", "all ways"])
def test_vmap_keeps_records_apart_by_the_operators_of_the_list(ways):
    shown, mixed, failed = set(), [], []
    for name in CASES:
        graph = None
        for way in ways:
            if way == WAYS[2] and graph is not None and not uses_ids(graph):
                continue
            try:
                graph = traced(name, way)
            except UntraceableError:
                failed.append(name)
                continue
            if not graph.outside:
                shown |= operators_of(graph)
                mixed += [(name, way)] if depends_on_neighbours(graph) else []
    assert not mixed
    assert len(CASES) >= 200
    if torch.__version__ >= TABLE_OF:  # earlier ones take other operators to pieces
        assert shown - OWN == APART
    assert set(failed) <= UNTRACEABLE


def test_operators_that_are_not_in_the_list_run_record_by_record():
    assert traced("lstm", WAYS[0]).outside == ("mkldnn_rnn_layer",)
    data = TensorDataset(*(part[:, 0] for part in PLAIN))
    gradients = RecordGradients(Uses(CASES["lstm"], *WAYS[0]), PrivateData(data), 1.0)
    gradients.choose(timed=False)
    assert (gradients.way.name, gradients.condition) == ("loop", None)
    assert "record by record because of mkldnn_rnn_layer" in gradients.in_words()


def test_the_comparison_sees_an_operator_that_mixes(monkeypatch):
    monkeypatch.setattr(_tracing, "bound_ids", lambda graph: None)
    graph = traced("embedding", WAYS[0])
    stack = [part[:4].clone() for part in PLAIN]
    before = by_vmap(graph, stack)
    stack[1][2, 0, 0] = -1  # the last row of the record before it
    assert not torch.equal(before[1], by_vmap(graph, stack)[1])


@pytest.mark.parametrize("number", NUMBERS)
def test_a_record_with_an_id_out_of_range_counts_as_zero_alone_and_in_company(number):
    x, i = (part[:, 0].clone() for part in PLAIN)
    i[3, 0] = number
    data, everyone = TensorDataset(x, i), range(len(x))
    module = Uses(CASES["embedding"], *WAYS[0])
    assert not clipped_sum(module, data, [3]).any()
    whole, rest = (clipped_sum(module, data, [row for row in everyone if row != out]) for out in (-1, 3))
    assert torch.equal(whole, rest)
    assert rest.any()


def test_ids_from_the_end_keep_their_meaning_where_the_operator_has_it():
    x, i = (part[:, 0].clone() for part in PLAIN)
    data, ends = TensorDataset(x, i), TensorDataset(x, i - ROWS)
    for name in ("index", "index_put", "index_fill"):
        module = Uses(CASES[name], *WAYS[0])
        torch.testing.assert_close(clipped_sum(module, data, [0, 1]), clipped_sum(module, ends, [0, 1]))
    for name in ("embedding", "gather", "index_select", "scatter", "cross_entropy"):
        assert not clipped_sum(Uses(CASES[name], *WAYS[0]), ends, [0, 1]).any(), name
    ignored = Uses(CASES["cross_entropy, ignored outside"], *WAYS[0])
    i[0, :3] = -1
    assert clipped_sum(ignored, TensorDataset(x, i), [0]).any()
