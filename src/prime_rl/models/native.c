/* Kernels of the embedded engine on CPUs. Compiled once per machine by native.py, which also holds the signatures.
 *
 * Activations and accumulation are float32; the key/value cache is float32 or bfloat16 (the upper half of a float32).
 * Work is shared by OpenMP threads when there is enough of it. Vectors are GCC/Clang vector extensions, so the same
 * source serves every instruction set. `LANES` positions or dimensions are two vectors.
 */

#include <stdint.h>
#include <string.h>

#define LANES 16
#define ROWS 4        /* query rows that share one pass over keys and values */
#define COLS 2        /* columns of a product that share one pass over its rows; the remainder is 1 */
#define PANEL 16      /* columns of a product that one thread computes for all rows */
#define STRIP 256     /* positions whose scores are held at a time */
#define MAX_DIM 256   /* largest head size */
#define CHUNK 64      /* tokens that the search for the drawn one skips at a time */
#define SMALL 4096    /* elements below which threads cost more than they give */

static int threads = 1;
void set_threads(int count) { threads = count; }

#ifdef __AVX512F__
#define WIDTH 16
#else
#define WIDTH 8
#endif
#define PARTS (LANES / WIDTH)

typedef float vec __attribute__((vector_size(4 * WIDTH)));
typedef int32_t ivec __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t uvec __attribute__((vector_size(4 * WIDTH)));
typedef float loose_vec __attribute__((vector_size(4 * WIDTH), aligned(4)));
typedef uint16_t half_vec __attribute__((vector_size(2 * WIDTH), aligned(2)));

static inline vec load(const float *p) { return *(const loose_vec *)p; }
static inline void store(float *p, vec x) { *(loose_vec *)p = x; }
static inline vec splat(float x) { return x - (vec){0}; }
static inline vec load_bf16(const uint16_t *p) { return (vec)(__builtin_convertvector(*(const half_vec *)p, uvec) << 16); }

static inline uint16_t to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 64); /* stays a NaN */
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);              /* to nearest, ties to even */
}

static inline float sum_of(vec x) {
    for (int half = WIDTH / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; lane++) x[lane] += x[lane + half];
    return x[0];
}

static inline vec larger(vec a, vec b) {
    ivec more = a > b;
    return (vec)(((ivec)a & more) | ((ivec)b & ~more));
}

static inline float largest_of(vec x) {
    for (int half = WIDTH / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; lane++) x[lane] = x[lane] > x[lane + half] ? x[lane] : x[lane + half];
    return x[0];
}

/* e**x to about one part in 10**7; arguments are clamped to +-87. */
static inline vec exp_of(vec x) {
    ivec low = x < splat(-87.0f), high = x > splat(87.0f);
    x = (vec)(((ivec)x & ~low & ~high) | ((ivec)splat(-87.0f) & low) | ((ivec)splat(87.0f) & high));
    vec scaled = x * splat(1.44269504f);
    vec half = (vec)(((ivec)scaled & (ivec)splat(-0.0f)) | (ivec)splat(0.5f));
    ivec whole = __builtin_convertvector(scaled + half, ivec);
    vec n = __builtin_convertvector(whole, vec);
    vec r = x - n * splat(0.693359375f) - n * splat(-2.12194440e-4f);
    vec p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    p = p * r * r + r + splat(1.0f);
    return p * (vec)((whole + 127) << 23);
}

/* -- attention ------------------------------------------------------------------------------------------------- */

typedef struct {
    int64_t num_sequences, num_heads, num_kv_heads, head_dim, block_size, max_blocks;
    int64_t q_stride, k_stride, v_stride; /* elements from one token to the next */
    int64_t cache_bf16;
} Shape;

/* Write the keys [T, K, D] and values [T, K, D] of T tokens to their slots: keys[block][kv head][d][offset],
 * values[block][kv head][offset][d]. */
