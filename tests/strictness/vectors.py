"""The table of sent requests, after RFC 9110, RFC 9112, RFC 9113 (h2c), and the published classes of request smuggling
(CL.TE, TE.CL, TE.TE, chunk extensions, bare LF, trailers).
"""

from __future__ import annotations

import json

from tests.strictness.vector import BODY, CHAT, HOST, JSON, SMUGGLED, Vector, chunked, declined, framed, head, post
from tests.strictness.vector import refused as no
from tests.strictness.vector import served as ok

SIZE = b"content-length: %d" % len(BODY)
TE = b"transfer-encoding: chunked"
LAST = b"0\r\n\r\n"
CHUNK = b"%x\r\n%s\r\n" % (len(BODY), BODY)
WHOLE = CHUNK + LAST


def _te(value: bytes) -> bytes:
    return framed(b"transfer-encoding:" + value, body=WHOLE)


def _cl(value: bytes) -> bytes:
    return framed(b"content-length:" + value)


def _sized(size: bytes) -> bytes:
    return chunked(size + b"\r\n" + BODY + b"\r\n" + LAST)


def _trailed(name: str, trailer: bytes, unseen: bytes, behind: bytes = b"") -> Vector:
    sent = chunked(CHUNK + b"0\r\n" + trailer + b"\r\n\r\n") + behind
    # Whatever comes behind a trailer is not read.
    return ok(name, sent, unseen=unseen, closed=True)


def _field(field: bytes) -> bytes:
    return post(field)


def _get(target: bytes) -> bytes:
    return head(HOST, line=b"GET " + target + b" HTTP/1.1")


GET = b"GET /v1/responses HTTP/1.1"


def _opening(*fields: bytes) -> bytes:
    key = b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ=="
    return head(
        HOST, b"connection: Upgrade", b"upgrade: websocket", b"sec-websocket-version: 13", key, *fields, line=GET
    )


LENGTHS = (
    no("Content-Length, then Transfer-Encoding (CL.TE)",
       framed(b"content-length: %d" % len(LAST + SMUGGLED), TE, body=LAST + SMUGGLED)),
    no("Transfer-Encoding, then Content-Length (TE.CL)",
       framed(TE, b"content-length: 4", body=b"%x\r\n%s\r\n" % (len(SMUGGLED), SMUGGLED) + LAST)),
    no("Content-Length: 0 and Transfer-Encoding", framed(b"content-length: 0", TE, body=WHOLE)),
    no("Transfer-Encoding, Content-Length spelt with a space before the colon",
       framed(b"content-length : 3", TE, body=WHOLE)),
    no("two Content-Length that differ", framed(SIZE, b"content-length: 0")),
    no("two Content-Length that agree", framed(SIZE, SIZE)),
    no("Content-Length as a list", _cl(b" %d, %d" % (len(BODY), len(BODY)))),
    no("Content-Length: -1", _cl(b" -1")),
    no("Content-Length with a plus", _cl(b" +%d" % len(BODY))),
    no("Content-Length in hexadecimal", _cl(b" 0x%x" % len(BODY))),
    no("Content-Length with a decimal point", _cl(b" %d.0" % len(BODY))),
    no("Content-Length with an underscore", _cl(b" 1_0")),
    no("Content-Length with digits beyond ASCII", _cl(" ٤٢".encode())),
    no("Content-Length that is empty", _cl(b"")),
    no("Content-Length with a space inside", _cl(b" 1 2")),
    no("Content-Length of 2^64", _cl(b" 18446744073709551616")),
    no("Content-Length of 2^64 + the length", _cl(b" %d" % (2**64 + len(BODY)))),
    no("Content-Length of 10^18, in a head by itself", head(HOST, JSON, b"content-length: 1000000000000000000"), 413),
    ok("Content-Length with leading zeros", _cl(b" 00%d" % len(BODY))),
    Vector("a second request behind the first (pipelining)", post() + SMUGGLED, (200, 200), reached=2),
    no("a request after a closing one, in one piece", post(b"connection: close") + SMUGGLED),
)  # fmt: skip

