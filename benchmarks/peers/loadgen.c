/* A load generator on one thread, cheap enough not to be what is measured.
 *
 *     cc -O2 -o loadgen loadgen.c && ./loadgen -p PORT -c 64 [-n CHUNKS] [-r RATE] [-a RAMP] [-w WARMUP] [-s SECONDS] FILE...
 *
 * Every FILE is a whole HTTP request; each time one is drawn at random. Two marks in it are filled in without changing
 * its length: sixteen `#` become a number that no other request has, and five `@` the chunks to ask for, which are
 * CHUNKS (0: one JSON answer), but random for the first request of a connection, so that streams end evenly.
 *
 * Closed loop: each connection sends its next request when its answer is complete. With -r, requests leave at random
 * moments (Poisson) so many a second, and their times count from the moment they were due. A connection that fails is
 * counted and opened again after 50 ms.
 *
 * `begin` and `end` are printed at the borders of the window, then a line of JSON; the load goes on for a moment after
 * `end`, so that who reads CPU clocks there does not also see a thousand connections being closed.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <math.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define NS_PER_S 1000000000ull
#define COOLDOWN_NS (NS_PER_S / 10)
#define RETRY_NS (NS_PER_S / 20)
#define EVENTS 256
#define TEMPLATES_MAX 64
#define HEAD_BYTES_MAX 8192
#define STAMP_BYTES 21
#define NUMBER_MARK "################"
#define CHUNKS_MARK "@@@@@"

typedef struct Template {
    char *bytes;
    size_t len;
    /* Where the marks are; both at the end where there are none, so that nothing is filled in. */
    size_t number_at, chunks_at;
} Template;

typedef struct Samples {
    uint64_t *ns;
    size_t count, room;
} Samples;

enum Framing { HEAD, LENGTH, CHUNK_SIZE, CHUNK_DATA, CHUNK_END, TRAILER };

typedef struct Conn {
    int fd;
    bool busy, seen_before, closing, want_out;
    uint64_t sent_ns, last_ns, retry_ns;
    struct Conn *next; /* among those that wait to be opened again */
    /* The request. */
    const Template *template;
    char number[17], chunks[8];
    size_t written;
    long chunks_asked, chunks_seen;
    /* The answer: its framing, and how much of a stamp was seen. */
    enum Framing framing;
    char head[HEAD_BYTES_MAX + 1];
    size_t head_len;
    uint64_t left;
    char size_line[20];
    size_t size_len;
    int stamp_seen;
    uint64_t stamp_ns;
} Conn;

static Template templates[TEMPLATES_MAX];
static int template_count, port, conn_count = 64;
static long chunks;
static double rate, ramp_s, warmup_s = 0.5, window_s = 3;
static int epoll_fd;
static Conn *conns, **idle;
static int idle_count, opened;
static Conn *retry_head, *retry_tail;
static enum { WARMUP, WINDOW, COOLDOWN, OVER } phase;
static uint64_t begin_ns, end_ns, request_number, random_state;
static uint64_t requests, chunks_total, bytes_total, skipped;
static Samples latency, ttft, transit, gap;
enum Failure { CANNOT_CONNECT, BAD_STATUS, CLOSED, WRONG_CHUNKS, NOT_HTTP, FAILURES };
static const char *failure_names[] = {"cannot connect", "status", "closed in an answer", "chunks missing", "not HTTP"};
static uint64_t failures[FAILURES];
static char first_bad_head[200];

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * NS_PER_S + (uint64_t)t.tv_nsec;
}

static uint64_t random_bits(void) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

static void die(const char *what) {
    perror(what);
    exit(1);
}

static void sample(Samples *s, uint64_t ns) {
    if (s->count == s->room && !(s->ns = realloc(s->ns, (s->room = s->room * 2 + 65536) * sizeof *s->ns))) die("realloc");
    s->ns[s->count++] = ns;
}

/* --- sending -------------------------------------------------------------------------------------------------------- */