void paged_write(const Shape *s, int64_t num_tokens, const float *k, const float *v, void *keys, void *values,
                 const int32_t *blocks, const int32_t *offsets) {
    const int64_t kv = s->num_kv_heads, dim = s->head_dim, size = s->block_size;
#pragma omp parallel for schedule(static) num_threads(threads) if (num_tokens * kv * dim > SMALL)
    for (int64_t t = 0; t < num_tokens; t++) {
        for (int64_t h = 0; h < kv; h++) {
            const float *from_k = k + t * s->k_stride + h * dim, *from_v = v + t * s->v_stride + h * dim;
            int64_t base = (blocks[t] * kv + h) * dim * size;
            if (s->cache_bf16) {
                uint16_t *to_k = (uint16_t *)keys + base + offsets[t];
                uint16_t *to_v = (uint16_t *)values + base + offsets[t] * dim;
                for (int64_t d = 0; d < dim; d++) to_k[d * size] = to_bf16(from_k[d]);
                for (int64_t d = 0; d < dim; d++) to_v[d] = to_bf16(from_v[d]);
            } else {
                float *to_k = (float *)keys + base + offsets[t];
                for (int64_t d = 0; d < dim; d++) to_k[d * size] = from_k[d];
                memcpy((float *)values + base + offsets[t] * dim, from_v, dim * sizeof(float));
            }
        }
    }
}

/* scores[r][0..15] of `rows` queries (q[d * ROWS + r]) against 16 positions of transposed keys. */
static inline __attribute__((always_inline)) void scores16(int rows, int bf16, const float *q, const void *keys,
                                                           int64_t dim, int64_t stride, float *scores) {
    vec sum[ROWS][PARTS];
    for (int r = 0; r < rows; r++)
        for (int part = 0; part < PARTS; part++) sum[r][part] = splat(0.0f);
    for (int64_t d = 0; d < dim; d++)
        for (int part = 0; part < PARTS; part++) {
            const int64_t at = d * stride + part * WIDTH;
            const vec key = bf16 ? load_bf16((const uint16_t *)keys + at) : load((const float *)keys + at);
            for (int r = 0; r < rows; r++) sum[r][part] += splat(q[d * ROWS + r]) * key;
        }
    for (int r = 0; r < rows; r++)
        for (int part = 0; part < PARTS; part++) store(scores + r * STRIP + part * WIDTH, sum[r][part]);
}

/* acc[r][d] += sum over 16 positions of weights[r][position] * values[position][d]. */
static inline __attribute__((always_inline)) void mix16(int rows, int bf16, const float *weights, const void *values,
                                                        int64_t dim, float *acc) {
    for (int64_t d = 0; d < dim; d += LANES) {
        vec sum[ROWS][PARTS];
        for (int r = 0; r < rows; r++)
            for (int part = 0; part < PARTS; part++) sum[r][part] = load(acc + r * MAX_DIM + d + part * WIDTH);
        for (int64_t j = 0; j < LANES; j++)
            for (int part = 0; part < PARTS; part++) {
                const int64_t at = j * dim + d + part * WIDTH;
                const vec value = bf16 ? load_bf16((const uint16_t *)values + at) : load((const float *)values + at);
                for (int r = 0; r < rows; r++) sum[r][part] += splat(weights[r * STRIP + j]) * value;
            }
        for (int r = 0; r < rows; r++)
            for (int part = 0; part < PARTS; part++) store(acc + r * MAX_DIM + d + part * WIDTH, sum[r][part]);
    }
}

/* Fold a strip of `count` (multiple of 16) scores into running maxima, sums and accumulators of one row; positions
 * from `visible` on are hidden. The scores become weights. */
static inline void soften(float *scores, int64_t count, int64_t visible, float *maximum, float *total, float *acc,
                          int64_t dim) {
    for (int64_t j = visible < 0 ? 0 : visible; j < count; j++) scores[j] = -__builtin_inff();
    vec top = splat(*maximum);
    for (int64_t j = 0; j < count; j += WIDTH) top = larger(load(scores + j), top);
    const float highest = largest_of(top);
    vec sum = splat(0.0f);
    for (int64_t j = 0; j < count; j += WIDTH) {
        vec w = exp_of(load(scores + j) - splat(highest));
        if (j + WIDTH > visible)
            for (int lane = 0; lane < WIDTH; lane++)
                if (j + lane >= visible) w[lane] = 0.0f;
        store(scores + j, w);
        sum += w;
    }
    if (highest > *maximum) {
        const vec shrink = *total == 0.0f ? splat(0.0f) : exp_of(splat(*maximum - highest));
        *total *= shrink[0];
        for (int64_t d = 0; d < dim; d += WIDTH) store(acc + d, load(acc + d) * shrink);
        *maximum = highest;
    }
    *total += sum_of(sum);
}

