// What kernels/triton/elementwise.py computes, for kernels that do it on their way, rounded where that rounds. Compiled for: BF16
// (else fp16), ACTIVATION, NORM.
#pragma once
#include <machine.h>

#define NONE 0  // of either
#define SILU 1
#define GELU_TANH 2
#define GELU 3

#define ROUNDED_FIRST 1  // before the product with the weight
#define ROUNDED_LAST 2

DEVICE float rounded(float f) { return widen(narrow(f)); }

DEVICE float activated(float x) {
    if (ACTIVATION == SILU) return divide(x, 1 + exponential(-x));
    if (ACTIVATION == GELU_TANH)  // x / 2 * (1 + tanh(y)) = x / (1 + exp(-2y)), without the cancellation
        return divide(x, 1 + exponential(-2 * 0.7978845608028654f * (x + 0.044715f * x * x * x)));
    return 0.5f * x * (1 + error_function(x * 0.7071067811865476f));
}

// activation(gate) * up of what products gave.
DEVICE u16 gated(float gate, float up) { return narrow(rounded(activated(rounded(gate))) * rounded(up)); }

DEVICE float first_of(u32 pair) { return widen((u16)pair); }
DEVICE float second_of(u32 pair) { return widen((u16)(pair >> 16)); }

DEVICE float sum_of(const Quad& q) {
    float sum = 0;
    for (int i = 0; i < 4; i++) sum += first_of(q.word[i]) + second_of(q.word[i]);
    return sum;
}

DEVICE float squares_of(const Quad& q) {
    float sum = 0;
    for (int i = 0; i < 4; i++) {
        const float a = first_of(q.word[i]), b = second_of(q.word[i]);
        sum = multiply_add(a, a, multiply_add(b, b, sum));
    }
    return sum;
}

// x * scale * (weight + offset), scale being 1 / rms(x); offset is 0 where x * scale is rounded.
DEVICE void normalise(Quad& x, const Quad& weight, float scale, float offset) {
    for (int i = 0; i < 4; i++) {
        const float a = first_of(x.word[i]) * scale, b = second_of(x.word[i]) * scale;
        const u32 w = weight.word[i];
        x.word[i] = NORM == ROUNDED_FIRST ? multiply_pairs(narrow_pair(a, b), w)
                                          : narrow_pair(a * (first_of(w) + offset), b * (second_of(w) + offset));
    }
}
