"""DeepSeek V2 (arXiv:2405.04434): presets of the network of DeepSeek V3 with softmax routing."""

from models.deepseek_v3 import DeepSeekV3Config

DEEPSEEK_V2_16B = DeepSeekV3Config(
    vocab_size=102400,
    dim=2048,
    num_layers=27,
    num_dense_layers=1,
    num_heads=16,
    q_lora_rank=0,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    dense_hidden_dim=10944,
    expert_hidden_dim=1408,
    num_experts=64,
    num_experts_per_token=6,
    num_shared_experts=2,
    score_function="softmax",
    normalize_weights=False,
    rope_mscale=0.707,
)
"""DeepSeek V2 Lite."""

DEEPSEEK_V2_236B = DeepSeekV3Config(
    vocab_size=102400,
    dim=5120,
    num_layers=60,
    num_dense_layers=1,
    num_heads=128,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    dense_hidden_dim=12288,
    expert_hidden_dim=1536,
    num_experts=160,
    num_experts_per_token=6,
    num_shared_experts=2,
    num_expert_groups=8,
    num_limited_groups=3,
    num_group_votes=1,
    score_function="softmax",
    normalize_weights=False,
    route_scale=16.0,
    rope_mscale=0.707,
)

DEEPSEEK_V2_PROXY = DeepSeekV3Config(
    vocab_size=512,
    dim=128,
    num_layers=3,
    num_dense_layers=1,
    num_heads=4,
    q_lora_rank=64,
    kv_lora_rank=64,
    qk_nope_head_dim=64,
    qk_rope_head_dim=64,
    v_head_dim=64,
    dense_hidden_dim=384,
    expert_hidden_dim=64,
    num_experts=16,
    num_experts_per_token=4,
    num_shared_experts=2,
    num_expert_groups=4,
    num_limited_groups=2,
    num_group_votes=1,
    score_function="softmax",
    normalize_weights=False,
    # A token's four weights then sum to about 1, as those of the 236B with its factor 16 do.
    route_scale=4.0,
    rope_mscale=0.707,
    loss_chunk_tokens=256,
)
"""Every feature of the 236B, for two CPU ranks."""