/* Ask for the next block of the table: blocks lie anywhere in memory, and the hardware sees no pattern. */
static inline void prefetch(const char *from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, 3);
}

/* Attention of up to ROWS query rows of one sequence and kv head. Row r is (token (first + r) / group of the
 * sequence's new tokens, head (first + r) % group of the kv head); it sees `seen[r]` positions. */
static inline __attribute__((always_inline)) void attend_rows(const Shape *s, int rows, int bf16, const float *q,
                                                              const void *keys, const void *values,
                                                              const int32_t *table, int64_t head, const int64_t *seen,
                                                              float *acc, float *total) {
    float scores[ROWS * STRIP];
    float maximum[ROWS];
    const int64_t dim = s->head_dim, size = s->block_size, width = bf16 ? 2 : 4;
    for (int r = 0; r < rows; r++) {
        maximum[r] = -3.0e38f;
        total[r] = 0.0f;
        memset(acc + r * MAX_DIM, 0, dim * sizeof(float));
    }
    const int64_t last = seen[rows - 1];
    const int64_t step = dim * size * width; /* bytes of one block and head */
#define BLOCK(base, position) ((const char *)(base) + (table[(position) / size] * s->num_kv_heads + head) * step)
    for (int64_t strip = 0; strip < last; strip += STRIP) {
        int64_t count = last - strip < STRIP ? last - strip : STRIP;
        for (int64_t j = 0; j < count; j += LANES) {
            int64_t position = strip + j;
            if (position % size == 0 && position + size < last) prefetch(BLOCK(keys, position + size), step);
            scores16(rows, bf16, q, BLOCK(keys, position) + position % size * width, dim, size, scores + j);
        }
        prefetch(BLOCK(values, strip), step);
        int64_t padded = (count + LANES - 1) / LANES * LANES;
        for (int r = 0; r < rows; r++)
            soften(scores + r * STRIP, padded, seen[r] - strip, maximum + r, total + r, acc + r * MAX_DIM, dim);
        for (int64_t j = 0; j < count; j += LANES) {
            int64_t position = strip + j;
            if (position % size == 0 && position + size < last) prefetch(BLOCK(values, position + size), step);
            mix16(rows, bf16, scores + j, BLOCK(values, position) + position % size * dim * width, dim, acc);
        }
    }
#undef BLOCK
}

static void attend_tile(const Shape *s, int rows, const float *q, const void *keys, const void *values,
                        const int32_t *table, int64_t head, const int64_t *seen, float *acc, float *total) {
#define CASE(n)                                                                                  \
    case n:                                                                                      \
        if (s->cache_bf16) attend_rows(s, n, 1, q, keys, values, table, head, seen, acc, total); \
        else attend_rows(s, n, 0, q, keys, values, table, head, seen, acc, total);               \
        break;
    switch (rows) {
        CASE(1)
        CASE(2)
        CASE(3)
        CASE(4)
    }
#undef CASE
}

/* out[T, H, D] of queries q[T, H, D] over the cache. A tile is up to ROWS query rows of one sequence and kv head:
 * tiles[i] = (sequence, kv head, first row). starts[s] is a sequence's first token in T, lengths[s] its tokens now,
 * contexts[s] its positions known after this step. */
void paged_attention(const Shape *s, const float *q, const void *keys, const void *values, const int32_t *tables,
                     const int32_t *starts, const int32_t *lengths, const int32_t *contexts, int64_t num_tiles,
                     const int32_t *tiles, float scale, float *out) {
    const int64_t group = s->num_heads / s->num_kv_heads, dim = s->head_dim;
#pragma omp parallel for schedule(dynamic, 4) num_threads(threads)
    for (int64_t i = 0; i < num_tiles; i++) {
        float query[MAX_DIM * ROWS], acc[ROWS * MAX_DIM], total[ROWS];
        int64_t seen[ROWS], row_of[ROWS];
        const int64_t sequence = tiles[3 * i], head = tiles[3 * i + 1], first = tiles[3 * i + 2];
        const int64_t left = lengths[sequence] * group - first;
        const int rows = left < ROWS ? (int)left : ROWS;
        for (int r = 0; r < rows; r++) {
            const int64_t token = (first + r) / group, query_head = head * group + (first + r) % group;
            const float *from = q + (starts[sequence] + token) * s->q_stride + query_head * dim;
            for (int64_t d = 0; d < dim; d++) query[d * ROWS + r] = from[d] * scale;
            seen[r] = contexts[sequence] - lengths[sequence] + token + 1;
            row_of[r] = (starts[sequence] + token) * s->num_heads + query_head;
        }
        attend_tile(s, rows, query, keys, values, tables + sequence * s->max_blocks, head, seen, acc, total);
        for (int r = 0; r < rows; r++)
            for (int64_t d = 0; d < dim; d++) out[row_of[r] * dim + d] = acc[r * MAX_DIM + d] / total[r];
    }
}