static void fail(Conn *c, enum Failure why, uint64_t t);

/* The request as pieces: the template with the marks filled in, from what is written already. */
static int pieces(const Conn *c, struct iovec *out) {
    const Template *t = c->template;
    bool number_first = t->number_at < t->chunks_at;
    struct { size_t at, len; const char *text; } marks[2] = {
        {t->number_at, strlen(NUMBER_MARK), c->number}, {t->chunks_at, strlen(CHUNKS_MARK), c->chunks}};
    size_t at = 0;
    int count = 0;
    for (int i = 0; i <= 2; i++) {
        int mark = number_first ? i : 1 - i;
        size_t until = i < 2 ? marks[mark].at : t->len;
        struct iovec both[2] = {{t->bytes + at, until - at}, {NULL, 0}};
        if (i < 2 && until < t->len) both[1] = (struct iovec){(void *)marks[mark].text, marks[mark].len};
        for (int k = 0; k < 2; at += both[k++].iov_len) {
            size_t skip = c->written > at ? c->written - at : 0;
            if (skip < both[k].iov_len)
                out[count++] = (struct iovec){(char *)both[k].iov_base + skip, both[k].iov_len - skip};
        }
    }
    return count;
}

static void watch(Conn *c, bool out) {
    if (c->want_out == out) return;
    c->want_out = out;
    struct epoll_event event = {.events = EPOLLIN | (out ? (uint32_t)EPOLLOUT : 0), .data.ptr = c};
    epoll_ctl(epoll_fd, EPOLL_CTL_MOD, c->fd, &event);
}

static void write_request(Conn *c) {
    struct iovec parts[5];
    while (c->written < c->template->len) {
        ssize_t sent = writev(c->fd, parts, pieces(c, parts));
        if (sent < 0) {
            /* Whatever else is wrong with the connection is seen, and counted, by reading from it. */
            watch(c, errno == EAGAIN);
            return;
        }
        c->written += (size_t)sent;
    }
    watch(c, false);
}

static void open_conn(Conn *c) {
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int one = 1;
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    if (c->fd < 0) die("socket");
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    c->want_out = true;
    struct epoll_event event = {.events = EPOLLIN | EPOLLOUT, .data.ptr = c};
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, c->fd, &event);
    if (connect(c->fd, (struct sockaddr *)&address, sizeof address) && errno != EINPROGRESS) die("connect");
}

/* Starts the next request; `t` is when it was due, which is where its times count from. */
static void start(Conn *c, uint64_t t) {
    c->busy = true;
    c->closing = false;
    c->sent_ns = t;
    c->last_ns = 0;
    c->template = &templates[random_bits() % (uint64_t)template_count];
    c->chunks_asked = chunks;
    if (chunks && !c->seen_before && !rate) c->chunks_asked = 1 + (long)(random_bits() % (uint64_t)chunks);
    c->seen_before = true;
    /* Spread over all bits, so that numbers in a row have no beginning in common. */
    sprintf(c->number, "%016llx", (unsigned long long)(++request_number * 0x9e3779b97f4a7c15ull));
    sprintf(c->chunks, "%5ld", c->chunks_asked);
    c->written = c->head_len = c->size_len = 0;
    c->chunks_seen = c->stamp_seen = 0;
    c->framing = HEAD;
    if (c->fd < 0) open_conn(c);
    else write_request(c);
}

static void close_conn(Conn *c) {
    if (c->fd >= 0) close(c->fd);
    c->fd = -1;
}

static void finish(Conn *c, uint64_t t) {
    if (chunks && c->chunks_seen != c->chunks_asked) {
        fail(c, WRONG_CHUNKS, t);
        return;
    }
    c->busy = false;
    if (phase == WINDOW) {
        requests++;
        sample(&latency, t - c->sent_ns);
    }
    if (c->closing) close_conn(c);
    if (rate) idle[idle_count++] = c;
    else start(c, t);
}

