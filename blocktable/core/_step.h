/* One step of the running rows: growth.py and keybook.py over the same arrays. */
#pragma once

#include "_cache.h"
#include "_sha256.h"

static int hashers_good(const Core *c, PyObject *hashers) {
    return PyList_CheckExact(hashers) && PyList_GET_SIZE(hashers) == c->max_rows;
}

static void hash_upto(Core *c, PyObject *hashers, int64_t row, int64_t blocks) {
    Sha *sha = &((Hasher *)PyList_GET_ITEM(hashers, row))->sha;
    for (int64_t n = c->num_hashed[row]; n < blocks; n++) {
        const int32_t *tokens = c->tokens + row * c->max_len + n * c->hash_size;
        sha_update(sha, (const uint8_t *)tokens, (size_t)c->hash_size * 4);
        sha_digest(sha, c->keys + (row * c->max_keys + n) * c->key_words * 8);
        c->num_hashed[row] = (int32_t)(n + 1);
    }
}

static void give_keys(Core *c, PyObject *hashers, GroupView *g, int group, int64_t row, int64_t upto) {
    hash_upto(c, hashers, row, upto * g->ratio);
    for (int64_t column = g->keyed[row]; column < upto; column++) {
        int32_t block = g->rows[row * g->width + column];
        if (!block || c->keyed[block]) continue; /* forks share blocks: keyed once */
        int64_t at = row * c->max_keys + (column + 1) * g->ratio - 1;
        index_insert(c, block, c->keys + at * c->key_words * 8, group);
        c->keyed[block] = 1;
        c->counters[STORED]++;
        int32_t *to = c->listening ? note(&c->given, 4) : NULL;
        if (to) to[0] = group, to[1] = (int32_t)row, to[2] = (int32_t)column, to[3] = block;
    }
    g->keyed[row] = (int32_t)upto;
    g->key_due[row] = (int32_t)((upto + 1) * g->block_size);
}

static int64_t shortage(const Core *c, const GroupView *g, int64_t row, int64_t total, int64_t ahead) {
    int64_t limit = total + ahead < c->max_len ? total + ahead : c->max_len;
    if (limit <= g->capacity[row]) return 0;
    if (!g->plain) return -1;
    int64_t more = (limit + g->block_size - 1) / g->block_size - g->counts[row];
    return g->aligned && more > 1 ? -1 : more;
}

/* Leading blocks that no token after the first `computed` ones attends to. */
static int64_t skipped_for(const GroupView *g, int64_t computed) {
    if (g->chunk) return computed / g->chunk * g->chunk / g->block_size;
    return computed <= g->back ? 0 : (computed - g->back) / g->block_size;
}

/* Columns of a row that are given up: start .. return value; empty if nothing is. */
static int64_t skip_range(const GroupView *g, int64_t row, int64_t computed, int64_t *start) {
    *start = g->skipped[row] > g->head ? g->skipped[row] : g->head;
    if (g->back < 0) return *start;
    int64_t stop = skipped_for(g, computed);
    return stop < g->counts[row] ? stop : g->counts[row];
}

/* Blocks to be given up, group by group, each row's highest column first; how many. */
static int64_t list_skipped(const Core *c, const Ints *rows, int32_t *out) {
    int64_t n = 0, start;
    for (int k = 0; k < c->num_groups; k++)
        for (int64_t i = 0; i < rows->count; i++) {
            const GroupView *g = &c->groups[k];
            int64_t row = ints_at(rows, i), stop = skip_range(g, row, c->num_computed[row], &start);
            for (int64_t column = stop - 1; column >= start; column--, n++)
                if (out) out[n] = g->rows[row * g->width + column];
        }
    return n;
}

static inline void widen(int32_t *lo, int32_t *hi, int64_t start, int64_t stop) {
    if (start < *lo) *lo = (int32_t)start;
    if (stop > *hi) *hi = (int32_t)stop;
}

