/* Rows of packed weights as float32, included by kernels.h once for each instruction set.
 *
 * What must hold: the numbers are those of an expanded copy, bit for bit: a code times its scale, rounded, plus its bias,
 * rounded. Nothing is read behind a row's last code, scale or bias.
 */

#ifndef WEFT_PACKED_ONCE
#define WEFT_PACKED_ONCE
/* The sixteen numbers of four bits: a sign, two bits of exponent, one of mantissa. */
static const float FOUR_BIT_FLOATS[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                          -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

static inline float float_of_bits(uint32_t bits) {
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

static inline float float_of_half(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7FFF;
    if (rest >= 0x7C00) return float_of_bits(sign | 0x7F800000 | (rest & 0x3FF) << 13);
    const float size = float_of_bits(rest << 13) * 0x1p112f; /* exact, also for what is subnormal as a half */
    return sign ? -size : size;
}

/* Eight bits: a sign, four of exponent, three of mantissa. */
static inline float float_of_e4m3(uint8_t byte) {
    const uint32_t sign = (uint32_t)(byte & 0x80) << 24, rest = byte & 0x7F;
    if (rest == 0x7F) return float_of_bits(sign | 0x7FC00000);
    const float size = float_of_bits(rest << 20) * 0x1p120f;
    return sign ? -size : size;
}

static inline float number_at(enum weft_kind kind, const void *numbers, size_t i) {
    if (kind == WEFT_F32) return ((const float *)numbers)[i];
    if (kind == WEFT_F16) return float_of_half(((const uint16_t *)numbers)[i]);
    if (kind == WEFT_BF16) return float_of_bits((uint32_t)((const uint16_t *)numbers)[i] << 16);
    const uint8_t byte = ((const uint8_t *)numbers)[i];
    if (kind == WEFT_NVFP4) return float_of_e4m3(byte);
    return byte == 0 ? 0x1p-127f : float_of_bits((uint32_t)byte << 23); /* MXFP4: a power of two */
}

static inline size_t row_bytes_of(const struct weft_weights *w) { return (w->k * w->bits + 7) / 8; }

static inline uint32_t code_at(const uint8_t *row, size_t bits, size_t i) {
    const size_t at = i * bits;
    const uint32_t low = row[at / 8], next = at % 8 + bits > 8 ? row[at / 8 + 1] : 0;
    return (low | next << 8) >> at % 8 & ((1u << bits) - 1);
}
#endif

/* Codes `from` to `to` of one group. */
static inline TARGET void NAME(expand_codes)(const struct weft_weights *w, const uint8_t *row, size_t group, size_t count, float *to) {
    const size_t first = group * w->group, at = first * w->bits / 8;
    const enum weft_kind kind = w->kind == WEFT_AFFINE ? w->scale_kind : w->kind;
    const size_t place = (size_t)(row - (const uint8_t *)w->codes) / row_bytes_of(w) * (w->k / w->group) + group;
    const float scale = number_at(kind, w->scales, place);
    if (w->kind != WEFT_AFFINE) {
        for (size_t i = 0; i < count; i++) to[i] = FOUR_BIT_FLOATS[code_at(row, 4, first + i)] * scale;
        return;
    }
    const float bias = number_at(kind, w->biases, place);
    if (w->bits == 4)
        for (size_t i = 0; i < count; i += 2) {
            const uint32_t pair = row[at + i / 2];
            to[i] = (float)(pair & 15) * scale + bias;
            to[i + 1] = (float)(pair >> 4) * scale + bias;
        }
    else if (w->bits == 8)
        for (size_t i = 0; i < count; i++) to[i] = (float)row[at + i] * scale + bias;
    else
        for (size_t i = 0; i < count; i++) to[i] = (float)code_at(row, w->bits, first + i) * scale + bias;
}

#if WIDTH == 16
/* Sixteen codes of 1 to 8 bits are up to sixteen bytes: each lane gets the two bytes its code begins in, and shifts it down. */
INLINE __m512i NAME(codes)(const uint8_t *from, size_t bits, __m512i places, __m512i shifts) {
    const __m128i bytes = _mm_maskz_loadu_epi8((__mmask16)((1u << 2 * bits) - 1), from);
    return _mm512_srlv_epi32(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(bytes), places), shifts);
}

/* Codes of up to four bits choose among the sixteen numbers of their group, which are computed once. */
TARGET static void NAME(expand_packed)(const struct weft_weights *w, size_t n, float *to) {
    const uint8_t *row = (const uint8_t *)w->codes + n * row_bytes_of(w);
    const size_t bits = w->bits, groups = w->k / w->group;
    const enum weft_kind kind = w->kind == WEFT_AFFINE ? w->scale_kind : w->kind;
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i begins = _mm512_mullo_epi32(lanes, _mm512_set1_epi32((int)bits)), byte = _mm512_srli_epi32(begins, 3);
    const __m512i shifts = _mm512_and_si512(begins, _mm512_set1_epi32(7)), mask = _mm512_set1_epi32((1 << bits) - 1);
    const __m512i high = _mm512_slli_epi32(_mm512_min_epi32(_mm512_add_epi32(byte, _mm512_set1_epi32(1)), _mm512_set1_epi32(15)), 8);
    const __m512i places = _mm512_or_si512(_mm512_or_si512(byte, high), _mm512_set1_epi32((int)0x80800000));
    const __m512 numbers = w->kind == WEFT_AFFINE ? _mm512_cvtepi32_ps(_mm512_and_si512(lanes, mask)) : _mm512_loadu_ps(FOUR_BIT_FLOATS);
    for (size_t group = 0; group < groups; group++) {
        const __m512 scale = _mm512_set1_ps(number_at(kind, w->scales, n * groups + group));
        const __m512 bias = _mm512_set1_ps(w->kind == WEFT_AFFINE ? number_at(kind, w->biases, n * groups + group) : -0.0f);
        const __m512 table = _mm512_add_ps(_mm512_mul_ps(numbers, scale), bias);
        for (size_t i = 0; i < w->group; i += 16, row += 2 * bits, to += 16) {
            const __m512i codes = NAME(codes)(row, bits, places, shifts);
            const __m512 found = bits <= 4 ? _mm512_permutexvar_ps(codes, table)
                                           : _mm512_add_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_and_si512(codes, mask)), scale), bias);
            _mm512_storeu_ps(to, found);
        }
    }
}
#else
TARGET static void NAME(expand_packed)(const struct weft_weights *w, size_t n, float *to) {
    const uint8_t *row = (const uint8_t *)w->codes + n * row_bytes_of(w);
    for (size_t group = 0; group < w->k / w->group; group++, to += w->group) NAME(expand_codes)(w, row, group, w->group, to);
}
#endif

/* Row n of the weights. */
TARGET static void NAME(expand)(const struct weft_weights *w, size_t n, float *to) {
    const uint16_t *halves = (const uint16_t *)w->codes + n * w->k;
    if (w->kind == WEFT_F32)
        memcpy(to, (const float *)w->codes + n * w->k, w->k * sizeof(float));
    else if (w->kind == WEFT_BF16)
        for (size_t i = 0; i < w->k; i++) to[i] = float_of_bits((uint32_t)halves[i] << 16);
    else if (w->kind == WEFT_F16)
        for (size_t i = 0; i < w->k; i++) to[i] = float_of_half(halves[i]);
    else
        NAME(expand_packed)(w, n, to);
}
