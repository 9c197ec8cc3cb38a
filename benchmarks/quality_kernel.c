/* A training step of the two-tower model: logistic loss, L2 of what is looked up, row-wise Adagrad. Lookups of one row are
   summed over the batch before it is updated, as FBGEMM does. And the codes of rows: the nearest entry of each book. */

#include <math.h>
#include <string.h>

typedef struct {
  float *weight;             /* (rows, dim) */
  const float *read;         /* (rows, dim), what lookups return: the weights, or their decoded copy */
  float *state;              /* (rows,), Adagrad's */
  const unsigned char *kept; /* (rows, dim), or NULL */
  float *sums;               /* (lookups of a batch, dim), zero between steps */
  int *slot;                 /* (rows,), where a row's sum is; -1 between steps */
  long *touched;             /* (lookups of a batch,) */
  long count;                /* 0 between steps */
} Table;

enum { AHEAD = 4, ENTRIES = 256, LANES = 16 };

static void prefetch(const Table *table, const float *rows, long row, long dim) {
  for (long d = 0; d < dim; d += 16) __builtin_prefetch(rows + row * dim + d);
  __builtin_prefetch(table->slot + row);
  __builtin_prefetch(table->state + row);
}

static float *sum_of(Table *table, long row, long dim) {
  int slot = table->slot[row];
  if (slot < 0) {
    slot = table->slot[row] = (int)table->count;
    table->touched[table->count++] = row;
  }
  return table->sums + slot * dim;
}

static void update(Table *table, long dim, float mean_of, float lr, float eps) {
  for (long i = 0; i < table->count; i++) {
    long row = table->touched[i];
    if (i + AHEAD < table->count) prefetch(table, table->weight, table->touched[i + AHEAD], dim);
    float *w = table->weight + row * dim, *g = table->sums + i * dim, squares = 0;
    for (long d = 0; d < dim; d++) squares += g[d] * g[d];
    table->state[row] += squares / mean_of;
    float scale = lr / (sqrtf(table->state[row]) + eps);
    for (long d = 0; d < dim; d++) w[d] -= scale * g[d];
    if (table->kept)
      for (long d = 0; d < dim; d++) w[d] *= table->kept[row * dim + d];
    memset(g, 0, dim * sizeof(float));
    table->slot[row] = -1;
  }
  table->count = 0;
}

static void look_up(float *sum, const float *rows, const long *which, long each, long dim) {
  for (long d = 0; d < dim; d++) sum[d] = 0;
  for (long e = 0; e < each; e++)
    for (long d = 0; d < dim; d++) sum[d] += rows[which[e] * dim + d];
}

/* tables: of users, items and biases. user_rows (batch, each) and item_rows (batch, items, each) are what is looked up and
   added; items (batch, items) are the biases, the interaction first. mean_of: columns that the row-wise mean is over. L2 is of
   the weights, not of their decoded copy: of the copy it would let weights drift from it. */
void step(Table tables[3], long batch, long items, long each, const long *user_rows, const long *item_rows,
          const long *biases, long dim, float mean_of, float l2, float lr) {
  float user[dim], item[dim], change[dim], own[dim];
  for (long b = 0; b < batch; b++) {
    if (b + AHEAD < batch) {
      for (long e = 0; e < each; e++) prefetch(&tables[0], tables[0].read, user_rows[(b + AHEAD) * each + e], dim);
      for (long i = 0; i < items * each; i++)
        prefetch(&tables[1], tables[1].read, item_rows[(b + AHEAD) * items * each + i], dim);
    }
    look_up(user, tables[0].read, user_rows + b * each, each, dim);
    look_up(own, tables[0].weight, user_rows + b * each, each, dim);
    for (long d = 0; d < dim; d++) change[d] = l2 * own[d];
    for (long i = 0; i < items; i++) {
      const long *rows = item_rows + (b * items + i) * each, bias = biases[b * items + i];
      float score = tables[2].weight[bias];
      look_up(item, tables[1].read, rows, each, dim);
      look_up(own, tables[1].weight, rows, each, dim);
      for (long d = 0; d < dim; d++) score += user[d] * item[d];
      float slope = 1.0f / (1.0f + expf(-score)) - (i == 0);
      for (long d = 0; d < dim; d++) change[d] += slope * item[d];
      for (long e = 0; e < each; e++) {
        float *sum = sum_of(&tables[1], rows[e], dim);
        for (long d = 0; d < dim; d++) sum[d] += slope * user[d] + l2 * own[d];
      }
      *sum_of(&tables[2], bias, 1) += slope;
    }
    for (long e = 0; e < each; e++) {
      float *sum = sum_of(&tables[0], user_rows[b * each + e], dim);
      for (long d = 0; d < dim; d++) sum[d] += change[d];
    }
  }
  update(&tables[0], dim, mean_of, lr, 1e-8f);
  update(&tables[1], dim, mean_of, lr, 1e-8f);
  update(&tables[2], 1, 1, lr, 1e-10f);
}

/* Of C, because compilers don't vectorize the search of the smallest. */
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int Ints __attribute__((vector_size(4 * LANES)));

/* For each row and group of columns the entry of its book with the smallest sum of (weight - entry)^2, the first of equals.
   books (groups, size, ENTRIES); halves (groups, ENTRIES): sum of entry^2 / 2. */
void nearest(const float *weight, long rows, long groups, long size, const float *books, const float *halves,
             unsigned char *codes) {
  Floats score[ENTRIES / LANES], best;
  Ints lanes, at, entry;
  for (int l = 0; l < LANES; l++) lanes[l] = l;
  for (long i = 0; i < rows * groups; i++) {
    const float *w = weight + i * size, *book = books + i % groups * size * ENTRIES;
    memcpy(score, halves + i % groups * ENTRIES, sizeof score);
    for (long s = 0; s < size; s++)
      for (int k = 0; k < ENTRIES; k++) ((float *)score)[k] -= w[s] * book[s * ENTRIES + k];
    best = score[0], at = entry = lanes;
    for (int k = 1; k < ENTRIES / LANES; k++) {
      Ints less = score[k] < best;
      entry += LANES;
      at = (less & entry) | (~less & at);
      best = (Floats)((less & (Ints)score[k]) | (~less & (Ints)best));
    }
    int first = 0;
    for (int l = 1; l < LANES; l++)
      if (best[l] < best[first] || (best[l] == best[first] && at[l] < at[first])) first = l;
    codes[i] = (unsigned char)at[first];
  }
}