/* -- pointwise ------------------------------------------------------------------------------------------------- */

static inline float inverse_rms(const float *x, int64_t n, float eps) {
    vec sum = splat(0.0f);
    int64_t i = 0;
    for (; i + WIDTH <= n; i += WIDTH) sum += load(x + i) * load(x + i);
    float total = sum_of(sum);
    for (; i < n; i++) total += x[i] * x[i];
    return 1.0f / __builtin_sqrtf(total / (float)n + eps);
}

/* x[T, N] += delta[T, N] where delta is given; out[T, N] = x / rms(x) * weight[N]. */
void add_rms_norm(int64_t num_tokens, int64_t n, float *x, const float *delta, const float *weight, float eps,
                  float *out) {
#pragma omp parallel for schedule(static) num_threads(threads) if (num_tokens * n > SMALL)
    for (int64_t t = 0; t < num_tokens; t++) {
        float *row = x + t * n, *to = out + t * n;
        if (delta)
            for (int64_t i = 0; i < n; i++) row[i] += delta[t * n + i];
        const float scale = inverse_rms(row, n, eps);
        for (int64_t i = 0; i < n; i++) to[i] = row[i] * scale * weight[i];
    }
}

/* Normalise (where weights are given) and rotate, in place, the first `heads` heads of each row of x[T, stride]:
 * `q_heads` of them by q_weight, the others by k_weight. cos and sin are [positions, D / 2]. */
void norm_rotate(int64_t num_tokens, int64_t stride, int64_t q_heads, int64_t heads, int64_t dim, float *x,
                 const float *q_weight, const float *k_weight, float eps, const float *cos, const float *sin,
                 const int64_t *positions) {
    const int64_t half = dim / 2;
#pragma omp parallel for schedule(static) num_threads(threads) if (num_tokens * heads * dim > SMALL)
    for (int64_t t = 0; t < num_tokens; t++) {
        const float *c = cos + positions[t] * half, *s = sin + positions[t] * half;
        for (int64_t h = 0; h < heads; h++) {
            float *row = x + t * stride + h * dim;
            const float *weight = h < q_heads ? q_weight : k_weight;
            if (weight) {
                const float scale = inverse_rms(row, dim, eps);
                for (int64_t d = 0; d < dim; d++) row[d] *= scale * weight[d];
            }
            for (int64_t d = 0; d < half; d++) {
                const float a = row[d], b = row[d + half];
                row[d] = a * c[d] - b * s[d];
                row[d + half] = b * c[d] + a * s[d];
            }
        }
    }
}

/* out[T, N] = silu(x[T, 0:N]) * x[T, N:2N]; N is a multiple of LANES. */
void silu_mul(int64_t num_tokens, int64_t n, const float *x, float *out) {
#pragma omp parallel for schedule(static) num_threads(threads) if (num_tokens * n > SMALL)
    for (int64_t t = 0; t < num_tokens; t++) {
        const float *gate = x + t * 2 * n, *up = gate + n;
        for (int64_t i = 0; i < n; i += WIDTH) {
            const vec g = load(gate + i);
            store(out + t * n + i, g / (splat(1.0f) + exp_of(-g)) * load(up + i));
        }
    }
}

/* -- products -------------------------------------------------------------------------------------------------- */

