/* The prefix index and the block pool: index.py, pool.py and eviction.py over the same arrays. */
#pragma once

#include "_core.h"

static inline int64_t bucket(const Core *c, uint64_t word) {
    return (int64_t)((word >> 32) * (uint64_t)c->num_blocks >> 32);
}

/* Keys ahead of the one at hand, so that their buckets are in the cache when their turn comes. */
#define AHEAD 12

static inline void index_fetch(const Core *c, const uint8_t *keys, int64_t i, int64_t count) {
    uint64_t word;
    if (i + AHEAD >= count) return;
    memcpy(&word, keys + (i + AHEAD) * c->key_words * 8, 8);
    __builtin_prefetch(&c->links[bucket(c, word)]);
}

static void index_insert(Core *c, int32_t block, const uint8_t *key, int group) {
    uint64_t *words = c->words + block * c->key_words;
    memcpy(words, key, (size_t)c->key_words * 8);
    words[c->key_words - 1] ^= (uint64_t)group;
    c->owner[block] = (uint8_t)group;
    c->links[c->num_blocks + block] = 0;
    int64_t at = bucket(c, words[0]);
    while (c->links[at]) at = c->num_blocks + c->links[at];
    c->links[at] = block;
    c->size[0]++;
}

static void index_remove(Core *c, int32_t block) {
    int64_t at = bucket(c, c->words[block * c->key_words]);
    while (c->links[at] && c->links[at] != block) at = c->num_blocks + c->links[at];
    if (!c->links[at]) return;
    c->links[at] = c->links[c->num_blocks + block];
    c->size[0]--;
}

static int32_t index_find(const Core *c, const uint8_t *key, int group) {
    uint64_t want[8];
    memcpy(want, key, (size_t)c->key_words * 8);
    want[c->key_words - 1] ^= (uint64_t)group;
    int32_t block = c->links[bucket(c, want[0])];
    while (block && memcmp(c->words + block * c->key_words, want, (size_t)c->key_words * 8))
        block = c->links[c->num_blocks + block];
    return block;
}

static int falling(const void *a, const void *b) {
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x < y) - (x > y);
}

static inline int64_t pool_unkeyed(const Core *c) {
    return c->scalars[TOP] + c->num_blocks - c->scalars[FRESH];
}

static inline int64_t pool_available(const Core *c) {
    return c->num_blocks - 1 - c->scalars[USED] - c->scalars[FENCED_COUNT];
}

/* Whether pool_take(count) will succeed here. */
static int pool_can_take(const Core *c, int64_t count) {
    return count <= pool_available(c) && (c->lru || count <= pool_unkeyed(c));
}

/* Block, group and key of a block that is about to lose it. */
static void note_taken(Core *c, int32_t block) {
    int32_t *to = note(&c->taken, 2 + 2 * c->key_words);
    if (!to) return;
    to[0] = block;
    to[1] = c->owner[block];
    memcpy(to + 2, c->words + block * c->key_words, (size_t)c->key_words * 8);
}

static void pool_take(Core *c, int64_t count, int32_t *out) {
    int64_t *s = c->scalars, taken = 0;
    if (count >= SORT_FROM && s[PUSHED] >= SORT_FROM) {
        int64_t from = s[TOP] - 2 * (s[PUSHED] + count);
        if (from < 0) from = 0;
        qsort(c->stack + from, (size_t)(s[TOP] - from), sizeof(int32_t), falling);
        s[PUSHED] = 0;
    }
    while (taken < count && s[TOP]) out[taken++] = c->stack[--s[TOP]];
    while (taken < count && s[FRESH] < c->num_blocks) out[taken++] = (int32_t)s[FRESH]++;
    int64_t evicted = count - taken;
    while (taken < count) {
        int64_t slot = c->queue[HEAD]++ % c->ring_size;
        int32_t block = c->ring[slot];
        if (c->place[block] != slot) continue;
        c->place[block] = -1;
        c->queue[LIVE]--;
        if (c->listening) note_taken(c, block);
        if (c->links) index_remove(c, block);
        c->keyed[block] = 0;
        out[taken++] = block;
    }
    if (evicted && c->counters) {
        c->counters[REMOVED] += evicted;
        c->counters[VERSION]++;
    }
    for (int64_t i = 0; i < count; i++) {
        c->state[out[i]] = OWNED_;
        c->ref[out[i]] = 1;
    }
    s[USED] += count;
}

static int known(const Core *c, int64_t block) { return block >= 0 && block < c->num_blocks; }

/* Whether every block of the list is owned once and can be released here; no lasting change. */
static int pool_can_release(Core *c, const Ints *in) {
    if (!c->lru || c->queue[TAIL] - c->queue[HEAD] + in->count > c->ring_size) return 0;
    int64_t seen, i, good = 1;
    for (seen = 0; good && seen < in->count; seen++) {
        int64_t block = ints_at(in, seen);
        if (!known(c, block) || (block && c->state[block] != OWNED_)) good = 0, seen--;
        else c->place[block] = (int32_t)seen; /* owned blocks have no place: room to find repeats */
    }
    for (i = 0; i < seen; i++) {
        int64_t block = ints_at(in, i);
        if (block) good &= c->place[block] == (int32_t)i;
        c->place[block] = -1;
    }
    c->place[0] = 0;
    return (int)good;
}

static void pool_release(Core *c, const Ints *in) {
    int64_t *s = c->scalars;
    for (int64_t i = 0; i < in->count; i++) {
        int32_t block = (int32_t)ints_at(in, i);
        if (!block || --c->ref[block]) continue;
        s[USED]--;
        if (c->keyed[block]) {
            int64_t slot = c->queue[TAIL]++ % c->ring_size;
            c->state[block] = EVICTABLE_;
            c->ring[slot] = block;
            c->place[block] = (int32_t)slot;
            c->queue[LIVE]++;
        } else {
            c->state[block] = FREE_;
            c->stack[s[TOP]++] = block;
            s[PUSHED]++;
        }
    }
}
