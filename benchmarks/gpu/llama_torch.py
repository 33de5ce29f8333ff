"""The model of `benchmarks.gpu.llama` in torch.compile: bfloat16, or torchao's float8 with tensorwise scales.

Sizes and dtypes are the same: float32 parameters and moments, bfloat16 computation by autocast, fused AdamW, cuDNN
attention if it supports the shapes. Forward pass, loss and backward pass are compiled, with torch's compilation caches
disabled, so that the first step is cold. Parameters have the same distributions as in JAX but other random numbers, so
first losses agree to about 0.01 only.

torch is imported inside functions, because only the torch rows need it.
"""

import contextlib
import os
import statistics
import time
from typing import Any

from benchmarks.gpu import sizes

EPSILON = 1e-6  # the default of linen's RMSNorm


def measure(shape: sizes.Shape, batch: int, tokens: int, float8: bool, rounds: int, steps: int) -> dict[str, Any]:
    """Measures one row in this process. The first step is timed as a whole."""
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    import torch  # pyright: ignore[reportMissingImports]  (an optional library)

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    start = time.perf_counter()
    model = stack(shape, device)
    if float8:
        from torchao.float8 import convert_to_float8_training  # pyright: ignore[reportMissingImports]

        convert_to_float8_training(model, module_filter_fn=lambda _, name: name != "head")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=1e-4, fused=True)
    data = torch.randint(shape.vocabulary, (batch, tokens + 1), device=device)
    compiled = torch.compile(lambda data: loss_of(model, shape, data))

    def wait():
        if device == "cuda":
            torch.cuda.synchronize()

    def step():
        with attention_backends(device), torch.autocast(device, torch.bfloat16):
            loss = compiled(data)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    wait()
    init_s, clock = time.perf_counter() - start, time.perf_counter()
    losses = [float(step())]
    wait()
    first, seconds = {"all": time.perf_counter() - clock}, []
    for _ in range(rounds):
        clock = time.perf_counter()
        for _ in range(steps):
            loss = step()
        wait()
        seconds.append((time.perf_counter() - clock) / steps)
        losses.append(float(loss))
    moments = [value for state in optimizer.state.values() for value in state.values()]
    return {
        "seconds": statistics.median(seconds),
        "first": first,
        "init_s": init_s,
        "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else 0,
        "state_bytes": sum(array.nbytes for array in (*model.parameters(), *moments)),
        "kernels": 0,
        "losses": losses,
    }


def attention_backends(device: str):
    """Context manager that prefers cuDNN attention to FlashAttention."""
    if device != "cuda":
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel  # pyright: ignore[reportMissingImports]

    return sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True)


def stack(shape: sizes.Shape, device: str):
    """Returns the layers, with float32 parameters and linen's default initialisers."""
    from torch import nn  # pyright: ignore[reportMissingImports]

    width, kv_width = shape.width, shape.kv_heads * (shape.width // shape.heads)

    def linear(inputs: int, outputs: int):
        layer = nn.Linear(inputs, outputs, bias=False, device=device)
        nn.init.normal_(layer.weight, std=inputs**-0.5)
        return layer

    def norm():
        return nn.RMSNorm(width, device=device)

    def block():
        layers = {"q": linear(width, width), "k": linear(width, kv_width), "v": linear(width, kv_width)}
        layers |= {"o": linear(width, width), "gate": linear(width, shape.hidden), "up": linear(width, shape.hidden)}
        layers |= {"down": linear(shape.hidden, width), "attention_norm": norm(), "mlp_norm": norm()}
        return nn.ModuleDict(layers)

    embed = nn.Embedding(shape.vocabulary, width, device=device)
    nn.init.normal_(embed.weight, std=width**-0.5)
    blocks = nn.ModuleList([block() for _ in range(shape.blocks)])
    return nn.ModuleDict({"embed": embed, "blocks": blocks, "norm": norm(), "head": linear(width, shape.vocabulary)})


def loss_of(model: Any, shape: sizes.Shape, data: Any) -> Any:
    """Returns the mean next-token cross-entropy of data (batch, tokens + 1)."""
    import torch  # pyright: ignore[reportMissingImports]

    functional = torch.nn.functional
    x = model["embed"](data[:, :-1]).bfloat16()
    cos, sin = rotations(x.shape[1], shape.width // shape.heads, x.device)
    for block in model["blocks"]:
        y = normed(block["attention_norm"], x)
        q, k, v = (block[name](y).unflatten(-1, (-1, shape.width // shape.heads)) for name in ("q", "k", "v"))
        q, k, v = (heads.transpose(1, 2) for heads in (rotated(q, cos, sin), rotated(k, cos, sin), v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + block["o"](y.transpose(1, 2).flatten(-2))
        y = normed(block["mlp_norm"], x)
        x = x + block["down"](functional.silu(block["gate"](y)) * block["up"](y))
    logits = model["head"](normed(model["norm"], x))
    return functional.cross_entropy(logits.float().flatten(0, 1), data[:, 1:].flatten())


def normed(layer: Any, x: Any) -> Any:
    """RMSNorm computed in float32, with a bfloat16 result."""
    x = x.float()
    return (x * (x.square().mean(-1, keepdim=True) + EPSILON).rsqrt() * layer.weight).bfloat16()


def rotations(tokens: int, size: int, device: Any) -> tuple[Any, Any]:
    """Returns cos and sin of the rotary position embeddings, each (tokens, 1, size / 2)."""
    import torch  # pyright: ignore[reportMissingImports]

    frequencies = 10000.0 ** (-torch.arange(0, size, 2, dtype=torch.float32, device=device) / size)
    angles = torch.arange(tokens, dtype=torch.float32, device=device)[:, None, None] * frequencies
    return angles.cos().bfloat16(), angles.sin().bfloat16()


def rotated(x: Any, cos: Any, sin: Any) -> Any:
    import torch  # pyright: ignore[reportMissingImports]

    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
