/* Mock vLLM replicas that cost a few microseconds an answer, so that what is measured is the proxy in front of them.
 *
 *     cc -O2 -o mockd mockd.c && ./mockd 4
 *
 * Serves so many replicas in one thread on free ports of 127.0.0.1 and prints their ports on one line. It ends when its
 * standard input does, so that no run can leave it behind.
 *
 * Standard members of the body steer an answer, because every proxy lets them through:
 *     "stream": true    a stream, otherwise one JSON answer of about 300 bytes
 *     "max_tokens": N   chunks of the stream
 *     "seed": US        microseconds between two chunks; 0 is as fast as the connection takes them
 *     "include_usage"   true adds the chunk with usage to the end of the stream
 * The first chunk leaves at once and the second after a random part of the gap, so that streams do not beat together.
 * Each content chunk carries "@T" and 19 digits: CLOCK_MONOTONIC in nanoseconds when it was sent.
 *
 * It is no server for the world: bodies need a content-length, and one request at a time is on a connection.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
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
#include <time.h>
#include <unistd.h>

#define REPLICAS_MAX 16
#define EVENTS 256
#define STAMP_DIGITS 19
#define NS_PER_S 1000000000ull
/* Of a large body the beginning and the end are kept, where the steering members are; what is between is only counted,
 * so that a hundred bodies of 10 MB do not fill the memory of the machine that is measured. */
#define HEAD_BYTES_MAX 16384
#define FRONT_BYTES 65536
#define TAIL_BYTES 4096
#define PENDING_BYTES 4096
#define TOKENS_MAX 16384

typedef struct Replica {
    int listener, running;
    uint64_t answered, prompt_bytes;
} Replica;

typedef struct Conn {
    int fd;
    Replica *replica;
    struct Conn *before, *after; /* neighbours in the pace list, while a chunk is due at a known time */
    bool paced, streaming, want_out, closing;
    uint64_t due_ns, gap_ns;
    long chunks_left;
    bool first, usage;
    long chunks;
    /* The request that is being read: its head and the front of its body, then the last bytes of a longer one. */
    char *front;
    size_t front_len, head_len, body_len, body_seen;
    char tail[TAIL_BYTES + 1];
    size_t tail_len;
    /* What the socket did not take; at most a chunk and the end of its stream. */
    char pending[PENDING_BYTES];
    size_t pending_len;
} Conn;

/* All streams of one gap are due in the order in which they were queued, so a list that is entered from its end is
 * sorted without searching; a run has one gap, or two. */
typedef struct Pace {
    uint64_t gap_ns;
    Conn *head, *tail;
} Pace;

static Replica replicas[REPLICAS_MAX];
static Pace paces[8];
static int epoll_fd, replica_count, pace_count;
static uint64_t random_state = 88172645463325252ull;

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * NS_PER_S + (uint64_t)t.tv_nsec;
}

static uint64_t random_below(uint64_t limit) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return limit ? random_state % limit : 0;
}

static void die(const char *what) {
    perror(what);
    exit(1);
}

/* --- what is answered -------------------------------------------------------------------------------------------- */

#define EVENT_HEAD "{\"id\":\"chatcmpl-8f1e5c0a9d2b4736\",\"object\":\"chat.completion.chunk\",\"created\":1790000000,\"model\":\"mock\",\"choices\":"
#define CONTENT_EVENT EVENT_HEAD "[{\"index\":0,\"delta\":{\"content\":\"@T%019d\"},\"logprobs\":null,\"finish_reason\":null,\"token_ids\":null}]}"
#define LAST_EVENT EVENT_HEAD "[{\"index\":0,\"delta\":{\"content\":\"\"},\"logprobs\":null,\"finish_reason\":\"length\",\"stop_reason\":null,\"token_ids\":null}]}"
#define USAGE_EVENT EVENT_HEAD "[],\"usage\":{\"prompt_tokens\":%ld,\"total_tokens\":%ld,\"completion_tokens\":%ld}}"
#define STREAM_HEAD "HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
#define CHAT_ANSWER "{\"id\":\"chatcmpl-8f1e5c0a9d2b4736\",\"object\":\"chat.completion\",\"created\":1790000000,\"model\":\"mock\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"The answer is forty-two.\"},\"logprobs\":null,\"finish_reason\":\"stop\",\"stop_reason\":null}],\"usage\":{\"prompt_tokens\":%ld,\"total_tokens\":%ld,\"completion_tokens\":8}}"
#define MODELS "{\"object\":\"list\",\"data\":[{\"id\":\"mock\",\"object\":\"model\",\"created\":1790000000,\"owned_by\":\"vllm\",\"root\":\"mock\",\"parent\":null,\"max_model_len\":131072,\"permission\":[]}]}"
/* What a router of SGLang asks a worker before it believes in it, and what vLLM says of its version. */
#define SERVER_INFO "{\"model_path\":\"mock\",\"served_model_name\":\"mock\",\"model_id\":\"mock\",\"tokenizer_path\":\"\",\"is_generation\":true,\"tp_size\":1,\"dp_size\":1,\"status\":\"ready\",\"version\":\"0.11.0\"}"