/* out[r][c] = x[r] . w[c] (+ bias[c]) for `rows` rows and `cols` columns. Each is summed in an order of its own. */
static inline __attribute__((always_inline)) void dots(int rows, int cols, int64_t n, const float *x, const float *w,
                                                       const float *bias, float *out, int64_t stride) {
    vec sum[ROWS][COLS];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < cols; c++) sum[r][c] = splat(0.0f);
    int64_t i = 0;
    for (; i + WIDTH <= n; i += WIDTH)
        for (int c = 0; c < cols; c++) {
            const vec weight = load(w + c * n + i);
            for (int r = 0; r < rows; r++) sum[r][c] += load(x + r * n + i) * weight;
        }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < cols; c++) {
            float total = sum_of(sum[r][c]);
            for (int64_t j = i; j < n; j++) total += x[r * n + j] * w[c * n + j];
            out[r * stride + c] = bias ? total + bias[c] : total;
        }
}

/* out[T, M] = x[T, N] times the transpose of w[M, N], plus bias[M] where it is given. No element depends on which other
 * rows there are, nor on the number of threads, to the last bit. */
void multiply(int64_t num_tokens, int64_t n, int64_t m, const float *x, const float *w, const float *bias, float *out) {
    const int64_t blocks = (m + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(static) num_threads(threads) if (num_tokens * n * m > 16 * SMALL)
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t end = (block + 1) * PANEL < m ? (block + 1) * PANEL : m;
        for (int64_t t = 0; t < num_tokens; t += ROWS) {
            const int64_t rows = num_tokens - t < ROWS ? num_tokens - t : ROWS;
            for (int64_t c = block * PANEL; c < end; c += COLS) {
                const float *from = x + t * n, *weights = w + c * n, *add = bias ? bias + c : 0;
                float *to = out + t * m + c;
                const int cols = end - c < COLS ? 1 : COLS;
#define CASE(r)                                                                    \
    case r:                                                                        \
        if (cols == COLS) dots(r, COLS, n, from, weights, add, to, m);             \
        else dots(r, 1, n, from, weights, add, to, m);                             \
        break;
                switch (rows) {
                    CASE(1)
                    CASE(2)
                    CASE(3)
                    CASE(4)
                }
#undef CASE
            }
        }
    }
}

/* -- sampling -------------------------------------------------------------------------------------------------- */

/* One token a row of logits[S, V] at its inverse temperature: the first whose cumulative probability exceeds draws[s],
 * and its logprob. The logits are overwritten. */
void sample(int64_t num_rows, int64_t vocab, float *logits, const float *inverse_temperatures, const float *draws,
            int64_t *ids, float *logprobs) {
#pragma omp parallel for schedule(static) num_threads(threads) if (num_rows * vocab > SMALL)
    for (int64_t s = 0; s < num_rows; s++) {
        float *row = logits + s * vocab;
        const vec scale = splat(inverse_temperatures[s]);
        const int64_t whole = vocab / WIDTH * WIDTH;
        float tail[WIDTH];
        for (int64_t i = 0; i < WIDTH; i++) tail[i] = whole + i < vocab ? row[whole + i] : -__builtin_inff();
        vec top = load(tail);
        for (int64_t i = 0; i < whole; i += WIDTH) top = larger(load(row + i), top);
        const vec highest = splat(largest_of(top));
        double total = 0.0;
        for (int64_t from = 0; from < whole; from += CHUNK) {
            vec sum = splat(0.0f);
            for (int64_t i = from; i < whole && i < from + CHUNK; i += WIDTH) {
                const vec weight = exp_of((load(row + i) - highest) * scale);
                store(row + i, weight);
                sum += weight;
            }
            total += sum_of(sum);
        }
        store(tail, exp_of((load(tail) - highest) * scale));
        for (int64_t i = whole; i < vocab; i++) total += row[i] = tail[i - whole];
        const double target = draws[s] * total;
        double passed = 0.0;
        int64_t id = 0;
        for (; id + CHUNK < vocab; id += CHUNK) {
            vec sum = splat(0.0f);
            for (int64_t i = id; i < id + CHUNK; i += WIDTH) sum += load(row + i);
            const float weight = sum_of(sum);
            if (passed + weight > target) break;
            passed += weight;
        }
        for (; id < vocab - 1; id++) {
            passed += row[id];
            if (passed > target) break;
        }
        ids[s] = id;
        logprobs[s] = __builtin_logf(row[id]) - (float)__builtin_log(total);
    }
}