CODINGS = (
    ok("chunked", _te(b" chunked"), unseen=b"transfer-encoding"),
    ok("chunked, spelt CHUNKED", _te(b" CHUNKED"), unseen=b"transfer-encoding"),
    ok("chunked behind white space", _te(b"\t chunked"), unseen=b"transfer-encoding"),
    ok("chunked before a space", _te(b" chunked "), unseen=b"transfer-encoding"),
    no("chunked before a tab", _te(b" chunked\t")),
    no("xchunked", _te(b" xchunked")),
    no("chunked behind a vertical tab", _te(b" \x0bchunked")),
    no("chunked, then NUL", _te(b" chunked\x00")),
    no("chunked in quotes", _te(b' "chunked"')),
    no("chunked with a parameter", _te(b" chunked;q=1")),
    no("chunked, identity", _te(b" chunked, identity")),
    no("identity, chunked", _te(b" identity, chunked"), 501),
    no("gzip, chunked", _te(b" gzip, chunked"), 501),
    no("chunked, chunked", _te(b" chunked, chunked")),
    no("identity", _te(b" identity")),
    no("empty", _te(b"")),
    no("chunked twice", framed(TE, TE, body=WHOLE)),
    no("chunked, then identity in a second field", framed(TE, b"transfer-encoding: identity", body=WHOLE)),
    no("identity, then chunked in a second field", framed(b"transfer-encoding: identity", TE, body=WHOLE)),
    no("a space before the colon", framed(SIZE, b"transfer-encoding : chunked")),
    no("a tab before the colon", framed(SIZE, b"transfer-encoding\t: chunked")),
    no("on a folded line", framed(SIZE, b"x-a: b", b" transfer-encoding: chunked")),
    no("behind a bare LF in another field", framed(SIZE, b"x-a: b\n" + TE)),
    no("behind a bare CR in another field", framed(SIZE, b"x-a: b\r" + TE)),
    no("in HTTP/1.0", head(HOST, JSON, TE, line=b"POST " + CHAT + b" HTTP/1.0") + WHOLE),
    no("transfer_encoding with an underscore", framed(SIZE, b"transfer_encoding: chunked")),
    no("content_length with an underscore", framed(SIZE, b"content_length: 0")),
)  # fmt: skip

CHUNKS = (
    ok("one byte a chunk", chunked(b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + LAST), seen=SIZE),
    ok("size in capitals with leading zeros", _sized(b"000%X" % len(BODY))),
    ok("an extension", _sized(b"%x;name=value" % len(BODY)), unseen=b"name"),
    ok("a quoted extension", _sized(b'%x;name="va;lue"' % len(BODY)), unseen=b"name"),
    no("an extension that ends in a bare LF", chunked(b"%x;a\n%s\r\n" % (len(BODY), BODY) + LAST)),
    no("an extension with a bare CR", _sized(b"%x;a\rb" % len(BODY))),
    no("an extension with NUL", _sized(b"%x;a\x00" % len(BODY))),
    no("size of 2^64", _sized(b"10000000000000000")),
    no("size of 2^64 + the length", _sized(b"1%016x" % len(BODY))),
    Vector("size of 2^63", _sized(b"8000000000000000"), (408,), closed=True),
    no("size with a minus", _sized(b"-%x" % len(BODY))),
    no("size with a plus", _sized(b"+%x" % len(BODY))),
    no("size with 0x", _sized(b"0x%x" % len(BODY))),
    no("size with an underscore", _sized(b"0_%x" % len(BODY))),
    no("size behind a space", _sized(b" %x" % len(BODY))),
    no("size before a space", _sized(b"%x " % len(BODY))),
    no("no size", _sized(b"")),
    no("no hexadecimal size", _sized(b"zz")),
    no("size line ends in a bare LF", chunked(b"%x\n%s\r\n" % (len(BODY), BODY) + LAST)),
    no("size line ends in a bare CR", chunked(b"%x\r%s\r\n" % (len(BODY), BODY) + LAST)),
    no("data without its CRLF", chunked(b"%x\r\n%s" % (len(BODY), BODY) + LAST)),
    no("data before a bare LF", chunked(b"%x\r\n%s\n" % (len(BODY), BODY) + LAST)),
    no("data longer than its size", chunked(b"%x\r\n%sXX\r\n" % (len(BODY), BODY) + LAST)),
    no("the last chunk with a bare LF", chunked(CHUNK + b"0\n\n")),
    Vector("the last chunk without its blank line", chunked(CHUNK + b"0\r\n"), (408,), closed=True),
    Vector("no last chunk", chunked(CHUNK), (408,), closed=True),
    _trailed("a trailer", b"x-trailer: yes", unseen=b"x-trailer"),
    _trailed("a trailer that names a key", b"authorization: Bearer x", unseen=b"bearer"),
    _trailed("a trailer with a length", b"x-a: b\r\nx-content-length: 3", unseen=b"x-content"),
    no("a trailer that is Content-Length", chunked(CHUNK + b"0\r\ncontent-length: 3\r\n\r\n")),
    no("a trailer that is Transfer-Encoding", chunked(CHUNK + b"0\r\ntransfer-encoding: chunked\r\n\r\n")),
    no("a trailer with a bare LF", chunked(CHUNK + b"0\r\nx-a: b\n\r\n")),
    Vector("a request behind the last chunk, in one piece", chunked(WHOLE) + SMUGGLED, (200,), reached=1, closed=True),
    _trailed("a trailer, and a request behind it", b"x-trailer: yes", unseen=b"x-trailer", behind=SMUGGLED),
)  # fmt: skip