static char content_chunk[1024];
static size_t content_len, stamp_at;

/* One server-sent event as one HTTP chunk, as vLLM frames them. */
static size_t framed(char *out, const char *event) {
    return (size_t)sprintf(out, "%zx\r\ndata: %s\n\n\r\n", strlen(event) + 8, event);
}

static void prepare(void) {
    char event[512];
    sprintf(event, CONTENT_EVENT, 0);
    content_len = framed(content_chunk, event);
    stamp_at = (size_t)(strstr(content_chunk, "@T") - content_chunk) + 2;
}

static void stamp(void) {
    uint64_t t = now_ns();
    for (int i = STAMP_DIGITS - 1; i >= 0; i--, t /= 10) content_chunk[stamp_at + (size_t)i] = (char)('0' + t % 10);
}

/* --- connections --------------------------------------------------------------------------------------------------- */

static void unpace(Conn *c) {
    if (!c->paced) return;
    Pace *pace = paces;
    while (pace->gap_ns != c->gap_ns) pace++;
    *(c->before ? &c->before->after : &pace->head) = c->after;
    *(c->after ? &c->after->before : &pace->tail) = c->before;
    c->paced = false;
}

static void pace(Conn *c, uint64_t due_ns) {
    Pace *pace = paces;
    while (pace < paces + pace_count && pace->gap_ns != c->gap_ns) pace++;
    if (pace == paces + pace_count) {
        /* A gap that nobody uses any more makes room for a new one. */
        for (pace = paces; pace < paces + pace_count && pace->head;) pace++;
        if (pace == paces + 8) errno = ERANGE, die("more than eight different gaps at once");
        if (pace == paces + pace_count) pace_count++;
        pace->gap_ns = c->gap_ns;
    }
    c->due_ns = due_ns;
    c->paced = true;
    c->before = pace->tail;
    while (c->before && c->before->due_ns > due_ns) c->before = c->before->before;
    c->after = c->before ? c->before->after : pace->head;
    *(c->before ? &c->before->after : &pace->head) = c;
    *(c->after ? &c->after->before : &pace->tail) = c;
}

static void close_conn(Conn *c) {
    unpace(c);
    if (c->streaming) c->replica->running--;
    close(c->fd);
    free(c->front);
    free(c);
}

static void watch(Conn *c, bool out) {
    if (c->want_out == out) return;
    c->want_out = out;
    struct epoll_event event = {.events = EPOLLIN | (out ? (uint32_t)EPOLLOUT : 0), .data.ptr = c};
    epoll_ctl(epoll_fd, EPOLL_CTL_MOD, c->fd, &event);
}

/* Sends, and keeps what the socket does not take. False when the connection is of no use any more. */
static bool put(Conn *c, const char *data, size_t len) {
    if (!c->pending_len) {
        ssize_t sent = send(c->fd, data, len, MSG_NOSIGNAL);
        if (sent < 0 && errno != EAGAIN) return false;
        if (sent > 0) data += sent, len -= (size_t)sent;
    }
    if (!len) return true;
    if (c->pending_len + len > PENDING_BYTES) return false;
    memcpy(c->pending + c->pending_len, data, len);
    c->pending_len += len;
    watch(c, true);
    return true;
}

