/* Numbers in float32, bfloat16 and float16. */
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

enum { FLOAT32, BFLOAT16, FLOAT16, INT8 };

INLINE float half(uint16_t bits) {
#ifdef __F16C__
    return _cvtsh_ss(bits);
#else
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, rest = bits & 0x7fff, word;
    float value;
    if (rest >= 0x7c00) word = sign | 0x7f800000 | (rest & 0x3ff) << 13;
    else if (rest >= 0x400) word = sign | ((rest << 13) + 0x38000000);
    else { value = (float)rest * 0x1p-24f; return sign ? -value : value; }
    memcpy(&value, &word, 4);
    return value;
#endif
}

INLINE uint16_t to_half(float value) {
#ifdef __F16C__
    return _cvtss_sh(value, 0);
#else
    uint32_t word;
    memcpy(&word, &value, 4);
    uint32_t sign = word >> 16 & 0x8000, rest = word & 0x7fffffff;
    if (rest > 0x7f800000) return sign | 0x7e00;
    if (rest >= 0x477ff000) return sign | 0x7c00;
    if (rest < 0x38800000) return sign | (uint16_t)rintf(fabsf(value) * 0x1p24f);
    rest += 0xfff + (rest >> 13 & 1);
    return sign | (rest - 0x38000000) >> 13;
#endif
}

INLINE float get(int type, const void *from, long i) {
    if (type == FLOAT32) return ((const float *)from)[i];
    if (type == FLOAT16) return half(((const uint16_t *)from)[i]);
    uint32_t word = (uint32_t)((const uint16_t *)from)[i] << 16;
    float value;
    memcpy(&value, &word, 4);
    return value;
}

INLINE uint16_t to_bfloat16(float value) {
    uint32_t word;
    memcpy(&word, &value, 4);
    if ((word & 0x7fffffff) > 0x7f800000) return word >> 16 | 0x40;
    return (word + 0x7fff + (word >> 16 & 1)) >> 16;
}

INLINE void put(int type, void *to, long i, float value) {
    if (type == FLOAT32) ((float *)to)[i] = value;
    else ((uint16_t *)to)[i] = type == FLOAT16 ? to_half(value) : to_bfloat16(value);
}

/* e to the x, to 1e-7 of it; 0 for -inf */
INLINE float exponential(float x) {
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    float n = rintf(x * 1.44269504f);
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t bits = ((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return x <= -87.0f ? 0.0f : p * power;
}

INLINE long least(long a, long b) { return a < b ? a : b; }