FIELDS = (
    no("a folded line (obs-fold)", post(b"x-a: b\r\n c")),
    no("a folded first line", head(b" x-a: b", HOST, SIZE) + BODY),
    no("lines that end in a bare LF", head(HOST, JSON, SIZE, end=b"\n") + BODY),
    no("a bare LF in a value", post(b"x-a: b\nx-b: c")),
    no("a bare CR in a value", post(b"x-a: b\rx-b: c")),
    no("NUL in a value", post(b"x-a: b\x00c")),
    no("BEL in a value", post(b"x-a: b\x07c")),
    no("DEL in a value", post(b"x-a: b\x7fc")),
    no("NUL in a name", post(b"x\x00a: b")),
    no("a space in a name", post(b"x a: b")),
    no("a name beyond ASCII", post("x-ä: b".encode())),
    no("no name", post(b": b")),
    no("no colon", post(b"x-a")),
    no("a space before the colon", post(b"x-a : b")),
    ok("UTF-8 in a value", post("x-a: bä".encode()), seen="x-a: bä".encode()),
    ok("Latin-1 in a value", post("x-a: bä".encode("latin-1")), seen="x-a: bä".encode("latin-1")),
    ok("white space around a value", post(b"x-a: \t b \t"), seen=b"x-a: b\r\n"),
    no("no Host", head(JSON, SIZE) + BODY),
    no("two Host", post(b"host: b.example")),
    no("a Host with a path", head(b"host: a/b", JSON, SIZE) + BODY),
    no("a Host with a user", head(b"host: a@b", JSON, SIZE) + BODY),
    no("a Host with a space", head(b"host: a b", JSON, SIZE) + BODY),
    no("two Content-Type", post(JSON)),
    no("two Authorization", post(b"authorization: Bearer a", b"Authorization: Bearer b")),
    no("two X-Request-ID", post(b"x-request-id: a", b"X-Request-ID: b")),
    ok("a Host of somebody else", head(b"host: 127.0.0.1:1", JSON, SIZE) + BODY, unseen=b"127.0.0.1:1\r"),
    ok("X-Forwarded-*, Forwarded: passed on, not believed", post(b"x-forwarded-for: 127.0.0.1", b"forwarded: for=a"),
       seen=b"x-forwarded-for: 127.0.0.1"),
    ok("an empty line before the request line", b"\r\n" + post()),
)  # fmt: skip