static bool answer(Conn *c, const char *type, const char *body, size_t len) {
    char head[256];
    int head_len = sprintf(head, "HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: %s\r\ncontent-length: %zu\r\n\r\n", type, len);
    if (len + (size_t)head_len <= 2048) {
        char whole[2048];
        memcpy(whole, head, (size_t)head_len);
        memcpy(whole + head_len, body, len);
        return put(c, whole, (size_t)head_len + len);
    }
    /* Only the tokens of a long prompt come here, and only from loopback: waiting is simpler than another buffer. */
    struct iovec { const char *base; size_t len; } parts[] = {{head, (size_t)head_len}, {body, len}};
    for (int i = 0; i < 2; i++)
        for (size_t done = 0; done < parts[i].len;) {
            ssize_t sent = send(c->fd, parts[i].base + done, parts[i].len - done, MSG_NOSIGNAL);
            if (sent < 0 && errno != EAGAIN) return false;
            if (sent > 0) done += (size_t)sent;
        }
    return true;
}

static bool end_stream(Conn *c) {
    char out[2048], event[512];
    size_t len = framed(out, LAST_EVENT);
    if (c->usage) {
        long prompt = (long)c->body_len / 4;
        sprintf(event, USAGE_EVENT, prompt, prompt + c->chunks, c->chunks);
        len += framed(out + len, event);
    }
    len += framed(out + len, "[DONE]");
    len += (size_t)sprintf(out + len, "0\r\n\r\n");
    c->streaming = false;
    c->replica->running--;
    return put(c, out, len);
}

/* Sends what is due of one stream. Without a gap this is one chunk for each turn of the loop, so that all streams
 * share the replica; a connection that does not take it is left alone until it does. */
static bool send_due(Conn *c) {
    unpace(c);
    if (c->pending_len) return true;
    stamp();
    if (!put(c, content_chunk, content_len)) return false;
    if (!--c->chunks_left) return end_stream(c);
    uint64_t gap_ns = c->first && c->gap_ns ? 1 + random_below(c->gap_ns) : c->gap_ns;
    c->first = false;
    /* Due times are counted from the start, so a late chunk does not slow the rest of its stream. */
    if (!c->pending_len) pace(c, c->due_ns + gap_ns);
    return true;
}

/* --- requests ------------------------------------------------------------------------------------------------------- */

/* The number after a member's name in the front or the tail of the body, `missing` where it is not there. */
static long member(const Conn *c, const char *name, long missing) {
    const char *found = strstr(c->front + c->head_len, name);
    if (!found && c->tail_len) found = strstr(c->tail, name);
    if (!found) return missing;
    found += strlen(name);
    while (*found == ' ' || *found == ':') found++;
    return *found == 't' ? 1 : strtol(found, NULL, 10);
}

static bool chat(Conn *c) {
    Replica *replica = c->replica;
    replica->answered++;
    replica->prompt_bytes += c->body_len;
    if (member(c, "\"stream\"", 0) != 1) {
        char body[512];
        long prompt = (long)c->body_len / 4;
        return answer(c, "application/json", body, (size_t)sprintf(body, CHAT_ANSWER, prompt, prompt + 8));
    }
    c->chunks = c->chunks_left = member(c, "\"max_tokens\"", member(c, "\"max_completion_tokens\"", 16));
    if (c->chunks < 1) c->chunks = c->chunks_left = 1;
    c->gap_ns = (uint64_t)member(c, "\"seed\"", 0) * 1000;
    c->usage = member(c, "\"include_usage\"", 0) == 1;
    c->first = c->streaming = true;
    replica->running++;
    c->due_ns = now_ns();
    /* An engine sends its head when it accepts a request, apart from the first chunk. */
    return put(c, STREAM_HEAD, strlen(STREAM_HEAD)) && send_due(c);
}

/* vllm-router's cache_aware policy asks workers for the tokens of a prompt. They are made of its bytes, four to a
 * token, so that equal prompts have equal tokens and different ones do not; all have six digits, which is cheap. */