/* As HostTable.null for one row. */
static void table_null(GroupView *g, int64_t row, int64_t start, int64_t stop) {
    int32_t *lo = &g->null_lo[row], *hi = &g->null_hi[row];
    memset(g->rows + row * g->width + start, 0, (size_t)(stop - start) * 4);
    if (*lo == INT32_MAX || (start <= *hi && stop >= *lo)) widen(lo, hi, start, stop);
    else widen(&g->lo[row], &g->hi[row], start, stop);
    g->log[g->log_n[0]++] = (int32_t)row;
    g->log_n[1] = 1;
}

/* Keys of states whose step is over, then the blocks in `gone` (list_skipped) leave their rows. */
static void release_skipped(Core *c, const Ints *rows, PyObject *hashers, const Ints *gone) {
    int64_t start;
    for (int k = 0; c->links && k < c->num_groups; k++) {
        GroupView *g = &c->groups[k];
        for (int64_t i = 0; g->deferred && i < rows->count; i++) {
            int64_t row = ints_at(rows, i), computed = c->num_computed[row];
            if (computed < g->key_due[row] || (g->aligned && computed % g->block_size)) continue;
            if (g->aligned) g->keyed[row] = (int32_t)(computed / g->block_size - 1);
            give_keys(c, hashers, g, k, row, computed / g->block_size);
        }
    }
    if (!gone->count) return;
    pool_release(c, gone);
    for (int k = 0; k < c->num_groups; k++) {
        GroupView *g = &c->groups[k];
        for (int64_t i = 0; i < rows->count; i++) {
            int64_t row = ints_at(rows, i), stop = skip_range(g, row, c->num_computed[row], &start);
            if (stop <= start) continue;
            table_null(g, row, start, stop);
            g->skipped[row] = (int32_t)stop;
        }
    }
}

/* Blocks the call needs; -1 = something only the NumPy code handles. */
static int64_t grow_plan(Core *c, const Ints *rows, const Ints *new_, const Ints *ahead, PyObject *hashers) {
    int64_t need = 0;
    for (int64_t i = 0; i < rows->count; i++) {
        int64_t row = ints_at(rows, i), n = ints_at(new_, i), a = ints_at(ahead, i);
        if (row < 0 || row >= c->max_rows || n < 0 || a < 0) return -1;
        int64_t total = c->num_computed[row] + n;
        if (total > c->max_len) return -1;
        if (c->links && Py_TYPE(PyList_GET_ITEM(hashers, row)) != &HasherType) return -1;
        for (int g = 0; g < c->num_groups; g++) {
            int64_t more = shortage(c, &c->groups[g], row, total, a);
            if (more < 0) return -1;
            need += more;
        }
    }
    return need;
}

static void grow_do(Core *c, const Ints *rows, const Ints *new_, const Ints *ahead, PyObject *hashers,
                    const int32_t *ids) {
    int64_t used = 0;
    for (int k = 0; k < c->num_groups; k++) {
        GroupView *g = &c->groups[k];
        for (int64_t i = 0; i < rows->count; i++) {
            int64_t row = ints_at(rows, i), total = c->num_computed[row] + ints_at(new_, i);
            int64_t more = shortage(c, g, row, total, ints_at(ahead, i));
            if (more <= 0) continue;
            int32_t count = g->counts[row], after = count + (int32_t)more;
            memcpy(g->rows + row * g->width + count, ids + used, (size_t)more * 4);
            used += more;
            g->counts[row] = after;
            g->capacity[row] = (int32_t)(after * g->block_size);
            widen(&g->lo[row], &g->hi[row], count, after);
            g->log[g->log_n[0]++] = (int32_t)row;
        }
    }
    for (int64_t i = 0; i < rows->count; i++)
        c->num_computed[ints_at(rows, i)] += (int32_t)ints_at(new_, i);
    for (int k = 0; c->links && k < c->num_groups; k++) {
        GroupView *g = &c->groups[k];
        for (int64_t i = 0; !g->deferred && i < rows->count; i++) {
            int64_t row = ints_at(rows, i), known_ = c->num_computed[row];
            if (known_ > c->num_tokens[row]) known_ = c->num_tokens[row];
            if (known_ >= g->key_due[row]) give_keys(c, hashers, g, k, row, known_ / g->block_size);
        }
    }
}
