"""Training speed of one layer of each kind of attention by sequence length, one process.

Forward and backward of a layer's attention (its projections included) at the sizes of the
proxies, one sequence in one document, one thread. Prints a Markdown table of tokens/s: a kind
whose row stays level is linear in the sequence, one that halves per column is quadratic.
"""

import statistics
from typing import Any

import torch
from torch import nn

from models.batch import Context
from models.deepseek_v3 import DEEPSEEK_V3_PROXY
from models.deepseek_v4 import DEEPSEEK_V4_PROXY
from models.initialization import collect_inits, initialize
from models.kimi_k3 import KIMI_K3_PROXY
from models.layers.compressed_attention import CompressedAttention
from models.llama3_1 import LLAMA3_1_PROXY
from models.muse_spark import MUSE_SPARK_PROXY
from models.protocol import Model
from models.qwen3_5 import QWEN3_5_PROXY
from perf.paired import interleave, table

LENGTHS = (1024, 2048, 4096, 8192)
ROUNDS = 5
# kind: the configuration and the index of a layer of that kind
KINDS: dict[str, tuple[Any, int]] = {
    "grouped queries, full (Llama 3.1)": (LLAMA3_1_PROXY, 0),
    "latent, full (DeepSeek V3)": (DEEPSEEK_V3_PROXY, 0),
    "window (Muse Spark)": (MUSE_SPARK_PROXY, 0),
    "Gated DeltaNet (Qwen3.5)": (QWEN3_5_PROXY, 0),
    "Kimi Delta Attention (Kimi K3)": (KIMI_K3_PROXY, 0),
    "compressed sparse (DeepSeek V4)": (DEEPSEEK_V4_PROXY, 1),
    "heavily compressed (DeepSeek V4)": (DEEPSEEK_V4_PROXY, 2),
}


class LayerStep:
    """Forward and backward of the attention of one layer."""

    def __init__(self, config: Any, layer: int, sequence_length: int) -> None:
        model: Model = config.build()
        inits = collect_inits(model)
        model.to_empty(device="cpu")
        initialize(model, inits, seed=0)
        self.attention: nn.Module = attention_of(model.layers[layer])
        context: Context = model.context(torch.arange(sequence_length)[None])
        compressed = isinstance(self.attention, CompressedAttention)
        self.shared = context.family[self.attention.block] if compressed else context
        self.x = torch.randn(1, sequence_length, config.dim, requires_grad=True)

    def __call__(self) -> None:
        """Run once."""
        out = self.attention(self.x, self.shared)
        out.backward(torch.ones_like(out))


def attention_of(block: nn.Module) -> nn.Module:
    """Return the attention of a block, whatever wraps it."""
    return next(module for name, module in block.named_modules() if name.endswith("attention"))


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    rows = []
    for kind, (config, layer) in KINDS.items():
        speeds = []
        for length in LENGTHS:
            times = interleave({kind: LayerStep(config, layer, length)}, rounds=ROUNDS)
            speeds.append(f"{length / statistics.median(times[kind]):.0f}")
        rows.append([kind, *speeds])
    print("## Attention by kind and sequence length (tokens/s, forward and backward)\n")
    print(table(["kind", *(str(length) for length in LENGTHS)], rows))


if __name__ == "__main__":
    main()