static bool render(Conn *c) {
    static char out[TOKENS_MAX * 7 + 512];
    const char *body = c->front + c->head_len;
    size_t bytes = c->front_len - c->head_len;
    char *end = out + sprintf(out, "{\"request_id\":\"chatcmpl-8f1e5c0a9d2b4736\",\"token_ids\":[");
    for (size_t at = 0; at + 4 <= bytes && at / 4 < TOKENS_MAX; at += 4) {
        uint32_t word;
        memcpy(&word, body + at, 4);
        word = 100000 + word % 900000;
        for (int digit = 5; digit >= 0; digit--, word /= 10) end[digit] = (char)('0' + word % 10);
        end[6] = ',';
        end += 7;
    }
    sprintf(end[-1] == ',' ? end - 1 : end, "],\"features\":null,\"sampling_params\":{},\"model\":\"mock\"}");
    return answer(c, "application/json", out, strlen(out));
}

static bool metrics(Conn *c) {
    char page[2048];
    const Replica *r = c->replica;
    const char *labels = "{engine=\"0\",model_name=\"mock\"}";
    int len = sprintf(page,
        "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running%s %d.0\n"
        "# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting%s 0.0\n"
        "# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc%s %.4f\n"
        "# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{block_size=\"16\",engine=\"0\",num_gpu_blocks=\"1000000\"} 1.0\n",
        labels, r->running, labels, labels, r->running / 8192.0);
    return answer(c, "text/plain; version=0.0.4; charset=utf-8", page, (size_t)len);
}

static bool starts(const char *text, const char *with) { return !strncmp(text, with, strlen(with)); }

static bool dispatch(Conn *c) {
    const char *line = c->front, *json = "application/json";
    if (starts(line, "POST /v1/chat/completions ")) return chat(c);
    if (starts(line, "POST /v1/chat/completions/render ")) return render(c);
    if (starts(line, "GET /metrics")) return metrics(c);
    if (starts(line, "GET /v1/models")) return answer(c, json, MODELS, strlen(MODELS));
    if (starts(line, "GET /health")) return answer(c, json, "", 0);
    if (starts(line, "GET ")) return answer(c, json, SERVER_INFO, strlen(SERVER_INFO));
    const char *none = "HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\ncontent-type: application/json\r\n\r\n{}";
    return put(c, none, strlen(none));
}

/* Reads the head once it is whole; the byte after it is the first of the body. False for what is not understood. */
static bool read_head(Conn *c) {
    char *end = memmem(c->front, c->front_len, "\r\n\r\n", 4);
    if (!end) return c->front_len < HEAD_BYTES_MAX;
    end[2] = 0;
    c->head_len = (size_t)(end - c->front) + 4;
    const char *length = strcasestr(c->front, "\ncontent-length:");
    c->body_len = length ? strtoull(length + 16, NULL, 10) : 0;
    c->closing = strcasestr(c->front, "\nconnection: close") != NULL;
    bool expects = strcasestr(c->front, "\nexpect: 100-continue") != NULL;
    if (strcasestr(c->front, "\ntransfer-encoding:")) {
        const char *refusal = "HTTP/1.1 411 Length Required\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
        put(c, refusal, strlen(refusal));
        return false;
    }
    c->body_seen = c->front_len - c->head_len;
    return !expects || put(c, "HTTP/1.1 100 Continue\r\n\r\n", 25);
}

static void keep_tail(Conn *c, const char *data, size_t len) {
    size_t fresh = len < TAIL_BYTES ? len : TAIL_BYTES;
    size_t old = c->tail_len + fresh > TAIL_BYTES ? TAIL_BYTES - fresh : c->tail_len;
    memmove(c->tail, c->tail + c->tail_len - old, old);
    memcpy(c->tail + old, data + len - fresh, fresh);
    c->tail_len = old + fresh;
    c->tail[c->tail_len] = 0;
}

static bool receive(Conn *c) {
    static char buffer[1 << 18];
    if (!c->front && !(c->front = malloc(FRONT_BYTES + 1))) die("malloc");
    bool in_front = c->front_len < FRONT_BYTES;
    char *into = in_front ? c->front + c->front_len : buffer;
    ssize_t got = recv(c->fd, into, in_front ? FRONT_BYTES - c->front_len : sizeof buffer, 0);
    if (got < 0 && errno == EAGAIN) return true;
    if (got <= 0 || c->streaming) return false;
    if (in_front) {
        c->front_len += (size_t)got;
        c->front[c->front_len] = 0;
    } else {
        keep_tail(c, buffer, (size_t)got);
    }
    if (c->head_len) c->body_seen += (size_t)got;
    else if (!read_head(c)) return false;
    if (!c->head_len || c->body_seen < c->body_len) return true;
    if (c->body_seen > c->body_len) return false;
    bool good = dispatch(c);
    c->front_len = c->head_len = c->tail_len = c->body_seen = 0;
    return good && !(c->closing && !c->streaming && !c->pending_len);
}

