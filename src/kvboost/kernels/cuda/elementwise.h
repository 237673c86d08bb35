// What kernels/triton/elementwise.py computes, for kernels that do it on their way, rounded where that rounds. Compiled for: BF16
// (else fp16), ACTIVATION.
#pragma once
#include <machine.h>

#define NONE 0
#define SILU 1
#define GELU_TANH 2
#define GELU 3

DEVICE float rounded(float f) { return widen(narrow(f)); }

DEVICE float activated(float x) {
    if (ACTIVATION == SILU) return divide(x, 1 + exponential(-x));
    if (ACTIVATION == GELU_TANH)  // x / 2 * (1 + tanh(y)) = x / (1 + exp(-2y)), without the cancellation
        return divide(x, 1 + exponential(-2 * 0.7978845608028654f * (x + 0.044715f * x * x * x)));
    return 0.5f * x * (1 + error_function(x * 0.7071067811865476f));
}

// activation(gate) * up of what products gave.
DEVICE u16 gated(float gate, float up) { return narrow(rounded(activated(rounded(gate))) * rounded(up)); }