static void fail(Conn *c, enum Failure why, uint64_t t) {
    failures[why]++;
    c->busy = false;
    close_conn(c);
    c->retry_ns = t + RETRY_NS;
    c->next = NULL;
    *(retry_head ? &retry_tail->next : &retry_head) = c;
    retry_tail = c;
}

/* --- reading -------------------------------------------------------------------------------------------------------- */

static void chunk_came(Conn *c, uint64_t t) {
    c->chunks_seen++;
    if (phase == WINDOW) {
        chunks_total++;
        sample(&transit, t > c->stamp_ns ? t - c->stamp_ns : 0);
        if (c->last_ns) sample(&gap, t - c->last_ns);
        else sample(&ttft, t - c->sent_ns);
    }
    c->last_ns = t;
}

/* Looks for stamps in the next piece of an answer; a piece may end within one. */
static void scan(Conn *c, const char *data, size_t len, uint64_t t) {
    if (phase == WINDOW) bytes_total += len;
    for (const char *end = data + len; data < end;) {
        if (!c->stamp_seen) {
            const char *found = memchr(data, '@', (size_t)(end - data));
            if (!found) return;
            data = found + 1;
            c->stamp_seen = 1;
            c->stamp_ns = 0;
            continue;
        }
        char byte = *data++;
        bool fits = c->stamp_seen == 1 ? byte == 'T' : byte >= '0' && byte <= '9';
        if (fits && c->stamp_seen > 1) c->stamp_ns = c->stamp_ns * 10 + (uint64_t)(byte - '0');
        c->stamp_seen = fits ? c->stamp_seen + 1 : 0;
        if (c->stamp_seen == STAMP_BYTES) {
            c->stamp_seen = 0;
            chunk_came(c, t);
        }
    }
}

/* Takes the head once it is whole. Returns how many of the bytes belong to it, 0 if the connection was given up. */
static size_t take_head(Conn *c, const char *data, size_t len, uint64_t t) {
    size_t old = c->head_len, more = len < HEAD_BYTES_MAX - old ? len : HEAD_BYTES_MAX - old;
    memcpy(c->head + old, data, more);
    c->head_len += more;
    c->head[c->head_len] = 0;
    char *end = strstr(c->head, "\r\n\r\n");
    if (!end) {
        if (c->head_len < HEAD_BYTES_MAX) return more;
        fail(c, NOT_HTTP, t);
        return 0;
    }
    end[2] = 0;
    if (strncmp(c->head + 8, " 200", 4)) {
        if (!*first_bad_head) snprintf(first_bad_head, sizeof first_bad_head, "%.*s %.*s", (int)strcspn(c->head, "\r"),
                                       c->head, (int)(len < 120 ? len : 120), end + 4 - c->head < (long)len ? end + 4 : "");
        fail(c, BAD_STATUS, t);
        return 0;
    }
    c->closing = strcasestr(c->head, "\nconnection: close") != NULL;
    const char *length = strcasestr(c->head, "\ncontent-length:");
    if (strcasestr(c->head, "\ntransfer-encoding: chunked")) c->framing = CHUNK_SIZE;
    else if (length) c->left = strtoull(length + 16, NULL, 10), c->framing = LENGTH;
    else {
        fail(c, NOT_HTTP, t);
        return 0;
    }
    return (size_t)(end - c->head) + 4 - old;
}

