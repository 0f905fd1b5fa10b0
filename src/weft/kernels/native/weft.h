/* What the CPU kernels compute, for sgemm.c that implements them and primitives.cpp that hands them to MLX.
 *
 * What must hold, for every function here:
 *   - The additions behind one number depend on its own row of the input alone: not on how many rows, tokens or threads
 *     there are, nor where a prompt is cut. A product's number is sixteen running sums over k (lane i takes k = i, i + 16,
 *     ...) folded 8, 4, 2, 1; attention adds its values in the order of the tokens.
 *   - Packed weights are expanded to the float32 numbers that an expanded copy of the file would hold, then multiplied as
 *     those would be: packing changes memory and time, never a bit.
 *   - All arrays are float32 and row-contiguous unless a stride says otherwise; nothing reads beyond an array's end.
 *   - Nothing here knows MLX or Python, keeps state between calls (but scratch memory of a thread), or throws.
 */
#ifndef WEFT_H
#define WEFT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { WEFT_API = 5 };  /* raise it with every change here: the two libraries are built apart */
enum { WEFT_LANES = 16, WEFT_STATE_ROWS = 4 }; /* numbers read together; rows of a recurrent state taken together */
enum { WEFT_MAX_TAPS = 16 };                   /* of a layer's convolution */

/* How numbers of weights and of scales are written; the last three are packings in groups, each group with a scale. */
enum weft_kind { WEFT_F32, WEFT_F16, WEFT_BF16, WEFT_AFFINE, WEFT_MXFP4, WEFT_NVFP4 };

/* A matrix (n, k), its rows one after the other: numbers, or codes of `bits` bits, the first in the lowest bits, in groups
 * of `group` along k. AFFINE: code * scale + bias, both of `scale_kind`, rounded after each operation. MXFP4: a number of
 * 4 bits times 2^(scale - 127). NVFP4: a number of 4 bits times a scale of 8 bits (e4m3). */
struct weft_weights {
    enum weft_kind kind, scale_kind;
    size_t n, k, bits, group;
    const void *codes, *scales, *biases;
};

/* c (m, n) = a (m, k) * weights^T, then + bias (n), then + residual (m, n) where these are not NULL. */
struct weft_linear {
    size_t m, lda, ldc;
    const float *a, *bias, *residual;
    float *c;
    const struct weft_weights *weights;
};
void weft_linear(const struct weft_linear *);

/* The same roughly, for guesses that are verified: weights of four bits in groups of 64 with scales of float32 are multiplied in whole numbers
 * where the processor can, others as above. The additions behind a number depend on its own row here too. */
void weft_rough(const struct weft_linear *);

/* Several products of the same rows beside each other: part i is weights[i] and biases[i], or no bias where that is NULL. */
struct weft_joint {
    size_t m, lda, ldc, num_parts;
    const float *a;
    float *c;
    const struct weft_weights *const *weights; /* all of one k */
    const float *const *biases;
};
void weft_joint(const struct weft_joint *);

/* c (m, n) = SiLU(a * gate^T) * (a * up^T), the first half of a gated MLP. */
struct weft_gated {
    size_t m;
    const float *a;
    float *c;
    const struct weft_weights *gate, *up;
};
void weft_gated(const struct weft_gated *);

/* Row `row` of the weights as float32: of an embedding, one token's. */
void weft_expand(const struct weft_weights *, size_t row, float *to);

/* y (m, n): rows of x brought to a mean square of one, times weight (n). */
void weft_norm(const float *x, const float *weight, float eps, float *y, size_t m, size_t n);
void weft_silu(const float *x, float *y, size_t count);

/* One token of each of m lines of n logits, of those that `allowed` (m, n), bytes, has where it is not NULL. Temperature 0: the
 * first of the largest. Else drawn: the weights are e^((x - largest) / temperature), none below min_p, and the token is the first
 * at which their running sum exceeds uniform, which is below 1, times the whole. Sums are of WEFT_DRAW_BLOCK numbers, in lanes,
 * then of these one after the other. With top_k below n (0: all) or top_p below 1 the tokens are drawn in the order of falling logits, equal ones in
 * that of tokens: of the first top_k those before which the weights sum up to less than top_p of the top_k's. problems: 2 where logits are
 * not finite (the largest, or any is no number), else 1 where no token is left, else 0. */
enum { WEFT_DRAW_BLOCK = 64 };
struct weft_choice {
    size_t m, n;
    const float *logits;
    const uint8_t *allowed;
    const float *temperature, *min_p, *top_p, *uniform; /* (m); `uniform` NULL: of no line that draws */
    const int32_t *top_k;                               /* (m) */
    int32_t *tokens, *problems;
};
void weft_choose(const struct weft_choice *);

/* Of each of m lines, which `lines` names among those of n logits: the log-probability of its token in `tokens`, which has one of every
 * line, and the `count` likeliest tokens in the order of weft_choice with theirs. chosen (m), likeliest and values (m, count); count <= n. */
struct weft_logprobs {
    size_t m, n, count;
    const float *logits;
    const int32_t *lines, *tokens;
    float *chosen;
    int32_t *likeliest;
    float *values;
};
void weft_logprobs(const struct weft_logprobs *);

/* Rotary positions: y = x, m rows of n numbers, of which the first 2 * half are rotated: neighbours, or numbers `half` apart.
 * Rows of x lie `x_rows` together, `x_stride` numbers from the next ones; those of y follow each other. Row m has the angles
 * (`half` cosines, then as many sines) of place m / batch_rows * batch_angles + (m % batch_rows) / repeat % tokens. */
