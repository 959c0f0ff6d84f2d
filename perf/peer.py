"""Training speed beside transformers' DeepSeek V3: same size, data, dtype, process and machine.

A full step: forward, backward, gradient clipping and AdamW, 1024 tokens, one process and one
thread. Prints a Markdown table.
"""

import statistics
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from msgspec.structs import replace
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from bench.cpu_peak import cpu_peak
from bench.trainer import Trainer
from perf.paired import interleave, ratio, table
from workloads.deepseek_v3 import deepseek_v3_debug
from workloads.workload import Precision, Workload

ROUNDS = 10
THREADS = 1


def peer_config(workload: Workload) -> DeepseekV3Config:
    """Return transformers' configuration of the workload's model."""
    c = workload.model
    return DeepseekV3Config(
        vocab_size=c.vocab_size,
        hidden_size=c.dim,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_heads,
        intermediate_size=c.dense_hidden_dim,
        moe_intermediate_size=c.expert_hidden_dim,
        n_routed_experts=c.num_experts,
        num_experts_per_tok=c.num_experts_per_token,
        n_shared_experts=c.num_shared_experts,
        first_k_dense_replace=c.num_dense_layers,
        q_lora_rank=c.q_lora_rank or None,
        kv_lora_rank=c.kv_lora_rank,
        qk_nope_head_dim=c.qk_nope_head_dim,
        qk_rope_head_dim=c.qk_rope_head_dim,
        v_head_dim=c.v_head_dim,
        n_group=1,
        topk_group=1,
        norm_topk_prob=False,
        num_nextn_predict_layers=0,
        use_cache=False,
        tie_word_embeddings=False,
    )


class PeerStep:
    """transformers' model with the same step around it."""

    def __init__(self, workload: Workload, ours: Trainer) -> None:
        self.bf16 = workload.precision.compute == "bfloat16"
        self.model = DeepseekV3ForCausalLM(peer_config(workload)).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=8e-4, fused=True)
        self.data = ours.data
        self.index = 0

    def __call__(self) -> None:
        """Run one step."""
        tokens, _, positions = self.data.batch(self.index, 0, 1, 0, 1)
        self.index += 1
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.bf16):
            loss = self.model(input_ids=tokens, position_ids=positions, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def compare(workload: Workload) -> list[list[str]]:
    """Return the two rows of one dtype."""
    trainer = Trainer(workload, torch.device("cpu"))
    peer = PeerStep(workload, trainer)
    steps = iter(range(10**6))
    times = interleave(
        {"TitanBench": lambda: trainer.step(next(steps)), "transformers": peer}, rounds=ROUNDS
    )
    speedup = ratio(times, "transformers", "TitanBench")
    flops = workload.model.flops_per_token(workload.sequence_length).full
    peak = getattr(cpu_peak(THREADS), workload.precision.compute)
    rows = []
    for name, seconds in times.items():
        tokens_per_second = workload.tokens_per_step / statistics.median(seconds)
        tflops = tokens_per_second * flops / 1e12
        rows.append(
            [
                name,
                workload.precision.compute,
                f"{tokens_per_second:.0f}",
                f"{1e3 * tflops:.0f}",
                f"{100 * tflops / peak:.1f} %",
                f"{speedup:.2f}" if name == "TitanBench" else "1",
            ]
        )
    return rows


def main() -> None:
    """Print the table."""
    torch.set_num_threads(THREADS)
    store = Path(tempfile.mkdtemp()) / "rendezvous"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    base = deepseek_v3_debug()
    base = replace(base, plan=base.plan.resolve(1))
    header = ["trainer", "dtype", "tokens/s", "model GFLOPS (full)", "MFU (measured peak)", "ratio"]
    rows = []
    for compute in ("float32", "bfloat16"):
        rows += compare(replace(base, precision=Precision(compute=compute)))
    print("## Training speed beside transformers' DeepSeek V3 (33.0 M parameters, 1024 tokens)\n")
    print(table(header, rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