/* Follows the framing of an answer through what was read; everything else is counted in `scan`. */
static void take(Conn *c, const char *data, size_t len, uint64_t t) {
    const char *end = data + len;
    while (data < end && c->busy) {
        size_t here = (size_t)(end - data);
        switch (c->framing) {
        case HEAD:
            data += take_head(c, data, here, t);
            break;
        case LENGTH:
        case CHUNK_DATA:
            if (here > c->left) here = c->left;
            scan(c, data, here, t);
            data += here;
            c->left -= here;
            if (!c->left && c->framing == CHUNK_DATA) c->framing = CHUNK_END;
            else if (!c->left) finish(c, t);
            break;
        case CHUNK_SIZE:
            if (*data != '\n' && c->size_len < sizeof c->size_line - 1) c->size_line[c->size_len++] = *data;
            if (*data++ == '\n') {
                c->size_line[c->size_len] = 0;
                c->left = strtoull(c->size_line, NULL, 16);
                c->size_len = 0;
                c->framing = c->left ? CHUNK_DATA : TRAILER;
            }
            break;
        case CHUNK_END:
            if (*data++ == '\n') c->framing = CHUNK_SIZE;
            break;
        case TRAILER:
            /* A line with nothing in it ends the answer. */
            if (*data == '\n' && !c->size_len) finish(c, t);
            else c->size_len = *data == '\n' ? 0 : c->size_len + (*data != '\r');
            data++;
            break;
        }
    }
}

static void receive(Conn *c) {
    static char buffer[1 << 18];
    ssize_t got = recv(c->fd, buffer, sizeof buffer, 0);
    uint64_t t = now_ns();
    if (got > 0 && c->busy) take(c, buffer, (size_t)got, t);
    else if (got < 0 && errno == EAGAIN) return;
    else if (c->busy) fail(c, c->head_len || c->written ? CLOSED : CANNOT_CONNECT, t);
    else if (got <= 0) close_conn(c); /* an idle connection that was closed; its next request opens another */
}

/* --- the run ---------------------------------------------------------------------------------------------------------- */

/* Sends all that is due now; returns when the next is. */
static uint64_t send_due(uint64_t t, uint64_t started_ns) {
    static uint64_t next_ns;
    while (retry_head && retry_head->retry_ns <= t) {
        Conn *c = retry_head;
        retry_head = c->next;
        if (rate) idle[idle_count++] = c;
        else start(c, t);
    }
    uint64_t due = retry_head ? retry_head->retry_ns : UINT64_MAX;
    if (rate) {
        if (!next_ns) next_ns = started_ns;
        for (; next_ns <= t; next_ns += (uint64_t)(-log((double)((random_bits() >> 11) + 1) * 0x1p-53) / rate * 1e9)) {
            if (idle_count) start(idle[--idle_count], next_ns);
            else if (opened < conn_count) start(&conns[opened++], next_ns);
            else skipped++;
        }
        return next_ns < due ? next_ns : due;
    }
    for (; opened < conn_count; start(&conns[opened++], t)) {
        uint64_t opens_ns = started_ns + (uint64_t)(ramp_s * 1e9 * opened / conn_count);
        if (opens_ns > t) return opens_ns < due ? opens_ns : due;
    }
    return due;
}