static bool flush_pending(Conn *c) {
    ssize_t sent = send(c->fd, c->pending, c->pending_len, MSG_NOSIGNAL);
    if (sent < 0) return errno == EAGAIN;
    c->pending_len -= (size_t)sent;
    memmove(c->pending, c->pending + sent, c->pending_len);
    if (c->pending_len) return true;
    watch(c, false);
    if (c->streaming) pace(c, now_ns());
    return true;
}

/* --- the loop -------------------------------------------------------------------------------------------------------- */

static int listen_anywhere(void) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof address;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    if (fd < 0 || bind(fd, (struct sockaddr *)&address, len) || listen(fd, 4096)) die("listen");
    getsockname(fd, (struct sockaddr *)&address, &len);
    printf("%d ", ntohs(address.sin_port));
    return fd;
}

static void accept_all(Replica *replica) {
    int fd, one = 1;
    while ((fd = accept4(replica->listener, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
        Conn *c = calloc(1, sizeof *c);
        if (!c) die("calloc");
        c->fd = fd;
        c->replica = replica;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = c};
        epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event);
    }
}

static void send_all_due(void) {
    uint64_t now = now_ns();
    for (Pace *pace = paces; pace < paces + pace_count; pace++)
        /* Those without a gap are queued again at once: each gets one chunk, then sockets are looked at. */
        for (Conn *last = pace->tail, *c = pace->head, *next; c && c->due_ns <= now; c = next) {
            next = c == last ? NULL : c->after;
            if (!send_due(c) || (c->closing && !c->streaming && !c->pending_len)) close_conn(c);
        }
}

int main(int argc, char **argv) {
    signal(SIGPIPE, SIG_IGN);
    prepare();
    epoll_fd = epoll_create1(0);
    replica_count = argc > 1 ? atoi(argv[1]) : 0;
    if (replica_count < 1 || replica_count > REPLICAS_MAX) {
        fprintf(stderr, "usage: mockd REPLICAS (1 to %d)\n", REPLICAS_MAX);
        return 2;
    }
    for (int i = 0; i < replica_count; i++) {
        replicas[i].listener = listen_anywhere();
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = &replicas[i]};
        epoll_ctl(epoll_fd, EPOLL_CTL_ADD, replicas[i].listener, &event);
    }
    puts("");
    fflush(stdout);
    struct epoll_event input = {.events = EPOLLIN, .data.ptr = NULL};
    if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, STDIN_FILENO, &input)) die("standard input must be a pipe");
    static struct epoll_event events[EVENTS];
    for (;;) {
        uint64_t due = UINT64_MAX, now = now_ns();
        for (Pace *pace = paces; pace < paces + pace_count; pace++)
            if (pace->head && pace->head->due_ns < due) due = pace->head->due_ns;
        uint64_t wait = due > now ? due - now : 0;
        struct timespec timeout = {.tv_sec = (time_t)(wait / NS_PER_S), .tv_nsec = (long)(wait % NS_PER_S)};
        int count = epoll_pwait2(epoll_fd, events, EVENTS, due == UINT64_MAX ? NULL : &timeout, NULL);
        for (int i = 0; i < count; i++) {
            void *who = events[i].data.ptr;
            if (!who) return 0;
            if (who >= (void *)replicas && who < (void *)(replicas + REPLICAS_MAX)) {
                accept_all(who);
                continue;
            }
            Conn *c = who;
            bool good = true;
            if (events[i].events & EPOLLOUT && c->pending_len)
                good = flush_pending(c) && !(c->closing && !c->streaming && !c->pending_len);
            if (good && events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) good = receive(c);
            if (!good) close_conn(c);
        }
        send_all_due();
    }
}
