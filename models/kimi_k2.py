"""Kimi K2 (arXiv:2507.20534): presets of the network of DeepSeek V3 with more experts, one group.

K2.5, K2.6 and K2.7 are one network; the vision tower is out of scope.
"""

from msgspec.structs import replace

from models.deepseek_v3 import DEEPSEEK_V3_671B, DEEPSEEK_V3_PROXY

KIMI_K2_7 = replace(
    DEEPSEEK_V3_671B,
    vocab_size=163840,
    num_dense_layers=1,
    num_heads=64,
    num_experts=384,
    num_expert_groups=1,
    num_limited_groups=1,
    route_scale=2.827,
    norm_eps=1e-5,
    rope_theta=50_000.0,
    rope_factor=64.0,
)
"""The language model, 1.03 T parameters."""

KIMI_K2_PROXY = replace(
    DEEPSEEK_V3_PROXY,
    num_experts=24,
    num_expert_groups=1,
    num_limited_groups=1,
    route_scale=2.827,
    norm_eps=1e-5,
    rope_theta=50_000.0,
    rope_factor=64.0,
    num_mtp_layers=0,
)
"""Every feature of the full size, for two CPU ranks."""