static int ascending(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static void print_samples(const char *name, Samples *s) {
    if (s->count) qsort(s->ns, s->count, sizeof *s->ns, ascending);
    printf("\"%s\":", name);
    if (!s->count) printf("null,");
    else printf("{\"count\":%zu,\"p50_us\":%.1f,\"p99_us\":%.1f,\"max_us\":%.1f},", s->count, (double)s->ns[s->count / 2] / 1e3,
                (double)s->ns[(size_t)((double)s->count * 0.99)] / 1e3, (double)s->ns[s->count - 1] / 1e3);
}

static void print_result(void) {
    int streams = 0;
    for (int i = 0; i < conn_count; i++) streams += conns[i].busy && conns[i].last_ns;
    printf("{\"window_s\":%.6f,\"requests\":%llu,\"chunks\":%llu,\"bytes\":%llu,\"skipped\":%llu,\"streams\":%d,",
           (double)(end_ns - begin_ns) / 1e9, (unsigned long long)requests, (unsigned long long)chunks_total,
           (unsigned long long)bytes_total, (unsigned long long)skipped, streams);
    print_samples("latency", &latency);
    print_samples("ttft", &ttft);
    print_samples("transit", &transit);
    print_samples("gap", &gap);
    printf("\"failures\":{");
    for (int i = 0, first = 1; i < FAILURES; i++)
        if (failures[i]) printf("%s\"%s\":%llu", first ? "" : ",", failure_names[i], (unsigned long long)failures[i]), first = 0;
    printf("}}\n");
    if (*first_bad_head) fprintf(stderr, "first refusal: %s\n", first_bad_head);
}

static void load(Template *t, const char *path) {
    FILE *file = fopen(path, "rb");
    if (!file || fseek(file, 0, SEEK_END)) die(path);
    t->len = (size_t)ftell(file);
    rewind(file);
    if (!(t->bytes = malloc(t->len + 1)) || fread(t->bytes, 1, t->len, file) != t->len) die(path);
    fclose(file);
    const char *number = memmem(t->bytes, t->len, NUMBER_MARK, strlen(NUMBER_MARK));
    const char *count = memmem(t->bytes, t->len, CHUNKS_MARK, strlen(CHUNKS_MARK));
    t->number_at = number ? (size_t)(number - t->bytes) : t->len;
    t->chunks_at = count ? (size_t)(count - t->bytes) : t->len;
}

static void say(const char *word) {
    puts(word);
    fflush(stdout);
}

int main(int argc, char **argv) {
    signal(SIGPIPE, SIG_IGN);
    for (int option; (option = getopt(argc, argv, "p:c:n:r:a:w:s:")) > 0;) switch (option) {
        case 'p': port = atoi(optarg); break;
        case 'c': conn_count = atoi(optarg); break;
        case 'n': chunks = atol(optarg); break;
        case 'r': rate = atof(optarg); break;
        case 'a': ramp_s = atof(optarg); break;
        case 'w': warmup_s = atof(optarg); break;
        case 's': window_s = atof(optarg); break;
        default: return 2;
        }
    for (; optind < argc && template_count < TEMPLATES_MAX; optind++) load(&templates[template_count++], argv[optind]);
    if (!port || !template_count || conn_count < 1 || chunks > 99999) {
        fprintf(stderr, "usage: loadgen -p PORT [-c CONNECTIONS] [-n CHUNKS] [-r RATE] [-a RAMP_S] [-w WARMUP_S] [-s WINDOW_S] FILE...\n");
        return 2;
    }
    conns = calloc((size_t)conn_count, sizeof *conns);
    idle = calloc((size_t)conn_count, sizeof *idle);
    if (!conns || !idle) die("calloc");
    for (int i = 0; i < conn_count; i++) conns[i].fd = -1;
    epoll_fd = epoll_create1(0);
    uint64_t started_ns = now_ns();
    /* Numbers of two runs must differ, or the second would find its prompts cached. */
    random_state = request_number = started_ns;
    static struct epoll_event events[EVENTS];
    uint64_t border_ns = started_ns + (uint64_t)((ramp_s + warmup_s) * 1e9);
    for (uint64_t t = started_ns; phase != OVER; t = now_ns()) {
        /* The window is what it became, not what it should have been: a busy machine may wake this process late. */
        if (t >= border_ns) switch (++phase) {
            case WINDOW:
                begin_ns = t;
                border_ns = t + (uint64_t)(window_s * 1e9);
                say("begin");
                break;
            case COOLDOWN:
                end_ns = t;
                border_ns = t + COOLDOWN_NS;
                say("end");
                break;
            default:
                break;
            }
        uint64_t due = send_due(t, started_ns), now = now_ns();
        if (border_ns < due) due = border_ns;
        uint64_t wait = due > now ? due - now : 0;
        struct timespec timeout = {.tv_sec = (time_t)(wait / NS_PER_S), .tv_nsec = (long)(wait % NS_PER_S)};
        int count = epoll_pwait2(epoll_fd, events, EVENTS, &timeout, NULL);
        for (int i = 0; i < count; i++) {
            Conn *c = events[i].data.ptr;
            if (c->fd >= 0 && events[i].events & EPOLLOUT) write_request(c);
            if (c->fd >= 0 && events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) receive(c);
        }
    }
    print_result();
    return 0;
}
