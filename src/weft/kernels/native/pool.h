/* A few threads that wait for columns to compute: they watch for a short while after each job, then sleep.
 *
 * The pool hands out column ranges and knows no arithmetic, so who computes what can not change a result. One caller at
 * a time has its help; a second caller meanwhile works alone instead of waiting. Used by sgemm.c only.
 */
#ifndef WEFT_POOL_H
#define WEFT_POOL_H

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <time.h>

enum { MAX_THREADS = 64 };
static const long WATCH_NANOSECONDS = 200000; /* about the pause between two products of a decode step */
static const unsigned OPEN = 1u << 31;        /* in pool.doors: workers may still join; the bits below count them */

typedef void work_function(const void *subject, size_t begin, size_t end);

static struct {
    pthread_mutex_t caller; /* held by whoever owns the job below */
    work_function *work;
    const void *subject;
    size_t total, chunk;
    atomic_size_t next; /* first column nobody has taken */
    atomic_uint doors;
    atomic_uint job;   /* counts jobs, so that a worker sees a new one */
    atomic_int asleep; /* workers that need a signal */
    atomic_int core;   /* where the caller runs */
    pthread_mutex_t bed;
    pthread_cond_t alarm;
    atomic_int threads; /* the caller included */
    int hired;          /* workers started so far */
} pool = {.caller = PTHREAD_MUTEX_INITIALIZER,
          .bed = PTHREAD_MUTEX_INITIALIZER,
          .alarm = PTHREAD_COND_INITIALIZER,
          .threads = 1};

static int pool_threads(void) { return atomic_load_explicit(&pool.threads, memory_order_relaxed); }

static inline void pool_pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static inline long pool_clock(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000L + now.tv_nsec;
}

static void pool_take_chunks(void) {
    for (;;) {
        size_t begin = atomic_fetch_add(&pool.next, pool.chunk);
        if (begin >= pool.total) return;
        size_t end = begin + pool.chunk;
        pool.work(pool.subject, begin, end < pool.total ? end : pool.total);
    }
}

/* Joins the job if its doors are open; the caller can not leave it before we have left. */
static void pool_join(void) {
    unsigned doors = atomic_load(&pool.doors);
    do {
        if (!(doors & OPEN)) return;
    } while (!atomic_compare_exchange_weak(&pool.doors, &doors, doors + 1));
    pool_take_chunks();
    atomic_fetch_sub(&pool.doors, 1);
}

static void pool_await_job(unsigned seen) {
    long deadline = pool_clock() + WATCH_NANOSECONDS;
    while (atomic_load(&pool.job) == seen) {
        for (int i = 0; i < 16 && atomic_load(&pool.job) == seen; i++) pool_pause();
        sched_yield(); /* watching must not take a core from somebody who has work */
        if (pool_clock() < deadline) continue;
        pthread_mutex_lock(&pool.bed);
        atomic_fetch_add(&pool.asleep, 1);
        while (atomic_load(&pool.job) == seen) pthread_cond_wait(&pool.alarm, &pool.bed);
        atomic_fetch_sub(&pool.asleep, 1);
        pthread_mutex_unlock(&pool.bed);
    }
}

/* Leaves the caller's core for any other: a worker there can only help while the caller waits. Some kernels start and
 * wake a thread beside whoever asked for it and take seconds to part the two (measured: 104 instead of 165 GFLOP/s). */
static void pool_step_aside(void) {
    cpu_set_t allowed, others;
    const int core = atomic_load(&pool.core);
    if (sched_getcpu() != core || sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
    others = allowed;
    CPU_CLR(core, &others);
    if (CPU_COUNT(&others) == 0) return;
    sched_setaffinity(0, sizeof others, &others);
    sched_setaffinity(0, sizeof allowed, &allowed);
}

static void *pool_worker(void *number) {
    unsigned seen = 0;
    for (;;) {
        pool_await_job(seen);
        seen = atomic_load(&pool.job);
        pool_step_aside();
        if ((ptrdiff_t)number < pool_threads() - 1) pool_join();
    }
    return NULL;
}

/* Workers are never joined: the end of the process ends them. Signals belong to the other threads. */
static void pool_hire(void) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (pool.hired < pool_threads() - 1) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, pool_worker, (void *)(ptrdiff_t)pool.hired) != 0) break;
        pthread_detach(thread);
        pool.hired++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void pool_announce(int may_wake) {
    atomic_store(&pool.core, sched_getcpu());
    atomic_store(&pool.next, 0);
    atomic_store(&pool.doors, OPEN);
    atomic_fetch_add(&pool.job, 1);
    if (!may_wake || atomic_load(&pool.asleep) == 0) return;
    pthread_mutex_lock(&pool.bed);
    pthread_cond_broadcast(&pool.alarm);
    pthread_mutex_unlock(&pool.bed);
}

static void pool_close(void) {
    atomic_fetch_and(&pool.doors, ~OPEN);
    for (unsigned turn = 1; atomic_load(&pool.doors) != 0; turn++) {
        pool_pause();
        if (turn % 256 == 0) sched_yield();
    }
}

/* Takes the pool for one caller if there is any help to have; sleepers count only if they may be woken. */
static int pool_take(int may_wake) {
    if (pool_threads() < 2 || pthread_mutex_trylock(&pool.caller) != 0) return 0;
    if (may_wake) pool_hire();
    if (pool.hired > 0 && (may_wake || atomic_load(&pool.asleep) < pool.hired)) return 1;
    pthread_mutex_unlock(&pool.caller);
    return 0;
}

/* Runs work over [0, total) in ranges of `chunk`. */
static void pool_run(work_function *work, const void *subject, size_t total, size_t chunk, int may_wake) {
    if (chunk >= total || !pool_take(may_wake)) {
        work(subject, 0, total);
        return;
    }
    pool.work = work;
    pool.subject = subject;
    pool.total = total;
    pool.chunk = chunk;
    pool_announce(may_wake);
    pool_take_chunks();
    pool_close();
    pthread_mutex_unlock(&pool.caller);
}

static int pool_set_threads(int threads) {
    return atomic_exchange(&pool.threads, threads < 1 ? 1 : threads > MAX_THREADS ? MAX_THREADS : threads);
}

/* A forked child has none of our threads: it begins with an empty pool and hires its own. */
static void pool_after_fork(void) {
    pthread_mutex_init(&pool.caller, NULL);
    pthread_mutex_init(&pool.bed, NULL);
    pthread_cond_init(&pool.alarm, NULL);
    atomic_store(&pool.doors, 0);
    atomic_store(&pool.asleep, 0);
    pool.hired = 0;
}

#endif
