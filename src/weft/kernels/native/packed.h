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

static const float FOUR_BIT_WHOLES[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

static inline float float_of_bits(uint32_t bits) {
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

static inline uint32_t bits_of_float(float number) {
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    return bits;
}

static inline float float_of_half(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7FFF;
    if (rest >= 0x7C00) return float_of_bits(sign | 0x7F800000 | (rest & 0x3FF) << 13);
    /* Exact, also for what is subnormal as a half. No branch for the sign, which nobody can predict. */
    return float_of_bits(sign | bits_of_float(float_of_bits(rest << 13) * 0x1p112f));
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

/* The first `count` codes of one group of a row. */
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
enum { GROUPS_AT_ONCE = 64 }; /* whose scales are converted together */

/* Scales, or biases, of `count` groups as float32. */
INLINE void NAME(scales)(enum weft_kind kind, const void *from, size_t at, size_t count, float *to) {
    if (kind == WEFT_F32)
        memcpy(to, (const float *)from + at, count * sizeof(float));
    else if (kind == WEFT_F16 || kind == WEFT_BF16)
        for (size_t i = 0; i < count; i += 16) {
            const __mmask16 there = count - i < 16 ? (__mmask16)((1u << (count - i)) - 1) : (__mmask16)0xFFFF;
            const __m256i halves = _mm256_maskz_loadu_epi16(there, (const uint16_t *)from + at + i);
            const __m512 wide = kind == WEFT_F16 ? _mm512_cvtph_ps(halves)
                                                 : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
            _mm512_storeu_ps(to + i, wide);
        }
    else
        for (size_t i = 0; i < count; i++) to[i] = number_at(kind, from, at + i);
}

/* How sixteen codes lie in up to sixteen bytes: each lane takes the two bytes its code begins in, and shifts it down. */
struct NAME(layout) {
    __m512i places, shifts, mask;
    __m512 numbers; /* of codes of up to four bits, before their scale */
};

INLINE struct NAME(layout) NAME(layout_of)(const int bits, int is_affine) {
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), one = _mm512_set1_epi32(1);
    const __m512i begins = _mm512_mullo_epi32(lanes, _mm512_set1_epi32(bits)), byte = _mm512_srli_epi32(begins, 3);
    const __m512i next = _mm512_min_epi32(_mm512_add_epi32(byte, one), _mm512_set1_epi32(15));
    const __m512i upper = _mm512_set1_epi32((int)0x80800000), mask = _mm512_set1_epi32((1 << bits) - 1);
    const __m512 codes = _mm512_cvtepi32_ps(_mm512_and_si512(lanes, mask));
    return (struct NAME(layout)){_mm512_or_si512(_mm512_or_si512(byte, _mm512_slli_epi32(next, 8)), upper),
                                 _mm512_and_si512(begins, _mm512_set1_epi32(7)), mask, is_affine ? codes : _mm512_loadu_ps(FOUR_BIT_FLOATS)};
}

/* One group of codes of up to four bits, which choose among the group's numbers, or of more, which are computed each. */
INLINE void NAME(expand_group)(const int bits, const struct NAME(layout) *l, const uint8_t *row, size_t count, __m512 scale, __m512 bias, float *to) {
    const __m512 table = _mm512_add_ps(_mm512_mul_ps(l->numbers, scale), bias);
    for (size_t i = 0; i < count; i += 16, row += 2 * bits) {
        __m512 found;
        if (bits == 8) {
            const __m512 codes = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)row)));
            found = _mm512_add_ps(_mm512_mul_ps(codes, scale), bias);
        } else {
            __m512i bytes; /* in every quarter */
            int64_t eight;
            if (bits == 4) /* spread as it is loaded, which costs no shuffle */
                memcpy(&eight, row, sizeof eight), bytes = _mm512_set1_epi64(eight);
            else
                bytes = _mm512_broadcast_i32x4(_mm_maskz_loadu_epi8((__mmask16)((1u << 2 * bits) - 1), row));
            const __m512i codes = _mm512_srlv_epi32(_mm512_shuffle_epi8(bytes, l->places), l->shifts);
            found = bits <= 4 ? _mm512_permutexvar_ps(codes, table)
                              : _mm512_add_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_and_si512(codes, l->mask)), scale), bias);
        }
        _mm512_storeu_ps(to + i, found);
    }
}