struct weft_rotation {
    const float *x, *angles;
    float *y;
    size_t m, n, half, x_rows, x_stride, batch_rows, batch_angles, repeat, tokens;
    int of_neighbours;
};
void weft_rotate(const struct weft_rotation *);

/* Cosines, then sines, of m lines: of place * scale * rate for each of `half` rates. places (m, half), or with `is_shared` (m): one for
 * all rates of a line. angles (m, 2 * half). */
struct weft_angles {
    size_t m, half;
    const float *places, *rates;
    float scale;
    int is_shared;
    float *angles;
};
void weft_angles(const struct weft_angles *);

/* Attention's weights: c (m, span) = softmax(q (m, k) * keys^T (span, k) + bias). With `tokens` the rows are those of as many
 * last tokens, head after head, each of which sees up to itself. */
struct weft_scores {
    size_t m, span, k, ldq, ldk, ld_bias, tokens;
    const float *q, *keys, *bias; /* bias (m, span) or NULL */
    float *c;
};
void weft_scores(const struct weft_scores *);

/* One sequence's new tokens and where its keys and values are: (heads, places, dim) each. */
struct weft_row {
    float *keys, *values;
    size_t places;  /* between two heads */
    size_t first;   /* tokens before its new ones */
    size_t tokens;  /* new ones */
    size_t line;    /* of its first new token in q and in the output */
};

/* Attention of all new tokens of all rows, each over its own row up to itself. q has lines of `q_stride` numbers, which begin
 * with the heads' dim numbers each: brought to a mean square of one and times `norm` (dim) where that is not NULL, then rotated
 * by the line's angles where these are not NULL (as in weft_rotation). With `is_gated` each head's numbers are followed by dim
 * gates, whose sigmoids its output is multiplied by. The output has lines of heads * dim. */
struct weft_attention {
    const struct weft_row *rows;
    size_t num_rows, heads, kv_heads, dim, q_stride, half;
    const float *q, *angles, *norm;
    float scale, eps;
    int of_neighbours, is_gated;
    float *output;
};
void weft_attend(const struct weft_attention *);

/* Writes new tokens behind those a row has: of line l the numbers at l * stride, kv_heads * dim of them, normed and rotated as
 * above, into the row's `keys`. */
struct weft_append {
    const struct weft_row *rows;
    size_t num_rows, kv_heads, dim, stride, half;
    const float *x, *angles, *norm;
    float eps;
    int of_neighbours;
};
void weft_append(const struct weft_append *);

/* States (height, width) of many heads and the tokens they go through, a linear recurrence, also with the delta rule:
 * s = s * gate; u = value, or beta * (value - s . key); s = s + u * key; output = s . query. Of head h of row b and token t the
 * numbers begin at b * row + t * token + h * head of their array; key and query heads are shared by `groups` heads. Width is
 * a multiple of WEFT_LANES and height of WEFT_STATE_ROWS. */
struct weft_series {
    const float *at;
    size_t row, token, head;
};
struct weft_recurrence {
    size_t rows, heads, groups, tokens, height, width;
    struct weft_series value, key, query, gate, beta; /* beta.at NULL: no delta rule */
    int is_gate_wide;                                 /* a gate per number of the key, else one */
    const float *first;                               /* states before: (rows, heads, height, width) */
    float *states;                                    /* after: the same, or with `keeps` (rows, tokens, heads, ...) */
    int keeps;
    float *output; /* (rows, tokens, heads, height) */
    size_t output_tokens; /* from one row of it to the next: as many as there are, or more */
};
void weft_recur(const struct weft_recurrence *);

/* A gated delta layer between its two products. A line has the channels (queries and keys of `key_heads` heads of `width`
 * numbers, values of `heads` heads of `height`), then as many z as values, then a b and an a for each head. The channels go
 * through a causal convolution over `taps` tokens and SiLU; keys and queries are brought to a mean square of one and weighed;
 * the delta rule has gate e^(-rate * softplus(a + bias)) and beta sigmoid(b); its output is normed, weighed and times SiLU(z). */
struct weft_delta_layer {
    size_t key_heads, heads, width, height, taps;
    const float *convolution;            /* (taps, channels) */
    const float *query_norm, *key_norm;  /* (width) */
    const float *rate, *bias;            /* (heads) */
    const float *norm;                   /* (height) */
    float key_eps, eps;
};
struct weft_delta {
    const struct weft_delta_layer *layer;
    size_t rows, tokens;
    size_t stride;       /* lines from one row's first token to the next one's: `tokens`, or more */
    const float *lines;  /* (rows * stride, line) */
    const float *before; /* the channels of the taps - 1 tokens before: (rows, taps - 1, channels) */
    const float *first;  /* states before, and after, as in weft_recurrence */
    float *states;
    float *after; /* as `before`: of the last tokens, or with `keeps` of those before and all new ones */
    int keeps;
    float *output; /* (rows * stride, heads * height), or NULL: only channels and states are asked for */
};
void weft_delta(const struct weft_delta *);

/* Runs work over [0, total) in pieces of one, by several threads where so many multiplications are worth it. Each must be whole by itself. */
void weft_share(void (*work)(const void *subject, size_t begin, size_t end), const void *subject, size_t total, size_t multiplications);

int weft_api(void);

#ifdef __cplusplus
}
#endif
#endif
