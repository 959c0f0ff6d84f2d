"""Kimi K3 written out from its equations: tokens one by one, experts one by one, S x S scores."""

import torch
import torch.nn.functional as F
from torch import Tensor

from models.batch import IGNORE, Batch
from models.kimi_k3 import KimiK3Config
from tests.models.recurrences import convolution_by_token, delta_rule_by_token

Values = dict[str, Tensor]


def loss_of(values: Values, biases: Values, config: KimiK3Config, batch: Batch) -> Tensor:
    """Summed cross-entropy; `values` are the parameters by name, `biases` those of the routers."""
    kept: list[Tensor] = []
    stream: Tensor | None = values["embedding.weight"][batch.tokens_BS]
    for layer in range(config.num_layers):
        own = part(values, f"layers.{layer}.")
        h = mix(part(own, "attention_residual."), [*kept, stream], config)
        if layer % config.residual_block == 0:
            kept, stream = [*kept, stream], None
        h = rms(h, config.norm_eps) * own["attention_norm.weight"]
        attend = latent_attention if layer in config.full_layers else delta_attention
        y = attend(part(own, "attention."), h, config, batch.positions_BS)
        stream = y if stream is None else stream + y
        h = mix(part(own, "feed_forward_residual."), [*kept, stream], config)
        h = rms(h, config.norm_eps) * own["feed_forward_norm.weight"]
        ffn = part(own, "feed_forward.")
        sparse = layer >= config.num_dense_layers
        bias = biases.get(f"layers.{layer}.feed_forward.router.expert_bias")
        stream = stream + (experts(ffn, bias, h, config) if sparse else dense(ffn, h, config))
    h = mix(part(values, "norm.residual."), [*kept, stream], config)
    logits = rms(h, config.norm_eps) * values["norm.weight"] @ values["head.weight"].T
    return F.cross_entropy(logits.mT, batch.labels_BS, ignore_index=IGNORE, reduction="sum")


def part(values: Values, prefix: str) -> Values:
    return {k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix)}


def rms(x: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def mix(values: Values, sources: list[Tensor], config: KimiK3Config) -> Tensor:
    normed = [rms(v, config.norm_eps) * values["gain"] for v in sources]
    weights = torch.stack([n @ values["query"] for n in normed]).softmax(0)
    return sum(w[..., None] * v for w, v in zip(weights, sources, strict=True))


def delta_attention(values: Values, x: Tensor, config: KimiK3Config, positions: Tensor) -> Tensor:
    heads = (config.num_heads, config.linear_head_dim)
    q, k, v = (
        convolution_by_token(
            x @ values[f"{name}_proj.weight"].T,
            values[f"{name}_convolution.weight"],
            positions,
            None,
        ).unflatten(-1, heads)
        for name in "qkv"
    )
    f = x @ values["decay_proj.0.weight"].T @ values["decay_proj.1.weight"].T
    f = (f + values["decay_bias"]).unflatten(-1, heads)
    decay = config.decay_bound * torch.sigmoid(values["log_rate"].exp()[:, None] * f)
    beta = torch.sigmoid(x @ values["beta_proj.weight"].T)
    out, _ = delta_rule_by_token(q, k, v, decay, beta, positions, None, heads[1] ** -0.5)
    gate = torch.sigmoid(x @ values["gate_proj.weight"].T)
    out = (rms(out, config.norm_eps) * values["norm.weight"]).flatten(2) * gate
    return out @ values["o_proj.weight"].T


def latent_attention(values: Values, x: Tensor, config: KimiK3Config, positions: Tensor) -> Tensor:
    nope, shared = config.qk_nope_head_dim, config.qk_rope_head_dim
    eps = config.latent_norm_eps
    latent_q = rms(x @ values["q_proj.0.weight"].T, eps) * values["q_proj.1.weight"]
    q = (latent_q @ values["q_proj.2.weight"].T).unflatten(-1, (config.num_heads, nope + shared))
    down = x @ values["kv_down_proj.weight"].T
    latent, k_shared = down.split([config.kv_lora_rank, shared], dim=-1)
    up = rms(latent, eps) * values["kv_norm.weight"] @ values["kv_up_proj.weight"].T
    k, v = up.unflatten(-1, (config.num_heads, -1)).split([nope, config.v_head_dim], dim=-1)
    scores = torch.einsum("bihd,bjhd->bhij", q[..., :nope], k)
    scores = scores + torch.einsum("bihd,bjd->bhij", q[..., nope:], k_shared)
    document = (positions == 0).cumsum(1)
    index = torch.arange(x.shape[1])
    seen = (document[:, :, None] == document[:, None]) & (index[:, None] >= index)
    scores = (scores * (nope + shared) ** -0.5).masked_fill(~seen[:, None], float("-inf"))
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).flatten(2)
    return (out * torch.sigmoid(x @ values["gate_proj.weight"].T)) @ values["o_proj.weight"].T


def situ(gate: Tensor, up: Tensor, config: KimiK3Config) -> Tensor:
    b, c = config.gate_bound, config.up_bound
    return b * torch.tanh(gate / b) * torch.sigmoid(gate) * c * torch.tanh(up / c)


def dense(values: Values, x: Tensor, config: KimiK3Config) -> Tensor:
    gate, up = (x @ values[f"{name}_proj.weight"].T for name in ("gate", "up"))
    return situ(gate, up, config) @ values["down_proj.weight"].T


def experts(values: Values, bias: Tensor, x: Tensor, config: KimiK3Config) -> Tensor:
    scores = torch.sigmoid(x @ values["router.weight"].T)
    chosen = (scores + bias).topk(config.num_experts_per_token, dim=-1).indices
    mask = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
    weights = scores * mask / ((scores * mask).sum(-1, keepdim=True) + 1e-20)
    z = x @ values["entry.weight"].T
    r = torch.zeros_like(z)
    for expert in range(config.num_experts):
        gate, up = (z @ values["experts.gate_up"][expert].T).chunk(2, dim=-1)
        out = situ(gate, up, config) @ values["experts.down"][expert].T
        r = r + weights[..., expert, None] * out
    routed = rms(r, config.norm_eps) * values["exit.0.weight"] @ values["exit.1.weight"].T
    return routed + dense(part(values, "shared."), x, config)