INLINE void NAME(expand_bits)(const int bits, const struct weft_weights *w, size_t n, float *to) {
    const size_t groups = w->k / w->group, group = w->group;
    const uint8_t *row = (const uint8_t *)w->codes + n * row_bytes_of(w);
    const int is_affine = w->kind == WEFT_AFFINE;
    const struct NAME(layout) layout = NAME(layout_of)(bits, is_affine);
    float scales[GROUPS_AT_ONCE], biases[GROUPS_AT_ONCE];
    for (size_t first = 0; first < groups; first += GROUPS_AT_ONCE) {
        const size_t count = groups - first < GROUPS_AT_ONCE ? groups - first : GROUPS_AT_ONCE;
        NAME(scales)(is_affine ? w->scale_kind : w->kind, w->scales, n * groups + first, count, scales);
        if (is_affine)
            NAME(scales)(w->scale_kind, w->biases, n * groups + first, count, biases);
        else
            for (size_t i = 0; i < count; i++) biases[i] = -0.0f; /* changes nothing, not even a zero's sign */
        for (size_t i = 0; i < count; i++, row += group / 8 * bits, to += group)
            NAME(expand_group)(bits, &layout, row, group, _mm512_set1_ps(scales[i]), _mm512_set1_ps(biases[i]), to);
    }
}

TARGET static void NAME(expand_packed)(const struct weft_weights *w, size_t n, float *to) {
    switch (w->bits) {
        case 2: NAME(expand_bits)(2, w, n, to); return;
        case 3: NAME(expand_bits)(3, w, n, to); return;
        case 4: NAME(expand_bits)(4, w, n, to); return;
        case 5: NAME(expand_bits)(5, w, n, to); return;
        case 6: NAME(expand_bits)(6, w, n, to); return;
        default: NAME(expand_bits)(8, w, n, to); return;
    }
}
#elif WIDTH == 8
/* Eight codes. Of five or six bits the four lower ones lie in the first 32 bits, the others in those that begin with the fifth. */
INLINE __m256i NAME(eight_codes)(const int bits, const uint8_t *row) {
    if (bits == 8) return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)row));
    const __m256i mask = _mm256_set1_epi32((1 << bits) - 1);
    uint64_t all = 0;
    uint32_t four = 0;
    if (bits <= 4) {
        const __m256i shifts = _mm256_mullo_epi32(_mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0), _mm256_set1_epi32(bits));
        memcpy(&four, row, (size_t)bits);
        return _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32((int)four), shifts), mask);
    }
    const __m256i shifts = _mm256_set_epi32(3 * bits, 2 * bits, bits, 0, 3 * bits, 2 * bits, bits, 0);
    memcpy(&all, row, (size_t)bits);
    const __m256i halves = _mm256_set_m128i(_mm_set1_epi32((int)(all >> 4 * bits)), _mm_set1_epi32((int)all));
    return _mm256_and_si256(_mm256_srlv_epi32(halves, shifts), mask);
}

INLINE void NAME(expand_affine)(const int bits, const struct weft_weights *w, size_t n, float *to) {
    const size_t groups = w->k / w->group;
    const uint8_t *row = (const uint8_t *)w->codes + n * row_bytes_of(w);
    for (size_t group = 0; group < groups; group++) {
        const __m256 scale = _mm256_set1_ps(number_at(w->scale_kind, w->scales, n * groups + group));
        const __m256 bias = _mm256_set1_ps(number_at(w->scale_kind, w->biases, n * groups + group));
        for (size_t i = 0; i < w->group; i += 8, row += bits, to += 8)
            _mm256_storeu_ps(to, _mm256_add_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(NAME(eight_codes)(bits, row)), scale), bias));
    }
}

/* Numbers of four bits: three bits choose the size, the fourth is the sign. */
INLINE void NAME(expand_floats)(const struct weft_weights *w, size_t n, float *to) {
    const size_t groups = w->k / w->group;
    const uint8_t *row = (const uint8_t *)w->codes + n * row_bytes_of(w);
    const __m256 sizes = _mm256_loadu_ps(FOUR_BIT_FLOATS);
    for (size_t group = 0; group < groups; group++) {
        const __m256 scale = _mm256_set1_ps(number_at(w->kind, w->scales, n * groups + group));
        for (size_t i = 0; i < w->group; i += 8, row += 4, to += 8) {
            const __m256i codes = NAME(eight_codes)(4, row), signs = _mm256_slli_epi32(_mm256_srli_epi32(codes, 3), 31);
            const __m256 found = _mm256_xor_ps(_mm256_permutevar8x32_ps(sizes, codes), _mm256_castsi256_ps(signs));
            _mm256_storeu_ps(to, _mm256_mul_ps(found, scale));
        }
    }
}

TARGET static void NAME(expand_packed)(const struct weft_weights *w, size_t n, float *to) {
    if (w->kind != WEFT_AFFINE) {
        NAME(expand_floats)(w, n, to);
        return;
    }
    switch (w->bits) {
        case 2: NAME(expand_affine)(2, w, n, to); return;
        case 3: NAME(expand_affine)(3, w, n, to); return;
        case 4: NAME(expand_affine)(4, w, n, to); return;
        case 5: NAME(expand_affine)(5, w, n, to); return;
        case 6: NAME(expand_affine)(6, w, n, to); return;
        default: NAME(expand_affine)(8, w, n, to); return;
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
