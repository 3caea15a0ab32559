/* Faults from below, for tests: preloaded into a process, it makes calls on files under one folder fail, or kill the
 * process. Nothing happens until faults_set is called, which is per process; forked children inherit it. Built and used
 * by run.py. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { NOTHING = 0, FAIL = 1, KILL = 2 };

static struct {
    char root[4096];
    int kind, error, lasting, filled;
    volatile int countdown;
    volatile long seen;
} plan;
static volatile unsigned char below[1 << 16]; /* whether a descriptor is of a file under root */

void faults_set(const char *root, int kind, int countdown, int error, int lasting)
{
    strncpy(plan.root, root, sizeof plan.root - 1);
    plan.kind = kind, plan.countdown = countdown, plan.error = error, plan.lasting = lasting;
}

long faults_seen(void) { return plan.seen; }

static int is_below(const char *path)
{
    size_t length = strlen(plan.root);
    return length && path && !strncmp(path, plan.root, length);
}

/* Whether this call is to fail; does not return if it is to kill. */
static int hit(void)
{
    __sync_add_and_fetch(&plan.seen, 1);
    if (plan.kind == NOTHING)
        return 0;
    int left = __sync_sub_and_fetch(&plan.countdown, 1);
    if (left > 0 || (left < 0 && !plan.lasting))
        return 0;
    if (plan.kind == KILL) {
        kill(getpid(), SIGKILL);
        for (;;)
            pause();
    }
    errno = plan.error;
    return 1;
}

#define REAL(name) static typeof(&name) real; if (!real) real = (typeof(&name))dlsym(RTLD_NEXT, #name)
#define MODE(last) mode_t mode = 0; if (flags & (O_CREAT | O_TMPFILE)) { va_list rest; va_start(rest, last); mode = va_arg(rest, mode_t); va_end(rest); }
#define OPENED(call) int below_root = is_below(path) && (flags & (O_WRONLY | O_RDWR)); \
    if (below_root && hit()) return -1; \
    int descriptor = call; \
    if (descriptor >= 0 && descriptor < (int)sizeof below) below[descriptor] = below_root; \
    return descriptor;

int open(const char *path, int flags, ...) { REAL(open); MODE(flags) OPENED(real(path, flags, mode)) }
int open64(const char *path, int flags, ...) { REAL(open64); MODE(flags) OPENED(real(path, flags, mode)) }
int openat(int folder, const char *path, int flags, ...) { REAL(openat); MODE(flags) OPENED(real(folder, path, flags, mode)) }
int openat64(int folder, const char *path, int flags, ...) { REAL(openat64); MODE(flags) OPENED(real(folder, path, flags, mode)) }

static int is_mine(int descriptor) { return descriptor >= 0 && descriptor < (int)sizeof below && below[descriptor]; }

int close(int descriptor)
{
    REAL(close);
    if (descriptor >= 0 && descriptor < (int)sizeof below)
        below[descriptor] = 0;
    return real(descriptor);
}

/* A full disk takes part of the bytes before it refuses the rest. */
#define WRITTEN(partly, whole) if (is_mine(descriptor) && hit()) { \
        int error = errno; \
        if (error == ENOSPC && count > 1 && !plan.filled) { plan.filled = 1, plan.countdown = 1; return partly; } \
        errno = error; \
        return -1; \
    } \
    return whole;

ssize_t write(int descriptor, const void *data, size_t count)
{
    REAL(write);
    WRITTEN(real(descriptor, data, count / 2), real(descriptor, data, count))
}

ssize_t pwrite64(int descriptor, const void *data, size_t count, off64_t offset)
{
    REAL(pwrite64);
    WRITTEN(real(descriptor, data, count / 2, offset), real(descriptor, data, count, offset))
}

int fsync(int descriptor)
{
    REAL(fsync);
    if (is_mine(descriptor) && hit())
        return -1;
    return real(descriptor);
}

int rename(const char *before, const char *after)
{
    REAL(rename);
    return is_below(after) && hit() ? -1 : real(before, after);
}

int mkdir(const char *path, mode_t mode)
{
    REAL(mkdir);
    return is_below(path) && hit() ? -1 : real(path, mode);
}

int unlink(const char *path)
{
    REAL(unlink);
    return is_below(path) && hit() ? -1 : real(path);
}