LINES = (
    no("a method that nobody knows", post(method=b"FOO")),
    no("a method in small letters", post(method=b"post")),
    no("a method with a space before it", b" " + post()),
    declined("a method of WebDAV", post(method=b"PROPFIND"), 405),
    declined("TRACE", head(HOST, line=b"TRACE " + CHAT + b" HTTP/1.1"), 405),
    no("CONNECT, authority-form", head(HOST, line=b"CONNECT backend:8000 HTTP/1.1"), 405),
    no("CONNECT, origin-form", head(HOST, line=b"CONNECT /v1/models HTTP/1.1"), 405),
    declined("OPTIONS, asterisk-form", head(HOST, line=b"OPTIONS * HTTP/1.1"), 404),
    no("asterisk-form with POST", post(target=b"*")),
    no("authority-form with POST", post(target=b"backend:8000")),
    no("a target without its slash", post(target=CHAT[1:])),
    no("no target", post(target=b"")),
    no("NUL in the target", post(target=CHAT + b"\x00")),
    no("a space in the target", post(target=CHAT + b" x")),
    no("a tab in the target", post(target=CHAT + b"\tx")),
    ok("two spaces in the request line", post(target=b" " + CHAT)),
    no("bytes beyond ASCII in the target", post(target=CHAT + "?ä".encode())),
    no("a bare CR in the query", post(target=CHAT + b"?a\rx-evil:1")),
    no("HTTP/0.9", b"GET /v1/models\r\n\r\n", 505),
    no("HTTP/0.9, spelt out", post(version=b"HTTP/0.9"), 505),
    ok("HTTP/1.0", post(version=b"HTTP/1.0"), closed=True),
    no("HTTP/1.2", post(version=b"HTTP/1.2")),
    no("HTTP/1.10", post(version=b"HTTP/1.10")),
    no("HTTP/2.0", post(version=b"HTTP/2.0"), 505),
    no("the preface of HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    no("http/1.1 in small letters", post(version=b"http/1.1")),
    no("a greeting of TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"),
)  # fmt: skip

TARGETS = (
    ok("absolute-form of another host", post(target=b"http://evil.example" + CHAT), unseen=b"evil"),
    ok("absolute-form with another port", post(target=b"http://127.0.0.1:1" + CHAT), unseen=b"127.0.0.1:1\r"),
    ok("absolute-form, https", post(target=b"https://evil.example" + CHAT), unseen=b"evil"),
    ok("absolute-form with a user", post(target=b"http://a:b@evil.example" + CHAT), unseen=b"evil"),
    declined("a target that begins with //", post(target=b"//evil.example" + CHAT), 404),
    declined("a second slash inside", post(target=b"/v1//chat/completions"), 404),
    ok("a slash at the end", post(target=CHAT + b"/"), seen=b"POST /v1/chat/completions HTTP/1.1"),
    declined("/../ that leads there", post(target=b"/x/.." + CHAT), 404),
    declined("/./ inside", post(target=b"/v1/./chat/completions"), 404),
    declined("/../ that leads to another page of the backend", post(target=CHAT + b"/../../../metrics"), 404),
    declined("%2e%2e", post(target=CHAT + b"/%2e%2e/%2e%2e/load"), 404),
    declined("%2f for a slash", post(target=b"/v1%2fchat/completions"), 404),
    declined("%5c", post(target=b"/v1%5cchat/completions"), 404),
    declined("a backslash", post(target=b"/v1\\chat\\completions"), 404),
    declined("%00", post(target=CHAT + b"%00"), 404),
    declined("a parameter", post(target=CHAT + b";x=y"), 404),
    declined("another case", post(target=b"/V1/chat/completions"), 404),
    declined("a letter spelt %63", post(target=b"/v1/%63hat/completions"), 404),
    no("a fragment", post(target=CHAT + b"#x")),
    ok("a query", post(target=CHAT + b"?a=b%0d%0ax-evil:1&c=/../%2e"), seen=CHAT + b"?a=b%0d%0ax-evil:1&c=/../%2e "),
    ok("a query with a second question mark", post(target=CHAT + b"?a?b"), seen=CHAT + b"?a?b "),
    declined("a page of the backend that is not offered", _get(b"/server_info"), 404),
    declined("another way to vLLM's admin pages", post(target=b"/v1/../sleep"), 404),
    declined("a stored response by a path that climbs", _get(b"/v1/responses/../../metrics"), 404),
    declined("a stored response by a path that climbs, %2f", _get(b"/v1/responses/..%2f..%2fmetrics"), 404),
)  # fmt: skip

HOPS = (
    ok("Connection: authorization", post(b"connection: authorization", b"authorization: Bearer x"), unseen=b"bearer"),
    ok("Connection: x-request-id", post(b"connection: x-request-id", b"x-request-id: mine"), seen=b": mine\r\n"),
    ok("Connection: content-length", post(b"connection: content-length"), seen=SIZE),
    ok("Connection: host", post(b"connection: host"), seen=b"\r\nhost: "),
    ok("Connection: content-type", post(b"connection: content-type"), unseen=b"content-type: application/json"),
    ok("Connection: close, X-A", post(b"connection: close, X-A", b"x-a: b"), unseen=b"x-a", closed=True),
    ok("Connection twice", post(b"connection: x-a", b"Connection: x-b", b"x-a: 1", b"x-b: 2"), unseen=b"x-b"),
    ok("Keep-Alive, Proxy-Connection, TE, Trailer",
       post(b"keep-alive: 9", b"proxy-connection: a", b"te: trailers", b"trailer: x"), unseen=b"trailer"),
    ok("Proxy-Authorization", post(b"proxy-authorization: Basic x"), unseen=b"basic"),
    ok("Upgrade: h2c", post(b"connection: upgrade, http2-settings", b"upgrade: h2c", b"http2-settings: AAMAAABk"),
       unseen=b"h2"),
    ok("Upgrade: websocket", post(b"connection: upgrade", b"upgrade: websocket"), unseen=b"websocket"),
    Vector("Upgrade: websocket, a request behind it",
           post(b"connection: upgrade", b"upgrade: websocket") + SMUGGLED, (200, 200), reached=2),
    no("GET, Upgrade: websocket", _opening(), 426),
    no("GET, Upgrade: websocket, a request behind it", _opening() + SMUGGLED, 426),
    no("GET, Upgrade: websocket, a frame behind it", _opening() + b"\x81\x85\x37\xfa\x21\x3d\x7f\x9f\x4d\x51\x58", 426),
    no("GET, Upgrade: websocket, with a body", _opening(b"content-length: %d" % len(SMUGGLED)) + SMUGGLED, 426),
    declined("GET, Upgrade: websocket, no Connection: upgrade", head(HOST, b"upgrade: websocket", line=GET), 405),
    declined("GET, Upgrade: h2c", head(HOST, b"connection: upgrade", b"upgrade: h2c", line=GET), 405),
    Vector("Expect: 100-continue", post(b"expect: 100-continue"), (100, 200), reached=1, unseen=b"expect"),
    no("Expect: something else", post(b"expect: 200-ok"), 417),
    no("Expect twice", post(b"expect: 100-continue", b"expect: 100-continue")),
)  # fmt: skip

EVIL = BODY.replace(b'"base"', json.dumps("base\r\nx-evil: 1").encode())
CONTENT = (
    declined("a line break in the model's name",
             head(HOST, JSON, b"content-length: %d" % len(EVIL)) + EVIL, 404),
    ok("a space in X-Request-ID", post(b"x-request-id: a b"), unseen=b": a b"),
    ok("a X-Request-ID of 257 bytes", post(b"x-request-id: " + b"x" * 257), unseen=b"xxx"),
    ok("a X-Request-ID beyond ASCII", post("x-request-id: ä".encode()), unseen="ä".encode()),
    no("a line break in X-Request-ID", post(b"x-request-id: a\nx-evil: 1")),
    ok("line breaks in X-Request-ID, escaped", post(b"x-request-id: a%0d%0ax-evil:1"), seen=b": a%0d%0ax-evil:1\r\n"),
    declined("Content-Encoding: gzip", post(b"content-encoding: gzip"), 415),
    declined("Content-Encoding: identity, gzip", post(b"content-encoding: identity, gzip"), 415),
    no("Content-Encoding twice", post(b"content-encoding: identity", b"content-encoding: gzip")),
    ok("Content-Encoding: identity", post(b"content-encoding: identity")),
    declined("a body above the limit", head(HOST, JSON, b"content-length: 200000") + b"x" * 200000, 413),
    no("a body above the limit, in chunks", chunked(b"%x\r\n%s\r\n" % (200000, b"x" * 200000) + LAST), 413),
    no("129 header fields", post(*(b"x-%d: y" % i for i in range(129))), 431),
    no("a header field above the limit", post(b"x-a: " + b"x" * (1 << 18)), 431),
    no("a request line above the limit", post(target=CHAT + b"?" + b"x" * (1 << 18)), 431),
)  # fmt: skip

TABLE = {
    "Length of the body": LENGTHS,
    "Transfer-Encoding": CODINGS,
    "Chunks": CHUNKS,
    "Header fields": FIELDS,
    "The request line": LINES,
    "Targets": TARGETS,
    "Fields for one hop": HOPS,
    "Content and sizes": CONTENT,
}
